"""`dsrun launch` as a command: whose words are whose, what it prints, and how it ends. Nothing is started here."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from asking import script_request

from dsrun.job import run_folder
from dsrun.job.job import read
from dsrun.job.processes import TerminalClosedError, TerminatedError
from dsrun.jobs.assembly import script as script_job
from dsrun.jobs.supervision import run
from dsrun.jobs.supervision.commands import commands_of

HEAVY = {"torch", "deepspeed", "transformers", "accelerate", "numpy", "yaml", "rich", "jinja2"}
RAW = "import argparse, deepspeed\nargs = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args()\n"


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    folder = tmp_path / "a user's 工作"
    folder.mkdir()
    (folder / "train.py").write_text(RAW, encoding="utf-8")
    (folder / "lab.json").write_text('{"train_batch_size": 4}', encoding="utf-8")  # which is Python, too
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return folder


@pytest.fixture
def carried(monkeypatch):
    """Jobs that would be carried out: (job, environ, options) of each. Put an error into `raises` to have it end so."""

    class Carried(list):
        raises: BaseException | None = None

    found = Carried()

    def carry_out(job, machine, environ, say, view, *, options, resume=False, run_file="", way_out=None):
        found.append((job, environ, options))
        if found.raises:
            raise found.raises
        return {
            "run_dir": job.run_dir,
            "ranks": job.world_size,
            "seconds": 1.0,
            "restarts": 0,
            "logs": "logs",
        }

    monkeypatch.setattr(run, "carry_out", carry_out)
    return found


def test_what_follows_the_script_is_its_own(dsrun, carried):
    words = ("--help", "--gpus", "7", "--dry-run", "-m", "--", "--json", "a b", "--preset=x")
    said = dsrun("launch", "--gpus", "2", "train.py", *words)
    assert said.code == 0, said.err
    ((job, _, _),) = carried
    assert (job.script, job.args, job.world_size) == ("train.py", words, 2)
    assert said.out == "", "stdout is the script's"
    assert "--dry-run and --gpus: behind train.py" in said.err


def test_an_option_that_the_script_has_is_no_slip(dsrun, carried, work):
    (work / "train.py").write_text(RAW + "# parser.add_argument('--dry-run')\n", encoding="utf-8")
    assert "behind" not in dsrun("launch", "train.py", "--dry-run").err


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("--gpu", "2", "train.py"), 2, "--gpus"),
        ((), 2, "SCRIPT"),
        (("--hang-timeout", "nan", "train.py"), 2, "finite"),
        (("--hang-timeout", "0", "train.py"), 2, "hang-timeout"),
        (("--max-restarts", "-1", "train.py"), 2, "max-restarts"),
        (("trian.py",), 1, "train.py"),
        (("python", "train.py"), 1, "Leave it out"),
        (("lab.json",), 1, "--deepspeed_config"),
        (("--lr", "1", "train.py"), 1, "--preset"),
        (("--preset", "zero9", "train.py"), 1, "zero9"),
        (("--env", "A B=1", "train.py"), 1, "'A B'"),
        (("train.py", "--deepspeed_config", "none.json"), 1, "no such file"),
    ],
)
def test_bad_words(dsrun, words, code, told, untouched):
    said = dsrun("launch", *words)
    assert said.code == code
    assert told in said.err
    assert "Traceback" not in said.err


def test_dry_run(dsrun, untouched):
    said = dsrun(
        "launch", "--gpus", "2", "--preset", "zero2", "--env", "WANDB_API_KEY=abc123", "--env", "LAB=x y",
        "--dry-run", "train.py", "--epochs", "3", "--hub-token", "abc123",
    )  # fmt: skip
    assert said.code == 0, said.err
    assert "localhost" in said.out
    assert '"stage": 2' in said.out
    assert "export LAB='x y'" in said.out
    assert "abc123" not in said.out
    assert (
        "train.py --local_rank=N --epochs 3 --hub-token '(hidden)' --deepspeed --deepspeed_config" in said.out
    )
    assert "dsrun.jobs.supervision.rank" in said.out


def test_dry_run_as_json(dsrun, untouched):
    words = (
        "--dry-run",
        "--json",
        "--no-local-rank",
        "--env",
        "WANDB_API_KEY=abc123",
        "train.py",
        "--key=abc123",
    )
    said = dsrun("launch", "--gpus", "2", *words)
    shown = json.loads(said.out)
    assert "abc123" not in said.out
    assert shown["job"]["args"] == ["--key=(hidden)"]
    assert shown["job"]["local_rank"] is False
    assert [row["rank"] for row in shown["ranks"]] == [0, 1]
    assert len(shown["commands"]) == 1


def test_how_it_goes_on(dsrun, carried, monkeypatch):
    monkeypatch.setenv("MINE", "1")
    said = dsrun(
        "launch", "--gpus", "1", "--hang-timeout", "0.5", "--max-restarts", "2", "--master-port", "29999",
        "--env", "MINE", "--env", "LAB=2", "--json", "train.py",
    )  # fmt: skip
    assert said.code == 0, said.err
    assert json.loads(said.out)["ranks"] == 1
    ((_, environ, options),) = carried
    assert (options.hang_timeout, options.max_restarts, options.master_port) == (0.5, 2, 29999)
    assert (environ["LAB"], environ["MINE"]) == ("2", "1")
    assert (options.env["LAB"], options.env["MINE"]) == ("2", "1")


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (TerminatedError(), 143), (TerminalClosedError(), 129)]
)
def test_when_it_is_ended(dsrun, carried, error, code):
    carried.raises = error
    said = dsrun("launch", "--gpus", "1", "--output-dir", "mine", "train.py")
    assert said.code == code
    assert "dsrun rerun" in said.err
    assert "mine" in said.err


def test_nothing_heavy_is_imported(imported, work):
    (work / "plain.py").write_text("print(1)")
    found = imported("launch", "--gpus", "1", "--dry-run", str(work / "plain.py"))
    assert not found & (HEAVY - {"jinja2"})


# A script's run among the others


@pytest.fixture
def past(work, machine=None):
    """The folder of a script's run that has failed."""
    from dsrun.cluster.devices import Machine

    paper = Machine("cpu", (), 4, "a machine of paper")
    request = script_request("train.py", ("--x", "a b"), gpus=2, output_dir=Path("runs/mine"))
    job = script_job.plan(request, paper, os.environ).job
    path = work / "runs" / "mine"
    with run_folder.held(path):
        run.write_folder(job, commands_of(job, os.environ), paper, os.environ)
        run_folder.write_state(path, "failed", problems=["rank 1 failed first: ValueError: a bad row"])
    for rank in (0, 1):
        (path / "logs" / f"rank-{rank}.log").write_text("loading\n", encoding="utf-8")
    assert read(path / "job.json") == job
    return path


def test_runs(dsrun, past):
    said = dsrun("runs")
    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines()[1].split()[:6] == ["mine", "train.py", "-", "2", "failed", "-"]
    (one,) = json.loads(dsrun("runs", "--json").out)["runs"]
    assert (one["model"], one["steps"], one["problem"]) == ("train.py", None, None)


def test_show(dsrun, past):
    said = dsrun("show", "mine")
    assert said.code == 0, said.err
    for words in ("failed", "train.py --x 'a b'", "a bad row", "dsrun rerun", str(past.parents[1])):
        assert words in said.out
    shown = json.loads(dsrun("show", "mine", "--json").out)
    assert (shown["script"], shown["args"], shown["ranks"]) == ("train.py", ["--x", "a b"], 2)


def test_logs_and_stop(dsrun, past):
    assert dsrun("logs", "mine").out == "[all] loading\n"
    assert "is not running (failed)" in dsrun("stop", "mine").err


@pytest.mark.parametrize("words", [("resume", "mine"), ("compare", "mine", "mine")])
def test_what_can_not_be_done_with_it(dsrun, past, words):
    said = dsrun(*words)
    assert said.code == 1
    assert said.err.count("is the run of a script") == 1
    assert "dsrun rerun" in said.err
