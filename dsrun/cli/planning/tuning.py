"""The parts of `dsrun tune`: candidates, trials and what is kept of them, the preset that comes of it."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsrun.cli.jobs.running import say
from dsrun.cli.output.results import print_json
from dsrun.cli.planning import plan_text as text
from dsrun.errors import DsrunError
from dsrun.files import write_atomic
from dsrun.options.commands import FinetuneOptions
from dsrun.options.declare import entries, flag_of
from dsrun.planner.analysis.tuning import Candidate, Trial, TrialOutcome, Tuned, measured, tune

if TYPE_CHECKING:
    from dsrun.config.presets.preset import Preset
    from dsrun.options.commands import TuneOptions

WARM_UP = 2
"""Steps of a trial that don't count: memory is found, and kernels are chosen."""
CHECKPOINTING = ("none", "selective", "full")
MOST_SPLITS = 5
"""Micro batches that are tried: the largest that divide a rank's share of a step, one after the other."""
AT_ONCE = 2
"""Candidates that are planned at the same time."""
OWN = (
    "max_steps",
    "output_dir",
    "dry_run",
    "resume",
    "detach",
    "output",
    "explain",
    "show_examples",
    "as_json",
)
"""Options of finetune that a trial has values of its own for."""
TRIALS, PRESET = "trials.jsonl", "tuned.toml"
OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|can't allocate memory|predicted to (run out|need)", re.IGNORECASE
)


@dataclasses.dataclass(frozen=True)
class Refused:
    """A candidate that finetune doesn't start, and why."""

    name: str
    reason: str


@dataclasses.dataclass(frozen=True)
class TuneResult:
    """A search that has ended."""

    words: tuple[str, ...]
    tuned: Tuned
    refused: tuple[Refused, ...]
    preset: Path | None
    """The file; None where every trial died."""


@dataclasses.dataclass(frozen=True)
class Search:
    """A search that is to be made. words: those of finetune."""

    words: tuple[str, ...]
    folder: Path
    knobs: Mapping[str, Sequence[str]]
    """Option of finetune -> the values to try."""
    trials: int
    steps: int
    preset: str
    """The preset that finetune would take by itself: of the result, where no other is tried."""

    def run(self) -> TuneResult:
        """Plan the candidates, try them, write the preset. Raises DsrunError where none can be planned."""
        self.folder.mkdir(parents=True, exist_ok=True)
        candidates, refused = self._candidates()
        if not candidates:
            raise DsrunError(
                "finetune starts none of the candidates: " + refused[0].reason, where="dsrun tune"
            )
        say(
            f"{len(candidates)} candidates, {len(refused)} refused; up to {self.trials} trials in {self.folder}"
        )
        tuned = tune(candidates, self._measure, trials=self.trials, steps=self.steps)
        preset = None
        if tuned.leader is not None:
            preset = self.folder / PRESET
            write_atomic(preset, preset_text(self, tuned), overwrite=True)
        return TuneResult(self.words, tuned, tuple(refused), preset)

    def _candidates(self) -> tuple[list[Candidate], list[Refused]]:
        """Every combination of the knobs' values that finetune would start, with what it predicts; the others."""
        choices = [
            dict(zip(self.knobs, values, strict=True)) for values in itertools.product(*self.knobs.values())
        ]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            planned = list(pool.map(self._planned, choices))
        return (
            [one for one in planned if isinstance(one, Candidate)],
            [one for one in planned if isinstance(one, Refused)],
        )

    def _planned(self, knobs: Mapping[str, str]) -> Candidate | Refused:
        name = name_of(knobs)
        done = finetune(self.words, knobs, {"dry_run": True, "as_json": True})
        if done.returncode:
            return Refused(name, last_line(done.stderr))
        prediction = json.loads(done.stdout)["job"]["prediction"] or {}
        seconds = prediction.get("step_seconds")
        if not seconds:
            return Refused(name, "its time can't be predicted: the planner doesn't know the network")
        key = "host_bytes" if prediction["device"] == "cpu" else "gpu_reserved_bytes"
        return Candidate(name, dict(knobs), float(seconds), float(prediction[key]))

    def _measure(self, candidate: Candidate, steps: int) -> TrialOutcome:
        """The outcome of a trial: an earlier one's, if it was made before, or of a run now."""
        key = self._key(candidate, steps)
        for line in self._earlier():
            if line.get("key") == key:
                return TrialOutcome(line["seconds"], line["reason"], line["out_of_memory"], line["noise"])
        say(f"trying {candidate.name}, {steps} steps ...")
        outcome = self._try(candidate, steps)
        done = {"key": key, "candidate": candidate.name, "knobs": dict(candidate.knobs), "steps": steps}
        with (self.folder / TRIALS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({**done, **dataclasses.asdict(outcome)}, ensure_ascii=False) + "\n")
        say(f"  {outcome.seconds:.3g} s a step" if outcome.seconds else f"  died: {outcome.reason}")
        return outcome

    def _earlier(self) -> Iterator[dict[str, Any]]:
        """The trials that were made before; a line that was cut short as the machine went down counts as none."""
        file = self.folder / TRIALS
        for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
            try:
                yield json.loads(line)
            except ValueError:
                continue

    def _key(self, candidate: Candidate, steps: int) -> str:
        content = json.dumps([self.words, dict(candidate.knobs), steps], ensure_ascii=False)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def _try(self, candidate: Candidate, steps: int) -> TrialOutcome:
        """Train for a few steps. The run's folder stays, with its log."""
        folder = self.folder / "trials" / f"{candidate.name}-{steps}-{self._key(candidate, steps)[:6]}"
        more: dict[str, Any] = {
            "max_steps": steps + WARM_UP, "output_dir": folder, "generate_rows": 0, "export_format": "none",
            "score_before": False, "warmup_steps": 0,
        }  # fmt: skip
        done = finetune(self.words, candidate.knobs, {**more, "as_json": True, "force": True})
        if done.returncode:
            whole = done.stderr + done.stdout
            return TrialOutcome(None, last_line(done.stderr), bool(OUT_OF_MEMORY.search(whole)))
        seconds = seconds_of(folder)
        middle = statistics.median(seconds)
        # 1.48 median absolute deviations are a standard deviation, and a mean of n has its n-th root less.
        spread = 1.48 * statistics.median(abs(one - middle) for one in seconds) / middle
        return TrialOutcome(middle, noise=round(spread / len(seconds) ** 0.5, 4))


