"""Lines of memory that ran out as numbers: what was asked for, what was there, who holds it.

PyTorch's of a GPU has two forms: before torch 2.1 in brackets ("(GPU 0; 15.78 GiB total capacity; 14.1 GiB already
allocated; ...)"), then in sentences ("GPU 0 has a total capacity of 15.89 GiB of which 61.88 MiB is free."). Of host
memory PyTorch's allocator, numpy and the kernel's OOM killer (also of a container, in a cgroup) say something.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping

_SIZE = r"([\d.]{1,12}) (bytes|KiB|MiB|GiB|TiB)"
GIB = {"bytes": 2.0**-30, "kB": 2.0**-20, "KiB": 2.0**-20, "MiB": 2.0**-10, "GiB": 1.0, "TiB": 1024.0}
PATTERNS = {
    name: re.compile(pattern)
    for name, pattern in {
        "asked": rf"Tried to allocate {_SIZE}",
        "total": rf"total capac?ity of {_SIZE}|total capacty of {_SIZE}|{_SIZE} total capacity",
        "free": rf"of which {_SIZE} is free|{_SIZE} free",
        "in_use": rf"this process has {_SIZE} memory in use",
        "allocated": rf"{_SIZE} is allocated by PyTorch|{_SIZE} already allocated",
        "unallocated": rf"{_SIZE} is reserved by PyTorch but unallocated",
        "reserved": rf"{_SIZE} reserved in total by PyTorch",
        "limit": rf"{_SIZE} allowed",
    }.items()
}
ON_HOST = {
    "asked": re.compile(
        r"you tried to allocate ([\d.]{1,18}) (bytes)|Unable to allocate ([\d.]{1,12}) ([KMGT]iB)"
    ),
    "in_use": re.compile(r"anon-rss:(\d{1,14})(kB)"),
    "reserved": re.compile(r"total-vm:(\d{1,14})(kB)"),
}
"""Of host memory; the kernel's kB are KiB. "reserved": addresses, of which a part is in use."""
LARGE = 0.1
"""The share of a card from which a part of its memory is worth a word."""


OF_CONTEXT = 1.0
"""GiB that CUDA itself may take in a process beside what PyTorch has reserved, which the older form doesn't tell."""


def numbers(line: str) -> dict[str, float] | None:
    """What an out-of-memory line says, in GiB; None where it says nothing in numbers."""
    found = _sizes(line, PATTERNS)
    if "unallocated" not in found and {"reserved", "allocated"} <= set(found):
        found["unallocated"] = max(0.0, found["reserved"] - found["allocated"])
    if {"total", "free", "in_use"} <= set(found):
        found["others"] = max(0.0, found["total"] - found["free"] - found["in_use"])
    elif {"total", "free", "reserved"} <= set(found):
        found["others"] = max(0.0, found["total"] - found["free"] - found["reserved"] - OF_CONTEXT)
    return found if "asked" in found else None


def others_hold(line: str) -> bool:
    """Whether an out-of-memory line's numbers say that other processes hold much of the card."""
    return _others_hold(numbers(line) or {})


def _others_hold(found: Mapping[str, float]) -> bool:
    return found.get("others", 0.0) > max(LARGE * found.get("total", 0.0), 0.5)


def host_numbers(line: str) -> dict[str, float] | None:
    """What a line of host memory that ran out says, in GiB; None where it says nothing in numbers."""
    return _sizes(line, ON_HOST) or None


def _sizes(line: str, patterns: Mapping[str, re.Pattern[str]]) -> dict[str, float]:
    found = {}
    for name, pattern in patterns.items():
        if hit := pattern.search(line):
            size, unit = [part for part in hit.groups() if part is not None]
            with contextlib.suppress(ValueError):  # 1.2.3
                found[name] = float(size) * GIB[unit]
    return found


def host_in_words(found: Mapping[str, float], chinese: bool = False) -> str:
    """The numbers of host memory in a sentence."""
    parts = []
    if "asked" in found:
        asked = f"{found['asked']:.2f} GiB"
        parts.append(f"要分配 {asked}" if chinese else f"{asked} were asked for")
    if "in_use" in found:
        held = f"{found['in_use']:.1f} GiB"
        parts.append(
            f"被结束的进程占用 {held}" if chinese else f"The process that was ended had {held} in use"
        )
    return "".join(f"{part}。" for part in parts) if chinese else " ".join(f"{part}." for part in parts)


def in_words(found: Mapping[str, float], chinese: bool = False) -> str:
    """The numbers in a sentence or two, with what they tell."""
    total, asked = found.get("total"), found["asked"]
    if chinese:
        text = f"要分配 {asked:.2f} GiB" + (f"，显卡共 {total:.1f} GiB" if total else "")
        text += f"，PyTorch 已用 {found['allocated']:.1f} GiB" if "allocated" in found else ""
        text += f"，进程上限 {found['limit']:.1f} GiB" if "limit" in found else ""
    else:
        text = f"{asked:.2f} GiB were asked for" + (f" on a card of {total:.1f} GiB" if total else "")
        text += f", of which PyTorch had {found['allocated']:.1f} GiB in use" if "allocated" in found else ""
        text += f"; this process may have {found['limit']:.1f} GiB" if "limit" in found else ""
    return f"{text}{_hint(found, chinese)}" + ("。" if chinese else ".")


def _hint(found: Mapping[str, float], chinese: bool) -> str:
    """What stands out among the numbers."""
    least = LARGE * found.get("total", 0.0)
    if _others_hold(found):
        size = found["others"]
        return f"；其他进程占用 {size:.1f} GiB" if chinese else f"; other processes hold {size:.1f} GiB"
    if found.get("unallocated", 0.0) > max(found["asked"], least):
        size = found["unallocated"]
        if chinese:
            return f"；{size:.1f} GiB 已保留却未使用（碎片）：设 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        return (
            f"; {size:.1f} GiB are reserved and unused (fragmentation): "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
    return ""
