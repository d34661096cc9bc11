"""What dumps of the flight recorder tell, as lines of a log: signatures know them (nccl.toml)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dsrun.errors import DsrunError
from dsrun.jobs.diagnosis.flight_recorder import comparison, dumps
from dsrun.jobs.diagnosis.reading.log_lines import PeeledLine, peeled

BEGIN = "flight recorder:"


def lines_of(found: Mapping[int, Path]) -> list[PeeledLine]:
    """What the dumps of a job's ranks tell, by the numbers of their sources; one that can't be read is told, too."""
    records: dict[int, dumps.RankRecord] = {}
    lines = []
    for source, path in found.items():
        try:
            records[source] = dumps.read(path)
        except DsrunError as error:
            lines.append(peeled(source, 1, f"{BEGIN} {error.problems[0].what}"))
    sources = {record.rank: source for source, record in records.items()}
    if told := comparison.compare(list(records.values())):
        first, *others = told
        alike = ", ".join(str(one.rank) for one in others if one.what == first.what)
        text = f"{BEGIN} {first}{'; so it is with ranks ' if alike else ''}{alike}"
        lines.append(peeled(sources.get(first.rank, min(sources.values())), 1, text, first.rank))
    elif records:
        source, record = next(iter(records.items()))
        text = f"{BEGIN} {len(records)} of {_ranks(records)} ranks left a dump, and none is seen to be behind"
        lines.append(peeled(source, 1, text, record.rank if len(records) == 1 else None))
    return lines


def _ranks(records: Mapping[int, dumps.RankRecord]) -> int:
    """How many ranks the job has, as far as its groups say it."""
    return max(
        (len(group) for one in records.values() for group in one.groups.values()), default=len(records)
    )
