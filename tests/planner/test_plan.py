"""Verdicts: where they turn, what decides, in which order plans come, how many rows fit, what finished runs change."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import pairwise

import pytest
from choices import ENGINES
from hypothesis import given, settings
from hypothesis import strategies as st
from running import examples

from dsrun.planner import disk
from dsrun.planner.gpu_memory import CONTEXT_GIB, GIB, NCCL_GIB, gpu_memory, untracked_gib
from dsrun.planner.host_memory import host_memory
from dsrun.planner.plan import (
    FITS,
    MOST_ROWS,
    OUT,
    TIGHT,
    TIGHT_FROM,
    Calibration,
    MemoryBudget,
    chance,
    demand,
    fastest,
    is_out,
    judge,
    largest_micro_batch,
    ranked,
)
from dsrun.planner.setup import Setup
from dsrun.planner.shape import Shape
from dsrun.planner.speed import Hardware, speed
from dsrun.planner.terms import MOMENTS

CHATGLM = Shape(6_243_584_000, 28, 4096, 13696, 32, 2, 128, 65024)
TINY = Shape(2_362_304, 4, 192, 512, 6, 2, 32, 2048)
V100 = Hardware(matrix_tflops=125, fp32_tflops=15.7, memory_gb_s=900, link_gb_s=130, bf16=False)
SETUP = Setup(CHATGLM, gpus=2, precision="fp16", seq_len=128, micro_batch=4, checkpointing=1)
OFFLOAD = replace(SETUP, optimizer_device="cpu")
NVME = replace(SETUP, stage=3, optimizer_device="nvme", parameter_device="nvme")
MORE = 1e-9


def room(gpu_bytes=1e15, **changes):
    return replace(MemoryBudget(gpus=2, nodes=1, gpu_bytes=gpu_bytes, hardware=V100), **changes)


def needed(setup):
    """Memory that a card needs."""
    return demand(setup, gpu_memory(setup))


def at(share, setup=SETUP, **changes):
    """The plan in a room of whose GPUs it takes this share."""
    return judge("zero2", setup, room(needed(setup) / share, **changes))


# --- verdicts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize(
    ("share", "verdict"),
    [
        (0.1, FITS),
        (TIGHT_FROM - MORE, FITS),
        (TIGHT_FROM + MORE, TIGHT),
        (1 - MORE, TIGHT),
        (1 + MORE, OUT),
        (5.0, OUT),
    ],
)
def test_where_verdicts_turn(share, verdict, gpus):
    plan = at(share, replace(SETUP, gpus=gpus))
    assert plan.used == pytest.approx(share, rel=MORE / 10)
    assert plan.verdict == verdict


@pytest.mark.parametrize(
    ("share", "verdict"),
    [(TIGHT_FROM - MORE, FITS), (TIGHT_FROM + MORE, TIGHT), (1 - MORE, TIGHT), (1 + MORE, OUT)],
)
def test_where_the_hosts_verdicts_turn(share, verdict):
    plan = judge("x", OFFLOAD, room(host_bytes=host_memory(OFFLOAD).peak / share))
    assert plan.verdict == verdict
    nvme = judge("x", NVME, room(nvme_bytes=disk.nvme_bytes(NVME) / share))
    assert nvme.verdict == verdict


def test_all_of_a_memory_is_not_too_much():
    whole = judge("x", OFFLOAD, room(host_bytes=host_memory(OFFLOAD).peak))
    assert (whole.used, whole.verdict) == (1.0, TIGHT)


def test_one_rank_has_no_nccl():
    assert untracked_gib(1) == CONTEXT_GIB
    assert untracked_gib(2) == untracked_gib(64) == CONTEXT_GIB + NCCL_GIB


@pytest.mark.parametrize(
    ("scarce", "named"),
    [({"gpu_bytes": 2**30}, "GPU: "), ({"host_bytes": 2**30}, "host: "), ({"nvme_bytes": 2**30}, "NVMe: ")],
)
def test_the_scarcest_decides(scarce, named):
    plan = judge("zero3-nvme", NVME, replace(room(), **{"host_bytes": 1e15, "nvme_bytes": 1e15, **scarce}))
    assert plan.verdict == OUT
    assert plan.reason.startswith(named)
    assert "of 1.0 GiB" in plan.reason


def test_a_reason_holds_the_numbers():
    plan = at(0.5)
    have = f"{2 * needed(SETUP) / GIB:.1f} GiB"
    assert plan.reason == f"GPU: {needed(SETUP) / GIB:.1f} of {have} {MOMENTS[plan.gpu.moment]}"
    host = judge("x", OFFLOAD, room(host_bytes=100 * GIB))
    peak = host_memory(OFFLOAD)
    assert host.reason == f"host: {peak.peak / GIB:.1f} of 100.0 GiB ({peak.moment})"


def test_unknown_memories_are_not_judged():
    assert judge("x", OFFLOAD, room()).reason.startswith("GPU")
    plan = judge("x", NVME, room(host_bytes=1e15))
    assert plan.nvme_bytes > 0
    assert "NVMe" not in plan.reason
    assert plan.verdict == FITS


def test_an_nvme_disk_counts_for_what_is_put_there():
    full = room(needed(SETUP) * 2, nvme_bytes=1.0)
    assert judge("x", SETUP, full).verdict == FITS
    assert judge("x", NVME, full).verdict == OUT
    assert judge("x", NVME, full).nvme_bytes == disk.nvme_bytes(NVME)
    assert judge("x", SETUP, full).nvme_bytes == 0


def test_cpus_are_judged_by_host_memory_alone():
    setup = Setup(TINY, gpus=2, precision="fp32", seq_len=64)
    cpu = room(1.0, accelerator="cpu", host_bytes=1e15)
    plan = judge("x", setup, cpu)
    assert plan.verdict == FITS
    assert plan.reason.startswith("host: ")
    assert plan.host.peak == host_memory(setup, accelerator="cpu").peak
    assert judge("x", setup, replace(cpu, host_bytes=plan.host.peak * 0.99)).verdict == OUT
    unknown = judge("x", setup, replace(cpu, host_bytes=None))
    assert (unknown.verdict, unknown.used) == (FITS, 0.0)
    assert "no memory was named" in unknown.reason


def test_a_plan_holds_what_its_parts_say():
    plan = judge("zero2-offload", OFFLOAD, room())
    assert plan.gpu == gpu_memory(OFFLOAD)
    assert plan.host == host_memory(OFFLOAD)
    assert plan.speed == speed(OFFLOAD, V100)
    assert plan.checkpoint_bytes == disk.checkpoint_bytes(OFFLOAD)
    assert (plan.preset, plan.setup) == ("zero2-offload", OFFLOAD)
    assert plan.seconds_per_token * plan.speed.tokens_per_second == pytest.approx(1)
    assert room(nodes=3).ranks == 6


# --- ranking --------------------------------------------------------------------------------------------------------


def pace(share, tokens):
    plan = at(share)
    return replace(plan, speed=replace(plan.speed, tokens_per_second=tokens))


def test_ranking():
    fast, slow = pace(0.5, 2000.0), pace(0.1, 1000.0)
    narrow, narrow_slow = pace(0.95, 9000.0), pace(0.95, 8000.0)
    slower_if_tight = pace(1.0, 3999.0)
    assert ranked([slower_if_tight, fast]) == [fast, slower_if_tight]
    near, far = pace(1.1, 1.0), pace(3.0, 99000.0)
    # 9,000 tokens a second count as 7,200 where the chance is 80 %.
    wanted = [narrow, narrow_slow, fast, slow, near, far]
    for turn in range(len(wanted)):
        assert ranked([*wanted[turn:], *wanted[:turn]]) == wanted
        assert ranked([*wanted[turn:], *wanted[:turn]][::-1]) == wanted
    assert ranked([]) == []


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 4), st.floats(1, 1e6)), max_size=8))
def test_ranking_in_general(pairs):
    plans = [pace(share, tokens) for share, tokens in pairs]
    found = ranked(plans)
    assert sorted(map(id, found)) == sorted(map(id, plans))
    for before, after in pairwise(found):
        assert before.verdict != OUT or after.verdict == OUT
        if before.verdict == after.verdict == OUT:
            assert before.used <= after.used
        elif after.verdict != OUT:
            paces = [
                one.speed.tokens_per_second * (one.chance if one.verdict == TIGHT else 1)
                for one in (before, after)
            ]
            assert paces[0] >= paces[1]


# --- the most rows --------------------------------------------------------------------------------------------------


@st.composite
def setups(draw):
    engine = draw(st.sampled_from(ENGINES))
    stage = draw(st.integers(0, 3)) if engine == "deepspeed" else 0
    optimizer = draw(st.sampled_from(["gpu", "cpu"])) if stage >= 1 else "gpu"
    return Setup(
        draw(st.sampled_from([CHATGLM, TINY])),
        gpus=2,
        engine=engine,
        stage=stage,
        optimizer_device=optimizer,
        parameter_device=draw(st.sampled_from(["gpu", "cpu"])) if stage == 3 else "gpu",
        precision=draw(st.sampled_from(["fp32", "fp16", "bf16"])),
        seq_len=draw(st.sampled_from([32, 128, 777, 2048, 8192])),
        micro_batch=draw(st.integers(1, 64)),
        grad_accum=draw(st.sampled_from([1, 4])),
        checkpointing=draw(st.sampled_from((0, 1, 3))),
        flash=draw(st.booleans()),
    )


@settings(deadline=None, max_examples=examples(150))
@given(
    setups(),
    st.floats(1, 200),
    st.none() | st.floats(1, 500),
    st.sampled_from(["cuda", "cpu"]),
    st.sampled_from([Calibration(), Calibration(moving=1.7, process_gib=0.5)]),
)
def test_so_many_fit_and_one_more_does_not(setup, gpu_gib, host_gib, accelerator, known):
    host = None if host_gib is None else host_gib * GIB
    here = room(gpu_gib * GIB, host_bytes=host, accelerator=accelerator, calibration=known)
    plan = judge("x", setup, here)
    most = largest_micro_batch(plan, here)

    def fits(rows):
        return judge("x", replace(setup, micro_batch=rows), here).verdict != OUT

    assert 0 <= most <= MOST_ROWS
    assert fits(most) if most else not fits(1)
    assert most == MOST_ROWS or not fits(most + 1)
    if accelerator == "cuda" and plan.verdict != OUT:
        assert most >= min(setup.micro_batch, MOST_ROWS)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 31, 32, 33, 1000])
def test_the_most_rows_exactly(rows):
    # So few weights that activations decide.
    setup = Setup(TINY, gpus=2, seq_len=8192)
    exact = room(needed(replace(setup, micro_batch=rows)) * (1 + MORE))
    assert largest_micro_batch(judge("x", setup, exact), exact) == rows


def test_not_even_one():
    small = room(needed(replace(SETUP, micro_batch=1)) * 0.99)
    assert largest_micro_batch(judge("x", SETUP, small), small) == 0


def test_the_search_ends():
    huge = room(1e18)
    assert largest_micro_batch(judge("x", SETUP, huge), huge) == MOST_ROWS


# --- what finished runs have shown ----------------------------------------------------------------------------------

ALL = Calibration(moving=1.3, reserved=0.5, process_gib=0.75, seconds=2.0)
PLANS = [
    SETUP,
    OFFLOAD,
    NVME,
    replace(SETUP, gpus=1, stage=0),
    replace(SETUP, variable_lengths=True, stage=3),
]


def both(setup, known, accelerator="cuda"):
    plain = room(host_bytes=1e15, accelerator=accelerator)
    return judge("x", setup, plain), judge("x", setup, replace(plain, calibration=known))


def unchanged(before, after):
    """Equal but for the last digits."""
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(unchanged(before[name], after[name]) for name in before)
    if hasattr(before, "__dataclass_fields__"):
        return all(unchanged(getattr(before, one.name), getattr(after, one.name)) for one in fields(before))
    return math.isclose(before, after, rel_tol=1e-12) if isinstance(before, (int, float)) else before == after


def without_start(memory):
    return replace(memory, peaks={name: size for name, size in memory.peaks.items() if name != "start"})


@pytest.mark.parametrize("setup", PLANS)
def test_the_defaults_change_nothing(setup):
    plain, same = both(setup, Calibration())
    assert plain == same


@pytest.mark.parametrize("setup", PLANS)
def test_moving(setup):
    plain, known = both(setup, Calibration(moving=1.3))
    held = plain.gpu.held
    for moment in ("turn", "middle", "end", "step"):
        assert known.gpu.peaks[moment] - held == pytest.approx(1.3 * (plain.gpu.peaks[moment] - held))
    assert known.gpu.allocated == max(known.gpu.peaks.values())
    assert known.gpu.held == held
    holes = plain.gpu.reserved - plain.gpu.allocated
    assert known.gpu.reserved - known.gpu.allocated == pytest.approx(holes)
    assert known.gpu.smi - known.gpu.reserved == pytest.approx(plain.gpu.smi - plain.gpu.reserved)
    assert unchanged(plain.host, known.host)
    assert known.speed.seconds_per_step == plain.speed.seconds_per_step


@pytest.mark.parametrize("setup", PLANS)
def test_reserved(setup):
    plain, known = both(setup, Calibration(reserved=0.5))
    holes = plain.gpu.reserved - plain.gpu.allocated
    assert holes > 0 or plain.gpu.moment in ("start", "flat")
    assert known.gpu.allocated == pytest.approx(plain.gpu.allocated)
    assert known.gpu.reserved - known.gpu.allocated == pytest.approx(holes / 2)
    assert known.gpu.smi == pytest.approx(plain.gpu.smi - holes / 2)
    assert unchanged(plain.host, known.host)
    assert known.verdict == plain.verdict
    assert known.used <= plain.used


@pytest.mark.parametrize("setup", PLANS)
@pytest.mark.parametrize("gib", [0.75, -0.5])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_process(setup, gib, nodes):
    setup = replace(setup, gpus=setup.gpus * 2, nodes=nodes)
    plain, known = both(setup, Calibration(process_gib=gib))
    ranks = setup.gpus // nodes
    for moment, size in plain.host.peaks.items():
        assert known.host.peaks[moment] - size == pytest.approx(gib * GIB * ranks)
    assert known.host.peak == max(known.host.peaks.values())
    assert unchanged(without_start(plain.gpu), without_start(known.gpu))
    assert known.speed.seconds_per_step == plain.speed.seconds_per_step


def test_a_process_is_never_less_than_nothing():
    _, known = both(SETUP, Calibration(process_gib=-1e6))
    assert set(known.host.peaks.values()) == {0.0}


@pytest.mark.parametrize("setup", PLANS)
def test_seconds(setup):
    plain, known = both(setup, Calibration(seconds=2.0))
    assert known.speed.seconds_per_step == 2 * plain.speed.seconds_per_step
    assert known.speed.tokens_per_second == plain.speed.tokens_per_second / 2
    assert known.speed.terms == {name: 2 * seconds for name, seconds in plain.speed.terms.items()}
    assert known.speed.bytes_per_step == plain.speed.bytes_per_step
    assert 1 < known.speed.uncertain < plain.speed.uncertain
    assert unchanged(without_start(plain.gpu), without_start(known.gpu))
    assert unchanged(plain.host, known.host)


def test_seconds_leave_the_start_alone():
    plain, known = both(SETUP, Calibration(seconds=2.0))
    assert unchanged(plain.gpu, known.gpu)


def test_memory_alone_says_nothing_of_seconds():
    plain, known = both(SETUP, Calibration(moving=1.3, process_gib=0.5))
    assert plain.speed == known.speed


def test_terms_follow_the_process():
    plain, known = both(OFFLOAD, Calibration(process_gib=0.75))
    assert known.host.terms["processes"] - plain.host.terms["processes"] == pytest.approx(1.5 * GIB)


def test_all_at_once():
    _, one = both(OFFLOAD, ALL)
    _, moving = both(OFFLOAD, Calibration(moving=1.3))
    _, process = both(OFFLOAD, Calibration(process_gib=0.75))
    _, seconds = both(OFFLOAD, Calibration(seconds=2.0))
    assert unchanged(
        without_start(replace(one.gpu, reserved=0, smi=0)),
        without_start(replace(moving.gpu, reserved=0, smi=0)),
    )
    assert one.host == process.host
    assert one.speed == seconds.speed


def test_a_calibration_can_turn_a_verdict():
    tight = needed(SETUP) / 0.9
    assert judge("x", SETUP, room(tight)).verdict == FITS
    assert judge("x", SETUP, room(tight, calibration=Calibration(moving=3.0))).verdict == OUT


def test_cpus_take_the_process_too():
    setup = Setup(TINY, gpus=4, nodes=2, precision="fp32", seq_len=64)
    plain, known = both(setup, Calibration(process_gib=0.25), "cpu")
    assert known.host.peak - plain.host.peak == pytest.approx(0.5 * GIB)


# --- chances --------------------------------------------------------------------------------------------------------


def test_a_chance_falls_with_the_share():
    shares = [0.0, 0.5, TIGHT_FROM, 0.97, 1.0, 1.05, 2.0]
    found = [chance(share) for share in shares]
    assert found == sorted(found, reverse=True)
    assert chance(1.0) == pytest.approx(0.5)
    assert 0.8 < chance(TIGHT_FROM) < 0.9
    assert found[0] == pytest.approx(1) and found[-1] == pytest.approx(0)


def test_a_card_has_to_have_torchs_peak_its_context_and_nccl():
    for gpus, outside in ((1, CONTEXT_GIB), (2, CONTEXT_GIB + NCCL_GIB)):
        setup = replace(SETUP, gpus=gpus)
        assert demand(setup, gpu_memory(setup)) >= gpu_memory(setup).needed + outside * GIB


def test_holes_that_cant_be_given_back():
    """Padding's count in full, those of one length in part, those of expandable segments hardly."""
    padded = replace(OFFLOAD, variable_lengths=True, micro_batch=16, seq_len=1024)
    memory = gpu_memory(padded)
    outside = untracked_gib(padded.gpus) * GIB
    assert demand(padded, memory) == pytest.approx(memory.reserved + outside)
    assert demand(padded, memory, expandable=True) < demand(padded, memory)
    fixed = replace(padded, variable_lengths=False)
    memory = gpu_memory(fixed)
    assert memory.needed + outside < demand(fixed, memory) < memory.reserved + outside


