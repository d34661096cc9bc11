"""The optimizer that a job brings itself: which weights go together, and what it is given."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from dsrun.errors import DsrunError
from dsrun.options.table import ParallelismOptions
from dsrun.training.engines import optimizers
from dsrun.training.engines.optimizers import MOST_ELEMENTS, elements, grouped, own_optimizer

PARAMS = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


def weight(size: int):
    """A weight of which only the size is there, as ZeRO-3 has divided it."""
    return SimpleNamespace(ds_numel=size, numel=lambda: 0)


def a_job(optimizer: str = "adamw-8bit", stage: int = 2):
    training = SimpleNamespace(optimizer=optimizer, optimizer_params=PARAMS)
    parallel = ParallelismOptions()
    return SimpleNamespace(training=training, zero_stage=stage, dp_size=2, parallel=parallel)


@pytest.fixture
def bitsandbytes(monkeypatch):
    """A stand-in: what it is made with is kept."""

    class AdamW8bit(torch.optim.AdamW):
        def __init__(self, params, **rest):
            self.given = rest
            super().__init__(params, **rest)

    package, inside = ModuleType("bitsandbytes"), ModuleType("bitsandbytes.optim")
    inside.AdamW8bit = AdamW8bit
    monkeypatch.setitem(sys.modules, "bitsandbytes", package)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", inside)
    return AdamW8bit


@given(sizes=st.lists(st.integers(1, 40), max_size=30), most=st.integers(1, 60))
def test_groups_hold_every_weight_once_in_order_and_no_more_than_they_may(sizes, most):
    weights = [weight(size) for size in sizes]
    groups = grouped(weights, 1, most)
    assert [one for group in groups for one in group] == weights
    for group in groups:
        assert sum(map(elements, group)) <= most or len(group) == 1
    for left, right in itertools.pairwise(groups):
        assert sum(map(elements, left)) + elements(right[0]) > most


def test_a_model_of_seven_billion_weights_is_counted_in_32_bits():
    layers = [weight(202_000_000) for _ in range(32)] + [weight(131_000_000)] * 2
    groups = grouped(layers, 1)
    assert max(sum(map(elements, group)) for group in groups) <= MOST_ELEMENTS // 2
    assert len(groups) == 7


def test_a_weight_that_cannot_be_counted_is_refused():
    assert len(grouped([weight(MOST_ELEMENTS + 2)], 2)) == 1
    with pytest.raises(DsrunError, match="2,147,483,647"):
        grouped([weight(MOST_ELEMENTS + 1)], 1)


def test_a_whole_weight_has_its_own_count():
    assert elements(torch.nn.Parameter(torch.zeros(3, 5))) == 15


def test_deepspeed_makes_its_own(bitsandbytes):
    assert own_optimizer(a_job("adamw"), [torch.nn.Parameter(torch.zeros(2))]) is None


def test_it_gets_what_the_config_said(bitsandbytes, monkeypatch):
    monkeypatch.setattr(optimizers.grouped, "__defaults__", (5,))
    weights = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 3, 2)]
    made = own_optimizer(a_job(), weights)
    assert isinstance(made, bitsandbytes)
    assert made.given == PARAMS
    assert [[len(one) for one in group["params"]] for group in made.param_groups] == [[3], [3, 2]]
    assert {group["lr"] for group in made.param_groups} == {3e-4}


def test_a_rank_without_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(DsrunError, match="bitsandbytes can't be imported") as caught:
        own_optimizer(a_job(), [torch.nn.Parameter(torch.zeros(2))])
    assert "pip install" in caught.value.problems[0].hint
