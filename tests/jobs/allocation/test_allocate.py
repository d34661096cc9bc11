"""The hosts, devices and ranks of a job from all that says so, on machines of paper that answer on paper."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from device_cases import ALONE, CASES, CVD, HOSTS, IN_SLURM, OTHERS, SLURM, TWO

from dsrun.cluster import devices
from dsrun.cluster.devices import Gpu, Machine
from dsrun.cluster.gpu_use import BusyError, GpuProcess, GpuUse, LockHolder
from dsrun.cluster.ssh import HostAnswer
from dsrun.errors import DsrunError
from dsrun.job.job import HostDevices
from dsrun.jobs.allocation.allocate import allocate
from dsrun.jobs.allocation.allocation import in_words, rank_places, rank_table, remembered
from dsrun.jobs.allocation.request import ConnectionOptions, DeviceRequest
from dsrun.jobs.assembly.plan_target import room_here

DEEPSPEED_HOSTFILE = "dsrun.jobs.allocation.allocate.DEEPSPEED_HOSTFILE"
GIB = 2**30
FOUR = Machine(
    "cuda",
    tuple(
        Gpu(i, "NVIDIA A100", f"GPU-{i}{i}{i}-abc", 80 * GIB, (8, 0), 79 * GIB, GpuUse((), 0))
        for i in range(4)
    ),
    32,
    "4 x NVIDIA A100",
    500 * GIB,
)
CPU = Machine("cpu", (), 8, "DS_ACCELERATOR=cpu", 64 * GIB)
ON_CPU = {"DS_ACCELERATOR": "cpu"}
ALICE = GpuUse((GpuProcess(1234, 20 * GIB, "alice", "python"),), 20 * GIB)


@pytest.fixture(autouse=True)
def _on_w1(monkeypatch, tmp_path):
    monkeypatch.setattr("socket.gethostname", lambda: "w1")
    monkeypatch.setattr(DEEPSPEED_HOSTFILE, tmp_path / "no" / "hostfile")


def facts(gpus=4, *, busy=(), total=40960, ram=200, cpus=16):
    rows = [
        {
            "index": i, "name": "NVIDIA A100-SXM4-40GB", "uuid": f"GPU-there-{i}", "total_mib": total,
            "used_mib": 20480 if i in busy else 10, "compute_capability": "8.0",
        }
        for i in range(gpus)
    ]  # fmt: skip
    processes = [
        {"uuid": f"GPU-there-{i}", "pid": 5, "used_mib": 20000, "name": "python", "user": "bob"} for i in busy
    ]
    return {
        "gpus": {"gpus": rows, "processes": processes},
        "ram": {"available": ram * GIB, "cpus": cpus},
        "torch": {"cuda": "12.6", "cpu_build": False},
    }


THERE = {"w2": facts(), "w3": facts(), "small": facts(2, total=16384, ram=50), "cpus": facts(0)}


def ask(hosts):
    return [
        HostAnswer(host, THERE[host])
        if host in THERE
        else HostAnswer(host, fault="there is no route to it", fix="ping it.")
        for host in hosts
    ]


@pytest.fixture
def placed(tmp_path):
    """`placed(environ, machine=..., ask=..., **options)`: the options of device_cases.py."""

    def run(environ=None, *, machine=FOUR, ask=ask, **options):
        environ = dict(environ or {})
        for holder, name in ((options, "hostfile"), (environ, "DSRUN_HOSTFILE")):
            if name in holder:
                path = tmp_path / f"a lab's {name}"
                path.write_text(holder[name], encoding="utf-8")
                holder[name] = path if name == "hostfile" else str(path)
        connection = ConnectionOptions(options.pop("launcher", "auto"), check=options.pop("check", True))
        return allocate(DeviceRequest(**options), connection, machine, environ, ask)

    return run


@pytest.mark.parametrize(
    ("environ", "options", "expected"), [pytest.param(*case[1:], id=case[0]) for case in CASES]
)
def test_every_combination(placed, environ, options, expected):
    if isinstance(expected, dict):
        found = placed(environ, **options)
        assert {host.host: host.cuda_visible_devices for host in found.hosts} == expected
        assert list(expected) == [host.host for host in found.hosts]
    else:
        with pytest.raises(DsrunError) as caught:
            placed(environ, **options)
        text = str(caught.value)
        assert all(words in text for words in expected), text


def test_there_are_enough():
    assert len(CASES) >= 90
    assert len({case[0] for case in CASES}) == len(CASES)


@pytest.mark.parametrize(
    ("cases", "launchers"),
    [(ALONE, {"local"}), (HOSTS, {"ssh", "local"}), (IN_SLURM, {"slurm", "local", "ssh"})],
)
def test_launchers(placed, cases, launchers):
    seen = set()
    for name, environ, options, expected in cases:
        found = placed(environ, **options)
        seen.add(found.launcher)
        if found.launcher == "local":
            assert list(expected) in (["localhost"], ["w1"]), name
        assert (
            placed(environ, **{**options, "launcher": "pdsh"}).launcher == "pdsh" if cases is HOSTS else True
        )
    assert seen == launchers


def test_one_host_that_is_another_is_reached(placed):
    """DeepSpeed starts the job of such a hostfile on the machine where it is called."""
    assert placed(hostfile="w2 slots=2\n").launcher == "ssh"
    assert placed(hostfile="w1 slots=2\n").launcher == "local"


def test_slurms_gpus_are_to_be_told_from_the_others(placed):
    """Where Slurm doesn't lock the others away, only CUDA_VISIBLE_DEVICES says which are the job's."""
    environ = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "w1", "SLURM_GPUS_ON_NODE": "2"}
    with pytest.raises(DsrunError, match="has 2 GPUs of this machine, and CUDA_VISIBLE_DEVICES"):
        placed(environ, devices="0")
    locked = replace(FOUR, gpus=FOUR.gpus[:2])
    assert placed(environ, machine=locked).hosts == (HostDevices("localhost", (0, 1)),)


# Notes


@pytest.mark.parametrize(
    ("environ", "options", "said"),
    [
        ({CVD: "3,1"}, {"hostfile": OTHERS}, f"{CVD}=3,1"),
        ({CVD: "3,1"}, {"hostfile": TWO}, f"w1: {CVD}=3,1 leaves out 0,2"),
        ({"DSRUN_HOSTFILE": OTHERS}, {}, "DSRUN_HOSTFILE="),
        ({**SLURM, "DSRUN_HOSTFILE": OTHERS}, {}, "DSRUN_HOSTFILE="),
        (
            {},
            {"hosts": "a:4,b:4", "check": False},
            "a, b ",
        ),
        (SLURM, {}, "w1, w2 "),
    ],
)
def test_what_is_said(placed, environ, options, said):
    assert any(said in note for note in placed(environ, **options).notes)


def test_deepspeeds_own_hostfile_is_left_alone(placed, tmp_path, monkeypatch):
    path = tmp_path / "hostfile"
    path.write_text("w9 slots=8\n", encoding="utf-8")
    monkeypatch.setattr(DEEPSPEED_HOSTFILE, path)
    found = placed(gpus=1)
    assert found.hosts == (HostDevices("localhost", (0,)),)
    (note,) = found.notes
    assert str(path) in note
    assert placed(hosts="w1:1").notes == ()


def test_a_hostfile_that_is_missing(tmp_path):
    with pytest.raises(DsrunError, match="hostfiel"):
        allocate(DeviceRequest(hostfile=tmp_path / "hostfiel"), ConnectionOptions(), FOUR, {}, ask)
    with pytest.raises(DsrunError, match="hostfiel"):
        allocate(
            DeviceRequest(), ConnectionOptions(), FOUR, {"DSRUN_HOSTFILE": str(tmp_path / "hostfiel")}, ask
        )


# Who uses them


def here(*busy, use=ALICE) -> Machine:
    return replace(FOUR, gpus=tuple(replace(gpu, use=use) if gpu.index in busy else gpu for gpu in FOUR.gpus))


def there(**busy):
    def answers(hosts):
        return [HostAnswer(host, facts(busy=busy.get(host, ()))) for host in hosts]

    return answers


def test_free_ones_of_each_host(placed):
    found = placed(machine=here(0, 2), ask=there(w2=(0, 1)), hostfile=TWO, gpus=2)
    assert [host.devices for host in found.hosts] == [(1, 3), (2, 3)]
    assert found.gpus_here == (1, 3)
    assert any(
        note.startswith("w2: GPU 0 ") and "bob's python (pid 5, 19.5 GiB)" in note for note in found.notes
    )


def test_too_few_on_another_host_is_no_matter_of_waiting(placed):
    for options in ({"gpus": 3}, {}):
        with pytest.raises(DsrunError) as caught:
            placed(ask=there(w2=(0, 1)), hostfile=TWO, **options)
        assert not isinstance(caught.value, BusyError)
        (problem,) = caught.value.problems
        assert problem.where == "w2"
        assert "GPU 1 " in problem.what
        assert "bob's python" in problem.what
        assert "--exclude w2" in problem.hint


def test_too_few_here_can_be_waited_for(placed):
    for options in ({"gpus": 3}, {}):
        with pytest.raises(BusyError) as caught:
            placed(machine=here(0, 1), hostfile=TWO, **options)
        assert "w1: " in str(caught.value)
        assert len(caught.value.lines) == 2
        assert "--wait" in caught.value.problems[0].hint


def test_both_at_once_is_said_at_once(placed):
    with pytest.raises(DsrunError) as caught:
        placed(machine=here(0), ask=there(w2=(3,), w3=(1,)), hosts="w[1-3]:4")
    assert not isinstance(caught.value, BusyError)
    assert len(caught.value.problems) == 3


def test_named_ones_are_taken(placed):
    found = placed(machine=here(0), ask=there(w2=(3,)), devices="w1:0,w2:3")
    assert [host.devices for host in found.hosts] == [(0,), (3,)]
    assert sum("used anyway" in note for note in found.notes) == 2
    held = GpuUse((), 0, LockHolder("bob", 98))
    with pytest.raises(BusyError, match="another dsrun"):
        placed(machine=here(0, use=held), devices="w1:0,w2:3")


def test_on_this_machine_alone_busy_ones_are_left_out(placed):
    assert placed(machine=here(1)).hosts[0].devices == (0, 2, 3)
    assert placed(machine=here(1), exclude="localhost:0").hosts[0].devices == (2, 3)


# Slices


def test_a_slice_is_called_by_its_name(placed):
    piece = Gpu(4, "NVIDIA A100 MIG 3g.40gb", "MIG-abc-1", 39 * GIB, (8, 0), 39 * GIB, parent=0)
    divided = replace(FOUR, gpus=(replace(FOUR.gpus[0], divided=True), *FOUR.gpus[1:], piece))
    found = placed({CVD: "MIG-abc"}, machine=divided)
    assert found.hosts == (HostDevices("localhost", (4,), ("MIG-abc-1",)),)
    assert found.gpus_here == (4,)
    assert room_here(found.machine, found.devices).gpu_bytes == 39 * GIB
    assert placed(machine=divided).hosts == (HostDevices("localhost", (1, 2, 3)),)
    with pytest.raises(DsrunError, match="GPU 0"):
        placed(machine=divided, hosts="w1:4")


# CPUs


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"localhost": 2}),
        ({"gpus": 3}, {"localhost": 3}),
        ({"exclude": "localhost:0"}, {"localhost": 2}),
        ({"hostfile": TWO}, {"w1": 4, "w2": 4}),
        ({"hostfile": "w1 slots=20\n"}, {"w1": 20}),
        ({"hosts": "w1,w2"}, {"w1": 2, "w2": 2}),
        ({"hosts": "w1,w2", "gpus": 3}, {"w1": 3, "w2": 3}),
        ({"hosts": "w1:2,w2:2", "check": False}, {"w1": 2, "w2": 2}),
        ({"devices": "w2:5"}, {"w2": 1}),
        ({"hosts": "cpus:2,w2:2"}, {"cpus": 2, "w2": 2}),
    ],
    ids=str,
)
def test_on_cpus(placed, options, expected):
    found = placed(ON_CPU, machine=CPU, **options)
    assert {host.host: len(host.devices) for host in found.hosts} == expected
    assert (found.accelerator, found.gpus_here) == ("cpu", ())


def test_cpus_under_slurm(placed):
    environ = {
        **ON_CPU,
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "w[1-2]",
        "SLURM_JOB_CPUS_PER_NODE": "1(x2)",
    }
    assert [len(host.devices) for host in placed(environ, machine=CPU).hosts] == [1, 1]
    assert [len(host.devices) for host in placed(environ, machine=CPU, gpus=2).hosts] == [2, 2]


def test_a_login_node_without_gpus(placed, monkeypatch):
    monkeypatch.setattr(devices, "_torch_is_for_cpus", lambda: "")
    bare = Machine("cpu", (), 4, "NVML finds no NVIDIA GPU", 8 * GIB)
    found = placed(machine=bare, hosts="w[2-3]:4")
    assert (found.accelerator, found.world_size, found.machine.gpus[0].name) == (
        "cuda",
        8,
        "NVIDIA A100-SXM4-40GB",
    )
    unasked = placed(machine=bare, hosts="w[2-3]:4", check=False)
    assert (unasked.accelerator, unasked.known, unasked.world_size) == ("cuda", False, 8)
    assert unasked.notes
    with pytest.raises(DsrunError, match=r"w2 .* w1 on CPUs"):
        placed(machine=bare, hosts="w[1-2]:4")


# What is planned for


def test_the_scarcest_host_counts(placed):
    found = placed(hosts="w1:4,w2:4,small:2")
    room = room_here(found.machine, found.devices, nodes=len(found.hosts))
    assert (found.world_size, room.gpus, room.nodes) == (10, 4, 3)
    assert room.gpu_bytes == (16384 - 10) << 20
    assert room.host_bytes == 50 / 2 * 4 * GIB  # small has 25 GiB for a rank
    assert found.machine.cpu_cores == 16
    assert found.machine.reason == "10 x NVIDIA A100 and NVIDIA A100-SXM4-40GB on 3 hosts"


def test_one_host_is_planned_for_as_it_is(placed):
    found = placed(hosts="w2:4", devices="w2:3,1")
    assert (found.machine.reason, found.devices) == ("4 x NVIDIA A100-SXM4-40GB", (3, 1))
    assert placed(devices="2,0").devices == (2, 0)


def test_this_machine_looked_at_again(placed):
    found = placed(hosts="w1:4,w2:4")
    fuller = replace(FOUR, gpus=tuple(replace(gpu, memory_free_bytes=7 * GIB) for gpu in FOUR.gpus))
    assert min(gpu.memory_free_bytes for gpu in found.seen_again(fuller).machine.gpus) == 7 * GIB
    assert found.seen_again(fuller).hosts == found.hosts


# Asking


def test_each_host_is_asked_once():
    calls = []

    def answers(hosts):
        calls.append(list(hosts))
        return ask(hosts)

    again = remembered(answers)
    assert [answer.host for answer in again(["w2", "w3"])] == ["w2", "w3"]
    assert [answer.host for answer in again(["w3", "small", "w2"])] == ["w3", "small", "w2"]
    assert calls == [["w2", "w3"], ["small"]]


def test_only_hosts_that_are_chosen_are_asked(placed):
    calls = []

    def answers(hosts):
        calls.extend(hosts)
        return ask(hosts)

    placed(ask=answers, hostfile="w1 slots=4\nw2 slots=4\ndead slots=4\n", include="w1@w2:0")
    assert calls == ["w2"]
    placed(ask=answers, hosts="w1:1,w2:1", check=False)
    assert calls == ["w2"]


@pytest.mark.parametrize(
    "said", [{}, {"gpus": {"error": "x"}, "ram": {}}, {**facts(), "gpus": {"gpus": [{}]}}]
)
def test_an_answer_that_is_none(placed, said):
    with pytest.raises(DsrunError) as caught:
        placed(ask=lambda hosts: [HostAnswer(host, said) for host in hosts], hosts="w2:4")
    assert [problem.where for problem in caught.value.problems] == ["w2"]


def test_many_hosts_take_no_time(placed):
    found = placed(hosts="node[0001-5000]:8", check=False)
    assert found.world_size == 40_000
    assert len(found.notes[-1]) < 200
    assert room_here(found.machine, found.devices, nodes=5000).ranks == 40_000


# The table, and again


def test_the_table():
    hosts = (HostDevices("w1", (3, 1)), HostDevices("node-two", (0,), ("MIG-abc",)))
    assert [tuple(row) for row in rank_places(hosts)] == [
        ("w1", "3", 0, 0),
        ("w1", "1", 1, 1),
        ("node-two", "MIG-abc", 2, 0),
    ]
    assert rank_table(hosts).splitlines() == [
        "host       device  rank",
        "w1              3     0",
        "w1              1     1",
        "node-two  MIG-abc     2",
    ]
    assert json.loads(json.dumps([row._asdict() for row in rank_places(hosts)]))[2]["local_rank"] == 0
    assert in_words(hosts) == "w1: 3,1; node-two: MIG-abc"
    assert (
        in_words([HostDevices(f"w{i}", (0,)) for i in range(9)])
        == "w0: 0; w1: 0; w2: 0; w3: 0; and 5 hosts more"
    )


@pytest.mark.parametrize(
    ("hosts", "launcher", "expected"),
    [
        ((HostDevices("localhost", (2, 3)),), "local", DeviceRequest(gpus=2)),
        ((HostDevices("w1", (2, 3)),), "local", DeviceRequest(gpus=2)),
        (
            (HostDevices("w1", (3, 1)), HostDevices("fe80::1", (0,))),
            "ssh",
            DeviceRequest(devices="w1:3,1,fe80::1:0"),
        ),
        ((HostDevices("w1", (0, 1)), HostDevices("w2", (0, 1))), "slurm", DeviceRequest(gpus=2, nodes=2)),
        (
            (HostDevices("glm-master-0", (0, 1)), HostDevices("glm-worker-0", (0, 1))),
            "kubernetes",
            DeviceRequest(),
        ),
    ],
)
def test_where_nothing_is_said_it_is_as_before(hosts, launcher, expected):
    assert DeviceRequest().or_like(hosts, launcher) == expected
    assert DeviceRequest(nodes=1).or_like(hosts, launcher) == DeviceRequest(nodes=1)


# Pods

IN_A_POD = {"HOSTNAME": "glm-master-0", "RANK": "0", "WORLD_SIZE": "3"}
IN_THE_LAST = {"HOSTNAME": "glm-worker-1", "RANK": "2", "WORLD_SIZE": "3"}
NAMES = ["glm-master-0", "glm-worker-0", "glm-worker-1"]


def nobody(hosts):
    raise AssertionError(hosts)


@pytest.mark.parametrize("where", [IN_A_POD, IN_THE_LAST])
@pytest.mark.parametrize(
    ("environ", "machine", "options", "devices"),
    [
        ({}, FOUR, {}, "0,1,2,3"),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, FOUR, {}, "3,1"),
        ({}, FOUR, {"gpus": 2}, "0,1"),
        ({"DSRUN_HOSTFILE": "w2 slots=1\n"}, FOUR, {"gpus": 2, "nodes": 3}, "0,1"),
        ({}, FOUR, {"devices": "glm-master-0:1,glm-worker-0:1,glm-worker-1:1"}, "1"),
        (ON_CPU, CPU, {}, "0"),
        (ON_CPU, CPU, {"gpus": 2}, "0,1"),
    ],
)
def test_pods_are_all_alike(placed, where, environ, machine, options, devices):
    found = placed({**environ, **where}, machine=machine, ask=nobody, launcher="kubernetes", **options)
    assert [host.host for host in found.hosts] == NAMES
    assert {host.cuda_visible_devices for host in found.hosts} == {devices}
    assert (found.launcher, found.accelerator) == ("kubernetes", machine.accelerator)
    assert all(entry.asked for entry in found.entries)
    assert found.known


@pytest.mark.parametrize(
    ("environ", "options", "words"),
    [
        ({}, {}, "RANK and WORLD_SIZE"),
        ({"RANK": "0"}, {}, "dsrun submit --cluster NAME"),
        ({"RANK": "3", "WORLD_SIZE": "3"}, {}, "RANK=3, WORLD_SIZE=3"),
        ({"RANK": "-1", "WORLD_SIZE": "3"}, {}, "RANK=-1"),
        (IN_A_POD, {"hosts": "w2:1"}, "--hosts"),
        (IN_A_POD, {"hostfile": "w2 slots=1\n"}, "--hostfile"),
        (IN_A_POD, {"nodes": 2}, "glm-worker-1"),
        (IN_A_POD, {"exclude": "glm-worker-0"}, "glm-worker-0"),
        (IN_A_POD, {"gpus": 5}, "--gpus 5"),
    ],
)
def test_what_pods_can_not_do(placed, environ, options, words):
    with pytest.raises(DsrunError) as caught:
        placed(environ, ask=nobody, launcher="kubernetes", **options)
    assert words in str(caught.value)


def test_a_single_pod_and_one_of_another_name(placed):
    found = placed({"RANK": "0", "WORLD_SIZE": "1", "HOSTNAME": "w1"}, launcher="kubernetes")
    assert [(host.host, host.cuda_visible_devices) for host in found.hosts] == [("pod-master-0", "0,1,2,3")]
    assert found.launcher == "kubernetes"