# --- searching -----------------------------------------------------------------------------------------------------
@settings(max_examples=examples(40))
@given(
    free=st.floats(2 * GIB, 200 * GIB),
    host=st.none() | st.floats(2 * GIB, 400 * GIB),
    accelerator=st.sampled_from(["cuda", "cpu"]),
    stage=st.sampled_from([0, 2, 3]),
)
def test_a_search_finds_what_judging_all_finds(free, host, accelerator, stage):
    """The search leaves out only what can't be first."""
    there = room(free, host_bytes=host, nvme_bytes=1e11, accelerator=accelerator)
    setups = [
        SETUP.changed(stage=stage, micro_batch=rows, grad_accum=8 // rows, checkpointing=again)
        for again in (0, 2, 1)
        for rows in (8, 4, 2, 1)
    ]
    plans = [judge("zero", setup, there) for setup in setups]
    assert fastest("zero", setups, there) == ranked(plans)[0]
    assert [is_out(setup, there) for setup in setups] == [plan.verdict == OUT for plan in plans]


def test_a_changed_setup_is_a_replaced_one():
    assert SETUP.changed(stage=3, micro_batch=1) == replace(SETUP, stage=3, micro_batch=1)
    with pytest.raises(TypeError, match="micro_batches"):
        SETUP.changed(micro_batches=1)
