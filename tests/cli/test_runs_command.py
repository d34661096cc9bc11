"""`dsrun runs`, show, logs, stop, resume, rerun and compare: what they say, and what they answer to bad input."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from asking import finetune_request
from running import HEAVY

from dsrun.cli.output.columns import width
from dsrun.cluster.devices import Machine
from dsrun.job import run_folder
from dsrun.job.checkpoints import CheckpointChoice, Mark, WrittenFile
from dsrun.job.job import Job
from dsrun.jobs.assembly.finetune import plan
from dsrun.jobs.runs import past_runs
from dsrun.jobs.supervision import run
from dsrun.jobs.supervision.commands import commands_of
from dsrun.training.reports.report import Report

ROWS = '{"content": "类型#裙", "summary": "一条裙子。"}\n' * 9
PAPER = Machine("cpu", (), 4, "a machine of paper")
COMMANDS = ("runs", "show", "logs", "stop", "resume", "rerun", "compare")


@pytest.fixture
def work(tmp_path, monkeypatch):
    """The folder that commands run in; its name is a hostile one."""
    folder = tmp_path / "a user's 工作"
    folder.mkdir()
    (folder / "train.jsonl").write_text(ROWS, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return folder


@pytest.fixture
def make_run(work):
    """`make_run(name, state, losses, **options)`: a run's folder in runs/, as dsrun and its ranks write it."""

    def make(name: str = "mine", state: str = "finished", losses=(7.5, 7.25, 7.0), **given) -> Path:
        path = work / "runs" / name
        data = {"train_file": work / "train.jsonl", "eval_file": work / "train.jsonl"}
        request = {"output_dir": path, "gpus": 2, "max_steps": 4, **data, **given}
        model = request.pop("model", "llama-tiny")
        job = plan(finetune_request(model, **request), PAPER, os.environ).job
        with run_folder.held(path):
            run.write_folder(job, commands_of(job, os.environ), PAPER, os.environ)
            run_folder.write_state(path, "running")
            report = Report(path, 0)
            Report(path, 1).finished()
            report.phase(past_runs.FIRST_PHASE)
            report.event("plan", total_steps=4, start_step=0, train_rows=9, eval_rows=9, step_rows=8)
            report.metrics(step=0, eval_loss=7.75)
            for step, loss in enumerate(losses, 1):
                report.metrics(step=step, loss=loss, tokens=100, seconds=0.5, skipped=0, memory_bytes=2**30)
            report.event("scores", when="after", scores={"rouge-1": 12.345}, rows=9)
            if state == "finished":
                report.finished()
            problems = ["rank 1 failed first: ValueError: bad row\n    | the last line"]
            run_folder.write_state(path, state, **({"problems": problems} if state == "failed" else {}))
        return path

    return make


@pytest.fixture
def carried(monkeypatch):
    """Jobs that would be carried out: (job, resume) of each."""
    found = []

    def carry_out(job, machine, environ, say, view, *, options, resume, run_file, way_out):
        found.append((job, resume))
        took = {"gpu_allocated_bytes": None, "host_bytes": 2**30}
        return {
            "model": "m", "best": None, "eval_loss": None, "perplexity": None,
            "scores": {}, "run_dir": job.run_dir, "example_prompt": None, "template_args": {},
            "measured": took, "predicted": None, "answered": {}, "worse": False,
        }  # fmt: skip

    monkeypatch.setattr(run, "carry_out", carry_out)
    return found


# dsrun runs


