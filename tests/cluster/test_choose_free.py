"""GPUs that a job gets on a machine that people share: CUDA_VISIBLE_DEVICES x --gpus x --devices x who uses them."""

from __future__ import annotations

import pytest

from dsrun.cluster.devices import CPU_RANKS, VISIBLE, Gpu, Machine, choose, free_first, notes, visible_devices
from dsrun.cluster.gpu_use import BusyError, GpuProcess, GpuUse, LockHolder
from dsrun.errors import DsrunError

GIB = 2**30
USES = {
    ".": None,  # not asked for
    "f": GpuUse((), GIB // 2),  # free
    "?": GpuUse(),  # NVML knows nothing
    "a": GpuUse((GpuProcess(1234, 20 * GIB, "alice", "python"),), 20 * GIB),
    "m": GpuUse(None, 5 * GIB),  # somebody's, by its memory
    "L": GpuUse(
        (GpuProcess(99, GIB, "bob", "python"),), GIB, LockHolder("bob", 98, "/home/bob/runs/x", "2026-01-02 03:04")
    ),
}  # fmt: skip
ALICE = "is in use: alice's python (pid 1234, 20.0 GiB)"
BOB = "is in use: bob's dsrun (pid 98, since 2026-01-02 03:04, run folder /home/bob/runs/x)"
SOMEBODY = "is in use: 5.0 GiB by processes that can't be seen from here"


def machine(state: str, accelerator: str = "cuda") -> Machine:
    """ "fa.L": four GPUs, free, alice's, unasked, locked."""
    gpus = tuple(
        Gpu(index, "NVIDIA A100", f"GPU-{index}{index}{index}-abc", 80 << 30, (8, 0), use=USES[letter])
        for index, letter in enumerate(state)
    )
    return Machine(accelerator, gpus, 8, "a machine of paper")


def environ(shown: str | None) -> dict[str, str]:
    return {} if shown is None else {VISIBLE: shown}


@pytest.mark.parametrize(
    ("state", "shown", "gpus", "devices", "expected"),
    [
        # --gpus: the free ones, in the order of CUDA_VISIBLE_DEVICES
        ("ffff", None, 2, None, (0, 1)),
        ("afff", None, 1, None, (1,)),
        ("affa", None, 2, None, (1, 2)),
        ("aLmf", None, 1, None, (3,)),
        ("fafa", None, 2, None, (0, 2)),
        ("....", None, 3, None, (0, 1, 2)),
        ("????", None, 4, None, (0, 1, 2, 3)),
        ("a?.f", None, 3, None, (1, 2, 3)),
        ("ffff", "3,1", 1, None, (3,)),
        ("fffa", "3,1", 1, None, (1,)),
        ("fffL", "3,2,0", 2, None, (2, 0)),
        ("afff", "GPU-222,0,1", 2, None, (2, 1)),
        ("afff", "1,2", 2, None, (1, 2)),
        # neither: all that are free
        ("ffff", None, None, None, (0, 1, 2, 3)),
        ("afff", None, None, None, (1, 2, 3)),
        ("aLmf", None, None, None, (3,)),
        ("faff", "3,1,0", None, None, (3, 0)),
        ("aaff", "2,3", None, None, (2, 3)),
        ("?m.L", None, None, None, (0, 2)),
        # --devices: those, if only no dsrun holds one
        ("ffff", None, None, "2,3", (2, 3)),
        ("aamf", None, None, "0-2", (0, 1, 2)),
        ("aaaa", None, None, "3,1", (3, 1)),
        ("Lafa", None, None, "1", (1,)),
        ("afff", "3,0", None, "0", (0,)),
    ],
)
def test_taken(state, shown, gpus, devices, expected):
    assert choose(machine(state), gpus, devices, environ(shown)) == expected


@pytest.mark.parametrize(
    ("state", "shown", "gpus", "devices", "said", "hint"),
    [
        ("affL", None, 3, None, ["--gpus 3: only 2 of 4 GPUs are free", f"GPU 0 {ALICE}", f"GPU 3 {BOB}"], "--gpus 2"),
        ("amLf", None, 2, None, ["--gpus 2: only 1 of 4 GPUs is free", f"GPU 1 {SOMEBODY}"], "--gpus 1"),
        ("aaaa", None, 1, None, ["--gpus 1: no GPU is free", f"GPU 2 {ALICE}"], "--wait"),
        ("aLma", None, None, None, ["no GPU is free", f"GPU 0 {ALICE}", f"GPU 1 {BOB}", f"GPU 2 {SOMEBODY}"], "--wait"),
        ("a", None, None, None, ["no GPU is free"], "--devices 0"),
        ("ffaL", "2,3", 1, None, ["--gpus 1: no GPU is free", f"{VISIBLE}=2,3", f"GPU 2 {ALICE}"], "--devices 2"),
        ("ffaL", "3,0", 2, None, ["--gpus 2: only 1 of 2 GPUs is free (CUDA", f"GPU 3 {BOB}"], "--gpus 1"),
        ("Lafa", None, 2, None, ["--gpus 2: only 1 of 4 GPUs is free"], "--devices 1"),
        ("ffaL", None, None, "3", ["--devices 3", "held by another dsrun: 3", f"GPU 3 {BOB}"], "--wait"),
        ("LfaL", None, None, "0-3", ["held by another dsrun: 0, 3", f"GPU 0 {BOB}", f"GPU 3 {BOB}"], "--wait"),
        ("fffL", "3", None, "3", ["held by another dsrun: 3"], "--wait"),
    ],
)  # fmt: skip
def test_busy(state, shown, gpus, devices, said, hint):
    with pytest.raises(BusyError) as caught:
        choose(machine(state), gpus, devices, environ(shown))
    (problem,) = caught.value.problems
    assert all(words in problem.what for words in said), problem.what
    assert hint in problem.hint
    assert all(line in problem.what for line in caught.value.lines)


def test_what_a_dsrun_holds_is_not_offered():
    with pytest.raises(BusyError) as caught:
        choose(machine("LL"), 1, None, {})
    assert caught.value.problems[0].hint == "Wait for them: --wait"


@pytest.mark.parametrize(
    ("state", "shown", "gpus", "devices", "said"),
    [
        ("aaaa", None, 5, None, "only 4 GPUs"),  # waiting won't help
        ("aaaa", "1,2", 3, None, f"only 2 GPUs ({VISIBLE}=1,2)"),
        ("aaaa", "", None, None, "leaves no device"),
        ("aaaa", None, 1, "0", "both say"),
        ("fffL", "0,1", None, "3", "hides it"),
        ("fffL", None, None, "4", "no device 4"),
        ("ffff", "MIG-GPU-000-abc/1/0", None, None, "there is no slice MIG-GPU-000-abc/1/0"),
        ("ffff", "0,MIG-3f", 1, None, "there is no slice MIG-3f"),
    ],
)
def test_wrong_however_busy(state, shown, gpus, devices, said):
    with pytest.raises(DsrunError) as caught:
        choose(machine(state), gpus, devices, environ(shown))
    assert not isinstance(caught.value, BusyError)
    assert said in caught.value.problems[0].what


@pytest.mark.parametrize(
    ("gpus", "expected"), [(None, tuple(range(CPU_RANKS))), (3, (0, 1, 2)), (8, tuple(range(8)))]
)
def test_ranks_on_a_cpu_are_nobodys(gpus, expected):
    where = machine("aLmf", "cpu")
    assert choose(where, gpus, None, {}) == free_first(where, gpus, {}) == expected
    assert choose(where, None, "0-3", {}) == (0, 1, 2, 3)
    assert notes(where, (0, 1), visible_devices(where, {})) == ()


@pytest.mark.parametrize(
    ("state", "shown", "gpus", "expected"),
    [
        ("affa", None, 2, (1, 2)),
        ("affa", None, 3, (1, 2, 0)),
        ("affa", None, None, (1, 2)),
        ("aaLa", None, None, (0, 1, 2, 3)),
        ("aafa", "3,2,1", 2, (2, 3)),
    ],
)
def test_what_is_planned_for_never_fails(state, shown, gpus, expected):
    assert free_first(machine(state), gpus, environ(shown)) == expected


@pytest.mark.parametrize(
    ("state", "shown", "gpus", "devices", "expected"),
    [
        ("ffff", None, None, None, []),
        ("....", None, 2, None, []),
        ("faff", None, None, None, [(1, ALICE, "left out")]),
        ("Lfmf", None, 1, None, [(0, BOB, "left out"), (2, SOMEBODY, "left out")]),
        ("faff", "0,2", None, None, []),
        ("faaf", None, None, "1", [(1, ALICE, "used")]),
        ("faaf", None, None, "0", []),
        ("f??f", None, 2, None, [(1, "NVML", "unknown")]),
    ],
)
def test_notes_name_gpus_and_users(state, shown, gpus, devices, expected):
    where = machine(state)
    chosen = choose(where, gpus, devices, environ(shown))
    there = visible_devices(where, environ(shown))
    found = notes(where, chosen, there, by_name=devices is not None)
    for line, (index, who, what) in zip(found, expected, strict=True):
        assert f"GPU {index} " in line and who in line and what in line
