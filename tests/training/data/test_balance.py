"""A step's examples sharded to micro batches: none lost, none idle, no rank waits longer than it must."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import examples

from dsrun.training.data.balance import balance, balance_well, shard, shard_padded, shard_sequences


@settings(max_examples=examples(200), deadline=None)
@given(
    heaps=st.integers(1, 6),
    each=st.integers(1, 6),
    data=st.data(),
)
def test_heaps_are_even_and_none_is_heavier_than_so_many_of_the_largest(heaps, each, data):
    weights = data.draw(st.lists(st.integers(1, 500), min_size=heaps * each, max_size=heaps * each))
    balanced = balance(weights, heaps)
    assert sorted(place for heap in balanced for place in heap) == list(range(heaps * each))
    sums = [sum(weights[place] for place in heap) for heap in balanced]
    assert min(sums) > 0
    assert max(sums) <= each * max(weights)
    assert max(sums) - min(sums) <= max(weights)


SHAPES = {"ranks": st.integers(1, 6), "rounds": st.integers(1, 4), "data": st.data()}


def drawn(data, ranks, rounds):
    count = ranks * rounds
    return data.draw(st.lists(st.integers(1, 500), min_size=count, max_size=5 * count))


def path(costs, ranks):
    """What a step takes: of every round its costliest list."""
    return sum(max(costs[start : start + ranks]) for start in range(0, len(costs), ranks))


@settings(max_examples=examples(200), deadline=None)
@given(**SHAPES)
def test_every_example_is_dealt_once_and_no_rank_is_idle(ranks, rounds, data):
    lengths = drawn(data, ranks, rounds)
    for method in (shard, shard_padded):
        lists = method(lengths, ranks, rounds)
        assert len(lists) == ranks * rounds
        assert all(lists), "ZeRO-3: all take part"
        assert sorted(itertools.chain(*lists)) == list(range(len(lengths)))


@settings(max_examples=examples(200), deadline=None)
@given(**SHAPES)
def test_nothing_costs_more_than_equal_numbers_would(ranks, rounds, data):
    each = data.draw(st.integers(1, 5))
    size = ranks * rounds * each
    lengths = data.draw(st.lists(st.integers(1, 500), min_size=size, max_size=size))
    sums = [sum(lengths[place] for place in some) for some in shard(lengths, ranks, rounds)]
    assert max(sums) <= each * max(lengths)
    ordered = sorted(lengths, reverse=True)
    equal = [each * max(ordered[start : start + each]) for start in range(0, size, each)]
    padded = [
        len(some) * max(lengths[place] for place in some) for some in shard_padded(lengths, ranks, rounds)
    ]
    assert path(padded, ranks) <= path(equal, ranks)


def padded_best(lengths, lists):
    """The lowest limit of any split into runs of neighbours by length, by trying all."""
    ordered = sorted(lengths, reverse=True)
    cuts = itertools.combinations(range(1, len(ordered)), lists - 1)
    runs = ([0, *cut, len(ordered)] for cut in cuts)
    return min(max((b - a) * ordered[a] for a, b in itertools.pairwise(run)) for run in runs)


@settings(max_examples=examples(100), deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=3, max_size=9), ranks=st.integers(1, 3))
def test_padded_lists_are_the_best_there_are(lengths, ranks):
    lists = shard_padded(lengths, ranks, 1)
    assert max(len(some) * max(lengths[place] for place in some) for some in lists) == padded_best(
        lengths, ranks
    )


def test_the_slower_method_finds_what_the_quick_one_misses():
    weights = [8, 7, 6, 5, 4]
    assert max(sum(weights[place] for place in heap) for heap in balance(weights, 2)) == 17
    assert max(sum(weights[place] for place in heap) for heap in balance_well(weights, 2)) == 16


def test_the_rounds_others_are_filled_while_the_longest_lasts():
    lengths = [900, *[100] * 31]
    sums = [sum(lengths[place] for place in some) for some in shard(lengths, 4, 4)]
    assert sums[0] == 900
    assert path(sums, 4) <= 1200  # 900, and 100 a round: evenly sharded it would be 900 + 3 x 300


@pytest.mark.parametrize("micro_batch", [4, 8, 16])
def test_ranks_wait_for_one_another_by_a_few_percent(micro_batch):
    """Lengths of ordinary data, lognormal, 16 to 2048: rank 0 used to get five times as much as the mean."""
    draw = random.Random(1)
    bound = path_length = 0
    for _ in range(20):
        lengths = [min(2048, max(16, int(draw.lognormvariate(6, 0.8)))) for _ in range(8 * micro_batch)]
        sums = [sum(lengths[place] for place in some) for some in shard(lengths, 8, 1)]
        path_length += max(sums)
        bound += max(*lengths, sum(lengths) / 8)
    assert bound / path_length >= 0.98


@settings(max_examples=examples(200), deadline=None)
@given(
    **SHAPES,
    count=st.integers(1, 6),
    slack=st.sampled_from([1.0, 1.01, 1.3]),
    more=st.integers(0, 900),
    side=st.integers(1, 900),
)
def test_sequences_keep_to_their_room(ranks, rounds, data, count, slack, more, side):
    lengths = drawn(data, ranks, rounds)
    room = max(lengths) + more
    lists = shard_sequences(lengths, ranks, count, slack=slack, room=room, square=side * side)
    if lists is None:
        return
    assert len(lists) == ranks and all(lists), "ZeRO-3: all take part"
    assert sorted(place for some in lists for sequence in some for place in sequence) == list(
        range(len(lengths))
    )
    for some in lists:
        width = max(sum(lengths[place] for place in sequence) for sequence in some)
        assert len(some) * width <= room
        assert all(len(sequence) == 1 for sequence in some) or len(some) * width**2 <= side * side


def test_sequences_of_a_step_are_nearly_full():
    """Of lognormal lengths, 16 to 2048, in two sequences a rank: 99 % of what the ranks have is no padding."""
    draw = random.Random(1)
    lengths = [min(2048, max(16, int(draw.lognormvariate(6, 0.8)))) for _ in range(128)]
    lists = shard_sequences(lengths, 8, 2, slack=1.01, room=1 << 20, square=1 << 26)
    most = max(len(some) * max(sum(lengths[place] for place in one) for one in some) for some in lists)
    assert sum(lengths) / 8 / most >= 0.99


def test_a_rank_with_one_long_example_leaves_the_rest_to_the_others():
    """Beside a length that takes the largest mask by itself nothing else has room; without it all would be padded."""
    lengths = [800, *[100] * 25]
    lists = shard_sequences(lengths, 4, 2, slack=1.2, room=3200, square=850 * 850)
    assert lists[0] == [[0]]
    assert max(sum(map(len, some)) for some in lists[1:]) <= 10
