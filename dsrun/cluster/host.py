"""What this host's memory is good for: what is free, within the limits that a container or a job scheduler sets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

UNLIMITED = 1 << 60
"""Bytes: cgroup v1 writes a number about this large where it sets no limit."""
ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class HostRam:
    """Bytes. total: of the machine or, if less, its cgroup. available: for a new job. limit: who sets the total."""

    total: int
    available: int
    limit: str


def host_ram(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> HostRam:
    """This host's memory: the machine's, or the tightest cgroup's on the way up from this process's own."""
    import psutil

    memory = psutil.virtual_memory()
    found = HostRam(int(memory.total), int(memory.available), "this machine")
    for folder in cgroup_folders(root, own):
        limit = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit is not None and limit < min(found.total, UNLIMITED):
            # Pages of files can be given back: what counts is the rest.
            cache = _stat(folder / "memory.stat")
            free = max(0, limit - max(0, (used or 0) - cache))
            found = HostRam(limit, min(found.available, free), f"the cgroup's limit ({folder})")
    return found


def cgroup_folders(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> list[Path]:
    """The cgroup folders of this process that may limit memory, the root's first."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return [root]
    found = [root, root / "memory"]
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        base = root if not controllers else root / "memory" if "memory" in controllers.split(",") else None
        if base is None:
            continue
        place = base
        for part in Path(path.lstrip("/")).parts:
            place = place / part
            found.append(place)
    return [folder for folder in found if folder.is_dir()]


def _number(*files: Path) -> int | None:
    for file in files:
        try:
            text = file.read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if text.isdecimal():
            return int(text)
    return None


def _stat(file: Path) -> int:
    """Bytes of inactive file pages; 0 where that isn't known."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    values = dict(line.split(" ", 1) for line in lines if " " in line)
    return next((int(values[name]) for name in ("total_inactive_file", "inactive_file") if name in values), 0)
