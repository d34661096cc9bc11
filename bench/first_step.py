"""Seconds from the command to the end of the first optimizer step: `dsrun finetune` beside a Trainer script.

    python bench/first_step.py [--pairs 7] [--output docs/reference/bench-first-step.md]

The other side is peer_trainer.py under a bare `deepspeed --num_gpus 2`: the same model folder, rows, batch,
config (`dsrun preset ... --for hf`), threads and compiled operators. The two run in turn, and who goes first
changes from round to round. Inside the processes the clock is read at the end of the first step; the command's
start is taken off.

dsrun is measured with its cache as a second run finds it ("warm"), and with the rows not yet tokenised ("cold"):
then the model and the compiled operators are there, as they are for the Trainer script, which tokenises in
every run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
ROWS = CHECKOUT / "presets/datasets/advertise/train.jsonl"
RANKS, STEPS, MICRO_BATCH, LR, SOURCE, TARGET = 2, 3, 4, 2e-3, 64, 96
WANTED = 1.10


@dataclass
class Bench:
    """Where everything is. environ: what both sides get; cache: the warm $DSRUN_CACHE."""

    folder: Path
    environ: dict[str, str]
    cache: Path
    preset: str
    count: int = 0

    def dsrun(self, *words: str, cache: Path | None = None) -> str:
        """Run a dsrun command and return its stdout."""
        return self.run([sys.executable, "-m", "dsrun", *words], {"DSRUN_CACHE": str(cache or self.cache)})

    def run(self, argv: list[str], extra: dict[str, str]) -> str:
        """Run a command to its end; show what it said if it failed."""
        done = subprocess.run(
            argv, env={**self.environ, **extra}, cwd=self.folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            print(done.stdout[-3000:], done.stderr[-6000:], file=sys.stderr)
            raise SystemExit(f"{' '.join(argv)} ended with {done.returncode}")
        return done.stdout

    def words(self, run_dir: Path) -> list[str]:
        """The finetune command without "dsrun"."""
        return [
            "finetune", "llama-tiny", "--gpus", str(RANKS), "--preset", self.preset, "--precision", "fp32",
            "--train-file", str(self.folder / "rows.jsonl"), "--micro-batch", str(MICRO_BATCH),
            "--max-source-length", str(SOURCE), "--max-target-length", str(TARGET), "--lr", str(LR),
            "--warmup-steps", "0", "--max-steps", str(STEPS), "--generate-rows", "0", "--no-score-before",
            "--output-dir", str(run_dir),
        ]  # fmt: skip

    def ours(self, cache: Path | None = None) -> tuple[float, list[tuple[str, float]]]:
        """Seconds until the first step's end, and when each phase of rank 0 began."""
        self.count += 1
        run_dir = self.folder / f"run-{self.count}"
        began = time.time()
        self.dsrun(*self.words(run_dir), cache=cache)
        first = json.loads((run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0])
        events = [
            json.loads(line) for line in (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        phases = [(event["text"], event["time"] - began) for event in events if event["event"] == "phase"]
        shutil.rmtree(run_dir)
        return first["time"] - began, phases

    def theirs(self, planned: dict[str, Any], config: Path) -> float:
        """The same for the Trainer script. planned: dsrun's own dry run, as JSON."""
        mark = self.folder / "mark"
        environ = planned["environment"]
        argv = [
            str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", str(RANKS),
            "--master_port", str(free_port()), str(Path(__file__).with_name("peer_trainer.py")),
            "--model", planned["job"]["prepared"]["model_dir"], "--train-file", str(self.folder / "rows.jsonl"),
            "--config", str(config), "--output-dir", str(self.folder / "peer"), "--mark", str(mark),
            "--max-source-length", str(SOURCE), "--max-target-length", str(TARGET),
            "--micro-batch", str(MICRO_BATCH), "--max-steps", str(STEPS), "--lr", str(LR),
        ]  # fmt: skip
        began = time.time()
        self.run(argv, {name: value for name, value in environ.items() if name != "PYTHONPATH"})
        seconds = float(mark.read_text(encoding="utf-8")) - began
        mark.unlink()
        return seconds

    def cold_cache(self) -> Path:
        """A cache that holds the warm one's model and operators, and no rows."""
        self.count += 1
        cache = self.folder / f"cache-{self.count}"
        cache.mkdir()
        for name in ("models", "torch_extensions"):
            (cache / name).symlink_to(self.cache / name)
        return cache


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def remove_shared_memory() -> None:
    """DeepSpeed's CPU collectives leave 69 MB a rank in /dev/shm; the Trainer script has nobody to tidy up."""
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_*"):
        if not in_use(path):
            path.unlink(missing_ok=True)


def in_use(path: Path) -> bool:
    """Whether a process of this user has mapped the file."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if str(path) in maps.read_text():
                return True
        except OSError:
            continue
    return False


def main() -> None:
    """Measure in pairs, write the page, and fail if dsrun takes longer than wanted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--preset", default="zero2")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    if importlib.util.find_spec("dsrun") is None:
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CHECKOUT), environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cache = Path(os.environ.get("DSRUN_CACHE") or folder / "cache").absolute()
        shutil.copy(ROWS, folder / "rows.jsonl")
        bench = Bench(folder, environ, cache, arguments.preset)
        bench.ours()  # compiles, makes the model, tokenises
        planned = json.loads(bench.dsrun(*bench.words(folder / "dry"), "--dry-run", "--json"))
        config = folder / "deepspeed.json"
        config.write_text(
            bench.dsrun(
                "preset", arguments.preset, "--gpus", str(RANKS), "--precision", "fp32", "--for", "hf",
                "--micro-batch", str(MICRO_BATCH),
            ),
            encoding="utf-8",
        )  # fmt: skip
        bench.theirs(planned, config)
        text, ratios = measure(bench, planned, config, arguments.pairs)
    print(text)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text, encoding="utf-8")
    if max(ratios.values()) > WANTED:
        raise SystemExit(f"more than {WANTED} times the Trainer script: {ratios}")


