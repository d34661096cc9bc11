"""A real all-reduce over all ranks, as a job does it: whether it works, and how fast. Run by jobs.supervision.rank.

Then each rank multiplies matrices, and each pair of hosts exchanges data (smoke_parts.py).

Bus bandwidth is data / time x 2(n-1)/n, as nccl-tests have it (doc/PERFORMANCE.md): what each rank sends and receives,
and so the same for any number of ranks. The first rank prints a line of JSON.
"""

from __future__ import annotations

import json
import os
import re
import socket
import statistics
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dsrun.training import smoke_parts
from dsrun.training.ranks.barrier import from_all_ranks

SECONDS = 2.0
WAIT_S = 60.0
"""The time that ranks wait for one another."""
BYTES = {"nccl": 64 << 20, "gloo": 8 << 20}
SMALL_COUNT = 50
NCCL_LOG = "nccl.log"
VALUES = 64
"""Ranks add small whole numbers, whose sums float32 holds exactly."""


def main() -> None:
    """Meet the other ranks, add up, and print what it took; exit code 1 where that fails."""
    try:
        _measure()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        # Not by raising: the threads of a group that is left sometimes abort an interpreter that ends in order.
        os._exit(1)


def _measure() -> None:
    backend = "gloo" if os.environ.get("DS_ACCELERATOR") == "cpu" else "nccl"
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", local_rank)
    if backend == "nccl":
        torch.cuda.set_device(device)
        if rank == 0 and "NCCL_DEBUG" not in os.environ:  # what it says tells which way it takes
            os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": NCCL_LOG}
    began = time.monotonic()
    dist.init_process_group(backend, timeout=timedelta(seconds=WAIT_S))
    first_s = _reduced(torch.empty(1, device=device))
    met_s = time.monotonic() - began
    data = torch.empty(BYTES[backend] // 4, device=device)
    for _ in range(2):
        _reduced(data)
    count = _agreed(max(1.0, SECONDS / max(_reduced(data), 1e-6)), device)
    times = [_reduced(data) for _ in range(count)]
    small = [_reduced(torch.empty(2, device=device)) for _ in range(SMALL_COUNT)]
    ranks = dist.get_world_size()
    seconds = statistics.median(times)
    cards = from_all_ranks(smoke_parts.card(device))
    pairs = smoke_parts.pairs(backend, device)
    result = {
        "smoke": 1, "backend": backend, "ranks": ranks, "bytes": data.nbytes, "count": count, "seconds": seconds,
        "bus_gb_s": data.nbytes / seconds * 2 * (ranks - 1) / ranks / 1e9,
        "small_us": statistics.median(small) * 1e6, "first_s": first_s, "met_s": met_s,
        "interface": _interface(backend), "cards": cards, "pairs": pairs,
    }  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


def _reduced(data: torch.Tensor) -> float:
    """Add a tensor up over all ranks; the seconds it took. Raises where the sum is wrong."""
    data.fill_(dist.get_rank() % VALUES + 1)
    smoke_parts.wait(data.device)
    began = time.perf_counter()
    dist.all_reduce(data)
    smoke_parts.wait(data.device)
    seconds = time.perf_counter() - began
    right = float(sum(rank % VALUES + 1 for rank in range(dist.get_world_size())))
    if not bool((data == right).all()):
        wrong = data[data != right]
        raise RuntimeError(
            f"an all-reduce on {socket.gethostname()} gave {wrong[0].item()} for {right} "
            f"in {wrong.numel()} of {data.numel()} numbers"
        )
    return seconds


def _agreed(number: float, device: torch.device) -> int:
    """A number for all ranks: the least of theirs."""
    least = torch.tensor([number], device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least.item())


def _interface(backend: str) -> str:
    """The network interface of the first rank's data; "" where it isn't known."""
    if backend == "gloo":
        return os.environ.get("GLOO_SOCKET_IFNAME", "")
    try:
        return interface_in(Path(NCCL_LOG).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""


def interface_in(log: str) -> str:
    """The interfaces in NCCL's log: "NET/IB : Using [0]mlx5_0:1/RoCE", "NET/Socket : Using [0]eth0:10.0.0.1<0>"."""
    names: dict[str, None] = {}
    for kind, devices in re.findall(r"NET/(\w+) : Using (.*)", log):
        for name in re.findall(r"\[\d+\]([\w.-]+)", devices):
            names[f"{name} ({kind})"] = None
    return ", ".join(names)


if __name__ == "__main__":
    main()
