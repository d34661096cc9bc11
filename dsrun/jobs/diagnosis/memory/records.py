"""A run's own records of memory that ran out: a rank's GPU by owner, and what each rank had of its host."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from dsrun.errors import BOUNDLESS, DsrunError
from dsrun.files import read_inside
from dsrun.job import job as jobs
from dsrun.job.layout import JOB, memory_file, resident_file
from dsrun.job.memory_division import MemoryDivision, MemoryPart, OwnedMemory, beside_plan
from dsrun.job.run_folder import json_object
from dsrun.words import GIB

SCARCE = 0.1
"""Share of a host's memory below which it was about to run out."""


def of_gpu(run_dir: Path, rank: int | None, requested_gib: float | None) -> MemoryDivision | None:
    """What a rank's GPU held as it ran out of memory, beside the plan; of any rank's where none is known to be first.
    None without a record that can be read."""
    job = _job(run_dir)
    ranks = [rank] if rank is not None else range(job.world_size if job else 0)
    division = next(filter(None, (_read(run_dir, one) for one in ranks)), None)
    if division is None:
        return None
    terms = _terms(job, "gpu_terms")
    free, total, reserved = division.free_gib, division.total_gib, division.reserved_gib
    known = None not in (free, total, reserved)
    return replace(
        division,
        requested_gib=requested_gib if division.requested_gib is None else division.requested_gib,
        others_gib=max(0.0, (total or 0) - (free or 0) - (reserved or 0)) if known else None,
        owners=beside_plan(division.owners, terms),
    )


def of_host(run_dir: Path, rank: int | None) -> MemoryDivision | None:
    """What the ranks of a host had resident, where its memory was about to run out, beside the plan for it.
    rank: the one that was killed; None: of any host's."""
    job = _job(run_dir)
    if job is None:
        return None
    for number, _ in enumerate(job.hosts):
        if rank is not None and rank not in jobs.ranks_of(job.hosts, number):
            continue
        seen = _json(run_dir, resident_file(number))
        least, total, kills = (_number(seen.get(name)) for name in ("least_ram_bytes", "ram_bytes", "ooms"))
        held = seen.get("resident")
        if not total or not isinstance(held, dict) or not (kills or least < SCARCE * total):
            continue
        owned = [OwnedMemory(f"rank {name}", _number(size) / GIB) for name, size in held.items()]
        terms = sorted(_terms(job, "host_terms").items(), key=lambda term: -term[1])
        return MemoryDivision(
            place="host", rank=rank, total_gib=total / GIB, free_gib=least / GIB,
            owners=tuple(sorted(owned, key=lambda one: -one.gib)),
            planned=tuple(MemoryPart(name, size / GIB) for name, size in terms),
        )  # fmt: skip
    return None


def _job(run_dir: Path) -> jobs.AnyJob | None:
    try:
        return jobs.read_shown(run_dir / JOB)
    except (DsrunError, OSError):
        return None  # of another version, or damaged: then there is no plan


def _terms(job: jobs.AnyJob | None, name: str) -> Mapping[str, float]:
    """The terms of a job's plan, in bytes; empty where it has none."""
    terms = (getattr(job, "prediction", None) or {}).get(name)
    return {key: _number(size) for key, size in terms.items()} if isinstance(terms, dict) else {}


def _json(run_dir: Path, name: str) -> dict[str, Any]:
    try:
        return json_object(read_inside(run_dir, name))
    except OSError:
        return {}


def _read(run_dir: Path, rank: int) -> MemoryDivision | None:
    try:
        return _division(json.loads(read_inside(run_dir, memory_file(rank))))
    except (OSError, ValueError, TypeError, KeyError, *BOUNDLESS):
        return None  # none was written, or a full disk cut it


def _division(content: Mapping[str, Any]) -> MemoryDivision:
    """The division that a rank wrote. Raises KeyError, TypeError or ValueError for anything else."""
    owners = tuple(
        OwnedMemory(
            str(one["owner"]), _number(one["gib"]), None,
            tuple(MemoryPart(str(part["name"]), _number(part["gib"])) for part in one["parts"]),
        )
        for one in content["owners"]
    )  # fmt: skip
    known = {field.name for field in fields(MemoryDivision)} - {"owners", "planned"}
    given = {name: value for name, value in content.items() if name in known}
    texts = ("place", "when", "failed_in")
    if not all(
        value is None or (isinstance(value, str) if name in texts else math.isfinite(value))
        for name, value in given.items()
    ):
        raise ValueError("a fact of another kind")
    return MemoryDivision(**given, owners=owners)


def _number(value: Any) -> float:
    return float(value) if type(value) in (int, float) and math.isfinite(value) else 0.0
