"""A copy of torch's CUDA caching allocator on numbers: what it reserves for a sequence of allocations and frees.

Source: c10/cuda/CUDACachingAllocator.cpp of torch 2.13. One device. A block is a piece of a segment that the driver
gave, and a stream's segments serve that stream alone. Blocks of a segment are neighbours; a free one lies in its pool
until an allocation takes it. With expandable segments a pool has one range of addresses instead, in which pages are
mapped as they are needed.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import chain

MIB = 2**20
MIN_BLOCK = 512
"""Bytes that every size is rounded up to a multiple of (kMinBlockSize)."""
SMALL = MIB
"""The largest size that is served from the small pool (kSmallSize)."""
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
"""Bytes of a segment for small sizes, and for those below LARGE (kSmallBuffer, kLargeBuffer). Pages of expandable
segments have these sizes, too."""
LARGE = 10 * MIB
"""From this size on an allocation gets a segment of its own size (kMinLargeAlloc)."""
ROUND_LARGE = 2 * MIB
"""Bytes that such a segment is rounded up to a multiple of (kRoundLarge)."""


@dataclass(frozen=True, slots=True)
class AllocatorOptions:
    """Settings of PYTORCH_CUDA_ALLOC_CONF, and of torch.cuda.set_per_process_memory_fraction."""

    expandable: bool = False
    """expandable_segments"""
    divisions: int = 0
    """roundup_power2_divisions: parts between two powers of two that sizes are rounded up to; 0: none."""
    max_split: float = math.inf
    """max_split_size_mb, in bytes: larger blocks are never split, and serve nothing much smaller."""
    collect_from: float = 0.0
    """garbage_collection_threshold: share of the capacity from which on old free segments are given back; 0: never.
    torch looks at it only where a memory fraction was set."""


class OutOfDeviceMemoryError(Exception):
    """No segment could be had, even after all free ones were given back. Sizes are in bytes."""

    def __init__(self, requested: int, allocated: int, reserved: int) -> None:
        super().__init__(f"{requested} bytes: {allocated} allocated, {reserved} reserved")
        self.requested, self.allocated, self.reserved = requested, allocated, reserved

    @property
    def holes(self) -> int:
        """Bytes that are reserved but not allocated, and can't be given back."""
        return self.reserved - self.allocated


class MemoryBlock:
    """A piece of a segment.

    size: bytes; address: its place on the device, by which equals are ordered; age: searches of its pool that it has
    been free for, counted where garbage is collected.
    """

    __slots__ = ("address", "age", "allocated", "following", "mapped", "pool", "preceding", "size")

    def __init__(self, pool: _Pool, address: int, size: int) -> None:
        self.pool, self.address, self.size = pool, address, size
        self.allocated, self.mapped, self.age = False, True, 0
        self.preceding: MemoryBlock | None = None
        self.following: MemoryBlock | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.address

    @property
    def whole(self) -> bool:
        """Whether it is all of its segment."""
        return self.preceding is None and self.following is None

    def cut(self, size: int) -> MemoryBlock:
        """Keep the first bytes of it; the rest is returned, as its neighbour."""
        rest = MemoryBlock(self.pool, self.address + size, self.size - size)
        rest.mapped, rest.preceding, rest.following = self.mapped, self, self.following
        if self.following is not None:
            self.following.preceding = rest
        self.size, self.following = size, rest
        return rest


