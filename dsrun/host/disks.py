"""The disks of this machine: room, file systems with their locks and quotas, and shared memory.

Sent to hosts as part of the probe: Python 3.8, its own library.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from dsrun.host.locks import NO_FLOCK
from dsrun.host.system import link_target, nearest_there, output_of, text_of

SHM = Path("/dev/shm")  # noqa: S108  (POSIX shared memory is there, for everybody)
BUFFERS = "deepspeed_allreduce_buffer_"
"""The beginning of the names of DeepSpeed's buffers for CPU ranks (csrc/cpu/comm/shm.cpp); nothing removes them."""
FLOCK_OF_ONE_HOST = {"localflock", "nolock", "local_lock=flock", "local_lock=all"}
"""Mount options of Lustre and NFS with which a lock is seen on its own host alone (mount.lustre(8), nfs(5))."""


def room_at(path: Path) -> dict[str, Any]:
    """The room where a path lies, or would lie."""
    place = nearest_there(path)
    room = os.statvfs(place)
    return {
        "path": str(path),
        "exists": path.exists(),
        "is_folder": path.is_dir(),
        "free": room.f_bavail * room.f_frsize,
        "total": room.f_blocks * room.f_frsize,
        "free_inodes": room.f_favail if room.f_files else None,  # Btrfs counts none
        "writable": os.access(place, os.W_OK),
        "file_system": file_system(place),
    }


def lock_of(path: Path) -> dict[str, Any]:
    """The kind of lock that a folder's file system has, tried on a file without a name.

    kind: "flock", "lease" where it has no flock, "unknown" where nothing can be made in it. one_host: the mount option
    by which other hosts don't see a lock; empty if they do.
    """
    place = nearest_there(path)
    place = place if place.is_dir() else place.parent
    try:
        file = tempfile.TemporaryFile(dir=place)  # noqa: SIM115  (closed below)
    except OSError as error:
        return {"kind": "unknown", "why": error.strerror, "one_host": ""}
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            kind = "lease" if error.errno in NO_FLOCK else "unknown"
            return {"kind": kind, "why": error.strerror, "one_host": ""}
    options = mount_of(place)[1].split(",")
    return {"kind": "flock", "why": "", "one_host": "".join([*FLOCK_OF_ONE_HOST.intersection(options)][:1])}


def file_system(path: Path) -> str | None:
    """The kind of file system that a path is on: "ext4", "nfs4"."""
    return mount_of(path)[0]


def mount_of(path: Path) -> tuple[str | None, str]:
    """A path's file system and its mount options."""
    real = str(path.resolve())
    best: tuple[str, str | None, str] = ("", None, "")
    for line in text_of("/proc/self/mounts").splitlines():
        words = line.split()
        point = words[1].replace("\\040", " ")
        inside = point in {"/", real} or real.startswith(point + "/")
        # The longest beginning of the path; of two on one point the later, which hides the other.
        if inside and len(point) >= len(best[0]):
            best = (point, words[2], words[3])
    return best[1:]


def quota_of(path: Path) -> dict[str, Any]:
    """The user's own limits on a path's file system, KiB and files; tool: None where no program says them."""
    folder = nearest_there(path)
    kind = file_system(folder) or ""
    if kind == "lustre" and shutil.which("lfs"):
        text = output_of("lfs", "quota", "-q", "-u", str(os.getuid()), str(folder))
        return {"tool": "lfs", "file_system": kind, **_quota(text)}
    if shutil.which("quota"):
        # It ends with 1 where a limit is passed: what it prints counts.
        done = subprocess.run(
            ["quota", "-w", "-p", "-v", "-f", str(folder)], capture_output=True, timeout=10, check=False, cwd="/",
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return {"tool": "quota", "file_system": kind, **_quota(done.stdout.decode(errors="replace"))}
    return {"tool": None, "file_system": kind}


def _quota(text: str) -> dict[str, Any]:
    """The first row of `quota` or `lfs quota`: name, KiB used, quota, limit, grace, files, quota, limit, grace."""
    for line in text.splitlines():
        words = line.replace("*", "").split()
        if len(words) >= 8 and words[1].isdigit():
            numbers = [int(word) if word.isdigit() else 0 for word in words[1:9]]
            used, soft, hard, _, files, files_soft, files_hard = (*numbers, 0)[:7]
            return {
                "kib": used,
                "limit_kib": hard or soft,
                "files": files,
                "limit_files": files_hard or files_soft,
            }
    return {}


def shared_memory() -> dict[str, Any]:
    """The room in /dev/shm; leftovers: DeepSpeed's buffers of this user that no process has open or mapped."""
    room, user = os.statvfs(SHM), os.getuid()
    mine, others = [], 0
    for entry in SHM.iterdir():
        try:
            owned = entry.lstat().st_uid == user
        except OSError:
            continue
        mine += [entry] if owned else []
        others += not owned
    buffers = sorted(entry for entry in mine if entry.name.startswith(BUFFERS))
    used = _mapped() if buffers else set()  # looking at every process takes long
    left = [entry for entry in buffers if str(entry) not in used]
    return {
        "total": room.f_blocks * room.f_frsize,
        "free": room.f_bavail * room.f_frsize,
        "own_entries": len(mine),
        "other_entries": others,
        "user": user,
        "buffers_in_use": len(buffers) - len(left),
        "leftover_count": len(left),
        "leftovers": [str(entry) for entry in left[:20]],
        "leftover_bytes": sum(_size(entry) for entry in left),
    }


def _mapped() -> set[str]:
    """Every file under /dev/shm that a process, as far as this user may see, maps or has open."""
    paths: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        maps = text_of(process / "maps").splitlines()
        paths.update(line.split(None, 5)[-1] for line in maps if str(SHM) in line)
        with contextlib.suppress(OSError):  # another user's
            paths.update(link_target(handle) for handle in (process / "fd").iterdir())
    return {path for path in paths if path.startswith(str(SHM))}


def _size(path: Path) -> int:
    """Bytes that a file takes; 0 where it is gone by now."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0
