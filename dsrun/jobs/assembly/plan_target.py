"""The target of a plan: this machine's devices or those that the user names, their room and their speed."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dsrun.cluster import devices as choice
from dsrun.cluster.devices import Gpu, Machine
from dsrun.errors import DsrunError, Problem, collected, raise_all
from dsrun.jobs.runs import calibration
from dsrun.options.commands import PlanOptions
from dsrun.options.declare import flag_of
from dsrun.options.table import HardwareOptions
from dsrun.planner import gpus as kinds
from dsrun.planner import units
from dsrun.planner.plan import Calibration, MemoryBudget
from dsrun.planner.speed import Hardware
from dsrun.words import counted

USUAL_GPU = "a100-80g"
"""The GPU whose speed is assumed where only the memory is known."""
USUAL_GPUS = (
    ("rtx-4090", 1),
    ("v100-32g", 2),
    ("rtx-4090", 8),
    ("a100-80g", 1),
    ("a100-80g", 8),
    ("h100-80g", 8),
)
"""GPUs that a plan is made for where there is none and none is named: kinds that labs have or rent, and how many."""
CPU_TFLOPS_A_CORE = 0.08
"""A server core's peak in fp32 matrix products, for lack of a data sheet: two units of eight, at 2.5 GHz."""


@dataclass(frozen=True)
class PlanTarget:
    """Devices to plan for. text: in words; bf16: whether the devices compute in it.
    hardware_assumed: only their memory is known; capability: of the oldest GPU, where that is known; notes: lines for
    the user."""

    room: MemoryBudget
    text: str
    bf16: bool
    hardware_assumed: bool = False
    capability: tuple[int, ...] | None = None
    network_assumed: bool = True
    notes: tuple[str, ...] = ()
    fp16: bool = True
    """Whether DeepSpeed trains in fp16 there."""


def target(options: PlanOptions, machine: Machine | None) -> PlanTarget:
    """The hardware: what --gpu, --gpu-memory, --host-memory and --nvme say, and this machine for the rest.

    machine: this one; None where the GPUs are named, so that nobody need ask. Raises DsrunError with all that can't be
    right.
    """
    problems: list[Problem] = []
    sizes: dict[str, float | None] = {}
    sizes_given = {"gpu_memory": options.gpu_memory, "host_memory": options.host_memory, "nvme": options.nvme}
    for name, text in sizes_given.items():
        option = flag_of(PlanOptions, name)
        with collected(problems):
            sizes[name] = units.size(text, option) if text is not None else None
    kind = None
    with collected(problems):
        kind = kinds.load(options.gpu) if options.gpu else None
    raise_all(problems)
    nodes = options.nodes
    if machine is not None and kind is None and sizes["gpu_memory"] is None:
        place = _this_machine(options, machine, nodes, sizes)
    else:
        place = _named(options, kind, nodes, sizes)
    if options.network:
        hardware = replace(place.room.hardware, network_gb_s=options.network / 8)
        place = replace(place, room=replace(place.room, hardware=hardware), network_assumed=False)
    return place


def _named(
    options: PlanOptions, kind: kinds.GpuModel | None, nodes: int, sizes: Mapping[str, float | None]
) -> PlanTarget:
    """GPUs as they are sold, or of which only the memory is known."""
    count = options.gpus or 1
    memory = sizes["gpu_memory"] or (kind.memory_gib * 2**30 if kind else 0.0)
    name = kind.name if kind else "GPU"
    hardware = Hardware.from_gpu(kind, count) if kind else _unknown_hardware(count)
    known = calibration.known(kind.name) if kind else Calibration()
    room = MemoryBudget(
        count, nodes, memory, hardware, sizes["host_memory"], sizes["nvme"], calibration=known
    )
    on = f" on {nodes} nodes of {count}" if nodes > 1 else ""
    text = f"{count * nodes} x {name}{on}, {memory / 2**30:.1f} GiB each" + _host_text(room)
    fp16 = kind is None or kind.takes_fp16(os.environ)
    capability = tuple(map(int, kind.compute_capability.split("."))) if kind else None
    return PlanTarget(
        room,
        text,
        kind.bf16 if kind else True,
        hardware_assumed=kind is None,
        capability=capability,
        fp16=fp16,
        notes=_many(count, nodes),
    )


