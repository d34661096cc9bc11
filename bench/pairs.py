"""Pairs of finetune's settings, drawn, each trained for real: does what was asked for take effect beside the other?

    python bench/pairs.py [--pairs 30] [--seed 15] [--folder DIR] [--write]

Of two settings one at least says how the job is divided. A pair is either refused before the start, in one message, or
llama-tiny takes two steps with it on CPU ranks, and three things are asked: are its losses those of one process with
the same settings as far as they don't divide the job (5e-5; bf16: 2e-2); does a setting that changes losses change
those of one process; and is there what a setting leaves behind: files, lines of metrics, calls in the ranks
(bench/pairs_ranks.py). --write puts what came of each into bench/results/pairs.json,
of which docs/generate.py makes a table.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from parallelism import CHECKOUT, own_models

RESULTS = CHECKOUT / "bench/results/pairs.json"
MODEL, STEPS = "llama-tiny", 2
Words = Mapping[str, str | None]
"""finetune's options; "": a switch. None takes away what the others say."""
BASE: Words = {
    "--preset": "zero1", "--global-batch": "4", "--micro-batch": "1", "--generate-rows": "2", "--no-score-before": "",
    "--max-source-length": "40", "--max-target-length": "16", "--allow-truncation": "", "--warmup-steps": "0",
    "--lr-schedule": "constant", "--seed": "1", "--optimizer": "sgd", "--lr": "0.05", "--precision": "fp32",
    "--max-steps": str(STEPS),
}  # fmt: skip
OF_THE_STEP = ("--optimizer", "--lr", "--generate-rows")
"""Options beside a preset or a layout that one process repeats."""
NEAR, NEAR_BF16, OTHER = 5e-5, 2e-2, 1e-5
"""Losses are the same; they are in 16 bits; they are others."""


@dataclass(frozen=True)
class Run:
    """Files that a trained pair has left."""

    folder: Path

    @cached_property
    def job(self) -> dict[str, Any]:
        """job.json."""
        return json.loads((self.folder / "job.json").read_text(encoding="utf-8"))

    @cached_property
    def seen(self) -> dict[str, int]:
        """Calls in the first rank."""
        return json.loads((self.folder / "seen.json").read_text(encoding="utf-8"))

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl or events.jsonl."""
        return list(map(json.loads, (self.folder / name).read_text(encoding="utf-8").splitlines()))

    @cached_property
    def losses(self) -> list[float]:
        """Losses of the steps and of the last evaluation."""
        found = self.lines("metrics.jsonl")
        last = [line["eval_loss"] for line in found if "eval_loss" in line][-1:]
        return [line["loss"] for line in found if "loss" in line] + last

    def has(self, *patterns: str) -> bool:
        """Whether there are such files."""
        return all(any(self.folder.glob(pattern)) for pattern in patterns)


@dataclass(frozen=True, eq=False)
class Setting:
    """A setting of finetune's."""

    axis: str
    """Settings of one axis exclude one another."""
    words: Words
    seen: Callable[[Run], bool]
    """Whether a run shows it."""
    changes: bool = False
    """Whether losses become others by it."""
    draws: bool = False
    """Whether it has dropout, which each rank draws for itself."""
    divides: bool = False
    """Whether it says how the job is divided, which one process doesn't repeat."""
    ranks: int = 2

    @property
    def name(self) -> str:
        """The setting as it is typed."""
        return " ".join(f"{flag} {value}".strip() for flag, value in self.words.items() if value is not None)


ADAM = {"--optimizer": "adamw", "--lr": "1e-3"}


def _layout(name: str, size: int) -> Setting:
    def seen(run: Run) -> bool:  # the ranks themselves assert their groups
        return run.job["parallel"][name] == size

    words: Words = {f"--{name}": str(size), **({"--generate-rows": None} if name == "pp" else {})}
    return Setting("layout", words, seen, divides=True)


def _stage(preset: str, stage: int, **more: str) -> Setting:
    def seen(run: Run) -> bool:
        return run.job["ds_config"].get("zero_optimization", {}).get("stage", 0) == stage

    return Setting("preset", {"--preset": preset, **more}, seen, divides=True)


def _fsdp(preset: str, ranks: int, shared: int) -> Setting:
    def seen(run: Run) -> bool:
        return run.job["fsdp"]["shard_ranks"] == shared

    return Setting("preset", {"--preset": preset}, seen, divides=True, ranks=ranks)


