"""What a host has, as one line of JSON on stdout. This file is sent to hosts, and run there by their python3.

So it needs nothing but Python's own library, from 3.8 on, and of dsrun the modules of dsrun/host/ that are sent with it
(SHARED). What few facts need is imported for them. A method of Probe that is called fact_NAME is a fact. Each is
gathered by itself: one that can't be had is {"error": why}, and the others are kept. Secrets are named, never shown.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from dsrun.host.hiding import is_secret, shown
from dsrun.host.locks import NO_FLOCK
from dsrun.host.memory import cgroup_folders, first_number, host_ram, oom_kills, text_of

OPTIONS = "{}"
"""What whoever sends this file asks for (script): python, environ, cwd, cache, nvme, data, master, port, seconds,
hashing_seconds, import_torch."""
VERSION = 1
PACKAGES = (
    "torch", "deepspeed", "transformers", "accelerate", "dsrun", "peft", "trl", "numpy", "pydantic", "triton",
    "bitsandbytes", "flash-attn", "liger-kernel",
)  # fmt: skip
VARIABLES = (
    "CUDA_", "NVIDIA_VISIBLE", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "DS_", "DSRUN_", "DLTS_", "OMP_", "MASTER_",
    "LOCAL_", "WORLD_SIZE", "RANK", "HF_", "HUGGING", "WANDB_", "LD_LIBRARY_PATH", "PYTHONPATH", "KMP_", "CXX",
    "SLURM_JOB_ID",
)  # fmt: skip
SHM = Path("/dev/shm")  # noqa: S108  (POSIX shared memory is there, for everybody)
BUFFERS = "deepspeed_allreduce_buffer_"
"""How DeepSpeed's collective for CPU ranks calls its files (csrc/cpu/comm/shm.cpp); nothing removes them."""
DRIVER = Path("/proc/driver/nvidia")
CUDA = "/usr/local/cuda"
"""Where CUDA is looked for when no variable says so."""
EDGE = 1 << 20
"""Bytes at each end of a large file that are always hashed."""
ASKING = """
import json, sys, sysconfig
print(json.dumps({"version": sys.version, "prefix": sys.prefix, "path": sys.path, "executable": sys.executable,
                  "include": sysconfig.get_paths()["include"], "platinclude": sysconfig.get_paths()["platinclude"]}))
"""


