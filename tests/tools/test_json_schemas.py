"""Commands print with --json what docs/reference/json/ says, and no key more."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jsonschema
import pytest
from running import check_form

from dsrun.job import run_folder
from dsrun.job.job import HostDevices, ScriptJob
from dsrun.json_outputs import VERSIONS, versioned
from dsrun.training.reports.report import Report
from tools.json_forms import FORMS
from tools.json_schemas import schema_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def work(tmp_path, monkeypatch):
    """The folder that commands run in, with two configs and a log."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    zero = '{"train_batch_size": 8, "zero_optimization": {"stage": %d, "offload_param": {"device": "cpu"}}}'
    for number in (2, 3):
        (tmp_path / f"ds{number}.json").write_text(zero % number)
    (tmp_path / "train.log").write_text(
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 88.00 MiB. GPU 0 has a total capacity of "
        "15.90 GiB of which 20.00 MiB is free.\n"
    )
    (tmp_path / "hostfile").write_text("node1 slots=8\nnode1 slots=x\n")
    return tmp_path


@pytest.fixture
def runs(work, make_job):
    """A fine-tune that ended, one that failed, a script and a folder that can't be read."""
    predicted = {
        "device": "cpu", "gpu_held_bytes": 1.0, "gpu_allocated_bytes": 1.0, "gpu_reserved_bytes": 1.0,
        "host_bytes": 1e9, "step_seconds": 0.5,
    }  # fmt: skip
    for name, losses in (("one", (7.5, 7.0)), ("two", (7.5, float("nan")))):
        path = work / "runs" / name
        with run_folder.held(path):
            (path / "job.json").write_text(make_job(path, prediction=predicted).to_json())
            reports = [Report(path, rank) for rank in range(2)]
            reports[0].event("plan", total_steps=2, start_step=0, train_rows=9, eval_rows=9, step_rows=8)
            reports[0].metrics(step=0, eval_loss=7.75)
            for step, loss in enumerate(losses, 1):
                reports[0].metrics(step=step, loss=loss, tokens=9, seconds=0.5, skipped=0, memory_bytes=2**30)
            reports[0].event("scores", when="after", scores={"rouge-1": 1.5}, rows=9)
            for report in reports:
                report.finished()
            run_folder.write_state(path, "finished")
    told = {"cause": "nan", "rank": 1, "summary": "x"}
    run_folder.write_state(work / "runs" / "two", "failed", why="loss", problems=["x"], diagnosis=told)
    script = work / "runs" / "script"
    job = ScriptJob(
        run_dir=str(script), hosts=(HostDevices("localhost", (0,)),), script="/x/train.py", args=("--x",), cwd="/x",
        accelerator="cpu", dsrun_version="0",
    )  # fmt: skip
    with run_folder.held(script):
        (script / "job.json").write_text(job.to_json())
    shutil.copytree(script, work / "runs" / "half")
    (work / "runs" / "half" / "job.json").write_text("{")
    return work / "runs"


def test_every_form_has_a_version_and_a_type():
    assert set(FORMS) == set(VERSIONS)


@pytest.mark.parametrize("name", FORMS)
def test_the_schemas_are_schemas(name):
    schema = schema_of(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["required"][0] == "version"


def test_an_undeclared_key_is_found():
    value = versioned("presets", {"presets": [], "more": 1})
    with pytest.raises(AssertionError, match="more"):
        check_form("presets", value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("validate", ("validate", "ds2.json", "ds3.json", "--level", "note", "--json")),
        ("diff", ("diff", "ds2.json", "ds3.json", "--json")),
        ("models", ("models", "--json")),
        ("presets", ("preset", "--json")),
        ("preset-explain", ("preset", "zero2", "--explain", "--json")),
        ("diagnose", ("diagnose", "train.log", "--json")),
        ("plan", ("plan", "llama-2-7b", "--gpu", "v100-32g", "--gpus", "4", "--price", "2", "--json")),
        ("plan-layouts", ("plan", "llama-2-7b", "--gpu", "a100-80g", "--gpus", "8", "--layouts", "--json")),
        ("plan-inference", ("plan", "llama-2-7b", "--gpu", "v100-32g", "--for", "inference", "--json")),
        ("dry-run", ("finetune", "llama-tiny", "--gpus", "2", "--dry-run", "--json")),
        ("explain", ("finetune", "llama-tiny", "--gpus", "2", "--explain", "--json")),
        ("hosts-check", ("hosts", "check", "hostfile", "--json")),
        ("doctor", ("doctor", "--json")),
    ],
)
@pytest.mark.usefixtures("work")
def test_what_is_printed(dsrun, name, words):
    check_form(name, json.loads(dsrun(*words).out))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("runs", ("runs",)),
        ("show", ("show", "one")),
        ("show", ("show", "two")),
        ("show-script", ("show", "script")),
        ("compare", ("compare", "one", "two")),
        ("plan-calibrate", ("plan", "--calibrate", "runs/one")),
    ],
)
@pytest.mark.usefixtures("runs")
def test_what_is_printed_of_runs(dsrun, name, words):
    check_form(name, json.loads(dsrun(*words, "--json").out))


def test_every_command_with_json_has_a_form():
    """Commands whose help names --json."""
    told = {command.split()[1] for form in FORMS.values() for command in form.commands}
    sources = {
        path.stem.rstrip("_"): path.read_text(encoding="utf-8")
        for path in (ROOT / "dsrun" / "cli").glob("[!_]*.py")
    }
    having = {name for name, text in sources.items() if '"--json"' in text or "as_json" in text}
    assert having - told == set()
