"""Training over two real hosts, one rank on each, by every way to start it: the losses of two ranks on one machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import threading
from collections.abc import Sequence

import psutil
import pytest
from needed import needs

needs("deepspeed", "transformers")

from lab import Host, find_program
from running import Done, same, starts_of, until
from runs import DSRUN, Cluster

pytestmark = pytest.mark.slow

LAUNCHERS = ("ssh", "pdsh", "openmpi", "mpich", "manual", "srun", "sbatch")
NAMED = LAUNCHERS[:5]
"""Launchers to hosts that somebody names."""
STAGES = ("zero1", "zero2", "zero3")
TRAINED = ("ssh", "sbatch")
"""Modules that other tests here train, so that no script has to show that ranks meet."""
ALIKE = ("pdsh", "mpich", "manual")
"""Agents call back over TCP here as under openmpi; started by stubs in tests/jobs/launchers."""
MEETS = """
import os, socket, time
place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    with socket.create_server(place) as server:
        server.accept()[0].sendall(socket.gethostname().encode())
else:
    for _ in range(3000):
        try:
            print(socket.create_connection(place).recv(99).decode(), "meets", socket.gethostname())
            break
        except OSError:
            time.sleep(0.1)
    else:
        raise TimeoutError
"""


@pytest.fixture(scope="module")
def cluster(lab, environ, data, tmp_path_factory):
    made = Cluster(lab, environ, tmp_path_factory.mktemp("training"), data)
    yield made
    made.end()


@pytest.fixture(autouse=True)
def _end(cluster):
    yield
    cluster.end()


def slurms(slurm, *argv: str) -> str:
    """Output of one of Slurm's commands."""
    return subprocess.run(
        [str(find_program(argv[0])), *argv[1:]], env={**os.environ, **slurm.environ}, check=True, capture_output=True,
        text=True, timeout=300,
    ).stdout  # fmt: skip


def submitted(cluster, slurm, words: Sequence[object]) -> str:
    """The number of a job that was sent to the queue."""
    process = cluster.dsrun("submit", "--nodes", "2", "--gpus-per-node", "1", "--", *words, env=slurm.environ)
    out, err = process.communicate(timeout=300)
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
def check(cluster):
    """Check what holds for every one of these jobs once it has ended."""

    def checked(done: Done) -> None:
        assert done.code == 0, done.err
        assert done.state == "finished"
        job = json.loads(done.read("job.json"))
        assert [host["host"] for host in job["hosts"]] == ["node1", "node2"]
        hosts = [re.search(r'"host": "(\w+)"', done.read(f"state/rank-{rank}.json"))[1] for rank in (0, 1)]
        assert hosts == ["node1", "node2"]
        cluster.check_nothing_is_left()
        assert [host.shm() for host in cluster.lab.hosts] == [[], []]

    return checked


def run(cluster, launcher: str, slurm, name: str, words: list[object], at: Host | None) -> Done:
    """A job on both hosts, to its end."""
    if launcher == "sbatch":
        return ended(cluster, slurm, name, submitted(cluster, slurm, words))
    if launcher == "srun":
        allocated = ["salloc", "--quiet", "--nodes=2", *DSRUN, words[0], "--gpus", "1", *words[1:]]
        return cluster.finish(cluster.popen(allocated, env=slurm.environ), name, 600)
    where = (
        ("--hostfile", cluster.lab.hostfile(slots=1)) if launcher != "mpich" else ("--hosts", "node[1-2]:1")
    )
    process = cluster.dsrun(words[0], *where, "--launcher", launcher, *words[1:], at=at)
    if launcher != "manual":
        return cluster.finish(process, name, 600)
    return started_by_hand(cluster, process, name)


def started_by_hand(cluster, process: subprocess.Popen[str], name: str) -> Done:
    """The lines that dsrun prints, each in a shell of its host."""
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
    reader.join(300)
    return Done(code, "", "".join(lines), cluster.folder / name)


