"""The checkpoints of a run as they lie on the disk: what their marks say, and which of them can be gone on from.

A mark (`complete`) is JSON: the step, the layout of the job that wrote it, and of each file its size, its digest and
the rank that wrote it; last the digest of all that. A mark of before there were digests says neither of files nor of
itself: such a checkpoint is taken as it is. A digest is a CRC-32 (bench/digests.py: why), there against accidents.
Whoever means harm can write the mark, too; against that dsrun.training.pickles reads values alone.

A checkpoint that isn't gone on from any more has its mark taken off, under another name: ASIDE, which says why.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shlex
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError, Problem
from dsrun.files import explained, json_text, read_json_object, write_atomic
from dsrun.job.layout import CHECKPOINTS, DOUBTFUL, MARK, PREFIX, whole_checkpoints

ASIDE = "aside"
"""The mark of a checkpoint that was left for an older one; it holds why."""
CHOICE = "resume.json"
"""The file with which the user's `CheckpointChoice` reaches the ranks."""
BLOCK_BYTES = 1 << 20
LOST = (errno.ENOENT, errno.EIO, errno.ENODATA, errno.EUCLEAN)
"""Error numbers of a file whose content is gone. After any other the next attempt may succeed."""


@dataclass(frozen=True)
class WrittenFile:
    """A file of a checkpoint, as it was written."""

    bytes: int
    crc32: str
    """Eight hexadecimal digits."""
    rank: int
    """The rank that wrote it."""

    @classmethod
    def of(cls, path: Path, rank: int) -> WrittenFile:
        """Size and digest of the file that was just written. Raises OSError."""
        return cls(*_digest(path), rank)


@dataclass(frozen=True)
class Mark:
    """The content of a whole checkpoint's mark."""

    step: int
    """Steps done."""
    layout: Mapping[str, Any]
    """See Backend.layout (dsrun/training/engines); empty in a mark that has none."""
    files: Mapping[str, WrittenFile] = field(default_factory=dict)
    """Files by their paths in the checkpoint's folder; empty in the mark of an older dsrun."""

    def text(self) -> str:
        """The mark's content."""
        content = json_text(asdict(self))
        return f'{content[:-1]}, "crc32": "{zlib.crc32(content.encode()):08x}"}}\n'


@dataclass(frozen=True)
class CheckpointChoice:
    """Which checkpoint the user wants to go on from, and how well it is looked at first."""

    step: int | None = None
    """The checkpoint after this step; None: the newest whole one."""
    digests: bool = True
    """Whether every file is read and compared with its digest."""


def read_mark(folder: Path) -> Mark:
    """The mark of a checkpoint. Raises DsrunError where it is damaged, OSError where the system refuses to tell."""
    damaged = DsrunError(f"is damaged: its mark `{MARK}` is not what was written", where=str(folder))
    try:
        text = (folder / MARK).read_bytes().decode("utf-8").rstrip("\n")
        fields = json.loads(text)
        if "crc32" in fields or "files" in fields:
            # Taken over the text as it stands: the parsed fields, written anew, need not give the same text.
            content, _, digest = text.removesuffix('"}').rpartition(', "crc32": "')
            if f"{zlib.crc32(f'{content}}}'.encode()):08x}" != digest:
                raise damaged
        layout = fields.get("layout", {})
        files = {name: WrittenFile(**entry) for name, entry in fields.get("files", {}).items()}
        mark = Mark(int(fields.get("step", step_of(folder))), dict(layout), files)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise damaged from error
    if mark.step != step_of(folder):
        fault = f"is damaged: its mark `{MARK}` is of the checkpoint after step {mark.step}"
        raise DsrunError(fault, where=str(folder))
    return mark


def step_of(folder: Path) -> int:
    """The steps done, by a checkpoint's name."""
    return int(folder.name.removeprefix(PREFIX))


def damage(folder: Path) -> str:
    """What is wrong with a checkpoint by its mark and the sizes of its files, in words; empty where nothing is.

    Raises OSError where the system refuses to tell.
    """
    try:
        mark = read_mark(folder)
        return _by_sizes(folder, mark) if mark.files else ""
    except DsrunError as error:
        return error.problems[0].what


def _by_sizes(folder: Path, mark: Mark) -> str:
    for name, written in mark.files.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            return f"is damaged: {name} (of rank {written.rank}) is missing"
        if size != written.bytes:
            where = f"{name} (of rank {written.rank})"
            return f"is damaged: {where} has {size:,} bytes in place of {written.bytes:,}"
    # A file of other ranks would be taken for a part of it. Hidden ones, as NFS leaves them, nobody reads.
    there = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.name[0] != ".")
    strange = sorted({str(path) for path in there} - {*mark.files, MARK, f".{MARK}"})
    return f"is damaged: {strange[0]} was not written with it" if strange else ""


def damage_by_digests(folder: Path, mark: Mark, paths: Iterable[str]) -> str:
    """What is wrong with these files of a checkpoint by their digests, in words; empty where nothing is.

    Each file is read whole. Raises OSError where a file can't be read now but may be later.
    """
    for name in paths:
        written = mark.files[name]
        try:
            size, digest = _digest(folder / name)
        except OSError as error:
            if error.errno not in LOST:
                raise
            return f"is damaged: {name} (of rank {written.rank}) can't be read: {error.strerror}"
        if (size, digest) != (written.bytes, written.crc32):
            return (
                f"is damaged: the digest of {name} (of rank {written.rank}) is not the one that was written"
            )
    return ""


