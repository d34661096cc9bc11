"""What is installed, judged with a fine-tune before its start."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsrun import versions
from dsrun.errors import DsrunError
from dsrun.jobs.assembly.checks import version_check


@pytest.fixture
def installed(monkeypatch):
    """`installed(deepspeed="0.18.1")`: these are there."""
    return lambda **found: monkeypatch.setattr(versions, "installed", lambda: found)


@pytest.fixture
def job(make_job, tmp_path):
    return make_job(tmp_path / "run")


def with_stage(job, stage):
    return replace(job, ds_config={**job.ds_config, "zero_optimization": {"stage": stage}})


def test_wrong_gradients_are_refused_and_can_be_forced(job, installed):
    installed(deepspeed="0.18.1")
    with pytest.raises(DsrunError, match="gradients") as caught:
        version_check.check(with_stage(job, 2))
    assert "--force" in caught.value.problems[0].hint and "0.18.4" in caught.value.problems[0].hint
    (note,) = version_check.check(with_stage(job, 2), force=True)
    assert "gradients" in note
    assert version_check.check(with_stage(job, 3)) == ()


def test_what_only_a_resumed_run_meets(job, installed):
    installed(deepspeed="0.15.4", torch="2.6.0")
    assert not any("Unpickling" in note for note in version_check.check(job))
    with pytest.raises(DsrunError, match="UnpicklingError"):
        version_check.check(job, resumes=True)


def test_everything_is_known_of_a_fine_tune(job):
    """So that nothing is told that may not concern it."""
    found = vars(version_check.circumstances(job, resumes=False))
    assert [name for name, value in found.items() if value is None] == []


def test_nothing_is_said_of_what_is_installed_here(job):
    pytest.importorskip("deepspeed")
    assert version_check.check(job) == version_check.check(job, resumes=True) == ()
