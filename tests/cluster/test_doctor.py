"""Every check of the doctor: green, and what makes it yellow, red or grey, from facts made up."""

from __future__ import annotations

import copy
import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsrun.cluster import doctor, probe
from dsrun.cluster.doctor.frame import GREEN, GREY, RED, WORST, YELLOW, Host, commonest, version

GIB = 2**30
UNSET = object()


def facts(number: int = 1) -> dict:
    """A host of a job on four GPUs each, that nothing is wrong with."""
    address = f"10.0.0.{number}"
    gpus = [
        {
            "index": index, "name": "NVIDIA A100", "uuid": f"GPU-{number}-{index}", "total_mib": 81920, "used_mib": 5,
            "compute_capability": "8.0",
        }
        for index in range(4)
    ]  # fmt: skip
    disk = {
        "path": "/home/lab", "exists": True, "is_folder": True, "free": 500 * GIB, "total": 900 * GIB,
        "free_inodes": 10**6, "writable": True, "file_system": "ext4",
    }  # fmt: skip
    return {
        "probe": 1,
        "hostname": {"name": f"gpu{number}", "resolves_to": [address], "user": 1000, "kernel": "6"},
        "python": {
            "version": "3.11.7", "executable": "/venv/bin/python", "prefix": "/venv", "header": "/inc/Python.h",
            "include": "/inc",
        },
        "packages": {
            "torch": "2.8.0+cu126", "deepspeed": "0.19.8", "transformers": "5.1.0", "accelerate": "1.15.0",
            "dsrun": "0.1.0",
        },
        "torch": {"cuda": "12.6", "cpu_build": False},
        "gpus": {"driver": "560.35.03", "gpus": gpus, "processes": [], "on_bus": 4, "tool": True},
        "ram": {"total": 512 * GIB, "available": 480 * GIB, "limited": False, "cpus": 64},
        "shm": {
            "total": 256 * GIB, "free": 250 * GIB, "own_entries": 0, "other_entries": 0, "user": 1000,
            "buffers_in_use": 0, "leftover_count": 0, "leftovers": [], "leftover_bytes": 0,
        },
        "memlock": {"limit": None, "infiniband": []},
        "disk": {
            "folder": disk, "cache": {**disk, "path": "/home/lab/.cache/dsrun"}, "nvme": {**disk, "path": "/nvme"},
        },
        "port": {"port": 29500, "free": True, "asked": False},
        "tools": {
            "compiler": "/usr/bin/c++", "compiler_name": "c++", "ninja": "/venv/bin/ninja",
            "nvcc": "/usr/local/cuda/bin/nvcc", "nvcc_version": "12.6", "numactl": None,
            "libaio_header": "/usr/include/libaio.h", "libaio": "/usr/lib/libaio.so",
        },
        "operators": {"folder": "/x", "built": [], "locks": [], "stale": []},
        "numa": {"nodes": 1},
        "data": {"path": "/data/a b.jsonl", "exists": True, "size": 3 * GIB, "sha256": "ab" * 32, "ends_sha256": "cd"},
        "interfaces": {"lo": ["127.0.0.1", "::1"], "eth0": [address, "fe80::1"], "docker0": ["172.17.0.1"]},
        "route": {
            "master": "gpu1", "address": "10.0.0.1", "interface": "lo" if number == 1 else "eth0", "source": address,
        },
        "variables": {},
        "clock": {"time": 1000.5},
    }  # fmt: skip


def lab(count: int = 3, changes: dict | None = None, on: int = 2) -> list[Host]:
    """`count` hosts; on the host number `on` (all if 0) the facts under these paths are others."""
    hosts = []
    for number in range(1, count + 1):
        found = copy.deepcopy(facts(number))
        own = {}
        for path, value in (changes or {}).items():
            if on not in (0, number):
                continue
            if path == "slots":
                own["slots"] = value
                continue
            place, keys = found, path.split("/")
            for key in keys[:-1]:
                place = place[int(key) if isinstance(place, list) else key]
            if value is UNSET:
                del place[keys[-1]]
            else:
                place[int(keys[-1]) if isinstance(place, list) else keys[-1]] = value
        more = {"slots": 4, **own}
        hosts.append(
            Host(f"gpu{number}", facts=found, asked_at=1000.0, answered_at=1000.6, first=number == 1, **more)
        )
    return hosts


