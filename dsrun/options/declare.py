"""What an option is, and how one is declared.

A command's options are the fields of a frozen dataclass: table.py has all options in groups, commands.py the groups of
each command. A field is declared once, with `option`: type, default, limits, help. `entries` gives the fields of a
class as `Entry`s, which the command line, run files, checks and the reference page read.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:  # typing has it from Python 3.11 on

    def dataclass_transform(**_: object) -> Any:
        return lambda cls: cls


KEY = "option"
"""Where a field's metadata hold its `Option`."""
COUNT = "count"
"""The unit of numbers that may be written 6.2e9 or 6.2B."""
PATH, NAME_OR_PATH, LIST_OR_FILE = "path", "name or path", "list or file"
"""What a text may be: always a path, or one only where it holds a slash or ends in .toml, or where it ends in .txt."""
LIST_SUFFIX = ".txt"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Option:
    """What a field says beside its name, type and default."""

    help: str
    flags: tuple[str, ...] = ()
    """As on the command line, where that isn't --name-of-the-field (and --no-name for a switch with two sides)."""
    metavar: str | None = None
    unit: str = ""
    choices: tuple[str, ...] = ()
    choices_in: str = ""
    """Where the choices are found by looking, "module:name": a mapping, or a function without arguments."""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    variable: str = ""
    """The environment variable that stands for it."""
    default_text: str = ""
    """What --help says of the default, where it is worked out or isn't the plain value."""
    common: bool = False
    """Whether --help shows it; --help-all shows all."""
    path: str = ""
    """Of a text: PATH, NAME_OR_PATH or LIST_OR_FILE. In a run file a path is relative to the file."""
    command_line_only: bool = False
    """How a command is to go this time, which no run file says."""


def option(default: Any, help: str, **more: Any) -> Any:
    """A field of an options class. more: the other fields of `Option`."""
    return field(default=default, metadata={KEY: Option(help=help, **more)})


