"""Watching a job: real processes, small ones, in place of the launcher and its ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dsrun import catalog
from dsrun.errors import JobFailedError
from dsrun.jobs import diagnosis, processes, supervise
from dsrun.jobs.run_folder import LAUNCHER_LOG

RANK = """
import json, os, signal, sys, time
from pathlib import Path

_, module, run_dir, rank, script = sys.argv
run_dir, rank = Path(run_dir), int(rank)

def say(text):
    with (run_dir / "logs" / f"rank-{rank}.log").open("a") as log:
        log.write(text + "\\n")

def state(status, **fields):
    path = run_dir / "state" / f"rank-{rank}.json"
    path.parent.mkdir(exist_ok=True)
    content = {"rank": rank, "pid": os.getpid(), "status": status, "ended": time.time(), **fields}
    path.with_suffix(".new").write_text(json.dumps(content))
    path.with_suffix(".new").replace(path)

def write(name, **fields):
    with (run_dir / name).open("a") as file:
        file.write(json.dumps(fields) + "\\n")

def fail(error):
    state("failed", error=error)
    os._exit(1)

state("running")
say(f"rank {rank} here")
exec(script)
"""
# As DeepSpeed's: starts the ranks, looks once a while, ends all when one has failed, and names that one's code.
LAUNCHER = """
import contextlib, signal, subprocess, sys, time
import psutil

_, rank_file, run_dir, poll_s, *scripts = sys.argv[:-4]
command = [sys.executable, rank_file, "dsrun.training.worker", run_dir]
processes = [subprocess.Popen([*command, str(rank), script]) for rank, script in enumerate(scripts)]

def end(*_, code=1):
    for process in processes:
        print(f"[INFO] [launch.py:253:sigkill_handler] Killing subprocess {process.pid}", flush=True)
        with contextlib.suppress(psutil.NoSuchProcess):
            tree = psutil.Process(process.pid)
            for one in [*tree.children(recursive=True), tree]:
                one.terminate()
    if code != 1:
        print(f"[ERROR] [launch.py:259:sigkill_handler] {command} exits with return code = {code}", flush=True)
    sys.exit(code)

signal.signal(signal.SIGTERM, end)
alive = set(processes)
while alive:
    for process in list(alive):
        if process.poll() is not None:
            if process.returncode:
                if process.returncode != 1:
                    end(code=process.returncode)
                print(f"[ERROR] {command} exits with return code = 1", flush=True)
                end()
            alive.remove(process)
    time.sleep(float(poll_s))
