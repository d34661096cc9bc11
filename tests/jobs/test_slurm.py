"""Slurm: the script for sbatch, and what a job reads from its allocation's variables."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dsrun.errors import DsrunError
from dsrun.jobs import slurm
from dsrun.jobs.sites import Site
from dsrun.jobs.slurm import SlurmAllocation, Submission, allocation

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[01-02]"}
ONE = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n01"}

GPUS = [
    # id, variables, GPUs of each host
    ("no GPUs", JOB, None),
    ("gres of every node", {**JOB, "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_GPUS": "0,1,2,3"}, (4, 4)),
    ("only the list", {**JOB, "SLURM_JOB_GPUS": "2,3"}, (2, 2)),
    ("per node", {**JOB, "SLURM_GPUS_PER_NODE": "4"}, (4, 4)),
    ("per node with a type", {**JOB, "SLURM_GPUS_PER_NODE": "a100:4"}, (4, 4)),
    ("per node with two types", {**JOB, "SLURM_GPUS_PER_NODE": "a100:2,v100:1"}, (3, 3)),
    ("gres written out", {**JOB, "SLURM_GPUS_PER_NODE": "gpu:a100:4"}, (4, 4)),
    ("a total, in equal shares", {**JOB, "SLURM_GPUS": "8", "SLURM_GPUS_ON_NODE": "4"}, (4, 4)),
    ("a total, in unequal shares", {**JOB, "SLURM_GPUS": "6", "SLURM_GPUS_ON_NODE": "4"}, None),
    ("per task", {**JOB, "SLURM_GPUS_PER_TASK": "1", "SLURM_TASKS_PER_NODE": "4,2"}, (4, 2)),
    ("per task, the same", {**JOB, "SLURM_GPUS_PER_TASK": "2", "SLURM_TASKS_PER_NODE": "3(x2)"}, (6, 6)),
    ("one node", {**ONE, "SLURM_GPUS_PER_NODE": "2", "SLURM_GPUS_ON_NODE": "2"}, (2,)),
    ("a step of a job per task", {**JOB, "SLURM_STEP_ID": "0", "SLURM_GPUS_PER_TASK": "2"}, None),
    (
        "a step on one of two nodes",
        {**JOB, "SLURM_STEP_ID": "0", "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "2"},
        (2, 2),
    ),
    (
        "a step with fewer",
        {
            **ONE,
            "SLURM_STEP_ID": "0",
            "SLURM_GPUS_PER_NODE": "4",
            "SLURM_GPUS_ON_NODE": "1",
            "SLURM_JOB_GPUS": "0,1,2,3",
            "SLURM_STEP_GPUS": "2",
        },
        (1,),
    ),
]

WRONG = [
    # variables, the variable that is named, words
    ({"SLURM_JOB_ID": "7"}, "SLURM_JOB_NODELIST", "is not set"),
    ({**JOB, "SLURM_JOB_NODELIST": "n[01-"}, "SLURM_JOB_NODELIST", "a [ without ]"),
    ({**JOB, "SLURM_JOB_NODELIST": "n[2-1]"}, "SLURM_JOB_NODELIST", "runs backwards"),
    (
        {**JOB, "SLURM_JOB_NUM_NODES": "3"},
        "SLURM_JOB_NUM_NODES",
        "is 3, but SLURM_JOB_NODELIST=n[01-02] names 2",
    ),
    ({**JOB, "SLURM_NNODES": "1"}, "SLURM_NNODES", "is 1, but"),
    ({**JOB, "SLURM_NNODES": "two"}, "SLURM_NNODES", "no number"),
    ({**JOB, "SLURM_GPUS_PER_NODE": "all"}, "SLURM_GPUS_PER_NODE", "no number of GPUs"),
    ({**JOB, "SLURM_GPUS_ON_NODE": "4,x"}, "SLURM_GPUS_ON_NODE", "no number of GPUs"),
    ({**JOB, "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_GPUS": "0,1"}, "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS=0,1"),
    (
        {**ONE, "SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS_PER_NODE": "2"},
        "SLURM_GPUS_ON_NODE",
        "SLURM_GPUS_PER_NODE",
    ),
    (
        {**JOB, "SLURM_JOB_CPUS_PER_NODE": "8(x3)"},
        "SLURM_JOB_CPUS_PER_NODE",
        "for 3 nodes, and the job has 2",
    ),
    ({**JOB, "SLURM_JOB_CPUS_PER_NODE": "8(x999999999)"}, "SLURM_JOB_CPUS_PER_NODE", "is"),
    ({**JOB, "SLURM_JOB_CPUS_PER_NODE": "8x2"}, "SLURM_JOB_CPUS_PER_NODE", "is '8x2'"),
    ({**JOB, "SLURM_HET_SIZE": "2"}, "SLURM_HET_SIZE", "several components"),
    (
        {**JOB, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"},
        "SLURM_STEP_NUM_TASKS",
        "srun started 8 dsrun",
    ),
]


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_ID": ""}, {"SLURM_CLUSTER_NAME": "x"}])
def test_outside_of_slurm(environ):
    assert allocation(environ) is None


@pytest.mark.parametrize(("environ", "expected"), [row[1:] for row in GPUS], ids=[row[0] for row in GPUS])
def test_gpus_of_each_host(environ, expected):
    found = allocation(environ)
    assert found is not None
    assert found.gpus == expected


@pytest.mark.parametrize(("environ", "variable", "words"), WRONG)
def test_variables_that_are_wrong(environ, variable, words):
    with pytest.raises(DsrunError) as error:
        allocation(environ)
    (problem,) = error.value.problems
    assert problem.where == variable
    assert words in problem.what


def test_all_of_an_allocation():
    environ = {
        **JOB,
        "SLURM_JOB_NODELIST": "gpu[08-10],login",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_JOB_CPUS_PER_NODE": "64(x3),8",
        "SLURM_RESTART_COUNT": "2",
        "DSRUN_REQUEUE": "7",
    }
    assert allocation(environ) == SlurmAllocation(
        job_id="7",
        hosts=("gpu08", "gpu09", "gpu10", "login"),
        gpus=None,
        cpus=(64, 64, 64, 8),
        restarts=2,
        in_step=False,
        requeue=True,
    )


@pytest.mark.parametrize(
    ("step", "inside"),
    [("0", True), ("12", True), ("4294967290", False), ("4294967291", False), ("", False)],
    ids=["srun", "a later srun", "salloc's shell", "batch", "none"],
)
def test_inside_a_step(step, inside):
    found = allocation({**JOB, "SLURM_STEP_ID": step, "SLURM_STEP_NUM_TASKS": "1"})
    assert found is not None
    assert found.in_step is inside


@pytest.mark.parametrize(
    ("lines", "gpus"),
    [
        (["n[01-02] CPU_IDs=0 Mem=16000 GRES=gpu:2(IDX:0-1)"], (2, 2)),
        (["n01 CPU_IDs=0-1 Mem=0 GRES=gpu:2(IDX:0-1)", "n02 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:3)"], (2, 1)),
        (["n[01-02] CPU_IDs=0 Mem=1 GRES=gpu:a100:4(IDX:0-3),gpu:v100:1(IDX:4),nvme:7"], (5, 5)),
        (["n01 CPU_IDs=0 Mem=1 GRES=gpu:1(IDX:0)", "n02 CPU_IDs=0 Mem=1 GRES="], (1, 0)),
        (["n[01-02] CPU_IDs=0 Mem=1 GRES="], None),
        (["n01 CPU_IDs=0 Mem=1 GRES=gpu:1(IDX:0)"], None),
        ([], None),
    ],
)
def test_gpus_as_scontrol_names_them(lines, gpus):
    found = allocation(JOB)
    assert found is not None
    text = "JobId=7 JobName=x\n   NumNodes=2-2 TresPerNode=gres:gpu:2\n"
    text += "".join(f"     Nodes={line}\n" for line in lines) + "   MinCPUsNode=1\n"
    assert slurm.detailed(found, text).gpus == gpus


def test_another_jobs_mark_is_no_mark():
    found = allocation({**JOB, "DSRUN_REQUEUE": "6"})
    assert found is not None
    assert not found.requeue


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
    assert slurm.time_limit_min(text) == minutes
    assert slurm.time_text(minutes) == normal
    assert slurm.time_limit_min(normal) == minutes


@pytest.mark.parametrize(
    "text", ["", "0", "00:00:00", "2h", "-5", "1:2:3:4", "1-", "-", "1.5", "UNLIMITED", "２", "9" * 7, "1\n2"]
)
def test_no_time_limits(text):
    with pytest.raises(DsrunError, match="--time"):
        slurm.time_limit_min(text)


@pytest.fixture
def submission(tmp_path):
    return Submission(
        run_dir=tmp_path / "a run's 50% $HOME `x` 实验",
        command=("finetune", "llama-tiny", "--set", "a=$(touch /tmp/x)"),
        site=Site(time_limit_min=60),
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
    found = options(slurm.script(submission))
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
    site = Site(
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
    text = slurm.script(replace(submission, site=site))
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
    found = options(slurm.script(replace(submission, site=Site(memory_gib=0, gres=""))))
    assert found["mem"] == "0"
    assert "gres" not in found


@pytest.mark.parametrize(("limit", "signal_s"), [(None, 300), (1440, 300), (10, 150), (1, 15)])
def test_a_short_job_is_told_later(limit, signal_s):
    assert slurm.signal_s(Site(time_limit_min=limit)) == signal_s


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"job_name": "a b"}, "--job-name"),
        ({"job_name": "-x"}, "--job-name"),
        ({"job_name": "x\n#SBATCH --uid=0"}, "--job-name"),
        ({"job_name": "x" * 65}, "--job-name"),
        ({"run_dir": Path("/a\\b")}, "Slurm can't write its log here"),
        ({"run_dir": Path("/a\nb")}, "Slurm can't write its log here"),
        ({"site": Site(container=("apptainer", "exec", "x.sif"))}, "srun is not inside"),
        ({"site": Site(signal_s=600, time_limit_min=10)}, "the job would end at once"),
    ],
)
def test_what_can_stand_in_no_script(submission, change, words):
    with pytest.raises(DsrunError, match=words):
        slurm.script(replace(submission, **change))


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
    site = Site(
        setup=("export FROM_SETUP='a  b'",), environment={"NCCL_DEBUG": "it's $HOME"}, time_limit_min=60
    )
    submission = replace(submission, site=site)
    cwd, rest = run(slurm.script(submission), tmp_path, SLURM_JOB_ID="42")
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
    _, rest = run(slurm.script(replace(submission, again=False)), tmp_path, SLURM_JOB_ID="42")
    assert rest == [*expected, *words]


def test_the_cluster_has_had_its_say(submission):
    """Its file may not be found on the node, and its hosts are not the job's."""
    submission = replace(submission, site=Site(setup=("export FROM_SETUP=${DSRUN_CLUSTER-none}",)))
    text = slurm.script(submission)
    assert text.index("FROM_SETUP") < text.index("\nunset DSRUN_CLUSTER\n") < text.index("\nexec ")


