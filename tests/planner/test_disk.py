"""Checkpoints, models and swap files: the sums of DeepSpeed 0.19's files, as real folders have them."""

from __future__ import annotations

import pytest

from dsrun.planner import disk
from dsrun.planner.lora import lora_weights
from dsrun.planner.setup import Setup
from dsrun.planner.shape import from_config, from_numbers

BENCH = from_config(
    {
        "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 11,
        "num_attention_heads": 8, "vocab_size": 2048,
    },
    "bench-150m",
)  # fmt: skip
LLAMA = from_numbers(6_738_415_616)
PSI = LLAMA.parameters


@pytest.mark.parametrize(
    ("stage", "precision", "folder"),
    [
        # Real checkpoints of bench-150m on two ranks, in bytes (bench/planner_cpu.py)
        (0, "fp32", 1_746_266_395),
        (0, "bf16", 2_037_211_645),
        (2, "bf16", 2_037_233_571),
        (3, "fp32", 1_746_273_278),
        (3, "bf16", 1_746_273_496),
    ],
)
def test_a_real_checkpoint(stage, precision, folder):
    setup = Setup(BENCH, gpus=2, stage=stage, precision=precision)
    assert disk.checkpoint_bytes(setup) == pytest.approx(folder, rel=0.001)


@pytest.mark.parametrize(("precision", "folder"), [("fp32", 582_152_053), ("bf16", 291_125_174)])
def test_a_real_model(precision, folder):
    assert disk.model_bytes(Setup(BENCH, precision=precision)) == pytest.approx(folder, rel=0.001)


def test_real_swap_files():
    setup = Setup(BENCH, gpus=2, stage=3, optimizer_device="nvme", parameter_device="nvme", precision="fp32")
    assert disk.nvme_bytes(setup) == pytest.approx(2_910_081_024, rel=0.001)


@pytest.mark.parametrize(
    ("fields", "bytes_a_weight"),
    [
        ({"stage": 0}, 14),
        ({"stage": 1}, 14),
        ({"stage": 2, "precision": "fp32"}, 16),
        ({"stage": 3}, 12),
        ({"stage": 3, "gpus": 64, "nodes": 8}, 12),
        ({"stage": 2, "optimizer": "sgd"}, 10),
        ({"engine": "torch", "precision": "pure"}, 6),
    ],
)
def test_bytes_a_weight_in_a_checkpoint(fields, bytes_a_weight):
    assert disk.checkpoint_bytes(Setup(LLAMA, **{"gpus": 8, **fields})) == bytes_a_weight * PSI


def test_adapters_keep_few_states():
    adapters = lora_weights(LLAMA, 16)
    setup = Setup(LLAMA, gpus=8, stage=1, method="lora", adapters=adapters)
    assert disk.checkpoint_bytes(setup) == 2 * PSI + 14 * adapters


def test_nvme_is_divided_among_nodes():
    fields = {"gpus": 8, "stage": 3, "optimizer_device": "nvme", "parameter_device": "nvme"}
    assert disk.nvme_bytes(Setup(LLAMA, **fields)) == pytest.approx(18 * PSI, rel=0.001)
    assert disk.nvme_bytes(Setup(LLAMA, **fields, nodes=2)) == pytest.approx(9 * PSI, rel=0.001)
    on_host = {**fields, "parameter_device": "cpu"}
    assert disk.nvme_bytes(Setup(LLAMA, **on_host)) == pytest.approx(16 * PSI, rel=0.001)
    assert disk.nvme_bytes(Setup(LLAMA, stage=3, optimizer_device="cpu")) == 0


def test_small_shares_stay_in_memory():
    """llama-tiny on two ranks: a real run swapped its optimizer's 12 bytes a weight, and nothing else."""
    tiny = from_config(
        {
            "model_type": "llama", "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
            "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 2048,
        },
        "llama-tiny",
    )  # fmt: skip
    setup = Setup(tiny, gpus=2, stage=3, optimizer_device="nvme", parameter_device="nvme", precision="fp32")
    assert disk.nvme_bytes(setup) == 12 * tiny.parameters
    alone = Setup(tiny, gpus=64, stage=3, optimizer_device="nvme", parameter_device="nvme")
    assert disk.nvme_bytes(alone) == 0


def test_quantized_weights_are_written_as_they_are_held():
    adapters = lora_weights(LLAMA, 16)
    setup = Setup(LLAMA, gpus=8, stage=1, method="qlora", quantized="nf4", adapters=adapters)
    assert disk.checkpoint_bytes(setup) == pytest.approx(setup.base_bytes + 14 * adapters)
    assert 0.5 * PSI < setup.base_bytes < 0.7 * PSI
    # PEFT writes what was added.
    assert disk.model_bytes(setup) == 2 * adapters
