"""What says which devices a job gets, in its combinations, and what comes of it.

A case: its name, variables of the shell, options, and either what CUDA_VISIBLE_DEVICES becomes on each host, in the
order of ranks, or words of the error. The options are the fields of DeviceRequest (`hostfile` is the file's text), and
`launcher` and `check` of ConnectionOptions. It is called on w1, which has four whole GPUs, 0 to 3 (GPU-000-abc,
GPU-111-abc, ...). w2 and w3 have four, too; small has two.
"""

from __future__ import annotations

from typing import Any

CVD = "CUDA_VISIBLE_DEVICES"
LOCAL = "localhost"
TWO = "w1 slots=4\nw2 slots=4\n"
OTHERS = "# our lab\nw2 slots=4\n\nw3 slots=4\n"
HERE = "w1 slots=4\n"
SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "w[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_PER_NODE": "2",
}
SLURM_HERE = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "w1", "SLURM_GPUS_ON_NODE": "2", CVD: "2,3"}

Case = tuple[str, dict[str, str], dict[str, Any], dict[str, str] | list[str]]

ALONE: list[Case] = [
    ("nothing", {}, {}, {LOCAL: "0,1,2,3"}),
    ("gpus", {}, {"gpus": 2}, {LOCAL: "0,1"}),
    ("devices", {}, {"devices": "2,3"}, {LOCAL: "2,3"}),
    ("devices in another order", {}, {"devices": "3,1"}, {LOCAL: "3,1"}),
    ("devices in ranges", {}, {"devices": "2-3,0"}, {LOCAL: "2,3,0"}),
    ("devices of a host that is this one", {}, {"devices": "w1:3,1-2"}, {LOCAL: "3,1,2"}),
    ("devices of localhost", {}, {"devices": "localhost:all"}, {LOCAL: "0,1,2,3"}),
    ("all devices", {}, {"devices": "all"}, {LOCAL: "0,1,2,3"}),
    ("include", {}, {"include": "localhost:3,1"}, {LOCAL: "1,3"}),
    ("include all", {}, {"include": "localhost"}, {LOCAL: "0,1,2,3"}),
    ("exclude", {}, {"exclude": "w1:0,2"}, {LOCAL: "1,3"}),
    ("one node", {}, {"nodes": 1, "gpus": 1}, {LOCAL: "0"}),
    ("visible", {CVD: "2,3"}, {}, {LOCAL: "2,3"}),
    ("visible, ordered", {CVD: "3,0,1"}, {}, {LOCAL: "3,0,1"}),
    ("visible, by UUID", {CVD: "GPU-222-abc,GPU-0"}, {}, {LOCAL: "2,0"}),
    ("visible, and what CUDA leaves out", {CVD: "1,-1,2"}, {}, {LOCAL: "1"}),
    ("visible and gpus", {CVD: "3,2,0"}, {"gpus": 2}, {LOCAL: "3,2"}),
    ("visible and devices", {CVD: "2,3"}, {"devices": "3,2"}, {LOCAL: "3,2"}),
    ("visible and all devices", {CVD: "3,2"}, {"devices": "all"}, {LOCAL: "3,2"}),
    ("visible and include", {CVD: "3,1,0"}, {"include": "localhost:0,3"}, {LOCAL: "3,0"}),
    ("visible and include all", {CVD: "3,1"}, {"include": "w1"}, {LOCAL: "3,1"}),
    ("visible and exclude", {CVD: "3,1,0"}, {"exclude": "localhost:1"}, {LOCAL: "3,0"}),
    ("visible and exclude what isn't", {CVD: "3,1"}, {"exclude": "localhost:0"}, {LOCAL: "3,1"}),
]
"""On this machine alone."""

