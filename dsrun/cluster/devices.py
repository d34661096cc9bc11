"""The devices of this machine, and those of them that a job gets: by NVML and the environment, never by torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dsrun import packages
from dsrun.cluster import gpu_locks, gpu_use
from dsrun.cluster.gpu_use import BusyError, GpuProcess, GpuUse
from dsrun.errors import DsrunError
from dsrun.host.gpus import DRIVER
from dsrun.words import counted, printable

VISIBLE = "CUDA_VISIBLE_DEVICES"
MOST_DEVICES = 100_000
"""More devices than any host has: a longer range is a slip, and isn't spelled out."""
MIG_ENABLED = 1
"""NVML_DEVICE_MIG_ENABLE in nvml.h."""
NO_DRIVER = (9, 12)
"""NVML_ERROR_DRIVER_NOT_LOADED and NVML_ERROR_LIBRARY_NOT_FOUND in nvml.h: also a machine that has no GPU says so."""
MISMATCH = 18
"""NVML_ERROR_LIB_RM_VERSION_MISMATCH in nvml.h."""
CPU_RANKS = 2
"""Ranks on a CPU machine where nobody says how many: with one, ZeRO would have nothing to share."""


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a slice of one (MIG), as NVML shows it."""

    index: int
    """Its number in PCI order; slices are numbered behind the GPUs."""
    name: str
    uuid: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    """(major, minor)"""
    memory_free_bytes: int | None = None
    """Free memory at this moment; None where nobody looked."""
    use: GpuUse | None = None
    """Its use at this moment; None where nobody looked."""
    parent: int | None = None
    """The GPU that a slice is one of."""
    divided: bool = False
    """Whether it is in MIG mode, so that only its slices can be trained on."""


@dataclass(frozen=True)
class Machine:
    """A host, as far as its devices go."""

    accelerator: str
    """"cuda" or "cpu": what DeepSpeed will train on."""
    gpus: tuple[Gpu, ...]
    """All its GPUs, also where it trains on CPUs."""
    cpu_cores: int
    """The cores that this process may use."""
    reason: str
    """The reason for this accelerator, in words."""
    host_memory_bytes: int | None = None
    """Host memory that a new job can have now; None where nobody looked."""
    cpu_slots: int | None = None
    """CPU ranks that it may have, where somebody forces more than there are cores."""
    left_out: tuple[str, ...] = ()
    """Its GPUs that NVML can't tell about, each in words with the reason: no job gets them."""

    @property
    def indices(self) -> tuple[int, ...]:
        """Every device index: GPUs and slices, or as many CPU slots as there are cores."""
        if self.accelerator == "cuda":
            return tuple(gpu.index for gpu in self.gpus if not gpu.divided)
        return tuple(range(self.cpu_slots or self.cpu_cores))

    def with_cpu_slots(self, slots: int | None) -> Machine:
        """The same machine for a job that is forced to have more CPU ranks than it has cores."""
        more = self.accelerator == "cpu" and slots is not None and slots > self.cpu_cores
        return replace(self, cpu_slots=slots) if more else self

    @property
    def takes_fp16(self) -> bool:
        """Whether DeepSpeed trains in fp16 on every GPU: it refuses to on those below compute capability 7.0, unless
        DS_ALLOW_DEPRECATED_FP16 is 1 (is_fp16_supported in accelerator/cuda_accelerator.py).
        """
        least = (6, 0) if os.environ.get("DS_ALLOW_DEPRECATED_FP16") == "1" else (7, 0)
        return all(gpu.compute_capability >= least for gpu in self.gpus)

    @property
    def half_precision(self) -> str:
        """bf16 where every GPU has it (compute capability 8.0), else fp16."""
        return "bf16" if all(gpu.compute_capability >= (8, 0) for gpu in self.gpus) else "fp16"

    @property
    def default_precision(self) -> str:
        """The precision of training: 16 bits, or fp32 on a CPU and where DeepSpeed refuses fp16."""
        half = self.half_precision
        return "fp32" if self.accelerator == "cpu" or (half == "fp16" and not self.takes_fp16) else half


class NvmlAnswer(NamedTuple):
    """NVML's account of this machine."""

    gpus: tuple[Gpu, ...] = ()
    left_out: tuple[str, ...] = ()
    """As in Machine."""
    fault: str = ""
    """The reason why it names no GPU although there is a driver or a card; empty where there may be none."""


