"""Runs from their folders: made-up ones, written by what writes real ones, and folders that went wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from asking import finetune_request
from running import until

from dsrun import catalog
from dsrun.cluster.devices import Machine
from dsrun.errors import DsrunError
from dsrun.job import run_folder
from dsrun.job.job import FORMAT, Job
from dsrun.jobs.allocation.request import DeviceRequest
from dsrun.jobs.assembly import rerun
from dsrun.jobs.assembly.finetune import plan
from dsrun.jobs.runs import (
    compare_runs,
    metrics_file,
    past_runs,
    rank_log,
    rank_logs,
    run_summaries,
    stopping,
)
from dsrun.jobs.supervision.commands import commands_of
from dsrun.jobs.supervision.run import write_folder
from dsrun.training.reports.report import Report

ROWS = '{"content": "类型#裙", "summary": "一条裙子。"}\n' * 9
PAPER = Machine("cpu", (), 4, "a machine of paper")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def home(tmp_path):
    """Where the runs lie; its name is a hostile one."""
    folder = tmp_path / 'a user\'s "runs" 运行'
    folder.mkdir()
    (folder.parent / "train.jsonl").write_text(ROWS, encoding="utf-8")
    return folder


@pytest.fixture
def make_run(home):
    """`make_run(name, state, losses, **options)`: the folder of a run that came so far."""

    def make(
        name: str = "run", state: str = "finished", losses=(7.5, 7.25, 7.0), evals=None, **given
    ) -> Path:
        data = {"train_file": home.parent / "train.jsonl", "eval_file": home.parent / "train.jsonl"}
        request = {"output_dir": home / name, "gpus": 2, "max_steps": 4, **data, **given}
        job = plan(finetune_request("llama-tiny", **request), PAPER, os.environ).job
        with run_folder.held(home / name):
            write_folder(job, commands_of(job, os.environ), PAPER, os.environ)
            run_folder.write_state(home / name, "running")
            reports = [Report(home / name, rank) for rank in range(2)]
            reports[0].phase(past_runs.FIRST_PHASE)
            reports[0].event("plan", total_steps=4, start_step=0, train_rows=9, eval_rows=9, step_rows=8)
            for step, loss in (evals or {0: 7.75}).items():
                reports[0].metrics(step=step, eval_loss=loss)
            for step, loss in enumerate(losses, 1):
                reports[0].metrics(
                    step=step, loss=loss, tokens=100, seconds=0.5, skipped=0, memory_bytes=2**30
                )
            if state == "finished":
                for report in reports:
                    report.finished()
            told = ["rank 1 failed first: ValueError: bad row\n    | line"]
            fields = {"problems": told} if state == "failed" else {}
            run_folder.write_state(home / name, state, **fields)
        return home / name

    return make


def the_summary(path) -> run_summaries.Summary:
    return run_summaries.summary(path, path.name)


# One run


def test_a_finished_run(make_run):
    before = time.time()
    path = make_run(evals={0: 7.75, 4: 6.5})
    after = time.time()
    seen = the_summary(path)
    assert (seen.name, seen.path, seen.state, seen.problem) == ("run", str(path), "finished", None)
    assert (seen.model, seen.preset, seen.ranks) == ("llama-tiny", "zero2", 2)
    assert (seen.steps, seen.total_steps, seen.loss, seen.eval_loss) == (3, 4, 7.0, 6.5)
    assert before - 1 <= seen.started <= after, "whole seconds may be all that is written"
    assert 0 <= seen.seconds <= after - before + 1


def test_killed_while_running(make_run):
    assert the_summary(make_run(state="running")).state == "interrupted"


def test_held_and_running(make_run):
    path = make_run(state="running")
    with run_folder.held(path):
        run = past_runs.read(path)
        assert (run.state, run.alive) == ("running", True)
        first = run.seconds
        time.sleep(0.02)
        assert past_runs.read(path).seconds > first


def test_half_lines_and_wrong_types_are_passed_over(make_run):
    path = make_run()
    for name in ("metrics.jsonl", "events.jsonl"):
        with (path / name).open("ab") as file:
            file.write(
                b'[]\n3\n\xff\xfe\n{"step": "x", "loss": []}\n{"event": 7, "time": "noon"}\n{"event": "plan"}\n'
            )
            file.write(b'{"event": "scores", "scores": 3}\n{"step": 4, "loss": 6.')
    seen = the_summary(path)
    assert (seen.problem, seen.steps, seen.loss, seen.total_steps) == (None, 3, 7.0, 4)


def test_a_loss_that_is_no_number_any_more(make_run):
    path = make_run(losses=(7.5, float("nan")))
    seen = the_summary(path)
    assert seen.steps == 2 and seen.loss != seen.loss
    assert "NaN" not in (path / "metrics.jsonl").read_text()


def test_an_evaluation_far_back(make_run):
    path = make_run(losses=[7.0] * 1500)
    assert (path / "metrics.jsonl").stat().st_size > metrics_file.BLOCK
    Report(path, 0).event("eval", step=0, loss=7.75)
    assert (the_summary(path).steps, the_summary(path).eval_loss) == (1500, 7.75)


def test_before_the_first_step(make_run):
    path = make_run(losses=())
    seen = the_summary(path)
    assert (seen.steps, seen.loss, seen.eval_loss) == (0, None, 7.75)
    assert past_runs.read(path).tokens_per_second is None


def test_a_run_that_never_got_to_its_ranks(make_run):
    path = make_run(state="failed")
    for name in ("events.jsonl", "metrics.jsonl"):
        (path / name).unlink()
    seen = the_summary(path)
    assert (seen.state, seen.steps, seen.total_steps) == ("failed", 0, 4)
    assert seen.started is not None and seen.seconds >= 0


def test_pauses_between_launches_do_not_count(make_run):
    path = make_run()
    times = [
        (1000.0, past_runs.FIRST_PHASE),
        (1060.0, "training"),
        (9000.0, past_runs.FIRST_PHASE),
        (9030.0, "training"),
    ]
    lines = [json.dumps({"time": when, "event": "phase", "text": text}) + "\n" for when, text in times]
    (path / "events.jsonl").write_text("".join(lines))
    (path / "run.json").write_text('{"state": "finished", "time": 9040.0, "pid": 1}')
    run = past_runs.read(path)
    assert (run.started, run.seconds, len(run.launches)) == (1000.0, 100.0, 2)


def test_the_ranks_begin_with_the_phase_that_launches_are_told_by():
    source = (catalog.PACKAGE / "training" / "worker.py").read_text(encoding="utf-8")
    assert f'report.phase("{past_runs.FIRST_PHASE}")' in source


def test_why_it_failed_as_it_was_told(make_run):
    assert past_runs.read(make_run(state="failed")).problems == [
        "rank 1 failed first: ValueError: bad row\n    | line"
    ]


def test_why_it_failed_where_nobody_told(make_run):
    path = make_run(state="running")
    for rank, error, ended in (
        (0, "RuntimeError: [gloo] Connection closed by peer", 5.0),
        (1, "ValueError: bad", 6.0),
    ):
        state = {"rank": rank, "status": "failed", "error": error, "ended": ended}
        (path / "state" / f"rank-{rank}.json").write_text(json.dumps(state))
    assert past_runs.read(path).problems == ["rank 1 failed first: ValueError: bad"]


def test_what_all_ranks_agreed_on(make_run):
    path = make_run(state="running")
    state = {"rank": 1, "status": "failed", "error": "step 3: the loss is nan", "ended": 6.0, "agreed": True}
    (path / "state" / "rank-1.json").write_text(json.dumps(state))
    assert past_runs.read(path).problems == ["step 3: the loss is nan"]


def test_a_finished_run_has_no_problem(make_run):
    run = past_runs.read(make_run())
    assert run.problems == []
    assert run.peaks["host_bytes"] > 0
    assert run.tokens_per_second == 200
    assert past_runs.read(make_run("other", "failed")).peaks is None


# Folders that went wrong


def spoil(path: Path, name: str, content: bytes | None) -> None:
    (path / name).unlink()
    if content is not None:
        (path / name).write_bytes(content)


@pytest.mark.parametrize(
    "content",
    [None, b"", b"{", b"[]", b"{}", b"\xff\xfe", b'{"format": 99}', b'{"format": 1}', b"3", b"null"],
)
def test_a_broken_job_file(make_run, content):
    path = make_run()
    spoil(path, "job.json", content)
    seen = the_summary(path)
    assert seen.state == "broken"
    assert seen.problem and "\n" not in seen.problem
    with pytest.raises(DsrunError):
        past_runs.read(path)


@pytest.mark.parametrize(
    "change",
    [
        {"hosts": [{"host": "x", "devices": 3}]},
        {"training": None},
        {"model": "x"},
        {"ds_config": {}},
        {"ds_config": None},
    ],
)
def test_a_job_file_with_wrong_types(make_run, change):
    path = make_run()
    job = json.loads((path / "job.json").read_text())
    (path / "job.json").write_text(json.dumps({**job, **change}))
    assert the_summary(path).state == "broken"


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"{}", b"\xff"])
def test_a_broken_state(make_run, content):
    path = make_run()
    spoil(path, "run.json", content)
    assert (the_summary(path).state, the_summary(path).steps) == ("not started", 3)


def test_folders_where_files_should_be(make_run):
    path = make_run()
    for name in ("events.jsonl", "metrics.jsonl", "run.json", "environment.json"):
        (path / name).unlink()
        (path / name).mkdir()
    seen = the_summary(path)
    assert (seen.state, seen.problem) == (run_summaries.BROKEN, "run.json is not a regular file")
    (path / "run.json").rmdir()
    assert the_summary(path).problem == "metrics.jsonl is not a regular file"


def test_somebody_elses_folder_among_the_checkpoints(make_run):
    path = make_run()
    (path / "checkpoints" / "step-old").mkdir(parents=True)
    (path / "checkpoints" / "step-old" / "complete").write_text("{}")
    assert past_runs.read(path).checkpoints == []


# Finding them


def test_found_at_and_below_newest_first(make_run, home):
    older, newer = make_run("older"), make_run("sweep/lr 0.1")
    lines = json.dumps({"time": 1000.0, "event": "phase", "text": "x"}) + "\n"
    (older / "events.jsonl").write_text(lines)
    (home / "no run").mkdir()
    (home / ".hidden").mkdir()
    (home / ".hidden" / "job.json").touch()
    assert [one.name for one in run_summaries.summaries([home])] == ["sweep/lr 0.1", "older"]
    assert [one.path for one in run_summaries.summaries([older, home])] == [str(newer), str(older)]
    assert [one.name for one in run_summaries.summaries([older])] == ["older"]


def test_links_are_not_followed(make_run, home):
    make_run("run")
    (home / "in a circle").symlink_to(home)
    (home / "nowhere").symlink_to(home / "gone")
    assert [one.name for one in run_summaries.summaries([home])] == ["run"]


def test_a_broken_run_is_a_line_among_the_others(make_run, home):
    make_run("good")
    (home / "killed at once").mkdir()
    (home / "killed at once" / ".lock").touch()
    by_name = {one.name: one for one in run_summaries.summaries([home])}
    assert by_name["good"].problem is None
    assert "job.json" in by_name["killed at once"].problem


def test_a_run_of_an_older_format_is_a_line_among_the_others(make_run, home):
    """Its events and states may have another form too: nothing of them is read."""
    make_run("good")
    path = make_run("old", "failed")
    spoil(path, "job.json", json.dumps({"format": FORMAT - 1, "nodes": 2}).encode())
    spoil(path, "events.jsonl", b'{"event": 1, "time": "x"}\n')
    spoil(path, "state/rank-0.json", b'{"pid": []}')
    by_name = {one.name: one for one in run_summaries.summaries([home])}
    assert by_name["good"].problem is None
    assert (by_name["old"].state, "format" in by_name["old"].problem) == ("broken", True)
    with pytest.raises(DsrunError) as caught:
        past_runs.read(path)
    assert len(caught.value.problems) == 1


def test_a_folder_that_is_not_there(home):
    with pytest.raises(DsrunError, match="no such folder"):
        run_summaries.summaries([home / "none"])
    (home / "file").touch()
    with pytest.raises(DsrunError, match="not a folder"):
        run_summaries.summaries([home / "file"])


def test_named_by_path_or_below_runs(make_run, home, monkeypatch):
    path = make_run("mine")
    monkeypatch.chdir(home.parent)
    (home.parent / "runs").symlink_to(home)
    (home.parent / "mine").mkdir()  # no run, and no reason not to find it
    assert past_runs.named(str(path)) == path
    assert past_runs.named("mine") == home.parent / "runs" / "mine"
    with pytest.raises(DsrunError, match="'mine'") as caught:
        past_runs.named("mime")
    assert caught.value.problems[0].where == "mime"
    with pytest.raises(DsrunError):
        past_runs.named("x" * 999)
    with pytest.raises(DsrunError):
        past_runs.named("a\0b")


# Logs


def said(*ranks: str, patience_s: float = 0.0) -> list[tuple[int | None, str]]:
    merger = rank_logs.Merger(list(range(len(ranks))))
    for rank, text in enumerate(ranks):
        log = rank_log.RankLog(Path(f"/nowhere/{rank}"))
        merger.feed(rank, [log._line(line) for line in text.split("\n")])
    return list(merger.take(patience_s))


def test_what_all_ranks_say_is_said_once():
    assert said("a\nx\nb", "a\ny\nb") == [(None, "a"), (0, "x"), (1, "y"), (None, "b")]


def test_the_same_line_twice():
    assert said("w\nw\nz", "w\nz") == [(None, "w"), (0, "w"), (None, "z")]


def test_the_same_lines_in_another_order():
    told = said("a\nb\nc", "b\na\nc")
    assert told[-1] == (None, "c")
    assert sorted(text for _, text in told).count("a") + len(told) <= 7
    assert {text for _, text in told} == {"a", "b", "c"}


def test_one_rank_alone_is_not_all():
    assert said("a\na") == [(0, "a"), (0, "a")]


def test_what_differs_between_ranks_that_say_the_same():
    one = "2026-11-21 19:31:06,757 INFO rank 0: Loading weights: 100%|█| 39/39 [00:00<00:00, 8006.36it/s]"
    other = "2026-11-21 19:31:06,912 INFO rank 1: Loading weights: 100%|█| 39/39 [00:00<00:00, 9041.00it/s]"
    assert said(one, other) == [(None, one)]


def test_times_in_the_lines_decide():
    one = "[2026-11-21 10:00:01,5] a\nstill a\n[2026-11-21 10:00:04] d"
    other = "2026-11-21T10:00:02 b\n2026-11-21 10:00:03 c"
    assert [text.split()[-1] for _, text in said(one, other)] == ["a", "a", "b", "c", "d"]


def test_a_new_line_waits_for_the_other_ranks():
    merger = rank_logs.Merger([0, 1])
    logs = [rank_log.RankLog(Path("/nowhere")) for _ in range(2)]
    merger.feed(0, [logs[0]._line("a")])
    assert list(merger.take(60.0)) == []
    merger.feed(1, [logs[1]._line("a")])
    assert list(merger.take(60.0)) == [(None, "a")]
    merger.feed(0, [logs[0]._line("b")])
    assert list(merger.take(0.0)) == [(0, "b")]


def test_a_line_that_others_say_late_is_told_once():
    merger = rank_logs.Merger([0, 1, 2])
    logs = [rank_log.RankLog(Path("/nowhere")) for _ in range(3)]

    def told(rank: int, *texts: str, patience_s: float = 0.0) -> list[tuple[int | None, str]]:
        merger.feed(rank, [logs[rank]._line(text) for text in texts])
        return list(merger.take(patience_s))

    assert told(0, "loading", "loading") == [(0, "loading"), (0, "loading")]
    assert told(1, "loading", "own", patience_s=60.0) == [], "own is not loading's echo: it waits"
    assert told(1) == [(1, "own")]
    assert told(2, "loading", "loading", "loading") == [(2, "loading")], "the third time is news"


def test_what_was_said_long_ago_is_forgotten(monkeypatch):
    monkeypatch.setattr(rank_logs, "KNOWN", 3)
    merger = rank_logs.Merger([0, 1])
    log = rank_log.RankLog(Path("/nowhere"))
    merger.feed(0, [log._line(str(number)) for number in range(9)])
    assert len(list(merger.take())) == 9
    assert len(merger._said) == 3
    merger.feed(1, [log._line("0"), log._line("8")])
    assert list(merger.take()) == [(1, "0")]


def log(path: Path, rank: int, content: bytes) -> None:
    with (path / "logs" / f"rank-{rank}.log").open("ab") as file:
        file.write(content)


def test_a_bar_counts_with_its_last_state_and_half_a_line_at_the_end(make_run):
    path = make_run()
    log(path, 0, b"bar: 0%\rbar: 50%\rbar: 100%\n\n\xff broken\r\nno end")
    told = list(rank_logs.tell(past_runs.read(path), None, follow=False))
    assert told == [(0, "bar: 100%"), (0, "\ufffd broken"), (0, "no end")]


def test_one_ranks_log(make_run):
    path = make_run()
    log(path, 0, b"zero\nboth\n")
    log(path, 1, b"both\n")
    run = past_runs.read(path)
    assert list(rank_logs.tell(run, 0, follow=False)) == [(0, "zero"), (0, "both")]
    assert list(rank_logs.tell(run, None, follow=False)) == [(0, "zero"), (None, "both")]
    with pytest.raises(DsrunError, match="no rank 7"):
        list(rank_logs.tell(run, 7, follow=False))


def test_nothing_was_printed(make_run):
    path = make_run()
    (path / "prepare.log").touch()
    with pytest.raises(DsrunError, match="no rank has printed anything") as caught:
        list(rank_logs.tell(past_runs.read(path), None, follow=True))
    assert "prepare.log" in caught.value.problems[0].hint


def test_following_until_the_run_ends(make_run):
    path = make_run(state="running")
    log(path, 0, b"before\n")
    told = []
    with run_folder.held(path):
        run = past_runs.read(path)
        steps = iter([lambda: log(path, 0, b"a\nha"), lambda: (log(path, 0, b"lf\n"), log(path, 1, b"a\n"))])
        held = [True, True, True, False]
        original, rank_logs.in_use = rank_logs.in_use, lambda _: held.pop(0)
        try:
            told += rank_logs.tell(run, None, follow=True, sleep=lambda _: next(steps, lambda: None)())
        finally:
            rank_logs.in_use = original
    assert told == [(0, "before"), (None, "a"), (0, "half")]


# Stopping

RANK = """
import os, signal, subprocess, sys, time, json
from pathlib import Path
run_dir, rank, stubborn = Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
if stubborn: signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", str(run_dir)])
path = run_dir / "state" / f"rank-{rank}.json"
path.parent.mkdir(exist_ok=True)
path.with_suffix(".new").write_text(json.dumps({"rank": rank, "pid": os.getpid(), "status": "running"}))
path.with_suffix(".new").replace(path)
time.sleep(600)
"""
LAUNCHER = """
import os, subprocess, sys
from pathlib import Path
run_dir = Path(next(word for word in sys.argv if word.endswith("job.json"))).parent
rank_file, stubborn = os.environ["TEST_RANK"].split(":")
ranks = [subprocess.Popen([sys.executable, rank_file, "dsrun.jobs.supervision.rank", str(run_dir), str(rank), stubborn])
         for rank in range(2)]
