"""A checkpoint that is not what was written is never trained on: every way to damage every file of it (damage.py)."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from needed import needs

needs("deepspeed", "transformers")

from damage import (
    DAMAGES,
    LAYOUTS,
    OLDER,
    RAN,
    STEP,
    cells,
    files_of,
    group_of_one,
    poisoned_and_marked,
    swap,
    train,
    truncate,
)
from running import Done, cut_off, finish, held_at, same, starts_of, words_of

from dsrun.job.layout import CHECKPOINTS, whole_checkpoints

pytestmark = pytest.mark.slow
ADVICE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


@pytest.fixture(scope="module")
def run_of(tmp_path_factory, environ, data):
    """`run_of(layout)`: a run with that layout."""
    place = tmp_path_factory.mktemp("layouts")

    def made(layout: str) -> Path:
        if not (place / layout).exists():
            train(layout, place / layout, data, environ)
        return place / layout

    return made


def check_all(layout: str, run_dir: Path, place: Path) -> None:
    with group_of_one(place / "store"):
        found = list(cells(layout, run_dir, place, tuple(DAMAGES)))
    assert len(found) > len(DAMAGES) * 2
    assert [one for one in found if not one.right] == []


def test_every_damage_of_every_file(reference, tmp_path):
    check_all("zero2", reference.run_dir, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_damage_in_every_layout(run_of, layout, tmp_path):
    check_all(layout, run_of(layout), tmp_path)


def test_the_run_goes_on_from_the_one_before(reference, dsrun_here, tmp_path):
    """Two ranks' optimizer files have changed places, which would destroy training. Some Pythons write other sizes."""
    run_dir = tmp_path / "run"
    cut_off(reference.run_dir, STEP, run_dir)
    folder = run_dir / CHECKPOINTS / f"step-{STEP}"
    swap(folder, "zero_pp_rank_0_mp_rank_00_optim_states.pt", folder)
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "lo\n\xff\xfe\n')
    done = finish(dsrun_here("resume", run_dir), run_dir)
    assert done.code == 0, done.err
    assert re.search(rf"step-{STEP} is damaged: (the digest of )?zero_pp_rank_", done.err), done.err
    assert f"the run goes on from step-{OLDER}" in done.err
    assert "metrics.jsonl: 2 lines can't be read and left out" in done.err
    assert starts_of(run_dir)[-1] == OLDER
    same(done.losses, reference.losses)


def test_a_restart_goes_on_from_the_one_before(reference, dsrun_here, data, tmp_path):
    """Nobody is asked: --max-restarts meets the damaged one by itself."""
    run_dir = tmp_path / "run"
    process = dsrun_here(*words_of("llama-tiny", run_dir), *data, "--max-restarts", "1")
    ranks = held_at(process, run_dir, STEP + 1)
    os.kill(ranks[0], signal.SIGSTOP)  # so that no newer one is written
    older, newest = whole_checkpoints(run_dir)[-2:]
    truncate(newest, "zero_pp_rank_1_mp_rank_00_optim_states.pt", older)
    for pid in ranks.values():
        os.kill(pid, signal.SIGKILL)
    done = finish(process, run_dir)
    assert (done.code, done.state) == (0, "finished"), done.err
    assert "starting again" in done.err
    assert f"{newest.name} is damaged: zero_pp_rank_1_mp_rank_00_optim_states.pt" in done.err
    assert f"the run goes on from {older.name}" in done.err
    assert starts_of(run_dir) == [0, int(older.name.removeprefix("step-"))]
    same(done.losses, reference.losses)


def check_refused(done: Done, run_dir: Path) -> None:
    assert done.code == 1
    assert "this checkpoint asks for code" in done.err
    assert f"Take another: --checkpoint N (there are: {OLDER}" in done.err
    logs = "".join(path.read_text(errors="replace") for path in (run_dir / "logs").glob("*.log"))
    assert ADVICE not in done.err + logs
    assert not (run_dir / CHECKPOINTS / RAN).exists()
    assert json.loads((run_dir / "run.json").read_text())["diagnosis"]["cause"] == "checkpoint"


def test_no_code_of_a_checkpoint_runs(reference, dsrun_here, tmp_path):
    run_dir = tmp_path / "run"
    cut_off(reference.run_dir, STEP, run_dir)
    folder = run_dir / CHECKPOINTS / f"step-{STEP}"
    poisoned_and_marked(folder, "zero_pp_rank_1_mp_rank_00_optim_states.pt", folder)
    check_refused(finish(dsrun_here("resume", run_dir), run_dir), run_dir)


@pytest.mark.full
@pytest.mark.parametrize("layout", [one for one in LAYOUTS if one != "zero2"])
def test_no_code_runs_in_any_layout(run_of, dsrun_here, layout, tmp_path):
    run_dir = tmp_path / "run"
    cut_off(run_of(layout), STEP, run_dir)
    folder = run_dir / CHECKPOINTS / f"step-{STEP}"
    poisoned_and_marked(folder, files_of(run_dir)[-2], folder)
    check_refused(finish(dsrun_here("resume", run_dir), run_dir), run_dir)
