"""Kinds of rule that are data: a key, a text, and the conditions of the finding.

    @rule("DS235", REFUSED)
    @bad({...})
    @good({...})
    def gpudirect_storage_without_gpu() -> Table:
        \"""What DeepSpeed does there, and the file of it.\"""
        return needs("aio.use_gds", "NVIDIA GPUs, but there are none. Set it to false.", when.on_cpu)

The kinds are `needs`, `excludes`, `without_effect`, `in_range`, `groups` and, for all else, `report`; `all_of` makes
one rule of several lines. A rule that computes, or loops over what a config holds, is a function of the Context.

A text is "what is wrong. What would be right." It has facts in braces: {value} is the key's own, {stage} and {gpus}
the setting's, others belong to the kind, or are passed as a name and the path of the value. A brace that is meant is
doubled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dsrun.config.rules.common import divisors, removal, set_to, written
from dsrun.config.rules.conditions import Condition, is_one_of, on
from dsrun.config.rules.frame import Context, Finding, Fix
from dsrun.words import listed

Conditions = Condition | Sequence[Condition]
Repair = Callable[[Context], Fix]
Fact = str | Callable[[Context], Any]
NO_FACTS: Mapping[str, Fact] = {}
Table = Callable[[Context], Iterator[Finding]]
"""A rule that is data: a line, or several."""


def _line(
    path: str,
    text: str,
    when: Sequence[Condition],
    fix: Repair | None = None,
    facts: Mapping[str, Fact] = NO_FACTS,
    *,
    by_its_alias: bool = False,
) -> Table:
    """A finding at `path` where all conditions hold.

    by_its_alias: whether it is shown at the name that the key has in the file.
    """
    message, _, advice = text.partition(". ")
    shown = {**facts, "value": path}

    def findings(context: Context) -> Iterator[Finding]:
        if all(condition(context) for condition in when):
            values = {name: _shown(context, fact) for name, fact in shown.items()}
            values |= {"stage": context.stage, "gpus": context.world_size}
            place = written(context, path) if by_its_alias else path
            repair = fix(context) if fix else None
            yield Finding(place, message.format_map(values), advice.format_map(values), repair)

    return findings


def _shown(context: Context, fact: Fact) -> Any:
    """The value of a fact: of a key, with 2e8 as 200000000, or of a function of the context."""
    if callable(fact):
        return fact(context)
    whole = context.integer(fact)
    return context.get(fact) if whole is None else whole


def all_of(*lines: Table, when: Conditions = ()) -> Table:
    """Several lines. when: conditions of all of them."""
    conditions = _each(when)

    def findings(context: Context) -> Iterator[Finding]:
        if all(condition(context) for condition in conditions):
            for line in lines:
                yield from line(context)

    return findings


def _each(when: Conditions) -> tuple[Condition, ...]:
    return (when,) if callable(when) else tuple(when)


def report(path: str, text: str, when: Conditions, fix: Repair | None = None, **facts: Fact) -> Table:
    """A line of no special kind."""
    return _line(path, text, _each(when), fix, facts)


def needs(
    path: str,
    text: str,
    when: Conditions = (),
    fix: Repair | None = None,
    *,
    given: str | Condition | None = None,
) -> Table:
    """A key that is on, and lacks something.

    given: the condition that it is on, if that isn't its flag; or the text that turns it on, with which the message
    then begins.
    """
    text = f"needs {text}"
    if isinstance(given, str):
        given, text = is_one_of(path, given), f'"{given}" {text}'
    return _line(path, text, (given or on(path), *_each(when)), fix)


def excludes(
    path: str,
    others: Mapping[str, Condition],
    text: str,
    fix: Repair | None = None,
    *,
    given: Condition | None = None,
) -> Table:
    """A key that is on, beside others that it can't stand beside.

    others: their names for {others}, and the conditions that they are there. given: the condition that the key is on,
    if that isn't its flag.
    """

    def there(context: Context) -> list[str]:
        return [name for name, condition in others.items() if condition(context)]

    return _line(
        path, text, (given or on(path), there), fix, {"others": lambda context: listed(there(context))}
    )


def without_effect(path: str, why: str, when: Conditions, advice: str = "Remove it.") -> Table:
    """A key that does nothing, and its removal. why: the reason, with the blank or colon in front."""
    return _line(path, f"has no effect{why}. {advice}", _each(when), remove(path), by_its_alias=True)


def in_range(
    path: str,
    text: str,
    when: Conditions = (),
    fix: Repair | None = None,
    *,
    least: float = -math.inf,
    most: float | str = math.inf,
) -> Table:
    """A number that is less than `least`, or more than {most}: a number, or the path of one."""

    def limit(context: Context) -> float | None:
        return context.number(most) if isinstance(most, str) else most

    def outside(context: Context) -> bool:
        number, largest = context.number(path), limit(context)
        return number is not None and (number < least or (largest is not None and number > largest))

    return _line(path, text, (outside, *_each(when)), fix, {"most": most if isinstance(most, str) else limit})


def groups(path: str, text: str, when: Conditions, last: str = ", ") -> Table:
    """A size of groups that leaves {rest} of the GPUs over, if their number is known.

    {sizes} are the sizes that leave none, with `last` before the last one.
    """

    def rest(context: Context) -> int:
        size, gpus = context.integer(path), context.world_size
        return gpus % size if size and gpus else 0

    def sizes(context: Context) -> str:
        return divisors(context.world_size or 1, last)

    return _line(path, text, (rest, *_each(when)), facts={"rest": rest, "sizes": sizes})


def put(path: str, value: Any, *, safe: bool = False) -> Repair:
    """The repair that sets a key; `set_to` in common.py says when that is safe."""
    return lambda context: set_to(context, path, value, safe=safe)


def remove(*paths: str, safe: bool = True) -> Repair:
    """The repair that takes out keys; safe where they do nothing."""
    return lambda context: removal(context, *paths, safe=safe)
