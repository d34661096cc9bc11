"""Why a run of dsrun's own died: its logs, with what dsrun saw itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dsrun.job import health
from dsrun.job.job import HostDevices
from dsrun.job.log_parts import TIMES, begins_at, in_order, log_of
from dsrun.job.run_folder import FLIGHT_RECORDER, LAUNCHER_LOG, LOGS, MARK, OWN_LOG, PREPARE_LOG, rank_log
from dsrun.jobs.diagnosis import log_files
from dsrun.jobs.diagnosis.diagnosis import Diagnosis, in_words, speaks_chinese, with_memory
from dsrun.jobs.diagnosis.ends import TIMED_OUT
from dsrun.jobs.diagnosis.log_files import LogSource
from dsrun.jobs.diagnosis.memory import records
from dsrun.jobs.diagnosis.reading import stacks as stacks_of
from dsrun.jobs.diagnosis.reading.log_lines import peeled
from dsrun.jobs.diagnosis.reading.stacks import hanging_in_words
from dsrun.jobs.diagnosis.signatures import SignatureIndex, find_signatures
from dsrun.jobs.diagnosis.verdict import Verdict, judge

TIMED_OUT_CAUSES = ("nccl_timeout", "collective_timeout")
"""Causes of ranks that waited for another one until they gave up."""
ON_HOST = ("host_oom", "killed", "slurm_oom")
"""Causes that may be a host's memory: whether it is, the host's own record says."""
DIED = "died first"
"""dsrun's words on a rank that ended without any (causes.py)."""
DSRUN_SOURCE = "what dsrun saw"
"""Name of the source with dsrun's own message."""


def log_sizes(run_dir: Path) -> dict[str, int]:
    """Size of each log now, in bytes: everything up to there belongs to earlier attempts."""
    return {str(path): path.stat().st_size for path in run_dir.joinpath(LOGS).glob("*.log*")}


def of_run(
    run_dir: Path,
    *,
    rank: int | None = None,
    said: str = "",
    since: Mapping[str, int] | None = None,
    environ: Mapping[str, str] | None = None,
    hosts: Sequence[HostDevices] = (),
) -> Diagnosis:
    """Why a run died. hosts: the job's, by which a slow one is named.

    rank: the first that dsrun saw end; its own log counts before those of the launcher and of others. said: dsrun's own
    message about the end. since: bytes of each log that belong to earlier attempts.
    """
    logs = _logs(run_dir, rank, since or {})
    index = SignatureIndex(find_signatures())
    own_logs = [log for log in logs if log.rank == rank and rank is not None]
    # The first rank's own log decides if it says anything: in the others stand consequences, and often earlier ones.
    if own_logs:
        own_logs += [
            log for log in logs if log not in own_logs and log.name.startswith(str(run_dir / FLIGHT_RECORDER))
        ]
    verdict = _verdict(own_logs, index, said) if own_logs else Verdict(values={})
    if verdict.cause is None and verdict.raised is None:
        own_logs = logs
        verdict = _verdict(logs, index, said)
    names = [*own_logs, LogSource(DSRUN_SOURCE, None)]
    environ = os.environ if environ is None else environ
    chinese = speaks_chinese(environ)
    diagnosis = _with_stacks(in_words(verdict, names, environ, rank=rank), verdict, run_dir, chinese)
    diagnosis = _with_memory(diagnosis, run_dir, said, chinese)
    return _with_health(diagnosis, run_dir, hosts, chinese)


def _with_memory(diagnosis: Diagnosis, run_dir: Path, message: str, chinese: bool) -> Diagnosis:
    """The diagnosis of memory that ran out, with what the run's own records say of it."""
    division = None
    if diagnosis.cause == "gpu_oom":
        requested = (diagnosis.numbers or {}).get("asked")
        division = records.of_gpu(run_dir, diagnosis.rank, requested)
    elif diagnosis.cause in ON_HOST or (diagnosis.cause is None and DIED in message):
        division = records.of_host(run_dir, diagnosis.rank)
    return with_memory(diagnosis, division, chinese) if division else diagnosis


def _with_health(
    diagnosis: Diagnosis, run_dir: Path, hosts: Sequence[HostDevices], chinese: bool
) -> Diagnosis:
    """The diagnosis with the ranks that the others had waited for before the end."""
    known = health.read(run_dir, hosts)
    if known is None or not known.slow:
        return diagnosis
    words = f"此前{known.words_zh}" if chinese else f"Before the end {known.words}."
    return replace(diagnosis, summary=f"{diagnosis.summary} {words}")


def _with_stacks(diagnosis: Diagnosis, verdict: Verdict, run_dir: Path, chinese: bool) -> Diagnosis:
    """The diagnosis of ranks that waited in vain, with the rank that they waited for and where it stood."""
    if verdict.cause not in TIMED_OUT_CAUSES or not verdict.signature or verdict.signature.names_rank:
        return diagnosis
    waited = {line.rank for line in verdict.lines if line.rank is not None and TIMED_OUT.search(line.text)}
    stacks = stacks_of.hanging(run_dir, waited)
    if not stacks:
        return diagnosis
    words = hanging_in_words(stacks, chinese)
    alone = stacks[0] if len(stacks) == 1 else None
    log = rank_log(stacks[0].rank)
    next_step = (
        f"查看该处为何不返回（该进程的日志：{log}）：只有部分进程执行的分支、锁、读写、子进程或无尽循环。"
        if chinese
        else f"See why that place doesn't return (the rank's log: {log}): a branch that only some ranks take, a lock, "
        "reading or writing, a child process, a loop without an end."
    )
    return replace(
        diagnosis,
        summary=f"{diagnosis.summary} {words[0].upper()}{words[1:]}{'。' if chinese else '.'}",
        rank=alone.rank if alone else None,
        rank_by="it had not come to the collective: its stack" if alone else None,
        stack=stacks[0].lines,
        next_step=next_step,
        confidence="high" if alone and not alone.waits else diagnosis.confidence,
    )


def _logs(run_dir: Path, rank: int | None, since: Mapping[str, int]) -> list[LogSource]:
    """The run's logs except dsrun's own, that of the first rank first."""
    left_out = {Path(OWN_LOG).name, Path(MARK).name}
    inside = run_dir.joinpath(LOGS).glob("*.*")
    # A pipe would be waited for, and a link may lead to any file that this user can read.
    plain = (path for path in inside if path.is_file() and not path.is_symlink())
    paths = in_order(path for path in plain if path.name not in left_out and path.suffix != TIMES)
    first = run_dir / rank_log(rank) if rank is not None else run_dir / LAUNCHER_LOG
    paths.sort(key=lambda path: log_of(path) != first)
    logs = [log_files.named(path) for path in paths]
    begins = {name: size for path in {*map(log_of, paths)} for name, size in begins_at(path, since).items()}
    prepare = run_dir / PREPARE_LOG
    if not any(log.rank is not None for log in logs) and prepare.is_file():
        logs.append(log_files.named(prepare))
    return [log._replace(since=begins.get(log.name, since.get(log.name, 0))) for log in logs]


def _verdict(logs: Sequence[LogSource], index: SignatureIndex, message: str) -> Verdict:
    lines = log_files.lines_of(logs, index)
    if message:  # its first line alone: what follows quotes a log
        lines.append(peeled(len(logs), 1, message.partition("\n")[0]))
    return judge(lines, index)
