"""Is there space on the disks, and is the working folder there?"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from dsrun.cluster.doctor.check import GREEN, GREY, RED, WORST, YELLOW, Host, Status, across, each
from dsrun.words import GIB, size_text

TITLE = "disk"
ORDER = 50
SHARE = (
    "The run folder has to be on a file system that all hosts share, and write, under one path: --output-dir."
)
LEAST = GIB
LITTLE = 10 * GIB
"""A checkpoint of a 1B model with its optimizer states is 14 GB."""
LEAST_FILES = 1000
LEAST_QUOTA_LEFT = 0.05
"""The part of a quota that should be left."""


@across("folder", "disk")
def folder(hosts: Sequence[Host]) -> Iterator[tuple[Host, Status]]:
    """All hosts share the run folder under one path; unless it is named it is made where dsrun is called."""
    for host in hosts:
        fact = host["disk"]["folder"]
        path = fact["path"]
        if not fact["is_folder"]:
            yield host, Status(RED, f"no folder {path}", SHARE)
        elif not fact["writable"]:
            yield host, Status(YELLOW, f"{path} can't be written", SHARE)
        else:
            yield host, Status(GREEN, f"{path} is there ({fact['file_system']})")


@each("folder-lock", "disk")
def folder_lock(host: Host) -> Status:
    """A run's folder is locked, so that no second dsrun works in it: by flock(2), or by a lease without it."""
    lock = host["disk"]["folder"]["lock"]
    mount = "Where several hosts start runs in one folder: mount it so that flock works among hosts (Lustre: -o flock)."
    if lock["kind"] == "unknown":
        return Status(GREY, f"not tried: {lock['why']}")
    if lock["kind"] == "lease":
        return Status(YELLOW, f"a lease: there is no flock ({lock['why']})", mount)
    if lock["one_host"]:
        return Status(YELLOW, f"flock, which other hosts don't see ({lock['one_host']})", mount)
    return Status(GREEN, "flock")


@each("room", "disk")
def room(host: Host) -> Status:
    """Checkpoints go to the working folder, compiled operators and tokenised data to the cache."""
    statuses = [_space(host["disk"]["folder"], "working folder"), _space(host["disk"]["cache"], "cache")]
    colour = min((status.colour for status in statuses), key=WORST.index)
    worst = [status for status in statuses if status.colour == colour]
    return Status(colour, "; ".join(status.what for status in worst), worst[0].fix if colour != GREEN else "")


def _space(fact: dict[str, Any], name: str) -> Status:
    path = shlex.quote(fact["path"])
    fix = f"Free some, or use another disk. What takes it: du -xh --max-depth=2 {path} | sort -h | tail"
    if name == "cache" and not fact["writable"]:
        return Status(RED, f"cache: {fact['path']} can't be written", "Use another folder: DSRUN_CACHE=/path")
    if fact.get("free_inodes") is not None and 0 <= fact["free_inodes"] < LEAST_FILES and fact["total"]:
        return Status(RED, f"{name}: no more files fit ({fact['free_inodes']} inodes)", fix)
    colour = RED if fact["free"] < LEAST else YELLOW if fact["free"] < LITTLE else GREEN
    return Status(colour, f"{name}: {size_text(fact['free'])} free", fix)


@each("quota", "quota")
def quota(host: Host) -> Status:
    """A full quota ends a job as a full disk does, while the disk looks empty ('Disk quota exceeded')."""
    fact = host["quota"]
    if fact["tool"] is None:
        return Status(GREY, f"not readable: no tool tells of quotas here ({fact['file_system']})")
    left = [
        (fact[limit] - fact[used]) / fact[limit]
        for used, limit in (("kib", "limit_kib"), ("files", "limit_files"))
        if fact.get(limit)
    ]
    if not left:
        return Status(GREEN, "none on the working folder")
    state = (
        f"{size_text(fact['kib'] * 1024)} of {size_text(fact['limit_kib'] * 1024)}"
        if fact["limit_kib"]
        else "no limit on bytes"
    )
    state += f", {fact['files']} of {fact['limit_files']} files" if fact["limit_files"] else ""
    if min(left) > LEAST_QUOTA_LEFT:
        return Status(GREEN, state)
    fix = "Remove old checkpoints and caches, ask for more, or write elsewhere: --output-dir, DSRUN_CACHE, HF_HOME."
    return Status(RED if min(left) <= 0 else YELLOW, f"the quota is nearly used up: {state}", fix)


@each("nvme", "disk")
def nvme(host: Host) -> Status:
    """Offload to NVMe reads and writes past the page cache (O_DIRECT), so it needs a real disk."""
    fact = host["disk"].get("nvme")
    if fact is None:
        return Status(GREY, "no --nvme to look at")
    state = f"{fact['path']}: {size_text(fact['free'])} free, {fact['file_system']}"
    if not fact["is_folder"]:
        fix = f"Make it, on the NVMe disk: mkdir -p {shlex.quote(fact['path'])}"
        return Status(RED, f"no folder {fact['path']}", fix)
    if not fact["writable"]:
        return Status(RED, f"{fact['path']} can't be written", f'chown "$USER" {shlex.quote(fact["path"])}')
    if str(fact["file_system"]).startswith(("tmpfs", "overlay", "nfs", "fuse", "cifs")):
        return Status(YELLOW, state, "Name a folder on the NVMe disk: this is not a local disk (`findmnt`).")
    if fact["free"] < LITTLE:
        return Status(YELLOW, state, "`dsrun plan` says how much the model takes there.")
    return Status(GREEN, state)
