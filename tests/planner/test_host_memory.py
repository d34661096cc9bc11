"""Main memory: what DeepSpeed's source says of offloading, published figures, and what must hold for every set-up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsrun.files import WEIGHT_FILE_BYTES
from dsrun.planner.host_memory import (
    CUDA_LIBRARIES_GIB,
    GIB,
    host_memory,
    offloaded,
    pinned_blocks,
    power_of_two,
)
from dsrun.planner.lora import lora_weights
from dsrun.planner.setup import Setup
from dsrun.planner.shape import Shape, from_numbers

PSI = 6_738_415_616
LLAMA = from_numbers(PSI, layers=32, hidden=4096, intermediate=11008, heads=32, vocab=32000)


def job(**fields) -> Setup:
    return Setup(LLAMA, **{"gpus": 8, "optimizer_device": "cpu", **fields})


class TestOffloading:
    """Bytes a weight on the host, by the tensors that DeepSpeed 0.19's optimizers make."""

    @pytest.mark.parametrize(
        ("fields", "bytes_a_weight"),
        [
            ({"stage": 2}, 18),
            ({"stage": 2, "grad_accum": 8}, 20),
            ({"stage": 1}, 18),
            ({"stage": 3}, 18),
            ({"stage": 3, "grad_accum": 8}, 18),
            ({"stage": 3, "parameter_device": "cpu"}, 22),
            ({"stage": 3, "parameter_device": "cpu", "optimizer_device": "gpu"}, 4),
            ({"stage": 2, "precision": "fp32"}, 20),
        ],
    )
    def test_bytes_a_weight(self, fields, bytes_a_weight):
        held = offloaded(job(**fields))
        held.pop("scratch", None)
        assert sum(held.values()) == pytest.approx(bytes_a_weight * PSI)

    def test_nothing_without_offloading(self):
        assert offloaded(job(stage=2, optimizer_device="gpu")) == {}
        assert offloaded(job(engine="fsdp", optimizer_device="gpu")) == {}

    def test_divided_among_nodes(self):
        one, two = (offloaded(job(gpus=16, nodes=nodes, stage=3)) for nodes in (1, 2))
        assert sum(two.values()) == pytest.approx(sum(one.values()) / 2)

    def test_nvme_buffers_hold_the_largest_sub_group(self):
        held = offloaded(job(stage=3, optimizer_device="nvme", parameter_device="nvme", sub_group=10**8))
        assert held["optimizer_buffers"] == 8 * 4 * 4 * 10**8
        assert held["parameter_buffers"] == 5 * 2 * LLAMA.embedding
        assert held["weights"] == pytest.approx(2 * PSI)  # a rank's share is less than max_in_cpu
        assert "master" not in held

    def test_a_process_a_rank(self):
        assert host_memory(job(optimizer_device="gpu")).terms["processes"] == 8 * 3.5 * GIB
        assert host_memory(job(optimizer_device="gpu", nodes=2)).terms["processes"] == 4 * 3.5 * GIB


class TestPinned:
    def test_power_of_two(self):
        assert [power_of_two(size) for size in (0, 1, 3, 4, 5, 2.25e9)] == [0, 1, 4, 4, 8, 2**32]

    def test_rounding_is_a_term_of_its_own(self):
        rounded, exact = host_memory(job(stage=2)), host_memory(job(stage=2), native_pinning=True)
        assert rounded.peak - exact.peak == pytest.approx(rounded.terms["pinned_rounding"])
        assert 0 < rounded.terms["pinned_rounding"] < 12 * PSI
        assert "pinned_rounding" not in host_memory(job(stage=2, pinned=False)).terms

    @pytest.mark.parametrize("stage", [2, 3])
    def test_no_more_is_pinned_than_is_held(self, stage):
        setup = job(stage=stage, grad_accum=4)
        pinned = sum(size * count for size, count in pinned_blocks(setup))
        assert pinned <= sum(offloaded(setup).values())


