"""`dsrun resume` (jobs): continue a run from a checkpoint."""

from __future__ import annotations

from typing import Any

import click

from dsrun.cli import finetune
from dsrun.cli.parsing.completion import runs
from dsrun.cli.parsing.options import TableCommand, given, options_of
from dsrun.options.commands import FinetuneOptions, ResumeOptions
from dsrun.options.declare import entries
from dsrun.options.layers import Resolved


class Resuming(TableCommand):
    """Resume's options are few: what is trained, and how, is the run's."""

    def instead(self, option: str) -> str:
        """An option of finetune's that is settled in a run."""
        from dsrun.trainers.other_names import ours

        if ours(option, entries(FinetuneOptions)) is None:
            return ""
        return "A run goes on as it began. With that changed: dsrun finetune, in another --output-dir."


@click.command(cls=Resuming)
@click.argument("run", shell_complete=runs)
@options_of(ResumeOptions)
def command(run: str, **values: Any) -> None:
    """Continue RUN from its newest whole checkpoint, or from its beginning where it has none.

    On other devices, more of them or fewer, and with another preset, if you say so: losses go on as if nothing had
    happened. RUN is a run's folder, or its name in runs/. It is what `dsrun finetune MODEL --output-dir RUN --resume`
    does.
    """
    from dsrun.jobs.runs import past_runs

    past = past_runs.read(past_runs.named(run)).with_secrets()
    model = past.job.model
    named = {**given(ResumeOptions, values).user, "output_dir": past.path, "resume": True}
    requested = Resolved.by_user(FinetuneOptions, named)
    finetune.start(model.location if model.source in finetune.PATHS else model.name, requested)
