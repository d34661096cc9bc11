"""A rank: what the user's script sees, and what is left of it. Real processes, without a launcher."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from running import until

from dsrun.host.gpus import cores_beside
from dsrun.job import rank_state
from dsrun.job.job import HostDevices
from dsrun.job.run_folder import write_state
from dsrun.jobs.supervision import rank as rank_module

SEEN = """
import json, os, sys
names = ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "DSRUN_VISIBLE_DEVICES")
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path[0], "cwd": os.getcwd(),
    "main": sys.modules["__main__"].__dict__ is globals(), "package": __package__ or None,
    "env": {name: os.environ.get(name) for name in names},
}))
"""


@pytest.fixture
def script(stage):
    """`script(code, **fields)`: the job that runs the code."""

    def make(code: str, **fields):
        path = stage.root / "a script's 目录" / "train.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(code, encoding="utf-8")
        job = stage.job("", "")
        return stage.put(dataclasses.replace(job, **{"script": str(path), **fields}))

    return make


@pytest.fixture
def start(stage):
    """`start(job, rank)`: the rank's process, as the launcher starts it."""

    def run(job, rank: int = 0, node: int | None = None, **env: str) -> subprocess.Popen[bytes]:
        local = {"RANK": str(rank), "LOCAL_RANK": "9", "CUDA_VISIBLE_DEVICES": "0,1,2"}
        local |= {"CROSS_RANK": "0"} if node is None else {"DSRUN_NODE": str(node)}
        words = [sys.executable, "-u", "-m", "dsrun.jobs.supervision.rank", str(stage.run_dir / "job.json")]
        return subprocess.Popen(
            words, env={**stage.environ, **local, **env}, cwd=job.cwd, stdin=subprocess.PIPE
        )

    return run


@pytest.fixture
def ran(stage, start):
    """`ran(job, rank)`: (exit code, its log, its state) of a rank that has run."""

    def run(job, rank: int = 0, **options):
        code = start(job, rank, **options).wait(300)
        log = (stage.run_dir / "logs" / f"rank-{rank}.log").read_text(encoding="utf-8")
        return (
            code,
            log,
            json.loads((stage.run_dir / "state" / f"rank-{rank}.json").read_text(encoding="utf-8")),
        )

    return run


def test_a_script_sees_what_it_sees_under_python(script, ran, stage):
    job = script(SEEN, args=("--lr", "1e-4", "中 文", "--resume"), local_rank=False)
    code, log, state = ran(job)
    plain = subprocess.run(
        [sys.executable, job.script, *job.args], capture_output=True, text=True, check=True, cwd=job.cwd,
        env=stage.environ,
    )  # fmt: skip
    seen, wanted = json.loads(log), json.loads(plain.stdout)
    del seen["env"], wanted["env"]
    assert seen == wanted
    assert seen["argv"][1:] == list(job.args)
    assert (code, state["status"]) == (0, "finished")


def test_a_module_too(script, ran, stage):
    job = script("", script="package.train", module=True, args=("x",), local_rank=False)
    (stage.root / "package").mkdir()
    (stage.root / "package" / "__init__.py").touch()
    (stage.root / "package" / "train.py").write_text(SEEN)
    _, log, _ = ran(job)
    plain = subprocess.run(
        [sys.executable, "-m", "package.train", "x"], capture_output=True, text=True, check=True, cwd=job.cwd,
        env=stage.environ,
    )  # fmt: skip
    seen, wanted = json.loads(log), json.loads(plain.stdout)
    del seen["env"], wanted["env"]
    assert seen == wanted


def test_local_rank_is_given_as_deepspeed_does(script, ran):
    _, log, _ = ran(script(SEEN, args=("a",)), 1)
    assert json.loads(log)["argv"][1:] == ["--local_rank=1", "a"]


def test_a_script_behind_a_link(script, ran, stage):
    job = script("import beside; print(beside.x)")
    Path(job.script).with_name("beside.py").write_text("x = 'beside it'")
    link = stage.root / "link.py"
    link.symlink_to(job.script)
    _, log, _ = ran(stage.put(dataclasses.replace(job, script=str(link))))
    assert log == "beside it\n"


# Devices and places


@pytest.mark.parametrize(
    ("devices", "visible", "told", "wanted"),
    [
        ((0, 1), (), None, "0,1"),
        ((3, 1), (), None, "3,1"),
        ((0, 1), ("GPU-b", "GPU-a"), None, "GPU-b,GPU-a"),
        ((0, 1), ("MIG-2f", "MIG-1a"), None, "MIG-2f,MIG-1a"),
        ((0, 1), (), "6,4", "6,4"),
    ],
)
def test_the_devices_in_the_jobs_order(script, ran, devices, visible, told, wanted):
    job = script(SEEN, hosts=(HostDevices("localhost", devices, visible),))
    _, log, _ = ran(job, **({"DSRUN_VISIBLE_DEVICES": told} if told else {}))
    assert json.loads(log)["env"] == {
        "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": wanted, "DSRUN_VISIBLE_DEVICES": None,
    }  # fmt: skip


