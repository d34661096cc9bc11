"""`dsrun plan --measure`: two short runs through the real launcher, on a CPU rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsrun.cli.planning import measure
from dsrun.jobs.runs import calibration

HERE = ("plan", "llama-tiny", "--measure", "--max-source-length", 32, "--max-target-length", 32)


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    """The folder that commands run in, a CPU machine's, and where the runs' own folder is made."""
    folder, temporary = tmp_path / "a user's 工作", tmp_path / "tmp"
    folder.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return folder


@pytest.mark.parametrize("words", [("--gpu", "v100-32g"), ("--gpu-memory", "24GiB")])
def test_it_is_for_this_machine(dsrun, words):
    said = dsrun(*HERE, *words)
    assert said.code == 2
    assert words[0] in said.err


@pytest.fixture
def on_cpus(monkeypatch):
    """The jobs that ran."""
    jobs, really = [], calibration.measured

    def counted(path, job):
        jobs.append(job)
        return really(path, job)

    monkeypatch.setattr(calibration, "measured", counted)
    return jobs


@pytest.mark.full
@pytest.mark.slow
def test_two_micro_batches_are_trained_and_planned_with(dsrun, on_cpus, work, tmp_path):
    said = dsrun(*HERE, "--preset", "zero2", "--precision", "fp32", "--json")
    assert said.code == 0, said.err
    assert [job.micro_batch for job in on_cpus] == [1, 2]
    assert {(job.world_size, job.preset, job.precision) for job in on_cpus} == {(1, "zero2", "fp32")}
    notes = json.loads(said.out)["notes"]
    assert any("Measured on one CPU rank under zero2" in note for note in notes)
    assert not list(work.iterdir())
    assert not list((tmp_path / "tmp").glob("dsrun*")), "torch leaves a folder of its own there"


def test_a_failed_run_is_reported_with_its_own_message(dsrun, on_cpus, monkeypatch):
    monkeypatch.setattr(measure, "_write_examples", lambda folder, tokens: Path(folder) / "missing.jsonl")
    said = dsrun(*HERE, "--preset", "zero2")
    assert said.code == 1
    assert "missing.jsonl" in said.err and not on_cpus
