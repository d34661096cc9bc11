"""What `dsrun logs` takes with two ranks' logs of a gigabyte each: its first line, its memory, --grep beside grep's.

    python bench/logs.py [--gb 1.0] [--folder DISK] [--seconds 120]

A third of the lines are the same on both ranks, as DeepSpeed writes them; two thirds bear numbers of the rank's own.
The memory is the most that the process had (getrusage); a child's begins with its parent's, so this one stays small.
One run of each command, one after the other; grep runs before dsrun and after it, so that neither is the one that reads
the disk. Nobody reads two gigabytes line by line: a command that takes longer than --seconds is ended, and the page
says how many lines it had printed by then.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from typing import NamedTuple

CHECKOUT = Path(__file__).resolve().parents[1]
PATTERN, SELDOM = "loss", "out of memory"
"""What --grep looks for: in every third line, and in a few."""
FIRST, PIPE = "dsrun logs RUN | head -1", r"\|"
WANTED_MB, WANTED_S = 100, 1.0


class Timing(NamedTuple):
    """A command that has run."""

    first_s: float
    """Until its first line."""
    wall_s: float
    cpu_s: float
    mb: float
    """The most memory that it had."""
    lines: int
    ended: bool
    """Whether it was ended before it had done all."""


def blocks(rank: int, count: int) -> Iterator[str]:
    """So many thousand lines of a rank's."""
    for block in range(count):
        lines = []
        for number in range(block * 1000, block * 1000 + 1000):
            clock = f"2026-11-23 {number // 36000 % 24:02}:{number // 600 % 60:02}:{number // 10 % 60:02}"
            begin = f"[{clock},{number % 1000:03}] [INFO]"
            if number % 3 == 0:
                rates = f"lr=[{2e-5 - number % 977 * 1e-9:.12f}], mom=[(0.9, 0.999)]"
                lines.append(f"{begin} [logging.py:107:log_dist] [Rank 0] step={number}, skipped=0, {rates}")
            elif number % 3 == 1:
                speed = 40 + (number * 7 + rank) % 913 / 1000
                step = f"epoch=0/micro_step={number}/global_step={number}"
                now = f"RunningAvgSamplesPerSec={speed - 0.1:.6f}, CurrSamplesPerSec={speed:.6f}, MemAllocated=21.4GB"
                lines.append(f"{begin} [timer.py:264:stop] {step}, {now}")
            else:
                loss = 7 - number % 977 / 250
                lines.append(
                    f"rank {rank} | batch {number} of the shard {rank}: loss {loss:.6f} grad_norm {loss / 3:.6f}"
                )
        if block % 1000 == 999:
            lines[-1] = f"rank {rank}: torch.OutOfMemoryError: CUDA out of memory"
        yield "\n".join(lines) + "\n"


def make_run(home: Path, gb: float) -> Path:
    """A run that has ended, with two ranks' logs of so many gigabytes each."""
    from dsrun.job.job import FORMAT, DataSpec, HostDevices, Job, ModelSpec, Prepared, TrainingSpec

    run = home / "run"
    (run / "logs").mkdir(parents=True)
    job = Job(
        run_dir=str(run), model=ModelSpec("llama-2-7b", "folder", "/models/llama-2-7b", "llama-2"),
        data=DataSpec(train_file="/data/train.jsonl", eval_file=None), training=TrainingSpec(), preset="zero2",
        precision="bf16", accelerator="cuda", hosts=(HostDevices("localhost", (0, 1)),),
        ds_config={"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1},
        prepared=Prepared("/cache/model", "/cache/rows", None), dsrun_version="0", format=FORMAT,
    )  # fmt: skip
    (run / "job.json").write_text(job.to_json(), encoding="utf-8")
    (run / "run.json").write_text('{"state": "finished"}', encoding="utf-8")
    for rank in range(2):
        with (run / "logs" / f"rank-{rank}.log").open("w", encoding="utf-8") as file:
            for text in blocks(rank, sys.maxsize):
                file.write(text)
                if file.tell() >= gb * 1e9:
                    break
    return run


def timed(argv: list[str], seconds: float, *, first: bool = False) -> Timing:
    """Run a command, and read what it prints; after so many seconds it is ended. first: its first line is enough."""
    environ = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    began, first_s, lines = time.perf_counter(), 0.0, 0
    process = subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    timer = Timer(seconds, process.kill)
    timer.start()
    assert process.stdout
    while block := os.read(process.stdout.fileno(), 1 << 20):
        first_s = first_s or time.perf_counter() - began
        lines += block.count(b"\n")
        if first:
            break
    process.stdout.close()
    _, status, usage = os.wait4(process.pid, 0)
    timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, -signal.SIGKILL) and not first:
        raise SystemExit(f"{' '.join(argv)} ended with {process.returncode}")
    wall_s = time.perf_counter() - began
    cpu_s = usage.ru_utime + usage.ru_stime
    return Timing(
        first_s, wall_s, cpu_s, usage.ru_maxrss / 1000, lines, process.returncode == -signal.SIGKILL
    )


