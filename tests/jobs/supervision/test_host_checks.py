"""What a job's hosts are asked before its start, what stops it, and what is only told."""

from __future__ import annotations

import copy
import os
import sys
from dataclasses import replace

import pytest
from needed import since

import dsrun
from dsrun.cluster.ssh import HostAnswer
from dsrun.errors import DsrunError
from dsrun.job.job import HostDevices, ScriptJob
from dsrun.jobs.supervision import host_checks
from dsrun.jobs.supervision.run_options import RunOptions

GIB = 2**30
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def facts(number: int) -> dict:
    """A host with four GPUs that nothing is wrong with."""
    address = f"10.0.0.{number}"
    gpus = [
        {"index": i, "name": "NVIDIA A100", "uuid": f"GPU-{number}-{i}", "total_mib": 81920, "used_mib": 5,
         "compute_capability": "8.0"}
        for i in range(4)
    ]  # fmt: skip
    disk = {"path": "/shared", "exists": True, "is_folder": True, "free": 500 * GIB, "total": 900 * GIB,
            "free_inodes": 10**6, "writable": True, "file_system": "nfs"}  # fmt: skip
    return {
        "probe": 1,
        "hostname": {"name": f"gpu{number}", "resolves_to": [address]},
        "python": {"version": f"{PYTHON}.7", "header": "/inc/Python.h", "include": "/inc"},
        "packages": {"torch": "2.8.0", "deepspeed": "0.19.8", "transformers": "5.1.0", "accelerate": "1.15.0",
                     "dsrun": dsrun.__version__},
        "torch": {"cuda": "12.6", "cpu_build": False},
        "gpus": {"driver": "560.35", "gpus": gpus, "processes": [], "on_bus": 4},
        "ram": {"total": 512 * GIB, "available": 480 * GIB, "limited": False, "cpus": 64},
        "shm": {"total": 256 * GIB, "free": 250 * GIB, "user": 0, "buffers_in_use": 0, "leftover_count": 0,
                "leftovers": [], "leftover_bytes": 0},
        "memlock": {"limit": None, "infiniband": []},
        "disk": {"folder": disk, "cache": dict(disk)},
        "port": {"port": 29500, "free": True, "asked": False},
        "tools": {"compiler": "/c++", "compiler_name": "c++", "ninja": "/ninja", "nvcc": "/nvcc",
                  "nvcc_version": "12.6", "numactl": None, "libaio_header": "/h", "libaio": "/l"},
        "operators": {"folder": "/x", "built": ["fused_adam"], "locks": [], "stale": []},
        "numa": {"nodes": 1},
        "data": {"path": "/d", "exists": True, "size": 9, "sha256": "ab", "ends_sha256": "cd"},
        "interfaces": {"lo": ["127.0.0.1"], "eth0": [address]},
        "route": {"master": "gpu1", "address": "10.0.0.1", "interface": "eth0", "source": address},
        "variables": {},
        "clock": {"time": 1000.5},
    }  # fmt: skip


class Hosts:
    """Answers as the real ways do. changes: path of a fact -> its value, on the host number `on`."""

    def __init__(self, changes=None, on=2):
        self.changes, self.on = changes or {}, on
        self.options = None

    def __call__(self, hosts, options, timeout_s):
        self.options = options
        return [self.answer(number, host) for number, host in enumerate(hosts, 1)]

    def answer(self, number, host):
        found = copy.deepcopy(facts(number))
        if number == self.on and "silent" in self.changes:
            return HostAnswer(host, None, "nothing answers at its address", f"ping {host}")
        for path, value in self.changes.items() if self.on in (0, number) else ():
            place, keys = found, path.split("/")
            for key in keys[:-1]:
                place = place[int(key) if isinstance(place, list) else key]
            place[int(keys[-1]) if isinstance(place, list) else keys[-1]] = value
        return HostAnswer(host, found, asked_at=1000.0, answered_at=1000.6)


@pytest.fixture
def job(make_job, tmp_path):
    """Two GPUs each of two hosts."""

    def make(**fields):
        hosts = (HostDevices("gpu1", (0, 1)), HostDevices("gpu2", (2, 3)))
        return make_job(
            tmp_path / "runs" / "new", **{"hosts": hosts, "accelerator": "cuda", "launcher": "ssh", **fields}
        )

    return make


