"""The planner's states are those of the ZeRO paper: arXiv 1910.02054, tables 1 and 2."""

from __future__ import annotations

import math

import pytest

from dsrun.planner.gpu_memory import persistent, temporary
from dsrun.planner.setup import Setup
from dsrun.planner.shape import Shape

GB = 1e9
RANKS = (1, 4, 16, 64, 256, 1024)
# Table 1, GB a device, as printed: parameters -> stage -> a number for each of RANKS.
TABLE_1 = {
    7.5e9: {
        1: ("120", "52.5", "35.6", "31.4", "30.4", "30.1"),
        2: ("120", "41.3", "21.6", "16.6", "15.4", "15.1"),
        3: ("120", "30", "7.5", "1.88", "0.47", "0.12"),
    },
    128e9: {
        1: ("2048", "896", "608", "536", "518", "513"),
        2: ("2048", "704", "368", "284", "263", "257"),
        3: ("2048", "512", "128", "32", "8", "2"),
    },
    1e12: {
        1: ("16000", "7000", "4750", "4187", "4046", "4011"),
        2: ("16000", "5500", "2875", "2218", "2054", "2013"),
        3: ("16000", "4000", "1000", "250", "62.5", "15.6"),
    },
}
# Table 2, theory: the largest model for 32 GB devices, 64-fold data parallel, in 1e9: stage -> for each of PARALLEL.
PARALLEL = (1, 2, 4, 8, 16)
TABLE_2 = {
    0: (2, 4, 8, 16, 32),
    1: (7.6, 15.2, 30.4, 60.8, 121.6),
    2: (14.4, 28.8, 57.6, 115.2, 230.4),
    3: (128, 256, 512, 1024, 2048),
}


def zero_states(parameters, ranks, stage):
    """Bytes on one rank of weights, gradients and Adam's states (the paper's K = 12), in the planner's own terms."""
    shape = Shape(
        round(parameters), layers=1, hidden=0, intermediate=0, heads=1, kv_heads=1, head_dim=0, vocab=0
    )
    setup = Setup(shape, gpus=ranks, stage=stage, precision="fp16")
    held = persistent(setup)
    states = sum(held.get(name, 0.0) for name in ("weights", "master", "moments", "gradient_shard"))
    return states + temporary(setup)["gradients"]


def last_digit(printed):
    """Value of one in the last digit of a printed number."""
    return 10.0 ** -len(printed.partition(".")[2])


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("parameters", TABLE_1, ids=lambda number: f"{number:g}")
def test_table_1(parameters, stage):
    # The paper rounds some of its numbers and cuts others.
    for ranks, printed in zip(RANKS, TABLE_1[parameters][stage], strict=True):
        found = zero_states(parameters, ranks, stage) / GB
        assert abs(found - float(printed)) < last_digit(printed), f"{ranks} ranks: {found}, {printed} printed"


def largest(stage, parallel, ranks=64, room=32 * GB):
    """The largest model of which `parallel` devices hold a part each: bisection, as the states only grow."""
    low, high = 0.0, 1e14
    while high - low > 1e5:
        middle = (low + high) / 2
        low, high = (middle, high) if zero_states(middle / parallel, ranks, stage) <= room else (low, middle)
    return low


@pytest.mark.parametrize("stage", TABLE_2)
def test_table_2(stage):
    # The paper multiplies its rounded first column.
    for parallel, printed in zip(PARALLEL, TABLE_2[stage], strict=True):
        assert largest(stage, parallel) / GB == pytest.approx(printed, rel=0.006)


@pytest.mark.parametrize("ranks", RANKS)
def test_the_papers_formulas(ranks):
    psi = 7.5e9
    assert zero_states(psi, ranks, 0) == 16 * psi
    assert zero_states(psi, ranks, 1) == pytest.approx(4 * psi + 12 * psi / ranks)
    assert zero_states(psi, ranks, 2) == pytest.approx(2 * psi + 14 * psi / ranks)
    assert zero_states(psi, ranks, 3) == pytest.approx(16 * psi / ranks)


def test_what_zero_1_saves_at_most():
    assert math.isclose(zero_states(1e9, 10**6, 1) / zero_states(1e9, 1, 0), 1 / 4, rel_tol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_a_stage_never_holds_more_than_the_one_below(ranks):
    held = [zero_states(7e9, ranks, stage) for stage in range(4)]
    assert held == sorted(held, reverse=True)
    if ranks > 1:
        assert len(set(held)) == 4
