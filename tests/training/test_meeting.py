"""The ranks' first exchange: real ranks, of which one doesn't come, or comes and exchanges nothing."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from needed import needs

needs("torch")

from dsrun.cluster.ports import free_port
from dsrun.job.job import HostDevices

ONE_HOST = "HostDevices('localhost', (0, 1, 2, 3))"
TWO_HOSTS = "HostDevices('node-a', (0, 1)), HostDevices('node-b', (0, 1))"
RANK = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
import torch, torch.distributed as dist
from dsrun.errors import TrainingError
from dsrun.job.job import HostDevices
from dsrun.training.ranks import meeting

rank, limit, hosts, absent, silent = int(os.environ["RANK"]), float(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
meeting.ARRIVE_S = meeting.EXCHANGE_S = limit
meeting.WORD_S = limit / 4
job = SimpleNamespace(hosts=eval(f"({hosts},)"), accelerator=sys.argv[5])

def give_up(error):
    print(error, file=sys.stderr, flush=True)
    os._exit(1)

if str(rank) in absent.split(","):
    time.sleep(600)
# The limit is short: those that come do so together, however long the imports took.
Path(sys.argv[6], str(rank)).touch()
while len(list(Path(sys.argv[6]).iterdir())) < 4 - len(absent.split(",")) * bool(absent):
    time.sleep(0.05)
first = meeting.Meeting(job, lambda text: print("note:", text, file=sys.stderr))
try:
    first.arrive()
except TrainingError as error:
    give_up(error)
with first.watched(give_up):
    if str(rank) in silent.split(","):
        time.sleep(600)
    dist.init_process_group("gloo")
    first.exchange(torch.device("cpu"))
dist.barrier()
os._exit(0)
"""


def ranks(environ, folder, limit: float, hosts: str, absent: str = "", silent: str = "", kind: str = "cpu"):
    """Exit code and messages of each of four ranks; those that never come are ended behind the others."""
    port = str(free_port())
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(limit), hosts, absent, silent, kind, folder], text=True,
            env={
                **environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "4", "RANK": str(rank),
                "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            },
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )
        for rank in range(4)
    ]  # fmt: skip
    done = []
    for rank, process in enumerate(started):
        if str(rank) in absent.split(","):
            process.kill()
        done.append((process.communicate(timeout=300)[1], process.returncode))
    return [(code, text) for text, code in done]


@pytest.mark.slow
@pytest.mark.full
def test_ranks_that_all_come(environ, tmp_path):
    assert [code for code, _ in ranks(environ, tmp_path, 60, ONE_HOST)] == [0] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "named"),
    [
        pytest.param(ONE_HOST, "ranks 2-3 did not come", marks=pytest.mark.full),
        (TWO_HOSTS, "ranks 2-3 on node-b did not come"),
    ],
)
def test_ranks_that_never_arrive_are_named(environ, tmp_path, hosts, named):
    (code, text), (other, _), *_ = ranks(environ, tmp_path, 4, hosts, absent="2,3")
    assert code == 1
    assert other != 0  # with the same words, or with the end of the first rank, whose store it asks
    assert f"{named} within 4 seconds" in text
    assert "dsrun logs RUN --rank 2" in text
    assert "--timeout MINUTES" in text
    assert "note: still waiting for ranks 2-3" in text


@pytest.mark.slow
def test_a_rank_that_arrives_and_exchanges_nothing(environ, tmp_path):
    """The others are inside of gloo, from which no exception brings them back."""
    codes, texts = zip(*ranks(environ, tmp_path, 4, TWO_HOSTS, silent="3", kind="cuda"), strict=True)
    assert set(codes) == {1}
    assert "all 4 ranks are there, but their first exchange did not end in 4 seconds" in texts[0]
    assert "dsrun doctor --smoke" in texts[0]
    assert "NCCL_SOCKET_IFNAME" in texts[0]
    assert "PCIe ACS" in texts[0]


@pytest.fixture
def meeting(monkeypatch, make_job):
    from dsrun.training.ranks.meeting import Meeting

    for name, value in (
        ("RANK", "1"),
        ("WORLD_SIZE", "4"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)

    def made(*hosts: HostDevices, minutes: str | None = None):
        monkeypatch.setenv("DEEPSPEED_TIMEOUT", minutes) if minutes else monkeypatch.delenv(
            "DEEPSPEED_TIMEOUT", raising=False
        )
        return Meeting(make_job(hosts=hosts or (HostDevices("localhost", (0, 1, 2, 3)),)), print)

    return made


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([3], "rank 3"), ([0, 2], "ranks 0, 2"), ([1, 2, 3], "ranks 1-3"), ([0, 1, 3], "ranks 0-1, 3")],
)
def test_ranks_in_words(meeting, ranks, words):
    assert meeting()._named(ranks) == words


def test_ranks_of_several_hosts(meeting):
    one = meeting(HostDevices("a", (0, 1)), HostDevices("b", (4, 5)))
    assert one._named([1, 2, 3]) == "rank 1 on a and ranks 2-3 on b"


def test_the_limits(meeting):
    """Both are what --timeout says."""
    assert (meeting()._arrive_s, meeting()._exchange_s) == (600, 120)
    assert (meeting(minutes="30")._arrive_s, meeting(minutes="30")._exchange_s) == (1800, 1800)


def test_a_first_rank_that_can_not_be_reached(meeting, monkeypatch):
    """Nobody listens on port 1."""
    from dsrun.errors import TrainingError
    from dsrun.training.ranks import meeting as module

    monkeypatch.setattr(module, "ARRIVE_S", 1.0)
    with pytest.raises(TrainingError, match=r"127\.0\.0\.1:1: rank 1 can't reach the first rank there"):
        meeting().arrive()


def test_a_wrong_sum_is_an_error(meeting, monkeypatch):
    import torch
    import torch.distributed as dist

    one = meeting()
    one._store = dist.HashStore()
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    with pytest.raises(RuntimeError, match=r"all-reduce of 4 ones gave 1"):
        one.exchange(torch.device("cpu"))


def test_an_exchange_that_ends_leaves_the_process_alone(meeting, monkeypatch):
    from dsrun.training.ranks import meeting as module

    monkeypatch.setattr(module, "EXCHANGE_S", 0.05)
    given_up = []
    with meeting().watched(given_up.append):
        pass
    time.sleep(0.2)
    assert given_up == []
