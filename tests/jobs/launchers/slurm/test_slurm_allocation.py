"""Slurm: what a job reads from its allocation's variables."""

from __future__ import annotations

import pytest

from dsrun.errors import DsrunError
from dsrun.jobs.launchers.slurm.allocation import SlurmJob, current_job, detailed

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
    ({**JOB, "SLURM_NNODES": "two"}, "SLURM_NNODES", "number"),
    ({**JOB, "SLURM_GPUS_PER_NODE": "all"}, "SLURM_GPUS_PER_NODE", "GPUs"),
    ({**JOB, "SLURM_GPUS_ON_NODE": "4,x"}, "SLURM_GPUS_ON_NODE", "GPUs"),
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
    assert current_job(environ) is None


@pytest.mark.parametrize(("environ", "expected"), [row[1:] for row in GPUS], ids=[row[0] for row in GPUS])
def test_gpus_of_each_host(environ, expected):
    found = current_job(environ)
    assert found is not None
    assert found.gpus == expected


@pytest.mark.parametrize(("environ", "variable", "words"), WRONG)
def test_variables_that_are_wrong(environ, variable, words):
    with pytest.raises(DsrunError) as error:
        current_job(environ)
    (problem,) = error.value.problems
    assert problem.where == variable
    assert words in problem.what


def test_all_of_an_allocation():
    environ = {
        **JOB,
        "SLURM_JOB_NODELIST": "gpu[08-10],login",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_JOB_CPUS_PER_NODE": "64(x3),8",
        "DSRUN_REQUEUE": "7",
    }
    assert current_job(environ) == SlurmJob(
        job_id="7",
        hosts=("gpu08", "gpu09", "gpu10", "login"),
        gpus=None,
        cpus=(64, 64, 64, 8),
        in_step=False,
        requeue=True,
    )


@pytest.mark.parametrize(
    ("step", "inside"),
    [("0", True), ("12", True), ("4294967290", False), ("4294967291", False), ("", False)],
    ids=["srun", "a later srun", "salloc's shell", "batch", "none"],
)
def test_inside_a_step(step, inside):
    found = current_job({**JOB, "SLURM_STEP_ID": step, "SLURM_STEP_NUM_TASKS": "1"})
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
    found = current_job(JOB)
    assert found is not None
    text = "JobId=7 JobName=x\n   NumNodes=2-2 TresPerNode=gres:gpu:2\n"
    text += "".join(f"     Nodes={line}\n" for line in lines) + "   MinCPUsNode=1\n"
    assert detailed(found, text).gpus == gpus


def test_another_jobs_mark_is_no_mark():
    found = current_job({**JOB, "DSRUN_REQUEUE": "6"})
    assert found is not None
    assert not found.requeue