class TestLoading:
    def test_every_rank_loads_the_model(self):
        memory = host_memory(job(stage=2, optimizer_device="gpu"))
        assert memory.peaks["loading"] == pytest.approx(8 * (3.5 * GIB + 2 * PSI))
        assert memory.moment == "loading"

    def test_zero_init_divides_while_loading(self):
        setup = job(stage=3, optimizer_device="gpu")
        assert host_memory(setup).peaks["loading"] == 8 * 3.5 * GIB
        assert host_memory(replace(setup, zero_init=False)).moment == "loading"

    def test_rank_0_gathers_a_shard_of_the_export(self):
        memory = host_memory(job(stage=3))
        assert 2 * PSI > WEIGHT_FILE_BYTES
        assert memory.peaks["export"] == pytest.approx(memory.peaks["training"] + WEIGHT_FILE_BYTES)

    @pytest.mark.parametrize(
        ("fields", "copied"),
        [
            ({"stage": 0, "optimizer_device": "gpu"}, 4 * PSI),
            ({"stage": 2, "optimizer_device": "gpu"}, 4 * PSI),  # eight ranks, each its fp32 share
            ({"stage": 2}, 2 * PSI),  # rank 0's flat weights
            ({"stage": 3, "optimizer_device": "gpu", "sub_group": 10**8}, 8 * 4 * 10**8),
            ({"stage": 3}, 0),
        ],
    )
    def test_saving(self, fields, copied):
        memory = host_memory(job(**fields))
        assert memory.peaks["checkpoint"] - memory.peaks["training"] == pytest.approx(copied)


class TestPublished:
    """Measurements of others. DeepSpeed and torch were older then, and torch rounded no pinned block up."""

    @pytest.mark.parametrize(
        ("shape", "gib"),
        [
            # huggingface/peft's README: CPU memory of LoRA with ZeRO-3 and both offloads, on one A100
            (from_numbers(12.9e9, layers=48, hidden=4096, intermediate=10240, heads=64, vocab=250112), 48.4),
            (from_numbers(2.8516e9), 16.6),
            (from_numbers(7.069e9, layers=30, hidden=4096, intermediate=16384, heads=32, vocab=250880), 32.6),
        ],
        ids=["mt0-xxl", "t0-3b", "bloomz-7b1"],
    )
    def test_lora_with_weights_on_the_host(self, shape: Shape, gib: float):
        setup = Setup(
            shape, stage=3, optimizer_device="cpu", parameter_device="cpu", method="lora",
            adapters=lora_weights(shape, 8, ("q", "v")),
        )  # fmt: skip
        training = host_memory(setup, native_pinning=True).peaks["training"]
        assert training / GIB == pytest.approx(gib, rel=0.15)

    @pytest.mark.parametrize(
        ("fields", "offloaded_gib", "without_gib"),
        [
            ({"stage": 2, "grad_accum": 8}, 361.3, 320.0),
            ({"stage": 3, "grad_accum": 4}, 387.4, 319.6),
            ({"stage": 3, "grad_accum": 2, "parameter_device": "cpu"}, 398.9, 319.6),
        ],
    )
    def test_used_memory_of_eight_a800(self, fields, offloaded_gib, without_gib):
        """gist.github.com/chenyaofo/d4cd6a20, Llama-7B: psutil's "used" with offloading and without.

        The differences are far below what is held: CUDA's pinned blocks count as cache there. What is pageable
        comes near them.
        """
        setup = job(**fields)
        added = (offloaded_gib - without_gib) * GIB
        held = sum(offloaded(setup).values())
        pinned = sum(size * count for size, count in pinned_blocks(setup))
        assert added < held
        assert held - pinned == pytest.approx(added, rel=0.25)


SETUPS = st.builds(
    Setup,
    shape=st.sampled_from([LLAMA, from_numbers(0.5e9), from_numbers(13e9)]),
    gpus=st.integers(1, 64),
    stage=st.integers(0, 3),
    optimizer_device=st.sampled_from(["gpu", "cpu"]),
    precision=st.sampled_from(["fp32", "bf16"]),
    seq_len=st.integers(1, 8192),
    micro_batch=st.integers(1, 64),
    grad_accum=st.integers(1, 8),
    checkpointing=st.sampled_from((0, 1, 3)),
    overlap_comm=st.booleans(),
)


