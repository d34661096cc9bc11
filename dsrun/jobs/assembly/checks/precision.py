"""Whether the devices train in a precision, and the job in fp8 (--fp8), looked at before the start."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun import packages
from dsrun.cluster import cpu_types
from dsrun.cluster.devices import Machine
from dsrun.errors import Problem
from dsrun.jobs.assembly.checks.kernels import Devices
from dsrun.options.commands import FinetuneOptions
from dsrun.options.table import NO_FP8
from dsrun.versions import version

WHERE = "--precision"
FIRST_FP8 = (8, 9)
"""The first GPUs with fp8 units: Ada; then Hopper and Blackwell."""
TORCHAO = "torchao"
TORCHAO_FIRST = (0, 10)
"""Has its recipes by name (Float8LinearConfig.from_recipe_name)."""
UNCOMPILED = (
    "--fp8 without --compile: each cast to 8 bits is a kernel of its own, and takes what the products save"
)


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


def fp8_problems(options: FinetuneOptions, *, fsdp: bool) -> Iterator[Problem]:
    """Why a job can't compute in fp8, each with what can be done, whatever its devices. fsdp: FSDP trains it."""
    if options.fp8 == NO_FP8:
        return
    known = (
        (not fsdp, "it is for FSDP, which gathers weights as they are multiplied", "Take --preset fsdp."),
        (options.precision != "bf16", f"it stands beside bf16, and the job computes in {options.precision}",
         "Take --precision bf16."),
        (options.method != "full", f"not tried with --method {options.method}, whose base has no gradients",
         "Take --method full."),
        (bool(options.tile_tokens), f"not tried together with --tile-tokens {options.tile_tokens}",
         "Take --tile-tokens 0."),
        (options.official, "--official computes as ChatGLM2's own script does", "Leave one of the two out."),
    )  # fmt: skip
    for bad, fault, hint in known:
        if bad:
            yield Problem(f"can't be: {fault}", f"--fp8 {options.fp8}", hint)
    there = packages.installed_version(TORCHAO)
    first = ".".join(map(str, TORCHAO_FIRST))
    if there is None or version(there) < TORCHAO_FIRST:
        has = "is not installed" if there is None else f"{there} is installed, and it takes {first}"
        yield Problem(
            f"{TORCHAO} {has}", f"--fp8 {options.fp8}", f"Install it: pip install '{TORCHAO}>={first}'"
        )


def fp8_device_problems(fp8: str, devices: Devices) -> list[Problem]:
    """Problems of GPUs that have no fp8 units. On CPUs it is emulated."""
    if fp8 == NO_FP8 or not devices.capability or devices.capability >= FIRST_FP8:
        return []
    wants, has = (".".join(map(str, numbers[:2])) for numbers in (FIRST_FP8, devices.capability))
    fault = f"can't be: fp8 units come with compute capability {wants}, and a GPU has {has}"
    return [Problem(fault, f"--fp8 {fp8}", "Leave it out: bf16 is what these GPUs are fast in.")]
