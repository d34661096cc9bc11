"""Harm that each file of a checkpoint can come to, and what the ranks then do; a table of it.

    python tests/damage.py [--runs FOLDER]      writes docs/reference/damaged-checkpoints.md

It trains a little with each layout (runs that lie in FOLDER already are taken as they are), damages one file of the
newest checkpoint after the other, in every way, and has it looked at as the ranks do before they load anything
(dsrun/training/checkpoint.py, `choose`). tests/end_to_end/test_damaged_checkpoints.py does the same in the full lane.
"""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from difflib import SequenceMatcher
from importlib.metadata import version
from pathlib import Path
from typing import Any

from running import COMMON, little_data

from dsrun.errors import DsrunError
from dsrun.job import checkpoints
from dsrun.job.checkpoints import WrittenFile, read_mark
from dsrun.job.job import Job
from dsrun.job.layout import MARK

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "damaged-checkpoints.md"
LAYOUTS = {
    "zero1": ("--preset", "zero1"),
    "zero2": ("--preset", "zero2"),
    "zero3": ("--preset", "zero3"),
    "fsdp": ("--preset", "fsdp"),
    "pp": ("--preset", "zero1", "--pp", "2", "--grad-accum", "2"),
    "lora": ("--preset", "zero2", "--method", "lora"),
}
"""Name -> the options of a fine-tune on two ranks."""
STEP, OLDER = 4, 2
"""The checkpoint that is damaged, and the one before it."""
RAN = "it ran"


