"""dsrun beside its peers, in turn: from the command to the first step, and samples a second after it.

    python bench/peers.py [--rounds 5] [--factory FOLDER] [--output docs/reference/bench-peers.md]

All train the same model folder on the same rows with the same batch, ZeRO config, precision, threads and compiled
operators, on two CPU ranks:

- `dsrun finetune`, with its cache as a second run finds it ("warm"), and with the rows not yet tokenised ("cold");
- `deepspeed --num_gpus 2 peer_trainer.py`, the shortest script around transformers' Trainer;
- `llamafactory-cli train`, where --factory names a folder: an environment is made in it that holds LLaMA-Factory
  alone, since it wants other versions of most packages.

Who goes first changes from round to round. A side's clock starts with its command, and is read at the end of every
optimizer step; samples a second are those of the steps after the first.
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
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

CHECKOUT = Path(__file__).resolve().parent.parent
ROWS = CHECKOUT / "presets/datasets/advertise/train.jsonl"
RANKS, MICRO_BATCH, LR, SOURCE, TARGET = 2, 4, 2e-3, 64, 96
FACTORY = "0.9.5"
# What it imports to train on text. Not torchvision: PyPI's is for CUDA builds of torch, and it does without.
FACTORY_NEEDS = (
    "torch==2.13.0", "deepspeed==0.19.8", "transformers>=4.55,<=5.6", "accelerate<=1.11", "datasets<=4.0", "trl<=0.24",
    "peft>=0.18,<=0.18.1", "gradio<=5.50", "tyro<0.9", "torchdata<=0.11", "av<=16", "einops", "fastapi", "fire",
    "hf-transfer", "matplotlib", "modelscope", "omegaconf", "pandas", "protobuf", "scipy", "sentencepiece",
    "sse-starlette", "tiktoken", "uvicorn",
)  # fmt: skip
LOOK_S = 0.01
WARM, COLD, TRAINER, LLAMA_FACTORY = "warm", "cold", "Trainer", "LLaMA-Factory"
NAMES = {
    WARM: "`dsrun finetune`, rows in the cache",
    COLD: "`dsrun finetune`, rows not yet tokenised",
    TRAINER: "`deepspeed --num_gpus 2 peer_trainer.py`",
    LLAMA_FACTORY: f"`llamafactory-cli train`, {FACTORY}",
}


class Run(NamedTuple):
    """One run. first, whole: seconds from the command to the first step's end, and to its own; rate: samples/s."""

    first: float
    whole: float
    rate: float


