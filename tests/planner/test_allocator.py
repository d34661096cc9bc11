"""The copy of torch's caching allocator: sequences worked by hand, and what torch's own answered to long ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from dsrun.planner.trace.allocator import (
    MIB,
    AllocatorOptions,
    CachingAllocator,
    MemoryBlock,
    OutOfDeviceMemoryError,
)

EXPANDABLE = AllocatorOptions(expandable=True)


def test_small_sizes_share_a_segment_of_2_mib():
    allocator = CachingAllocator()
    allocator.allocate(1)
    allocator.allocate(513)
    assert (allocator.allocated, allocator.reserved) == (512 + 1024, 2 * MIB)
    allocator.allocate(MIB)  # the last size that is small; a second one has no room any more
    assert allocator.reserved == 2 * MIB
    allocator.allocate(MIB)
    assert allocator.reserved == 4 * MIB


def test_sizes_below_10_mib_get_segments_of_20():
    allocator = CachingAllocator()
    allocator.allocate(MIB + 1)
    assert allocator.reserved == 20 * MIB
    allocator.allocate(11 * MIB)  # fits into the rest
    assert allocator.reserved == 20 * MIB
    allocator.allocate(11 * MIB)  # a segment of its own, rounded up to 2 MiB
    assert allocator.reserved == 32 * MIB


def test_the_best_fit_is_taken_and_a_large_rest_below_1_mib_stays():
    allocator = CachingAllocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(30 * MIB)
    allocator.free(large)
    allocator.free(small)
    block = allocator.allocate(29 * MIB + 512)
    assert block.size == 30 * MIB, "the rest is no more than 1 MiB: it isn't split off"
    assert allocator.allocated == 30 * MIB
    assert allocator.allocate(35 * MIB).size == 35 * MIB  # of the 40
    assert allocator.reserved == 70 * MIB


def test_free_neighbours_become_one():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (11, 11, 11)]
    for block in blocks:
        allocator.free(block)
    assert allocator.reserved == 3 * 12 * MIB, "three segments, which are no neighbours"
    parts = [allocator.allocate(size * MIB) for size in (3, 3, 3)]
    assert allocator.reserved == 3 * 12 * MIB
    for block in (parts[0], parts[2], parts[1]):
        allocator.free(block)
    assert allocator.allocate(12 * MIB).size == 12 * MIB
    assert allocator.reserved == 3 * 12 * MIB


def test_a_full_card_gets_back_what_is_free_as_a_whole():
    allocator = CachingAllocator(100 * MIB)
    kept, gone = allocator.allocate(40 * MIB), allocator.allocate(40 * MIB)
    allocator.free(gone)
    allocator.allocate(60 * MIB)
    assert (allocator.retries, allocator.reserved, kept.size) == (1, 100 * MIB, 40 * MIB)


@pytest.mark.parametrize("options", [AllocatorOptions(), EXPANDABLE])
def test_a_stream_has_its_own_blocks(options):
    """A full card gets back what is free in any of them."""
    allocator = CachingAllocator(100 * MIB, options)
    allocator.free(allocator.allocate(40 * MIB, "gathering"))
    allocator.allocate(40 * MIB)
    assert (allocator.allocated, allocator.reserved) == (40 * MIB, 80 * MIB)
    allocator.allocate(40 * MIB, "gathering")
    assert allocator.reserved == 80 * MIB
    allocator.free(allocator.allocate(10 * MIB, "reducing"))
    allocator.allocate(20 * MIB)
    assert (allocator.retries, allocator.reserved) == (1, 100 * MIB)


def test_a_hole_is_not_given_back():
    """30 MiB are free, in two pieces beside what is in use: 20 can't be had."""
    allocator = CachingAllocator(60 * MIB)
    blocks = [allocator.allocate(20 * MIB) for _ in range(3)]
    for block in blocks:
        allocator.free(block)
    first = [allocator.allocate(5 * MIB) for _ in range(12)]
    for block in first[::2]:
        allocator.free(block)
    with pytest.raises(OutOfDeviceMemoryError) as error:
        allocator.allocate(20 * MIB)
    assert (error.value.requested, error.value.allocated, error.value.holes) == (20 * MIB, 30 * MIB, 30 * MIB)


def test_expandable_segments_grow_in_place_and_give_back_pages():
    allocator = CachingAllocator(options=EXPANDABLE)
    block = allocator.allocate(50 * MIB)
    assert allocator.reserved == 60 * MIB  # pages of 20
    allocator.free(block)
    allocator.allocate(90 * MIB)
    assert allocator.reserved == 100 * MIB, "the same range, longer: no second segment"
    tail = allocator.allocate(30 * MIB)
    assert allocator.reserved == 120 * MIB
    allocator.free(tail)
    allocator.release()
    assert allocator.reserved == 100 * MIB, "a part of the fifth page is in use"