for rank in ranks: rank.wait()
"""
HOLDER = """
# dsrun, with a small launcher in place of DeepSpeed's
import os, sys
from pathlib import Path
from dsrun.cluster.devices import Machine
from dsrun.jobs.supervision import run
from dsrun.jobs.supervision.display.progress import PlainView
from dsrun.jobs.supervision.run_options import RunOptions
from dsrun.job.job import FORMAT, Job
from dsrun.job.processes import TerminatedError

run._prepare = lambda *_: None
try:
    job = Job.read(Path(sys.argv[1]))
    view = PlainView(Path(job.run_dir), print)
    run.carry_out(job, Machine("cpu", (), 4, ""), os.environ, print, view, options=RunOptions())
except TerminatedError:
    sys.exit(143)
"""


@pytest.fixture
def start(tmp_path, make_run):
    """`start(stubborn)`: a run that goes on, of real processes; gives its folder when its ranks are there."""
    started = []

    def run(stubborn: bool = False) -> tuple[Path, subprocess.Popen]:
        path = make_run("going on", "interrupted")
        for state in (path / "state").iterdir():
            state.unlink()
        (tmp_path / "rank.py").write_text(RANK)
        package = tmp_path / "fake" / "deepspeed" / "launcher"
        package.mkdir(parents=True, exist_ok=True)
        for name, text in (("../__init__.py", ""), ("__init__.py", ""), ("launch.py", LAUNCHER)):
            (package / name).write_text(text)
        for name in ("fused_adam", "cpu_adam"):
            (tmp_path / "operators" / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "operators" / name / f"{name}.so").touch()
        job = path.with_name("job of it.json")
        job.write_bytes((path / "job.json").read_bytes())
        environ = {
            **os.environ, "PYTHONPATH": f"{tmp_path / 'fake'}{os.pathsep}{catalog.PACKAGE.parent}",
            "TORCH_EXTENSIONS_DIR": str(tmp_path / "operators"), "TEST_RANK": f"{tmp_path / 'rank.py'}:{stubborn}",
        }  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(job)], env=environ, stdout=subprocess.DEVNULL
        )
        started.append(process)

        def there() -> bool:
            assert process.poll() is None
            return len(list((path / "state").glob("rank-*.json"))) == 2

        until(there, "the ranks")
        return path, process

    yield run
    for process in started:
        process.kill()
        process.wait()
    left = of(tmp_path)
    for process in left:
        process.kill()
    assert not left


def of(folder: Path) -> list[psutil.Process]:
    """The living processes that were started with a path below a folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if (
            any(word.startswith(str(folder)) for word in words)
            and process.info["status"] != psutil.STATUS_ZOMBIE
        ):
            found.append(process)
    return [process for process in found if process.pid != os.getpid()]


