"""Folders of runs that somebody has damaged or made to do harm: a problem of that run, beside the others' lines."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsrun.errors import DsrunError
from dsrun.files import MOST_BYTES, open_inside, read_inside
from dsrun.jobs.runs import run_summaries
from dsrun.reports.board import known_runs
from dsrun.reports.board.known_runs import KnownRuns, key_of

testclient = pytest.importorskip("starlette.testclient")

DEEP = '{"a":' * 100_000
FILES = ("job.json", "run.json", "events.jsonl", "metrics.jsonl", "environment.json", "data.json", "command.sh",
         "deepspeed.json", "state/rank-0.json", "generated_predictions.jsonl", "logs/rank-0.log")  # fmt: skip


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def outside(path: Path) -> None:
    other = (
        next(parent for parent in path.parents if parent.name == "bad").parents[1] / f"another's {path.name}"
    )
    other.write_text("{}")
    path.symlink_to(other)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate((8 << 30) if path.suffix == ".jsonl" else MOST_BYTES + 1)


def deep(path: Path) -> None:
    path.write_text(DEEP)


def counts(path: Path) -> None:
    path.write_text('{"format": 5, "step": 1e999, "loss": 1' + "0" * 4000 + "}\n")


def folder(path: Path) -> None:
    path.mkdir()


HARM = [pipe, device, outside, huge, deep, counts, folder]


def harmed(run: Path, name: str, harm) -> None:
    path = run / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    harm(path)


@pytest.fixture
def board(home, monkeypatch):
    from dsrun.reports.board.app import make_app

    for name, value in (("FRESH_S", -1.0), ("FOLDERS_S", -1.0), ("LOOK_S", 600.0)):
        monkeypatch.setattr(known_runs, name, value)
    runs = KnownRuns(home)
    client = testclient.TestClient(
        make_app(runs, "t"), base_url="http://127.0.0.1:8420", follow_redirects=False
    )
    assert client.get("/?token=t").status_code == 303
    return SimpleNamespace(get=client.get, runs=runs)


CASES = [
    pytest.param(name, harm, marks=() if harm is pipe or name == "run.json" else pytest.mark.full)
    for name in FILES for harm in HARM if (name, harm) != ("logs/rank-0.log", huge)
]  # fmt: skip
"""Each harm to one file, and one harm to each; a log may be as large as it likes."""


@pytest.mark.parametrize(("name", "harm"), CASES)
def test_one_bad_run_hides_no_other(dsrun, make_run, home, board, name, harm):
    bad = make_run("bad")
    make_run("good")
    harmed(bad, name, harm)
    lines = {line.name: line for line in run_summaries.summaries([home])}
    assert lines["good"].problem is None and lines["good"].loss == 7.0
    assert lines["bad"].loss in (7.0, None)
    assert {line.name: line.problem for line in board.runs.lines()} == {
        name: line.problem for name, line in lines.items()
    }
    for run in ("good", "bad"):
        assert board.get(f"/run/{key_of(run)}").status_code == 200
    for words in (("runs", home), ("show", bad), ("logs", bad), ("show", bad, "--json"), ("diagnose", bad)):
        said = dsrun(*words)
        assert said.code in ((0, 1, 2, 3) if words[0] == "diagnose" else (0, 1)), said.err
        assert "internal error" not in said.err


@pytest.mark.parametrize(
    ("name", "harm", "what"),
    [
        ("job.json", deep, "is not a job file"), ("job.json", pipe, "is not a regular file"),
        ("job.json", huge, "bytes are read at most"), ("run.json", pipe, "is not a regular file"),
        ("run.json", outside, "is a link out of its folder"), ("events.jsonl", device, "is a link out of its folder"),
        ("metrics.jsonl", huge, "are read at most"), ("job.json", counts, "job file"),
    ],
)  # fmt: skip
def test_the_problem_names_the_file(make_run, home, name, harm, what):
    bad = make_run("bad")
    harmed(bad, name, harm)
    (line,) = run_summaries.summaries([home])
    assert line.state == run_summaries.BROKEN
    assert line.problem and line.problem.startswith(name) and what.split()[-1] in line.problem


def test_a_lock_that_is_a_pipe_holds_nobody_up(make_run, home):
    harmed(make_run("bad"), ".lock", pipe)
    assert [line.name for line in run_summaries.summaries([home])] == ["bad"]


def test_a_log_of_slurm_that_leads_nowhere(make_run, home):
    make_run("good")
    waiting = home / "bad"
    (waiting / "logs").mkdir(parents=True)
    (waiting / "submit.sbatch").touch()
    (waiting / "logs" / "slurm-1.out").symlink_to("gone")
    states = {line.name: line.state for line in run_summaries.summaries([home])}
    assert states == {"good": "finished", "bad": run_summaries.SUBMITTED}


def test_links_lead_nowhere(make_run, home, tmp_path, dsrun):
    make_run("run")
    secret = tmp_path / "another's runs"
    secret.mkdir()
    (home / "run").rename(secret / "run")
    make_run("mine")
    (home / "rootlink").symlink_to("/")
    (home / "theirs").symlink_to(secret)
    (home / "loop").symlink_to(home)
    (home / "twice").symlink_to(home / "mine")
    assert [line.name for line in run_summaries.summaries([home])] == ["mine"]
    link = tmp_path / "by name"
    link.symlink_to(home)
    assert [line.name for line in run_summaries.summaries([link])] == ["mine"]  # who names a link means it


def test_a_link_within_the_folder_is_read(tmp_path):
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").symlink_to("a")
    assert read_inside(tmp_path, "b") == b"x"
    (tmp_path / "inner").mkdir()
    (tmp_path / "out").symlink_to("inner")
    (tmp_path / "inner" / "c").symlink_to(tmp_path / "a")
    assert read_inside(tmp_path, "out/c") == b"x"
    with pytest.raises(DsrunError, match="link out of its folder"):
        open_inside(tmp_path / "inner", "c")


def test_a_folder_of_states_that_leads_elsewhere(make_run, tmp_path):
    from dsrun.jobs.runs import past_runs

    run = make_run("bad")
    (run / "state").rename(tmp_path / "elsewhere")
    (run / "state").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DsrunError, match="link out of its folder"):
        _ = past_runs.read(run).ranks


def test_what_takes_a_summary_down_is_a_line(make_run, board, monkeypatch):
    make_run("a"), make_run("b")
    real = known_runs.summary

    def summary(path, name):
        if name == "a":
            raise AssertionError("of whatever kind")
        return real(path, name)

    monkeypatch.setattr(known_runs, "summary", summary)
    lines = {line.name: line.problem for line in board.runs.lines()}
    assert lines == {"a": "can't be read: AssertionError: of whatever kind", "b": None}


def test_a_run_that_is_slow_to_read_holds_up_nobody_elses_page(make_run, board, monkeypatch):
    import threading

    from dsrun.reports.board import views

    make_run("slow"), make_run("quick")
    board.runs.lines()
    reads, goes_on, real = threading.Event(), threading.Event(), views.page_of

    def page_of(path, name, *more):
        if name == "slow":
            reads.set()
            assert goes_on.wait(60)
        return real(path, name, *more)

    monkeypatch.setattr(views, "page_of", page_of)
    thread = threading.Thread(target=lambda: board.get(f"/run/{key_of('slow')}"), daemon=True)
    thread.start()
    assert reads.wait(60)
    assert board.get(f"/run/{key_of('quick')}").status_code == 200
    goes_on.set()
    thread.join(60)


def test_a_deep_header_of_safetensors_is_a_cut_file(tmp_path):
    from dsrun.models.resolve import safetensors_bytes

    file = tmp_path / "model.safetensors"
    file.write_bytes(len(DEEP).to_bytes(8, "little") + DEEP.encode())
    assert safetensors_bytes(file) is None
    with file.open("wb") as sparse:
        sparse.write((4 << 30).to_bytes(8, "little"))
        sparse.truncate(8 << 30)
    assert safetensors_bytes(file) is None


def test_a_line_without_an_end_takes_no_memory(tmp_path):
    from dsrun.job.run_folder import LONGEST_LINE, Follower

    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n' + b" " * (3 * LONGEST_LINE) + b'\n{"step": 2}\n')
    assert Follower(file).lines() == [{"step": 1}, {"step": 2}]


def test_lines_that_nest_without_end_are_left_out(tmp_path):
    from dsrun.job.run_folder import Follower

    file = tmp_path / "events.jsonl"
    file.write_text(json.dumps({"a": 1}) + "\n" + DEEP + "\n" + json.dumps({"a": 2}) + "\n")
    assert Follower(file).lines() == [{"a": 1}, {"a": 2}]
