"""Which devices this machine has, and which of them a job gets. Asks NVML and the environment, never torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from dsrun.cluster import gpu_locks, gpu_use
from dsrun.cluster.gpu_use import BusyError, Use
from dsrun.cluster.host import host_ram
from dsrun.errors import DsrunError

VISIBLE = "CUDA_VISIBLE_DEVICES"
MOST = 100_000
"""More devices than any host has: a longer range is a slip, and isn't spelled out."""
CPU_RANKS = 2
"""Ranks on a CPU machine where nobody says how many: with one, ZeRO would have nothing to share."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as NVML shows it. index: in PCI order; compute_capability: (major, minor);
    memory_free_bytes and use: at this moment, None where it was not asked for."""

    index: int
    name: str
    uuid: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    memory_free_bytes: int | None = None
    use: Use | None = None


@dataclass(frozen=True)
class Machine:
    """accelerator: "cuda" or "cpu", what DeepSpeed will train on; gpus: all of them; cpu_cores: usable ones.

    host_memory_bytes: what a new job can have of the host's memory now, None where it was not asked for.
    """

    accelerator: str
    gpus: tuple[Gpu, ...]
    cpu_cores: int
    reason: str
    host_memory_bytes: int | None = None

    @property
    def indices(self) -> tuple[int, ...]:
        """Every device index: GPUs, or as many CPU slots as there are cores."""
        return (
            tuple(gpu.index for gpu in self.gpus)
            if self.accelerator == "cuda"
            else tuple(range(self.cpu_cores))
        )

    @property
    def default_precision(self) -> str:
        """bf16 where every GPU has it (compute capability 8.0), else fp16; fp32 on a CPU."""
        if self.accelerator == "cpu":
            return "fp32"
        return "bf16" if all(gpu.compute_capability >= (8, 0) for gpu in self.gpus) else "fp16"


def detect(environ: Mapping[str, str]) -> Machine:
    """This machine. DS_ACCELERATOR=cpu and a CPU build of torch make it a CPU machine, whatever GPUs it has."""
    cores = len(os.sched_getaffinity(0))
    gpus = _gpus()
    ram = host_ram().available
    if environ.get("DS_ACCELERATOR"):
        wanted = environ["DS_ACCELERATOR"]
        if wanted not in {"cpu", "cuda"}:
            raise DsrunError(
                f"DS_ACCELERATOR={wanted} is not supported", hint="Use cuda or cpu, or unset it."
            )
        if wanted == "cuda" and not gpus:
            raise DsrunError(
                "DS_ACCELERATOR=cuda, but NVML finds no NVIDIA GPU", hint="Unset it, or use cpu."
            )
        return Machine(wanted, gpus, cores, f"DS_ACCELERATOR={wanted}", ram)
    if not gpus:
        return Machine("cpu", (), cores, "NVML finds no NVIDIA GPU", ram)
    import importlib.metadata  # takes longer to import than all else here

    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = ""
    if torch.endswith("+cpu"):
        reason = f"torch {torch} is a CPU build: the GPUs can't be used with it"
        return Machine("cpu", gpus, cores, reason, ram)
    return Machine("cuda", gpus, cores, f"{len(gpus)} x {gpus[0].name}", ram)


def _gpus() -> tuple[Gpu, ...]:
    """Every NVIDIA GPU; none where NVML or its driver is missing."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            name, uuid = _text(pynvml.nvmlDeviceGetName(handle)), _text(pynvml.nvmlDeviceGetUUID(handle))
            found.append(
                Gpu(
                    index,
                    name,
                    uuid,
                    int(memory.total),
                    tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
                    int(memory.free),
                    gpu_use.look(handle, gpu_locks.holder(uuid)),
                )
            )
        return tuple(found)
    finally:
        pynvml.nvmlShutdown()


def _text(answer: str | bytes) -> str:
    """NVML's text, which older bindings give as bytes."""
    return answer if isinstance(answer, str) else answer.decode()


