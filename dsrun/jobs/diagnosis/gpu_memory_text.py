"""PyTorch's out-of-memory line as numbers: what was asked for, what was there, who holds it.

Two forms: before torch 2.1 in brackets ("(GPU 0; 15.78 GiB total capacity; 14.1 GiB already allocated; ...)"), then in
sentences ("GPU 0 has a total capacity of 15.89 GiB of which 61.88 MiB is free.").
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_SIZE = r"([\d.]{1,12}) (bytes|KiB|MiB|GiB|TiB)"
GIB = {"bytes": 2.0**-30, "KiB": 2.0**-20, "MiB": 2.0**-10, "GiB": 1.0, "TiB": 1024.0}
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
    }.items()
}
LARGE = 0.1
"""The share of a card from which a part of its memory is worth a word."""


def numbers(line: str) -> dict[str, float] | None:
    """What an out-of-memory line says, in GiB; None where it says nothing in numbers."""
    found = {}
    for name, pattern in PATTERNS.items():
        if hit := pattern.search(line):
            size, unit = [part for part in hit.groups() if part is not None]
            try:
                found[name] = float(size) * GIB[unit]
            except ValueError:
                continue
    if "unallocated" not in found and {"reserved", "allocated"} <= set(found):
        found["unallocated"] = max(0.0, found["reserved"] - found["allocated"])
    if {"total", "free", "in_use"} <= set(found):
        found["others"] = max(0.0, found["total"] - found["free"] - found["in_use"])
    return found if "asked" in found else None


def in_words(found: Mapping[str, float], chinese: bool = False) -> str:
    """The numbers in a sentence or two, with what they tell."""
    total, asked = found.get("total"), found["asked"]
    if chinese:
        text = f"要分配 {asked:.2f} GiB" + (f"，显卡共 {total:.1f} GiB" if total else "")
        text += f"，PyTorch 已用 {found['allocated']:.1f} GiB" if "allocated" in found else ""
    else:
        text = f"{asked:.2f} GiB were asked for" + (f" on a card of {total:.1f} GiB" if total else "")
        text += f", of which PyTorch had {found['allocated']:.1f} GiB in use" if "allocated" in found else ""
    return f"{text}{_hint(found, chinese)}" + ("。" if chinese else ".")


def _hint(found: Mapping[str, float], chinese: bool) -> str:
    """What stands out among the numbers."""
    least = LARGE * found.get("total", 0.0)
    if found.get("others", 0.0) > max(least, 0.5):
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
