"""TensorBoard: event files in RUN/tensorboard."""

from __future__ import annotations

import json
from collections.abc import Mapping

from dsrun.training.reports.trackers import TrackedRun


class TensorBoard:
    """Writes event files. Where a run continues, what was written of later steps is not shown any more."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.run_id = run.name
        self._writer = SummaryWriter(
            str(run.folder / "tensorboard"), purge_step=run.step + 1 if run.earlier else None
        )
        text = json.dumps(dict(run.config), ensure_ascii=False, indent=2, default=str)
        self._writer.add_text("config", f"```\n{text}\n```", run.step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, *, failed: bool) -> None:  # noqa: ARG002  (event files have no state)
        self._writer.close()


start = TensorBoard
