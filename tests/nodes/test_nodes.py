"""Ten kinds of node, by their recorded answers: what finetune, plan and doctor make of each.

A node is a file: NVML's answers, and under `finetune`, `plan` and `doctor` the exit code and words of the answer.
"""

from __future__ import annotations

import os

import pytest
import stand_in

from dsrun.cluster import devices
from dsrun.host import memory

NODES = stand_in.names()
ILL = ("mismatch", "ecc_pending", "no_permission", "busy")
COMMANDS = {
    "finetune": (
        "finetune",
        "llama-tiny",
        "--dry-run",
        "--output-dir",
        "{folder}/run",
        "--global-batch",
        "840",
    ),
    "plan": ("plan", "llama-tiny", "--global-batch", "840"),
    "doctor": ("doctor",),
}


def test_there_are_ten():
    assert len(NODES) == 10


@pytest.fixture(params=NODES)
def recorded(request, monkeypatch, tmp_path, cpu_build):
    """The node as this machine, with torch's CUDA build on it."""
    made = stand_in.node(request.param)
    stand_in.Nvml(made).into(monkeypatch)
    if made.get("init") != 12:
        stand_in.program(request.param, tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(devices, "_torch_is_for_cpus", lambda: "")
    ram = memory.host_ram()
    monkeypatch.setattr(memory, "host_ram", lambda: ram._replace(total=1 << 40, available=1 << 40))
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return made


def told(recorded, command, dsrun, folder):
    wanted = recorded[command]
    done = dsrun(*[word.format(folder=folder) for word in COMMANDS[command]])
    said = done.out + done.err
    assert done.code == wanted["code"], said
    assert "internal error" not in said
    for words in wanted["words"]:
        assert words in said
    for words in wanted.get("never", ()):
        assert words not in said


@pytest.mark.parametrize("command", ["finetune", "plan"])
def test_what_is_said(recorded, command, dsrun, tmp_path):
    told(recorded, command, dsrun, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recorded",
    [name if name in ILL else pytest.param(name, marks=pytest.mark.full) for name in NODES],
    indirect=True,
)
def test_what_doctor_says(recorded, dsrun, tmp_path):
    """It asks nvidia-smi, in a process of its own."""
    told(recorded, "doctor", dsrun, tmp_path)