MOST_IN_A_NODE = 16
"""GPUs of the largest usual node."""


def _many(count: int, nodes: int) -> tuple[str, ...]:
    """A line where --gpus may have been meant for all nodes together."""
    if nodes == 1 or count < MOST_IN_A_NODE or count % nodes:
        return ()
    return (
        f"--gpus {count} --nodes {nodes} are {count * nodes} GPUs, {count} in each node; {count} in all are "
        f"--gpus {count // nodes} --nodes {nodes}.",
    )


def _this_machine(
    options: PlanOptions, machine: Machine, nodes: int, sizes: Mapping[str, float | None]
) -> PlanTarget:
    count = options.gpus
    if count is not None and count > len(machine.indices):
        there = (
            f"{len(machine.gpus)} GPUs"
            if machine.accelerator == "cuda"
            else f"no GPU and {machine.cpu_cores} cores"
        )
        raise DsrunError(
            f"can't be {count}: this machine has {there}",
            where="--gpus",
            hint="To plan for others, name them: --gpu v100-32g, or --gpu-memory 32GiB",
        )
    chosen = choice.free_first(machine, count, {})  # as finetune takes them
    room = room_here(machine, chosen)
    room = replace(
        room, nodes=nodes, host_bytes=sizes["host_memory"] or room.host_bytes, nvme_bytes=sizes["nvme"]
    )
    if machine.accelerator == "cpu":
        host = (room.host_bytes or 0) / 2**30
        ranks = counted(room.ranks, "CPU rank")
        on = f"{nodes} nodes like this machine" if nodes > 1 else "this machine"
        each = " each" if nodes > 1 else ""
        free = "of memory" if sizes["host_memory"] else "of memory free"
        text = f"{ranks} on {on} ({machine.reason}), {host:.1f} GiB {free}{each}"
        return PlanTarget(room, text, True)
    names = " and ".join(dict.fromkeys(gpu.name for gpu in machine.gpus if gpu.index in chosen))
    on = f" on {nodes} nodes" if nodes > 1 else ""
    text = f"{room.ranks} x {names} as in this machine{on}, {room.gpu_bytes / 2**30:.1f} GiB free each"
    from dsrun.cluster import gpu_use

    busy = [gpu_use.in_words(index, use) for index, use in gpu_use.in_use(machine).items() if index in chosen]
    oldest = min(gpu.compute_capability for gpu in machine.gpus if gpu.index in chosen)
    return PlanTarget(
        room,
        text + _host_text(room),
        computes_bf16(machine, machine.indices),
        notes=(*machine.left_out, *busy),
        capability=oldest,
        fp16=machine.takes_fp16,
    )


def named_machine(options: HardwareOptions, machine: Machine, gpus: int) -> tuple[Machine, bool]:
    """A machine with the GPUs that --gpu and --gpu-memory name, else `machine`; and whether it has `gpus` devices.

    Raises DsrunError where a name or a size can't be right.
    """
    flags = {name: flag_of(HardwareOptions, name) for name in ("gpu_memory", "host_memory")}
    sizes = {name: units.size(text, flag) for name, flag in flags.items() if (text := getattr(options, name))}
    host = int(sizes["host_memory"]) if "host_memory" in sizes else None
    if not options.gpu and "gpu_memory" not in sizes:
        machine = replace(machine, host_memory_bytes=host or machine.host_memory_bytes)
        return machine, gpus <= len(machine.indices)
    kind = kinds.load(options.gpu or USUAL_GPU)
    memory = int(sizes.get("gpu_memory", kind.memory_gib * 2**30))
    major, minor = map(int, kind.compute_capability.split("."))
    cards = tuple(Gpu(index, kind.name, "", memory, (major, minor)) for index in range(gpus))
    return Machine("cuda", cards, machine.cpu_cores, f"{gpus} x {kind.name}", host), True


