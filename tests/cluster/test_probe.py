"""The probe's facts about this machine, beside those of other tools; and that it runs on bare hosts."""

from __future__ import annotations

import ast
import errno
import hashlib
import importlib.metadata
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dsrun.cluster import extensions, probe
from dsrun.host import disks, network
from dsrun.host.operators import stale_locks

SOURCE = Path(probe.__file__)
OLD = sorted(
    {
        *(str(path) for path in Path("/usr/bin").glob("python3.[0-9]*[0-9]")),
        *(str(path) for path in Path("~/.pyenv/versions").expanduser().glob("3.*/bin/python3")),
        sys.executable,
    }
)


def run(options, *, python=sys.executable, environ=None, cwd=None):
    """The probe's answer, with the script on stdin, as on a host."""
    done = subprocess.run(
        [python, "-I", "-"],
        input=probe.script(options).encode(),
        capture_output=True,
        check=True,
        env={**os.environ, **(environ or {})},
        cwd=cwd,
    )
    (line,) = done.stdout.decode().splitlines()
    return json.loads(line)


@pytest.fixture(scope="module")
def found():
    return run({"python": sys.executable, "master": "localhost"})


def test_no_fact_is_missing(found):
    assert set(found) == {"probe", *probe.FACTS}
    assert not {name: fact for name, fact in found.items() if isinstance(fact, dict) and "error" in fact}


def test_it_needs_only_pythons_own_library():
    names, shared = set(), {f"dsrun.host.{name}" for name in probe.SHARED}
    for source in (SOURCE, *(SOURCE.parents[1] / "host").glob("*.py")):
        for node in ast.walk(ast.parse(source.read_text(), feature_version=(3, 8))):
            if isinstance(node, ast.Import):
                names |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module not in shared:
                names.add(node.module.partition(".")[0])
    assert names <= sys.stdlib_module_names | {"__future__"}


@pytest.mark.parametrize("python", OLD)
def test_it_runs_on_other_pythons(python):
    code = "import sys; print(*sys.version_info[:2])"
    version = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.split()
    if not version or tuple(map(int, version)) < (3, 8):
        pytest.skip("older than 3.8, or doesn't run")
    found = run({"python": python})
    assert found["python"]["version"].startswith(".".join(version))
    assert not {name for name, fact in found.items() if isinstance(fact, dict) and "error" in fact}


def test_the_host_and_its_python(found):
    assert found["hostname"]["name"] == socket.gethostname()
    assert found["python"]["executable"] == sys.executable
    assert found["python"]["version"] == sys.version.split()[0]
    assert found["python"]["header"] is None or Path(found["python"]["header"]).is_file()


@pytest.mark.parametrize("name", probe.PACKAGES)
def test_packages(found, name):
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = None
    if name == "dsrun" and version is None:
        from dsrun import __version__

        version = __version__ if found["packages"]["dsrun"] else None
    assert found["packages"][name] == version


def test_torchs_cuda(found):
    if not found["packages"]["torch"]:
        pytest.skip("no torch")
    text = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.version.cuda or '')"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert found["torch"] == {"cuda": text or None, "cpu_build": not text}


@pytest.mark.parametrize(
    ("line", "cuda"),
    [
        ("cuda: Optional[str] = '12.6'", "12.6"),
        ("cuda = '11.8'", "11.8"),
        ('cuda: Optional[str] = "13.0"', "13.0"),
        ("cuda: Optional[str] = None", None),
        ("cuda = None", None),
    ],
)
def test_torchs_cuda_as_it_is_written(tmp_path, line, cuda):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(
        f"__version__ = '2.8.0'\ndebug = False\n{line}\nhip = None\n"
    )
    look = probe.Probe({})
    look.python = {"path": [str(tmp_path)]}
    assert look.fact_torch() == {"cuda": cuda, "cpu_build": cuda is None}


