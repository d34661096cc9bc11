"""Is a process allowed enough: memory, files, processes, and the grant of Slurm?"""

from __future__ import annotations

from dsrun.cluster.doctor.check import GREEN, GREY, RED, YELLOW, Host, Status, each

TITLE = "limits"
ORDER = 45
LEAST_FILES = 4096
"""Open files of a process: a data loader's worker passes tensors as files (torch.multiprocessing: file_descriptor)."""
THREADS_A_RANK = 64
"""Threads and processes that a rank has at least: data loaders, compilers, torch's own."""
SOON_MIN = 10
ULIMIT = "ulimit {letter} {value}; for good in /etc/security/limits.conf: * - {name} {value}"


@each("oom", "ram")
def oom(host: Host) -> Status:
    """The kernel ends processes for want of memory; the victim prints nothing but 'Killed'."""
    fact = host["ram"]
    killed = fact.get("oom_kills")
    if killed is None:
        return Status(GREY, "not readable")
    if not killed:
        return Status(GREEN, "nothing was ended for want of memory")
    where = "this container or job" if fact["limited"] else "the machine"
    state = f"{killed} processes were ended for want of memory since {where} started"
    return Status(
        YELLOW,
        state,
        "See whose: dmesg | grep -i 'killed process'; ask for more memory, or take fewer ranks.",
    )


@each("open-files", "limits")
def open_files(host: Host) -> Status:
    """Ranks, data loaders and NCCL hold many files open: 'Too many open files' comes late in a job."""
    have, hard = host["limits"]["open_files"], host["limits"]["open_files_hard"]
    if have is None or have >= LEAST_FILES:
        return Status(GREEN, "no limit" if have is None else f"{have} may be open")
    value = LEAST_FILES * 16 if hard is None else max(have, hard)
    how = {"letter": "-n", "value": value, "name": "nofile"}
    return Status(YELLOW, f"only {have} may be open", ULIMIT.format(**how))


@each("processes", "limits", "gpus", "torch")
def processes(host: Host) -> Status:
    """Threads count, too: 'can't start new thread' or 'fork: Resource temporarily unavailable'."""
    limits = [host["limits"]["processes"], host["limits"]["cgroup_processes"]]
    known = [limit for limit in limits if limit is not None]
    if not known or min(known) >= host.ranks * THREADS_A_RANK:
        return Status(GREEN, f"{min(known)} allowed" if known else "no limit")
    fix = (
        "docker run --pids-limit -1"
        if min(known) == limits[1]
        else ULIMIT.format(letter="-u", value=65536, name="nproc")
    )
    return Status(YELLOW, f"only {min(known)} for {host.ranks} ranks", fix)


@each("slurm", "limits", "clock", "ram")
def slurm(host: Host) -> Status:
    """Slurm ends a job at its time, and what takes more memory than --mem."""
    grant = host["limits"]["slurm"]
    if grant is None:
        return Status(GREY, "not in a job of Slurm's")
    parts, colour = [f"job {grant['job']}"], GREEN
    if grant["end"] is not None:
        left = (grant["end"] - host["clock"]["time"]) / 60
        parts.append(f"{left:.0f} minutes left")
        colour = RED if left <= 0 else YELLOW if left < SOON_MIN else colour
    else:
        parts.append("its time is not readable: squeue -j $SLURM_JOB_ID -o %L")
    if grant["node_mib"]:
        parts.append(f"{grant['node_mib'] / 1024:.0f} GiB a node")
    elif grant["cpu_mib"]:
        parts.append(f"{grant['cpu_mib']} MiB a CPU")
    fix = (
        "Ask for more time: --time, or `scontrol update JobId=... TimeLimit=...` where you may."
        if colour != GREEN
        else ""
    )
    return Status(colour, ", ".join(parts), fix)