def torch_build(path: Any) -> Any:
    """What torch's version.py on that path says; nothing is imported. cpu_build: None where there is no torch."""
    for folder in path:
        if text := text_of(Path(folder, "torch", "version.py")):
            found = re.search(r"^cuda(?:\s*:[^=]*)?\s*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
            return {"cuda": found.group(1) if found else None, "cpu_build": found is None}
    return {"cuda": None, "cpu_build": None}


class Probe:
    """One look at this host. options: see OPTIONS; all may be left out."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.environ: dict[str, str] = {**os.environ, **options.get("environ", {})}
        self.wanted_python = str(options.get("python") or sys.executable)

    @cached_property
    def python(self) -> dict[str, Any]:
        """What the job's Python says of itself (ASKING)."""
        if not Path(self.wanted_python).is_file():
            raise OSError("the Python of the job is not there")
        found: dict[str, Any] = json.loads(_run(self.wanted_python, "-c", ASKING, environ=self.environ))
        found["path"] = [folder for folder in found["path"] if folder]
        return found

    @cached_property
    def cache(self) -> Path:
        """dsrun's cache folder, as dsrun finds it on this host."""
        base = self.environ.get("XDG_CACHE_HOME") or "~/.cache"
        given = self.options.get("cache") or self.environ.get("DSRUN_CACHE") or f"{base}/dsrun"
        return Path(given).expanduser().absolute()

    def package(self, name: str) -> str | None:
        """A package's version, from what pip wrote beside it; None where it isn't installed."""
        import importlib.metadata  # slow

        path = self.python["path"]
        for distribution in importlib.metadata.Distribution.discover(name=name, path=path):
            return str(distribution.metadata["Version"])
        for folder in path:  # a bare checkout on PYTHONPATH
            text = text_of(Path(folder, name, "__init__.py"))
            if found := re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE):
                return found.group(1)
        return None

    def fact_hostname(self) -> Any:
        import socket

        name = socket.gethostname()
        try:
            resolved = sorted({str(row[4][0]) for row in socket.getaddrinfo(name, None)})
        except OSError:
            resolved = []
        return {"name": name, "resolves_to": resolved, "user": os.getuid(), "kernel": platform.release()}

    def fact_python(self) -> Any:
        """The Python that runs the job: the launcher starts the same path on every host."""
        if not Path(self.wanted_python).is_file():
            return {"missing": self.wanted_python, "probed_by": sys.executable}
        found = self.python
        headers = (Path(found[name], "Python.h") for name in ("include", "platinclude"))
        return {
            "version": found["version"].split()[0],
            "executable": self.wanted_python,
            "prefix": found["prefix"],
            "header": next((str(header) for header in headers if header.is_file()), None),
            "include": found["include"],
        }

    def fact_packages(self) -> Any:
        return {name: self.package(name) for name in PACKAGES}

    def fact_torch(self) -> Any:
        """torch's CUDA version, read and not asked: importing torch takes seconds, and a GPU's memory."""
        return torch_build(self.python["path"])

    def fact_architectures(self) -> Any:
        """What torch itself says it has code for (sm_80, compute_90): builds of NVIDIA's and of one's own differ.

        Importing torch takes seconds, so that it is done where somebody asks for it, and there are GPUs.
        """
        if not (
            self.options.get("import_torch") and shutil.which("nvidia-smi") and self.fact_torch()["cuda"]
        ):
            return {"asked": False}
        # As torch.cuda.get_arch_list has them, which says nothing where the driver doesn't work.
        flags = "import torch; print(getattr(torch._C, '_cuda_getArchFlags', str)())"
        seconds = max(5.0, float(self.options.get("seconds") or 30) / 2)
        return {
            "asked": True,
            "flags": _run(self.wanted_python, "-c", flags, seconds=seconds, environ=self.environ).split(),
        }

    def fact_gpus(self) -> Any:
        """NVIDIA's GPUs as nvidia-smi shows them; on_bus: how many the PCI bus has, whether the driver works or not."""
        found: dict[str, Any] = {"driver": None, "gpus": [], "processes": [], "on_bus": _on_bus()}
        if not shutil.which("nvidia-smi"):
            return {**found, "tool": False}
        fields = "--query-gpu=index,name,uuid,memory.total,memory.used,driver_version"
        try:
            rows = _nvidia_smi(fields + ",compute_cap")
        except OSError as error:
            if "compute_cap" not in str(error):  # drivers before 510 don't know it
                return {**found, "tool": True, "fault": str(error)}
            rows = _nvidia_smi(fields)
        for index, name, uuid, total, used, driver, *capability in rows:
            found["driver"] = driver
            found["gpus"].append(
                {
                    "index": int(index),
                    "name": name,
                    "uuid": uuid,
                    "total_mib": _number(total),
                    "used_mib": _number(used),
                    "compute_capability": next((one for one in capability if _number(one) is not None), None),
                }
            )
        found["processes"] = [
            {"uuid": uuid, "pid": _number(pid), "used_mib": _number(used), "name": name, "user": _owner(pid)}
            for uuid, pid, used, name, *_ in _nvidia_smi("--query-compute-apps=gpu_uuid,pid,used_memory,name")
        ]
        return {**found, "tool": True}

    def fact_gpu_health(self) -> Any:
        """What the driver counts of each GPU's faults; None: the GPU or the driver doesn't say."""
        if not shutil.which("nvidia-smi"):
            return {"gpus": []}
        from xml.etree import ElementTree as Tree

        log = Tree.fromstring(_run("nvidia-smi", "-q", "-x", seconds=25))  # noqa: S314  (the driver's own words)
        return {"gpus": [_health(gpu, index) for index, gpu in enumerate(log.iter("gpu"))]}

    def fact_kernel_log(self) -> Any:
        """NVIDIA's faults (Xid) since the machine has started; many systems show the log to root only."""
        if not shutil.which("dmesg"):
            return {"unreadable": "no dmesg"}
        try:
            text = _run("dmesg")
        except OSError as error:
            return {"unreadable": str(error)[-120:]}
        now, found = float(text_of("/proc/uptime").split()[0]), {}
        for line in XID.finditer(text):
            found[line["bus"], int(line["xid"])] = {
                "bus": line["bus"],
                "xid": int(line["xid"]),
                "hours_ago": round((now - float(line["at"])) / 3600, 1),
            }
        return {"xids": list(found.values())}

    def fact_limits(self) -> Any:
        """What a process may have, None: no limit; and what Slurm gave, where it did."""
        asked = {"open_files": resource.RLIMIT_NOFILE, "processes": resource.RLIMIT_NPROC}
        found = {name: resource.getrlimit(limit) for name, limit in asked.items()}
        unlimited = resource.RLIM_INFINITY
        pids = [first_number(folder, "pids.max") for folder in cgroup_folders(controller="pids")]
        return {
            **{name: None if soft == unlimited else soft for name, (soft, _) in found.items()},
            **{f"{name}_hard": None if hard == unlimited else hard for name, (_, hard) in found.items()},
            "cgroup_processes": min((count for count in pids if count is not None), default=None),
            "slurm": self._slurm(),
        }

    def _slurm(self) -> Any:
        """The job's end (seconds since 1970) and memory (MiB a node or a CPU); None outside of Slurm's jobs."""
        if not self.environ.get("SLURM_JOB_ID"):
            return None
        names = {
            "end": "SLURM_JOB_END_TIME",
            "node_mib": "SLURM_MEM_PER_NODE",
            "cpu_mib": "SLURM_MEM_PER_CPU",
        }
        found = {name: _number(self.environ.get(variable, "")) for name, variable in names.items()}
        return {"job": self.environ["SLURM_JOB_ID"], **found}

    def fact_quota(self) -> Any:
        """The user's own limits on the working folder's file system, KiB and files; tool: None where none tells."""
        folder = Path(self.options.get("cwd") or str(Path.cwd()))
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        kind = _file_system(folder) or ""
        if kind == "lustre" and shutil.which("lfs"):
            text = _run("lfs", "quota", "-q", "-u", str(os.getuid()), str(folder))
            return {"tool": "lfs", "file_system": kind, **_quota(text)}
        if shutil.which("quota"):
            # Ends with 1 where a limit is passed: its words count.
            done = subprocess.run(
                ["quota", "-w", "-p", "-v", "-f", str(folder)], capture_output=True, timeout=10, check=False, cwd="/",
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
            return {"tool": "quota", "file_system": kind, **_quota(done.stdout.decode(errors="replace"))}
        return {"tool": None, "file_system": kind}

    def fact_ram(self) -> Any:
        """Bytes: the machine's, or the tightest cgroup's on the way up from this process's own."""
        return {**host_ram()._asdict(), "cpus": len(os.sched_getaffinity(0)), "oom_kills": oom_kills()}

    def fact_shm(self) -> Any:
        """leftovers: DeepSpeed's buffers of this user that no process has open or mapped."""
        space, user = os.statvfs(SHM), os.getuid()
        mine, others = [], 0
        for entry in SHM.iterdir():
            try:
                owned = entry.lstat().st_uid == user
            except OSError:
                continue
            mine += [entry] if owned else []
            others += not owned
        buffers = sorted(entry for entry in mine if entry.name.startswith(BUFFERS))
        used = _mapped() if buffers else set()
        left = [entry for entry in buffers if str(entry) not in used]
        return {
            "total": space.f_blocks * space.f_frsize,
            "free": space.f_bavail * space.f_frsize,
            "own_entries": len(mine),
            "other_entries": others,
            "user": user,
            "buffers_in_use": len(buffers) - len(left),
            "leftover_count": len(left),
            "leftovers": [str(entry) for entry in left[:20]],
            "leftover_bytes": sum(_size(entry) for entry in left),
        }

    def fact_memlock(self) -> Any:
        """Bytes that a process may lock in memory; None: no limit. InfiniBand and NVMe buffers are locked."""
        soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        cards = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
        return {"limit": None if soft == resource.RLIM_INFINITY else soft, "infiniband": cards}

    def fact_disk(self) -> Any:
        """Space where the job writes. A folder that isn't there yet: of the nearest one above it."""
        folders = {
            "folder": self.options.get("cwd") or str(Path.cwd()),
            "cache": self.options.get("cache") or self.cache,
            "nvme": self.options.get("nvme"),
            "data": self.options.get("data"),
        }
        found = {name: _space(Path(given).expanduser()) for name, given in folders.items() if given}
        found["folder"]["lock"] = _lock(Path(found["folder"]["path"]))
        return found

    def fact_port(self) -> Any:
        """Whether somebody listens on the port where ranks meet, tried as torch's TCPStore does."""
        import socket

        port = self.options.get("port") or 29500
        try:
            probe = socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET)
        except OSError:
            probe = socket.socket()
        with probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if probe.family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            try:
                probe.bind(("", port))
                free = True
            except OSError:
                free = False
        return {"port": port, "free": free, "asked": bool(self.options.get("port"))}

    def fact_tools(self) -> Any:
        """What compiling DeepSpeed's operators takes."""
        python = vars(self).get("python", {})  # if it was there
        prefix = python.get("prefix", sys.prefix)
        beside = f"{Path(self.wanted_python).parent}:{prefix}/bin"
        roots = [Path("/usr"), Path("/usr/local"), Path(prefix)]
        libraries = [root / kind for root in roots for kind in ("lib", "lib64")]
        libraries += [folder for root in roots for folder in sorted((root / "lib").glob("*-linux-gnu*"))]
        libraries += [Path(folder) for folder in self.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
        compiler, nvcc = self.environ.get("CXX") or "c++", find_nvcc(self.environ)
        return {
            "compiler": shutil.which(compiler),
            "compiler_name": compiler,
            "ninja": shutil.which("ninja") or shutil.which("ninja", path=beside),
            "nvcc": nvcc,
            "nvcc_version": nvcc_version(nvcc) if nvcc else None,
            "numactl": shutil.which("numactl"),
            "libaio_header": _first(root.glob("include/libaio.h") for root in roots),
            "libaio": _first(folder.glob("libaio.so*") for folder in libraries),
        }

    def fact_toolkit(self) -> Any:
        """What of CUDA's toolkit the operators of GPUs are compiled and linked with (see cuda_toolkit)."""
        nvcc = find_nvcc(self.environ)
        if not nvcc:
            return {"home": None}
        compiler = self.environ.get("CXX") or "c++"
        version = None
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            version = int(_run(compiler, "-dumpversion").split(".")[0])
        return {**cuda_toolkit(nvcc, self.environ), "compiler": compiler, "compiler_major": version}

    def fact_fabric(self) -> Any:
        """What NCCL can take between hosts: InfiniBand, RoCE and EFA cards, libraries for them, plug-ins."""
        cards = [_card(path) for path in sorted(Path("/sys/class/infiniband").glob("*"))]
        folders = [Path(folder) for folder in self.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
        folders += [Path(folder) for folder in PLUGIN_FOLDERS]
        plugins = [str(path) for folder in folders for path in sorted(folder.glob("libnccl-net*.so*"))]
        try:
            known = _run("ldconfig", "-p")
        except (OSError, subprocess.SubprocessError):
            known = ""
        plugins += re.findall(r"=> (\S*libnccl-net\S*)", known)
        verbs = "libibverbs.so.1" in known or any((folder / "libibverbs.so.1").exists() for folder in folders)
        return {
            "cards": cards,
            "plugins": list(dict.fromkeys(plugins)),
            "verbs": True if verbs else None if not known else False,
        }

    def fact_operators(self) -> Any:
        """DeepSpeed's compiled operators, and the locks of builds; stale: those behind which nothing builds.

        builds: what each was compiled for.
        """
        folder = self._operators_folder()
        locks = sorted(folder.glob("*/lock"))
        stale = stale_locks(folder)
        return {
            "folder": str(folder),
            "built": sorted(path.stem for path in folder.glob("*/*.so") if path.stem == path.parent.name),
            "locks": [str(lock) for lock in locks],
            "stale": [str(lock) for lock in stale],
            "oldest_lock_hours": max((round(_age_s(lock) / 3600, 1) for lock in locks), default=None),
            "builds": self._builds(folder),
            "file_system": _file_system(folder),
            "given": bool(self.environ.get("TORCH_EXTENSIONS_DIR")),
        }

    def _builds(self, folder: Path) -> list[dict[str, Any]]:
        """What the operators in a folder were compiled for; own_torch: this Python's."""
        path = self.python["path"]
        torch = next(
            (str(Path(one, "torch")) for one in path if Path(one, "torch", "version.py").is_file()), ""
        )
        found = {file.parent.name: built_for(text_of(file)) for file in sorted(folder.glob("*/build.ninja"))}
        return [
            {
                "name": name,
                "own_torch": Path(made["torch"]).resolve() == Path(torch).resolve(),
                "gpus": made["gpus"],
            }
            for name, made in found.items()
            if made
        ]

    def _operators_folder(self) -> Path:
        """The job's own, or TORCH_EXTENSIONS_DIR."""
        if self.environ.get("TORCH_EXTENSIONS_DIR"):
            return Path(self.environ["TORCH_EXTENSIONS_DIR"]).expanduser().absolute()
        versions = [self.package(name) or "none" for name in ("torch", "deepspeed")]
        return operators_folder(self.cache, self.python["prefix"], self.python["version"], *versions)

    def fact_numa(self) -> Any:
        return {"nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))}

    def fact_data(self) -> Any:
        """The data file's size and sha256. One too large for the time there is: the sha256 of both its ends."""
        import hashlib

        if not self.options.get("data"):
            return None
        path = Path(self.options["data"]).expanduser()
        if not path.is_file():
            return {"path": str(path), "exists": False}
        seconds = self.options.get("hashing_seconds") or self.options.get("seconds", 30) / 2
        until = time.monotonic() + seconds
        whole, ends = hashlib.sha256(), hashlib.sha256()
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            for start in (0, max(0, size - EDGE)):
                file.seek(start)
                ends.update(file.read(EDGE))
            file.seek(0)
            block = b"-"
            while block and time.monotonic() < until:
                block = file.read(1 << 20)
                whole.update(block)
        return {
            "path": str(path),
            "exists": True,
            "size": size,
            "sha256": None if block else whole.hexdigest(),
            "ends_sha256": ends.hexdigest(),
        }

    @cached_property
    def interfaces(self) -> dict[str, list[str]]:
        """Interface -> its addresses."""
        try:
            rows = [line.split() for line in _run("ip", "-o", "addr", "show").splitlines()]
            pairs = [
                (row[1].split("@")[0], row[3].split("/")[0]) for row in rows if row[2] in ("inet", "inet6")
            ]
        except (OSError, IndexError, subprocess.SubprocessError):
            pairs = _from_the_kernel()
        found: dict[str, list[str]] = {}
        for name, address in pairs:
            found.setdefault(name, []).append(address)
        return found

    def fact_interfaces(self) -> Any:
        return self.interfaces

    def fact_route(self) -> Any:
        """The way to the master: its address here, and by which interface and from which address it is reached."""
        import socket

        master = self.options.get("master")
        if not master:
            return None
        try:
            rows = socket.getaddrinfo(master, None, type=socket.SOCK_DGRAM)
        except OSError as error:
            fault = f"can't find the name {master}: {error.strerror or error}"
            return {"master": master, "address": None, "fault": fault}
        rows.sort(key=lambda row: row[0] != socket.AF_INET)
        family, address = rows[0][0], str(rows[0][4][0])
        found = {"master": master, "address": address}
        try:
            words = _run("ip", "route", "get", address).split()
            source = words[words.index("src") + 1] if "src" in words else None
            return {**found, "interface": words[words.index("dev") + 1], "source": source}
        except (OSError, ValueError, subprocess.SubprocessError):
            pass  # no `ip` tool
        try:
            # Connecting a UDP socket sends nothing; the kernel chooses the way.
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))
                source = str(probe.getsockname()[0])
        except OSError as error:
            return {**found, "fault": f"no route to {address}: {error.strerror or error}"}
        names = [name for name, addresses in self.interfaces.items() if source in addresses]
        return {**found, "interface": names[0] if names else None, "source": source}

    def fact_variables(self) -> Any:
        """The variables that a job obeys. Of a secret only that it is set."""
        found = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
        return {name: None if is_secret(name) else value for name, value in sorted(shown(found).items())}

    def fact_clock(self) -> Any:
        """Last: it is compared with the moment at which the answer comes."""
        return {"time": time.time()}


FACTS = tuple(name[len("fact_") :] for name in vars(Probe) if name.startswith("fact_"))


def facts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Every fact. options: see OPTIONS."""
    probe = Probe(options)
    found: dict[str, Any] = {"probe": VERSION}
    for name in FACTS:
        try:
            found[name] = getattr(probe, f"fact_{name}")()
        except Exception as error:  # a fact that can't be had is no reason to lose the others
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    return found


def _run(*words: str, seconds: float = 10.0, environ: Mapping[str, str] | None = None) -> str:
    """A command's stdout; raises where it fails, or takes longer."""
    done = subprocess.run(
        list(words),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=seconds,
        env=None if environ is None else dict(environ),
        check=False,
        cwd="/",  # -c puts the working folder first: a json.py in it would be taken for Python's own
    )
    if done.returncode:
        text = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise OSError(f"{words[0]} ended with {done.returncode}: {text[-300:]}")
    return done.stdout.decode(errors="replace")


def _nvidia_smi(query: str) -> list[list[str]]:
    text = _run("nvidia-smi", query, "--format=csv,noheader,nounits", seconds=20)
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines() if line.strip()]
    return [row for row in rows if len(row) >= 4]