def choose(
    machine: Machine, gpus: int | None, devices: str | None, environ: Mapping[str, str]
) -> tuple[int, ...]:
    """The devices of a job on this machine, in rank order.

    gpus: how many, free ones; devices: which ("2,3", "0-3"), in use or not, if only no other dsrun holds one; neither:
    all visible GPUs that are free, or CPU_RANKS on a CPU machine. CUDA_VISIBLE_DEVICES restricts and orders what can be
    chosen from. Raises DsrunError for devices that do not exist or are not visible, naming both sides, and BusyError
    where too few are free, naming whose they are.
    """
    if gpus is not None and devices is not None:
        raise DsrunError("--gpus and --devices both say which devices to use", hint="Give one of them.")
    seen = _visible(machine, environ)
    limit = _limit(machine, environ)
    if devices is not None:
        wanted = parse_devices(devices)
        _check_wanted(wanted, devices, machine, seen, limit)
        _check_held(wanted, devices, machine)
        return wanted
    if gpus is not None and gpus > len(seen):
        raise DsrunError(
            f"--gpus {gpus}: there are only {_count_text(machine, len(seen))}"
            + (f" ({limit})" if limit else ""),
            hint=f"Use --gpus {len(seen)}" if seen else f"Change {VISIBLE}.",
        )
    return free_first(machine, gpus, environ, free=True)


def free_first(
    machine: Machine, gpus: int | None, environ: Mapping[str, str], *, free: bool = False
) -> tuple[int, ...]:
    """So many devices (all that are free, where nobody says), those that nobody uses first.

    free: raise BusyError rather than give one that is in use. Without it this is what a job would get if it waited for
    no one: what to plan for.
    """
    seen = visible(machine, environ)
    if machine.accelerator == "cpu":
        return seen[: min(CPU_RANKS, len(seen)) if gpus is None else gpus]
    busy = gpu_use.in_use(machine)
    unused = tuple(index for index in seen if index not in busy)
    count = (len(unused) or len(seen)) if gpus is None else gpus
    if free and count > len(unused):
        raise _too_few(machine, gpus, seen, unused, _limit(machine, environ))
    return (*unused, *(index for index in seen if index in busy))[:count]


def notes(
    machine: Machine, chosen: tuple[int, ...], devices: str | None, environ: Mapping[str, str]
) -> tuple[str, ...]:
    """What is worth saying about a choice: GPUs that were left to others, and those that others use as well."""
    found = gpu_use.in_use(machine)
    lines = []
    for index in _visible(machine, environ):
        if index in found and index in chosen:
            lines.append(f"{gpu_use.in_words(index, found[index])}; it is taken all the same")
        elif index in found and devices is None:
            lines.append(f"{gpu_use.in_words(index, found[index])}; it is left out")
    if machine.accelerator == "cuda":
        dark = [gpu.index for gpu in machine.gpus if gpu.index in chosen and gpu.use and gpu.use.unknown]
        lines += [f"whether GPU {index} is in use is unknown: NVML doesn't say" for index in dark]
    return tuple(lines)


def visible(machine: Machine, environ: Mapping[str, str]) -> tuple[int, ...]:
    """The devices that can be chosen from, in CUDA_VISIBLE_DEVICES' order. Raises DsrunError where it leaves none."""
    found = _visible(machine, environ)
    if not found:
        raise DsrunError(f"{VISIBLE} leaves no device", hint=f"Unset it, or name devices: {machine.indices}")
    return found


def _limit(machine: Machine, environ: Mapping[str, str]) -> str:
    """What limits the choice, in words; empty where nothing does."""
    return f"{VISIBLE}={environ.get(VISIBLE)}" if _visible(machine, environ) != machine.indices else ""


