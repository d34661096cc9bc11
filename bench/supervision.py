"""Cost of supervision: steps per second of one script under `dsrun launch` and under bare `deepspeed`, in turn.

    python bench/supervision.py [--pairs 7] [--steps 1000] [--ranks 2]

The steps are counted inside the script, between its first and its last, so that starting does not count; how long each
took to its first step is told apart. Every rank prints a line a step, as training scripts do. The ratio is the median
over the pairs; 0.97 is wanted. Rank 0's own processor time a step stands beside it: on a machine that others use, too,
that is what can be compared. Written to bench/results/supervision-DATE.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WANTED = 0.97
SCRIPT = """
import argparse, os, resource, time
import deepspeed, torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--steps", type=int)
args = deepspeed.add_config_arguments(parser).parse_args()
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
rows = torch.randn(16, 256)

def cpu_s():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

for step in range(args.steps + 1):
    if step == 1:  # the first one warms up
        began, first, before = time.perf_counter(), time.time(), cpu_s()
    loss = engine(rows).square().mean()
    engine.backward(loss)
    engine.step()
    os.write(1, f"rank {os.environ['RANK']} step {step} loss {loss.item():.6f}\\n".encode())
if os.environ["RANK"] == "0":
    rate, cpu_ms = args.steps / (time.perf_counter() - began), 1e3 * (cpu_s() - before) / args.steps
    os.write(1, f"RATE {rate} CPU {cpu_ms} FIRST {first}\\n".encode())
torch.distributed.barrier()
torch.distributed.destroy_process_group()  # without it the process now and then aborts as it ends
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


def environment() -> dict[str, str]:
    return {**os.environ, "DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu"), "PYTHONPATH": str(ROOT)}


def measure(command: list[str], folder: Path) -> tuple[float, float, float]:
    """Steps per second, rank 0's milliseconds of processor time a step, and seconds to the first step."""
    began = time.time()
    env = environment()
    # Both with the threads that dsrun would give its ranks: they are not what is compared.
    env.setdefault("OMP_NUM_THREADS", "1")
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    found = re.search(r"RATE ([\d.]+) CPU ([\d.]+) FIRST ([\d.]+)", done.stdout)
    if done.returncode or not found:
        raise SystemExit(
            f"{command} ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        )
    return float(found[1]), float(found[2]), float(found[3]) - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    rates: dict[str, list[float]] = {"deepspeed": [], "dsrun": []}
    cpu: dict[str, list[float]] = {"deepspeed": [], "dsrun": []}
    starts: dict[str, list[float]] = {"deepspeed": [], "dsrun": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        (folder / "ds.json").write_text(json.dumps(CONFIG))
        script = ["train.py", "--steps", str(given.steps), "--deepspeed_config", "ds.json"]
        number = str(given.ranks)
        for pair in range(given.pairs):
            commands = {
                "deepspeed": [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", number, *script],
                "dsrun": [
                    sys.executable, "-m", "dsrun", "launch", "--gpus", number, "--output-dir", f"run-{pair}", *script
                ],
            }  # fmt: skip
            # Whoever goes second may find a warmer machine: they take turns.
            for who in sorted(commands, reverse=bool(pair % 2)):
                rate, cpu_ms, start = measure(commands[who], folder)
                rates[who].append(rate)
                cpu[who].append(cpu_ms)
                starts[who].append(start)
                told = f"{rate:8.2f} steps/s  {cpu_ms:6.2f} ms of CPU  first step after {start:5.1f} s"
                print(f"pair {pair + 1}  {who:<9}  {told}")
    ratios = [ours / bare for ours, bare in zip(rates["dsrun"], rates["deepspeed"], strict=True)]
    ratio = statistics.median(ratios)
    start_s = {who: statistics.median(values) for who, values in starts.items()}
    print(f"steps/s, dsrun to deepspeed: {ratio:.4f} (wanted: at least {WANTED}); of the pairs: ", end="")
    print(", ".join(f"{one:.3f}" for one in ratios))
    cpu_ratio = statistics.median(cpu["dsrun"]) / statistics.median(cpu["deepspeed"])
    print(
        f"processor time a step, dsrun to deepspeed: {cpu_ratio:.4f}; load of the machine: {os.getloadavg()[1]:.1f}"
    )
    print(f"to the first step: dsrun {start_s['dsrun']:.1f} s, deepspeed {start_s['deepspeed']:.1f} s")
    now = datetime.now(UTC)
    result = {
        "date": now.isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "ranks": given.ranks,
        "steps": given.steps,
        "ratio": ratio,
        "wanted": WANTED,
        "ratios": ratios,
        "steps_per_second": rates,
        "cpu_ms_per_step": cpu,
        "cpu_ratio": cpu_ratio,
        "load": os.getloadavg(),
        "seconds_to_first_step": starts,
    }
    path = ROOT / "bench" / "results" / f"supervision-{now:%Y-%m-%d}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
