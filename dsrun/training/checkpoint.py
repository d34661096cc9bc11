"""Checkpoints: the engine's own files, in checkpoints/step-N, with a mark that says they are whole.

Before a run goes on from one, its ranks look at it together (`choose`): each reads a share of the files. A damaged one
is passed over for the one before it, and all ranks know which one that is before the first loads anything.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from dsrun.errors import DsrunError, Problem, TrainingError
from dsrun.job import checkpoints
from dsrun.job.checkpoints import Mark, WrittenFile
from dsrun.job.job import Job
from dsrun.job.layout import CHECKPOINTS, DOUBTFUL, MARK, PREFIX, whole_checkpoints
from dsrun.training import zip_digests
from dsrun.training.barrier import barrier
from dsrun.training.disk import reach_disk, refused
from dsrun.training.engines import Engine, backend_of
from dsrun.training.pickles import CodeRefusedError

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
        own = _reach_disk_with_digests(folder, _own_files(folder, job))
        barrier()  # without a time limit, which the exchange below has
        files = {name: one for part in _of_all_ranks(own) for name, one in part.items()}
        if first:
            _mark(folder, Mark(step, backend.layout(job), files))
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


class _Look(NamedTuple):
    """What a rank says of its share of a checkpoint's files."""

    damage: str = ""
    """In words; empty where they are whole."""
    refused: Problem | None = None
    """Why nothing is gone on with: a file asks for code, or can't be read for now."""


def choose(job: Job, say: Callable[[str], None]) -> Path | None:
    """The checkpoint to go on from, the same on all ranks: the newest whole one, or the one that the user named.

    None where the run has written none. say: called with a line for the user. Every rank takes part. What is newer
    loses its mark, so that nothing of the part of the run that is done again is taken for its result.
    Raises TrainingError where none can be read, the named one is damaged, or a file asks for code.
    """
    run_dir = Path(job.run_dir)
    choice = _of_the_first(lambda: checkpoints.choice_of(run_dir))
    whole = _of_the_first(lambda: whole_checkpoints(run_dir))
    if choice.step is not None:
        whole = [path for path in whole if checkpoints.step_of(path) == choice.step]
        if not whole:
            raise TrainingError(f"there is no whole checkpoint after step {choice.step}", where=str(run_dir))
    newer: dict[Path, str] = {}
    for folder in reversed(whole):
        damage = _look_together(job, folder, digests=choice.digests)
        if not damage:
            _leave(run_dir, folder, newer, say)
            return folder
        if choice.step is not None:
            raise TrainingError([checkpoints.unreadable(folder, damage)])
        newer[folder] = damage
    if newer:
        lines = [f"{folder.name} {damage}" for folder, damage in newer.items()]
        barrier()
        if dist.get_rank() == 0:
            for folder, damage in newer.items():
                checkpoints.put_aside(folder, damage)
        raise TrainingError(checkpoints.none_whole(run_dir, lines).problems)
    return None


def _leave(run_dir: Path, folder: Path, damaged: Mapping[Path, str], say: Callable[[str], None]) -> None:
    """Take the marks off what is newer than the checkpoint that is gone on from, and say so; also what has none."""
    if dist.get_rank() == 0:
        for one in checkpoints.states(run_dir):
            if one.state.startswith("incomplete") and checkpoints.step_of(one.folder) > checkpoints.step_of(
                folder
            ):
                say(f"{one.folder.name} is {one.state}: the run goes on from {folder.name}")
        for newer in whole_checkpoints(run_dir):
            if checkpoints.step_of(newer) > checkpoints.step_of(folder):
                why = damaged.get(newer, "is put aside")
                say(f"{newer.name} {why}: the run goes on from {folder.name}")
                checkpoints.put_aside(
                    newer, damaged.get(newer, f"put aside: the run went on from {folder.name}")
                )
        # A restart goes on from the newest one, which may be newer by then.
        choice = checkpoints.choice_of(run_dir)
        if choice.step is not None:
            checkpoints.put_choice(run_dir, replace(choice, step=None))
    barrier()