@dataclass
class Bench:
    """Places of everything. environ: what all sides get; cache: the warm $DSRUN_CACHE."""

    folder: Path
    environ: dict[str, str]
    cache: Path
    preset: str
    precision: str
    steps: int
    count: int = 0

    def dsrun(self, *words: str, cache: Path | None = None) -> str:
        """Run a dsrun command and return its stdout."""
        return self.run([sys.executable, "-m", "dsrun", *words], {"DSRUN_CACHE": str(cache or self.cache)})

    def run(self, argv: list[str], extra: dict[str, str], look: Callable[[], None] = lambda: None) -> str:
        """Run a command to its end, looking now and then; show what it said if it failed."""
        said, told = self.folder / "stdout", self.folder / "stderr"
        with said.open("w") as out, told.open("w") as err:
            process = subprocess.Popen(
                argv, env={**self.environ, **extra}, cwd=self.folder, stdout=out, stderr=err
            )
            while process.poll() is None:
                look()
                time.sleep(LOOK_S)
        look()
        if process.returncode:
            print(said.read_text()[-4000:], told.read_text()[-8000:], file=sys.stderr)
            raise SystemExit(f"{' '.join(argv)} ended with {process.returncode}")
        return said.read_text(encoding="utf-8")

    def words(self, run_dir: Path) -> list[str]:
        """The finetune command without "dsrun"."""
        return [
            "finetune", "llama-tiny", "--gpus", str(RANKS), "--preset", self.preset, "--precision", self.precision,
            "--train-file", str(self.folder / "rows.jsonl"), "--micro-batch", str(MICRO_BATCH),
            "--grad-accum", "1", "--allow-truncation", "--lr-schedule", "linear",
            "--max-source-length", str(SOURCE), "--max-target-length", str(TARGET), "--lr", str(LR),
            "--warmup-steps", "0", "--max-steps", str(self.steps), "--generate-rows", "0", "--no-score-before",
            "--output-dir", str(run_dir),
        ]  # fmt: skip

    def ours(self, cache: Path | None = None) -> tuple[Run, list[tuple[str, float]]]:
        """A run of dsrun, and when each phase of rank 0 began."""
        self.count += 1
        run_dir = self.folder / f"run-{self.count}"
        began = time.time()
        self.dsrun(*self.words(run_dir), cache=cache)
        ended = time.time()
        steps = [one["time"] for one in _lines(run_dir / "metrics.jsonl") if "loss" in one]
        events = _lines(run_dir / "events.jsonl")
        phases = [(event["text"], event["time"] - began) for event in events if event["event"] == "phase"]
        shutil.rmtree(run_dir)
        return self._of(began, steps, ended), phases

    def trainer(self, planned: dict[str, Any], config: Path) -> Run:
        """A run of the Trainer script. planned: dsrun's own dry run, as JSON."""
        mark = self.folder / "mark"
        mark.unlink(missing_ok=True)
        argv = [
            str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", str(RANKS),
            "--master_port", str(free_port()), str(Path(__file__).with_name("peer_trainer.py")),
            "--model", planned["job"]["prepared"]["model_dir"], "--train-file", str(self.folder / "rows.jsonl"),
            "--config", str(config), "--output-dir", str(self.folder / "peer"), "--mark", str(mark),
            "--max-source-length", str(SOURCE), "--max-target-length", str(TARGET), "--precision", self.precision,
            "--micro-batch", str(MICRO_BATCH), "--max-steps", str(self.steps), "--lr", str(LR),
        ]  # fmt: skip
        began = time.time()
        self.run(argv, {**planned["environment"], "PYTHONPATH": self.environ.get("PYTHONPATH", "")})
        ended = time.time()
        return self._of(began, [float(line) for line in mark.read_text(encoding="utf-8").split()], ended)

    def factory(self, planned: dict[str, Any], config: Path, place: Path) -> Run:
        """A run of LLaMA-Factory, whose steps are told by the lines of its log as they come."""
        output = self.folder / "factory"
        shutil.rmtree(output, ignore_errors=True)
        asked = self.folder / "factory.yaml"  # JSON is YAML; a file of JSON it fails to read
        asked.write_text(json.dumps(self._factory_config(planned, config, output)), encoding="utf-8")
        seen: list[float] = []

        def look() -> None:
            log = output / "trainer_log.jsonl"
            if log.exists():
                count = sum("loss" in line for line in log.read_text(encoding="utf-8").splitlines())
                seen.extend([time.time()] * (count - len(seen)))

        extra = {
            **{name: value for name, value in planned["environment"].items() if name not in ("PATH", "PYTHONPATH")},
            "PATH": f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(place / "stub"),
            "FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(RANKS), "MASTER_PORT": str(free_port()),
            "DISABLE_VERSION_CHECK": "1", "HF_HUB_OFFLINE": "1",
            # Its torch is as new, its other packages are not: operators of its own.
            "TORCH_EXTENSIONS_DIR": str(place / "torch_extensions"),
        }  # fmt: skip
        began = time.time()
        self.run([str(place / "bin/llamafactory-cli"), "train", str(asked)], extra, look)
        return self._of(began, seen, time.time())

    def _factory_config(self, planned: dict[str, Any], config: Path, output: Path) -> dict[str, Any]:
        return {
            "stage": "sft", "do_train": True, "finetuning_type": "full", "use_cpu": True, "template": "llama2",
            "model_name_or_path": planned["job"]["prepared"]["model_dir"], "deepspeed": str(config),
            "dataset": "rows", "dataset_dir": str(self.folder), "cutoff_len": SOURCE + TARGET,
            "per_device_train_batch_size": MICRO_BATCH, "gradient_accumulation_steps": 1, "learning_rate": LR,
            "max_steps": self.steps, "bf16": self.precision == "bf16", "output_dir": str(output), "logging_steps": 1,
            "save_strategy": "no", "report_to": "none", "plot_loss": False, "preprocessing_num_workers": 1,
            "lr_scheduler_type": "linear", "warmup_steps": 0, "seed": 42,
        }  # fmt: skip

    def _of(self, began: float, steps: list[float], ended: float) -> Run:
        if len(steps) != self.steps:
            raise SystemExit(f"{len(steps)} of {self.steps} steps were told")
        samples = RANKS * MICRO_BATCH * (len(steps) - 1)
        return Run(steps[0] - began, ended - began, samples / (steps[-1] - steps[0]))

    def cold_cache(self) -> Path:
        """A cache that holds the warm one's model and operators, and no rows."""
        self.count += 1
        cache = self.folder / f"cache-{self.count}"
        cache.mkdir()
        for name in ("models", "torch_extensions"):
            (cache / name).symlink_to(self.cache / name)
        return cache


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def remove_shared_memory() -> None:
    """DeepSpeed's CPU collectives leave 69 MB a rank in /dev/shm; the others have nobody to tidy up."""
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*"):
        if not in_use(path):
            path.unlink(missing_ok=True)


