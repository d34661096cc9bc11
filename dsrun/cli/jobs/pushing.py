"""The model of a run to the Hugging Face Hub: what is asked before anything starts, and the push at the end."""

from __future__ import annotations

import os
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Any

import click

from dsrun.cli.jobs.running import ending, say
from dsrun.errors import DsrunError, raise_all
from dsrun.options.commands import ExportOptions, FinetuneOptions
from dsrun.options.table import NO_EXPORT

if TYPE_CHECKING:
    from dsrun.job.job import Job
    from dsrun.models.hub_push import PushTarget


def goal(options: ExportOptions | FinetuneOptions) -> PushTarget | None:
    """The repository of --push, as the Hub has it now; None without the option.

    Raises DsrunError where nothing can be pushed there: a bad name, no token, no huggingface_hub, a network that is
    forbidden or broken, a repository that others may see or may not.
    """
    from dsrun.jobs.assembly.checks.packages import absent_packages
    from dsrun.models import hub_push

    check_public(options)
    if options.push is None:
        return None
    raise_all(absent_packages(("huggingface_hub",), hub_push.OPTION))
    return hub_push.target(options.push, public=options.public)


def check_public(options: ExportOptions | FinetuneOptions) -> None:
    """Raise DsrunError for --public without --push."""
    if options.public and options.push is None:
        raise DsrunError("says who may see what is pushed", where="--public", hint="Give --push, too.")


def check_model(job: Job, options: FinetuneOptions) -> None:
    """Raise DsrunError where a job is to push a model and writes none."""
    if options.push is not None and job.training.export_format == NO_EXPORT:
        raise DsrunError(
            f"pushes the model, and --export-format {NO_EXPORT} writes none",
            where="--push",
            hint="Leave one of the two out.",
        )


def push_folder(folder: Path, target: PushTarget, run: Path) -> str:
    """Push a folder that was looked at; returns the commit's address. Raises DsrunError."""
    from dsrun.models import hub_push

    raise_all(hub_push.too_large(folder))
    seen = "everybody may see it" if target.public else "private"
    say(f"pushing {folder} to {target.repository} ({seen})")
    with ending("Nothing of the model is on the Hub."):
        return hub_push.push(folder, target, f"Model of {run.name}, by dsrun")


def push_result(job: Job, options: FinetuneOptions, result: dict[str, Any]) -> dict[str, str]:
    """Push the model of a run that ended well; returns the commit's address or the fault, for the result.

    The run stays finished whatever the Hub says: a fault is one line, with the command that pushes later. What made
    the model worse isn't pushed.
    """
    from dsrun.jobs.launchers.common import environment
    from dsrun.jobs.runs import exporting

    if options.push is None:
        return {}
    run = Path(job.run_dir)
    later = join(["dsrun", "export", job.run_dir, "--push", options.push, *["--public"] * options.public])
    try:
        if result["worse"]:
            raise DsrunError("the run ended worse than it began")
        target = goal(options)  # who pushed there meanwhile is no matter of this run's beginning
        if target is None:
            raise RuntimeError("a push without a repository")
        request = exporting.of_end(job, run)
        if request is None:
            raise DsrunError("the run wrote no model")
        exporting.carry_out(request, {**os.environ, **environment.of_checkout(os.environ)})
        address = push_folder(Path(*request.folders.values()), target, run)
    except DsrunError as error:
        fault = "; ".join(problem.what for problem in error.problems)
        say(
            f"The model is not on the Hub: {fault}\n  The run itself is finished. Push its model later: {later}"
        )
        return {"push_failed": fault}
    if not options.as_json:
        click.echo(f"pushed      {address}")
    return {"pushed": address}