@pytest.mark.parametrize("named", [True, False])
def test_the_place_on_a_host_where_hosts_differ(make_job, monkeypatch, named):
    """DeepSpeed's LOCAL_RANK is rank % slots of the host: 1, 2, 0 on the second of these."""
    hosts = (HostDevices("a", (0,)), HostDevices("b", (5, 3, 4)), HostDevices("c", (7, 2)))
    job = make_job(hosts=hosts)
    found = []
    for rank, node in enumerate([0, 1, 1, 1, 2, 2]):
        for name, value in (("DSRUN_NODE" if named else "CROSS_RANK", node), ("LOCAL_RANK", 9)):
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        rank_module.place(job, rank)
        found.append((os.environ["LOCAL_RANK"], os.environ["CUDA_VISIBLE_DEVICES"]))
    assert found == [
        ("0", "0"), ("0", "5,3,4"), ("1", "5,3,4"), ("2", "5,3,4"), ("0", "7,2"), ("1", "7,2"),
    ]  # fmt: skip


@pytest.fixture
def two_sockets(tmp_path, monkeypatch):
    """Two GPUs on each of two NUMA nodes, of 8 cores each."""
    for number, bus in enumerate(["0000:17:00.0", "0000:3d:00.0", "0000:97:00.0", "0000:bd:00.0"]):
        (tmp_path / "gpus" / bus).mkdir(parents=True)
        (tmp_path / "gpus" / bus / "information").write_text(f"Model: \t H100\nGPU UUID: \t GPU-{number}\n")
        (tmp_path / "pci" / bus).mkdir(parents=True)
        (tmp_path / "pci" / bus / "local_cpulist").write_text("0-3,8-11\n" if number < 2 else "4-7,12-15\n")
    monkeypatch.setattr(
        rank_module, "cores_beside", lambda gpu: cores_beside(gpu, tmp_path, tmp_path / "pci")
    )
    bound = []
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr("os.sched_setaffinity", lambda _, cores: bound.append(sorted(cores)))
    for name in rank_module.BINDING:
        monkeypatch.delenv(name, raising=False)
    return bound


FIRST, SECOND = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]


@pytest.mark.parametrize(
    ("visible", "threads", "local_rank", "variables", "cores"),
    [
        ("0,1,2,3", "4", "1", {}, FIRST),
        ("0,1,2,3", "4", "2", {}, SECOND),
        ("3,0", "8", "0", {}, SECOND),
        ("GPU-3,GPU-0", "8", "0", {}, SECOND),
        ("0,1", "8", "0", {}, None),  # both on one node, which has not as many cores
        ("0,1,2,3", "4", "0", {"OMP_PROC_BIND": "close"}, None),
        ("MIG-abc", "16", "0", {}, None),
        ("9", "16", "0", {}, None),
        ("0,1,2,3", "", "0", {}, None),
    ],
)
def test_ranks_that_offload_are_bound_beside_their_gpu(
    make_job, monkeypatch, two_sockets, visible, threads, local_rank, variables, cores
):
    values = {"CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": threads, "LOCAL_RANK": local_rank}
    for name, value in {**values, **variables}.items():
        monkeypatch.setenv(name, value)
    offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    rank_module.bind(make_job(accelerator="cuda", ds_config={}))
    rank_module.bind(make_job(accelerator="cpu", ds_config=offload))
    assert two_sockets == []
    rank_module.bind(make_job(accelerator="cuda", ds_config=offload))
    assert two_sockets == ([] if cores is None else [cores])


# Ends