def test_runs(dsrun, make_run):
    make_run("done")
    make_run("it's  dead", "running")
    make_run("失败", "failed", losses=())
    (Path("runs") / "killed").mkdir()
    (Path("runs") / "killed" / ".lock").touch()
    (Path("runs") / "with\na line").mkdir()
    (Path("runs") / "with\na line" / "job.json").write_text('{"format": 1')
    said = dsrun("runs")
    assert (said.code, said.err) == (0, "")
    lines = said.out.splitlines()
    assert len(lines) == 6
    assert " ".join(lines[0].split()) == "run model preset ranks state steps loss eval loss started took"
    row = r"^{} +llama-tiny +zero2 +2 +{} +{} +{} +7\.7500 +20\d\d-\d\d-\d\d \d\d:\d\d:\d\d +\d+:\d\d$"
    for parts in (
        ("done", "finished", "3/4", r"7\.0000"),
        ("it's  dead", "interrupted", "3/4", r"7\.0000"),
        ("失败", "failed", "0/4", "-"),
    ):
        assert re.search(row.format(*parts), said.out, re.MULTILINE), said.out
    assert any(line.startswith("killed  broken: ") and "job.json" in line for line in lines)
    assert any(line.startswith(r"with\na line  broken: job.json is not a job file") for line in lines)
    order = [line.split()[0] for line in lines[1:] if "llama-tiny" in line]
    assert order == ["失败", "it's", "done"]


def test_runs_as_json(dsrun, make_run, work):
    make_run("lost", losses=(7.5, float("nan")))
    (row,) = json.loads(dsrun("runs", "--json").out, parse_constant=pytest.fail)["runs"]
    assert row["path"] == str(work / "runs" / "lost")
    assert (row["steps"], row["loss"], row["eval_loss"], row["problem"]) == (2, None, 7.75, None)
    (work / "runs" / "lost" / "job.json").write_text("{")
    (row,) = json.loads(dsrun("runs", "--json", "runs/lost").out)["runs"]
    assert (row["state"], row["name"], row["model"]) == ("broken", "lost", None)
    assert row["problem"]


@pytest.mark.parametrize("columns", [100, 80, 60])
def test_a_narrow_terminal_gets_fewer_columns(dsrun, make_run, monkeypatch, columns):
    make_run("a-name-that-is-long")
    whole = dsrun("runs").out.splitlines()
    monkeypatch.setattr("dsrun.cli.runs.screen_width", lambda: columns)
    titles, row = dsrun("runs").out.splitlines()
    assert max(len(titles), len(row)) <= columns < len(whole[0])
    for cell in ("a-name-that-is-long", "finished", "3/4", "7.0000"):
        assert cell in row


@pytest.mark.parametrize("columns", [80, 40])
def test_a_long_name_stands_above_its_line(dsrun, make_run, monkeypatch, columns):
    """Nothing is wider than the terminal, and the name stays whole: it is what other commands are given."""
    name = "chatglm2-6b-zero2-offload-20261123-123456"[: columns - 1]
    path = make_run(name, "failed")
    make_run("short")
    run_folder.write_state(path, "failed", diagnosis={"cause": "checkpoint_of_another_world_size"})
    monkeypatch.setattr("dsrun.cli.runs.screen_width", lambda: columns)
    lines = dsrun("runs").out.splitlines()
    assert max(map(width, lines)) <= columns
    assert name in lines and "short" in lines
    place = lines.index(name)
    assert all(cell in " ".join(lines[place + 1 : place + 4]) for cell in ("another_world_size", "3/4"))


def test_no_runs(dsrun, work):
    said = dsrun("runs")
    assert (said.code, said.out) == (0, "")
    assert f"no runs in {work / 'runs'}" in said.err
    assert json.loads(dsrun("runs", "--json").out)["runs"] == []
    assert dsrun("runs", work).code == 0
    said = dsrun("runs", "elsewhere")
    assert (said.code, said.err) == (1, "dsrun: elsewhere: no such folder\n")


def test_two_hundred_runs(dsrun, make_run, imported, monkeypatch):
    """Each run is read as far as its line needs: no long file whole, and none twice."""
    whole: Counter[Path] = Counter()
    real = past_runs.read_bytes

    def read(run_dir: Path, name: str) -> bytes:
        whole[run_dir / name] += 1
        return real(run_dir, name)

    monkeypatch.setattr(past_runs, "read_bytes", read)
    path = make_run("0", losses=[7.0] * 300)
    for number in range(1, 200):
        shutil.copytree(path, path.with_name(str(number)))
    assert len(dsrun("runs").out.splitlines()) == 201
    assert whole
    assert set(whole.values()) == {1}
    assert "metrics.jsonl" not in {path.name for path in whole}
    assert not imported("runs", str(path.parent)) & HEAVY


