"""From set-ups to verdicts: what fits, what it costs, and in which order to try it. Plain functions on numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from dsrun.planner import disk
from dsrun.planner.gpu_memory import GIB, GpuMemory, around, gpu_memory, temporary
from dsrun.planner.host_memory import HostMemory, host_memory, ranks_per_node
from dsrun.planner.setup import Setup
from dsrun.planner.speed import Hardware, Speed, speed
from dsrun.planner.terms import MOMENTS

TIGHT = 0.92
"""Share of the memory from which on a plan is tight: the model's error (6-8 % in the median) is the rest."""
MEASURED_WITHIN = 1.2
"""The factor within which seconds are right for a machine that has been calibrated."""
FITS, NARROW, OUT = "fits", "tight", "out of memory"
VERDICTS = (FITS, NARROW, OUT)
WARY = 2.0
"""A plan that is tight may end in an out-of-memory error: it is taken only if it is so many times as fast."""
MOST_ROWS = 4096
"""The largest micro batch that is looked for."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a machine's finished runs say of the model's constants. The defaults change nothing.

    moving: factor on what comes and goes on the GPU (activations, buckets, temporaries; weights and states are counted,
    not estimated). reserved: factor on what torch holds beyond what is in use. process_gib: GiB of main memory that
    a rank's own process takes more (or less) than is assumed. seconds: factor on a step's time.
    """

    moving: float = 1.0
    reserved: float = 1.0
    process_gib: float = 0.0
    seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class Room:
    """What there is to plan for.

    gpus: per node. gpu_bytes: of each GPU, all or what is free. host_bytes, nvme_bytes: per node, None where unknown.
    accelerator: "cuda", or "cpu" where the ranks train in host memory. hardware: how fast it is.
    calibration: what earlier runs on it have shown.
    """

    gpus: int
    nodes: int
    gpu_bytes: float
    hardware: Hardware
    host_bytes: float | None = None
    nvme_bytes: float | None = None
    accelerator: str = "cuda"
    calibration: Calibration = Calibration()

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes


@dataclass(frozen=True, slots=True)
class Plan:
    """A set-up, judged.

    used: share of the scarcest memory that it needs (1.0 is all of it). scarce: which that is: GPU, host or NVMe; empty
    where none is known. reason: what decides, in words.
    """

    preset: str
    setup: Setup
    gpu: GpuMemory
    host: HostMemory
    speed: Speed
    nvme_bytes: float
    checkpoint_bytes: float
    verdict: str
    used: float
    reason: str
    scarce: str = ""

    @property
    def seconds_per_token(self) -> float:
        """Over all ranks: what plans are ranked by."""
        return 1 / self.speed.tokens_per_second


def judge(preset: str, setup: Setup, room: Room) -> Plan:
    """One set-up in one room."""
    known = room.calibration
    gpu = gpu_memory(setup)
    host = host_memory(setup, accelerator=room.accelerator)
    pace = speed(setup, room.hardware)
    if known != _NOTHING:
        gpu, host, pace = (
            _calibrated_gpu(setup, gpu, known),
            _calibrated_host(setup, host, known),
            _calibrated_speed(pace, known),
        )
    nvme = disk.nvme_bytes(setup)
    shares = _shares(setup, gpu, host, nvme, room)
    used, reason = max(shares)
    verdict = OUT if used > 1 else NARROW if used > TIGHT else FITS
    return Plan(
        preset=preset,
        setup=setup,
        gpu=gpu,
        host=host,
        speed=pace,
        nvme_bytes=nvme,
        checkpoint_bytes=disk.checkpoint_bytes(setup),
        verdict=verdict,
        used=used,
        reason=reason,
        scarce=reason.partition(":")[0] if ":" in reason else "",
    )


_NOTHING = Calibration()


def _calibrated_gpu(setup: Setup, gpu: GpuMemory, known: Calibration) -> GpuMemory:
    """The peaks above what is held all the time, scaled; and the holes above the peak."""
    held = gpu.held
    peaks = {
        name: held + known.moving * (size - held) if size > held else size for name, size in gpu.peaks.items()
    }
    allocated = max(peaks.values())
    reserved = allocated + known.reserved * (gpu.reserved - gpu.allocated)
    scaled = {name: known.moving * gpu.terms[name] for name in temporary(setup)}
    return replace(
        gpu,
        terms={**gpu.terms, **scaled},
        peaks=peaks,
        allocated=allocated,
        reserved=reserved,
        smi=reserved + gpu.smi - gpu.reserved,
    )


def _calibrated_host(setup: Setup, host: HostMemory, known: Calibration) -> HostMemory:
    more = known.process_gib * GIB * ranks_per_node(setup)
    peaks = {name: max(0.0, size + more) for name, size in host.peaks.items()}
    terms = {**host.terms, "processes": max(0.0, host.terms["processes"] + more)}
    return replace(host, terms=terms, peaks=peaks, peak=max(peaks.values()))


def _calibrated_speed(pace: Speed, known: Calibration) -> Speed:
    if known.seconds == 1:
        return pace
    return replace(
        pace,
        seconds_per_step=pace.seconds_per_step * known.seconds,
        tokens_per_second=pace.tokens_per_second / known.seconds,
        terms={name: seconds * known.seconds for name, seconds in pace.terms.items()},
        uncertain=MEASURED_WITHIN,
    )


def _shares(
    setup: Setup, gpu: GpuMemory, host: HostMemory, nvme: float, room: Room
) -> list[tuple[float, str]]:
    """Each memory's share in use, and what to say about it."""
    shares = []
    if room.accelerator == "cuda":
        needed = gpu.allocated + around(setup.gpus) * GIB
        shares.append(
            (needed / room.gpu_bytes, f"GPU: {_gib(needed)} of {_gib(room.gpu_bytes)} {MOMENTS[gpu.moment]}")
        )
    if room.host_bytes is not None:
        worst = max(host.peaks, key=lambda name: host.peaks[name])
        shares.append(
            (host.peak / room.host_bytes, f"host: {_gib(host.peak)} of {_gib(room.host_bytes)} ({worst})")
        )
    if room.nvme_bytes is not None and nvme:
        shares.append((nvme / room.nvme_bytes, f"NVMe: {_gib(nvme)} of {_gib(room.nvme_bytes)}"))
    return shares or [(0.0, "nothing to compare with: no memory was named")]


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def ranked(plans: Iterable[Plan]) -> list[Plan]:
    """The fastest first, but what is tight as if it took WARY times as long; what is out at last, by how far."""
    wary = {FITS: 1.0, NARROW: WARY}
    return sorted(
        plans,
        key=lambda plan: (
            plan.verdict == OUT,
            plan.used if plan.verdict == OUT else plan.seconds_per_token * wary[plan.verdict],
        ),
    )


def largest_micro_batch(plan: Plan, room: Room) -> int:
    """The most rows at a time that still fit (0: not even one), with everything else as it is."""

    def fits(rows: int) -> bool:
        return judge(plan.preset, replace(plan.setup, micro_batch=rows), room).verdict != OUT

    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= MOST_ROWS and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return min(low, MOST_ROWS)
