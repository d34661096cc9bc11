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
from dsrun.job.layout import CHECKPOINTS, DOUBTFUL, NOT_FINITE, PREFIX, stack_file, whole_checkpoints
from dsrun.job.run_folder import launcher_log, rank_log
from dsrun.jobs.diagnosis.ends import TIMED_OUT, HostEnd, RankEnd, causes, first_of, timed_out
from dsrun.jobs.diagnosis.killed import killed_in_words, reported_code, reported_codes
from dsrun.jobs.diagnosis.logs import end_of, tail
from dsrun.jobs.diagnosis.reading import stacks as stacks_of
from dsrun.jobs.diagnosis.reading.stacks import counted_ranks, hanging_in_words

MOST_STACKS = 4
"""Stacks that stand in a message."""
OWN_SIGNALS = (signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV)
"""Signals that no launcher sends to a rank."""


MOST_CODE = 128
"""The highest exit code that a program gives by itself, by the conventions of shells."""


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

    def waited(self, end: RankEnd) -> bool:
        """Whether a rank waited for another one until its time was over; one that NCCL's watchdog ended says so in its
        log alone."""
        if not end.killed:
            return timed_out(end.error)
        with contextlib.suppress(OSError):
            return bool(
                TIMED_OUT.search(end_of(self.run_dir / rank_log(end.rank)).decode("utf-8", "replace"))
            )
        return False

    def where(self, host: HostEnd) -> str:
        """The host's name as " on NAME"; empty where the job has one host."""
        return f" on {self.job.hosts[host.host].host}" if len(self.job.hosts) > 1 else ""

    def code(self, end: RankEnd) -> int:
        """A rank's exit code: its own; else the one that its launcher printed or ended with. Of the launcher's none
        below 0 (or 128 above, as a shell has it) counts: that is a rank which was ended because of this one."""
        if end.code is not None:
            return end.code
        host = self.host_of(end)
        reported = reported_codes(host.output)
        code = reported[-1] if reported else host.code or 0
        return code if 0 < code <= MOST_CODE else 1


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
    return Cause("all-ranks-agreed", problem, evidence.code(first))


def rank_hangs(evidence: Evidence) -> Cause | None:
    """A rank waited for another one until its time was over, and that one was still running."""
    first = evidence.first
    waited = [end.rank for end in evidence.ends if evidence.waited(end)]
    if first is None or first.rank not in waited:
        return None
    stacks = stacks_of.hanging(evidence.run_dir, waited)
    if not stacks:
        return None
    waiting = f"{counted_ranks(waited)} waited in a collective until the time was over"
    fault = f"{hanging_in_words(stacks)}; {waiting}"
    quoted = [
        f"    | {line}" for stack in stacks[:MOST_STACKS] for line in (f"rank {stack.rank}:", *stack.lines)
    ]
    files = ", ".join(str(evidence.run_dir / stack_file(stack.rank)) for stack in stacks[:MOST_STACKS])
    hint = f"The stacks of all threads: {files}{resume_hint(evidence.job)}"
    rank = stacks[0].rank if len(stacks) == 1 else None
    return Cause("rank-hangs", Problem("\n".join([fault, *quoted]), hint=hint), evidence.code(first), rank)


def rank_killed(evidence: Evidence) -> Cause | None:
    """A rank ended without an error message."""
    first = evidence.first
    if first is None or not first.killed:
        return None
    host = evidence.host_of(first)
    # The launcher names one code, of whichever rank it saw first; where others failed too it may be theirs.
    alone = all(end.killed for end in evidence.ends if evidence.host_of(end).host == host.host)
    code = reported_code(host.output, host.code or 0, alone) if first.code is None else first.code
    if f"Process {first.pid} exits successfully" in host.output:
        code = 0  # os._exit(0), or another program in its place: its work was not done
    how = f"died first: {killed_in_words(code, host.ooms)}{_memory(code, host)}"
    exit_code = code or (-signal.SIGKILL if host.ooms else evidence.code(first._replace(code=None)))
    return _of_rank("rank-killed", evidence, first, how, exit_code)


def rank_failed(evidence: Evidence) -> Cause | None:
    """A rank raised an error."""
    first = evidence.first
    if first is None or first.killed:
        return None
    code = evidence.code(first)
    return _of_rank("rank-failed", evidence, first, f"failed first: {first.error}", code)


CAUSES: tuple[Callable[[Evidence], Cause | None], ...] = (
    launcher_killed,
    launcher_failed,
    all_ranks_agreed,
    rank_hangs,
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
