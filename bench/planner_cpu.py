"""Memory that host_memory predicts for runs on a CPU, against what their ranks held.

    python bench/planner_cpu.py [--write] [--presets zero2 zero3] [--cases tiny weights tokens] [--precisions fp32]
    python bench/planner_cpu.py --from bench/results/planner-cpu-2026-11-23.json --write

Every preset trains random Llamas with two ranks through the `deepspeed` launcher, a few steps each. A rank's growth
is the most that it held (VmHWM) less what it held with the libraries loaded and no model. --write renews
docs/reference/planner-measured.md and bench/results/planner-cpu-DATE.json; what stands in today's file is not run
again, so that a bench that was ended goes on. --from judges the runs of such a file again with today's formulas, and
runs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dsrun.files import write_atomic
from dsrun.planner import disk
from dsrun.planner.host_memory import host_memory
from dsrun.planner.setup import Setup, batch_fields, zero_fields
from dsrun.planner.shape import from_config

ROOT = Path(__file__).resolve().parent.parent
PRESETS = ("ddp", "zero1", "zero2", "zero2-offload", "zero3", "zero3-offload", "zero3-nvme")
BF16 = (("weights", "ddp"), ("weights", "zero2"), ("weights", "zero3"), ("tokens", "zero2"))
"""Cases that run in bf16 too, beside everything in fp32."""
GOAL = 0.2
RANKS = 2
SAMPLE_S = 0.02
MIB = 2**20

MODEL = """\
summary = "Llama's network with random weights, for measuring"
parameters = {parameters}
prompt_format = "llama-2"

[architecture]
model_type = "llama"
hidden_size = {hidden}
intermediate_size = {inner}
num_hidden_layers = {layers}
num_attention_heads = {heads}
num_key_value_heads = {kv_heads}
vocab_size = {vocab}
max_position_embeddings = 2048
rms_norm_eps = 1e-5
rope_theta = 10000.0
bos_token_id = 1
eos_token_id = 2
pad_token_id = 0
tie_word_embeddings = false
initializer_range = 0.02

[random]
seed = 1

[tokenizer]
style = "llama"
vocab_size = 2000
max_piece_length = 3
dataset = "advertise"
"""


@dataclass(frozen=True)
class Case:
    """A model and what it is fed. tokens: of a row, prompt and response; steps: optimizer steps."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tokens: int
    micro_batch: int
    steps: int

    @property
    def parameters(self) -> int:
        """Weights in all."""
        block = (
            (2 + 2 * self.kv_heads / self.heads) * self.hidden**2
            + 3 * self.hidden * self.inner
            + 2 * self.hidden
        )
        return int(self.layers * block) + 2 * self.vocab * self.hidden + self.hidden

    def model_file(self) -> str:
        """The TOML file that describes the model to dsrun."""
        return MODEL.format(**asdict(self), parameters=self.parameters)


CASES = {
    "tiny": Case("llama-tiny", 192, 512, 4, 6, 2, 2048, tokens=64, micro_batch=1, steps=4),
    "weights": Case("bench-150m", 1024, 2816, 11, 8, 8, 2048, tokens=64, micro_batch=1, steps=3),
    "tokens": Case("bench-40m", 512, 1408, 12, 8, 8, 2048, tokens=512, micro_batch=4, steps=3),
    "wide": Case("bench-wide", 3072, 4096, 2, 24, 24, 2048, tokens=256, micro_batch=2, steps=3),
}
LATER = {"wide": ("ddp", "zero2", "zero3")}
"""Cases that were first run when the plan's constants stood, under these presets: the plan has not seen them."""


class Watch(threading.Thread):
    """Looks at the ranks' resident memory all the time: (seconds since the epoch, rank, bytes)."""

    def __init__(self, run: Path) -> None:
        super().__init__(daemon=True)
        self.run_dir, self.seen, self.done = run, list[tuple[float, int, int]](), threading.Event()

    def run(self) -> None:
        """Watch until `done` is set."""
        while not self.done.wait(SAMPLE_S):
            for path in self.run_dir.glob("state/rank-*.json"):
                try:
                    state = json.loads(path.read_text())
                    status = Path(f"/proc/{state['pid']}/status").read_text()
                    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
                except (OSError, ValueError, StopIteration):
                    continue
                self.seen.append((time.time(), state["rank"], int(resident.split()[1]) * 1024))


def write_model(case: Case, folder: Path) -> dict[str, str]:
    """The environment in which dsrun knows the model."""
    models = folder / "catalog" / "presets" / "models"
    models.mkdir(parents=True, exist_ok=True)
    if case.name != "llama-tiny":
        (models / f"{case.name}.toml").write_text(case.model_file())
    return {**os.environ, "DSRUN_PATH": str(folder / "catalog")}


