"""What an option is, where a value came from, and how the sources of a command become one value.

A command's options are the fields of a frozen dataclass (groups.py, commands.py). A field is declared once, with
`option`: type, default, limits, help. The command line, a run file, a model file and a preset give values under the
fields' names, as a `Layer` each; `Resolved` keeps the strongest source of every option, and `resolve` takes sources
that depend on one another in their order.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dsrun.errors import DsrunError, Problem, raise_all

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


class Source(enum.IntEnum):
    """Who gave a value; a later one wins over an earlier one."""

    BUILT_IN = 0
    DERIVED = 1
    MODEL_FILE = 2
    SHIPPED_PRESET = 3
    REFERENCE_RECIPE = 4
    CLUSTER_FILE = 5
    LAB_PRESET = 6
    RUN_FILE = 7
    ENVIRONMENT = 8
    COMMAND_LINE = 9

    @property
    def words(self) -> str:
        """For people: "model file"."""
        return self.name.lower().replace("_", " ").replace("built in", "built-in default")


@dataclass(frozen=True)
class Origin:
    """Where a value came from."""

    source: Source
    where: str = ""
    """The file, the variable, or why it was derived; empty where the source says it all. For people: nothing hangs on
    its words."""
    through: str = ""
    """The option whose value brought this one along, by its name: "overrides" (--set), "adapter". Empty: its own."""

    def __str__(self) -> str:
        return f"{self.source.words}: {self.where}" if self.where else self.source.words


@dataclass(frozen=True)
class Layer:
    """The values of one source."""

    source: Source
    values: Mapping[str, object]
    """By the options' names; None gives nothing."""
    why: str = ""
    """The origins' `where`: the file, the variable, or the reason."""
    through: str = ""
    """The option that brings them along; see `Origin`."""
    settles: bool = False
    """They were worked out of what all sources say, and hold whichever gave the value before."""
    note: str = ""
    """A line for the user."""

    @classmethod
    def settled(cls, values: Mapping[str, object], why: str, note: str = "") -> Layer:
        """Values that were worked out of what all sources say."""
        return cls(Source.DERIVED, values, why, settles=True, note=note)


NOTHING = Layer(Source.DERIVED, {})


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


EXCLUSIVE = (("epochs", "max_steps"), ("warmup_ratio", "warmup_steps"))
"""Options that say the same thing in two ways: the stronger source's holds, and one source may give only one."""


@dataclass(frozen=True)
class Resolved(Generic[T]):
    """A command's options, and where each came from. Sources may be added in any order."""

    options: T
    origins: Mapping[str, Origin]

    @classmethod
    def built_in(cls, options: type[T]) -> Resolved[T]:
        """Nothing but the declared defaults."""
        return cls(options(), dict.fromkeys(entries(options), Origin(Source.BUILT_IN)))

    @classmethod
    def by_user(cls, options: type[T], values: Mapping[str, object]) -> Resolved[T]:
        """What a command line with these values asks for."""
        return Resolved.built_in(options).filled(Source.COMMAND_LINE, values)

    def said(self, name: str) -> bool:
        """Whether the user said it: on the command line, by a variable or in a run file."""
        return self.origins[name].source >= Source.RUN_FILE

    def source(self, name: str) -> Source:
        return self.origins[name].source

    @property
    def user(self) -> dict[str, Any]:
        """The values that the user said, by name."""
        said = {name: getattr(self.options, name) for name in self.origins if self.said(name)}
        return {name: value for name, value in said.items() if value is not None}

    def filled(
        self, source: Source, values: Mapping[str, object], where: str = "", *, through: str = ""
    ) -> Resolved[T]:
        """With a source's values where no stronger source has set one; None sets nothing. through: see `Origin`.

        Raises DsrunError with every value that can't be, and every name that is no option, of that source.
        """
        known = entries(type(self.options))
        problems = [*problems_of(known, source, values, where), *twice(known, values, where)]
        raise_all(problems)
        taken = {
            name: known[name].typed(value)
            for name, value in values.items()
            if value is not None and source >= self.source(name) and self._free(name, source)
        }
        said = frozenset(taken)
        origins = {**self.origins, **dict.fromkeys(said, Origin(source, where, through))}
        for pair in EXCLUSIVE:
            for name, other in (pair, pair[::-1]):
                if name in said:
                    taken[other], origins[other] = None, origins[name]
        return dataclasses.replace(self, options=dataclasses.replace(self.options, **taken), origins=origins)  # type: ignore[type-var]

    def settled(self, values: Mapping[str, object], why: str) -> Resolved[T]:
        """With values that were worked out of what all sources said; the source of what they don't change stays."""
        new = {name: value for name, value in values.items() if getattr(self.options, name) != value}
        origins = {**self.origins, **dict.fromkeys(new, Origin(Source.DERIVED, why))}
        return dataclasses.replace(self, options=dataclasses.replace(self.options, **new), origins=origins)  # type: ignore[type-var]

    def with_layers(self, *layers: Layer) -> Resolved[T]:
        """With the values of layers, one after the other. Raises DsrunError as `filled` does."""
        known = self
        for layer in layers:
            known = (
                known.settled(layer.values, layer.why)
                if layer.settles
                else known.filled(layer.source, layer.values, layer.why, through=layer.through)
            )
        return known

    def _free(self, name: str, source: Source) -> bool:
        others = (other for pair in EXCLUSIVE if name in pair for other in pair)
        return all(source >= self.source(other) for other in others)

    def rows(self) -> Iterator[tuple[Entry, Any, Origin]]:
        """Each option with its value and where it came from, in the order of the table."""
        for name, entry in entries(type(self.options)).items():
            yield entry, getattr(self.options, name), self.origins[name]


