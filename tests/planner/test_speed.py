"""The speed model: against published throughput, in the order of ways to divide a job, and as a function."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from dataclasses import replace

import pytest
from choices import ENGINES, PRECISIONS
from hypothesis import given
from hypothesis import strategies as st

from dsrun.planner import gpus, shapes
from dsrun.planner.lora import lora_weights
from dsrun.planner.setup import OPTIMIZERS, QUANTIZED, Setup
from dsrun.planner.shape import Shape, from_numbers
from dsrun.planner.speed import FP8, Hardware, slow_network, speed, traffic

LLAMA_7B = Shape(6_738_415_616, 32, 4096, 11008, 32, 32, 128, 32000)
QWEN_7B = Shape(7_721_324_544, 32, 4096, 11008, 32, 32, 128, 151936)
EIGHT_A100 = Hardware.from_gpu(gpus.load("a100-80g"), 8)
EIGHT_PCIE = Hardware.from_gpu(gpus.load("a100-80g-pcie"), 8)
FOUR_V100 = Hardware.from_gpu(gpus.load("v100-32g"), 4)

# llm-foundry's scripts/train/benchmarking/README.md: every fifth of 55 rows. FSDP, MPT models, flash attention.
# GPU, weights, layers, hidden, GPUs, seq_len, micro batch, accumulation, checkpointing -> tokens/s of one GPU.
LLM_FOUNDRY = [
    ("a100-80g", 64862437376, 80, 8192, 64, 2048, 8, 4, True, 410),
    ("a100-80g", 29975214080, 48, 7168, 8, 512, 12, 21, True, 967),
    ("a100-80g", 12853954560, 40, 5120, 8, 2048, 2, 3, False, 2262),
    ("a100-80g", 6658859008, 32, 4096, 8, 4096, 16, 2, True, 3684),
    ("a100-80g", 2651837440, 32, 2560, 8, 2048, 10, 2, False, 10811),
    ("a100-40g", 64862437376, 80, 8192, 64, 2048, 2, 1, True, 276),
    ("a100-40g", 12853954560, 40, 5120, 128, 2048, 16, 1, True, 1972),
    ("a100-40g", 6658859008, 32, 4096, 8, 16384, 1, 4, True, 2249),
    ("a100-40g", 2651837440, 32, 2560, 8, 8192, 1, 4, False, 7149),
    ("h100-80g", 64862437376, 80, 8192, 64, 2048, 8, 4, True, 1039),
    ("h100-80g", 12853954560, 40, 5120, 8, 2048, 2, 3, False, 4792),
]
# gist.github.com/chenyaofo/d4cd6a20: Llama-7B, 4096 tokens, eight A800, DeepSpeed 0.14.2.
# stage, optimizer and weights on, micro batch, accumulation, checkpointing -> rows/s of all.
GIST = {
    "zero2": (2, "gpu", "gpu", 1, 8, False, 5.33),
    "zero2 checkpointing": (2, "gpu", "gpu", 1, 8, True, 4.19),
    "zero2 checkpointing, 4 rows": (2, "gpu", "gpu", 4, 2, True, 4.69),
    "zero2 offload": (2, "cpu", "gpu", 1, 8, True, 1.81),
    "zero3": (3, "gpu", "gpu", 2, 4, False, 4.95),
    "zero3 checkpointing": (3, "gpu", "gpu", 2, 4, True, 4.45),
    "zero3 checkpointing, 8 rows": (3, "gpu", "gpu", 8, 1, True, 4.73),
    "zero3 offload": (3, "cpu", "gpu", 2, 4, True, 2.05),
    "zero3 offload of both": (3, "cpu", "cpu", 4, 2, True, 2.06),
}
# Qwen's README: seconds an iteration of 8 rows, A100-80G, checkpointing. method, quantized, stage, GPUs, tokens -> s.
QWEN = [
    ("lora", None, None, 1, 256, 1.2),
    ("lora", None, None, 1, 1024, 2.8),
    ("lora", None, None, 1, 2048, 5.2),
    ("lora", None, None, 1, 8192, 21.3),
    ("qlora", "gptq4", None, 1, 256, 3.0),
    ("qlora", "gptq4", None, 1, 2048, 7.0),
    ("qlora", "gptq4", None, 1, 8192, 22.3),
    ("full", None, 3, 2, 256, 4.0),
    ("full", None, 3, 2, 512, 4.0),
    ("full", None, 3, 2, 1024, 4.5),
]


def job(**changes):
    return replace(
        Setup(LLAMA_7B, gpus=8, stage=2, seq_len=2048, micro_batch=2, grad_accum=4, checkpointing=1),
        **changes,
    )


def tokens(hardware=EIGHT_A100, **changes):
    return speed(job(**changes), hardware).tokens_per_second


def mpt(row):
    gpu, weights, layers, hidden, ranks, seq_len, micro, again, checkpointing, measured = row
    heads = hidden // 128
    shape = Shape(weights, layers, hidden, 4 * hidden, heads, heads, 128, 50368, gated=False)
    setup = Setup(
        shape, gpus=ranks, nodes=ranks // 8, engine="fsdp", seq_len=seq_len, micro_batch=micro, grad_accum=again,
        checkpointing=checkpointing,
    )  # fmt: skip
    # Eight 200 Gbit/s ports a node; one constant for both machines' efficiencies, 0.65 and 0.48.
    hardware = replace(
        Hardware.from_gpu(gpus.load(gpu), 8),
        network_gb_s=200,
        bytes_an_operation=FUSED,
    )
    return speed(setup, hardware).tokens_per_second / ranks / measured


FUSED, IN_2023 = 0.0036, 0.008
"""Bytes an operation of llm-foundry's kernels, and of transformers' in 2023."""


def gist(row):
    stage, optimizer, weights, micro, again, checkpointing, _ = row
    setup = job(
        stage=stage, optimizer_device=optimizer, parameter_device=weights, seq_len=4096, micro_batch=micro,
        grad_accum=again, checkpointing=checkpointing, reentrant=True,
    )  # fmt: skip
    machine = replace(Hardware.from_gpu(gpus.load("a800-80g"), 8), bytes_an_operation=IN_2023)
    return speed(setup, machine).tokens_per_second / 4096


def test_llm_foundrys_throughput():
    errors = [abs(mpt(row) - 1) for row in LLM_FOUNDRY]
    assert statistics.median(errors) <= 0.12
    assert max(errors) <= 0.30


def test_the_gists_strategies():
    ratios = {name: gist(row) / row[-1] for name, row in GIST.items()}
    assert statistics.median(abs(ratio - 1) for ratio in ratios.values()) <= 0.10
    assert all(0.9 <= ratio <= 1.2 for ratio in ratios.values()), ratios


def test_the_gists_order():
    """Rows that differ by more than a tenth stand in the measured order."""
    for name, row in GIST.items():
        for other, second in GIST.items():
            if row[-1] > 1.1 * second[-1]:
                assert gist(row) > gist(second), (name, other)


def test_offload_costs_what_the_gist_shows():
    def cost(fast, slow):
        return gist(GIST[fast]) / gist(GIST[slow]), GIST[fast][-1] / GIST[slow][-1]

    for fast, slow in (("zero2 checkpointing", "zero2 offload"), ("zero3 checkpointing", "zero3 offload")):
        predicted, measured = cost(fast, slow)
        assert predicted == pytest.approx(measured, rel=0.25)


def test_qwens_seconds_an_iteration():
    ratios = []
    for method, quantized, stage, ranks, seq_len, measured in QWEN:
        setup = Setup(
            QWEN_7B, gpus=ranks, engine="torch" if stage is None else "deepspeed", stage=stage or 0, method=method,
            precision="pure" if method == "lora" else "bf16", adapters=lora_weights(QWEN_7B, 64), quantized=quantized,
            seq_len=seq_len, grad_accum=8, checkpointing=1, reentrant=True,
        )  # fmt: skip
        if method == "full":
            setup = replace(setup, adapters=0)
        ratios.append(speed(setup, EIGHT_A100).seconds_per_step / measured)
    assert statistics.median(abs(ratio - 1) for ratio in ratios) <= 0.10
    assert all(0.75 <= ratio <= 1.25 for ratio in ratios), ratios


@pytest.mark.parametrize("again", [1, 2, 8])
def test_stages_in_order_and_close_on_nvlink(again):
    one, two, three = (tokens(stage=stage, grad_accum=again, reentrant=True) for stage in (1, 2, 3))
    assert one >= two >= three >= 0.95 * one
    assert tokens(stage=2, grad_accum=again) > 1.02 * two, (
        "nothing is computed again that backward has no use for"
    )
    assert tokens(stage=3, grad_accum=again) == three, "of ZeRO-3 all is"


def test_ddp_steps_all_weights_on_every_gpu():
    assert tokens(stage=0, grad_accum=64) == pytest.approx(tokens(stage=1, grad_accum=64), rel=0.01)
    alone = speed(job(stage=0), EIGHT_A100).terms["optimizer"]
    assert alone == pytest.approx(8 * speed(job(stage=1), EIGHT_A100).terms["optimizer"])


def test_gaps_are_larger_without_nvlink():
    for hardware in (EIGHT_PCIE, replace(FOUR_V100, link_gb_s=10, bf16=True)):
        one, two, three = (tokens(hardware, stage=stage, reentrant=True) for stage in (1, 2, 3))
        assert one > two > three
        assert 1 - three / one > 4 * (1 - tokens(stage=3) / tokens(stage=1, reentrant=True))


def test_larger_micro_batches_help_zero3_more():
    def gain(stage):
        few = tokens(EIGHT_PCIE, stage=stage, micro_batch=1, grad_accum=8)
        return tokens(EIGHT_PCIE, stage=stage, micro_batch=8, grad_accum=1) / few

    assert gain(3) > 1.5 * gain(1)


@pytest.mark.parametrize("hardware", [EIGHT_A100, EIGHT_PCIE])
def test_offload_in_order(hardware):
    plain = tokens(hardware, stage=3)
    weights = tokens(hardware, stage=3, parameter_device="cpu")
    states = tokens(hardware, stage=3, optimizer_device="cpu")
    both = tokens(hardware, stage=3, optimizer_device="cpu", parameter_device="cpu")
    nvme = tokens(hardware, stage=3, optimizer_device="nvme", parameter_device="cpu")
    all_nvme = tokens(hardware, stage=3, optimizer_device="nvme", parameter_device="nvme")
    assert plain > weights > states > both > nvme > all_nvme
    assert 1.4 < plain / states < 5


@pytest.mark.parametrize("seq_len", [512, 2048, 8192])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_checkpointing_costs_a_fifth_to_a_quarter(stage, seq_len):
    setup = {"stage": stage, "seq_len": seq_len, "micro_batch": 16384 // seq_len}
    cost = 1 - tokens(checkpointing=1, **setup) / tokens(checkpointing=0, **setup)
    assert 0.11 <= cost <= 0.39


def test_a_lora_step_is_two_thirds_of_a_full_one():
    lora = {"method": "lora", "adapters": lora_weights(LLAMA_7B, 8), "gpus": 1, "stage": 0, "seq_len": 512}
    for checkpointing, share in ((0, 4 / 6), (1, 6 / 8)):
        full = speed(job(gpus=1, stage=0, seq_len=512, checkpointing=checkpointing), EIGHT_A100).terms
        less = speed(job(checkpointing=checkpointing, **lora), EIGHT_A100).terms
        assert less["compute"] / full["compute"] == pytest.approx(share, rel=0.02)
        assert less["optimizer"] < 0.01 * full["optimizer"]


def test_lora_sends_no_gradients_of_frozen_weights():
    adapters = lora_weights(LLAMA_7B, 8)
    psi, lora = LLAMA_7B.parameters, {"method": "lora", "adapters": adapters}
    assert traffic(job(stage=3)).step(4) == 4 * 6 * psi
    assert traffic(job(stage=2)).step(4) == 10 * psi
    assert traffic(job(stage=1)).step(4) == traffic(job(stage=0)).step(4) == 4 * psi
    assert traffic(job(stage=2, **lora)).step(4) == 10 * adapters
    assert traffic(job(stage=3, **lora)).step(4) == 4 * (4 * psi + 6 * adapters)
    assert traffic(job(stage=3, precision="fp32")).step(4) == 4 * 12 * psi


def test_short_rows_wait_for_python():
    terms = speed(job(stage=3, seq_len=128, micro_batch=1), EIGHT_A100).terms
    assert terms["launch"] > terms["compute"]
    assert terms["launch"] + terms["compute"] == pytest.approx(4 * 32 * 0.0155)
    assert speed(job(), EIGHT_A100).terms["launch"] == 0


def test_precision_decides_the_rate():
    def compute(hardware, precision):
        return speed(job(precision=precision, seq_len=1024), hardware).terms["compute"]

    assert compute(EIGHT_A100, "fp32") / compute(EIGHT_A100, "bf16") == pytest.approx(312 / 19.5)
    assert compute(FOUR_V100, "bf16") == compute(FOUR_V100, "fp32")
    assert compute(FOUR_V100, "fp32") / compute(FOUR_V100, "fp16") == pytest.approx(125 / 15.7)


def test_several_nodes_go_at_the_networks_pace():
    one = speed(job(stage=3), EIGHT_A100)
    assert one.bytes_per_step == 0
    two = speed(job(stage=3, gpus=16, nodes=2), EIGHT_A100)
    assert two.bytes_per_step == 4 * 6 * LLAMA_7B.parameters / 2
    assert two.terms["communication"] > 10 * one.terms["communication"]
    fast = replace(EIGHT_A100, network_gb_s=1000)
    assert (
        speed(job(stage=3, gpus=16, nodes=2), fast).terms["communication"] < two.terms["communication"] / 10
    )


def test_slow_network_says_what_to_do():
    setup = job(stage=3, gpus=16, nodes=2, micro_batch=1)
    said = slow_network(setup, EIGHT_A100)
    assert said is not None
    for words in (
        "80.9 GB",
        "6.47 s",
        "12.5 GB/s",
        "zero_hpz_partition_size 8",
        "53.9 GB",
        "ZeRO-2",
        "33.7 GB",
    ):
        assert words in said
    assert slow_network(setup, replace(EIGHT_A100, network_gb_s=200)) is None
    assert slow_network(replace(setup, stage=2), EIGHT_A100) is None
    assert slow_network(replace(setup, nodes=1), EIGHT_A100) is None
    assert slow_network(replace(setup, engine="fsdp"), EIGHT_A100) is None
    alone = slow_network(replace(setup, gpus=2), EIGHT_A100)
    assert alone is not None
    assert "zero_hpz" not in alone


def test_a_second_copy_in_each_node_halves_what_is_gathered_between_them():
    """Three times the weights' size become two: gathered for forward, and the gradients (arXiv 2306.10209)."""
    setup = job(stage=3, gpus=16, nodes=2, micro_batch=1)
    plain, copied = (speed(replace(setup, secondary=size), EIGHT_A100) for size in (1, 8))
    assert copied.bytes_per_step == pytest.approx(plain.bytes_per_step * 2 / 3)
    assert copied.seconds_per_step < plain.seconds_per_step
    over_nodes = speed(replace(setup, secondary=16), EIGHT_A100)
    assert over_nodes.bytes_per_step == plain.bytes_per_step
    said = slow_network(replace(setup, secondary=8), EIGHT_A100)
    assert said is not None and "zero3-hpz" not in said


