"""What an argument of another trainer is here: the kinds of counterparts, and a trainer's table of them.

A row is one of these, made by the function of that name:

    same        an option of the same meaning; the value stays, or is translated word by word
    settled     several arguments that are read together, by a function
    anyway      dsrun does so without being told
    left_out    there is nothing like it, and the job trains the same without it
    differs     there is nothing like it, and the job trains otherwise without it
    refused     another job than dsrun does: the file is refused by this argument

`differs` and `refused` count only where the argument is on: off, empty, or as the trainer has it by itself, it asks for
nothing.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsrun.trainers import arguments

SAME, SETTLED, ANYWAY, LEFT_OUT, DIFFERS, REFUSED = (
    "same", "settled", "anyway", "left out", "differs", "refused",
)  # fmt: skip
UNKNOWN = "unknown"
"""The kind of an argument that no row of the table has."""
OFF: tuple[Any, ...] = (None, False, "", 0, "none", "None", "no", "false", "False", [], {}, ())
"""Values by which an argument asks for nothing."""


class UnlikeError(ValueError):
    """A value that has no counterpart, though its argument has. The text says why."""


@dataclass(frozen=True)
class Row:
    """Arguments with one counterpart."""

    keys: tuple[str, ...]
    """Their names, or patterns of names: galore_*."""
    kind: str
    options: tuple[str, ...] = ()
    """dsrun's options, as fields."""
    text: str = ""
    """What differs, or why there is none."""
    translate: Callable[[Any], Any] | None = None
    """The value that it is here, for a row of `same`. Raises UnlikeError."""
    settle: Callable[[Draft], None] | None = None
    """The function that puts the options in, by `Draft.put` and its like, for a row of `settled`."""
    only_given: bool = False
    """Whether the trainer's own default is no part of the job, for a row of `same`."""
    empty: Any = None
    """The value here where the argument is null there, by the file or by default, for a row of `same`. None: null is
    as if it weren't there."""
    named: Mapping[str, str] = field(default_factory=dict)
    """An argument -> the option that it means first of all, for a row of `settled` with several."""

    def option_of(self, key: str) -> str | None:
        """The option that an argument means; None for one without."""
        if key in self.options:
            return key
        return self.options[0] if len(self.options) == 1 else self.named.get(key)

    def has(self, key: str) -> bool:
        """Whether an argument is one of the row's."""
        return key in self.keys or any(fnmatch.fnmatchcase(key, pattern) for pattern in self.keys)


def same(
    option: str,
    *keys: str,
    text: str = "",
    words: Mapping[Any, Any] | Callable[[Any], Any] | None = None,
    only_given: bool = False,
    empty: Any = None,
) -> Row:
    """An option of the same meaning. words: the values here by those there, or a function of the value; empty: as in
    Row."""
    translate = None if words is None else words if callable(words) else _by_words(words)
    return Row(_names(keys), SAME, (option,), text, translate, only_given=only_given, empty=empty)


def _names(keys: Sequence[str]) -> tuple[str, ...]:
    """Names of arguments that may stand in one text, with spaces between them."""
    return tuple(name for key in keys for name in key.split())


def _by_words(words: Mapping[Any, Any]) -> Callable[[Any], Any]:
    def translate(value: Any) -> Any:
        if value not in words:
            raise UnlikeError(
                f"dsrun has {', '.join(dict.fromkeys(str(new) for new in words.values() if new is not None))}"
            )
        return words[value]

    return translate


def settled(
    settle: Callable[[Draft], None],
    *keys: str,
    options: str = "",
    text: str = "",
    named: Mapping[str, str] | None = None,
) -> Row:
    """Arguments that are read together. options: their names, with spaces between them; named: as in Row."""
    return Row(_names(keys), SETTLED, tuple(options.split()), text, settle=settle, named=named or {})


def anyway(*keys: str, text: str, option: str = "") -> Row:
    """What dsrun does without being told."""
    return Row(_names(keys), ANYWAY, (option,) if option else (), text)


def left_out(*keys: str, text: str) -> Row:
    """Without a counterpart; the training is the same."""
    return Row(_names(keys), LEFT_OUT, text=text)


def differs(*keys: str, text: str) -> Row:
    """Without a counterpart; the training is another one where it is on."""
    return Row(_names(keys), DIFFERS, text=text)


