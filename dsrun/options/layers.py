"""Layers of option values: where each value comes from, and how the sources of a command become one value.

The command line, a run file, a model file and a preset give values under the options' names, as a `Layer` each.
`Resolved` keeps the strongest source of every option; `resolve` takes sources that depend on one another in their
order.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from dsrun.errors import DsrunError, Problem, raise_all
from dsrun.options.declare import Entry, entries

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
    KEPT = 7
    """A run file's, of a value that dsrun wrote there because it decides what is trained: nobody asked for it."""
    RUN_FILE = 8
    ENVIRONMENT = 9
    COMMAND_LINE = 10

    @property
    def words(self) -> str:
        """The name in words: "model file"."""
        if self is Source.KEPT:
            return "kept in the run file"
        return self.name.lower().replace("_", " ").replace("built in", "built-in default")


@dataclass(frozen=True)
class Origin:
    """The origin of a value."""

    source: Source
    where: str = ""
    """The file, the variable, or the reason it was derived for; empty where the source says it all. It is shown to
    people; nothing hangs on its words."""
    through: str = ""
    """The name of the option whose value brought this one along: "overrides" (--set), "adapter". Empty: its own."""

    def __str__(self) -> str:
        return f"{self.source.words}: {self.where}" if self.where else self.source.words


@dataclass(frozen=True)
class Layer:
    """The values of one source."""

    source: Source
    values: Mapping[str, object]
    """Values by the options' names; None gives nothing."""
    why: str = ""
    """The origins' `where`: the file, the variable, or the reason."""
    through: str = ""
    """The option that brings them along; see `Origin`."""
    settles: bool = False
    """Whether they were worked out of the values of all sources. Then they hold, whichever source gave the value
    before."""
    note: str = ""
    """A line for the user."""

    @classmethod
    def settled(cls, values: Mapping[str, object], why: str, note: str = "") -> Layer:
        """Values that were worked out of those of all sources."""
        return cls(Source.DERIVED, values, why, settles=True, note=note)


NOTHING = Layer(Source.DERIVED, {})


EXCLUSIVE = (("epochs", "max_steps"), ("warmup_ratio", "warmup_steps"))
"""Options that say the same thing in two ways. The one of the stronger source holds; a source may give only one."""


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
        """The options of a command line with these values."""
        return Resolved.built_in(options).filled(Source.COMMAND_LINE, values)

    def said(self, name: str) -> bool:
        """Whether the user gave it: on the command line, by a variable or in a run file."""
        return self.origins[name].source >= Source.RUN_FILE

    def source(self, name: str) -> Source:
        return self.origins[name].source

    @property
    def user(self) -> dict[str, Any]:
        """The values that the user gave, by name."""
        given = {name: getattr(self.options, name) for name in self.origins if self.said(name)}
        return {name: value for name, value in given.items() if value is not None}

    def filled(
        self, source: Source, values: Mapping[str, object], where: str = "", *, through: str = ""
    ) -> Resolved[T]:
        """The same with a source's values, where no stronger source has set one. None sets nothing.

        through: see `Origin`. Raises DsrunError with every value that can't be, and every name that is no option.
        """
        known = entries(type(self.options))
        problems = [*problems_of(known, source, values, where), *twice(known, values, where)]
        raise_all(problems)
        taken = {
            name: known[name].typed(value)
            for name, value in values.items()
            if value is not None and source >= self.source(name) and self._free(name, source)
        }
        origins = {**self.origins, **dict.fromkeys(taken, Origin(source, where, through))}
        # A value takes the place of its rival, too. The rival's None has this source as its origin: else a weaker
        # source, added later, could set it again.
        for pair in EXCLUSIVE:
            for name, other in (pair, pair[::-1]):
                if taken.get(name) is not None:
                    taken[other], origins[other] = None, origins[name]
        return dataclasses.replace(self, options=dataclasses.replace(self.options, **taken), origins=origins)  # type: ignore[type-var]

    def settled(self, values: Mapping[str, object], why: str) -> Resolved[T]:
        """The same with values that were worked out of those of all sources. Unchanged values keep their origins."""
        new = {name: value for name, value in values.items() if getattr(self.options, name) != value}
        origins = {**self.origins, **dict.fromkeys(new, Origin(Source.DERIVED, why))}
        return dataclasses.replace(self, options=dataclasses.replace(self.options, **new), origins=origins)  # type: ignore[type-var]

    def with_layers(self, *layers: Layer) -> Resolved[T]:
        """The same with the values of layers, one after the other. Raises DsrunError as `filled` does."""
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
        """Each option with its value and its origin, in the order of the table."""
        for name, entry in entries(type(self.options)).items():
            yield entry, getattr(self.options, name), self.origins[name]


SourceOfValues = Callable[[Resolved[T]], Layer | Sequence[Layer]]
"""A pure function from what is known so far to a source's layers. Raises DsrunError for values that can't be."""


@dataclass(frozen=True)
class Resolution(Generic[T]):
    """The outcome of `resolve`."""

    known: Resolved[T]
    notes: tuple[str, ...] = ()
    """Lines for the user."""
    problems: tuple[Problem, ...] = ()
    """The problems of the source that was refused. Those behind it were not asked."""


def resolve(known: Resolved[T], sources: Iterable[SourceOfValues[T]]) -> Resolution[T]:
    """The options with the layers of sources, each of which sees the values of those before it.

    The order is not that of strength, which is `Source`'s: a weak source that no other depends on may come last. It
    ends at the first source that is refused: those behind it would judge by values that may not hold.
    """
    notes: list[str] = []
    for source in sources:
        try:
            made = source(known)
            layers = (made,) if isinstance(made, Layer) else made
            for layer in layers:
                known = known.with_layers(layer)
        except DsrunError as error:
            return Resolution(known, tuple(notes), tuple(error.problems))
        notes += [layer.note for layer in layers if layer.note]
    return Resolution(known, tuple(notes))


def from_environment(cls: type, environ: Mapping[str, str], name: str) -> Layer:
    """The layer of an option's environment variable."""
    entry = entries(cls)[name]
    return Layer(Source.ENVIRONMENT, {name: entry.in_environment(environ)}, entry.option.variable)


def twice(known: Mapping[str, Entry], values: Mapping[str, object], where: str = "") -> Iterator[Problem]:
    """Problems of a source that says one thing in two ways."""
    for pair in EXCLUSIVE:
        if all(values.get(name) is not None for name in pair):
            flags = " and ".join(known[name].flag for name in pair)
            yield Problem(f"{flags} say the same thing in two ways", where, "Give one of them.")


def problems_of(
    known: Mapping[str, Entry], source: Source, values: Mapping[str, object], where: str
) -> Iterator[Problem]:
    """Problems of a source's values, and of names that are no options."""
    from dsrun.catalog import suggestion

    by_hand = source == Source.COMMAND_LINE
    for name, value in values.items():
        if name not in known:
            yield Problem(f"unknown option {name!r}", where, suggestion(name, known, ""))
        elif value is not None and (wrong := known[name].problem(value)):
            shown = str(value) if value != "" and isinstance(value, (str, Path)) else repr(value)
            place = known[name].flag if by_hand else f"{where}: {name}"
            yield Problem(f"can't be {shown}", place, wrong)