def test_memory(found):
    here = psutil.virtual_memory()
    assert found["ram"]["limited"] or found["ram"]["total"] == here.total
    assert found["ram"]["available"] <= found["ram"]["total"] <= here.total
    assert found["ram"]["cpus"] == len(psutil.Process().cpu_affinity())
    assert found["shm"]["total"] == psutil.disk_usage("/dev/shm").total
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert found["memlock"]["limit"] == (None if soft == resource.RLIM_INFINITY else soft)


def test_disks(tmp_path):
    folder = tmp_path / "it's 数据"
    folder.mkdir()
    found = run({"cwd": str(folder), "nvme": str(tmp_path / "no" / "such"), "cache": str(tmp_path)})["disk"]
    assert found["folder"]["is_folder"] and found["folder"]["writable"] and found["folder"]["exists"]
    assert found["folder"]["total"] == psutil.disk_usage(str(folder)).total
    assert not found["nvme"]["is_folder"] and not found["nvme"]["exists"]
    assert found["nvme"]["total"] == found["folder"]["total"]
    kinds = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    assert found["folder"]["file_system"] in kinds.values()
    assert "data" not in found
    assert found["folder"]["lock"] == {"kind": "flock", "why": "", "one_host": ""}
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSYS, "lease"), (errno.ENOLCK, "lease"), (errno.EACCES, "unknown")]
)
def test_a_file_system_without_flock(tmp_path, monkeypatch, number, kind):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disks.fcntl, "flock", flock)
    assert disks.lock_of(tmp_path / "no" / "such") == {
        "kind": kind,
        "why": os.strerror(number),
        "one_host": "",
    }


def test_a_lock_that_is_seen_on_its_own_host_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(disks, "text_of", lambda _: "server:/ / lustre rw,localflock,nosuid 0 0\n")
    assert disks.lock_of(tmp_path)["one_host"] == "localflock"


def addresses_by_interface():
    """{interface: its addresses} of those that have one, by psutil."""
    addresses: dict[str, set[str]] = {}
    for name, rows in psutil.net_if_addrs().items():
        for row in rows:
            if row.family in (socket.AF_INET, socket.AF_INET6):
                addresses.setdefault(name, set()).add(row.address.partition("%")[0])
    return addresses


@pytest.mark.parametrize("tool", ["ip", "no ip"])
def test_addresses_and_the_way_to_the_master(tool, monkeypatch):
    def none(*words, **more):
        raise OSError("no ip here")

    if tool == "no ip":
        monkeypatch.setattr(network, "output_of", none)
    look = probe.Probe({"master": "localhost"})
    before = addresses_by_interface()
    facts = {name: set(addresses) for name, addresses in look.fact_interfaces().items()}
    after = addresses_by_interface()
    # Other programs' bridges and namespaces come and go meanwhile, those of tests/cluster_lab among them.
    still = {name: addresses for name, addresses in before.items() if after.get(name) == addresses}
    assert "lo" in still
    assert {name: addresses for name, addresses in facts.items() if name in still} == still
    assert set(facts) <= set(before) | set(after)
    route = look.fact_route()
    assert route["interface"] == "lo"
    assert route["address"] in ("127.0.0.1", "::1")


def test_a_master_whose_name_leads_nowhere():
    found = probe.Probe({"master": "no-such-host.invalid"}).fact_route()
    assert found["address"] is None and "no-such-host.invalid" in found["fault"]


