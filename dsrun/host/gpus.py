"""The NVIDIA GPUs of this machine, their driver and the faults that it counts.

Sent to hosts as part of the probe: Python 3.8, its own library.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from dsrun.host.system import number_of, output_of, text_of

DRIVER = Path("/proc/driver/nvidia")
PCI_DEVICES = Path("/sys/bus/pci/devices")
NVIDIA = "0x10de"
"""PCI's number of the vendor."""
DISPLAY_CLASSES = ("0x0300", "0x0302")
"""PCI's classes of graphics cards, and of those without a connector."""
VGPU = re.compile(r"\bGRID\b|\bvGPU\b|-\d+[ABCQ]$")
"""Names of GPUs that a hypervisor shares: "GRID T4-16Q", "NVIDIA A40-48C"."""
ASK_VIRTUAL_MEMORY = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
number, answer = ctypes.c_int(), ctypes.c_int()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(number)) == 0 and number.value
answers = set()
for index in range(number.value):
    device = ctypes.c_int()
    assert cuda.cuDeviceGet(ctypes.byref(device), index) == 0
    assert cuda.cuDeviceGetAttribute(ctypes.byref(answer), 102, device) == 0
    answers.add(answer.value)
print(int(all(answers)))
"""
"""Number 102 is CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED in cuda.h."""
DRIVER_S = 20
"""Time for the driver to answer: without its daemon it sets up each GPU first."""
XID = re.compile(r"\[\s*(?P<at>\d+\.\d+)\].*NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F:.]+)\): (?P<xid>\d+)")
SLOWED = ("hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown")
"""The driver's names of why a GPU's clock is held down, as far as somebody should look at it."""
FAILED = ("remapped_row_failure", "unrepairable_memory", "sram_threshold_exceeded")
"""The GPU has to be replaced."""
PENDING = (
    "remapped_row_pending",
    "pending_retirement",
    "pending_blacklist",
    "channel_repair_pending",
    "tpc_repair_pending",
)
"""A reset repairs it."""


def nvidia_gpus() -> dict[str, Any]:
    """The GPUs and their processes as nvidia-smi shows them; on_bus: how many the PCI bus has, driver or not;
    of_driver: how many the kernel module has, which are more where one has fallen off."""
    facts: dict[str, Any] = {
        "driver": None,
        "gpus": [],
        "processes": [],
        "on_bus": _on_bus(),
        "of_driver": len(list(DRIVER.glob("gpus/*"))),
    }
    if not shutil.which("nvidia-smi"):
        return {**facts, "tool": False}
    fields = "--query-gpu=index,name,uuid,memory.total,memory.used,driver_version"
    try:
        rows = _nvidia_smi(fields + ",compute_cap")
    except OSError as error:
        if "compute_cap" not in str(error):  # drivers before 510 don't know it
            return {**facts, "tool": True, "fault": str(error)}
        rows = _nvidia_smi(fields)
    for index, name, uuid, total, used, driver, *capability in rows:
        facts["driver"] = driver
        facts["gpus"].append(
            {
                "index": int(index),
                "name": name,
                "uuid": uuid,
                "total_mib": number_of(total),
                "used_mib": number_of(used),
                # An older driver's row has no such column; a new one may answer [N/A].
                "compute_capability": next(
                    (text for text in capability if number_of(text) is not None), None
                ),
            }
        )
    facts["processes"] = [
        {"uuid": uuid, "pid": number_of(pid), "used_mib": number_of(used), "name": name, "user": _owner(pid)}
        for uuid, pid, used, name, *_ in _nvidia_smi("--query-compute-apps=gpu_uuid,pid,used_memory,name")
    ]
    return {**facts, "tool": True}


def gpu_health() -> dict[str, Any]:
    """The faults of each GPU that the driver counts; None where the GPU or the driver doesn't say."""
    if not shutil.which("nvidia-smi"):
        return {"gpus": []}
    from xml.etree import ElementTree as Tree  # slow

    log = Tree.fromstring(output_of("nvidia-smi", "-q", "-x", seconds=25))  # noqa: S314  (the driver's own words)
    return {"gpus": [_health(gpu, index) for index, gpu in enumerate(log.iter("gpu"))]}


def kernel_faults() -> dict[str, Any]:
    """NVIDIA's faults (Xid) since the machine has started; many systems show the log to root only."""
    if not shutil.which("dmesg"):
        return {"unreadable": "no dmesg"}
    try:
        text = output_of("dmesg")
    except OSError as error:
        return {"unreadable": str(error)[-120:]}
    now = float(text_of("/proc/uptime").split()[0])
    # A fault may fill the log: of each GPU and number the last line counts.
    last = {(line["bus"], int(line["xid"])): float(line["at"]) for line in XID.finditer(text)}
    return {
        "xids": [
            {"bus": bus, "xid": xid, "hours_ago": round((now - at) / 3600, 1)}
            for (bus, xid), at in last.items()
        ]
    }


