"""`dsrun rerun`: the same job again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dsrun.cli._where import where_options


@click.command()
@click.argument("run")
@click.option(
    "--output-dir", type=click.Path(path_type=Path), help="The new run's folder.  [default: beside RUN]"
)
@where_options
@click.option("--wait", is_flag=True, help="Wait for GPUs of this machine that others use.")
@click.option("--force", is_flag=True, help="Start what is predicted to run out of memory.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    run: str, *, output_dir: Path | None, wait: bool, force: bool, as_json: bool, **options: Any
) -> None:
    """Do the job of RUN again from its beginning, in a new folder: same model, data, config, seed and ranks.

    It runs where RUN ran: on as many free devices of this machine, or on the same devices of the same hosts.

    RUN is a run's folder, or its name in runs/. It is refused where the data or the model have changed since, as far
    as the run knows what they were. Of a script's run the same command is started anew.
    """
    import os
    from math import inf

    from dsrun.cli import finetune
    from dsrun.cli._where import reach_of
    from dsrun.cluster.devices import detect
    from dsrun.jobs import claims, runs
    from dsrun.jobs.repeat import repeated

    def say(line: str) -> None:
        click.echo(line, err=True)

    found = runs.read(runs.named(run))
    if found.script:
        from dsrun.cli import launch

        launch.again(found, output_dir=output_dir, wait=wait, as_json=as_json, options=options)
        return
    machine = detect(os.environ)
    reach, wait_min = reach_of(options, again=True), inf if wait else None
    with claims.claim(
        machine, os.environ, lambda: detect(os.environ), say, reach=reach, wait_min=wait_min
    ) as claim:
        job, notes = repeated(
            found, machine, os.environ, output_dir=output_dir, force=force, take=claim, **options
        )
        claim.name(job.run_dir)
        for note in notes:
            say(f"note: {note}")
        finetune.run(job, claim.machine, as_json, resume=False, reach=reach)