@given(setup=SETUPS, accelerator=st.sampled_from(["cuda", "cpu"]))
def test_the_peak_is_the_largest(setup, accelerator):
    memory = host_memory(setup, accelerator=accelerator)
    assert memory.peak == max(memory.peaks.values()) == memory.peaks[memory.moment]
    assert all(size >= 0 for size in memory.terms.values())
    assert {"training", "loading", "checkpoint"} <= memory.peaks.keys()
    assert memory.peak >= memory.terms["processes"]


@given(setup=SETUPS, accelerator=st.sampled_from(["cuda", "cpu"]), factor=st.floats(1, 10))
def test_more_weights_need_more(setup, accelerator, factor):
    larger = replace(setup, shape=replace(setup.shape, parameters=round(setup.shape.parameters * factor)))
    few, many = (host_memory(one, accelerator=accelerator, native_pinning=True) for one in (setup, larger))
    assert many.peak >= few.peak


@given(setup=SETUPS)
def test_more_nodes_need_no_more_each(setup):
    doubled = replace(setup, gpus=2 * setup.gpus)
    one = host_memory(replace(setup, gpus=2 * setup.gpus), native_pinning=True)
    two = host_memory(replace(doubled, nodes=2), native_pinning=True)
    assert two.peaks["training"] <= one.peaks["training"]


@given(setup=SETUPS)
def test_offloading_takes_room_on_the_host(setup):
    on, off = (
        host_memory(replace(setup, stage=max(1, setup.stage), optimizer_device=device))
        for device in ("cpu", "gpu")
    )
    assert on.peaks["training"] > off.peaks["training"]


@given(setup=SETUPS, rows=st.integers(1, 64))
def test_longer_batches_need_more_on_a_cpu(setup, rows):
    few, many = (
        host_memory(replace(setup, micro_batch=count), accelerator="cpu") for count in (rows, rows + 1)
    )
    assert many.peak >= few.peak * (1 - 1e-12)


def test_every_rank_on_a_cpu_maps_the_libraries_of_torchs_cuda_build():
    two = job(gpus=2)
    plain, larger = (host_memory(two, accelerator="cpu", cuda_build=built) for built in (False, True))
    assert larger.peak - plain.peak == pytest.approx(2 * CUDA_LIBRARIES_GIB * GIB)
    assert host_memory(two).peak == host_memory(two, cuda_build=True).peak


@given(setup=SETUPS)
def test_a_cpu_does_what_both_memories_did(setup):
    memory = host_memory(setup, accelerator="cpu")
    assert memory.peaks["training"] > 4 * setup.trained / max(1, setup.gpus)
    assert "pinned_rounding" not in memory.terms


class TestCopies:
    """Checkpoints that are written beside the training: bytes a weight in the first node's memory."""

    @pytest.mark.parametrize(
        ("fields", "bytes_a_weight"),
        [
            ({"stage": 0, "optimizer_device": "gpu"}, 2 + 12),
            ({"stage": 1, "optimizer_device": "gpu"}, 2 + 12),
            ({"stage": 2}, 2 + 12),
            ({"stage": 2, "nodes": 2}, 2 + 6),
            ({"stage": 3, "nodes": 2}, 6),
            ({"stage": 3, "optimizer_device": "nvme"}, 0),
            ({"engine": "fsdp", "precision": "amp", "optimizer_device": "gpu"}, 4 + 8),
            ({"engine": "fsdp", "precision": "fp32", "optimizer_device": "gpu", "nodes": 2}, 6),
        ],
    )
    @pytest.mark.parametrize("accelerator", ["cuda", "cpu"])
    def test_bytes_a_weight(self, fields, bytes_a_weight, accelerator):
        without, beside = (
            host_memory(job(**fields, async_save=on), accelerator=accelerator) for on in (False, True)
        )
        copied = beside.terms["checkpoint_copy"]
        assert copied == pytest.approx(bytes_a_weight * PSI)
        assert without.terms["checkpoint_copy"] == 0
        assert beside.peaks["training"] - without.peaks["training"] == pytest.approx(copied)
        assert beside.peaks["export"] == pytest.approx(without.peaks["export"])

    def test_frozen_weights_are_in_no_checkpoint(self):
        lora = job(stage=2, method="lora", adapters=lora_weights(LLAMA, 8), async_save=True)
        assert host_memory(lora).terms["checkpoint_copy"] == 14 * lora.adapters