def search_of(words: list[str], folder: Path, options: TuneOptions) -> Search:
    """The search that the command line asks for. Raises click.UsageError, and DsrunError where finetune refuses it."""
    said = said_by(words)
    for name in OWN:
        if name in said:
            raise click.UsageError(f"{flag_of(FinetuneOptions, name)} is the trials' own.")
    done = finetune(words, {}, {"dry_run": True, "as_json": True, "force": True})
    if done.returncode:
        raise DsrunError(f"finetune refuses it: {done.stderr.strip()}", where="dsrun tune")
    job = json.loads(done.stdout)["job"]
    knobs = {name: values for name, values in usual_knobs(job, said).items() if name not in said}
    for word in options.knobs:
        name, _, values = word.partition("=")
        field = name.strip("-").replace("-", "_")
        if field not in entries(FinetuneOptions) or not values:
            raise click.UsageError(
                f"--knob {word}: an option of finetune and its values, as attention=sdpa,flash."
            )
        knobs[field] = tuple(values.split(","))
    if not knobs:
        raise click.UsageError("Nothing is left to vary: what is said fixes all knobs.")
    return Search(tuple(words), folder, knobs, options.trials, options.trial_steps, job["preset"])


def usual_knobs(job: Mapping[str, Any], said: set[str]) -> dict[str, tuple[str, ...]]:
    """The knobs of any fine-tune: presets, micro batches of as many examples a step, activation checkpointing."""
    from dsrun.config.presets.preset import load
    from dsrun.jobs.assembly.planning import setups

    hosts = job["hosts"]
    presets = setups.all_presets(len(hosts))
    if job["accelerator"] == "cpu":
        presets = [name for name in presets if not _offloads(load(name))]
    micro = job["ds_config"]["train_micro_batch_size_per_gpu"]
    share = micro * job["ds_config"]["gradient_accumulation_steps"]
    splits = [size for size in range(share, 0, -1) if share % size == 0][:MOST_SPLITS]
    found = {
        "preset": tuple(presets),
        "micro_batch": tuple(map(str, splits)),
        "activation_checkpointing": CHECKPOINTING,
    }
    if said & {"grad_accum", "tokens_per_batch"}:
        del found["micro_batch"]
    return found


def _offloads(preset: Preset) -> bool:
    """Whether a preset moves anything to the host, which ranks on CPUs are on already."""
    zero = [file.config.get("zero_optimization", {}) for file in preset.chain]
    return any(name.startswith("offload_") for table in zero for name in table)


def said_by(words: Sequence[str]) -> set[str]:
    """The options of finetune among words, and those of a run file."""
    from dsrun.cli.parsing.run_file import is_run_file
    from dsrun.options import run_file

    flags = {
        flag: name
        for name, entry in entries(FinetuneOptions).items()
        for spelled in entry.flags
        for flag in spelled.split("/")
    }
    found = {flags[flag] for word in words if (flag := word.partition("=")[0]) in flags}
    for word in words:
        if is_run_file(word) and not word.startswith("-"):
            found |= set(run_file.read(Path(word)).values)
    return found


