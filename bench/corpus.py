"""Findings of `dsrun validate` in a collection of real configs: a page for docs/, with the counts of an earlier run.

    python bench/corpus.py FOLDER [--before COUNTS] [--write] [--output PAGE]

FOLDER has an index.json as tests/config/test_corpus.py describes it, with the repository and path of each file.
A file is good where DeepSpeedConfig reads it and no fault was found in it by hand. --write puts this run's counts
where the next one finds them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from oracle import reading  # noqa: E402

from dsrun.config.rules import SEVERITIES, Setting  # noqa: E402
from dsrun.config.validation.validate import (  # noqa: E402
    LocatedFinding,
    RuleSelection,
    ValidationResult,
    apply_fixes,
    validate,
)

COUNTS = CHECKOUT / "bench/results/validate-corpus-before.json"
FAULTS = (
    "silently_ignored",
    "engine_issues",
    "removed_in_0_19",
    "auto_not_filled_by_hf",
    "no_effect",
    "deprecated",
)
MEASURED = {
    "DS219": "fails in the first backward pass",
    "DS250": "starts from other weights than the model's",
    "DS306": "the loss isn't scaled: gradients are lost",
    "DS401": "refused by deepspeed.initialize",
    "DS408": "diverges",
    "DS713": "every operation waits for the GPU",
}
"""Rules whose findings are faults by measurement, whatever a reader of the file saw."""

READ = {
    "DS012": "names a key that DeepSpeed reads and never uses",
    "DS203": "the run ends without a model file",
    "DS205": "names a key that stage 3 never reads",
    "DS206": "names the keys that stage 0 ignores",
    "DS207": "an old form, at which accelerate stops",
    "DS219": "a measured fault",
    "DS250": "a measured fault",
    "DS258": "accumulates over four micro batches, where the file says one",
    "DS306": "a measured fault",
    "DS401": "a measured fault",
    "DS408": "a measured fault",
    "DS417": "weight decay is another than the file's optimizer has elsewhere",
    "DS713": "a measured fault",
    "DS730": "names a section that HF Trainer ignores, and any code that doesn't call for it",
    "DS731": "the call that the section is for fails",
}
"""What somebody who read each line that good files get found it worth."""

DEFAULT = RuleSelection(level="warning")


@dataclass
class Judged:
    """A file of the collection, and what is said of it."""

    case: dict[str, Any]
    result: ValidationResult
    fixed: dict[bool, ValidationResult] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return self.case["ds_accepts"] and not any(self.case[fault] for fault in FAULTS)

    @property
    def shown(self) -> list[LocatedFinding]:
        """Findings of the default view."""
        return [found for found in self.result.findings if found.finding.severity != "note"]


def judge(folder: Path) -> list[Judged]:
    """Every file, as somebody who names no option would."""
    judged = []
    for case in json.loads((folder / "index.json").read_text(encoding="utf-8")):
        data = (folder / case["file"]).read_bytes()
        one = Judged(case, validate(data, case["file"], Setting()))
        setting = Setting(world_size=case["world_size_used"])
        default = validate(data, case["file"], setting, selection=DEFAULT)
        one.fixed = {
            unsafe: apply_fixes(default, setting, DEFAULT, unsafe=unsafe) for unsafe in (False, True)
        }
        judged.append(one)
    return judged


def counted(judged: list[Judged]) -> dict[str, list[int]]:
    """Rule and severity -> (good files, other files) that have it."""
    files: dict[str, list[set[str]]] = defaultdict(lambda: [set(), set()])
    for one in judged:
        for found in one.result.findings:
            key = f"{found.finding.rule} {found.finding.severity}"
            files[key][not one.good].add(one.case["file"])
    return {key: [len(good), len(others)] for key, (good, others) in sorted(files.items())}


def quiet(judged: list[Judged]) -> list[str]:
    """Number of good files with any finding."""
    good = [one for one in judged if one.good]
    faulty = [one for one in good if any(found.finding.rule in MEASURED for found in one.shown)]
    real = [one for one in good if one not in faulty]
    used = [one for one in real if "tests/" not in one.case["path"]]

    def row(name: str, some: list[Judged]) -> str:
        at = [
            sum(any(_at(found, level) for found in one.result.findings) for one in some)
            for level in SEVERITIES
        ]
        shares = " | ".join(f"{count} ({count / len(some):.0%})" for count in at)
        return f"| {name} | {len(some)} | {shares} |"

    return [
        "| files | of them | `--level error` | `--level warning`, the default | `--level note` |",
        "| --- | --- | --- | --- | --- |",
        row("good", good),
        row("without those that a measured fault was found in", real),
        row("and without the tests of a project", used),
        row("others", [one for one in judged if not one.good]),
        "",
        f"Wanted: at most one in five good files. A file with a fault that was measured isn't good: {_told(real)}. "
        f"Where it is counted as good, {_told(good)}.",
        "",
        "Measured faults: " + "; ".join(f"{rule} ({why})" for rule, why in MEASURED.items()) + ".",
    ]


def _told(some: list[Judged]) -> str:
    told = sum(bool(one.shown) for one in some)
    return f"{told} of {len(some)} get something ({told / len(some):.0%})"


def read_by_eye(judged: list[Judged]) -> list[str]:
    """Each rule that good files meet by default: in how many, and why it is shown."""
    files: dict[str, set[str]] = defaultdict(set)
    for one in judged:
        for found in one.shown if one.good else ():
            files[found.finding.rule].add(one.case["file"])
    rows = [
        f"| {rule} | {len(names)} | {READ.get(rule, 'not read yet')} |"
        for rule, names in sorted(files.items())
    ]
    return ["| rule | good files | why it is worth a line |", "| --- | --- | --- |", *rows]


def _at(found: LocatedFinding, level: str) -> bool:
    return SEVERITIES.index(found.finding.severity) <= SEVERITIES.index(level)


def notes(counts: dict[str, list[int]], before: dict[str, list[int]]) -> list[str]:
    """The table of both runs. A dash: the rule has no such finding."""
    lines = [
        "| rule | severity | good files before | now | others before | now |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for key in sorted({*counts, *before}):
        old, new = before.get(key), counts.get(key)
        cells = [str(each[place]) if each else "-" for place in (0, 1) for each in (old, new)]
        lines.append(f"| {' | '.join([*key.split(), *cells])} |")
    return lines


def moved(counts: dict[str, list[int]]) -> list[str]:
    lines = ["| rule | good files | others |", "| --- | --- | --- |"]
    return lines + [
        f"| {key.split()[0]} | {good} | {others} |"
        for key, (good, others) in counts.items()
        if key.endswith("note")
    ]


def repaired(judged: list[Judged]) -> str:
    """How many of the files that DeepSpeed refuses it reads after the fixes; "auto" is filled in by "
    "nobody here."""
    reading.load()

    def reads(one: Judged, result: ValidationResult) -> bool:
        if result.document is None:
            return False
        if result.target == "deepspeed":
            return reading.read(result.document.value, one.case["world_size_used"]).kind == reading.ACCEPTED
        return not any(found.finding.effect == "refused" for found in result.findings)

    refused = [one for one in judged if not one.case["ds_accepts"] and not reads(one, one.result)]
    safe, all_ = (sum(reads(one, one.fixed[unsafe]) for one in refused) for unsafe in (False, True))
    return (
        f"Of {len(refused)} files that are refused, `--fix` repairs {safe} and `--fix --unsafe-fixes` "
        f"{all_}: DeepSpeedConfig then reads "
        'them (those with "auto": no finding says that it would stop).'
    )


