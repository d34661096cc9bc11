"""What can go wrong with a run on one machine, for real: a full disk, a folder that can't be written any more, an end
in the middle of a checkpoint. Each time nothing may be left running, what dsrun says must be true, and the run goes on
to the losses of one that was not disturbed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

from running import (
    check_nothing_is_left,
    finish,
    held_at,
    let_go,
    little_data,
    processes_of,
    same,
    starts_of,
    until,
)

from dsrun.jobs.layout import whole_checkpoints
from dsrun.jobs.run_folder import describe_state

pytestmark = pytest.mark.slow

STEPS, SAVE_STEPS = 20, 2
SHORT = (
    "--gpus", "2", "--preset", "zero2", "--precision", "fp32", "--micro-batch", "4", "--generate-rows", "0",
    "--no-score-before", "--warmup-steps", "0", "--max-source-length", "40", "--max-target-length", "16",
    "--eval-steps", "1000", "--max-steps", str(STEPS), "--save-steps", str(SAVE_STEPS),
)  # fmt: skip
DISK_BYTES = 1 << 30


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def data(place) -> tuple[str, ...]:
    return little_data(place)


@pytest.fixture(scope="module")
def dsrun_here(environ, place):
    """`dsrun_here(*words)`: a dsrun that is under way."""
    started: list[subprocess.Popen[str]] = []

    def run(*words: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "dsrun", *map(str, words)],
            env=environ, cwd=place, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def two_at_once(dsrun_here, data, place):
    """Two runs that were started at the same moment."""
    folders = [place / name for name in ("one", "two")]
    running = [dsrun_here("finetune", "llama-tiny", *SHORT, *data, "--output-dir", one) for one in folders]
    return [finish(process, run_dir, 800) for process, run_dir in zip(running, folders, strict=True)]


@pytest.fixture(scope="module")
def undisturbed(two_at_once) -> dict[int, float]:
    return two_at_once[0].losses


@pytest.fixture(scope="module")
def disk(tmp_path_factory) -> Iterator[Path]:
    """A disk of its own for a run folder."""
    folder = tmp_path_factory.mktemp("disk")
    argv = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", folder]
    if not shutil.which("mount") or subprocess.run(argv, check=False, capture_output=True).returncode:
        pytest.skip("a disk can't be made here: only root may mount one")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_two_jobs_at_once(two_at_once):
    """Ports, caches, shared memory and locks are each job's own, or shared."""
    for done in two_at_once:
        assert (done.code, done.state) == (0, "finished"), done.err
        assert len(done.losses) == STEPS
        check_nothing_is_left(done.run_dir)
    same(two_at_once[0].losses, two_at_once[1].losses, 1e-5)


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """Nothing more goes onto the disk."""
    ballast = disk / "ballast"
    with ballast.open("wb") as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
            file.flush()
    yield
    ballast.unlink()


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """What is opened in the folder from now on can only be read."""
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_journey(disk, dsrun_here, data, undisturbed):
    """One run that is ended in three ways, and resumed each time."""
    run_dir = disk / "run"
    process = dsrun_here("finetune", "llama-tiny", *SHORT, *data, "--output-dir", run_dir)
    wanted = [0]

    def ended(process: subprocess.Popen[str]) -> str:
        done = finish(process, run_dir, 40)
        assert done.code not in (0, None)
        assert not done.own_traceback
        until(lambda: not processes_of(run_dir), "the processes are gone", 15)
        return done.err

    def again() -> subprocess.Popen[str]:
        wanted.append(int(whole_checkpoints(run_dir)[-1].name.removeprefix("step-")))
        return dsrun_here("resume", run_dir)

    # A disk that is full when a checkpoint is written
    ranks = held_at(process, run_dir, 3)
    with full(disk):
        let_go(ranks)
        said = ended(process)
    assert "the disk is full" in said or "the disk was full" in said
    assert f"dsrun resume {run_dir}" in said
    assert describe_state(run_dir) in ("failed", "interrupted")

    # A folder that can't be written any more
    process = again()
    ranks = held_at(process, run_dir, 7)
    with read_only(run_dir):
        let_go(ranks)
        said = ended(process)
        assert "Read-only file system" in said
        refused = finish(dsrun_here("resume", run_dir), run_dir, 60)
        assert refused.code == 1
        assert "Read-only file system" in refused.err
        assert not refused.own_traceback
    assert describe_state(run_dir) in ("failed", "interrupted")

    # An end in the middle of a checkpoint
    process = again()
    ranks = held_at(process, run_dir, 11)
    let_go(ranks)
    half = until(lambda: _half_written(run_dir, ranks), "a checkpoint is being written", every=0.0005)
    began = time.monotonic()
    process.terminate()
    done = finish(process, run_dir, 40)
    assert time.monotonic() - began < 15
    check_nothing_is_left(run_dir)
    assert (done.code, done.state) == (143, "interrupted"), done.err
    assert half not in whole_checkpoints(run_dir)

    done = finish(again(), run_dir)
    assert (done.code, done.state) == (0, "finished"), done.err
    assert starts_of(run_dir) == wanted
    same(done.losses, undisturbed, 1e-5)
    check_nothing_is_left(run_dir)


def _half_written(run_dir: Path, ranks: dict[int, int]) -> Path | None:
    """A checkpoint that the ranks were just writing; they are stopped then."""
    for path in (run_dir / "checkpoints").glob("step-*"):
        if not (path / "complete").exists() and int(path.name.removeprefix("step-")) >= 12:
            for pid in ranks.values():
                os.kill(pid, signal.SIGSTOP)
            if not (path / "complete").exists():
                return path
            let_go(ranks)
    return None


def test_a_new_run_in_a_folder_that_can_not_be_written(disk, dsrun_here, data):
    place = disk / "read only"
    place.mkdir()
    with read_only(place):
        process = dsrun_here("finetune", "llama-tiny", *SHORT, *data, "--output-dir", place / "run")
        done = finish(process, place / "run", 60)
    assert done.code == 1
    assert str(place) in done.err
    assert not done.own_traceback
    assert not done.run_dir.exists()
