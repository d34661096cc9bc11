"""`dsrun tune`'s search, replayed on a recorded grid: what the best of all is worth, and how near the search comes.

    python bench/tuning.py record [--turns 3] [--steps 8]   train all of GRID on two CPU ranks, by turns; writes RECORD
    python bench/tuning.py [--trials 8] [--json]            replay the search on RECORD
    python bench/tuning.py autotuner                        DeepSpeed's own autotuner on the same grid

The grid is llama-tiny in fp32 on two CPU ranks: four presets, three splits of 16 examples, with and without activation
checkpointing: 24 configs. In a turn the same two processes train one after the other, in another order each
time, so that what else the machine does hits all alike; a config's time in a turn is its fastest step behind the
first two, which nothing else held up, and the record's the median over the turns. All steps stand in the record.
Replayed, every trial gives its config's time; with noise a short one gives one turn's, a longer one the median. The
regret is the time of the chosen config beyond that of the best.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from datetime import date
from importlib.metadata import version
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
SPLITS = ((8, 1), (4, 2), (1, 8))
"""Micro batch and accumulation, in the order in which `dsrun tune` has them."""
CHECKPOINTING = ("none", "full")
GRID = [
    {"preset": preset, "micro_batch": micro, "grad_accum": accum, "activation_checkpointing": way}
    for preset, (micro, accum), way in itertools.product(PRESETS, SPLITS, CHECKPOINTING)
]
FIXED = {
    "gpus": RANKS, "precision": "fp32", "generate_rows": 0, "export_format": "none",
    "eval_steps": 1000, "set": "optimizer.params.torch_adam=true",
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


def seconds_of(folder: Path) -> list[float]:
    """Seconds of a run's steps, without the first."""
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["seconds"] for line in lines if "seconds" in line and "loss" in line][WARM_UP:]


def turn(folder: Path, order: list[dict[str, Any]], steps: int) -> dict[str, list[float]]:
    """Name -> its steps' seconds, of all configs trained by the same two processes, one after the other."""
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
    """Train the grid by turns; what is written, after each turn."""
    loads: list[float] = []
    times: list[dict[str, list[float]]] = []
    for number in range(turns):
        order = random.Random(number).sample(GRID, len(GRID))
        loads.append(os.getloadavg()[0])
        with tempfile.TemporaryDirectory() as folder:
            times.append(turn(Path(folder), order, steps))
        print(f"turn {number + 1}: load {loads[-1]:.1f} before it", file=sys.stderr)
        RECORD.write_text(json.dumps(recorded_by(loads, times, steps), indent=1) + "\n", encoding="utf-8")
    return recorded_by(loads, times, steps)


def recorded_by(loads: list[float], times: list[dict[str, list[float]]], steps: int) -> dict[str, Any]:
    """The record of some turns."""
    fastest = [{name: min(seconds) for name, seconds in found.items()} for found in times]
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
                **dict(zip(("planned", "needs"), planned(config), strict=True)),
                "turns": [round(found[name_of(config)], 5) for found in fastest],
                "seconds": round(statistics.median(found[name_of(config)] for found in fastest), 5),
                "steps": [[round(second, 4) for second in found[name_of(config)]] for found in times],
            }
            for config in GRID
        ],
    }


def planned(config: dict[str, Any]) -> tuple[float, float]:
    """A config's seconds and bytes, as finetune predicts them before it starts."""
    with tempfile.TemporaryDirectory() as folder:
        job = json.loads(plan_job(config, Path(folder) / "run", 3).read_text(encoding="utf-8"))
    return job["prediction"]["step_seconds"], job["prediction"]["host_bytes"]


def replay(recorded: dict[str, Any], trials: int, draws: int) -> dict[str, Any]:
    """The search on the recorded times, with other turns' times in each draw; beside the planner's first choice, and
    as many trials of candidates at random."""
    from dsrun.planner.analysis.tuning import Candidate, TrialOutcome, tune

    configs = recorded["configs"]
    true = {name_of(knobs_of(config)): config["seconds"] for config in configs}
    turns = {name_of(knobs_of(config)): config["turns"] for config in configs}
    candidates = [
        Candidate(name_of(knobs_of(config)), knobs_of(config), config["planned"], config["needs"])
        for config in configs
    ]
    best = min(true.values())
    spread = statistics.median(statistics.stdev(map(math.log, found)) for found in turns.values())
    regrets, used, chosen = [], [], []
    for seed in range(draws):
        draw = random.Random(seed)

        def measure(candidate: Candidate, steps: int, draw: random.Random = draw) -> TrialOutcome:
            short = steps == recorded["steps"]
            seconds = draw.choice(turns[candidate.name]) if short else true[candidate.name]
            return TrialOutcome(seconds, noise=spread)

        found = tune(candidates, measure, trials=trials, steps=recorded["steps"])
        assert found.leader is not None
        regrets.append(true[found.leader.name] / best - 1)
        used.append(len(found.trials))
        chosen.append(found.leader.name)
    first = min(candidates, key=lambda candidate: candidate.seconds)
    blind = [
        min(true[name] for name in random.Random(seed).sample([*true], trials)) / best - 1
        for seed in range(draws)
    ]
    return {
        "trials": trials,
        "spread_between_turns": spread,
        "regret_of_medians": regret_of(recorded, trials, lambda config: config["seconds"]),
        "regret_of_fastest": regret_of(recorded, trials, lambda config: min(config["turns"])),
        "draws": draws,
        "best": min(true, key=lambda name: true[name]),
        "best_seconds": best,
        "worst_seconds": max(true.values()),
        "regret": {"mean": statistics.fmean(regrets), "most": max(regrets)},
        "within_5_percent": sum(regret <= 0.05 for regret in regrets) / draws,
        "trials_used": statistics.fmean(used),
        "chosen": dict(Counter(chosen).most_common(4)),
        "planner_alone": true[first.name] / best - 1,
        "at_random": {"mean": statistics.fmean(blind), "most": max(blind)},
    }


