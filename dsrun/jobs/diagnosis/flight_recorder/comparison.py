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
"""What is told of a rank; signatures (nccl.toml) know these words."""
MOST_NAMED = 16
"""Ranks that are listed."""
HAS_TO_DIFFER = frozenset(
    {"send", "recv", "gather", "scatter", "broadcast", "reduce", "all_to_all", "ALLTOALL"}
)
"""Collectives to which ranks may bring other shapes."""


class Standing(NamedTuple):
    """What is told of a rank."""

    rank: int
    what: str
    collective: Collective
    """The one in question, as a rank that waits there enqueued it (of one that differs its own)."""
    waiting: tuple[int, ...] = ()
    """Ranks that wait there."""
    last: Collective | None = None
    """The last one that this rank enqueued in the group."""
    group: str = ""
    """What the group is for."""

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
    """What is told of the ranks that something is wrong with, the likeliest to blame first; none where all is well."""
    by_rank = {record.rank: record for record in records}
    standing = {rank: one for rank, record in by_rank.items() if (one := _oldest_pending(record))}
    missing = {rank: _missing(by_rank, rank, one) for rank, one in standing.items()}
    return (
        _behind(by_rank, standing, missing) or _differing(by_rank, standing) or _on_devices(by_rank, standing)
    )


def _oldest_pending(record: RankRecord) -> Collective | None:
    return next((one for one in record.collectives if one.pending), None)


def members(records: Mapping[int, RankRecord], group: str) -> list[int]:
    """The ranks of a group, in its own order; of one that no dump lists those that used it.

    Gloo's dumps list the default group under an empty name."""
    for record in records.values():
        if found := record.groups.get(group) or (len(record.groups) == 1 and record.groups.get("")):
            return sorted(found)
    return sorted(rank for rank, one in records.items() if _last(one, group))


def _last(record: RankRecord | None, group: str) -> Collective | None:
    """The last one of a group that a rank enqueued."""
    own = [one for one in record.collectives if one.group == group and not one.by_pair] if record else []
    return max(own, key=lambda one: one.number, default=None)


def _missing(records: Mapping[int, RankRecord], rank: int, at: Collective) -> list[int]:
    """Whom a rank waits for."""
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
    """Of a recv the rank that has not sent so often."""
    if at.peer is None or at.peer >= len(ranks) or rank not in ranks:
        return []
    sender, name = ranks[at.peer], f"send {at.peer}->{ranks.index(rank)}"
    sent = records[sender].collectives if sender in records else ()
    return [] if any(one.name == name and one.number >= at.number for one in sent) else [sender]


def _behind(
    records: Mapping[int, RankRecord],
    standing: Mapping[int, Collective],
    missing: Mapping[int, Sequence[int]],
) -> list[Standing]:
    """Ranks that are waited for: those that wait for nobody themselves; where all do, they wait crosswise."""
    awaited = Counter(other for others in missing.values() for other in others)
    silent = [rank for rank in awaited if rank not in records]
    if len(silent) > len(records):  # they lie elsewhere, and say nothing here
        awaited = Counter({rank: count for rank, count in awaited.items() if rank in records})
    free = [rank for rank in awaited if not missing.get(rank)]
    ordered = sorted(free or awaited, key=lambda rank: (rank not in records, -awaited[rank], rank))
    found = []
    for rank in ordered:
        waiting = [other for other, others in missing.items() if rank in others]
        at = min((standing[other] for other in waiting), key=lambda one: one.created)
        what = NO_DUMP if rank not in records else BEHIND if free else CROSSED
        last = _last(records.get(rank), at.group)
        found.append(Standing(rank, what, at, tuple(sorted(waiting)), last, _name(records, at.group)))
    return found


def _differing(records: Mapping[int, RankRecord], standing: Mapping[int, Collective]) -> list[Standing]:
    """Ranks whose collective is another than that of most, where they stand."""
    found = []
    for group, number in dict.fromkeys(
        (one.group, one.number) for one in standing.values() if not one.by_pair
    ):
        here = {
            rank: one
            for rank, one in standing.items()
            if (one.group, one.number, one.by_pair) == (group, number, False)
        }
        counts = Counter(map(_kind, here.values()))
        usual = counts.most_common(1)[0][0]
        odd = [rank for rank, one in here.items() if _kind(one) != usual]
        others = tuple(sorted(set(here) - set(odd)))
        found += [
            Standing(rank, DIFFERS, here[rank], others, here[others[0]], _name(records, group))
            for rank in odd
        ]
    return found


def _kind(one: Collective) -> tuple[str, str]:
    return one.name, "" if one.name.lstrip("_") in HAS_TO_DIFFER else one.sizes


def _on_devices(records: Mapping[int, RankRecord], standing: Mapping[int, Collective]) -> list[Standing]:
    """All ranks came: who has not begun, where others have; else that all began. Gloo tells neither."""
    if not standing:
        return []
    at = min(standing.values(), key=lambda one: one.created)
    here = {rank: one for rank, one in standing.items() if (one.group, one.number) == (at.group, at.number)}
    began = tuple(sorted(rank for rank, one in here.items() if one.state == "started"))
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
