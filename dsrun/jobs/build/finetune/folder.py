"""The folder of a run, and what its ranks import."""

from __future__ import annotations

from pathlib import Path

from dsrun.data.cache import check_cache
from dsrun.errors import Problem
from dsrun.jobs.build.checks.packages import (
    SCORE_PACKAGES,
    absent_packages,
    check_torch_build,
    check_trackers,
)
from dsrun.jobs.build.finetune.draft import Draft
from dsrun.jobs.launchers import ON_THIS_MACHINE
from dsrun.jobs.spec import run_folder
from dsrun.jobs.spec.job import Job
from dsrun.options.groups import TrackerOptions
from dsrun.options.table import Source, select

TRAINING_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "pyarrow", "psutil", "matplotlib")


def check_folder(draft: Draft) -> None:
    """The run's folder is new, and what the ranks import is installed."""
    run_dir = draft.options.output_dir or Path("runs") / run_folder.stamped(
        f"{Path(draft.name).name}-{Path(str(draft.preset)).stem}"
    )
    draft.asked = draft.asked.filled(Source.DERIVED, {"output_dir": run_dir}, "model, preset and time")
    scored = draft.options.generate_rows > 0 and bool(draft.files and draft.files.evaluation)
    draft.problems += [*run_folder.check_new(run_dir), *check_packages(scored=scored)]
    if draft.placed is not None and draft.placed.launcher == ON_THIS_MACHINE:
        draft.problems += check_cache()
    draft.problems += check_torch_build(draft.placed)
    asked = select(TrackerOptions, draft.options)
    draft.problems += check_trackers(asked, draft.environ, draft.allocator.connection)
    if draft.asked.said("log_project") and not asked.log:
        draft.problems.append(
            Problem("is for --log, and there is none", "--log-project", "Add --log NAME, or leave it out.")
        )


def scores(job: Job) -> bool:
    """Whether held-out prompts are answered and compared."""
    return bool(job.data.eval_file) and job.training.generate_rows > 0


def check_packages(*, scored: bool) -> list[Problem]:
    """What a fine-tune's ranks need and is not installed. scored: held-out prompts are answered and compared."""
    return absent_packages((*TRAINING_PACKAGES, *(SCORE_PACKAGES if scored else ())), "training")
