"""Checkpoints: the engine's own files, in checkpoints/step-N, with a mark that says they are whole.

Before a run goes on from a checkpoint, its ranks look at it together (`choose`): each reads a share of the files. A
damaged one is passed over for the one before it. All ranks know their choice before the first loads anything.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
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
from dsrun.training.disk import reach_disk, refused
from dsrun.training.engines import Engine, backend_of
from dsrun.training.pickles import CodeRefusedError
from dsrun.training.ranks.barrier import barrier, from_all_ranks

HINT = "Free some room, or keep fewer checkpoints, and continue: the one before it is whole."


def save(engine: Engine, job: Job, step: int) -> Path:
    """Write the checkpoint after optimizer step `step` (count of steps done), and drop all but the newest ones.

    It holds the trained weights. Every rank takes part.

    The mark is made when all ranks have written and their files have reached the disk: a folder without it is never
    resumed from. Until then the checkpoint before it stays.
    Raises DsrunError where a file can't be written.
    """
    folder = _folder(job, step)
    with _given_back(folder, job):
        _make_room(folder)
        engine.save(folder, step)
        _commit(folder, job, step, _reach_disk_with_digests(folder, _own_files(folder, job)))
    _drop_older(job)
    return folder


class PendingSave:
    """A checkpoint whose files a thread writes, of copies in main memory, while the training goes on.

    1. All ranks copy what they are going to write. This is all that the training waits for.
    2. A thread of each rank writes, waits until the files are on the disk, and makes their digests. It takes part in no
       collective: those of the training would get out of order.
    3. When the threads of all ranks are done, which the training finds out beside the loss (`written`), or as nobody
       has anything else to do, all ranks `finish`: the mark is made, and older checkpoints go.

    What ends the run before the third leaves a folder without a mark, and the checkpoint before it, as a save does.
    """

    def __init__(self, engine: Engine, job: Job, step: int) -> None:
        """Copy, and begin to write. Every rank makes the same call. Raises DsrunError where the folder can't be
        written."""
        self.step, self.folder = step, _folder(job, step)
        self._job = job
        self._files: dict[str, WrittenFile] = {}
        self._error: BaseException | None = None
        with _given_back(self.folder, job):
            _make_room(self.folder)
            self._capture = engine.capture(self.folder, step)
        self._thread = threading.Thread(target=self._write, name=f"checkpoint-{step}", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        try:
            # In the thread, too, room is given back before the error is told: by then the disk is not full any more.
            with _given_back(self.folder, self._job):
                self._capture.write()
                self._files = _reach_disk_with_digests(self.folder, _own_files(self.folder, self._job))
        except BaseException as error:  # which `written` raises where the training sees it
            self._error = error

    def written(self) -> bool:
        """Whether this rank's files are on the disk. Raises what its thread ended with."""
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def finish(self) -> None:
        """Wait for all ranks' files, and mark the checkpoint. Every rank makes the same call. Raises as `save`."""
        self._thread.join()
        self.written()
        with _given_back(self.folder, self._job):
            barrier()  # without a time limit: another rank may write for longer
            self._capture.close()
            late = [
                path
                for path in _own_files(self.folder, self._job)
                if str(path.relative_to(self.folder)) not in self._files
            ]
            files = {**self._files, **_reach_disk_with_digests(self.folder, late)}
            _commit(self.folder, self._job, self.step, files)
        _drop_older(self._job)


def _folder(job: Job, step: int) -> Path:
    return Path(job.run_dir) / CHECKPOINTS / f"{PREFIX}{step}"


@contextlib.contextmanager
def _given_back(folder: Path, job: Job) -> Iterator[None]:
    """While a checkpoint is written: where that fails, remove what this rank wrote, and raise the error in words."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # In words first: once the half of a checkpoint is removed, the disk is not full any more.
        in_words = refused(folder, error, HINT)
        _give_back(folder, job)
        raise in_words from error


def _make_room(folder: Path) -> None:
    """Remove what would be in the way of a new checkpoint. Every rank takes part."""
    if dist.get_rank() == 0:
        _remove_rest(folder.parent.parent, folder)
    barrier()  # nobody writes into a folder that rank 0 is about to remove


def _commit(folder: Path, job: Job, step: int, written: dict[str, WrittenFile]) -> None:
    """Mark a checkpoint, whose files are on the disk, as whole. Every rank takes part. written: this rank's files."""
    barrier()  # has no time limit, as the exchange below has: a rank may write for long
    files = {name: file for of_rank in from_all_ranks(written) for name, file in of_rank.items()}
    if dist.get_rank() == 0:
        _mark(folder, Mark(step, backend_of(job).layout(job), files))