def lines_of(one: Judged) -> list[str]:
    """A file's lines: rule and key, several keys of one rule together."""
    keys: dict[str, list[str]] = defaultdict(list)
    for found in one.shown:
        keys[found.finding.rule].append(f"`{found.path or '$'}`")
    return [f"{rule} {', '.join(dict.fromkeys(paths))}" for rule, paths in keys.items()]


def page(judged: list[Judged], before: dict[str, list[int]]) -> str:
    repositories = {one.case["repo"] for one in judged}
    counts = counted(judged)
    told = [one for one in judged if one.shown]
    lines = [
        "# dsrun validate on real files",
        "",
        f"Made by `python bench/corpus.py FOLDER` on {date.today()}: {len(judged)} `deepspeed.json` "
        f"files of {len(repositories)} public "
        "repositories, with no option but the file's name. *Good* is what DeepSpeedConfig 0.19.8 "
        "reads and no fault was found in by hand.",
        "",
        "## How many get anything",
        "",
        *quiet(judged),
        "",
        "## What good files get by default",
        "",
        "Every such line was read, with the file beside it. A rule would be a note if it named no ignored key "
        "and nothing in the training or in what it leaves behind were another than the file says; none of these is.",
        "",
        *read_by_eye(judged),
        "",
        "## Shown with `--level note` only",
        "",
        "None of them names a key that DeepSpeed ignores, but for `steps_per_print` under accelerate "
        "(DS717), sections that are "
        "switched off by name (DS014) and what an mpu may read (DS268); none a value that "
        "makes training another "
        "than it says: DS109 is a warning beside a train_batch_size, DS417 where the decay shows. "
        "Files that have the note:",
        "",
        *moved(counts),
        "",
        "## Each rule, before and now",
        "",
        "Files that have a finding, before there were levels and now.",
        "",
        *notes(counts, before),
        "",
        "## Fixes",
        "",
        repaired(judged),
        "",
        "## What each file gets by default",
        "",
        f"{len(told)} files get something; the other {len(judged) - len(told)} get nothing. Good ones "
        "are marked.",
        "",
        "| file | | findings |",
        "| --- | --- | --- |",
        *(
            f"| {one.case['repo']}: {one.case['path']} | {'good' if one.good else ''} | "
            f"{'<br>'.join(lines_of(one))} |"
            for one in told
        ),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--before", type=Path, default=COUNTS)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    judged = judge(given.folder)
    before = json.loads(given.before.read_text(encoding="utf-8")) if given.before.exists() else {}
    text = page(judged, before)
    if given.output:
        given.output.write_text(text, encoding="utf-8")
    else:
        print(text)
    if given.write:
        COUNTS.write_text(json.dumps(counted(judged), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