def again(owner: type, name: str, **more: Any) -> Any:
    """Another class's option, of which something is said otherwise. more: fields of `Option`."""
    entry = entries(owner)[name]
    return field(default=entry.default, metadata={KEY: dataclasses.replace(entry.option, **more)})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class OptionGroup:
    """A frozen dataclass of options. Its fields are those of its class and of all groups that it is put together from.

    What `dataclass` writes and compiles anew for each class (a third of the time that a short command takes) stands
    here once.
    """

    def __init_subclass__(cls) -> None:
        dataclass(init=False, repr=False, eq=False)(cls)

    def __init__(self, **values: Any) -> None:
        for one in dataclasses.fields(self):  # type: ignore[arg-type]
            made = one.default if one.default_factory is MISSING else one.default_factory
            value = values.pop(one.name) if one.name in values else made() if callable(made) else made
            if value is MISSING:
                raise TypeError(f"{type(self).__name__} needs {one.name}")
            object.__setattr__(self, one.name, value)
        if values:
            raise TypeError(f"{type(self).__name__} has no {', '.join(values)}")
        self.__post_init__()

    def __post_init__(self) -> None:
        """For a group that makes something of its values."""

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
    """int, float, str, bool or Path; of a repeated option, of each of its values."""
    default: Any
    option: Option
    group: str
    """The title of the group that it is listed in: the first line of its class's docstring."""
    repeated: bool
    optional: bool
    """Whether None is a value: nobody says, and something else decides."""

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that it takes; empty where they are not a few names."""
        if not self.option.choices_in:
            return self.option.choices
        module, _, name = self.option.choices_in.partition(":")
        found = getattr(importlib.import_module(module), name)
        return (*self.option.choices, *(found() if callable(found) else found))

    @property
    def flags(self) -> tuple[str, ...]:
        """How the command line spells it."""
        own = "--" + self.name.replace("_", "-")
        if self.kind is bool and not self.option.flags and self.default is not False:
            return (f"{own}/--no-{own[2:]}",)
        return self.option.flags or (own,)

    @property
    def flag(self) -> str:
        """How messages spell it."""
        return self.spelled(None)

    def spelled(self, value: object) -> str:
        """How the command line says a value: of a switch with two sides by one of them."""
        first = next((flag for flag in self.flags if flag.startswith("--")), self.flags[0])
        on, _, off = first.partition("/")
        return off if off and value is False else on

    def in_environment(self, environ: Mapping[str, str]) -> str | None:
        """What its variable says; None where it has none, or an empty one."""
        return environ.get(self.option.variable) or None

    @property
    def default_words(self) -> str:
        """The default for people; empty where there is nothing to say."""
        if self.option.default_text or self.option.variable:
            return self.option.default_text or f"${self.option.variable}"
        if self.default is None or self.default is False or self.default == ():
            return ""
        if self.kind is bool:
            return self.flag[2:]
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    def problem(self, value: object) -> str:
        """What is wrong with a value, in words that follow "can't be ..."; empty where it is right."""
        values: Sequence[object] = value if isinstance(value, (list, tuple)) else (value,)
        if isinstance(value, (list, tuple)) and not self.repeated:
            return f"Expected {self.takes}, not a list."
        return next((f"Expected {self.takes}." for one in values if not self._fits(one)), "")

    def _fits(self, value: object) -> bool:
        if value is None:
            return self.optional
        if self.kind is bool or isinstance(value, bool):
            return self.kind is bool and isinstance(value, bool)
        if self.kind in (int, float):
            right = isinstance(value, (int, float) if self.kind is float else int)
            return isinstance(value, (int, float)) and right and self._in_range(value)
        fits = isinstance(value, (str, Path))
        return fits and value != "" and (not self.choices or value in self.choices)

    def _in_range(self, number: float) -> bool:
        said = self.option
        return (
            math.isfinite(number)
            and (said.at_least is None or number >= said.at_least)
            and (said.above is None or number > said.above)
            and (said.at_most is None or number <= said.at_most)
            and (said.below is None or number < said.below)
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
        said = [f"{word} {limit:g}" for word, limit in limits.items() if limit is not None]
        return words[self.kind] + (f", {' and '.join(said)}" if said else "")

    def typed(self, value: object) -> Any:
        """A right value in the field's own type."""
        if self.repeated:
            values = value if isinstance(value, (list, tuple)) else (value,)
            return tuple(self.kind(one) for one in values)
        return value if value is None else self.kind(value)


def entries(cls: type) -> Mapping[str, Entry]:
    """The options of a class, in the order in which its groups are named in its bases."""
    return _entries(cls)


@functools.cache
def _entries(cls: type[object]) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for owner in cls.__mro__:
        if not dataclasses.is_dataclass(owner):
            continue
        own = {one.name: one for one in dataclasses.fields(owner)}
        for name in inspect.get_annotations(owner):
            if name not in found and name in own and KEY in own[name].metadata:
                found[name] = _entry(own[name], owner)
    return found


def _entry(one: dataclasses.Field[Any], owner: object) -> Entry:
    said: Option = one.metadata[KEY]
    hint: Any = one.type
    arguments = typing.get_args(hint)
    optional = isinstance(hint, UnionType) or typing.get_origin(hint) is typing.Union
    repeated = typing.get_origin(hint) is tuple
    if optional:
        (hint,) = (argument for argument in arguments if argument is not type(None))
    kind = arguments[0] if repeated else hint
    title = (owner.__doc__ or "").partition("\n")[0].rstrip(".")
    return Entry(one.name, kind, one.default, said, title, repeated, optional)


def select(cls: type[T], options: object, **more: Any) -> T:
    """A smaller class's fields out of a command's options, by name. more: fields that are no options."""
    names = {one.name for one in dataclasses.fields(cls)} - set(more)  # type: ignore[arg-type]
    return cls(**{name: getattr(options, name) for name in names if hasattr(options, name)}, **more)


def flag_of(cls: type, name: str) -> str:
    """How messages spell an option of a class."""
    return entries(cls)[name].flag
