"""Slurm: the script for sbatch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dsrun.errors import DsrunError
from dsrun.jobs.launchers.common.cluster_files import ClusterFile
from dsrun.jobs.launchers.common.submission import Submission
from dsrun.jobs.launchers.slurm import batch


@pytest.mark.parametrize(
    ("text", "minutes", "normal"),
    [
        ("90", 90, "01:30:00"),
        ("2:00", 2, "00:02:00"),
        ("0:30", 1, "00:01:00"),
        ("90:01", 91, "01:31:00"),
        ("2:00:00", 120, "02:00:00"),
        ("100:00:00", 6000, "4-04:00:00"),
        ("1-12", 2160, "1-12:00:00"),
        ("0-2", 120, "02:00:00"),
        ("1-02:30", 1590, "1-02:30:00"),
        ("1-00:00:01", 1441, "1-00:01:00"),
        (" 5 ", 5, "00:05:00"),
    ],
)
def test_time_limits(text, minutes, normal):
    assert batch.time_limit_min(text) == minutes
    assert batch.time_text(minutes) == normal
    assert batch.time_limit_min(normal) == minutes


@pytest.mark.parametrize(
    "text", ["", "0", "00:00:00", "2h", "-5", "1:2:3:4", "1-", "-", "1.5", "UNLIMITED", "２", "9" * 7, "1\n2"]
)
def test_no_time_limits(text):
    with pytest.raises(DsrunError, match="--time"):
        batch.time_limit_min(text)


@pytest.fixture
def submission(tmp_path):
    return Submission(
        run_dir=tmp_path / "a run's 50% $HOME `x` 实验",
        command=("finetune", "llama-tiny", "--set", "a=$(touch /tmp/x)"),
        cluster=ClusterFile(time_limit_min=60),
        nodes=2,
        gpus=8,
        job_name="实验-1",
        cwd=tmp_path,
        python="/opt/py thon/bin/python",
    )


def options(text):
    """The #SBATCH lines, as sbatch reads them: with a shell's quotes, up to the first command."""
    import shlex

    found = []
    for line in text.splitlines():
        if line.startswith("#SBATCH "):
            found += shlex.split(line.removeprefix("#SBATCH "))
        elif line and not line.startswith("#"):
            break
    return dict(word.removeprefix("--").partition("=")[::2] for word in found)


def test_the_options(submission):
    found = options(batch.script(submission))
    assert found == {
        "job-name": "实验-1",
        "nodes": "2",
        "ntasks-per-node": "1",
        "gres": "gpu:8",
        "time": "01:00:00",
        "signal": "B:USR1@300",
        "output": f"{submission.run_dir}/logs/slurm-%j.out".replace("50%", "50%%"),
        "open-mode": "append",
        "export": "ALL",
        "requeue": "",
    }


def test_every_option_of_a_site(submission):
    cluster = ClusterFile(
        partition="a,b",
        account="abc@v100",
        qos="q",
        constraint="a100&ib",
        reservation="r",
        signal_s=600,
        requeue=False,
        gres="gpu:a100:{gpus},nvme:1",
        cpus_per_node=64,
        memory_gib=500,
        exclusive=True,
    )
    text = batch.script(replace(submission, cluster=cluster))
    found = options(text)
    assert {name: found[name] for name in ("partition", "account", "qos", "constraint", "reservation")} == {
        "partition": "a,b",
        "account": "abc@v100",
        "qos": "q",
        "constraint": "a100&ib",
        "reservation": "r",
    }
    assert found["gres"] == "gpu:a100:8,nvme:1"
    assert (found["cpus-per-task"], found["mem"], found["signal"]) == ("64", "500G", "B:USR1@600")
    assert {"no-requeue", "exclusive"} <= set(found)
    assert "time" not in found
    assert "export SRUN_CPUS_PER_TASK=64\n" in text
    assert "DSRUN_REQUEUE" not in text


def test_all_memory_and_no_gpus(submission):
    found = options(batch.script(replace(submission, cluster=ClusterFile(memory_gib=0, gres=""))))
    assert found["mem"] == "0"
    assert "gres" not in found


@pytest.mark.parametrize(("limit", "signal_s"), [(None, 300), (1440, 300), (10, 150), (1, 15)])
def test_a_short_job_is_told_later(limit, signal_s):
    assert batch.signal_s(ClusterFile(time_limit_min=limit)) == signal_s


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"job_name": "a b"}, "--job-name"),
        ({"job_name": "-x"}, "--job-name"),
        ({"job_name": "x\n#SBATCH --uid=0"}, "--job-name"),
        ({"job_name": "x" * 65}, "--job-name"),
        ({"run_dir": Path("/a\\b")}, "Slurm can't write its log here"),
        ({"run_dir": Path("/a\nb")}, "Slurm can't write its log here"),
        ({"cluster": ClusterFile(container=("apptainer", "exec", "x.sif"))}, "srun is not inside"),
        ({"cluster": ClusterFile(signal_s=600, time_limit_min=10)}, "the job would end at once"),
    ],
)
def test_what_can_stand_in_no_script(submission, change, words):
    with pytest.raises(DsrunError, match=words):
        batch.script(replace(submission, **change))


