"""The findings in dumps of the flight recorder, as lines of a log: signatures know them (nccl.toml)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dsrun.errors import DsrunError
from dsrun.jobs.diagnosis.flight_recorder import comparison, dumps
from dsrun.jobs.diagnosis.reading.log_lines import PeeledLine, peeled

BEGIN = "flight recorder:"


def lines_of(paths: Mapping[int, Path]) -> list[PeeledLine]:
    """Findings in the dumps of a job's ranks, by the numbers of their sources, and a line for each unreadable dump."""
    records: dict[int, dumps.RankRecord] = {}
    lines = []
    for source, path in paths.items():
        try:
            records[source] = dumps.read(path)
        except DsrunError as error:
            lines.append(peeled(source, 1, f"{BEGIN} {error.problems[0].what}"))
    sources = {record.rank: source for source, record in records.items()}
    if standings := comparison.compare(list(records.values())):
        first, *others = standings
        alike = ", ".join(str(other.rank) for other in others if other.what == first.what)
        text = f"{BEGIN} {first}{'; so it is with ranks ' if alike else ''}{alike}"
        lines.append(peeled(sources.get(first.rank, min(sources.values())), 1, text, first.rank))
    elif records:
        source, record = next(iter(records.items()))
        text = f"{BEGIN} {len(records)} of {_ranks(records)} ranks left a dump, and none is seen to be behind"
        lines.append(peeled(source, 1, text, record.rank if len(records) == 1 else None))
    return lines


def _ranks(records: Mapping[int, dumps.RankRecord]) -> int:
    """How many ranks the job has, as far as its groups show."""
    return max(
        (len(group) for record in records.values() for group in record.groups.values()), default=len(records)
    )
