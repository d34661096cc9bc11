"""Kinds of GPU: the files, what they hold, and which of them a name belongs to."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from dsrun import catalog
from dsrun.errors import DsrunError
from dsrun.planner import gpus

KNOWN = list(catalog.files(gpus.KIND))
NAMES = {
    "Tesla V100-SXM2-32GB": "v100-32g",
    "Tesla V100-SXM3-32GB": "v100-32g",
    "Tesla V100-PCIE-16GB": "v100-16g-pcie",
    "NVIDIA A100-SXM4-80GB": "a100-80g",
    "NVIDIA A100 80GB PCIe": "a100-80g-pcie",
    "GeForce RTX 2080 Ti": "rtx-2080ti",
    "NVIDIA GeForce RTX 2080 Ti": "rtx-2080ti",
    "NVIDIA H100 80GB HBM3": "h100-80g",
}
"""Names of some GPUs in nvidia-smi -L, and their files."""
OTHERS = [
    # Another chip or another memory than the file of the nearest name.
    "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A10G",
    "NVIDIA GeForce RTX 3080 Ti", "NVIDIA GeForce RTX 4080 SUPER", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA L40",
    "NVIDIA H20-3e", "NVIDIA GH200 144G HBM3e", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "NVIDIA RTX 6000 Ada Generation",
    "Tesla K80", "AMD Instinct MI300X", "", "*",
]  # fmt: skip


def lab_file(lab, name, text):
    folder = lab / "presets" / "gpus"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return path


def shipped(name):
    return (catalog.shipped_root() / gpus.KIND / f"{name}.toml").read_text(encoding="utf-8")


def test_there_are_many():
    assert len(KNOWN) >= 35


@pytest.mark.parametrize("name", KNOWN)
def test_every_file_loads_and_introduces_itself(name):
    gpu = gpus.load(name)
    assert gpu.summary.endswith(" GB")
    assert gpu.nvml


@pytest.mark.parametrize("name", KNOWN)
def test_figures_agree_with_one_another(name):
    gpu = gpus.load(name)
    # The box counts 10^9 or 2^30 bytes, and the driver keeps some for itself.
    assert 0.9 * gpu.memory_gb * 1e9 < gpu.memory_gib * 2**30 < gpu.memory_gb * 2**30
    assert gpu.matrix_tflops >= 1.9 * gpu.fp32_tflops
    assert gpu.bf16 == (tuple(int(part) for part in gpu.compute_capability.split(".")) >= (8, 0))
    assert gpu.pcie_gb_s in (12, 24, 48) or name.startswith("gh200"), (
        "PCIe's generations, or NVLink to the processor"
    )
    assert (gpu.link == "nvlink") == (gpu.link_gb_s > 100)


def test_every_file_is_found_by_its_own_names_and_no_other_is():
    patterns = {name: gpus.load(name).nvml for name in KNOWN}
    for name, own in patterns.items():
        for said in own:
            example = said.replace("*", "X").replace("?", "X")
            assert gpus.recognise(example).name == name
            matching = [
                other
                for other, theirs in patterns.items()
                if any(fnmatchcase(example.casefold(), pattern.casefold()) for pattern in theirs)
            ]
            assert matching == [name]


@pytest.mark.parametrize(("said", "name"), NAMES.items())
def test_recognise(said, name):
    found = gpus.recognise(said)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("said", OTHERS)
def test_what_no_file_describes_is_not_guessed(said):
    assert gpus.recognise(said) is None


def test_a_labs_own_file_comes_first(lab):
    lab_file(lab, "zz-ours", shipped("h200").replace("4800", "4000"))
    found = gpus.recognise("nvidia h200")
    assert found is not None
    assert (found.name, found.memory_gb_s) == ("zz-ours", 4000)


def test_a_labs_file_without_names_is_no_match(lab):
    lab_file(lab, "aa-ours", 'summary = "ours"\n')
    lab_file(lab, "bb-ours", 'nvml = "NVIDIA H200"\n')
    found = gpus.recognise("NVIDIA H200")
    assert found is not None
    assert found.name == "h200"


def test_a_broken_file_says_everything_at_once(lab):
    path = lab_file(
        lab,
        "ours",
        'summary = " "\nmemory_gb = "80"\nmemory_gib = -1\ncompute_capability = 8.0\nbf16 = 1\n'
        'fp32_tflops = nan\nmemory_gb_s = true\nlink = "NVLINK"\nlink_gb_s = inf\nnvml = ["NVIDIA X", 3]\n'
        "pcie_gbs = 24\nprice = 3\n",
    )
    with pytest.raises(DsrunError) as raised:
        gpus.load("ours")
    problems = raised.value.problems
    assert {problem.where for problem in problems} == {str(path)}
    assert all(problem.hint for problem in problems)
    needed = [key for key in gpus.CHECKS if key != "watts"]
    assert [problem.what.split()[0] for problem in problems] == [*needed, "pcie_gbs", "price"]
    assert "pcie_gb_s" in problems[-2].hint


def test_an_unknown_gpu_names_the_nearest():
    with pytest.raises(DsrunError) as raised:
        gpus.load("a100-80gb")
    assert "Did you mean 'a100-80g'?" in raised.value.problems[0].hint
