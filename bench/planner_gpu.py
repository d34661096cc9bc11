"""What the planner says of GPUs, against what runs on them took: memory and seconds per step.

    python bench/planner_gpu.py --output FOLDER [--presets zero2 zero3] [--models 100m 500m] [--gpus 2] [--steps 6]

Random Llamas in bf16, every preset on all the GPUs there are, with micro batches of 1 and 4, with and without
checkpointing. Measured: torch.cuda.max_memory_allocated and max_memory_reserved, the largest of the ranks', and the
median step, from each run's own record. A run that fails is a row too: out of memory is what a plan has to foresee.
bench/gpu.sh makes the environment and calls this.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from planner_cpu import Case, setup_of, write_model, write_rows

from dsrun.planner import gpus as kinds
from dsrun.planner.gpu_memory import gpu_memory
from dsrun.planner.host_memory import host_memory
from dsrun.planner.speed import Hardware, speed

PRESETS = ("ddp", "zero1", "zero2", "zero2-offload", "zero3", "zero3-offload")
GIB = 2**30
FIRST_S = 40.0
"""What a run takes, by guess, until one was seen."""
TOKENS = 1024
MODELS = {
    "100m": Case("bench-100m", 768, 2048, 12, 12, 12, 8192, TOKENS, micro_batch=1, steps=6),
    "500m": Case("bench-500m", 1280, 3456, 24, 20, 20, 8192, TOKENS, micro_batch=1, steps=6),
    "1500m": Case("bench-1500m", 2048, 5504, 29, 16, 16, 16384, TOKENS, micro_batch=1, steps=6),
}


@dataclass(frozen=True)
class Run:
    """One set-up: a key of MODELS, a preset, the micro batch, and whether activations are checkpointed."""

    model: str
    preset: str
    micro_batch: int
    checkpointing: bool

    @property
    def case(self) -> Case:
        """The model, with this run's micro batch."""
        return replace(MODELS[self.model], micro_batch=self.micro_batch)

    @property
    def name(self) -> str:
        """For folders."""
        return f"{self.model}-{self.preset}-{self.micro_batch}" + "-checkpointing" * self.checkpointing


def wanted(models: list[str], presets: list[str], micro_batches: list[int]) -> Iterator[Run]:
    """Every combination, small models first."""
    for model, preset, rows, again in itertools.product(models, presets, micro_batches, (False, True)):
        yield Run(model, preset, rows, again)


def command(run: Run, gpus: int, steps: int, rows: Path, out: Path) -> list[str]:
    """The command line of a run."""
    case, half = run.case, run.case.tokens // 2
    return [
        sys.executable, "-m", "dsrun", "finetune", case.name, "--preset", run.preset, "--precision", "bf16",
        "--gpus", str(gpus), "--max-steps", str(steps), "--generate-rows", "0", "--no-score-before",
        "--train-file", str(rows), "--prompt-column", "content", "--response-column", "summary",
        "--max-source-length", str(half), "--max-target-length", str(half), "--warmup-steps", "0",
        "--grad-accum", "1", "--allow-truncation",
        "--micro-batch", str(run.micro_batch), "--output-dir", str(out), "--json", "--force",
        "--activation-checkpointing", "full" if run.checkpointing else "none",
    ]  # fmt: skip


def took(out: Path) -> dict[str, Any]:
    """What the ranks of a run took: the largest of every figure, None where no rank had it."""
    peaks = [json.loads(path.read_text()).get("peaks", {}) for path in sorted(out.glob("state/rank-*.json"))]
    names = ("gpu_allocated_bytes", "gpu_reserved_bytes", "host_peak_bytes", "step_seconds")
    return {
        name: max((peak[name] for peak in peaks if peak.get(name) is not None), default=None)
        for name in names
    }


