"""Part 4, for whoever has 2 to 8 GPUs in a host: tokens/s of each way to divide a model, overlap, NCCL.

    python bench/gpu/many.py [--gpus N] [--output FOLDER] [--budget 520] [--keep FOLDER] [--only NAME ...] [--tiny]

- NCCL: bytes a second of all-reduce, all-gather and reduce-scatter, 256 MiB in bf16, as a bus bandwidth (NCCL's tests:
  2 (N-1)/N of the bytes for an all-reduce, (N-1)/N for the others), which is what a link carries.
- Llama-3-8B's widths with 8 layers (speed.py), packed sequences of 4k tokens: zero1, zero2, zero3 and fsdp; zero2 and
  zero1 with and without `overlap_comm`. Tokens a second of all GPUs, MFU, and peaks.

All GPUs of the machine are used unless --gpus says fewer. With --tiny two ranks on a CPU, over gloo.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from common import Case, Child, Clock, begin, carry_out, ended, machine, parser, wanted

# speed puts bench/ on the path for peers.
import speed  # isort: skip
from peers import free_port

from dsrun.planner import gpus as kinds

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter")
BYTES = {"cuda": 256 * 2**20, "cpu": 2**16}
TRIES = 5
OVERLAP = "zero_optimization.overlap_comm"
ROUNDED = "zero_optimization.zero_quantized_weights"
"""Meant for several hosts; here it shows that DeepSpeed's kernel compiles, and that the losses are finite."""
CUDA_ALONE = ("many-zero3-qwz",)
RUNS = (
    *(speed.Run(f"many-{preset}", 4096, 1, preset=preset) for preset in ("zero2", "zero3", "fsdp", "zero1")),
    speed.Run("many-zero2-overlap", 4096, 1, ("--set", f"{OVERLAP}=true")),
    speed.Run("many-zero2-no-overlap", 4096, 1, ("--set", f"{OVERLAP}=false")),
    speed.Run("many-zero1-no-overlap", 4096, 1, ("--set", f"{OVERLAP}=false"), preset="zero1"),
    speed.Run("many-zero3-qwz", 4096, 1, ("--set", f"{ROUNDED}=true"), preset="zero3-qwz", expected=90.0),
)
"""Whether a preset overlaps by itself depends on DeepSpeed's version, so both are asked for by name."""


@dataclass(frozen=True)
class Bench:
    """Settings of all runs. one: speed.py's."""

    one: speed.Bench
    gpus: int

    def trained(self, run: speed.Run, folder: Path, seconds: float) -> dict[str, Any]:
        """`dsrun finetune` on all GPUs: tokens a second of all, MFU of one."""
        return self.one.ours(replace(run, gpus=self.gpus), folder, seconds)

    def collective(self, name: str, accelerator: str, folder: Path, seconds: float) -> dict[str, Any]:
        """A collective between ranks that this script is, once for each GPU."""
        report = folder / "report.json"
        argv = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(self.gpus), "--master-port",
            str(free_port()), __file__, "--rank-of", name, accelerator, str(report),
        ]  # fmt: skip
        failed, _ = ended(argv, {**os.environ, "OMP_NUM_THREADS": "1"}, folder, seconds)
        return {"failed": failed} if failed else json.loads(report.read_text(encoding="utf-8"))


def timed(name: str, accelerator: str, report: Path) -> None:
    """One rank's part of a collective; rank 0 writes the seconds of the fastest try and the bus bandwidth."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["LOCAL_RANK"])
    if accelerator == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if accelerator == "cuda" else "gloo")
    ranks = dist.get_world_size()
    kind = torch.bfloat16 if accelerator == "cuda" else torch.float32
    count = BYTES[accelerator] // kind.itemsize // ranks * ranks
    whole = torch.ones(count, dtype=kind, device=accelerator)
    part = torch.ones(count // ranks, dtype=kind, device=accelerator)

    def once() -> None:
        if name == "all-reduce":
            whole.fill_(1)  # sums of sums would overflow
            dist.all_reduce(whole)
        elif name == "all-gather":
            dist.all_gather_into_tensor(whole, part)
        else:
            dist.reduce_scatter_tensor(part, whole)

    wait = torch.cuda.synchronize if accelerator == "cuda" else lambda: None
    fastest = float("inf")
    for number in range(TRIES + 1):
        dist.barrier()
        wait()
        began = time.perf_counter()
        once()
        wait()
        fastest = min(fastest, time.perf_counter() - began) if number else fastest
    carried = count * kind.itemsize * (ranks - 1) / ranks * (2 if name == "all-reduce" else 1)
    if name == "all-reduce" and not (whole == ranks).all():
        raise SystemExit(f"rank {rank}: the all-reduce of {ranks} ones is {whole[whole != ranks][0].item()}")
    if rank == 0:
        found = {"failed": "", "ranks": ranks, "seconds": fastest, "bus_bytes_per_second": carried / fastest}
        report.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def cases(bench: Bench, accelerator: str) -> Iterator[Case]:
    """NCCL first: where it fails nothing else can work."""
    for name in COLLECTIVES:
        yield Case(name, partial(bench.collective, name, accelerator))
    for run in RUNS:
        taken = run if accelerator == "cuda" else replace(run, length=64)
        cuda = run.name in CUDA_ALONE
        yield Case(run.name, partial(bench.trained, taken), cuda=cuda, expected=run.expected)


def main() -> None:
    """Run, and write each result as it comes."""
    if sys.argv[1:2] == ["--rank-of"]:
        name, accelerator, report = sys.argv[2:]
        timed(name, accelerator, Path(report))
        return
    options = parser(__doc__)
    options.add_argument("--gpus", type=int, help="how many; all otherwise")
    given = options.parse_args()
    results, clock = begin("many", given), Clock(given.budget)
    gpus = given.gpus or (2 if given.tiny else len(machine()))
    if gpus < 2:
        raise SystemExit("one GPU: bench/gpu/run.sh speed is for it")
    results.where = f"{gpus} x {results.where}"
    accelerator = "cpu" if given.tiny else "cuda"
    kind = None if given.tiny else kinds.recognise(machine()[0].split(",")[0])
    child = Child()
    with tempfile.TemporaryDirectory(prefix="dsrun-many-") as name:
        kept = given.keep or Path(name) / "models"
        kept.mkdir(parents=True, exist_ok=True)
        one = speed.Bench(
            speed.Models(kept.resolve(), child, given.tiny), "fp32" if given.tiny else "bf16",
            speed.TINY_STEPS if given.tiny else speed.STEPS,
            gpus * 1e12 * kind.matrix_tflops if kind else None, kind.name if kind else None,
        )  # fmt: skip
        (Path(name) / "runs").mkdir()
        chosen = wanted(cases(Bench(one, gpus), accelerator), given.only)
        carry_out(chosen, results, clock, Path(name) / "runs")


if __name__ == "__main__":
    main()
