"""Whether the devices train in a precision, looked at before the start."""

from __future__ import annotations

from dsrun.cluster import cpu_types
from dsrun.cluster.devices import Machine
from dsrun.errors import Problem

WHERE = "--precision"


def problems(precision: str | None, machine: Machine) -> list[Problem]:
    """Problems for which DeepSpeed refuses to start (_do_sanity_check in runtime/engine.py). machine: with the job's
    GPUs."""
    if precision != "fp16":
        return []
    if machine.accelerator == "cpu":
        if cpu_types.has_fp16():
            return []
        hint = "Take --precision bf16 (half the memory) or fp32 (exact, the default on a CPU)."
        return [Problem("is fp16, which this CPU can't train in (DeepSpeed refuses it)", WHERE, hint)]
    if machine.takes_fp16:
        return []
    old = next(gpu for gpu in machine.gpus if gpu.compute_capability < (7, 0))
    return [
        Problem(
            f"is fp16, which DeepSpeed refuses on GPUs below compute capability 7.0: {old.name}",
            WHERE,
            "Take fp32, or set DS_ALLOW_DEPRECATED_FP16=1 (from 6.0 on), which DeepSpeed has no tests for.",
        )
    ]


def notes(precision: str | None, machine: Machine) -> tuple[str, ...]:
    """Remarks on what trains unlike one would think: bf16 on GPUs without it."""
    if precision != "bf16" or machine.accelerator == "cpu" or machine.half_precision == "bf16":
        return ()
    old = next(gpu for gpu in machine.gpus if gpu.compute_capability < (8, 0))
    own = "fp16" if machine.takes_fp16 else "fp32"
    return (
        f"--precision bf16: {old.name} has none, PyTorch emulates it, many times slower; {own} is what it is fast in",
    )