def write_rows(path: Path) -> None:
    """Rows longer than any case wants; dsrun cuts them to length."""
    source = ROOT / "presets" / "datasets" / "advertise" / "train.jsonl"
    texts = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()[:200]]
    text = "".join(str(value) for row in texts for value in row.values())
    rows = [
        {"content": text[index : index + 2000], "summary": text[index : index + 2000]} for index in range(64)
    ]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def run(name: str, preset: str, precision: str, folder: Path) -> dict[str, Any]:
    """Train once; what every rank held, in bytes above its baseline, by phase and in all."""
    case = CASES[name]
    env = {**write_model(case, folder), "DS_ACCELERATOR": "cpu"}
    rows = folder / "rows.jsonl"
    write_rows(rows)
    out = folder / f"{case.name}-{preset}-{precision}-{len(list(folder.iterdir()))}"
    half = case.tokens // 2
    command = [
        sys.executable, "-m", "dsrun", "finetune", case.name, "--preset", preset, "--precision", precision,
        "--gpus", str(RANKS), "--max-steps", str(case.steps), "--generate-rows", "0", "--no-score-before",
        "--train-file", str(rows), "--prompt-column", "content", "--response-column", "summary",
        "--max-source-length", str(half), "--max-target-length", str(half), "--warmup-steps", "0",
        "--grad-accum", "1", "--allow-truncation",
        "--micro-batch", str(case.micro_batch), "--output-dir", str(out), "--json", "--save-steps", "2", "--force",
    ]  # fmt: skip
    if preset == "zero3-nvme":
        (folder / "nvme").mkdir(exist_ok=True)
        command += ["--nvme-path", str(folder / "nvme")]
        # A buffer must hold a rank's share of the largest weight, here the feed-forward's.
        largest = max(case.inner, case.vocab) * case.hidden // RANKS
        command += ["--set", f"zero_optimization.offload_param.buffer_size={largest}"]
    watch = Watch(out)
    watch.start()
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    watch.done.set()
    watch.join()
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        raise SystemExit(f"{case.name} under {preset} in {precision} failed with exit code {done.returncode}")
    found = {"case": name, "preset": preset, "precision": precision, **measured(out, watch.seen)}
    for path in (out, folder / "nvme"):
        shutil.rmtree(path, ignore_errors=True)
    return found


def measured(out: Path, seen: list[tuple[float, int, int]]) -> dict[str, Any]:
    """Memory of a finished run, in bytes above each rank's baseline."""
    states = [json.loads(path.read_text()) for path in sorted(out.glob("state/rank-*.json"))]
    peaks = {state["rank"]: state["peaks"] for state in states}
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    phases = [(event["time"], event["text"]) for event in events if event["event"] == "phase"]
    by_phase: dict[str, dict[str, int]] = {}
    for moment, rank, resident in seen:
        phase = next((text for began, text in reversed(phases) if began <= moment), "")
        above = resident - peaks[rank]["host_baseline_bytes"]
        held = by_phase.setdefault(phase, {})
        held[str(rank)] = max(held.get(str(rank), 0), above)
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    checkpoints = list(out.glob("checkpoints/step-*"))
    return {
        "growth": {
            str(rank): peak["host_peak_bytes"] - peak["host_baseline_bytes"] for rank, peak in peaks.items()
        },
        "baseline": {str(rank): peak["host_baseline_bytes"] for rank, peak in peaks.items()},
        "phases": by_phase,
        "step_seconds": peaks[0]["step_seconds"],
        "tokens": [line["tokens"] for line in metrics if "tokens" in line],
        "model_bytes": _size(out / "model"),
        "checkpoint_bytes": _size(checkpoints[0]) if checkpoints else None,
        "nvme_bytes": _size(out.parent / "nvme"),
        "ds_config": json.loads((out / "deepspeed.json").read_text()),
    }


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def setup_of(case: Case, ds_config: dict[str, Any], gpus: int = RANKS) -> Setup:
    """The planner's set-up of a run, from the ds_config that it ran with."""
    config = {
        "model_type": "llama", "hidden_size": case.hidden, "intermediate_size": case.inner,
        "num_hidden_layers": case.layers, "num_attention_heads": case.heads, "vocab_size": case.vocab,
        "num_key_value_heads": case.kv_heads, "tie_word_embeddings": False,
    }  # fmt: skip
    shape = from_config(config, case.name)
    fields = {**zero_fields(ds_config), **batch_fields(ds_config)}
    return Setup(shape, gpus=gpus, seq_len=case.tokens, **fields)


def judge(run: dict[str, Any]) -> dict[str, Any]:
    """A run's figures beside the planner's, in bytes; growth is a rank's, the mean of both."""
    case = CASES[run["case"]]
    setup = setup_of(case, run["ds_config"])
    plan = host_memory(setup, accelerator="cpu")
    baseline = sum(run["baseline"].values())
    row = {
        "growth": (sum(run["growth"].values()) / RANKS, (plan.peak - baseline) / RANKS),
        "model": (run["model_bytes"], disk.model_bytes(setup)),
    }
    if run["checkpoint_bytes"]:
        row["checkpoint"] = (run["checkpoint_bytes"], disk.checkpoint_bytes(setup))
    if run["nvme_bytes"]:
        row["nvme"] = (run["nvme_bytes"], disk.nvme_bytes(setup))
    return row


