"""Steps by a budget of tokens: the same examples on any devices, and every one of them once an epoch."""

from __future__ import annotations

import pytest
from needed import needs

needs("torch")

from hypothesis import given, settings
from hypothesis import strategies as st
from running import examples
from test_batches import write_rows

from dsrun.training.data import batches
from dsrun.training.data.packing import Packing
from dsrun.training.data.token_budget import TokenPlan

LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=40)
WAYS = st.sampled_from([None, Packing(32), Packing(32, varlen=True)])
LONGEST = 60


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory):
    return tmp_path_factory.mktemp("rows") / "a user's 行.arrow"


def taken(plan: TokenPlan, step: int, ranks: int) -> list[int]:
    """The examples of a step, over all ranks and micro-steps."""
    return [
        example
        for index in range(ranks)
        for micro_batch in plan.step(step, index).micro_batches
        for sequence in micro_batch
        for example in sequence
    ]


@settings(max_examples=examples(40), deadline=None)
@given(
    lengths=LENGTHS, tokens=st.integers(LONGEST, 400), rooms=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    ranks=st.tuples(st.integers(1, 4), st.integers(1, 4)), ways=st.tuples(WAYS, WAYS),
)  # fmt: skip
def test_what_a_step_takes_depends_on_the_budget_alone(rows_file, lengths, tokens, rooms, ranks, ways):
    rows = write_rows(rows_file, lengths)
    plans = [
        TokenPlan(rows, 3, one, tokens=tokens, room=room * LONGEST, packing=way)
        for one, room, way in zip(ranks, rooms, ways, strict=True)
    ]
    stream: list[int] = []
    for step in range(4):
        first, second = (sorted(taken(plan, step, one)) for plan, one in zip(plans, ranks, strict=True))
        assert first == second
        total = sum(map(rows.length, first))
        step_plan = plans[0].step(step, 0)
        assert step_plan.tokens == total <= tokens
        assert step_plan.target_tokens == sum(map(rows.target_tokens, first))
        place = plans[0].examples_until(step + 1)
        (following,) = batches.stream(rows, 3, place, place + 1)
        assert total + rows.length(following) > tokens, "as many as fit"
        stream += first
    whole = len(stream) // len(lengths)
    counts = [stream.count(example) for example in range(len(lengths))]
    assert all(whole <= count <= whole + 1 for count in counts)


@settings(max_examples=examples(40), deadline=None)
@given(
    lengths=LENGTHS,
    tokens=st.integers(LONGEST, 400),
    room=st.integers(1, 4),
    ranks=st.integers(1, 4),
    way=WAYS,
)
def test_every_micro_batch_fits_and_all_ranks_have_as_many(rows_file, lengths, tokens, room, ranks, way):
    rows = write_rows(rows_file, lengths)
    plan = TokenPlan(rows, 3, ranks, tokens=tokens, room=room * LONGEST, packing=way)
    for step in range(3):
        parts = [plan.step(step, index) for index in range(ranks)]
        assert len({len(part.micro_batches) for part in parts}) == 1
        assert len({(part.target_tokens, part.tokens, part.filler) for part in parts}) == 1
        for part in parts:
            for micro_batch in filter(None, part.micro_batches):
                widths = [sum(map(rows.length, sequence)) for sequence in micro_batch]
                assert len(widths) * max(widths) <= room * LONGEST
        rounds = zip(*(part.micro_batches for part in parts), strict=True)
        assert all(any(some) for some in rounds), "no micro-step without any work"


def test_no_more_micro_steps_than_the_tokens_need(rows_file):
    rows = write_rows(rows_file, [(4, 6)] * 64)
    for room, micro_steps in ((160, 1), (80, 2), (40, 4)):
        plan = TokenPlan(rows, 3, 2, tokens=320, room=room, packing=Packing(32, varlen=True))
        assert len(plan.step(0, 0).micro_batches) == micro_steps


def test_steps_of_a_run(rows_file):
    rows = write_rows(rows_file, [(4, 6)] * 10)
    plan = TokenPlan(rows, 3, 2, tokens=35, room=40, packing=None)  # three examples a step
    assert plan.total_steps(None, 7) == 7
    assert plan.total_steps(1.0, None) == 4
    assert plan.total_steps(0.3, None) == 1
    assert plan.total_steps(3.0, None) == 10
    assert plan.examples_until(4) == 12, "the last step runs on into the next epoch"


def test_a_step_larger_than_the_data_takes_it_again(rows_file):
    rows = write_rows(rows_file, [(4, 6)] * 3)
    plan = TokenPlan(rows, 3, 1, tokens=75, room=1000, packing=None)
    assert sorted(taken(plan, 0, 1)) == sorted([0, 1, 2, 0, 1, 2, *taken(plan, 0, 1)[6:]])
    assert plan.step(0, 0).tokens == 70
