"""Cost of digests: what they add to writing a checkpoint, and what checking them before a resume takes.

    python bench/digests.py [--gib 1.4] [--rounds 7] [--output bench/results/digests-DATE.json]

Two CPU ranks write half each of a checkpoint of fp32 numbers with torch.save, wait until it is on the disk, and mark it
(dsrun/training/checkpoint.py), in turn with digests and without, each time into new files; the median of the rounds
counts, wall and CPU seconds of the first. A busy disk or CPU ("load") makes walls worth nothing. "look" is what a
resume does before it loads: all files read and compared, by two ranks, of which the page cache still has most.
"gb_per_second" is each digest of Python's library over 64 MiB, one core.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

DIGESTS: dict[str, Callable[[bytes], Any]] = {
    "crc32": zlib.crc32, "adler32": zlib.adler32, "sha1": hashlib.sha1, "sha256": hashlib.sha256,
    "blake2b": hashlib.blake2b,
}  # fmt: skip
WANTED = 1.05


def speeds() -> dict[str, float]:
    """GB a second of each digest."""
    content, found = os.urandom(1 << 26), {}
    for name, digest in DIGESTS.items():
        began = time.process_time()
        digest(content)
        found[name] = round(len(content) / (time.process_time() - began) / 1e9, 2)
    return found


def rank(number: int, folder: Path, gib: float, rounds: int, store: str) -> None:
    """One rank's part; the first writes results.json into the folder."""
    import torch
    import torch.distributed as dist

    from dsrun.job.checkpoints import Mark, WrittenFile, damage_by_digests
    from dsrun.training import checkpoint

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    numbers = torch.rand(int(gib * 2**30 / 2 / 4))
    plain, timed = checkpoint.reach_disk, checkpoint._reach_disk_with_digests
    found: dict[str, list[tuple[float, float]]] = {"without": [], "with": [], "look": []}

    def measured(work: Callable[[], None]) -> tuple[float, float]:
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        work()
        dist.barrier()
        return time.perf_counter() - began, time.process_time() - cpu

    for turn in range(rounds):
        for kind in ("without", "with") if turn % 2 else ("with", "without"):
            target = folder / f"{kind}-{number}"
            target.mkdir()
            file = target / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
            written: dict[str, WrittenFile] = {}

            def write(
                kind: str = kind, target: Path = target, file: Path = file, written: Any = written
            ) -> None:
                torch.save({"state": numbers}, file)
                if kind == "with":
                    written.update(timed(target, [file]))
                else:
                    plain([file])

            found[kind].append(measured(write))
            if kind == "with":
                mark = Mark(1, {}, written)
                found["look"].append(measured(lambda: check(damage_by_digests(target, mark, written))))  # noqa: B023
            shutil.rmtree(target)
    if number == 0:
        (folder / "results.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def check(damage: str) -> None:
    """Raise where a file is not as it was written."""
    if damage:
        raise RuntimeError(damage)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=1.4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk that is meant")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    import torch

    with tempfile.TemporaryDirectory(dir=arguments.folder) as text:
        folder = Path(text)
        torch.multiprocessing.start_processes(
            rank,
            (folder, arguments.gib, arguments.rounds, str(folder / "store")),
            nprocs=2,
            start_method="spawn",
        )
        found = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    medians = {
        kind: {"wall_s": round(statistics.median(wall for wall, _ in times), 3),
               "cpu_s": round(statistics.median(cpu for _, cpu in times), 3)}
        for kind, times in found.items()
    }  # fmt: skip
    pairs = [one[0] / other[0] for one, other in zip(found["with"], found["without"], strict=True)]
    result = {
        "date": str(date.today()), "python": platform.python_version(), "zlib": zlib.ZLIB_RUNTIME_VERSION,
        "cpus": os.cpu_count(), "load": os.getloadavg()[0],
        "gib": arguments.gib, "rounds": arguments.rounds, "gb_per_second": speeds(),
        "medians": medians, "ratio_of_medians": round(medians["with"]["wall_s"] / medians["without"]["wall_s"], 3),
        "median_of_ratios": round(statistics.median(pairs), 3), "wanted": WANTED,
        "walls_s": {kind: [round(wall, 3) for wall, _ in times] for kind, times in found.items()},
    }  # fmt: skip
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
