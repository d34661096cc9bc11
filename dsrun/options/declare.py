"""Options: what one is, and how it is declared.

A command's options are the fields of a frozen dataclass: table.py has all options in groups, commands.py the groups of
each command. A field is declared once, with `option`: type, default, limits, help. `entries` gives the fields of a
class as `Entry`s, which the command line, run files, checks and the reference page read.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar

from dsrun.json_numbers import is_finite

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:  # typing has it from Python 3.11 on

    def dataclass_transform(**_: object) -> Any:
        return lambda cls: cls


KEY = "option"
"""The key of a field's metadata that holds its `Option`."""
COUNT = "count"
"""The unit of numbers that may be written 6.2e9 or 6.2B."""
PATH, NAME_OR_PATH, LIST_OR_FILE = "path", "name or path", "list or file"
"""Kinds of text that may be a path: always; where it holds a slash or ends in one of FILE_SUFFIXES; where it ends in
.txt."""
LIST_SUFFIX = ".txt"
FILE_SUFFIXES = (".toml", ".json", ".json5", ".jsonc", ".hjson")
"""Endings of what NAME_OR_PATH takes for a file: dsrun's own, and a DeepSpeed config's."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Option:
    """The facts that a field declares beside its name, type and default."""

    help: str
    flags: tuple[str, ...] = ()
    """Its flags, where they aren't --name-of-the-field (and --no-name for a switch with two sides)."""
    metavar: str | None = None
    unit: str = ""
    choices: tuple[str, ...] = ()
    choices_in: str = ""
    """The place of the choices, "module:name": a mapping, or a function without arguments."""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    variable: str = ""
    """The environment variable that stands for it."""
    default_text: str = ""
    """The default in --help, where it is worked out or isn't the plain value."""
    common: bool = False
    """Whether --help shows it; --help-all shows all."""
    path: str = ""
    """For a text that may be a path: PATH, NAME_OR_PATH or LIST_OR_FILE. A run file's paths are relative to it."""
    synonyms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Other tools' words for a value, also for one of several with commas between them -> dsrun's."""
    command_line_only: bool = False
    """Whether it says how a command is to go this time only. A run file has no such keys."""


def option(default: Any, help: str, **more: Any) -> Any:
    """A field of an options class. more: the other fields of `Option`."""
    return field(default=default, metadata={KEY: Option(help=help, **more)})


def again(owner: type, name: str, **more: Any) -> Any:
    """Another class's option with some fields of `Option` replaced (more)."""
    entry = entries(owner)[name]
    return field(default=entry.default, metadata={KEY: dataclasses.replace(entry.option, **more)})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class OptionGroup:
    """A frozen dataclass of options. Its fields are those of its class and of all groups that it is put together from.

    `dataclass` would write and compile these methods anew for each class, which is a third of a short command's time.
    """

    def __init_subclass__(cls) -> None:
        dataclass(init=False, repr=False, eq=False)(cls)

    def __init__(self, **values: Any) -> None:
        for declared in dataclasses.fields(self):  # type: ignore[arg-type]
            name, factory = declared.name, declared.default_factory
            default = declared.default if factory is MISSING else factory()
            value = values.pop(name, default)
            if value is MISSING:
                raise TypeError(f"{type(self).__name__} needs {name}")
            object.__setattr__(self, name, value)
        if values:
            raise TypeError(f"{type(self).__name__} has no {', '.join(values)}")
        self.__post_init__()

    def __post_init__(self) -> None:
        """A hook for groups that make something of their values."""

    def __setattr__(self, name: str, value: object) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"
        )