def test_looking_needs_nothing_heavy(make_run, imported):
    path = make_run()
    (path / "logs" / "rank-0.log").write_text("a\n")
    for args in (("show", path), ("logs", path), ("compare", path, path)):
        assert not imported(*map(str, args)) & (HEAVY - {"jinja2"}), args


# dsrun show


def test_show(dsrun, make_run):
    path = make_run("a b")
    said = dsrun("show", "a b")
    assert (said.code, said.err) == (0, "")
    for words in (
        "finished, 3 of 4 steps", "llama-tiny (random", "train.jsonl, held out: ", "zero2 (ZeRO stage 2), fp32",
        "2 on cpu", "8 examples a step: micro batch 4 x accumulation 1 x 2", "7.5000 -> 7.0000", "step 0: 7.7500",
        "ROUGE-1 12.35", "200 tokens/s", "GiB of host memory (predicted ", "logs        logs\n",
        "config      deepspeed.json\n",
    ):  # fmt: skip
        assert words in said.out, said.out
    again = next(line for line in said.out.splitlines() if line.startswith("repeat"))
    assert shlex.split(again)[1:] == ["dsrun", "rerun", str(path.relative_to(Path.cwd()))]


def test_show_and_compare_on_a_narrow_terminal(dsrun, make_run, monkeypatch):
    """Folded at words: nothing is lost, and only a path may be wider. A long key has a line of its own."""
    one, two = make_run("one", preset="zero1"), make_run("two", preset="zero3")
    words = [("show", one), ("compare", one, two)]
    wide = [dsrun(*args).out for args in words]
    for module in ("compare", "output.columns"):
        monkeypatch.setattr(f"dsrun.cli.{module}.screen_width", lambda **_: 70)
    narrow = [dsrun(*args).out for args in words]
    for before, after in zip(wide, narrow, strict=True):
        assert before != after and before.split() == after.split()
    assert [
        line for text in narrow for line in text.splitlines() if width(line) > 70 and "/" not in line
    ] == []


def test_show_what_was_trained_on_what(dsrun, make_run, work):
    (work / "dev.jsonl").write_text(ROWS, encoding="utf-8")
    files = (f"{work}/train.jsonl:2", f"{work}/dev.jsonl:0.5")
    path = make_run("mine", method="lora", lora_target="q_proj,v_proj", train_file=files)
    (path / "data.json").touch()
    shown = json.loads(dsrun("show", "mine", "--json").out)
    assert (shown["peft"]["method"], shown["data"]["weights"]) == ("lora", [2.0, 0.5])
    assert set(shown["commands"]) == {"repeat"}, "there is no model to be asked"
    (path / "adapter").mkdir()
    said = dsrun("show", "mine").out
    for words in (
        f"data        {work}/train.jsonl x 2, {work}/dev.jsonl x 0.5, held out: ",
        "method      lora: rank 8, alpha 16, on q_proj,v_proj\n",
        "rows        data.json\n",
        "adapter     adapter\n",
        "ask         dsrun chat ",
    ):
        assert words in said, said


def test_show_why_it_failed(dsrun, make_run):
    path = make_run(state="failed")
    (path / "checkpoints" / "step-2").mkdir(parents=True)
    (path / "checkpoints" / "step-2" / "complete").write_text("{}")
    said = dsrun("show", path)
    assert "failed, 3 of 4 steps" in said.out
    assert (
        "error       rank 1 failed first: ValueError: bad row\n                | the last line\n" in said.out
    )
    assert "checkpoints checkpoints (sizes of files were compared" in said.out
    assert "    step-2: whole\n" in said.out
    assert "1.00 GiB at most so far on rank 0" in said.out
    assert f"dsrun resume {shlex.quote(str(path.relative_to(Path.cwd())))}" in said.out