def run(text, tmp_path, **environ):
    """Run a script with a Python that says what it got: its arguments, its folder, whether it is the shell itself."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/bash\nprintf "%s\\n" "$PWD" "$$" "$DSRUN_REQUEUE" "$NCCL_DEBUG" "$FROM_SETUP" "$@"\n'
    )
    python.chmod(0o755)
    path = tmp_path / "script"
    path.write_text(text.replace("'/opt/py thon/bin/python'", f"'{python}'"), encoding="utf-8")
    with subprocess.Popen(
        ["/bin/bash", path], stdout=subprocess.PIPE, text=True, cwd="/", env={**os.environ, **environ}
    ) as process:
        out = process.communicate()[0]
    assert process.returncode == 0
    cwd, pid, *rest = out.splitlines()
    assert int(pid) == process.pid, "exec: Slurm's signal goes to this process"
    return cwd, rest


def test_the_script_runs(submission, tmp_path):
    cluster = ClusterFile(
        setup=("export FROM_SETUP='a  b'",), environment={"NCCL_DEBUG": "it's $HOME"}, time_limit_min=60
    )
    submission = replace(submission, cluster=cluster)
    cwd, rest = run(batch.script(submission), tmp_path, SLURM_JOB_ID="42")
    assert cwd == str(tmp_path)
    expected = [
        "42",
        "it's $HOME",
        "a  b",
        "-m",
        "dsrun",
        "finetune",
        "--output-dir",
        str(submission.run_dir),
    ]
    words = ["llama-tiny", "--set", "a=$(touch /tmp/x)"]
    # A job that comes back finds what it began.
    assert rest == [*expected, "--continue", *words]
    _, rest = run(batch.script(replace(submission, again=False)), tmp_path, SLURM_JOB_ID="42")
    assert rest == [*expected, *words]


def test_the_cluster_has_had_its_say(submission):
    """Its file may not be found on the node, and its hosts are not the job's."""
    submission = replace(submission, cluster=ClusterFile(setup=("export FROM_SETUP=${DSRUN_CLUSTER-none}",)))
    text = batch.script(submission)
    assert text.index("FROM_SETUP") < text.index("\nunset DSRUN_CLUSTER\n") < text.index("\nexec ")


def test_modules_are_loaded_before_the_setup(submission):
    cluster = ClusterFile(modules=("cuda/12.4", "gcc/12"), setup=("module list",))
    text = batch.script(replace(submission, cluster=cluster))
    places = [
        text.index(line)
        for line in ("module load cuda/12.4 || exit 1\nmodule load gcc/12", "\nmodule list\n")
    ]
    assert places == sorted(places)


def test_a_module_that_is_not_there_ends_the_job(submission, tmp_path):
    path = tmp_path / "script"
    cluster = ClusterFile(modules=("no-such-module",))
    path.write_text(
        "module() { echo >&2 no; return 1; }\n" + batch.script(replace(submission, cluster=cluster))
    )
    done = subprocess.run(["/bin/bash", path], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "no\n")


def test_a_container_is_entered_with_its_own_python(submission):
    cluster = ClusterFile(container=("apptainer", "exec", "--nv", "/images/a b.sif"))
    text = batch.script(replace(submission, cluster=cluster, nodes=1))
    assert "exec apptainer exec --nv '/images/a b.sif' python3 -m dsrun finetune" in text
    text = batch.script(replace(submission, cluster=replace(cluster, python="/opt/py"), nodes=1))
    assert "a b.sif' /opt/py -m dsrun finetune" in text


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="Slurm is not installed")
@pytest.mark.parametrize(
    "name", ["plain", "a b", "a's  b", 'a"b', "实验 'x'", "a#b", "a #b", "$HOME `x`", "a=b,c;d&e|f", "50% %j"]
)
def test_sbatch_reads_what_was_written(submission, tmp_path, name):
    """The real one prints the options that it found before it looks for its controller, which isn't there."""
    conf = tmp_path / "slurm.conf"
    conf.write_text(
        "ClusterName=x\nSlurmctldHost=localhost\nSlurmctldPort=1\nNodeName=n\nPartitionName=p Nodes=n\n"
    )
    submission = replace(
        submission, run_dir=Path("/x") / name, cluster=ClusterFile(partition="p", constraint="a&b")
    )
    script = tmp_path / "script"
    script.write_text(batch.script(submission), encoding="utf-8")
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
    with subprocess.Popen(
        ["sbatch", "-vv", script],
        env={**environ, "SLURM_CONF": str(conf)},
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    ) as process:
        found = {}
        for line in process.stderr:
            if match := re.match(r"sbatch: (\S+) +: (.*)", line):
                found[match[1]] = match[2]
            if "end of defined options" in line:
                break
        process.kill()
    assert found["output"] == f"/x/{name}/logs/slurm-%j.out".replace(name, name.replace("%", "%%"))
    assert (found["job-name"], found["nodes"], found["partition"]) == ("实验-1", "2", "p")
