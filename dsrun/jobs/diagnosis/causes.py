"""Why a job failed: one named cause from how its ranks and hosts ended, and from their logs.

DeepSpeed's launcher reports the rank that it happens to look at first, and not why a rank was killed. Here the ranks'
own state files, the moments at which their processes ended, and the kernel's counters are put together.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from dsrun.errors import DsrunError, Problem
from dsrun.job.checkpoints import newest_whole
from dsrun.job.job import AnyJob, Job
from dsrun.job.layout import CHECKPOINTS, DOUBTFUL, NOT_FINITE, PREFIX, whole_checkpoints
from dsrun.job.run_folder import launcher_log, rank_log
from dsrun.jobs.diagnosis.ends import HostEnd, RankEnd, causes, first_of
from dsrun.jobs.diagnosis.killed import killed_in_words, reported_code, reported_codes
from dsrun.jobs.diagnosis.logs import tail

OWN_SIGNALS = (signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV)
"""Signals that no launcher sends to a rank."""


class Cause(NamedTuple):
    """One named cause of a job's end."""

    name: str
    """The name of the function in CAUSES that found it, with hyphens."""
    problem: Problem
    exit_code: int
    """Exit code of the first rank to end, where it is known."""
    rank: int | None = None
    """The rank that ended first; None where it was no rank."""


class Evidence:
    """All that is known of a failed job: its ranks' and its hosts' ends, and its logs."""

    def __init__(self, job: AnyJob, ends: Iterable[RankEnd], hosts: Iterable[HostEnd]) -> None:
        self.job, self.ends, self.run_dir = job, list(ends), Path(job.run_dir)
        self.hosts = {host.host: host for host in hosts}
        struck = [end.rank for end in self.ends if _struck(self.host_of(end))]
        self.first = first_of(self.ends, struck)
        """The rank whose end is the cause; of ranks that all merely lost one another, the first."""
        self.only_lost = not causes(self.ends, struck)
        """Whether every rank's error only says that it lost another one."""

    def host_of(self, end: RankEnd) -> HostEnd:
        """How the host of a rank ended, as far as it told."""
        number = host_number(self.job, end.rank)
        return self.hosts.get(number) or HostEnd(number, None)

    def where(self, host: HostEnd) -> str:
        """The host's name as " on NAME"; empty where the job has one host."""
        return f" on {self.job.hosts[host.host].host}" if len(self.job.hosts) > 1 else ""

    def code(self, host: HostEnd) -> int:
        """The launcher's code for its first rank's end: rather one that it printed, since it takes a while to leave and
        may be killed itself by then."""
        reported = reported_codes(host.output)
        return max(0, reported[-1] if reported else host.code or 0) or 1


def diagnose(job: AnyJob, ends: Iterable[RankEnd], hosts: Iterable[HostEnd]) -> Cause:
    """The cause of a job's failure: the first that CAUSES finds."""
    evidence = Evidence(job, ends, hosts)
    # The order is a claim: a launcher that was killed takes its ranks along, so their ends say nothing then; and a rank
    # that was killed left no error, so its message is the launcher's code and the kernel's counters.
    return next(cause for find in CAUSES if (cause := find(evidence)))


def launcher_killed(evidence: Evidence) -> Cause | None:
    """DeepSpeed's launcher was killed, and the ranks only lost it."""
    host = next((host for host in evidence.hosts.values() if host.killed_by), None)
    if host is None or not evidence.only_lost:
        return None
    log = evidence.run_dir / launcher_log(host.host)
    signal_name = signal.Signals(host.killed_by).name
    fault = f"DeepSpeed's launcher{evidence.where(host)} was killed ({signal_name})\n{tail(log)}"
    problem = Problem(fault, hint=_log_hint(log) + resume_hint(evidence.job))
    return Cause("launcher-killed", problem, -host.killed_by)


def launcher_failed(evidence: Evidence) -> Cause | None:
    """No rank has ended badly by itself: the launcher did."""
    if evidence.first is not None:
        return None
    ended = list(evidence.hosts.values())
    host = next((host for host in ended if host.code), next(iter(ended), HostEnd(0, 0)))
    log = evidence.run_dir / launcher_log(host.host)
    how = f"ended with exit code {host.code} before any rank failed by itself"
    fault = f"the launcher{evidence.where(host)} {how}\n{tail(log)}"
    return Cause("launcher-failed", Problem(fault, hint=_log_hint(log)), host.code or 1)


