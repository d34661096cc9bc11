"""Why a process ended without an error message: its exit code, and the kernel's OOM killer."""

from __future__ import annotations

import re
import signal

REPORTED = re.compile(r"exits with return code = (-?\d+)")
"""The launcher's message about a rank's exit code (deepspeed/launcher/launch.py)."""


def reported_codes(output: str) -> list[int]:
    """The exit codes of ranks that the launcher printed, in order."""
    return [int(code) for code in REPORTED.findall(output)]


def reported_code(output: str, code: int, alone: bool) -> int | None:
    """The first rank's exit code, -N for signal N; None where the launcher's message need not be about that rank.

    alone: no other rank ended with an error of its own, so that a positive code can only be the first rank's.
    """
    reported = reported_codes(output)
    if not reported and code < 0:
        return None  # a signal ended the launcher itself
    # Without a message the code is the launcher's own: a shell gives 128 + N for signal N.
    signed = reported[-1] if reported else (code - 256 if code > 128 else code)
    return signed if signed < 0 or (alone and signed > 0) else None


def killed_in_words(code: int | None, ooms: int) -> str:
    """Why a process ended without an error message. code: as in `reported_code`; ooms: strikes of the OOM killer."""
    if ooms > 0:
        remedy = "fewer ranks per host, no CPU offload, or more RAM"
        return f"killed by the kernel's OOM killer: host memory ran out ({remedy})"
    if code is not None and code >= 0:
        return f"it exited with code {code}, without an error message"
    by_whom = "by somebody, a resource manager, or the kernel when memory ran out (see dmesg)"
    if code is None:
        return f"it ended without an error message: killed {by_whom}, or it exited by itself (os._exit)"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    if name == "SIGKILL":
        return f"killed (SIGKILL): {by_whom}"
    reasons = {
        "SIGBUS": "a memory-mapped file or /dev/shm ran out of room",
        "SIGSEGV": "a fault in compiled code",
        "SIGABRT": "compiled code gave up; the reason stands in its log",
        "SIGILL": "compiled for another processor: delete the compiled operators (TORCH_EXTENSIONS_DIR)",
        "SIGTERM": "asked to end by somebody or by a resource manager",
    }
    return f"killed by {name}: {reasons.get(name, 'see its log')}"
