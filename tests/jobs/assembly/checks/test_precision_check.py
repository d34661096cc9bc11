"""Precisions that devices don't train in are refused before the start, or said to be slow."""

from __future__ import annotations

import pytest

from dsrun.cluster import cpu_types
from dsrun.cluster.devices import Gpu, Machine
from dsrun.jobs.assembly.checks import precision

GIB = 2**30


def cards(*capabilities) -> Machine:
    gpus = tuple(Gpu(i, f"Card {one}", f"GPU-{i}", 16 * GIB, one) for i, one in enumerate(capabilities))
    return Machine("cuda", gpus, 8, "cards of paper")


P100S, V100S, A100S = cards((6, 0), (6, 0)), cards((7, 0), (7, 0)), cards((8, 0), (8, 0))


@pytest.mark.parametrize(
    ("machine", "refused"),
    [(P100S, {"fp16"}), (V100S, set()), (A100S, set()), (cards((8, 0), (6, 1)), {"fp16"})],
)
def test_fp16_needs_7_0(machine, refused):
    assert {one for one in ("fp16", "bf16", "fp32") if precision.problems(one, machine)} == refused


def test_deepspeeds_own_way_round_it(monkeypatch):
    (problem,) = precision.problems("fp16", P100S)
    assert "DS_ALLOW_DEPRECATED_FP16=1" in problem.hint
    monkeypatch.setenv("DS_ALLOW_DEPRECATED_FP16", "1")
    assert not precision.problems("fp16", P100S)


@pytest.mark.parametrize(("there", "refused"), [(True, False), (False, True)])
def test_a_cpu_has_fp16_or_not(monkeypatch, there, refused):
    monkeypatch.setattr(cpu_types, "has_fp16", lambda: there)
    assert bool(precision.problems("fp16", Machine("cpu", (), 4, "no GPU"))) is refused


@pytest.mark.parametrize(
    ("machine", "own"), [(P100S, "fp32"), (V100S, "fp16"), (cards((8, 0), (7, 5)), "fp16")]
)
def test_bf16_that_is_emulated_is_said(machine, own):
    (note,) = precision.notes("bf16", machine)
    assert own in note


def test_bf16_where_it_is_at_home():
    assert not precision.notes("bf16", A100S)
    assert not precision.notes("bf16", Machine("cpu", (), 4, "no GPU"))
    assert not precision.notes("fp16", V100S)
