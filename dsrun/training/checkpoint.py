"""Checkpoints: the engine's own files, in checkpoints/step-N, with a mark that says they are whole."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dsrun.files import json_text
from dsrun.jobs.spec.job import Job
from dsrun.jobs.spec.layout import CHECKPOINTS, DOUBTFUL, MARK, PREFIX, whole_checkpoints
from dsrun.training.barrier import barrier
from dsrun.training.disk import reach_disk, refused
from dsrun.training.engines import Engine, backend_of

HINT = "Free some room, or keep fewer checkpoints, and continue: the one before it is whole."


def save(engine: Engine, job: Job, step: int) -> Path:
    """Write the checkpoint after optimizer step `step` (count of steps done), and drop all but the newest ones.

    It holds what is trained.

    Every rank takes part. The mark is made when all ranks have written and what they wrote has reached the disk: a
    folder without it is never resumed from. Until then the checkpoint before it stays.
    Raises DsrunError where a file can't be written.
    """
    run_dir, first, backend = Path(job.run_dir), dist.get_rank() == 0, backend_of(job)
    folder = run_dir / CHECKPOINTS / f"{PREFIX}{step}"
    try:
        if first:
            _remove_rest(run_dir, folder)
        barrier()
        engine.save(folder, step)
        reach_disk(_own_files(folder, job))
        barrier()
        if first:
            _mark(folder, {"step": step, "layout": backend.layout(job)})
    except (OSError, RuntimeError) as error:
        in_words = refused(folder, error, HINT)
        _give_back(folder, job)
        raise in_words from error
    if first:
        for old in whole_checkpoints(run_dir)[: -job.training.keep_checkpoints]:
            # Without its mark, it is removed before the next one is written.
            with contextlib.suppress(OSError):
                _remove(old)
    barrier()
    return folder


def remove(folder: Path) -> None:
    """Remove a checkpoint that nobody needs any more; where it was the only one, with the folder of all, in which
    DeepSpeed leaves a script."""
    with contextlib.suppress(OSError):
        _remove(folder)
        if not any(folder.parent.glob(f"{PREFIX}*")):
            shutil.rmtree(folder.parent)


def doubt(run_dir: Path, step: int) -> None:
    """Take the mark off the checkpoint after this step, if there is one: with its weights the loss was no number.

    Whether they are finite doesn't matter: after a step that was far too large they are, and good for nothing.
    """
    folder = run_dir / CHECKPOINTS / f"{PREFIX}{step}"
    with contextlib.suppress(FileNotFoundError):
        (folder / MARK).rename(folder / DOUBTFUL)


def load(engine: Engine, folder: Path) -> int:
    """Restore weights, optimizer and loss scale on every rank; returns the steps done. Raises as Engine.load does."""
    return engine.load(folder, written_by(folder))


def written_by(folder: Path) -> dict[str, Any]:
    """The layout of the job that wrote a whole checkpoint; empty where its mark says nothing."""
    try:
        return dict(json.loads((folder / MARK).read_text(encoding="utf-8"))["layout"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _remove_rest(run_dir: Path, target: Path) -> None:
    """What was cut short, and what is there of a step that is done again."""
    whole = whole_checkpoints(run_dir)
    for path in (run_dir / CHECKPOINTS).glob(f"{PREFIX}*"):
        if path == target or path not in whole:
            _remove(path)


def _remove(folder: Path) -> None:
    """Remove a checkpoint, the mark first: cut short, what is left must not look whole."""
    (folder / MARK).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _own_files(folder: Path, job: Job) -> list[Path]:
    """What this rank wrote of a checkpoint."""
    rank, backend = dist.get_rank(), backend_of(job)
    return [path for path in folder.rglob("*") if path.is_file() and backend.rank_of(job, path) == rank]


def _mark(folder: Path, content: dict[str, Any]) -> None:
    """Say that a checkpoint is whole, after everything that it says is true."""
    reach_disk([*(path for path in folder.rglob("*") if path.is_dir()), folder, folder.parent])
    temporary = folder / f".{MARK}"
    temporary.write_text(json_text(content) + "\n", encoding="utf-8")
    reach_disk([temporary])
    temporary.rename(folder / MARK)
    reach_disk([folder])


def _give_back(folder: Path, job: Job) -> None:
    """Free what this rank has written by half: on a full disk nobody could write down what happened."""
    with contextlib.suppress(OSError):
        if dist.get_rank() == 0:
            (folder / MARK).unlink(missing_ok=True)
        for path in _own_files(folder, job):
            os.truncate(path, 0)  # torch's writer may hold it open for as long as the error lives
            path.unlink()
