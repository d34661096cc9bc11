"""Verdicts on setups: which ones fit, what they cost, and in which order to try them. Plain functions on numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from dsrun.planner import disk
from dsrun.planner.gpu_memory import (
    AT,
    WITH_LENGTHS,
    GpuMemory,
    gpu_memory,
    persistent,
    temporary,
    untracked_gib,
    within_step,
)
from dsrun.planner.host_memory import HostMemory, host_memory
from dsrun.planner.setup import Setup
from dsrun.planner.speed import Hardware, Speed, speed
from dsrun.planner.terms import MOMENTS
from dsrun.words import GIB

FITS, TIGHT, OUT = "fits", "tight", "out of memory"
ERROR = 0.06
"""The model's own: standard deviation of the logarithm of predicted by measured (a median error of 4 %)."""
TIGHT_FROM = 0.94
"""Share of the memory from which on a plan is tight: below it, 85 of 100 run or more."""
STUCK = {"fixed": 0.25, "padded": 1.0, "expandable": 0.1}
"""Share of the allocator's holes that it can't give back when the card is full.

Blocks that are free as a whole it returns, and tries again. Examples of one length find the same blocks in every step.
Padded batches leave pieces of blocks behind (a run of 5 x 24 GB died of 9.96 GiB of them, hiyouga/LLaMA-Factory#2744).
expandable: with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, whose pages are returned one by one.
"""
MEASURED_WITHIN = 1.2
"""The factor within which seconds are right on a machine that has been calibrated."""
MOST_ROWS = 4096
"""The largest micro batch that is looked for."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """How a machine's finished runs correct the planner's constants. The defaults change nothing."""

    moving: float = 1.0
    """Factor on what comes and goes on the GPU: activations, buckets, temporaries. Weights and states are counted, not
    estimated."""
    reserved: float = 1.0
    """Factor on what torch reserves beyond what is in use."""
    process_gib: float = 0.0
    """GiB of main memory that a rank's own process takes more (or less) than is assumed."""
    seconds: float = 1.0
    """Factor on a step's time."""
    lengths: float = 1.0
    """Factor on what depends on how long examples are: activations and logits."""
    gpu_gib: float = 0.0
    """GiB of a GPU that a rank takes more (or less) than is assumed, whatever its examples."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The hardware that is planned for."""

    gpus: int
    """Per node."""
    nodes: int
    gpu_bytes: float
    """Memory of each GPU: all, or what is free."""
    hardware: Hardware
    """Rates of the machines."""
    host_bytes: float | None = None
    """Per node; None where unknown."""
    nvme_bytes: float | None = None
    """Per node; None where unknown."""
    accelerator: str = "cuda"
    """"cuda", or "cpu" where the ranks train in host memory."""
    calibration: Calibration = Calibration()
    """Corrections by earlier runs on it."""
    cuda_build: bool = False
    """Whether torch there is built for CUDA, which takes memory in ranks on CPUs, too."""
    expandable: bool = False
    """Whether torch's allocator has expandable segments."""

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes


@dataclass(frozen=True, slots=True)
class Plan:
    """A setup, judged."""

    preset: str
    setup: Setup
    gpu: GpuMemory
    host: HostMemory
    speed: Speed
    nvme_bytes: float
    """Swap files on each node."""
    checkpoint_bytes: float
    """One checkpoint, of all nodes."""
    verdict: str
    """FITS, TIGHT or OUT."""
    used: float
    """Share of the scarcest memory that it needs; 1.0 is all of it, and runs in half of the cases."""
    reason: str
    """The memory that decides, in words."""
    scarce: str = ""
    """The scarcest memory: GPU, host or NVMe; empty where none is known."""
    demand: float = 0.0
    """Bytes of a GPU that it can't do without (see the function of that name)."""

    @property
    def chance(self) -> float:
        """The chance that it runs, 0 to 1: bench/planner.py compares it with published runs."""
        return chance(self.used)

    @property
    def at_peak(self) -> dict[str, float]:
        """Term -> its bytes at the GPU's peak, which they add up to; of a traced plan owner -> bytes."""
        if (traced := self.gpu.traced) is not None:
            return {owner: float(size) for owner, size in traced.replay.at_peak.items() if size}
        moment, peak = self.gpu.moment, self.gpu.allocated
        if moment not in AT:  # before the first step: the weights, and what is made of them
            weights = min(peak, self.gpu.terms["weights"])
            return {"weights": weights, moment: peak - weights}
        held = persistent(self.setup)
        shares = {name: share * self.gpu.terms.get(name, 0.0) for name, share in AT[moment].items()}
        if self.setup.engine == "deepspeed" and self.setup.stage == 0 and moment == "middle":
            shares.pop("reduce_copy", None)
        return {**held, **shares}

    @property
    def seconds_per_token(self) -> float:
        """Seconds a token over all ranks, by which plans are ranked."""
        return 1 / self.speed.tokens_per_second