def test_rounded_numbers_on_their_way_between_nodes():
    """A weight's 2 bytes become 1 in each gather (qwZ), a gradient's 2 become 1/2 (qgZ, arXiv 2306.10209)."""
    setup = job(stage=3, gpus=16, nodes=2, micro_batch=1, secondary=8)
    psi, steps = LLAMA_7B.parameters, setup.grad_accum

    def bytes_of(**fields):
        return speed(replace(setup, **fields), EIGHT_A100).bytes_per_step * 2 / steps / psi

    assert bytes_of() == pytest.approx(4)
    assert bytes_of(quantized_gather=True) == pytest.approx(3)
    assert bytes_of(quantized_gather=True, quantized_reduce=True) == pytest.approx(1.5)
    assert bytes_of(secondary=1, quantized_gather=True) == pytest.approx(4)
    assert bytes_of(secondary=1, quantized_reduce=True) == pytest.approx(4.5)
    assert speed(replace(setup, nodes=1, gpus=8, quantized_reduce=True), EIGHT_A100) == speed(
        replace(setup, nodes=1, gpus=8), EIGHT_A100
    ), "on one node gradients are reduced as they are"
    seconds = [
        speed(replace(setup, quantized_gather=gather, quantized_reduce=reduce), EIGHT_A100).seconds_per_step
        for gather, reduce in ((False, False), (True, False), (True, True))
    ]
    assert seconds == sorted(seconds, reverse=True) and len(set(seconds)) == 3


