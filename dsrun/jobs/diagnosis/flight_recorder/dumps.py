"""Dumps of torch's flight recorder: one a rank, as a pickle or as JSON, with the collectives that it enqueued last.

torch writes them where a collective times out and TORCH_FR_BUFFER_SIZE (before 2.9 TORCH_NCCL_TRACE_BUFFER_SIZE) is
above 0, to TORCH_FR_DUMP_TEMP_FILE (TORCH_NCCL_DEBUG_INFO_TEMP_FILE) with the rank's number behind it. Their fields are
those that torch/distributed/flight_recorder/components/builder.py reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dsrun.errors import DsrunError
from dsrun.jobs.diagnosis.flight_recorder import data_pickle

NAME = re.compile(r"(?:trace|recorder|dump)[\w.-]{0,60}?rank[-_.]?(\d{1,6})(?:\.json)?$")
"""File name of a dump: "nccl_trace_rank_3", "comm_lib_trace_rank_3" and dsrun's own."""
DIGITS = re.compile(r"(\d{1,6})(?:\.json)?$")
HEAD = 4096
"""Bytes at a file's beginning by which a dump is recognised."""
PEER = re.compile(r":(?P<what>send|recv) \d{1,6}(?:->|<-)(?P<peer>\d{1,6})$")
DONE = "completed"
LIBRARIES = re.compile(r"/(?:site|dist)-packages/|/lib/python3[\d.]{0,4}/|^<")


class Collective(NamedTuple):
    """A collective that a rank enqueued."""

    group: str
    """Its process group's name."""
    number: int
    """Its number in the group, from 1; of a send or recv in that pair of ranks."""
    name: str
    """"all_reduce"; for a send or recv with both ranks."""
    sizes: str
    """Shapes and type of its inputs."""
    state: str
    """"scheduled", "started" or "completed"."""
    pending: bool
    """Whether it had not ended when the dump was written."""
    created: float
    """Seconds since 1970; 0 is unknown."""
    place: str
    """The line of the user's own code, as file:line; else the innermost one."""
    peer: int | None = None
    """The rank in the group that a recv waits for."""
    by_pair: bool = False
    """Whether it is a send or recv."""


class RankRecord(NamedTuple):
    """The content of a rank's dump."""

    rank: int
    collectives: tuple[Collective, ...]
    """The collectives, in the order in which they were enqueued."""
    groups: Mapping[str, frozenset[int]]
    """Process groups with the ranks in them."""
    names: Mapping[str, str]
    """Purposes of groups, as the program names them."""


def is_dump(path: Path) -> bool:
    """Whether a file is a dump, by its beginning."""
    with path.open("rb") as file:
        head = file.read(HEAD)
    if head.startswith(b"\x80"):
        return b"version" in head[:64] and (b"pg_config" in head or b"entries" in head)
    return head.lstrip().startswith(b"{") and any(
        word in head
        for word in (b'"pg_config"', b'"pg_status"', b'"collective_seq_id"', b'"comm_lib_version"')
    )


def read(path: Path) -> RankRecord:
    """A rank's dump. Raises DsrunError for one that can't be read, or without a rank in its name."""
    where = str(path)
    number = DIGITS.search(path.name)
    if number is None:
        raise DsrunError(
            "is a dump of a flight recorder, and its name says no rank",
            where=where,
            hint="Let it end in the rank.",
        )
    try:
        data = path.read_bytes()
        dump = data_pickle.read(data) if data.startswith(b"\x80") else json.loads(data)
        return _record(int(number[1]), dump)
    except DsrunError as error:
        raise DsrunError(error.problems[0].what, where=where) from error
    except OSError as error:
        raise DsrunError(f"can't be read: {error.strerror}", where=where) from error
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise DsrunError(f"is no dump of torch's flight recorder ({error!r})", where=where) from error


def _record(rank: int, dump: Mapping[str, Any]) -> RankRecord:
    config: Mapping[str, Mapping[str, Any]] = dump.get("pg_config") or {}
    groups = {str(name): _ranks(group.get("ranks")) for name, group in config.items()}
    entries: Iterable[Mapping[str, Any]] = dump.get("entries") or ()
    names = {str(name): str(group.get("desc") or "") for name, group in config.items()}
    collectives = tuple(_collective(entry) for entry in entries)
    for entry in entries:
        names.setdefault(_group(entry), str((entry["process_group"] or ("", ""))[1]))
    return RankRecord(rank, collectives, groups, names)


def _ranks(text: Any) -> frozenset[int]:
    """The ranks of a group: torch writes the list as a text."""
    return frozenset(map(int, re.findall(r"\d+", str(text))))


def _group(entry: Mapping[str, Any]) -> str:
    return str(entry["process_group"][0])


def _collective(entry: Mapping[str, Any]) -> Collective:
    name = str(entry["profiling_name"])
    by_pair = bool(entry.get("is_p2p"))
    pair = PEER.search(name)
    number = entry["p2p_seq_id" if by_pair else "collective_seq_id"]
    types = "/".join(dict.fromkeys(map(str, entry.get("input_dtypes") or ())))
    state = str(entry["state"])
    return Collective(
        group=_group(entry),
        number=int(number),
        name=name.partition(":")[2] or name,
        sizes=f"{entry.get('input_sizes') or []} {types}".strip(),
        state=state,
        pending=not entry.get("retired") and state != DONE,
        created=float(entry.get("time_created_ns") or 0) / 1e9,
        place=_place(entry.get("frames") or ()),
        peer=int(pair["peer"]) if pair and pair["what"] == "recv" else None,
        by_pair=by_pair,
    )


def _place(frames: Iterable[Mapping[str, Any]]) -> str:
    """The innermost line outside libraries."""
    lines = [(str(frame.get("filename", "")), frame.get("line", 0)) for frame in frames]
    outside = [(file, line) for file, line in lines if not LIBRARIES.search(file)]
    return next((f"{file}:{line}" for file, line in [*outside, *lines]), "")