def _number(text: str) -> float | None:
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return None  # [N/A], [Not Supported]


def _owner(pid: str) -> str | None:
    """The name of whoever runs it; None where that can't be seen, as from inside a container."""
    try:
        user = Path("/proc", str(int(pid))).stat().st_uid
    except (OSError, ValueError):
        return None
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def _on_bus() -> int:
    count = 0
    for device in Path("/sys/bus/pci/devices").glob("*"):
        nvidia = text_of(device / "vendor").strip() == "0x10de"
        count += nvidia and text_of(device / "class").startswith(("0x0300", "0x0302"))
    return count


XID = re.compile(r"\[\s*(?P<at>\d+\.\d+)\].*NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F:.]+)\): (?P<xid>\d+)")
SLOWED = ("hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown")
"""The driver's names of why a GPU's clock is held down, as far as somebody should look at it."""
PLUGIN_FOLDERS = (
    "/opt/amazon/ofi-nccl/lib",
    "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu",
    "/opt/aws-ofi-nccl/lib",
)
AMAZON = "0x1d0f"
HEADERS = ("cuda_runtime.h", "cusparse.h", "cublas_v2.h", "cusolverDn.h", "curand.h")
"""What torch's own headers include (ATen/cuda/CUDAContextLight.h), and DeepSpeed's operators."""
LIBRARIES = ("cudart", "curand")
"""What operators are linked with: -lcudart by torch, -lcurand by CPU Adam before DeepSpeed 0.19.8."""


