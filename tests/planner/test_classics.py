"""Runs that everybody knows, numbers that tracebacks and READMEs hold to the last digit, and what holds for any run.

A run fits where what torch allocates, the CUDA context and NCCL together are no more than the card.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import examples

from dsrun.planner.gpu_memory import GIB, gpu_memory, persistent, temporary
from dsrun.planner.lora import lora_weights
from dsrun.planner.setup import OPTIMIZERS, Setup
from dsrun.planner.shape import Shape
from dsrun.planner.terms import MOMENTS

MIB = 2**20
CHATGLM = Shape(6_243_584_000, 28, 4096, 13696, 32, 2, 128, 65024)  # ChatGLM2-6B and ChatGLM3-6B
LLAMA_2_7B = Shape(6_738_415_616, 32, 4096, 11008, 32, 32, 128, 32000)
LLAMA_2_13B = Shape(13_015_864_320, 40, 5120, 13824, 40, 40, 128, 32000)
LLAMA_2_70B = Shape(68_976_648_192, 80, 8192, 28672, 64, 8, 128, 32000)


def needed_gib(setup):
    """Memory that a card needs: torch's peak, CUDA's context, NCCL."""
    memory = gpu_memory(setup)
    return (memory.allocated + memory.smi - memory.reserved) / GIB


def parameters(count):
    """A shape that is nothing but so many weights."""
    return Shape(round(count), 1, 0, 0, 1, 1, 0, 0)


# --- the classics ---------------------------------------------------------------------------------------------------

# ChatGLM2-6B's own ptuning/ds_train_finetune.sh: 64 + 64 tokens, 4 rows, fp16, ZeRO-2.
ADVERTISING = Setup(
    CHATGLM, gpus=2, stage=2, precision="fp16", seq_len=128, micro_batch=4, flash=False, logits_bytes=16
)


def test_chatglm2_on_two_v100_with_offload_fits():
    memory = gpu_memory(replace(ADVERTISING, optimizer_device="cpu"))
    assert needed_gib(replace(ADVERTISING, optimizer_device="cpu")) < 32
    # Also while it starts: the weights and a copy of a rank's share of them.
    assert memory.peaks["start"] == 3 * CHATGLM.parameters
    assert memory.peaks["start"] < 32 * GIB
    # And, if there is room, the flat copy of them (2 x 11.6 GiB).
    assert memory.allocated == memory.peaks["flat"] == 4 * CHATGLM.parameters
    assert gpu_memory(replace(ADVERTISING, optimizer_device="cpu"), room=16 * GIB).peaks["flat"] == 0


def test_chatglm2_on_two_v100_without_offload_does_not():
    assert needed_gib(ADVERTISING) > 2 * 32


def test_chatglm2_on_four_24_gib_cards_does_not():
    assert needed_gib(replace(ADVERTISING, gpus=4)) > 24


def test_chatglm3_sft_is_what_its_readme_says():
    """ChatGLM3, finetune_demo: four GPUs, each with 48,346 MiB in nvidia-smi (README.md, configs/sft.yaml).

    ds_zero_3.json has DeepSpeed's AdamW, "auto" buckets and "auto" bf16, which sft.yaml doesn't turn on: it trains in
    fp32, to which finetune_hf.py converts the weights. 256 + 512 tokens and one are the most that it lets through (how
    long its rows really were, nobody says), 4 rows, each batch padded to its longest; blocks are recomputed.
    """
    square = CHATGLM.hidden**2
    setup = Setup(
        CHATGLM, gpus=4, stage=3, precision="fp32", seq_len=769, micro_batch=4, checkpointing=1,
        variable_lengths=True, logits_bytes=16, overlap_comm=True, reduce_bucket=square,
    )  # fmt: skip
    assert gpu_memory(setup).smi / MIB == pytest.approx(48_346, rel=0.10)


def test_llama_2_70b_on_two_nodes_of_eight_a100_80g_fits():
    setup = Setup(LLAMA_2_70B, gpus=16, nodes=2, stage=3, seq_len=2048, checkpointing=1)
    assert needed_gib(setup) < 80
    assert needed_gib(replace(setup, gpus=8, nodes=1)) > 80
    assert needed_gib(replace(setup, stage=2)) > 80


def test_llama_2_7b_wants_more_than_one_80_gib_card():
    """2 + 2 + 12 bytes a weight: 100 GiB (transformers' model_memory_anatomy.md: 18 with amp)."""
    one = Setup(LLAMA_2_7B, stage=0, checkpointing=1)
    assert needed_gib(one) > 100
    assert needed_gib(replace(one, gpus=8, stage=3)) < 24
    assert needed_gib(replace(one, stage=2, optimizer_device="cpu")) < 40


def test_zero_offload_s_13b_on_one_32_gib_card_needs_more_now():
    """The paper's 13B on one V100 (arXiv 2101.06840) was of a DeepSpeed that cloned the weights on the host."""
    setup = Setup(
        LLAMA_2_13B, stage=2, optimizer_device="cpu", precision="fp16", seq_len=1024, checkpointing=1
    )
    memory = gpu_memory(setup)
    assert memory.decisive == "start"
    assert memory.needed == 4 * LLAMA_2_13B.parameters > 32 * GIB
    assert max(memory.peaks[moment] for moment in ("turn", "middle", "end", "step")) < 32 * GIB


# --- tracebacks, exactly --------------------------------------------------------------------------------------------


def test_zero_2_steps_with_20_bytes_a_share():
    """hiyouga/LLaMA-Factory#1158: 13.9e9 weights on 4 GPUs; "tried to allocate 12.94 GiB" with 77.65 in use."""
    setup = Setup(parameters(12.94 * GIB), gpus=4, stage=2, seq_len=1)
    psi = setup.shape.parameters
    step = gpu_memory(setup).peaks["step"]
    assert step == pytest.approx(2 * psi + 20 * psi / 4)
    assert step / GIB == pytest.approx(77.65 + 12.94, abs=0.03)


def test_zero_2_starts_with_gradients_of_zeros():
    """shibing624/MedicalGPT#318: 34.4e9 weights on 16 GPUs; "tried to allocate 8.01 GiB" with 72.18 in use."""
    setup = Setup(parameters(8.01 * GIB * 16 / 4), gpus=16, stage=2, seq_len=1)
    psi = setup.shape.parameters
    start = gpu_memory(setup).peaks["start"]
    assert start == pytest.approx(2 * psi + 8 * psi / 16)
    assert start / GIB == pytest.approx(72.18 + 8.01, abs=0.2)


def test_zero_3_steps_a_sub_group_at_a_time():
    """stage3.py: flat 16-bit gradients and their fp32 copy, 6 bytes an element of the sub-group.

    hiyouga/LLaMA-Factory#2959, 72.3e9 weights on 16 GPUs, stepped its whole share at once: 16.83 GiB for the copy.
    """
    setup = Setup(LLAMA_2_70B, gpus=16, stage=3)
    assert temporary(setup)["step"] == 6e9 * min(1, LLAMA_2_70B.parameters / 16 / 1e9)
    qwen = Setup(parameters(16.83 * GIB * 16 / 4), gpus=16, stage=3, sub_group=10**12)
    assert temporary(qwen)["step"] / GIB == pytest.approx(16.83 * 6 / 4, abs=0.01)
    assert temporary(replace(setup, optimizer_device="cpu"))["step"] == 0


def test_torch_adamw_needs_a_square_root_more():
    """torch/optim/adam.py, _foreach_sqrt: 4 bytes an element that is stepped, where FusedAdam needs none."""
    setup = Setup(LLAMA_2_7B, gpus=8, stage=3)
    torch = temporary(replace(setup, fused_adam=False))["step"]
    assert torch - temporary(setup)["step"] == 2 * min(LLAMA_2_7B.parameters / 8, 1e9)
    # Stage 2 has dropped its list of gradients by then (stage_1_and_2.py), which is as much.
    below = replace(setup, stage=2)
    assert temporary(replace(below, fused_adam=False))["step"] == temporary(below)["step"]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_zero_2_offload_on_one_gpu_starts_with_4_bytes_a_weight(precision):
    setup = Setup(LLAMA_2_7B, gpus=1, stage=2, optimizer_device="cpu", precision=precision)
    assert gpu_memory(setup).peaks["start"] == 4 * LLAMA_2_7B.parameters


def test_lora_on_one_gpu_holds_the_weights_and_little_more():
    adapters = lora_weights(LLAMA_2_7B, 8, ("q", "v"))
    held = persistent(
        Setup(LLAMA_2_7B, engine="torch", stage=0, precision="pure", method="lora", adapters=adapters)
    )
    assert adapters == 4_194_304  # what PEFT prints
    assert held["weights"] == 2 * LLAMA_2_7B.parameters
    assert sum(held.values()) - held["weights"] == 12 * adapters


# --- any run --------------------------------------------------------------------------------------------------------

SHAPES = st.sampled_from(
    [CHATGLM, LLAMA_2_7B, LLAMA_2_70B, Shape(125_000_000, 12, 768, 3072, 12, 12, 64, 50257)]
)


@st.composite
def setups(draw):
    """A set-up that can be."""
    engine = draw(st.sampled_from(["deepspeed", "deepspeed", "fsdp", "torch"]))
    stage = draw(st.integers(0, 3)) if engine == "deepspeed" else 0
    devices = st.sampled_from(["gpu", "cpu", "nvme"])
    optimizer_device = draw(devices) if stage >= 1 else "gpu"
    precisions = {"deepspeed": ["fp32", "fp16", "bf16"]}.get(engine, ["fp32", "amp", "pure"])
    shape = draw(SHAPES)
    lora = draw(st.booleans())
    gpus = 1 if engine == "torch" else draw(st.sampled_from([1, 2, 4, 8, 64]))
    return Setup(
        shape,
        gpus=gpus,
        nodes=max(1, gpus // 8),
        engine=engine,
        stage=stage,
        optimizer_device=optimizer_device,
        parameter_device=draw(devices) if stage == 3 and optimizer_device != "gpu" else "gpu",
        precision=draw(st.sampled_from(precisions)),
        optimizer=draw(st.sampled_from(sorted(OPTIMIZERS))),
        method="lora" if lora else "full",
        adapters=lora_weights(shape, draw(st.integers(1, 128))) if lora else 0,
        seq_len=draw(st.integers(1, 8192)),
        micro_batch=draw(st.integers(1, 16)),
        grad_accum=draw(st.integers(1, 4)),
        checkpointing=draw(st.sampled_from((0, 1, 3))),
        flash=draw(st.booleans()),
        variable_lengths=draw(st.booleans()),
        fused_adam=draw(st.booleans()),
        overlap_comm=draw(st.booleans()),
        reduce_bucket=draw(st.integers(10**6, 10**9)),
        sub_group=draw(st.integers(10**7, 10**10)),
        zero_init=draw(st.booleans()),
    )


ANY = settings(max_examples=examples(200), deadline=None, derandomize=True)


@ANY
@given(setups(), st.sampled_from(["micro_batch", "seq_len"]), st.integers(1, 5))
def test_more_to_eat_is_never_less_memory(setup, field, more):
    less = gpu_memory(setup)
    greater = gpu_memory(replace(setup, **{field: getattr(setup, field) + more}))
    for moment in MOMENTS:
        assert greater.peaks[moment] >= less.peaks[moment]
    assert greater.allocated >= less.allocated
    assert greater.reserved >= less.reserved * (1 - 1e-12)


@ANY
@given(setups())
def test_terms_and_peaks(setup):
    memory = gpu_memory(setup)
    terms = memory.terms
    assert terms.keys() == persistent(setup).keys() | temporary(setup).keys()
    assert all(value >= 0 for value in terms.values())
    assert memory.peaks.keys() == MOMENTS.keys()
    assert memory.allocated == max(memory.peaks.values()) == memory.peaks[memory.moment]
    assert memory.allocated <= memory.reserved < memory.smi

    def total(*names):
        return sum(terms.get(name, 0.0) for name in names)

    states = sum(persistent(setup).values())
    turn = total("activations", "logits", "gathered", "buckets", "carried")
    middle = total("activations", "layer", "scores", "gathered", "buckets", "carried")
    if setup.engine != "deepspeed" or setup.stage:  # stage 0 reduces when backward has ended
        middle += total("reduce_copy")
    assert memory.peaks["turn"] == pytest.approx(states + turn)
    assert memory.peaks["middle"] == pytest.approx(states + middle)
    assert memory.peaks["step"] == pytest.approx(states + terms["step"])
    assert states < memory.peaks["end"] <= sum(terms.values())


@ANY
@given(setups())
def test_before_the_first_step_there_are_no_moments(setup):
    before, after = gpu_memory(setup, optimizer_states=False), gpu_memory(setup)
    assert "moments" not in before.terms
    assert before.allocated <= after.allocated


@ANY
@given(setups())
def test_a_stage_holds_no_more_weights_and_optimizer_states_than_the_one_below(setup):
    own = replace(
        setup, engine="deepspeed", gpus=8, optimizer_device="gpu", parameter_device="gpu", precision="bf16"
    )
    names = ("weights", "adapters", "master", "moments")
    held = [sum(persistent(replace(own, stage=stage)).get(name, 0.0) for name in names) for stage in range(4)]
    assert held == sorted(held, reverse=True)


@ANY
@given(setups(), st.sampled_from([2, 3, 8]))
def test_more_ranks_never_hold_more(setup, times):
    more = replace(setup, gpus=setup.gpus * times, nodes=setup.nodes * times)
    assert sum(persistent(more).values()) <= sum(persistent(setup).values()) * (1 + 1e-12)


@ANY
@given(setups())
def test_offloading_never_takes_more_states(setup):
    own = replace(
        setup, engine="deepspeed", stage=3, precision="bf16", parameter_device="gpu", optimizer_device="gpu"
    )
    here = persistent(own)
    away = persistent(replace(own, optimizer_device="cpu"))
    gone = persistent(replace(own, optimizer_device="cpu", parameter_device="cpu"))
    assert sum(here.values()) >= sum(away.values()) >= sum(gone.values())
    assert "master" not in away and "moments" not in away
    assert gone["weights"] == 0


@ANY
@given(setups())
def test_recomputing_never_takes_more(setup):
    here = replace(setup, checkpointing=0, zero_init=True)
    assert (
        gpu_memory(replace(here, checkpointing=1, flash=True)).peaks["turn"] <= gpu_memory(here).peaks["turn"]
    )
