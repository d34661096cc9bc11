"""A run that goes on, or is done again, with files that are not what they were. As values: nothing is started."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import replace
from pathlib import Path

import pytest
from asking import finetune_request
from running import write_tokenizer

from dsrun.data import inputs
from dsrun.errors import DsrunError
from dsrun.job import run_folder
from dsrun.job.checkpoints import Mark
from dsrun.job.job import Job, ModelSpec, Prepared
from dsrun.job.layout import MARK
from dsrun.jobs.assembly import finetune, rerun
from dsrun.jobs.assembly.resume import resumed
from dsrun.jobs.launchers.common import environment
from dsrun.jobs.runs import past_runs
from dsrun.options.table import PeftOptions

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64,
    "torch_dtype": "float32",
}  # fmt: skip
ROWS = "".join(json.dumps({"content": f"q {n}", "summary": "a"}) + "\n" for n in range(64))


@pytest.fixture
def model(tmp_path) -> Path:
    """A model's folder; its one weight is nobody's."""
    folder = tmp_path / "a model 模型"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(folder)
    header = json.dumps({"x": {"dtype": "F32", "shape": [256], "data_offsets": [0, 1024]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(1024))
    return folder


@pytest.fixture
def data(tmp_path) -> Path:
    path = tmp_path / "train 数据.jsonl"
    path.write_text(ROWS, encoding="utf-8")
    return path


@pytest.fixture
def started(tmp_path, monkeypatch, machine, model, data):
    """`started(name=MODEL, checkpoint=True, cached=False, **options)`: a run that died."""
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "cache"))

    def made(name=str(model), *, checkpoint=True, cached=False, **options) -> Job:
        limits = {"max_source_length": 16, "max_target_length": 16, "preset": "zero2"}
        given = {"output_dir": tmp_path / "run", "train_file": data, "gpus": 2, **limits, **options}
        job = finetune.plan(finetune_request(name, **given), machine, {}).job
        return kept(job, checkpoint=checkpoint, cached=cached)

    return made


def kept(job: Job, *, checkpoint=True, cached=False) -> Job:
    run_dir = Path(job.run_dir)
    with run_folder.held(run_dir):
        (run_dir / run_folder.JOB).write_text(job.to_json(), encoding="utf-8")
        run_folder.write_state(run_dir, "failed")
    if checkpoint:
        (run_dir / "checkpoints/step-4").mkdir(parents=True, exist_ok=True)
        (run_dir / "checkpoints/step-4" / MARK).write_text(Mark(4, {}).text())
    if cached:
        Path(job.prepared.train_rows).parent.mkdir(parents=True)
        Path(job.prepared.train_rows).touch()
    return job


@pytest.fixture
def resume(machine):
    """`resume(job)`: what is said of it."""

    def run(job: Job) -> tuple[str, ...]:
        name = job.model.location if job.model.source == "folder" else job.model.name
        return resumed(finetune_request(name, output_dir=Path(job.run_dir)), machine, {}).notes

    return run


@pytest.fixture
def refused(resume, machine):
    """`refused(job)`: the one problem, which resume and rerun both have."""

    def run(job: Job, *, again=True):
        with pytest.raises(DsrunError) as caught:
            resume(job)
        if again:
            with pytest.raises(DsrunError) as once_more:
                repeat(job, machine)
            assert str(once_more.value) == str(caught.value)
        (problem,) = caught.value.problems
        return problem

    return run


def repeat(job: Job, machine):
    return rerun.repeated(past_runs.read(Path(job.run_dir)), machine, {}, output_dir=None)


def touch(path: Path) -> None:
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 10**9))


def test_the_record_is_in_the_job(started, model, data):
    job = started()
    assert [(Path(file.path).name, file.kind) for file in job.prepared.inputs.files] == [
        (data.name, "train"), ("tokenizer.json", "tokenizer"), ("config.json", "config"),
        ("model.safetensors", "weights"),
    ]  # fmt: skip
    assert Job.read(Path(job.run_dir) / run_folder.JOB) == job


def test_nothing_was_changed(started, resume, machine):
    job = started(method="lora")
    assert not [note for note in (*resume(job), *repeat(job, machine).notes) if "planned" in note]


def test_other_versions_are_named(started, resume, machine):
    job = started()
    packages = {**environment.every_package(), "torch": "2.0.0", "rich": "0"}
    record = {"python": platform.python_version(), "packages": packages}
    (Path(job.run_dir) / run_folder.ENVIRONMENT).write_text(json.dumps(record))
    for notes in (resume(job), repeat(job, machine).notes):
        (line,) = [note for note in notes if "other versions" in note]
        assert "torch 2.0.0 -> " in line and "and of 1 other package" in line and "rich" not in line


def test_a_changed_file_and_an_empty_cache(started, resume, refused, data):
    """The rows that were tokenised of it would have the name of those that the run began with."""
    job = started()
    data.write_text("".join(ROWS.splitlines(keepends=True)[:40]), encoding="utf-8")
    problem = refused(job)
    assert problem.where == str(data)
    assert f"{data.stat().st_size:,} bytes, {len(ROWS.encode()):,} when the run was planned" in problem.what
    assert "Put it back as it was, or start a new run" in problem.hint
    data.write_text(ROWS, encoding="utf-8")
    resume(job)


def test_a_changed_file_whose_rows_are_there(started, resume, refused, machine, data):
    job = started(cached=True)
    data.write_text(ROWS.replace("q 7", "q 8"), encoding="utf-8")
    (note,) = [note for note in resume(job) if str(data) in note]
    assert "as before, other ones: SHA-256" in note
    assert note.endswith("; the run goes on with what was made of it, which is in the cache")
    data.unlink()
    assert any(note.startswith(f"{data}: is not there") for note in resume(job))
    with pytest.raises(DsrunError, match="is gone"):
        repeat(job, machine)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_changed_weights(started, resume, refused, machine, model, method):
    """What is frozen is in no checkpoint; what was trained is."""
    job = started(method=method, cached=True)
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\x80\x3f")
    if method == "full":
        assert any("which is in its checkpoint" in note for note in resume(job))
        with pytest.raises(DsrunError, match="is not the model's weights"):
            repeat(job, machine)
        return
    problem = refused(job)
    assert problem.where == str(path)
    assert problem.what.startswith("is not the model's weights that the run was planned with: ")


def test_a_full_fine_tune_without_a_checkpoint_begins_with_its_weights(started, refused, model):
    job = started(method="full", checkpoint=False, cached=True)
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\x80\x3f")
    assert "weights" in refused(job).what


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_changed_tokenizer_or_config(started, refused, model, name):
    job = started(cached=True)
    with (model / name).open("a") as file:
        file.write("\n")
    problem = refused(job)
    assert problem.where == str(model / name)
    assert "tokenizer" in problem.what or "model's config" in problem.what


def test_a_new_tokenizer_file(started, refused, model):
    job = started(cached=True)
    (model / "added_tokens.json").write_text("{}")
    problem = refused(job)
    assert "was not there when the run was planned" in problem.what
    assert problem.hint.startswith("Take it away")


def test_files_that_were_only_touched(started, resume, machine, model, data):
    job = started(method="lora")
    for path in (data, *model.iterdir()):
        touch(path)
    assert not [note for note in (*resume(job), *repeat(job, machine).notes) if "planned" in note]


def test_large_files_are_compared_by_samples_and_that_is_said(
    started, resume, refused, machine, model, monkeypatch
):
    monkeypatch.setattr(inputs, "WHOLE_BYTES", 64)
    monkeypatch.setattr(inputs, "SAMPLE_BYTES", 8)
    job = started(method="lora", cached=True)
    path = model / "model.safetensors"
    touch(path)
    for notes in (resume(job), repeat(job, machine).notes):
        (note,) = [note for note in notes if "planned" in note]
        assert note.startswith("model.safetensors: written since the run was planned; size and 128 samples")
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\x80\x3f")
    assert "as before, other ones than when the run was planned" in refused(job).what


def test_files_are_not_read_again_where_size_and_time_are_the_same(started, resume, monkeypatch):
    job = started(method="lora")
    monkeypatch.setattr(inputs, "digest_of", lambda path, kind: pytest.fail(f"{path} was read"))
    resume(job)


def test_samples_begin_with_the_header_and_end_with_the_last_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "WHOLE_BYTES", 64)
    monkeypatch.setattr(inputs, "SAMPLE_BYTES", 4)
    path = tmp_path / "model.safetensors"
    content = bytes(4096)
    path.write_bytes(content)
    plain = inputs.digest_of(path, inputs.WEIGHTS)
    for place in (0, 4095):
        path.write_bytes(content[:place] + b"x" + content[place + 1 :])
        assert inputs.digest_of(path, inputs.WEIGHTS) != plain
    path.write_bytes(content + b"\0")
    assert inputs.digest_of(path, inputs.WEIGHTS) != plain
    assert inputs.digest_of(path, inputs.TRAIN) != plain


def test_a_run_of_an_older_dsrun(started, resume, refused, machine, data):
    """It has no record: that is said in one line. Done again, its names tell, as they always did."""
    job = started(method="lora")
    raw = json.loads(job.to_json())
    del raw["prepared"]["inputs"]
    path = Path(job.run_dir) / run_folder.JOB
    path.write_text(json.dumps(raw), encoding="utf-8")
    assert Job.read(path).prepared.inputs is None
    for notes in (resume(job), repeat(job, machine).notes):
        assert len([note for note in notes if "no record" in note]) == 1
    data.write_text(ROWS * 2, encoding="utf-8")
    with pytest.raises(DsrunError, match="its data, its tokenizer or its model was changed") as caught:
        repeat(job, machine)
    assert str(data) in str(caught.value)


def test_another_way_to_prepare(started, refused, monkeypatch):
    """A newer dsrun's rows don't go by the name of the older one's."""
    job = started()
    monkeypatch.setattr("dsrun.data.cache.RECIPE", 0)
    assert "may prepare in another way" in refused(job).what