class VisibleDevices(NamedTuple):
    """The devices that can be chosen from."""

    indices: tuple[int, ...]
    """Their indices, in the order in which they are taken."""
    limit: str = ""
    """The setting that hides others, in words; empty where none does."""


WITHOUT_DEVICES = ("emscripten", "wasi")
"""Platforms on which Python sees no device."""


def detect(environ: Mapping[str, str]) -> Machine:
    """This machine. DS_ACCELERATOR=cpu and a CPU build of torch make it a CPU machine, whatever GPUs it has.

    Raises DsrunError where it has GPUs that can't be used and nobody asked for CPUs: training there on CPUs instead
    takes days, and looks as if all were well; and in a browser, which shows no page the machine's devices.
    """
    from dsrun.host.memory import host_ram

    if sys.platform in WITHOUT_DEVICES:
        raise DsrunError(
            "no GPU is named, and a browser doesn't show this machine's",
            hint="Name one, such as --gpu a100-80g, or its memory: --gpu-memory 24GiB.",
        )
    accelerator = environ.get("DS_ACCELERATOR")
    (gpus, left_out, fault), reason = _ask_nvml(), f"DS_ACCELERATOR={accelerator}"
    if accelerator and accelerator not in {"cpu", "cuda"}:
        raise DsrunError(f"{reason} is not supported", hint="Use cuda or cpu, or unset it.")
    if accelerator == "cuda" and not gpus:
        if fault:
            raise DsrunError(f"{reason}, but {fault}", hint=_what_to_do(fault))
        raise DsrunError(f"{reason}, but NVML finds no NVIDIA GPU", hint="Unset it, or use cpu.")
    if not accelerator:
        cpu = _torch_is_for_cpus() if gpus or fault else "NVML finds no NVIDIA GPU"
        if fault and not cpu:
            raise DsrunError(fault, hint=_what_to_do(fault))
        accelerator = "cpu" if cpu else "cuda"
        reason = cpu or f"{sum(gpu.parent is None for gpu in gpus)} x {gpus[0].name}"
    cores, memory = len(os.sched_getaffinity(0)), host_ram().available
    return Machine(accelerator, gpus, cores, reason, memory, left_out=left_out)


def _what_to_do(fault: str) -> str:
    """The hint where NVML doesn't work, or none of the GPUs."""
    if "mismatch" in fault:
        first = "The driver was upgraded beside the old one in the kernel: restart the machine."
    else:
        first = (
            "`nvidia-smi` and `dsrun doctor` show more; a GPU that is lost needs a restart of the machine."
        )
    return f"{first} To train on CPUs all the same: DS_ACCELERATOR=cpu"


def cpu_reason(machine: Machine, environ: Mapping[str, str]) -> str:
    """The reason why jobs started on this machine train on CPUs on every host; empty where they need not."""
    if machine.accelerator == "cuda":
        return ""
    wanted = environ.get("DS_ACCELERATOR")
    return "DS_ACCELERATOR=cpu" if wanted == "cpu" else "" if wanted else _torch_is_for_cpus()


def _torch_is_for_cpus() -> str:
    torch = packages.installed_version("torch") or ""
    return f"torch {torch} is a CPU build: the GPUs can't be used with it" if torch.endswith("+cpu") else ""


def from_facts(facts: Mapping[str, Any], cpu: str = "") -> Machine:
    """Another machine, from its probe's facts. cpu: the reason why it trains on CPUs whatever GPUs it has, if it does.

    Raises KeyError, TypeError or ValueError where the facts are not as probe.py makes them.
    """
    devices, ram, torch = facts["gpus"], facts["ram"], facts.get("torch") or {}
    uses: dict[str, list[GpuProcess]] = {}
    for process in devices["processes"]:
        size = None if process["used_mib"] is None else int(process["used_mib"] * 2**20)
        names = (
            None if process[key] is None else printable(str(process[key]), gpu_use.LONGEST_NAME)
            for key in ("user", "name")
        )
        uses.setdefault(process["uuid"], []).append(GpuProcess(int(process["pid"] or 0), size, *names))
    gpus = tuple(
        _gpu_of_facts(fact, tuple(uses.get(fact["uuid"], ())))
        for fact in devices["gpus"]
        if fact["total_mib"]
    )
    cores, free = int(ram["cpus"]), int(ram["available"])
    if not cpu and torch.get("cpu_build"):
        cpu = "its torch is a CPU build"
    if cpu or not gpus:
        return Machine("cpu", gpus, cores, cpu or "it has no NVIDIA GPU", free)
    return Machine("cuda", gpus, cores, f"{len(gpus)} x {gpus[0].name}", free)


