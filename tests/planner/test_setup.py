"""Set-ups: what a ds_config gives one, LoRA's weights as PEFT counts them, and who shares what."""

from __future__ import annotations

import pytest
from needed import since

from dsrun import catalog
from dsrun.config.presets.build import Options, build_config
from dsrun.config.presets.sources import draft, strategy
from dsrun.planner.lora import lora_weights
from dsrun.planner.setup import DEVICES, OPTIMIZERS, Setup, batch_fields, zero_fields
from dsrun.planner.shape import Shape

LLAMA_2_7B = Shape(6_738_415_616, 32, 4096, 11008, 32, 32, 128, 32000)
LLAMA_3_8B = Shape(8_030_261_248, 32, 4096, 14336, 32, 8, 128, 128256)
QWEN_7B = Shape(7_721_324_544, 32, 4096, 11008, 32, 32, 128, 151936)
LARGEST = 65024 * 4096
# Preset -> (stage, optimizer's device, weights' device).
DIVIDED = {
    "ddp": (0, "gpu", "gpu"),
    "zero1": (1, "gpu", "gpu"),
    "zero2": (2, "gpu", "gpu"),
    "zero2-offload": (2, "cpu", "gpu"),
    "zero3": (3, "gpu", "gpu"),
    "zero3-offload": (3, "cpu", "cpu"),
    "zero3-nvme": (3, "nvme", "nvme"),
    "zero3-hpz": (3, "gpu", "gpu"),
    "zero3-qwz": (3, "gpu", "gpu"),
    "zero3-zeropp": (3, "gpu", "gpu"),
}
# What DeepSpeed 0.19 takes where a config is silent: runtime/zero/config.py, runtime/zero/offload_config.py.
SILENT = {
    "stage": 0,
    "optimizer_device": "gpu",
    "parameter_device": "gpu",
    "reduce_bucket": 500_000_000,
    "overlap_comm": False,
    "max_reuse": 1_000_000_000,
    "sub_group": 1_000_000_000,
    "fp32_gradients": False,
    "pinned": True,
    "nvme_buffers": 4,
    "fused_adam": False,
    "secondary": 1,
    "quantized_gather": False,
    "quantized_reduce": False,
}


def built(preset, **options):
    nvme = "/nvme" if preset == "zero3-nvme" else None
    options = {"gpus": 2, "micro_batch": 3, "grad_accum": 5, "precision": "fp16", **options}
    return build_config(preset, Options(nvme_path=nvme, largest_parameter=LARGEST, **options)).ds_config


def written(zero, key, default):
    """Value in a config's zero_optimization, or DeepSpeed's default."""
    return zero.get(key, default)


def test_the_presets_are_shipped():
    assert set(DIVIDED) <= set(catalog.files("presets"))


@pytest.mark.parametrize("preset", DIVIDED)
@pytest.mark.parametrize("said", [(), ("zero_optimization.sub_group_size=5e8",)])
def test_a_plan_s_strategy_is_the_finished_config_s(preset, said):
    asked = {"gpus": 2, "nodes": 2, "precision": "bf16", "nvme_path": "/nvme", "overrides": said}
    options = Options(micro_batch=3, grad_accum=5, largest_parameter=LARGEST, **asked)
    assert zero_fields(strategy(preset, options)) == zero_fields(draft(preset, options))


def test_a_lab_s_template_changes_the_strategy(lab):
    (lab / "templates").mkdir(exist_ok=True)
    (lab / "templates" / "zero.json.j2").write_text('"zero_optimization": {{ {"stage": 1} | tojson }}')
    assert zero_fields(strategy("zero3", Options(gpus=2)))["stage"] == 1


@pytest.mark.parametrize("preset", DIVIDED)
def test_a_presets_fields(preset):
    config = built(preset)
    zero, found = config["zero_optimization"], zero_fields(config)
    assert set(found) == set(SILENT) <= set(Setup.__dataclass_fields__)
    assert (found["stage"], found["optimizer_device"], found["parameter_device"]) == DIVIDED[preset]
    assert found["reduce_bucket"] == written(zero, "reduce_bucket_size", 500_000_000)
    assert found["overlap_comm"] is written(zero, "overlap_comm", found["stage"] == 3)
    assert found["max_reuse"] == written(zero, "stage3_max_reuse_distance", 1_000_000_000)
    assert found["sub_group"] == written(zero, "sub_group_size", 1_000_000_000)
    offload = zero.get("offload_optimizer", {})
    assert found["pinned"] is (offload["pin_memory"] if offload else True)
    assert found["nvme_buffers"] == offload.get("buffer_count", 4)
    assert found["fused_adam"] is True
    assert found["fp32_gradients"] is False
    numbers = [value for name, value in found.items() if isinstance(SILENT[name], int)]
    assert all(type(value) in (int, bool) for value in numbers)