REFUSED: list[Case] = [
    ("too many gpus", {}, {"gpus": 5}, ["--gpus 5", "4 GPUs"]),
    ("a device that isn't there", {}, {"devices": "3,4"}, ["--devices 3,4", "device 4", "0-3"]),
    (
        "a slot that isn't there",
        {},
        {"include": "localhost:4"},
        ["slot 4", "4 slots"],
    ),
    ("more gpus than visible", {CVD: "2,3"}, {"gpus": 3}, ["--gpus 3", f"{CVD}=2,3"]),
    ("a device that is hidden", {CVD: "2,3"}, {"devices": "0,3"}, ["--devices 0,3", f"{CVD}=2,3", "hides"]),
    ("an included slot that is hidden", {CVD: "2"}, {"include": "w1:0,2"}, ["--include w1:0,2", f"{CVD}=2"]),
    ("all that is visible is excluded", {CVD: "2"}, {"exclude": "w1:2"}, ["--exclude w1:2", f"{CVD}=2"]),
    ("nothing visible", {CVD: ""}, {}, [CVD, "no device"]),
    ("nothing visible but some wanted", {CVD: "-1"}, {"devices": "0"}, ["--devices 0", f"{CVD}=-1"]),
    ("visible twice", {CVD: "1,1"}, {}, [f"{CVD}=1,1", "twice"]),
    ("visible, and not there", {CVD: "0,7"}, {"gpus": 1}, [f"{CVD}=0,7", "GPU 7"]),
    ("visible, a UUID of elsewhere", {CVD: "GPU-9"}, {}, ["GPU-9", "GPU-000-abc"]),
    ("visible, a slice of elsewhere", {CVD: "MIG-1"}, {}, ["MIG-1"]),
    ("gpus and devices", {}, {"gpus": 1, "devices": "0"}, ["--devices 0", "--gpus 1"]),
    ("include and exclude", {}, {"include": "w1", "exclude": "w2"}, ["--include w1", "--exclude w2"]),
    ("another host, without a hostfile", {}, {"include": "w2:0"}, ["w2 ", "--hostfile"]),
    ("nodes without hosts", {}, {"nodes": 2}, ["--nodes 2", "--hosts"]),
    ("a launcher without hosts", {}, {"launcher": "pdsh"}, ["--launcher pdsh", "--hosts"]),
    (
        "Slurm's launcher outside of Slurm",
        {},
        {"launcher": "slurm", "hosts": "w2:4"},
        ["--launcher slurm", "salloc"],
    ),
    ("two lists of hosts", {}, {"hostfile": TWO, "hosts": "w2:4"}, ["--hostfile", "--hosts w2:4"]),
    (
        "more slots than GPUs",
        {},
        {"hostfile": "w2 slots=4\n\nsmall slots=4\n"},
        [":3: ", "small", "2 GPUs", "4 slots"],
    ),
    ("more slots than GPUs here", {}, {"hostfile": "w1 slots=8\n"}, [":1: ", "w1", "4 GPUs", "8 slots"]),
    ("a device that the host hasn't", {}, {"devices": "w2:0-4"}, ["w2 ", "slot 4"]),
    ("a host that doesn't answer", {}, {"hosts": "w2:4,dead:4"}, ["dead", "no route", "--no-check"]),
    ("how many are all", {}, {"devices": "w2:all", "check": False}, ["--devices w2:all", "--no-check"]),
    (
        "slots that are all hidden",
        {CVD: "2,3"},
        {"hostfile": "w1 slots=2\nw2 slots=2\n"},
        [f"{CVD}=2,3", "host w1", ":1"],
    ),
    (
        "a device on a host that is hidden",
        {CVD: "0"},
        {"hostfile": TWO, "devices": "w1:1,w2:1"},
        ["--devices w1:1,w2:1", f"{CVD}=0"],
    ),
    ("more GPUs than visible on a host", {CVD: "0"}, {"hostfile": TWO, "gpus": 2}, ["--gpus 2", f"{CVD}=0"]),
    (
        "GPUs here, none there",
        {},
        {"hosts": "w1:2,cpus:2"},
        ["w1 ", "cpus on CPUs", "--exclude cpus"],
    ),
    ("one machine twice", {}, {"hosts": "w1:2,localhost:2"}, ["w1 and localhost", "this machine"]),
    ("more nodes than hosts", {}, {"hosts": "w[1-2]:4", "nodes": 3}, ["--nodes 3", "2 hosts"]),
    ("Slurm: more than it gave", SLURM, {"gpus": 3}, ["--gpus 3", "host w1", "2 slots"]),
    (
        "Slurm: a device beyond",
        SLURM,
        {"devices": "w1:0-2,w2:0"},
        ["w1 ", "slot 2", "Slurm's job 12"],
    ),
    ("Slurm: another host", SLURM, {"include": "w3"}, ["'w3'", "Slurm's job 12"]),
    (
        "Slurm: hosts of others",
        SLURM,
        {"hosts": "w[2-3]:2", "launcher": "slurm"},
        ["w3 ", "--hosts", "Slurm's job 12"],
    ),
    ("Slurm: fewer visible than given", {**SLURM, CVD: "1"}, {}, [f"{CVD}=1", "Slurm's job 12"]),
    (
        "Slurm here: more visible than given",
        {**SLURM_HERE, CVD: "1,2,3"},
        {"gpus": 1},
        ["job 12 has 2", f"{CVD}=1,2,3"],
    ),
    (
        "Slurm here: which they are",
        {**SLURM_HERE, CVD: "0,1,2", "SLURM_JOB_GPUS": "2,3"},
        {},
        [f"export {CVD}=2,3"],
    ),
    ("Slurm here: more than it gave", SLURM_HERE, {"gpus": 3}, ["--gpus 3", f"{CVD}=2,3"]),
]

