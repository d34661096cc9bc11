"""Are the GPUs there, free, and fit for this torch?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dsrun.cluster.doctor.check import GREEN, GREY, RED, YELLOW, Host, Status, across, each
from dsrun.versions import version

TITLE = "GPUs"
ORDER = 30
DRIVERS = {13: 580, 12: 525, 11: 450}
"""CUDA's major version -> the oldest driver (CUDA Compatibility, minor version compatibility, table 1)."""
BUSY_MIB = 1024
"""A GPU's memory that is taken while nobody computes on it stays below this."""


@each("driver", "gpus", "torch", "packages")
def driver(host: Host) -> Status:
    """A driver that is older than torch's CUDA, or a GPU that torch's build leaves out, shows up as no GPU at all."""
    fact, cuda = host["gpus"], host["torch"]["cuda"]
    if not fact["gpus"]:
        if fact.get("on_bus"):
            what = f"{fact['on_bus']} NVIDIA GPUs on the bus, and no driver that works: "
            fix = "Install the driver, or load it (modprobe nvidia) and read: dmesg | grep -i nvidia"
            return Status(RED, what + (fact.get("fault") or "no nvidia-smi"), fix)
        return Status(GREY, "no NVIDIA GPU")
    if cuda is None:
        if host["torch"]["cpu_build"]:
            fix = "Install a torch for CUDA, if the GPUs are to be used: https://pytorch.org/get-started/locally"
            return Status(YELLOW, "torch is a CPU build: it does not see the GPUs", fix)
        return Status(GREY, f"driver {fact['driver']}; no torch to compare it with")
    oldest = DRIVERS.get(version(cuda)[0])
    if oldest and version(str(fact["driver"]))[0] < oldest:
        what = f"driver {fact['driver']}, and torch's CUDA {cuda} needs {oldest} or later"
        fitting = [major for major, least in DRIVERS.items() if version(str(fact["driver"]))[0] >= least]
        fix = "Update the driver" + (f", or install a torch for CUDA {fitting[0]}." if fitting else ".")
        return Status(RED, what, fix)
    torch = version(str(host["packages"].get("torch") or "0"))
    if left := [gpu for gpu in fact["gpus"] if _left_out(gpu, version(cuda), torch)]:
        one = left[0]
        capability = f"{one['name']} has compute capability {one['compute_capability']}"
        fix = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"
        return Status(RED, f"{capability}, which torch for CUDA {cuda} leaves out", fix)
    return Status(GREEN, f"driver {fact['driver']} for torch's CUDA {cuda}")


def _left_out(gpu: dict[str, Any], cuda: tuple[int, ...], torch: tuple[int, ...]) -> bool:
    """Whether torch's builds lack code for the GPU.

    CUDA 13 compiles for 7.5 and later; builds for CUDA 12.8 left out what is before 7.0 from their first, and 7.0
    from torch 2.11 on (pytorch/pytorch, RELEASE.md, issues 157517 and 172352).
    """
    if not gpu.get("compute_capability"):
        return False
    capability = version(gpu["compute_capability"])
    if cuda >= (13,) or (cuda >= (12, 8) and torch >= (2, 11)):
        return capability < (7, 5)
    return cuda >= (12, 8) and capability < (7, 0)


@across("gpus", "gpus", "torch")
def gpus(hosts: Sequence[Host]) -> Iterator[tuple[Host, Status]]:
    """The launcher does not compare slots with GPUs: one rank too many dies with "invalid device ordinal"."""
    somewhere = any(host.trains_on_gpus for host in hosts)
    for host in hosts:
        count = len(host.gpus)
        kinds = ", ".join(sorted({str(gpu["name"]) for gpu in host.gpus}))
        if not count and not somewhere and (host.slots is None or host["torch"]["cuda"] is None):
            yield host, Status(GREY, "none: a host for training on CPUs")
        elif not count:
            what = "no GPU" if host.slots is None else f"no GPU, and {host.slots} slots"
            yield host, Status(RED, what, "Take it out of the hostfile, or see `nvidia-smi` on it.")
        elif host.slots is not None and count < host.slots:
            fix = f"Write slots={count} in the hostfile, or see `nvidia-smi` on it for the one that is gone."
            yield host, Status(RED, f"{count} x {kinds}, and {host.slots} slots", fix)
        else:
            more = f", {host.slots} of them in the hostfile" if host.slots not in (None, count) else ""
            yield host, Status(GREEN, f"{count} x {kinds}{more}")


@each("gpu-free", "gpus")
def free(host: Host) -> Status:
    """Other people's processes take memory that the plan counts on."""
    if not host.gpus:
        return Status(GREY, "no NVIDIA GPU")
    names = {gpu["uuid"]: gpu["index"] for gpu in host.gpus}
    taken = [
        f"GPU {gpu['index']}: {gpu['used_mib'] / 1024:.1f} of {gpu['total_mib'] / 1024:.1f} GiB taken"
        for gpu in host.gpus
        if (gpu["used_mib"] or 0) > BUSY_MIB
    ]
    for process in host["gpus"]["processes"]:
        who, what = process["user"] or "somebody", f"{process['name']} ({process['pid']})"
        taken.append(f"{who} runs {what} on GPU {names.get(process['uuid'], '?')}")
    if not taken:
        return Status(GREEN, "nobody computes on them")
    shown = "; ".join([*taken[:6], f"and {len(taken) - 6} more"] if len(taken) > 6 else taken)
    fix = "Ask its owner, wait, or leave these GPUs out: --devices, or --exclude HOST:N."
    return Status(YELLOW, shown, fix)
