"""DeepSpeed asks py-cpuinfo twice whenever it loads a compiled operator, and each answer takes a second.

Twice in every rank, even where the operator is long built (CPUOpBuilder.cpu_arch and simd_width in
op_builder/builder.py): two of the ten seconds from a command to its first step. The answer is kept beside them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError
from dsrun.files import write_atomic


def remember() -> None:
    """Make cpuinfo.get_cpu_info answer from a file in TORCH_EXTENSIONS_DIR, made when first asked on this processor."""
    import cpuinfo

    folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    if folder and Path(folder).is_dir():
        path = Path(folder) / f"cpu-{_processor()}.json"
        cpuinfo.get_cpu_info = functools.cache(functools.partial(_answer, cpuinfo.get_cpu_info, path))


def _answer(ask: Any, path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        info: dict[str, Any] = ask()
    with contextlib.suppress(DsrunError):  # a folder that can't be written to: asked again next time
        write_atomic(path, json.dumps(info))
    return info


def _processor() -> str:
    """A digest of this processor's kind: hosts with others may share the folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    wanted = ("model name", "flags", "Features", "CPU part")
    facts = sorted({line for line in lines if line.startswith(wanted)})
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
