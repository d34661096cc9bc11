"""Sizes in lines about memory that ran out: how much was requested, how much there was, who holds it.

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
"""Patterns for host memory; the kernel's kB are KiB. "reserved": addresses, of which a part is in use."""
CUDA_SETTING = "PYTORCH_CUDA_ALLOC_CONF"
SETTINGS = {"NPU": "PYTORCH_NPU_ALLOC_CONF", "HIP": "PYTORCH_HIP_ALLOC_CONF"}
"""Device as a line names it -> the variable that its allocator reads."""
LARGE = 0.1
"""Share of a card's memory from which a part is worth mentioning."""


ROOM = 4.0
"""How many times what was asked for has to be free before memory can't have been what was missing."""
CONTEXT_GIB = 1.0
"""Memory that CUDA itself may take in a process, in GiB: the older form counts it to nobody."""


def numbers(line: str) -> dict[str, float] | None:
    """Sizes in an out-of-memory line, in GiB; None where it names none."""
    sizes = _sizes(line, PATTERNS)
    if "unallocated" not in sizes and {"reserved", "allocated"} <= set(sizes):
        sizes["unallocated"] = max(0.0, sizes["reserved"] - sizes["allocated"])
    if {"total", "free", "in_use"} <= set(sizes):
        sizes["others"] = max(0.0, sizes["total"] - sizes["free"] - sizes["in_use"])
    elif {"total", "free", "reserved"} <= set(sizes):
        sizes["others"] = max(0.0, sizes["total"] - sizes["free"] - sizes["reserved"] - CONTEXT_GIB)
    return sizes if "asked" in sizes else None


def setting_of(line: str) -> str:
    """The variable that the allocator of a line's device reads."""
    return next(
        (name for device, name in SETTINGS.items() if re.search(rf"\b{device}\b", line)), CUDA_SETTING
    )


def others_hold(line: str) -> bool:
    """Whether an out-of-memory line's numbers say that other processes hold much of the card."""
    return _others_hold(numbers(line) or {})


def _others_hold(sizes: Mapping[str, float]) -> bool:
    return sizes.get("others", 0.0) > max(LARGE * sizes.get("total", 0.0), 0.5)


def has_room(line: str) -> bool:
    """Whether an out-of-memory line's numbers say that the card had much more free than was asked for."""
    return _has_room(numbers(line) or {})


def _has_room(sizes: Mapping[str, float]) -> bool:
    free = sizes.get("free", 0.0)
    much = max(ROOM * sizes.get("asked", 0.0), LARGE * sizes.get("total", 0.0), 0.5)
    return free > much and "limit" not in sizes


def shown(gib: float, digits: int = 1) -> str:
    """A size with its unit: in GiB, and what would be next to nothing there in MiB."""
    least = 10.0**-digits
    return f"{gib:.{digits}f} GiB" if gib >= least or not gib else f"{gib * 1024:.3g} MiB"


def host_numbers(line: str) -> dict[str, float] | None:
    """Sizes in a line about host memory that ran out, in GiB; None where it names none."""
    return _sizes(line, ON_HOST) or None


def _sizes(line: str, patterns: Mapping[str, re.Pattern[str]]) -> dict[str, float]:
    sizes = {}
    for name, pattern in patterns.items():
        if hit := pattern.search(line):
            size, unit = [part for part in hit.groups() if part is not None]
            with contextlib.suppress(ValueError):  # 1.2.3
                sizes[name] = float(size) * GIB[unit]
    return sizes


def host_in_words(sizes: Mapping[str, float], chinese: bool = False) -> str:
    """The numbers of host memory in a sentence."""
    parts = []
    if "asked" in sizes:
        requested = f"{shown(sizes['asked'], 2)}"
        parts.append(f"要分配 {requested}" if chinese else f"{requested} were asked for")
    if "in_use" in sizes:
        held = f"{shown(sizes['in_use'])}"
        parts.append(
            f"被结束的进程占用 {held}" if chinese else f"The process that was ended had {held} in use"
        )
    return "".join(f"{part}。" for part in parts) if chinese else " ".join(f"{part}." for part in parts)


def in_words(sizes: Mapping[str, float], chinese: bool = False, setting: str = CUDA_SETTING) -> str:
    """The sizes in a sentence or two, with what they suggest. setting: the variable that the allocator reads."""
    total, requested = sizes.get("total"), sizes["asked"]
    if chinese:
        text = f"要分配 {shown(requested, 2)}" + (f"，显卡共 {shown(total)}" if total else "")
        text += f"，PyTorch 已用 {shown(sizes['allocated'])}" if "allocated" in sizes else ""
        text += f"，进程上限 {shown(sizes['limit'])}" if "limit" in sizes else ""
    else:
        text = f"{shown(requested, 2)} were asked for" + (f" on a card of {shown(total)}" if total else "")
        text += f", of which PyTorch had {shown(sizes['allocated'])} in use" if "allocated" in sizes else ""
        text += f"; this process may have {shown(sizes['limit'])}" if "limit" in sizes else ""
    return f"{text}{_hint(sizes, chinese, setting)}" + ("。" if chinese else ".")


def _hint(sizes: Mapping[str, float], chinese: bool, setting: str) -> str:
    """The most telling of the sizes."""
    least = LARGE * sizes.get("total", 0.0)
    if _has_room(sizes):
        free = shown(sizes["free"])
        return f"；仍有 {free} 空闲" if chinese else f"; {free} are free"
    if _others_hold(sizes):
        size = sizes["others"]
        return f"；其他进程占用 {shown(size)}" if chinese else f"; other processes hold {shown(size)}"
    if sizes.get("unallocated", 0.0) > max(sizes["asked"], least):
        size = sizes["unallocated"]
        if chinese:
            return f"；{shown(size)} 已保留却未使用（碎片）：设 {setting}=expandable_segments:True"
        return f"; {shown(size)} are reserved and unused (fragmentation): {setting}=expandable_segments:True"
    return ""
