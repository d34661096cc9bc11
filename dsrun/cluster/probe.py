"""The facts of a host, as one line of JSON on stdout. This file is sent to hosts, and run there by their python3.

It needs nothing but Python's own library, from 3.8 on, and the modules of dsrun/host/ that are sent with it: SHARED. A
method of Probe that is called fact_NAME is a fact. Each is gathered by itself: one that can't be had is
{"error": why}, and the others are kept. Secrets are named, never shown.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from dsrun.host.disks import lock_of, quota_of, room_at, shared_memory
from dsrun.host.gpus import gpu_health, kernel_faults, nvidia_gpus
from dsrun.host.hiding import is_secret, shown
from dsrun.host.memory import cgroup_folders, host_ram, oom_kills
from dsrun.host.network import CARDS, LAUNCHERS_PORT, fabric, interfaces, is_free_port, route_to
from dsrun.host.operators import operators_folder, operators_in
from dsrun.host.system import first_number, number_of, output_of, text_of
from dsrun.host.toolkit import build_tools, torch_build, used_toolkit

OPTIONS = "{}"
"""The options of whoever sends this file (script): python, environ, cwd, cache, nvme, data, master, port, seconds,
hashing_seconds, import_torch."""
VERSION = 1
PACKAGES = (
    "torch", "deepspeed", "transformers", "accelerate", "dsrun", "peft", "trl", "numpy", "pydantic", "triton",
    "bitsandbytes", "flash-attn", "flash-attn-3", "flash-attn-4", "liger-kernel",
    "flash-linear-attention", "causal-conv1d",
)  # fmt: skip
VARIABLES = (
    "CUDA_", "NVIDIA_VISIBLE", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "DS_", "DSRUN_", "DLTS_", "OMP_", "MASTER_",
    "LOCAL_", "WORLD_SIZE", "RANK", "HF_", "HUGGING", "WANDB_", "LD_LIBRARY_PATH", "PYTHONPATH", "KMP_", "CXX",
    "SLURM_JOB_ID",
)  # fmt: skip
EDGE = 1 << 20
"""Bytes at each end of a large file that are always hashed."""
ASKING = """
import json, sys, sysconfig
print(json.dumps({"version": sys.version, "prefix": sys.prefix, "path": sys.path, "executable": sys.executable,
                  "include": sysconfig.get_paths()["include"], "platinclude": sysconfig.get_paths()["platinclude"]}))