def _optimizer(name: str, rate: str) -> Setting:
    words = {"--optimizer": name, "--lr": rate}
    # What the config has is AdamW, which a preset's words may have said already.
    return Setting("optimizer", words, _stands("training", "optimizer", name), changes=name != "config")


def _stands(section: str, name: str, value: object) -> Callable[[Run], bool]:
    return lambda run: (run.job[section] if section else run.job)[name] == value


def _calls(name: str, *without: str) -> Callable[[Run], bool]:
    return lambda run: run.seen.get(name, 0) > 0 and not any(run.seen.get(other) for other in without)


def _clipped(run: Run) -> bool:
    clip = (run.job["fsdp"] or {}).get("grad_clip") or run.job["ds_config"].get("gradient_clipping")
    return bool(clip == 0.05)


def _accumulates(run: Run) -> bool:
    config = run.job["fsdp"] or run.job["ds_config"]
    return (config.get("grad_accum") or config.get("gradient_accumulation_steps")) == 2


def _hpz(run: Run) -> bool:
    return run.job["ds_config"]["zero_optimization"].get("zero_hpz_partition_size") == 2


ADAPTER: Words = {"--method": "lora", "--lr": "0.5"}

HPZ: Words = {"--preset": "zero3", "--set": "zero_optimization.zero_hpz_partition_size=2"}
SETTINGS = (
    _layout("tp", 2), _layout("sp", 2), _layout("pp", 2),
    _stage("ddp", 0), _stage("zero2", 2), _stage("zero3", 3), _stage("zero3-offload", 3, **ADAM),
    _fsdp("fsdp", 2, 2), _fsdp("fsdp-pairs", 4, 2), _fsdp("fsdp-offload", 2, 2),
    Setting("preset", HPZ, _hpz, divides=True, ranks=4),
    Setting("method", ADAPTER, lambda run: run.has("adapter/adapter_model.safetensors"), changes=True),
    Setting("method", {**ADAPTER, "--lora-rank": "4", "--lora-target": "q_proj,down_proj"},
            lambda run: run.has("adapter/adapter_model.safetensors"), changes=True),
    Setting("method", {"--method": "ptuning"}, lambda run: run.has("adapter/*"), changes=True, draws=True),
    *(_optimizer(*one) for one in (("lion", "1e-4"), ("adamw", "1e-3"), ("muon", "1e-3"), ("config", "1e-3"))),
    Setting("clip", {"--grad-clip": "0.05"}, _clipped, changes=True),
    Setting("schedule", {"--lr-schedule": "linear", "--warmup-steps": "1"},
            lambda run: len({line.get("lr", 0) for line in run.lines("metrics.jsonl")} - {0}) == STEPS, changes=True),
    # Answers are all cut to as many tokens, so that the mean is the same.
    Setting("loss", {"--loss": "micro-batch-mean"}, _stands("training", "loss", "micro-batch-mean")),
    Setting("loss", {"--official": "", "--lr-schedule": None, "--grad-clip": None},
            lambda run: run.job["data"]["official"], changes=True),
    Setting("attention", {"--attention": "eager"}, _calls("eager", "varlen")),
    Setting("attention", {"--attention": "varlen"}, _calls("varlen", "eager")),
    Setting("attention", {"--attention": "sdpa"}, _calls("sdpa", "eager", "varlen")),
    Setting("packing", {"--no-packing": ""},
            lambda run: [one["packed"] for one in run.lines("events.jsonl") if one["event"] == "plan"] == [False]),
    Setting("precision", {"--precision": "bf16"}, _stands("", "precision", "bf16"), changes=True),
    Setting("recomputing", {"--activation-checkpointing": "full"}, _calls("recomputed")),
    Setting("recomputing", {"--activation-checkpointing": "selective"}, _calls("recomputed")),
    Setting("tiles", {"--tile-tokens": "8"}, _calls("tiles")),
    Setting("batch", {"--tokens-per-batch": "400", "--global-batch": None, "--micro-batch": None},
            lambda run: all(line["tokens"] <= 400 for line in run.lines("metrics.jsonl") if "tokens" in line),
            changes=True),
    Setting("batch", {"--grad-accum": "2", "--global-batch": None}, _accumulates),
    Setting("targets", {"--train-on-prompt": ""}, _stands("data", "train_on_prompt", True), changes=True),
    Setting("best", {"--keep-best": "", "--eval-steps": "1"}, lambda run: run.has("best/*")),
    Setting("answers", {"--compute-metrics": "", "--eval-steps": "1"}, lambda run: run.has("step-1_*.jsonl")),
    Setting("answers", {"--score-before": "", "--no-score-before": None},
            lambda run: run.has("before_training.*.jsonl")),
    Setting("checkpoints", {"--save-steps": "1", "--keep": "1"},
            lambda run: len(list(run.folder.glob("checkpoints/step-*"))) == 1),
    Setting("export", {"--export-format": "adapter"}, lambda run: not run.has("model/*.safetensors")),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Pair:
    """Two settings, one of which at least divides the job."""

    one: Setting
    other: Setting
    ranks: int

    @property
    def both(self) -> tuple[Setting, Setting]:
        """The two settings."""
        return self.one, self.other

    @property
    def trained(self) -> str:
        """Text where nothing is wrong."""
        return "trained; losses not compared (dropout)" if any(one.draws for one in self.both) else "trained"

    @property
    def name(self) -> str:
        """Name for people."""
        return f"{self.one.name} + {self.other.name}" + (f" on {self.ranks}" if self.ranks > 2 else "")


def drawn(count: int, seed: int) -> list[Pair]:
    """A number of different pairs: half of them with a layout, half with a preset; a third of them on four ranks."""
    dice, found = random.Random(seed), dict[tuple[str, ...], Pair]()
    while len(found) < count:
        axis = ("layout", "preset")[len(found) % 2]
        one = dice.choice([one for one in SETTINGS if one.axis == axis])
        other = dice.choice([other for other in SETTINGS if other.axis != axis])
        ranks = max(one.ranks, other.ranks, dice.choice((2, 2, 4)))
        found.setdefault(tuple(sorted((one.name, other.name))), Pair(one, other, ranks))
    return list(found.values())


def words_of(settings: tuple[Setting, ...]) -> dict[str, str]:
    """BASE with these; an option that one of them takes away is away."""
    found: dict[str, str | None] = dict(BASE)
    for setting in settings:
        found |= {flag: value for flag, value in setting.words.items() if value is not None}
    away = {flag for setting in settings for flag, value in setting.words.items() if value is None}
    return {flag: value for flag, value in found.items() if value is not None and flag not in away}


def planned(options: Mapping[str, str], ranks: int, run_dir: Path) -> str:
    """Write the job; returns what finetune says where it refuses it."""
    from dsrun.cli import main as dsrun

    shutil.rmtree(run_dir, ignore_errors=True)
    words = {**options, "--gpus": str(ranks), "--output-dir": str(run_dir)}
    out, err = io.StringIO(), io.StringIO()
    given = [part for flag, value in words.items() for part in (flag, value) if part]
    with redirect_stdout(out), redirect_stderr(err), contextlib.suppress(SystemExit):
        dsrun(["finetune", MODEL, *given, "--force", "--dry-run", "--json"])  # ranks may share cores
    if not out.getvalue():
        return err.getvalue().strip()
    run_dir.mkdir(parents=True)
    (run_dir / "job.json").write_text(json.dumps(json.loads(out.getvalue())["job"]), encoding="utf-8")
    return ""


def train(folders: list[Path], ranks: int) -> None:
    """Start ranks once, and once more for each job that fails."""
    left = list(folders)
    while left:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks),
            str(Path(__file__).with_name("pairs_ranks.py")), *(str(one / "job.json") for one in left),
        ]  # fmt: skip
        ended = subprocess.run(command, text=True, capture_output=True, check=False, cwd=left[0].parent)
        if ended.returncode == 0:
            return
        reached = next(number for number, one in enumerate(left) if not (one / "seen.json").is_file())
        if not (left[reached] / "failed.txt").is_file():
            (left[reached] / "failed.txt").write_text(ended.stderr[-4000:], encoding="utf-8")
        left = left[reached + 1 :]


