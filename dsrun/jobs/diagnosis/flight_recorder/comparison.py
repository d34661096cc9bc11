"""Which rank is behind in which collective, from the dumps of several ranks.

1. Of each rank the oldest collective that hasn't ended is where it stands. It waits there for those ranks of the group
   that have not enqueued one with that number.
2. Who is waited for and waits for nobody is behind: what it does instead, its own log and its last collective say.
   Where two wait for one another in two groups, they enqueue in different orders.
3. Where nobody is behind, collectives of one number that differ (name, shapes, type) are out of step.
4. Else all ranks came: one whose device has not begun it is busy or stuck, and if all began it is the network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from dsrun.jobs.diagnosis.flight_recorder.dumps import Collective, RankRecord

BEHIND, CROSSED, DIFFERS, NOT_BEGUN, ALL_CAME, NO_DUMP = (
    "has not come to",
    "waits in another order at",
    "differs in",
    "came to and has not begun",
    "and all others began, and none ended,",
    "left no dump, and is waited for at",
)
"""Words for how a rank stands; signatures (nccl.toml) know them."""
MOST_NAMED = 16
"""Ranks that a line lists."""
HAS_TO_DIFFER = frozenset(
    {"send", "recv", "gather", "scatter", "broadcast", "reduce", "all_to_all", "ALLTOALL"}
)
"""Collectives whose shapes may differ between ranks."""


class Standing(NamedTuple):
    """How a rank stands at a collective."""

    rank: int
    what: str
    collective: Collective
    """The collective in question, as a rank that waits there enqueued it (where ranks differ, this rank's own)."""
    waiting: tuple[int, ...] = ()
    """Ranks that wait there."""
    last: Collective | None = None
    """The last collective that this rank enqueued in the group."""
    group: str = ""
    """The group's purpose, as the program names it."""

    def __str__(self) -> str:
        at = self.collective
        text = f"rank {self.rank} {self.what} {at.name} {at.number} {at.sizes}"
        text += f" of group {self.group or at.group or 'default'}"
        text += f"; ranks that wait there: {_listed(self.waiting)}" if self.waiting else ""
        text += f" (called at {at.place})" if at.place else ""
        if self.last and self.last is not at:
            text += f"; its own last one: {self.last.name} {self.last.number}"
            text += f" (called at {self.last.place})" if self.last.place else ""
        return text


def compare(records: Sequence[RankRecord]) -> list[Standing]:
    """Ranks that something is wrong with, the likeliest to blame first; none where all is well."""
    by_rank = {record.rank: record for record in records}
    standing = {rank: pending for rank, record in by_rank.items() if (pending := _oldest_pending(record))}
    missing = {rank: _missing(by_rank, rank, pending) for rank, pending in standing.items()}
    # The order matters: who hasn't come holds up all others, whatever these bring; only among ranks that have come can
    # their collectives differ; and only if all brought the same can a device or the network be to blame.
    return (
        _behind(by_rank, standing, missing) or _differing(by_rank, standing) or _on_devices(by_rank, standing)
    )


def _oldest_pending(record: RankRecord) -> Collective | None:
    return next((collective for collective in record.collectives if collective.pending), None)


def members(records: Mapping[int, RankRecord], group: str) -> list[int]:
    """The ranks of a group, in its own order; those that used it where no dump lists the group.

    Gloo's dumps list the default group under an empty name.
    """
    for record in records.values():
        if ranks := record.groups.get(group) or (len(record.groups) == 1 and record.groups.get("")):
            return sorted(ranks)
    return sorted(rank for rank, record in records.items() if _last(record, group))


def _last(record: RankRecord | None, group: str) -> Collective | None:
    """The last collective of a group that a rank enqueued."""
    enqueued = record.collectives if record else ()
    in_group = (collective for collective in enqueued if collective.group == group and not collective.by_pair)
    return max(in_group, key=lambda collective: collective.number, default=None)


def _missing(records: Mapping[int, RankRecord], rank: int, at: Collective) -> list[int]:
    """The ranks that a rank waits for."""
    ranks = members(records, at.group)
    if at.by_pair:
        return _missing_sender(records, rank, ranks, at)
    return [
        other
        for other in ranks
        if other != rank
        and ((last := _last(records.get(other), at.group)) is None or last.number < at.number)
    ]


def _missing_sender(
    records: Mapping[int, RankRecord], rank: int, ranks: Sequence[int], at: Collective
) -> list[int]:
    """The rank that a recv waits for, where it has sent less often than that."""
    if at.peer is None or at.peer >= len(ranks) or rank not in ranks:
        return []
    sender, name = ranks[at.peer], f"send {at.peer}->{ranks.index(rank)}"
    sent = records[sender].collectives if sender in records else ()
    return (
        []
        if any(collective.name == name and collective.number >= at.number for collective in sent)
        else [sender]
    )


def _behind(
    records: Mapping[int, RankRecord],
    standing: Mapping[int, Collective],
    missing: Mapping[int, Sequence[int]],
) -> list[Standing]:
    """Ranks that others wait for: those that wait for nobody themselves; where all do, they wait crosswise."""
    awaited = Counter(other for others in missing.values() for other in others)
    silent = [rank for rank in awaited if rank not in records]
    if len(silent) > len(records):  # most of the job's dumps are elsewhere: a missing one says nothing here
        awaited = Counter({rank: count for rank, count in awaited.items() if rank in records})
    free = [rank for rank in awaited if not missing.get(rank)]
    ordered = sorted(free or awaited, key=lambda rank: (rank not in records, -awaited[rank], rank))
    standings = []
    for rank in ordered:
        waiting = [other for other, others in missing.items() if rank in others]
        at = min((standing[other] for other in waiting), key=lambda collective: collective.created)
        fault = NO_DUMP if rank not in records else BEHIND if free else CROSSED
        last = _last(records.get(rank), at.group)
        standings.append(Standing(rank, fault, at, tuple(sorted(waiting)), last, _name(records, at.group)))
    return standings


def _differing(records: Mapping[int, RankRecord], standing: Mapping[int, Collective]) -> list[Standing]:
    """Ranks whose collective differs from that of most, where they stand."""
    standings = []
    for group, number in dict.fromkeys(
        (collective.group, collective.number) for collective in standing.values() if not collective.by_pair
    ):
        here = {
            rank: collective
            for rank, collective in standing.items()
            if (collective.group, collective.number, collective.by_pair) == (group, number, False)
        }
        counts = Counter(map(_kind, here.values()))
        usual = counts.most_common(1)[0][0]
        odd = [rank for rank, collective in here.items() if _kind(collective) != usual]
        others = tuple(sorted(set(here) - set(odd)))
        standings += [
            Standing(rank, DIFFERS, here[rank], others, here[others[0]], _name(records, group))
            for rank in odd
        ]
    return standings


def _kind(collective: Collective) -> tuple[str, str]:
    return collective.name, "" if collective.name.lstrip("_") in HAS_TO_DIFFER else collective.sizes


def _on_devices(records: Mapping[int, RankRecord], standing: Mapping[int, Collective]) -> list[Standing]:
    """The ranks whose device has not begun, where all have come; else that all began. Gloo records neither."""
    if not standing:
        return []
    at = min(standing.values(), key=lambda collective: collective.created)
    here = {
        rank: collective
        for rank, collective in standing.items()
        if (collective.group, collective.number) == (at.group, at.number)
    }
    began = tuple(sorted(rank for rank, collective in here.items() if collective.state == "started"))
    if not began or len(here) < len(members(records, at.group)):
        return []
    name = _name(records, at.group)
    late = [rank for rank in here if rank not in began]
    if late:
        return [Standing(rank, NOT_BEGUN, here[rank], began, None, name) for rank in late]
    return [Standing(min(here), ALL_CAME, at, (), None, name)]


def _name(records: Mapping[int, RankRecord], group: str) -> str:
    return next((name for record in records.values() if (name := record.names.get(group))), "")


def _listed(ranks: Iterable[int]) -> str:
    numbers = list(map(str, ranks))
    return ", ".join(numbers[:MOST_NAMED]) + (" ..." if len(numbers) > MOST_NAMED else "")