def regret_of(recorded: dict[str, Any], trials: int, time: Callable[[dict[str, Any]], float]) -> float:
    """The search's regret where every trial takes what `time` says of its config."""
    from dsrun.planner.analysis.tuning import Candidate, TrialOutcome, tune

    true = {name_of(knobs_of(config)): time(config) for config in recorded["configs"]}
    candidates = [
        Candidate(name_of(knobs_of(config)), knobs_of(config), config["planned"], config["needs"])
        for config in recorded["configs"]
    ]
    found = tune(
        candidates, lambda one, _: TrialOutcome(true[one.name]), trials=trials, steps=recorded["steps"]
    )
    assert found.leader is not None
    return true[found.leader.name] / min(true.values()) - 1


def knobs_of(config: dict[str, Any]) -> dict[str, Any]:
    """A recorded config's knobs."""
    return {name: config[name] for name in GRID[0]}


def autotuner() -> dict[str, str]:
    """DeepSpeed's own autotuner for llama-tiny's micro batches and stages on as many CPU ranks: how it ends."""
    script = (
        "import argparse, deepspeed, torch\n"
        "parser = deepspeed.add_config_arguments(argparse.ArgumentParser())\n"
        "parser.add_argument('--local_rank', type=int, default=0)\n"
        "model = torch.nn.Linear(8, 8)\n"
        "deepspeed.initialize(args=parser.parse_args(), model=model, model_parameters=model.parameters())\n"
    )
    config = {
        "train_micro_batch_size_per_gpu": "auto", "autotuning": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(script, encoding="utf-8")
        (folder / "ds.json").write_text(json.dumps(config), encoding="utf-8")
        command = [
            str(Path(sys.executable).with_name("deepspeed")), "--autotuning", "run", "--num_gpus", str(RANKS),
            "train.py", "--deepspeed", "--deepspeed_config", "ds.json",
        ]  # fmt: skip
        done = subprocess.run(
            command,
            env={**os.environ, "DS_ACCELERATOR": "cpu"},
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
        )
    words = (done.stderr or done.stdout).strip().splitlines()
    return {
        "deepspeed": version("deepspeed"),
        "exit_code": str(done.returncode),
        "words": words[-1] if words else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", default="replay", choices=("replay", "record", "autotuner"))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="print data")
    given = parser.parse_args()
    recorded = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    if given.what == "replay":
        found = replay(recorded, given.trials, given.draws)
        print(json.dumps(found, indent=1) if given.json else shown(found, recorded))
        return
    if given.what == "record":
        recorded = {**record(given.turns, given.steps), "autotuner": recorded.get("autotuner")}
    else:
        recorded["autotuner"] = autotuner()
    RECORD.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


def shown(found: dict[str, Any], recorded: dict[str, Any]) -> str:
    """A replay in words."""
    regret, blind = found["regret"], found["at_random"]
    return "\n".join(
        [
            f"{len(recorded['configs'])} configs of {recorded['model']} on {recorded['ranks']} CPU ranks, recorded "
            f"{recorded['date']} (load {recorded['load_before_each_turn']}): {found['best_seconds']:.3g} to "
            f"{found['worst_seconds']:.3g} s a step, the best {found['best']}",
            f"dsrun tune, {found['trials']} trials at most: regret {found['regret_of_medians']:.1%} on the medians of "
            f"the turns, {found['regret_of_fastest']:.1%} on the fastest; a config's turns differ by "
            f"{found['spread_between_turns']:.0%} (standard deviation)",
            f"with the noise of single turns, {found['trials_used']:.1f} trials in the mean of {found['draws']} "
            f"draws: regret {regret['mean']:.1%} in the mean, {regret['most']:.1%} at most, within 5 % in "
            f"{found['within_5_percent']:.0%}",
            f"the planner's first choice without a trial: {found['planner_alone']:.1%}",
            f"as many at random: {blind['mean']:.1%} in the mean, {blind['most']:.1%} at most",
            f"DeepSpeed's autotuner: {(recorded.get('autotuner') or {}).get('words', 'not asked')}",
        ]
    )


if __name__ == "__main__":
    main()