ADAM = {"optimizer": {"type": "AdamW", "params": {}}}
NVME = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}}, **ADAM}
ON_CPU = {
    "accelerator": "cpu",
    "ds_config": {},
    "hosts": (HostDevices("gpu1", (0,)), HostDevices("gpu2", (0,))),
}
OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, **ADAM}
BUILT = {"operators/built": ["fused_adam"]}
NEW = {"operators/built": ["cpu_adam", "async_io"]}
PROCESS = {"pid": 77, "used_mib": 9, "name": "python", "user": "li"}
TWO_NETS = {"interfaces/ib0": ["10.9.0.2"]}

# What is changed on the second host, and the words of the problem and of its hint.
STOPS = [
    ({}, {"silent": True}, "nothing answers", "ping gpu2"),
    ({}, {"python": {"missing": "/venv/bin/python"}}, "no /venv/bin/python", "same environment"),
    ({}, {"packages/torch": "2.7.0"}, "torch 2.7.0 (the others: 2.8.0)", "torch==2.8.0"),
    ({}, {"gpus/gpus": facts(2)["gpus"]["gpus"][:3]}, "no GPU 3: it has 3 (0, 1, 2)", "--devices"),
    ({}, {"gpus/gpus": [], "gpus/on_bus": 0}, "no GPU 2, 3: it has none", "nvidia-smi"),
    ({}, {"gpus/driver": "520.1"}, "525", "driver"),
    ({}, {"ram/available": GIB}, "1.0 GiB", "ps -eo"),
    ({}, {"shm/free": 0}, "0.0 KiB", "--shm-size"),
    ({}, {"memlock/limit": 65536, "memlock/infiniband": ["mlx5_0"]}, "mlx5_0", "ulimit"),
    ({}, {"disk/folder/is_folder": False}, "no folder", "file system that all hosts share"),
    ({}, {"disk/folder/writable": False}, "can't be written", "file system that all hosts share"),
    ({}, {"disk/cache/free": GIB // 2}, "cache: 512.0 MiB free", "du -xh"),
    ({}, {"data/sha256": "00"}, "another file than on gpu1", "rsync"),
    ({}, {"data": {"path": "/d", "exists": False}}, "no file /d", "Copy it"),
    ({}, {"operators/built": NEW["operators/built"], "tools/nvcc": None}, "no nvcc", "toolkit"),
    ({}, {"operators/built": NEW["operators/built"], "tools/compiler": None}, "no C++ compiler", "g++"),
    ({}, {"operators/built": [], "python/header": None}, "no Python.h", "-dev"),
    ({"ds_config": NVME}, {"tools/libaio": None}, "no libaio", "libaio-dev"),
    ({"ds_config": NVME}, {"disk/nvme": {"path": "/nvme", "is_folder": False, "free": 0, "file_system": "x"}},
     "no folder /nvme", "mkdir"),
    ({}, {"variables/GLOO_SOCKET_IFNAME": "eth7"}, "GLOO_SOCKET_IFNAME=eth7", "Unset"),
    ({**ON_CPU, "ds_config": ADAM}, {"operators/built": [], "tools/ninja": None}, "no ninja", "ninja"),
]  # fmt: skip
# What is changed on both hosts or on the second, and doesn't stop the job: words of the note, or "" for none.
TOLD = [
    ({}, {}, ""),
    ({}, {"ram/available": 100 * GIB}, "gpu2: 100.0 GiB of 512.0 GiB free"),
    ({}, {"clock/time": 1010.0}, "gpu2: at least 9 s ahead of the others"),
    ({}, {"gpus/processes": [{"uuid": "GPU-2-3", **PROCESS}]}, "gpu2: li runs python (77) on GPU 3"),
    ({}, {"gpus/processes": [{"uuid": "GPU-2-0", **PROCESS}]}, ""),  # none of the job's
    ({}, {"gpus/gpus/0/compute_capability": "3.0", "torch/cuda": "13.0", "gpus/driver": "580.1"}, ""),
    ({}, TWO_NETS, "gpu2: reaches the others by eth0, and has ib0 too"),
    (ON_CPU, {**BUILT, **TWO_NETS}, ""),
    # What the agents see to, or the job has no use for.
    ({}, {"operators/locks": ["/x/cpu_adam/lock"], "operators/stale": ["/x/cpu_adam/lock"]}, ""),
    ({}, {"route/address": None, "route/fault": "can't find the name"}, ""),
    ({}, {"port/free": False}, ""),
    ({}, {"tools/compiler": None, "tools/nvcc": None, "tools/ninja": None, "tools/libaio": None}, ""),
    (ON_CPU, {**BUILT, "gpus/gpus": [], "torch/cuda": None, "torch/cpu_build": True}, ""),
    (ON_CPU, {**BUILT, "gpus/processes": [{"uuid": "GPU-2-0", **PROCESS}]}, ""),
    (ON_CPU, {**BUILT, "tools/nvcc": None, "memlock/limit": 65536, "memlock/infiniband": ["mlx5_0"]}, ""),
    pytest.param(
        {"ds_config": OFFLOAD}, {"operators/built": [], "tools/nvcc": None}, "",
        marks=since(deepspeed="0.19.8"),  # its CPU Adam is plain C++ from that one on
    ),
    ({"launcher": "slurm"}, {"gpus/gpus": facts(2)["gpus"]["gpus"][:2]}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "changes", "what", "hint"), STOPS)
def test_what_stops_a_job(job, fields, changes, what, hint):
    job = job(**{"ds_config": ADAM, **fields})
    with pytest.raises(DsrunError) as caught:
        host_checks.checkup(job, RunOptions(), ask=Hosts(changes))
    found = [problem for problem in caught.value.problems if what in problem.what]
    assert len(found) == 1, caught.value.problems
    assert found[0].where == "gpu2"
    assert hint in found[0].hint
    assert caught.value.problems[-1].hint.endswith("Or start without this check: --no-check")


@pytest.mark.parametrize(("fields", "changes", "note"), TOLD)
def test_what_does_not_stop_a_job(job, fields, changes, note):
    job = job(**{"ds_config": ADAM, **fields})
    on = 0 if "operators/built" in changes else 2
    notes = host_checks.checkup(job, RunOptions(), ask=Hosts(changes, on))
    assert (not notes) if not note else any(one.startswith(note) for one in notes), notes


def test_gpus_that_are_not_there_are_no_fault_of_the_driver(job):
    with pytest.raises(DsrunError) as caught:
        host_checks.checkup(
            job(ds_config=ADAM), RunOptions(), ask=Hosts({"gpus/gpus": facts(2)["gpus"]["gpus"][:2]})
        )
    (problem,) = caught.value.problems
    assert problem.what == "no GPU 2, 3: it has 2 (0, 1)"


def test_the_same_of_several_hosts_is_said_once(job):
    many = tuple(HostDevices(f"gpu{number}", (0,)) for number in range(1, 31))
    with pytest.raises(DsrunError) as caught:
        host_checks.checkup(
            job(hosts=many, ds_config=ADAM), RunOptions(), ask=Hosts({"ram/available": GIB}, on=0)
        )
    (problem,) = caught.value.problems
    assert problem.where == "gpu1, gpu2, gpu3, gpu4 and 26 more"


def test_all_that_is_wrong_is_said_together(job):
    changes = {"ram/available": GIB, "disk/folder/is_folder": False, "data": {"path": "/d", "exists": False}}
    with pytest.raises(DsrunError) as caught:
        host_checks.checkup(job(ds_config=ADAM), RunOptions(), ask=Hosts(changes))
    assert len(caught.value.problems) == 3


def test_hosts_are_compared_with_this_machine(job):
    for change, what in (
        ({"packages/dsrun": "9.9"}, f"dsrun 9.9, and it is {dsrun.__version__} here"),
        ({"python/version": "3.8.1"}, f"Python 3.8, and it is {PYTHON} here"),
    ):
        with pytest.raises(DsrunError) as caught:
            host_checks.checkup(job(ds_config=ADAM), RunOptions(), ask=Hosts(change, on=0))
        (problem,) = caught.value.problems
        assert (problem.where, problem.what) == ("gpu1, gpu2", what)


def test_the_port_counts_where_it_is_named(job):
    with pytest.raises(DsrunError, match="29501 is taken"):
        asked = Hosts({"port": {"port": 29501, "free": False, "asked": True}}, on=1)
        host_checks.checkup(job(ds_config=ADAM), RunOptions(master_port=29501), ask=asked)
    assert asked.options["port"] == 29501


def test_what_hosts_are_asked(job, tmp_path):
    hosts = Hosts()
    secret = {"HF_TOKEN": "hf_x", "DSRUN_CACHE": "/shared/cache"}
    host_checks.checkup(job(ds_config=NVME), RunOptions(env=secret), ask=hosts)
    options = dict(hosts.options)
    assert options.pop("environ")["DSRUN_CACHE"] == "/shared/cache"
    assert options == {
        "python": sys.executable, "master": "gpu1", "cwd": str(tmp_path), "data": "/data/训练.jsonl", "nvme": "/nvme",
        "port": None, "hashing_seconds": host_checks.HASHING_S,
    }  # fmt: skip
    assert "hf_x" not in str(hosts.options)


def test_forwarded_variables_count_on_every_host(job):
    with pytest.raises(DsrunError) as caught:
        host_checks.checkup(
            job(ds_config=ADAM), RunOptions(env={"GLOO_SOCKET_IFNAME": "ib0"}), ask=Hosts(TWO_NETS)
        )
    (problem,) = caught.value.problems
    assert problem.where == "gpu1" and "GLOO_SOCKET_IFNAME=ib0" in problem.what


def test_a_script(tmp_path):
    hosts = (HostDevices("gpu1", (0,)), HostDevices("gpu2", (0,)))
    job = ScriptJob(
        run_dir=str(tmp_path), script="train.py", args=(), cwd="/", accelerator="cuda", hosts=hosts,
        dsrun_version="0", launcher="ssh",
    )  # fmt: skip
    asked = Hosts()
    assert host_checks.checkup(job, RunOptions(), ask=asked) == ()
    assert asked.options["data"] is None


def test_this_machine_alone_is_not_asked(job):
    assert host_checks.checkup(job(hosts=(HostDevices("localhost", (0,)),)), RunOptions(), ask=None) == ()


HEALTHY = {"index": 1, "name": "NVIDIA H100", "failed": [], "pending": [], "uncorrected": 0, "uncorrected_ever": 0,
           "slowed": [], "width": None, "fabric": "Completed"}  # fmt: skip


@pytest.fixture
def here(job):
    """A job on GPU 1 of this machine."""
    return lambda **fields: job(hosts=(HostDevices("localhost", (1,)),), launcher="local", **fields)


@pytest.mark.parametrize(
    ("changes", "options", "what", "hint"),
    [
        ({"gpus/driver": "535.104", "torch/cuda": "13.0"}, {}, "needs 580 or later", "Update the driver"),
        ({"gpu_health": {"gpus": [{**HEALTHY, "fabric": "In Progress"}]}}, {}, "NVSwitch is not set up",
         "nvidia-fabricmanager"),
        ({"gpu_health": {"gpus": [{**HEALTHY, "pending": ["remapped_row_pending"]}]}}, {}, "waits for a reset",
         "--gpu-reset -i 1"),
        ({"port": {"port": 29501, "free": False, "asked": True}}, {"master_port": 29501}, "29501 is taken", ""),
    ],
)  # fmt: skip
def test_what_stops_a_job_on_this_machine(here, changes, options, what, hint):
    with pytest.raises(DsrunError) as caught:
        host_checks.checkup(here(), RunOptions(**options), ask=Hosts(changes, on=1))
    (problem,) = caught.value.problems
    assert what in problem.what
    assert hint in problem.hint
    assert problem.hint.endswith("Or start without this check: --no-check")
    # CPU ranks need none of it.
    assert host_checks.checkup(here(accelerator="cpu"), RunOptions(), ask=Hosts(changes, on=1)) == ()


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"memlock/limit": 65536, "memlock/infiniband": ["mlx5_0"]}, "64 KiB may be locked"),
        ({"gpu_health": {"gpus": [{**HEALTHY, "index": 0, "pending": ["remapped_row_pending"]}]}}, ""),
        ({"gpus/gpus": []}, ""),
        ({"ram/available": GIB, "disk/folder/writable": False}, ""),  # other checks have looked at these
        ({}, ""),
    ],
)
def test_what_does_not_stop_a_job_on_this_machine(here, changes, note):
    notes = host_checks.checkup(here(), RunOptions(), ask=Hosts(changes, on=1))
    assert [line.startswith(note) for line in notes] == ([True] if note else [])


