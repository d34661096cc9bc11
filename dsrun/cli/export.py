"""`dsrun export` (runs): the model of a run's checkpoint, in transformers' format."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsrun.cli.output.results import print_json
from dsrun.cli.parsing.completion import runs
from dsrun.cli.parsing.options import TableCommand, given, options_of
from dsrun.errors import DsrunError, raise_all
from dsrun.options.commands import ExportOptions

if TYPE_CHECKING:
    from dsrun.models.hub_push import PushTarget


@click.command(cls=TableCommand)
@click.argument("run", shell_complete=runs)
@options_of(ExportOptions)
def command(run: str, **values: Any) -> None:
    """Write the model of a checkpoint of RUN, as the run's end would have written it. No GPU is used.

    RUN is a run's folder, or its name in runs/. Every division of a checkpoint is read: ZeRO 0 to 3, with or without
    offload to the CPU, LoRA and P-Tuning. What was trained beside a model is merged as the run would have merged it.

    \b
    dsrun export runs/mine
    dsrun export runs/mine --checkpoint 2000 -o models/mine-2000
    dsrun export runs/mine --push my-lab/mine
    """
    from dsrun.cli.jobs.running import ending
    from dsrun.job import run_folder
    from dsrun.jobs.assembly.checks import disk_check
    from dsrun.jobs.assembly.checks.packages import absent_packages
    from dsrun.jobs.launchers.common import environment
    from dsrun.jobs.runs import exporting, past_runs
    from dsrun.models import hub_push, peft_methods, resolve

    options = given(ExportOptions, values).options
    if options.public and options.push is None:
        raise DsrunError("says who may see what is pushed", where="--public", hint="Give --push, too.")
    run_read = past_runs.read(past_runs.named(run))
    job = exporting.job_of(run_read, options.export_format)
    make_request = exporting.pushed if options.push else exporting.request
    request = make_request(run_read, job, options.checkpoint, options.output, digests=options.digests)
    resolve.check_export_format(job.model, job.training.export_format)
    folders = [run_read.path if options.output is None else options.output]
    hub_package = ("huggingface_hub",) if options.push else ()
    problems = [
        *peft_methods.check_export(job.peft, job.training.export_format),
        *peft_methods.check_packages(job.peft),
        *absent_packages(("torch", "deepspeed", "transformers", "accelerate", *hub_package), "this"),
    ]
    if request.checkpoint is not None:
        problems += (problem for folder in folders for problem in disk_check.check_export(job, folder))
    raise_all(problems)
    target = hub_push.target(options.push, public=options.public) if options.push else None
    doing = f"writing the model from {request.checkpoint}" if request.checkpoint else "looking at the model"
    click.echo(doing, err=True)
    # Into the run's own folder nothing is written beside a dsrun that works there; elsewhere it is in nobody's way.
    held = run_folder.held(run_read.path) if options.output is None else nullcontext()
    with ending("No model was written." if request.checkpoint else "Nothing was pushed."), held:
        result = exporting.carry_out(request, {**os.environ, **environment.of_checkout(os.environ)})
    if target:
        result["pushed"] = _push(
            Path(result["folders"][exporting.main_kind(result["folders"])]), target, run_read.path
        )
    if options.as_json:
        value = {"run": run_read.path, "checkpoint": request.checkpoint, **result}
        print_json("export", value)
        return
    for kind, folder in result["folders"].items():
        click.echo(f"{kind:<14} {folder}")
    if target:
        click.echo(f"{'pushed':<14} {result['pushed']}")


def _push(folder: Path, target: PushTarget, run: Path) -> str:
    """Push a folder that was looked at; returns the commit's address."""
    from dsrun.cli.jobs.running import ending
    from dsrun.models import hub_push

    raise_all(hub_push.too_large(folder))
    seen = "everybody may see it" if target.public else "private"
    click.echo(f"pushing {folder} to {target.repository} ({seen})", err=True)
    with ending("Nothing of the model is on the Hub."):
        return hub_push.push(folder, target, f"Model of {run.name}, by dsrun")
