"""Files that must not be lost: waiting until they are on the disk, and errors of a full disk in words."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from dsrun.errors import DsrunError
from dsrun.files import is_full
from dsrun.host.system import nearest_there

FULL_BYTES = 1 << 20
"""A disk with less room than this is full."""
SAYS_FULL = re.compile(r"No space left on device|[Qq]uota exceeded|os error (28|122)\b")
"""The words of safetensors' error, which has no errno either."""
CUT_SHORT = re.compile(r"unexpected pos|iostream error|failed writing|I/O error")
"""The words of torch's error of a failed write: its zip writer knows no errno (serialize/inline_container.cc)."""


def reach_disk(paths: Iterable[Path]) -> None:
    """Wait until files, and folders' lists of names, are on the disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def refused(path: Path, error: Exception, hint: str) -> Exception:
    """The error in words, where the disk is the cause; else the error itself. hint: what to do once there is room."""
    full = is_full(error) or bool(SAYS_FULL.search(str(error)))
    with contextlib.suppress(OSError):
        disk = os.statvfs(nearest_there(path))
        full = full or disk.f_bavail * disk.f_frsize < FULL_BYTES
    if full or CUT_SHORT.search(str(error)):
        # Another rank may have given its room back by now.
        what = "the disk is full" if full else "the disk was full, or it fails"
        return DsrunError(f"can't be written: {what} ({error})", where=str(path), hint=hint)
    if isinstance(error, OSError):
        return DsrunError(f"can't be written: {error.strerror or error}", where=str(path))
    return error
