"""Are the GPUs sound? What the driver counts of faults, and what the kernel's log says of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsrun.cluster.doctor.check import GREEN, GREY, RED, YELLOW, Host, Status, each

TITLE = "health"
ORDER = 35
NO_GPU = Status(GREY, "no NVIDIA GPU")
FAULTS = {
    48: "an uncorrectable memory error",
    63: "a memory row or page was put out of use",
    64: "a memory row or page could not be put out of use",
    74: "an NVLink error",
    79: "it has fallen off the bus",
    92: "many corrected memory errors",
    94: "an uncorrectable memory error that ended one process",
    95: "an uncorrectable memory error that may have reached others",
    119: "its firmware (GSP) did not answer",
    120: "its firmware (GSP) stopped",
}
"""NVIDIA's Xids of hardware faults (docs.nvidia.com/deploy/xid-errors); 13, 31 and 43 are programs' own."""
GRAVE = (48, 64, 79, 95, 119, 120)
RECENT_H = 72
RESET = "Stop what runs on it and reset it: nvidia-smi --gpu-reset -i {index} (as root), or reboot."


@each("ecc", "gpu_health")
def ecc(host: Host) -> Status:
    """Memory errors end jobs with Xid 94 or 95, or as CUDA error 'uncorrectable ECC error encountered'."""
    gpus = host["gpu_health"]["gpus"]
    if not gpus:
        return NO_GPU
    if failed := [gpu for gpu in gpus if gpu["failed"]]:
        state = f"{_named(failed[0])} has to be replaced: {', '.join(failed[0]['failed'])}"
        return Status(RED, state, _leave_out(failed[0], "Ask your vendor for another."))
    if pending := [gpu for gpu in gpus if gpu["pending"]]:
        state = f"{_named(pending[0])} waits for a reset: {', '.join(pending[0]['pending'])}"
        return Status(RED, state, RESET.format(index=pending[0]["index"]))
    if wrong := [gpu for gpu in gpus if gpu["uncorrected"]]:
        state = f"{_named(wrong[0])} has had {wrong[0]['uncorrected']} uncorrectable memory errors since its last reset"
        return Status(YELLOW, state, RESET.format(index=wrong[0]["index"]))
    counted = [gpu["uncorrected"] for gpu in gpus if gpu["uncorrected"] is not None]
    if not counted:
        return Status(
            GREY, "not readable: the driver counts no memory errors (a GPU without ECC, or it is off)"
        )
    ever = sum(gpu["uncorrected_ever"] or 0 for gpu in gpus)
    return Status(
        GREEN, "no uncorrectable memory error" + (f" since the last reset, {ever} ever" if ever else "")
    )


@each("slowed", "gpu_health")
def slowed(host: Host) -> Status:
    """One GPU that is held down by heat, by power or by its slot makes all ranks as slow."""
    gpus = host["gpu_health"]["gpus"]
    if not gpus:
        return NO_GPU
    if hot := [gpu for gpu in gpus if gpu["slowed"]]:
        state = f"{_named(hot[0])} is held down now: {', '.join(hot[0]['slowed'])}"
        fix = "See its temperature and power: nvidia-smi -q -d TEMPERATURE,POWER,PERFORMANCE; then its fans and cables."
        return Status(YELLOW, state, fix)
    if narrow := [gpu for gpu in gpus if gpu["width"] and gpu["width"][0] != gpu["width"][1]]:
        state = f"{_named(narrow[0])} has {narrow[0]['width'][0]} lanes of {narrow[0]['width'][1]}"
        return Status(
            YELLOW, state, _leave_out(narrow[0], "Have it put into its slot again, or into another.")
        )
    return Status(GREEN, "none")


@each("fabric-manager", "gpu_health")
def fabric_manager(host: Host) -> Status:
    """On machines with NVSwitch no CUDA program starts until the fabric manager is done (CUDA error 802)."""
    states = {gpu["fabric"] for gpu in host["gpu_health"]["gpus"]} - {None}
    if not states:
        return Status(GREY, "no NVSwitch")
    if states == {"Completed"}:
        return Status(GREEN, "done")
    fix = "systemctl status nvidia-fabricmanager; its version has to be the driver's own."
    return Status(RED, f"NVSwitch is not set up: {', '.join(sorted(states))}", fix)


@each("xid", "kernel_log", "gpus")
def xid(host: Host) -> Status:
    """The driver writes faults of a GPU into the kernel's log as Xids."""
    log = host["kernel_log"]
    if "unreadable" in log:
        return (
            Status(GREY, f"not readable: {log['unreadable']} (as root: dmesg | grep Xid)")
            if host.gpus
            else NO_GPU
        )
    faults = sorted(
        (fault for fault in log["xids"] if fault["xid"] in FAULTS),
        key=lambda fault: float(fault["hours_ago"]),
    )
    if not faults:
        return Status(GREEN, "none since the machine started") if host.gpus else NO_GPU
    last = faults[0]
    more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
    state = (
        f"Xid {last['xid']} of GPU {last['bus']} {last['hours_ago']:g} hours ago: {FAULTS[last['xid']]}{more}"
    )
    grave = last["xid"] in GRAVE and last["hours_ago"] < RECENT_H
    fix = "Read: dmesg | grep -i xid; reset the GPU or reboot; if it comes again leave it out (--devices, --exclude)."
    return Status(RED if grave else YELLOW, state, fix)


def _named(gpu: Mapping[str, Any]) -> str:
    return f"GPU {gpu['index']} ({gpu['name']})"


def _leave_out(gpu: Mapping[str, Any], then: str) -> str:
    return f"Leave it out of the job (--devices, or --exclude HOST:{gpu['index']}). {then}"
