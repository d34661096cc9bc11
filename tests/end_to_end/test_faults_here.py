"""What can go wrong with a run on one machine, for real: a rank or dsrun that is killed, a full disk, an end in the
middle of a checkpoint. Each time nothing may be left running, what dsrun says must be true, and the run goes on
to the losses of one that was not disturbed.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from needed import needs

needs("deepspeed", "transformers")

from running import (
    STEPS,
    Done,
    check_nothing_is_left,
    cut_off,
    finish,
    full_disk,
    half_written,
    held_at,
    let_go,
    lines_of,
    own_disk_at,
    processes_of,
    same,
    starts_of,
    until,
    words_of,
)

from dsrun.job.layout import whole_checkpoints
from dsrun.job.run_folder import describe_state, request_checkpoint
from dsrun.jobs.runs import past_runs

pytestmark = pytest.mark.slow

DISK_BYTES = 1 << 30


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def own_disk(tmp_path_factory) -> Iterator[Path | None]:
    """A disk of its own for a run folder; None where only root may mount one."""
    with own_disk_at(tmp_path_factory.mktemp("disk"), DISK_BYTES) as folder:
        yield folder


@pytest.fixture
def disk(own_disk) -> Path:
    return own_disk or pytest.skip("a disk can't be made here: only root may mount one")


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Files opened in the folder from now on can only be read."""
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def ask(run_dir: Path, *, then_stop: bool) -> None:
    """Ask held ranks for a checkpoint. They look for that every second: the next step has to find it."""
    request_checkpoint(run_dir, then_stop=then_stop)
    time.sleep(1.5)


class Journey:
    """One run that is ended in one way after the other, and resumed each time."""

    def __init__(self, run_dir: Path, dsrun_here, data) -> None:
        self.run_dir, self.dsrun_here = run_dir, dsrun_here
        self.process = dsrun_here(*words_of("llama-tiny", run_dir), *data)
        self.wanted = [0]
        """The steps from which it should have gone on."""
        self.ends: dict[str, tuple[Done, str]] = {}
        """Way of ending -> the dsrun that ended, and the run's state then."""

    def held(self, steps: int) -> dict[int, int]:
        """The ranks, held after that many steps from where it went on."""

        def trains() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            return len(starts_of(self.run_dir)) == len(self.wanted)

        until(trains, "it trains")
        return held_at(self.process, self.run_dir, self.wanted[-1] + steps)

    def end(self, name: str) -> None:
        """Wait until it has ended."""
        done = finish(self.process, self.run_dir)
        until(lambda: not processes_of(self.run_dir), "the processes are gone")
        self.ends[name] = done, describe_state(self.run_dir)

    def go_on(self) -> None:
        whole = whole_checkpoints(self.run_dir)
        self.wanted.append(int(whole[-1].name.removeprefix("step-")) if whole else 0)
        self.process = self.dsrun_here("resume", self.run_dir)


@pytest.fixture(scope="module")
def journey(own_disk, place, dsrun_here, data) -> Journey:
    run_dir = (own_disk or place) / "run"
    run = Journey(run_dir, dsrun_here, data)

    # A rank is killed before there is a checkpoint
    ranks = run.held(1)
    os.kill(ranks[1], signal.SIGKILL)
    run.end("rank")
    run.go_on()

    # A checkpoint is asked for, then another one and an end: a time limit is near
    ranks = run.held(1)
    ask(run_dir, then_stop=False)
    let_go(ranks)
    ranks = run.held(3)
    ask(run_dir, then_stop=True)
    let_go(ranks)
    run.end("request")
    run.statuses = [
        json.loads(path.read_text())["status"] for path in (run_dir / "state").glob("rank-*.json")
    ]
    run.go_on()

    if own_disk:
        ranks = run.held(1)
        with full_disk(own_disk):
            let_go(ranks)
            run.end("disk")
        run.go_on()

    # Somebody stops the run in the middle of a checkpoint
    ranks = run.held(1)
    let_go(ranks)
    after = run.wanted[-1] + 1
    run.half = until(
        lambda: half_written(run_dir, ranks, after), "a checkpoint is being written", every=0.0005
    )
    run.stopped = finish(dsrun_here("stop", run_dir), run_dir)
    run.end("stop")
    run.half_was_whole = run.half in whole_checkpoints(run_dir)
    run.go_on()

    # dsrun is killed
    ranks = run.held(3)
    run.process.kill()
    let_go(ranks)
    run.end("dsrun")
    run.go_on()

    run.end("well")
    return run