def _drop_older(job: Job) -> None:
    """Remove all checkpoints but the newest. Every rank takes part, and waits until the mark is made."""
    if dist.get_rank() == 0:
        for old in whole_checkpoints(Path(job.run_dir))[: -job.training.keep_checkpoints]:
            # What can't be removed now has lost its mark, and goes before the next checkpoint is written.
            with contextlib.suppress(OSError):
                _remove(old)
    barrier()


def remove(folder: Path) -> None:
    """Remove a checkpoint that nobody needs any more. With the only one goes the folder of all, in which DeepSpeed
    leaves a script."""
    with contextlib.suppress(OSError):
        _remove(folder)
        if not any(folder.parent.glob(f"{PREFIX}*")):
            shutil.rmtree(folder.parent)


def doubt(run_dir: Path, step: int) -> None:
    """Take the mark off the checkpoint after this step, if there is one: with its weights the loss was no number.

    Even finite weights are doubted: after a step that was far too large they are finite, and good for nothing.
    """
    folder = run_dir / CHECKPOINTS / f"{PREFIX}{step}"
    with contextlib.suppress(FileNotFoundError):
        (folder / MARK).rename(folder / DOUBTFUL)


class _Look(NamedTuple):
    """A rank's verdict on its share of a checkpoint's files."""

    damage: str = ""
    """The damage in words; empty where the files are whole."""
    refused: Problem | None = None
    """Why the run doesn't go on from any checkpoint: a file asks for code, or can't be read for now."""


def choose(job: Job, say: Callable[[str], None]) -> Path | None:
    """The checkpoint to go on from, the same on all ranks: the newest whole one, or the one that the user named.

    None where the run has written none. say: called with a line for the user. Every rank takes part. Newer checkpoints
    lose their marks: the run takes their steps again, and nobody should take the old ones for its result.
    Raises TrainingError where none can be read, the named one is damaged, or a file asks for code.
    """
    run_dir = Path(job.run_dir)
    choice = _from_rank_0(lambda: checkpoints.choice_of(run_dir))
    whole = _from_rank_0(lambda: whole_checkpoints(run_dir))
    if choice.step is not None:
        whole = [path for path in whole if checkpoints.step_of(path) == choice.step]
        if not whole:
            raise TrainingError(f"there is no whole checkpoint after step {choice.step}", where=str(run_dir))
    damaged: dict[Path, str] = {}
    for folder in reversed(whole):
        damage = _look_together(job, folder, digests=choice.digests)
        if not damage:
            _leave_newer(run_dir, folder, damaged, say)
            return folder
        if choice.step is not None:
            raise TrainingError([checkpoints.unreadable(folder, damage)])
        damaged[folder] = damage
    if damaged:
        lines = [f"{folder.name} {damage}" for folder, damage in damaged.items()]
        barrier()
        if dist.get_rank() == 0:
            for folder, damage in damaged.items():
                checkpoints.put_aside(folder, damage)
        raise TrainingError(checkpoints.none_whole(run_dir, lines).problems)
    return None


def _leave_newer(run_dir: Path, folder: Path, damaged: dict[Path, str], say: Callable[[str], None]) -> None:
    """Take the marks off checkpoints that are newer than the chosen one, and say so; also of incomplete ones."""
    if dist.get_rank() == 0:
        chosen = checkpoints.step_of(folder)
        for entry in checkpoints.states(run_dir):
            if entry.state.startswith("incomplete") and checkpoints.step_of(entry.folder) > chosen:
                say(f"{entry.folder.name} is {entry.state}: the run goes on from {folder.name}")
        for newer in whole_checkpoints(run_dir):
            if checkpoints.step_of(newer) > chosen:
                why = damaged.get(newer)
                say(f"{newer.name} {why or 'is put aside'}: the run goes on from {folder.name}")
                checkpoints.put_aside(newer, why or f"put aside: the run went on from {folder.name}")
        # The user's choice was for this start. A restart goes on from the newest one, which may be newer by then.
        choice = checkpoints.choice_of(run_dir)
        if choice.step is not None:
            checkpoints.put_choice(run_dir, replace(choice, step=None))
    barrier()


