"""Every check of the doctor: green, and what makes it yellow, red or grey, from facts made up."""

from __future__ import annotations

import copy
import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsrun.cluster import doctor, probe
from dsrun.cluster.doctor.check import GREEN, GREY, RED, WORST, YELLOW, Host, commonest

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
        "lock": {"kind": "flock", "why": "", "one_host": ""},
    }  # fmt: skip
    return {
        "probe": 1,
        "hostname": {"name": f"gpu{number}", "resolves_to": [address], "user": 1000, "kernel": "6"},
        "python": {
            "version": "3.11.7", "executable": "/venv/bin/python", "prefix": "/venv", "header": "/inc/Python.h",
            "include": "/inc",
        },
        "packages": {
            "torch": "2.8.0+cu126", "deepspeed": "0.19.8", "transformers": "5.23.0", "accelerate": "1.15.0",
            "dsrun": "0.1.0", "liger-kernel": "0.8.5", "flash-attn-4": "4.0.0b36", "bitsandbytes": "0.49.0",
        },
        "torch": {"cuda": "12.6", "cpu_build": False},
        "gpus": {"driver": "560.35.03", "gpus": gpus, "processes": [], "on_bus": 4, "tool": True},
        "architectures": {"asked": True, "flags": ["sm_70", "sm_80", "sm_90", "compute_90"]},
        "gpu_health": {"gpus": [
            {
                "index": index, "name": "NVIDIA A100", "uncorrected": 0, "uncorrected_ever": 0, "failed": [],
                "pending": [], "slowed": [], "width": ["16x", "16x"], "fabric": "Completed",
            }
            for index in range(4)
        ]},
        "kernel_log": {"xids": [{"bus": "0000:3b:00", "xid": 13, "hours_ago": 3.0}]},
        "limits": {
            "open_files": 65536, "open_files_hard": 65536, "processes": None, "processes_hard": None,
            "cgroup_processes": None, "slurm": None,
        },
        "quota": {"tool": "quota", "file_system": "nfs4", "kib": 10, "limit_kib": 1000, "files": 1, "limit_files": 0},
        "ram": {"total": 512 * GIB, "available": 480 * GIB, "limited": False, "cpus": 64, "oom_kills": 0},
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
        "toolkit": {
            "home": "/usr/local/cuda", "no_headers": [], "no_libraries": [], "gcc": 13, "compiler": "c++",
            "compiler_major": 12,
        },
        "fabric": {
            "cards": [{"name": "mlx5_0", "efa": False, "layer": "InfiniBand", "state": "ACTIVE"}], "plugins": [],
            "verbs": True,
        },
        "operators": {
            "folder": "/x", "built": [], "locks": [], "stale": [], "oldest_lock_hours": None, "builds": [],
            "file_system": "ext4", "given": False,
        },
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

# Check, what is changed on the second of three hosts, its colour there, and what is named there and in the fix.
CASES = [
    ("python", {"python/version": "3.12.1"}, RED, "3.12.1", "3.11"),
    ("python", {"python/version": "3.11.2"}, GREEN, "3.11.2", ""),
    ("python", {"python": {"missing": "/venv/bin/python"}}, RED, "/venv/bin/python", "shares|share"),
    ("packages", {"packages/torch": "2.7.1+cu126"}, RED, "2.7.1+cu126",
     "torch==2.8.0+cu126"),
    ("packages", {"packages/dsrun": "0.0.9"}, RED, "0.0.9", "dsrun==0.1.0"),
    ("packages", {"packages/accelerate": None}, RED, "1.15.0", "accelerate==1.15.0"),
    ("packages", {"packages/peft": "0.18.0"}, GREEN, "2.8.0", ""),
    ("versions", {"packages/transformers": "5.1.0"}, YELLOW, "transformers 5.1.0", "another transformers"),
    ("versions", {"packages/deepspeed": "0.18.1"}, YELLOW, "gradients", "0.18.4"),
    ("versions", {"packages/deepspeed": "0.13.0", "packages/numpy": "2.1.0"}, RED, "numpy 2.1.0", "0.14.4"),
    ("versions", {"packages/deepspeed": "0.13.0", "packages/numpy": "1.26.4"}, RED, "torch 2.8.0", "0.14.4"),
    ("versions", {"hostname/kernel": "4.18.0-553.el8"}, GREEN, "", ""),
    ("driver", {"gpus/driver": "520.61"}, RED, "525", "11"),
    ("driver", {"gpus/driver": "525.60.13"}, GREEN, "525", ""),
    ("driver", {"torch/cuda": "13.0", "gpus/driver": "575.57"}, RED, "580", "12"),
    ("driver", {"torch/cuda": "13.0", "gpus/driver": "580.65"}, GREEN, "580", ""),
    ("driver", {"torch/cuda": "11.8", "gpus/driver": "440.1"}, RED, "450", "Update the driver."),
    ("driver", {**OLD_GPU, "torch/cuda": "13.0", "gpus/driver": "580.65"}, RED, "7.0", "cu126"),
    ("driver", {**OLD_GPU, "torch/cuda": "12.8", "packages/torch": "2.11.0"}, RED, "7.0", "cu126"),
    ("driver", {**OLD_GPU, "torch/cuda": "12.8", "packages/torch": "2.8.0"}, GREEN, "", ""),
    ("driver", {**OLD_GPU, "torch/cuda": "12.6"}, GREEN, "", ""),
    ("driver", {"gpus/gpus/0/compute_capability": "10.0"}, RED, "10.0", "No build"),
    ("architectures", {"architectures/flags": ["sm_90", "compute_90"]}, RED, "sm_90", "cu126"),
    ("architectures", {"architectures/flags": ["sm_86"]}, RED, "sm_86", "cu126"),
    ("architectures", {"architectures/flags": ["compute_70"]}, GREEN, "compute_70", ""),
    ("architectures", {"architectures/flags": ["sm_80a"]}, GREEN, "sm_80a", ""),
    ("architectures", {"architectures/flags": []}, GREY, "not readable", ""),
    ("architectures", {"architectures": {"asked": False}}, GREY, "", ""),
    ("architectures", NO_GPU, GREY, "no NVIDIA GPU", ""),
    ("torch-build", {"gpus/driver": "580.65"}, GREEN, "torch --index-url https://download.pytorch.org/whl/cu130", ""),
    ("torch-build", {}, GREEN, "'torch<2.15' --index-url https://download.pytorch.org/whl/cu126", ""),
    ("torch-build", {**OLD_GPU, "gpus/driver": "580.65"}, GREEN, "cu126", ""),
    ("torch-build", {"gpus/driver": "470.57"}, GREEN, "'torch<2.8'", ""),
    ("torch-build", {"gpus/driver": "390.1"}, GREY, "not known", ""),
    ("torch-build", NO_GPU, GREY, "no NVIDIA GPU", ""),
    ("driver", {"gpus/gpus/0/compute_capability": "6.1", "torch/cuda": "12.8"}, RED, "6.1", "cu126"),
    ("driver", {"gpus/gpus/0/compute_capability": None, "torch/cuda": "12.8"}, GREEN, "", ""),
    ("driver", {"torch/cuda": "13.0", "gpus/driver": "580.65", "gpus/gpus/0/compute_capability": "7.5"}, GREEN, "", ""),
    ("driver", {"torch/cuda": None, "torch/cpu_build": True}, YELLOW, "", "pytorch.org"),
    ("driver", {"torch/cuda": None, "torch/cpu_build": None}, GREY, "", ""),
    ("driver", CPU, GREY, "", ""),
    ("driver", {**NO_GPU, "gpus/on_bus": 4, "gpus/fault": "has failed"}, RED, "4", "modprobe"),
    ("driver", {**NO_GPU, "gpus/fault": "ended with 18: Driver/library version mismatch"}, RED, "mismatch", "restart"),
    ("driver", {**NO_GPU, "gpus/fault": "ended with 4: Insufficient Permissions"}, RED, "Perm", "/dev/nvidia"),
    ("driver", {**NO_GPU, "gpus/fault": "ended with 9: couldn't communicate"}, GREY, "", ""),
    ("gpus", {"gpus/of_driver": 5}, RED, "the driver has 5: one is lost", "Restart the machine"),
    ("gpus", {"gpus/of_driver": 4}, GREEN, "A100", ""),
    ("gpus", {"slots": 8}, RED, "A100", "slots=4"),
    ("gpus", {"slots": 2}, GREEN, "2", ""),
    ("gpus", {"slots": None}, GREEN, "A100", ""),
    ("gpus", NO_GPU, RED, "4", "hostfile"),
    ("gpus", CPU, RED, "4", "hostfile"),
    ("gpu-free", {"gpus/gpus/1/used_mib": 40960}, YELLOW, "40.0", "--exclude"),
    ("gpu-free", {"gpus/gpus/1/used_mib": None}, GREEN, "", ""),
    ("gpu-free", {"gpus/processes": [{"uuid": "GPU-2-3", "pid": 77, "used_mib": 9, "name": "python", "user": "li"}]},
     YELLOW, "77", "owner"),
    ("gpu-free", {"gpus/processes": [{"uuid": "GPU-x", "pid": 7, "used_mib": 9, "name": "a", "user": None}] * 9},
     YELLOW, "3", "owner"),
    ("gpu-free", NO_GPU, GREY, "", ""),
    ("ecc", {"gpu_health/gpus/2/failed": ["remapped_row_failure"]}, RED, "GPU 2", "--exclude HOST:2"),
    ("ecc", {"gpu_health/gpus/1/pending": ["remapped_row_pending"]}, RED, "remapped_row_pending", "--gpu-reset -i 1"),
    ("ecc", {"gpu_health/gpus/3/uncorrected": 7}, YELLOW, "7", "-i 3"),
    ("ecc", {"gpu_health/gpus/3/uncorrected_ever": 5}, GREEN, "5 ever", ""),
    ("ecc", {f"gpu_health/gpus/{index}/uncorrected": None for index in range(4)}, GREY, "not readable", ""),
    ("ecc", {"gpu_health/gpus": []}, GREY, "", ""),
    ("slowed", {"gpu_health/gpus/0/slowed": ["hw_thermal_slowdown"]}, YELLOW, "hw_thermal", "nvidia-smi -q"),
    ("slowed", {"gpu_health/gpus/0/width": ["8x", "16x"]}, YELLOW, "8x", "slot"),
    ("slowed", {"gpu_health/gpus/0/width": None}, GREEN, "", ""),
    ("fabric-manager", {"gpu_health/gpus/0/fabric": "In Progress"}, RED, "In Progress", "nvidia-fabricmanager"),
    ("fabric-manager", {f"gpu_health/gpus/{index}/fabric": None for index in range(4)}, GREY, "", ""),
    ("xid", {"kernel_log": {"unreadable": "not permitted"}}, GREY, "not permitted", ""),
    ("xid", {"kernel_log/xids": [{"bus": "0000:3b:00", "xid": 79, "hours_ago": 3.0}]}, RED, "0000:3b:00", "dmesg"),
    ("xid", {"kernel_log/xids": [{"bus": "0000:3b:00", "xid": 79, "hours_ago": 73.0}]}, YELLOW, "79", "dmesg"),
    ("xid", {"kernel_log/xids": [{"bus": "0000:3b:00", "xid": 63, "hours_ago": 1.0}]}, YELLOW, "63", "dmesg"),
    ("xid", {**NO_GPU, "kernel_log": {"unreadable": "no dmesg"}}, GREY, "no NVIDIA GPU", ""),
    ("oom", {"ram/oom_kills": 3}, YELLOW, "3 processes", "killed process"),
    ("oom", {"ram/oom_kills": None}, GREY, "not readable", ""),
    ("open-files", {"limits/open_files": 1024}, YELLOW, "1024", "ulimit -n 65536"),
    ("open-files", {"limits/open_files": None}, GREEN, "", ""),
    ("processes", {"limits/cgroup_processes": 100}, YELLOW, "100", "--pids-limit"),
    ("processes", {"limits/processes": 200}, YELLOW, "200", "nproc"),
    ("processes", {"limits/processes": 256}, GREEN, "256", ""),
    ("slurm", {"limits/slurm": {"job": "7", "end": 4600.5, "node_mib": 65536, "cpu_mib": None}}, GREEN, "60 min", ""),
    ("slurm", {"limits/slurm": {"job": "7", "end": 1500.5, "node_mib": None, "cpu_mib": 9}}, YELLOW, "9 MiB", "--time"),
    ("slurm", {"limits/slurm": {"job": "7", "end": None, "node_mib": None, "cpu_mib": None}}, GREEN, "readable", ""),
    ("quota", {"quota/kib": 960}, YELLOW, "nearly", "--output-dir"),
    ("quota", {"quota/kib": 1000}, RED, "nearly", "--output-dir"),
    ("quota", {"quota/files": 99, "quota/limit_files": 100}, YELLOW, "99 of 100", "--output-dir"),
    ("quota", {"quota": {"tool": "quota", "file_system": "nfs4"}}, GREEN, "none", ""),
    ("quota", {"quota": {"tool": None, "file_system": "ext4"}}, GREY, "not readable", ""),
    ("cuda-parts", {"toolkit/no_headers": ["cusparse.h"]}, RED, "cusparse.h", "CUDA_HOME"),
    ("cuda-parts", {"toolkit/no_libraries": ["curand"]}, RED, "libcurand.so", "nvidia-curand"),
    ("cuda-parts", {"toolkit/compiler_major": 14}, RED, "gcc 14", "g++-13"),
    ("cuda-parts", {"toolkit/gcc": None, "toolkit/compiler_major": 99}, GREEN, "", ""),
    ("cuda-parts", {"toolkit": {"home": None}}, GREY, "no nvcc", ""),
    ("cuda-parts", {**CPU, "toolkit": {"home": None}}, GREY, "", ""),
    ("cache", {"operators/builds": [{"name": "a_op", "own_torch": False, "gpus": []}]}, YELLOW, "a_op", "rm -r"),
    ("cache", {"operators/builds": [{"name": "a_op", "own_torch": True, "gpus": ["9.0"]}]}, RED, "8.0", "rm -r /x"),
    ("cache", {"operators/builds": [{"name": "a_op", "own_torch": True, "gpus": ["7.0", "8.0"]}]}, GREEN, "", ""),
    ("cache", {"operators/built": ["a"], "operators/given": True, "operators/file_system": "nfs4"}, YELLOW, "SIGILL",
     "unset TORCH_EXTENSIONS_DIR"),
    ("nccl-net", {"fabric/cards": []}, GREEN, "sockets", ""),
    ("nccl-net", {"fabric/cards/0/state": "DOWN"}, YELLOW, "mlx5_0 is down", "ibstat"),
    ("nccl-net", {"variables/NCCL_IB_DISABLE": "1"}, YELLOW, "NCCL_IB_DISABLE", "unset"),
    ("nccl-net", {"fabric/verbs": False}, YELLOW, "libibverbs", "apt-get"),
    ("nccl-net", {"fabric/cards/0/efa": True}, YELLOW, "plug-in", "aws-ofi-nccl"),
    ("nccl-net", {"fabric/cards/0/efa": True, "fabric/plugins": ["/opt/x/libnccl-net.so"]}, GREEN, "EFA", ""),
    ("nccl-net", CPU, GREY, "no GPU", ""),
    ("nccl-interface", {"variables/NCCL_SOCKET_IFNAME": "ib"}, RED, "NCCL_SOCKET_IFNAME=ib", "eth0"),
    ("nccl-interface", {"variables/NCCL_SOCKET_IFNAME": "^eth"}, RED, "lo", "export"),
    ("nccl-interface", {"variables/NCCL_SOCKET_IFNAME": "=eth0"}, GREEN, "eth0", ""),
    ("nccl-interface", {"interfaces/ib0": ["10.9.0.2"]}, YELLOW, "ib0", "NCCL_SOCKET_IFNAME=eth0"),
    ("nccl-interface", {"interfaces": {"lo": ["127.0.0.1"], "docker0": ["172.17.0.1"]}}, RED, "no other", "export"),
    ("nccl-interface", {"interfaces": {"eth0": ["fe80::1"]}}, RED, "none with an address", "eth0"),
    ("ram", {"ram/available": GIB}, RED, "512.0", "-eo"),
    ("ram", {"ram/available": 100 * GIB}, YELLOW, "100.0", "-eo"),
    ("ram", {"ram/total": 8 * GIB, "ram/available": 3 * GIB, "ram/limited": True}, YELLOW, "", "-eo"),
    ("shm", {"shm/total": 64 << 20, "shm/free": 64 << 20}, YELLOW, "256", "--shm-size"),
    ("shm", {"shm/total": GIB, "shm/free": 300 << 20}, GREEN, "300", ""),
    ("shm", {"shm/total": GIB, "shm/free": 300 << 20, "slots": 8}, YELLOW, "512", "--shm-size"),
    ("shm", {"shm/total": 64 << 20, "shm/free": 0}, RED, "0", "--shm-size"),
    ("shm", TOO_FULL, RED, "1.0",
     "rm /dev/shm/deepspeed_allreduce_buffer_1000_*"),
    ("shm", {"shm/leftover_count": 2, "shm/leftovers": LEFT, "shm/buffers_in_use": 4}, YELLOW, "2",
     f"rm {shlex.join(LEFT)}"),
    ("shm", {"shm/leftover_count": 9, "shm/leftovers": LEFT, "shm/buffers_in_use": 4}, YELLOW, "9",
     "have ended"),
    ("memlock", {"memlock/limit": 65536, "disk/nvme": UNSET}, GREEN, "64", ""),
    ("memlock", {"memlock/limit": 16384, "disk/nvme": UNSET}, YELLOW, "16", "limits.conf"),
    ("memlock", {"memlock/limit": 8 << 20}, YELLOW, "", "limits.conf"),
    ("memlock", {"memlock/limit": 8 << 20, "memlock/infiniband": ["mlx5_0"]}, RED, "mlx5_0", "memlock=-1"),
    ("folder", {"disk/folder/is_folder": False}, RED, "/home/lab", "all hosts share"),
    ("folder", {"disk/folder/writable": False}, YELLOW, "", "--output-dir"),
    ("folder-lock", {"disk/folder/lock/kind": "lease", "disk/folder/lock/why": "Function not implemented"}, YELLOW,
     "Function not implemented", "-o flock"),
    ("folder-lock", {"disk/folder/lock/one_host": "localflock"}, YELLOW, "localflock", "-o flock"),
    ("folder-lock", {"disk/folder/lock/kind": "unknown", "disk/folder/lock/why": "denied"}, GREY, "denied", ""),
    ("room", {"disk/folder/free": GIB // 2}, RED, "512", "-xh"),
    ("room", {"disk/cache/free": 5 * GIB}, YELLOW, "5.0", "-xh"),
    ("room", {"disk/cache/writable": False}, RED, "", "DSRUN_CACHE"),
    ("room", {"disk/folder/free_inodes": 3}, RED, "", "-xh"),
    ("room", {"disk/folder/free_inodes": None}, GREEN, "500.0", ""),
    ("nvme", {"disk/nvme": UNSET}, GREY, "", ""),
    ("nvme", {"disk/nvme/is_folder": False}, RED, "/nvme", "/nvme"),
    ("nvme", {"disk/nvme/writable": False, "disk/nvme/path": "/a b"}, RED, "", "'/a"),
    ("nvme", {"disk/nvme/file_system": "tmpfs"}, YELLOW, "", "findmnt"),
    ("nvme", {"disk/nvme/file_system": "nfs4"}, YELLOW, "nfs4", "findmnt"),
    ("nvme", {"disk/nvme/free": 3 * GIB}, YELLOW, "3.0", "dsrun plan"),
    ("locks", {"operators/locks": ["/x y/cpu_adam/lock"], "operators/stale": ["/x y/cpu_adam/lock"]}, RED,
     "cpu_adam", "rm '/x y/cpu_adam/lock'"),
    ("locks", {"operators/locks": ["/x/cpu_adam/lock"]}, GREEN, "1", ""),
    ("compiler", {"tools/compiler": None, "tools/compiler_name": "g++-13"}, RED, "g++-13", "apt-get"),
    ("compiler", {"tools/compiler": None, "operators/built": ["cpu_adam"]}, YELLOW, "cpu_adam",
     "g++"),
    ("nvcc", {"tools/nvcc": None}, RED, "", "12"),
    ("nvcc", {"tools/nvcc": None, "operators/built": ["fused_adam"]}, YELLOW, "", "12"),
    ("nvcc", {"tools/nvcc_version": "11.8"}, RED, "11.8", "12.6"),
    ("nvcc", {"tools/nvcc_version": "12.4"}, GREEN, "12.4", ""),
    ("nvcc", {"tools/nvcc_version": "13.1", "torch/cuda": "13.0"}, RED, "refuses", "DS_SKIP_CUDA_CHECK"),
    ("nvcc", {"tools/nvcc_version": "13.1", "torch/cuda": "13.0", "operators/built": ["a"]}, YELLOW, "refuses", "13.0"),
    ("nvcc", {"tools/nvcc_version": None}, GREY, "", ""),
    ("nvcc", CPU, GREY, "", ""),
    ("ninja", {"tools/ninja": None}, RED, "", "pip install ninja"),
    ("headers", {"python/header": None}, RED, "/inc", "python3.11-dev"),
    ("headers", {"python": {"missing": "/venv/bin/python"}}, GREY, "", ""),
    ("libaio", {"tools/libaio": None}, YELLOW, "", "libaio-dev"),
    ("libaio", {"tools/libaio_header": None}, YELLOW, "", "libaio-dev"),
    ("clock", {"clock/time": 1004.0}, YELLOW, "3", "set-ntp"),
    ("clock", {"clock/time": 900.0}, YELLOW, "100", "set-ntp"),
    ("clock", {"clock/time": 1002.4}, GREEN, "", ""),
    ("clock", {"clock/time": 998.0}, GREEN, "", ""),
    ("port", {"port/free": False}, GREY, "", ""),
    ("own-name", {"hostname/resolves_to": ["127.0.1.1"]}, GREEN, "127.0.1.1", ""),
    ("own-name", {"hostname/resolves_to": []}, GREEN, "eth0", ""),
    ("own-name", {"hostname/resolves_to": [], "route/interface": None}, YELLOW, "", "/etc/hosts"),
    ("own-name", {"hostname/resolves_to": ["::1"], "route": None}, YELLOW, "1", "GLOO_SOCKET_IFNAME"),
    ("own-name", {"hostname/resolves_to": [], **SET}, GREEN, "GLOO_SOCKET_IFNAME", ""),
    ("route", {"route/address": None, "route/fault": "can't find the name gpu1"}, YELLOW, "", "DNS"),
    ("route", {"route/fault": "no route to 10.0.0.1"}, RED, "", "ip route add"),
    ("route", {"route/address": "127.0.1.1"}, YELLOW, "", "real address"),
    ("route", {"route/address": "192.168.1.1"}, YELLOW, "192.168.1.1", "--master-addr"),
    ("nccl-interface", TWO_NETS, YELLOW, "eth0", "export NCCL_SOCKET_IFNAME=eth0"),
    ("interface", {**TWO_NETS, "gpus/gpus": []}, GREEN, "eth0", ""),
    ("interface", TWO_NETS, GREEN, "eth0", ""),
    ("nccl-interface", {**TWO_NETS, "variables/NCCL_SOCKET_IFNAME": "eth"}, GREEN, "eth0", ""),
    ("nccl-interface", {"interfaces/br-1": ["10.1.1.1"], "interfaces/eth9": ["fe80::2%eth9"]}, GREEN, "eth0", ""),
    ("interface", {"route/interface": "ens3", "interfaces": {"ens3": ["10.0.0.2"]}}, GREEN, "ens3", ""),
    ("nccl-interface", {"route/interface": "ens3", "interfaces/ens3": ["10.0.0.9"]}, YELLOW, "ens3",
     "export NCCL_SOCKET_IFNAME=eth0,ens3"),
    ("interface", {"variables/GLOO_SOCKET_IFNAME": "eth7"}, RED, "GLOO_SOCKET_IFNAME=eth7", "Unset"),
    ("interface", {"variables/GLOO_SOCKET_IFNAME": "eth"}, RED, "GLOO_SOCKET_IFNAME=eth", "Unset"),
    ("nccl-interface", {"variables/NCCL_SOCKET_IFNAME": "ib,eth"}, GREEN, "eth0", ""),
    ("nccl-interface", {"variables/NCCL_SOCKET_IFNAME": "^docker"}, RED, "lo", "export NCCL_SOCKET_IFNAME=eth0"),
    ("nccl-interface", {"variables/NCCL_SOCKET_IFNAME": "=ib0"}, RED, "ib0", "export NCCL_SOCKET_IFNAME=eth0"),
    ("interface", {"route/interface": None}, GREY, "", ""),
    ("data", {"data/sha256": "00" * 32}, RED, "gpu1", "rsync --checksum gpu1:'/data/a b.jsonl'"),
    ("data", {"data": {"path": "/d", "exists": False}}, RED, "/d", "Copy it"),
    ("data", {"data/sha256": None}, GREEN, "", ""),
    ("data", {"data/sha256": None, "data/ends_sha256": "ee"}, RED, "", "rsync"),
    ("data", {"data/sha256": None, "data/size": 7}, RED, "7", "rsync"),
    ("data", {"data": None}, GREY, "", ""),
    # What is just enough, and just too little.
    ("gpu-free", {"gpus/gpus/1/used_mib": 1024}, GREEN, "", ""),
    ("gpu-free", {"gpus/gpus/1/used_mib": 1025}, YELLOW, "1", "owner"),
    ("ram", {"ram/total": 8 * GIB, "ram/available": 2 * GIB, "slots": 1}, GREEN, "2.0", ""),
    ("ram", {"ram/total": 8 * GIB, "ram/available": 2 * GIB - 1, "slots": 1}, RED, "", "-eo"),
    ("ram", {"ram/total": 8 * GIB, "ram/available": 4 * GIB}, GREEN, "4.0", ""),
    ("ram", {"ram/total": 8 * GIB, "ram/available": 4 * GIB - 1}, YELLOW, "", "-eo"),
    ("shm", {"shm/total": GIB, "shm/free": 256 << 20}, GREEN, "256", ""),
    ("shm", {"shm/total": GIB, "shm/free": (256 << 20) - 1}, YELLOW, "256", "--shm-size"),
    ("shm", {"shm/total": 64 << 20, "shm/free": 64 << 20, "slots": 1}, YELLOW, "64", "--shm-size"),
    ("shm", {"shm/total": 65 << 20, "shm/free": 64 << 20, "slots": 1}, GREEN, "64", ""),
    ("shm", {"shm/total": 64 << 20, "shm/free": 8 << 20}, YELLOW, "8", "--shm-size"),
    ("shm", {"shm/leftover_count": 4, "shm/leftovers": LEFT, "shm/buffers_in_use": 1}, YELLOW, "", "rm /dev"),
    ("shm", {"shm/leftover_count": 5, "shm/leftovers": LEFT, "shm/buffers_in_use": 1}, YELLOW, "", "have ended"),
    ("shm", {**TOO_FULL, "shm/leftover_bytes": (256 - 20) << 20}, RED, "9", "rm /dev"),
    ("shm", {**TOO_FULL, "shm/leftover_bytes": (256 - 21) << 20}, YELLOW, "256", "--shm-size"),
    ("memlock", {"memlock/limit": 65535, "disk/nvme": UNSET}, YELLOW, "63", "limits.conf"),
    ("room", {"disk/folder/free": GIB}, YELLOW, "1.0", "-xh"),
    ("room", {"disk/folder/free": 10 * GIB}, GREEN, "10.0", ""),
    ("room", {"disk/folder/free": 10 * GIB - 1}, YELLOW, "10.0", "-xh"),
    ("room", {"disk/folder/free_inodes": 1000}, GREEN, "", ""),
    ("nvme", {"disk/nvme/free": 10 * GIB}, GREEN, "", ""),
    ("nvcc", {"tools/nvcc_version": "11.7", "torch/cuda": "11.8"}, GREEN, "11.7", ""),
    ("nvcc", {"tools/nvcc_version": "13.0", "torch/cuda": "13.0"}, GREEN, "13.0", ""),
    ("driver", {**NO_GPU, "gpus/on_bus": 4}, RED, "", "modprobe"),
    ("route", {"route/interface": None}, GREEN, "", ""),
    ("kernels", {"packages/liger-kernel": None}, YELLOW, "no liger-kernel: the loss", "pip install liger-kernel"),
    ("kernels", {"packages/flash-attn-4": None}, GREEN, "no flash-attn: torch's", ""),
    ("kernels", {"packages/bitsandbytes": None}, GREEN, "no bitsandbytes: QLoRA", ""),
    ("kernels", {"packages/flash-attn-4": None, "packages/flash-attn": "2.8.3"}, GREEN, "flash-attn 2.8.3", ""),
    ("kernels", NO_GPU, GREY, "no NVIDIA GPU", ""),
    ("numa", {"numa/nodes": 2}, GREY, "beside its GPU", ""),
]  # fmt: skip


@pytest.mark.parametrize(("check", "changes", "colour", "what", "fix"), CASES)
def test_results_for_a_host(check, changes, colour, what, fix):
    found = of(lab(changes=changes), check, 2)
    assert found.colour == colour, found
    assert what in found.what
    assert any(words in found.fix for words in fix.split("|"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_nothing_is_wrong_with_a_good_host(check):
    found = check.results(lab())
    assert len(found) == 3
    assert {result.colour for result in found} <= {GREEN, GREY}
    assert check.about.endswith((".", ")."))


def test_cases_are_of_checks_that_there_are():
    assert {name for name, *_ in CASES} <= {check.name for check in CHECKS}


@pytest.mark.parametrize(("check", "changes", "colour", "what", "fix"), CASES)
def test_every_yellow_and_red_says_what_to_do(check, changes, colour, what, fix):
    for hosts in (lab(changes=changes), lab(count=1, changes=changes, on=1), lab(changes=changes, on=0)):
        found = doctor.examine(hosts)
        assert len(found) == len(hosts) * len(CHECKS)
        for result in found:
            assert result.what
            assert bool(result.fix) == (result.colour in (RED, YELLOW)), result


@pytest.mark.parametrize("fact", probe.FACTS)
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
    assert of(lab(2, TWO_NETS, on=1), "nccl-interface", 1).colour == YELLOW
    everywhere = lab(2, {"interfaces/ib0": ["10.9.0.2"]}, on=0)
    assert [found.colour for found in results(everywhere, "nccl-interface")] == [GREEN] * 2


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
    assert found.colour == RED and "pip install" in found.fix and "deepspeed" in found.fix
    (found,) = results(lab(count=1, changes={"packages/accelerate": None}, on=1), "packages")
    assert found.colour == YELLOW


def test_another_peft_than_the_others_is_worth_a_look():
    hosts = lab(changes={"packages/peft": "0.18.0"}, on=0)
    hosts[1].facts["packages"]["peft"] = "0.15.0"
    (first, odd, last) = results(hosts, "packages")
    assert (first.colour, odd.colour, last.colour) == (GREEN, YELLOW, GREEN)
    assert "peft 0.15.0" in odd.what and "peft==0.18.0" in odd.fix


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
    names = {path.stem for path in folder.glob("*.py")} - {"__init__", "check"}
    assert {group.name for group in doctor.groups()} == names
    orders = [group.order for group in doctor.groups()]
    assert orders == sorted(set(orders))
    assert all(group.checks for group in doctor.groups())
    checks = [check.name for check in CHECKS]
    assert len(set(checks)) == len(checks) >= 20


def test_checks_name_facts_that_there_are():
    known = set(probe.FACTS)
    assert all(set(check.needs) <= known for check in CHECKS)


def test_a_thousand_hosts():
    hosts = lab(1000)
    assert len(doctor.examine(hosts)) == 1000 * len(CHECKS)


def test_results_are_json():
    rows = [vars(SimpleNamespace(**result.__dict__)) for result in doctor.examine(lab())]
    assert json.loads(json.dumps(rows)) == rows


def test_the_commonest():
    assert commonest(["a", "b", "b"]) == "b"
    assert commonest(["a", "b"]) == "a"