def test_a_run_that_was_ended_again_and_again(journey, reference):
    done, _ = journey.ends["well"]
    assert (done.code, done.state) == (0, "finished"), done.err
    assert starts_of(journey.run_dir) == journey.wanted
    assert len(past_runs.read(journey.run_dir).launches) == len(journey.wanted)
    same(done.losses, reference.losses)
    assert done.last_eval == pytest.approx(reference.last_eval, abs=1e-5)
    assert [line["step"] for line in done.metrics if "eval_loss" in line] == [0, STEPS]
    check_nothing_is_left(journey.run_dir)


def test_a_killed_rank_is_named(journey):
    done, state = journey.ends["rank"]
    assert done.code not in {0, 3}
    assert (done.out, state) == ("", "failed")
    # By SIGKILL, or by somebody where the launcher was ended before it told the exit code.
    assert re.search(r"rank 1 died first: .*killed", done.err)
    assert "Traceback" not in done.err
    assert str(journey.run_dir / "logs" / "rank-1.log") in done.err
    assert (journey.run_dir / "logs" / "rank-1.log").stat().st_size > 0


def test_a_run_without_a_checkpoint_starts_over(journey):
    assert journey.wanted[1] == 0


def test_a_run_stops_on_request(journey):
    done, _ = journey.ends["request"]
    events = lines_of(journey.run_dir / "events.jsonl")
    saved = [event["step"] for event in events if event["event"] == "checkpoint" and "requested" in event]
    stopped = [event["step"] for event in events if event["event"] == "stopped"]
    assert len(saved) == 2
    assert saved[1:] == stopped == journey.wanted[2:3]
    assert journey.statuses == ["stopped", "stopped"]
    assert not done.own_traceback


def test_a_full_disk(journey, disk):
    done, state = journey.ends["disk"]
    assert done.code not in (0, None)
    assert not done.own_traceback
    assert "the disk is full" in done.err or "the disk was full" in done.err
    assert f"dsrun resume {journey.run_dir}" in done.err
    assert state in ("failed", "interrupted")


def test_an_end_in_the_middle_of_a_checkpoint(journey):
    done, state = journey.ends["stop"]
    assert journey.stopped.code == 0, journey.stopped.err
    assert "interrupted" in journey.stopped.out
    assert (done.code, done.out, state) == (143, "", "interrupted"), done.err
    assert "Traceback" not in done.err
    assert not journey.half_was_whole
    assert f"step-{journey.wanted[-2]}" in done.err, "where it goes on"


def test_ranks_end_when_dsrun_is_killed(journey):
    done, state = journey.ends["dsrun"]
    assert (done.code, state) == (-signal.SIGKILL, "interrupted")


def test_a_new_run_in_a_folder_that_can_not_be_written(disk, dsrun_here, data):
    place = disk / "read only"
    place.mkdir()
    with read_only(place):
        done = finish(dsrun_here(*words_of("llama-tiny", place / "run"), *data), place / "run")
    assert done.code == 1
    assert str(place) in done.err
    assert not done.own_traceback
    assert not done.run_dir.exists()


