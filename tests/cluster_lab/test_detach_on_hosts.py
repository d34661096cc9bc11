"""--detach of a job on two hosts: it outlives the command and its session, and `dsrun stop` ends it on both."""

from __future__ import annotations

import pytest
from needed import needs

needs("deepspeed")

from lab import wait_for
from runs import Cluster

from dsrun.job.run_folder import describe_state, in_use

pytestmark = pytest.mark.slow

WAITS = "import time\nprint('here', flush=True)\ntime.sleep(600)\n"


@pytest.fixture
def cluster(lab, environ, data, tmp_path):
    made = Cluster(lab, environ, tmp_path, data)
    yield made
    made.end()


def test_a_detached_job_on_two_hosts(cluster):
    (cluster.folder / "waits.py").write_text(WAITS, encoding="utf-8")
    run_dir = cluster.folder / "a night's 夜"
    where = ("--hostfile", cluster.lab.hostfile(slots=1), "--launcher", "ssh")
    begun = cluster.dsrun("launch", *where, "--output-dir", run_dir, "--detach", "waits.py")
    out, err = begun.communicate(timeout=300)
    assert begun.returncode == 0, err
    assert "dsrun stop" in out

    def here() -> bool:
        logs = [run_dir / "logs" / f"rank-{rank}.log" for rank in (0, 1)]
        return all(path.is_file() and "here" in path.read_text() for path in logs)

    assert wait_for(here, 300), "the ranks of both hosts go on"
    assert all(host.running("dsrun.jobs.supervision.rank") for host in cluster.lab.hosts)
    assert in_use(run_dir)
    assert describe_state(run_dir) == "running"
    stopped = cluster.dsrun("stop", run_dir)
    _, err = stopped.communicate(timeout=300)
    assert stopped.returncode == 0, err
    cluster.check_nothing_is_left()
    assert describe_state(run_dir).startswith(("interrupted", "stopped"))