def results(hosts, check):
    return [result for result in doctor.examine(hosts) if result.check == check]


def of(hosts, check, number):
    (found,) = [result for result in results(hosts, check) if result.host == f"gpu{number}"]
    return found


CHECKS = [check for group in doctor.groups() for check in group.checks]
OLD_GPU = {"gpus/gpus/3/compute_capability": "7.0"}
NO_GPU = {"gpus/gpus": [], "gpus/on_bus": 0, "gpus/driver": None}
CPU = {**NO_GPU, "torch/cuda": None, "torch/cpu_build": True}
LEFT = ["/dev/shm/deepspeed_allreduce_buffer_1000_a_0", "/dev/shm/deepspeed_allreduce_buffer_1000_a b_1"]
TOO_FULL = {"shm/total": GIB, "shm/free": 20 << 20, "shm/leftover_count": 9, "shm/leftover_bytes": GIB}
TWO_NETS = {"interfaces/ib0": ["10.9.0.2"]}
SET = {"variables/GLOO_SOCKET_IFNAME": "eth0", "variables/NCCL_SOCKET_IFNAME": "eth0"}

# Check, what is changed on the second of three hosts, its colour there, and words of what is said and of the fix.
CASES = [
    ("python", {"python/version": "3.12.1"}, RED, "3.12.1, the others have 3.11", "Python 3.11"),
    ("python", {"python/version": "3.11.2"}, GREEN, "3.11.2", ""),
    ("python", {"python": {"missing": "/venv/bin/python"}}, RED, "no /venv/bin/python", "shares|share"),
    ("packages", {"packages/torch": "2.7.1+cu126"}, RED, "torch 2.7.1+cu126 (the others: 2.8.0+cu126)",
     "torch==2.8.0+cu126  # torch from the index it came from"),
    ("packages", {"packages/dsrun": "0.0.9"}, RED, "dsrun 0.0.9", "pip install dsrun==0.1.0"),
    ("packages", {"packages/accelerate": None}, RED, "accelerate missing (the others: 1.15.0)", "accelerate==1.15.0"),
    ("driver", {"gpus/driver": "520.61"}, RED, "wants 525", "CUDA 11"),
    ("driver", {"gpus/driver": "525.60.13"}, GREEN, "525", ""),
    ("driver", {"torch/cuda": "13.0", "gpus/driver": "575.57"}, RED, "wants 580", "CUDA 12"),
    ("driver", {"torch/cuda": "13.0", "gpus/driver": "580.65"}, GREEN, "580", ""),
    ("driver", {"torch/cuda": "11.8", "gpus/driver": "440.1"}, RED, "wants 450", "Update the driver."),
    ("driver", {**OLD_GPU, "torch/cuda": "13.0", "gpus/driver": "580.65"}, RED, "7.0", "cu126"),
    ("driver", {**OLD_GPU, "torch/cuda": "12.8", "packages/torch": "2.11.0"}, RED, "7.0", "cu126"),
    ("driver", {**OLD_GPU, "torch/cuda": "12.8", "packages/torch": "2.8.0"}, GREEN, "", ""),
    ("driver", {**OLD_GPU, "torch/cuda": "12.6"}, GREEN, "", ""),
    ("driver", {"gpus/gpus/0/compute_capability": "6.1", "torch/cuda": "12.8"}, RED, "6.1", "cu126"),
    ("driver", {"gpus/gpus/0/compute_capability": None, "torch/cuda": "12.8"}, GREEN, "", ""),
    ("driver", {"torch/cuda": "13.0", "gpus/driver": "580.65", "gpus/gpus/0/compute_capability": "7.5"}, GREEN, "", ""),
    ("driver", {"torch/cuda": None, "torch/cpu_build": True}, YELLOW, "CPU build", "pytorch.org"),
    ("driver", {"torch/cuda": None, "torch/cpu_build": None}, GREY, "no torch", ""),
    ("driver", CPU, GREY, "no NVIDIA GPU", ""),
    ("driver", {**NO_GPU, "gpus/on_bus": 4, "gpus/fault": "has failed"}, RED, "4 NVIDIA GPUs on the bus", "modprobe"),
    ("gpus", {"slots": 8}, RED, "4 x NVIDIA A100, and 8 slots", "slots=4"),
    ("gpus", {"slots": 2}, GREEN, "2 of them", ""),
    ("gpus", {"slots": None}, GREEN, "4 x NVIDIA A100", ""),
    ("gpus", NO_GPU, RED, "no GPU, and 4 slots", "hostfile"),
    ("gpus", CPU, RED, "no GPU, and 4 slots", "hostfile"),
    ("gpu-free", {"gpus/gpus/1/used_mib": 40960}, YELLOW, "GPU 1: 40.0 of 80.0 GiB", "--exclude"),
    ("gpu-free", {"gpus/gpus/1/used_mib": None}, GREEN, "", ""),
    ("gpu-free", {"gpus/processes": [{"uuid": "GPU-2-3", "pid": 77, "used_mib": 9, "name": "python", "user": "li"}]},
     YELLOW, "li runs python (77) on GPU 3", "owner"),
    ("gpu-free", {"gpus/processes": [{"uuid": "GPU-x", "pid": 7, "used_mib": 9, "name": "a", "user": None}] * 9},
     YELLOW, "and 3 more", "owner"),
    ("gpu-free", NO_GPU, GREY, "no NVIDIA GPU", ""),
    ("ram", {"ram/available": GIB}, RED, "1.0 GiB of 512.0 GiB free", "ps -eo"),
    ("ram", {"ram/available": 100 * GIB}, YELLOW, "100.0 GiB", "ps -eo"),
    ("ram", {"ram/total": 8 * GIB, "ram/available": 3 * GIB, "ram/limited": True}, YELLOW, "cgroup", "ps -eo"),
    ("shm", {"shm/total": 64 << 20, "shm/free": 64 << 20}, YELLOW, "4 ranks want 256 MiB", "--shm-size"),
    ("shm", {"shm/total": GIB, "shm/free": 300 << 20}, GREEN, "300 MiB", ""),
    ("shm", {"shm/total": GIB, "shm/free": 300 << 20, "slots": 8}, YELLOW, "512 MiB", "--shm-size"),
    ("shm", {"shm/total": 64 << 20, "shm/free": 0}, RED, "0 MiB", "--shm-size"),
    ("shm", TOO_FULL, RED, "9 buffers of ended DeepSpeed runs (1.0 GiB)",
     "rm /dev/shm/deepspeed_allreduce_buffer_1000_*"),
    ("shm", {"shm/leftover_count": 2, "shm/leftovers": LEFT, "shm/buffers_in_use": 4}, YELLOW, "2 buffers",
     f"rm {shlex.join(LEFT)}"),
    ("shm", {"shm/leftover_count": 9, "shm/leftovers": LEFT, "shm/buffers_in_use": 4}, YELLOW, "9 buffers",
     "have ended"),
    ("memlock", {"memlock/limit": 65536, "disk/nvme": UNSET}, GREEN, "64 KiB", ""),
    ("memlock", {"memlock/limit": 16384, "disk/nvme": UNSET}, YELLOW, "16 KiB", "limits.conf"),
    ("memlock", {"memlock/limit": 8 << 20}, YELLOW, "NVMe", "limits.conf"),
    ("memlock", {"memlock/limit": 8 << 20, "memlock/infiniband": ["mlx5_0"]}, RED, "mlx5_0", "--ulimit memlock=-1"),
    ("folder", {"disk/folder/is_folder": False}, RED, "no folder /home/lab", "all hosts share"),
    ("folder", {"disk/folder/writable": False}, YELLOW, "can't be written", "--output-dir"),
    ("room", {"disk/folder/free": GIB // 2}, RED, "working folder: 512 MiB free", "du -xh"),
    ("room", {"disk/cache/free": 5 * GIB}, YELLOW, "cache: 5.0 GiB free", "du -xh"),
    ("room", {"disk/cache/writable": False}, RED, "can't be written", "DSRUN_CACHE"),
    ("room", {"disk/folder/free_inodes": 3}, RED, "no more files fit", "du -xh"),
    ("room", {"disk/folder/free_inodes": None}, GREEN, "500.0 GiB free", ""),
    ("nvme", {"disk/nvme": UNSET}, GREY, "no --nvme", ""),
    ("nvme", {"disk/nvme/is_folder": False}, RED, "no folder /nvme", "mkdir -p /nvme"),
    ("nvme", {"disk/nvme/writable": False, "disk/nvme/path": "/a b"}, RED, "can't be written", "'/a b'"),
    ("nvme", {"disk/nvme/file_system": "tmpfs"}, YELLOW, "tmpfs", "findmnt"),
    ("nvme", {"disk/nvme/file_system": "nfs4"}, YELLOW, "nfs4", "findmnt"),
    ("nvme", {"disk/nvme/free": 3 * GIB}, YELLOW, "3.0 GiB", "dsrun plan"),
    ("locks", {"operators/locks": ["/x y/cpu_adam/lock"], "operators/stale": ["/x y/cpu_adam/lock"]}, RED,
     "lock on cpu_adam", "rm '/x y/cpu_adam/lock'"),
    ("locks", {"operators/locks": ["/x/cpu_adam/lock"]}, GREEN, "1 being built", ""),
    ("compiler", {"tools/compiler": None, "tools/compiler_name": "g++-13"}, RED, "g++-13", "apt-get install g++"),
    ("compiler", {"tools/compiler": None, "operators/built": ["cpu_adam"]}, YELLOW, "compiled already: cpu_adam",
     "g++"),
    ("nvcc", {"tools/nvcc": None}, RED, "no nvcc", "toolkit 12"),
    ("nvcc", {"tools/nvcc": None, "operators/built": ["fused_adam"]}, YELLOW, "no nvcc", "toolkit 12"),
    ("nvcc", {"tools/nvcc_version": "11.8"}, RED, "nvcc 11.8, and torch is built for CUDA 12.6", "toolkit 12.6"),
    ("nvcc", {"tools/nvcc_version": "12.4"}, GREEN, "nvcc 12.4 for torch's CUDA 12.6", ""),
    ("nvcc", {"tools/nvcc_version": "13.1", "torch/cuda": "13.0"}, YELLOW, "another minor", "DS_SKIP_CUDA_CHECK"),
    ("nvcc", {"tools/nvcc_version": None}, GREY, "doesn't say", ""),
    ("nvcc", CPU, GREY, "no operator for GPUs", ""),
    ("ninja", {"tools/ninja": None}, RED, "no ninja", "pip install ninja"),
    ("headers", {"python/header": None}, RED, "no Python.h in /inc", "python3.11-dev"),
    ("headers", {"python": {"missing": "/venv/bin/python"}}, GREY, "", ""),
    ("libaio", {"tools/libaio": None}, YELLOW, "no libaio", "libaio-dev"),
    ("libaio", {"tools/libaio_header": None}, YELLOW, "no header", "libaio-dev"),
    ("clock", {"clock/time": 1004.0}, YELLOW, "at least 3 s ahead of", "set-ntp"),
    ("clock", {"clock/time": 900.0}, YELLOW, "at least 100 s behind", "set-ntp"),
    ("clock", {"clock/time": 1002.4}, GREEN, "", ""),
    ("clock", {"clock/time": 998.0}, GREEN, "", ""),
    ("port", {"port/free": False}, GREY, "first host", ""),
    ("own-name", {"hostname/resolves_to": ["127.0.1.1"]}, GREEN, "leads to 127.0.1.1: Gloo is told to take eth0", ""),
    ("own-name", {"hostname/resolves_to": []}, GREEN, "leads nowhere: Gloo is told to take eth0", ""),
    ("own-name", {"hostname/resolves_to": [], "route/interface": None}, YELLOW, "leads nowhere", "/etc/hosts"),
    ("own-name", {"hostname/resolves_to": ["::1"], "route": None}, YELLOW, "leads to ::1", "GLOO_SOCKET_IFNAME"),
    ("own-name", {"hostname/resolves_to": [], **SET}, GREEN, "GLOO_SOCKET_IFNAME is set", ""),
    ("route", {"route/address": None, "route/fault": "can't find the name gpu1"}, YELLOW, "can't find", "DNS"),
    ("route", {"route/fault": "no route to 10.0.0.1"}, RED, "no route", "ip route add"),
    ("route", {"route/address": "127.0.1.1"}, YELLOW, "back to this host itself", "real address"),
    ("route", {"route/address": "192.168.1.1"}, YELLOW, "192.168.1.1 here", "--master-addr one of: 10.0.0.1"),
    ("interface", TWO_NETS, YELLOW, "by eth0, and has ib0 too", "export NCCL_SOCKET_IFNAME=eth0"),
    ("interface", {**TWO_NETS, "gpus/gpus": []}, GREEN, "eth0", ""),
    ("interface", {**TWO_NETS, "variables/NCCL_SOCKET_IFNAME": "eth"}, GREEN, "eth0", ""),
    ("interface", {"interfaces/br-1": ["10.1.1.1"], "interfaces/eth9": ["fe80::2%eth9"]}, GREEN, "eth0", ""),
    ("interface", {"route/interface": "ens3", "interfaces": {"ens3": ["10.0.0.2"]}}, GREEN, "ens3", ""),
    ("interface", {"route/interface": "ens3", "interfaces/ens3": ["10.0.0.9"]}, YELLOW, "by ens3, and has eth0 too",
     "export NCCL_SOCKET_IFNAME=eth0,ens3"),
    ("interface", {"variables/GLOO_SOCKET_IFNAME": "eth7"}, RED, "GLOO_SOCKET_IFNAME=eth7, and it has lo", "Unset"),
    ("interface", {"variables/GLOO_SOCKET_IFNAME": "eth"}, RED, "GLOO_SOCKET_IFNAME=eth,", "Unset"),
    ("interface", {"variables/NCCL_SOCKET_IFNAME": "ib,eth"}, GREEN, "eth0", ""),
    ("interface", {"variables/NCCL_SOCKET_IFNAME": "^docker"}, GREEN, "eth0", ""),
    ("interface", {"variables/NCCL_SOCKET_IFNAME": "=ib0"}, RED, "ib0", "export NCCL_SOCKET_IFNAME=eth0"),
    ("interface", {"route/interface": None}, GREY, "isn't known", ""),
    ("data", {"data/sha256": "00" * 32}, RED, "another file than on gpu1", "rsync --checksum gpu1:'/data/a b.jsonl'"),
    ("data", {"data": {"path": "/d", "exists": False}}, RED, "no file /d", "Copy it"),
    ("data", {"data/sha256": None}, GREEN, "too large to read whole", ""),
    ("data", {"data/sha256": None, "data/ends_sha256": "ee"}, RED, "another file", "rsync"),
    ("data", {"data/sha256": None, "data/size": 7}, RED, "(7 bytes)", "rsync"),
    ("data", {"data": None}, GREY, "no --data", ""),
    # What is just enough, and just too little.
    ("gpu-free", {"gpus/gpus/1/used_mib": 1024}, GREEN, "", ""),
    ("gpu-free", {"gpus/gpus/1/used_mib": 1025}, YELLOW, "GPU 1", "owner"),
    ("ram", {"ram/total": 8 * GIB, "ram/available": 2 * GIB, "slots": 1}, GREEN, "2.0 GiB", ""),
    ("ram", {"ram/total": 8 * GIB, "ram/available": 2 * GIB - 1, "slots": 1}, RED, "GiB free", "ps -eo"),
    ("ram", {"ram/total": 8 * GIB, "ram/available": 4 * GIB}, GREEN, "4.0 GiB", ""),
    ("ram", {"ram/total": 8 * GIB, "ram/available": 4 * GIB - 1}, YELLOW, "GiB free", "ps -eo"),
    ("shm", {"shm/total": GIB, "shm/free": 256 << 20}, GREEN, "256 MiB", ""),
    ("shm", {"shm/total": GIB, "shm/free": (256 << 20) - 1}, YELLOW, "256 MiB", "--shm-size"),
    ("shm", {"shm/total": 64 << 20, "shm/free": 64 << 20, "slots": 1}, YELLOW, "64 MiB", "--shm-size"),
    ("shm", {"shm/total": 65 << 20, "shm/free": 64 << 20, "slots": 1}, GREEN, "64 MiB", ""),
    ("shm", {"shm/total": 64 << 20, "shm/free": 8 << 20}, YELLOW, "8 MiB", "--shm-size"),
    ("shm", {"shm/leftover_count": 4, "shm/leftovers": LEFT, "shm/buffers_in_use": 1}, YELLOW, "", "rm /dev"),
    ("shm", {"shm/leftover_count": 5, "shm/leftovers": LEFT, "shm/buffers_in_use": 1}, YELLOW, "", "have ended"),
    ("shm", {**TOO_FULL, "shm/leftover_bytes": (256 - 20) << 20}, RED, "9 buffers", "rm /dev"),
    ("shm", {**TOO_FULL, "shm/leftover_bytes": (256 - 21) << 20}, YELLOW, "want 256 MiB", "--shm-size"),
    ("memlock", {"memlock/limit": 65535, "disk/nvme": UNSET}, YELLOW, "63 KiB", "limits.conf"),
    ("room", {"disk/folder/free": GIB}, YELLOW, "1.0 GiB", "du -xh"),
    ("room", {"disk/folder/free": 10 * GIB}, GREEN, "10.0 GiB", ""),
    ("room", {"disk/folder/free": 10 * GIB - 1}, YELLOW, "10.0 GiB", "du -xh"),
    ("room", {"disk/folder/free_inodes": 1000}, GREEN, "", ""),
    ("nvme", {"disk/nvme/free": 10 * GIB}, GREEN, "", ""),
    ("nvcc", {"tools/nvcc_version": "11.7", "torch/cuda": "11.8"}, GREEN, "nvcc 11.7", ""),
    ("nvcc", {"tools/nvcc_version": "13.0", "torch/cuda": "13.0"}, GREEN, "nvcc 13.0", ""),
    ("driver", {**NO_GPU, "gpus/on_bus": 4}, RED, "no nvidia-smi", "modprobe"),
    ("route", {"route/interface": None}, GREEN, "by ? as", ""),
    ("numa", {"numa/nodes": 2}, GREY, "2 NUMA nodes: with offload, --bind_cores_to_rank", ""),
]  # fmt: skip


@pytest.mark.parametrize(("check", "changes", "colour", "what", "fix"), CASES)
def test_what_is_said_of_a_host(check, changes, colour, what, fix):
    found = of(lab(changes=changes), check, 2)
    assert found.colour == colour, found
    assert what in found.what
    assert any(words in found.fix for words in fix.split("|"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_good_host_is_green(check):
    for result in check.results(lab()):
        expected = (
            {GREY} if check.name == "numa" or (check.name == "port" and result.host != "gpu1") else {GREEN}
        )
        assert {result.colour} == expected, result


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_every_check_has_cases(check):
    colours = {colour for name, _, colour, _, _ in CASES if name == check.name}
    assert check.name in ("reachable", "numa", "port") or colours & {RED, YELLOW}
    assert check.about.endswith((".", ")."))


@pytest.mark.parametrize(("check", "changes", "colour", "what", "fix"), CASES)
def test_every_yellow_and_red_says_what_to_do(check, changes, colour, what, fix):
    for hosts in (lab(changes=changes), lab(count=1, changes=changes, on=1), lab(changes=changes, on=0)):
        found = doctor.examine(hosts)
        assert len(found) == len(hosts) * len(CHECKS)
        for result in found:
            assert result.what
            assert bool(result.fix) == (result.colour in (RED, YELLOW)), result


@pytest.mark.parametrize("fact", [name for name, _ in probe.FACTS])
@pytest.mark.parametrize("value", [{"error": "OSError: no"}, UNSET, "odd", [], 7, {"x": 1}, None])
def test_facts_that_are_not_as_expected_make_no_verdict(fact, value):
    for on in (0, 2):
        for result in doctor.examine(lab(changes={fact: value}, on=on)):
            assert result.what
            if value == {"error": "OSError: no"} and result.what.startswith("not known"):
                assert result.colour == GREY and "OSError: no" in result.what


def test_the_port_of_the_first_host():
    assert of(lab(changes={"port/free": False}, on=1), "port", 1).colour == YELLOW
    asked = of(lab(changes={"port/free": False, "port/asked": True}, on=1), "port", 1)
    assert asked.colour == RED and "ss -ltnp" in asked.fix


def test_a_host_that_does_not_answer():
    hosts = lab()
    hosts[0] = Host("gpu1", 4, None, "no login without a password", "ssh-copy-id gpu1", first=True)
    found = doctor.examine(hosts)
    assert [(result.check, result.colour, result.fix) for result in found if result.host == "gpu1"] == [
        ("reachable", RED, "ssh-copy-id gpu1")
    ]
    assert {result.colour for result in found if result.host != "gpu1"} <= {GREEN, GREY}


def test_no_host_answers():
    hosts = [Host("a", fault="silent", fix="wake it", first=True), Host("b", fault="silent", fix="wake it")]
    assert [(result.check, result.colour) for result in doctor.examine(hosts)] == [("reachable", RED)] * 2


def test_one_host_has_nobody_to_be_compared_with():
    for check in ("clock", "own-name", "route", "interface"):
        (found,) = results(lab(count=1), check)
        assert found.colour == GREY


def test_two_hosts_are_compared():
    assert [
        result.colour
        for check in ("clock", "own-name", "route", "interface")
        for result in results(lab(2), check)
    ] == [GREEN] * 8
    assert of(lab(2, {"route/address": "127.0.1.1"}), "route", 2).colour == YELLOW
    assert of(lab(2, TWO_NETS, on=1), "interface", 1).colour == YELLOW


def test_the_first_hosts_interface_is_the_one_with_the_address_that_the_others_go_to():
    away = {"interfaces": {"lo": ["127.0.0.1"], "ens3": ["10.0.0.1"]}}
    found = of(lab(3, away, on=1), "interface", 1)
    assert (found.colour, found.what) == (GREEN, "ens3")
    name = of(lab(3, {"hostname/resolves_to": ["127.0.1.1"]}, on=1), "own-name", 1)
    assert "Gloo is told to take eth0" in name.what


def test_without_the_first_host_the_others_are_still_judged():
    hosts = lab(4)[1:]
    assert {result.colour for result in results(hosts, "route")} == {GREEN}
    assert of(lab(4, {"route/address": "127.0.1.1"}, on=3)[1:], "route", 3).colour == YELLOW


def test_a_lab_without_gpus():
    for slots in (None, 2):
        hosts = lab(changes={**CPU, "slots": slots}, on=0)
        assert {result.colour for result in results(hosts, "gpus")} == {GREY}
    one = lab(count=1, changes={**NO_GPU, "slots": None}, on=1)
    assert results(one, "gpus")[0].colour == GREY
    assert results(lab(count=1, changes=NO_GPU, on=1), "gpus")[0].colour == RED


def test_packages_that_nobody_has():
    (found,) = results(lab(count=1, changes={"packages/deepspeed": None}, on=1), "packages")
    assert found.colour == RED and "dsrun[train]" in found.fix
    (found,) = results(lab(count=1, changes={"packages/accelerate": None}, on=1), "packages")
    assert found.colour == YELLOW


def test_the_odd_one_out_is_named_and_not_the_others():
    colours = [result.colour for result in results(lab(changes={"packages/torch": "2.7.1"}), "packages")]
    assert colours == [GREEN, RED, GREEN]
    # Of two, the first is right.
    colours = [result.colour for result in results(lab(2, {"packages/torch": "2.7.1"}, on=2), "packages")]
    assert colours == [GREEN, RED]


def test_the_clock_of_two_hosts():
    hosts = lab(2, {"clock/time": 1010.5}, on=2)
    assert [result.colour for result in results(hosts, "clock")] == [GREEN, YELLOW]


def test_a_host_in_two_minds_is_as_bad_as_its_worst():
    assert doctor.worst([GREEN, YELLOW, GREY]) == YELLOW
    assert doctor.worst([GREEN, GREY]) == GREEN
    assert doctor.worst([RED, YELLOW]) == RED
    assert doctor.worst([]) == GREY
    assert set(WORST) == {GREEN, YELLOW, RED, GREY}


def test_groups_are_the_modules_of_the_folder():
    folder = Path(doctor.__file__).parent
    names = {path.stem for path in folder.glob("*.py")} - {"__init__", "frame"}
    assert {group.name for group in doctor.groups()} == names
    orders = [group.order for group in doctor.groups()]
    assert orders == sorted(set(orders))
    assert all(group.checks for group in doctor.groups())
    checks = [check.name for check in CHECKS]
    assert len(set(checks)) == len(checks) >= 20


def test_checks_name_facts_that_there_are():
    known = {name for name, _ in probe.FACTS}
    assert all(set(check.needs) <= known for check in CHECKS)


def test_a_thousand_hosts():
    hosts = lab(1000)
    assert len(doctor.examine(hosts)) == 1000 * len(CHECKS)


def test_results_are_json():
    rows = [vars(SimpleNamespace(**result.__dict__)) for result in doctor.examine(lab())]
    assert json.loads(json.dumps(rows)) == rows


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2.13.0+cpu", (2, 13, 0)),
        ("580.95.05", (580, 95, 5)),
        ("2.8.0rc1", (2, 8, 0)),
        ("", ()),
        ("x", ()),
        ("13", (13,)),
    ],
)
def test_versions(text, numbers):
    assert version(text) == numbers


def test_the_commonest():
    assert commonest(["a", "b", "b"]) == "b"
    assert commonest(["a", "b"]) == "a"
