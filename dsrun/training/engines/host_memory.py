"""How much memory of this host is free."""

from __future__ import annotations

import contextlib
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def available_bytes(cgroup: Path = CGROUP) -> int:
    """What new memory can be had without swapping: of the machine, or of the container where that is less.

    cgroup: version 2's, as a container sees its own; elsewhere it says nothing.
    """
    import psutil

    free = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        limit, used = (
            int((cgroup / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current")
        )
        free = min(free, max(0, limit - used))
    return free
