"""Guesses at unknown keys: which key was probably meant."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from dsrun.catalog import closest
from dsrun.config import tree
from dsrun.config.schemas import names
from dsrun.config.schemas.schema import Node, Schema, properties_of

MOST_COMPARED = 200
"""Keys of a section that are compared with one another, or with a section's keys, at most."""


NOBODYS = "Remove it; a comment's key starts with an underscore."
"""The advice about a key at the top level that none of DeepSpeed's is like."""


class Guess(NamedTuple):
    """The advice about an unknown key."""

    advice: str
    """A sentence."""
    path: str | None = None
    """The path that was probably meant, None where that isn't sure; the key's own path where it belongs nowhere."""
    idle: bool = False
    """Whether it belongs nowhere, and nothing is lost without it."""
    stray: bool = False
    """Whether no key is like it."""


@dataclass(frozen=True)
class _Unknown:
    """An unknown key, and the keys that it may be a slip of."""

    schema: Schema
    path: str

    @property
    def section(self) -> str:
        """The section it stands in, "" for the top level."""
        return self.path.rpartition(".")[0]

    @property
    def key(self) -> str:
        return self.path.rpartition(".")[2]

    @cached_property
    def parent(self) -> Node | None:
        return self.schema.node(self.section) if self.section else self.schema.root

    @cached_property
    def beside(self) -> list[str]:
        """The keys that its section takes."""
        return [name for name, child in properties_of(self.parent).items() if "x-alias-of" not in child]

    @cached_property
    def near(self) -> str | None:
        """The key beside it that is most alike."""
        return names.nearest(self.key, self.beside)

    def homes(self, name: str) -> list[str]:
        """The paths of keys of a name, without sections that this key itself stands in."""
        return [home for home in self.schema.homes.get(name, ()) if not tree.under(self.path, home)]


@lru_cache(maxsize=4096)
def guess(known: Schema, path: str) -> Guess:
    """The guess at an unknown key, from the first of these steps that has an answer:

    1. A key whose answer is known beforehand.
    2. At the top level, a section with words around its name: zero_optimization_config.
    3. The one key with the same words, longer or shorter: gradient_accumulation_dtype.
    4. A key beside it that is very much alike or has the same words: overlap_com, comm_overlap.
    5. The same key, or one of the same words, in other sections.
    6. A key beside it that is alike; then one in another section that is very much so.
    7. Where the section is unknown itself, what that was meant to be.
    8. At the top level, a section by a short name; elsewhere the list of what the section takes.
    """
    unknown = _Unknown(known, path)
    # From sure to vague. A likeness beside the key comes before the same name elsewhere (overlap_com is a slip), and a
    # vague likeness behind it (a right key in the wrong section is no slip).
    steps = (
        _known_beforehand,
        _bare_section,
        _abbreviated,
        _close_beside,
        _at_home,
        _alike,
        _in_unknown_section,
    )
    return next((answer for step in steps if (answer := step(unknown))), None) or _last_resort(unknown)


def _known_beforehand(unknown: _Unknown) -> Guess | None:
    if unknown.key == "$schema":
        return Guess("Remove it: it belongs at the top level only.")
    if unknown.key == "offload" and unknown.section in ("", "zero_optimization"):
        return Guess("Did you mean zero_optimization.offload_optimizer?")
    return None


def _bare_section(unknown: _Unknown) -> Guess | None:
    short = names.bare(unknown.key)
    if not unknown.section and short != unknown.key and short in unknown.beside:
        return Guess(f"Did you mean {short}?", short)
    return None


def _abbreviated(unknown: _Unknown) -> Guess | None:
    same = [name for name in unknown.schema.homes if names.abbreviated(unknown.key, name)]
    homes = unknown.homes(same[0]) if len(same) == 1 else []
    return Guess(f"Did you mean {homes[0]}?", homes[0]) if len(homes) == 1 else None


def _close_beside(unknown: _Unknown) -> Guess | None:
    key, near = unknown.key, unknown.near
    if near and (names.alike(key, near) > names.CLOSE or names.reordered(key, near)):
        return _did_you_mean(key, near, unknown.beside, unknown.section)
    return None