def _look_together(job: Job, folder: Path, *, digests: bool) -> str:
    """The damage of a checkpoint in words, the same on all ranks. Raises TrainingError as `choose` does."""

    def first_look() -> tuple[str, Mark | None]:
        damage = checkpoints.damage(folder)
        return damage, None if damage else checkpoints.read_mark(folder)

    damage, mark = _from_rank_0(first_look)
    if mark is None:
        return str(damage)
    look = _look(job, folder, mark, _share(mark, files_of(folder, mark)), digests=digests)
    barrier()  # without a time limit: another rank's files may be larger
    looks = from_all_ranks(look)
    # A refusal goes before damage: an older checkpoint is no way round a file that asks for code.
    if refused := next((look.refused for look in looks if look.refused), None):
        hint = "\n  ".join(filter(None, [refused.hint, checkpoints.unreadable(folder, "").hint]))
        raise TrainingError([replace(refused, hint=hint)])
    return next((look.damage for look in looks if look.damage), "")


def files_of(folder: Path, mark: Mark) -> list[str]:
    """The files of a checkpoint, by their paths in it; all that are there where the mark, an old one, lists none."""
    present = (path for path in folder.rglob("*") if path.is_file() and path.name != MARK)
    return list(mark.files) or sorted(str(path.relative_to(folder)) for path in present)


def _share(mark: Mark, names: Iterable[str]) -> list[str]:
    """The files that this rank looks at: the largest first, each to the rank that has least to read by then."""
    # The bytes come from the mark and not from the disk, so that all ranks make the same division.
    sizes = {name: mark.files[name].bytes if name in mark.files else 0 for name in names}
    work = [0] * dist.get_world_size()
    share = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = work.index(min(work))
        work[rank] += sizes[name] if name in mark.files else 1
        if rank == dist.get_rank():
            share.append(name)
    return share


def _look(job: Job, folder: Path, mark: Mark, names: Iterable[str], *, digests: bool) -> _Look:
    """Look at files: whether they are as they were written, and hold values alone."""
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
            what = what.removeprefix("is damaged: ")
            raise DsrunError(f"is damaged: {name} {what}", where=str(folder)) from error


def load(engine: Engine, folder: Path) -> int:
    """Restore weights, optimizer and loss scale on every rank; returns the steps done. Raises as Engine.load does."""
    return engine.load(folder, checkpoints.read_mark(folder).layout)


def _from_rank_0(look: Callable[[], Any]) -> Any:
    """Rank 0's look at the files, for all ranks: on a network's file system other hosts may see an older state.

    Raises TrainingError where `look` raises DsrunError or OSError.
    """
    result: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            result[0] = look()
        except (DsrunError, OSError) as error:
            result[1] = str(error)
    dist.broadcast_object_list(
        result
    )  # an error, too: else the others would wait for a result until they time out
    if result[1] is not None:
        raise TrainingError(result[1])
    return result[0]


def _remove_rest(run_dir: Path, target: Path) -> None:
    """Remove checkpoints that were cut short, and an earlier one of the step that is written now."""
    whole = whole_checkpoints(run_dir)
    for path in (run_dir / CHECKPOINTS).glob(f"{PREFIX}*"):
        if path == target or path not in whole:
            _remove(path)


def _remove(folder: Path) -> None:
    """Remove a checkpoint, the mark first: cut short here, its remains must not look whole."""
    (folder / MARK).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _own_files(folder: Path, job: Job) -> list[Path]:
    """The files that this rank wrote of a checkpoint."""
    rank, backend = dist.get_rank(), backend_of(job)
    files = (path for path in folder.rglob("*") if path.is_file())
    return [path for path in files if backend.rank_of(job, path.relative_to(folder)) == rank]


def _reach_disk_with_digests(folder: Path, files: list[Path]) -> dict[str, WrittenFile]:
    """Wait until files are on the disk, and make their digests meanwhile: from those that torch made as it wrote, and
    from the page cache."""
    with ThreadPoolExecutor(1) as beside:
        synced = beside.submit(reach_disk, files)
        written = {
            str(path.relative_to(folder)): zip_digests.written(path, dist.get_rank()) for path in files
        }
        synced.result()
    return written


def _mark(folder: Path, mark: Mark) -> None:
    """Say that a checkpoint is whole.

    The order is what makes it true after a power cut at any moment: the names of its files reach the disk before the
    mark does, and the mark has its content before it has its name.
    """
    reach_disk([*(path for path in folder.rglob("*") if path.is_dir()), folder, folder.parent])
    temporary = folder / f".{MARK}"
    temporary.write_text(mark.text(), encoding="utf-8")
    reach_disk([temporary])
    temporary.rename(folder / MARK)
    reach_disk([folder])


def _give_back(folder: Path, job: Job) -> None:
    """Remove this rank's half-written files: on a full disk nobody could write down what happened."""
    with contextlib.suppress(OSError):
        if dist.get_rank() == 0:
            (folder / MARK).unlink(missing_ok=True)
        for path in _own_files(folder, job):
            os.truncate(path, 0)  # torch's writer may hold it open for as long as the error lives
            path.unlink()
