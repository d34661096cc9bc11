"""The all-reduce that the doctor tries: on which devices, as which job, and what is told of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsrun.cluster.devices import Gpu, Machine
from dsrun.cluster.doctor.check import Host
from dsrun.errors import DsrunError, JobFailedError, Problem
from dsrun.job import run_folder
from dsrun.job.job import HostDevices, read
from dsrun.jobs.supervision import smoke
from dsrun.jobs.supervision.run_options import RunOptions

GIB = 2**30


def host(name, gpus=0, slots=None, busy=(), cpu_build=False):
    found = [
        {"index": i, "name": "NVIDIA A100", "uuid": f"GPU-{i}", "total_mib": 81920, "used_mib": 5,
         "compute_capability": "8.0"}
        for i in range(gpus)
    ]  # fmt: skip
    processes = [
        {"uuid": f"GPU-{i}", "pid": 7, "used_mib": 9000, "name": "python", "user": "li"} for i in busy
    ]
    facts = {
        "gpus": {"gpus": found, "processes": processes}, "ram": {"cpus": 8, "available": GIB},
        "torch": {"cpu_build": cpu_build},
    }  # fmt: skip
    return Host(name, slots, facts)


GPU = Gpu(0, "NVIDIA A100", "GPU-0", 80 * GIB, (8, 0))
ON_GPUS = Machine("cuda", (GPU,), 8, "1 x NVIDIA A100")
ON_CPUS = Machine("cpu", (), 8, "no GPU")


@pytest.mark.parametrize(
    ("hosts", "launcher", "devices"),
    [
        ([host("a", 4), host("b", 2)], "ssh", [(0, 1, 2, 3), (0, 1)]),
        ([host("a", 4, slots=2), host("b", 2, slots=2)], "ssh", [(0, 1), (0, 1)]),
        ([host("a", 4, busy=(0, 2)), host("b", 2, busy=(0, 1))], "ssh", [(1, 3), (0, 1)]),
        ([host("a", 4, slots=1, busy=(0,)), host("b", 1)], "ssh", [(1,), (0,)]),
        ([host("a", 4, slots=2, busy=(0,)), host("b", 4, slots=2)], "slurm", [(0, 1), (0, 1)]),
        ([host("a", 3)], "local", [(0, 1, 2)]),
    ],
)
def test_gpus(hosts, launcher, devices):
    found, accelerator = smoke.devices_of(hosts, ON_GPUS, launcher, {})
    assert accelerator == "cuda"
    assert found == tuple(HostDevices(one.name, chosen) for one, chosen in zip(hosts, devices, strict=True))


def test_cpus():
    hosts = [host("a"), host("b", slots=8)]
    assert smoke.devices_of(hosts, ON_GPUS, "ssh", {}) == (
        (HostDevices("a", (0,)), HostDevices("b", (0,))),
        "cpu",
    )
    assert smoke.devices_of([host("a")], ON_CPUS, "local", {}) == ((HostDevices("a", (0, 1)),), "cpu")
    request = {"DS_ACCELERATOR": "cpu"}
    assert smoke.devices_of([host("a", 4), host("b", 4)], ON_CPUS, "ssh", request)[1] == "cpu"


def test_this_machines_visible_devices_count_here_and_nowhere_else():
    found, _ = smoke.devices_of(
        [host("localhost", 4), host("b", 2)], ON_GPUS, "ssh", {"CUDA_VISIBLE_DEVICES": "3,1"}
    )
    assert [one.devices for one in found] == [(3, 1), (0, 1)]
    with pytest.raises(DsrunError, match="CUDA_VISIBLE_DEVICES"):
        smoke.devices_of([host("localhost", 4)], ON_GPUS, "local", {"CUDA_VISIBLE_DEVICES": ""})


def test_hosts_that_are_not_alike():
    with pytest.raises(DsrunError) as caught:
        smoke.devices_of([host("a", 4), host("b", 4, cpu_build=True)], ON_GPUS, "ssh", {})
    assert "b: trains on CPUs (its torch is a CPU build), and others on GPUs" in str(caught.value)


def test_hosts_of_which_nothing_is_known():
    silent = Host("c", 1, None, "nothing answers", "ping c")
    with pytest.raises(DsrunError, match="c: does not answer: nothing answers\n  ping c"):
        smoke.devices_of([host("a", 4), silent], ON_GPUS, "ssh", {})
    with pytest.raises(DsrunError, match="d: what it has is not known: TypeError"):
        smoke.devices_of([Host("d", 1, {"gpus": None, "ram": {}})], ON_GPUS, "ssh", {})


class Coordinators:
    """In the place of Coordinator: does to the run folder what `play` says."""

    def __init__(self, play):
        self.play = play

    def __call__(self, job, environ, options, watch, say):
        self.job, self.options, self.watch = job, options, watch
        return self

    def run(self):
        self.play(Path(self.job.run_dir))


def tried(monkeypatch, play, folder):
    heads = Coordinators(play)
    monkeypatch.setattr(smoke, "Coordinator", heads)
    hosts = [host("a"), host("b")]
    found = smoke.smoke(
        hosts, "ssh", folder, {"DS_ACCELERATOR": "cpu"}, RunOptions(env={"A": "b"}), say=print
    )
    return found, heads


def test_the_job_and_what_it_said(monkeypatch, tmp_path):
    seen = []

    def play(run_dir):
        seen.append(read(run_dir / run_folder.JOB))
        (run_dir / "logs" / "rank-0.log").write_text('warning\n{"smoke": 1, "ranks": 2}\nbye\n[]\n')

    found, heads = tried(monkeypatch, play, tmp_path / "runs")
    assert (found.found, found.problems, found.ranks, found.hosts) == ({"smoke": 1, "ranks": 2}, (), 2, 2)
    assert found.run_dir == ""
    (job,) = seen
    assert (job.script, job.module, job.local_rank, job.launcher) == (
        "dsrun.training.smoke",
        True,
        False,
        "ssh",
    )
    assert job.cwd == job.run_dir  # which is there on all hosts
    assert heads.options.env == {"A": "b"} and heads.options.hang_timeout
    assert not heads.watch()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_other_runs_stays(monkeypatch, tmp_path):
    (tmp_path / "other").mkdir()
    tried(monkeypatch, lambda run_dir: (run_dir / "logs" / "rank-0.log").write_text('{"smoke": 1}'), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_failure_keeps_its_folder(monkeypatch, tmp_path):
    def play(run_dir):
        raise JobFailedError([Problem("rank 1 on b failed", hint="look")], 7)

    found, _ = tried(monkeypatch, play, tmp_path)
    assert found.found is None
    assert found.problems == (Problem("rank 1 on b failed", hint="look"),)
    assert json.loads(Path(found.run_dir, "run.json").read_text())["state"] == "failed"


def test_a_first_rank_that_said_nothing(monkeypatch, tmp_path):
    found, _ = tried(
        monkeypatch, lambda run_dir: (run_dir / "logs" / "rank-0.log").write_text("1\n"), tmp_path
    )
    assert found.problems[0].where.endswith("rank-0.log")
    assert json.loads(Path(found.run_dir, "run.json").read_text())["state"] == "failed"


def test_a_folder_that_can_not_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    found, _ = tried(monkeypatch, lambda run_dir: None, tmp_path / "file")
    assert found.problems and found.run_dir == ""


def card(tflops=700.0, wrong=0, nans=0, bits=7, device="NVIDIA H100"):
    return {
        "device": device, "dtype": "bfloat16", "tflops": tflops, "numbers": 100, "wrong": wrong, "nans": nans,
        "bits": bits,
    }  # fmt: skip


def told(cards, pairs=(), backend="nccl"):
    hosts = (HostDevices("a", (0, 1)), HostDevices("b", (0, 3)))
    return list(smoke.remarks({"backend": backend, "cards": cards, "pairs": pairs}, hosts))


def test_nothing_is_told_of_devices_that_are_alike():
    assert told([card(), card(690.0), card(), card(710.0)], [[0, 1, 12.0]]) == []


def test_a_device_that_multiplies_wrongly_is_named():
    (found,) = told([card(), card(), card(), card(wrong=17, nans=5)])
    assert (found.check, found.host, found.colour) == ("matrix", "b", "red")
    assert "GPU 3" in found.what and "17 of 100" in found.what and "5 of them NaN" in found.what
    assert "--exclude b:3" in found.fix


def test_a_slow_device_is_compared_with_its_kind():
    (found,) = told([card(), card(), card(500.0), card(60.0, device="NVIDIA T4", bits=1)])
    assert (found.host, found.colour) == ("b", "yellow") and "500" in found.what and "700" in found.what
    assert told([card(700.0), card(500.0), card(), card()], backend="gloo") == []


def test_other_bits_than_the_others():
    (found,) = told([card(), card(bits=8), card(), card()])
    assert (found.host, found.colour) == ("a", "yellow") and "bits" in found.what
    assert (
        told([card(), card(bits=8)], backend="gloo") == []
    )  # processors of several kinds are all called cpu


def test_the_slowest_pair_of_hosts_is_named():
    hosts = tuple(HostDevices(name, (0,)) for name in "abc")
    pairs = [[0, 1, 12.0], [0, 2, 4.0], [1, 2, 11.0]]
    (found,) = smoke.remarks({"backend": "nccl", "cards": [], "pairs": pairs}, hosts)
    assert found.host == "a" and "a and c exchange 4.00 GB/s" in found.what and "11.00" in found.what