def test_fp8_as_torchtitan_measured_it():
    """Llama-3-8B on 8 H100s, 8k tokens: 6,424 / 5,760 rowwise, 7,186 / 5,760 tensorwise (its commit 7a04053)."""
    h100 = Hardware.from_gpu(gpus.load("h100-80g"), 8)
    llama_3 = from_numbers(
        8.03e9, layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, vocab=128256
    )
    setup = Setup(llama_3, gpus=8, engine="fsdp", stage=0, precision="amp", seq_len=8192, checkpointing=2)
    plain, rowwise, tensorwise = (
        speed(replace(setup, fp8=way), h100).tokens_per_second for way in ("", *FP8)
    )
    assert rowwise / plain == pytest.approx(6424 / 5760, rel=0.03)
    assert tensorwise / plain == pytest.approx(7186 / 5760, rel=0.04)
    for other in ({"engine": "deepspeed", "stage": 2}, {"method": "lora", "adapters": 10**7}):
        changed = replace(setup, **other)
        assert speed(replace(changed, fp8="rowwise"), h100) == speed(changed, h100)


def test_a_nodes_gpus_share_its_way_to_the_host():
    a100 = gpus.load("a100-80g")
    assert Hardware.from_gpu(gpus.load("v100-32g"), 1).pcie_gb_s == 12
    assert Hardware.from_gpu(a100, 8).pcie_gb_s == Hardware.from_gpu(a100, 1).pcie_gb_s == 24
    assert Hardware.from_gpu(gpus.load("h100-80g"), 8).pcie_gb_s == 48


