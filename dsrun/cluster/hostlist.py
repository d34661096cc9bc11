"""Short names of many hosts, as Slurm writes them, with the number of devices behind a colon: node[01-16]:8.

Written here because python-hostlist is under the GPL, and dsrun under the MIT licence.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from dsrun.cluster import hostnames
from dsrun.cluster.hostfile import HostSlots, slots_fault
from dsrun.cluster.hostnames import shown
from dsrun.errors import DsrunError, Problem, collected, raise_all

MOST_HOSTS = 100_000
LONGEST_NUMBER = 18
"""Digits of a number in brackets."""
BRACKETS = re.compile(r"\[([^\[\]]*)\]")
RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
EXAMPLES = "As: node[01-16]:8 or gpu[1,3-5]:8,login1:2"


@dataclass(frozen=True)
class _Numbers:
    """A range in brackets."""

    first: int
    last: int
    width: int
    """Digits with leading zeros; 0 where there are none."""

    def __len__(self) -> int:
        return self.last - self.first + 1

    def texts(self) -> Iterator[str]:
        return (f"{number:0{self.width}d}" for number in range(self.first, self.last + 1))


@dataclass(frozen=True)
class _Group:
    """`gpu[1,3-5]-ib:8`."""

    texts: tuple[str, ...]
    """Texts around the brackets, one more than there are brackets."""
    brackets: tuple[tuple[_Numbers, ...], ...]
    slots: int
    written: str
    """The group as the user wrote it."""

    @property
    def count(self) -> int:
        return math.prod(sum(len(numbers) for numbers in bracket) for bracket in self.brackets)

    def hosts(self) -> Iterator[str]:
        choices = [[text for numbers in bracket for text in numbers.texts()] for bracket in self.brackets]
        for chosen in itertools.product(*choices):
            yield "".join(itertools.chain(*zip(self.texts, (*chosen, ""), strict=True)))


def expand(text: str, default_slots: int | None = None) -> tuple[HostSlots, ...]:
    """The hosts of "node[01-16]:8,login1:2" with their slots, in the order given.

    A leading zero makes every number as wide as the first one, as in Slurm; several brackets give every
    combination. Each group needs its number of slots, unless `default_slots` replaces those left out.
    The line of an entry is its line in a hostfile of these hosts. Raises DsrunError with everything that is
    wrong: bad ranges, bad names, hosts named twice, more than 100,000 hosts.
    """
    problems: list[Problem] = []
    groups: list[_Group] = []
    for piece in _pieces(text):
        with collected(problems):
            groups.append(_group(piece.strip(), default_slots))
    raise_all(problems)
    if (count := sum(group.count for group in groups)) > MOST_HOSTS:
        many = f"{count:,}" if count < 10**12 else "more than a million million"
        hint = "Look for a slip in the brackets."
        raise DsrunError(f"{many} hosts: more than {MOST_HOSTS:,}", where=shown(text), hint=hint)
    return tuple(_entries(groups))


def with_open_slots(text: str) -> list[tuple[str, int | None]]:
    """The hosts of `expand`, with None in place of slots that nobody gave."""
    # Slots that nobody gave follow the default: expanded with two of them, they differ.
    pairs = zip(expand(text, 1), expand(text, 2), strict=True)
    return [(entry.host, entry.slots if entry.slots == other.slots else None) for entry, other in pairs]


def _entries(groups: list[_Group]) -> list[HostSlots]:
    groups_of: dict[str, _Group] = {}
    problems: list[Problem] = []
    entries: list[HostSlots] = []
    for group in groups:
        for host in group.hosts():
            if fault := hostnames.name_fault(host):
                problems.append(Problem(fault.message, shown(group.written), fault.hint))
                break  # the others of a group have the same fault
            if host in groups_of:
                other = groups_of[host].written
                twice = "twice" if other == group.written else f"in {shown(other)} too"
                problems.append(Problem(f"{host} is named {twice}", shown(group.written), "Name it once."))
                break
            groups_of[host] = group
            entries.append(HostSlots(host, group.slots, len(entries) + 1))
    raise_all(problems)
    return entries


def _pieces(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    if not text.strip():
        raise DsrunError("no host is named", hint=EXAMPLES)
    pieces, depth, start = [], 0, 0
    for place, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            fault = "a [ inside brackets" if depth > 1 else "a ] without ["
            raise DsrunError(f"{fault} at character {place + 1}", where=shown(text), hint=EXAMPLES)
        if char == "," and depth == 0:
            pieces.append(text[start:place])
            start = place + 1
    if depth:
        raise DsrunError("a [ without ]", where=shown(text), hint=EXAMPLES)
    return [*pieces, text[start:]]


def _group(piece: str, default_slots: int | None) -> _Group:
    """Raises DsrunError where it isn't one."""
    if not piece:
        raise DsrunError("nothing between two commas, or at an end", hint=EXAMPLES)
    name, colon, slots = piece.rpartition(":")
    # fe80::8 is an address, whose end looks like a number of slots; fe80::1:8 is one, too, but so is what stands before
    # its last colon: there the end is taken for slots, which every group has to have.
    if hostnames.is_ipv6(piece) and not hostnames.is_ipv6(name):
        name, colon = piece, ""
    if not colon:
        name = piece
        if default_slots is None:
            raise DsrunError("no number of slots", where=shown(piece), hint=f"Write {piece}:N")
        slots = str(default_slots)
    if not re.fullmatch(r"-?[0-9]+", slots):
        raise DsrunError(f"{shown(slots)} is not a number of slots", where=shown(piece), hint=EXAMPLES)
    if fault := slots_fault(slots):
        raise DsrunError(fault.message, where=shown(piece), hint=fault.hint)
    # re.split gives texts and what was in the brackets in turn.
    parts = BRACKETS.split(name)
    brackets = tuple(tuple(_numbers(part, piece) for part in inside.split(",")) for inside in parts[1::2])
    return _Group(tuple(parts[::2]), brackets, int(slots), piece)


def _numbers(part: str, piece: str) -> _Numbers:
    """ "7" or "01-16". Raises DsrunError for anything else, naming the group it stands in."""
    match = RANGE.fullmatch(part.strip())
    where = shown(piece)
    if not match:
        raise DsrunError(f"{shown(part)} is neither a number nor a range", where=where, hint=EXAMPLES)
    first, last = match[1], match[2] or match[1]
    if max(len(first), len(last)) > LONGEST_NUMBER:
        raise DsrunError(f"{shown(part)} has more than {LONGEST_NUMBER} digits", where=where)
    if int(last) < int(first):
        raise DsrunError(f"{first}-{last} runs backwards", where=where, hint=f"Write {last}-{first}")
    padded = any(len(number) > 1 and number[0] == "0" for number in (first, last))
    if padded and len(first) != len(last):
        message = f"{first}-{last}: leading zeros, and numbers of {len(first)} and {len(last)} digits"
        hint = f"Write {first.zfill(len(last))}-{last.zfill(len(first))}, or no leading zeros."
        raise DsrunError(message, where=where, hint=hint)
    return _Numbers(int(first), int(last), len(first) if padded else 0)