def test_a_run_is_ended_with_all_that_belongs_to_it(start, tmp_path):
    path, process = start()
    assert past_runs.read(path).state == "running"
    assert len(of(tmp_path)) >= 6  # dsrun, the launcher, two ranks and a child of each
    ended = stopping.stop(past_runs.read(path), 300)
    assert ended.state == "interrupted"
    assert ended.processes >= 6
    assert not of(tmp_path)
    assert process.wait(300) == 143
    with pytest.raises(DsrunError, match=r"is not running \(interrupted\)"):
        stopping.stop(past_runs.read(path), 300)


def test_a_rank_that_does_not_want_to_end(start, tmp_path):
    path, _ = start(stubborn=True)
    with pytest.raises(DsrunError, match=r"has not ended after 0\.3 s; still there") as caught:
        stopping.stop(past_runs.read(path), 0.3)
    assert "again" in caught.value.problems[0].hint
    assert stopping.stop(past_runs.read(path), 300).state == "interrupted"
    assert not of(tmp_path)


@pytest.fixture
def stranger(home):
    """Another process that says dsrun, and may have the lock's file open."""
    started = []

    def start(code: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", f"# dsrun\n{code}\nprint('here', flush=True)\ninput()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout.readline() == "here\n"
        return process

    yield start
    for process in started:
        assert process.poll() is None, "a stranger was stopped"
        process.communicate("\n")


@pytest.mark.parametrize("code", ["", "file = open({lock!r})", "file = open({lock!r}, 'a')"])
def test_a_stranger_with_the_number_in_run_json_is_left_alone(make_run, stranger, code):
    path = make_run(state="running")
    process = stranger(code.format(lock=str(path / ".lock")))
    with run_folder.held(path):
        record = json.loads((path / "run.json").read_text())
        (path / "run.json").write_text(json.dumps({**record, "pid": process.pid}))
        with pytest.raises(DsrunError, match="nothing was stopped"):
            stopping.stop(past_runs.read(path), 1)


@pytest.mark.parametrize(
    "pid", [None, "1", -1, 0, 0.5, True, 2**31 - 1, 2**70, float("nan"), float("inf"), [1]]
)
def test_a_number_that_is_no_process(make_run, pid):
    path = make_run(state="running")
    with run_folder.held(path):
        (path / "run.json").write_text(json.dumps({"state": "running", "pid": pid}))
        with pytest.raises(DsrunError):
            stopping.stop(past_runs.read(path), 1)


def test_nobody_holds_it_and_a_living_process_has_the_number(make_run):
    path = make_run(state="running")  # run.json names this very process
    with pytest.raises(DsrunError, match=r"is not running \(interrupted\)"):
        stopping.stop(past_runs.read(path), 1)


def test_on_another_host(make_run):
    path = make_run(state="running")
    (path / "environment.json").write_text('{"host": "node17"}')
    with run_folder.held(path), pytest.raises(DsrunError, match="runs on node17"):
        stopping.stop(past_runs.read(path), 1)


def test_signals_reach_only_what_holds_the_lock(make_run, monkeypatch):
    # It ends by itself between the look and the request, and its number goes to another.
    path = make_run(state="running")
    sent = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: sent.append(_))
    stopping._request(psutil.Process(), past_runs.read(path))
    assert sent == []


