"""The folder of a run, and what its ranks import."""

from __future__ import annotations

from pathlib import Path

from dsrun.data.cache import check_cache
from dsrun.errors import Findings, Problem
from dsrun.job import run_folder
from dsrun.job.job import Job
from dsrun.jobs.allocation.allocation import Allocation
from dsrun.jobs.allocation.request import ConnectionOptions
from dsrun.jobs.assembly.checks.packages import (
    SCORE_PACKAGES,
    absent_packages,
    check_torch_build,
    check_trackers,
)
from dsrun.jobs.assembly.finetune.data import Files
from dsrun.jobs.assembly.finetune.stages import Requested, WithModel
from dsrun.jobs.launchers import ON_THIS_MACHINE
from dsrun.options.declare import select
from dsrun.options.layers import Layer, Source
from dsrun.options.table import TrackerOptions

TRAINING_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "pyarrow", "psutil", "matplotlib")


def check_folder(
    requested: Requested,
    preset: str,
    files: Files | None,
    allocation: Allocation | None,
    *,
    connection: ConnectionOptions,
    findings: Findings,
) -> Layer:
    """The run's folder, which is new, once what the ranks import is looked for. files, allocation: None where they
    can't be had."""
    options = requested.options
    run_dir = options.output_dir or Path("runs") / run_folder.stamped(
        f"{Path(requested.model.name if isinstance(requested, WithModel) else requested.name).name}-{Path(preset).stem}"
    )
    scored = options.generate_rows > 0 and bool(files and files.evaluation)
    findings.problems.extend([*run_folder.check_new(run_dir), *check_packages(scored=scored)])
    if requested.launcher == ON_THIS_MACHINE:
        findings.problems.extend(check_cache())
    findings.problems.extend(check_torch_build(allocation))
    trackers = select(TrackerOptions, options)
    findings.problems.extend(check_trackers(trackers, requested.environ, connection))
    if requested.resolved.said("log_project") and not trackers.log:
        fault, hint = "is for --log, and there is none", "Add --log NAME, or leave it out."
        findings.problems.append(Problem(fault, "--log-project", hint))
    return Layer(Source.DERIVED, {"output_dir": run_dir}, "model, preset and time")


def scores(job: Job) -> bool:
    """Whether held-out prompts are answered and compared."""
    return bool(job.data.eval_file) and job.training.generate_rows > 0


def check_packages(*, scored: bool) -> list[Problem]:
    """Problems of packages that a fine-tune's ranks lack. scored: held-out prompts are answered and compared."""
    return absent_packages((*TRAINING_PACKAGES, *(SCORE_PACKAGES if scored else ())), "training")