def _gpu_of_facts(fact: Mapping[str, Any], processes: tuple[GpuProcess, ...]) -> Gpu:
    total, used = int(fact["total_mib"] * 2**20), int((fact["used_mib"] or 0) * 2**20)
    major, _, minor = str(fact["compute_capability"] or "0.0").partition(".")
    name = printable(str(fact["name"]), gpu_use.LONGEST_NAME)
    use = GpuUse(processes, used)
    return Gpu(
        int(fact["index"]), name, str(fact["uuid"]), total, (int(major), int(minor)), total - used, use
    )


def _ask_nvml() -> NvmlAnswer:
    """What NVML tells of every NVIDIA GPU; a GPU about which it can't tell is left out, for the others to be used."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return NvmlAnswer()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        # Without a driver a CPU machine answers the same, so that only a card of the kernel module's speaks against it.
        no_driver = getattr(error, "value", None) in NO_DRIVER
        cards = len(list(DRIVER.glob("gpus/*")))
        if no_driver and not cards:
            return NvmlAnswer()
        has = f"; {DRIVER}/gpus has {counted(cards, 'card')}" if cards else ""
        return NvmlAnswer(fault=f"NVML can't be started: {_words(error)}{has}")
    try:
        return _every_gpu()
    except pynvml.NVMLError as error:
        return NvmlAnswer(fault=f"NVML can't count the GPUs: {_words(error)}")
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _every_gpu() -> NvmlAnswer:
    """The GPUs, and behind them their slices, between nvmlInit and nvmlShutdown."""
    import pynvml

    gpus: dict[int, Gpu] = {}
    slices: dict[int, list[Any]] = {}
    left_out = []
    count = pynvml.nvmlDeviceGetCount()
    for index in range(count):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            inside = _slices(handle)
            capability = tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle))
            gpus[index] = _gpu(index, handle, capability, divided=inside is not None)
        except (
            pynvml.NVMLError
        ) as error:  # fallen off the bus; memory of the host's, whose size it doesn't tell
            left_out.append(f"GPU {index} is left out: NVML can't tell about it ({_words(error)})")
        else:
            slices[index] = inside or []
    number = count
    for parent, handles in slices.items():
        for handle in handles:
            try:
                gpus[number] = _gpu(number, handle, gpus[parent].compute_capability, parent)
            except pynvml.NVMLError as error:
                left_out.append(f"slice {number} of GPU {parent} is left out: {_words(error)}")
            number += 1
    return NvmlAnswer(tuple(gpus.values()), tuple(left_out), "" if gpus else "; ".join(left_out))


def _words(error: Exception) -> str:
    """NVML's own words, in which people look for the fault; nvidia-smi has others for a mismatch."""
    text = str(error) or type(error).__name__
    return f"Driver/library version mismatch ({text})" if getattr(error, "value", None) == MISMATCH else text


def _gpu(
    index: int, handle: Any, capability: tuple[int, int], parent: int | None = None, *, divided: bool = False
) -> Gpu:
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    name, uuid = _text(pynvml.nvmlDeviceGetName(handle)), _text(pynvml.nvmlDeviceGetUUID(handle))
    use = gpu_use.query(handle, gpu_locks.holder_of(uuid))
    return Gpu(index, name, uuid, int(memory.total), capability, int(memory.free), use, parent, divided)


def _slices(handle: Any) -> list[Any] | None:
    """The handles of a GPU's slices (NVML's MIG devices); None where it is not in MIG mode."""
    import pynvml

    try:
        mode, _ = pynvml.nvmlDeviceGetMigMode(handle)
        count = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle) if mode == MIG_ENABLED else 0
    except (pynvml.NVMLError, AttributeError):  # a GPU that can't be divided; bindings that don't know of it
        return None
    if mode != MIG_ENABLED:
        return None
    handles = []
    for place in range(count):
        with suppress(pynvml.NVMLError):  # this place is empty
            handles.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place))
    return handles


def _text(answer: str | bytes) -> str:
    """NVML's text, which older bindings give as bytes."""
    return answer if isinstance(answer, str) else answer.decode()


