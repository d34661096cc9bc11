"""Weights & Biases: local files in RUN/wandb. WANDB_MODE=offline keeps them for `wandb sync`."""

from __future__ import annotations

import os
from collections.abc import Mapping

from dsrun.training.reports.trackers import TrackedRun

STEP = "trainer/step"
"""Its own step only goes up, and a run that continues may have logged later steps: curves are drawn over this."""


class WandB:
    """One run of wandb's, which is continued under its id."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=run.project, name=run.name, config=dict(run.config), id=run.earlier, resume="allow",
            dir=os.environ.get("WANDB_DIR") or str(run.folder),
            settings=wandb.Settings(console="off", disable_code=True),
        )  # fmt: skip
        self.run_id = self._run.id
        self._run.define_metric(STEP)
        for group in ("train/*", "eval/*"):
            self._run.define_metric(group, step_metric=STEP)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({STEP: step, **values})

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


start = WandB
