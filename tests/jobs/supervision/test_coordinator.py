"""Running a job: real agents and small real processes in place of the launcher and its ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from running import until

from dsrun.cluster.ports import free_port
from dsrun.errors import DsrunError, JobFailedError
from dsrun.job.processes import TerminalClosedError, TerminatedError, TimeLimitError
from dsrun.job.run_folder import LAUNCHER_LOG
from dsrun.jobs.supervision import coordinator
from dsrun.jobs.supervision.coordinator import StoppedError
from dsrun.jobs.supervision.job_hosts import JobHost, JobHosts

pytestmark = pytest.mark.slow

DONE = "state('finished')"
FOREVER = "forever()"


@pytest.fixture
def failure(stage, monkeypatch):
    """`failure(job)`: run a job that fails; the problem and the exit code."""
    monkeypatch.setattr(coordinator, "SETTLE_S", 30.0)  # a busy machine's launcher tells its code late

    def run(job, watch=lambda: False, **options):
        with pytest.raises(JobFailedError) as caught:
            stage.run(job, watch, **options)
        (problem,) = caught.value.problems
        assert caught.value.exit_code != 0
        return problem, caught.value.exit_code

    return run


def test_a_job_that_ends_well(stage):
    looks = []
    stage.run(stage.job(DONE, DONE), lambda: bool(looks.append(1)))
    assert looks
    assert not stage.left(0)


def test_states_of_an_earlier_run_do_not_count(failure, stage):
    (stage.run_dir / "state").mkdir()
    (stage.run_dir / "state" / "rank-1.json").write_text('{"rank": 1, "pid": 1, "status": "finished"}')
    (stage.run_dir / "state" / "save").write_text("stop")
    problem, _ = failure(stage.job(DONE, "os.unlink(run_dir / 'state' / 'rank-1.json')"))
    assert problem.what
    assert not (stage.run_dir / "state" / "save").exists()


def test_a_rank_that_raises_is_named_with_its_reason_and_last_lines(failure, stage):
    problem, code = failure(
        stage.job(FOREVER, "say('reading weights'); fail('ValueError: the weights do not fit')")
    )
    assert stage.causes == [("rank-failed", 1)]
    assert "ValueError: the weights do not fit" in problem.what
    assert "reading weights" in problem.what
    assert str(stage.run_dir / "logs" / "rank-1.log") in problem.hint
    assert code == 1


def test_the_cause_is_named_and_not_who_lost_a_peer(failure, stage):
    lost = "fail('RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:3456')"
    for number in (1, 0):
        scripts = [lost] * 3
        scripts[number] = f"after({1 - number}, 2); fail('ValueError: bad row')"
        problem, _ = failure(stage.job(*scripts, deaths=3))
        assert stage.causes.pop() == ("rank-failed", number)
        assert "bad row" in problem.what


def test_a_rank_that_waited_in_vain_and_the_one_ended_after_it(failure, stage):
    waited = "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation to complete"
    problem, _ = failure(stage.job(FOREVER, f"watched(); fail({waited!r})"))
    assert stage.causes == [("rank-failed", 1)]
    assert waited in problem.what
    assert "SIGKILL" not in problem.what


def test_a_rank_that_left_with_code_0_while_another_needs_it(failure, stage):
    lost = "RuntimeError: [pair.cc:537] Connection closed by peer [127.0.0.1]:3456"
    problem, _ = failure(stage.job("watched(); os._exit(0)", f"until(lambda: gone(0)); fail({lost!r})"))
    assert stage.causes == [("rank-killed", 0)]
    assert "code 0" in problem.what
    assert "SIGKILL" not in problem.what


def test_the_first_of_two_causes(failure, stage):
    job = stage.job("after(1); fail('ValueError: later')", "fail('ValueError: sooner')", deaths=2)
    problem, _ = failure(job)
    assert "sooner" in problem.what


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, "SIGKILL"), (signal.SIGBUS, "/dev/shm"), (signal.SIGTERM, "SIGTERM"),
        *(pytest.param(number, number.name, marks=pytest.mark.full) for number in (signal.SIGSEGV, signal.SIGABRT)),
    ],
)  # fmt: skip
def test_a_rank_that_is_killed(failure, stage, number, words):
    problem, code = failure(stage.job(FOREVER, f"watched(); os.kill(os.getpid(), {int(number)})"))
    assert stage.causes == [("rank-killed", 1)]
    assert words in problem.what
    assert "rank 1 here" in problem.what
    assert code == 128 + number


@pytest.mark.parametrize("dying", [1, *(pytest.param(rank, marks=pytest.mark.full) for rank in (0, 2))])
def test_the_rank_that_was_killed_and_not_those_ended_after_it(failure, stage, dying):
    # The launcher looks at the very moment: all ranks are gone before anybody else looks.
    scripts = [FOREVER] * 3
    scripts[dying] = "watched(); os.kill(os.getpid(), 9)"
    for _ in range(3):
        failure(stage.job(*scripts, poll_s=0.001))
    assert stage.causes == [("rank-killed", dying)] * 3


@pytest.mark.parametrize("code", [3, 0])
def test_a_rank_that_leaves_without_a_word(failure, stage, code):
    leaves = f"os._exit({code})"
    problem, exit_code = failure(
        stage.job(FOREVER, f"watched(); {leaves}") if code else stage.job(DONE, leaves)
    )
    assert stage.causes == [("rank-killed", 1)]
    assert f"code {code}" in problem.what
    assert "SIGKILL" not in problem.what
    assert exit_code == max(1, code)


def test_the_code_of_an_earlier_run_is_not_told(failure, stage):
    (stage.run_dir / LAUNCHER_LOG).write_text("[ERROR] ['python'] exits with return code = -11\n")
    problem, _ = failure(stage.job(FOREVER, "os.kill(os.getppid(), 9); os.kill(os.getpid(), 9)"))
    assert "SIGSEGV" not in problem.what


def test_a_launcher_that_can_not_start_a_rank(failure, stage):
    problem, code = failure(stage.job(FOREVER, runner="sys.exit('No module named deepspeed')"))
    assert stage.causes == [("launcher-failed", None)]
    assert "No module named deepspeed" in problem.what
    assert LAUNCHER_LOG in problem.hint
    assert code == 1


def test_a_launcher_that_is_killed_takes_its_ranks_along(failure, stage):
    problem, code = failure(stage.job(FOREVER, "watched(); os.kill(os.getppid(), 9); forever()"))
    assert "launcher" in problem.what
    assert code == 128 + 9
    assert not stage.left(0)


def test_a_launcher_that_ends_well_before_its_ranks(failure, stage):
    """DeepSpeed's does so where its own child is killed by a signal (runner.py, returncode > 0)."""
    problem, code = failure(stage.job(FOREVER, "watched(); os.kill(os.getppid(), 12); forever()",
                                      runner="signal.signal(12, lambda *_: os._exit(0))"))  # fmt: skip
    assert "launcher" in problem.what
    assert code == 1
    assert not stage.left(0)


