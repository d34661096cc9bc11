"""The tables of the pages for those who come from another trainer: every argument with its counterpart, from the tables
that `dsrun import` reads. They stand between two comments; the rest of such a page is written by hand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from dsrun.options.commands import FinetuneOptions
from dsrun.options.declare import flag_of
from dsrun.trainers import arguments, trainers
from dsrun.trainers.counterparts import ANYWAY, DIFFERS, LEFT_OUT, REFUSED, SAME, SETTLED, Row

PAGES = {
    "docs/howto/from-llama-factory.md": "llama-factory",
    "docs/howto/from-axolotl.md": "axolotl",
    "docs/howto/from-ms-swift.md": "ms-swift",
    "docs/howto/from-trl.md": "trl",
    "docs/howto/from-torchtune.md": "torchtune",
}
PART = re.compile(
    r"(?<=<!-- arguments: made by docs/generate.py -->\n).*?(?=<!-- end of the arguments -->)", re.DOTALL
)
WORDS = {
    ANYWAY: "nothing to say",
    LEFT_OUT: "none, the training is the same",
    DIFFERS: "none",
    REFUSED: "refused",
}
ORDER = (SAME, SETTLED, DIFFERS, REFUSED, LEFT_OUT, ANYWAY)


def pages(root: Path) -> Iterator[tuple[Path, str]]:
    """Each page with its table as the code has it."""
    for name, trainer in PAGES.items():
        path = root / name
        yield path, PART.sub(lambda _, trainer=trainer: table(trainer), path.read_text(encoding="utf-8"))


def table(name: str) -> str:
    """A trainer's table, in the order: options, what differs, what is refused, the rest."""
    trainer = trainers()[name]
    release = arguments.version(name)
    lines = [
        f"\nThe arguments of {trainer.title} {release}.\n",
        "| argument | dsrun | what differs |",
        "| --- | --- | --- |",
    ]
    rows = sorted(trainer.rows, key=lambda row: ORDER.index(row.kind))
    model = f"| `{trainer.model}` | MODEL | a folder, a repository, or a name from `dsrun models` |"
    lines += ([model] if trainer.model else []) + [line for row in rows if (line := _line(row))]
    return "\n".join(lines) + "\n\n"


def _line(row: Row) -> str:
    names = ", ".join(f"`{key}`" for key in row.keys)
    flags = ", ".join(f"`{flag_of(FinetuneOptions, option)}`" for option in row.options)
    return f"| {names} | {flags or WORDS.get(row.kind, '')} | {row.text.replace('|', chr(92) + '|')} |"