def judge(run: Run, gpus: int, found: dict[str, Any], hardware: Hardware | None) -> dict[str, Any]:
    """A run's figures with the plan's beside them, in bytes and seconds. hardware: None where it is no known kind."""
    setup = setup_of(run.case, found["ds_config"], gpus=gpus)
    setup = replace(setup, checkpointing=int(run.checkpointing))
    plan = gpu_memory(setup)
    return found | {
        "planned_allocated_bytes": plan.allocated, "planned_reserved_bytes": plan.reserved,
        "planned_moment": plan.moment, "planned_host_bytes": host_memory(setup).peak,
        "planned_step_seconds": speed(setup, hardware).seconds_per_step if hardware else None,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown: GiB, and planned / measured."""
    lines = [
        "| model | preset | micro batch | checkpointing | planned GiB | allocated GiB | ratio | planned reserved | "
        "reserved GiB | planned s/step | s/step |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        planned, held = row["planned_allocated_bytes"], row["gpu_allocated_bytes"]
        said = f"{planned / held:.2f}" if held and not row["failed"] else row["failed"] or ""
        cells = (
            row["model"], row["preset"], str(row["micro_batch"]), "yes" if row["checkpointing"] else "no",
            _gib(planned), _gib(held), said, _gib(row["planned_reserved_bytes"]), _gib(row["gpu_reserved_bytes"]),
            _seconds(row["planned_step_seconds"]), _seconds(row["step_seconds"]),
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _gib(size: float | None) -> str:
    return "" if size is None else f"{size / GIB:.2f}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def carry_out(run: Run, gpus: int, steps: int, folder: Path, hardware: Hardware | None) -> dict[str, Any]:
    """Run once. failed: "" or a word on why."""
    rows, out = folder / "rows.jsonl", folder / run.name
    write_rows(rows)
    environ = write_model(run.case, folder)
    done = subprocess.run(
        command(run, gpus, steps, rows, out), capture_output=True, text=True, env=environ, check=False
    )
    failed = ""
    if done.returncode:
        failed = "out of memory" if "out of memory" in done.stderr.lower() else "failed"
        print(done.stderr, file=sys.stderr)
    if not (out / "deepspeed.json").exists():
        raise SystemExit(f"{run.name} never started; see above")
    found = {
        "model": run.model, "preset": run.preset, "micro_batch": run.micro_batch,
        "checkpointing": run.checkpointing, "gpus": gpus, "failed": failed, **took(out),
        "ds_config": json.loads((out / "deepspeed.json").read_text()),
    }  # fmt: skip
    shutil.rmtree(out, ignore_errors=True)
    return judge(run, gpus, found, hardware)


def machine() -> list[str]:
    """What nvidia-smi calls every GPU, its memory and driver."""
    asked = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip().splitlines()


def versions() -> str:
    """Of what decides the figures."""
    found = []
    for name in ("deepspeed", "torch", "transformers"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} missing")
    return ", ".join(found)


def main() -> None:
    """Run, print, and write both files after every run: a long bench that is interrupted keeps what it has."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--presets", nargs="+", default=PRESETS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--gpus", type=int, help="all there are otherwise")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--budget", type=float, help="seconds; no run is started that would end later")
    arguments = parser.parse_args()
    began, longest = time.monotonic(), FIRST_S
    there = machine()
    gpus = arguments.gpus or len(there)
    kind = kinds.recognise(there[0].split(",")[0])
    hardware = Hardware.from_gpu(kind, gpus) if kind else None
    where = f"{gpus} of {len(there)} x {there[0]}; {versions()}"
    arguments.output.mkdir(parents=True, exist_ok=True)
    day = date.today()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for run in wanted(arguments.models, arguments.presets, arguments.micro_batches):
            started = time.monotonic()
            if arguments.budget is not None and started + longest > began + arguments.budget:
                print(f"no time left for {run.name} and what follows", file=sys.stderr)
                break
            rows.append(carry_out(run, gpus, arguments.steps, Path(name), hardware))
            longest = max(longest, time.monotonic() - started)
            print(table(rows[-1:]).splitlines()[-1], flush=True)
            text = f"# The planner against GPUs\n\n{day}: {where}, bf16, rows of {TOKENS} tokens.\n\n{table(rows)}\n"
            (arguments.output / f"planner-gpu-{day}.md").write_text(text, encoding="utf-8")
            kept = {"day": str(day), "machine": where, "runs": rows}
            (arguments.output / f"planner-gpu-{day}.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
