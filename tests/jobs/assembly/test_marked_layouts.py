"""Which layouts finetune trains with is what its own checks say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsrun.jobs.assembly import plan_target
from dsrun.jobs.assembly.checks import parallelism
from dsrun.jobs.assembly.layouts import best_layouts, sizes_of
from dsrun.jobs.assembly.planning import setups, subjects
from dsrun.options.commands import PlanOptions
from dsrun.options.table import ParallelismOptions
from dsrun.planner.layouts import Layout


@pytest.fixture(scope="module")
def found():
    options = PlanOptions(gpu="a100-80g", gpus=8, nodes=2, seq_len=2048, global_batch=64)
    what = subjects.subject("llama-2-70b", options)
    where = plan_target.target(options, None)
    base = setups.base_setup(what.shape, where.room, options, "bf16")
    return best_layouts(base, where.room, what.architecture, examples=64), (
        base,
        where.room,
        what.architecture,
    )


def test_plain_data_parallel_is_dsruns(found):
    layouts, _ = found
    assert [one.refused for one in layouts if one.plan.layout == Layout(16, stage=3)] == [""]


def test_each_is_marked_as_the_checks_say(found):
    layouts, _ = found
    for one in layouts:
        parallel = ParallelismOptions(**sizes_of(one.plan.layout))
        setup = parallelism.ParallelSetup(
            parallel=parallel,
            devices=(8, 8),
            stage=one.plan.layout.stage,
            network="llama",
            heads=64,
            kv_heads=8,
        )
        if one.plan.layout.pp > 1:  # defaults that give way
            setup = replace(setup, packing=False, attention=parallelism.SDPA)
        assert bool(one.refused) == bool(parallel.group > 1 and parallelism.refusals(setup))
        assert (one.engine == "dsrun") == (not one.refused)


def test_a_network_that_is_not_divided(found):
    _, (base, room, architecture) = found
    others = best_layouts(base, room, {**architecture, "model_type": "mamba"}, examples=64)
    assert all(one.refused for one in others if one.plan.layout.tp > 1)
    assert not any(one.refused for one in others if one.plan.layout.dp == 16)


def test_the_buckets_are_the_presets(found):
    layouts, (base, room, architecture) = found
    other = best_layouts(replace(base, reduce_bucket=10**10), room, architecture, examples=64)
    assert [one.plan.gpu_bytes for one in other] == [one.plan.gpu_bytes for one in layouts]