def test_a_second_copy_in_each_host():
    """Only jobs on several hosts have one; below ZeRO-3 DeepSpeed knows none."""
    assert [zero_fields(built("zero3-hpz", nodes=count))["secondary"] for count in (1, 2)] == [1, 2]
    assert zero_fields({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 8}})["secondary"] == 1


def test_what_is_rounded_on_its_way():
    """ZeRO-3 alone rounds."""
    rounded = {
        name: [
            value for key, value in zero_fields(built(name, nodes=2)).items() if key.startswith("quantized")
        ]
        for name in ("zero3-hpz", "zero3-qwz", "zero3-zeropp")
    }
    assert rounded == {"zero3-hpz": [False, False], "zero3-qwz": [True, False], "zero3-zeropp": [True, True]}
    below = zero_fields({"zero_optimization": {"stage": 2, "zero_quantized_weights": True}})
    assert below["quantized_gather"] is False


def test_known_presets_exactly():
    """A change of a preset or of its template is noticed here."""
    assert zero_fields(built("zero3-nvme"))["pinned"] is True
    assert zero_fields(built("zero3"))["overlap_comm"] is True
    assert zero_fields(built("zero2"))["overlap_comm"] is False


@pytest.mark.parametrize("config", [{}, {"zero_optimization": {}}, {"zero_optimization": {"stage": 0}}])
def test_a_silent_config(config):
    assert zero_fields(config) == SILENT


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_defaults(stage):
    found = zero_fields({"zero_optimization": {"stage": stage}})
    assert found == {**SILENT, "stage": stage, "overlap_comm": stage == 3}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeeds_defaults_are_its_own(stage):
    """Defaults from DeepSpeed's own reading of an empty zero_optimization."""
    zero = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig(stage=stage)
    found = zero_fields({"zero_optimization": {"stage": stage}})
    assert found["reduce_bucket"] == zero.reduce_bucket_size
    assert found["overlap_comm"] == zero.overlap_comm
    assert found["max_reuse"] == zero.max_reuse_distance
    assert found["sub_group"] == zero.sub_group_size


@since(deepspeed="0.19.8")  # before, memory is not pinned unless asked
def test_deepspeeds_defaults_of_offload_are_its_own():
    offload = pytest.importorskip("deepspeed.runtime.zero.offload_config")
    own = offload.DeepSpeedZeroOffloadOptimizerConfig()
    said = zero_fields({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}})
    assert (said["pinned"], said["nvme_buffers"]) == (own.pin_memory, own.buffer_count)


@pytest.mark.parametrize("key", ["offload_optimizer", "offload_param"])
@pytest.mark.parametrize("section", [None, {}, {"device": "none"}])
def test_no_offload(key, section):
    found = zero_fields({"zero_optimization": {"stage": 3, key: section}})
    assert found["optimizer_device"] == found["parameter_device"] == "gpu"


def test_offload():
    offload = {"device": "nvme", "pin_memory": True, "buffer_count": 6}
    found = zero_fields({"zero_optimization": {"stage": 3, "offload_optimizer": offload}})
    assert (found["optimizer_device"], found["parameter_device"]) == ("nvme", "gpu")
    assert (found["pinned"], found["nvme_buffers"]) == (True, 6)
    offload = {"device": "cpu", "pin_memory": False}
    unpinned = zero_fields({"zero_optimization": {"stage": 2, "offload_optimizer": offload}})
    assert unpinned["pinned"] is False
    # DeepSpeed divides, and so offloads, weights under stage 3 only.
    early = zero_fields({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}})
    assert early["parameter_device"] == "gpu"


@pytest.mark.parametrize(
    ("optimizer", "fused"),
    [
        ({"type": "AdamW"}, True),
        ({"type": "Adam", "params": {"lr": 1e-4}}, True),
        ({"type": "adamw", "params": {"torch_adam": True}}, False),
        ({"type": "Lion"}, False),
        ({}, False),
    ],
)
def test_which_adam(optimizer, fused):
    assert zero_fields({"optimizer": optimizer})["fused_adam"] is fused


