"""`dsrun resume`: continue a run."""

from __future__ import annotations

from typing import Any

import click

from dsrun.cli._running import going_options, save_option
from dsrun.cli._where import where_options
from dsrun.cli.finetune import PATHS
from dsrun.cli.finetune import command as finetune


@click.command()
@click.argument("run")
@click.option("--preset", help="Go on with another division of the model: zero3, zero2-offload, ...")
@where_options
@going_options
@save_option
@click.option("--wait", is_flag=True, help="Wait for GPUs of this machine that others use.")
@click.option("--force", is_flag=True, help="Continue what is predicted to run out of memory.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def command(ctx: click.Context, /, run: str, *, wait: bool, as_json: bool, **options: Any) -> None:
    """Continue RUN from its newest whole checkpoint, or from its beginning where it has none.

    On other devices, more of them or fewer, and with another preset, if you say so: losses go on as if nothing had
    happened. RUN is a run's folder, or its name in runs/. It is what `dsrun finetune MODEL --output-dir RUN --resume`
    does.
    """
    from dsrun.jobs import runs

    found = runs.read(runs.named(run))
    model = found.job.model
    ctx.invoke(
        finetune,
        model=model.location if model.source in PATHS else model.name,
        output_dir=found.path,
        wait=wait,
        resume=True,
        train_file=None,  # `invoke` would take what click has where an option may be repeated: ()
        as_json=as_json,
        **options,
    )
