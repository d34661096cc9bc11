"""`dsrun resume`: continue a run."""

from __future__ import annotations

import click

from dsrun.cli.finetune import PATHS, POSITIVE
from dsrun.cli.finetune import command as finetune


@click.command()
@click.argument("run")
@click.option("--gpus", type=POSITIVE, help="How many GPUs (or CPU ranks): as many as before.")
@click.option("--devices", help='Which devices, as nvidia-smi counts: "2,3" or "0-3".')
@click.option("--wait", is_flag=True, help="Wait for GPUs that others use.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def command(
    ctx: click.Context, run: str, *, gpus: int | None, devices: str | None, wait: bool, as_json: bool
) -> None:
    """Continue RUN from its newest whole checkpoint, or from its beginning where it has none.

    RUN is a run's folder, or its name in runs/. It is what `dsrun finetune MODEL --output-dir RUN --resume` does.
    """
    from dsrun.jobs import runs

    found = runs.read(runs.named(run))
    model = found.job.model
    ctx.invoke(
        finetune,
        model=model.location if model.source in PATHS else model.name,
        output_dir=found.path,
        gpus=gpus,
        devices=devices,
        wait=wait,
        resume=True,
        as_json=as_json,
    )
