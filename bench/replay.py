"""What changed between releases of DeepSpeed, found in their code, beside what the releases themselves do: a page.

    python bench/replay.py --sources DIR [--first 0.15.0] [--releases 0.15.4,...] [--corpus DIR] [--drawn 500]
        [--output PAGE]

Every release from the first on reads the same configs with its own DeepSpeedConfig: each key of any of these releases
by itself, at its bounds, its choices and values that are none; real configs; drawn ones. What one release takes and the
next refuses, or the other way round, is a change. It counts as found where dsrun says the same of both releases, once
with the data that ship, and once blind: with what is known of the older release and the code of the newer one alone.
A change that dsrun says and DeepSpeed doesn't show is wrong. Defaults are compared as DeepSpeedConfig holds them.
--sources is where the releases' code is written to, from the cache of tools/releases.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "bench")]

from oracle import draw, reading, releases  # noqa: E402

from dsrun.config import tree  # noqa: E402
from dsrun.config.rules import Setting, run  # noqa: E402
from dsrun.config.rules.frame import REFUSED  # noqa: E402
from dsrun.config.schemas import schema  # noqa: E402
from dsrun.config.schemas.schema import PYDANTIC_1, Schema  # noqa: E402
from dsrun.releases.config_changes import holding  # noqa: E402
from dsrun.releases.packed import package  # noqa: E402
from tools.releases.config_facts import CodeReader, release_source  # noqa: E402
from tools.releases.fetch import Cache  # noqa: E402
from tools.releases.packages import PACKAGES  # noqa: E402
from tools.schemas.generate import COMMENTS, OVERLAY, nodes, with_neighbours  # noqa: E402

Config = dict[str, Any]
Changes = dict[tuple[str, str], set[int]]
MOST_VALUES = 14
"""Values of each key that are tried."""
FEW_VALUES = 3
"""The same of a key that is one and the same in all releases."""
SAMPLE = 300
"""Configs that no change shows, which dsrun is asked about for each pair of releases: changes that it makes up."""
ODD: tuple[Any, ...] = (None, True, False, 0, -1, 1, 2, 0.5, "x", "auto", {}, [])


@dataclass(frozen=True)
class Probe:
    """A config that every release reads. key: the one that it is about; empty for whole configs."""

    key: str
    config: Config


@dataclass
class Step:
    """A release and the next: what DeepSpeed shows, and what dsrun says."""

    before: str
    after: str
    shown: set[tuple[str, str]] = field(default_factory=set)
    """(Key, stops or taken) of the changes that DeepSpeed shows; whole configs by their number."""
    found: set[tuple[str, str]] = field(default_factory=set)
    blind: set[tuple[str, str]] = field(default_factory=set)
    wrong: set[tuple[str, str]] = field(default_factory=set)
    wrong_blind: set[tuple[str, str]] = field(default_factory=set)
    beyond: int = 0
    """Configs of which dsrun says a true change, while both releases refuse them, or both take them."""
    examples: dict[tuple[str, str], Config] = field(default_factory=dict)
    """A change that is not found, or wrong -> the first config that shows it."""
    defaults: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    defaults_found: set[str] = field(default_factory=set)


# --- configs --------------------------------------------------------------------------------------------------------


def probes(first: str, drawn: int, corpus: Path | None) -> list[Probe]:
    """The configs, each once."""
    found = [*single_keys(first)]
    if corpus:
        files = sorted((corpus / "configs").glob("*.json"))
        found += [Probe("", config) for file in files if isinstance(config := _read(file), dict)]
    rng = Random(1)
    found += [Probe("", draw.draw(rng, world_sizes=(1,)).config) for _ in range(drawn)]
    return [*{json.dumps(probe.config, sort_keys=True): probe for probe in found}.values()]


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return None


def single_keys(first: str) -> Iterator[Probe]:
    """Every key that a release from the first on has, by itself: at several values where it is not the same in all."""
    counts = sum(release >= schema.numbers(first) for release in schema.releases())
    for path, (known, had) in keys_of_any(first).items():
        most = MOST_VALUES if len(known) > 1 or had < counts else FEW_VALUES
        node = known[-1]
        choices = [
            choice for one in known for branch in one.get("anyOf", [one]) for choice in branch.get("enum", ())
        ]
        edges = [edge for one in known for edge in draw.edges(one)[:3]]
        values = [
            *(one.get("default") for one in known),
            draw.fitting(Random(path), node),
            *edges,
            *choices,
            *ODD,
        ]
        for value in [*{json.dumps(value): value for value in values}.values()][: most + len(choices)]:
            config: Config = {} if path in draw.BATCH else {draw.BATCH[1]: 1}
            if name := draw.TYPED.get(path.partition(".")[0]):
                tree.put(config, name[0], name[1])
            tree.put(config, path, copy.deepcopy(value))
            yield Probe(path, config)


def keys_of_any(first: str) -> dict[str, tuple[list[Any], int]]:
    """Key -> its different nodes over the releases, and how many of them have it."""
    found: dict[str, tuple[list[Any], int]] = {}
    for release in schema.releases():
        if release >= schema.numbers(first):
            for path, node in schema.load(release).nodes.items():
                if not path.startswith(
                    ("optimizer.params.", "scheduler.params.", "inference", "msamp", "$schema")
                ):
                    known, had = found.get(path, ([], 0))
                    same = any(_rule_of(node) == _rule_of(other) for other in known)
                    found[path] = (known if same else [*known, node], had + 1)
    return found


def _rule_of(node: Any) -> Any:
    """A node without its words and what lies below it."""
    return {
        key: value for key, value in node.items() if key not in ("description", "properties", "x-no-effect")
    }


# --- DeepSpeed's answers --------------------------------------------------------------------------------------------


def answer(release: str, place: Path, configs: list[Config], kept: Path) -> None:
    """In a process of its own: let a release read the configs, and keep which it took, and the defaults."""
    os.environ.update(releases.environment(place))
    os.chdir(place)
    sys.path.insert(0, str(place))
    reading.load()
    import deepspeed

    if deepspeed.__version__ != release:
        raise RuntimeError(f"imported {deepspeed.__version__}")
    taken = [reading.read(config, 1).kind == reading.ACCEPTED for config in configs]
    kept.write_text(json.dumps({"taken": taken, "defaults": defaults()}), encoding="utf-8")


def defaults() -> dict[str, Any]:
    """What DeepSpeedConfig holds of a config that says nothing, by names."""
    from deepspeed.runtime.config import DeepSpeedConfig

    found: dict[str, Any] = {}

    def walk(value: Any, path: str, depth: int) -> None:
        if hasattr(value, "model_dump"):
            value = {name: getattr(value, name) for name in type(value).model_fields}
        elif hasattr(value, "__dict__") and not isinstance(value, type) and depth < 4:
            value = vars(value)
        if isinstance(value, dict) and depth < 4:
            for name, item in value.items():
                walk(item, f"{path}.{name}" if path else str(name), depth + 1)
        elif isinstance(value, (int, float, str, bool, type(None))):
            found[path] = value

    walk(DeepSpeedConfig({"train_batch_size": 1}), "", 0)
    walk(
        DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": SECTIONS}).zero_config,
        "zero_optimization",
        0,
    )
    return found


SECTIONS = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


def ask(release: str, folder: Path, configs: list[Config]) -> dict[str, Any]:
    """A release's answers, kept for the next time. Raises RuntimeError where it can't be imported.

    torch is imported once, before the processes part: that is most of what an import of DeepSpeed takes.
    """
    import torch  # noqa: F401

    place = releases.unpacked(release, folder)
    digest = hashlib.sha256(json.dumps(configs).encode()).hexdigest()[:12]
    kept = folder / f"answers-{release}-{digest}.json"
    if not kept.is_file():
        process = multiprocessing.get_context("fork").Process(
            target=answer, args=(release, place, configs, kept)
        )
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError("its process failed; what it says is above")
    answers: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    return answers


# --- what dsrun says ------------------------------------------------------------------------------------------------


def verdicts(release: str, configs: list[Config]) -> list[bool]:
    """Whether dsrun says that a release takes each config."""
    return [_takes(config, schema.numbers(release)) for config in configs]


def _takes(config: Config, version: schema.Version) -> bool:
    setting = Setting(version=version, world_size=1, device="cpu")
    return not any(finding.effect == REFUSED for finding in run(copy.deepcopy(config), setting))


def blind_verdicts(before: str, after: str, configs: list[Config]) -> list[bool]:
    """The same of a release with what is known of the one before, and its own code."""
    known, load = blind_schema(before, after), schema.load
    schema.load = lambda _version=None: known  # type: ignore[assignment]
    try:
        return [_takes(config, known.version) for config in configs]
    finally:
        schema.load = load


def blind_schema(before: str, after: str) -> Schema:
    """The schema that the generator makes of a release's code, with the overlay as the release before needs it."""
    old = schema.load(schema.numbers(before))
    had = set(dict(nodes(old.root)))
    overlay = with_neighbours(json.loads(OVERLAY.read_text(encoding="utf-8")), old.version)
    source = release_source(Cache(PACKAGES["deepspeed"]), after)
    reader = CodeReader(source, _without(overlay, had, ""), {})
    reader.overlay = _without(overlay, had, "")
    properties = reader.judged()["properties"]
    source.forget()
    known = dict(nodes({"properties": properties}))
    gone = [path for path in had if path not in known and path != "$schema"]
    removed = {**old.root["x-removed"], **dict.fromkeys([*gone, *reader.refused], "Remove it.")}
    root = {
        "type": "object",
        "additionalProperties": False,
        "patternProperties": COMMENTS,
        "properties": properties,
        "x-removed": removed,
        "x-refused": reader.refused,
        "x-renamed": {},
        "x-added-later": {},
        **({"x-converts": PYDANTIC_1} if source.converts_as_1 else {}),
    }
    return Schema(root, old.version)


