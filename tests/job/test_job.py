from __future__ import annotations

import dataclasses
import json

import pytest

from dsrun.errors import DsrunError
from dsrun.job.job import FORMAT, HostDevices, Job
from dsrun.options.table import ParallelismOptions


def test_a_job_survives_its_file(make_job, tmp_path):
    job = make_job(tmp_path / "it's a 运行")
    path = tmp_path / "job.json"
    path.write_text(job.to_json(), encoding="utf-8")
    assert Job.read(path) == job
    assert Job.from_json(job.to_json(), "x").to_json() == job.to_json()


def test_the_text_is_for_people_too(make_job):
    text = make_job().to_json()
    assert "训练" in text
    assert text.endswith("}\n")
    assert text.count("\n") > 20


def test_a_job_holds_every_field(make_job):
    job = make_job()
    assert set(json.loads(job.to_json())) == {field.name for field in dataclasses.fields(job)}


def test_a_job_does_not_change(make_job):
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_job().run_dir = "/elsewhere"


def test_numbers_of_a_job(make_job):
    job = make_job(ranks=3)
    assert (job.world_size, job.zero_stage, job.micro_batch, job.grad_accum) == (3, 2, 4, 2)
    hosts = (HostDevices("a", (0, 3)), HostDevices("b", (1,)))
    assert dataclasses.replace(job, hosts=hosts).world_size == 3
    assert make_job(ds_config={}).zero_stage == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw.pop("ds_config"),
        lambda raw: raw.pop("model"),
        lambda raw: raw.update(model=None),
        lambda raw: raw.update(hosts="localhost"),
        lambda raw: raw.update(hosts=[{"host": "localhost"}]),
        lambda raw: raw["training"].pop("seed"),
        lambda raw: raw["data"].update(another=1),
        lambda raw: raw.update(another=1),
    ],
)
def test_a_changed_file_is_refused(make_job, change):
    raw = json.loads(make_job().to_json())
    change(raw)
    with pytest.raises(DsrunError) as caught:
        Job.from_json(json.dumps(raw), "/runs/a/job.json")
    (problem,) = caught.value.problems
    assert problem.where == "/runs/a/job.json"
    assert "new run" in problem.hint


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"job"', '{"format": 1}'])
def test_what_is_no_job(text):
    with pytest.raises(DsrunError) as caught:
        Job.from_json(text, "job.json")
    assert caught.value.problems[0].where == "job.json"


@pytest.mark.parametrize("found", [0, FORMAT - 1, FORMAT + 1, None, str(FORMAT)])
def test_another_format_is_named(make_job, found):
    raw = {**json.loads(make_job().to_json()), "format": found}
    with pytest.raises(DsrunError, match="format"):
        Job.from_json(json.dumps(raw), "job.json")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x00", "{}".encode("utf-16")])
def test_a_file_that_is_not_text(tmp_path, content):
    path = tmp_path / "job.json"
    path.write_bytes(content)
    with pytest.raises(DsrunError) as caught:
        Job.read(path)
    assert caught.value.problems[0].where == str(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DsrunError, match="can't be read"):
        Job.read(tmp_path / "job.json")
    with pytest.raises(DsrunError, match="is not a regular file"):
        Job.read(tmp_path)


def test_neighbours_share_their_examples(make_job):
    job = make_job(ranks=8, parallel=ParallelismOptions(tp=2))
    assert (job.world_size, job.dp_size, job.step_examples) == (8, 4, 4 * job.micro_batch * job.grad_accum)
    assert [job.dp_index(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
