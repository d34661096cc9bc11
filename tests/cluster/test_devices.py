"""Which devices a job gets: CUDA_VISIBLE_DEVICES x --gpus x --devices, on machines of paper."""

from __future__ import annotations

import importlib.metadata
import sys
import types

import pytest

from dsrun.cluster.devices import VISIBLE, Gpu, Machine, choose, detect, parse_devices
from dsrun.errors import DsrunError


def gpu(index: int, capability=(8, 0)) -> Gpu:
    return Gpu(index, "NVIDIA A100", f"GPU-{index}{index}{index}-abc", 80 << 30, capability)


FOUR = Machine("cuda", tuple(map(gpu, range(4))), 32, "4 x NVIDIA A100")
CPU = Machine("cpu", (), 2, "NVML finds no NVIDIA GPU")
ONE_CORE = Machine("cpu", (), 1, "NVML finds no NVIDIA GPU")
MANY_CORES = Machine("cpu", (), 64, "NVML finds no NVIDIA GPU")
CPU_BY_CHOICE = Machine("cpu", FOUR.gpus, 2, "DS_ACCELERATOR=cpu")


def environ(visible: str | None) -> dict[str, str]:
    return {} if visible is None else {VISIBLE: visible}


@pytest.mark.parametrize(
    ("machine", "visible", "gpus", "devices", "expected"),
    [
        (FOUR, None, None, None, (0, 1, 2, 3)),
        (FOUR, None, 1, None, (0,)),
        (FOUR, None, 4, None, (0, 1, 2, 3)),
        (FOUR, None, None, "2,3", (2, 3)),
        (FOUR, None, None, "3,1", (3, 1)),
        (FOUR, None, None, "1-3", (1, 2, 3)),
        (FOUR, None, None, " 0 , 2 - 3 ".replace(" - ", "-"), (0, 2, 3)),
        (FOUR, "2,3", None, None, (2, 3)),
        (FOUR, "3,2", None, None, (3, 2)),
        (FOUR, "3,2", 1, None, (3,)),
        (FOUR, "2,3", 2, None, (2, 3)),
        (FOUR, "2,3", None, "3", (3,)),
        (FOUR, "2,3", None, "3,2", (3, 2)),
        (FOUR, " 1 , 2 ", None, None, (1, 2)),
        (FOUR, "GPU-222-abc,0", None, None, (2, 0)),
        (FOUR, "GPU-3", None, None, (3,)),
        (FOUR, "1,-1,2", None, None, (1,)),
        (FOUR, "0,1,2,3", 3, None, (0, 1, 2)),
        (CPU, None, None, None, (0, 1)),
        (MANY_CORES, None, None, None, (0, 1)),
        (MANY_CORES, None, 5, None, (0, 1, 2, 3, 4)),
        (ONE_CORE, None, None, None, (0,)),
        (CPU, None, 2, None, (0, 1)),
        (CPU, None, None, "1", (1,)),
        (CPU, None, None, "0-1", (0, 1)),
        (CPU, "", 2, None, (0, 1)),
        (CPU, "7", 2, None, (0, 1)),
        (CPU_BY_CHOICE, "3", 2, None, (0, 1)),
    ],
)
def test_chosen(machine, visible, gpus, devices, expected):
    assert choose(machine, gpus, devices, environ(visible)) == expected


@pytest.mark.parametrize(
    ("machine", "visible", "gpus", "devices", "said", "hint"),
    [
        (FOUR, None, 2, "0,1", ["--gpus", "--devices"], "one"),
        (FOUR, None, 5, None, ["--gpus 5", "4 GPUs"], "--gpus 4"),
        (FOUR, "2,3", 3, None, ["--gpus 3", "2 GPUs", f"{VISIBLE}=2,3"], "--gpus 2"),
        (FOUR, "1", 2, None, ["--gpus 2", "1 GPU", f"{VISIBLE}=1"], "--gpus 1"),
        (FOUR, "", 1, None, [VISIBLE], VISIBLE),
        (FOUR, "", None, None, [VISIBLE], ""),
        (FOUR, "-1", None, None, [VISIBLE], ""),
        (FOUR, None, None, "4", ["--devices 4", "4 GPUs"], "0-3"),
        (FOUR, None, None, "2-5", ["--devices 2-5", "4, 5"], "0-3"),
        (FOUR, "2,3", None, "0,3", ["--devices 0,3", f"{VISIBLE}=2,3"], "2,3"),
        (FOUR, "9", None, None, [f"{VISIBLE}=9", "no GPU 9"], "0 (GPU-000-abc)"),
        (FOUR, "GPU-9", None, None, ["GPU-9"], "GPU-000-abc"),
        (FOUR, "MIG-1", None, None, ["MIG-1"], "GPU-000-abc"),
        (FOUR, "1,1", None, None, [f"{VISIBLE}=1,1", "twice"], ""),
        (FOUR, None, None, "1,1", ["--devices 1,1", "twice"], ""),
        (FOUR, None, None, "0-2,1", ["twice"], ""),
        (CPU, None, 3, None, ["--gpus 3", "2 CPU cores", "NVML finds no NVIDIA GPU"], "--gpus 2"),
        (CPU, None, None, "2", ["--devices 2", "2 CPU cores"], "0-1"),
        (CPU_BY_CHOICE, None, 4, None, ["2 CPU cores", "DS_ACCELERATOR=cpu"], "--gpus 2"),
    ],
)
def test_refused(machine, visible, gpus, devices, said, hint):
    with pytest.raises(DsrunError) as caught:
        choose(machine, gpus, devices, environ(visible))
    (problem,) = caught.value.problems
    assert all(words in problem.what for words in said)
    assert hint in problem.hint


