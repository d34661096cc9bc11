"""Are the GPUs there, free, and fit for this torch?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from dsrun.cluster.doctor.check import GREEN, GREY, RED, YELLOW, Host, Status, across, each
from dsrun.cluster.torch_builds import DRIVERS, left_out, newest
from dsrun.versions import version

TITLE = "GPUs"
NO_GPU = Status(GREY, "no NVIDIA GPU")
FLASH = ("flash-attn", "flash-attn-3", "flash-attn-4")
STATES = ("flash-linear-attention", "causal-conv1d")
"""Kernels of layers with a state: Qwen3-Next's, Qwen3.5's."""
KERNELS = ("liger-kernel", *FLASH, "bitsandbytes", *STATES)
ORDER = 30
NO_DRIVER = re.compile(r"ended with (?:6|9|12):")
"""nvidia-smi on a machine that may well have no GPU: it found none, no driver in the kernel, or no library of it."""
BUSY_MIB = 1024
"""A GPU's memory that is taken while nobody computes on it stays below this."""


@each("driver", "gpus", "torch", "packages")
def driver(host: Host) -> Status:
    """A driver that is older than torch's CUDA, or a GPU that torch's build leaves out, shows up as no GPU at all."""
    fact, cuda = host["gpus"], host["torch"]["cuda"]
    if not fact["gpus"]:
        if fact.get("on_bus"):
            state = f"{fact['on_bus']} NVIDIA GPUs on the bus, and no driver that works: "
            fix = "Install the driver, or load it (modprobe nvidia) and read: dmesg | grep -i nvidia"
            return Status(
                RED, state + (fact.get("fault") or "no nvidia-smi"), _mended(fact.get("fault")) or fix
            )
        if fact.get("fault") and not NO_DRIVER.search(fact["fault"]):
            return Status(
                RED, f"no driver that works: {fact['fault']}", _mended(fact["fault"]) or "nvidia-smi"
            )
        return Status(GREY, "no NVIDIA GPU")
    if cuda is None:
        if host["torch"]["cpu_build"]:
            command = newest(fact["driver"], [gpu.get("compute_capability") for gpu in fact["gpus"]])
            fix = f"If the GPUs are to be used: {command or 'https://pytorch.org/get-started/locally'}"
            return Status(YELLOW, "torch is a CPU build: it does not see the GPUs", fix)
        return Status(GREY, f"driver {fact['driver']}; no torch to compare it with")
    oldest = DRIVERS.get(version(cuda)[0])
    if oldest and version(str(fact["driver"]))[0] < oldest:
        state = f"driver {fact['driver']}, and torch's CUDA {cuda} needs {oldest} or later"
        fitting = [major for major, least in DRIVERS.items() if version(str(fact["driver"]))[0] >= least]
        fix = "Update the driver" + (f", or install a torch for CUDA {fitting[0]}." if fitting else ".")
        return Status(RED, state, fix)
    torch = str(host["packages"].get("torch") or "0")
    if left := [gpu for gpu in fact["gpus"] if left_out(gpu["compute_capability"], cuda, torch)]:
        gpu_left = left[0]
        capability = f"{gpu_left['name']} has compute capability {gpu_left['compute_capability']}"
        cards = [gpu["compute_capability"] for gpu in fact["gpus"]]
        fix = (
            newest(fact["driver"], cards)
            or f"No build has code for all of them: leave GPU {gpu_left['index']} out."
        )
        return Status(RED, f"{capability}, which torch for CUDA {cuda} leaves out", fix)
    return Status(GREEN, f"driver {fact['driver']} for torch's CUDA {cuda}")


def _mended(fault: str | None) -> str:
    """What helps against nvidia-smi's own fault; empty where that says nothing that is known."""
    if fault and "mismatch" in fault:
        return "The driver was upgraded beside the one in the kernel: restart the machine."
    if fault and "Insufficient Permissions" in fault:
        return "Let its user open /dev/nvidia*: the group of these files, or the container's devices."
    return ""


