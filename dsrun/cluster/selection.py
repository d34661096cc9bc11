"""The devices of hosts that a job gets: DeepSpeed's --include and --exclude, dsrun's --devices.

The grammar of the first two is DeepSpeed's, `NODE[:SLOT[,SLOT...]][@NODE...]`, and so is the result wherever both
accept (deepspeed/launcher/runner.py, parse_node_config_list and parse_resource_filter): in the hostfile's order,
the slots ascending. --devices keeps the order in which it names them. What DeepSpeed drops silently is an error here:
a slot or a whole host named twice, --num_nodes beyond the hostfile, --num_gpus beyond a host's slots.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dsrun.catalog import closest
from dsrun.cluster.hostfile import MOST_SLOTS, HostSlots
from dsrun.cluster.hostnames import shown
from dsrun.errors import DsrunError, Problem, collected, raise_all
from dsrun.words import counted

ALL = "all"
MOST_NAMED = 8
"""Hosts that a message names before it only counts."""
PART = re.compile(r"([0-9]+)(?:-([0-9]+))?")
FILTER = "As: --include host1:0,1@host2"
DEVICES = "As: --devices host1:0-3,host2:all"


class ResourcePool(dict[str, tuple[int, ...]]):
    """The slots of each host (the name is DeepSpeed's word). source: where they are from, for messages."""

    source = "the hostfile"


@dataclass(frozen=True)
class Selection:
    """The devices of a job, in the order of the ranks."""

    hosts: tuple[tuple[str, tuple[int, ...]], ...]
    """(Host, its slots)"""
    whole: frozenset[str] = field(default=frozenset(), compare=False)
    """Hosts that were named as a whole, and not by their slots."""


def select(
    entries: Sequence[HostSlots],
    include: str | None = None,
    exclude: str | None = None,
    *,
    devices: str | None = None,
    gpus: int | None = None,
    nodes: int | None = None,
    source: str = ResourcePool.source,
) -> Selection:
    """The devices that are left of a hostfile's entries.

    include, exclude: as DeepSpeed takes them. devices: "host1:0-3,host2:all"; "2,3" or "all" where there is one
    host. gpus: this many devices of each host, the first ones; nodes: this many hosts, the first ones. All of them if
    nothing is given. source: where the entries are from, for messages. Raises DsrunError for options that contradict
    each other, and for hosts or slots that aren't there.
    """
    there = ResourcePool({entry.host: tuple(range(entry.slots)) for entry in entries})
    there.source = source
    if not there:
        raise DsrunError("there is no host to choose from")
    if len(there) < len(entries):
        # DeepSpeed's own reader refuses such a hostfile, but lists can be written in other ways, too.
        twice = [host for host, count in Counter(entry.host for entry in entries).items() if count > 1]
        raise DsrunError(f"{_names(twice)} is listed twice", hint="Name each host once.")
    options = {"--include": include, "--exclude": exclude, "--devices": devices}
    check_together({**options, "--gpus": gpus, "--nodes": nodes})
    whole: set[str]
    if include is not None:
        wanted = _filter(include, "--include", there)
        left = {host: wanted[host] or slots for host, slots in there.items() if host in wanted}
        whole = {host for host, slots in wanted.items() if not slots}
    elif devices is not None:
        left, whole = _devices(devices, there)
    else:
        left = _without(exclude, there) if exclude is not None else _first(there, gpus, nodes)
        whole = set(left)
    return Selection(tuple(left.items()), frozenset(whole))


def check_together(given: Mapping[str, str | int | None]) -> None:
    """--gpus and --nodes may be given together; any other two contradict each other. Raises DsrunError for these.

    given: option -> value, None where it isn't given.
    """
    used = [name for name, value in given.items() if value is not None]
    if len(used) > 1 and set(used) != {"--gpus", "--nodes"}:
        both = " and ".join(f"{name} {given[name]}" for name in used)
        hint = "Give one of them; only --gpus and --nodes combine."
        raise DsrunError(f"{both} contradict each other", hint=hint)


def _first(there: ResourcePool, gpus: int | None, nodes: int | None) -> dict[str, tuple[int, ...]]:
    """The first `gpus` devices of the first `nodes` hosts."""
    if nodes is not None and not 0 < nodes <= len(there):
        message = f"--nodes {nodes}: {there.source} has {counted(len(there), 'host')}"
        raise DsrunError(message, hint=f"Give 1 to {len(there)}." if len(there) > 1 else "Give 1.")
    chosen = dict(list(there.items())[:nodes])
    if gpus is None:
        return chosen
    if gpus < 1:
        raise DsrunError(f"--gpus {gpus} leaves no device", hint="Give 1 or more for each host.")
    lacking = {host: counted(len(slots), "slot") for host, slots in chosen.items() if len(slots) < gpus}
    if lacking:
        hint = "Give at most that many."
        raise DsrunError(
            Problem(f"--gpus {gpus}: host {host} has {has}", hint=hint) for host, has in lacking.items()
        )
    return {host: slots[:gpus] for host, slots in chosen.items()}


def _without(exclude: str, there: ResourcePool) -> dict[str, tuple[int, ...]]:
    unwanted = _filter(exclude, "--exclude", there)
    left = {}
    for host, slots in there.items():
        excluded = (unwanted[host] or slots) if host in unwanted else ()
        if remaining := tuple(slot for slot in slots if slot not in excluded):
            left[host] = remaining
    if not left:
        raise DsrunError(f"--exclude {exclude} leaves no device of {_known(there)}", hint="Exclude fewer.")
    return left


def _filter(text: str, option: str, there: ResourcePool) -> dict[str, tuple[int, ...]]:
    """The hosts and slots of a filter, sorted; no slots where the whole host is meant."""
    slots_of: dict[str, list[int]] = {}
    whole: set[str] = set()
    problems: list[Problem] = []
    where = f"{option} {text}"
    for piece in text.split("@"):
        host, slots = _host_and_slots(piece, there)
        if problem := _unknown(host, there, where):
            problems.append(problem)
            continue
        numbers: list[int] = []
        for part in slots.split(",") if slots is not None else ():
            with collected(problems):
                numbers += _slot(part, where)
        problems += _absent(host, numbers, there, where)
        # A host may come twice with different slots, as DeepSpeed takes it; the same slot twice, or a slot beside the
        # whole host, DeepSpeed drops in silence.
        before = slots_of.setdefault(host, [])
        if again := _repeated(before + numbers):
            problems.append(Problem(f"{host}:{_list(again)} is named twice", where, "Name it once."))
        if host in whole or (slots is None and before):
            message = f"host {host} is named as a whole and again"
            problems.append(Problem(message, where, "Name its slots, or the whole host."))
        before += numbers
        if slots is None:
            whole.add(host)
    raise_all(problems)
    return {host: tuple(sorted(numbers)) for host, numbers in slots_of.items()}


def _host_and_slots(piece: str, there: ResourcePool) -> tuple[str, str | None]:
    """`host:0,1` or `host`. An IPv6 address is known by being one of the hosts."""
    piece = piece.strip()
    if piece in there or ":" not in piece:
        return piece, None
    host, _, slots = piece.rpartition(":")
    return host, slots


def _slot(part: str, where: str) -> tuple[int, ...]:
    part = part.strip()
    if not (part.isascii() and part.isdigit()):
        hint = "Slots are numbers from 0; ranges are for --devices."
        raise DsrunError(f"{shown(part)} is not a slot", where=where, hint=hint)
    return (_int(part),)


def _int(digits: str) -> int:
    """The number, or one that no host has either: int() refuses texts of more than 4300 digits."""
    return int(digits) if len(digits) < 100 else 10**99


def _devices(text: str, there: ResourcePool) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """The hosts and slots of --devices, and the hosts of which it wants all."""
    where = f"--devices {text}"
    slots_of: dict[str, list[int]] = {}
    whole: set[str] = set()
    problems: list[Problem] = []
    host = next(iter(there)) if len(there) == 1 else ""
    for piece in text.split(","):
        name, part = _host_and_slots(piece, there)
        if part is None:
            name, part = "", name
        if name:
            host = name
            if host in slots_of:
                problems.append(Problem(f"host {host} is named twice", where, f"As: {host}:0,2-3"))
        if problem := _misplaced(host, part, there, where):
            problems.append(problem)
            continue
        slots_of.setdefault(host, [])
        whole |= {host} if part == ALL else set()
        try:
            numbers = list(there[host]) if part == ALL else _range(part, where)
        except DsrunError as error:
            problems += error.problems
            continue
        problems += _absent(host, numbers, there, where)
        slots_of[host] += numbers
    for host, numbers in slots_of.items():
        if again := _repeated(numbers):
            problems.append(Problem(f"{host}:{_list(again)} is named twice", where, "Name it once."))
    if problems:
        raise DsrunError(dict.fromkeys(problems))
    return {host: tuple(numbers) for host, numbers in slots_of.items()}, whole


def _misplaced(host: str, part: str, there: ResourcePool, where: str) -> Problem | None:
    """The reason why a device can't be looked up on its host."""
    if part in there:
        return Problem(f"no devices behind host {part}", where, f"Write {part}:{ALL} for all of them.")
    if not host:
        message = f"{shown(part)}: on which of {counted(len(there), 'host')}?"
        return Problem(message, where, DEVICES)
    return _unknown(host, there, where)


def _range(part: str, where: str) -> list[int]:
    match = PART.fullmatch(part.strip())
    if not match:
        raise DsrunError(f"{shown(part)} is not a device", where=where, hint=DEVICES)
    first, last = _int(match[1]), _int(match[2] or match[1])
    if last < first:
        raise DsrunError(f"{shown(part)} runs backwards", where=where, hint=f"Write {match[2]}-{match[1]}")
    if last >= MOST_SLOTS:
        raise DsrunError(f"there is no device {shown(match[2] or match[1])}", where=where, hint=DEVICES)
    return list(range(first, last + 1))


def _unknown(host: str, there: ResourcePool, where: str) -> Problem | None:
    if host in there:
        return None
    if not host:
        return Problem("a host's name is missing", where, FILTER if "--devices" not in where else DEVICES)
    near = closest(host, there) if len(there) <= 1000 else None
    hint = f"Did you mean {near!r}? " if near else ""
    message = f"host {shown(host)} is not in {there.source}"
    return Problem(message, where, f"{hint}It has {_known(there)}.")


def _absent(host: str, numbers: Sequence[int], there: ResourcePool, where: str) -> Iterator[Problem]:
    absent = sorted(set(numbers) - set(there[host]))
    if absent:
        last = len(there[host]) - 1
        source, span = f"{there.source[:1].upper()}{there.source[1:]}", f"0 to {last}" if last else "0 alone"
        hint = f"{source} gives it {counted(last + 1, 'slot')}: {span}."
        yield Problem(f"host {host} has no slot {_list(absent)}", where, hint)


def _repeated(numbers: Sequence[int]) -> list[int]:
    return sorted(number for number, count in Counter(numbers).items() if count > 1)


def _list(numbers: Sequence[int]) -> str:
    texts = [str(number) if number < 10**18 else "..." for number in numbers[:MOST_NAMED]]
    return ",".join([*texts, "..."] if len(numbers) > MOST_NAMED else texts)


def _names(hosts: Sequence[str]) -> str:
    return ", ".join([*hosts[:MOST_NAMED], "..."] if len(hosts) > MOST_NAMED else hosts)


def _known(there: ResourcePool) -> str:
    return (
        _names(tuple(there)) if len(there) <= MOST_NAMED else f"{_names(tuple(there))} ({len(there)} hosts)"
    )