def in_use(path: Path) -> bool:
    """Whether a process of this user has mapped the file."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if str(path) in maps.read_text():
                return True
        except OSError:  # it has ended, or is somebody else's
            continue
    return False


def make_factory(place: Path) -> None:
    """An environment with LLaMA-Factory. torchaudio is an empty package: text needs none of it."""
    if (place / "bin/llamafactory-cli").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    pip = [str(place / "bin/pip"), "install", "-q"]
    subprocess.run([*pip, "torch==2.13.0"], check=True)  # DeepSpeed's setup imports it
    subprocess.run([*pip, *FACTORY_NEEDS], check=True)
    subprocess.run([*pip, "--no-deps", f"llamafactory=={FACTORY}"], check=True)
    stub = place / "stub/torchaudio"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text('__version__ = "2.13.0"\n', encoding="utf-8")


def main() -> None:
    """Measure in rounds, write the page, and fail where dsrun is behind."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--preset", default="zero2-offload")
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--factory", type=Path, metavar="FOLDER")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    if importlib.util.find_spec("dsrun") is None:
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CHECKOUT), environ.get("PYTHONPATH")]))
    if given.factory:
        make_factory(given.factory.absolute())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cache = Path(os.environ.get("DSRUN_CACHE") or folder / "cache").absolute()
        bench = Bench(folder, environ, cache, given.preset, given.precision, given.steps)
        write_rows(folder)
        bench.ours()  # compiles, makes the model, tokenises
        planned = json.loads(bench.dsrun(*bench.words(folder / "dry"), "--dry-run", "--json"))
        config = folder / "deepspeed.json"
        config.write_text(
            bench.dsrun(
                "preset", given.preset, "--gpus", str(RANKS), "--precision", given.precision, "--for", "hf",
                "--micro-batch", str(MICRO_BATCH),
            ),
            encoding="utf-8",
        )  # fmt: skip
        sides: dict[str, Callable[[], Run]] = {TRAINER: lambda: bench.trainer(planned, config)}
        if given.factory:
            place = given.factory.absolute()
            sides[LLAMA_FACTORY] = lambda: bench.factory(planned, config, place)
        for run in sides.values():
            run()  # compiles, and fills whatever they keep
        runs, phases = measure(bench, sides, given.rounds)
    text, behind = report(bench, runs, phases)
    print(text)
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(text, encoding="utf-8")
    if behind:
        raise SystemExit(f"dsrun is behind: {', '.join(behind)}")


