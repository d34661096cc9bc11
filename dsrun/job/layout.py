"""What the ranks and those who watch them agree on: names in the run folder, and one variable."""

from __future__ import annotations

import signal
from pathlib import Path

JOB = "job.json"
RUN_FILE = "run.toml"
"""The run's options as a run file: for the same with another value, here or elsewhere."""
SECRETS = "secrets.json"
"""Values that job.json hides, with their places: readable for its owner alone."""
EVENTS, METRICS = "events.jsonl", "metrics.jsonl"
DATA_REPORT = "data.json"
"""Counts of the rows, taken when they were tokenised."""
STATE = "state"
TRACKERS = "trackers.json"
"""Names and ids of the run with each of its trackers."""
CHECKPOINTS, PREFIX, MARK = "checkpoints", "step-", "complete"
DOUBTFUL = "doubtful"
"""The mark of a checkpoint whose weights gave a loss that is no number: whole, and nothing to go on from."""
NOT_FINITE = "is not finite since step"
"""Words in the error of a run that a loss or gradient ended which was not finite."""
LAST_FROM_STEPS = 20
"""Steps from which a run writes a checkpoint of its last step; a shorter run is sooner done again."""
SAVE_REQUEST, STOP_WORD = "state/save", "stop"
"""A file that asks the ranks for a checkpoint after this step; with the word "stop" in it, training ends there."""
MODEL, ADAPTER, ORIGINAL, TEXT_MODEL, BEST = "model", "adapter", "model-chatglm", "model-text", "best"
"""Folders of a run's results; best: the model of the lowest evaluation loss."""
SUPERVISOR = "DSRUN_SUPERVISOR_PID"
"""The process whose end ends the ranks of its host; unset when the command is run by hand."""
NODE = "DSRUN_NODE"
"""Number of this host among the job's, from 0."""
VISIBLE_DEVICES = "DSRUN_VISIBLE_DEVICES"
"""Value of CUDA_VISIBLE_DEVICES for the host's ranks, where the job itself can't say it."""
LOG_LIMIT = "DSRUN_LOG_LIMIT"
"""How many bytes of each rank's log are kept; unset or 0 for all."""
STACK_SIGNAL = signal.SIGRTMIN + 7
"""Has a rank write its threads' stacks into their file."""
RANK_MODULE = "dsrun.jobs.supervision.rank"
"""The module that every rank's process runs."""


def state_file(rank: int) -> str:
    """The file with a rank's own state (rank_state.py)."""
    return f"{STATE}/rank-{rank}.json"


def stack_file(rank: int) -> str:
    """The file with the stacks of a rank's threads, taken while it ran and another one had failed; else empty."""
    return f"{STATE}/stack-{rank}.txt"


def memory_file(rank: int) -> str:
    """The file with what a rank's GPU held when it ran out of memory (memory_division.py)."""
    return f"{STATE}/memory-{rank}.json"


def resident_file(host: int) -> str:
    """The file with the memory that each rank of a host had, as far as its agent saw it."""
    return f"{STATE}/resident-{host}.json"


def whole_checkpoints(run_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first. A folder without the mark was cut short, and does not count."""
    marks = (run_dir / CHECKPOINTS).glob(f"{PREFIX}*/{MARK}")
    by_step = {mark.parent.name.removeprefix(PREFIX): mark.parent for mark in marks}
    return [by_step[step] for step in sorted(filter(str.isdecimal, by_step), key=int)]