def all_ranks_agreed(evidence: Evidence) -> Cause | None:
    """All ranks ended with the same error, such as a loss that is NaN."""
    first = evidence.first
    if first is None or not first.agreed:
        return None
    fault, _, advice = first.error.partition("\n")
    kept = _kept_hint(evidence.job) if NOT_FINITE in fault else ""
    lines = [advice.strip(), _log_hint(evidence.run_dir / rank_log(first.rank)), kept]
    problem = Problem(fault, hint="\n  ".join(filter(None, lines)))
    return Cause("all-ranks-agreed", problem, evidence.code(evidence.host_of(first)))


def rank_killed(evidence: Evidence) -> Cause | None:
    """A rank ended without an error message."""
    first = evidence.first
    if first is None or not first.killed:
        return None
    host = evidence.host_of(first)
    # The launcher names one code, of whichever rank it saw first; where others failed too it may be theirs.
    alone = all(end.killed for end in evidence.ends if evidence.host_of(end).host == host.host)
    code = reported_code(host.output, host.code or 0, alone)
    if f"Process {first.pid} exits successfully" in host.output:
        code = 0  # os._exit(0), or another program in its place: its work was not done
    how = f"died first: {killed_in_words(code, host.ooms)}{_memory(code, host)}"
    exit_code = code or (-signal.SIGKILL if host.ooms else evidence.code(host))
    return _of_rank("rank-killed", evidence, first, how, exit_code)


def rank_failed(evidence: Evidence) -> Cause | None:
    """A rank raised an error."""
    first = evidence.first
    if first is None or first.killed:
        return None
    code = evidence.code(evidence.host_of(first))
    return _of_rank("rank-failed", evidence, first, f"failed first: {first.error}", code)


CAUSES: tuple[Callable[[Evidence], Cause | None], ...] = (
    launcher_killed,
    launcher_failed,
    all_ranks_agreed,
    rank_killed,
    rank_failed,
)
"""Causes in the order in which they are tried; one of the last two always applies."""


def _of_rank(name: str, evidence: Evidence, end: RankEnd, how: str, code: int) -> Cause:
    log = evidence.run_dir / rank_log(end.rank)
    fault = f"rank {end.rank}{evidence.where(evidence.host_of(end))} {how}\n{tail(log)}"
    return Cause(name, Problem(fault, hint=_log_hint(log) + resume_hint(evidence.job)), code, end.rank)


def _struck(host: HostEnd) -> bool:
    """Whether the killed ranks of a host were not (only) ended by the launcher: the kernel's OOM killer struck, or the
    launcher itself tells of a signal that it never sends."""
    return host.ooms > 0 or any(-code in OWN_SIGNALS for code in reported_codes(host.output))


def _memory(code: int | None, host: HostEnd) -> str:
    """How little memory the host had left, where that may be why a rank was killed."""
    if not host.ram_bytes or (code not in (None, -signal.SIGKILL) and not host.ooms):
        return ""
    least, total = host.least_ram_bytes / 2**30, host.ram_bytes / 2**30
    return f"; the least host memory left while it ran was {least:.1f} of {total:.1f} GiB"


def _log_hint(log: Path) -> str:
    return f"The whole log: {log}"


def resume_hint(job: AnyJob) -> str:
    """How to continue from the newest checkpoint, as one more line of a hint; empty where there is none."""
    newest = None
    if isinstance(job, Job):
        with contextlib.suppress(DsrunError):  # none of them can be read, as the failure has said
            newest, _ = newest_whole(Path(job.run_dir))
    command = shlex.join(["dsrun", "resume", job.run_dir])
    return f"\n  Continue from {newest.name}: {command}" if newest else ""


def _kept_hint(job: AnyJob) -> str:
    """How to get at the newest good checkpoint of a fine-tune that can't continue."""
    if not isinstance(job, Job):
        return ""
    run_dir = Path(job.run_dir)
    whole, command = whole_checkpoints(run_dir), shlex.join(["dsrun", "export", job.run_dir])
    if whole:
        return f"{whole[-1].name} is the newest good checkpoint; as a model: {command}"
    doubtful = [mark.parent.name for mark in (run_dir / CHECKPOINTS).glob(f"{PREFIX}*/{DOUBTFUL}")]
    return f"{doubtful[0]} has the weights that gave that loss: no checkpoint is good" if doubtful else ""


def host_number(job: AnyJob, rank: int) -> int:
    """The number of the host that a rank runs on."""
    last = 0
    for number, host in enumerate(job.hosts):
        last += len(host.devices)
        if rank < last:
            return number
    raise ValueError(f"no rank {rank}")
