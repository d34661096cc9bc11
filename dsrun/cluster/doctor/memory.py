"""Is there memory, shared memory, and permission to lock it?"""

from __future__ import annotations

import shlex

from dsrun.cluster.doctor.check import GREEN, GREY, MIB, RED, YELLOW, Host, Status, each
from dsrun.words import GIB, counted, size_text

TITLE = "memory"
ORDER = 40
SHM_A_RANK = 64 * MIB
"""Bytes of /dev/shm for a rank: NCCL or DeepSpeed's CPU collective, and the data loader's workers."""
CONTAINERS_SHM = 64 * MIB
"""Docker's default size of /dev/shm in a container (docker run --shm-size)."""
LEAST_RAM = 2 * GIB
"""Importing torch and DeepSpeed takes about 1 GiB in each rank."""
LEAST_LOCKED = 64 << 10
MOST_LISTED = 4


@each("ram", "ram")
def ram(host: Host) -> Status:
    """Memory for a new job, within what a container or the scheduler allows."""
    fact = host["ram"]
    who = "of its cgroup's" if fact["limited"] else "of"
    state = f"{size_text(fact['available'])} {who} {size_text(fact['total'])} free"
    fix = "See who has it: ps -eo user,pid,rss,args --sort=-rss | head"
    if fact["available"] < LEAST_RAM:
        return Status(RED, state, fix)
    if fact["available"] < fact["total"] / 4 or fact["available"] < host.ranks * GIB:
        return Status(YELLOW, state, fix)
    return Status(GREEN, state)


@each("shm", "shm", "gpus", "torch")
def shm(host: Host) -> Status:
    """NCCL and DeepSpeed's CPU collective meet in /dev/shm; a rank that finds it full dies with a bus error."""
    fact, need = host["shm"], host.ranks * SHM_A_RANK
    state = f"{size_text(fact['free'])} of {size_text(fact['total'])} free"
    larger = (
        "In a container: docker run --shm-size=8g (or --ipc=host); else: mount -o remount,size=8G /dev/shm"
    )
    left = fact["leftover_count"]
    if fact["free"] < need and fact["free"] + fact["leftover_bytes"] >= need:
        return Status(RED, f"{state}; {_left(left, fact['leftover_bytes'])}", _clear(host))
    if fact["free"] < MIB * 8:
        return Status(RED, state, larger)
    if fact["total"] <= CONTAINERS_SHM or fact["free"] < need:
        return Status(YELLOW, f"{state}: {host.ranks} ranks need {size_text(need)}", larger)
    if left:
        return Status(YELLOW, f"{state}; {_left(left, fact['leftover_bytes'])}", _clear(host))
    return Status(GREEN, state)


def _left(count: int, size: int) -> str:
    return f"{counted(count, 'buffer')} of ended DeepSpeed runs ({size_text(size)})"


def _clear(host: Host) -> str:
    """The command that removes the user's own leftovers; the user's number is a part of their names (shm.cpp)."""
    fact = host["shm"]
    remove = f"rm /dev/shm/deepspeed_allreduce_buffer_{int(fact['user'])}_*"
    if fact["buffers_in_use"] and fact["leftover_count"] <= MOST_LISTED:
        return f"rm {shlex.join(fact['leftovers'])}"
    return f"Once your runs on it have ended: {remove}" if fact["buffers_in_use"] else remove


@each("memlock", "memlock", "disk")
def memlock(host: Host) -> Status:
    """InfiniBand registers memory, and DeepSpeed's NVMe offload locks its buffers (csrc/pin_memory/page_alloc.cpp)."""
    limit, cards = host["memlock"]["limit"], host["memlock"]["infiniband"]
    if limit is None:
        return Status(GREEN, "no limit")
    state = f"{limit // 1024} KiB may be locked"
    fix = "ulimit -l unlimited, in /etc/security/limits.conf: * - memlock unlimited; docker run --ulimit memlock=-1"
    if cards:
        return Status(RED, f"{state}, and InfiniBand ({', '.join(cards)}) needs more", fix)
    if "nvme" in host["disk"]:
        return Status(YELLOW, f"{state}: the buffers of NVMe offload stay unlocked", fix)
    if limit < LEAST_LOCKED:
        return Status(YELLOW, state, fix)
    return Status(GREEN, state)


@each("numa", "numa")
def numa(host: Host) -> Status:
    """On several NUMA nodes, ranks that offload to the CPU are faster on the cores beside their GPU."""
    nodes = host["numa"]["nodes"]
    if nodes <= 1:
        return Status(GREY, "one NUMA node")
    return Status(GREY, f"{nodes} NUMA nodes: with offload, each rank runs on the cores beside its GPU")
