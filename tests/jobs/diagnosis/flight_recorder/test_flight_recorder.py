"""Dumps of torch's flight recorder: what they tell of ranks, and what is no dump of data."""

from __future__ import annotations

import json
import os
import pickle
import random
import textwrap

import pytest

from dsrun.errors import DsrunError
from dsrun.jobs.diagnosis.diagnosis import diagnose_files
from dsrun.jobs.diagnosis.flight_recorder import data_pickle, dumps

RANKS = range(4)


def entry(number, name="all_reduce", group="0", sizes=((4, 5),), state="completed", **more):
    """One of a dump, as torch 2.13 writes it."""
    script = {"name": "step", "filename": "/home/me/train.py", "line": number}
    library = {
        "name": name,
        "filename": "/env/lib/python3.12/site-packages/torch/distributed/c.py",
        "line": 7,
    }
    return {
        "frames": [library, script], "record_id": number, "pg_id": 0, "process_group": (group, f"group {group}"),
        "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number, "profiling_name": f"nccl:{name}",
        "time_created_ns": 1_795_413_637_000_000_000 + number, "input_sizes": [list(one) for one in sizes],
        "input_dtypes": ["Float"], "output_sizes": [], "output_dtypes": [], "state": state,
        "time_discovered_started_ns": None, "retired": state == "completed", "timeout_ms": 600_000, "is_p2p": False,
        **more,
    }  # fmt: skip


def written(folder, of_ranks, groups=None, form="pickle"):
    """Dumps of some ranks, in torch's protocol."""
    config = groups or {"0": "[0, 1, 2, 3]"}
    for rank, entries in of_ranks.items():
        listed = {name: {"name": name, "desc": f"group {name}", "ranks": own} for name, own in config.items()}
        said = {"version": "2.10", "pg_config": listed, "entries": entries}
        path = folder / f"nccl_trace_rank_{rank}"
        path.write_bytes(pickle.dumps(said, protocol=2) if form == "pickle" else json.dumps(said).encode())
    return folder


def told(folder):
    return diagnose_files([str(folder)], {"LANG": "C"})


DONE = [entry(1), entry(2)]
WAITS = [*DONE, entry(3, "all_gather", state="started")]


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_the_rank_that_did_not_come(tmp_path, form):
    found = told(written(tmp_path, {rank: DONE if rank == 2 else WAITS for rank in RANKS}, form=form))
    assert (found.cause, found.rank, found.signature) == ("nccl_timeout", 2, "recorder-behind")
    assert "Rank 2" in found.summary and "all_gather 3" in found.summary and "0, 1, 3" in found.summary
    assert "/home/me/train.py:3" in found.line and "/home/me/train.py:2" in found.line


def test_who_waits_for_another_is_not_the_one_behind(tmp_path):
    """Rank 3 waits for 2 in a group of their own, and 0 and 1 for 3: 2 is the one."""
    groups = {"0": "[0, 1, 3]", "1": "[2, 3]"}
    ranks = {0: WAITS, 1: WAITS, 2: [], 3: [*DONE, entry(1, group="1", state="scheduled")]}
    assert told(written(tmp_path, ranks, groups)).rank == 2


def test_ranks_that_wait_crosswise(tmp_path):
    groups = {"0": "[0, 1]", "1": "[0, 1]"}
    ranks = {0: [entry(1, state="scheduled")], 1: [entry(1, group="1", state="scheduled")]}
    assert told(written(tmp_path, ranks, groups)).cause == "ranks_disagree"


@pytest.mark.parametrize(
    "other",
    [entry(3, "all_reduce", state="started"), entry(3, "all_gather", sizes=((7,),), state="started")],
    ids=["another collective", "another shape"],
)
def test_ranks_out_of_step(tmp_path, other):
    found = told(written(tmp_path, {rank: [*DONE, other] if rank == 1 else WAITS for rank in RANKS}))
    assert (found.cause, found.rank) == ("ranks_disagree", 1)


def test_a_device_that_has_not_begun(tmp_path):
    late = [*DONE, entry(3, "all_gather", state="scheduled")]
    found = told(written(tmp_path, {rank: late if rank == 3 else WAITS for rank in RANKS}))
    assert (found.rank, found.signature) == (3, "recorder-not-begun")


def test_all_came_and_none_ended(tmp_path):
    found = told(written(tmp_path, dict.fromkeys(RANKS, WAITS)))
    assert (found.cause, found.rank) == ("nccl_net", None)


def test_a_recv_without_its_send(tmp_path):
    recv = entry(3, "recv 1<-0", state="started", is_p2p=True, p2p_seq_id=2)
    sent = entry(3, "send 0->1", is_p2p=True, p2p_seq_id=1)
    found = told(written(tmp_path, {0: [sent], 1: [recv]}, {"0": "[0, 1]"}))
    assert (found.rank, found.signature) == (0, "recorder-behind")


