"""Sizes of ZeRO's buckets: by the model and the memory that is left, constant, and within what DeepSpeed takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsrun.planner.buckets import LARGEST, SMALLEST, bucket_sizes
from dsrun.planner.gpu_memory import GIB, gpu_memory
from dsrun.planner.setup import Setup
from dsrun.planner.shape import Shape

LLAMA_7B = Shape(6_738_415_616, 32, 4096, 11008, 32, 32, 128, 32000)
SMALL = Shape(35_000_001, 4, 512, 1024, 8, 8, 64, 32000)


def sizes(stage=3, free=80 * GIB, **fields):
    setup = Setup(**{"shape": LLAMA_7B, "gpus": 8, "stage": stage, "checkpointing": 1, **fields})
    found = {one.key: one for one in bucket_sizes(setup, free)}
    assert all(one.why and one.elements % 2 == 0 and one.elements > 0 for one in found.values())
    return {key: one.elements for key, one in found.items()}


def test_with_room_they_are_as_large_as_is_of_use():
    assert sizes(2) == {"reduce_bucket_size": LARGEST, "allgather_bucket_size": LARGEST}
    found = sizes(3)
    assert found == {
        "reduce_bucket_size": LARGEST, "stage3_prefetch_bucket_size": min(LARGEST, LLAMA_7B.layer_parameters)
    }  # fmt: skip


def test_a_larger_model_has_no_larger_ones():
    """Constant buffers: 7B and 70B have the same."""
    large = Shape(68_976_648_192, 80, 8192, 28672, 64, 8, 128, 32000)
    assert set(sizes(3, shape=large, gpus=64).values()) == {LARGEST}


def test_a_small_model_has_smaller_ones():
    assert sizes(2, shape=SMALL)["reduce_bucket_size"] == SMALL.parameters + 1
    assert sizes(3, shape=SMALL)["stage3_prefetch_bucket_size"] == SMALLEST


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_where_memory_is_short_they_shrink_until_it_fits(stage):
    setup = Setup(shape=LLAMA_7B, gpus=8, stage=stage, checkpointing=1)
    whole = gpu_memory(replace(setup, reduce_bucket=LARGEST)).smi
    less = sizes(stage, free=whole)["reduce_bucket_size"]
    assert SMALLEST <= less < LARGEST
    assert gpu_memory(replace(setup, reduce_bucket=less)).smi < whole
    assert sizes(stage, free=1 * GIB)["reduce_bucket_size"] == SMALLEST


@pytest.mark.parametrize("fields", [{"stage": 0}, {"engine": "fsdp"}, {"engine": "torch"}])
def test_what_has_no_buckets(fields):
    assert sizes(**fields) == {}