def test_utilisation_counts_nothing_twice():
    found = speed(job(gpus=1, stage=0, grad_accum=64, reentrant=True), EIGHT_A100)
    without = speed(job(gpus=1, stage=0, grad_accum=64, checkpointing=0), EIGHT_A100)
    assert 0.49 < without.model_flops_utilisation < 0.54
    assert found.model_flops_utilisation == pytest.approx(0.75 * without.model_flops_utilisation, rel=0.02)


SETUPS = st.builds(
    Setup,
    shape=st.builds(
        Shape,
        parameters=st.integers(10**6, 10**12),
        layers=st.integers(1, 128),
        hidden=st.integers(64, 16384),
        intermediate=st.integers(64, 65536),
        heads=st.integers(1, 128),
        kv_heads=st.just(1),
        head_dim=st.sampled_from([64, 128]),
        vocab=st.integers(100, 300_000),
    ),
    gpus=st.sampled_from([1, 2, 3, 4, 8, 16]),
    engine=st.sampled_from(ENGINES),
    stage=st.sampled_from([0, 1, 2, 3]),
    optimizer_device=st.sampled_from(["gpu", "cpu", "nvme"]),
    parameter_device=st.sampled_from(["gpu", "cpu", "nvme"]),
    precision=st.sampled_from(PRECISIONS),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    method=st.sampled_from(["full", "lora", "qlora"]),
    adapters=st.integers(0, 10**8),
    copies=st.integers(0, 10**8),
    quantized=st.sampled_from([None, *QUANTIZED]),
    seq_len=st.integers(1, 131072),
    micro_batch=st.integers(1, 64),
    grad_accum=st.integers(1, 64),
    checkpointing=st.sampled_from((0, 1, 3)),
    flash=st.booleans(),
)
HARDWARE = st.builds(
    Hardware.from_gpu, st.sampled_from(list(gpus.catalog.files(gpus.KIND))).map(gpus.load), st.just(8)
)