def reference_of(settings: tuple[Setting, ...], run: Run, folder: Path) -> Run | None:
    """One process with what of the settings doesn't divide a run, and the run's examples a step; None where that can't
    be. It is trained later."""
    left_out = {flag for one in settings if one.divides for flag in one.words if flag not in OF_THE_STEP}
    words = words_of(settings)
    words = {flag: value for flag, value in words.items() if flag not in {*left_out, "--grad-accum"}}
    words.setdefault("--preset", str(BASE["--preset"]))
    if "--tokens-per-batch" not in words:
        parallel, hosts = run.job["parallel"], run.job["hosts"]
        ranks = sum(len(host["devices"]) for host in hosts) // (
            parallel["tp"] * parallel["sp"] * parallel["pp"]
        )
        accumulation = 2 if _accumulates(run) else 4 // ranks
        words |= {"--global-batch": str(ranks * accumulation)}
    key = hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:12]
    found = Run(folder / f"one-{key}")
    return None if not found.has("job.json") and planned(words, 1, found.folder) else found


def apart(here: Run, there: Run) -> float:
    """The largest difference of two runs' losses."""
    return max(abs(one - other) for one, other in zip(here.losses, there.losses, strict=True))


def judged(pair: Pair, run: Run, folder: Path) -> Iterator[str]:
    """Faults of a trained pair, in words."""
    for setting in pair.both:
        if not setting.seen(run):
            yield f"{setting.name} is not to be seen"
    reference = reference_of(pair.both, run, folder)
    if reference is None:
        return
    if not reference.has("seen.json"):
        yield "one process fails with the same settings"
        return
    if any(setting.draws for setting in pair.both):
        return
    near = NEAR_BF16 if run.job["precision"] == "bf16" else NEAR
    if (found := apart(run, reference)) > near:
        yield f"losses are {found:.0e} off those of one process"
    for setting in pair.both:
        plain = reference_of(tuple(one for one in pair.both if one is not setting), run, folder)
        if (
            setting.changes
            and plain is not None
            and plain.has("seen.json")
            and apart(reference, plain) < OTHER
        ):
            yield f"{setting.name} changes nothing in one process"


