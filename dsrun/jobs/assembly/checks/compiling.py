"""Whether a job's layers can be compiled: --compile.

torch writes the code of each layer's graph in C++ for CPUs and in Triton for GPUs, whose launchers are C: either needs
a compiler and Python's headers where the ranks run.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsrun import packages
from dsrun.ds_config import offloads, zero_stage
from dsrun.errors import Problem
from dsrun.jobs.launchers import ON_THIS_MACHINE
from dsrun.options.commands import FinetuneOptions
from dsrun.options.declare import flag_of, select
from dsrun.options.layers import NOTHING, Layer, Source
from dsrun.options.optimizers import MUON
from dsrun.options.table import ParallelismOptions
from dsrun.planner import gpus
from dsrun.planner.analysis import measured

if TYPE_CHECKING:
    from dsrun.job.job import Job

FLAG = flag_of(FinetuneOptions, "compile")
COMPILERS = {"cpu": ("CXX", ("g++", "c++", "clang++")), "cuda": ("CC", ("gcc", "cc", "clang"))}
"""Device -> the variable that names a compiler, and what is looked for without it."""
AT_STAGE_3 = (
    "ZeRO-3 gathers and releases weights inside of each layer, which would end its graph at each of them",
    "Take --preset fsdp, which gathers whole layers, or zero2.",
)
"""Why not there, and what instead."""
NOT_MODELLED = f"{FLAG}: memory and seconds are predicted without it; how much it saves isn't modelled"


def problems(
    options: FinetuneOptions, *, accelerator: str, stage: int, environ: Mapping[str, str] | None = None
) -> Iterator[Problem]:
    """Why they can't, each with what can be done. stage: ZeRO's; 0 for FSDP, whose hooks are around whole layers.

    environ: the ranks'; None where they run on hosts that are not looked at.
    """
    if not options.compile:
        return
    words = select(ParallelismOptions, options)
    known = (
        (stage == 3, *AT_STAGE_3),
        (words.group > 1, f"not tried together with {words.words}", "Leave one of the two out."),
        (options.method == "ptuning", "its prefix is a cache, which every layer would be compiled for anew",
         "Take --method lora or full."),
        (options.method == "qlora", "not tried on weights in 4 bits", "Take --method lora."),
        (bool(options.tile_tokens), f"not tried together with --tile-tokens {options.tile_tokens}",
         "Take --tile-tokens 0, or leave it out."),
        (options.official, "--official computes as ChatGLM2's own script does", "Leave one of the two out."),
        (options.optimizer == MUON and accelerator == "cpu",
         "on CPUs Muon has torch.compile switched off, whose start takes minutes", "Take another optimizer."),
    )  # fmt: skip
    refused = [Problem(f"can't be: {fault}", FLAG, hint) for bad, fault, hint in known if bad]
    yield from refused
    if not refused and environ is not None:
        yield from _tools(accelerator, environ)


def measured_default(
    options: FinetuneOptions,
    *,
    gpu_names: Collection[str],
    fsdp: bool,
    ds_config: Mapping[str, Any],
    environ: Mapping[str, str],
) -> Layer:
    """--compile where it was measured to pay on GPUs of this kind; NOTHING where nobody has measured, or it can't be.

    gpu_names: as NVML calls the job's GPUs. ds_config: empty with FSDP.
    """
    stage, known = zero_stage(ds_config), {gpus.recognise(name) for name in gpu_names}
    kind = known.pop() if len(known) == 1 else None
    if kind is None or stage == 3 or offloads(ds_config):
        return NOTHING
    found = measured.compiled(kind.name, "fsdp" if fsdp else "zero")
    if found is None or found.gain < measured.WORTH_IT:
        return NOTHING
    if options.max_steps is not None and not found.pays_in(options.max_steps):
        return NOTHING
    wanted = replace(options, compile=True)
    if any(problems(wanted, accelerator="cuda", stage=stage, environ=environ)):
        return NOTHING
    why = f"on {kind.name} a step took {found.seconds_with / found.seconds_without:.0%} of its time with it"
    note = f"layers are compiled: {why} ({found.with_what}; {found.day}), for {found.start_seconds:.0f} s at the start"
    return Layer(Source.DERIVED, {"compile": True}, why, note=f"{note}; --no-compile leaves it out")


def resumed(job: Job, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Problems of a run that goes on, on this machine's devices or with another preset."""
    if job.training.compile and job.zero_stage == 3:
        fault, hint = AT_STAGE_3
        yield Problem(f"the run compiles its layers ({FLAG}): {fault}", f"--preset {job.preset}", hint)
    elif job.training.compile and job.launcher == ON_THIS_MACHINE:
        yield from _tools(job.accelerator, environ)


def _tools(accelerator: str, environ: Mapping[str, str]) -> Iterator[Problem]:
    """The tools that this machine lacks."""
    import shutil
    import sysconfig

    variable, names = COMPILERS[accelerator if accelerator in COMPILERS else "cuda"]
    wanted = (environ[variable],) if environ.get(variable) else names
    if not any(shutil.which(name.split()[0], path=environ.get("PATH", os.defpath)) for name in wanted):
        yield Problem(
            f"can't be: there is no compiler ({', '.join(wanted)})", FLAG,
            f"Install one (build-essential, or name it in {variable}), or leave it out.",
        )  # fmt: skip
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not headers.is_file():
        yield Problem(
            f"can't be: {headers} is missing",
            FLAG,
            "Install Python's headers (python3-dev), or leave it out.",
        )
    if accelerator == "cuda" and packages.installed_version("triton") is None:
        yield Problem("can't be: triton is not installed", FLAG, "Install it: pip install triton")