def _nvidia_smi(query: str) -> list[list[str]]:
    """The rows of a query's answer."""
    text = output_of("nvidia-smi", query, "--format=csv,noheader,nounits", seconds=20)
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines() if line.strip()]
    return [row for row in rows if len(row) >= 4]


def _owner(pid: str) -> str | None:
    """The name of whoever runs it; None where that can't be seen, as from inside a container."""
    try:
        user = Path("/proc", str(int(pid))).stat().st_uid
    except (OSError, ValueError):
        return None
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def _on_bus() -> int:
    """How many of NVIDIA's GPUs the PCI bus has, those of other containers and virtual machines included."""
    return sum(
        text_of(device / "vendor").strip() == NVIDIA and text_of(device / "class").startswith(DISPLAY_CLASSES)
        for device in PCI_DEVICES.glob("*")
    )


def _health(gpu: Any, index: int) -> dict[str, Any]:
    """The faults of a <gpu> in `nvidia-smi -q -x`."""

    def text(*names: str) -> str | None:
        # Drivers move tags from one group to another, so that they are looked for anywhere.
        texts = ((gpu.findtext(f".//{name}") or "").strip() for name in names)
        return next((text for text in texts if text not in ("", "N/A", "Unknown Error")), None)

    def uncorrected(period: str) -> int | None:
        # Generations of GPUs count in other memories (DRAM, SRAM, its parity), each in a tag of its own.
        counters = gpu.find(f"./ecc_errors/{period}")
        rows = [] if counters is None else [row for row in counters if "uncorrectable" in row.tag]
        numbers = [int(row.text) for row in rows if (row.text or "").strip().isdigit()]
        return sum(numbers) if numbers else None

    slow = [
        name
        for name in SLOWED
        if text(f"clocks_event_reason_{name}", f"clocks_throttle_reason_{name}") == "Active"
    ]
    widths = [text("current_link_width"), text("max_link_width")]
    return {
        "index": index,
        "name": text("product_name"),
        "uncorrected": uncorrected("volatile"),
        "uncorrected_ever": uncorrected("aggregate"),
        "failed": [name for name in FAILED if text(name) == "Yes"],
        "pending": [name for name in PENDING if text(name) == "Yes"],
        "slowed": slow,
        "width": widths if all(widths) else None,
        "fabric": text("fabric/state"),
    }


def driver_version(folder: Path = DRIVER) -> str | None:
    """The version of NVIDIA's driver, as its kernel module says it."""
    match = re.search(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)", text_of(folder / "version"))
    return match.group(1) if match else None


def gpu_models(folder: Path = DRIVER) -> list[str]:
    """The kinds of GPUs of this machine, each once, as the driver's own files name them: no program is asked."""
    texts = "\n".join(text_of(file) for file in folder.glob("gpus/*/information"))
    return sorted({model.strip() for model in re.findall(r"^Model:(.*)$", texts, re.MULTILINE)})


def cores_beside(gpu: str, folder: Path = DRIVER, devices: Path = PCI_DEVICES) -> frozenset[int]:
    """The cores of the NUMA node that a GPU hangs on; none where the kernel doesn't say.

    gpu: its UUID, or its number in PCI order, as CUDA_VISIBLE_DEVICES has them.
    """
    cards = sorted((folder / "gpus").glob("*"))
    if gpu.isdecimal():
        bus = cards[int(gpu)].name if int(gpu) < len(cards) else ""
    else:
        named = (card.name for card in cards if gpu in text_of(card / "information").split())
        bus = next(named, "")
    return frozenset(_numbers(text_of(devices / bus / "local_cpulist"))) if bus else frozenset()


def _numbers(text: str) -> Iterator[int]:
    """ "0-27,56-83" as the kernel writes lists of cores."""
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        yield from range(int(first), int(last or first) + 1)


@lru_cache(maxsize=None)  # noqa: UP033  (functools.cache is of Python 3.9)
def has_virtual_memory(folder: Path = DRIVER) -> bool | None:
    """Whether all GPUs here have CUDA's virtual memory management, which torch's expandable segments are made of: a GPU
    that a hypervisor shares has none, nor have some small boards. None where nobody says.

    A child process asks the driver: whoever has asked it once keeps a context, and can't be forked any more.
    """
    if any(VGPU.search(model) for model in gpu_models(folder)):
        return False
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", ASK_VIRTUAL_MEMORY],
            capture_output=True,
            timeout=DRIVER_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {b"0": False, b"1": True}.get(done.stdout.strip())