@pytest.mark.parametrize(
    "text", ["", ",", "1,", "x", "1-", "-1", "3-1", "1.5", "0x1", "1;2", "1 2", "one", "1--2", "GPU-1"]
)
def test_no_devices(text):
    with pytest.raises(DsrunError, match="--devices"):
        parse_devices(text)


def test_a_typo_is_answered_at_once():
    with pytest.raises(DsrunError, match="--devices"):
        choose(FOUR, None, "0-99999999999", {})


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [([(8, 0)], "bf16"), ([(9, 0), (8, 6)], "bf16"), ([(8, 0), (7, 5)], "fp16"), ([(7, 0)], "fp16")],
)
def test_precision_of_gpus(capabilities, expected):
    gpus = tuple(gpu(index, capability) for index, capability in enumerate(capabilities))
    assert Machine("cuda", gpus, 8, "").default_precision == expected


def test_precision_of_a_cpu():
    assert CPU.default_precision == CPU_BY_CHOICE.default_precision == "fp32"


class NVMLError(Exception):
    pass


def nvml(count: int | None, text=str) -> types.ModuleType:
    """A stand-in for pynvml with so many GPUs; None: no driver."""
    module = types.ModuleType("pynvml")

    def init():
        if count is None:
            raise NVMLError("driver not loaded")

    module.NVMLError = NVMLError
    module.nvmlInit = init
    module.nvmlShutdown = lambda: None
    module.nvmlDeviceGetCount = lambda: count
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetName = lambda handle: text("NVIDIA A100")
    module.nvmlDeviceGetUUID = lambda handle: text(f"GPU-{handle}")
    module.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(
        total=80 << 30, free=79 << 30, used=1 << 30
    )
    module.nvmlDeviceGetCudaComputeCapability = lambda handle: (8, 0)
    module.nvmlDeviceGetComputeRunningProcesses = lambda handle: []
    return module


@pytest.fixture
def torch_version(monkeypatch):
    real = importlib.metadata.version

    def pretend(version: str | None):
        def look_up(name: str) -> str:
            if name != "torch":
                return real(name)
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(importlib.metadata, "version", look_up)

    return pretend


@pytest.mark.parametrize(
    ("count", "torch", "variable", "accelerator", "reason"),
    [
        (2, "2.13.0+cu130", None, "cuda", "2 x NVIDIA A100"),
        (2, "2.13.0", None, "cuda", "2 x NVIDIA A100"),
        (2, None, None, "cuda", "2 x NVIDIA A100"),
        (2, "2.13.0+cpu", None, "cpu", "CPU build"),
        (2, "2.13.0", "cpu", "cpu", "DS_ACCELERATOR=cpu"),
        (2, "2.13.0", "cuda", "cuda", "DS_ACCELERATOR=cuda"),
        (2, "2.13.0", "", "cuda", "2 x NVIDIA A100"),
        (0, "2.13.0", None, "cpu", "no NVIDIA GPU"),
        (None, "2.13.0", None, "cpu", "no NVIDIA GPU"),
        (None, "2.13.0", "cpu", "cpu", "DS_ACCELERATOR=cpu"),
    ],
)
def test_detected(monkeypatch, torch_version, count, torch, variable, accelerator, reason):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(count))
    torch_version(torch)
    machine = detect({} if variable is None else {"DS_ACCELERATOR": variable})
    assert machine.accelerator == accelerator
    assert reason in machine.reason
    assert machine.cpu_cores >= 1
    assert len(machine.indices) == (count if accelerator == "cuda" else machine.cpu_cores)


@pytest.mark.parametrize(("count", "variable"), [(2, "xpu"), (2, "CPU"), (0, "cuda"), (None, "cuda")])
def test_an_accelerator_that_is_not_there(monkeypatch, count, variable):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(count))
    with pytest.raises(DsrunError, match=f"DS_ACCELERATOR={variable}") as caught:
        detect({"DS_ACCELERATOR": variable})
    assert caught.value.problems[0].hint


def test_without_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert detect({}).accelerator == "cpu"


def test_old_nvml_answers_in_bytes(monkeypatch, torch_version):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(1, text=str.encode))
    torch_version("2.13.0")
    (found,) = detect({}).gpus
    assert (found.name, found.uuid) == ("NVIDIA A100", "GPU-0")
