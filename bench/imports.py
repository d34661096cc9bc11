"""Examples of other trainers through `dsrun import`: taken over whole, with a list, or refused; no silent loss.

    python bench/imports.py llama-factory=FOLDER/examples axolotl=FOLDER/examples [torchtune=FOLDER/configs] [--list]

The folders are clones of their repositories: nothing of them is checked in. A key is lost in silence where neither the
run file nor the refusal has its name; a job is wrong where its options are not dsrun's. Exit 1 for either.
"""

from __future__ import annotations

import re
import sys
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
    try:
        draft = files.drafted(files.read(path))
    except DsrunError as error:
        text = str(error)
        known = isinstance(source, dict) and recognise.recognised(source) is not None
        return Verdict(REFUSED if known else NONE, () if text else tuple(keys), text)
    target = folder / "run.toml"
    text = run_text.run_text(draft, path.name, folder)
    lost = tuple(sorted(key for key in keys if not re.search(rf"(?<![\w-]){re.escape(key)}(?![\w-])", text)))
    target.write_text(text, encoding="utf-8")
    try:
        run_file.read(target)
    except DsrunError as error:
        return Verdict(BROKEN, lost, str(error))
    return Verdict(WHOLE if run_text.is_whole(draft) else LISTED, lost, text)


def main(words: list[str]) -> int:
    """Print the counts of each trainer, and what is wrong."""
    import tempfile

    listed, wrong = "--list" in words, 0
    with tempfile.TemporaryDirectory() as folder:
        for word in words:
            name, equals, place = word.partition("=")
            if not equals:
                continue
            counts: Counter[str] = Counter()
            reasons: Counter[str] = Counter()
            for path in sorted(p for p in Path(place).rglob("*") if p.suffix in (".yaml", ".yml")):
                verdict = judge(path, Path(folder))
                counts[verdict.kind] += 1
                if verdict.lost or verdict.kind == BROKEN:
                    wrong += 1
                    why = verdict.text if verdict.kind == BROKEN else ", ".join(verdict.lost)
                    print(f"{path.relative_to(place)}: {verdict.kind}: {why}")
                if listed and verdict.kind in (REFUSED, NONE):
                    print(f"{path.relative_to(place)}: {verdict.text.splitlines()[0]}")
                if verdict.kind == LISTED:
                    head = "(?:differs in it|what does it do\\?)\n((?:# .*\n?)*)"
                    for part in re.findall(head, verdict.text):
                        reasons.update(re.findall(r"^# ([\w.]+) =", part, re.MULTILINE))
            total = sum(counts.values())
            print(
                f"{name}: {total} files: "
                + ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
            )
            if listed:
                print(
                    "  most often listed:",
                    ", ".join(f"{key} {count}" for key, count in reasons.most_common(40)),
                )
    print(f"silent losses and wrong run files: {wrong}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