def _digest(path: Path) -> tuple[int, str]:
    """Size of a file in bytes, and its CRC-32."""
    size = digest = 0
    with path.open("rb", buffering=0) as file:
        block = memoryview(bytearray(BLOCK_BYTES))
        while count := file.readinto(block):
            digest = zlib.crc32(block[:count], digest)
            size += count
    return size, f"{digest:08x}"


def named_checkpoint(run_dir: Path, step: int) -> Path:
    """The checkpoint after a step. Raises DsrunError where it is not there, or damaged by the sizes of its files."""
    whole = whole_checkpoints(run_dir)
    folder = next((path for path in whole if step_of(path) == step), None)
    if folder is None:
        steps = ", ".join(str(step_of(path)) for path in whole)
        fault = f"there is no whole checkpoint after step {step}"
        raise DsrunError(fault, where="--checkpoint", hint=f"There are: {steps or 'none'}.")
    if why := _damage_in_words(folder):
        raise DsrunError([unreadable(folder, why)])
    return folder


def newest_whole(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from, and a line for each newer one that is damaged, by the sizes of files alone.

    Raises DsrunError where all of them are damaged: a run that has done something doesn't begin again unasked.
    """
    damaged: list[str] = []
    for folder in reversed(whole_checkpoints(run_dir)):
        why = _damage_in_words(folder)
        if not why:
            return folder, damaged
        damaged.append(f"{folder.name} {why}")
    # None is whole. Where some were put aside as damaged, beginning at step 0 would throw the run's work away.
    lines = damaged or [f"{state.folder.name} {state.state}" for state in states(run_dir) if state.damaged]
    if lines:
        raise none_whole(run_dir, lines)
    return None, []


def _damage_in_words(folder: Path) -> str:
    with explained("can't be read", folder):
        return damage(folder)


def unreadable(folder: Path, why: str) -> Problem:
    """The problem of a checkpoint that was chosen and can't be read."""
    others = ", ".join(
        str(step_of(path)) for path in whole_checkpoints(folder.parent.parent) if path != folder
    )
    hint = f"Take another: --checkpoint N (there are: {others})." if others else ""
    return Problem(why, str(folder), hint)


def none_whole(run_dir: Path, lines: Iterable[str]) -> DsrunError:
    """The error of a run of which no checkpoint can be read. lines: why, one for each."""
    fault = "none of its checkpoints can be read:\n    " + "\n    ".join(lines)
    again = shlex.join(["dsrun", "rerun", str(run_dir)])
    return DsrunError(fault, where=str(run_dir), hint=f"From its beginning: {again}")


def put_aside(folder: Path, why: str) -> None:
    """Take a checkpoint out of those that are gone on from. The next one that is written takes its room."""
    # Why goes first: a checkpoint without both would look as if it had never been written to its end.
    with contextlib.suppress(OSError):
        (folder / ASIDE).write_text(json_text({"why": why}) + "\n", encoding="utf-8")
    (folder / MARK).unlink(missing_ok=True)


@dataclass(frozen=True)
class CheckpointState:
    """A checkpoint's folder, and whether it can be gone on from."""

    folder: Path
    state: str
    """In words: "whole", "is damaged: ...", "incomplete: ...", "aside: ..."."""
    damaged: bool = False


def states(run_dir: Path) -> list[CheckpointState]:
    """Every checkpoint's folder in a run, oldest first; of the files only their sizes are looked at."""
    folders = [
        path
        for path in (run_dir / CHECKPOINTS).glob(f"{PREFIX}*")
        if path.name.removeprefix(PREFIX).isdecimal()
    ]
    return [_state(folder) for folder in sorted(folders, key=step_of)]


def _state(folder: Path) -> CheckpointState:
    if (folder / MARK).exists():
        try:
            why = damage(folder)
        except OSError as error:
            return CheckpointState(folder, f"can't be read: {error.strerror}")
        return CheckpointState(folder, why or "whole", bool(why))
    if (folder / DOUBTFUL).exists():
        return CheckpointState(folder, "doubtful: the loss was no number with its weights")
    if (folder / ASIDE).exists():
        with contextlib.suppress(DsrunError):
            why = str(read_json_object(folder / ASIDE).get("why"))
            return CheckpointState(folder, why, why.startswith("is damaged"))
    return CheckpointState(folder, "incomplete: it was not written to its end")


def put_choice(run_dir: Path, choice: CheckpointChoice) -> None:
    """Write the user's choice for the ranks. Raises DsrunError where it can't be written."""
    write_atomic(run_dir / CHOICE, json_text(asdict(choice)) + "\n")


def choice_of(run_dir: Path) -> CheckpointChoice:
    """The choice that `put_choice` wrote, or the newest checkpoint where there is none. Raises DsrunError where the
    file holds no choice."""
    if not (run_dir / CHOICE).exists():
        return CheckpointChoice()
    try:
        return CheckpointChoice(**read_json_object(run_dir / CHOICE))
    except TypeError as error:
        raise DsrunError(f"is not what dsrun writes: {error}", where=str(run_dir / CHOICE)) from error
