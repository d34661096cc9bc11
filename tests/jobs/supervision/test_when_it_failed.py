"""What a failed job's message says beside the cause: the limit of an exchange, and what does without an operator."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from dsrun import versions
from dsrun.cluster import extensions
from dsrun.errors import DsrunError, JobFailedError, Problem
from dsrun.job import run_folder
from dsrun.jobs.diagnosis import run_logs
from dsrun.jobs.diagnosis.diagnosis import Diagnosis
from dsrun.jobs.diagnosis.signatures import find_signatures
from dsrun.jobs.supervision import preparation, run
from dsrun.jobs.supervision.run_options import RunOptions


@pytest.fixture
def installed(monkeypatch):
    """`installed(deepspeed="0.19.8")`: these are there."""
    return lambda **found: monkeypatch.setattr(versions, "installed", lambda: found)


def limit(cause, **environ):
    return run._about_the_limit(Diagnosis(cause=cause, summary="", next_step="", confidence="high"), environ)


def test_the_causes_are_some_that_signatures_name():
    assert set(run_logs.TIMED_OUT_CAUSES) <= {signature.cause for signature in find_signatures().values()}
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


OUT = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB "
    "of which 512.00 MiB is free. Of the allocated memory 70.00 GiB is allocated by PyTorch."
)


@pytest.mark.parametrize(("changes", "words"), [("Take less.", "Take less."), ("", "dsrun diagnose")])
def test_memory_that_ran_out_is_told_with_the_changes_that_fit(
    make_job, tmp_path, monkeypatch, changes, words
):
    """Beside who had it: the rank's own record, and the plan's terms in job.json."""
    job = make_job(tmp_path / "run")
    job = replace(job, accelerator="cuda", prediction={"gpu_terms": {"logits": 3.4 * 2**30}})
    run_dir = Path(job.run_dir)
    (run_dir / "state").mkdir(parents=True)
    job.write()
    owned = {"owner": "logits", "gib": 9.1, "planned_gib": None, "parts": [{"name": "lm_head", "gib": 9.1}]}
    record = {
        "place": "gpu", "rank": 0, "device": 0, "when": "evaluating", "failed_in": "lm_head", "owners": [owned],
        "reserved_gib": 78.0, "free_gib": 0.5, "total_gib": 79.1, "holes_gib": 0.1, "largest_hole_gib": 0.1,
    }  # fmt: skip
    (run_dir / "state/memory-0.json").write_text(json.dumps(record))
    (run_dir / "logs").mkdir()
    (run_dir / "logs/rank-0.log").write_text(f"{OUT}\n")

    class Fails:
        def __init__(self, *args, **more):
            pass

        def run(self):
            raise JobFailedError([Problem("rank 0 failed first: out of memory")], 1, 0)

    monkeypatch.setattr(run, "Coordinator", Fails)
    monkeypatch.setattr(run.run_logs, "log_sizes", lambda run_dir: {})
    sizes = []
    with pytest.raises(JobFailedError) as caught:
        run.run_ranks(
            job, {}, lambda line: None, nullcontext(lambda: False), options=RunOptions(check=False),
            way_out=lambda job, numbers: sizes.append(numbers["total"]) or changes,
        )  # fmt: skip
    hint = caught.value.problems[0].hint
    assert "Planned 3.40 GiB, is 9.10 GiB: logits. It failed here: evaluating, in lm_head." in hint
    assert words in hint
    assert sizes == [79.11]
    assert caught.value.diagnosis["memory"]["owners"][0]["planned_gib"] == pytest.approx(3.4)


def test_a_build_that_fails_names_what_does_without(make_job, tmp_path, monkeypatch):
    def fails(argv):
        raise DsrunError("ninja failed", hint="The whole log: /x")

    monkeypatch.setattr(preparation, "compiled_first", lambda job: ["fused_adam"])
    env = {extensions.VARIABLE: str(tmp_path / "operators")}
    with pytest.raises(DsrunError) as caught:
        preparation.build_operators(make_job(), env, fails, lambda line: None, lambda: None)
    hint = caught.value.problems[0].hint
    assert "The whole log" in hint and "optimizer.params.torch_adam=true" in hint


@pytest.fixture
def on_a_gpu(make_job, tmp_path):
    """A fine-tune on a GPU with DeepSpeed's AdamW, in its folder."""
    params = {"lr": 1e-4, "betas": [0.9, 0.999], "weight_decay": 0.0}
    job = make_job(tmp_path / "run")
    (tmp_path / "run").mkdir(exist_ok=True)
    config = {**job.ds_config, "optimizer": {"type": "AdamW", "params": params}}
    return replace(job, accelerator="cuda", ds_config=config)


@pytest.fixture
def coordinated(monkeypatch):
    """The jobs that a coordinator was given; the build of fused_adam fails while one asks for it."""
    found = []

    class Coordinated:
        def __init__(self, job, *args, **more):
            found.append(job)

        def run(self):
            if not found[-1].ds_config["optimizer"]["params"].get("torch_adam"):
                raise DsrunError(
                    "dsrun.training.engines.build_operator FusedAdamBuilder failed on gpu02 (exit code 1)"
                )

    monkeypatch.setattr(run, "Coordinator", Coordinated)
    return found


def ranks_of(job, said):
    view = nullcontext(lambda: False)
    return run.run_ranks(job, {}, said.append, view, options=RunOptions(check=False))


def test_a_build_that_fails_is_done_without(on_a_gpu, coordinated):
    said: list[str] = []
    assert ranks_of(on_a_gpu, said) == 0
    assert len(coordinated) == 2
    written = json.loads((Path(on_a_gpu.run_dir) / run_folder.JOB).read_text())["ds_config"]["optimizer"][
        "params"
    ]
    assert (written["torch_adam"], written["fused"], written["lr"]) == (True, True, 1e-4)
    assert (
        json.loads((Path(on_a_gpu.run_dir) / run_folder.CONFIG).read_text())["optimizer"]["params"] == written
    )
    assert any("gpu02" in line and "torch's fused AdamW" in line for line in said)


def test_what_only_deepspeeds_adam_takes_is_not_dropped(on_a_gpu, coordinated):
    params = {**on_a_gpu.ds_config["optimizer"]["params"], "bias_correction": False}
    config = {**on_a_gpu.ds_config, "optimizer": {"type": "AdamW", "params": params}}
    with pytest.raises(DsrunError, match="FusedAdamBuilder"):
        ranks_of(replace(on_a_gpu, ds_config=config), [])
    assert len(coordinated) == 1