SourceOfValues = Callable[[Resolved[T]], Layer | Sequence[Layer]]
"""A pure function: what is known so far -> what a source makes of it. Raises DsrunError where that can't be."""


@dataclass(frozen=True)
class Resolution(Generic[T]):
    """What came of the layers of some sources."""

    known: Resolved[T]
    notes: tuple[str, ...] = ()
    """Lines for the user."""
    problems: tuple[Problem, ...] = ()
    """What a source was refused for; those behind it were not asked."""


def resolve(known: Resolved[T], sources: Iterable[SourceOfValues[T]]) -> Resolution[T]:
    """The options with the layers of sources, each of which sees what those before it gave.

    The order is not that of strength, which is `Source`'s: a weak source that nobody else depends on may come last. It
    ends at the first source that is refused: those behind it would judge by values that may not hold.
    """
    notes: list[str] = []
    for source in sources:
        try:
            given = source(known)
            layers = (given,) if isinstance(given, Layer) else given
            for layer in layers:
                known = known.with_layers(layer)
        except DsrunError as error:
            return Resolution(known, tuple(notes), tuple(error.problems))
        notes += [layer.note for layer in layers if layer.note]
    return Resolution(known, tuple(notes))


def from_environment(cls: type, environ: Mapping[str, str], name: str) -> Layer:
    """What an option's variable says."""
    entry = entries(cls)[name]
    return Layer(Source.ENVIRONMENT, {name: entry.in_environment(environ)}, entry.option.variable)


def twice(known: Mapping[str, Entry], values: Mapping[str, object], where: str = "") -> Iterator[Problem]:
    """What one source says in two ways."""
    for pair in EXCLUSIVE:
        if all(values.get(name) is not None for name in pair):
            flags = " and ".join(known[name].flag for name in pair)
            yield Problem(f"{flags} say the same thing in two ways", where, "Give one of them.")


def problems_of(
    known: Mapping[str, Entry], source: Source, values: Mapping[str, object], where: str
) -> Iterator[Problem]:
    """What is wrong with a source's values."""
    from dsrun.catalog import suggestion

    by_hand = source == Source.COMMAND_LINE
    for name, value in values.items():
        if name not in known:
            yield Problem(f"unknown option {name!r}", where, suggestion(name, known, ""))
        elif value is not None and (wrong := known[name].problem(value)):
            shown = str(value) if value != "" and isinstance(value, (str, Path)) else repr(value)
            place = known[name].flag if by_hand else f"{where}: {name}"
            yield Problem(f"can't be {shown}", place, wrong)


def select(cls: type[T], options: object, **more: Any) -> T:
    """A smaller class's fields out of a command's options, by name. more: fields that are no options."""
    names = {one.name for one in dataclasses.fields(cls)} - set(more)  # type: ignore[arg-type]
    return cls(**{name: getattr(options, name) for name in names if hasattr(options, name)}, **more)


def flag_of(cls: type, name: str) -> str:
    """How messages spell an option of a class."""
    return entries(cls)[name].flag
