"""--cluster: what a cluster's file says of hosts, launcher and variables, in the commands that start a job."""

from __future__ import annotations

import json

import pytest

FINETUNE = ("finetune", "llama-tiny", "--preset", "zero2", "--no-check", "--dry-run", "--json")
SSH = 'launcher = "pdsh"\nhosts = "w[1-2]:2"\ninterface = "ib0"\n[environment]\nNCCL_DEBUG = "WARN"\nOURS = "it\'s"\n'


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    for name, text in (("ssh", SSH), ("slurm", ""), ("bare", 'launcher = "openmpi"\n')):
        (tmp_path / f"{name}.toml").write_text(text)
    (tmp_path / "file.toml").write_text('launcher = "mpich"\nhostfile = "our hosts"\n')
    (tmp_path / "our hosts").write_text("w3 slots=1\nw4 slots=1\n")
    return tmp_path


@pytest.fixture
def job(dsrun, place):
    """`job(*words)`: the launcher and the ranks' hosts and devices of a dry run."""

    def job(*words, command=FINETUNE):
        said = dsrun(*command, *words)
        assert said.code == 0, said.err
        told = json.loads(said.out)
        job.told, job.err = told, said.err
        return told["job"]["launcher"], " ".join(f"{row['host']}:{row['device']}" for row in told["ranks"])

    return job


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--cluster", "./ssh.toml"), ("pdsh", "w1:0 w1:1 w2:0 w2:1")),
        (("--cluster", "file.toml"), ("mpich", "w3:0 w4:0")),
        (("--cluster", "ssh.toml", "--launcher", "ssh", "--nodes", 1), ("ssh", "w1:0 w1:1")),
        (("--cluster", "ssh.toml", "--hosts", "w9:1"), ("pdsh", "w9:0")),
        (("--cluster", "file.toml", "--devices", "w4:0"), ("mpich", "w4:0")),
        (("--cluster", "bare.toml", "--gpus", 1), ("local", "localhost:0")),
        (("--cluster", "bare.toml", "--devices", "w1:0,w2:0"), ("openmpi", "w1:0 w2:0")),
        (("--cluster", "slurm.toml", "--hosts", "w[1-2]:1"), ("ssh", "w1:0 w2:0")),
    ],
)
def test_hosts_and_launcher(job, words, expected):
    assert job(*words) == expected
    assert "the hosts are those of" not in job.err


def test_by_the_variable(job, place, monkeypatch):
    monkeypatch.setenv("DSRUN_CLUSTER", "./ssh.toml")
    assert job() == ("pdsh", "w1:0 w1:1 w2:0 w2:1")
    assert f"note: the hosts are those of {place / 'ssh.toml'} ($DSRUN_CLUSTER)" in job.err
    assert job("--cluster", "bare.toml", "--gpus", 1) == ("local", "localhost:0")
    monkeypatch.setenv("DSRUN_CLUSTER", "")
    assert job("--gpus", 1) == ("local", "localhost:0")
    # Inside Slurm's job the hosts are Slurm's.
    monkeypatch.setenv("DSRUN_CLUSTER", "./ssh.toml")
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    assert job("--gpus", 1) == ("slurm", "n1:0 n2:0")
    assert job("--gpus", 1, "--cluster", "slurm.toml") == ("slurm", "n1:0 n2:0")


@pytest.mark.parametrize("hosts", [(), ("--hosts", "localhost:1")])
def test_variables_reach_all_ranks(job, hosts):
    """The file's come before the user's, as in the queue; --env comes before both."""
    launch = ("launch", "--no-check", "--dry-run", "--json")
    job("--cluster", "ssh.toml", *hosts, "--env", "OURS=mine", "train.py", command=launch)
    expected = {
        "NCCL_DEBUG": "WARN",
        "OURS": "mine",
        "NCCL_SOCKET_IFNAME": "ib0",
        "GLOO_SOCKET_IFNAME": "ib0",
    }
    assert expected.items() <= job.told["environment"].items()
    if not hosts:
        assert expected.items() <= job.told["forwarded"].items()


@pytest.mark.parametrize("command", [FINETUNE, ("launch", "--dry-run", "train.py")])
def test_jobs_of_a_queue_are_sent(dsrun, place, monkeypatch, command):
    said = dsrun(command[0], "--cluster", "./slurm.toml", *command[1:])
    assert said.code == 1
    assert f"{place / 'slurm.toml'}: starts its jobs through Slurm's queue" in said.err
    assert "dsrun submit --cluster ./slurm.toml -- finetune ..." in said.err
    assert "DSRUN_CLUSTER=" not in said.err
    monkeypatch.setenv("DSRUN_CLUSTER", "example-kubernetes")
    said = dsrun(*command)
    assert said.code == 1
    assert "starts its jobs as pods" in said.err
    assert "dsrun submit --cluster example-kubernetes" in said.err
    assert "on this machine: DSRUN_CLUSTER= dsrun ..." in said.err


def test_an_unknown_cluster(dsrun, place):
    said = dsrun(*FINETUNE, "--cluster", "zzz")
    assert (said.code, "unknown cluster 'zzz'" in said.err) == (1, True)


@pytest.mark.parametrize("command", [("finetune", "llama-tiny"), ("launch", "train.py")])
def test_continue_needs_a_folder(dsrun, place, command):
    said = dsrun(command[0], "--continue", command[1])
    assert (said.code, "--output-dir RUN" in said.err) == (2, True)


def test_a_run_that_is_not_there_is_started(dsrun, place, job):
    assert job("--output-dir", "run", "--continue", "--gpus", 1) == ("local", "localhost:0")
    assert job.told["resume_from"] is None
    launch = ("launch", "--dry-run", "--json")
    job("--output-dir", "run", "--continue", "--gpus", 1, "train.py", command=launch)
    run = place / "run"
    run.mkdir()
    (run / "job.json").write_text(json.dumps(job.told["job"]))
    # The same script goes on, another one does not.
    job("--output-dir", "run", "--continue", "--gpus", 1, "train.py", command=launch)
    (place / "other.py").write_text("")
    for words, message in (
        (("launch", "--output-dir", "run", "--continue", "other.py"), "is the folder of another run"),
        (("launch", "--output-dir", "run", "train.py"), "holds a run already"),
        (("finetune", "--output-dir", "run", "--continue", "llama-tiny"), "run"),
    ):
        said = dsrun(*words)
        assert (said.code, message in said.err) == (1, True), said.err


def test_a_run_keeps_its_place(dsrun, place, job, monkeypatch):
    """A cluster that only the variable names says nothing of where a run goes on."""
    job("--output-dir", "run", "--gpus", 1)
    run = place / "run"
    run.mkdir()
    (run / "job.json").write_text(json.dumps(job.told["job"]))
    monkeypatch.setenv("DSRUN_CLUSTER", "./ssh.toml")
    again = ("--output-dir", "run", "--continue")
    assert job(*again) == ("local", "localhost:0")
    assert job(*again, "--cluster", "ssh.toml") == ("pdsh", "w1:0 w1:1 w2:0 w2:1")
