"""What a host has, as one line of JSON on stdout. This file is sent to hosts, and run there by their python3.

So it needs nothing but Python's own library, from 3.8 on, and imports nothing of dsrun. Each fact is gathered by
itself: one that can't be is {"error": why}, and the others stand. Secrets are named, never shown.
"""

# ruff: noqa: ARG001  (every fact takes the same two, whether it looks at them or not)

from __future__ import annotations

import array
import ctypes
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Facts = Any  # what json takes

OPTIONS = "{}"
"""The wishes of whoever sends this file (script): python, environ, cwd, cache, nvme, data, master, port, seconds,
hashing_seconds."""
VERSION = 1
PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "dsrun")
VARIABLES = (
    "CUDA_", "NVIDIA_VISIBLE", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "DS_", "DSRUN_", "DLTS_", "OMP_", "MASTER_",
    "LOCAL_", "WORLD_SIZE", "RANK", "HF_", "HUGGING", "WANDB_", "LD_LIBRARY_PATH", "PYTHONPATH", "KMP_", "CXX",
    "SLURM_JOB_ID",
)  # fmt: skip
SECRETS = re.compile("TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
SHM = Path("/dev/shm")  # noqa: S108  (POSIX shared memory is there, for everybody)
BUFFERS = "deepspeed_allreduce_buffer_"
"""How DeepSpeed's collective for CPU ranks calls its files (csrc/cpu/comm/shm.cpp); nothing removes them."""
UNLIMITED = 1 << 60
EDGE = 1 << 20
"""Bytes of both ends of a large file that are always hashed."""
ASKING = """
import json, sys, sysconfig
print(json.dumps({"version": sys.version, "prefix": sys.prefix, "path": sys.path, "executable": sys.executable,
                  "include": sysconfig.get_paths()["include"], "platinclude": sysconfig.get_paths()["platinclude"]}))
"""


def facts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Every fact. options: see OPTIONS; all may be left out."""
    found: dict[str, Any] = {"probe": VERSION}
    shared: dict[str, Any] = {}  # what later facts need of earlier ones
    for name, function in FACTS:
        found[name] = _gathered(function, options, shared)
    return found


def _gathered(function: Any, options: Mapping[str, Any], shared: dict[str, Any]) -> Facts:
    try:
        return function(options, shared)
    except Exception as error:  # a fact that can't be had is no reason to lose the others
        return {"error": f"{type(error).__name__}: {error}"}


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
        said = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise OSError(f"{words[0]} ended with {done.returncode}: {said[-300:]}")
    return done.stdout.decode(errors="replace")


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _environ(options: Mapping[str, Any]) -> dict[str, str]:
    return {**os.environ, **options.get("environ", {})}


def _hostname(options: Mapping[str, Any], shared: dict[str, Any]) -> Facts:
    name = socket.gethostname()
    try:
        resolved = sorted({str(row[4][0]) for row in socket.getaddrinfo(name, None)})
    except OSError:
        resolved = []
    return {"name": name, "resolves_to": resolved, "user": os.getuid(), "kernel": platform.release()}


def _python(options: Mapping[str, Any], shared: dict[str, Any]) -> Facts:
    """The Python that runs the job: the launcher starts the same path on every host."""
    wanted = options.get("python") or sys.executable
    if not Path(wanted).is_file():
        return {"missing": wanted, "probed_by": sys.executable}
    found = json.loads(_run(wanted, "-c", ASKING, environ=_environ(options)))
    found["path"] = [place for place in found["path"] if place]
    shared["python"] = found
    places = [found["include"], found["platinclude"]]
    header = next((f"{place}/Python.h" for place in places if Path(place, "Python.h").is_file()), None)
    return {
        "version": found["version"].split()[0],
        "executable": wanted,
        "prefix": found["prefix"],
        "header": header,
        "include": found["include"],
    }


def _packages(options: Mapping[str, Any], shared: dict[str, Any]) -> Facts:
    """Package -> version, from what pip wrote beside it; None where it isn't installed."""
    return {name: _package(name, _python_of(shared)["path"]) for name in PACKAGES}


def _python_of(shared: Mapping[str, Any]) -> dict[str, Any]:
    if "python" not in shared:
        raise OSError("the Python of the job is not there")
    found: dict[str, Any] = shared["python"]
    return found


def _package(name: str, path: Sequence[str]) -> str | None:
    for distribution in importlib.metadata.Distribution.discover(name=name, path=list(path)):
        return str(distribution.metadata["Version"])
    for place in path:  # a bare checkout on PYTHONPATH
        said = re.search(r'^__version__ = "([^"]+)"', _text(Path(place, name, "__init__.py")), re.MULTILINE)
        if said:
            return said.group(1)
    return None


def _torch(options: Mapping[str, Any], shared: dict[str, Any]) -> Facts:
    """torch's CUDA version, read and not asked: importing torch takes seconds, and a GPU's memory."""
    for place in _python_of(shared)["path"]:
        text = _text(Path(place, "torch", "version.py"))
        if text:
            said = re.search(r"^cuda(?:\s*:[^=]*)?\s*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
            return {"cuda": said.group(1) if said else None, "cpu_build": said is None}
    return {"cuda": None, "cpu_build": None}


def _gpus(options: Mapping[str, Any], shared: dict[str, Any]) -> Facts:
    """NVIDIA's GPUs as nvidia-smi shows them; `on_bus`: how many the PCI bus has, whether the driver works or not."""
    found: dict[str, Any] = {"driver": None, "gpus": [], "processes": [], "on_bus": _on_bus()}
    if not shutil.which("nvidia-smi"):
        return {**found, "tool": False}
    fields = ["index", "name", "uuid", "memory.total", "memory.used", "driver_version", "compute_cap"]
    query = "--query-gpu="
    try:
        rows = _csv(query + ",".join(fields))
    except OSError as error:
        if "compute_cap" not in str(error):  # drivers before 510 don't know it
            return {**found, "tool": True, "fault": str(error)}
        rows = _csv(query + ",".join(fields[:-1]))
    for row in rows:
        index, name, uuid, total, used, driver = row[:6]
        found["driver"] = driver
        found["gpus"].append(
            {
                "index": int(index),
                "name": name,
                "uuid": uuid,
                "total_mib": _number(total),
                "used_mib": _number(used),
                "compute_capability": row[6] if len(row) > 6 and _number(row[6]) is not None else None,
            }
        )
    for uuid, pid, used, name in (
        row[:4] for row in _csv("--query-compute-apps=gpu_uuid,pid,used_memory,name")
    ):
        found["processes"].append(
            {"uuid": uuid, "pid": _number(pid), "used_mib": _number(used), "name": name, "user": _owner(pid)}
        )
    return {**found, "tool": True}


def _csv(query: str) -> list[list[str]]:
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
        nvidia = _text(device / "vendor").strip() == "0x10de"
        count += nvidia and _text(device / "class").startswith(("0x0300", "0x0302"))
    return count


def _ram(options: Mapping[str, Any], shared: dict[str, Any]) -> Facts:
    """Bytes: the machine's, or the tightest cgroup's on the way up from this process's own."""
    rows = dict(line.split(":", 1) for line in _text("/proc/meminfo").splitlines() if ":" in line)
    total, available = (int(rows[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limited = False
    for folder in _cgroups(Path("/sys/fs/cgroup"), _text("/proc/self/cgroup")):
        limit = _first_number(folder, "memory.max", "memory.limit_in_bytes")
        if limit is None or limit >= min(total, UNLIMITED):
            continue
        used = _first_number(folder, "memory.current", "memory.usage_in_bytes") or 0
        stat = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
        cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        total, available, limited = limit, min(available, max(0, limit - max(0, used - cache))), True
    return {"total": total, "available": available, "limited": limited, "cpus": len(os.sched_getaffinity(0))}


def _cgroups(root: Path, text: str) -> list[Path]:
    found = [root, root / "memory"]
    for line in text.splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        place = root / "memory" if controllers else root
        for part in Path(path.lstrip("/")).parts:
            place = place / part
            found.append(place)
    return [folder for folder in found if folder.is_dir()]


def _first_number(folder: Path, *names: str) -> int | None:
    for name in names:
        text = _text(folder / name).strip()
        if text.isdecimal():
            return int(text)
    return None


def _shm(options: Mapping[str, Any], shared: dict[str, Any]) -> Facts:
    """leftovers: DeepSpeed's buffers of this user that no process has open or mapped."""
    room = os.statvfs(SHM)
    mine, others = [], 0
    for entry in SHM.iterdir():
        try:
            owned = entry.lstat().st_uid == os.getuid()
        except OSError:
            continue
        mine += [entry] if owned else []
        others += not owned
    buffers = sorted(entry for entry in mine if entry.name.startswith(BUFFERS))
    used = _mapped() if buffers else set()
    left = [entry for entry in buffers if str(entry) not in used]
    return {
        "total": room.f_blocks * room.f_frsize,
        "free": room.f_bavail * room.f_frsize,
        "own_entries": len(mine),
        "other_entries": others,
        "user": os.getuid(),
        "buffers_in_use": len(buffers) - len(left),
        "leftover_count": len(left),
        "leftovers": [str(entry) for entry in left[:20]],
        "leftover_bytes": sum(_size(entry) for entry in left),
    }


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
        for line in _text(place / "maps").splitlines():
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


def _memlock(options: Mapping[str, Any], shared: dict[str, Any]) -> Facts:
    """Bytes that a process may lock in memory; None: as many as it likes. InfiniBand and NVMe buffers are locked."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    cards = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    return {"limit": None if soft == resource.RLIM_INFINITY else soft, "infiniband": cards}


def _disk(options: Mapping[str, Any], shared: dict[str, Any]) -> Facts:
    """Room where the job writes. A folder that isn't there yet: of the nearest one above it."""
    found = {}
    for name, given in (
        ("folder", options.get("cwd") or str(Path.cwd())),
        ("cache", options.get("cache") or _cache(_environ(options))),
        ("nvme", options.get("nvme")),
        ("data", options.get("data")),
    ):
        if given:
            found[name] = _room(Path(given).expanduser())
    return found


def _cache(environ: Mapping[str, str]) -> Path:
    """As dsrun/jobs/cache.py has it."""
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environ.get("DSRUN_CACHE") or f"{base}/dsrun").expanduser().absolute()


def _room(path: Path) -> Facts:
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    room = os.statvfs(place)
    return {
        "path": str(path),
        "exists": path.exists(),
        "is_folder": path.is_dir(),
        "free": room.f_bavail * room.f_frsize,
        "total": room.f_blocks * room.f_frsize,
        "free_inodes": room.f_favail if room.f_files else None,
        "writable": os.access(place, os.W_OK),
        "file_system": _file_system(place),
    }


def _file_system(path: Path) -> str | None:
    """The kind that a path is on: the mount point that is the longest beginning of it."""
    real = str(path.resolve())
    best: tuple[str, str | None] = ("", None)
    for line in _text("/proc/self/mounts").splitlines():
        words = line.split()
        point = words[1].replace("\\040", " ")
        inside = point in {"/", real} or real.startswith(point + "/")
        if inside and len(point) >= len(best[0]):
            best = (point, words[2])
    return best[1]


def _port(options: Mapping[str, Any], shared: dict[str, Any]) -> Facts:
    """Whether somebody listens on the port where ranks meet, tried as torch's TCPStore does."""
    port = options.get("port") or 29500
    family = socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET
    try:
        probe = socket.socket(family)
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
    return {"port": port, "free": free, "asked": bool(options.get("port"))}


def _tools(options: Mapping[str, Any], shared: dict[str, Any]) -> Facts:
    """What compiling DeepSpeed's operators takes."""
    environ = _environ(options)
    python = shared.get("python", {})
    prefix = python.get("prefix", sys.prefix)
    places = [str(Path(options.get("python") or sys.executable).parent), f"{prefix}/bin"]
    roots = [Path("/usr"), Path("/usr/local"), Path(prefix)]
    libraries = [root / kind for root in roots for kind in ("lib", "lib64")]
    libraries += [folder for root in roots for folder in sorted((root / "lib").glob("*-linux-gnu*"))]
    libraries += [Path(place) for place in environ.get("LD_LIBRARY_PATH", "").split(":") if place]
    nvcc = _nvcc(environ)
    return {
        "compiler": shutil.which(environ.get("CXX") or "c++"),
        "compiler_name": environ.get("CXX") or "c++",
        "ninja": shutil.which("ninja") or shutil.which("ninja", path=":".join(places)),
        "nvcc": nvcc,
        "nvcc_version": _nvcc_version(nvcc) if nvcc else None,
        "numactl": shutil.which("numactl"),
        "libaio_header": _first(root.glob("include/libaio.h") for root in roots),
        "libaio": _first(place.glob("libaio.so*") for place in libraries),
    }


def _nvcc(environ: Mapping[str, str]) -> str | None:
    """As torch looks for it (utils/cpp_extension.py): CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda."""
    for home in (environ.get("CUDA_HOME"), environ.get("CUDA_PATH")):
        if home and Path(home, "bin/nvcc").is_file():
            return f"{home}/bin/nvcc"
    usual = Path("/usr/local/cuda/bin/nvcc")
    return shutil.which("nvcc") or (str(usual) if usual.is_file() else None)


def _nvcc_version(nvcc: str) -> str | None:
    try:
        said = re.search(r"release (\d+\.\d+)", _run(nvcc, "--version"))
    except (OSError, subprocess.SubprocessError):
        return None
    return said.group(1) if said else None


def _first(found: Iterable[Iterable[Path]]) -> str | None:
    return next((str(path) for paths in found for path in sorted(paths)), None)


def _operators(options: Mapping[str, Any], shared: dict[str, Any]) -> Facts:
    """DeepSpeed's compiled operators, and the locks of builds; stale: those behind which nothing builds."""
    folder = _operators_folder(_environ(options), options, shared)
    locks = sorted(folder.glob("*/lock"))
    busy = _places_in_use() if locks else set()
    return {
        "folder": str(folder),
        "built": sorted(path.stem for path in folder.glob("*/*.so") if path.stem == path.parent.name),
        "locks": [str(lock) for lock in locks],
        "stale": [str(lock) for lock in locks if not _building(lock.parent, busy)],
    }


def _operators_folder(
    environ: Mapping[str, str], options: Mapping[str, Any], shared: Mapping[str, Any]
) -> Path:
    """As dsrun/cluster/extensions.py has it, for the job's Python."""
    if environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(environ["TORCH_EXTENSIONS_DIR"]).expanduser().absolute()
    python = _python_of(shared)
    lines = _text("/proc/cpuinfo").splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    identity = [python["prefix"], python["version"], flags]
    identity += [_package(name, python["path"]) or "none" for name in ("torch", "deepspeed")]
    name = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:16]
    return Path(options.get("cache") or _cache(environ)) / "torch_extensions" / name


def _places_in_use() -> set[str]:
    """Working folders and path arguments of every process that can be seen."""
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        found.add(_link(place / "cwd"))
        words = _text(place / "cmdline").split("\0")
        found.update(word[word.find("/") :] for word in words if "/" in word)
    return found


def _building(folder: Path, busy: Iterable[str]) -> bool:
    names = {str(folder), str(folder.resolve())}
    return any(place == name or place.startswith(name + "/") for place in busy for name in names)


def _numa(options: Mapping[str, Any], shared: dict[str, Any]) -> Facts:
    return {"nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))}


def _data(options: Mapping[str, Any], shared: dict[str, Any]) -> Facts:
    """The data file's size and sha256. One too large for the time there is: the sha256 of both its ends."""
    if not options.get("data"):
        return None
    path = Path(options["data"]).expanduser()
    if not path.is_file():
        return {"path": str(path), "exists": False}
    until = time.monotonic() + (options.get("hashing_seconds") or options.get("seconds", 30) / 2)
    whole, ends = hashlib.sha256(), hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        ends.update(file.read(EDGE))
        file.seek(max(0, size - EDGE))
        ends.update(file.read(EDGE))
        file.seek(0)
        done = False
        while time.monotonic() < until:
            block = file.read(1 << 20)
            if not block:
                done = True
                break
            whole.update(block)
    return {
        "path": str(path),
        "exists": True,
        "size": size,
        "sha256": whole.hexdigest() if done else None,
        "ends_sha256": ends.hexdigest(),
    }


def _interfaces(options: Mapping[str, Any], shared: dict[str, Any]) -> Facts:
    """Interface -> its addresses."""
    try:
        rows = [line.split() for line in _run("ip", "-o", "addr", "show").splitlines()]
        pairs = [(row[1].split("@")[0], row[3].split("/")[0]) for row in rows if row[2] in ("inet", "inet6")]
    except (OSError, IndexError, subprocess.SubprocessError):
        pairs = _from_the_kernel()
    found: dict[str, list[str]] = {}
    for name, address in pairs:
        found.setdefault(name, []).append(address)
    shared["interfaces"] = found
    return found


def _from_the_kernel() -> list[tuple[str, str]]:
    """(interface, address) pairs without the `ip` tool: SIOCGIFCONF for IPv4, /proc for IPv6."""
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
    for line in _text("/proc/net/if_inet6").splitlines():
        words = line.split()
        pairs.append((words[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0]))))
    return pairs


def _route(options: Mapping[str, Any], shared: dict[str, Any]) -> Facts:
    """The way to the master: its address here, and by which interface and from which address it is reached."""
    master = options.get("master")
    if not master:
        return None
    try:
        rows = socket.getaddrinfo(master, None, type=socket.SOCK_DGRAM)
    except OSError as error:
        return {
            "master": master,
            "address": None,
            "fault": f"can't find the name {master}: {error.strerror or error}",
        }
    rows.sort(key=lambda row: row[0] != socket.AF_INET)
    family, address = rows[0][0], str(rows[0][4][0])
    try:
        words = _run("ip", "route", "get", address).split()
        found: dict[str, str | None] = {
            "interface": words[words.index("dev") + 1],
            "source": words[words.index("src") + 1] if "src" in words else None,
        }
    except (OSError, ValueError, subprocess.SubprocessError):
        try:
            found = _route_by_udp(family, address, shared.get("interfaces", {}))
        except OSError as error:
            fault = f"no route to {address}: {error.strerror or error}"
            return {"master": master, "address": address, "fault": fault}
    return {"master": master, "address": address, **found}


def _route_by_udp(family: int, address: str, interfaces: Mapping[str, list[str]]) -> dict[str, str | None]:
    """Connecting a UDP socket sends nothing; the kernel chooses the way."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        source = str(probe.getsockname()[0])
    names = [name for name, addresses in interfaces.items() if source in addresses]
    return {"interface": names[0] if names else None, "source": source}


def _variables(options: Mapping[str, Any], shared: dict[str, Any]) -> Facts:
    """The variables that a job hears to. Of a secret only that it is set."""
    found = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
    return {name: None if SECRETS.search(name) else value for name, value in sorted(found.items())}


def _clock(options: Mapping[str, Any], shared: dict[str, Any]) -> Facts:
    return {"time": time.time()}


FACTS = (
    ("hostname", _hostname),
    ("python", _python),
    ("packages", _packages),
    ("torch", _torch),
    ("gpus", _gpus),
    ("ram", _ram),
    ("shm", _shm),
    ("memlock", _memlock),
    ("disk", _disk),
    ("port", _port),
    ("tools", _tools),
    ("operators", _operators),
    ("numa", _numa),
    ("data", _data),
    ("interfaces", _interfaces),
    ("route", _route),
    ("variables", _variables),
    ("clock", _clock),  # last: it is compared with the moment at which the answer comes
)


def script(options: Mapping[str, Any]) -> str:
    """This file's text with the wishes in it: what a host's python3 reads from stdin. Only plain ASCII is put in."""
    text = Path(__file__).read_text(encoding="utf-8")
    line = 'OPTIONS = "{}"\n'
    if text.count("\n" + line) != 1:
        raise ValueError("the line for the options is not there")
    return text.replace("\n" + line, "\nOPTIONS = " + ascii(json.dumps(options)) + "\n")


if __name__ == "__main__":
    print(json.dumps(facts(json.loads(OPTIONS))), flush=True)  # noqa: T201
