"""Where a job is to run: GPUs by name, by memory alone, and this machine as it stands."""

from __future__ import annotations

import pytest

from dsrun.cluster.devices import Gpu, Machine
from dsrun.errors import DsrunError
from dsrun.jobs.assembly.plan_target import (
    USUAL_GPU,
    computes_bf16,
    device_name,
    free_bytes,
    room_here,
    target,
    visible,
)
from dsrun.options.commands import PlanOptions
from dsrun.planner import gpus as kinds

GIB = 2**30


def place(given, machine):
    return target(PlanOptions(**given), machine)


@pytest.fixture(autouse=True)
def _no_calibration(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def gpu(index, name="NVIDIA A100-SXM4-80GB", total=80, free=None, capability=(8, 0)) -> Gpu:
    return Gpu(index, name, f"GPU-{index}", total * GIB, capability, None if free is None else free * GIB)


def machine(*gpus, host=500) -> Machine:
    return Machine("cuda", gpus, 32, f"{len(gpus)} GPUs", host and host * GIB)


FOUR = machine(gpu(0, free=10), gpu(1, free=79), gpu(2, free=40), gpu(3, free=78))
CPU = Machine("cpu", (), 8, "a machine of paper", 32 * GIB)


# GPUs that are named


def test_a_kind_of_gpu():
    given = {"gpu": "v100-32g", "gpus": 2, "nodes": 3, "host_memory": "256GiB", "nvme": "2TB"}
    found = place(given, None)
    kind = kinds.load("v100-32g")
    room = found.room
    assert (room.gpus, room.nodes, room.ranks, room.accelerator) == (2, 3, 6, "cuda")
    assert room.gpu_bytes == kind.memory_gib * GIB
    assert (room.host_bytes, room.nvme_bytes) == (256 * GIB, 2e12)
    assert not found.bf16
    assert not found.hardware_assumed
    assert room.hardware.matrix_tflops == kind.matrix_tflops
    assert (
        found.text
        == "6 x v100-32g on 3 nodes of 2, 31.7 GiB each, 256 GiB of host memory and 1863 GiB of NVMe a node"
    )


def test_one_gpu_where_nobody_says_how_many():
    found = place({"gpu": "a100-80g"}, FOUR)
    assert (found.room.ranks, found.room.host_bytes, found.room.nvme_bytes) == (1, None, None)
    assert found.bf16


def test_only_the_memory_is_known():
    found = place({"gpu_memory": "24GB", "gpus": 4}, None)
    assert found.room.gpu_bytes == 24e9
    assert found.hardware_assumed
    assert found.room.hardware.matrix_tflops == kinds.load(USUAL_GPU).matrix_tflops
    assert found.text == "4 x GPU, 22.4 GiB each"


def test_the_memory_that_is_free_of_a_known_kind():
    found = place({"gpu": "a100-80g", "gpu_memory": "20GiB"}, None)
    assert found.room.gpu_bytes == 20 * GIB
    assert not found.hardware_assumed


def test_the_network_between_nodes():
    slow, fast = (place({"gpu": "t4", "nodes": 2, "network": speed}, None) for speed in (10, 400))
    assert (slow.room.hardware.network_gb_s, fast.room.hardware.network_gb_s) == (1.25, 50)
    assert place({"gpu": "t4", "nodes": 2}, None).room.hardware.network_gb_s == 12.5


def test_everything_wrong_at_once():
    given = {"gpu": "v100-32", "gpu_memory": "24", "host_memory": "lots", "nvme": "2XB"}
    with pytest.raises(DsrunError) as caught:
        place(given, None)
    text = str(caught.value)
    assert len(caught.value.problems) == 4
    for words in ("v100-32g", "--gpu-memory", "24GiB", "--host-memory", "'lots'", "--nvme", "XB"):
        assert words in text


# This machine


def test_the_first_gpus_are_taken_and_the_scarcest_counts():
    """The first, as finetune takes them."""
    found = place({"gpus": 2}, FOUR)
    assert (found.room.gpus, found.room.gpu_bytes) == (2, 10 * GIB)
    assert place({}, machine(*FOUR.gpus[1:3])).room.gpu_bytes == 40 * GIB
    assert found.room.host_bytes == 500 * GIB
    assert (
        found.text
        == "2 x NVIDIA A100-SXM4-80GB as in this machine, 10.0 GiB free each, 500 GiB of host memory a node"
    )


def test_all_gpus_where_nobody_says_how_many():
    assert place({}, FOUR).room.ranks == place({"gpus": 4}, FOUR).room.ranks == 4
    assert place({"nodes": 2}, FOUR).room.ranks == 8


def test_host_memory_may_be_said():
    assert place({"host_memory": "100GiB"}, FOUR).room.host_bytes == 100 * GIB
    assert place({}, machine(gpu(0), host=None)).room.host_bytes is None


@pytest.mark.parametrize(("where", "words"), [(FOUR, "4 GPUs"), (CPU, "no GPU and 8 cores")])
def test_more_than_there_are(where, words):
    with pytest.raises(DsrunError, match=words) as caught:
        place({"gpus": 9}, where)
    assert caught.value.problems[0].where == "--gpus"
    assert "--gpu v100-32g" in caught.value.problems[0].hint


def test_ranks_on_a_cpu():
    found = place({}, CPU)
    assert (found.room.ranks, found.room.accelerator, found.room.host_bytes) == (2, "cpu", 32 * GIB)
    assert found.text == "2 CPU ranks on this machine (a machine of paper), 32.0 GiB of memory free"
    assert place({"gpus": 5}, CPU).room.ranks == 5
    assert place({"gpus": 1}, CPU).text.startswith("1 CPU rank on")
    assert place({}, Machine("cpu", (), 1, "x", GIB)).room.ranks == 1


@pytest.mark.parametrize("cuda", ["12.6", None])
def test_torchs_cuda_build_counts_on_cpus(monkeypatch, tmp_path, cuda):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(f"cuda: Optional[str] = {cuda!r}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    room = room_here(Machine("cpu", (), 4, "", 8 << 30), (0, 1))
    assert room.cuda_build is (cuda is not None)


def test_several_cpu_nodes_are_said():
    found = place({"nodes": 2, "host_memory": "8GiB"}, CPU)
    assert found.room.ranks == 4
    assert (
        found.text == "4 CPU ranks on 2 nodes like this machine (a machine of paper), 8.0 GiB of memory each"
    )


def test_cores_are_shared_by_ranks():
    one, four = (place({"gpus": count}, CPU).room.hardware for count in (1, 4))
    assert one.fp32_tflops == pytest.approx(4 * four.fp32_tflops)
    twice = place({"gpus": 1}, Machine("cpu", (), 16, "x", GIB)).room.hardware
    assert twice.fp32_tflops == twice.matrix_tflops == pytest.approx(2 * one.fp32_tflops)


def test_memory_whose_use_is_unknown_is_free():
    assert free_bytes(machine(gpu(0, total=32)), 0) == 32 * GIB
    assert free_bytes(FOUR, 2) == 40 * GIB
    assert free_bytes(FOUR, 9) == 0
    assert free_bytes(CPU, 0) == 0


def test_a_card_without_memory_left():
    assert free_bytes(machine(gpu(0, free=0)), 0) == 0


def test_a_known_kind_has_its_own_speed_and_another_the_usual():
    known, other = room_here(FOUR, (0,)).hardware, room_here(machine(gpu(0, "NVIDIA Odd")), (0,)).hardware
    assert known.matrix_tflops == kinds.load("a100-80g").matrix_tflops
    assert other.matrix_tflops == kinds.load(USUAL_GPU).matrix_tflops


@pytest.mark.parametrize("order", [1, -1])
def test_among_several_kinds_the_slowest_counts(order):
    names = ["NVIDIA A100-SXM4-80GB", "Tesla T4"][::order]
    mixed = machine(gpu(0, names[0]), gpu(1, names[1], capability=(7, 5)))
    assert room_here(mixed, (0, 1)).hardware.matrix_tflops == kinds.load("t4").matrix_tflops
    assert not place({}, mixed).bf16
    assert all(name in place({}, mixed).text for name in names)


def test_device_names():
    assert device_name(FOUR, (1,)) == "a100-80g"
    assert device_name(machine(gpu(0, "NVIDIA Odd")), (0,)) == "NVIDIA Odd"
    assert device_name(CPU, (0, 1)) == "cpu"


def test_bf16():
    old = machine(gpu(0), gpu(1, capability=(7, 5)))
    assert [computes_bf16(old, devices) for devices in ((0,), (1,), (0, 1))] == [True, False, False]
    assert computes_bf16(CPU, (0,))


def test_hidden_gpus_are_not_planned_for():
    assert [one.index for one in visible(FOUR, {"CUDA_VISIBLE_DEVICES": "2,0"}).gpus] == [2, 0]
    assert visible(FOUR, {}) == FOUR
    assert visible(CPU, {"CUDA_VISIBLE_DEVICES": "7"}) == CPU
    with pytest.raises(DsrunError, match="CUDA_VISIBLE_DEVICES"):
        visible(FOUR, {"CUDA_VISIBLE_DEVICES": ""})