"""


class Probe:
    """One look at this host. options: see OPTIONS; all may be left out."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.environ: dict[str, str] = {**os.environ, **options.get("environ", {})}
        self.wanted_python = str(options.get("python") or sys.executable)

    @cached_property
    def python(self) -> dict[str, Any]:
        """The answer of the job's Python to ASKING: its version, prefix, import path and headers."""
        if not Path(self.wanted_python).is_file():
            raise OSError("the Python of the job is not there")
        answer: dict[str, Any] = json.loads(output_of(self.wanted_python, "-c", ASKING, environ=self.environ))
        answer["path"] = [folder for folder in answer["path"] if folder]
        return answer

    @property
    def folder(self) -> Path:
        """The job's working folder."""
        return Path(self.options.get("cwd") or str(Path.cwd()))

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
            if match := re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE):
                return match.group(1)
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
        python = self.python
        headers = (Path(python[name], "Python.h") for name in ("include", "platinclude"))
        return {
            "version": python["version"].split()[0],
            "executable": self.wanted_python,
            "prefix": python["prefix"],
            "header": next((str(header) for header in headers if header.is_file()), None),
            "include": python["include"],
        }

    def fact_packages(self) -> Any:
        return {name: self.package(name) for name in PACKAGES}

    def fact_torch(self) -> Any:
        return torch_build(self.python["path"])

    def fact_architectures(self) -> Any:
        """The GPUs that torch has code for, as it says itself (sm_80, compute_90): NVIDIA's own builds have others.

        Importing torch takes seconds, so that it is done only by request, and where there are GPUs.
        """
        if not (
            self.options.get("import_torch") and shutil.which("nvidia-smi") and self.fact_torch()["cuda"]
        ):
            return {"asked": False}
        # torch.cuda.get_arch_list has the same, but says nothing where the driver doesn't work.
        flags = "import torch; print(getattr(torch._C, '_cuda_getArchFlags', str)())"
        seconds = max(5.0, float(self.options.get("seconds") or 30) / 2)
        return {
            "asked": True,
            "flags": output_of(
                self.wanted_python, "-c", flags, seconds=seconds, environ=self.environ
            ).split(),
        }

    fact_gpus = staticmethod(nvidia_gpus)

    fact_gpu_health = staticmethod(gpu_health)

    fact_kernel_log = staticmethod(kernel_faults)

    def fact_limits(self) -> Any:
        """The limits of a process, None: no limit; and what Slurm gave, where it did."""
        import resource  # which a browser's Python lacks

        kinds = {"open_files": resource.RLIMIT_NOFILE, "processes": resource.RLIMIT_NPROC}
        limits = {
            name: [_limit(number) for number in resource.getrlimit(kind)] for name, kind in kinds.items()
        }
        pids = [first_number(folder, "pids.max") for folder in cgroup_folders(controller="pids")]
        return {
            **{name: soft for name, (soft, _) in limits.items()},
            **{f"{name}_hard": hard for name, (_, hard) in limits.items()},
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
        numbers = {name: number_of(self.environ.get(variable, "")) for name, variable in names.items()}
        return {"job": self.environ["SLURM_JOB_ID"], **numbers}

    def fact_quota(self) -> Any:
        return quota_of(self.folder)

    def fact_ram(self) -> Any:
        return {**host_ram()._asdict(), "cpus": len(os.sched_getaffinity(0)), "oom_kills": oom_kills()}

    fact_shm = staticmethod(shared_memory)

    def fact_memlock(self) -> Any:
        """Bytes that a process may lock in memory; None: no limit. InfiniBand and NVMe buffers are locked."""
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        cards = sorted(path.name for path in CARDS.glob("*"))
        return {"limit": _limit(soft), "infiniband": cards}

    def fact_disk(self) -> Any:
        """The room where the job writes. A folder that isn't there yet has that of the nearest one above it."""
        folders = {
            "folder": self.folder,
            "cache": self.options.get("cache") or self.cache,
            "nvme": self.options.get("nvme"),
            "data": self.options.get("data"),
        }
        rooms = {name: room_at(Path(path).expanduser()) for name, path in folders.items() if path}
        rooms["folder"]["lock"] = lock_of(Path(rooms["folder"]["path"]))
        return rooms

    def fact_port(self) -> Any:
        """Whether the port is free where ranks meet; asked: it was named."""
        port = self.options.get("port") or LAUNCHERS_PORT
        return {"port": port, "free": is_free_port(port), "asked": bool(self.options.get("port"))}

    def fact_tools(self) -> Any:
        # A Python that doesn't answer has been a fault of its own fact: here dsrun's own stands for it.
        prefix = vars(self).get("python", {}).get("prefix", sys.prefix)
        return build_tools(self.environ, prefix, beside=str(Path(self.wanted_python).parent))

    def fact_toolkit(self) -> Any:
        return used_toolkit(self.environ)

    def fact_fabric(self) -> Any:
        return fabric(self.environ)

    def fact_operators(self) -> Any:
        """DeepSpeed's compiled operators in the job's own folder, or in TORCH_EXTENSIONS_DIR (given)."""
        named = self.environ.get("TORCH_EXTENSIONS_DIR")
        if named:
            folder = Path(named).expanduser().absolute()
        else:
            versions = [self.package(name) or "none" for name in ("torch", "deepspeed")]
            folder = operators_folder(self.cache, self.python["prefix"], self.python["version"], *versions)
        return {**operators_in(folder, self.python["path"]), "given": bool(named)}

    def fact_numa(self) -> Any:
        return {"nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))}

    def fact_data(self) -> Any:
        """The data file's size and sha256;
        None where there is no time to read it: then the sha256 of its ends counts."""
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
            # The ends first: hosts whose time runs out in the middle can still be compared by them.
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

    fact_interfaces = staticmethod(interfaces)

    def fact_route(self) -> Any:
        """The way to the master, where the job has one."""
        return route_to(self.options["master"]) if self.options.get("master") else None

    def fact_variables(self) -> Any:
        """The variables that a job obeys. A secret is None: only that it is set is shown."""
        variables = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
        return {name: None if is_secret(name) else value for name, value in sorted(shown(variables).items())}

    def fact_clock(self) -> Any:
        # Last: it is compared with the moment at which the answer comes.
        return {"time": time.time()}


def _limit(number: int) -> int | None:
    import resource

    return None if number == resource.RLIM_INFINITY else number


FACTS = tuple(name[len("fact_") :] for name in vars(Probe) if name.startswith("fact_"))


def facts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Every fact. options: see OPTIONS."""
    probe = Probe(options)
    facts: dict[str, Any] = {"probe": VERSION}
    for name in FACTS:
        try:
            facts[name] = getattr(probe, f"fact_{name}")()
        except Exception as error:  # a fact that can't be had is no reason to lose the others
            facts[name] = {"error": f"{type(error).__name__}: {error}"}
    return facts


SHARED = ("hiding", "locks", "system", "memory", "gpus", "disks", "toolkit", "operators", "network")
"""Modules of dsrun/host/ that are sent with this one; each imports only those before it."""
UNPACKING = """
for _name, _text in json.loads({texts}).items():
    if _name not in sys.modules:
        sys.modules[_name] = type(sys)(_name)
        exec(compile(_text, _name, "exec"), vars(sys.modules[_name]))
"""


def script(options: Mapping[str, Any]) -> str:
    """The program that a host's python3 reads from stdin: this file, with the options and SHARED put in.

    Only plain ASCII is put in, as the host's locale is anybody's. There is no dsrun there: UNPACKING makes its modules
    before the first import looks for them.
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
