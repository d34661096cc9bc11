"""Checkpoints: DeepSpeed's own, in checkpoints/step-N, with a mark that says they are whole."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dsrun.jobs.layout import CHECKPOINTS, MARK, PREFIX, whole_checkpoints


def save(engine: Any, run_dir: Path, step: int, keep: int) -> Path:
    """Write the checkpoint after optimizer step `step` (count of steps done), and drop all but the newest `keep`.

    Every rank takes part. The mark is made when all ranks have written: a folder without it is never resumed from.
    """
    folder = run_dir / CHECKPOINTS / f"{PREFIX}{step}"
    engine.save_checkpoint(
        str(folder.parent), tag=folder.name, client_state={"step": step}, save_latest=False
    )
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / MARK).touch()
        for old in whole_checkpoints(run_dir)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return folder


def load(engine: Any, folder: Path) -> int:
    """Restore weights, optimizer and loss scale on every rank; returns the steps done."""
    path, state = engine.load_checkpoint(str(folder.parent), tag=folder.name)
    if path is None:
        raise RuntimeError(f"DeepSpeed could not load {folder}")
    return int(state["step"])
