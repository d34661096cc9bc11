"""The all-reduce of `dsrun doctor --smoke`: two real ranks, and what NCCL says of its way."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from dsrun.cluster.ports import free_port
from dsrun.training import smoke, smoke_parts

SOCKET = """node1:77:77 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
node1:77:80 [0] NCCL INFO NET/IB : No device found.
node1:77:80 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0> [1]ib-0.8:10.9.0.1<0>
node1:77:81 [1] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0> [1]ib-0.8:10.9.0.1<0>
"""
INFINIBAND = "n:7:8 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>\n"


@pytest.mark.parametrize(
    ("log", "way"),
    [
        (SOCKET, "eth0 (Socket), ib-0.8 (Socket)"),
        (INFINIBAND, "mlx5_0 (IB), mlx5_1 (IB)"),
        ("NCCL INFO Bootstrap : Using eth0:1.1.1.1<0>", ""),
        ("", ""),
    ],
)
def test_the_way_that_nccl_takes(log, way):
    assert smoke.interface_in(log) == way


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7])
def test_every_pair_of_hosts_meets_once_and_nobody_twice_at_a_time(count):
    whole = list(smoke_parts.rounds(count))
    assert sorted(pair for matched in whole for pair in matched) == [
        (one, other) for one in range(count) for other in range(one + 1, count)
    ]
    assert all(len({host for pair in matched for host in pair}) == 2 * len(matched) for matched in whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_product_is_exact_and_has_no_zeros(dtype):
    first, second, right = smoke_parts.known_product(512, dtype, torch.device("cpu"))
    assert (first @ second == right).all()
    assert first.all() and second.all() and right.isfinite().all()


def test_a_sound_device(monkeypatch):
    monkeypatch.setattr(smoke_parts, "SECONDS", {"cpu": 0.0})
    one, other = (smoke_parts.card(torch.device("cpu")) for _ in range(2))
    assert (one["wrong"], one["nans"]) == (0, 0) and one["tflops"] > 0
    assert one["bits"] == other["bits"]


def test_a_device_that_multiplies_wrongly(monkeypatch):
    """The known result is another than what is computed."""
    sound = smoke_parts.known_product

    def known(*args):
        first, second, right = sound(*args)
        first[3, 5] = float("nan")
        return first, second, right

    monkeypatch.setattr(smoke_parts, "SECONDS", {"cpu": 0.0})
    monkeypatch.setattr(smoke_parts, "known_product", known)
    result = smoke_parts.card(torch.device("cpu"))
    assert result["wrong"] == result["nans"] == 512


RANKS = """
import os
from dsrun.training import smoke
import torch.distributed as dist
if os.environ["RANK"] == os.environ.get("WRONG"):
    dist.get_rank = lambda: 7
smoke.SECONDS = 0.2
smoke.main()
"""


def ranks(environ, tmp_path, **more):
    env = {
        **environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2",
        "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more,
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS], env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=tmp_path,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=600) for process in started]
    return [(process.returncode, *texts) for process, texts in zip(started, outputs, strict=True)]


@pytest.mark.slow
@pytest.mark.full  # tests/cli/test_doctor_command.py runs it under the launcher
def test_two_ranks(environ, tmp_path):
    first, second = ranks(environ, tmp_path)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    result = json.loads(first[1])
    assert second[1] == ""
    assert (result["smoke"], result["backend"], result["ranks"], result["interface"]) == (1, "gloo", 2, "lo")
    assert result["bytes"] == 8 << 20
    assert result["bus_gb_s"] == pytest.approx(result["bytes"] / result["seconds"] / 1e9)
    assert 0 < result["small_us"] < 1e6 and result["count"] >= 1
    assert [card["wrong"] for card in result["cards"]] == [0, 0]
    assert result["pairs"] == []


@pytest.mark.slow
def test_a_wrong_sum_is_an_error_on_every_rank(environ, tmp_path):
    for code, _, err in ranks(environ, tmp_path, WRONG="1"):
        assert code == 1
        assert "gave 9.0 for 3.0 in 1 of 1 numbers" in err
