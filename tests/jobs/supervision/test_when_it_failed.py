"""What a failed job's message says beside the cause: the limit of an exchange, and what does without an operator."""

from __future__ import annotations

import pytest

from dsrun import versions
from dsrun.cluster import extensions
from dsrun.errors import DsrunError
from dsrun.jobs.diagnosis.diagnosis import Diagnosis
from dsrun.jobs.diagnosis.signatures import find_signatures
from dsrun.jobs.supervision import preparation, run


@pytest.fixture
def installed(monkeypatch):
    """`installed(deepspeed="0.19.8")`: these are there."""
    return lambda **found: monkeypatch.setattr(versions, "installed", lambda: found)


def limit(cause, **environ):
    return run._about_the_limit(Diagnosis(cause=cause, summary="", next_step="", confidence="high"), environ)


def test_the_causes_are_some_that_signatures_name():
    assert set(run.TIMED_OUT) <= {signature.cause for signature in find_signatures().values()}
    assert run.SHORTER in versions.combinations()


def test_a_time_out_is_explained_by_deepspeeds_change(installed):
    installed(deepspeed="0.19.8")
    said = limit("nccl_timeout")
    assert "deepspeed 0.19.8" in said and "10 minutes" in said and "--timeout 30 (DEEPSPEED_TIMEOUT)" in said
    installed(deepspeed="0.19.5")
    assert limit("collective_timeout").startswith("Longer: --timeout")


def test_a_limit_of_the_users_own_is_named(installed):
    installed(deepspeed="0.19.8")
    assert "60 minutes" in limit("nccl_timeout", DEEPSPEED_TIMEOUT="60")


@pytest.mark.parametrize("cause", ["gpu_oom", None])
def test_nothing_is_said_of_limits_where_nobody_waited(cause):
    assert limit(cause) == ""


def test_a_build_that_fails_names_what_does_without(make_job, tmp_path, monkeypatch):
    def fails(argv):
        raise DsrunError("ninja failed", hint="The whole log: /x")

    monkeypatch.setattr(preparation, "compiled_first", lambda job: ["fused_adam"])
    env = {extensions.VARIABLE: str(tmp_path / "operators")}
    with pytest.raises(DsrunError) as caught:
        preparation.build_operators(make_job(), env, fails, lambda line: None, lambda: None)
    hint = caught.value.problems[0].hint
    assert "The whole log" in hint and "optimizer.params.torch_adam=true" in hint
