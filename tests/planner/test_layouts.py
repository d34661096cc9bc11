"""The layouts that there are, the memory of a rank's part of each, and that those in use elsewhere come out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsrun.jobs.assembly import plan_target
from dsrun.jobs.assembly.planning import setups, subjects
from dsrun.options.commands import PlanOptions
from dsrun.planner.gpu_memory import gpu_memory
from dsrun.planner.layouts import Layout, judge_divided, judge_layout, judge_layouts, layouts, parts, reasons
from dsrun.planner.plan import FITS, OUT, TIGHT, judge
from dsrun.planner.setup import Setup


def asked(model, gpu, gpus, nodes=1, seq_len=2048, **more) -> tuple:
    options = PlanOptions(
        gpu=gpu, gpus=gpus, nodes=nodes, seq_len=seq_len, micro_batch=1, grad_accum=1, **more
    )
    what = subjects.subject(model, options)
    room = plan_target.target(options, None).room
    return setups.base_setup(what.shape, room, options, "bf16"), room


def best(model, gpu, gpus, nodes=1, seq_len=2048, *, examples, **more):
    base, room = asked(model, gpu, gpus, nodes, seq_len, **more)
    return judge_layouts(base, room, layouts(base.shape, gpus, nodes), examples=examples)


def test_every_layout_uses_all_ranks():
    base, _ = asked("llama-3-8b", "a100-80g", 8)
    found = list(layouts(base.shape, 8, 4))
    assert len(set(found)) == len(found)
    for one in found:
        assert one.dp * one.tp * one.sp * one.pp == 32
        assert one.tp <= 8
        assert base.shape.kv_heads % one.tp == base.shape.heads % one.sp == 0
        assert one.pp == 1 or one.stage == 1
        assert one.sp == 1 or one.tp == one.pp == 1


def test_heads_that_do_not_divide():
    base, _ = asked("chatglm2-6b", "a100-80g", 8)
    assert {one.tp for one in layouts(base.shape, 8, 1)} == {1, 2}, "two key/value heads"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_plain_data_parallel_is_the_plan_itself(stage):
    base, room = asked("llama-7b", "a100-80g", 8)
    base = replace(base, stage=stage, checkpointing=1, micro_batch=2, grad_accum=4)
    mine = judge_layout(base, room, Layout(8, stage=stage))
    plan = judge("x", base, room)
    assert mine.used == pytest.approx(plan.used)
    assert mine.seconds == pytest.approx(plan.speed.seconds_per_step, rel=0.01)


@pytest.mark.parametrize(
    ("layout", "share"),
    [(Layout(1, tp=8), 8), (Layout(1, pp=8), 8), (Layout(1, tp=2, pp=4), 8), (Layout(1, sp=8), 1)],
)
def test_a_rank_holds_its_share_of_the_weights(layout, share):
    base, _ = asked("llama-7b", "a100-80g", 8)
    held = max(gpu_memory(part).terms["weights"] for part in parts(base, layout))
    even = 2 * base.shape.parameters / share
    assert even <= held <= 1.5 * even, "embeddings are whole"


def test_zero_shares_what_the_ranks_have_in_common():
    base, _ = asked("llama-7b", "a100-80g", 8)
    for layout in (Layout(4, tp=2, stage=1), Layout(4, sp=2, stage=1), Layout(4, pp=2, stage=1)):
        (part, *_) = parts(base, layout)
        master = gpu_memory(part).terms["master"]
        assert master == pytest.approx(4 * part.shape.parameters / layout.shards)


def test_a_pipeline_keeps_what_is_on_its_way():
    base, _ = asked("llama-7b", "a100-80g", 8)
    few, many = (replace(base, grad_accum=steps) for steps in (1, 8))
    first = [gpu_memory(parts(one, Layout(1, pp=4))[0]).terms["activations"] for one in (few, many)]
    whole = gpu_memory(base).terms["activations"]
    assert first == [pytest.approx(whole / 4), pytest.approx(whole)]


def test_the_bubble_is_what_the_papers_say():
    base, room = asked("llama-2-13b", "a100-80g", 8)
    found = judge_layout(replace(base, grad_accum=16), room, Layout(1, pp=8))
    rest = {name: found.terms[name] for name in ("compute", "launch", "pipeline") if name in found.terms}
    assert found.terms["bubble"] / sum(rest.values()) == pytest.approx(7 / 16, rel=1e-6)


def test_links_and_network():
    base, room = asked("llama-7b", "a100-80g", 8, 2)
    near, far = (judge_layout(base, room, one) for one in (Layout(2, tp=8), Layout(1, tp=8, pp=2)))
    assert near.network_bytes > far.network_bytes > 0, "gradients weigh more than a block's output"
    assert near.link_bytes > 0
    alone = judge_layout(base, replace(room, nodes=1), Layout(1, tp=8))
    assert alone.network_bytes == 0


# Layouts that are known


def test_70b_on_two_nodes_of_eight():
    first = best("llama-2-70b", "a100-80g", 8, 2, examples=64)[0]
    assert (first.layout, first.checkpointing) == (Layout(16, stage=3), 1)
    assert first.verdict in (FITS, TIGHT)


def test_128k_tokens_on_eight():
    found = best("llama-2-7b", "a100-80g", 8, seq_len=131072, examples=8)
    assert found[0].layout.sp > 1
    assert found[0].verdict == FITS
    alone = [one for one in found if one.layout.dp == 8]
    assert len(alone) == 4
    assert {one.verdict for one in alone} == {OUT}, "ZeRO doesn't divide a sequence"


def test_175b_on_sixteen_nodes():
    found = best(None, "a100-80g", 8, 16, examples=1536, params=175e9)
    first = found[0].layout
    assert first.tp > 1, "tensor parallel in a node"
    assert first.pp >= 8, "a pipeline across nodes"
    megatron = next(one for one in found if (one.layout.tp, one.layout.pp) == (8, 8))
    assert megatron.verdict in (FITS, TIGHT)
    assert megatron.seconds < 1.2 * found[0].seconds
    assert found[0].terms["bubble"] < 0.1 * found[0].seconds


def test_what_fits_on_each_gpu_is_not_divided():
    first = best("llama-3.2-1b", "h100-80g", 8, examples=64)[0]
    assert first.layout.tp == first.layout.sp == first.layout.pp == 1


def test_reasons_name_each_part():
    base, room = asked(None, "a100-80g", 8, 16, params=175e9)
    plan = judge_layout(replace(base, grad_accum=96), room, Layout(2, tp=8, pp=8, stage=1))
    said = " ".join(reasons(plan, room))
    assert all(f"{name} 8" in said for name in ("tp", "pp"))
    assert "ZeRO-1: 2 ranks" in said


def test_a_step_that_can_not_be_shared_is_left_out():
    base, room = asked("llama-7b", "a100-80g", 8)
    found = judge_layouts(base, room, layouts(base.shape, 8, 1), examples=4)
    assert found
    assert all(one.layout.dp in (1, 2, 4) for one in found)
    assert isinstance(base, Setup)


def test_a_divided_jobs_plan():
    base, room = asked("llama-2-13b", "a100-80g", 8)
    base = replace(base, stage=1, grad_accum=2, checkpointing=1)
    layout = Layout(4, tp=2, stage=1)
    plan, own = judge_divided("zero1", base, room, layout), judge_layout(base, room, layout)
    assert plan.used == pytest.approx(own.used, rel=0.01)
    assert plan.speed.seconds_per_step == pytest.approx(own.seconds)
    assert plan.speed.tokens_per_second == pytest.approx(4 * 2 * 2048 / own.seconds)
    assert plan.used < judge("zero1", base, room).used, "the weights are divided"
