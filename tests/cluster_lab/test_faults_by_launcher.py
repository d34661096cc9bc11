"""Every kind of fault under every way to start ranks: the cause that is named, and the rank that failed first.

Rank 1 fails, on the second host where there are two; rank 0 waits, as the ranks of a job do. The scripts are small:
what is tested is what dsrun makes of ends and logs that reached it through launchers, agents and files.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass

import pytest
from runs import DSRUN, Cluster

from dsrun.job.run_folder import rank_log

pytestmark = [pytest.mark.slow, pytest.mark.full]

SCRIPT = """
import os, runpy, sys, time
rank, kind = int(os.environ["RANK"]), sys.argv[-1]
print("step 1", flush=True)
if rank == 1:
    time.sleep(1)
    runpy.run_path(os.path.join(os.path.dirname(os.path.abspath(__file__)), "faults", kind + ".py"))
time.sleep(600)
"""
BY_DEEPSPEED = "import os\nif os.environ.get('NEVER'):\n    import deepspeed\n"
"""Source that asks for DeepSpeed's launcher, and doesn't take its seconds in each rank."""


@dataclass(frozen=True)
class Kind:
    """What rank 1 does, and the message about it."""

    code: str
    cause: str | None
    rank: int | None = 1
    options: tuple[str, ...] = ()


KINDS = {
    "SIGKILL": Kind("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", None),
    "SIGSEGV": Kind("import ctypes; ctypes.string_at(0)", None),
    "import": Kind("import no_such_module_of_ours", "import"),
    "TypeError": Kind("len(7)", "script_error"),
    "KeyError": Kind("{}['peer']", "script_error"),
    "NaN": Kind("raise FloatingPointError('loss is nan at step 3')", "nan"),
    "full disk": Kind("f = open('/dev/full', 'w', buffering=1); f.write('x' * 9999)", "disk_full"),
    "a file that one host lacks": Kind("open('/dev/shm/lab-data.jsonl')", "missing_file"),
    "port in use": Kind(
        "import socket; one = socket.create_server(('', 0)); socket.create_server(one.getsockname())",
        "port_in_use",
    ),
    "another version on one host": Kind("from json import loads_of_a_later_version", "version"),
    "hang": Kind("import time; time.sleep(600)", None, None, ("--hang-timeout", "0.2")),
}
LAUNCHERS = ("local", "local, deepspeed", "local, accelerate", "ssh", "pdsh", "openmpi", "mpich", "srun")


@pytest.fixture(scope="module")
def cluster(lab, environ, tmp_path_factory):
    made = Cluster(lab, environ, tmp_path_factory.mktemp("faults-by-launcher"), ())
    yield made
    made.end()


@pytest.fixture(scope="module")
def scripts(cluster):
    """The folder of the scripts; a file lies on the first host only."""
    folder = cluster.folder
    (folder / "faults").mkdir()
    for name, kind in KINDS.items():
        (folder / "faults" / f"{name}.py").write_text(kind.code)
    (folder / "plain.py").write_text(SCRIPT)
    (folder / "by_deepspeed.py").write_text(BY_DEEPSPEED + textwrap.dedent(SCRIPT))
    accelerate = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_CPU", "use_cpu": True}
    accelerate |= {"num_machines": 1, "num_processes": 2, "machine_rank": 0, "mixed_precision": "no"}
    (folder / "accelerate.yaml").write_text(json.dumps(accelerate))
    (folder / "from_accelerate.py").write_text(
        "import os\nif os.environ.get('NEVER'):\n    from accelerate import Accelerator\n" + SCRIPT
    )
    cluster.lab.hosts[0].run(["touch", "/dev/shm/lab-data.jsonl"])
    return folder


@pytest.fixture(autouse=True)
def _end(cluster):
    yield
    cluster.end()


def started(cluster, scripts, launcher, name, kind, request):
    """dsrun, with a job that fails."""
    ours = ("launch", "--output-dir", cluster.folder / name, "--timeout", "5", *kind.options)
    words = [kind_name for kind_name, one in KINDS.items() if one is kind]
    if launcher.startswith("local"):
        way = launcher.rpartition(", ")[2]
        script = {"local": "plain.py", "deepspeed": "by_deepspeed.py", "accelerate": "from_accelerate.py"}[
            way
        ]
        more = ("--accelerate", scripts / "accelerate.yaml") if way == "accelerate" else ("--gpus", "2")
        return cluster.dsrun(*ours, *more, scripts / script, *words)
    script = scripts / "plain.py"
    if launcher == "srun":
        environ = request.getfixturevalue("slurm").environ
        allocated = ["salloc", "--quiet", "--nodes=2", *DSRUN, *ours, "--gpus", "1", script, *words]
        return cluster.popen(allocated, env=environ)
    where = ("--hostfile", cluster.lab.hostfile(slots=1), "--launcher", launcher)
    return cluster.dsrun(*ours, *where, script, *words)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("name", KINDS)
def test_a_fault(cluster, scripts, request, launcher, name):
    kind = KINDS[name]
    run = f"{launcher}-{name}".replace(" ", "-").replace(",", "")
    done = cluster.finish(started(cluster, scripts, launcher, run, kind, request), run, 400)
    assert done.code not in (0, None)
    assert not done.own_traceback
    record = json.loads(done.read("run.json"))
    assert record["state"] == "failed"
    found = record["diagnosis"]
    # Nobody can tell who sent a SIGKILL; that there was one stands in a line of DeepSpeed's launcher.
    cause = "killed" if (name, launcher) == ("SIGKILL", "local, deepspeed") else kind.cause
    assert (found["cause"], found["rank"]) == (cause, kind.rank), done.err
    if kind.rank is not None:
        assert "rank 1" in done.err
        assert launcher.startswith("local") or "node2" in done.err
    if name == "hang":
        assert "hangs" in done.err
        assert all("Current thread" in done.read(str(rank_log(rank))) for rank in (0, 1))
    cluster.check_nothing_is_left()
