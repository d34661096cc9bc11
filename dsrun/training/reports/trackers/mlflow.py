"""MLflow: the server in MLFLOW_TRACKING_URI; without one a database in RUN/mlflow, which needs no server."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from dsrun.training.reports.trackers import TrackedRun

LONGEST = 500
"""Characters of a parameter's value (mlflow's own limit is 6,000, older servers' 500)."""
URI = "MLFLOW_TRACKING_URI"


class MLflow:
    """One run of MLflow's, by a client of its own: its active run belongs to one thread."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        folder = run.folder / "mlflow"
        if not os.environ.get(URI):
            folder.mkdir(exist_ok=True)
        self._client = MlflowClient(os.environ.get(URI) or f"sqlite:///{folder}/mlflow.db")
        if run.earlier:
            self.run_id = run.earlier
            self._client.update_run(self.run_id, status="RUNNING")
            return
        known = self._client.get_experiment_by_name(run.project)
        artifacts = None if os.environ.get(URI) else (folder / "artifacts").as_uri()
        experiment = known.experiment_id if known else self._client.create_experiment(run.project, artifacts)
        self.run_id = self._client.create_run(experiment, run_name=run.name).info.run_id
        params = [Param(name, str(value)[:LONGEST]) for name, value in run.config.items()]
        self._client.log_batch(self.run_id, params=params)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def finish(self, *, failed: bool) -> None:
        self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")


start = MLflow
