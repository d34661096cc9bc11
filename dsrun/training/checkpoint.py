"""Checkpoints: DeepSpeed's own, in checkpoints/step-N, with a mark that says they are whole."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dsrun.errors import DsrunError
from dsrun.jobs.job import Job
from dsrun.jobs.layout import CHECKPOINTS, MARK, PREFIX, whole_checkpoints
from dsrun.training import universal

FULL_BYTES = 1 << 20
"""A disk with less room than this is full."""
CUT_SHORT = re.compile(r"unexpected pos|iostream error|failed writing")
"""What torch says of a write that came to nothing: its zip writer knows no errno (serialize/inline_container.cc)."""
FULL = (errno.ENOSPC, errno.EDQUOT)


def save(engine: Any, job: Job, step: int) -> Path:
    """Write the checkpoint after optimizer step `step` (count of steps done), and drop all but the newest ones.

    It holds what is trained.

    Every rank takes part. The mark is made when all ranks have written and what they wrote has reached the disk: a
    folder without it is never resumed from. Until then the checkpoint before it stays.
    Raises DsrunError where a file can't be written.
    """
    run_dir, first = Path(job.run_dir), dist.get_rank() == 0
    folder = run_dir / CHECKPOINTS / f"{PREFIX}{step}"
    try:
        if first:
            _remove_rest(run_dir, folder)
        dist.barrier()
        engine.save_checkpoint(
            str(folder.parent), tag=folder.name, client_state={"step": step}, save_latest=False,
            exclude_frozen_parameters=job.tuning.freezes,
        )  # fmt: skip
        _reach_disk(path for path in folder.rglob("*") if path.is_file() and _is_ours(path))
        dist.barrier()
        if first:
            _mark(folder, {"step": step, "layout": layout(job)})
    except (OSError, RuntimeError) as error:
        refused = _refused(folder, error)
        _give_back(folder)
        raise refused from error
    if first:
        for old in whole_checkpoints(run_dir)[: -job.training.keep_checkpoints]:
            # Without its mark, it is removed before the next one is written.
            with contextlib.suppress(OSError):
                _remove(old)
    dist.barrier()
    return folder


def load(engine: Any, job: Job, folder: Path) -> int:
    """Restore weights, optimizer and loss scale on every rank; returns the steps done.

    What the same division wrote is read by DeepSpeed itself, everything else by `universal`.
    Raises DsrunError where that can't be.
    """
    wrote, wanted = written_by(folder), layout(job)
    if wrote != wanted:
        if uses_nvme(wrote) or uses_nvme(wanted):
            raise DsrunError(
                "what an NVMe disk's swap files hold can't be divided anew",
                where=str(folder),
                hint="Continue it with the preset and the number of ranks that wrote it.",
            )
        if job.training.optimizer != "adamw":
            raise DsrunError(
                "8-bit states can't be divided anew",
                where=str(folder),
                hint="Continue it with the preset and the number of ranks that wrote it.",
            )
        return universal.load(engine, folder)
    # What isn't trained is in no checkpoint: it was read from the model's own folder.
    path, state = engine.load_checkpoint(
        str(folder.parent), tag=folder.name, load_module_strict=not job.tuning.freezes
    )
    if path is None:
        raise RuntimeError(f"DeepSpeed could not load {folder}")
    return int(state["step"])


def layout(job: Job) -> dict[str, Any]:
    """What decides how a checkpoint is divided into files; the folders of swap files are no part of it."""
    zero = json.loads(json.dumps(job.ds_config.get("zero_optimization", {})))
    for section in ("offload_optimizer", "offload_param"):
        (zero.get(section) or {}).pop("nvme_path", None)
    optimizer = job.ds_config.get("optimizer", {})
    return {
        "world_size": job.world_size, "precision": job.precision, "zero_optimization": zero,
        "optimizer": optimizer.get("type"), "torch_adam": optimizer.get("params", {}).get("torch_adam", False),
    }  # fmt: skip


def written_by(folder: Path) -> dict[str, Any]:
    """The layout of the job that wrote a whole checkpoint; empty where its mark says nothing."""
    try:
        return dict(json.loads((folder / MARK).read_text(encoding="utf-8"))["layout"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def uses_nvme(found: dict[str, Any]) -> bool:
    """Whether a layout keeps the optimizer's states or the weights in swap files."""
    zero = found.get("zero_optimization", {})
    sections = [zero.get(name) or {} for name in ("offload_optimizer", "offload_param")]
    return any(section.get("device") == "nvme" for section in sections)


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


def _is_ours(path: Path) -> bool:
    """Whether this rank wrote a file: its name says so, or it bears no rank and is the first one's."""
    found = re.search(r"_pp_rank_(\d+)_|/rank(\d+)/", str(path))
    rank = int(found[1] or found[2]) if found else 0
    return rank == dist.get_rank()


def _reach_disk(paths: Any) -> None:
    """Wait until files, and folders' lists of names, are on the disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _mark(folder: Path, content: dict[str, Any]) -> None:
    """Say that a checkpoint is whole, after everything that it says is true."""
    _reach_disk([*(path for path in folder.rglob("*") if path.is_dir()), folder, folder.parent])
    temporary = folder / f".{MARK}"
    temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
    _reach_disk([temporary])
    temporary.rename(folder / MARK)
    _reach_disk([folder])


def _give_back(folder: Path) -> None:
    """Free what this rank has written by half: on a full disk nobody could write down what happened."""
    with contextlib.suppress(OSError):
        if dist.get_rank() == 0:
            (folder / MARK).unlink(missing_ok=True)
        for path in [path for path in folder.rglob("*") if path.is_file() and _is_ours(path)]:
            os.truncate(path, 0)  # torch's writer may hold it open for as long as the error lives
            path.unlink()


def _refused(folder: Path, error: Exception) -> Exception:
    """The error in words, where the disk is why; else as it is."""
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    full = getattr(error, "errno", None) in FULL
    with contextlib.suppress(OSError):
        found = os.statvfs(parent)
        full = full or found.f_bavail * found.f_frsize < FULL_BYTES
    if full or CUT_SHORT.search(str(error)):
        # Another rank may have given its room back by now.
        what = "the disk is full" if full else "the disk was full, or it fails"
        return DsrunError(
            f"can't be written: {what} ({error})",
            where=str(folder),
            hint="Free some room, or keep fewer checkpoints, and continue: the one before it is whole.",
        )
    if isinstance(error, OSError):
        return DsrunError(f"can't be written: {error.strerror or error}", where=str(folder))
    return error