def finetune(
    words: Sequence[str], knobs: Mapping[str, Any], more: Mapping[str, Any]
) -> subprocess.CompletedProcess[str]:
    """Run `dsrun finetune` with these words and options to its end."""
    command = [sys.executable, "-m", "dsrun", "finetune", *words]
    for name, value in {**knobs, **more}.items():
        entry = entries(FinetuneOptions)[name]
        yes, _, no = entry.flags[-1].partition("/")
        if entry.kind is bool:
            on = str(value).lower() in ("true", "yes", "1")
            command += [yes] if on else [no] if no else []
        else:
            command += [yes, str(value)]
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


def seconds_of(folder: Path) -> list[float]:
    """Seconds of a trial's steps, without the first ones."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["seconds"] for line in lines if "seconds" in line and "loss" in line][WARM_UP:]


def name_of(knobs: Mapping[str, Any]) -> str:
    """A candidate's name: its values, as a folder may be called."""
    return re.sub(r"[^\w.+-]+", "_", "-".join(map(str, knobs.values())))


def last_line(stderr: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason was given"


# --- what comes of it -----------------------------------------------------------------------------------------------


def preset_text(search: Search, tuned: Tuned) -> str:
    """The preset of the leader, with the trials as its evidence."""
    assert tuned.leader is not None  # noqa: S101
    knobs = dict(tuned.leader.knobs)
    base = knobs.pop("preset", search.preset)
    words = [*search.words]
    if "--preset" in words:  # which the file extends
        place = words.index("--preset")
        del words[place : place + 2]
    lines = [
        "# Made by `dsrun tune`: the fastest of what was tried, with the trials.",
        f"#   dsrun finetune {shlex.join(words)} --preset {search.folder / PRESET}",
        "#",
        *(f"# {line}".rstrip() for line in table(tuned)),
        "",
        f"summary = {json.dumps(f'tuned: {tuned.leader.name}, {tuned.seconds:.3g} s a step')}",
    ]
    lines.append(f"extends = {json.dumps(base)}")
    if knobs:
        lines += ["", "[defaults]", *(f"{name} = {_toml(name, value)}" for name, value in knobs.items())]
    return "\n".join([*lines, ""])


def _toml(name: str, value: str) -> str:
    """An option's value as TOML: a number where the option has one."""
    kind = entries(FinetuneOptions)[name].kind
    return value.lower() if kind in (int, float, bool) else json.dumps(value)


def table(tuned: Tuned) -> list[str]:
    """The candidates that were tried, the fastest first, a line each; those that died last."""
    seconds = measured(tuned.trials)
    by_name: dict[str, list[Trial]] = {}
    for trial in tuned.trials:
        by_name.setdefault(trial.candidate.name, []).append(trial)
    names = sorted(by_name, key=lambda name: seconds.get(name, float("inf")))
    wide = max(map(len, names), default=0)
    lines = [f"{'candidate':<{wide}}  s/step  planned  steps"]
    for name in names:
        last = by_name[name][-1]
        steps = " + ".join(str(trial.steps) for trial in by_name[name])
        took = f"{seconds[name]:6.3g}" if last.outcome.seconds is not None else "  died"
        why = "" if last.outcome.seconds is not None else f"  {last.outcome.reason}"
        lines.append(f"{name:<{wide}}  {took}  {last.candidate.seconds:7.3g}  {steps}{why}")
    return lines


def report(found: TuneResult, *, as_json: bool) -> bool:
    """Print the table and the preset, or all as JSON. Returns whether there is a preset."""
    if as_json:
        print_json("tune", value_of(found))
        return found.preset is not None
    for line in table(found.tuned):
        click.echo(line)
    for refused in found.refused:
        text.say(f"note: {refused.name} was not tried: {refused.reason}", err=True)
    if found.preset is None:
        click.echo("Every trial died.")
        return False
    sure = "surely the fastest" if found.tuned.sure else "the fastest found; --trials for more"
    click.echo(f"{found.tuned.leader.name if found.tuned.leader else ''}: {sure}")
    text.with_finetune(f"--preset {found.preset}")
    return True


def value_of(found: TuneResult) -> dict[str, Any]:
    """The search for machines."""
    tuned = found.tuned
    return {
        "preset": None if found.preset is None else str(found.preset),
        "knobs": dict(tuned.leader.knobs) if tuned.leader else {},
        "seconds_per_step": tuned.seconds if tuned.leader else None,
        "sure": tuned.sure,
        "trials": [
            {
                "candidate": trial.candidate.name, "knobs": dict(trial.candidate.knobs), "steps": trial.steps,
                "planned_seconds": trial.candidate.seconds, **dataclasses.asdict(trial.outcome),
            }
            for trial in tuned.trials
        ],
        "refused": [dataclasses.asdict(one) for one in found.refused],
    }  # fmt: skip