def measure(bench: Bench, planned: dict[str, Any], config: Path, pairs: int) -> tuple[str, dict[str, float]]:
    """The page, and the median ratio of each state of the cache."""
    seconds: dict[str, list[float]] = {"warm": [], "cold": [], "Trainer": []}
    phases: list[list[tuple[str, float]]] = []
    for number in range(pairs):
        turns = ["warm", "cold", "Trainer"]
        for turn in turns if number % 2 == 0 else reversed(turns):
            if turn == "Trainer":
                found = bench.theirs(planned, config)
            else:
                found, began = bench.ours(bench.cold_cache() if turn == "cold" else None)
                phases += [began] if turn == "warm" else []
            remove_shared_memory()
            seconds[turn].append(found)
            print(f"{number + 1}/{pairs} {turn}: {found:.2f} s", file=sys.stderr)
    ratios = {
        turn: statistics.median(
            one / other for one, other in zip(seconds[turn], seconds["Trainer"], strict=True)
        )
        for turn in ("warm", "cold")
    }
    return report(seconds, ratios, phases, bench.preset), ratios


def report(
    seconds: dict[str, list[float]],
    ratios: dict[str, float],
    phases: list[list[tuple[str, float]]],
    preset: str,
) -> str:
    """The page for docs/reference."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("deepspeed", "torch", "transformers"))
    names = {
        "warm": "`dsrun finetune`, rows in the cache",
        "cold": "`dsrun finetune`, rows not yet tokenised",
        "Trainer": "`deepspeed --num_gpus 2 peer_trainer.py`",
    }
    lines = [
        "# From the command to the first step",
        "",
        f"Made by `python bench/first_step.py` on {date.today()}: {versions}, "
        f"Python {platform.python_version()}, {os.cpu_count()} CPU cores, no GPU.",
        "",
        f"llama-tiny, preset {preset}, {RANKS} CPU ranks, fp32, micro batch {MICRO_BATCH}, the shipped 1,200 "
        f"advertisements. {len(seconds['warm'])} rounds, each running all three; seconds from the command to the "
        "end of the first optimizer step. The ratio is the median of the rounds' own ratios to the script.",
        "",
        "| | median | fastest | slowest | ratio |",
        "| --- | --- | --- | --- | --- |",
    ]
    for turn, found in seconds.items():
        ratio = f"{ratios[turn]:.2f}" if turn in ratios else "1"
        lines.append(
            f"| {names[turn]} | {statistics.median(found):.2f} | {min(found):.2f} | {max(found):.2f} | {ratio} |"
        )
    lines += [
        "",
        f"Wanted: {WANTED:.2f} at most.",
        "",
        "When rank 0 of dsrun (warm) entered its phases, median:",
        "",
    ]
    lines += ["| phase | seconds after the command |", "| --- | --- |"]
    for place, (text, _) in enumerate(phases[0]):
        if text == "training":
            lines.append(f"| {text} | {statistics.median(found[place][1] for found in phases):.2f} |")
            break
        lines.append(f"| {text} | {statistics.median(found[place][1] for found in phases):.2f} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