def refused(*keys: str, text: str) -> Row:
    """Another job than dsrun does, where it is on."""
    return Row(_names(keys), REFUSED, text=text)


@dataclass(frozen=True)
class ForeignTrainer:
    """A trainer, and what its arguments are here."""

    name: str
    """As in arguments.json: llama-factory."""
    title: str
    """As its own documents write it."""
    rows: tuple[Row, ...]
    model: str = ""
    """The argument that names the model."""
    telling: tuple[str, ...] = ()
    """Arguments by which a file is known to be this trainer's; several of the others may be others', too."""
    starts: tuple[str, ...] = ()
    """Patterns of the commands that start it."""
    prepare: Callable[[dict[str, Any]], dict[str, Any]] = dict
    """The arguments as the table knows them, from those of a file: nested ones flat, old names new."""

    def row(self, key: str) -> Row | None:
        """The row of an argument; None where the table has none."""
        exact = (row for row in self.rows if key in row.keys)
        return next(exact, None) or next((row for row in self.rows if row.has(key)), None)

    @property
    def known(self) -> set[str]:
        """Names of arguments that its classes declare, or that the table writes out."""
        return {*arguments.declared(self.name), *(key for row in self.rows for key in row.keys)}

    def default(self, key: str) -> Any:
        """The trainer's own default; None where it has none, or isn't known."""
        return arguments.default(self.name, key)


@dataclass
class Outcome:
    """What became of an argument of a file."""

    key: str
    value: Any
    kind: str
    text: str = ""
    """The option with its value; or why there is none."""
    line: int = 0
    """Its line in the file; 0 where it is the trainer's default, or stands on a command line."""


@dataclass
class ImportedValue:
    """A value of an option in the run that is made, and where it comes from."""

    value: Any
    source: str


@dataclass
class Draft:
    """A run in the making: the arguments of a file, and what has become of them so far."""

    trainer: ForeignTrainer
    given: Mapping[str, Any]
    """The arguments that the file gives, null ones among them."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """Their lines."""
    folder: Path = Path()
    """The folder that paths are looked for in, and in those above it."""
    gpus: int = 1
    """Ranks of the job, for what counts all of them."""
    where: str = ""
    """The file, in messages."""
    model: str | None = None
    options: dict[str, ImportedValue] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def get(self, key: str) -> Any:
        """The value of an argument: the file's, else the trainer's own default."""
        value = self.given.get(key)
        return self.trainer.default(key) if value is None else value

    def is_on(self, key: str) -> bool:
        """Whether an argument asks for something."""
        return is_on(self.get(key))

    def put(self, option: str, value: Any, *keys: str, source: str = "", text: str = "") -> None:
        """Give an option a value because of these arguments. text: what the file's reader has to know."""
        named = [key for key in keys if self.given.get(key) is not None]
        source = source or ", ".join(named) or f"{self.trainer.title}'s own default"
        if value is not None:
            self.options[option] = ImportedValue(value, f"{source}: {text}" if text else source)
        for key in keys:
            self.tell(key, SAME, option if value is not None else text or "as dsrun has it")

    def tell(self, key: str, kind: str, text: str) -> None:
        """Note what became of an argument; one that the file hasn't, only where that matters (differs, refused)."""
        if key not in self.given and kind not in (DIFFERS, REFUSED):
            return
        before = self.outcomes.get(key)
        if before is not None and before.kind == kind == SAME and text not in before.text.split(", "):
            text = f"{before.text}, {text}"
        self.outcomes[key] = Outcome(key, self.given.get(key), kind, text, self.lines.get(key, 0))

    def find(self, name: str) -> Path | None:
        """A file or folder that a path of the file's means; None where none of its places has it."""
        return next((one for one in self.places(name) if exists(one)), None)

    def places(self, name: str) -> list[Path]:
        """What a path of the file's can mean: from the working folder, the file's or one above it."""
        path = Path(name).expanduser()
        return [Path.cwd() / path, *(folder / path for folder in (self.folder, *self.folder.parents))]


def exists(path: Path) -> bool:
    """Whether there is such a file or folder, as far as it can be seen."""
    try:
        return path.exists()
    except OSError:  # a name that is too long, or a folder that may not be read
        return False


def is_on(value: Any) -> bool:
    """Whether a value asks for something."""
    return not any(value is off or (type(value) is type(off) and value == off) for off in OFF)
