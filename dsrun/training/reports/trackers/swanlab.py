"""SwanLab: local files in RUN/swanlab. SWANLAB_MODE=offline or local sends nothing."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

from dsrun.training.reports.trackers import TrackedRun


class SwanLab:
    """One experiment of SwanLab's, which is continued under its id. A step that was logged before stays as it is."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        self.run_id = run.earlier or secrets.token_hex(8)
        self._run = swanlab.init(
            project=run.project, name=run.name, config=dict(run.config), id=self.run_id, resume="allow",
            log_dir=os.environ.get("SWANLAB_LOG_DIR") or str(run.folder / "swanlab"),
            settings=swanlab.Settings(terminal={"proxy_type": "none"}, interactive=False),
        )  # fmt: skip

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, *, failed: bool) -> None:
        self._run.finish(state="crashed" if failed else "success")


start = SwanLab
