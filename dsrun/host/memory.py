"""The memory of this machine, within the limits of the cgroups that a container or a scheduler puts around a process.

Sent to hosts as part of the probe: Python 3.8, its own library.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from dsrun.host.system import first_number, pairs_of, text_of

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
UNLIMITED = 1 << 60
"""Bytes: cgroup v1 writes a number about this large where it sets no limit."""


class HostRam(NamedTuple):
    """Bytes of main memory."""

    total: int
    """Memory of the machine or, if less, its cgroup's limit."""
    available: int
    """Memory for a new job, without swapping."""
    limited: bool
    """Whether a cgroup sets the limit: a container's, or a job scheduler's."""


def host_ram(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> HostRam:
    """The machine's memory, or that of the tightest cgroup on the way up from this process's own."""
    ram = HostRam(*_machine_ram(), False)
    for folder in cgroup_folders(root, own):
        limit = first_number(folder, "memory.max", "memory.limit_in_bytes")
        # A wider limit inside a tighter one leaves nothing less: what is used there is used in the tighter one, too.
        if limit is not None and limit < min(ram.total, UNLIMITED):
            used = first_number(folder, "memory.current", "memory.usage_in_bytes") or 0
            stat = pairs_of(text_of(folder / "memory.stat"), " ")
            # Pages of files can be given back: they are not in use.
            used -= int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            ram = HostRam(limit, min(ram.available, max(0, limit - max(0, used))), True)
    return ram


def _machine_ram() -> tuple[int, int]:
    """Bytes of the whole machine, and those that are available."""
    rows = pairs_of(text_of("/proc/meminfo"), ":")
    total, available = (int(rows[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return total, available


def cgroup_folders(root: Path = CGROUPS, own: Path = OWN_CGROUP, controller: str = "memory") -> list[Path]:
    """The cgroup folders of this process that may limit memory (or what the controller counts), the root's first."""
    folders = [root, root / controller]
    for line in text_of(own).splitlines():
        # "0::/path" in cgroup v2; "4:memory:/path" in v1, where each controller has a tree of its own.
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        folder = root / controller if controllers else root
        for part in Path(path.lstrip("/")).parts:
            folder = folder / part
            folders.append(folder)
    return [folder for folder in folders if folder.is_dir()]


def oom_kills(root: Path = CGROUPS) -> int:
    """The number of processes that the kernel's OOM killer has ended in this process's cgroups, or on the machine."""
    folders = cgroup_folders(root)
    counts = [
        count
        for folder in folders
        for name in ("memory.events", "memory.oom_control")
        for count in _oom_counter(folder / name)
    ]
    return max(counts or _oom_counter(Path("/proc/vmstat")), default=0)


def _oom_counter(path: Path) -> list[int]:
    """The count in a file, as a list; empty where it has none."""
    return [int(number) for number in re.findall(r"^oom_kill (\d+)$", text_of(path), re.MULTILINE)]
