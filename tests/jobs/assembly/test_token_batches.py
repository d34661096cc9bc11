"""--tokens-per-batch: how it is divided over devices, what is refused beside it, and where else it continues."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsrun.errors import DsrunError
from dsrun.jobs.assembly.resume import batch_on
from dsrun.options import derived
from dsrun.options.commands import FinetuneOptions
from dsrun.options.layers import Resolved, Source
from dsrun.options.table import ParallelismOptions


def asked(**said):
    return Resolved.built_in(FinetuneOptions).filled(
        Source.COMMAND_LINE, {"tokens_per_batch": 8000, **said}, "the command line"
    )


@given(tokens=st.integers(100, 10**6), longest=st.integers(1, 100), ranks=st.integers(1, 64))
def test_the_micro_batches_hold_the_step(tokens, longest, ranks):
    options = asked().with_layers(derived.by_tokens(asked(), tokens, longest, ranks)).options
    held = options.micro_batch * options.grad_accum * ranks * longest
    assert held >= tokens
    assert options.global_batch == options.micro_batch * options.grad_accum * ranks
    assert options.micro_batch == 1 or options.micro_batch * longest <= derived.MICRO_TOKENS


def test_smaller_micro_batches_hold_it_too():
    whole = asked().with_layers(derived.by_tokens(asked(), 8000, 100, 2))
    smaller = derived.smaller_token_batches(whole, 8000, 100, 2)
    found = [whole.with_layers(layer).options for layer in smaller]
    assert [one.micro_batch for one in found] == list(range(whole.options.micro_batch - 1, 0, -1))
    assert all(one.micro_batch * one.grad_accum * 2 * 100 >= 8000 for one in found)


@pytest.mark.parametrize("said", [{"micro_batch": 2}, {"grad_accum": 4}, {"global_batch": 32}])
def test_a_step_is_said_in_one_way(said):
    with pytest.raises(DsrunError, match="no fixed"):
        derived.by_tokens(asked(**said), 8000, 100, 2)


def test_a_step_holds_an_example():
    with pytest.raises(DsrunError, match="no room for an example of 8001"):
        derived.by_tokens(asked(), 8000, 8001, 1)


def test_a_mean_of_micro_batches_needs_fixed_ones():
    with pytest.raises(DsrunError, match="micro-batch-mean"):
        derived.by_loss(asked(loss="micro-batch-mean"))


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_it_continues_on_any_ranks(ranks):
    """The micro batch stays; no number of ranks is refused."""
    job = SimpleNamespace(
        training=SimpleNamespace(tokens_per_batch=8000), micro_batch=5,
        data=SimpleNamespace(max_source_length=60, max_target_length=40),
        parallel=ParallelismOptions(), run_dir="runs/a",
    )  # fmt: skip
    micro_batch, accumulation = batch_on(job, ranks)
    assert micro_batch == 5
    assert ranks * micro_batch * accumulation * 100 >= 8000
