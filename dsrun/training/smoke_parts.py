"""Parts of `dsrun doctor --smoke`: a matrix product whose result is known, and what each pair of hosts can send."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from dsrun.training.ranks.barrier import from_all_ranks

SIZE = {"cuda": 4096, "cpu": 512}
"""Rows and columns; a power of two, see `known_product`."""
SECONDS = {"cuda": 1.0, "cpu": 0.2}
LEAST_COUNT = 3
PAIR_BYTES = {"nccl": 64 << 20, "gloo": 4 << 20}
PAIR_COUNT = 3
MOST_ROUNDS = 63
"""Rounds of pairs of hosts, at most: each takes a moment, and with more hosts not every pair is tried."""
SEED = 1


def known_product(size: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Two matrices [size, size] without a zero, and their product, exact in any dtype.

    A = x s', B = s y' / size with powers of two in x and y and signs in s: every partial sum is x y m / size with a
    whole m up to size, which fp32 holds exactly while size <= 2^24, and the result x y is a power of two.
    """
    order = torch.arange(size, device=device)
    x, y = (torch.pow(2.0, (order * step) % 5 - 2) for step in (1, 3))
    signs = 1.0 - 2.0 * (order * 7 % 3 % 2)
    first, second = torch.outer(x, signs), torch.outer(signs, y) / size
    return first.to(dtype), second.to(dtype), torch.outer(x, y).to(dtype)


def card(device: torch.device) -> dict[str, Any]:
    """Matrix products on a rank's device: its speed, wrong elements, and the bits of a random product.

    bits: equal on sound devices of one kind with one library.
    """
    dtype = _dtype(device)
    first, second, right = known_product(SIZE[device.type], dtype, device)
    times: list[float] = []
    wrong = nans = 0
    until = time.monotonic() + SECONDS[device.type]
    while len(times) < LEAST_COUNT or time.monotonic() < until:
        wait(device)
        began = time.perf_counter()
        product = first @ second
        wait(device)
        times.append(time.perf_counter() - began)
        wrong = max(wrong, int((product != right).sum()))
        nans = max(nans, int(product.isnan().sum()))
    generator = torch.Generator(device=device).manual_seed(SEED)
    drawn = torch.randn(2, *first.shape, generator=generator, device=device).to(dtype)
    bits = (drawn[0] @ drawn[1]).float().view(torch.int32).to(torch.int64).sum()
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": str(dtype).removeprefix("torch."),
        "tflops": 2 * first.shape[0] ** 3 / min(times) / 1e12,
        "numbers": right.numel(),
        "wrong": wrong,
        "nans": nans,
        "bits": int(bits),
    }


def _dtype(device: torch.device) -> torch.dtype:
    """The type that a device trains in: bf16, fp16 before Ampere, fp32 on a CPU."""
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Each pair of `count` once, in rounds in which everybody is in one pair at most (the circle method)."""
    order = [*range(count), *([-1] if count % 2 else [])]
    for _ in range(len(order) - 1):
        half = len(order) // 2
        pairs = zip(order[:half], reversed(order[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if -1 not in pair]
        order = [order[0], order[-1], *order[1:-1]]


def pairs(backend: str, device: torch.device) -> list[list[float]]:
    """[host, host, GB/s in each direction] of pairs of hosts, both ways at once; the first rank of each host sends.

    Empty for one host. On all ranks the same.
    """
    local_ranks = from_all_ranks(int(os.environ["LOCAL_RANK"]))
    first = [rank for rank, local in enumerate(local_ranks) if local == 0]
    data = torch.ones(PAIR_BYTES[backend] // 4, device=device)
    room = torch.empty_like(data)
    rows: list[list[float]] = []
    for number, matched in enumerate(rounds(len(first))):
        if number == MOST_ROUNDS:
            break
        dist.barrier()
        for pair in matched:
            ranks = [first[host] for host in pair]
            if dist.get_rank() in ranks:
                peer = ranks[1 - ranks.index(dist.get_rank())]
                seconds = min(_exchange(data, room, peer, device) for _ in range(PAIR_COUNT))
                rows += [[*pair, data.nbytes / seconds / 1e9]] if dist.get_rank() == ranks[0] else []
    return sorted(row for of_rank in from_all_ranks(rows) for row in of_rank)


def _exchange(data: torch.Tensor, room: torch.Tensor, peer: int, device: torch.device) -> float:
    """Seconds until both ranks have the other's data."""
    began = time.perf_counter()
    work = dist.batch_isend_irecv([dist.P2POp(dist.isend, data, peer), dist.P2POp(dist.irecv, room, peer)])
    for request in work:
        request.wait()
    wait(device)
    return time.perf_counter() - began


def wait(device: torch.device) -> None:
    """Wait until a GPU has done all its work; a CPU has already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