def test_a_rank_that_never_says_that_it_finished(failure, stage):
    problem, _ = failure(stage.job(DONE, "pass"))
    assert "rank 1" in problem.what


def test_a_rank_that_never_came_up(failure, stage):
    problem, _ = failure(stage.job(DONE, "(run_dir / 'state' / 'rank-1.json').unlink()"))
    assert problem.what


def test_a_code_at_the_very_end_is_no_success(failure, stage):
    failure(stage.job(DONE, "state('finished'); os.kill(os.getpid(), 11)"))


def test_a_rank_that_does_not_want_to_end(failure, stage, monkeypatch):
    monkeypatch.setattr(coordinator, "GRACE_S", 0.5)
    stubborn = f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {FOREVER}"
    problem, _ = failure(stage.job(stubborn, "watched(); fail('ValueError: x')"))
    assert "rank 1" in problem.what


def test_children_of_a_rank_end_too(failure, stage):
    child = "import subprocess; subprocess.Popen(['sleep', '600'])"
    for number, end in enumerate((FOREVER, "os.kill(os.getpid(), 9)")):
        there = f"(run_dir / 'child {number}')"
        failure(
            stage.job(f"{child}; {there}.touch(); {end}", f"until({there}.exists); fail('ValueError: x')")
        )
        assert not stage.left(0)


def test_a_process_that_took_a_dead_ranks_number_is_left_alone(failure, stage):
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        problem, _ = failure(stage.job(f"os.getpid = lambda: {other.pid}; state('running'); os._exit(1)"))
        assert problem.what
        assert other.poll() is None
    finally:
        other.communicate(b"\n")


def test_a_dead_run_says_how_to_go_on(failure, stage, make_job):
    for step in (5, 10):
        folder = stage.run_dir / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "complete").write_text("{}")
    (stage.run_dir / "checkpoints" / "step-15").mkdir()
    stage.play("fail('ValueError: x')")
    problem, _ = failure(stage.put(make_job(stage.run_dir, ranks=1)))
    assert "step-10" in problem.hint
    import shlex

    line = next(line for line in problem.hint.splitlines() if "step-10" in line)
    assert shlex.split(line[line.index("dsrun resume") :]) == ["dsrun", "resume", str(stage.run_dir)]