def write_rows(folder: Path) -> None:
    """The shipped rows, once more under the names that LLaMA-Factory knows."""
    shutil.copy(ROWS, folder / "rows.jsonl")
    rows = [{"instruction": row["content"], "input": "", "output": row["summary"]} for row in _lines(ROWS)]
    (folder / "alpaca.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    (folder / "dataset_info.json").write_text('{"rows": {"file_name": "alpaca.json"}}', encoding="utf-8")


def measure(
    bench: Bench, sides: dict[str, Callable[[], Run]], rounds: int
) -> tuple[dict[str, list[Run]], list[list[tuple[str, float]]]]:
    """The runs of every side, one a round, and the phases of dsrun's warm ones."""
    turns = [WARM, COLD, *sides]
    runs: dict[str, list[Run]] = {turn: [] for turn in turns}
    phases: list[list[tuple[str, float]]] = []
    for number in range(rounds):
        for turn in turns if number % 2 == 0 else reversed(turns):
            if turn in sides:
                found = sides[turn]()
            else:
                found, began = bench.ours(bench.cold_cache() if turn == COLD else None)
                phases += [began] if turn == WARM else []
            remove_shared_memory()
            runs[turn].append(found)
            print(
                f"{number + 1}/{rounds} {turn}: first step {found.first:.2f} s, {found.rate:.1f} samples/s, "
                f"{found.whole:.2f} s in all",
                file=sys.stderr,
            )
    return runs, phases


def report(
    bench: Bench, runs: dict[str, list[Run]], phases: list[list[tuple[str, float]]]
) -> tuple[str, list[str]]:
    """The page for docs/reference, and where dsrun (warm) is behind."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("deepspeed", "torch", "transformers"))
    peers = [turn for turn in runs if turn not in (WARM, COLD)]
    lines = [
        "# dsrun beside its peers",
        "",
        f"Made by `python bench/peers.py` on {date.today()}: {versions}, "
        f"Python {platform.python_version()}, {os.cpu_count()} CPU cores, no GPU.",
        "",
        f"llama-tiny, preset {bench.preset}, {RANKS} CPU ranks, {bench.precision}, micro batch {MICRO_BATCH}, "
        f"{bench.steps} steps, the shipped 1,200 advertisements. {len(runs[WARM])} rounds, each running all; medians "
        "(in brackets the fastest and the slowest).",
        "",
        "| | seconds to the first step's end | samples a second after it | seconds in all |",
        "| --- | --- | --- | --- |",
    ]
    for turn, found in runs.items():
        cells = [_cell([getattr(run, name) for run in found]) for name in ("first", "rate", "whole")]
        lines.append(f"| {NAMES[turn]} | {' | '.join(cells)} |")
    lines += [
        "",
        "Ratios, the median of the rounds' own: how much sooner dsrun ends its first step (peer / dsrun), and how many "
        "samples it trains on for one of the peer's.",
        "",
        "| | to the first step, warm | cold | samples a second, warm |",
        "| --- | --- | --- | --- |",
    ]
    behind = []
    for peer in peers:
        pairs = {turn: list(zip(runs[turn], runs[peer], strict=True)) for turn in (WARM, COLD)}
        sooner = {turn: statistics.median(b.first / a.first for a, b in pairs[turn]) for turn in pairs}
        more = statistics.median(a.rate / b.rate for a, b in pairs[WARM])
        lines.append(f"| {NAMES[peer]} | {sooner[WARM]:.2f} | {sooner[COLD]:.2f} | {more:.2f} |")
        behind += [f"{peer}, first step: {sooner[WARM]:.2f}"] if sooner[WARM] < 1 else []
        behind += [f"{peer}, samples: {more:.2f}"] if more < 1 else []
    lines += [
        "",
        "When rank 0 of dsrun (warm) entered its phases, median:",
        "",
        "| phase | seconds after the command |",
        "| --- | --- |",
    ]
    for place, (text, _) in enumerate(phases[0]):
        lines.append(f"| {text} | {statistics.median(found[place][1] for found in phases):.2f} |")
        if text == "training":
            break
    return "\n".join([*lines, ""]), behind


def _cell(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