def _health(gpu: Any, index: int) -> dict[str, Any]:
    """A <gpu> of `nvidia-smi -q -x`. Tags differ between drivers, so that they are looked for anywhere in it."""

    def text(*names: str) -> str | None:
        found = (gpu.findtext(f".//{name}") for name in names)
        return next(
            (said.strip() for said in found if said and said.strip() not in ("N/A", "Unknown Error")), None
        )

    def counted(where: str) -> int | None:
        part = gpu.find(f"./ecc_errors/{where}")
        rows = [] if part is None else [row for row in part if "uncorrectable" in row.tag]
        numbers = [int(row.text) for row in rows if (row.text or "").strip().isdigit()]
        return sum(numbers) if numbers else None

    slow = [
        name
        for name in SLOWED
        if text(f"clocks_event_reason_{name}", f"clocks_throttle_reason_{name}") == "Active"
    ]
    widths = [text("current_link_width"), text("max_link_width")]
    return {
        "index": index,
        "name": text("product_name"),
        "uncorrected": counted("volatile"),
        "uncorrected_ever": counted("aggregate"),
        "failed": [name for name in FAILED if text(name) == "Yes"],
        "pending": [name for name in PENDING if text(name) == "Yes"],
        "slowed": slow,
        "width": widths if all(widths) else None,
        "fabric": text("fabric/state"),
    }