@pytest.mark.parametrize(
    ("code", "exit_code", "status", "error"),
    [
        ("", 0, "finished", None),
        ("import sys; sys.exit()", 0, "finished", None),
        ("import sys; sys.exit(0)", 0, "finished", None),
        ("import sys; sys.exit(7)", 7, "failed", "it left with exit code 7, without an error"),
        ("import sys; sys.exit('no data')", 1, "failed", "no data"),
        ("raise ValueError('the weights\\ndo not fit')", 1, "failed", "ValueError: the weights\ndo not fit"),
        ("import nothing_of_this_name", 1, "failed", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("x = = 1", 1, "failed", "SyntaxError: invalid syntax"),
        ("raise KeyboardInterrupt", 1, "failed", "KeyboardInterrupt"),
        ("raise OSError(b'/data/\\xff'.decode('utf-8', 'surrogateescape'))", 1, "failed", "OSError: /data/?"),
    ],
)  # fmt: skip
def test_how_it_ends(script, ran, code, exit_code, status, error):
    found_code, log, state = ran(script(code))
    if "KeyboardInterrupt" not in code:
        assert found_code == exit_code
    assert found_code != 0 or status == "finished"
    assert state["status"] == status
    assert state.get("error") == error
    assert {"rank", "pid", "host", "started", "ended", "stacks"} <= set(state)
    assert ("Traceback" in log or "SyntaxError" in log) == (
        "raise" in code or "import n" in code or "=" in code
    )


@pytest.mark.parametrize("code", [0, 5])
def test_one_that_leaves_at_once_has_said_nothing(script, ran, code):
    found, _, state = ran(script(f"import os; os._exit({code})"))
    assert (found, state["status"]) == (code, "running")


def test_a_script_that_is_not_there(script, ran):
    code, _, state = ran(script("", script="/nowhere/train.py"))
    assert code == 1
    assert "/nowhere/train.py" in state["error"]


def test_what_waits_at_the_end_of_a_failed_script_does_not_wait_for_ever(script, stage):
    """Other ranks' collectives, a logger that reports: it has CLEAN_UP_S."""
    job = script("import atexit, time; atexit.register(time.sleep, 600); raise ValueError('x')")
    code = "from dsrun.jobs.supervision import rank; rank.CLEAN_UP_S = 0.3; rank.main()"
    words = [sys.executable, "-c", code, str(stage.run_dir / "job.json")]
    process = subprocess.Popen(words, env={**stage.environ, "RANK": "0"}, cwd=job.cwd)
    assert process.wait(300) == 1


def test_all_that_is_printed_goes_to_its_log(script, ran):
    code = "import os, subprocess, sys\nprint('out')\nprint('err', file=sys.stderr)\nos.write(1, b'raw\\n')\n" \
           "subprocess.run(['echo', 'child'])"  # fmt: skip
    _, log, _ = ran(script(code))
    assert log == "out\nerr\nraw\nchild\n"


def test_a_later_attempt_goes_on_in_the_same_log(script, ran):
    ran(script("print('first')"))
    assert ran(script("print('second')"))[1] == "first\nsecond\n"


def test_every_stack_on_request(script, start, stage):
    code = "import sys, threading\nthere, done = threading.Event(), threading.Event()\n" \
           "def beside(): there.set(); done.wait()\nthreading.Thread(target=beside).start()\n" \
           "def stuck(): there.wait(); print('up', flush=True); sys.stdin.read()\nstuck(); done.set()"  # fmt: skip
    process = start(script(code))
    log = stage.run_dir / "logs" / "rank-0.log"
    until(lambda: log.exists() and "up" in log.read_text(), "it is stuck")
    process.send_signal(signal.SIGUSR2)
    until(lambda: "in stuck" in log.read_text() and "in beside" in log.read_text(), "both stacks")
    process.communicate(b"")
    assert process.returncode == 0, "it goes on"


def test_a_crash_in_compiled_code_leaves_a_stack(script, ran):
    code, log, state = ran(script("import faulthandler\ndef deep(): faulthandler._sigsegv()\ndeep()"))
    assert code == -signal.SIGSEGV
    assert "in deep" in log
    assert state["status"] == "running"


def test_processes_that_a_script_starts_find_it(script, ran):
    """multiprocessing's spawn imports the main script again, by its path."""
    code = (
        "import multiprocessing\ndef double(x): return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(double, [1, 2]))"
    )
    code, log, _ = ran(script(code))
    assert (code, log) == (0, "[2, 4]\n")


def test_of_a_module_too(script, ran, stage):
    job = script("", script="spawning", module=True)
    (stage.root / "spawning.py").write_text(
        "import multiprocessing\ndef double(x): return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(double, [1, 2]))"
    )
    assert ran(job)[1] == "[2, 4]\n"


# The end of those above


PARENT = """
import subprocess, sys, time
process = subprocess.Popen(sys.argv[1:])
time.sleep(600)
"""


@pytest.mark.parametrize("who", ["launcher", "supervisor", "supervisor that nobody collects"])
def test_a_rank_ends_with_those_above_it(script, stage, who):
    job = script(
        "import subprocess, time; subprocess.Popen(['sleep', '600']); print('up', flush=True); time.sleep(600)"
    )
    supervisor = subprocess.Popen(["sleep", "600"], env=stage.environ)
    env = {**stage.environ, "RANK": "0", "DSRUN_SUPERVISOR_PID": str(supervisor.pid)}
    words = [sys.executable, "-m", "dsrun.jobs.supervision.rank", str(stage.run_dir / "job.json")]
    launcher = subprocess.Popen([sys.executable, "-c", PARENT, *words], env=env, cwd=job.cwd)
    log = stage.run_dir / "logs" / "rank-0.log"
    try:
        until(lambda: log.exists() and "up" in log.read_text(), "the rank")
        (launcher if who == "launcher" else supervisor).kill()
        if who in ("launcher", "supervisor"):
            (launcher if who == "launcher" else supervisor).wait()
        left = int(who != "launcher")
        until(
            lambda: len(stage.processes("dsrun.jobs.supervision.rank")) <= left, "the rank's end", every=0.05
        )
        state = json.loads((stage.run_dir / "state" / "rank-0.json").read_text())
        assert (state["status"], state["error"]) == ("failed", rank_state.GONE)

        def none_sleeps() -> bool:  # killed before the rank went, which the kernel carries out when it can
            others = (one for one in stage.processes("600") if one.pid != supervisor.pid)
            return all(one.ppid() == os.getpid() for one in others)

        until(none_sleeps, "the script's own process is gone")
    finally:
        for process in (launcher, supervisor):
            process.kill()
            process.wait()


# Its state


def test_a_state_is_there_from_the_beginning_and_added_to(tmp_path):
    state = rank_state.of(tmp_path, 3)
    assert rank_state.of(tmp_path, 3) is state
    read = lambda: json.loads((tmp_path / "state" / "rank-3.json").read_text())  # noqa: E731
    assert (read()["rank"], read()["pid"], read()["status"]) == (3, os.getpid(), "running")
    state.write(stacks=True)
    assert not state.ended
    state.end(rank_state.STOPPED)
    assert state.ended
    assert (read()["status"], read()["stacks"]) == ("stopped", True)
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["rank-3.json"]


@pytest.mark.parametrize("started_again", [True, False])
def test_what_is_left_of_an_attempt_before_has_no_say(tmp_path, started_again):
    """A host was lost and is back: its rank ends, in a folder where the next attempt is under way."""
    path = tmp_path / "state" / "rank-0.json"
    left = rank_state.RankState(tmp_path, 0)
    path.unlink()  # as the head does
    if started_again:
        new = rank_state.RankState(tmp_path, 0)
        new.fields["pid"] = left.fields["pid"] + 1
        new._put()
    left.end(rank_state.FAILED, error="the launcher or dsrun is gone")
    assert path.exists() == started_again
    assert not started_again or json.loads(path.read_text())["status"] == "running"


def test_a_zombie_ends_no_ranks(tmp_path):
    state = rank_state.RankState(tmp_path, 0)
    process = subprocess.Popen(["true"])
    until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE, "its end")
    assert not rank_module._watched_by(process.pid, state)
    process.wait()
    assert not rank_module._watched_by(process.pid, state)
    assert rank_module._watched_by(os.getpid(), state)


