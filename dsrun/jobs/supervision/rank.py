"""One rank: `python -m dsrun.jobs.supervision.rank RUN/job.json`, started by DeepSpeed's launcher.

It puts right what the launcher gets wrong, and then runs the training worker or the user's script in this process:
CUDA_VISIBLE_DEVICES becomes what the job says (the launcher sorts indices, and knows neither UUIDs nor MIG slices),
LOCAL_RANK the rank's place on its host (the launcher's is rotated where hosts have unequal numbers of slots:
deepspeed/launcher/launch.py, `dist_rank % num_local_procs`).
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import IO

from dsrun.cluster.python_environment import without_own
from dsrun.host.gpus import cores_beside
from dsrun.host.hiding import secrets
from dsrun.job import rank_state
from dsrun.job.job import AnyJob, Job, ScriptJob, ranks_of, read
from dsrun.job.layout import LOG_LIMIT, NODE, STACK_SIGNAL, SUPERVISOR, VISIBLE_DEVICES, stack_file
from dsrun.job.log_parts import LogKeeper
from dsrun.job.run_folder import FLIGHT_RECORDER, rank_log, record_of
from dsrun.jobs.diagnosis.ends import timed_out
from dsrun.jobs.diagnosis.logs import end_of

WORKER = "dsrun.training.worker"
STACKS = signal.SIGUSR2
"""Prints every thread's stack into the rank's log."""
RECORDER_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""The number of collectives that torch's flight recorder keeps; the second name is of torch before 2.9."""
RECORDER_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""The path of its dumps, without the rank's number."""
TRACEBACK = "Traceback (most recent call last):"
OVER = ("finished", "failed", "interrupted", "stopped")
"""States of a run that has ended; one without a record has not."""
BINDING = ("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables by which a user says himself where OpenMP's threads run."""
PR_SET_PDEATHSIG = 1
LAST_WORDS_S = 2.0
"""Time to wait for the last output of a script in another Python once it has ended."""
OTHERS_S = 3.0
"""Time for a rank that waited for another one in vain, before it leaves: for that one's stack to be taken, and for
others that wait to say so. Its end is the other's, by the launcher."""
CLEAN_UP_S = 10.0
"""Time for a script that failed to clean up: the other ranks, which wait for it, can't help any more."""


def main() -> None:
    """Set this process up as a rank, and run what the job says."""
    path, *extra = sys.argv[1:]
    job = read(Path(path))
    rank, run_dir = int(os.environ["RANK"]), Path(job.run_dir)
    LogKeeper(run_dir / rank_log(rank), int(os.environ.pop(LOG_LIMIT, "0")))
    faulthandler.enable()
    faulthandler.register(STACKS, all_threads=True)
    place(job, rank)
    bind(job)
    keep_flight_recorder(run_dir, rank)
    state = rank_state.of(run_dir, rank)
    keep_stack(run_dir, rank)
    state.write(stacks=not getattr(job, "python", None))  # another Python's stacks are out of reach
    end_with_parents(state)
    try:
        if isinstance(job, Job):
            sys.argv = [WORKER, "--job", path, *extra]
            runpy.run_module(WORKER, run_name="__main__", alter_sys=True)
        else:
            run_script(job)
    except BaseException as error:
        code = _exit_code(error)
        if code == 0:
            _say(state, rank_state.FINISHED)
            raise
        _leave_anyway(code)
        if not state.ended:
            _fail(state, error)
        if timed_out(state.fields["error"]):
            time.sleep(OTHERS_S)
        raise
    _say(state, rank_state.FINISHED)


def keep_stack(run_dir: Path, rank: int) -> None:
    """Have STACK_SIGNAL write the stacks of all threads into the rank's file, also where it hangs in compiled code."""
    with contextlib.suppress(OSError):  # a full disk: the rank works without
        file = (run_dir / stack_file(rank)).open("a")
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
        _open_files.append(file)


_open_files: list[IO[str]] = []
"""Files that stay open for as long as this process lives."""


def _say(state: rank_state.RankState, status: str) -> None:
    if not state.ended:
        state.end(status)


def place(job: AnyJob, rank: int) -> None:
    """This rank's devices and its place on its host, in the environment."""
    node = int(os.environ.get(NODE) or os.environ.get("CROSS_RANK", "0"))
    ranks = ranks_of(job.hosts, node)
    os.environ["LOCAL_RANK"] = str(ranks.index(rank))
    visible = os.environ.pop(VISIBLE_DEVICES, None)
    os.environ["LOCAL_WORLD_SIZE"] = str(len(ranks))
    os.environ["CUDA_VISIBLE_DEVICES"] = visible or job.hosts[node].cuda_visible_devices


def bind(job: AnyJob) -> None:
    """Put a rank whose optimizer steps on the host onto the cores beside its GPU, whose memory it then has as well.

    Across sockets the same step reads and writes the other's memory. Only cores that this process has are taken, and
    only where all ranks of that NUMA node have room for their threads on them; the user's own binding stands.
    """
    if job.accelerator != "cuda" or not job.offloads or any(map(os.environ.get, BINDING)):
        return
    visible, place = os.environ["CUDA_VISIBLE_DEVICES"].split(","), int(os.environ["LOCAL_RANK"])
    if place >= len(visible):
        return
    allowed = os.sched_getaffinity(0)
    beside = [cores_beside(gpu) & allowed for gpu in visible]
    own, threads = beside[place], os.environ.get("OMP_NUM_THREADS", "")
    if own and threads.isdecimal() and int(threads) * beside.count(own) <= len(own):
        os.sched_setaffinity(0, own)


def keep_flight_recorder(run_dir: Path, rank: int) -> None:
    """Have torch's flight recorder, where it is on, write into the run's folder, unless the user says elsewhere.
    What an earlier attempt left there would be taken for this one's."""
    if not any(os.environ.get(name, "0") not in ("", "0") for name in RECORDER_SIZES):
        return
    prefix = run_dir / FLIGHT_RECORDER
    for name in RECORDER_FILES:
        os.environ.setdefault(name, str(prefix))
    Path(f"{prefix}{rank}").unlink(missing_ok=True)


def run_script(job: ScriptJob) -> None:
    """The user's script or module, as Python itself would start it."""
    for name in secrets(job.env):  # command.sh has none
        os.environ.setdefault(name, job.env[name])
    local_rank = [f"--local_rank={os.environ['LOCAL_RANK']}"] if job.local_rank else []
    sys.argv = [job.script, *local_rank, *job.args]
    if job.python:
        _run_elsewhere([job.python, "-u", *(["-m"] if job.module else []), *sys.argv], Path(job.run_dir))
    elif job.module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(job.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(job.script).resolve().parent)
        _run_file(Path(job.script))


def _run_file(path: Path) -> None:
    """A file as Python itself runs one. runpy would leave __file__ relative, which is wrong once the script changes its
    folder, and would take the main module away before what is left to do at exit."""
    main = ModuleType("__main__")
    main.__file__ = str(path.absolute())
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    code = compile(path.read_bytes(), main.__file__, "exec", dont_inherit=True)
    exec(code, main.__dict__)  # noqa: S102  (the user's script is what was asked for)


def _run_elsewhere(argv: list[str], run_dir: Path) -> None:
    """The script by another Python, in a process of its own that ends with this one. Exits as it did."""
    process = subprocess.Popen(
        argv, env=without_own(os.environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        preexec_fn=_end_with_parent,  # noqa: PLW1509
    )  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    unwritten: list[OSError] = []
    printing = threading.Thread(target=_pass_on, args=[process, unwritten], daemon=True, name="dsrun-output")
    printing.start()
    code = process.wait()
    printing.join(LAST_WORDS_S)  # a process that it has left behind may keep the pipe open
    if unwritten:
        state = rank_state.of(run_dir, int(os.environ["RANK"]))
        state.end(rank_state.FAILED, error=f"OSError: {unwritten[0]}", traceback="")
        sys.exit(1)
    if code == -signal.SIGKILL:
        os.kill(os.getpid(), signal.SIGKILL)  # so that whoever looks for the reason sees what happened
    if code < 0:
        sys.exit(f"ended by {signal.Signals(-code).name}")
    if code:
        log = rank_log(int(os.environ["RANK"]))
        state = rank_state.of(run_dir, int(os.environ["RANK"]))
        text = end_of(run_dir / log).decode("utf-8", errors="replace")
        trace = text[text.rfind(TRACEBACK) :].strip() if TRACEBACK in text else ""
        words = trace.splitlines()[-1] if trace else f"it left with exit code {code}, without an error"
        state.end(rank_state.FAILED, error=words, traceback=trace, code=code)
        sys.exit(code)


def _pass_on(process: subprocess.Popen[bytes], unwritten: list[OSError]) -> None:
    """Copy the other Python's output to this process's log: the log may be another file by then (log_parts.py).
    Where it can't be written, the script ends, as one does whose own print fails."""
    assert process.stdout  # noqa: S101  (a pipe)
    while block := os.read(process.stdout.fileno(), 1 << 16):
        while block:
            try:
                block = block[os.write(1, block) :]
            except OSError as error:
                unwritten.append(error)
                process.terminate()
                return


def _end_with_parent() -> None:
    """Have the kernel kill this child once its parent is gone, whatever ended it (prctl(2))."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit_code(error: BaseException) -> int:
    if not isinstance(error, SystemExit):
        return 1
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def _fail(state: rank_state.RankState, error: BaseException) -> None:
    """The state of a script that failed: its last line, and the whole of it."""
    if isinstance(error, SystemExit):
        words = f"it left with exit code {_exit_code(error)}, without an error"
        words = words if isinstance(error.code, int) else str(error.code)
        state.end(rank_state.FAILED, error=words, traceback="", code=_exit_code(error))
        return
    text = "".join(traceback.format_exception(error))
    summary = traceback.format_exception_only(error)[-1].strip()
    state.end(rank_state.FAILED, error=summary, traceback=text)


def _leave_anyway(code: int) -> None:
    """Exit after CLEAN_UP_S in any case: a script's clean-up may wait for the other ranks, which wait for this one."""

    def leave() -> None:
        time.sleep(CLEAN_UP_S)
        os._exit(code)

    threading.Thread(target=leave, daemon=True, name="dsrun-leave").start()


def end_with_parents(state: rank_state.RankState) -> None:
    """End this rank when its launcher or its supervisor is gone: neither takes its ranks along when it is killed.

    A supervisor that is stopped (SIGSTOP) can't end its ranks either, though dsrun has given its host up. This rank may
    then wait for ever for those that have ended elsewhere: the run's record says that it is over, or the next attempt
    has a rank in this one's place.
    """
    launcher = os.getppid()
    supervisor = int(os.environ.get(SUPERVISOR, "0"))

    def watch() -> None:
        while os.getppid() == launcher and (not supervisor or _watched_by(supervisor, state)):
            time.sleep(1)
        with contextlib.suppress(OSError):
            sys.stderr.write(f"dsrun: {rank_state.GONE}\n")
            sys.stderr.flush()
            if not state.ended:
                state.end(rank_state.FAILED, error=rank_state.GONE, traceback="")
        _kill_children()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="dsrun-watch").start()


def _watched_by(pid: int, rank: rank_state.RankState) -> bool:
    """Whether a process runs that ends this rank when the job is over.

    One that nobody collects (a container without an init) does not run, though it is there.
    """
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    state = words.rpartition(")")[2].split()[0]
    if state == "T":
        return rank.is_own and record_of(rank.run_dir).get("state") not in OVER
    return state not in ("Z", "X")


def _kill_children() -> None:
    """Data loaders and the like: with the launcher and dsrun gone, there is nobody else who would end them."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()


if __name__ == "__main__":
    main()