def test_show_a_run_that_goes_on(dsrun, make_run):
    path = make_run(state="running")
    with run_folder.held(path):
        shown = json.loads(dsrun("show", path, "--json").out)
    assert shown["state"] == "running"
    assert set(shown["commands"]) == {"follow", "stop"}


def test_show_as_json(dsrun, make_run):
    path = make_run(losses=(7.5, float("nan")))
    shown = json.loads(dsrun("show", path, "--json").out, parse_constant=pytest.fail)
    assert (shown["path"], shown["state"], shown["problems"]) == (str(path), "finished", [])
    assert shown["loss"] == {"first": 7.5, "last": None}
    assert shown["measured"]["host_bytes"] > 0
    assert shown["predicted"]["host_bytes"] > 0
    assert shown["eval_losses"] == [{"step": 0, "loss": 7.75}]
    assert shown["places"]["logs"] == str(path / "logs")
    assert "model" not in shown["places"]


@pytest.mark.parametrize(
    "name", ["job.json", "run.json", "events.jsonl", "metrics.jsonl", "environment.json", "logs", "state"]
)
@pytest.mark.parametrize("state", ["finished", "failed", "running"])
def test_show_with_a_file_gone(dsrun, make_run, name, state):
    path = make_run(state=state)
    shutil.rmtree(path / name) if (path / name).is_dir() else (path / name).unlink()
    for args in (("show", path), ("show", path, "--json"), ("compare", path, path), ("runs", path)):
        said = dsrun(*args)
        assert "bug in dsrun" not in said.err
        assert said.code == (1 if name == "job.json" and args[0] != "runs" else 0), said.err


# Bad input

