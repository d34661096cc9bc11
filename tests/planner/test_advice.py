"""Advice where nothing fits: it fits, nothing shorter does, and it says what each change saves."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsrun.planner.advice import LORA_RANK, MOST_CHANGES, SHORTEST, SMALLER, advise, changes
from dsrun.planner.gpu_memory import GIB
from dsrun.planner.lora import lora_weights
from dsrun.planner.plan import OUT, MemoryBudget, judge
from dsrun.planner.setup import Setup
from dsrun.planner.shape import SIZES, Shape
from dsrun.planner.speed import Hardware

LLAMA = Shape(6_738_415_616, 32, 4096, 11008, 32, 32, 128, 32000)
LARGE = Shape(68_976_648_192, 80, 8192, 28672, 64, 8, 128, 32000)
SMALL = Shape(1_100_048_384, 22, 2048, 5632, 32, 4, 64, 32000)
WORDY = replace(SMALL, vocab=152064)
A100 = Hardware(matrix_tflops=312, fp32_tflops=19.5, memory_gb_s=2039, link_gb_s=230)
PRESETS = {
    name: {
        "stage": stage,
        "overlap_comm": stage == 3,
        "optimizer_device": optimizer,
        "parameter_device": weights,
    }
    for name, stage, optimizer, weights in (
        ("ddp", 0, "gpu", "gpu"),
        ("zero2", 2, "gpu", "gpu"),
        ("zero2-offload", 2, "cpu", "gpu"),
        ("zero3", 3, "gpu", "gpu"),
        ("zero3-offload", 3, "cpu", "cpu"),
    )
}
KINDS = (
    "precision", "attention", "micro batch", "length", "preset", "saving", "checkpointing", "loss", "method", "nodes",
    "model",
)  # fmt: skip
LAST = ({"nodes", "model"}, {"model"}, set())
WHOLE = Setup(LLAMA, gpus=2, stage=2, precision="fp32", seq_len=2048, micro_batch=4, flash=False)


def room(gpu_gib, host_gib=None, gpus=2, nodes=1):
    host = None if host_gib is None else host_gib * GIB
    return MemoryBudget(gpus=gpus, nodes=nodes, gpu_bytes=gpu_gib * GIB, hardware=A100, host_bytes=host)


def setup(preset="zero2", **different):
    return replace(WHOLE, **{**PRESETS[preset], **different})


def case(gpu_gib, host_gib=None, preset="zero2", presets=tuple(PRESETS), **different):
    here = room(gpu_gib, host_gib, gpus=different.get("gpus", 2))
    wanted = judge(preset, setup(preset, **different), here)
    assert wanted.verdict == OUT
    return wanted, {name: PRESETS[name] for name in presets}, here


# All that helps a little is done already.
FRUGAL = {"precision": "bf16", "seq_len": 200, "micro_batch": 1, "flash": True, "checkpointing": 1}
# Name -> what is wanted, on which presets, where; and the texts of the advice, where they are known by hand.
CASES = {
    "precision": (case(100, presets=["zero2"], micro_batch=1), ["--precision bf16"]),
    "micro batch": (
        case(24, shape=WORDY, precision="bf16", flash=True, micro_batch=8),
        ["--micro-batch 1 --grad-accum 8"],
    ),
    "loss": (
        case(4.3, presets=["zero2"], shape=WORDY, **FRUGAL, method="qlora", quantized="nf4", adapters=10**6),
        ["a fused linear cross-entropy (Liger)"],
    ),
    "adapters": (case(24, 64, **FRUGAL), ["--method lora"]),
    "preset": (case(24, 2000, shape=LARGE, **FRUGAL), ["--preset zero3-offload"]),
    "several": (case(24, 64), None),
    "small cards": (case(8, 64, preset="ddp"), None),
    "nodes": (case(24, presets=["zero3"], preset="zero3", shape=LARGE, **FRUGAL), None),
    "two changes": (
        case(24, 30, preset="zero3-offload", presets=["zero3-offload", "zero3"], **FRUGAL),
        ["--preset zero3", "--method lora"],
    ),
    # QLoRA, four nodes and eight times those would do.
    "no kind twice": (case(6, presets=["zero3"], preset="zero3", shape=LARGE, **FRUGAL), None),
    "model": (case(24, presets=["zero2"], shape=LARGE, **FRUGAL), None),
}
NAMES = list(CASES)


@cache
def advice(name):
    (wanted, presets, here), _ = CASES[name]
    return advise(wanted, presets, here, bf16=True)


def possible(wanted, presets):
    others = {name: fields for name, fields in presets.items() if name != wanted.preset}
    return changes(wanted.setup, others, bf16=True)


def applied(wanted, texts, presets, here):
    """The plans that a list's texts lead to, one after the other; none where they don't go together."""
    known = {change.text: change for change in possible(wanted, presets)}
    job, preset = wanted.setup, wanted.preset
    plans = [wanted]
    for text in texts:
        preset = known[text].preset or preset
        job = known[text].apply(job)
        if job is None:
            return []
        plans.append(judge(preset, job, replace(here, nodes=job.nodes)))
    return plans


def by_hand(wanted, presets, here, length, without):
    """Every list of so many changes, presets among them, that fits; by brute force."""
    moves = [(change.kind, change.text) for change in possible(wanted, presets) if change.kind not in without]
    for chosen in combinations(moves, length):
        if len({kind for kind, _ in chosen}) == length:
            texts = [text for _, text in chosen]
            plans = applied(wanted, texts, presets, here)
            if plans and plans[-1].verdict != OUT:
                yield texts


# --- it fits, and is the shortest ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_advice_is_what_its_steps_lead_to_and_it_fits(name):
    (wanted, presets, here), _ = CASES[name]
    found = advice(name)
    plans = applied(wanted, [step.text for step in found.steps], presets, here)
    assert found.plan == plans[-1]
    assert found.plan.verdict != OUT
    assert found.nodes == found.plan.setup.nodes
    judged_again = judge(found.plan.preset, found.plan.setup, replace(here, nodes=found.nodes))
    assert judged_again == found.plan


@pytest.mark.parametrize("name", NAMES)
def test_nothing_shorter_fits(name):
    """Nothing fits without more nodes, or without a smaller model, where the advice has them."""
    (wanted, presets, here), _ = CASES[name]
    kinds = {change.text: change.kind for change in possible(wanted, presets)}
    found = advice(name)
    used = {kinds[step.text] for step in found.steps}
    for without in LAST:
        if used & without:
            for length in range(1, MOST_CHANGES + 1):
                assert not list(by_hand(wanted, presets, here, length, without)), without
            continue
        for length in range(1, len(found.steps)):
            assert not list(by_hand(wanted, presets, here, length, without))
        assert [step.text for step in found.steps] in by_hand(
            wanted, presets, here, len(found.steps), without
        )
        break


@pytest.mark.parametrize("name", NAMES)
def test_of_one_length_the_first_in_the_fields_order(name):
    """The list whose first change comes first, then its second, ..."""
    (wanted, presets, here), _ = CASES[name]
    known = possible(wanted, presets)
    order = {change.text: place for place, change in enumerate(known)}
    kinds = {change.text: change.kind for change in known}
    found = [step.text for step in advice(name).steps]
    used = {kinds[text] for text in found}
    without = next(without for without in LAST if not used & without)
    lists = by_hand(wanted, presets, here, len(found), without)
    assert [order[text] for text in found] == min([order[text] for text in texts] for texts in lists)


@pytest.mark.parametrize("name", [name for name in NAMES if CASES[name][1]])
def test_texts(name):
    assert [step.text for step in advice(name).steps] == CASES[name][1]


@pytest.mark.parametrize("name", NAMES)
def test_a_kind_at_most_once(name):
    (wanted, presets, _), _ = CASES[name]
    kinds = {change.text: change.kind for change in possible(wanted, presets)}
    used = [kinds[step.text] for step in advice(name).steps]
    assert 1 <= len(used) == len(set(used)) <= MOST_CHANGES


def test_four_changes_at_most():
    """Four are found, and five are not looked for."""
    assert len(advice("small cards").steps) == MOST_CHANGES == 4


def test_the_cases_differ():
    used = {step.text.split()[0] for name in NAMES for step in advice(name).steps}
    assert len(used) >= 6
    assert len({len(advice(name).steps) for name in NAMES}) >= 2


# --- order ----------------------------------------------------------------------------------------------------------


def test_the_fields_order():
    kinds = [change.kind for change in changes(WHOLE, PRESETS, bf16=True)]
    assert list(dict.fromkeys(kinds)) == list(KINDS)
    assert kinds == sorted(kinds, key=KINDS.index)
    sizes = [
        change.apply(WHOLE).shape.parameters
        for change in changes(WHOLE, PRESETS, bf16=True)
        if change.apply(WHOLE) and change.kind == "model"
    ]
    assert sizes == sorted(sizes, reverse=True)


def test_more_nodes_only_where_nothing_else_helps():
    assert [step.text for step in advice("nodes").steps][-1].startswith(("2 nodes", "4 nodes", "8 nodes"))
    # One change, a smaller model, would do here as well; two that cost neither model nor nodes come first.
    wanted, presets, here = case(7.2, presets=["zero2"], **{**FRUGAL, "seq_len": 2048})
    assert list(by_hand(wanted, presets, here, 1, set()))
    found = advise(wanted, presets, here, bf16=True)
    assert len(found.steps) == 2
    assert found.plan.setup.nodes == 1
    assert found.plan.setup.shape == wanted.setup.shape


def test_a_smaller_model_at_last():
    wanted, *_ = CASES["model"][0]
    found = advice("model")
    assert found.steps[-1].text.startswith("a model of about")
    assert found.plan.setup.shape.parameters <= SMALLER * wanted.setup.shape.parameters


def test_nothing_helps():
    wanted, presets, here = case(0.5, 0.5)
    assert advise(wanted, presets, here, bf16=True) is None
    for without in LAST:
        assert not any(list(by_hand(wanted, presets, here, length, without)) for length in (1, 2))


def test_the_wanted_preset_need_not_be_among_them():
    wanted, _, here = case(24, 2000, shape=LARGE, **FRUGAL)
    found = advise(wanted, {"zero3-offload": PRESETS["zero3-offload"]}, here, bf16=True)
    assert found.plan.preset == "zero3-offload"


# --- changes, one by one --------------------------------------------------------------------------------------------


def only(kind, job, bf16=True):
    return [
        (change, after)
        for change in changes(job, {}, bf16=bf16)
        if change.kind == kind and (after := change.apply(job))
    ]


@pytest.mark.parametrize(("bf16", "name"), [(True, "bf16"), (False, "fp16")])
def test_precision(bf16, name):
    ((change, after),) = only("precision", WHOLE, bf16)
    assert change.text == f"--precision {name}"
    assert after == replace(WHOLE, precision=name)
    assert not only("precision", after, bf16)


def test_a_smaller_micro_batch_keeps_the_batch():
    ((change, after),) = only("micro batch", replace(WHOLE, micro_batch=4, grad_accum=3))
    assert (after.micro_batch, after.grad_accum) == (1, 12)
    assert change.text == "--micro-batch 1 --grad-accum 12"
    assert not only("micro batch", after)


def test_shorter_rows():
    found = only("length", replace(WHOLE, seq_len=512))
    assert [after.seq_len for _, after in found] == [256, 128]
    assert all(str(after.seq_len) in change.text for change, after in found)
    assert [after.seq_len for _, after in only("length", replace(WHOLE, seq_len=2 * SHORTEST))] == [SHORTEST]
    assert not only("length", replace(WHOLE, seq_len=2 * SHORTEST - 1))


def test_what_is_on_is_not_advised():
    done = replace(WHOLE, flash=True, checkpointing=1, fused_loss=True)
    for kind in ("attention", "checkpointing", "loss"):
        ((_, after),) = only(kind, WHOLE)
        assert sum(getattr(after, name) != getattr(WHOLE, name) for name in Setup.__dataclass_fields__) == 1
        assert not only(kind, done)


def test_methods():
    lora, qlora = only("method", WHOLE)
    assert (lora[1].method, lora[1].quantized) == ("lora", None)
    assert (qlora[1].method, qlora[1].quantized) == ("qlora", "nf4")
    assert lora[1].adapters == qlora[1].adapters == lora_weights(LLAMA, LORA_RANK)
    ((change, after),) = only("method", replace(WHOLE, method="lora", adapters=77))
    assert (change.text, after.adapters) == ("--method qlora", 77)
    assert not only("method", qlora[1])


def test_nodes():
    found = only("nodes", replace(WHOLE, gpus=6, nodes=3))
    assert [(after.gpus, after.nodes) for _, after in found] == [(12, 6), (24, 12), (48, 24)]
    assert found[0][0].text == "6 nodes like this, not 3"


def test_models():
    found = only("model", WHOLE)
    assert [after.shape.parameters for _, after in found] == [
        round(size) for size, *_ in reversed(SIZES) if size <= SMALLER * LLAMA.parameters
    ]
    for change, after in found:
        assert f"about {after.shape.parameters / 1e9:.3g}e9 parameters" in change.text


def test_a_smaller_model_has_smaller_adapters():
    job = replace(WHOLE, method="lora", adapters=lora_weights(LLAMA, LORA_RANK))
    for _, after in only("model", job):
        assert after.adapters == lora_weights(after.shape, LORA_RANK)


def test_no_4_bit_weights_under_zero_3():
    job = Setup(LLAMA, gpus=2, stage=3, precision="bf16", seq_len=128, checkpointing=1)
    for gib in (5, 6, 7, 8):
        here = room(gib)
        wanted = judge("zero3", job, here)
        found = advise(wanted, {"zero3": PRESETS["zero3"]}, here, bf16=True)
        assert found is None or not (found.plan.setup.quantized and found.plan.setup.stage == 3)


# --- what it says ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_savings_add_up(name):
    (wanted, presets, here), _ = CASES[name]
    found = advice(name)

    def short(plan):
        return plan.gpu.allocated if wanted.reason.startswith("GPU") else plan.host.peak

    plans = applied(wanted, [step.text for step in found.steps], presets, here)
    for step, (before, after) in zip(found.steps, pairwise(plans), strict=True):
        assert step.saves_bytes == short(before) - short(after)
        assert step.slower == after.seconds_per_token / before.seconds_per_token
        assert step.costs
    saved = sum(step.saves_bytes for step in found.steps)
    assert saved == pytest.approx(short(wanted) - short(found.plan))
    assert saved > 0
    assert found.scarce == wanted.scarce


@settings(deadline=None, max_examples=10)
@given(
    st.floats(8, 60), st.floats(40, 400), st.sampled_from(sorted(PRESETS)), st.sampled_from(["fp32", "bf16"])
)
def test_advice_in_general(gpu_gib, host_gib, preset, precision):
    here = room(gpu_gib, host_gib)
    wanted = judge(preset, setup(preset, precision=precision, micro_batch=2), here)
    if wanted.verdict != OUT:
        return
    found = advise(wanted, PRESETS, here, bf16=True)
    if found is not None:
        plans = applied(wanted, [step.text for step in found.steps], PRESETS, here)
        assert plans[-1] == found.plan
        assert found.plan.verdict != OUT
        if len(found.steps) > 1:
            assert all(plan.verdict == OUT for plan in plans[:-1])