@pytest.mark.parametrize("kind", [socket.AF_INET, socket.AF_INET6])
def test_a_port_that_is_taken(kind):
    with socket.socket(kind) as other:
        other.bind(("::" if kind == socket.AF_INET6 else "0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        assert probe.Probe({"port": port}).fact_port() == {"port": port, "free": False, "asked": True}
    assert probe.Probe({"port": port}).fact_port()["free"]


def test_the_port_of_the_launcher():
    assert probe.Probe({}).fact_port()["port"] == 29500


def test_operators_are_looked_for_where_jobs_have_them(tmp_path, found):
    cache = str(tmp_path)
    for environ in ({}, {"TORCH_EXTENSIONS_DIR": str(tmp_path / "x")}):
        asked = run({"python": sys.executable, "cache": cache, "environ": environ})
        assert asked["operators"]["folder"] == str(extensions.folder(environ, tmp_path))


@pytest.mark.parametrize(
    "environ", [{"DSRUN_CACHE": "~/a b"}, {"XDG_CACHE_HOME": "/x"}, {"HOME": "/home/li"}]
)
def test_the_cache_is_where_jobs_have_it(environ, monkeypatch):
    from dsrun.data.cache import cache_root

    monkeypatch.delenv("DSRUN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert probe.Probe({}).cache == cache_root()


def test_locks(tmp_path):
    for name in ("cpu_adam", "async_io"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    (tmp_path / "cpu_adam" / "cpu_adam.so").touch()
    builder = subprocess.Popen(["sleep", "60"], cwd=tmp_path / "async_io")
    try:
        found = run({"environ": {"TORCH_EXTENSIONS_DIR": str(tmp_path)}})["operators"]
    finally:
        builder.kill()
        builder.wait()
    assert found["built"] == ["cpu_adam"]
    assert found["locks"] == [str(tmp_path / name / "lock") for name in ("async_io", "cpu_adam")]
    assert found["stale"] == [str(lock) for lock in stale_locks(tmp_path) if "cpu_adam" in str(lock)]
    assert found["stale"] == [str(tmp_path / "cpu_adam" / "lock")]


def test_buffers_that_dead_runs_left():
    mark = f"{disks.BUFFERS}{os.getuid()}_test_{os.getpid()}"
    left, open_one = disks.SHM / f"{mark}_0", disks.SHM / f"{mark}_1"
    before = probe.Probe({}).fact_shm()
    try:
        left.write_bytes(b"x" * 8192)
        with open_one.open("wb") as file:
            file.write(b"x")
            file.flush()
            after = probe.Probe({}).fact_shm()
    finally:
        left.unlink(missing_ok=True)
        open_one.unlink(missing_ok=True)
    assert after["leftover_count"] + after["buffers_in_use"] >= 2
    assert after["buffers_in_use"] >= 1
    assert after["user"] == os.getuid() == before["user"]
    assert str(open_one) not in after["leftovers"]


def test_a_data_file(tmp_path):
    path = tmp_path / "it's 数据.jsonl"
    path.write_bytes(os.urandom(3 << 20))
    found = probe.Probe({"data": str(path)}).fact_data()
    assert found["size"] == 3 << 20
    assert found["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    hurried = probe.Probe({"data": str(path), "seconds": 0}).fact_data()
    assert hurried["sha256"] is None
    assert hurried["ends_sha256"] == found["ends_sha256"]
    assert probe.Probe({"data": str(tmp_path / "none")}).fact_data() == {
        "path": str(tmp_path / "none"),
        "exists": False,
    }
    assert probe.Probe({}).fact_data() is None


def test_secrets_are_named_only():
    found = run(
        {}, environ={"HF_TOKEN": "hf_abcdef", "WANDB_API_KEY": "123", "NCCL_DEBUG": "INFO", "EDITOR": "vi"}
    )
    assert found["variables"]["HF_TOKEN"] is None
    assert found["variables"]["WANDB_API_KEY"] is None
    assert found["variables"]["NCCL_DEBUG"] == "INFO"
    assert "EDITOR" not in found["variables"]
    assert "abcdef" not in json.dumps(found)


def test_what_is_sent_needs_no_dsrun(tmp_path):
    """The modules that the probe imports are in its text."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-"], input=probe.script({"python": "/none"}).encode(), capture_output=True,
        check=True, cwd=tmp_path,
    )  # fmt: skip
    assert json.loads(done.stdout)["ram"] == {
        **json.loads(done.stdout)["ram"],
        **{"cpus": len(os.sched_getaffinity(0))},
    }


def test_the_clock(found):
    assert abs(found["clock"]["time"] - time.time()) < 600


def test_tools(found):
    assert found["tools"]["compiler"] == shutil.which(os.environ.get("CXX") or "c++")
    assert (found["tools"]["nvcc"] is None) == (extensions.nvcc_fault(os.environ) == "no nvcc")


def test_a_python_that_is_not_there():
    found = run({"python": "/no/such/python"})
    assert found["python"]["missing"] == "/no/such/python"
    assert "error" in found["packages"] and "error" not in found["ram"]


@pytest.mark.parametrize("name", ["it's", 'a"b', "a\\b\nc", "数据", "'''", "\x00"])
def test_wishes_travel_as_they_are(name):
    text = probe.script({"data": name})
    spaces = {"__name__": "not main"}
    exec(compile(text, "probe", "exec"), spaces)
    assert json.loads(spaces["OPTIONS"]) == {"data": name}


def test_packages_of_a_checkout(tmp_path):
    (tmp_path / "dsrun").mkdir()
    (tmp_path / "dsrun" / "__init__.py").write_text('"""A checkout."""\n\n__version__ = "9.9.9"\n')
    found = run({"environ": {"PYTHONPATH": str(tmp_path)}})
    try:
        expected = importlib.metadata.version("dsrun")
    except importlib.metadata.PackageNotFoundError:
        expected = "9.9.9"
    assert found["packages"]["dsrun"] == expected


def test_a_file_in_the_working_folder_is_not_taken_for_pythons_own(tmp_path):
    for name in ("json.py", "socket.py", "sysconfig.py"):
        (tmp_path / name).write_text("raise SystemExit(1)\n")
    assert "error" not in run({}, cwd=tmp_path)["python"]


SMI = """#!/bin/sh
case "$1" in
*compute-apps*) echo 'GPU-b, 4242424, 30000, python' ;;
*compute_cap*) %s ;;
*) printf '0, Tesla V100, GPU-a, 32768, 12, 470.57\\n1, Tesla V100, GPU-b, 32768, [N/A], 470.57\\n' ;;
esac
"""
NEW = "printf '0, NVIDIA H200, GPU-b, 143771, 0, 580.95.05, 9.0\\n'"
REFUSES = """echo 'Field "compute_cap" is not a valid field to query.'; exit 2"""


def smi(tmp_path, monkeypatch, text):
    path = tmp_path / "nvidia-smi"
    path.write_text(text)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return probe.Probe({}).fact_gpus()


def test_gpus(tmp_path, monkeypatch):
    found = smi(tmp_path, monkeypatch, SMI % NEW)
    assert found["driver"] == "580.95.05"
    (gpu,) = found["gpus"]
    assert gpu["compute_capability"] == "9.0" and gpu["total_mib"] == 143771
    (process,) = found["processes"]
    assert process == {"uuid": "GPU-b", "pid": 4242424, "used_mib": 30000, "name": "python", "user": None}


def test_gpus_of_a_driver_that_does_not_know_compute_capabilities(tmp_path, monkeypatch):
    found = smi(tmp_path, monkeypatch, SMI % REFUSES)
    assert [gpu["compute_capability"] for gpu in found["gpus"]] == [None, None]
    assert [gpu["used_mib"] for gpu in found["gpus"]] == [12, None]


def test_a_driver_that_does_not_answer(tmp_path, monkeypatch):
    found = smi(tmp_path, monkeypatch, "#!/bin/sh\necho 'NVIDIA-SMI has failed' >&2\nexit 9\n")
    assert found["gpus"] == [] and "NVIDIA-SMI has failed" in found["fault"]


def test_a_fault_in_one_fact_leaves_the_others(monkeypatch):
    def fails(look):
        raise RuntimeError("odd")

    monkeypatch.setattr(probe, "FACTS", ("ram", "numa"))
    monkeypatch.setattr(probe.Probe, "fact_ram", fails)
    monkeypatch.setattr(probe.Probe, "fact_numa", lambda look: 2)
    assert probe.facts({}) == {"probe": 1, "ram": {"error": "RuntimeError: odd"}, "numa": 2}