# Again


def test_the_same_job_in_a_new_folder(make_run, home):
    path = make_run("mine-20260101-120000")
    old = Job.read(path / "job.json")
    planned = rerun.repeated(past_runs.read(path), PAPER, {}, output_dir=None)
    job = planned.job
    assert planned.notes == ()
    assert (job.ds_config, job.data, job.training, job.model) == (
        old.ds_config,
        old.data,
        old.training,
        old.model,
    )
    assert job.world_size == 2
    new = Path(job.run_dir)
    assert new.parent == home
    assert new.name.startswith("mine-2") and new.name != path.name and len(new.name) == len(path.name)
    wanted = DeviceRequest(devices="1,3")
    job = rerun.repeated(past_runs.read(path), PAPER, {}, output_dir=home / "x", wanted=wanted).job
    assert (job.run_dir, job.hosts[0].devices) == (str(home / "x"), (1, 3))


def refused(run: Path, machine=PAPER, **options) -> str:
    with pytest.raises(DsrunError) as caught:
        rerun.repeated(past_runs.read(run), machine, {}, **{"output_dir": None, **options})
    return str(caught.value)


def test_data_that_changed_or_went(make_run, home):
    path = make_run()
    data = home.parent / "train.jsonl"
    data.write_text(ROWS + '{"content": "x", "summary": "y"}\n', encoding="utf-8")
    assert f"{data}: is not the data that the run was planned with" in refused(path)
    data.unlink()
    assert f"{data}: is gone" in refused(path)


