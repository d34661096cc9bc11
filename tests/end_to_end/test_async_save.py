"""Checkpoints written beside the training, in whole runs: killed in the middle of one, a disk that fills, resumed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from needed import needs

needs("deepspeed", "transformers")

from running import (
    SAVE_STEPS,
    STEPS,
    check_nothing_is_left,
    finish,
    lines_of,
    own_disk_at,
    ranks_of,
    reaches,
    same,
    starts_of,
    words_of,
)

from dsrun.job.layout import whole_checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.full]
AT_SAVE = Path(__file__).resolve().parents[1] / "at_export"


@pytest.fixture
def run(environ, tmp_path_factory) -> Callable:
    """`run(*words, at_save=...)`: a dsrun that is under way."""
    import subprocess
    import sys

    started = []

    def begin(*words: object, at_save: str = "") -> subprocess.Popen[str]:
        paths = f"{AT_SAVE}{os.pathsep}{environ['PYTHONPATH']}" if at_save else environ["PYTHONPATH"]
        process = subprocess.Popen(
            [sys.executable, "-m", "dsrun", *map(str, words)], cwd=tmp_path_factory.mktemp("cwd"), text=True,
            env={**environ, "PYTHONPATH": paths, "AT_SAVE": at_save}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def whole(run_dir: Path) -> list[str]:
    return [path.name for path in whole_checkpoints(run_dir)]


@pytest.fixture(scope="module")
def disk(tmp_path_factory) -> Iterator[Path]:
    with own_disk_at(tmp_path_factory.mktemp("disk"), 1 << 30) as folder:
        yield folder or pytest.skip("a disk can't be made here: only root may mount one")


DIVISIONS = {
    "zero2": ("--preset", "zero2"), "zero3": ("--preset", "zero3"), "fsdp": ("--preset", "fsdp"),
    "tp": ("--preset", "zero1", "--tp", "2", "--grad-accum", "2"),
    "pp": ("--preset", "zero1", "--pp", "2", "--grad-accum", "2"),
}  # fmt: skip


@pytest.mark.parametrize("division", DIVISIONS)
def test_the_losses_and_checkpoints_of_a_run_that_waits(division, run, data, tmp_path, reference):
    run_dir = tmp_path / "run"
    words = (*words_of("llama-tiny", run_dir), *data, *DIVISIONS[division], "--async-save")
    done = finish(run(*words), run_dir)
    assert done.code == 0, done.err
    same(done.losses, reference.losses)
    assert whole(run_dir) == [f"step-{step}" for step in range(SAVE_STEPS, STEPS, SAVE_STEPS)]
    saved = [line["step"] for line in lines_of(run_dir / "events.jsonl") if line["event"] == "checkpoint"]
    assert saved == list(range(SAVE_STEPS, STEPS, SAVE_STEPS))


@pytest.mark.parametrize("preset", ["zero2", "fsdp"])
def test_killed_while_one_is_written(preset, run, data, tmp_path, reference):
    """Step 4's is on its way for as long as it takes; steps go on, and all processes are killed after the fifth."""
    run_dir = tmp_path / "run"
    words = (*words_of("llama-tiny", run_dir), *data, "--preset", preset, "--async-save")
    process = run(*words, at_save="4: sleep 600")
    reaches(process, run_dir, 5)
    for pid in ranks_of(run_dir).values():
        os.kill(pid, signal.SIGKILL)
    assert finish(process, run_dir).code != 0
    check_nothing_is_left(run_dir)
    assert (run_dir / "checkpoints/step-4").is_dir()
    assert whole(run_dir) == ["step-2"]
    done = finish(run("resume", run_dir), run_dir)
    assert done.code == 0, done.err
    assert starts_of(run_dir) == [0, 2]
    assert "step-4 is incomplete" in (run_dir / "events.jsonl").read_text()
    same(done.losses, reference.losses)


def test_a_disk_that_fills_while_one_is_written(run, data, disk, reference):
    """The step after it ends the run in words; the checkpoint before is gone on from."""
    run_dir, ballast = disk / "run", disk / "ballast"
    words = (*words_of("llama-tiny", run_dir), *data, "--async-save")
    # At the first byte of what follows step 2's files: 4's are the first that find no room.
    done = finish(run(*words, at_save=f"2: fill {ballast} 300000"), run_dir)
    assert done.code == 1
    assert "the disk is full" in done.err or "the disk was full" in done.err
    assert "step-4" in done.err and whole(run_dir) == ["step-2"]
    assert json.loads((run_dir / "run.json").read_text())["state"] == "failed"
    ballast.unlink()
    done = finish(run("resume", run_dir), run_dir)
    assert done.code == 0, done.err
    assert starts_of(run_dir) == [0, 2]
    same(done.losses, reference.losses)


def test_a_stop_waits_for_a_whole_one(run, data, tmp_path):
    from dsrun.job.run_folder import request_checkpoint

    run_dir = tmp_path / "run"
    process = run(*words_of("llama-tiny", run_dir), *data, "--async-save", at_save="2: sleep 5")
    reaches(process, run_dir, 2)
    request_checkpoint(run_dir, then_stop=True)
    done = finish(process, run_dir)
    stopped = next(line["step"] for line in lines_of(run_dir / "events.jsonl") if line["event"] == "stopped")
    assert done.code != 0 and f"dsrun resume {run_dir}" in done.err
    assert whole(run_dir)[-1] == f"step-{stopped}" and whole(run_dir)[0] == "step-2"
