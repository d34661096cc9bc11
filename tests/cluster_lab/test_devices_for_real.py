"""The devices that ranks see, read from started processes: CUDA_VISIBLE_DEVICES with everything else that says which.

The cases are those of tests/jobs/device_cases.py, which are judged on paper there; here the launcher starts them, on
this machine, on two hosts, and under Slurm. Only the GPUs are none: a stand-in for NVML's bindings says what they are.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from needed import needs

needs("deepspeed")
sys.path.append(str(Path(__file__).resolve().parents[1] / "jobs"))

from device_cases import ALONE, CVD, HOSTS, LOCAL, Case
from runs import DSRUN

from dsrun.cluster import gpu_locks

pytestmark = pytest.mark.slow

AT_ONCE = 2
NVML = """
import socket
from collections import namedtuple

NVMLError = type("NVMLError", (Exception,), {})
Memory = namedtuple("Memory", "total free used")


def nothing(*_, **__):
    return []


nvmlInit = nvmlShutdown = nvmlDeviceGetComputeRunningProcesses = nothing


def nvmlDeviceGetCount():
    return 4


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetCudaComputeCapability(handle):
    return (8, 0)


def nvmlDeviceGetMemoryInfo(handle, version=None):
    return Memory(80 << 30, 79 << 30, 1 << 28)


def nvmlDeviceGetName(handle):
    return "NVIDIA A100-SXM4-80GB"


def nvmlDeviceGetUUID(handle):
    return f"GPU-{handle}{handle}{handle}-TAG-{socket.gethostname()}"


def nvmlDeviceGetMigMode(handle):
    raise NVMLError
"""
TELLS = f"""
import json, os, pathlib, socket, sys