@each("architectures", "architectures", "gpus")
def architectures(host: Host) -> Status:
    """A build of NVIDIA's or of one's own has code for the GPUs that it was made for: others get 'no kernel image'."""
    fact = host["architectures"]
    if not host.gpus or not fact["asked"]:
        return Status(GREY, "no NVIDIA GPU" if not host.gpus else "torch has no code for GPUs")
    if not (flags := fact["flags"]):
        return Status(GREY, "not readable: torch doesn't say what it has code for")
    for gpu in host.gpus:
        card = gpu.get("compute_capability")
        if card and not any(_runs(flag, version(card)) for flag in flags):
            cards = [other.get("compute_capability") for other in host.gpus]
            fix = newest(host["gpus"]["driver"], cards) or f"Leave GPU {gpu['index']} out: --devices."
            return Status(RED, f"{gpu['name']} is {card}, and torch has code for {', '.join(flags)}", fix)
    return Status(GREEN, f"torch has code for {', '.join(flags)}")


def _runs(flag: str, card: tuple[int, ...]) -> bool:
    """Whether "sm_80" (on 8.x from there on) or "compute_80" (compiled for anything later) is of use to a card.

    CUDA's binary compatibility holds within a major version, and not for sm_90a's like.
    """
    kind, _, number = flag.partition("_")
    digits = number.rstrip("af")
    made = (int(digits[:-1]), int(digits[-1]))
    if number != digits:
        return made == card
    return made <= card if kind == "compute" else made[0] == card[0] and made <= card


@each("torch-build", "gpus", "torch")
def torch_build(host: Host) -> Status:
    """The newest torch that the driver and the GPUs take: an update without a look at it ends in 'no kernel image'."""
    if not host.gpus:
        return Status(GREY, "no NVIDIA GPU")
    command = newest(host["gpus"]["driver"], [gpu.get("compute_capability") for gpu in host.gpus])
    known = "the newest that this driver and these GPUs take: "
    return (
        Status(GREEN, known + command)
        if command
        else Status(GREY, "not known for this driver and these GPUs")
    )


@each("kernels", "gpus", "packages")
def kernels(host: Host) -> Status:
    """Packages of kernels for GPUs are used where they are there, and are missed by nothing but time and memory."""
    if not host.gpus:
        return NO_GPU
    has = host["packages"]
    there = [f"{name} {has[name]}" for name in KERNELS if has.get(name)]
    flash = any(has.get(name) for name in FLASH)
    lacking = {
        "liger-kernel": None if has.get("liger-kernel") else "the loss holds all logits",
        "flash-attn": None if flash else "torch's attention takes its place",
        "bitsandbytes": None if has.get("bitsandbytes") else "QLoRA and 8-bit AdamW need it",
        **{name: None if has.get(name) else "slow linear attention, no packing" for name in STATES},
    }
    absent = [f"no {name}: {cost}" for name, cost in lacking.items() if cost]
    state = "; ".join([*there, *absent])
    if lacking["liger-kernel"]:
        return Status(
            YELLOW, state, "In its environment: pip install liger-kernel (or dsrun[gpu], which has them all)"
        )
    return Status(GREEN, state)


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
            state = "no GPU" if host.slots is None else f"no GPU, and {host.slots} slots"
            yield host, Status(RED, state, "Take it out of the hostfile, or see `nvidia-smi` on it.")
        elif (driven := host["gpus"].get("of_driver") or 0) > count:
            fix = (
                "Restart the machine: a GPU that has fallen off the bus comes back so. See: dmesg | grep Xid"
            )
            yield host, Status(RED, f"{count} x {kinds}, and the driver has {driven}: one is lost", fix)
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
        who, program = process["user"] or "somebody", f"{process['name']} ({process['pid']})"
        taken.append(f"{who} runs {program} on GPU {names.get(process['uuid'], '?')}")
    if not taken:
        return Status(GREEN, "nobody computes on them")
    shown = "; ".join([*taken[:6], f"and {len(taken) - 6} more"] if len(taken) > 6 else taken)
    fix = "Ask its owner, wait, or leave these GPUs out: --devices, or --exclude HOST:N."
    return Status(YELLOW, shown, fix)