def _without(entry: Any, had: set[str], path: str) -> Any:
    """The overlay without the keys that a release hasn't got."""
    if not isinstance(entry, dict):
        return entry
    found = {}
    for key, value in entry.items():
        if key == "properties":
            inner = {name: (child, f"{path}.{name}" if path else name) for name, child in value.items()}
            found[key] = {name: _without(child, had, at) for name, (child, at) in inner.items() if at in had}
        elif key in ("items", "additionalProperties"):
            found[key] = _without(value, had, path + ("[]" if key == "items" else ".*"))
        else:
            found[key] = value
    return found


# --- comparing ------------------------------------------------------------------------------------------------------


def names(chosen: list[Probe], differing: Iterable[int], takes: Mapping[int, bool]) -> Changes:
    """(Key or number, direction) -> the configs that show it."""
    found: Changes = defaultdict(set)
    for number in differing:
        name = chosen[number].key or f"config {number}"
        found[name, "taken" if takes[number] else "stops"].add(number)
    return found


def compared(step: Step, chosen: list[Probe], old: list[bool], new: list[bool]) -> Step:
    """A step filled in. A change is found where dsrun says of every config that shows it what DeepSpeed does."""
    flipped = [number for number in range(len(chosen)) if old[number] != new[number]]
    rest = [number for number in range(len(chosen)) if old[number] == new[number]]
    looked = [*flipped, *Random(step.after).sample(rest, min(SAMPLE, len(rest)))]
    configs = [chosen[number].config for number in looked]
    said, after, blind = (
        dict(zip(looked, answers, strict=True))
        for answers in (
            verdicts(step.before, configs),
            verdicts(step.after, configs),
            blind_verdicts(step.before, step.after, configs),
        )
    )
    shown = names(chosen, flipped, dict(enumerate(new)))
    step.shown = set(shown)
    for change, numbers in shown.items():
        missed = [n for n in sorted(numbers) if said[n] != old[n] or after[n] != new[n]]
        missed_blind = [n for n in sorted(numbers) if blind[n] != new[n]]
        if not missed:
            step.found.add(change)
        if not missed_blind:
            step.blind.add(change)
        for number in [*missed, *missed_blind][:1]:
            step.examples[change] = chosen[number].config
    for wrong, judged in ((step.wrong, after), (step.wrong_blind, blind)):
        flips = [n for n in looked if said[n] != judged[n] and old[n] == new[n]]
        for change, numbers in names(chosen, flips, judged).items():
            if change not in shown:
                wrong.add(change)
                step.examples.setdefault(change, chosen[min(numbers)].config)
            else:
                step.beyond += len(numbers)
    return step


