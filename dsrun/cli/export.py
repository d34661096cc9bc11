"""`dsrun export` (runs): the model of a run's checkpoint, in transformers' format."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import click

from dsrun.cli._options import TableCommand, given, options_of
from dsrun.options.commands import ExportOptions


@click.command(cls=TableCommand)
@click.argument("run")
@options_of(ExportOptions)
def command(run: str, **values: Any) -> None:
    """Write the model of a checkpoint of RUN, as the run's end would have written it. No GPU is used.

    RUN is a run's folder, or its name in runs/. Every division of a checkpoint is read: ZeRO 0 to 3, with or without
    offload to the CPU, LoRA and P-Tuning. What was trained beside a model is merged as the run would have merged it.

    \b
    dsrun export runs/mine
    dsrun export runs/mine --checkpoint 2000 -o models/mine-2000
    """
    from dsrun.cli._running import ending
    from dsrun.errors import DsrunError
    from dsrun.jobs.build.checks import disk_check
    from dsrun.jobs.build.checks.packages import absent_packages
    from dsrun.jobs.launchers.common import environment
    from dsrun.jobs.runs import exporting, past_runs
    from dsrun.jobs.spec import run_folder
    from dsrun.models import peft_methods, resolve

    options = given(ExportOptions, values).options
    found = past_runs.read(past_runs.named(run))
    job = exporting.job_of(found, options.export_format)
    request = exporting.request(found, job, options.checkpoint, options.output)
    resolve.check_export_format(job.model, job.training.export_format)
    folders = [found.path if options.output is None else options.output]
    problems = [
        *peft_methods.check_export(job.peft, job.training.export_format),
        *peft_methods.check_packages(job.peft),
        *absent_packages(("torch", "deepspeed", "transformers", "accelerate"), "this"),
        *(problem for folder in folders for problem in disk_check.check_export(job, folder)),
    ]
    if problems:
        raise DsrunError(problems)
    click.echo(f"writing the model from {request.checkpoint}", err=True)
    held = run_folder.held(found.path) if options.output is None else nullcontext()
    with ending("No model was written."), held:
        result = exporting.carry_out(request, {**os.environ, **environment.of_checkout(os.environ)})
    if options.as_json:
        from dsrun.files import json_text

        click.echo(json_text({"run": found.path, "checkpoint": request.checkpoint, **result}, indent=2))
        return
    for kind, folder in result["folders"].items():
        click.echo(f"{kind:<14} {folder}")