def measure(folder: Path | None, gb: float, seconds: float) -> dict[str, Timing]:
    """Each command -> what it took."""
    with tempfile.TemporaryDirectory(dir=folder) as text:
        run = make_run(Path(text), gb)
        files = sorted(map(str, (run / "logs").iterdir()))
        logs = [sys.executable, "-m", "dsrun", "logs", str(run)]
        commands = {
            f"grep -c -i '{SELDOM}'": ["grep", "-c", "-i", SELDOM, *files],
            FIRST: logs,
            "dsrun logs RUN": logs,
            "dsrun logs RUN --tail 100": [*logs, "--tail", "100"],
            f"dsrun logs RUN --grep '(?i){SELDOM}'": [*logs, "--grep", f"(?i){SELDOM}"],
            f"grep -c -i '{SELDOM}', again": ["grep", "-c", "-i", SELDOM, *files],
            f"grep -c -i '{PATTERN}'": ["grep", "-c", "-i", PATTERN, *files],
            f"dsrun logs RUN --rank 0 --grep '(?i){PATTERN}'": [
                *logs,
                "--rank",
                "0",
                "--grep",
                f"(?i){PATTERN}",
            ],
        }
        return {words: timed(argv, seconds, first=words == FIRST) for words, argv in commands.items()}


def section(found: dict[str, Timing], gb: float) -> list[str]:
    """The part of the page that tells of it."""
    own = [timing for words, timing in found.items() if words.startswith("dsrun")]
    seldom = [timing.cpu_s for words, timing in found.items() if words.startswith(f"grep -c -i '{SELDOM}'")]
    times = found[f"dsrun logs RUN --grep '(?i){SELDOM}'"].cpu_s / statistics.mean(seldom)
    return [
        "## Large logs",
        "",
        f"Two ranks' logs of {gb} GB each, read by `python bench/logs.py`, one run of each command (load "
        f"{os.getloadavg()[0]:.1f}).",
        "",
        "| command | first line, s | wall, s | CPU, s | most memory, MB | lines |",
        "| --- | --- | --- | --- | --- | --- |",
        *(
            f"| `{words.replace('|', PIPE)}` | {one.first_s:.2f} | {one.wall_s:.1f}{' (ended)' if one.ended else ''} | "
            f"{one.cpu_s:.1f} | {one.mb:.0f} | {one.lines:,} |"
            for words, one in found.items()
        ),
        "",
        f"Wanted: {WANTED_MB} MB at most, and the first line after {WANTED_S:.0f} s. The most memory of dsrun's was "
        f"{max(one.mb for one in own):.0f} MB; its first line came after {found[FIRST].first_s:.2f} s, and took "
        f"{found[FIRST].cpu_s:.2f} s of a core. A pattern that is seldom met takes {times:.0f} times grep's CPU.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--seconds", type=float, default=120)
    given = parser.parse_args()
    sys.path.insert(0, str(CHECKOUT))
    print("\n".join(section(measure(given.folder, given.gb, given.seconds), given.gb)))


if __name__ == "__main__":
    main()