def chance(used: float) -> float:
    """The chance that a run fits which is predicted to take this share of the memory: the error is log-normal."""
    return 0.5 * math.erfc(math.log(used) / (ERROR * math.sqrt(2))) if used > 0 else 1.0


def demand(setup: Setup, gpu: GpuMemory, *, expandable: bool = False) -> float:
    """Bytes of a GPU that a run can't do without: torch's peak, the holes that it can't give back, CUDA and NCCL."""
    if gpu.traced is not None:
        return gpu.traced.capacity + untracked_gib(setup.gpus) * GIB
    padded = setup.variable_lengths and setup.engine != "torch"
    stuck = STUCK["expandable" if expandable else "padded" if padded else "fixed"]
    within = max(gpu.peaks[moment] for moment in ("turn", "middle", "end", "step"))
    # Holes come of steps. What the flat copy at the start has reserved beyond them is given back whole.
    holes = stuck * max(0.0, gpu.reserved - max(within, gpu.peaks["flat"]))
    return max(gpu.needed, within + holes) + untracked_gib(setup.gpus) * GIB


def judge(
    preset: str,
    setup: Setup,
    budget: MemoryBudget,
    pace: Speed | None = None,
    *,
    traced: GpuMemory | None = None,
) -> Plan:
    """One setup against one budget. pace: a step's time, where it is known; traced: its memory by a trace."""
    gpu, host = traced or _gpu(setup, budget), _host(setup, budget)
    nvme = disk.nvme_bytes(setup)
    nothing_known = (0.0, "", "nothing to compare with: no memory was named")
    used, scarce, reason = max(_shares(setup, gpu, host, nvme, budget), default=nothing_known)
    return Plan(
        preset=preset,
        setup=setup,
        gpu=gpu,
        host=host,
        speed=pace or _speed(setup, budget),
        nvme_bytes=nvme,
        checkpoint_bytes=disk.checkpoint_bytes(setup),
        verdict=OUT if used > 1 else TIGHT if used > TIGHT_FROM else FITS,
        used=used,
        reason=reason,
        scarce=scarce,
        demand=demand(setup, gpu, expandable=budget.expandable),
    )


def fastest(preset: str, setups: Iterable[Setup], budget: MemoryBudget) -> Plan:
    """The first of `ranked`. Setups slower than one that fits are not judged: memory is the longer half of the work."""
    timed = [(_speed(setup, budget), setup) for setup in setups]
    best: list[Plan] = []
    for pace, setup in sorted(timed, key=lambda timed_setup: 1 / timed_setup[0].tokens_per_second):
        if best and 1 / pace.tokens_per_second > best[0].seconds_per_token and best[0].verdict == FITS:
            break
        best = ranked([*best, judge(preset, setup, budget, pace)])[:1]
    return best[0]


def is_out(setup: Setup, budget: MemoryBudget) -> bool:
    """Whether `judge` calls a setup out of memory, in a third of its time: most setups of a search don't fit."""
    if budget.accelerator == "cuda":
        needed = demand(setup, _gpu(setup, budget), expandable=budget.expandable)
        if needed > budget.gpu_bytes:
            return True
    if budget.host_bytes is not None and _host(setup, budget).peak > budget.host_bytes:
        return True
    return budget.nvme_bytes is not None and disk.nvme_bytes(setup) > budget.nvme_bytes