@given(SETUPS, HARDWARE, st.integers(1, 8))
def test_terms_are_positive_and_add_up(setup, hardware, nodes):
    setup = replace(setup, gpus=setup.gpus * nodes, nodes=nodes)
    found = speed(setup, hardware)
    assert 0 < found.seconds_per_step < math.inf
    assert all(0 <= seconds < math.inf for seconds in found.terms.values())
    assert math.fsum(found.terms.values()) == pytest.approx(found.seconds_per_step)
    assert found.tokens_per_second * found.seconds_per_step == pytest.approx(
        setup.gpus * setup.grad_accum * setup.tokens
    )
    assert 0 < found.model_flops_utilisation <= hardware.efficiency
    assert (found.bytes_per_step == 0) == (nodes == 1 or traffic(setup).step(1) == 0)
    assert found.uncertain > 1
    slow_network(setup, hardware)


@given(SETUPS, HARDWARE, st.integers(2, 63))
def test_more_gpus_in_a_node_are_never_slower_in_all(setup, hardware, ranks):
    """Speed from two GPUs on: the second one brings the communication with it."""
    fewer = speed(replace(setup, gpus=ranks), hardware).tokens_per_second
    assert speed(replace(setup, gpus=ranks + 1), hardware).tokens_per_second >= fewer * (1 - 1e-9)


