"""The builds of torch that have code for a GPU, and the newest that a driver takes."""

from __future__ import annotations

import pytest

from dsrun.cluster import torch_builds
from dsrun.host.gpus import driver_version


@pytest.mark.parametrize(
    ("capability", "cuda", "torch", "without"),
    [
        ("7.0", "13.0", "2.11.0", True),
        ("7.5", "13.0", "2.11.0", False),
        ("7.0", "12.8", "2.10.0", False),
        ("7.0", "12.8", "2.11.0+cu128", True),
        ("6.0", "12.8", "2.7.0", True),
        ("6.0", "12.6", "2.13.0+cu126", False),
        ("10.0", "12.6", "2.13.0", True),
        ("12.0", "12.8", "2.9.0", False),
        (None, "13.0", "2.11.0", False),
    ],
)
def test_what_a_build_leaves_out(capability, cuda, torch, without):
    assert torch_builds.left_out(capability, cuda, torch) is without


@pytest.mark.parametrize(
    ("driver", "capabilities", "index"),
    [
        ("580.95", ["9.0"], "cu130"),
        ("580.95", ["7.0", "9.0"], "cu126"),
        ("570.1", ["10.0"], "cu128"),
        ("560.35", ["8.0"], "cu126"),
        ("470.1", ["7.0"], "cu118"),
        (None, ["7.0"], "cu126"),
        ("580.95", ["7.0", "10.0"], ""),
        ("390.1", ["7.0"], ""),
    ],
)
def test_the_newest_build(driver, capabilities, index):
    command = torch_builds.newest(driver, capabilities)
    assert command.endswith(index) and bool(command) == bool(index)
    for capability in capabilities if index else ():
        cuda = f"{index[2:4]}.{index[4:]}"
        assert not torch_builds.left_out(capability, cuda, "2.10")


def test_the_drivers_version(tmp_path):
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root@x)\n"
    (tmp_path / "version").write_text(text)
    assert driver_version(tmp_path) == "580.95.05"
    assert driver_version(tmp_path / "none") is None
