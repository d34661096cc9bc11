"""Training over two real hosts, one rank on each, by every way to start it: the losses of two ranks on one machine."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import threading

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

from lab import find_program
from running import THOROUGH, Done, little_data, same, until
from runs import DSRUN, Cluster

pytestmark = pytest.mark.slow

STEPS = 4
STAGES = ("zero1", "zero2", "zero3")
USUAL = {"ssh": STAGES, "pdsh": ("zero3",), "openmpi": ("zero2",), "srun": ("zero3",), "sbatch": ("zero1",)}
RUNS = dict.fromkeys(USUAL, STAGES) if THOROUGH else USUAL
"""Launcher -> the stages that are trained with it."""
NAMED = ("ssh", "pdsh", "openmpi")
"""Launchers to hosts that somebody names."""
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def cluster(lab, environ, tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    made = Cluster(lab, environ, folder, (*little_data(folder), "--max-steps", str(STEPS)))
    yield made
    made.end()


@pytest.fixture(autouse=True)
def _end(cluster):
    yield
    cluster.end()


@pytest.fixture(scope="module")
def expected(cluster) -> dict[int, float]:
    """The losses of two ranks on one machine."""
    process = cluster.train("local", "--gpus", "2", "--preset", "zero1")
    done = cluster.finish(process, "local", 800)
    assert done.code == 0, done.err
    assert len(done.losses) == STEPS
    return done.losses


def slurms(slurm, *argv: str) -> str:
    """What a command of Slurm's says."""
    return subprocess.run(
        [str(find_program(argv[0])), *argv[1:]], env={**os.environ, **slurm.environ}, check=True, capture_output=True,
        text=True, timeout=60,
    ).stdout  # fmt: skip


def submitted(cluster, slurm, name: str, *options: str) -> str:
    """The number of a job that was sent to the queue."""
    words = cluster.words(name, *options)
    process = cluster.dsrun("submit", "--nodes", "2", "--gpus-per-node", "1", "--", *words, env=slurm.environ)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return re.search(r"^job +(\d+)", out, re.MULTILINE)[1]


def ended(cluster, slurm, name: str, number: str) -> Done:
    """The job, when it has left the queue."""
    state = re.compile(r"JobState=(\w+)")

    def over() -> bool:
        found = state.search(slurms(slurm, "scontrol", "show", "job", number))
        return found[1] not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "CONFIGURING")

    until(over, f"job {number} ends", every=0.3)
    said = (cluster.folder / name / "logs" / f"slurm-{number}.out").read_text(encoding="utf-8")
    completed = "JobState=COMPLETED" in slurms(slurm, "scontrol", "show", "job", number)
    return Done(0 if completed else 1, "", said, cluster.folder / name)


@pytest.fixture
def check(cluster, expected):
    """What holds for every one of these jobs once it has ended."""

    def checked(done: Done) -> None:
        assert done.code == 0, done.err
        assert done.state == "finished"
        same(done.losses, expected, TOLERANCE)
        job = done.read("job.json")
        assert re.findall(r'"host": "(\w+)"', job) == ["node1", "node2"]
        hosts = [re.search(r'"host": "(\w+)"', done.read(f"state/rank-{rank}.json"))[1] for rank in (0, 1)]
        assert hosts == ["node1", "node2"]
        assert list((done.run_dir / "model").glob("*.safetensors"))
        cluster.check_nothing_is_left()
        assert [host.shm() for host in cluster.lab.hosts] == [[], []]

    return checked


@pytest.fixture(params=RUNS)
def of_all_stages(request, cluster, expected) -> list[Done]:
    """Its runs, by one launcher. They share the hosts, at the same time."""
    slurm = None if request.param in NAMED else request.getfixturevalue("slurm")
    running = {}
    for preset in RUNS[request.param]:
        name = f"{request.param}-{preset}"
        if request.param in NAMED:
            # From the first of the hosts, and from a machine that is none of them.
            at = cluster.lab.hosts[0] if preset == "zero1" else None
            where = ("--hostfile", cluster.lab.hostfile(slots=1), "--launcher", request.param)
            running[name] = cluster.train(name, *where, "--preset", preset, at=at)
        elif request.param == "srun":
            words = cluster.words(name, "--gpus", "1", "--preset", preset)
            allocated = ["salloc", "--quiet", "--nodes=2", *DSRUN, *words]
            running[name] = cluster.popen(allocated, env=slurm.environ)
        else:
            running[name] = submitted(cluster, slurm, name, "--preset", preset)
    return [
        ended(cluster, slurm, name, one) if request.param == "sbatch" else cluster.finish(one, name, 600)
        for name, one in running.items()
    ]


def test_every_stage(of_all_stages, check):
    for done in of_all_stages:
        check(done)


def test_mpich(cluster, check):
    where = ("--hosts", "node[1-2]:1", "--launcher", "mpich")
    check(cluster.finish(cluster.train("mpich", *where, "--preset", "zero2"), "mpich"))


def test_by_hand(cluster, check):
    """The lines that dsrun prints, each in a shell of its host."""
    where = ("--hostfile", cluster.lab.hostfile(slots=1), "--launcher", "manual")
    process = cluster.train("manual", *where, "--preset", "zero3")
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(iter(process.stderr.readline, "")))
    reader.start()
    until(lambda: sum(line.startswith("on node") for line in lines) == 2, "two lines")
    shown = dict(re.findall(r"^on (\w+):  (.+)$", "".join(lines), re.MULTILINE))
    for host in cluster.lab.hosts:
        by_hand = host.popen(
            ["sh", "-c", shown[host.name]], cwd="/", env={"PYTHONPATH": cluster.environ["PYTHONPATH"]},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        cluster.started.append(by_hand)
    code = process.wait(300)
    reader.join(10)
    check(Done(code, "", "".join(lines), cluster.folder / "manual"))


def test_a_job_whose_time_is_nearly_over_comes_back(cluster, slurm, check):
    """Slurm's signal before the time limit: a checkpoint, the queue, and the losses of a job that wasn't disturbed."""
    name = "requeued"
    number = submitted(cluster, slurm, name, "--preset", "zero2", "--save-steps", "100")
    run_dir = cluster.folder / name
    until(lambda: len(list(run_dir.glob("state/rank-?.json"))) == 2, "the ranks are there")
    slurms(slurm, "scancel", "--signal=USR1", "--batch", number)
    until(lambda: list(run_dir.glob("checkpoints/*/complete")), "a checkpoint")

    def queued() -> bool:
        # A job that comes back would wait for two minutes, lest the one before still run somewhere.
        said = slurms(slurm, "scontrol", "show", "job", number)
        if "Restarts=1" in said and "JobState=PENDING" in said:
            with contextlib.suppress(subprocess.CalledProcessError):
                slurms(slurm, "scontrol", "update", f"JobId={number}", "StartTime=now")
        return "Restarts=1" in said and "JobState=RUNNING" in said

    until(queued, "it runs again", 300, every=0.5)
    done = ended(cluster, slurm, name, number)
    check(done)
    assert re.findall(r'"event": "plan".*?"start_step": (\d+)', done.read("events.jsonl")) == ["0", "1"]
