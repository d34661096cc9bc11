"""The precisions that this machine's CPU trains in. torch knows them, in a process of its own."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

SECONDS = 120
"""Time for an import of torch on a busy machine."""


@functools.cache
def has_fp16() -> bool:
    """Whether a CPU rank can train in fp16; True where torch doesn't answer: the ranks then report it themselves."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dsrun.training.engines.cpu_types"],
            capture_output=True, text=True, timeout=SECONDS, check=True,
        )  # fmt: skip
        return "fp16" in json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return True