def test_the_model_changed(make_run):
    path = make_run()
    job = json.loads((path / "job.json").read_text())
    job["prepared"]["model_dir"] = "/cache/models/llama-tiny-0000000000000000"
    (path / "job.json").write_text(json.dumps(job))
    assert "(the model folder) can't be made again" in refused(path)


def test_another_accelerator_a_full_folder_and_too_few_devices(make_run, home):
    path = make_run()
    both = refused(path, Machine("cuda", (), 4, "GPUs"), output_dir=path)
    assert "trained on cpu" in both and "holds a run already" in both
    assert "2 ranks, and 1 devices" in refused(path, wanted=DeviceRequest(devices="0"))
    assert "--gpus 2" in refused(path, Machine("cpu", (), 1, "one core"))


def test_what_is_in_the_cache_may_have_moved(make_run, monkeypatch, tmp_path):
    path = make_run()
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "another cache"))
    job = rerun.repeated(past_runs.read(path), PAPER, {}, output_dir=None).job
    assert job.prepared.train_rows.startswith(str(tmp_path / "another cache"))


# Side by side


def test_what_differs(make_run):
    paths = [
        make_run("a", losses=(7.5, 7.25, 7.0), evals={0: 8.0}),
        make_run("b", losses=(7.5, 7.0), evals={0: 8.0, 2: 7.5}, preset="zero3", lr=1e-3, seed=7),
        make_run("c", losses=(7.5, 7.25)),
    ]
    seen = compare_runs.compare_runs([past_runs.read(path) for path in paths])
    assert seen.config["zero_optimization.stage"] == [2, 3, 2]
    assert seen.config["optimizer.params.lr"] == [2e-3, 1e-3, 2e-3]
    settings = {"preset": ["zero2", "zero3", "zero2"], "training.seed": [42, 7, 42]}
    assert seen.settings == settings, "the config has said the learning rate"
    assert seen.losses == {1: [7.5, 7.5, 7.5], 2: [7.25, 7.0, 7.25]}
    assert seen.eval_losses == {0: [8.0, 8.0, 7.75], 2: [None, 7.5, None]}
    assert seen.agreement == [
        compare_runs.Agreement(2, False, 2, 0.25),
        compare_runs.Agreement(2, True, 1, 0.0),
    ]
    assert seen.figures["last_loss"] == [7.0, 7.0, 7.25]