"""
FOREVER = "time.sleep(600)"


class Ears:
    def __init__(self):
        self.events, self.lines = [], []

    def event(self, event):
        self.events.append(event)

    def metrics(self, line):
        self.lines.append(line)


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "a user's 运行"
    (folder / "logs").mkdir(parents=True)
    return folder


@pytest.fixture
def launcher(tmp_path, run_dir):
    """`launcher(*scripts, poll_s=0.2)`: the arguments that start a rank for each script."""
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "launcher.py").write_text(LAUNCHER)

    def argv(*scripts: str, poll_s: float = 0.2, port: int = 29999) -> list[str]:
        return [
            sys.executable, str(tmp_path / "launcher.py"), str(tmp_path / "rank.py"), str(run_dir), str(poll_s),
            *scripts, "--master_addr", "127.0.0.1", "--master_port", str(port),
        ]  # fmt: skip

    return argv


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path):
    """Whatever happened: no process that a test started outlives it."""
    yield
    deadline = time.monotonic() + 1
    while (left := processes_of(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in left:
        process.kill()
    assert not left


def processes_of(folder) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        started_here = any(word.startswith(str(folder)) for word in words)
        if started_here and process.pid != os.getpid() and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


@pytest.fixture
def watch(run_dir, make_job):
    """`watch(argv)`: run a job of so many ranks to its end; gives what was heard."""

    def run(argv: list[str], ranks: int = 2) -> Ears:
        ears = Ears()
        supervise.run_job(make_job(run_dir, ranks), argv, dict(os.environ), ears)
        return ears

    return run


@pytest.fixture
def failure(watch):
    def run(argv: list[str], ranks: int = 2):
        with pytest.raises(JobFailedError) as caught:
            watch(argv, ranks)
        (problem,) = caught.value.problems
        assert caught.value.exit_code != 0
        return problem, caught.value.exit_code

    return run


def test_a_job_that_ends_well(watch, launcher):
    script = (
        "if rank == 0:\n"
        "    write('events.jsonl', event='phase', text='训练')\n"
        "    for step in range(3): write('metrics.jsonl', step=step)\n"
        "state('finished')"
    )
    heard = watch(launcher(script, script))
    assert heard.events == [{"event": "phase", "text": "训练"}]
    assert [line["step"] for line in heard.lines] == [0, 1, 2]


def test_lines_of_an_earlier_run_are_not_told_again(watch, launcher, run_dir):
    (run_dir / "events.jsonl").write_text('{"event": "phase", "text": "old"}\n')
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    heard = watch(launcher("write('metrics.jsonl', step=2); state('finished')"), ranks=1)
    assert (heard.events, heard.lines) == ([], [{"step": 2}])


def test_states_of_an_earlier_run_do_not_count(failure, launcher, run_dir):
    (run_dir / "state").mkdir()
    (run_dir / "state" / "rank-1.json").write_text('{"rank": 1, "pid": 1, "status": "finished"}')
    problem, _ = failure(launcher("state('finished')"))
    assert problem.what


def test_a_rank_that_raises_is_named_with_its_reason_and_last_lines(failure, launcher, run_dir):
    problem, code = failure(
        launcher(FOREVER, "say('reading weights'); fail('ValueError: the weights do not fit')")
    )
    assert "rank 1" in problem.what
    assert "ValueError: the weights do not fit" in problem.what
    assert "reading weights" in problem.what
    assert str(run_dir / "logs" / "rank-1.log") in problem.hint
    assert code == 1


def test_the_cause_is_named_and_not_who_lost_a_peer(failure, launcher):
    lost = "time.sleep(0.1); fail('RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:3456')"
    cause = "time.sleep(0.4); fail('ValueError: bad row')"
    for scripts in ((lost, cause, lost), (cause, lost, lost)):
        problem, _ = failure(launcher(*scripts, poll_s=1.5), ranks=3)
        assert f"rank {scripts.index(cause)}" in problem.what
        assert "bad row" in problem.what


def test_the_first_of_two_causes(failure, launcher):
    problem, _ = failure(
        launcher("time.sleep(0.3); fail('ValueError: later')", "fail('ValueError: sooner')", poll_s=1)
    )
    assert "sooner" in problem.what


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "SIGSEGV"), (signal.SIGBUS, "/dev/shm"),
        (signal.SIGABRT, "SIGABRT"), (signal.SIGTERM, "SIGTERM"),
    ],
)  # fmt: skip
def test_a_rank_that_is_killed(failure, launcher, number, words):
    problem, code = failure(
        launcher(FOREVER, f"time.sleep(0.2); os.kill(os.getpid(), {int(number)})", poll_s=1)
    )
    assert "rank 1" in problem.what
    assert "killed" in problem.what
    assert words in problem.what
    assert "rank 1 here" in problem.what
    assert code > 1


@pytest.mark.parametrize("dying", [0, 1, 2])
def test_the_rank_that_was_killed_and_not_those_ended_after_it(failure, launcher, dying):
    # The launcher looks at the very moment: all ranks are gone before anybody else looks.
    scripts = [FOREVER] * 3
    scripts[dying] = "time.sleep(0.5); os.kill(os.getpid(), 9)"
    for _ in range(3):
        problem, _ = failure(launcher(*scripts, poll_s=0.001), ranks=3)
        assert f"rank {dying} died first" in problem.what


def test_a_rank_that_leaves_without_a_word(failure, launcher):
    problem, _ = failure(launcher(FOREVER, "os._exit(3)"))
    assert "rank 1" in problem.what
    assert "SIGKILL" not in problem.what
    assert "3" in problem.what.splitlines()[0].replace("rank 1", "")


def test_the_code_of_an_earlier_run_is_not_told(failure, launcher, run_dir):
    (run_dir / LAUNCHER_LOG).write_text("[ERROR] ['python'] exits with return code = -11\n")
    problem, _ = failure(launcher(FOREVER, "os.kill(os.getppid(), 9); os.kill(os.getpid(), 9)"))
    assert "SIGSEGV" not in problem.what


def test_a_launcher_that_can_not_start_a_rank(failure, launcher, tmp_path):
    argv = launcher(FOREVER)
    (tmp_path / "launcher.py").write_text("import sys\nsys.exit('No module named deepspeed')")
    problem, code = failure(argv)
    assert "launcher" in problem.what
    assert "No module named deepspeed" in problem.what
    assert LAUNCHER_LOG in problem.hint
    assert code == 1


def test_a_launcher_that_is_killed_takes_its_ranks_along(failure, launcher, tmp_path):
    problem, code = failure(launcher(FOREVER, "time.sleep(0.3); os.kill(os.getppid(), 9); time.sleep(600)"))
    assert problem.what
    assert code == 128 + 9
    assert not processes_of(tmp_path)


def test_a_rank_that_never_says_that_it_finished(failure, launcher):
    problem, _ = failure(launcher("state('finished')", "pass"))
    assert "rank 1" in problem.what


def test_a_rank_that_does_not_want_to_end(failure, launcher, monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 0.5)
    stubborn = f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {FOREVER}"
    problem, _ = failure(launcher(stubborn, "time.sleep(0.5); fail('ValueError: x')"))
    assert "rank 1" in problem.what


def test_children_of_a_rank_end_too(failure, launcher, tmp_path):
    code = "import time; time.sleep(600)"
    child = f"import subprocess; subprocess.Popen([sys.executable, '-c', {code!r}, str(run_dir)])"
    for script in (f"{child}; {FOREVER}", f"{child}; time.sleep(0.3); os.kill(os.getpid(), 9)"):
        failure(launcher(script, "time.sleep(0.6); fail('ValueError: x')"))
        assert not processes_of(tmp_path)


def test_a_process_that_took_a_dead_ranks_number_is_left_alone(watch, failure, launcher, tmp_path):
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        problem, _ = failure(
            launcher(f"os.getpid = lambda: {other.pid}; state('running'); os._exit(1)"), ranks=1
        )
        assert problem.what
        assert other.poll() is None
    finally:
        other.communicate(b"\n")


def test_a_dead_run_says_how_to_go_on(failure, launcher, run_dir):
    for step in (5, 10):
        folder = run_dir / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "complete").touch()
    (run_dir / "checkpoints" / "step-15").mkdir()
    problem, _ = failure(launcher("fail('ValueError: x')"), ranks=1)
    assert "step-10" in problem.hint
    assert "--resume" in problem.hint
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == [
        "step-10",
        "step-15",
        "step-5",
    ]


def test_the_way_to_go_on_can_be_pasted_into_a_shell(failure, launcher, run_dir):
    import shlex

    (run_dir / "checkpoints" / "step-5").mkdir(parents=True)
    (run_dir / "checkpoints" / "step-5" / "complete").touch()
    problem, _ = failure(launcher("fail('ValueError: x')"), ranks=1)
    line = next(line for line in problem.hint.splitlines() if "--resume" in line)
    words = shlex.split(line[line.index("--output-dir") :])
    assert words[:3] == ["--output-dir", str(run_dir), "--resume"]


def test_without_a_checkpoint_nothing_is_promised(failure, launcher):
    problem, _ = failure(launcher("fail('ValueError: x')"), ranks=1)
    assert "step-" not in problem.hint


def test_shared_memory_of_the_run_is_removed(watch, launcher):
    mine = Path("/dev/shm/deepspeed_allreduce_buffer_0_127.0.0.1_29998_0")
    other = Path("/dev/shm/deepspeed_allreduce_buffer_0_127.0.0.1_2999_0")
    try:
        for path in (mine, other):
            path.touch()
        watch(launcher("state('finished')", port=29998), ranks=1)
        assert (mine.exists(), other.exists()) == (False, True)
    finally:
        for path in (mine, other):
            path.unlink(missing_ok=True)


WATCHER = """
import json, sys
from pathlib import Path
from dsrun.jobs import supervise
from dsrun.jobs.processes import TerminatedError
from dsrun.jobs.job import Job

