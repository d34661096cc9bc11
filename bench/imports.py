"""Examples of other trainers through `dsrun import`: taken over whole, with a list, or refused; no silent loss.

    python bench/imports.py llama-factory=FOLDER/examples axolotl=FOLDER/examples [torchtune=FOLDER/configs] [--list]
    python bench/imports.py ... --output docs/reference/imports.md

The folders are clones of their repositories: nothing of them is checked in. A key is lost in silence where neither the
run file nor the refusal has its name; a job is wrong where its options are not dsrun's. Exit 1 for either.
"""

from __future__ import annotations

import datetime
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dsrun.errors import DsrunError
from dsrun.options import run_file
from dsrun.trainers import files, recognise, run_text

WHOLE, LISTED, REFUSED, NONE, BROKEN = "whole", "with a list", "refused by name", "no training", "BROKEN"


class Verdict(NamedTuple):
    """What became of an example."""

    kind: str
    lost: tuple[str, ...] = ()
    """Keys that neither the run file nor the refusal names."""
    text: str = ""
    reason: str = ""
    """Why it is refused, without what is special to the file."""
    sft: bool = False
    """Whether it says `stage: sft`, as LLaMA-Factory's do."""


def keys_of(value: object) -> set[str]:
    """The names of all keys, those in sections and lists too."""
    if isinstance(value, dict):
        return {str(key) for key in value} | {name for inner in value.values() for name in keys_of(inner)}
    return {name for inner in value for name in keys_of(inner)} if isinstance(value, list) else set()


def judge(path: Path, folder: Path) -> Verdict:
    """Import an example, and read back what was written. folder: for the run file."""
    try:
        source = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        source = {"": str(error)}
    keys = keys_of(source)
    sft = isinstance(source, dict) and source.get("stage") == "sft"
    try:
        draft = files.drafted(files.read(path))
    except DsrunError as error:
        text = str(error)
        known = isinstance(source, dict) and recognise.recognised(source) is not None
        reason = re.sub(r"^.*?(?=dsrun (does|trains|has) )", "", error.problems[0].what)
        return Verdict(REFUSED if known else NONE, () if text else tuple(keys), text, reason, sft)
    target = folder / "run.toml"
    text = run_text.run_text(draft, path.name, folder)
    lost = tuple(sorted(key for key in keys if not re.search(rf"(?<![\w-]){re.escape(key)}(?![\w-])", text)))
    target.write_text(text, encoding="utf-8")
    try:
        run_file.read(target)
    except DsrunError as error:
        return Verdict(BROKEN, lost, str(error), sft=sft)
    return Verdict(WHOLE if run_text.is_whole(draft) else LISTED, lost, text, sft=sft)


class Counts(NamedTuple):
    """What became of a folder's files."""

    name: str
    kinds: Counter[str]
    of_sft: Counter[str]
    """Those that say `stage: sft`."""
    reasons: Counter[str]
    """Keys that are listed as different or unknown -> in how many files."""
    refused: Counter[str]
    """Words of refusals -> how many files."""
    wrong: int


def counted(name: str, place: Path, *, listed: bool) -> Counts:
    """Import all files of a folder. listed: print what is refused."""
    kinds: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    of_sft: Counter[str] = Counter()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted(p for p in place.rglob("*") if p.suffix in (".yaml", ".yml")):
            verdict = judge(path, Path(folder))
            kinds[verdict.kind] += 1
            if verdict.sft:
                of_sft[verdict.kind] += 1
            if verdict.lost or verdict.kind == BROKEN:
                wrong += 1
                why = verdict.text if verdict.kind == BROKEN else ", ".join(verdict.lost)
                print(f"{path.relative_to(place)}: {verdict.kind}: {why}")
            if verdict.kind in (REFUSED, NONE):
                if verdict.kind == REFUSED:
                    refused[verdict.reason] += 1
                if listed:
                    print(f"{path.relative_to(place)}: {verdict.text.splitlines()[0]}")
            if verdict.kind == LISTED:
                head = "(?:differs in it|what does it do\\?)\n((?:# .*\n?)*)"
                for part in re.findall(head, verdict.text):
                    reasons.update(re.findall(r"^# ([\w.]+) =", part, re.MULTILINE))
    return Counts(name, kinds, of_sft, reasons, refused, wrong)


def page(counts: list[Counts]) -> str:
    """The page of the comparison."""
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    named = [(each.name, each.kinds, str(each.wrong)) for each in counts]
    named += [(f"{each.name}, `stage: sft`", each.of_sft, "") for each in counts if each.of_sft]
    rows = "".join(
        f"| {name} | {kinds.total()} | "
        f"{kinds[WHOLE]} | {kinds[LISTED]} | {kinds[REFUSED]} | {kinds[NONE]} | {wrong} |\n"
        for name, kinds, wrong in named
    )
    parts = "".join(
        f"\n## {each.name}\n\nListed most often: "
        + ", ".join(f"`{key}` {count}" for key, count in each.reasons.most_common(12))
        + ".\n\n| refused for | files |\n| --- | --- |\n"
        + "".join(f"| {why} | {count} |\n" for why, count in each.refused.most_common())
        for each in counts
    )
    return f"""# Examples of other trainers through `dsrun import`

Made by `python bench/imports.py` on {today}, of clones of their repositories, with every YAML in their folders of
examples: those of preferences, rewards, images and chats among them.

Whole: all arguments have a counterpart, or change nothing. With a list: the run file names those that differ or that
dsrun doesn't know. Refused by name: the message names the argument for which dsrun has no such job. Lost: files with a
key that is neither in the run file nor in the refusal, or whose run file dsrun doesn't read back.

| | files | whole | with a list | refused by name | no training | lost |
| --- | --- | --- | --- | --- | --- | --- |
{rows}{parts}"""


def main(words: list[str]) -> int:
    """Print the counts of each trainer, and what is wrong."""
    listed = "--list" in words
    output = words[words.index("--output") + 1] if "--output" in words else ""
    pairs = [word.partition("=") for word in words if "=" in word]
    counts = [counted(name, Path(place), listed=listed) for name, _, place in pairs]
    for each in counts:
        kinds = ", ".join(f"{count} {kind}" for kind, count in each.kinds.most_common())
        print(f"{each.name}: {each.kinds.total()} files: {kinds}")
        if listed:
            most = ", ".join(f"{key} {count}" for key, count in each.reasons.most_common(40))
            print(f"  most often listed: {most}")
    wrong = sum(each.wrong for each in counts)
    print(f"silent losses and wrong run files: {wrong}")
    if output:
        Path(output).write_text(page(counts), encoding="utf-8")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
