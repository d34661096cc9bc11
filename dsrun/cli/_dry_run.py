"""What --dry-run prints of a job: where its ranks run, its config, its environment, its commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from dsrun.jobs.job import AnyJob, ScriptJob
    from dsrun.jobs.placed import Reach


def show(job: AnyJob, reach: Reach, *, as_json: bool, resume: bool = False) -> None:
    """Print it. resume: it goes on from the newest whole checkpoint. Raises DsrunError for what --env has wrong."""
    from dsrun.cli._running import going_of
    from dsrun.jobs.job import ScriptJob
    from dsrun.jobs.layout import whole_checkpoints
    from dsrun.jobs.run import launch_of
    from dsrun.jobs.travel import shown

    going, environ = going_of(reach, job.launcher)
    launch = launch_of(job, environ, resume=resume)
    added = {name: value for name, value in environ.items() if os.environ.get(name) != value}
    env = shown({**added, **launch.env})
    travels = shown(going.wishes.env) if len(job.hosts) > 1 else {}
    checkpoints = whole_checkpoints(Path(job.run_dir)) if resume else []
    resume_from = str(checkpoints[-1]) if checkpoints else None
    commands = [*([launch.prepare] if launch.prepare else []), *launch.train]
    if as_json:
        import dataclasses
        import json

        from dsrun.jobs.placed import table

        everything: dict[str, Any] = {
            "job": dataclasses.asdict(job),
            "ranks": [row._asdict() for row in table(job.hosts)],
            "environment": env,
            "travels": travels,
            "commands": commands,
            "resume_from": resume_from,
        }
        click.echo(json.dumps(everything, ensure_ascii=False, indent=2))
        return
    from shlex import join, quote

    from dsrun.config.build import render_json
    from dsrun.jobs.placed import table_text

    click.echo(f"# run folder: {job.run_dir}" + (f", from {resume_from}" if resume_from else ""))
    click.echo(f"# {job.world_size} ranks ({job.accelerator}), launcher {job.launcher}")
    click.echo("".join(f"#   {line}\n" for line in table_text(job.hosts).splitlines()), nl=False)
    if job.ds_config is not None:
        click.echo(f"\n# deepspeed.json\n{render_json(job.ds_config)}")
    click.echo("\n# environment, on top of yours")
    for name, value in env.items():
        click.echo(f"export {name}={quote(value)}")
    if travels:
        click.echo("\n# of yours, to the other hosts\n# " + " ".join(travels))
    if isinstance(job, ScriptJob):
        click.echo(f"\n# each rank runs, in {job.cwd}\n# {join(rank_command(job))}")
    click.echo("\n# commands")
    if launch.prepare:
        click.echo(join(launch.prepare))
    for host, words in zip(job.hosts, launch.train, strict=True):
        click.echo((f"# on {host.host}\n" if len(job.hosts) > 1 else "") + join(words))


def rank_command(job: ScriptJob) -> list[str]:
    """What a rank does, as a command of Python's."""
    local_rank = ["--local_rank=N"] if job.local_rank else []
    return ["python", *(["-m"] if job.module else []), job.script, *local_rank, *job.args]