def compare_defaults(step: Step, old: dict[str, Any], new: dict[str, Any]) -> None:
    """The defaults that DeepSpeedConfig holds in both releases and that differ, and those that the data have."""
    step.defaults = {name: (old[name], new[name]) for name in old if name in new and old[name] != new[name]}
    data = package("deepspeed")
    told = [
        {fact.place: fact.text for fact in holding(data, release) if fact.kind == "default"}
        for release in (step.before, step.after)
    ]
    changed = {path for path in told[0] if path in told[1] and told[0][path] != told[1][path]}
    for name, values in step.defaults.items():
        words = [json.dumps(value) for value in values]
        same = [
            path for path in changed
            if _same_name(path, name) and all(_equal(told[i][path], words[i]) for i in (0, 1))
        ]  # fmt: skip
        if same:
            step.defaults_found.add(name)


def _same_name(path: str, name: str) -> bool:
    return path.rpartition(".")[2] == name.rpartition(".")[2]


def _equal(one: str, other: str) -> bool:
    return bool(json.loads(one) == json.loads(other))


# --- the page -------------------------------------------------------------------------------------------------------


def share(part: int, whole: int) -> str:
    return f"{part} of {whole}" + (f" ({100 * part / whole:.0f} %)" if whole else "")


def page(steps: list[Step], chosen: list[Probe], unable: dict[str, str], seconds: float) -> str:
    """The page for docs/reference."""
    shown, found, blind, wrong, wrong_blind = (
        sum(len(getattr(step, name)) for step in steps)
        for name in ("shown", "found", "blind", "wrong", "wrong_blind")
    )
    defaults = sum(len(step.defaults) for step in steps)
    defaults_found = sum(len(step.defaults_found) for step in steps)
    keys = sum(1 for probe in chosen if probe.key)
    lines = [
        "# Releases of DeepSpeed, replayed",
        "",
        f"Made by `python bench/replay.py` on {date.today()}: {steps[0].before} to {steps[-1].after}, each release's "
        f"own DeepSpeedConfig on one CPU rank, {keys:,} configs of one key and {len(chosen) - keys:,} whole ones, in "
        f"{seconds / 60:.0f} minutes.",
        "",
        "A change is a key (or a whole config) that one release takes and the next refuses, or the other way round. It "
        "is found where dsrun says of every config that shows it, for both releases, what DeepSpeed does. *Blind* "
        "judges the newer release with what was known of the older one (overlay, rules) and the newer one's code "
        "alone. *Wrong* is a change that dsrun says and DeepSpeed doesn't show, among these and "
        f"{SAMPLE} configs of each pair that show none.",
        "",
        f"- changes found: **{share(found, shown)}**, wrong: **{wrong}**",
        f"- blind: **{share(blind, shown)}**, wrong: **{wrong_blind}**",
        f"- configs for which a true change is said where both stop, or neither: {sum(s.beyond for s in steps)}",
        f"- changed defaults found: **{share(defaults_found, defaults)}**",
        "",
        "| from | to | changes | found | blind | wrong | wrong, blind | defaults | found |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for step in steps:
        cells = [
            len(step.shown), len(step.found), len(step.blind), len(step.wrong), len(step.wrong_blind),
            len(step.defaults), len(step.defaults_found),
        ]  # fmt: skip
        lines.append(f"| {step.before} | {step.after} | {' | '.join(map(str, cells))} |")
    lines += ["", "## Not found, or wrong", ""]
    for step in steps:
        for label, changes in (
            ("not found", step.shown - step.found),
            ("wrong", step.wrong),
            ("not found blind", step.shown - step.blind),
            ("wrong blind", step.wrong_blind),
        ):
            if changes:
                lines.append(f"- {step.before} to {step.after}, {label}:")
                lines += [
                    f"  - `{key}` {way}: `{json.dumps(step.examples[key, way])[:300]}`"
                    for key, way in sorted(changes)
                ]
        if lost := step.defaults.keys() - step.defaults_found:
            told = ", ".join(
                f"`{name}` {step.defaults[name][0]!r} to {step.defaults[name][1]!r}" for name in sorted(lost)
            )
            lines.append(f"- {step.before} to {step.after}, defaults not found: {told}")
    lines += [f"- {release}: not run ({reason})" for release, reason in unable.items()]
    return "\n".join(lines) + "\n"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sources", type=Path)
    parser.add_argument("--first", default="0.15.0")
    parser.add_argument("--releases", default="", help="only these, from the first on: 0.15.4,0.16.0")
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--drawn", type=int, default=500)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def replayed(given: argparse.Namespace, folder: Path) -> tuple[list[Step], list[Probe], dict[str, str]]:
    """The steps, the configs, and the releases that can't be run with the reason."""
    chosen = probes(given.first, given.drawn, given.corpus)
    configs = [probe.config for probe in chosen]
    wanted = [release for release in schema.releases() if release >= schema.numbers(given.first)]
    if given.releases:
        named = set(map(schema.numbers, given.releases.split(",")))
        wanted = [release for release in wanted if release in named]
    answers: dict[str, dict[str, Any]] = {}
    unable: dict[str, str] = {}
    for release in map(schema.name_of, wanted):
        began = time.perf_counter()
        try:
            answers[release] = ask(release, folder, configs)
        except RuntimeError as error:
            unable[release] = str(error)
        print(f"{release}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    steps = []
    for before, after in pairwise(answers):
        step = compared(Step(before, after), chosen, answers[before]["taken"], answers[after]["taken"])
        compare_defaults(step, answers[before]["defaults"], answers[after]["defaults"])
        print(f"{before} to {after}: {len(step.found)} of {len(step.shown)}", file=sys.stderr)
        steps.append(step)
    return steps, chosen, unable


def main() -> None:
    given = options()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        steps, chosen, unable = replayed(given, given.sources or Path(scratch))
    text = page(steps, chosen, unable, time.perf_counter() - began)
    print(text)
    if given.output:
        given.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    os.nice(5)
    main()