told = [socket.gethostname(), os.environ["{CVD}"], int(os.environ["LOCAL_RANK"])]
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(told))
"""
HERE_TOO = {
    "devices of localhost", "all devices", "include all", "one node", "visible and all devices", "visible",
    "devices in another order", "visible and include all", "visible and exclude what isn't",
}  # fmt: skip
"""Said in other words by other cases."""
ON_TWO = {
    "hostfile", "hostfile with fewer slots", "hostfile of this machine", "hostfile of one other", "hostfile and gpus",
    "hostfile and include", "hostfile and exclude", "hostfile and devices", "hosts",
    "visible and a hostfile", "visible and gpus of hosts", "visible and included slots",
    "visible and devices of hosts",
}  # fmt: skip
LONELY: list[Case] = [case for case in ALONE if case[0] not in HERE_TOO]
PAIRS: list[Case] = [case for case in HOSTS if case[0] in ON_TWO]
IN_SLURM: list[Case] = [
    ("Slurm's", {}, {}, {"w1": "1,2", "w2": "0,1"}),
    ("Slurm's and gpus", {}, {"gpus": 1}, {"w1": "1", "w2": "0"}),
    ("Slurm's and devices", {}, {"devices": "w2:0,w1:1"}, {"w2": "0", "w1": "2"}),
    ("Slurm's and nodes", {}, {"nodes": 1}, {"w1": "1,2"}),
    ("Slurm's and include", {}, {"include": "w1:1@w2:0"}, {"w1": "2", "w2": "0"}),
    ("Slurm's and exclude", {}, {"exclude": "w1"}, {"w2": "0,1"}),
]
"""Two GPUs of each host; w1's first is somebody else's."""

Start = Callable[[list[str], Mapping[str, str], Path], "subprocess.CompletedProcess[str]"]


def some(cases: list[Case]) -> pytest.MarkDecorator:
    """A few; all with --full, and all on paper in tests/jobs."""
    return pytest.mark.parametrize(
        "cases", [pytest.param(cases[::8], id="some"), pytest.param(cases, id="all", marks=pytest.mark.full)]
    )


def test_there_are_enough():
    assert len(PAIRS) == len(ON_TWO)
    assert len(LONELY) + len(PAIRS) + len(IN_SLURM) >= 30


class Trial:
    """Cases, carried out. names: what w1 and w2 are called here; start: runs argv with variables in a folder."""

    def __init__(
        self, folder: Path, names: Mapping[str, str], start: Start, environ: Mapping[str, str]
    ) -> None:
        self.folder, self.names, self.start, self.environ = folder, names, start, environ
        (folder / "tells.py").write_text(TELLS)

    def all_of(self, cases: Iterable[Case], at_once: int = AT_ONCE) -> dict[str, Any]:
        """Outcome of each case. Cases that go on at once have GPUs of their own."""
        tags: SimpleQueue[str] = SimpleQueue()
        for number in range(at_once):
            tags.put(f"{os.getpid()}{'abcdef'[number]}")
        try:
            with ThreadPoolExecutor(at_once) as pool:
                return dict(pool.map(lambda one: self._one(*one, tags), enumerate(cases)))
        finally:
            for path in gpu_locks.FOLDER.glob(f"*-{os.getpid()}[a-f]*"):
                path.unlink()

    def _one(self, number: int, case: Case, tags: SimpleQueue[str]) -> tuple[str, Any]:
        name, variables, options, _ = case
        tag = tags.get()
        try:
            folder = self.folder / str(number)
            (folder / "told").mkdir(parents=True)
            (folder / "pynvml.py").write_text(NVML.replace("TAG", tag))
            path = f"{folder}{os.pathsep}{self.environ['PYTHONPATH']}"
            given = {**self.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cuda"}
            given |= {key: self._said(value).replace("-abc", f"-{tag}") for key, value in variables.items()}
            words = ["launch", "--no-local-rank", "--output-dir", str(folder / "run")]
            done = self.start([*DSRUN, *words, *self._options(options, folder), "tells.py", f"{number}/told"], given,
                              self.folder)  # fmt: skip
        finally:
            tags.put(tag)
        if done.returncode:
            return name, done.stderr
        told = {int(path.name): json.loads(path.read_text()) for path in (folder / "told").iterdir()}
        return name, [told[rank] for rank in sorted(told)]

    def _options(self, options: Mapping[str, Any], folder: Path) -> list[str]:
        words = []
        for option, value in options.items():
            text = self._said(str(value))
            if option == "hostfile":
                (folder / "hostfile").write_text(text)
                text = str(folder / "hostfile")
            words += [f"--{option}", text]
        return words

    def _said(self, text: str) -> str:
        for paper, real in self.names.items():
            text = text.replace(paper, real)
        return text

    def expected(self, cases: Iterable[Case]) -> dict[str, Any]:
        """Host of each rank in order, the devices that it sees, and its place among them."""
        found = {}
        for name, _, _, hosts in cases:
            assert isinstance(hosts, dict)
            found[name] = [
                [self.names["w1"] if host == LOCAL else self.names[host], visible, place]
                for host, visible in hosts.items()
                for place in range(len(visible.split(",")))
            ]
        return found


@some(LONELY)
def test_on_this_machine(tmp_path, environ, cases):
    def start(argv, env, cwd):
        return subprocess.run(
            argv, env=env, cwd=cwd, capture_output=True, text=True, check=False, timeout=300
        )

    trial = Trial(tmp_path, {"w1": socket.gethostname()}, start, environ)
    assert trial.all_of(cases) == trial.expected(cases)


KEPT = ("PYTHONPATH", "DSRUN_CACHE")
NODES = {"w1": "node1", "w2": "node2", "w[": "node["}


@some(PAIRS)
def test_on_two_hosts(lab, tmp_path, environ, cases):
    """Called on the first of them."""
    first = lab.hosts[0]

    def start(argv, env, cwd):
        return first.run([*argv[:4], "--no-check", *argv[4:]], env=env, cwd=cwd, check=False, timeout_s=300)

    kept = {name: environ[name] for name in KEPT}
    trial = Trial(tmp_path, NODES, start, kept)
    assert trial.all_of(cases) == trial.expected(cases)


@some(IN_SLURM)
def test_under_slurm(lab, slurm, tmp_path, environ, cases):
    """Devices by Slurm's numbers: the first GPU of node1 is somebody else's."""
    somebody = [
        "srun",
        "--nodes=1",
        "--nodelist=node1",
        "--gres=gpu:1",
        "sh",
        "-c",
        "echo here; exec sleep 600",
    ]
    other = subprocess.Popen(
        somebody,
        env={**os.environ, **slurm.environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )

    def start(argv, env, cwd):
        words = ["salloc", "--quiet", "--nodes=2", "--gpus-per-node=2", *argv]
        return lab.controller.run(words, env={**slurm.environ, **env}, cwd=cwd, check=False, timeout_s=300)

    kept = {name: environ[name] for name in KEPT}
    trial = Trial(tmp_path, NODES, start, kept)
    try:
        assert other.stdout.readline() == "here\n"
        assert trial.all_of(cases, at_once=1) == trial.expected(cases)
    finally:
        other.terminate()
        other.communicate(timeout=300)