def test_curves_that_can_not_be_compared(make_run):
    nan = float("nan")
    paths = [make_run("a", losses=(7.5, nan)), make_run("b", losses=(7.5, 7.0)), make_run("c", losses=())]
    seen = compare_runs.compare_runs([past_runs.read(path) for path in paths])
    assert seen.agreement == [
        compare_runs.Agreement(2, False, 2, None),
        compare_runs.Agreement(0, False, None, None),
    ]
    same = compare_runs.compare_runs([past_runs.read(paths[0])] * 2)
    assert same.agreement[0].equal
    assert (same.config, same.settings) == ({}, {})


def test_long_curves_are_shown_at_a_few_steps(make_run):
    path = make_run(losses=[7.0] * 1000)
    shown = compare_runs.compare_runs([past_runs.read(path)] * 2).losses
    assert len(shown) == compare_runs.STEPS
    assert (min(shown), max(shown)) == (1, 1000)


# Curves


def test_a_thinned_curve_keeps_its_ends_its_spikes_and_its_gaps():
    values = [1.0] * 5000
    values[1234], values[3456], values[4000] = 9.0, -9.0, float("nan")
    xs, ys = metrics_file.thinned(list(map(float, range(5000))), values, 200)
    assert len(xs) <= 300
    assert (xs[0], xs[-1]) == (0.0, 4999.0)
    assert {1234.0, 3456.0, 4000.0} <= set(xs)
    assert (max(y for y in ys if y == y), min(y for y in ys if y == y)) == (9.0, -9.0)


def test_a_mean_leaves_out_what_is_no_number():
    calm = metrics_file.calmed([1.0, 3.0, float("nan"), 5.0, 7.0], 3)
    assert calm[0] == 2.0 and calm[1] == 2.0 and calm[2] != calm[2] and calm[3:] == [6.0, 6.0]