def choose(
    machine: Machine, gpus: int | None, devices: str | None, environ: Mapping[str, str]
) -> tuple[int, ...]:
    """The devices of a job on this machine, in rank order.

    gpus: how many, free ones; devices: which ("2,3", "0-3"), also in use, unless another dsrun holds them; neither:
    all visible GPUs that are free, or CPU_RANKS on a CPU machine. CUDA_VISIBLE_DEVICES restricts and orders what can be
    chosen from. Raises DsrunError for devices that do not exist or are not visible, naming both sides, and BusyError
    where too few are free, naming whose they are.
    """
    if gpus is not None and devices is not None:
        raise DsrunError("--gpus and --devices both say which devices to use", hint="Give one of them.")
    there = visible_devices(machine, environ)
    if devices is not None:
        return named(machine, parse_devices(devices), f"--devices {devices}", there)
    return free(machine, gpus, there)


def named(machine: Machine, wanted: tuple[int, ...], option: str, there: VisibleDevices) -> tuple[int, ...]:
    """Devices that an option names, also ones in use, unless another dsrun holds them. option: as the user wrote it.

    Raises DsrunError for devices that do not exist or are not visible, and BusyError for those that are held: two dsrun
    never share a GPU, as each counts on the memory that it saw free.
    """
    _check_wanted(wanted, option, machine, there)
    in_use = gpu_use.in_use(machine)
    if held := [index for index in wanted if index in in_use and in_use[index].holder]:
        lines = [gpu_use.in_words(index, in_use[index]) for index in held]
        message = f"{option}: held by another dsrun: {', '.join(map(str, held))}"
        raise BusyError(message, lines, hint="Wait for it with --wait, or choose others.")
    _check_slices(wanted, machine)
    return wanted


def free(machine: Machine, gpus: int | None, there: VisibleDevices) -> tuple[int, ...]:
    """This many devices that nobody uses (None: all such). Raises DsrunError where there are too few, and BusyError
    where too few are free, naming whose they are."""
    count = len(there.indices)
    if gpus is not None and gpus > count:
        raise DsrunError(
            "\n  ".join(
                [
                    f"--gpus {gpus}: there are only {_count_text(machine, count)}" + _because(there),
                    *(machine.left_out if machine.accelerator == "cuda" else ()),
                ]
            ),
            hint=_fewer(machine, count),
        )
    chosen = _first(machine, gpus, _not_empty(machine, there), free=True)
    _check_slices(chosen, machine)
    return chosen


def _fewer(machine: Machine, count: int) -> str:
    """The hint where a machine has only that many devices."""
    if machine.accelerator == "cpu":
        return f"Use --gpus {count}, or for a trial --force: ranks then share cores."
    return f"Use --gpus {count}" if count else f"Change {VISIBLE}."


def free_first(machine: Machine, gpus: int | None, environ: Mapping[str, str]) -> tuple[int, ...]:
    """The devices that a job would get if it waited for nobody, the free ones first: what a plan is made for.

    gpus: how many; None: all that are free.
    """
    return _first(machine, gpus, _not_empty(machine, visible_devices(machine, environ)), free=False)


def _first(machine: Machine, gpus: int | None, there: VisibleDevices, *, free: bool) -> tuple[int, ...]:
    """The first of these devices, those that nobody uses first. free: raise BusyError rather than give one in use."""
    if machine.accelerator == "cpu":
        return there.indices[: min(CPU_RANKS, len(there.indices)) if gpus is None else gpus]
    busy = gpu_use.in_use(machine)
    unused = tuple(index for index in there.indices if index not in busy)
    count = (len(unused) or len(there.indices)) if gpus is None else gpus
    if gpus is None and not there.limit and any(gpu.parent is not None for gpu in machine.gpus):
        # "All free ones" means whole GPUs, or one slice where there are only slices: a job can't have several of them
        # (_check_slices), and would be refused for what nobody asked.
        whole = sum(gpu.index in there.indices and gpu.parent is None for gpu in machine.gpus)
        count = min(count, max(1, whole))
    if free and count > len(unused):
        raise _too_few(gpus, there, busy)
    return (*unused, *(index for index in there.indices if index in busy))[:count]