def test_without_a_checkpoint_nothing_is_promised(failure, stage):
    problem, _ = failure(stage.job("fail('ValueError: x')"))
    assert "step-" not in problem.hint


def test_shared_memory_of_the_run_is_removed(stage):
    name = "/dev/shm/deepspeed_allreduce_buffer_0_127.0.0.1_%s_0"
    other = Path(name % (100_000 + os.getpid()))  # no port, and no other suite's
    script = f"Path({name!r} % os.environ['MASTER_PORT']).touch(); say(os.environ['MASTER_PORT']); {DONE}"
    try:
        other.touch()
        stage.run(stage.job(script))
        port = (stage.run_dir / "logs" / "rank-0.log").read_text().split()[-1]
        assert (Path(name % port).exists(), other.exists()) == (False, True)
    finally:
        other.unlink(missing_ok=True)


def test_what_a_rank_gets(stage):
    names = ("DSRUN_SUPERVISOR_PID", "DSRUN_NODE", "DSRUN_VISIBLE_DEVICES", "DS_ACCELERATOR", "MASTER_ADDR")
    stage.run(stage.job(f"say(json.dumps({{name: os.environ[name] for name in {names}}})); {DONE}"))
    env = json.loads((stage.run_dir / "logs" / "rank-0.log").read_text().splitlines()[-1])
    assert int(env.pop("DSRUN_SUPERVISOR_PID")) != os.getpid()
    assert list(env.values()) == ["0", "0", "cpu", "127.0.0.1"]


# Signals


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (signal.SIGTERM, TerminatedError), (signal.SIGINT, KeyboardInterrupt), (signal.SIGUSR1, TimeLimitError),
        (signal.SIGHUP, TerminalClosedError),
    ],
)  # fmt: skip
def test_a_signal_ends_every_process(stage, number, error):
    def strike() -> None:
        assert len(stage.processes()) >= 4
        os.kill(os.getpid(), number)

    before = [signal.getsignal(one) for one in (number, signal.SIGTSTP)]
    with pytest.raises(error):
        stage.run(stage.job(FOREVER, FOREVER), stage.when(stage.up(), strike))
    assert not stage.left(0)
    assert [signal.getsignal(one) for one in (number, signal.SIGTSTP)] == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(stage, number, monkeypatch):
    stubborn = f"signal.signal(signal.SIGTERM, signal.SIG_IGN); say('deaf'); {FOREVER}"
    sent = []
    real = JobHost.send

    def send(host, **message) -> None:
        sent.append(message)
        real(host, **message)
        if message == {"stop": coordinator.GRACE_S}:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(JobHost, "send", send)

    def deaf() -> bool:
        logs = [path.read_text() for path in (stage.run_dir / "logs").glob("rank-*.log")]
        return len(logs) == 2 and all("deaf" in log for log in logs)

    with pytest.raises((TerminatedError, KeyboardInterrupt)):
        stage.run(stage.job(stubborn, stubborn), stage.when(deaf, lambda: os.kill(os.getpid(), number)))
    assert {"stop": 0} in sent
    assert not stage.left(0)


def test_ctrl_c_while_it_starts(stage, monkeypatch):
    """The agents have not even said hello."""
    real = JobHosts.start

    def started(hosts, setup) -> None:
        real(hosts, setup)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(JobHosts, "start", started)
    with pytest.raises(KeyboardInterrupt):
        stage.run(stage.job(FOREVER))
    assert not stage.left()
    assert not (stage.run_dir / "logs" / "rank-0.log").exists()


COORDINATOR = """
import os, sys
from pathlib import Path
from dsrun.jobs.supervision.coordinator import Coordinator
from dsrun.jobs.supervision.run_options import RunOptions
from dsrun.job.job import read

env = {name: os.environ[name] for name in ("PYTHONPATH", "TORCH_EXTENSIONS_DIR", "OMP_NUM_THREADS")}
options = RunOptions(env=env, host_timeout=10 / 60)
Coordinator(read(Path(sys.argv[1])), dict(os.environ), options, lambda: False, print).run()
"""


@pytest.fixture
def other_coordinator(stage):
    """`other_coordinator(job)`: a process that runs it, when all its ranks are there."""
    started = []

    def start(job) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", COORDINATOR, str(stage.run_dir / "job.json")]
        process = subprocess.Popen(words, env={**stage.environ, "DSRUN_SSH": str(stage.root / "bin" / "ssh")})
        started.append(process)

        def there() -> bool:
            assert process.poll() is None
            return stage.up(job.world_size)()

        until(there, "the ranks")
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


