"""A step's examples sharded over its micro batches, so that no rank waits long for another.

Ranks meet in every micro-step, so a step takes as long as the sum, over its micro-steps, of the heaviest micro batch of
any rank. Nothing here changes what a step trains on, only who computes it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence

CLOSE_ENOUGH = 1.005
"""The heaviest list, as a multiple of its lower bound, that is good enough: a better one costs more time to find."""
LARGEST_DIFFERENCING = 1024
"""Weights times lists up to which the slower method is tried: about a millisecond. With many weights a list the quick
method comes close anyhow."""


def balance(weights: Sequence[int], heaps: int) -> list[list[int]]:
    """The places of `weights` in `heaps` lists of about equal sum: the heaviest first, each to the lightest list.

    With n * heaps weights no sum exceeds n times the largest weight: as long as a place is left to assign, some list
    has fewer than n, and the lightest is no heavier than that one.
    """
    places_of: list[list[int]] = [[] for _ in range(heaps)]
    lightest = [(0, number) for number in range(heaps)]
    for place in sorted(range(len(weights)), key=lambda place: -weights[place]):
        weight, number = lightest[0]
        places_of[number].append(place)
        heapq.heapreplace(lightest, (weight + weights[place], number))
    return places_of


def shard(weights: Sequence[int], ranks: int, rounds: int) -> list[list[int]]:
    """The places of `weights` in rounds * ranks lists, all ranks' of the first round, then of the second, ...

    The sum over the rounds of the heaviest list is kept small:

    1. A weight above what the lists that are left would have on average makes its round as long as itself. That round's
       other lists are filled as far as it lasts, which leaves less for the rounds after it.
    2. Once there is no such weight, what is left is balanced over all lists that are left.

    No list is empty where there are as many weights as lists, and none is heavier than in `balance`'s guarantee.
    """
    left = sorted(range(len(weights)), key=lambda place: -weights[place])
    done: list[list[int]] = []
    while len(done) < (rounds - 1) * ranks:
        lists = rounds * ranks - len(done)
        longest = weights[left[0]]
        if longest * lists <= sum(weights[place] for place in left):
            break
        shadow, left = _filled(weights, left, ranks, longest, keep=lists - ranks)
        done += shadow
    lists = rounds * ranks - len(done)
    rest = [weights[place] for place in left]
    return done + [[left[place] for place in heap] for heap in balance_well(rest, lists)]


def _filled(
    weights: Sequence[int], order: list[int], lists: int, room: int, *, keep: int
) -> tuple[list[list[int]], list[int]]:
    """Lists of at most `room` each, the heaviest weights first, and what is left over: at least `keep` places."""
    filled: list[list[int]] = [[place] for place in order[:lists]]
    rooms = [room - weights[place] for place in order[:lists]]
    left: list[int] = []
    for number, place in enumerate(order[lists:]):
        most = max(range(lists), key=rooms.__getitem__)
        still = len(order) - lists - number - 1
        if weights[place] > rooms[most] or len(left) + still < keep:
            left.append(place)
        else:
            filled[most].append(place)
            rooms[most] -= weights[place]
    return filled, left


def balance_well(weights: Sequence[int], heaps: int) -> list[list[int]]:
    """`balance`, or what the largest differencing method makes of it, where that is worth its time."""
    quick = balance(weights, heaps)
    heaviest = _heaviest(weights, quick)
    bound = max(max(weights, default=0), -(-sum(weights) // heaps))
    if heaviest <= CLOSE_ENOUGH * bound or len(weights) * heaps > LARGEST_DIFFERENCING:
        return quick
    slow = _differencing(weights, heaps)
    return slow if all(slow) and _heaviest(weights, slow) < heaviest else quick


def _heaviest(weights: Sequence[int], lists: Sequence[Sequence[int]]) -> int:
    return max((sum(weights[place] for place in places) for places in lists), default=0)


def _differencing(weights: Sequence[int], heaps: int) -> list[list[int]]:
    """The largest differencing method for several lists (Karmarkar and Karp 1982; Michiels et al. 2003).

    Every weight starts as a partition of its own, with empty lists. The two partitions whose lists differ most are
    joined, the heaviest list of one with the lightest of the other, until one is left.
    """
    count = itertools.count()
    parts = [
        (-weight, next(count), [(weight, [place]), *((0, []) for _ in range(heaps - 1))])
        for place, weight in enumerate(weights)
    ]
    heapq.heapify(parts)
    while len(parts) > 1:
        first, second = heapq.heappop(parts)[2], heapq.heappop(parts)[2]
        joined = sorted(
            ((a + b, here + there) for (a, here), (b, there) in zip(first, reversed(second), strict=True)),
            key=lambda entry: -entry[0],
        )
        heapq.heappush(parts, (joined[-1][0] - joined[0][0], next(count), joined))
    return [places for _, places in parts[0][2]]


def shard_padded(lengths: Sequence[int], ranks: int, rounds: int) -> list[list[int]]:
    """`shard` for examples that are padded and not packed: a list costs its longest length times its count of lengths.

    Neighbours by length share a list. A round's limit is the smallest with which all that is left fits in the lists
    that are left, so that short examples come in larger numbers. Equal numbers are taken where they cost less.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    ordered = [lengths[place] for place in order]
    equal = _runs(
        ordered, ordered[0] * len(ordered), rounds * ranks, most=-(-len(ordered) // (rounds * ranks))
    )
    sizes = min(_limited(ordered, ranks, rounds), equal, key=lambda sizes: _path(ordered, sizes, ranks))
    ends = list(itertools.accumulate(sizes, initial=0))
    return [order[start:end] for start, end in itertools.pairwise(ends)]


def _limited(ordered: Sequence[int], ranks: int, rounds: int) -> list[int]:
    """The count of lengths (longest first) that each list takes, by the smallest limit for every round."""
    sizes: list[int] = []
    for number in range(rounds):
        left, lists = ordered[sum(sizes) :], (rounds - number) * ranks
        low, high = left[0], left[0] * -(-len(left) // lists)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if len(_runs(left, middle)) <= lists else (middle + 1, high)
        sizes += _runs(left, high, lists)[:ranks]
    return sizes


def _path(ordered: Sequence[int], sizes: Sequence[int], ranks: int) -> int:
    """Padded tokens on the critical path: every round's costliest list."""
    starts = itertools.accumulate(sizes, initial=0)
    costs = [size * ordered[start] for size, start in zip(sizes, starts, strict=False)]
    return sum(max(costs[start : start + ranks]) for start in range(0, len(costs), ranks))


def _runs(ordered: Sequence[int], room: int, at_least: int = 1, most: int | None = None) -> list[int]:
    """The count of lengths (longest first) that each list takes, padded within `room`; `at_least` lists, none empty."""
    sizes: list[int] = []
    start = 0
    while start < len(ordered):
        after = max(0, at_least - len(sizes) - 1)
        size = max(1, min(room // ordered[start], most or len(ordered), len(ordered) - start - after))
        sizes.append(size)
        start += size
    return sizes


def shard_sequences(
    lengths: Sequence[int], lists: int, count: int, *, slack: float, room: int, square: int
) -> list[list[list[int]]] | None:
    """Places of `lengths` in lists of at most `count` sequences, padded to the longest of a list; None: some are left.

    A list's sequences have equal room, together `slack` times what lists have on average, or the longest length that is
    left where that is more; `room` at most, and sequences x width^2 `square` at most (but for a single length). They
    are filled one after the other, each with the longest length that fits, until none does: first-fit decreasing, so
    that short lengths are spent where they fill a gap. No list is empty where there are as many lengths as lists.
    """
    left = sorted(range(len(lengths)), key=lambda place: lengths[place])
    sizes = [lengths[place] for place in left]
    total, mean = sum(sizes), _mean(sizes, lists)
    batches: list[list[list[int]]] = []
    for after in range(lists - 1, -1, -1):
        longest = sizes[-1]
        # More than on average where a list before this one had no room for as much.
        share = min(room, max(longest, math.ceil(slack * max(mean, total / (after + 1)))))
        # The longest length may need a wider sequence than an equal division gives. Then fewer sequences have room in
        # the share, and under the mask's limit, and those get what the others would have had.
        width = max(longest, share // count)
        several = max(1, min(count, share // width, square // (width * width)))
        width = max(longest, min(share // several, math.isqrt(square // several)))
        batches.append([])
        for _ in range(several):
            sequence, rest = [], width
            while len(left) > after and (number := bisect_right(sizes, rest) - 1) >= 0:
                rest -= sizes[number]
                total -= sizes.pop(number)
                sequence.append(left.pop(number))
            if sequence:
                batches[-1].append(sequence)
    return None if left else batches


def _mean(ascending: Sequence[int], lists: int) -> float:
    """The mean of the lists, without those that a single length fills."""
    total, number = sum(ascending), len(ascending) - 1
    while lists > 1 and ascending[number] * lists > total:
        total, lists, number = total - ascending[number], lists - 1, number - 1
    return total / lists