def test_launchers_without_a_way(job):
    (note,) = host_checks.checkup(job(launcher="manual"), RunOptions())
    assert note == "launcher manual: no host is asked what it has"
    assert host_checks.way("slurm") is host_checks.by_srun
    # An MPI has ways of its own.
    (note,) = host_checks.checkup(
        job(launcher="openmpi", ds_config=ADAM), RunOptions(), ask=Hosts({"silent": True})
    )
    assert note.startswith("gpu2 can't be asked")


@pytest.mark.parametrize("fact", sorted(facts(1)))
@pytest.mark.parametrize("value", ["odd", None, [], {"x": 1}, {"error": "OSError: no"}])
def test_odd_answers_make_no_fault_of_dsruns(job, fact, value):
    for on in (0, 2):
        try:
            host_checks.checkup(job(ds_config=ADAM), RunOptions(), ask=Hosts({fact: value}, on))
        except DsrunError as error:
            assert all(problem.where for problem in error.problems)


SRUN = """#!/bin/sh
[ -n "$BROKEN" ] && { echo "srun: error: Unable to allocate resources" >&2; exit 1; }
while [ "$1" != --nodelist ]; do shift; done
hosts=$2
while [ "$1" != python3 ]; do shift; done
shift
cat > "$SCRIPT"
for host in $(echo $hosts | tr , ' '); do
  [ $host = lost ] || SLURMD_NODENAME=$host PYTHON "$@" < "$SCRIPT" &
done
wait
echo 'a greeting'
"""