@pytest.fixture
def batch(request, launcher):
    """Slurm, where the launcher is its."""
    return None if launcher in NAMED else request.getfixturevalue("slurm")


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(one, marks=pytest.mark.full if one in ALIKE else [])
        for one in LAUNCHERS
        if one not in TRAINED
    ],
)
def test_ranks_meet(cluster, check, launcher, batch):
    """A script on two hosts, by every launcher."""
    name = f"{launcher}-script"
    (cluster.folder / "meets.py").write_text(MEETS)
    words = ["launch", "--output-dir", cluster.folder / name, cluster.folder / "meets.py"]
    done = run(cluster, launcher, batch, name, words, None)
    check(done)
    assert "node1 meets node2" in done.read("logs/rank-1.log")


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_stage(cluster, check, launcher, batch, stage, reference):
    name = f"{launcher}-{stage}"
    # From the first of the hosts, and from a machine that is none of them.
    at = cluster.lab.hosts[0] if stage == "zero1" else None
    done = run(cluster, launcher, batch, name, cluster.words(name, "--preset", stage), at)
    check(done)
    same(done.losses, reference.losses)
    assert list((done.run_dir / "model").glob("*.safetensors"))


@pytest.mark.full
@pytest.mark.parametrize(("preset", "ranks"), [("fsdp", 4), ("fsdp-hybrid", 2)])
def test_two_ranks_on_each_host_under_fsdp(cluster, preset, ranks, reference):
    """Either all four share the model, or each host has a copy of it."""
    words = cluster.words(preset, "--preset", preset, "--micro-batch", "2")
    process = cluster.dsrun(words[0], "--hostfile", cluster.lab.hostfile(slots=2), *words[1:])
    done = cluster.finish(process, preset, 900)
    assert done.code == 0, done.err
    assert json.loads(done.read("job.json"))["fsdp"]["shard_ranks"] == ranks
    same(done.losses, reference.losses)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["tp", "sp", "pp"])
def test_groups_in_a_host_and_data_parallelism_across(cluster, kind, reference):
    """Each host is a stage of a pipeline. The ranks themselves check that their groups have these sizes."""
    name = f"{kind}-on-hosts"
    words = cluster.words(name, f"--{kind}", "2", "--preset", "zero1")
    process = cluster.dsrun(words[0], "--hostfile", cluster.lab.hostfile(slots=2), *words[1:])
    done = cluster.finish(process, name, 900)
    assert done.code == 0, done.err
    job = json.loads(done.read("job.json"))
    assert job["parallel"][kind] == 2
    assert [len(host["devices"]) for host in job["hosts"]] == [2, 2]
    same(done.losses, reference.losses)


def steps_of(number: str) -> list[str]:
    """The command lines of the daemons that hold a step of this job, on any host of the lab."""
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if line.startswith(f"slurmstepd: [{number}.")]


def test_a_job_whose_time_is_nearly_over_comes_back(cluster, slurm, check, reference):
    """Slurm's signal before the time limit: a checkpoint, the queue, and the losses of a job that wasn't disturbed."""
    name = "requeued"
    number = submitted(cluster, slurm, cluster.words(name, "--save-steps", "100"))
    run_dir = cluster.folder / name
    until(lambda: len(list(run_dir.glob("state/rank-?.json"))) == 2, "the ranks are there")
    slurms(slurm, "scancel", "--signal=USR1", "--batch", number)
    until(lambda: list(run_dir.glob("checkpoints/*/complete")), "a checkpoint")

    def runs_again() -> bool:
        # Slurm holds a requeued job back for two minutes, so that nothing of its first run is left. The test looks
        # for that itself: the controller takes the late exit code of a first run's step for the second run's.
        said = slurms(slurm, "scontrol", "show", "job", number)
        assert "JobState=FAILED" not in said, said
        # Asked only while that is the reason: each change lets the scheduler think of the job anew.
        if "JobState=PENDING" in said and "Reason=BeginTime" in said and not steps_of(number):
            with contextlib.suppress(subprocess.CalledProcessError):
                slurms(slurm, "scontrol", "update", f"JobId={number}", "StartTime=now")
        return bool(re.search(r"Restarts=[1-9]", said)) and "JobState=RUNNING" in said

    try:
        until(runs_again, "it runs again", every=1)
    except AssertionError:
        state = [slurms(slurm, "scontrol", "show", kind) for kind in ("job", "node")]
        pytest.fail("\n".join(["it doesn't run again:", *state]))
    done = ended(cluster, slurm, name, number)
    check(done)
    same(done.losses, reference.losses)
    first, second = starts_of(run_dir)
    assert first == 0 < second, "it went on from the checkpoint that the signal asked for"