def train(layout: str, run_dir: Path, data: tuple[str, ...], environ: dict[str, str]) -> None:
    """A run with whole checkpoints after 2, 4 and 6 of 8 steps."""
    command = [
        sys.executable, "-m", "dsrun", "finetune", "llama-tiny", "--output-dir", str(run_dir), "--gpus", "2",
        *COMMON, "--max-steps", "8", "--save-steps", "2", "--keep", "9", *LAYOUTS[layout], *data,
    ]  # fmt: skip
    done = subprocess.run(command, env=environ, text=True, capture_output=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr


# What happens to a file. Each is called with the checkpoint's folder, the file's name and the checkpoint before.


def flip(folder: Path, name: str, older: Path) -> None:
    """64 bytes in the middle."""
    content = bytearray((folder / name).read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(255 - one for one in content[middle : middle + 64])
    put(folder / name, bytes(content))


def swap(folder: Path, name: str, older: Path) -> None:
    """Changes places with the file that is nearest to it: another rank's of the same kind, where there is one."""
    others = [path.name for path in sorted(folder.iterdir()) if path.name not in (name, MARK)] or [MARK]
    other = max(others, key=lambda one: SequenceMatcher(None, one, name).ratio())
    mine, its = (folder / name).read_bytes(), (folder / other).read_bytes()
    put(folder / name, its)
    put(folder / other, mine)


def stale(folder: Path, name: str, older: Path) -> None:
    """The file of an earlier step."""
    put(folder / name, (older / name).read_bytes())


def truncate(folder: Path, name: str, older: Path) -> None:
    """Half of it is there."""
    content = (folder / name).read_bytes()
    put(folder / name, content[: len(content) // 2])


def zero(folder: Path, name: str, older: Path) -> None:
    """The second half is zero, as a crash leaves what was not written."""
    content = (folder / name).read_bytes()
    put(folder / name, content[: len(content) // 2] + bytes(len(content) - len(content) // 2))


def empty(folder: Path, name: str, older: Path) -> None:
    """Nothing is in it."""
    put(folder / name, b"")


def missing(folder: Path, name: str, older: Path) -> None:
    """It is not there."""
    (folder / name).unlink()


def poisoned(folder: Path, name: str, older: Path) -> None:
    """It asks for a function, which would make a file."""
    import torch

    evil = Evil(folder.parent / RAN)
    if name == ".metadata":
        put(folder / name, pickle.dumps([evil, pickle.loads((folder / name).read_bytes())]))
    elif name.endswith(".distcp"):
        # One of its tensors is another one, at its end: the metadata say so.
        at = folder / "evil"
        torch.save(evil, at)
        found = pickle.loads((folder / ".metadata").read_bytes())
        key = next(
            key
            for key, place in found.storage_data.items()
            if place.relative_path == name and "model." in key.fqn
        )
        content, blob = (folder / name).read_bytes(), at.read_bytes()
        at.unlink()
        place = replace(found.storage_data[key], offset=len(content), length=len(blob))
        found.storage_data[key] = place
        put(folder / name, content + blob)
        put(folder / ".metadata", pickle.dumps(found))
    else:
        content = torch.load(folder / name, weights_only=False)
        content["more"] = evil
        at = folder / "evil"
        torch.save(content, at)
        at.replace(folder / name)


def poisoned_and_marked(folder: Path, name: str, older: Path) -> None:
    """The same, with a mark whose digests fit: whoever can write the folder can make it."""
    poisoned(folder, name, older)
    mark = read_mark(folder)
    files = {one: WrittenFile.of(folder / one, mark.files[one].rank) for one in mark.files}
    (folder / MARK).unlink()
    (folder / MARK).write_text(replace(mark, files=files).text())


def poisoned_of_old(folder: Path, name: str, older: Path) -> None:
    """The same, with a mark of before there were digests."""
    poisoned(folder, name, older)
    mark = read_mark(folder)
    (folder / MARK).unlink()
    (folder / MARK).write_text(checkpoints.json_text({"step": mark.step, "layout": mark.layout}))


DAMAGES: dict[str, Callable[[Path, str, Path], None]] = {
    one.__name__.replace("_", " "): one
    for one in (
        flip, swap, stale, truncate, zero, empty, missing, poisoned, poisoned_and_marked, poisoned_of_old,
    )
}  # fmt: skip


class Evil:
    """Pickled as a call that makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def put(path: Path, content: bytes) -> None:
    """A new file in the place of one that other folders may have, too."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


# What comes of it


@dataclass(frozen=True)
class Cell:
    """A file that was damaged."""

    layout: str
    name: str
    damage: str
    changed: tuple[str, ...]
    """The files that are not as they were written; more than one where files changed places."""
    said: str
    """Message to the user."""
    went_on_from: str
    """The name of a checkpoint; empty where nothing is gone on with."""
    ran: bool
    """Whether the file's own code was run."""

    @property
    def right(self) -> bool:
        """Whether nothing of the damaged file is trained on, no code in it runs, and the message names it."""
        poison = self.damage in ("poisoned and marked", "poisoned of old")
        no_mark = (self.name, self.damage) == (MARK, "missing")
        words = "asks for code" if poison else "incomplete" if no_mark else "damaged"
        named = no_mark or any(name in self.said for name in self.changed)
        went_on_from = "" if poison else f"step-{OLDER}"
        return not self.ran and words in self.said and named and self.went_on_from == went_on_from


def files_of(run_dir: Path) -> list[str]:
    """The files of the checkpoint that is damaged."""
    return sorted(path.name for path in (run_dir / f"checkpoints/step-{STEP}").iterdir())


def cells(layout: str, run_dir: Path, place: Path, damages: tuple[str, ...]) -> Iterator[Cell]:
    """Every file of a run's checkpoint with each of these damages. In a process group of one.

    place: an empty folder on the run's disk.
    """
    for name in files_of(run_dir):
        for damage in damages:
            if name == MARK and damage.startswith("poisoned"):
                continue  # it is JSON
            yield cell(layout, run_dir, place, name, damage)


def cell(layout: str, run_dir: Path, place: Path, name: str, damage: str) -> Cell:
    """One of them."""
    from dsrun.training import checkpoint

    copy = place / "run"
    for step in (STEP, OLDER):
        source = run_dir / f"checkpoints/step-{step}"
        shutil.copytree(source, copy / f"checkpoints/step-{step}", copy_function=os.link)
    target, older = (copy / f"checkpoints/step-{step}" for step in (STEP, OLDER))
    DAMAGES[damage](target, name, older)
    there = {path.name: path for path in target.iterdir()}
    changed = tuple(
        path.name
        for path in sorted((run_dir / f"checkpoints/step-{STEP}").iterdir())
        if path.name not in there or not path.samefile(there[path.name])
    )
    job, said = replace(Job.read(run_dir / "job.json"), run_dir=str(copy)), []
    try:
        folder = checkpoint.choose(job, said.append)
        went_on_from = folder.name if folder else "the beginning"
    except DsrunError as error:
        said.append(str(error))
        went_on_from = ""
    ran = (copy / "checkpoints" / RAN).exists()
    found = Cell(layout, name, damage, changed, "\n".join(said), went_on_from, ran)
    shutil.rmtree(copy)
    return found


@contextmanager
def group_of_one(store: Path) -> Iterator[None]:
    """A process group of one, unless there is one already."""
    import torch.distributed as dist

    if ours := not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    if ours:
        dist.destroy_process_group()


# The page


def page(found: list[Cell]) -> str:
    """The table in words."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed"))
    wrong = [one for one in found if not one.right]
    lines = [
        "# Damaged checkpoints",
        "",
        f"Made by `python tests/damage.py` on {date.today()}: {packages}, Python {sys.version.split()[0]}. "
        "llama-tiny is trained by two ranks with each layout; then one file of the newest checkpoint is damaged, and "
        "the checkpoints are looked at as the ranks do before a resume.",
        "",
        f"{len(found) - len(wrong)} of {len(found)} cases are as they should be: the file is named, nothing of it is "
        "trained on, and no code in it runs.",
        "",
        "| damage | what it is | " + " | ".join(LAYOUTS) + " |",
        "| --- | --- |" + " --- |" * len(LAYOUTS),
    ]
    for name, function in DAMAGES.items():
        row = []
        for layout in LAYOUTS:
            here = [one for one in found if (one.layout, one.damage) == (layout, name)]
            went_on = sum(bool(one.went_on_from) for one in here)
            bad = sum(not one.right for one in here)
            kind = "passed over" if went_on == len(here) else "refused"
            row.append(f"**{bad} of {len(here)} wrong**" if bad else f"{len(here)} {kind}")
        what = (function.__doc__ or "").rstrip(".").partition("\n")[0]
        lines.append(f"| {name} | {what} | " + " | ".join(row) + " |")
    lines += [
        "",
        "Numbers are files. *Passed over*: the run goes on from the checkpoint before, and says so. *Refused*: the run "
        "ends, and says what the file asks for; nothing is gone on with, as no accident makes such a file. The mark "
        "`complete` is JSON and can't be poisoned.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=Path, help="runs of earlier, by the names of the layouts")
    arguments = parser.parse_args()
    found: list[Cell] = []
    with tempfile.TemporaryDirectory() as text, group_of_one(Path(text, "store")):
        place = Path(text)
        runs = (arguments.runs or place / "runs").absolute()
        runs.mkdir(exist_ok=True)
        for layout in LAYOUTS:
            if not (runs / layout).exists():
                (place / "data").mkdir(exist_ok=True)
                train(layout, runs / layout, little_data(place / "data"), dict(os.environ))
            found += cells(layout, runs / layout, runs, tuple(DAMAGES))
    for one in found:
        if not one.right:
            print(one)
    PAGE.write_text(page(found), encoding="utf-8")
    print(f"{len(found)} cases, {sum(not one.right for one in found)} wrong")


if __name__ == "__main__":
    main()