def test_expandable_segments_fill_the_hole_that_fixed_ones_leave():
    def reserved(options: AllocatorOptions) -> int:
        allocator = CachingAllocator(options=options)
        for size in range(20, 200, 7):
            allocator.free(allocator.allocate(size * MIB))
        return allocator.reserved

    assert reserved(EXPANDABLE) == 200 * MIB
    assert reserved(AllocatorOptions()) > 5 * 200 * MIB


def test_sizes_are_rounded_up_between_powers_of_two():
    allocator = CachingAllocator(options=AllocatorOptions(divisions=4))
    assert [allocator.rounded(size) for size in (1, 1200, 2049, 2560, 1 << 20, (1 << 20) + 1)] == [
        512, 1536, 2560, 2560, 1 << 20, (1 << 20) + (1 << 18)]  # fmt: skip


def test_old_segments_go_first_from_the_threshold_on():
    allocator = CachingAllocator(200 * MIB, AllocatorOptions(collect_from=0.5))
    old, young = allocator.allocate(60 * MIB), allocator.allocate(40 * MIB)
    allocator.free(old)
    allocator.allocate(30 * MIB)  # from the old one; then it is free no longer as a whole
    assert allocator.reserved == 100 * MIB
    allocator.free(young)
    allocator.allocate(50 * MIB)
    assert allocator.reserved == 150 * MIB, "at the threshold nothing goes yet"
    allocator.allocate(44 * MIB)
    assert allocator.reserved == 60 * MIB + 50 * MIB + 44 * MIB, "the free 40 went"


def draws(seed: int) -> Iterator[float]:
    """Numbers from 0 to 1: a linear congruence, the same everywhere."""
    state = seed
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield (state >> 11) / 2**53


def sequence(seed: int, largest: int, events: int = 3000) -> Iterator[tuple[int, int]]:
    """(Number of a block, bytes) to be allocated, (number, 0) to be freed."""
    numbers, live = draws(seed), []
    for number in range(events):
        if live and next(numbers) < 0.5:
            yield live.pop(int(next(numbers) * len(live))), 0
        else:
            live.append(number)
            yield number, int(2 ** (4 + next(numbers) * (largest - 4)))


def answers(options: AllocatorOptions, capacity: float, seed: int, largest: int) -> tuple[int, int, int]:
    """(Events until the end or until nothing is left, the last counter of reserved bytes, a sum over all of them)."""
    allocator, total, reserved = CachingAllocator(capacity, options), 0, 0
    blocks: dict[int, MemoryBlock] = {}
    done = 0
    for number, size in sequence(seed, largest):
        try:
            if size:
                blocks[number] = allocator.allocate(size)
            else:
                allocator.free(blocks.pop(number))
        except OutOfDeviceMemoryError:
            break
        done, reserved = done + 1, allocator.reserved
        total = (total * 31 + allocator.allocated + 7 * allocator.reserved) % (2**61 - 1)
    return done, reserved, total


RECORDED: list[tuple[AllocatorOptions, float, int, int, tuple[int, int, int]]] = [
    (AllocatorOptions(), 2**50, 1, 28, (3000, 2438987776, 488663462106150429)),
    (AllocatorOptions(), 2 * 2**30, 2, 29, (1332, 1954545664, 1111916040237057751)),
    (AllocatorOptions(max_split=64 * MIB), 2**50, 1, 28, (3000, 4542431232, 1874745582288708992)),
    (AllocatorOptions(max_split=64 * MIB), 2 * 2**30, 2, 29, (1347, 1927282688, 2049895995872197693)),
    (AllocatorOptions(divisions=4), 2**50, 1, 28, (3000, 2097152000, 1083800937622051391)),
    (AllocatorOptions(divisions=4), 2 * 2**30, 2, 29, (1332, 2143289344, 2201657770771387483)),
]
"""Options, capacity, seed, largest size as a power of two, and what torch's own allocator (1.13, compiled with a driver
that only counts) answered."""


@pytest.mark.parametrize(("options", "capacity", "seed", "largest", "recorded"), RECORDED)
def test_torch_answers_the_same(options, capacity, seed, largest, recorded):
    assert answers(options, capacity, seed, largest) == recorded


@pytest.mark.parametrize("options", [AllocatorOptions(), EXPANDABLE, AllocatorOptions(max_split=32 * MIB)])
def test_blocks_never_overlap_and_the_counters_add_up(options):
    allocator = CachingAllocator(options=options)
    blocks: dict[int, MemoryBlock] = {}
    for number, size in sequence(3, 25, 1500):
        if size:
            blocks[number] = allocator.allocate(size)
        else:
            allocator.free(blocks.pop(number))
        if number % 50 == 0:
            spans = sorted((block.address, block.address + block.size) for block in blocks.values())
            assert all(end <= start for (_, end), (start, _) in pairwise(spans))
            assert allocator.allocated == sum(block.size for block in blocks.values()) <= allocator.reserved
    for block in blocks.values():
        allocator.free(block)
    allocator.release()
    assert (allocator.allocated, allocator.reserved) == (0, 0)
