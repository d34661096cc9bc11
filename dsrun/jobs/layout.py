"""What the ranks and those who watch them agree on: names in the run folder, and one variable."""

from __future__ import annotations

from pathlib import Path

EVENTS, METRICS = "events.jsonl", "metrics.jsonl"
STATE = "state"
CHECKPOINTS, PREFIX, MARK = "checkpoints", "step-", "complete"
SUPERVISOR = "DSRUN_SUPERVISOR_PID"
"""The process whose end ends the job; unset when the command is run by hand."""


def whole_checkpoints(run_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first. A folder without the mark was cut short, and does not count."""
    marks = (run_dir / CHECKPOINTS).glob(f"{PREFIX}*/{MARK}")
    return sorted((mark.parent for mark in marks), key=lambda path: int(path.name.removeprefix(PREFIX)))
