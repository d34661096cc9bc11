"""Writing what must not be lost: until it is on the disk, and in words where the disk refuses."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from dsrun.errors import DsrunError
from dsrun.files import is_full, nearest_there

FULL_BYTES = 1 << 20
"""A disk with less room than this is full."""
SAYS_FULL = re.compile(r"No space left on device|[Qq]uota exceeded|os error (28|122)\b")
"""What safetensors says, which has no errno either."""
CUT_SHORT = re.compile(r"unexpected pos|iostream error|failed writing|I/O error")
"""What torch says of a write that came to nothing: its zip writer knows no errno (serialize/inline_container.cc)."""


def reach_disk(paths: Iterable[Path]) -> None:
    """Wait until files, and folders' lists of names, are on the disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def refused(path: Path, error: Exception, hint: str) -> Exception:
    """The error in words, where the disk is why; else as it is. hint: what to do once there is room."""
    full = is_full(error) or bool(SAYS_FULL.search(str(error)))
    with contextlib.suppress(OSError):
        found = os.statvfs(nearest_there(path))
        full = full or found.f_bavail * found.f_frsize < FULL_BYTES
    if full or CUT_SHORT.search(str(error)):
        # Another rank may have given its room back by now.
        what = "the disk is full" if full else "the disk was full, or it fails"
        return DsrunError(f"can't be written: {what} ({error})", where=str(path), hint=hint)
    if isinstance(error, OSError):
        return DsrunError(f"can't be written: {error.strerror or error}", where=str(path))
    return error