def _look_together(job: Job, folder: Path, *, digests: bool) -> str:
    """What is wrong with a checkpoint, in words that all ranks know. Raises TrainingError as `choose` does."""

    def first_look() -> tuple[str, Mark | None]:
        damage = checkpoints.damage(folder)
        return damage, None if damage else checkpoints.read_mark(folder)

    damage, mark = _of_the_first(first_look)
    if mark is None:
        return str(damage)
    look = _look(job, folder, mark, _share(mark, files_of(folder, mark)), digests=digests)
    barrier()  # without a time limit: another rank's files may be larger
    looks = _of_all_ranks(look)
    if refused := next((one.refused for one in looks if one.refused), None):
        hint = "\n  ".join(filter(None, [refused.hint, checkpoints.unreadable(folder, "").hint]))
        raise TrainingError([replace(refused, hint=hint)])
    return next((one.damage for one in looks if one.damage), "")


def files_of(folder: Path, mark: Mark) -> list[str]:
    """The files of a checkpoint, by their paths in it: of a mark that doesn't say them all that are there."""
    there = (path for path in folder.rglob("*") if path.is_file() and path.name != MARK)
    return list(mark.files) or sorted(str(path.relative_to(folder)) for path in there)


def _share(mark: Mark, names: Iterable[str]) -> list[str]:
    """The files that this rank looks at: the largest first, each to the rank that has least to read by then."""
    work = [0] * dist.get_world_size()
    own = []
    for name in sorted(names, key=lambda one: (-mark.files[one].bytes if one in mark.files else 0, one)):
        rank = work.index(min(work))
        work[rank] += mark.files[name].bytes if name in mark.files else 1
        if rank == dist.get_rank():
            own.append(name)
    return own


def _look(job: Job, folder: Path, mark: Mark, names: Iterable[str], *, digests: bool) -> _Look:
    """Whether files are as they were written, and hold values alone."""
    try:
        check(job, folder, mark, names, digests=digests)
    except CodeRefusedError as error:
        return _Look(refused=error.problems[0])
    except DsrunError as error:
        return _Look(damage=error.problems[0].what)
    except OSError as error:
        return _Look(refused=Problem(f"can't be read: {error.strerror}", str(error.filename or folder)))
    return _Look()


def check(job: Job, folder: Path, mark: Mark, names: Iterable[str], *, digests: bool = True) -> None:
    """Look at files of a checkpoint, by their digests and by what they name; nothing is loaded.

    Raises DsrunError where one is damaged, CodeRefusedError where one asks for code, OSError where one can't be read.
    """
    names, backend = list(names), backend_of(job)
    if digests and mark.files and (why := checkpoints.damage_by_digests(folder, mark, names)):
        raise DsrunError(why, where=str(folder))
    for name in names:
        try:
            backend.check_file(folder / name)
        except CodeRefusedError:
            raise
        except DsrunError as error:
            what = error.problems[0].what
            raise DsrunError(
                f"is damaged: {name} {what.removeprefix('is damaged: ')}", where=str(folder)
            ) from error


def load(engine: Engine, folder: Path) -> int:
    """Restore weights, optimizer and loss scale on every rank; returns the steps done. Raises as Engine.load does."""
    return engine.load(folder, checkpoints.read_mark(folder).layout)


def _of_all_ranks(own: Any) -> list[Any]:
    """What each rank says, for all of them."""
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, own)
    return said


def _of_the_first(look: Callable[[], Any]) -> Any:
    """What rank 0 sees, for all of them: of a network's file system ranks on other hosts may see something older.

    Raises TrainingError where it raises DsrunError or OSError.
    """
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = look()
        except (DsrunError, OSError) as error:
            found[1] = str(error)
    dist.broadcast_object_list(found)
    if found[1] is not None:
        raise TrainingError(found[1])
    return found[0]


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
    files = (path for path in folder.rglob("*") if path.is_file())
    return [path for path in files if backend.rank_of(job, path.relative_to(folder)) == rank]


def _reach_disk_with_digests(folder: Path, files: list[Path]) -> dict[str, WrittenFile]:
    """Wait until files are on the disk. Meanwhile their digests are made, mostly of those that torch made as it wrote;
    what has to be read is still in the page cache."""
    with ThreadPoolExecutor(1) as beside:
        synced = beside.submit(reach_disk, files)
        made = {str(path.relative_to(folder)): zip_digests.written(path, dist.get_rank()) for path in files}
        synced.result()
    return made


def _mark(folder: Path, mark: Mark) -> None:
    """Say that a checkpoint is whole, after everything that it says is true."""
    reach_disk([*(path for path in folder.rglob("*") if path.is_dir()), folder, folder.parent])
    temporary = folder / f".{MARK}"
    temporary.write_text(mark.text(), encoding="utf-8")
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