TWO = {"node1": 1, "node2": 1}


@pytest.mark.parametrize(("launcher", "hosts"), [("local", None), ("ssh", TWO), ("pdsh", TWO)])
def test_when_dsrun_is_killed_nothing_stays(other_coordinator, stage, launcher, hosts):
    process = other_coordinator(stage.job(FOREVER, FOREVER, hosts=hosts, launcher=launcher))
    assert len(stage.processes(str(stage.rank))) == 2
    process.kill()
    process.wait()
    assert not stage.left()


def test_ctrl_z_stops_dsrun_and_not_the_job(other_coordinator, stage):
    """Longer than silence is borne; the agents do not take it for dsrun's end."""
    waiting = "while not (run_dir / 'go').exists(): time.sleep(0.05)\n" + DONE
    job = stage.job(waiting, DONE, hosts=TWO, launcher="ssh")
    process = other_coordinator(job)
    process.send_signal(signal.SIGTSTP)
    until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "it stops")
    time.sleep(12)
    assert stage.agent(0).is_running()
    process.send_signal(signal.SIGCONT)
    time.sleep(1)
    (stage.run_dir / "go").touch()
    assert process.wait(300) == 0


# A checkpoint before the end


@pytest.fixture
def tune(stage, make_job):
    """`tune(*scripts)`: a fine-tune with these ranks; scripts of the user's are not asked for a checkpoint."""

    def make(*scripts: str, **play):
        stage.play(*scripts, **play)
        return stage.put(make_job(stage.run_dir, ranks=len(scripts)))

    return make


def test_a_checkpoint_is_written_first(stage, tune):
    job = tune("answer()", "answer()")
    with pytest.raises(StoppedError) as caught:
        stage.run(
            job, stage.when(stage.up(), lambda: os.kill(os.getpid(), signal.SIGINT)), save_on_stop=20 / 60
        )
    assert isinstance(caught.value.cause, KeyboardInterrupt)
    assert (stage.run_dir / "state" / "save").read_text() == "stop"
    assert any("checkpoint" in line for line in stage.said)


def test_a_second_ctrl_c_does_not_wait_for_the_checkpoint(stage, tune):
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        stage.run(tune(FOREVER, FOREVER), stage.when(stage.up(), twice), save_on_stop=60.0)


def test_a_checkpoint_that_takes_too_long_is_given_up(stage, tune):
    with pytest.raises(TerminatedError):
        stage.run(
            tune(FOREVER),
            stage.when(stage.up(1), lambda: os.kill(os.getpid(), signal.SIGTERM)),
            save_on_stop=0.5 / 60,
        )
    assert any("given up" in line for line in stage.said)


def test_a_rank_that_dies_while_it_saves(failure, stage, tune):
    dying = "while not (run_dir / 'state' / 'save').exists(): time.sleep(0.02)\nfail('OSError: disk full')"
    problem, _ = failure(
        tune(FOREVER, dying),
        stage.when(stage.up(), lambda: os.kill(os.getpid(), signal.SIGINT)),
        save_on_stop=120 / 60,
    )
    assert stage.causes == [("rank-failed", 1)]
    assert "disk full" in problem.what


def test_a_script_is_not_asked_for_a_checkpoint(stage):
    with pytest.raises(KeyboardInterrupt):
        stage.run(
            stage.job(FOREVER),
            stage.when(stage.up(1), lambda: os.kill(os.getpid(), signal.SIGINT)),
            save_on_stop=60 / 60,
        )


# Hangs


def test_a_hang_is_ended_and_every_stack_is_shown(failure, stage):
    script = "import time\n\n\ndef stuck():\n    print('up', flush=True)\n    time.sleep(600)\n\n\nstuck()\n"
    (stage.root / "script.py").write_text(script)

    def starts() -> bool:
        logs = [path.read_text() for path in (stage.run_dir / "logs").glob("rank-*.log")]
        return [log for log in logs if "up" in log] != logs or len(logs) < 2

    problem, _ = failure(stage.job("", "", real=True), starts, hang_timeout=0.5 / 60)
    assert "hangs" in problem.what
    for rank in range(2):
        log = (stage.run_dir / "logs" / f"rank-{rank}.log").read_text()
        assert "in stuck" in log
        assert "script.py" in log


def test_a_job_that_moves_does_not_hang(stage):
    stage.run(stage.job(f"time.sleep(2); {DONE}"), lambda: True, hang_timeout=0.5 / 60)