def test_a_stopped_supervisor_ends_no_ranks_of_a_run_that_is_over(tmp_path):
    """dsrun has given its host up; while the run goes on, the supervisor may, too."""
    state = rank_state.RankState(tmp_path, 0)
    process = subprocess.Popen(["sleep", "600"])
    try:
        process.send_signal(signal.SIGSTOP)
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "its stop")
        assert rank_module._watched_by(process.pid, state)
        for said, watched in (("running", True), ("failed", False), ("interrupted", False)):
            write_state(tmp_path, said)
            assert rank_module._watched_by(process.pid, state) == watched
        write_state(tmp_path, "running")
        (tmp_path / "state/rank-0.json").unlink()
        assert not rank_module._watched_by(process.pid, state), "the run was started again, without this rank"
        rank_state.RankState(tmp_path, 0).write(pid=1)
        assert not rank_module._watched_by(process.pid, state), "another one has its place"
    finally:
        process.kill()
        process.wait()


def test_the_flight_recorder_writes_into_the_runs_folder(script, ran, stage):
    """Where it is on; what an attempt before left there is gone, and a place of the user's own stays his."""
    old = stage.run_dir / "logs" / "flight-recorder.rank-1"
    old.parent.mkdir(exist_ok=True)
    old.write_bytes(b"of another attempt")
    job = script("import os; print(os.environ.get('TORCH_FR_DUMP_TEMP_FILE'))")
    assert ran(job, 1)[1] == "None\n"
    assert old.exists()
    said = ran(job, 1, TORCH_FR_BUFFER_SIZE="2000")[1].splitlines()[-1]
    assert f"{said}1" == str(old)
    assert not old.exists()
    own = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9", "TORCH_FR_DUMP_TEMP_FILE": "/tmp/mine_"}
    assert ran(job, 1, **own)[1].splitlines()[-1] == "/tmp/mine_"
