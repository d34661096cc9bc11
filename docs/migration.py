"""The tables of the pages for those who come from another trainer: every argument with its counterpart, from the tables
that `dsrun import` reads. They stand between two comments; the rest of such a page is written by hand. The Chinese
page has the same table: migration_zh.toml has its texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from dsrun.catalog import read_toml
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
CHINESE = Path(__file__).with_name("migration_zh.toml")
ORDER = (SAME, SETTLED, DIFFERS, REFUSED, LEFT_OUT, ANYWAY)


def pages(root: Path) -> Iterator[tuple[Path, str]]:
    """Each page with its table as the code has it, in both languages. Raises ValueError where a text has no Chinese."""
    chinese = read_toml(CHINESE)
    used = set()

    def translated(text: str) -> str:
        used.add(text)
        return str(chinese.get(text, text))

    for name, trainer in PAGES.items():
        yield _with_table(root / name, table(trainer))
        yield _with_table((root / name).with_suffix(".zh.md"), table(trainer, translated, "、"))
    if wrong := used ^ chinese.keys():
        raise ValueError(f"docs/{CHINESE.name} lacks these texts, or no table has them: {sorted(wrong)}")


def _with_table(path: Path, lines: str) -> tuple[Path, str]:
    return path, PART.sub(lambda _: lines, path.read_text(encoding="utf-8"))


def table(name: str, say: Callable[[str], str] = str, comma: str = ", ") -> str:
    """A trainer's table, in the order: options, what differs, what is refused, the rest. say: a text in the page's
    language; comma: what stands between names there."""
    trainer = trainers()[name]
    title = say("The arguments of {title} {release}.")
    lines = [
        f"\n{title.format(title=trainer.title, release=arguments.version(name))}\n",
        f"| {say('argument')} | dsrun | {say('what differs')} |",
        "| --- | --- | --- |",
    ]
    rows = sorted(trainer.rows, key=lambda row: ORDER.index(row.kind))
    if trainer.model:
        model = say("a folder, a repository, or a name from `dsrun models`")
        lines.append(f"| `{trainer.model}` | MODEL | {model} |")
    lines += [_line(row, say, comma) for row in rows]
    return "\n".join(lines) + "\n\n"


def _line(row: Row, say: Callable[[str], str], comma: str) -> str:
    names = comma.join(f"`{key}`" for key in row.keys)
    flags = comma.join(f"`{flag_of(FinetuneOptions, option)}`" for option in row.options)
    if not flags and row.kind in WORDS:
        flags = say(WORDS[row.kind])
    text = say(row.text).replace("|", chr(92) + "|") if row.text else ""
    return f"| {names} | {flags} | {text} |"
