"""Trackio: a database in RUN/trackio, unless TRACKIO_DIR says where, or TRACKIO_SPACE_ID names a Space."""

from __future__ import annotations

import os
from collections.abc import Mapping

from dsrun.training.reports.trackers import TrackedRun


class Trackio:
    """One run of Trackio's, which is continued under its name."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(run.folder / "trackio"))  # read as it is imported
        import trackio

        self.run_id = run.name
        self._run = trackio.init(
            project=run.project, name=run.name, config=dict(run.config), resume="allow" if run.earlier else "never",
            embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, *, failed: bool) -> None:  # noqa: ARG002  (its runs have no state)
        self._run.finish()


start = Trackio
