"""What people ask of a plan beside which preset fits: how long examples may be, what makes it safe, when it peaks."""

from __future__ import annotations

import pytest

from dsrun.planner import gpus, shapes
from dsrun.planner.analysis.knobs import knobs
from dsrun.planner.analysis.length_curve import MOST, STEP, length_curve, longest, usual_lengths
from dsrun.planner.analysis.timeline import timeline
from dsrun.planner.plan import OUT, TIGHT, TIGHT_FROM, MemoryBudget, judge
from dsrun.planner.setup import Setup
from dsrun.planner.speed import Hardware

GIB = 2**30
LLAMA = shapes.shape("llama-3-8b", None)[0]
A100 = Hardware.from_gpu(gpus.load("a100-80g"), 8)
SETUP = Setup(LLAMA, gpus=8, stage=3, seq_len=4096, checkpointing=1)


def room(gib=79.25):
    return MemoryBudget(8, 1, gib * GIB, A100)


# --- lengths ---


def test_the_longest_example_fits_and_the_next_does_not():
    plan = judge("zero3", SETUP, room())
    found = longest(plan, room())
    assert found % STEP == 0 and found > 4096
    verdicts = [judge("zero3", SETUP.changed(seq_len=found + more), room()).verdict for more in (0, STEP)]
    assert verdicts[0] != OUT and verdicts[1] == OUT


def test_without_room_no_length_fits_and_without_a_length_all_do():
    plan = judge("zero3", SETUP, room())
    assert longest(plan, room(1)) == 0
    assert longest(plan, room(1e9)) == MOST


def test_a_curve_grows_and_crosses_the_card_at_the_longest():
    plan = judge("zero3", SETUP, room())
    curve = length_curve(plan, room(), usual_lengths(4096, longest(plan, room())))
    sizes = [size for _, size in curve.points]
    assert sizes == sorted(sizes) and curve.points[0][0] == 512
    assert all((size <= room().gpu_bytes) is (length <= curve.longest) for length, size in curve.points)
    assert dict(curve.points)[4096] == plan.demand
    plain = judge("zero3", SETUP.changed(checkpointing=0), room())
    found = length_curve(plain, room(), [4096])
    assert found.longest < found.longest_recomputed == curve.longest


# --- a tight plan ---


def tight_room(setup):
    needed = judge("zero3", setup, room()).demand
    return room(needed / GIB / (0.5 * (1 + TIGHT_FROM)))


def test_each_knob_of_a_tight_plan_gives_back_memory():
    setup = SETUP.changed(micro_batch=4, checkpointing=0)
    there = tight_room(setup)
    plan = judge("zero3", setup, there)
    assert plan.verdict == TIGHT
    presets = {"zero3": {"stage": 3}, "zero3-offload": {"stage": 3, "optimizer_device": "cpu"}}
    found = knobs(plan, presets, there, bf16=True)
    assert all(knob.saves_bytes > 0 and knob.chance > plan.chance for knob in found)
    texts = " ".join(knob.text for knob in found)
    assert (
        "--micro-batch 1" in texts and "--activation-checkpointing full" in texts and "zero3-offload" in texts
    )
    safe = [knob for knob in found if knob.verdict == "fits"]
    assert safe and found[: len(safe)] == safe
    assert [knob.seconds for knob in safe] == sorted(knob.seconds for knob in safe)
    checkpointing = next(knob for knob in found if "checkpointing" in knob.text)
    again = judge("zero3", setup.changed(checkpointing=1), there)
    assert checkpointing.saves_bytes == pytest.approx(plan.demand - again.demand)
    assert checkpointing.seconds == pytest.approx(again.speed.seconds_per_step - plan.speed.seconds_per_step)


def test_what_saves_nothing_is_no_knob():
    setup = SETUP.changed(flash=True)
    there = tight_room(setup)
    found = knobs(judge("zero3", setup, there), {}, there, bf16=True)
    assert not [knob for knob in found if "attention" in knob.text or "recompute" in knob.text]


# --- a step over time ---


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_steps_moments_have_their_peaks(stage):
    plan = judge("x", SETUP.changed(stage=stage), room())
    instants = {one.when: one for one in timeline(plan)}
    assert instants["between forward and backward"].size == plan.gpu.peaks["turn"]
    assert instants["in the optimizer's step"].size == plan.gpu.peaks["step"]
    forward = [one.size for name, one in instants.items() if name.startswith("forward")]
    assert forward == sorted(forward) and forward[-1] < plan.gpu.peaks["turn"]
    turn = instants["between forward and backward"]
    assert sum(turn.parts.values()) == pytest.approx(turn.size)
    assert max(one.size for one in instants.values()) == plan.gpu.allocated
