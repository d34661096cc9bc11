"""Every term that a plan can hold has its words, and there are no words for a term that no plan holds."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
from choices import ENGINES, PRECISIONS

from dsrun.planner import gpu_memory, terms
from dsrun.planner.host_memory import host_memory
from dsrun.planner.lora import lora_weights
from dsrun.planner.setup import METHODS, Setup
from dsrun.planner.shape import Experts, Shape
from dsrun.planner.speed import Hardware, speed

LLAMA = Shape(6_738_415_616, 32, 4096, 11008, 32, 32, 128, 32000)
SMALL = Shape(2_362_304, 4, 192, 512, 6, 2, 32, 2048)
MIXTURE = Shape(44_000_000_000, 32, 4096, 14336, 32, 8, 128, 32000, experts=Experts(8, 2, 14336))
V100 = Hardware(matrix_tflops=125, fp32_tflops=15.7, memory_gb_s=900, link_gb_s=130)
DIVIDED = [("fsdp", 0, "gpu", "gpu"), ("torch", 0, "gpu", "gpu"), ("deepspeed", 0, "gpu", "gpu")]
DIVIDED += [("deepspeed", stage, place, "gpu") for stage in (1, 2) for place in ("gpu", "cpu")]
DIVIDED += [("deepspeed", 3, *places) for places in itertools.product(("gpu", "cpu", "nvme"), repeat=2)]
RANKS = ((1, 1), (8, 1), (16, 2))
STRIDE = 7
"""Distance between the combinations that are tried: it divides none of the counts that they are made of."""
TABLES = {"gpu": terms.GPU, "host": terms.HOST, "host on CPUs": terms.HOST, "speed": terms.SPEED}


def setups():
    """Every combination of what decides which terms there are."""
    both = (False, True)
    for divided, precision, method, (gpus, nodes), shape in itertools.product(
        DIVIDED, PRECISIONS, METHODS, RANKS, (LLAMA, SMALL, MIXTURE)
    ):
        engine, stage, optimizer_device, parameter_device = divided
        for accumulation, checkpointing, flash, fp32, zero_init in itertools.product(
            (1, 4), both, both, both, both
        ):
            yield Setup(
                shape,
                gpus=gpus,
                nodes=nodes,
                engine=engine,
                stage=stage,
                optimizer_device=optimizer_device,
                parameter_device=parameter_device,
                precision=precision,
                method=method,
                adapters=0 if method == "full" else lora_weights(shape, 16),
                quantized="nf4" if method == "qlora" else None,
                quantized_head=method == "qlora" and flash,
                seq_len=128,
                grad_accum=accumulation,
                checkpointing=checkpointing,
                activations_device="cpu" if checkpointing and flash else "gpu",
                flash=flash,
                fp32_gradients=fp32,
                zero_init=zero_init,
                secondary=nodes,
                async_save=fp32,
                fp8="rowwise" if engine == "fsdp" and zero_init else "",
                ep=4 if shape is MIXTURE and stage and gpus > 1 else 1,
            )


@cache
def occurring():
    """Kind of plan -> the names of all terms that aren't zero everywhere, and how many set-ups were looked at."""
    names = {kind: set() for kind in TABLES}
    looked = 0
    for setup in itertools.islice(setups(), 0, None, STRIDE):
        looked += 1
        for kind, found in (
            ("gpu", gpu_memory.gpu_memory(setup).terms),
            ("host", host_memory(setup).terms),
            ("host on CPUs", host_memory(setup, accelerator="cpu").terms),
            ("speed", speed(setup, V100).terms),
        ):
            names[kind].update(name for name, size in found.items() if size)
    return names, looked


def test_the_grid_is_broad():
    _, looked = occurring()
    assert looked * STRIDE > 30_000
    assert {engine for engine, *_ in DIVIDED} == set(ENGINES)


@pytest.mark.parametrize("kind", ["gpu", "host", "speed"])
def test_every_term_has_its_words(kind):
    names, _ = occurring()
    assert names[kind] - set(TABLES[kind]) == set()


def test_every_term_on_cpus_has_its_words():
    """Terms of a GPU are in the host's memory there, under the GPU's names."""
    names, _ = occurring()
    assert names["host on CPUs"] - set(terms.HOST) - set(terms.GPU) == set()


@pytest.mark.parametrize("kind", ["gpu", "speed"])
def test_no_words_are_dead(kind):
    names, _ = occurring()
    assert set(TABLES[kind]) - names[kind] == set()


def test_no_words_of_the_host_are_dead():
    names, _ = occurring()
    assert set(terms.HOST) - names["host"] - names["host on CPUs"] == set()


def test_every_moment_has_its_words():
    assert set(terms.MOMENTS) == set(gpu_memory.gpu_memory(Setup(LLAMA)).peaks)
    assert len(set(terms.MOMENTS.values())) == len(terms.MOMENTS)


@pytest.mark.parametrize("kind", ["gpu", "host", "speed"])
def test_words_are_written(kind):
    for name, term in TABLES[kind].items():
        assert all(text.strip() == text and text for text in term), name


@pytest.mark.parametrize("preset", ["ddp", "zero3-offload"])
def test_components_without_a_gpu(dsrun, monkeypatch, preset):
    """Every term in use is printed where the ranks are CPUs, and those that have words with them."""
    from dsrun.cluster import devices

    monkeypatch.setattr(devices, "_ask_nvml", devices.NvmlAnswer)
    said = dsrun("plan", "chatglm2-tiny", "--components", "--preset", preset)
    assert said.code == 0, said.err
    for name in ("activations", "logits", "layer"):
        assert terms.GPU[name].what in said.out
    assert terms.HOST["processes"].what in said.out
    assert terms.SPEED["compute"].what in said.out


def test_components_of_a_gpu(dsrun):
    said = dsrun(
        "plan", "chatglm2-6b", "--gpu", "v100-32g", "--gpus", "2", "--components", "--preset", "zero3-offload"
    )
    assert said.code == 0, said.err
    for table, names in (
        (terms.GPU, ["reduce_bucket", "gathered"]),
        (terms.HOST, ["pinned_twice", "gradient_shard"]),
    ):
        for name in names:
            assert f"{name} " in said.out
            assert f"{table[name].what}: {table[name].formula} ({table[name].source})" in said.out
    assert terms.SPEED["cpu_optimizer"].formula in said.out
    assert terms.MOMENTS["middle"] in said.out