def text_of(runs: list[dict[str, Any]], day: str, versions: str) -> str:
    """docs/reference/planner-measured.md."""
    judged = [(run, judge(run)) for run in runs]
    memory, disks, apart = [], [], []
    for run, row in judged:
        case = CASES[run["case"]]
        held, said = row["growth"]
        ranks = " / ".join(f"{value / MIB:,.0f}" for value in run["growth"].values())
        fed = f"{case.micro_batch} x {case.tokens}"
        apart.append((abs(said / held - 1), f"{case.name} under {run['preset']} in {run['precision']}"))
        memory.append(
            f"| {case.name} | {fed} | {run['preset']} | {run['precision']} | {said / MIB:,.0f} | {ranks} | "
            f"{said / held:.2f} |"
        )
        for what in ("checkpoint", "nvme", "model"):
            if what in row and (what != "model" or "checkpoint" in row):
                there, planned = row[what]
                disks.append(
                    f"| {case.name} | {run['preset']} | {run['precision']} | {what} | {planned / MIB:,.1f} | "
                    f"{there / MIB:,.1f} | {planned / there:.3f} |"
                )
    missed = [f"{name} ({distance:.0%})" for distance, name in apart if distance > GOAL]
    within = f"{len(apart) - len(missed)} of {len(apart)} are within {GOAL:.0%} of it"
    return PAGE.format(
        day=day, versions=versions, memory="\n".join(memory), disks="\n".join(disks),
        within=within + (f"; farther: {', '.join(missed)}" if missed else ""),
        parameters="Millions of weights: "
        + ", ".join(f"{case.name} {case.parameters / 1e6:.1f}" for case in CASES.values()),
    )  # fmt: skip


def main() -> None:
    """Run or read, judge, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--presets", nargs="+", default=PRESETS)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--from", dest="source", type=Path)
    arguments = parser.parse_args()
    found = (
        json.loads(arguments.source.read_text(encoding="utf-8")) if arguments.source else runs_of(arguments)
    )
    text = text_of(found["runs"], found["day"], found["versions"])
    print(text)
    if arguments.write:
        (ROOT / "docs" / "reference" / "planner-measured.md").write_text(text, encoding="utf-8")


def runs_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every run that is asked for, written after each with --write."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("deepspeed", "torch", "transformers"))
    found: dict[str, Any] = {
        "day": str(date.today()),
        "versions": f"{versions}, Python {platform.python_version()}, {os.cpu_count()} CPU cores",
        "runs": [],
    }
    target = ROOT / "bench" / "results" / f"planner-cpu-{found['day']}.json"
    if arguments.write and target.exists():
        before = json.loads(target.read_text(encoding="utf-8"))
        if before["versions"] != found["versions"]:
            raise SystemExit(f"{target} is of {before['versions']}; move it away to run everything again")
        found["runs"] = before["runs"]
    there = {(run["case"], run["preset"], run["precision"]) for run in found["runs"]}
    with tempfile.TemporaryDirectory() as name:
        for one in wanted(arguments):
            if one in there:
                continue
            found["runs"].append(run(*one, Path(name)))
            held, said = judge(found["runs"][-1])["growth"]
            print(f"{' '.join(one)}: {said / MIB:.0f} of {held / MIB:.0f} MiB", flush=True)
            if arguments.write:
                write_atomic(target, json.dumps(found, indent=1) + "\n")
    return found


def wanted(arguments: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """(Case, preset, precision) of every run."""
    for precision in arguments.precisions:
        for case in arguments.cases:
            for preset in arguments.presets:
                if preset in LATER.get(case, PRESETS) and (precision == "fp32" or (case, preset) in BF16):
                    yield case, preset, precision


PAGE = """\
# The planner against runs

Made by `python bench/planner_cpu.py --write` on {day}: {versions}, no GPU.
What is measured here is DeepSpeed on a CPU, where the memory of the "GPU" is the host's; what a GPU holds has to be
measured on one (`bench/gpu/run.sh planned`).

## Memory

Two ranks through the `deepspeed` launcher, a few steps each. {parameters}.
Rows x tokens are a rank's micro batch. Planned: what `host_memory(setup, accelerator="cpu")` says a rank holds, less
what its libraries held before the model was loaded, which was measured. Measured: the most that ranks 0 and 1 ever
held, less the same, in MiB. The ratio is the plan's to the ranks' mean: {within}.

| model | rows x tokens | preset | precision | planned MiB | measured MiB (rank 0 / 1) | ratio |
| --- | --- | --- | --- | ---: | ---: | ---: |
{memory}

Most of llama-tiny's growth is libraries that are loaded later, a constant in the plan: the mean of its seven rows. Two
runs of one job differ by up to a tenth under ZeRO-3: glibc's malloc keeps gathered weights that were freed, more or
fewer of them as a rank's threads meet. The constant for that was read from runs of the other models; bench-wide has no
part in either. All else is DeepSpeed's source.

## Disks

A checkpoint's folder, the swap files of zero3-nvme, and the exported model's folder with its tokenizer, in MiB.

| model | preset | precision | what | planned MiB | measured MiB | ratio |
| --- | --- | --- | --- | ---: | ---: | ---: |
{disks}
"""


if __name__ == "__main__":
    main()
