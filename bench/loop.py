"""Cost of dsrun's training loop beside a bare engine loop: seconds a step of the same model on the same examples.

    python bench/loop.py [--ranks 2] [--steps 900]

bare    forward, backward and engine.step, with batches that are there already;
dsrun   `Trainer._step`: the batches (a thread makes them), the learning rate, the sum over ranks, metrics.jsonl.

Both take their turns on one DeepSpeed engine (llama-tiny, zero2, fp32, CPU), TURN steps each and the same ones, so that
what else runs on the machine hits both and neither has longer examples. "wall" is time by the clock, "cpu" the main
thread's own: what is in the way of a GPU that waits for its next kernel. Medians over the turns, in ms a step, with the
10th percentile; more_cpu_ms is the median of the turns' differences. The result is a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
TURN = 10
PARSER_HELP = __doc__.split("\n\n")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=PARSER_HELP)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=900, help="of each loop")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        return rank(arguments.job)
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        prepare = [
            "finetune", "llama-tiny", "--gpus", str(arguments.ranks), "--max-steps", "1", "--precision", "fp32",
            "--micro-batch", "4", "--grad-accum", "1", "--preset", "zero2", "--generate-rows", "0", "--no-score-before",
            "--set", "optimizer.params.torch_adam=true", "--output-dir", str(run),
        ]  # fmt: skip
        env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT)}
        subprocess.run([sys.executable, "-m", "dsrun", *prepare], check=True, env=env, stdout=sys.stderr)
        job = run / "job.json"
        content = json.loads(job.read_text(encoding="utf-8"))
        content["training"]["max_steps"] = arguments.steps
        job.write_text(json.dumps(content), encoding="utf-8")
        return ranks(arguments, job, env)


def ranks(arguments: argparse.Namespace, job: Path, env: dict[str, str]) -> int:
    """Start the ranks; their exit codes."""
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    command = [sys.executable, __file__, "--job", str(job)]
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(arguments.ranks)}
    started = [
        subprocess.Popen(command, env={**env, "RANK": str(number), "LOCAL_RANK": str(number)})
        for number in range(arguments.ranks)
    ]
    return max(one.wait() for one in started)


def rank(path: Path) -> int:
    """One rank's both loops; rank 0 prints."""
    import torch

    from dsrun.job.job import Job
    from dsrun.training.data.ahead import made_ahead
    from dsrun.training.engines import deepspeed
    from dsrun.training.loop import Trainer
    from dsrun.training.models.load import load_model
    from dsrun.training.prepare import tokenizer_of
    from dsrun.training.reports.report import Report

    job, number = Job.read(path), int(os.environ["RANK"])
    deepspeed.connect()
    tokenizer, encoder = tokenizer_of(job)
    model, _ = load_model(job, "sdpa")
    engine = deepspeed.initialize(job, model)
    trainer = Trainer(job, engine, tokenizer, encoder.stop_ids, Report(Path(job.run_dir), number))
    engine.train()
    made = made_ahead(trainer._make, range(trainer.total_steps), engine.device)

    def bare(step: int) -> None:
        plan, batches = ready[step]
        for batch in batches:
            engine.backward(engine(**batch, num_items_in_batch=plan.target_tokens, use_cache=False).loss)
            engine.step()

    loops = {"bare": bare, "dsrun": lambda step: trainer._step(step, made)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for turn, first in enumerate(range(0, trainer.total_steps, TURN)):
        steps = range(first, min(first + TURN, trainer.total_steps))
        ready = {step: trainer._make(step) for step in steps}
        for name in list(loops) if turn % 2 else reversed(list(loops)):
            found[name].append(timed(loops[name], steps))
    made.close()
    if number == 0:
        print(json.dumps(table(found, job)), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0


def timed(take: Callable[[int], Any], steps: range) -> tuple[float, float]:
    """ms a step of a turn: by the clock, and of this thread."""
    wall, own = time.perf_counter(), time.thread_time()
    for step in steps:
        take(step)
    return (time.perf_counter() - wall) * 1000 / len(steps), (time.thread_time() - own) * 1000 / len(steps)


def table(found: dict[str, list[tuple[float, float]]], job: Any) -> dict[str, Any]:
    result: dict[str, Any] = {"ranks": job.world_size, "turns": len(found["bare"]), "steps_a_turn": TURN}
    own = [ours[1] - bare[1] for bare, ours in zip(found["bare"], found["dsrun"], strict=True)]
    result["more_cpu_ms"] = round(statistics.median(own), 2)
    for place, clock in enumerate(("wall_ms", "cpu_ms")):
        for name, turns in found.items():
            values = sorted(turn[place] for turn in turns)
            result[f"{name}_{clock}"] = round(statistics.median(values), 2)
            result[f"{name}_{clock}_p10"] = round(values[len(values) // 10], 2)
        result[f"ratio_{clock}"] = round(result[f"dsrun_{clock}"] / result[f"bare_{clock}"], 3)
    return result


if __name__ == "__main__":
    sys.exit(main())