@given(SETUPS, HARDWARE, st.integers(2, 63), st.integers(1, 8))
def test_more_nodes_are_never_slower_in_all(setup, hardware, nodes, each):
    """Speed from two nodes on, of the same kind."""
    fewer = speed(replace(setup, gpus=nodes * each, nodes=nodes), hardware).tokens_per_second
    more = speed(replace(setup, gpus=(nodes + 1) * each, nodes=nodes + 1), hardware).tokens_per_second
    assert more >= fewer * (1 - 1e-9)


@given(
    SETUPS,
    HARDWARE,
    st.sampled_from(
        [
            "matrix_tflops",
            "fp32_tflops",
            "memory_gb_s",
            "link_gb_s",
            "network_gb_s",
            "pcie_gb_s",
            "cpu_gb_s",
            "nvme_gb_s",
        ]
    ),
)
def test_better_hardware_is_never_slower(setup, hardware, field):
    setup = replace(setup, gpus=2 * setup.gpus, nodes=2)
    better = replace(hardware, **{field: 2 * getattr(hardware, field)})
    assert speed(setup, better).seconds_per_step <= speed(setup, hardware).seconds_per_step * (1 + 1e-9)


@given(SETUPS, HARDWARE)
def test_less_to_do_is_never_slower(setup, hardware):
    there = speed(setup, hardware).seconds_per_step * (1 + 1e-9)
    assert speed(replace(setup, checkpointing=0), hardware).seconds_per_step <= there
    assert speed(replace(setup, flash=True), hardware).seconds_per_step <= there
    assert speed(replace(setup, grad_accum=1), hardware).seconds_per_step <= there


def test_torch_is_not_imported():
    code = "import sys, dsrun.planner.speed, dsrun.planner.gpus; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- mixtures of experts, short rows ---

MIXTURE = shapes.shape("qwen3-30b-a3b", None)[0]
A800 = Hardware.from_gpu(gpus.load("a800-80g"), 8)


def seconds(setup, hardware=A800):
    return speed(setup, hardware).seconds_per_step


def test_experts_in_a_loop_take_a_layers_time_each_under_zero3():
    """As published of Qwen3-30B-A3B on 16 A800: 91.2 s a step, where Megatron takes 9.6."""
    asked = Setup(MIXTURE, gpus=16, nodes=2, stage=3, seq_len=8192, checkpointing=1, looped_experts=True)
    assert seconds(asked) == pytest.approx(91.2, rel=0.2)
    grouped = seconds(asked.changed(looped_experts=False))
    assert grouped < seconds(asked) / 5
    below = asked.changed(stage=2)
    assert seconds(below.changed(looped_experts=False)) < seconds(below) < seconds(asked)


def test_an_experts_operations_move_more_than_a_dense_blocks():
    """Its tokens are brought together and apart: an operation of a narrow expert takes longer."""
    dense = shapes.shape("llama-3-8b", None)[0]
    asked = {"gpus": 8, "stage": 2, "seq_len": 4096, "micro_batch": 4}
    assert speed(Setup(MIXTURE, **asked), A800).model_flops_utilisation < 0.6 * (
        speed(Setup(dense, **asked), A800).model_flops_utilisation
    )
    wide = shapes.shape("mixtral-8x7b", None)[0]
    mfu = [speed(Setup(shape, **asked), A800).model_flops_utilisation for shape in (MIXTURE, wide, dense)]
    assert mfu == sorted(mfu)


def test_short_rows_wait_for_their_small_kernels():
    """Where launching takes as long as computing, a step takes longer than either; far from there, the longer."""
    shape = shapes.shape("llama-2-7b", None)[0]
    alone = replace(A800, link_gb_s=1e6)

    def split(tokens):
        found = speed(Setup(shape, gpus=1, stage=0, seq_len=tokens), alone)
        return found.terms["compute"], found.terms["launch"]

    started = 32 * 5e-3
    for tokens in (32, 64):
        compute, launch = split(tokens)
        assert compute + launch == pytest.approx(started)
    even = min(range(128, 2048, 64), key=lambda tokens: abs(split(tokens)[0] - started))
    assert sum(split(even)) > 1.2 * started
    assert split(16384)[1] == 0
