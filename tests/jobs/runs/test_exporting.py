"""Which checkpoint a model is made from, where it goes, and what is refused before anything is started."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from dsrun.cli.jobs.running import run_options_of
from dsrun.errors import DsrunError
from dsrun.job import export_request
from dsrun.jobs.allocation.request import ConnectionOptions
from dsrun.jobs.runs import exporting
from dsrun.jobs.runs.past_runs import Run
from dsrun.options.table import PeftOptions, SupervisionOptions


@pytest.fixture
def make_run(make_job, tmp_path):
    """`make_run(steps, state, **fields)`: a run with whole checkpoints after these steps."""

    def make(
        steps=(2, 10), state: str = "failed", method: str = "full", export_format: str = "transformers"
    ) -> Run:
        folder = tmp_path / "a run's 实验"
        for step in steps:
            (folder / f"checkpoints/step-{step}").mkdir(parents=True)
            (folder / f"checkpoints/step-{step}/complete").write_text("{}")
        (folder / "checkpoints/step-99").mkdir(parents=True)  # cut short
        job = make_job(folder, peft=PeftOptions(method=method))
        training = dataclasses.replace(job.training, export_format=export_format)
        return Run(folder, dataclasses.replace(job, training=training), state, {})

    return make


def asked(run: Run, step: int | None = None, output: Path | None = None):
    return exporting.request(run, run.job, step, output)


def test_the_newest_whole_one(make_run):
    run = make_run()
    found = asked(run)
    assert found.checkpoint == str(run.path / "checkpoints/step-10")
    assert found.folders == {"model": str(run.path / "model")}
    assert export_request.export_request(export_request.to_json(found)) == found


def test_another_one_to_another_place(make_run, tmp_path):
    run = make_run(state="running")
    found = asked(run, 2, tmp_path / "new")
    assert found.checkpoint.endswith("step-2")
    assert found.folders == {"model": str(tmp_path / "new")}


@pytest.mark.parametrize(
    ("method", "export_format", "own", "elsewhere"),
    [
        ("full", "chatglm", ["model", "model-chatglm"], "model-chatglm"),
        ("lora", "transformers", ["model", "adapter"], "model"),
        ("lora", "adapter", ["adapter"], "adapter"),
        ("ptuning", "transformers", ["adapter"], "adapter"),
    ],
)
def test_what_is_written(method, export_format, own, elsewhere, make_run, tmp_path):
    run = make_run(method=method, export_format=export_format)
    assert list(asked(run).folders) == own
    assert asked(run, output=tmp_path / "new").folders == {elsewhere: str(tmp_path / "new")}


def test_a_run_that_wrote_no_model_gets_it_later(make_run):
    run = make_run(method="lora", export_format="none")
    assert export_request.export_folders(run.job, run.path) == {}
    assert list(exporting.request(run, exporting.job_of(run, None), None, None).folders) == [
        "model",
        "adapter",
    ]


def test_another_format(make_run):
    run = make_run(method="lora")
    assert list(exporting.request(run, exporting.job_of(run, "adapter"), None, None).folders) == ["adapter"]


def test_a_step_that_has_none(make_run):
    with pytest.raises(DsrunError, match="no whole checkpoint after step 99") as caught:
        asked(make_run(), 99)
    assert caught.value.problems[0].hint == "There are: 2, 10."


@pytest.mark.parametrize(("state", "command"), [("failed", "resume"), ("finished", "rerun")])
def test_a_run_without_any(make_run, state, command):
    with pytest.raises(DsrunError, match="has no whole checkpoint") as caught:
        asked(make_run((), state))
    assert f"dsrun {command} " in caught.value.problems[0].hint


def test_a_finished_run_that_kept_none_has_its_model(make_run):
    run = make_run((), "finished")
    (run.path / "model").mkdir()
    (run.path / "model" / "config.json").write_text("{}")
    with pytest.raises(DsrunError, match="has no whole checkpoint") as caught:
        asked(run)
    assert str(run.path / "model") in caught.value.problems[0].hint


def test_a_run_that_diverged_is_not_to_be_trained_on(make_run):
    run = dataclasses.replace(make_run(()), record={"why": "loss is not finite since step 2"})
    with pytest.raises(DsrunError, match="has no whole checkpoint") as caught:
        asked(run)
    assert "--lr" in caught.value.problems[0].hint
    assert "dsrun resume" not in caught.value.problems[0].hint


def test_what_is_there_stays(make_run, tmp_path):
    run = make_run()
    (run.path / "model").mkdir()
    with pytest.raises(DsrunError, match="holds a model already") as caught:
        asked(run)
    assert "-o" in caught.value.problems[0].hint
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    for folder, words in (("full", "is not empty"), ("full/file", "is not a folder")):
        with pytest.raises(DsrunError, match=words):
            asked(run, output=tmp_path / folder)


def test_a_run_that_goes_on_writes_its_own(make_run):
    with pytest.raises(DsrunError, match="is still running"):
        asked(make_run(state="running"))


# To be pushed


def test_a_finished_model_is_looked_at_and_not_written_again(make_run):
    run = make_run(state="finished", method="lora")
    for name in ("model", "adapter"):
        (run.path / name).mkdir()
    found = exporting.pushed(run, run.job, None, None)
    assert found.checkpoint is None
    assert found.folders == {"model": str(run.path / "model")}
    adapter = exporting.pushed(run, exporting.job_of(run, "adapter"), None, None)
    assert adapter.folders == {"adapter": str(run.path / "adapter")}


def test_an_unfinished_model_is_pushed_by_its_step_alone(make_run, tmp_path):
    run = make_run(state="failed")
    with pytest.raises(DsrunError, match="is failed") as caught:
        exporting.pushed(run, run.job, None, None)
    assert "2, 10" in caught.value.problems[0].hint
    assert str(exporting.pushed(run, run.job, 2, tmp_path / "new").checkpoint).endswith("step-2")


def test_public_says_nothing_alone(dsrun, make_run):
    said = dsrun("export", make_run().path, "--public")
    assert said.code == 1
    assert "--push" in said.err


def test_the_command_says_it_all(dsrun, make_run):
    run = make_run(())
    (run.path / "job.json").write_text(run.job.to_json(), encoding="utf-8")
    said = dsrun("export", run.path)
    assert said.code == 1
    assert "has no whole checkpoint" in said.err


# How long ranks wait for one another


@pytest.mark.parametrize("own", [None, "7"])
def test_the_time_limit_of_the_process_group(own, monkeypatch):
    monkeypatch.delenv("DEEPSPEED_TIMEOUT", raising=False)
    if own:
        monkeypatch.setenv("DEEPSPEED_TIMEOUT", own)
    options, environ = run_options_of(ConnectionOptions(), "ssh", SupervisionOptions(timeout=30))
    assert options.env["DEEPSPEED_TIMEOUT"] == environ["DEEPSPEED_TIMEOUT"] == "30"
    _, environ = run_options_of(ConnectionOptions(), "local")
    assert environ == dict(os.environ)
