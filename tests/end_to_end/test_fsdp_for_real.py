"""FSDP under the real launcher: the same losses as DeepSpeed's, though a rank is killed and another number goes on."""

from __future__ import annotations

import json
import os
import signal

import pytest
from needed import needs, since

needs("deepspeed")
transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from running import answer_alike, cut_off, finish, held_at, let_go, same, starts_of, words_of

from dsrun.training.engines.checkpoints import resharding, sharded_files

pytestmark = [pytest.mark.slow, since(torch="2.7")]  # FSDP on CPUs


@pytest.fixture(scope="module")
def run(tmp_path_factory, dsrun_here, data):
    """A run on two ranks, of which one is killed after the fifth step; one alone goes on from its checkpoint."""
    run_dir = tmp_path_factory.mktemp("fsdp") / "run"
    process = dsrun_here(*words_of("llama-tiny", run_dir), *data, "--preset", "fsdp")
    ranks = held_at(process, run_dir, 5)
    os.kill(ranks[1], signal.SIGKILL)
    let_go(ranks)
    assert finish(process, run_dir).code != 0
    assert json.loads((run_dir / "job.json").read_text())["fsdp"]["shard_ranks"] == 2
    return finish(dsrun_here("resume", run_dir, "--gpus", "1"), run_dir)


def test_it_goes_on_where_it_was_killed(run):
    assert run.code == 0, run.err
    assert starts_of(run.run_dir) == [0, 4]


def test_the_losses_are_deepspeeds(run, reference):
    same(run.losses, reference.losses)
    assert run.last_eval == pytest.approx(reference.last_eval, abs=1e-5)
    norms = [[line["grad_norm"] for line in one.metrics if "loss" in line] for one in (run, reference)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_the_model_is_transformers_own(run, reference):
    """A folder that loads without dsrun, and answers as the reference run's does."""
    answer_alike(run.run_dir, reference.run_dir)


def test_the_run_says_how_it_was_divided(run, dsrun):
    job = json.loads(run.read("job.json"))
    assert (job["ds_config"], job["fsdp"]["shard_ranks"]) == ({}, 1)
    assert not (run.run_dir / "deepspeed.json").exists()
    shown = json.loads(dsrun("show", run.run_dir, "--json").out)
    assert (shown["zero_stage"], shown["fsdp"]["shard_ranks"]) == (None, 1)
    assert "FSDP" in dsrun("show", run.run_dir).out


def test_a_checkpoint_of_two_ranks_read_by_none(run, reference):
    """Whole weights out of the files of both ranks, in one process without a group: what `dsrun export` reads."""
    found = sharded_files.trained_weights(run.run_dir / "checkpoints/step-4")
    wanted = resharding.trained_weights(reference.run_dir / "checkpoints/step-4")
    assert len(list((run.run_dir / "checkpoints/step-4").glob("*.distcp"))) == 2
    assert set(found) <= set(wanted)
    for name in found:
        torch.testing.assert_close(found[name], wanted[name], atol=1e-5, rtol=0)


def test_the_other_engine_can_not_go_on(run, dsrun, tmp_path):
    cut_off(run.run_dir, 8, tmp_path / "run")
    said = dsrun("resume", tmp_path / "run", "--preset", "zero3")
    assert said.code == 1
    assert "another engine" in said.err and "dsrun export" in said.err


@pytest.mark.full
def test_it_goes_on_by_itself_on_as_many_ranks(tmp_path, dsrun_here, data, reference):
    process = dsrun_here(
        *words_of("llama-tiny", tmp_path / "run"), *data, "--preset", "fsdp-offload", "--max-restarts", "1"
    )
    ranks = held_at(process, tmp_path / "run", 5)
    os.kill(ranks[1], signal.SIGKILL)
    let_go(ranks)
    ended = finish(process, tmp_path / "run")
    assert (ended.code, starts_of(ended.run_dir)) == (0, [0, 4])
    same(ended.losses, reference.losses)


@pytest.mark.full
def test_an_export_is_the_checkpoints_model(run, dsrun, tmp_path):
    said = dsrun("export", run.run_dir, "--checkpoint", 8, "-o", tmp_path / "model")
    assert said.code == 0, said.err
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    wanted = sharded_files.trained_weights(run.run_dir / "checkpoints/step-8")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
