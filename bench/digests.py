"""Cost of digests: what they add to writing a checkpoint, and what checking them before a resume takes; large logs.

    python bench/digests.py [--gib 1.4] [--rounds 7] [--folder DISK] [--output docs/reference/bench-files.md]

Two CPU ranks write half each of a checkpoint of fp32 numbers with torch.save, wait until it is on the disk, and mark it
(dsrun/training/checkpoint.py), in turn without digests, with them, and with those of all bytes read again, each time
into new files. Wall and CPU seconds of the first rank. Once in memory (/dev/shm), where a digest has nothing to hide
behind, and once on a disk. A busy disk or CPU ("load") makes walls worth little: the CPU seconds count then.
"look" is what a resume does before it loads: all files read and compared, by two ranks, from the page cache mostly.
The logs are bench/logs.py's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
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
KINDS = {
    "without": "without digests",
    "with": "with digests, from those that torch makes",
    "read": "with digests of all bytes, read again",
}
MEMORY = Path("/dev/shm")


def speeds() -> dict[str, float]:
    """GB a second of each digest."""
    content, found = os.urandom(1 << 26), {}
    for name, digest in DIGESTS.items():
        began = time.process_time()
        digest(content)
        found[name] = round(len(content) / (time.process_time() - began) / 1e9, 2)
    return found


def rank(number: int, folder: Path, gib: float, rounds: int) -> None:
    """One rank's part; the first writes results.json into the folder."""
    import torch
    import torch.distributed as dist

    from dsrun.job.checkpoints import Mark, WrittenFile, damage_by_digests
    from dsrun.training import checkpoint, zip_digests

    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=number, world_size=2)
    numbers = torch.rand(int(gib * 2**30 / 2 / 4))
    put_together = zip_digests.written
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in (*KINDS, "look")}

    def measured(kind: str, work: Callable[[], None]) -> None:
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        work()
        own = time.process_time() - cpu
        dist.barrier()
        found[kind].append((time.perf_counter() - began, own))

    for turn in range(rounds):
        order = [*KINDS]
        for kind in order[turn % 3 :] + order[: turn % 3]:
            target = folder / f"{kind}-{number}"
            target.mkdir()
            file = target / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
            written: dict[str, WrittenFile] = {}
            zip_digests.written = put_together if kind == "with" else WrittenFile.of

            def write(
                kind: str = kind, target: Path = target, file: Path = file, written: Any = written
            ) -> None:
                torch.save({"state": numbers}, file)
                if kind == "without":
                    checkpoint.reach_disk([file])
                else:
                    written.update(checkpoint._reach_disk_with_digests(target, [file]))

            measured(kind, write)
            if kind == "with":
                mark = Mark(1, {}, written)
                measured("look", lambda: check(damage_by_digests(target, mark, written)))  # noqa: B023
            shutil.rmtree(target)
    if number == 0:
        (folder / "results.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def check(damage: str) -> None:
    """Raise where a file is not as it was written."""
    if damage:
        raise RuntimeError(damage)


def measure(where: Path | None, gib: float, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of each kind, round by round, in a folder."""
    import torch

    with tempfile.TemporaryDirectory(dir=where) as text:
        torch.multiprocessing.start_processes(rank, (Path(text), gib, rounds), nprocs=2, start_method="spawn")
        found: dict[str, list[tuple[float, float]]] = json.loads(Path(text, "results.json").read_text())
    return found


def table(found: dict[str, list[tuple[float, float]]]) -> list[str]:
    """Medians, and medians of the rounds' own ratios to a checkpoint without digests."""
    lines = [
        "| | wall, s | CPU of a rank, s | wall, times without | CPU, times without |",
        "| --- | --- | --- | --- | --- |",
    ]
    for kind, words in {**KINDS, "look": "looked at before a resume"}.items():
        wall, cpu = (statistics.median(column) for column in zip(*found[kind], strict=True))
        pairs = [*zip(found[kind], found["without"], strict=True)] if kind in ("with", "read") else []
        ratios = [
            f"{statistics.median(one[at] / other[at] for one, other in pairs):.3f}" if pairs else ""
            for at in (0, 1)
        ]
        lines.append(f"| {words} | {wall:.2f} | {cpu:.2f} | {ratios[0]} | {ratios[1]} |")
    return lines


def page(memory: list[str], disk: list[str], log_lines: list[str], given: argparse.Namespace) -> str:
    """The page for docs/reference."""
    told = ", ".join(f"{name} {speed:.1f}" for name, speed in speeds().items())
    return "\n".join(
        [
            "# What digests and large logs take",
            "",
            f"Made by `python bench/digests.py` on {date.today()}: Python {platform.python_version()}, zlib "
            f"{zlib.ZLIB_RUNTIME_VERSION}, {os.cpu_count()} CPU cores (load {os.getloadavg()[0]:.1f}).",
            "",
            "## Digests of a checkpoint",
            "",
            f"Two CPU ranks write {given.gib} GiB of fp32 numbers together, {given.rounds} rounds in turn; medians. "
            "torch.save makes a CRC-32 of each tensor as it writes it; of these and of the few bytes between them the "
            "file's digest is put together (dsrun/training/zip_digests.py), so no tensor is read again. The mark holds "
            "the same as if it were.",
            "",
            "In memory (`/dev/shm`), where nothing else is waited for:",
            "",
            *memory,
            "",
            "On a disk, until all is on it:",
            "",
            *disk,
            "",
            f"Wanted: {WANTED} times at most. Digests of Python's library, GB a second on one core: {told}.",
            "",
            *log_lines,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk that is meant")
    parser.add_argument("--log-gb", type=float, default=1.0, help="of each of two ranks")
    parser.add_argument("--log-seconds", type=float, default=120, help="after which a command is ended")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    tables = [table(measure(where, given.gib, given.rounds)) for where in (MEMORY, given.folder)]
    words = ["--gb", str(given.log_gb), "--seconds", str(given.log_seconds)]
    words += ["--folder", str(given.folder)] if given.folder else []
    command = [sys.executable, str(Path(__file__).with_name("logs.py")), *words]
    log_lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    text = page(*tables, log_lines, given)
    print(text)
    if given.output:
        given.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
