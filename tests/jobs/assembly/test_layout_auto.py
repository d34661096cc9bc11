"""--layout auto: the planner's choice, filled in as if it had been typed."""

from __future__ import annotations

import pytest
from asking import finetune_request

from dsrun.cluster.devices import Gpu, Machine
from dsrun.errors import DsrunError
from dsrun.jobs.assembly import finetune

GIB = 2**30
pytestmark = pytest.mark.usefixtures("own_places")


def cards(count, free=79) -> Machine:
    gpus = (Gpu(i, "NVIDIA A100-SXM4-80GB", f"GPU-{i}", 80 * GIB, (8, 0), free * GIB) for i in range(count))
    return Machine("cuda", tuple(gpus), 32, f"{count} x A100", 900 * GIB)


@pytest.fixture
def plan(tmp_path):
    file = tmp_path / "训练.jsonl"
    file.write_text('{"content": "类型#裙", "summary": "一条裙子。"}\n' * 9, encoding="utf-8")

    def make(model, machine=None, **given):
        request = finetune_request(
            model, train_file=file, layout="auto", last_checkpoint=False, global_batch=16, **given
        )
        return finetune.plan(request, machine or cards(8), {}, download=False)

    return make


def refused(plan, *args, **given):
    with pytest.raises(DsrunError) as caught:
        plan(*args, **given)
    return caught.value.problems


def test_what_fits_is_only_shared_out(plan):
    planned = plan("llama-3.2-1b")
    job = planned.job
    assert (job.parallel.tp, job.parallel.sp) == (1, 1)
    assert job.micro_batch * job.grad_accum * job.world_size == 16
    assert job.ds_config["train_micro_batch_size_per_gpu"] == job.micro_batch
    assert any(note.startswith("layout dp 8") for note in planned.notes)


def test_long_examples_are_divided(plan):
    job = plan("llama-3.2-1b", max_source_length=65536, max_target_length=65536).job
    assert job.parallel.sp > 1
    assert job.prediction["gpu_allocated_bytes"] < 79 * GIB
    assert job.dp_size * job.micro_batch * job.grad_accum == 16


@pytest.mark.parametrize("given", [{"preset": "zero3"}, {"tp": 2}, {"micro_batch": 1}])
def test_what_is_chosen_may_not_be_said(plan, given):
    (problem,) = refused(plan, "llama-3.2-1b", **given)
    assert "--layout auto" in problem.what


def test_nothing_fits(plan):
    (problem,) = refused(plan, "llama-3.1-70b", cards(2, 15))
    assert "no layout fits" in problem.what


def test_cpu_ranks_have_none_to_choose(plan):
    (problem,) = refused(plan, "llama-tiny", Machine("cpu", (), 4, "no GPU", 32 * GIB))
    assert "needs GPUs" in problem.what