def test_a_rank_that_is_stopped_is_named_and_has_no_stack(failure, stage):
    stopped = []

    def stop() -> None:
        pid = json.loads((stage.run_dir / "state" / "rank-1.json").read_text())["pid"]
        os.kill(pid, signal.SIGSTOP)
        stopped.append(pid)

    problem, _ = failure(stage.job(FOREVER, FOREVER), stage.when(stage.up(), stop), hang_timeout=3 / 60)
    assert f"rank 1 is stopped (kill -CONT {stopped[0]}" in problem.hint
    assert "rank 0 runs in another Python" in problem.hint  # it has no handler
    assert "Every rank's stack" not in problem.hint
    assert not stage.left()


def test_a_rank_without_the_handler_is_not_struck(failure, stage):
    problem, _ = failure(stage.job(FOREVER), hang_timeout=1 / 60)
    assert "hangs" in problem.what


# Places


def test_the_port_is_taken(stage):
    import socket

    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DsrunError) as caught:
            stage.run(stage.job(DONE), master_port=port)
    assert not isinstance(caught.value, JobFailedError)
    (problem,) = caught.value.problems
    assert str(port) in problem.what
    assert "--master-port" in problem.where
    assert not (stage.run_dir / "logs" / "rank-0.log").exists()


def test_the_port_that_is_asked_for(stage):
    port = free_port()
    stage.run(stage.job(f"assert os.environ['MASTER_PORT'] == '{port}'; {DONE}"), master_port=port)


def test_a_program_that_is_not_there(stage):
    job = stage.job(DONE, DONE, hosts=TWO, launcher="pdsh")
    stage.environ["PATH"] = "/none"
    with pytest.raises(DsrunError, match="pdsh, which is not installed"):
        stage.run(job)


# Nothing leaks


def test_handles_threads_and_children_are_given_back(stage):
    import threading

    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    stage.run(stage.job(DONE))
    before = open_files(), threading.active_count()
    for launcher, hosts in (("local", None), ("ssh", TWO), ("pdsh", TWO)):
        stage.run(stage.job(DONE, DONE, hosts=hosts, launcher=launcher))
    with pytest.raises(JobFailedError):
        stage.run(stage.job("fail('x')", DONE, hosts=TWO, launcher="ssh"))
    assert (open_files(), threading.active_count()) == before
    assert not [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE]


SECRET = "hf_s3cr3t"


@pytest.mark.parametrize(
    "launcher",
    ["local", "ssh", "pdsh", *(pytest.param(name, marks=pytest.mark.full) for name in ("openmpi", "slurm"))],
)
def test_secrets_are_on_no_command_line_and_in_no_file(stage, launcher):
    seen = []

    def look() -> bool:
        words = []
        for process in stage.processes():
            with contextlib.suppress(psutil.Error):  # it has just ended
                words += process.cmdline()
        seen.append(len(words))
        assert not any(SECRET in word for word in words)
        return False

    stage.environ["HF_TOKEN"] = SECRET
    script = f"assert os.environ['HF_TOKEN'] == {SECRET!r}; time.sleep(0.3); {DONE}".replace(
        SECRET, "'.join(['hf_', 's3cr3t']) + '"
    )
    hosts = None if launcher == "local" else TWO
    job = stage.job(script, script, hosts=hosts, launcher=launcher)
    stage.run(job, look, env={**stage.forwarded, "HF_TOKEN": SECRET})
    assert max(seen)
    for path in stage.run_dir.rglob("*"):
        assert path.is_dir() or SECRET not in path.read_text(errors="replace"), path


def test_what_holds_the_token_is_for_nobody_else_and_gone_after_the_start(stage, monkeypatch):
    control = stage.run_dir / ".control"
    modes, there = [], []
    real = JobHosts._listen

    def listen(hosts, setup) -> None:
        real(hosts, setup)
        modes.append(control.stat().st_mode & 0o777)

    control.write_text("of a run that was killed")
    control.chmod(0o644)
    monkeypatch.setattr(JobHosts, "_listen", listen)
    job = stage.job(f"time.sleep(0.3); {DONE}", DONE, hosts=TWO, launcher="pdsh")
    stage.run(job, lambda: bool(there.append(control.exists())))
    assert modes == [0o600]
    assert there
    assert not any(there)


def test_an_agent_that_is_asked_to_end_waits_for_the_checkpoint(stage, tune):
    """As when a scheduler asks every process of a job."""
    job = tune("answer()", "answer()")
    agent = stage.when(stage.up(), lambda: stage.agent(0).send_signal(signal.SIGTERM))
    with pytest.raises(StoppedError) as caught:
        stage.run(job, agent, save_on_stop=30.0 / 60)
    assert isinstance(caught.value.cause, TerminatedError)
    assert any("asked to end (SIGTERM)" in line for line in stage.said)