FAILED = ("remapped_row_failure", "unrepairable_memory", "sram_threshold_exceeded")
"""The GPU has to be replaced."""
PENDING = (
    "remapped_row_pending",
    "pending_retirement",
    "pending_blacklist",
    "channel_repair_pending",
    "tpc_repair_pending",
)
"""A reset repairs it."""


def _card(path: Path) -> dict[str, Any]:
    port = path / "ports" / "1"
    return {
        "name": path.name,
        "efa": text_of(path / "device" / "vendor").strip() == AMAZON,
        "layer": text_of(port / "link_layer").strip() or None,
        "state": text_of(port / "state").strip().rpartition(" ")[2] or None,
    }


def _quota(text: str) -> dict[str, Any]:
    """The first row of `quota` or `lfs quota`: name, KiB used, quota, limit, grace, files, quota, limit, grace."""
    for line in text.splitlines():
        words = line.replace("*", "").split()
        if len(words) >= 8 and words[1].isdigit():
            numbers = [int(word) if word.isdigit() else 0 for word in words[1:9]]
            used, soft, hard, _, files, files_soft, files_hard = (*numbers, 0)[:7]
            return {
                "kib": used,
                "limit_kib": hard or soft,
                "files": files,
                "limit_files": files_hard or files_soft,
            }
    return {}


