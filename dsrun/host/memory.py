"""This host's memory: the machine's, within the limits of the cgroups that a container or a scheduler puts around it.

Sent to hosts as part of the probe: Python 3.8, its own library, nothing of dsrun.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
UNLIMITED = 1 << 60
"""Bytes: cgroup v1 writes a number about this large where it sets no limit."""


class HostRam(NamedTuple):
    """Bytes of main memory."""

    total: int
    """Memory of the machine or, if less, its cgroup's limit."""
    available: int
    """For a new job, without swapping."""
    limited: bool
    """By a cgroup: a container's, or a job scheduler's."""


def host_ram(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> HostRam:
    """This host's memory: the machine's, or the tightest cgroup's on the way up from this process's own."""
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
    """Bytes in all, and available ones."""
    rows = pairs_of(text_of("/proc/meminfo"), ":")
    total, available = (int(rows[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return total, available


def cgroup_folders(root: Path = CGROUPS, own: Path = OWN_CGROUP, controller: str = "memory") -> list[Path]:
    """The cgroup folders of this process that may limit memory (or what the controller counts), the root's first."""
    found = [root, root / controller]
    for line in text_of(own).splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        folder = root / controller if controllers else root
        for part in Path(path.lstrip("/")).parts:
            folder = folder / part
            found.append(folder)
    return [folder for folder in found if folder.is_dir()]


def oom_kills(root: Path = CGROUPS) -> int:
    """How often the kernel's OOM killer has struck in this process's cgroups; on the machine where it has none."""
    found = []
    for folder in cgroup_folders(root):
        for name in ("memory.events", "memory.oom_control"):
            found += _oom_counter(folder / name)
    return max(found) if found else max(_oom_counter(Path("/proc/vmstat")), default=0)


def _oom_counter(path: Path) -> list[int]:
    found = re.findall(r"^oom_kill (\d+)$", text_of(path), re.MULTILINE)
    return [int(number) for number in found]


def first_number(folder: Path, *names: str) -> int | None:
    """The number in the first of the files that holds one; None where none does."""
    for name in names:
        text = text_of(folder / name).strip()
        if text.isdecimal():
            return int(text)
    return None


def text_of(path: str | Path) -> str:
    """A file's text; empty where it can't be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def pairs_of(text: str, sign: str) -> dict[str, str]:
    """What a file like /proc/meminfo says, by name."""
    return dict(line.split(sign, 1) for line in text.splitlines() if sign in line)