def _at_home(unknown: _Unknown) -> Guess | None:
    """The key stands in another section. If that does the same for something else, the key has no place here."""
    homes = unknown.homes(unknown.key)
    if not homes:
        same = next((name for name in unknown.schema.homes if names.reordered(unknown.key, name)), None)
        homes = unknown.homes(same) if same else []
        if len(homes) == 1:
            return Guess(f"Did you mean {homes[0]}?", homes[0])
    if not homes:
        return None
    section = unknown.schema.canonical(unknown.section)
    if len(homes) == 1 and names.alternatives(section, homes[0].rpartition(".")[0]):
        if section == "bf16" and ("scale" in unknown.key or "hysteresis" in unknown.key):
            return Guess("fp16 has it; bf16 needs no loss scale: remove it.", unknown.path, idle=True)
        return Guess(f"DeepSpeed has it at {homes[0]} only; remove it here.", unknown.path)
    return Guess(f"It belongs at {' or '.join(homes[:3])}.", homes[0] if len(homes) == 1 else None)


def _alike(unknown: _Unknown) -> Guess | None:
    if unknown.near:
        return _did_you_mean(unknown.key, unknown.near, unknown.beside, unknown.section)
    everywhere = unknown.schema.homes
    # Asked for less than CONFIDENT, as difflib's ratio depends on which name comes first.
    other = (
        None if unknown.key in everywhere else closest(unknown.key, everywhere, names.CONFIDENT - names.TIED)
    )
    if other and names.alike(unknown.key, other) > names.CONFIDENT:
        return _did_you_mean(unknown.key, other, [other], everywhere[other][0].rpartition(".")[0])
    return None


def _in_unknown_section(unknown: _Unknown) -> Guess | None:
    return Guess(guess(unknown.schema, unknown.section).advice) if unknown.parent is None else None


def _last_resort(unknown: _Unknown) -> Guess:
    section, beside = unknown.section, unknown.beside
    if section:
        shown = ", ".join(beside[:12]) + (f" and {len(beside) - 12} more" if len(beside) > 12 else "")
        taken = f"{section} takes: {shown}." if beside else f"{section} takes no keys of its own."
        return Guess(taken, stray=True)
    short = names.SHORT.get(names.bare(unknown.key), "")
    if short in beside:
        return Guess(f"Did you mean {short}?", short)
    return Guess(NOBODYS)


def _did_you_mean(key: str, near: str, candidates: Collection[str], section: str) -> Guess:
    """The guess for a key whose nearest name is known: that, several that are as near, or its opposite."""
    ahead = f"{section}." if section else ""
    if names.opposite(key, near):
        return Guess(f"There is {ahead}{near}, which is the opposite.")
    if others := names.tied(key, near, candidates):
        return Guess(f"Did you mean {' or '.join(ahead + name for name in [near, *others][:3])}?")
    return Guess(f"Did you mean {ahead}{near}?", ahead + near)


def has_keys_of(node: Node, value: Any) -> bool:
    """Whether half of a section's keys, or more, are those of a node, or slips of them. True of any other value."""
    known = properties_of(node)
    if not isinstance(value, dict) or not value or not known:
        return True
    given = list(value)[:MOST_COMPARED]
    fitting = sum(key in known or names.nearest(key, [*known]) is not None for key in given)
    return fitting * 2 >= len(given)


def section_like(known: Schema, value: Any) -> str | None:
    """The one section at the top level that most keys of a value are known in, or None."""
    if not isinstance(value, dict) or not value:
        return None
    telling = [key for key in list(value)[:MOST_COMPARED] if len(known.homes.get(key, ())) == 1]
    above = {known.homes[key][0].rpartition(".")[0] for key in telling}
    meant = above.pop() if len(above) == 1 else ""
    keys = properties_of(known.node(meant)) if meant else {}
    most = sum(key in keys for key in value) * 2 > len(value)
    return meant if most and meant and "." not in meant else None