def measured(pairs: list[Pair], folder: Path) -> dict[Pair, str]:
    """Outcome of each: "trained", "refused: ..." or what is wrong."""
    found: dict[Pair, str] = {}
    runs = {pair: Run(folder / str(number)) for number, pair in enumerate(pairs)}
    for pair, run in runs.items():
        if why := planned(words_of(pair.both), pair.ranks, run.folder):
            found[pair] = "refused: " + " ".join(why.replace("dsrun: ", "").split())
    trained = [pair for pair in pairs if pair not in found]
    references = {
        one.folder
        for pair in trained
        for some in (pair.both, *((one,) for one in pair.both))
        if (one := reference_of(some, runs[pair], folder))
    }
    train([one for one in sorted(references) if not Run(one).has("seen.json")], 1)
    for _, alike in itertools.groupby(sorted(trained, key=start_of), start_of):
        some = list(alike)
        train([runs[pair].folder for pair in some], some[0].ranks)
        for pair in some:
            if (failed := runs[pair].folder / "failed.txt").is_file():
                found[pair] = f"failed: {failed.read_text(encoding='utf-8').strip().splitlines()[-1]}"
            else:
                found[pair] = "; ".join(judged(pair, runs[pair], folder)) or pair.trained
            print(f"{pair.name}: {found[pair]}", flush=True)
    return {pair: found[pair] for pair in pairs}


def start_of(pair: Pair) -> tuple[object, ...]:
    """Pairs of which this is the same are trained by the same processes."""
    layout = [one.name for one in pair.both if one.axis == "layout"]
    fsdp = [one.name for one in pair.both if "fsdp" in one.name]
    return pair.ranks, str(layout), str(fsdp)


def main() -> None:
    """Draw, train, show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=15)
    parser.add_argument("--folder", help="where the runs lie")
    parser.add_argument("--plan", action="store_true", help="train nothing: what is refused, and what isn't")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(CHECKOUT)}")
    given = parser.parse_args()
    pairs = drawn(given.pairs, given.seed)
    with contextlib.nullcontext(given.folder) if given.folder else tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        own_models(folder / "lab")
        os.environ |= {
            "DSRUN_PATH": str(folder / "lab"), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(CHECKOUT),
        }  # fmt: skip
        sys.path.insert(0, str(CHECKOUT))
        from dsrun.cluster import extensions
        from dsrun.data.cache import cache_root

        os.environ.setdefault(extensions.VARIABLE, str(extensions.folder(os.environ, cache_root())))
        if given.plan:
            for number, pair in enumerate(pairs):
                print(
                    pair.name, "|", planned(words_of(pair.both), pair.ranks, folder / str(number)) or "starts"
                )
            return
        found = measured(pairs, folder)
    lines = [{"pair": pair.name, "found": text} for pair, text in found.items()]
    if given.write:
        RESULTS.write_text(json.dumps(lines, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for line in lines:
        print(f"{line['pair']}: {line['found'].splitlines()[0]}")


if __name__ == "__main__":
    main()