HOSTS: list[Case] = [
    ("hostfile", {}, {"hostfile": TWO}, {"w1": "0,1,2,3", "w2": "0,1,2,3"}),
    ("hostfile with fewer slots", {}, {"hostfile": "w1 slots=2\nw2 slots=3\n"}, {"w1": "0,1", "w2": "0,1,2"}),
    ("hostfile of this machine", {}, {"hostfile": HERE, "gpus": 1}, {"w1": "0"}),
    ("hostfile of one other", {}, {"hostfile": "w2 slots=2\n"}, {"w2": "0,1"}),
    ("hostfile and gpus", {}, {"hostfile": TWO, "gpus": 2}, {"w1": "0,1", "w2": "0,1"}),
    ("hostfile and nodes", {}, {"hostfile": OTHERS, "nodes": 1}, {"w2": "0,1,2,3"}),
    ("hostfile, nodes and gpus", {}, {"hostfile": TWO, "nodes": 1, "gpus": 2}, {"w1": "0,1"}),
    ("hostfile and include", {}, {"hostfile": TWO, "include": "w2:3,1@w1:0"}, {"w1": "0", "w2": "1,3"}),
    ("hostfile and exclude", {}, {"hostfile": TWO, "exclude": "w1@w2:0,1"}, {"w2": "2,3"}),
    (
        "hostfile and devices",
        {},
        {"hostfile": TWO, "devices": "w2:3,1,w1:all"},
        {"w2": "3,1", "w1": "0,1,2,3"},
    ),
    ("hosts", {}, {"hosts": "w[1-2]:2"}, {"w1": "0,1", "w2": "0,1"}),
    ("hosts with all that they have", {}, {"hosts": "w2,small"}, {"w2": "0,1,2,3", "small": "0,1"}),
    ("devices of hosts", {}, {"devices": "w2:0-1,w3:all"}, {"w2": "0,1", "w3": "0,1,2,3"}),
    ("hosts that are not asked", {}, {"hosts": "a:8,b:8", "gpus": 1, "check": False}, {"a": "0", "b": "0"}),
    ("devices that are not asked for", {}, {"devices": "a:6,2", "check": False}, {"a": "6,2"}),
    ("a hostfile named by a variable", {"DSRUN_HOSTFILE": OTHERS}, {"gpus": 1}, {"w2": "0", "w3": "0"}),
    ("an option before the variable", {"DSRUN_HOSTFILE": OTHERS}, {"hosts": "w1:1"}, {"w1": "0"}),
    ("visible and a hostfile", {CVD: "3,1"}, {"hostfile": TWO}, {"w1": "3,1", "w2": "0,1,2,3"}),
    ("visible and gpus of hosts", {CVD: "3,1"}, {"hostfile": TWO, "gpus": 1}, {"w1": "3", "w2": "0"}),
    ("visible and fewer slots", {CVD: "3,1,0"}, {"hostfile": "w1 slots=2\n"}, {"w1": "1,0"}),
    ("visible and included slots", {CVD: "3,1"}, {"hostfile": TWO, "include": "w1:1,3"}, {"w1": "3,1"}),
    ("visible and excluded hosts", {CVD: "3,1"}, {"hostfile": TWO, "exclude": "w2"}, {"w1": "3,1"}),
    (
        "visible and devices of hosts",
        {CVD: "3,1"},
        {"hostfile": TWO, "devices": "w1:1,3,w2:0"},
        {"w1": "1,3", "w2": "0"},
    ),
    ("visible, not there", {CVD: "3,1"}, {"hostfile": OTHERS}, {"w2": "0,1,2,3", "w3": "0,1,2,3"}),
]

IN_SLURM: list[Case] = [
    ("Slurm's hosts", SLURM, {}, {"w1": "0,1", "w2": "0,1"}),
    ("Slurm's hosts, with its devices here", {**SLURM, CVD: "2,3"}, {}, {"w1": "2,3", "w2": "0,1"}),
    ("Slurm's hosts and gpus", {**SLURM, CVD: "GPU-222,GPU-3"}, {"gpus": 1}, {"w1": "GPU-222", "w2": "0"}),
    ("Slurm's hosts and devices", {**SLURM, CVD: "2,3"}, {"devices": "w2:0,w1:1"}, {"w2": "0", "w1": "3"}),
    ("Slurm's hosts and nodes", SLURM, {"nodes": 1}, {"w1": "0,1"}),
    ("Slurm's hosts and exclude", SLURM, {"exclude": "w1"}, {"w2": "0,1"}),
    ("Slurm's one host", SLURM_HERE, {}, {LOCAL: "2,3"}),
    ("Slurm's one host and devices", SLURM_HERE, {"devices": "3"}, {LOCAL: "3"}),
    ("Slurm, but a hostfile", SLURM, {"hostfile": OTHERS, "gpus": 1}, {"w2": "0", "w3": "0"}),
    ("Slurm before the variable", {**SLURM, "DSRUN_HOSTFILE": OTHERS}, {"gpus": 1}, {"w1": "0", "w2": "0"}),
]

CASES = [*ALONE, *REFUSED, *HOSTS, *IN_SLURM]
