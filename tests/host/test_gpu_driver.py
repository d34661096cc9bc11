"""The driver's answers about GPUs, by files of paper and a driver that is compiled here."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from dsrun.host.gpus import cores_beside, has_virtual_memory

DRIVER = """
int cuInit(unsigned flags) { return INIT; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 102 && (device == 0 || SECOND);
    return 0;
}
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A libcuda of two GPUs: what cuInit answers, and whether the second has virtual memory management."""

    def compiled(init: int, second: int) -> None:
        (tmp_path / "driver.c").write_text(DRIVER, encoding="utf-8")
        defines = [f"-DINIT={init}", f"-DSECOND={second}"]
        target = tmp_path / "libcuda.so.1"
        argv = ["cc", "-shared", "-fPIC", *defines, "-o", str(target), str(tmp_path / "driver.c")]
        subprocess.run(argv, check=True)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))

    has_virtual_memory.cache_clear()
    yield compiled
    has_virtual_memory.cache_clear()


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
@pytest.mark.parametrize(("init", "second", "expected"), [(0, 1, True), (0, 0, False), (100, 1, None)])
def test_the_driver_is_asked_for_virtual_memory(driver, tmp_path, init, second, expected):
    driver(init, second)
    assert has_virtual_memory(tmp_path / "none") is expected


@pytest.mark.parametrize(
    ("model", "shared"),
    [
        ("GRID T4-16Q", True),
        ("NVIDIA A40-48C", True),
        ("GRID A100D-80C", True),
        ("NVIDIA A100-SXM4-80GB", False),
        ("NVIDIA H100 80GB HBM3", False),
        ("NVIDIA A100-PCIE-40GB", False),
        ("Tesla V100-SXM2-32GB", False),
        ("NVIDIA RTX 6000 Ada Generation", False),
    ],
)
def test_a_shared_gpu_is_known_by_its_name(driver, tmp_path, monkeypatch, model, shared):
    def asked(*_, **__):
        raise OSError

    monkeypatch.setattr(subprocess, "run", asked)
    card = tmp_path / "gpus" / "0000:17:00.0"
    card.mkdir(parents=True)
    (card / "information").write_text(f"Model: \t\t {model}\nIRQ: 1\n", encoding="utf-8")
    assert has_virtual_memory(tmp_path) is (False if shared else None)


def test_no_cores_where_the_kernel_says_nothing(tmp_path):
    assert cores_beside("0", tmp_path, tmp_path) == frozenset()
    (tmp_path / "gpus" / "0000:17:00.0").mkdir(parents=True)
    assert cores_beside("0", tmp_path, tmp_path) == frozenset()
