from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from dsrun.cluster import extensions
from dsrun.cluster.devices import Machine
from dsrun.job.job import HostDevices, ScriptJob
from dsrun.jobs.diagnosis.causes import diagnose
from dsrun.jobs.supervision import coordinator
from dsrun.jobs.supervision.coordinator import Coordinator
from dsrun.jobs.supervision.run_options import RunOptions

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def machine(monkeypatch) -> Machine:
    """A CPU machine with room for four ranks, and libaio's header, which the one under the tests may not have."""
    monkeypatch.setattr(extensions, "libaio_header", lambda prefix: "/usr/include/libaio.h")
    return Machine("cpu", (), 4, "a machine of paper")


# A stage for jobs that run: real agents and real processes; in DeepSpeed's place something that starts in no time.

MARK = "DSRUN_TEST_STAGE"
LAUNCH = """
import argparse, base64, contextlib, json, os, signal, subprocess, sys, time
from pathlib import Path
import psutil

parser = argparse.ArgumentParser()
for name in ("--world_info", "--master_addr", "--master_port", "--node_rank", "--module"):
    parser.add_argument(name, required=True)
parser.add_argument("--no_local_rank", action="store_true", required=True)
parser.add_argument("words", nargs=argparse.REMAINDER)
arguments = parser.parse_args()
job, *extra = arguments.words
run_dir = Path(job).parent
play = json.loads((run_dir / "play.json").read_text())
exec(play["runner"])
slots = [len(own) for own in json.loads(base64.urlsafe_b64decode(arguments.world_info)).values()]
node = int(arguments.node_rank)
first, own = sum(slots[:node]), slots[node]
env = {**os.environ, "MASTER_ADDR": arguments.master_addr, "MASTER_PORT": arguments.master_port,
       "WORLD_SIZE": str(sum(slots)), "CROSS_RANK": str(node), "LOCAL_SIZE": str(own),
       "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(own)))}
command = [sys.executable, "-u", "-m", arguments.module] if play["real"] else [play["rank"], arguments.module]
processes = []
for rank in range(first, first + own):
    env |= {"RANK": str(rank), "LOCAL_RANK": str(rank % own)}  # as deepspeed/launcher/launch.py has it
    processes.append(subprocess.Popen([*command, job, *extra], env=env))

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
while sum(process.poll() is not None for process in processes) < play["deaths"]:
    time.sleep(0.02)
alive = set(processes)
while alive:
    for process in list(alive):
        if process.poll() is not None:
            if process.returncode:
                if process.returncode != 1:
                    end(code=process.returncode)
                print(f"[ERROR] {command} exits with return code = 1", flush=True)
                end()
            print(f"[INFO] Process {process.pid} exits successfully.", flush=True)
            alive.remove(process)
    time.sleep(play["poll_s"])
"""
RANK = """#!{python}
import contextlib, json, os, signal, socket, sys, time
from pathlib import Path

run_dir, rank = Path(sys.argv[2]).parent, int(os.environ["RANK"])
play = json.loads((run_dir / "play.json").read_text())

def say(text):
    with (run_dir / "logs" / f"rank-{{rank}}.log").open("a") as log:
        log.write(text + "\\n")

def state(status, **fields):
    path = run_dir / "state" / f"rank-{{rank}}.json"
    path.parent.mkdir(exist_ok=True)
    content = {{"rank": rank, "pid": os.getpid(), "status": status, "ended": time.time(), **fields}}
    path.with_suffix(".new").write_text(json.dumps(content))
    path.with_suffix(".new").replace(path)

def write(name, **fields):
    with (run_dir / name).open("a") as file:
        file.write(json.dumps(fields) + "\\n")

def fail(error):
    state("failed", error=error)
    os._exit(1)

def forever():
    time.sleep(600)

def until(condition):
    while not condition():
        time.sleep(0.02)

def watched():
    "Wait until the host's agent waits for the end of every rank here."
    agent = Path("/proc", os.environ["DSRUN_SUPERVISOR_PID"], "fdinfo")

    def handles():
        found = 0
        for one in agent.iterdir():
            with contextlib.suppress(OSError):
                found += "\\nPid:" in one.read_text()
        return found

    with contextlib.suppress(OSError):
        os.close(os.pidfd_open(os.getpid()))
        limit = time.monotonic() + 30  # a kernel that shows none
        until(lambda: handles() >= int(os.environ["LOCAL_SIZE"]) or time.monotonic() > limit)

def gone(other):
    "Whether that rank's process has ended, and the launcher has seen it."
    path = run_dir / "state" / f"rank-{{other}}.json"
    return path.exists() and not Path("/proc", str(json.loads(path.read_text())["pid"])).exists()

def after(*ranks):
    "Wait until those ranks have failed."
    path = lambda other: run_dir / "state" / f"rank-{{other}}.json"
    until(lambda: all(path(one).exists() and "failed" in path(one).read_text() for one in ranks))

def answer():
    "Wait for the request to save, and end as it says."
    while not (run_dir / "state" / "save").exists():
        time.sleep(0.02)
    state("stopped" if (run_dir / "state" / "save").read_text() == "stop" else "failed", error="no word")

state("running")
say(f"rank {{rank}} here")
exec(play["scripts"][rank])
"""
# In the place of ssh, pdsh, mpirun, mpiexec.hydra and srun: the "hosts" are this one, with a login's environment only.
WAY = """#!{python}
import os, re, subprocess, sys

name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
base = {{"PATH": "/usr/bin:/bin", "HOME": os.environ.get("HOME", "/"), "{mark}": os.environ["{mark}"]}}

def start(command, **env):
    return subprocess.Popen(command, env={{**base, **env}}, start_new_session=True)

def after(option):
    return words[words.index(option) + 1]

if name == "ssh":
    print("Welcome to", words[words.index("--") + 1], "{{", flush=True)
    started = [start(["bash", "-c", words[words.index("--") + 2]])]
elif name == "pdsh":
    hosts = after("-w").split(",")
    started = []
    for n in range(len(hosts)):
        text = re.sub("%(.)", lambda found: str(n) if found[1] == "n" else found[1], words[-1])
        started.append(start(["bash", "-c", text]))
else:
    command = words[next(n for n, word in enumerate(words) if word == "env" or word.startswith(sys.prefix)):]
    if name == "srun":
        started = [start(command, SLURMD_NODENAME=host) for host in after("--nodelist").split(",")]
    else:
        variable = "OMPI_COMM_WORLD_RANK" if name == "mpirun" and "--host" in words else "PMI_RANK"
        started = [start(command, **{{variable: str(n)}}) for n in range(int(after("-n")))]
sys.exit(max([process.wait() for process in started]))
"""
WAYS = ("ssh", "pdsh", "mpirun", "mpiexec.hydra", "srun")