def test_a_model_that_dsrun_makes(started, resume, data):
    """Its tokenizer's text ships with dsrun; nothing else is read."""
    job = started("llama-tiny")
    assert {file.kind for file in job.prepared.inputs.files} == {"train", "tokenizer"}
    assert not [note for note in resume(job) if "planned" in note]


@pytest.mark.parametrize(
    ("source", "fields", "method", "read"),
    [
        ("folder", {}, "full", {"tokenizer", "config"}),
        ("folder", {}, "ptuning", {"tokenizer", "config", "weights"}),
        ("folder", {"special_tokens": ("<a>",)}, "full", set()),
        ("chatglm", {}, "full", set()),
        ("chatglm", {}, "lora", {"weights"}),
        ("gguf", {}, "lora", set()),
        ("random", {}, "lora", set()),
    ],
)
def test_what_is_read_again_where_all_is_in_the_cache(make_job, tmp_path, source, fields, method, read):
    """Of rows that are there no data, of a model folder that was made no tokenizer; what is frozen is read in place.
    Without them all of it, and before a checkpoint what training begins with."""
    for name in ("model", "rows"):
        (tmp_path / name).mkdir()
    here = Prepared(str(tmp_path / "model"), str(tmp_path / "rows"), str(tmp_path / "rows"))
    job = make_job(
        model=ModelSpec("x", source, str(tmp_path / "model"), "plain", **fields),
        prepared=here,
        peft=PeftOptions(method=method),
    )
    assert inputs.kinds_read(job, from_checkpoint=True) == read
    assert inputs.kinds_read(job, from_checkpoint=False) >= {*read, "adapter"}
    gone = replace(job, prepared=Prepared("/gone", "/gone", "/gone"))
    assert inputs.kinds_read(gone, from_checkpoint=False) == set(inputs.KINDS)