@dataclass(frozen=True)
class Entry:
    """An option as its class declares it."""

    name: str
    kind: type
    """int, float, str, bool or Path: its type, or for a repeated option the type of each value."""
    default: Any
    option: Option
    group: str
    """The title of its group in --help: the first line of its class's docstring."""
    repeated: bool
    optional: bool
    """Whether None is a value: the user leaves it open, and something else decides."""

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that it takes; empty where these are no short list."""
        if not self.option.choices_in:
            return self.option.choices
        module, _, name = self.option.choices_in.partition(":")
        names = getattr(importlib.import_module(module), name)
        return (*self.option.choices, *(names() if callable(names) else names))

    @property
    def flags(self) -> tuple[str, ...]:
        """Its flags on the command line, as click takes them."""
        if self.option.flags:
            return self.option.flags
        name = self.name.replace("_", "-")
        two_sides = self.kind is bool and self.default is not False
        return (f"--{name}/--no-{name}",) if two_sides else (f"--{name}",)

    @property
    def flag(self) -> str:
        """Its flag in messages."""
        return self.spelled(None)

    def spelled(self, value: object) -> str:
        """The flag for a value: of a switch with two sides the side that says so."""
        first = next((flag for flag in self.flags if flag.startswith("--")), self.flags[0])
        on, _, off = first.partition("/")
        return off if off and value is False else on

    def in_environment(self, environ: Mapping[str, str]) -> str | None:
        """The value of its variable; None where it has none, or an empty one."""
        return environ.get(self.option.variable) or None

    @property
    def default_words(self) -> str:
        """The default in words; empty where there is nothing to say."""
        if self.option.default_text or self.option.variable:
            return self.option.default_text or f"${self.option.variable}"
        if self.default is None or self.default is False or self.default == ():
            return ""
        if self.kind is bool:
            return self.flag[2:]
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    def problem(self, value: object) -> str:
        """The expectation that a value fails, as a sentence behind "can't be ..."; empty where the value is right."""
        values: Sequence[object] = value if isinstance(value, (list, tuple)) else (value,)
        if values is value and not self.repeated:
            return f"Expected {self.takes}, not a list."
        return "" if all(map(self._fits, values)) else f"Expected {self.takes}."

    def _fits(self, value: object) -> bool:
        if value is None:
            return self.optional
        if self.kind is bool or isinstance(value, bool):  # before numbers: True is an int to Python
            return self.kind is bool and isinstance(value, bool)
        if self.kind in (int, float):
            whole_enough = self.kind is float or isinstance(value, int)
            return is_finite(value) and whole_enough and self._in_range(value)
        is_text = isinstance(value, (str, Path))
        return is_text and value != "" and (not self.choices or value in self.choices)

    def _in_range(self, number: float) -> bool:
        limits = self.option
        return (
            (limits.at_least is None or number >= limits.at_least)
            and (limits.above is None or number > limits.above)
            and (limits.at_most is None or number <= limits.at_most)
            and (limits.below is None or number < limits.below)
        )

    @property
    def takes(self) -> str:
        """The values that are right, in words."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        words = {
            int: "a whole number",
            float: "a number",
            str: "a text",
            bool: "true or false",
            Path: "a path",
        }
        limits = {
            "at least": self.option.at_least, "above": self.option.above, "at most": self.option.at_most,
            "below": self.option.below,
        }  # fmt: skip
        given = [f"{word} {limit:g}" for word, limit in limits.items() if limit is not None]
        return words[self.kind] + (f", {' and '.join(given)}" if given else "")

    def typed(self, value: object) -> Any:
        """A right value in the field's own type."""
        if self.repeated:
            values = value if isinstance(value, (list, tuple)) else (value,)
            return tuple(map(self.kind, values))
        if isinstance(value, str) and self.option.synonyms:
            value = ",".join(self.option.synonyms.get(part.strip(), part) for part in value.split(","))
        return value if value is None else self.kind(value)


def entries(cls: type) -> Mapping[str, Entry]:
    """The options of a class, in the order in which its groups are named in its bases."""
    return _entries(cls)


@functools.cache
def _entries(cls: type[object]) -> dict[str, Entry]:
    declared: dict[str, Entry] = {}
    # Each field is listed in the group that declares it. dataclasses.fields(cls) would have all of them, but not where
    # they come from; a class that says an option again comes first, and wins.
    for owner in cls.__mro__:
        if not dataclasses.is_dataclass(owner):
            continue
        fields = {field.name: field for field in dataclasses.fields(owner)}
        for name in inspect.get_annotations(owner):
            if name not in declared and name in fields and KEY in fields[name].metadata:
                declared[name] = _entry(fields[name], owner)
    return declared


def _entry(field: dataclasses.Field[Any], owner: object) -> Entry:
    declared: Option = field.metadata[KEY]
    hint: Any = field.type
    arguments = typing.get_args(hint)
    optional = isinstance(hint, UnionType) or typing.get_origin(hint) is typing.Union
    repeated = typing.get_origin(hint) is tuple
    if optional:
        (hint,) = (argument for argument in arguments if argument is not type(None))
    kind = arguments[0] if repeated else hint
    title = (owner.__doc__ or "").partition("\n")[0].rstrip(".")
    return Entry(field.name, kind, field.default, declared, title, repeated, optional)


def select(cls: type[T], options: object, **more: Any) -> T:
    """A smaller class's fields out of a command's options, by name. more: fields that are no options."""
    names = {field.name for field in dataclasses.fields(cls)} - set(more)  # type: ignore[arg-type]
    return cls(**{name: getattr(options, name) for name in names if hasattr(options, name)}, **more)


def flag_of(cls: type, name: str) -> str:
    """The flag of a class's option in messages."""
    return entries(cls)[name].flag
