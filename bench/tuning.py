"""`dsrun tune`'s search, replayed on a recorded grid: what the best of all is worth, and how near the search comes.

    python bench/tuning.py record [--turns 3] [--steps 8]   train all of GRID on two CPU ranks, by turns; writes RECORD
    python bench/tuning.py [--trials 8] [--json]            replay the search on RECORD
    python bench/tuning.py autotuner                        DeepSpeed's own autotuner on the same grid

The grid is llama-tiny in fp32 on two CPU ranks: four presets, three splits of 16 examples, with and without activation
checkpointing: 24 configs. In a turn the same two processes train one after the other, in another order each
time, so that what else the machine does hits all alike; a config's time is the median of a turn's steps behind the
first two, and the record's the median over the turns. Replayed, a short trial gives one turn's time, a longer one the
median, and the regret is the time of the chosen config beyond that of the best.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from datetime import date
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

RECORD = CHECKOUT / "bench/results/tuning.json"
MODEL = "llama-tiny"
RANKS = 2
EXAMPLES = 16
"""Examples a step, of all ranks."""
WARM_UP = 2
"""Steps of a run that don't count: memory is found, and kernels are chosen."""
PRESETS = ("ddp", "zero1", "zero2", "zero3")
SPLITS = ((1, 8), (4, 2), (8, 1))
CHECKPOINTING = ("none", "full")
GRID = [
    {"preset": preset, "micro_batch": micro, "grad_accum": accum, "activation_checkpointing": way}
    for preset, (micro, accum), way in itertools.product(PRESETS, SPLITS, CHECKPOINTING)
]
FIXED = {
    "gpus": RANKS, "precision": "fp32", "generate_rows": 0, "export_format": "none",
    "set": "optimizer.params.torch_adam=true",
}  # fmt: skip
"""Options of every run. torch's AdamW: DeepSpeed's own would be compiled first."""


def name_of(config: dict[str, Any]) -> str:
    """A config's folder, and its key in the record."""
    return "-".join(str(value) for value in config.values())


def plan_job(config: dict[str, Any], folder: Path, steps: int) -> Path:
    """Write the job.json of a config; the file. Raises SystemExit with finetune's words where it refuses."""
    from dsrun.cli import main as dsrun

    values = {**config, **FIXED, "max_steps": steps, "warmup_steps": 0, "output_dir": folder}
    words = [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    out = io.StringIO()
    with redirect_stdout(out), contextlib.suppress(SystemExit):
        dsrun(["finetune", MODEL, *words, "--no-score-before", "--force", "--dry-run", "--json"])
    if not out.getvalue():
        raise SystemExit(f"{name_of(config)} was refused")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    file = folder / "job.json"
    file.write_text(json.dumps(json.loads(out.getvalue())["job"]), encoding="utf-8")
    return file


def seconds_of(folder: Path) -> float:
    """Median seconds of a run's steps, without the first."""
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    seconds = [line["seconds"] for line in lines if "seconds" in line and "loss" in line]
    return statistics.median(seconds[WARM_UP:])


def turn(folder: Path, order: list[dict[str, Any]], steps: int) -> dict[str, float]:
    """Name -> a step's seconds, of all configs trained by the same two processes, one after the other."""
    files = [plan_job(config, folder / name_of(config), steps) for config in order]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS),
        str(Path(__file__).with_name("parallelism_ranks.py")), *map(str, files),
    ]  # fmt: skip
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    return {name_of(config): seconds_of(folder / name_of(config)) for config in order}


def record(turns: int, steps: int) -> dict[str, Any]:
    """Train the grid by turns; what is written."""
    loads, times = [], []
    for number in range(turns):
        order = random.Random(number).sample(GRID, len(GRID))
        loads.append(os.getloadavg()[0])
        with tempfile.TemporaryDirectory() as folder:
            times.append(turn(Path(folder), order, steps))
        print(f"turn {number + 1}: load {loads[-1]:.1f} before it", file=sys.stderr)
    return {
        "date": str(date.today()),
        "model": MODEL,
        "ranks": RANKS,
        "examples": EXAMPLES,
        "steps": steps,
        "cores": os.cpu_count(),
        "load_before_each_turn": [round(load, 2) for load in loads],
        "configs": [
            {
                **config,
                "turns": [round(found[name_of(config)], 5) for found in times],
                "seconds": round(statistics.median(found[name_of(config)] for found in times), 5),
            }
            for config in GRID
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", default="replay", choices=("replay", "record", "autotuner"))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print data")
    given = parser.parse_args()
    if given.what == "record":
        RECORD.write_text(json.dumps(record(given.turns, given.steps), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