def test_fp32_gradients():
    assert zero_fields({"data_types": {"grad_accum_dtype": "fp32"}})["fp32_gradients"] is True
    assert zero_fields({"data_types": {"grad_accum_dtype": "bf16"}})["fp32_gradients"] is False


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("preset", DIVIDED)
def test_a_presets_batch(preset, precision):
    fields = batch_fields(built(preset, precision=precision))
    assert fields == {"precision": precision, "micro_batch": 3, "grad_accum": 5}
    assert Setup(LLAMA_2_7B, **fields, **zero_fields(built(preset))).stage == DIVIDED[preset][0]


def test_what_a_batch_leaves_open():
    auto = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "fp16": {"enabled": "auto"},
    }
    assert batch_fields(auto) == {"precision": "fp32"}
    assert batch_fields({}) == batch_fields({"bf16": {"enabled": "auto"}}) == {"precision": "fp32"}
    assert batch_fields({"fp16": {"enabled": False}, "bf16": {"enabled": True}}) == {"precision": "bf16"}
    assert batch_fields({"gradient_accumulation_steps": 7}) == {"precision": "fp32", "grad_accum": 7}


@pytest.mark.parametrize("key", ["train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
@pytest.mark.parametrize("preset", DIVIDED)
def test_a_config_for_hf_leaves_them_open(preset, key):
    config = built(preset, target="hf", micro_batch=None, grad_accum=None)
    assert config[key] == "auto"
    assert set(batch_fields(config)) == {"precision"}


# --- LoRA -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "rank", "targets", "weights"),
    [
        # PEFT's print_trainable_parameters, as published for each.
        (LLAMA_2_7B, 8, "attention", 4_194_304),
        (LLAMA_2_7B, 16, "attention", 8_388_608),
        (LLAMA_3_8B, 8, "attention", 3_407_872),
        (LLAMA_2_7B, 16, "all", 39_976_960),
        (LLAMA_2_7B, 64, "all", 159_907_840),
        (LLAMA_3_8B, 16, "all", 41_943_040),
    ],
)
def test_lora_weights(shape, rank, targets, weights):
    assert lora_weights(shape, rank, {"all": None, "attention": ("q", "v")}[targets]) == weights


def test_qwens_targets_are_fewer():
    """Qwen's own finetune.py: one matrix for queries, keys and values; c_proj, and w1 and w2 of the gate."""
    hidden, inner, rank = QWEN_7B.hidden, QWEN_7B.intermediate, 64
    matrices = [(hidden, 3 * hidden), (hidden, hidden), (hidden, inner), (hidden, inner), (inner, hidden)]
    own = QWEN_7B.layers * rank * sum(rows + columns for rows, columns in matrices)
    assert own == 143_130_624
    # Three matrices for queries, keys and values take two more inputs' worth of rows.
    assert lora_weights(QWEN_7B, rank) - own == QWEN_7B.layers * rank * 2 * hidden


def test_without_a_gate_there_are_two_matrices():
    plain = Shape(0, 2, 64, 256, 4, 4, 16, 100, gated=False)
    gated = Shape(0, 2, 64, 256, 4, 4, 16, 100)
    assert lora_weights(gated, 1) - lora_weights(plain, 1) == 2 * (64 + 256)
    assert lora_weights(gated, 5) == 5 * lora_weights(gated, 1)


# --- a set-up's own words -------------------------------------------------------------------------------------------


def test_what_is_trained():
    assert Setup(LLAMA_2_7B).trained == LLAMA_2_7B.parameters
    assert Setup(LLAMA_2_7B, adapters=5, copies=3).trained == LLAMA_2_7B.parameters
    assert Setup(LLAMA_2_7B, method="lora", adapters=5, copies=3).trained == 8
    assert Setup(LLAMA_2_7B, seq_len=100, micro_batch=7, grad_accum=9, gpus=3).tokens == 700


@pytest.mark.parametrize(
    ("precision", "width"), [("fp32", 4), ("amp", 4), ("fp16", 2), ("bf16", 2), ("pure", 2)]
)
def test_the_width_of_a_weight(precision, width):
    assert Setup(LLAMA_2_7B, precision=precision).weight_bytes == width


@pytest.mark.parametrize(
    ("engine", "stage", "shards"),
    [("deepspeed", 0, 1), ("deepspeed", 2, 1), ("deepspeed", 3, 6), ("fsdp", 0, 6), ("torch", 0, 1)],
)
def test_who_shares_the_weights(engine, stage, shards):
    assert Setup(LLAMA_2_7B, gpus=6, engine=engine, stage=stage).shards == shards


def test_tables():
    assert DEVICES == ("gpu", "cpu", "nvme")
    assert all(fp32 >= bit16 >= 0 for fp32, bit16 in OPTIMIZERS.values())