def notes(
    machine: Machine, chosen: tuple[int, ...], there: VisibleDevices, *, by_name: bool = False
) -> tuple[str, ...]:
    """Remarks on a choice: GPUs that were left to others, those that others use as well, and CPU ranks that share
    cores."""
    uses = gpu_use.in_use(machine)
    lines = []
    for index in dict.fromkeys((*there.indices, *chosen)):
        if index in uses and index in chosen:
            lines.append(f"{gpu_use.in_words(index, uses[index])}; it is used anyway")
        elif index in uses and not by_name:
            lines.append(f"{gpu_use.in_words(index, uses[index])}; it is left out")
    if machine.accelerator == "cuda":
        lines += machine.left_out
        dark = [gpu.index for gpu in machine.gpus if gpu.index in chosen and gpu.use and gpu.use.unknown]
        lines += [f"whether GPU {index} is in use is unknown: NVML doesn't say" for index in dark]
    elif len(chosen) > machine.cpu_cores:
        cores = _count_text(machine, machine.cpu_cores)
        lines.append(f"{len(chosen)} CPU ranks share {cores}, as they were forced to: it will be slow")
    return tuple(lines)


def visible_indices(machine: Machine, environ: Mapping[str, str]) -> tuple[int, ...]:
    """The devices that can be chosen from, in CUDA_VISIBLE_DEVICES' order. Raises DsrunError where it leaves none."""
    return _not_empty(machine, visible_devices(machine, environ)).indices


def cuda_uuids(machine: Machine, chosen: tuple[int, ...]) -> tuple[str, ...]:
    """The names by which CUDA_VISIBLE_DEVICES has to show devices; empty where their indices do: not for slices, nor
    beside a lost GPU, which NVML counts and CUDA may not."""
    by_index = {gpu.index: gpu for gpu in machine.gpus}
    if machine.accelerator == "cpu":
        return ()
    if not machine.left_out and all(by_index[index].parent is None for index in chosen):
        return ()
    return tuple(by_index[index].uuid for index in chosen)


def _not_empty(machine: Machine, there: VisibleDevices) -> VisibleDevices:
    if not there.indices:
        raise DsrunError(
            f"{there.limit.partition('=')[0] or 'this machine'} leaves no device",
            hint=f"Unset it, or name devices: {machine.indices}" if there.limit else "",
        )
    return there


def _because(there: VisibleDevices) -> str:
    return f" ({there.limit})" if there.limit else ""


def _too_few(gpus: int | None, there: VisibleDevices, busy: Mapping[int, GpuUse]) -> BusyError:
    taken = [index for index in there.indices if index in busy]
    total = len(there.indices)
    left = total - len(taken)
    request = "" if gpus is None else f"--gpus {gpus}: "
    how_many = f"only {left} of {total} GPUs {'is' if left == 1 else 'are'}" if left else "no GPU is"
    hint = f"Use --gpus {left}, or wait for more: --wait" if left else "Wait for them: --wait"
    # One that another dsrun holds is never shared: each counts on the memory that it saw free.
    shared = next((index for index in taken if not busy[index].holder), None)
    if shared is not None:
        hint += f". Or take what others use as well, by name: --devices {shared}"
    lines = [gpu_use.in_words(index, busy[index]) for index in taken]
    return BusyError(f"{request}{how_many} free{_because(there)}", lines, hint=hint)


def _count_text(machine: Machine, count: int) -> str:
    kind = "GPU" if machine.accelerator == "cuda" else "CPU core"
    text = f"{count} {kind}{'' if count == 1 else 's'}"
    return text if machine.accelerator == "cuda" else f"{text} ({machine.reason})"


def _check_wanted(wanted: tuple[int, ...], option: str, machine: Machine, there: VisibleDevices) -> None:
    """Raises DsrunError for devices that are divided, absent or hidden."""
    for index in wanted:
        if machine.accelerator == "cuda":
            _check_whole(index, option, machine)
    count = len(machine.indices)
    if absent := [index for index in wanted if index not in machine.indices]:
        message = f"{option}: no device {', '.join(map(str, absent))}; this machine has {_count_text(machine, count)}"
        if machine.left_out:
            choices = ",".join(map(str, machine.indices))
            raise DsrunError("\n  ".join([message, *machine.left_out]), hint=f"Choose from {choices}.")
        raise DsrunError(message, hint=f"Choose from {f'0-{count - 1}' if count > 1 else '0'}.")
    hidden = [index for index in wanted if index not in there.indices] if there.limit else []
    if hidden:
        raise DsrunError(
            f"{option} asks for {', '.join(map(str, hidden))}, but {there.limit} hides it",
            hint=f"Choose from {','.join(map(str, there.indices))}, or unset {VISIBLE}.",
        )