def visible(machine: Machine, environ: Mapping[str, str]) -> Machine:
    """A machine with the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order. Raises DsrunError where none is left."""
    if machine.accelerator == "cpu":
        return machine
    by_index = {gpu.index: gpu for gpu in machine.gpus}
    return replace(machine, gpus=tuple(by_index[index] for index in choice.visible_indices(machine, environ)))


def computes_bf16(machine: Machine, devices: Sequence[int]) -> bool:
    """Whether all of these devices have bf16: a CPU does, a GPU from compute capability 8.0 on."""
    return machine.accelerator == "cpu" or all(
        gpu.compute_capability >= (8, 0) for gpu in machine.gpus if gpu.index in devices
    )


def free_bytes(machine: Machine, index: int) -> int:
    """Bytes that a GPU has free now (all of it where that is not known); 0 for a CPU rank."""
    gpu_there = next((gpu for gpu in machine.gpus if gpu.index == index), None)
    if machine.accelerator == "cpu" or gpu_there is None:
        return 0
    return _free_bytes(gpu_there)


def _free_bytes(gpu: Gpu) -> int:
    return gpu.memory_bytes if gpu.memory_free_bytes is None else gpu.memory_free_bytes


def room_here(
    machine: Machine, devices: Sequence[int], nvme_bytes: float | None = None, nodes: int = 1
) -> MemoryBudget:
    """Free memory of some devices of this machine. The scarcest GPU counts for all.

    nodes: the devices are spread over this many hosts, and `machine` is as jobs.allocation.Allocation has it.
    """
    host = None if machine.host_memory_bytes is None else float(machine.host_memory_bytes)
    count = -(-len(devices) // nodes)
    if machine.accelerator == "cpu":
        flops = CPU_TFLOPS_A_CORE * machine.cpu_cores / count
        hardware = replace(_unknown_hardware(count), matrix_tflops=flops, fp32_tflops=flops, cpu=True)
        known = calibration.known(device_name(machine, devices))
        from dsrun.host.toolkit import torch_build

        cuda_build = torch_build(sys.path)["cuda"] is not None
        return MemoryBudget(count, nodes, host or 0.0, hardware, host, nvme_bytes, "cpu", known, cuda_build)
    wanted = set(devices)
    names = dict.fromkeys(gpu.name for gpu in machine.gpus if gpu.index in wanted)
    # Among cards of several kinds all wait for the slowest.
    kind = min(filter(None, map(kinds.recognise, names)), key=lambda gpu: gpu.matrix_tflops, default=None)
    hardware = Hardware.from_gpu(kind, count) if kind else _unknown_hardware(count)
    free = min(_free_bytes(gpu) for gpu in machine.gpus if gpu.index in wanted)
    known = calibration.known(device_name(machine, devices))
    return MemoryBudget(count, nodes, float(free), hardware, host, nvme_bytes, calibration=known)


def device_name(machine: Machine, devices: Sequence[int]) -> str:
    """The kind of device that a calibration is kept under: a GPU's file, else what NVML calls it, or cpu."""
    if machine.accelerator == "cpu":
        return "cpu"
    name = next((gpu.name for gpu in machine.gpus if gpu.index in devices), "unknown")
    kind = kinds.recognise(name)
    return kind.name if kind else name


def _unknown_hardware(count: int) -> Hardware:
    return Hardware.from_gpu(kinds.load(USUAL_GPU), count)


def _host_text(room: MemoryBudget) -> str:
    parts = [
        f"{size / 2**30:.0f} GiB of {fault}"
        for fault, size in (("host memory", room.host_bytes), ("NVMe", room.nvme_bytes))
        if size is not None
    ]
    return f", {' and '.join(parts)} a node" if parts else ""
