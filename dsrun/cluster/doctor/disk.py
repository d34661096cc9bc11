"""Is there room on the disks, and is the working folder there?"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from dsrun.cluster.doctor.frame import GIB, GREEN, GREY, RED, YELLOW, Host, Verdict, across, each, gib

TITLE = "disk"
ORDER = 50
SHARE = (
    "The run folder has to be on a file system that all hosts share, and write, under one path: --output-dir."
)
LEAST = GIB
LITTLE = 10 * GIB
"""A checkpoint of a 1B model with its optimizer states is 14 GB."""
LEAST_FILES = 1000


@across("folder", "disk")
def folder(hosts: Sequence[Host]) -> Iterator[tuple[Host, Verdict]]:
    """All hosts share the run folder under one path; unless it is named it is made where dsrun is called."""
    for host in hosts:
        fact = host["disk"]["folder"]
        path = fact["path"]
        if not fact["is_folder"]:
            yield host, Verdict(RED, f"no folder {path}", SHARE)
        elif not fact["writable"]:
            yield host, Verdict(YELLOW, f"{path} can't be written", SHARE)
        else:
            yield host, Verdict(GREEN, f"{path} is there ({fact['file_system']})")


@each("room", "disk")
def room(host: Host) -> Verdict:
    """Checkpoints go to the working folder, compiled operators and tokenised data to the cache."""
    found = [
        _room(host["disk"][name], what) for name, what in (("folder", "working folder"), ("cache", "cache"))
    ]
    for colour in (RED, YELLOW):
        if worse := [verdict for verdict in found if verdict.colour == colour]:
            return Verdict(colour, "; ".join(verdict.what for verdict in worse), worse[0].fix)
    return Verdict(GREEN, "; ".join(verdict.what for verdict in found))


def _room(fact: dict[str, Any], what: str) -> Verdict:
    said = f"{what}: {gib(fact['free'])} free"
    path = shlex.quote(fact["path"])
    fix = f"Make room, or use another disk. What takes it: du -xh --max-depth=2 {path} | sort -h | tail"
    if what == "cache" and not fact["writable"]:
        return Verdict(
            RED, f"cache: {fact['path']} can't be written", "Name another folder: DSRUN_CACHE=/path"
        )
    if fact.get("free_inodes") is not None and 0 <= fact["free_inodes"] < LEAST_FILES and fact["total"]:
        return Verdict(RED, f"{what}: no more files fit ({fact['free_inodes']} inodes)", fix)
    return Verdict(RED if fact["free"] < LEAST else YELLOW if fact["free"] < LITTLE else GREEN, said, fix)


@each("nvme", "disk")
def nvme(host: Host) -> Verdict:
    """Offload to NVMe reads and writes past the page cache (O_DIRECT), so it wants a real disk."""
    fact = host["disk"].get("nvme")
    if fact is None:
        return Verdict(GREY, "no --nvme to look at")
    said = f"{fact['path']}: {gib(fact['free'])} free, {fact['file_system']}"
    if not fact["is_folder"]:
        return Verdict(
            RED,
            f"no folder {fact['path']}",
            f"Make it, on the NVMe disk: mkdir -p {shlex.quote(fact['path'])}",
        )
    if not fact["writable"]:
        return Verdict(RED, f"{fact['path']} can't be written", f'chown "$USER" {shlex.quote(fact["path"])}')
    if fact["file_system"] in {"tmpfs", "overlay"} or str(fact["file_system"]).startswith(
        ("nfs", "fuse", "cifs")
    ):
        return Verdict(YELLOW, said, "Name a folder on the NVMe disk: this is no local disk (see `findmnt`).")
    if fact["free"] < LITTLE:
        return Verdict(YELLOW, said, "`dsrun plan` says how much the model takes there.")
    return Verdict(GREEN, said)
