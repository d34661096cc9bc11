"""`dsrun export` (runs): the model of a run's checkpoint, in transformers' format."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from dsrun.cli.output.results import print_json
from dsrun.cli.parsing.completion import runs
from dsrun.cli.parsing.options import TableCommand, given, options_of
from dsrun.errors import raise_all
from dsrun.options.commands import ExportOptions


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
    from dsrun.cli.jobs import pushing
    from dsrun.cli.jobs.running import ending
    from dsrun.job import run_folder
    from dsrun.jobs.assembly.checks import disk_check
    from dsrun.jobs.assembly.checks.packages import absent_packages
    from dsrun.jobs.launchers.common import environment
    from dsrun.jobs.runs import exporting, past_runs
    from dsrun.models import peft_methods, resolve

    options = given(ExportOptions, values).options
    pushing.check_public(options)
    run_read = past_runs.read(past_runs.named(run))
    job = exporting.job_of(run_read, options.export_format)
    make_request = exporting.pushed if options.push else exporting.request
    request = make_request(run_read, job, options.checkpoint, options.output, digests=options.digests)
    resolve.check_export_format(job.model, job.training.export_format)
    folders = [run_read.path if options.output is None else options.output]
    problems = [
        *peft_methods.check_export(job.peft, job.training.export_format),
        *peft_methods.check_packages(job.peft),
        *absent_packages(("torch", "deepspeed", "transformers", "accelerate"), "this"),
    ]
    if request.checkpoint is not None:
        problems += (problem for folder in folders for problem in disk_check.check_export(job, folder))
    raise_all(problems)
    target = pushing.goal(options)
    doing = f"writing the model from {request.checkpoint}" if request.checkpoint else "looking at the model"
    click.echo(doing, err=True)
    # Into the run's own folder nothing is written beside a dsrun that works there; elsewhere it is in nobody's way.
    held = run_folder.held(run_read.path) if options.output is None else nullcontext()
    with ending("No model was written." if request.checkpoint else "Nothing was pushed."), held:
        result = exporting.carry_out(request, {**os.environ, **environment.of_checkout(os.environ)})
    if target:
        folder = Path(result["folders"][exporting.main_kind(result["folders"])])
        result["pushed"] = pushing.push_folder(folder, target, run_read.path)
    if options.as_json:
        value = {"run": run_read.path, "checkpoint": request.checkpoint, **result}
        print_json("export", value)
        return
    for kind, folder in result["folders"].items():
        click.echo(f"{kind:<14} {folder}")
    if target:
        click.echo(f"{'pushed':<14} {result['pushed']}")