@pytest.fixture
def srun(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "srun"
    program.parent.mkdir()
    program.write_text(SRUN.replace("PYTHON", sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SCRIPT", str(tmp_path / "script"))


def test_slurm_asks_every_node_of_an_allocation(srun, monkeypatch):
    answers = host_checks.by_srun(["n2", "lost", "n1"], {"master": "n2"}, 60)
    assert [answer.host for answer in answers] == ["n2", "lost", "n1"]
    assert [answer.facts and answer.facts["route"]["master"] for answer in answers] == ["n2", None, "n2"]
    assert answers[1].fault and "--nodelist lost" in answers[1].fix
    assert all(answer.asked_at <= answer.answered_at for answer in answers)
    monkeypatch.setenv("BROKEN", "1")
    (answer,) = host_checks.by_srun(["n1"], {}, 60)
    assert answer.fault == "srun ended with 1, and said: srun: error: Unable to allocate resources"
    monkeypatch.setenv("PATH", "/nowhere")
    (answer,) = host_checks.by_srun(["n1"], {}, 60)
    assert answer.fault.startswith("srun can't be started")


def test_replaced_hosts_keep_their_own_parts(job):
    """The second host's devices are judged, not the first's."""
    swapped = replace(job(ds_config=ADAM), hosts=(HostDevices("gpu1", (3,)), HostDevices("gpu2", (0,))))
    three = Hosts({"gpus/gpus": facts(2)["gpus"]["gpus"][:1]})
    assert host_checks.checkup(swapped, RunOptions(), ask=three) == ()


# A Python of the script's own


def test_the_scripts_own_python_is_looked_at_on_every_host(tmp_path):
    hosts = (HostDevices("gpu1", (0,)), HostDevices("gpu2", (0,)))
    job = ScriptJob(
        run_dir=str(tmp_path / "new"), script="train.py", args=(), cwd=str(tmp_path), accelerator="cpu", hosts=hosts,
        dsrun_version="", launcher="ssh", plain=True, python="/lab/bin/python",
    )  # fmt: skip
    asked = []

    def answers(there):
        """Of dsrun's own Python all is well; of the other one the second host says this."""

        def ask(names, options, timeout_s):
            asked.append(options["python"])
            other = options["python"] == "/lab/bin/python"
            return Hosts(there if other else {})(names, options, timeout_s)

        return ask

    host_checks.checkup(job, RunOptions(), ask=answers({}))
    assert asked == [sys.executable, "/lab/bin/python"]
    with pytest.raises(DsrunError, match="no /lab/bin/python"):
        host_checks.checkup(job, RunOptions(), ask=answers({"python": {"missing": "/lab/bin/python"}}))
    with pytest.raises(DsrunError, match=r"torch 1\.13"):
        host_checks.checkup(job, RunOptions(), ask=answers({"packages/torch": "1.13"}))