@pytest.mark.full
def test_a_folder_that_can_not_be_written_any_more(disk, dsrun_here, data, reference):
    run = Journey(disk / "later read only", dsrun_here, data)
    ranks = run.held(3)
    with read_only(run.run_dir):
        let_go(ranks)
        run.end("read only")
        refused = finish(dsrun_here("resume", run.run_dir), run.run_dir)
    done, state = run.ends["read only"]
    assert done.code not in (0, None)
    for one in (done, refused):
        assert "Read-only file system" in one.err
        assert not one.own_traceback
    assert refused.code == 1
    assert state in ("failed", "interrupted")
    run.go_on()
    run.end("well")
    assert starts_of(run.run_dir) == run.wanted
    same(run.ends["well"][0].losses, reference.losses)


@pytest.mark.full
def test_a_half_written_checkpoint_is_not_used(reference, dsrun_here, place):
    """A newer one than the last that is whole."""
    run_dir = place / "half"
    cut_off(reference.run_dir, STEPS, run_dir)
    *_, whole, newest = whole_checkpoints(run_dir)
    (newest / "complete").unlink()
    for path in newest.iterdir():
        path.write_bytes(path.read_bytes()[:100])
    done = finish(dsrun_here("resume", run_dir), run_dir)
    assert done.code == 0, done.err
    assert starts_of(run_dir) == [0, int(whole.name.removeprefix("step-"))]
    same(done.losses, reference.losses)


@pytest.mark.full
def test_two_jobs_at_once(dsrun_here, data, place, reference):
    """Ports, caches, shared memory and locks are each job's own, or shared."""
    folders = [place / name for name in ("one", "two")]
    running = [dsrun_here(*words_of("llama-tiny", one), *data) for one in folders]
    for process, run_dir in zip(running, folders, strict=True):
        done = finish(process, run_dir, 800)
        assert (done.code, done.state) == (0, "finished"), done.err
        check_nothing_is_left(run_dir)
        same(done.losses, reference.losses)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
def test_a_loss_that_is_no_number_ends_the_run(dsrun_here, data, place, precision):
    run_dir = place / f"diverged-{precision}"
    options = ("--precision", precision, "--lr", "1e18", "--save-steps", "1")
    done = finish(dsrun_here(*words_of("llama-tiny", run_dir), *data, *options), run_dir)
    assert (done.code, done.state) == (1, "failed"), done.err
    last = done.metrics[-1]
    assert last["loss"] is None and last["step"] < STEPS
    assert not math.isfinite(float(last["not_finite"]["loss"]))
    reason = f"loss is not finite since step {last['step']}"
    assert reason in done.err and "--lr" in done.err
    assert json.loads(done.read("run.json"))["why"] == reason
    shown = finish(dsrun_here("show", run_dir), run_dir)
    assert f"failed: {reason}" in shown.out
    assert "Traceback" not in done.err and "failed first" not in done.err
    states = [json.loads(path.read_text()) for path in (run_dir / "state").glob("rank-*.json")]
    assert {state["status"] for state in states} <= {"failed", "running"}
    assert len({state["error"] for state in states if "error" in state}) == 1, "the same step and words"
    assert not (run_dir / "model").exists()
    # The step before was far too large: its weights are finite, and gave that loss.
    led_to_it = f"step-{last['step'] - 1}"
    assert led_to_it in {path.name for path in (run_dir / "checkpoints").glob("step-*")}
    assert led_to_it not in {path.name for path in whole_checkpoints(run_dir)}
    assert f"{led_to_it} has the weights that gave that loss" in done.err
    assert "dsrun resume" not in shown.out
    exported = finish(dsrun_here("export", run_dir), run_dir)
    assert exported.code == 1 and "no whole checkpoint" in exported.err
    words = ("finetune", "llama-tiny", "--output-dir", run_dir, "--resume", "--dry-run")
    again = finish(dsrun_here(*words), run_dir)
    assert "from its beginning" in again.err + again.out and "--lr" in again.err + again.out
    check_nothing_is_left(run_dir)