def test_modules_are_loaded_before_the_setup(submission):
    site = Site(modules=("cuda/12.4", "gcc/12"), setup=("module list",))
    text = slurm.script(replace(submission, site=site))
    places = [
        text.index(line)
        for line in ("module load cuda/12.4 || exit 1\nmodule load gcc/12", "\nmodule list\n")
    ]
    assert places == sorted(places)


def test_a_module_that_is_not_there_ends_the_job(submission, tmp_path):
    path = tmp_path / "script"
    site = Site(modules=("no-such-module",))
    path.write_text("module() { echo >&2 no; return 1; }\n" + slurm.script(replace(submission, site=site)))
    done = subprocess.run(["/bin/bash", path], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "no\n")


def test_a_container_is_entered_with_its_own_python(submission):
    site = Site(container=("apptainer", "exec", "--nv", "/images/a b.sif"))
    text = slurm.script(replace(submission, site=site, nodes=1))
    assert "exec apptainer exec --nv '/images/a b.sif' python3 -m dsrun finetune" in text
    text = slurm.script(replace(submission, site=replace(site, python="/opt/py"), nodes=1))
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
    submission = replace(submission, run_dir=Path("/x") / name, site=Site(partition="p", constraint="a&b"))
    script = tmp_path / "script"
    script.write_text(slurm.script(submission), encoding="utf-8")
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