class Ears:
    def event(self, event): print(event, flush=True)
    def metrics(self, line): print(line, flush=True)

try:
    import os
    supervise.run_job(Job.read(Path(sys.argv[1])), sys.argv[2:], dict(os.environ), Ears())
except (KeyboardInterrupt, TerminatedError) as error:
    print(type(error).__name__, flush=True)
"""


@pytest.fixture
def watcher(tmp_path, run_dir, make_job):
    """`watcher(argv)`: another process that watches a job; gives it when rank 0 has said something."""
    started = []

    def start(argv: list[str]) -> subprocess.Popen[str]:
        (run_dir / "job.json").write_text(make_job(run_dir).to_json(), encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-c", WATCHER, str(run_dir / "job.json"), *argv], stdout=subprocess.PIPE, text=True,
            cwd=catalog.PACKAGE.parent,
        )  # fmt: skip
        started.append(process)
        assert "phase" in process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, "TerminatedError"), (signal.SIGINT, "KeyboardInterrupt")]
)
def test_a_signal_ends_every_process(watcher, launcher, tmp_path, number, error):
    process = watcher(launcher(f"write('events.jsonl', event='phase'); {FOREVER}", FOREVER))
    assert len(processes_of(tmp_path)) >= 3
    began = time.monotonic()
    process.send_signal(number)
    assert process.stdout.read() == f"{error}\n"
    assert process.wait(10) == 0
    assert time.monotonic() - began < 5
    assert not processes_of(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_while_ending_changes_nothing(watcher, launcher, tmp_path, number):
    slow = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1.5), os._exit(0))); "
    process = watcher(launcher(slow + f"write('events.jsonl', event='phase'); {FOREVER}", slow + FOREVER))
    process.send_signal(number)
    time.sleep(0.5)
    process.send_signal(number)
    process.wait(10)
    assert not processes_of(tmp_path)


def test_sigterm_means_what_it_did_before(watch, launcher):
    before = signal.getsignal(signal.SIGTERM)
    watch(launcher("state('finished')"), ranks=1)
    assert signal.getsignal(signal.SIGTERM) is before


# In words


@pytest.mark.parametrize(
    ("code", "ooms", "words"),
    [
        (-9, 0, ["SIGKILL", "dmesg"]),
        (-9, 1, ["OOM", "memory"]),
        (-7, 0, ["SIGBUS", "/dev/shm"]),
        (-11, 0, ["SIGSEGV"]),
        (-6, 0, ["SIGABRT"]),
        (-4, 0, ["SIGILL", "TORCH_EXTENSIONS_DIR"]),
        (-15, 0, ["SIGTERM"]),
        (-10, 0, ["SIGUSR1"]),
    ],
)
def test_codes_in_words(code, ooms, words):
    assert all(word in diagnosis.killed_in_words(code, ooms) for word in words)


def test_oom_kills_are_a_number():
    assert diagnosis.oom_kills() >= 0


def test_the_last_lines_of_a_log(tmp_path):
    log = tmp_path / "rank-0.log"
    assert "empty" in diagnosis.tail(log)
    log.write_bytes(b"\n\n")
    assert "empty" in diagnosis.tail(log)
    log.write_bytes(b"".join(b"line %d\n\n" % number for number in range(50)) + b"\xff broken " + b"x" * 999)
    lines = diagnosis.tail(log, 3).splitlines()
    assert [line.split("|")[1].strip()[:8] for line in lines[:2]] == ["line 48", "line 49"]
    assert len(lines) == 3
    assert all(len(line) < 260 for line in lines)


# Preparing steps


@pytest.fixture
def step(tmp_path):
    """`step(code)`: run a preparing step of that code; gives what it said."""

    def run(code: str) -> list[str]:
        said = []
        (tmp_path / "step.py").write_text(code)
        supervise.run_step(
            [sys.executable, "-u", str(tmp_path / "step.py")],
            dict(os.environ),
            tmp_path / "prepare.log",
            said.append,
        )
        return said

    return run


def test_a_step_is_heard(step, tmp_path):
    assert step("import sys; print('分词'); print('done'); sys.stderr.write('noise\\n')") == ["分词", "done"]
    assert (tmp_path / "prepare.log").read_text() == "noise\n"


def test_a_steps_problems_are_the_users(step):
    problems = [
        {"what": "no row", "where": "a.jsonl", "hint": "Look."},
        {"what": "b", "where": "", "hint": ""},
    ]
    code = f"import sys; print({json.dumps({'problems': problems})!r}); sys.exit(1)"
    with pytest.raises(JobFailedError) as caught:
        step(code)
    assert [vars(problem) for problem in caught.value.problems] == problems


def test_a_step_that_breaks_shows_its_log(step, tmp_path):
    with pytest.raises(JobFailedError) as caught:
        step("raise ValueError('broken')")
    (problem,) = caught.value.problems
    assert "ValueError: broken" in problem.what
    assert str(tmp_path / "prepare.log") in problem.hint


def test_a_step_that_is_killed(step):
    with pytest.raises(JobFailedError) as caught:
        step("import os; os.kill(os.getpid(), 9)")
    assert caught.value.exit_code == 128 + 9
    assert "SIGKILL" in str(caught.value)