def _too_few(
    machine: Machine, gpus: int | None, seen: tuple[int, ...], unused: tuple[int, ...], limit: str
) -> BusyError:
    found = gpu_use.in_use(machine)
    lines = [gpu_use.in_words(index, found[index]) for index in seen if index in found]
    asked = "" if gpus is None else f"--gpus {gpus}: "
    how_many = "no GPU is" if not unused else f"only {len(unused)} of {len(seen)} GPUs {_are(len(unused))}"
    hint = f"Use --gpus {len(unused)}, or wait for more: --wait" if unused else "Wait for them: --wait"
    shared = next((index for index in seen if index in found and not found[index].holder), None)
    if shared is not None:  # what another dsrun holds is never shared
        hint += f". Or take what others use as well, by name: --devices {shared}"
    return BusyError(f"{asked}{how_many} free" + (f" ({limit})" if limit else ""), lines, hint=hint)


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _check_held(wanted: tuple[int, ...], option: str, machine: Machine) -> None:
    """Two dsrun never share a GPU, not even where it is named: each counts on the memory that it saw free."""
    found = gpu_use.in_use(machine)
    held = [index for index in wanted if index in found and found[index].holder]
    if held:
        lines = [gpu_use.in_words(index, found[index]) for index in held]
        what = f"--devices {option}: held by another dsrun: {', '.join(map(str, held))}"
        raise BusyError(what, lines, hint="Wait for it with --wait, or choose others.")


def _count_text(machine: Machine, count: int) -> str:
    kind = "GPU" if machine.accelerator == "cuda" else "CPU core"
    text = f"{count} {kind}{'' if count == 1 else 's'}"
    return text if machine.accelerator == "cuda" else f"{text} ({machine.reason})"


def _check_wanted(
    wanted: tuple[int, ...], option: str, machine: Machine, visible: tuple[int, ...], limit: str
) -> None:
    absent = [index for index in wanted if index not in machine.indices]
    if absent:
        there = f"0-{len(machine.indices) - 1}" if len(machine.indices) > 1 else "0"
        raise DsrunError(
            f"--devices {option}: no device {', '.join(map(str, absent))}; "
            f"this machine has {_count_text(machine, len(machine.indices))}",
            hint=f"Choose from {there}.",
        )
    hidden = [index for index in wanted if index not in visible]
    if hidden:
        raise DsrunError(
            f"--devices {option} asks for {', '.join(map(str, hidden))}, but {limit} hides it",
            hint=f"Choose from {','.join(map(str, visible))}, or unset {VISIBLE}.",
        )


def _visible(machine: Machine, environ: Mapping[str, str]) -> tuple[int, ...]:
    """The indices that CUDA_VISIBLE_DEVICES leaves, in its order. On a CPU machine it means nothing."""
    text = environ.get(VISIBLE)
    if text is None or machine.accelerator == "cpu":
        return machine.indices
    by_uuid = {gpu.uuid: gpu.index for gpu in machine.gpus}
    found: list[int] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        matches = [index for uuid, index in by_uuid.items() if uuid.startswith(entry)]
        if entry.isdecimal() and int(entry) in machine.indices:
            found.append(int(entry))
        elif entry == "-1":
            break  # CUDA's own rule: it hides itself and all that follow
        elif entry.startswith("GPU-") and len(matches) == 1:
            found.append(matches[0])
        else:
            a_slice = f"{entry} is a slice of a GPU (MIG), and dsrun trains on whole ones"
            raise DsrunError(
                f"{VISIBLE}={text}: " + (a_slice if entry.startswith("MIG-") else f"there is no GPU {entry}"),
                hint=f"This machine has {', '.join(f'{gpu.index} ({gpu.uuid})' for gpu in machine.gpus)}.",
            )
    if len(set(found)) != len(found):
        raise DsrunError(f"{VISIBLE}={text} names a GPU twice")
    return tuple(found)


def parse_devices(text: str) -> tuple[int, ...]:
    """ "2,3" or "0-3,6" as indices, in the order given. Raises DsrunError for anything else."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise DsrunError(f"--devices {text}: {part!r} is not a device", hint="Examples: 2,3 or 0-3")
        if int(last if dash else first) >= MOST:
            raise DsrunError(
                f"--devices {text}: there is no device {last or first}", hint="Examples: 2,3 or 0-3"
            )
        found += range(int(first), int(last if dash else first) + 1)
    if len(set(found)) != len(found):
        raise DsrunError(f"--devices {text} names a device twice")
    return tuple(found)