def cuda_toolkit(nvcc: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """The headers and libraries of nvcc's toolkit that are not there, and the newest gcc that it takes.

    gcc: the major version, from the toolkit's own host_config.h, which stops the compiler; None where it doesn't say.
    """
    homes = [Path(environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    home = next(iter(homes), Path(nvcc).parent.parent)
    includes = [home / "include", *home.glob("targets/*/include")]
    includes += [Path(folder) for folder in environ.get("CPATH", "").split(":") if folder]
    libraries = [
        home / "lib64",
        home / "lib",
        home / "lib64/stubs",
        *home.glob("targets/*/lib"),
        *SYSTEM_LIBRARIES,
    ]
    libraries += [Path(folder) for folder in environ.get("LIBRARY_PATH", "").split(":") if folder]
    stops = text_of(
        next(
            (folder / "crt/host_config.h" for folder in includes if (folder / "crt/host_config.h").is_file()),
            "",
        )
    )
    newest = re.search(r"__GNUC__ > (\d+)", stops)
    return {
        "home": str(home),
        "no_headers": [name for name in HEADERS if not any((folder / name).is_file() for folder in includes)],
        "no_libraries": [
            name
            for name in LIBRARIES
            if not any((folder / f"lib{name}.{end}").exists() for folder in libraries for end in ("so", "a"))
        ],
        "gcc": int(newest.group(1)) if newest else None,
    }


SYSTEM_LIBRARIES = tuple(
    Path(folder) for folder in ("/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/local/lib")
)


def built_for(ninja: str) -> dict[str, Any]:
    """What an operator was compiled with, from its build.ninja: torch's folder, and GPUs' capabilities ("8.0")."""
    torch = re.search(r"-isystem (\S*/torch)/include(?:\s|$)", ninja)
    if not torch:
        return {}
    gpus = sorted({f"{int(code) // 10}.{int(code) % 10}" for code in re.findall(r"code=sm_(\d+)", ninja)})
    return {"torch": torch.group(1), "gpus": gpus}


def _age_s(path: Path) -> float:
    """Seconds since a file was written; 0 where it is gone by now."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    """Bytes that a file takes; 0 where it is gone by now."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def _mapped() -> set[str]:
    """Every file under /dev/shm that a process, as far as this user may see, maps or has open."""
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        for line in text_of(place / "maps").splitlines():
            if str(SHM) in line:
                found.add(line.split(None, 5)[-1])
        try:
            handles = list((place / "fd").iterdir())
        except OSError:
            continue
        for handle in handles:
            target = _link(handle)
            if target.startswith(str(SHM)):
                found.add(target)
    return found


def _link(path: Path) -> str:
    """Where a link leads; "" where that can't be seen."""
    try:
        return os.readlink(path)  # noqa: PTH115  (Path.readlink is of Python 3.9)
    except OSError:
        return ""


def _space(path: Path) -> dict[str, Any]:
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    space = os.statvfs(place)
    return {
        "path": str(path),
        "exists": path.exists(),
        "is_folder": path.is_dir(),
        "free": space.f_bavail * space.f_frsize,
        "total": space.f_blocks * space.f_frsize,
        "free_inodes": space.f_favail if space.f_files else None,
        "writable": os.access(place, os.W_OK),
        "file_system": _file_system(place),
    }


FLOCK_OF_ONE_HOST = {"localflock", "nolock", "local_lock=flock", "local_lock=all"}
"""Mount options of Lustre and NFS with which a lock is seen on its own host alone (mount.lustre(8), nfs(5))."""


def _lock(path: Path) -> dict[str, Any]:
    """kind: "flock", "lease" where a folder's file system has no flock, "unknown" where nothing can be made in it.
    one_host: the mount option by which other hosts don't see a lock; empty if they do. The file has no name."""
    import tempfile

    place = path.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    try:
        file = tempfile.TemporaryFile(dir=place)  # noqa: SIM115  (closed below)
    except OSError as error:
        return {"kind": "unknown", "why": error.strerror, "one_host": ""}
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            kind = "lease" if error.errno in NO_FLOCK else "unknown"
            return {"kind": kind, "why": error.strerror, "one_host": ""}
    options = _mount(place)[1].split(",")
    return {"kind": "flock", "why": "", "one_host": "".join([*FLOCK_OF_ONE_HOST.intersection(options)][:1])}


def _file_system(path: Path) -> str | None:
    """The kind that a path is on."""
    return _mount(path)[0]


def _mount(path: Path) -> tuple[str | None, str]:
    """A path's file system and its mount options: the mount point that is the longest beginning of the path."""
    real = str(path.resolve())
    best: tuple[str, str | None, str] = ("", None, "")
    for line in text_of("/proc/self/mounts").splitlines():
        words = line.split()
        point = words[1].replace("\\040", " ")
        inside = point in {"/", real} or real.startswith(point + "/")
        if inside and len(point) >= len(best[0]):
            best = (point, words[2], words[3])
    return best[1:]


def find_nvcc(environ: Mapping[str, str]) -> str | None:
    """As torch looks for it (utils/cpp_extension.py): CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda."""
    for home in (environ.get("CUDA_HOME"), environ.get("CUDA_PATH")):
        if home and Path(home, "bin/nvcc").is_file():
            return f"{home}/bin/nvcc"
    usual = Path(CUDA, "bin/nvcc")
    return shutil.which("nvcc") or (str(usual) if usual.is_file() else None)


def nvcc_version(nvcc: str) -> str | None:
    """The release that an nvcc calls itself: "12.6"."""
    try:
        found = re.search(r"release (\d+\.\d+)", _run(nvcc, "--version"))
    except (OSError, subprocess.SubprocessError):
        return None
    return found.group(1) if found else None


def _first(found: Iterable[Iterable[Path]]) -> str | None:
    return next((str(path) for paths in found for path in sorted(paths)), None)


def operators_folder(cache: Path, prefix: str, version: str, torch: str, deepspeed: str) -> Path:
    """Where a Python's compiled operators are. prefix, version: sys.prefix and sys.version.

    Shared by nobody: virtual environments with other versions would overwrite one another's builds, and a build for
    one processor or kind of GPU (they are compiled for the machine's own) dies on another that shares the home folder.
    """
    import hashlib

    identity = "\n".join((prefix, version, _cpu_flags(), torch, deepspeed, *gpu_models()))
    return cache / "torch_extensions" / hashlib.sha256(identity.encode()).hexdigest()[:16]


def driver_version(folder: Path = DRIVER) -> str | None:
    """NVIDIA's driver, as its kernel module says it."""
    found = re.search(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)", text_of(folder / "version"))
    return found.group(1) if found else None


def gpu_models(folder: Path = DRIVER) -> list[str]:
    """The kinds of GPUs of this machine, each once, as the driver's own files name them: no program is asked."""
    texts = (text_of(file) for file in sorted(folder.glob("gpus/*/information")))
    return sorted(
        {
            found.group(1).strip()
            for text in texts
            if (found := re.search(r"^Model:(.*)$", text, re.MULTILINE))
        }
    )


def _cpu_flags() -> str:
    lines = text_of("/proc/cpuinfo").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def stale_locks(folder: Path) -> list[Path]:
    """The `lock` files of the operators in a folder behind which no process of this machine is building."""
    locks = sorted(folder.glob("*/lock"))
    busy = _paths_in_use() if locks else set()
    return [lock for lock in locks if not _is_in_use(lock.parent, busy)]


def _paths_in_use() -> set[str]:
    """Working folders and path arguments of every process: builds (ninja, c++, nvcc) run in the operator's folder."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        found.add(_link(process / "cwd"))
        words = text_of(process / "cmdline").split("\0")
        found.update(word[word.find("/") :] for word in words if "/" in word)
    return found


def _is_in_use(folder: Path, busy: Iterable[str]) -> bool:
    names = {str(folder), str(folder.resolve())}
    return any(path == name or path.startswith(name + "/") for path in busy for name in names)


def _from_the_kernel() -> list[tuple[str, str]]:
    """(interface, address) pairs without the `ip` tool: SIOCGIFCONF for IPv4, /proc for IPv6."""
    import array
    import ctypes
    import socket
    import struct

    space = array.array("B", b"\0" * 16384)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iL", len(space), space.buffer_info()[0])
        size = struct.unpack("iL", fcntl.ioctl(probe.fileno(), 0x8912, request))[0]
    record = 40 if ctypes.sizeof(ctypes.c_void_p) == 8 else 32
    data = space.tobytes()[:size]
    pairs = []
    for start in range(0, size, record):
        name = data[start : start + 16].split(b"\0", 1)[0].decode().split(":")[0]
        pairs.append((name, socket.inet_ntoa(data[start + 20 : start + 24])))
    for line in text_of("/proc/net/if_inet6").splitlines():
        words = line.split()
        pairs.append((words[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0]))))
    return pairs


SHARED = ("hiding", "locks", "memory")
"""Modules of dsrun/host/ that this one imports: they are sent with it."""
UNPACKING = """
for _name, _text in json.loads({texts}).items():
    if _name not in sys.modules:
        sys.modules[_name] = type(sys)(_name)
        exec(compile(_text, _name, "exec"), vars(sys.modules[_name]))
"""


def script(options: Mapping[str, Any]) -> str:
    """What a host's python3 reads from stdin: this file with the options and the modules that it imports in it.

    Only plain ASCII is put in. On the host there is no dsrun: its modules are made there before they are imported.
    """
    text = Path(__file__).read_text(encoding="utf-8")
    folder = Path(__file__).parents[1] / "host"
    shared = {f"dsrun.host.{name}": (folder / f"{name}.py").read_text(encoding="utf-8") for name in SHARED}
    unpacking = UNPACKING.format(texts=ascii(json.dumps(shared)))
    given = "OPTIONS = " + ascii(json.dumps(options))
    for line, put in (
        ("\nfrom dsrun.host", unpacking + "\nfrom dsrun.host"),
        ('\nOPTIONS = "{}"\n', f"\n{given}\n"),
    ):
        if line not in text:
            raise ValueError(f"the line {line.strip()!r} is not there")
        text = text.replace(line, put, 1)
    return text


if __name__ == "__main__":
    print(json.dumps(facts(json.loads(OPTIONS))), flush=True)  # noqa: T201