def _gpu(setup: Setup, budget: MemoryBudget) -> GpuMemory:
    """The memory of a rank's GPU, corrected by the machine's runs.

    The peaks above what is held all the time are scaled, and then the holes above the largest. What was measured of one
    model changes what has an example's length, and adds a constant.
    """
    gpu = gpu_memory(setup, room=budget.gpu_bytes - untracked_gib(setup.gpus) * GIB)
    calibration = budget.calibration
    if calibration == Calibration():
        return gpu
    within = within_step(setup, gpu.terms, names=WITH_LENGTHS)
    peaks = {
        name: gpu.held
        + (size - gpu.held) * (calibration.moving if size > gpu.held else 1)
        + (calibration.lengths - 1) * within.get(name, 0.0)
        + calibration.gpu_gib * GIB
        for name, size in gpu.peaks.items()
    }
    reserved = max(peaks.values()) + calibration.reserved * (gpu.reserved - gpu.allocated)
    scaled = {
        name: calibration.moving * gpu.terms[name] * (calibration.lengths if name in WITH_LENGTHS else 1)
        for name in temporary(setup)
    }
    return replace(
        gpu,
        terms={**gpu.terms, **scaled},
        peaks=peaks,
        reserved=reserved,
        smi=reserved + gpu.smi - gpu.reserved,
    )


def _host(setup: Setup, budget: MemoryBudget) -> HostMemory:
    """The main memory of a node, with each rank's process corrected by the machine's runs."""
    host = host_memory(setup, accelerator=budget.accelerator, cuda_build=budget.cuda_build)
    more = budget.calibration.process_gib * GIB * setup.ranks_per_node
    if not more:
        return host
    return replace(
        host,
        terms={**host.terms, "processes": max(0.0, host.terms["processes"] + more)},
        peaks={name: max(0.0, size + more) for name, size in host.peaks.items()},
    )


def _speed(setup: Setup, budget: MemoryBudget) -> Speed:
    """A step's time, scaled by the machine's runs where they were timed, and then surer."""
    pace, factor = speed(setup, budget.hardware), budget.calibration.seconds
    if factor == 1:
        return pace
    return replace(
        pace,
        seconds_per_step=pace.seconds_per_step * factor,
        tokens_per_second=pace.tokens_per_second / factor,
        terms={name: seconds * factor for name, seconds in pace.terms.items()},
        uncertain=MEASURED_WITHIN,
    )


def _shares(
    setup: Setup, gpu: GpuMemory, host: HostMemory, nvme: float, budget: MemoryBudget
) -> Iterator[tuple[float, str, str]]:
    """The share of each memory that is needed, the memory's name, and a text about it."""
    needs = [
        (
            "GPU",
            demand(setup, gpu, expandable=budget.expandable),
            budget.gpu_bytes,
            f" {MOMENTS[gpu.decisive]}",
        ),
        ("host", host.peak, budget.host_bytes, f" ({host.moment})"),
        ("NVMe", nvme, budget.nvme_bytes if nvme else None, ""),
    ]
    for name, needed, available, when in needs:
        if available is not None and (name != "GPU" or budget.accelerator == "cuda"):
            yield needed / available, name, f"{name}: {needed / GIB:.1f} of {available / GIB:.1f} GiB{when}"


def ranked(plans: Iterable[Plan]) -> list[Plan]:
    """Plans, the fastest first; a tight one with a chance of 60 % counts 1 / 0.6 times as long. Then those that are out
    of
    memory, the nearest miss first.

    Of equally fast ones the one that divides less comes first: what a plan can't see (hooks, more and smaller messages)
    only costs. Of equals then the one that takes the least of a GPU.
    """

    def key(plan: Plan) -> tuple[bool, float, int, float, str]:
        if plan.verdict == OUT:
            return True, plan.used, plan.setup.stage, plan.gpu.needed, plan.preset
        seconds = plan.seconds_per_token * (1 / plan.chance if plan.verdict == TIGHT else 1)
        return False, seconds, plan.setup.stage, plan.used, plan.preset

    return sorted(plans, key=key)


def largest_micro_batch(plan: Plan, budget: MemoryBudget) -> int:
    """The most examples per rank that still fit (0: not even one), with everything else as it is."""

    def fits(rows: int) -> bool:
        return judge(plan.preset, plan.setup.changed(micro_batch=rows), budget).verdict != OUT

    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= MOST_ROWS and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return min(low, MOST_ROWS)
