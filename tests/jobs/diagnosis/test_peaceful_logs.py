"""Logs of jobs that are well, or that somebody ended: no failure of the job's is named in them.

Most are of real runs on CPU ranks (their paths changed); those of GPUs, Slurm, Kubernetes and NPUs are written in words
that these programs print.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_phases import answer

FOLDER = Path(__file__).parent / "peaceful"
LOGS = sorted(FOLDER.glob("*.log"))
ENDED = ("interrupted", "cancelled", "slurm_timelimit", "sigterm", None)
"""What may be said of a job that somebody, or its time limit, ended."""


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_nothing_is_named_wrongly(log):
    diagnosis = answer(log.read_text(encoding="utf-8"))
    kind = log.stem.partition("-")[0]
    assert diagnosis.cause in (ENDED if kind == "cancelled" else (None,)), diagnosis.summary
    if kind == "healthy":
        assert diagnosis.summary == "No failure was found in these lines."


def test_there_are_enough_of_both_kinds():
    assert len([log for log in LOGS if log.stem.startswith("healthy-")]) >= 10
    assert len([log for log in LOGS if log.stem.startswith("cancelled-")]) >= 10


@pytest.mark.parametrize(
    "log", [log for log in LOGS if log.stem.startswith("healthy-")], ids=lambda log: log.stem
)
def test_a_failure_at_the_end_of_the_same_log_is_named(log):
    text = log.read_text(encoding="utf-8")
    end = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert answer(f"{text}\n{end}").cause == "gpu_oom"


def test_a_connection_that_was_tried_in_vain_is_named():
    refused = "WARNING:train:could not reach the tracker at http://metrics.lab:8080: Connection refused; retrying (3/3)"
    assert answer(f"Saving model checkpoint to /out\n{refused}").cause == "rendezvous_timeout"
