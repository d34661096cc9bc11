"""The devices that a job gets: CUDA_VISIBLE_DEVICES x --gpus x --devices, on machines of paper."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import pytest

from dsrun import packages
from dsrun.cluster import devices
from dsrun.cluster.devices import (
    VISIBLE,
    Gpu,
    Machine,
    choose,
    cpu_reason,
    cuda_uuids,
    detect,
    free_first,
    from_facts,
    notes,
    parse_devices,
    visible_devices,
)
from dsrun.errors import DsrunError


def gpu(index: int, capability=(8, 0)) -> Gpu:
    return Gpu(index, "NVIDIA A100", f"GPU-{index}{index}{index}-abc", 80 << 30, capability)


FOUR = Machine("cuda", tuple(map(gpu, range(4))), 32, "4 x NVIDIA A100")
CPU = Machine("cpu", (), 2, "NVML finds no NVIDIA GPU")
ONE_CORE = Machine("cpu", (), 1, "NVML finds no NVIDIA GPU")
MANY_CORES = Machine("cpu", (), 64, "NVML finds no NVIDIA GPU")
CPU_BY_CHOICE = Machine("cpu", FOUR.gpus, 2, "DS_ACCELERATOR=cpu")


def piece(index: int, parent: int, name: str) -> Gpu:
    return Gpu(index, "NVIDIA A100 MIG 3g.40gb", f"MIG-{name}", 39 << 30, (8, 0), parent=parent)


# Of three GPUs the first and the last are divided, in two slices and in one.
DIVIDED = Machine(
    "cuda",
    (
        *(replace(gpu(index), divided=index != 1) for index in range(3)),
        piece(3, 0, "aaa-1"),
        piece(4, 0, "aab-2"),
        piece(5, 2, "ccc-3"),
    ),
    32,
    "3 x NVIDIA A100",
)
SLICES = replace(
    DIVIDED, gpus=tuple(replace(one, divided=True) if one.index == 1 else one for one in DIVIDED.gpus)
)


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
        # Slices: the whole GPUs, unless a slice is named or nothing else is there
        (DIVIDED, None, None, None, (1,)),
        (DIVIDED, None, None, "4", (4,)),
        (DIVIDED, "MIG-aab-2", None, None, (4,)),
        (DIVIDED, "MIG-aab", 1, None, (4,)),
        (DIVIDED, "MIG-ccc,MIG-aaa", 1, None, (5,)),
        (DIVIDED, "GPU-111-abc", None, None, (1,)),
        (SLICES, None, None, None, (3,)),
        (SLICES, None, 1, None, (3,)),
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
        (FOUR, "MIG-1", None, None, ["no slice MIG-1"], "GPU-000-abc"),
        (FOUR, "GPU-", None, None, ["GPU- is the beginning of several names"], "GPU-000-abc"),
        (
            DIVIDED,
            None,
            None,
            "0",
            ["--devices 0: GPU 0 is divided"],
            "3 (MIG-aaa-1, NVIDIA A100 MIG 3g.40gb), 4",
        ),
        (DIVIDED, "0", None, None, [f"{VISIBLE}=0: GPU 0 is divided"], "MIG-aab-2"),
        (DIVIDED, "GPU-222", None, None, ["GPU 2 is divided"], "5 (MIG-ccc-3"),
        (
            DIVIDED,
            "MIG-aa",
            None,
            None,
            ["MIG-aa is the beginning of several"],
            "3 (MIG-aaa-1, a slice of 0)",
        ),
        (DIVIDED, "3", None, None, ["there is no GPU 3"], "1 (GPU-111-abc)"),
        (DIVIDED, None, 2, None, ["--gpus 2", "1 GPU"], "--gpus 1"),
        (
            DIVIDED,
            None,
            None,
            "3,4",
            ["3 and 4 are slices of GPU 0", "Duplicate GPU detected"],
            "--devices 3",
        ),
        (DIVIDED, None, None, "4,5", ["4 and 5 are slices (MIG)"], "--devices 4"),
        (DIVIDED, None, None, "1,5", ["5 is a slice (MIG)"], "whole GPUs"),
        (DIVIDED, "MIG-aaa,MIG-aab", None, None, ["slices of GPU 0"], "--devices 3"),
        (DIVIDED, "MIG-aaa", None, "1", ["--devices 1", f"{VISIBLE}=MIG-aaa hides it"], ""),
        (SLICES, None, 3, None, ["3, 4, 5", "slices of GPU 0"], ""),
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
    [
        ([(8, 0)], "bf16"),
        ([(9, 0), (8, 6)], "bf16"),
        ([(8, 0), (7, 5)], "fp16"),
        ([(7, 0)], "fp16"),
        ([(7, 0), (6, 0)], "fp32"),
    ],
)
def test_precision_of_gpus(capabilities, expected):
    gpus = tuple(gpu(index, capability) for index, capability in enumerate(capabilities))
    assert Machine("cuda", gpus, 8, "").default_precision == expected


def test_more_cpu_ranks_than_cores_are_for_those_who_force_them(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    on_cpu = {"DS_ACCELERATOR": "cpu"}
    with pytest.raises(DsrunError, match="only 2 CPU cores") as caught:
        choose(detect(on_cpu), 5, None, {})
    assert "--force" in caught.value.problems[0].hint
    forced = detect(on_cpu).with_cpu_slots(5)
    chosen = choose(forced, 5, None, {})
    assert chosen == (0, 1, 2, 3, 4) and forced.cpu_cores == 2
    (said,) = notes(forced, chosen, visible_devices(forced, {}))
    assert "5 CPU ranks share 2 CPU cores" in said
    assert detect(on_cpu).with_cpu_slots(2).cpu_slots is None
    assert FOUR.with_cpu_slots(9) is FOUR
    assert not notes(detect(on_cpu), (0, 1), visible_devices(forced, {}))


def test_precision_of_a_cpu():
    assert CPU.default_precision == CPU_BY_CHOICE.default_precision == "fp32"


def test_slices_have_uuids_for_cuda():
    assert cuda_uuids(FOUR, (3, 1)) == cuda_uuids(CPU, (0, 1)) == ()
    assert cuda_uuids(DIVIDED, (4,)) == ("MIG-aab-2",)


def test_slices_are_planned_for():
    assert free_first(SLICES, None, {}) == (3,)
    assert free_first(SLICES, 2, {}) == (3, 4)


V100 = {"name": "Tesla V100", "total_mib": 32768}
FACTS = {
    "gpus": {
        "gpus": [
            {**V100, "index": 0, "uuid": "GPU-a", "used_mib": 30, "compute_capability": "7.0"},
            {**V100, "index": 1, "uuid": "GPU-b", "used_mib": 3000, "compute_capability": None},
        ],
        "processes": [{"uuid": "GPU-b", "pid": 77, "used_mib": 2900, "name": "py\x1bthon", "user": "alice"}],
    },
    "ram": {"total": 9 << 30, "available": 8 << 30, "cpus": 12},
    "torch": {"cuda": "12.6", "cpu_build": False},
}  # fmt: skip


def test_another_machine_from_its_facts():
    found = from_facts(FACTS)
    assert (found.accelerator, found.cpu_cores, found.host_memory_bytes) == ("cuda", 12, 8 << 30)
    assert [one.compute_capability for one in found.gpus] == [(7, 0), (0, 0)]
    assert found.gpus[1].memory_free_bytes == (32768 - 3000) << 20
    assert [one.use.busy for one in found.gpus] == [False, True]
    assert str(found.gpus[1].use) == "alice's py\\x1bthon (pid 77, 2.8 GiB)"
    assert choose(found, None, None, {}) == (0,)


@pytest.mark.parametrize(
    ("changed", "cpu", "reason"),
    [
        ({}, "DS_ACCELERATOR=cpu", "DS_ACCELERATOR=cpu"),
        ({"torch": {"cuda": None, "cpu_build": True}}, "", "its torch is a CPU build"),
        ({"gpus": {"gpus": [], "processes": []}, "torch": {"error": "x"}}, "", "no NVIDIA GPU"),
    ],
)
def test_another_machine_without_gpus_to_use(changed, cpu, reason):
    found = from_facts({**FACTS, **changed}, cpu)
    assert found.accelerator == "cpu"
    assert reason in found.reason


@pytest.mark.parametrize("facts", [{}, {"gpus": {"error": "x"}, "ram": {}}, {**FACTS, "ram": {"error": "x"}}])
def test_facts_with_holes_are_refused(facts):
    with pytest.raises((KeyError, TypeError, ValueError)):
        from_facts(facts)


def test_why_on_cpus(torch_version):
    torch_version("2.13.0+cpu")
    assert cpu_reason(FOUR, {}) == cpu_reason(CPU, {"DS_ACCELERATOR": "cuda"}) == ""
    assert cpu_reason(CPU, {"DS_ACCELERATOR": "cpu"}) == "DS_ACCELERATOR=cpu"
    assert "CPU build" in cpu_reason(CPU, {})
    torch_version("2.13.0")
    assert cpu_reason(CPU, {}) == ""


class NVMLError(Exception):
    """With pynvml's number of the error, and the driver's words."""

    def __init__(self, text: str = "", value: int = 999) -> None:
        super().__init__(text)
        self.value = value


def nvml(count: int | None, text=str) -> types.ModuleType:
    """A stand-in for pynvml with so many GPUs; None: no driver."""
    module = types.ModuleType("pynvml")

    def init():
        if count is None:
            raise NVMLError("driver not loaded", 9)

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
    return lambda version: monkeypatch.setattr(packages, "installed_version", {"torch": version}.get)


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


MISMATCH = NVMLError("RM has detected an NVML/RM version mismatch.", 18)


@pytest.mark.parametrize(
    ("error", "torch", "cards", "refused"),
    [
        (MISMATCH, "2.13.0+cu130", 0, True),
        (MISMATCH, "2.13.0", 8, True),
        (NVMLError("Unknown Error"), "2.13.0", 0, True),
        (NVMLError("Driver Not Loaded", 9), "2.13.0", 8, True),
        (NVMLError("NVML Shared Library Not Found", 12), "2.13.0", 8, True),
        (NVMLError("NVML Shared Library Not Found", 12), "2.13.0", 0, False),
        (NVMLError("Driver Not Loaded", 9), "2.13.0", 0, False),
        (MISMATCH, "2.13.0+cpu", 8, False),
    ],
)
def test_nvml_that_fails_makes_no_cpu_job(monkeypatch, torch_version, tmp_path, error, torch, cards, refused):
    module = nvml(2)
    monkeypatch.setattr(module, "nvmlInit", lambda: (_ for _ in ()).throw(error))
    monkeypatch.setitem(sys.modules, "pynvml", module)
    for number in range(cards):
        (tmp_path / "gpus" / f"0000:0{number}:00.0").mkdir(parents=True)
    monkeypatch.setattr(devices, "DRIVER", tmp_path)
    torch_version(torch)
    assert detect({"DS_ACCELERATOR": "cpu"}).accelerator == "cpu"
    if not refused:
        assert detect({}).accelerator == "cpu"
        return
    for variables in ({}, {"DS_ACCELERATOR": "cuda"}):
        with pytest.raises(DsrunError) as caught:
            detect(variables)
        (problem,) = caught.value.problems
        assert str(error) in problem.what
        assert "DS_ACCELERATOR=cpu" in problem.hint
        assert ("8 cards" in problem.what) == (cards == 8)
        assert ("restart the machine." in problem.hint.partition(";")[0]) == (error is MISMATCH)


@pytest.mark.parametrize(
    "asked", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUUID"]
)
def test_a_lost_gpu_is_left_out(monkeypatch, torch_version, asked):
    module = nvml(4)
    answers = getattr(module, asked)

    def lost(handle):
        if handle == 1:
            raise NVMLError("GPU is lost", 15)
        return answers(handle)

    monkeypatch.setattr(module, asked, lost)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    torch_version("2.13.0")
    found = detect({})
    assert found.indices == (0, 2, 3)
    chosen = choose(found, None, None, {})
    (note,) = notes(found, chosen, visible_devices(found, {}))
    assert note == "GPU 1 is left out: NVML can't tell about it (GPU is lost)"
    # CUDA may count without the lost one, so that an index would be another GPU's.
    assert cuda_uuids(found, chosen) == ("GPU-0", "GPU-2", "GPU-3")
    with pytest.raises(DsrunError, match="GPU is lost") as caught:
        choose(found, None, "1", {})
    assert caught.value.problems[0].hint == "Choose from 0,2,3."
    with pytest.raises(DsrunError, match="GPU is lost"):
        choose(found, 4, None, {})


def test_no_gpu_that_tells_its_memory(monkeypatch, torch_version):
    module = nvml(1)

    def unknown(handle):
        raise NVMLError("Not Supported", 3)

    monkeypatch.setattr(module, "nvmlDeviceGetMemoryInfo", unknown)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    torch_version("2.13.0")
    with pytest.raises(DsrunError, match="Not Supported") as caught:
        detect({})
    assert "DS_ACCELERATOR=cpu" in caught.value.problems[0].hint


def with_slices(module: types.ModuleType, slices: dict[int, int]) -> types.ModuleType:
    """GPUs in MIG mode: their index -> how many slices they have, at places with gaps."""

    def mode(handle):
        if handle not in slices:
            raise NVMLError("not supported")
        return 1, 1

    def one(handle, place):
        if place % 2 or place // 2 >= slices[handle]:
            raise NVMLError("not found")
        return f"{handle}/{place}"

    module.nvmlDeviceGetMigMode = mode
    module.nvmlDeviceGetMaxMigDeviceCount = lambda handle: 7
    module.nvmlDeviceGetMigDeviceHandleByIndex = one
    module.nvmlDeviceGetUUID = lambda handle: f"{'MIG' if '/' in str(handle) else 'GPU'}-{handle}"
    return module


def test_slices_are_numbered_behind_the_gpus(monkeypatch, torch_version):
    monkeypatch.setitem(sys.modules, "pynvml", with_slices(nvml(3), {0: 2, 2: 0}))
    torch_version("2.13.0")
    found = detect({})
    assert [(one.index, one.uuid, one.parent, one.divided) for one in found.gpus] == [
        (0, "GPU-0", None, True),
        (1, "GPU-1", None, False),
        (2, "GPU-2", None, True),
        (3, "MIG-0/0", 0, False),
        (4, "MIG-0/2", 0, False),
    ]
    assert found.indices == (1, 3, 4)
    assert found.reason == "3 x NVIDIA A100"
    with pytest.raises(DsrunError, match="nvidia-smi mig -cgi") as caught:
        choose(found, None, "2", {})
    assert "GPU 2 is divided" in str(caught.value)
    assert choose(found, None, None, {VISIBLE: "MIG-0/2"}) == (4,)


def test_gpus_that_are_not_divided(monkeypatch, torch_version):
    module = with_slices(nvml(1), {0: 2})
    module.nvmlDeviceGetMigMode = lambda handle: (0, 1)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    torch_version("2.13.0")
    assert [one.divided for one in detect({}).gpus] == [False]


def test_old_nvml_answers_in_bytes(monkeypatch, torch_version):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(1, text=str.encode))
    torch_version("2.13.0")
    (found,) = detect({}).gpus
    assert (found.name, found.uuid) == ("NVIDIA A100", "GPU-0")