def _check_whole(index: int, option: str, machine: Machine) -> None:
    """Raises DsrunError for a GPU that is divided."""
    if not any(gpu.index == index and gpu.divided for gpu in machine.gpus):
        return
    slices = [f"{part.index} ({part.uuid}, {part.name})" for part in machine.gpus if part.parent == index]
    none = "It has none: nvidia-smi mig -cgi makes them."
    raise DsrunError(
        f"{option}: GPU {index} is divided (MIG mode): only its slices can be trained on",
        hint=f"Its slices: {', '.join(slices)}." if slices else none,
    )


def _check_slices(chosen: tuple[int, ...], machine: Machine) -> None:
    """A slice is for a job of one rank: CUDA shows a process one of them only (NVIDIA's MIG user guide)."""
    slices = [gpu for gpu in machine.gpus if gpu.index in chosen and gpu.parent is not None]
    if not slices or len(chosen) == 1 or machine.accelerator == "cpu":
        return
    first = slices[0]
    twins = [gpu for gpu in slices if gpu.parent == first.parent]
    numbers = " and ".join(str(gpu.index) for gpu in (twins if len(twins) > 1 else slices))
    if len(twins) > 1:
        why = f"{numbers} are slices of GPU {first.parent} (MIG), and NCCL refuses two ranks on one GPU"
        why += ' ("Duplicate GPU detected")'
    else:
        are = "is a slice (MIG)" if len(slices) == 1 else "are slices (MIG)"
        why = f"{numbers} {are}, and beside one CUDA shows a process no other GPU"
    message = f"devices {', '.join(map(str, chosen))}: {why}"
    raise DsrunError(message, hint=f"Give one slice: --devices {first.index}; or whole GPUs.")


def visible_devices(machine: Machine, environ: Mapping[str, str]) -> VisibleDevices:
    """The devices that CUDA_VISIBLE_DEVICES leaves, in its order. On a CPU machine it means nothing.

    Without it: the whole GPUs; where there is none, the slices.
    """
    text = environ.get(VISIBLE)
    if machine.accelerator == "cpu":
        return VisibleDevices(machine.indices)
    if text is None:
        whole = tuple(gpu.index for gpu in machine.gpus if gpu.parent is None and not gpu.divided)
        return VisibleDevices(whole or machine.indices)
    indices: list[int] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        if entry == "-1":
            break  # CUDA's own rule: it hides itself and all that follow
        matches = [gpu.index for gpu in machine.gpus if _is_meant(gpu, entry)]
        if len(matches) != 1:
            kind = "slice" if entry.startswith("MIG-") else "GPU"
            why = f"{entry} is the beginning of several names" if matches else f"there is no {kind} {entry}"
            hint = f"This machine has {', '.join(_names(machine))}."
            raise DsrunError(f"{VISIBLE}={text}: {why}", hint=hint)
        _check_whole(matches[0], f"{VISIBLE}={text}", machine)
        indices += matches
    if len(set(indices)) != len(indices):
        once = ",".join(map(str, dict.fromkeys(indices)))
        raise DsrunError(f"{VISIBLE}={text} names a GPU twice", hint=f"Name each once: {VISIBLE}={once}")
    return VisibleDevices(tuple(indices), f"{VISIBLE}={text}" if tuple(indices) != machine.indices else "")


def _is_meant(gpu: Gpu, entry: str) -> bool:
    """Whether an entry of CUDA_VISIBLE_DEVICES names a GPU: by index, by UUID, or by the beginning of its UUID."""
    if entry.isdecimal():
        return gpu.parent is None and gpu.index == int(entry)
    return entry.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(entry)


def _names(machine: Machine) -> Iterator[str]:
    for gpu in machine.gpus:
        part = "" if gpu.parent is None else f", a slice of {gpu.parent}"
        yield f"{gpu.index} ({gpu.uuid}{part}{', divided' if gpu.divided else ''})"


def parse_devices(text: str) -> tuple[int, ...]:
    """ "2,3" or "0-3,6" as indices, in the order given. Raises DsrunError for anything else."""
    indices: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or int(last) < int(first):
            raise DsrunError(f"--devices {text}: {part!r} is not a device", hint="Examples: 2,3 or 0-3")
        if int(last) >= MOST_DEVICES:
            raise DsrunError(f"--devices {text}: there is no device {last}", hint="Examples: 2,3 or 0-3")
        indices += range(int(first), int(last) + 1)
    if len(set(indices)) != len(indices):
        raise DsrunError(f"--devices {text} names a device twice")
    return tuple(indices)