class Stage:
    """A run folder and all that a job needs to run in it. said: what the user was told."""

    def __init__(self, root: Path, environ: dict[str, str]) -> None:
        self.root = root
        self.run_dir = root / "a user's 100%n 运行"
        (self.run_dir / "logs").mkdir(parents=True)
        launcher = root / "fake" / "deepspeed" / "launcher"
        launcher.mkdir(parents=True)
        for folder in (launcher, launcher.parent):
            (folder / "__init__.py").touch()
        (launcher / "launch.py").write_text(LAUNCH)
        (root / "bin").mkdir()
        for name in WAYS:
            self.program(name, WAY.format(python=sys.executable, mark=MARK))
        self.rank = self.program("rank", RANK.format(python=sys.executable))
        self.operators = root / "operators"
        for name in ("fused_adam", "cpu_adam"):
            (self.operators / name).mkdir(parents=True)
            (self.operators / name / f"{name}.so").touch()
        kept = {name: environ[name] for name in ("HOME", "LANG", "LD_LIBRARY_PATH") if name in environ}
        forwarded = {
            "PYTHONPATH": f"{root / 'fake'}{os.pathsep}{ROOT}", "TORCH_EXTENSIONS_DIR": str(self.operators),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self.forwarded = forwarded
        self.environ = {**kept, **forwarded, "PATH": f"{root / 'bin'}:{environ['PATH']}", MARK: str(root)}
        self.said: list[str] = []
        self.causes: list[tuple[str, int | None]] = []
        """Of the jobs that failed: the cause's name, and its rank."""

    def program(self, name: str, text: str) -> Path:
        path = self.root / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def play(
        self, *scripts: str, poll_s: float = 0.05, deaths: int = 0, runner: str = "", real: bool = False
    ) -> None:
        """What the ranks do: Python, in a process that knows say, state, write, fail, forever, until, watched, gone,
        after, answer. deaths: as many of them have to be gone before the launcher looks at any."""
        content = {
            "scripts": scripts,
            "poll_s": poll_s,
            "deaths": deaths,
            "runner": runner,
            "real": real,
            "rank": str(self.rank),
        }
        (self.run_dir / "play.json").write_text(json.dumps(content))

    def job(
        self, *scripts: str, hosts: dict[str, int] | None = None, launcher: str = "local", **play
    ) -> ScriptJob:
        """A job with a rank for each script, on this machine or on the hosts that are given with their slots."""
        self.play(*scripts, **play)
        hosts = hosts or {"localhost": len(scripts)}
        job = ScriptJob(
            run_dir=str(self.run_dir), script=str(self.root / "script.py"), args=(), cwd=str(self.root),
            accelerator="cpu", dsrun_version="0",
            hosts=tuple(HostDevices(host, tuple(range(slots))) for host, slots in hosts.items()),
            launcher=launcher,
        )  # fmt: skip
        return self.put(job)

    def put(self, job):
        (self.run_dir / "job.json").write_text(job.to_json(), encoding="utf-8")
        return job

    def coordinator(self, job, watch=lambda: False, say=None, **options) -> Coordinator:
        options = RunOptions(**{"env": self.forwarded, **options})
        return Coordinator(job, self.environ, options, watch, say or self.said.append)

    def run(self, job, watch=lambda: False, **options) -> None:
        self.coordinator(job, watch, **options).run()

    def when(self, ready, action):
        """A watch that acts once, as soon as `ready()` is true."""
        done = []

        def watch() -> bool:
            if not done and ready():
                done.append(True)
                action()
            return False

        return watch

    def up(self, ranks: int = 2):
        """Whether so many ranks are there."""
        return lambda: len(list((self.run_dir / "logs").glob("rank-*.log"))) >= ranks

    def processes(self, word: str = "") -> list[psutil.Process]:
        """The living processes that were started on this stage, those with the word on their command line."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                ours = process.environ().get(MARK) == str(self.root) and process.pid != os.getpid()
                if (
                    ours
                    and process.status() != psutil.STATUS_ZOMBIE
                    and any(word in one for one in process.cmdline())
                ):
                    found.append(process)
        return found

    def left(self, patience_s: float = 60.0) -> list[psutil.Process]:
        """What still lives, when all had the time to go. 0: what ended a job waits for them itself."""
        until = time.monotonic() + patience_s
        while (found := self.processes()) and time.monotonic() < until:
            time.sleep(0.02)
        return found

    def agent(self, number: int) -> psutil.Process:
        """A host's agent."""
        for process in self.processes("dsrun.jobs.supervision.host_agent"):
            words = process.cmdline()
            if Path(words[0]).name.startswith("python") and words[-2:] == ["--node", str(number)]:
                return process
        raise LookupError(number)


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """See Stage. Whatever happens on it: nothing that was started there may outlive the test."""
    stage = Stage(tmp_path, dict(os.environ))
    monkeypatch.setenv("DSRUN_SSH", str(tmp_path / "bin" / "ssh"))

    def diagnosed(*evidence):
        cause = diagnose(*evidence)
        stage.causes.append((cause.name, cause.rank))
        return cause

    monkeypatch.setattr(coordinator, "diagnose", diagnosed)
    yield stage
    left = stage.left()
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    assert not left


@pytest.fixture
def own_places(tmp_path, monkeypatch):
    """Nothing of the user's is read or written, and nothing has to be compiled."""
    from dsrun.jobs.assembly import finetune

    for name in ("work", "cache", "config"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(finetune, "check_operators", lambda *_: None)