BAD = {
    "no such run": (("show", "miine"), "miine: no such run\n  Did you mean 'mine'?"),
    "a file": (("show", "train.jsonl"), "train.jsonl: is not a folder"),
    "no run": (("show", "."), "holds no run"),
    "a name too long": (("show", "x" * 300), "xxx"),
    "no such rank": (("logs", "mine", "--rank", 2), "has no rank 2\n  Its ranks are 0 to 1."),
    "no logs": (("logs", "mine"), "no rank has printed anything"),
    "stopped already": (("stop", "mine"), "is not running (finished)"),
    "finished": (("resume", "mine"), "is finished; there is nothing to continue"),
    "its own folder": (("rerun", "mine", "--output-dir", "runs/mine"), "holds a run already"),
    "a kind of picture": (
        ("compare", "mine", "mine", "--plot", "x.gif"),
        "--plot x.gif: unknown picture format",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_message(dsrun, make_run, case):
    make_run()
    args, words = BAD[case]
    said = dsrun(*args)
    assert (said.code, said.out) == (1, ""), said.err
    assert words in said.err
    assert said.err.count("dsrun: ") == 1


def test_wrong_usage(dsrun, work):
    for args in (
        ("show",),
        ("compare", "mine"),
        ("compare",),
        ("logs", "mine", "--rank", -1),
        ("stop", "x", "--timeout", "y"),
    ):
        assert dsrun(*args).code == 2


def test_every_run_that_is_wrong_is_named(dsrun, work):
    said = dsrun("compare", "one", "two")
    assert (said.code, said.err.count("no such run")) == (1, 2)


# dsrun logs


def test_logs(dsrun, make_run):
    path = make_run()
    (path / "logs" / "rank-0.log").write_text("both\nnull\n三\n", encoding="utf-8")
    (path / "logs" / "rank-1.log").write_text("both\neins\n三\n", encoding="utf-8")
    assert dsrun("logs", path).out == "[all] both\n[rank 0] null\n[rank 1] eins\n[all] 三\n"
    assert dsrun("logs", path, "--rank", 1).out == "both\neins\n三\n"
    said = dsrun("logs", path, "-f", "--rank", 0)
    assert (said.code, said.out) == (0, "both\nnull\n三\n")
    assert said.err == "dsrun: the run is finished\n"


def test_following_ends_with_the_run_or_with_ctrl_c(make_run):
    path = make_run(state="running")
    (path / "logs" / "rank-0.log").write_text("first\n")
    command = [sys.executable, "-m", "dsrun", "logs", "-f", str(path)]
    environ = {**os.environ, "PYTHONPATH": str(Path(run.__file__).parents[3])}
    for by_signal in (True, False):
        with run_folder.held(path):
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
            )
            assert process.stdout.readline() == "[rank 0] first\n"
            if by_signal:
                process.send_signal(2)
            else:
                (path / "logs" / "rank-1.log").write_text("half")
        out, err = process.communicate(timeout=300)
        assert (process.returncode, out) == ((130, "") if by_signal else (0, "[rank 1] half\n")), err


# dsrun resume, dsrun rerun


def test_resume_is_finetunes_with_the_model_of_the_run(dsrun, make_run, carried):
    path = make_run(state="interrupted")
    said = dsrun("resume", "mine", "--devices", "0,1")
    assert said.code == 0, said.err
    ((job, resume),) = carried
    assert (job.run_dir, job.model.name, resume) == (str(path), "llama-tiny", CheckpointChoice())
    assert job.training == Job.read(path / "job.json").training
    assert dsrun("resume", "mine", "--gpus", 1).code == 0
    assert carried[-1][0].world_size == 1
    assert "3 ranks can't share" in dsrun("resume", "mine", "--gpus", 3).err


def test_resume_from_an_older_checkpoint(dsrun, make_run, carried):
    """And what is damaged by its size is passed over, or refused where it is named, before anything is started."""
    path = make_run(state="interrupted")
    for step in (2, 3):
        folder = path / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "a.pt").write_bytes(b"abc")
        (folder / "complete").write_text(Mark(step, {}, {"a.pt": WrittenFile.of(folder / "a.pt", 0)}).text())
    said = dsrun("resume", "mine", "--devices", "0,1", "--checkpoint", 2, "--no-digests")
    assert said.code == 0, said.err
    assert carried[-1] == (carried[-1][0], CheckpointChoice(2, digests=False))
    said = dsrun("resume", "mine", "--devices", "0,1", "--checkpoint", 1)
    assert (said.code, "There are: 2, 3." in said.err) == (1, True)
    (path / "checkpoints" / "step-3" / "a.pt").write_bytes(b"ab")
    said = dsrun("resume", "mine", "--devices", "0,1", "--checkpoint", 3)
    assert (said.code, "a.pt (of rank 0) has 2 bytes in place of 3" in said.err) == (1, True)
    said = dsrun("resume", "mine", "--devices", "0,1")
    assert (said.code, "step-3 is damaged" in said.err, "going on from step-2" in said.err) == (0, True, True)
    assert "step-3: is damaged" in dsrun("show", "mine").out
    assert json.loads(dsrun("show", "mine", "--json").out)["checkpoints"][1]["damaged"]
    (path / "checkpoints" / "step-2" / "complete").write_text("")
    said = dsrun("resume", "mine", "--devices", "0,1")
    assert (said.code, "none of its checkpoints can be read" in said.err) == (1, True)
    assert len(carried) == 2


def test_rerun(dsrun, make_run, carried, work):
    path = make_run(seed=7)
    said = dsrun("rerun", "mine", "--output-dir", "again", "--json")
    assert said.code == 0, said.err
    ((job, resume),) = carried
    assert (job.run_dir, job.training.seed, resume) == (str(work / "again"), 7, None)
    assert json.loads(said.out)["run_dir"] == str(work / "again")
    assert job.ds_config == Job.read(path / "job.json").ds_config
    (work / "train.jsonl").write_text(ROWS * 2, encoding="utf-8")
    said = dsrun("rerun", "mine")
    assert said.code == 1
    assert "train.jsonl: is not the data that the run was planned with" in said.err
    assert len(carried) == 1


# dsrun compare


