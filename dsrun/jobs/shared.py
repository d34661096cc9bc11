"""Whether all hosts see the same run folder: a mark is put into it by one, and read by the others."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from dsrun.jobs.run_folder import LOGS

MARK = f"{LOGS}/.shared"


def put_mark(run_dir: Path) -> str:
    """Mark the folder, and return the mark."""
    mark = secrets.token_hex(8)
    (run_dir / MARK).write_text(mark, encoding="ascii")
    return mark


def mark_of(run_dir: Path) -> str | None:
    """The folder's mark as it is seen from here; None where there is none."""
    with contextlib.suppress(OSError):
        return (run_dir / MARK).read_text(encoding="ascii")
    return None