class _Pool:
    """Free blocks, ordered by size and then by address."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.free: list[tuple[int, int]] = []
        self.blocks: dict[int, MemoryBlock] = {}
        self.range: MemoryBlock | None = None
        """The first block of its expandable range."""
        self.base = 0
        """The address at which that begins."""

    def put(self, block: MemoryBlock) -> None:
        block.age = 0
        insort(self.free, block.key)
        self.blocks[block.address] = block

    def take(self, block: MemoryBlock) -> None:
        del self.free[bisect_left(self.free, block.key)]
        del self.blocks[block.address]

    def smallest_from(self, size: float) -> MemoryBlock | None:
        """The best fit: the smallest free block of at least that size, of equals the one at the lowest address."""
        place = bisect_left(self.free, (size, 0))
        return self.blocks[self.free[place][1]] if place < len(self.free) else None


class CachingAllocator:
    """The allocator of one device.

    capacity: bytes that the driver can give; without limit by default. `allocated` and `reserved` are torch's
    counters of the same names, in bytes, and `peak_allocated` and `peak_reserved` their largest values so far.
    """

    def __init__(self, capacity: float = math.inf, options: AllocatorOptions | None = None) -> None:
        self.capacity = capacity
        self.options = options or AllocatorOptions()
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.retries = 0
        """Times that all free segments were given back, since there was no room (num_alloc_retries)."""
        self._pools: dict[str, tuple[_Pool, _Pool]] = {}
        """Stream -> its small and its large blocks."""
        self._address = MIB  # 0 is no address

    def allocate(self, size: int, stream: str = "") -> MemoryBlock:
        """A block for that many bytes, out of a stream's own. Raises OutOfDeviceMemoryError."""
        rounded = self.rounded(size)
        pools = self._pools.get(stream)
        if pools is None:
            pools = self._pools[stream] = _Pool(small=True), _Pool(small=False)
        pool = pools[rounded > SMALL]
        block = self._best_fit(pool, rounded)
        if block is None:
            block = self._from_driver(pool, rounded, size)
        else:
            pool.take(block)
        rest = block.size - rounded
        if rest and self._splits(pool, rounded, rest):
            pool.put(block.cut(rounded))
        block.allocated = True
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: MemoryBlock) -> None:
        """Give a block back to its pool, together with its free neighbours."""
        block.allocated = False
        self.allocated -= block.size
        self._merged(block)

    def rounded(self, size: int) -> int:
        """Bytes that an allocation of a size takes, at least."""
        size, divisions = max(size, 1), self.options.divisions
        if divisions > 1 and size > MIN_BLOCK * divisions:
            power = 1 << (size - 1).bit_length()
            if power == size:
                return size
            step = (power >> 1) // divisions
            return power // 2 + -(-(size - power // 2) // step) * step
        return -(-size // MIN_BLOCK) * MIN_BLOCK

    def _best_fit(self, pool: _Pool, size: int) -> MemoryBlock | None:
        if self.options.collect_from:
            for waiting in pool.blocks.values():
                waiting.age += 1
        if (block := pool.smallest_from(size)) is None:
            return None
        if self.options.expandable:
            return self._least_room(pool, block)
        # What max_split_size forbids to split goes to sizes that are nearly as large.
        if size < self.options.max_split <= block.size:
            return None
        if size >= self.options.max_split and block.size >= size + LARGE_SEGMENT:
            return None
        return block

    def _least_room(self, pool: _Pool, block: MemoryBlock) -> MemoryBlock:
        """A free block at the end of what is mapped counts as large as it could grow, so that others come first."""
        place = bisect_left(pool.free, block.key)
        while place + 1 < len(pool.free):
            other = pool.blocks[pool.free[place + 1][1]]
            if _room(other) >= _room(block):
                break
            block, place = other, place + 1
        return block

    def _splits(self, pool: _Pool, size: int, rest: int) -> bool:
        if pool.small or self.options.expandable:
            return rest >= MIN_BLOCK
        return size < self.options.max_split and rest > SMALL

    def _from_driver(self, pool: _Pool, rounded: int, size: int) -> MemoryBlock:
        """A block of a new segment; where there is no room, after the free segments were given back."""
        if self.options.collect_from:
            self._collect()
        block = self._segment(pool, rounded)
        if block is None and self._free_oversized(pool, rounded):
            block = self._segment(pool, rounded)
        if block is None:
            self.retries += 1
            self.release()
            block = self._segment(pool, rounded)
        if block is None:
            raise OutOfDeviceMemoryError(size, self.allocated, self.reserved)
        return block

    def _segment(self, pool: _Pool, size: int) -> MemoryBlock | None:
        if self.options.expandable:
            return self._expanded(pool, size)
        if size <= SMALL:
            length = SMALL_SEGMENT
        else:
            length = LARGE_SEGMENT if size < LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE
        if not self._reserve(length):
            return None
        block = MemoryBlock(pool, self._address, length)
        self._address += length + ROUND_LARGE  # segments never touch
        return block

    def _reserve(self, size: int) -> bool:
        if self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def release(self) -> None:
        """Give back all memory that is free as a whole, as torch.cuda.empty_cache does."""
        for pool in chain.from_iterable(self._pools.values()):
            for block in list(pool.blocks.values()):
                if self.options.expandable:
                    self._unmap(block)
                elif block.whole:
                    self._give_back(block)

    def _give_back(self, block: MemoryBlock) -> None:
        block.pool.take(block)
        self.reserved -= block.size

    def _free_oversized(self, pool: _Pool, size: int) -> bool:
        """Give back blocks that max_split_size keeps from smaller requests, as many as this one needs."""
        if math.isinf(self.options.max_split):
            return False
        wanted, released = max(size, self.options.max_split), 0
        if (fitting := pool.smallest_from(wanted)) is not None:
            self._give_back(fitting)
            return True
        while released < wanted and pool.free and pool.free[-1][0] >= self.options.max_split:
            block = pool.blocks[pool.free[-1][1]]
            released += block.size
            self._give_back(block)
        return released >= wanted

    def _collect(self) -> None:
        """Give back free segments that served nothing for longer than the others, until the threshold is met.

        All that are older than the mean go at once, so that it isn't done at every allocation.
        """
        excess = self.reserved - int(self.options.collect_from * self.capacity)
        candidates = [
            block for _, pool in self._pools.values() for block in pool.blocks.values() if block.whole
        ]
        while excess > 0 and candidates:
            mean = sum(block.age for block in candidates) / len(candidates)
            for block in [block for block in candidates if block.age >= mean]:
                candidates.remove(block)
                excess -= block.size
                self._give_back(block)

    # Expandable segments

    def _expanded(self, pool: _Pool, size: int) -> MemoryBlock | None:
        """A free block of at least that size, for which pages are mapped into the pool's range of addresses."""
        if pool.range is None:
            # The range is larger than the device, so that its end is never met.
            pool.range = MemoryBlock(pool, self._address, 2**60)
            pool.range.mapped, pool.base = False, self._address
            self._address += 2**61
        first = _first_with_room(pool.range, size)
        if not first.mapped:
            mapped = self._map(first, min(first.size, size))
            if mapped is None:
                return None
            first = mapped
        while first.size < size:
            after = first.following  # there is one: what is left of the range
            mapped = self._map(after, min(size - first.size, after.size)) if after is not None else None
            if mapped is None:
                return None
            first = mapped
        pool.take(first)
        return first

    def _map(self, block: MemoryBlock, size: int) -> MemoryBlock | None:
        """Map pages at the start of an unmapped block, and join them with free neighbours. None: there is no room."""
        pool = block.pool
        length = min(block.size, -(-size // pool.page) * pool.page)
        if not self._reserve(length):
            return None
        if length < block.size:
            block.cut(length)
        block.mapped = True
        return self._merged(block)

    def _unmap(self, block: MemoryBlock) -> None:
        """Give back the whole pages of a free block."""
        page, base = block.pool.page, block.pool.base
        start = base + -(-(block.address - base) // page) * page
        end = base + (block.address + block.size - base) // page * page
        if end <= start:
            return
        block.pool.take(block)
        if start > block.address:
            rest = block.cut(start - block.address)
            block.pool.put(block)
            block = rest
        if end < block.address + block.size:
            block.pool.put(block.cut(end - block.address))
        block.mapped = False
        self.reserved -= block.size
        _join_unmapped(block)

    def _merged(self, block: MemoryBlock) -> MemoryBlock:
        """A free block with its free neighbours, put into its pool."""
        pool = block.pool
        for other in (block.preceding, block.following):
            if other is not None and other.mapped and not other.allocated:
                pool.take(other)
                block = _joined(other, block) if other is block.preceding else _joined(block, other)
        pool.put(block)
        return block


def _room(block: MemoryBlock) -> int:
    after = block.following
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _joined(first: MemoryBlock, second: MemoryBlock) -> MemoryBlock:
    """Two neighbours as one block: the first, which keeps the place of a range's beginning."""
    first.size += second.size
    first.following = second.following
    if second.following is not None:
        second.following.preceding = first
    return first


def _join_unmapped(block: MemoryBlock) -> None:
    after, before = block.following, block.preceding
    if after is not None and not after.mapped:
        _joined(block, after)
    if before is not None and not before.mapped:
        _joined(before, block)


def _first_with_room(start: MemoryBlock, size: int) -> MemoryBlock:
    """The block of the lowest address from which on free and unmapped ones together have the size."""
    block: MemoryBlock | None = start
    while block is not None:
        if block.allocated:
            block = block.following
            continue
        room, reaches, unmapped = 0, block, False
        last: MemoryBlock | None = block
        while last is not None and not last.allocated:
            room += last.size
            unmapped = unmapped or not last.mapped
            reaches = last
            if room >= size and unmapped:
                return block
            last = last.following
        block = reaches.following
    raise AssertionError("the range of addresses is larger than any device")
