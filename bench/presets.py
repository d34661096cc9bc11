"""Every preset in every precision, three steps on llama-tiny through the `deepspeed` launcher: a table for docs/.

    python bench/presets.py [--output docs/reference/presets-measured.md] [--presets zero2 zero3] [--steps 3]

Runs on CPU with two ranks; zero3-nvme needs libaio's header and writes to --nvme-path (a temporary folder otherwise).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

PRESETS = ("ddp", "zero1", "zero2", "zero2-offload", "zero3", "zero3-offload", "zero3-nvme")
PRECISIONS = ("fp32", "bf16", "fp16")


def train(preset: str, precision: str, steps: int, folder: Path, nvme: Path) -> tuple[list[float], float]:
    """The losses of the steps, and the seconds from command to end."""
    run = folder / f"{preset}-{precision}"
    command = [
        sys.executable, "-m", "dsrun", "finetune", "llama-tiny", "--preset", preset, "--precision", precision,
        "--gpus", "2", "--max-steps", str(steps), "--generate-rows", "0", "--no-score-before",
        "--warmup-steps", "0", "--lr", "1e-3", "--output-dir", str(run), "--nvme-path", str(nvme), "--json",
    ]  # fmt: skip
    if preset != "zero3-nvme":
        command = [word for word in command if word not in ("--nvme-path", str(nvme))]
    began = time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "DS_ACCELERATOR": "cpu"}, check=False
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        raise SystemExit(f"{preset} in {precision} failed with exit code {done.returncode}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    weights = list((run / "model").glob("*.safetensors"))
    if not weights:
        raise SystemExit(f"{preset} in {precision} exported no weights")
    return [line["loss"] for line in lines if "loss" in line], seconds


def main() -> None:
    """Train, compare, write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--presets", nargs="+", default=PRESETS)
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--nvme-path", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        nvme = arguments.nvme_path or folder / "nvme"
        nvme.mkdir(exist_ok=True)
        losses: dict[tuple[str, str], list[float]] = {}
        rows = []
        for precision in arguments.precisions:
            for preset in arguments.presets:
                found, seconds = train(preset, precision, arguments.steps, folder, nvme)
                losses[preset, precision] = found
                first = losses[arguments.presets[0], precision]
                apart = max(abs(one - other) for one, other in zip(found, first, strict=True))
                text = " ".join(f"{loss:.6f}" for loss in found)
                rows.append(f"| {preset} | {precision} | {text} | {apart:.1e} | {seconds:.0f} |")
                print(rows[-1], flush=True)
    spreads = {
        precision: max(
            max(steps) - min(steps)
            for steps in zip(*(losses[preset, precision] for preset in arguments.presets), strict=True)
        )
        for precision in arguments.precisions
    }
    told = ", ".join(f"{precision} {spread:.1e}" for precision, spread in spreads.items())
    print(f"largest distance between two presets: {told}")
    versions = ", ".join(f"{name} {version(name)}" for name in ("deepspeed", "torch", "transformers"))
    text = "\n".join(
        [
            "# Every preset, trained",
            "",
            f"Made by `python bench/presets.py` on {date.today()}: {versions}, Python {platform.python_version()}, "
            f"{os.cpu_count()} CPU cores, no GPU.",
            "",
            f"llama-tiny, {arguments.steps} optimizer steps, 2 ranks through the `deepspeed` launcher. "
            f"The third column holds the loss of each step, the fourth its largest distance from "
            f"{arguments.presets[0]} in the same precision, the last the seconds of the whole command.",
            "",
            "| preset | precision | losses | apart | seconds |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "",
            f"Largest distance between two presets at any step: {told}.",
            "",
        ]
    )
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    if spreads.get("fp32", 0.0) > 1e-4:
        raise SystemExit(f"the stages differ by {spreads['fp32']:.1e} in fp32")


if __name__ == "__main__":
    main()