def test_one_rank_left_no_dump(tmp_path):
    found = told(written(tmp_path, {rank: WAITS for rank in RANKS if rank != 1}))
    assert (found.rank, found.confidence) == (1, "low")


def test_a_few_of_many_dumps_blame_nobody(tmp_path):
    assert told(written(tmp_path, {0: WAITS})).cause is None


def test_all_is_well(tmp_path):
    assert told(written(tmp_path, dict.fromkeys(RANKS, DONE))).cause is None


def test_the_logs_reason_comes_before_the_rank_that_is_behind(tmp_path):
    """Rank 2 is behind since its disk is full."""
    written(tmp_path, {rank: DONE if rank == 2 else WAITS for rank in RANKS})
    (tmp_path / "rank-2.log").write_text(
        "Traceback (most recent call last):\nOSError: [Errno 28] No space left on device\n"
    )
    found = told(tmp_path)
    assert (found.cause, found.rank) == ("disk_full", 2)


def test_the_rank_that_is_behind_comes_before_those_that_timed_out(tmp_path):
    written(tmp_path, {rank: DONE if rank == 2 else WAITS for rank in RANKS})
    said = "[rank0]:[E1] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLGATHER)\n"
    (tmp_path / "rank-0.log").write_text(said)
    assert told(tmp_path).rank == 2


class Trap:
    def __reduce__(self):
        return os.system, ("touch trapped",)


@pytest.mark.parametrize("protocol", range(6))
def test_code_in_a_pickle_is_refused(tmp_path, monkeypatch, protocol):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DsrunError, match="run code"):
        data_pickle.read(pickle.dumps({"version": Trap(), "pg_config": {}}, protocol))
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(b"\x80\x02" + pickle.dumps({"version": "pg_config", "entries": Trap()}, 2)[2:])
    assert "run code" in told(tmp_path).line
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_data_are_read_as_pickle_reads_them(protocol):
    said = {
        "a": [1, -5, 2**40, 2**80, 1.5, None, True, "中文", (), ("x", 2), [[]] * 3],
        "b": {"c": {}},
        "d": "x" * 300,
    }
    assert data_pickle.read(pickle.dumps(said, protocol)) == said


def test_damaged_dumps_are_told():
    data = pickle.dumps({"version": "2.10", "pg_config": {}, "entries": DONE}, 2)
    draw = random.Random(5)
    for cut in range(len(data)):
        with pytest.raises(DsrunError):
            data_pickle.read(data[:cut])
    for _ in range(2000):
        changed = bytearray(data)
        changed[draw.randrange(len(data))] = draw.randrange(256)
        try:
            data_pickle.read(bytes(changed))
        except DsrunError as error:
            assert str(error)


def test_a_dump_that_was_cut_off_leaves_the_others(tmp_path):
    written(tmp_path, {rank: DONE if rank == 2 else WAITS for rank in RANKS})
    path = tmp_path / "nccl_trace_rank_3"
    path.write_bytes(path.read_bytes()[:900])
    assert told(tmp_path).rank == 2


def test_a_name_without_a_rank(tmp_path):
    path = written(tmp_path, {0: DONE}) / "nccl_trace_rank_0"
    path.rename(tmp_path / "trace.json")
    with pytest.raises(DsrunError, match="no rank"):
        dumps.read(tmp_path / "trace.json")


REAL = """
import json, os, sys, time
import torch, torch.distributed as dist
from torch._C import _distributed_c10d as own
rank = int(sys.argv[1])
store = dist.FileStore("store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
dist.all_reduce(torch.ones(4, 5))
while not json.loads(own._dump_fr_trace_json())["entries"][0]["retired"]:
    time.sleep(0.01)  # another thread says so
if rank == 0:
    late = dist.broadcast(torch.ones(3), 0, async_op=True)
    late = dist.all_reduce(torch.ones(2), async_op=True)
open(f"nccl_trace_rank_{rank}", "wb").write(own._dump_fr_trace())
os._exit(0)
"""


@pytest.mark.slow
def test_torchs_own_dumps(tmp_path):
    pytest.importorskip("torch._C._distributed_c10d")
    import subprocess
    import sys

    (tmp_path / "train.py").write_text(textwrap.dedent(REAL))
    environ = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen([sys.executable, "train.py", str(rank)], cwd=tmp_path, env=environ)
        for rank in range(2)
    ]
    assert [rank.wait(300) for rank in ranks] == [0, 0]
    found = diagnose_files([str(tmp_path)], {"LANG": "C"})
    assert (found.rank, found.signature) == (1, "recorder-behind")
    assert "train.py" in found.line