def test_compare(dsrun, make_run):
    one, other = make_run("one"), make_run("其他", losses=(7.5, 7.0), preset="zero3", lr=1e-3)
    said = dsrun("compare", "one", other)
    assert (said.code, said.err) == (0, "")
    assert f"run 1: {one} (finished)\nrun 2: {other} (finished)\n" in said.out
    for row in (
        r"zero_optimization\.stage +2 +3", r"optimizer\.params\.lr +0\.002 +0\.001",
        r"preset +zero2 +zero3", r"2 +7\.250000 +7\.000000", r"0 +7\.750000 +7\.750000",
        r"rouge-1 after +12\.35 +12\.35", r"steps +3 +2", r"tokens a second +200 +200",
        r"host memory +[\d.]+ GiB +[\d.]+ GiB",
    ):  # fmt: skip
        assert re.search(rf"^ +{row}$", said.out, re.MULTILINE), (row, said.out)
    assert "run 2 and run 1: at most 0.25 apart, at step 2 (of 2 steps that both have)" in said.out
    assert "training.lr" not in said.out, "once is enough"
    assert said.out.index("last loss") < said.out.index("zero_optimization"), "results first"


def test_another_model_is_one_row(dsrun, make_run):
    said = dsrun("compare", make_run("one"), make_run("two", model="chatglm2-tiny"))
    assert re.search(r"^  model +llama-tiny +chatglm2-tiny$", said.out, re.MULTILINE), said.out
    assert "model.architecture" not in said.out


def test_long_values_lose_their_middle_on_a_terminal(dsrun, make_run, monkeypatch, work):
    long = work / f"{'a-long-name-' * 9}.jsonl"
    long.write_text(ROWS, encoding="utf-8")
    runs = make_run("one"), make_run("two", train_file=(str(long),))
    assert str(long) in dsrun("compare", *runs).out, "a file or a pipe gets all of it"
    for module in ("compare", "output.columns"):
        monkeypatch.setattr(f"dsrun.cli.{module}.screen_width", lambda **_: 80)
    lines = dsrun("compare", *runs).out.splitlines()
    cut = [line for line in lines if "…" in line]
    assert cut and max(map(width, cut)) <= 80
    assert all(line.rstrip().endswith("e-.jsonl") for line in cut if "long" in line)


def test_compare_equal_runs(dsrun, make_run):
    said = dsrun("compare", make_run("a"), make_run("b"), make_run("c", losses=()))
    assert "config: the same in all" in said.out
    assert "settings: the same in all" in said.out
    assert "run 2 and run 1: equal to the last digit at all 3 steps that both have" in said.out
    assert "run 3 and run 1: no step in common" in said.out


def test_compare_as_json(dsrun, make_run):
    paths = make_run("a"), make_run("b", losses=(7.5, float("nan")))
    shown = json.loads(dsrun("compare", *paths, "--json").out, parse_constant=pytest.fail)
    assert shown["runs"] == [str(path) for path in paths]
    assert shown["losses"] == [{"1": 7.5, "2": 7.25, "3": 7.0}, {"1": 7.5, "2": None}]
    assert shown["agreement"] == [{"steps": 2, "equal": False, "step": 2, "difference": None}]


def test_compare_draws_the_curves(dsrun, make_run, work):
    pytest.importorskip("matplotlib")
    for kind, start in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        file = work / f"the curves{kind}"
        said = dsrun(
            "compare", make_run(f"cost $x^2$ {kind}"), make_run(f"other{kind}", losses=()), "--plot", file
        )
        assert said.code == 0, said.err
        assert str(file) in said.err
        assert file.read_bytes().startswith(start)
    said = dsrun("compare", "other.png", "other.png", "--plot", work / "none" / "x.png")
    assert (said.code, said.out) == (1, "")
    assert "can't be written" in said.err


def test_columns_of_any_script_line_up():
    from dsrun.cli.output.columns import columns, width

    lines = columns([["失败", "1", "x"], ["a\tb", "22"], ["e\u0301", "333", "y"]])
    assert [width(line) for line in lines] == [12, 9, 12]
    assert lines == ["失败    1  x", "a\\tb   22", "e\u0301     333  y"]
