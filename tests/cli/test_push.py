"""`finetune --push`: what is refused before the start, what is pushed at the end, and what isn't."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys

import pytest
from hub_stand_in import NAME, TOKEN, stand_in
from needed import needs
from running import SHORT

needs("huggingface_hub")

from dsrun.cli.jobs import pushing
from dsrun.jobs.runs import exporting
from dsrun.options.commands import FinetuneOptions

PUSH = FinetuneOptions(push=NAME)


@pytest.fixture
def hub(monkeypatch):
    with stand_in() as hub:
        for name, value in hub.environ.items():
            monkeypatch.setenv(name, value)
        yield hub


@pytest.fixture
def job(make_job, tmp_path, monkeypatch):
    """A job whose run has written its model; that the model can be loaded is the export's own test."""
    run = tmp_path / "a run's 实验"
    (run / "model").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (run / "model" / name).write_text(name, encoding="utf-8")
    monkeypatch.setattr(exporting, "carry_out", lambda request, _: {"folders": request.folders})
    return make_job(run)


@pytest.mark.parametrize(
    ("options", "environ", "words"),
    [
        (("--push", "a/b/c"), {}, "names no repository"),
        (("--push", NAME), {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE forbids it"),
        (("--push", NAME), {"HF_ENDPOINT": "http://127.0.0.1:9"}, "HF_ENDPOINT"),
        (("--push", NAME, "--export-format", "none"), {}, "--export-format none writes none"),
        (("--public",), {}, "Give --push, too"),
    ],
)
def test_what_can_not_be_pushed_is_refused_before_the_start(
    dsrun, hub, monkeypatch, tmp_path, options, environ, words
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    said = dsrun("finetune", "llama-tiny", "--gpus", 1, "--dry-run", *options)
    assert (said.code, words in said.err) == (1, True), said.err


def test_without_a_token_or_the_package(dsrun, hub, monkeypatch):
    import importlib.util

    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert "no token for the Hub" in dsrun("finetune", "llama-tiny", "--push", NAME, "--dry-run").err
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "huggingface_hub" else there(name, *more),
    )
    assert "--push needs huggingface_hub" in dsrun("finetune", "llama-tiny", "--push", NAME, "--dry-run").err


def test_the_model_of_the_end_is_pushed(hub, job, capsys):
    options = dataclasses.replace(PUSH, public=True)
    result = pushing.push_result(job, options, {"worse": False})
    assert result["pushed"].startswith(f"{hub.address}/{NAME}/commit/")
    assert result["pushed"] in capsys.readouterr().out
    assert [line["value"]["path"] for line in hub.commits[0]["lines"]] == ["config.json", "model.safetensors"]
    assert hub.repositories[NAME]["private"] is False


def test_what_the_repository_became_meanwhile_counts(hub, job):
    """Hours pass between the look before the start and the push."""
    pushing.goal(PUSH)
    hub.repositories[NAME] = {"private": True, "files": ["model-00001-of-00002.safetensors"]}
    pushing.push_result(job, PUSH, {"worse": False})
    (commit,) = hub.commits
    assert {"key": "deletedFile", "value": {"path": "model-00001-of-00002.safetensors"}} in commit["lines"]


@pytest.mark.parametrize("fault", ["refused", "worse", "no model"])
def test_a_run_stays_finished_where_its_model_is_not_pushed(hub, job, capsys, tmp_path, fault):
    hub.repositories[NAME] = {"private": True, "files": []}
    hub.refuses = 403 if fault == "refused" else 0
    if fault == "no model":
        (tmp_path / "a run's 实验" / "model").rename(tmp_path / "elsewhere")
    result = pushing.push_result(job, PUSH, {"worse": fault == "worse"})
    said = capsys.readouterr()
    words = {
        "refused": "refuses my-lab/model (403)",
        "worse": "worse than it began",
        "no model": "wrote no model",
    }
    assert words[fault] in result["push_failed"]
    assert words[fault] in said.err
    assert shlex.join(["dsrun", "export", job.run_dir, "--push", NAME]) in said.err
    assert said.out == ""
    assert hub.commits == []
    assert TOKEN not in said.err


@pytest.mark.slow
def test_a_run_that_ends_well_pushes_and_one_that_fails_does_not(hub, environ, data, tmp_path):
    needs("torch", "deepspeed", "transformers")
    run = tmp_path / "run"
    job = ("finetune", "llama-tiny", "--gpus", "1", *SHORT, *data, "--max-steps", "2")
    command = [sys.executable, "-m", "dsrun", *job]
    env = {**environ, **hub.environ}
    done = subprocess.run(
        [*command, "--output-dir", run, "--push", NAME, "--json"],
        env=env, text=True, capture_output=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pushed"].startswith(f"{hub.address}/{NAME}")
    names = {line["value"]["path"] for line in hub.commits[0]["lines"]}
    assert names == {path.name for path in (run / "model").iterdir()}
    kept = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    assert TOKEN.encode() not in kept + done.stdout.encode() + done.stderr.encode()
    failed = subprocess.run(
        [*command, "--output-dir", tmp_path / "failed", "--push", NAME, "--lr", "1e30", "--grad-clip", "0"],
        env=env, text=True, capture_output=True, timeout=400, check=False,
    )  # fmt: skip
    assert failed.returncode != 0, failed.stdout
    assert len(hub.commits) == 1
