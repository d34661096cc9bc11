"""DS50x-DS53x: tensor, sequence, pipeline and expert parallelism."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from dsrun.config.rules.effects import known_keys
from dsrun.config.rules.frame import DIFFERS, FAILS, Context, Edit, Fix, Hit, rule

TP = "tensor_parallel"
SIZE = f"{TP}.autotp_size"
INNER = f"{TP}.tp.tp_size"
PARTS = f"{TP}.partition_config"
SEQUENCE = "sequence_parallel_size"
EXPERTS = "expert_parallel"


def divisors(number: int) -> str:
    """`1, 2 or 4`."""
    found = [str(size) for size in range(1, number + 1) if number % size == 0]
    return f"{', '.join(found[:-1])} or {found[-1]}" if len(found) > 1 else found[0]


@rule(
    "DS502",
    "error",
    FAILS,
    bad=[
        {"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}},
        {"tensor_parallel": {"autotp_size": 4, "tp": {"tp_size": 2}}},
    ],
    good=[
        {"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 2}}},
        {"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 1}}},
        {"tensor_parallel": {"autotp_size": 2}},
    ],
)
def two_tensor_parallel_sizes(context: Context) -> Iterator[Hit]:
    """tp.tp_size must be 1 or the same (_apply_autotp_partitioning in runtime/engine.py)."""
    size, inner = context.integer(SIZE), context.integer(INNER)
    if size is not None and size > 1 and inner not in (None, 1, size):
        fix = Fix((Edit("remove", INNER),), safe=False)
        yield Hit(
            INNER,
            f"{inner} is another size than autotp_size {size}",
            "Remove it: autotp_size is enough.",
            fix,
        )


@rule(
    "DS503",
    "error",
    DIFFERS,
    bad=[
        {"tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 2}}},
        {"tensor_parallel": {"autotp_size": 0, "tp": {"tp_size": 4}}},
    ],
    good=[
        {"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 2}}},
        {"tensor_parallel": {"tp": {"tp_size": 1}}},
        {"tensor_parallel": {"autotp_size": 1}},
        {"tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 1}}},
    ],
)
def tensor_parallelism_that_is_off(context: Context) -> Iterator[Hit]:
    """The model is split only for autotp_size above 1 (runtime/engine.py).

    Without autotp_size the code may have set it by deepspeed.tp_model_init (runtime/tensor_parallel/init_utils.py).
    """
    size, inner = context.integer(SIZE), context.integer(INNER)
    if inner is None or inner <= 1 or (size or 0) > 1 or (size is None and context.has(SIZE)):
        return
    fix = Fix((Edit("replace" if context.has(SIZE) else "add", SIZE, inner),), safe=False)
    text = (
        f"{inner} has no effect: autotp_size is {size}"
        if size is not None
        else f"{inner} has no effect without autotp_size"
    )
    yield Hit(INNER, text, f"Set {SIZE} to {inner}.", fix, severity=None if size is not None else "warning")


@rule(
    "DS504",
    "warning",
    bad=[
        {"tensor_parallel": {"autotp_size": 1, "preset_model": "llama"}},
        {"tensor_parallel": {"partition_config": {"strict_mode": True}}},
        {"tensor_parallel": {"tp_overlap_comm": True, "autotp_size": 0}},
    ],
    good=[
        {"tensor_parallel": {"autotp_size": 2, "preset_model": "llama"}},
        {"tensor_parallel": {"autotp_size": 1}},
        {"tensor_parallel": {}},
        {
            "tensor_parallel": {
                "autotp_size": 1,
                "tp": {"tp_size": 1},
                "preset_model": None,
                "tp_overlap_comm": False,
            }
        },
    ],
)
def tensor_parallel_details_without_a_size(context: Context) -> Iterator[Hit]:
    """Nothing of the section is looked at unless autotp_size is above 1 (runtime/engine.py)."""
    if context.has(SIZE) and (context.integer(SIZE) is None or (context.integer(SIZE) or 0) > 1):
        return
    rest = [
        key
        for key in known_keys(context, TP)
        if key not in ("autotp_size", "tp") and context.get(f"{TP}.{key}")
    ]
    preset = context.text(f"{EXPERTS}.preset_model")
    if rest and not (rest == ["preset_model"] and preset):
        yield Hit(
            TP,
            f"is off while autotp_size isn't above 1, and so without effect: {', '.join(rest)}",
            f"Set {SIZE} to the GPUs that share a model, or remove the section.",
        )


@rule(
    "DS505",
    "warning",
    bad=[
        {"_model": {"attention_heads": 9}, "tensor_parallel": {"autotp_size": 2}},
        {"_model": {"attention_heads": 2}, "tensor_parallel": {"autotp_size": 4}},
    ],
    good=[
        {"_model": {"attention_heads": 4}, "tensor_parallel": {"autotp_size": 4}},
        {"_model": {"attention_heads": 9}, "tensor_parallel": {"autotp_size": 1}},
        {"_model": {}, "tensor_parallel": {"autotp_size": 4}},
    ],
)
def heads_that_split_unevenly(context: Context) -> Iterator[Hit]:
    """AutoTP gives such GPUs unequal shares of the attention, or none (get_shard_size in module_inject/tp_shard.py)."""
    size, heads = context.integer(SIZE), context.setting.model and context.setting.model.attention_heads
    if size is not None and size > 1 and heads and heads % size:
        yield Hit(
            SIZE,
            f"{heads} attention heads don't divide by {size}: the GPUs get unequal shares",
            f"Take a divisor of the heads: {divisors(heads)}.",
        )


@rule(
    "DS506",
    "warning",
    bad={
        "tensor_parallel": {
            "autotp_size": 2,
            "preset_model": "llama",
            "partition_config": {"use_default_specs": False},
        }
    },
    good=[
        {
            "tensor_parallel": {
                "autotp_size": 2,
                "preset_model": "llama",
                "partition_config": {"use_default_specs": True},
            }
        },
        {
            "tensor_parallel": {
                "autotp_size": 2,
                "preset_model": "llama",
                "partition_config": {"strict_mode": True},
            }
        },
        {"tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": False}}},
    ],
)
def preset_that_is_set_aside(context: Context) -> Iterator[Hit]:
    """A partition_config without the default specs takes the preset's place.

    Source: get_partition_config_object in runtime/tensor_parallel/config.py.
    """
    preset = context.text(f"{TP}.preset_model")
    if preset and context.flag(f"{PARTS}.use_default_specs") is False:
        yield Hit(
            f"{TP}.preset_model",
            f'"{preset}" has no effect: partition_config.use_default_specs is false',
            "Remove one of the two.",
        )


@rule(
    "DS507",
    "warning",
    bad=[
        {
            "tensor_parallel": {
                "autotp_size": 2,
                "partition_config": {"layer_specs": [{"partition_type": "row"}]},
            }
        },
        {
            "tensor_parallel": {
                "autotp_size": 2,
                "partition_config": {"layer_specs": [{"patterns": [], "partition_type": "row"}]},
            }
        },
    ],
    good=[
        {
            "tensor_parallel": {
                "autotp_size": 2,
                "partition_config": {"layer_specs": [{"patterns": [".*o_proj.*"]}]},
            }
        },
        {"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": []}}},
    ],
)
def layer_spec_without_patterns(context: Context) -> Iterator[Hit]:
    """A spec counts for the parameters that its patterns match (TPLayerSpec in module_inject/autotp_config.py)."""
    for index, spec in enumerate(_specs(context)):
        if not spec.get("patterns"):
            path = f"{PARTS}.layer_specs.{index}"
            yield Hit(
                path,
                "has no patterns, and so matches no layer",
                'Add "patterns": regular expressions of names.',
            )


@rule(
    "DS508",
    "error",
    FAILS,
    bad={
        "tensor_parallel": {
            "autotp_size": 2,
            "partition_config": {"layer_specs": [{"patterns": [".*(q_proj"]}]},
        }
    },
    good=[
        {
            "tensor_parallel": {
                "autotp_size": 2,
                "partition_config": {"layer_specs": [{"patterns": [".*(q_proj)"]}]},
            }
        },
        {
            "tensor_parallel": {
                "autotp_size": 1,
                "partition_config": {"layer_specs": [{"patterns": [".*(q_proj"]}]},
            }
        },
    ],
)
def pattern_that_is_no_expression(context: Context) -> Iterator[Hit]:
    """The patterns go to Python's re (TPLayerSpec.matches in module_inject/autotp_config.py)."""
    if (context.integer(SIZE) or 0) <= 1:
        return
    for index, spec in enumerate(_specs(context)):
        patterns = spec.get("patterns")
        for pattern in patterns if isinstance(patterns, list) else ():
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                path = f"{PARTS}.layer_specs.{index}.patterns"
                text = f'"{pattern}" is no regular expression: {error}'
                yield Hit(path, text, "Write it as Python's re has it; a literal bracket needs a backslash.")


@rule(
    "DS509",
    "error",
    FAILS,
    bad={
        "tensor_parallel": {
            "autotp_size": 2,
            "vocab_parallel_ce_backend": "liger",
            "vocab_parallel_lm_head": False,
        }
    },
    good=[
        {
            "tensor_parallel": {
                "autotp_size": 2,
                "vocab_parallel_ce_backend": "torch",
                "vocab_parallel_lm_head": False,
            }
        },
        {
            "tensor_parallel": {
                "autotp_size": 2,
                "vocab_parallel_ce_backend": "liger",
                "vocab_parallel_lm_head": True,
            }
        },
        {"tensor_parallel": {"autotp_size": 2, "vocab_parallel_ce_backend": "liger"}},
    ],
    since=(0, 19),
)
def loss_without_its_head(context: Context) -> Iterator[Hit]:
    """Liger's loss needs a head that is split by the vocabulary (finalize_autotp in runtime/engine.py)."""
    path = f"{TP}.vocab_parallel_ce_backend"
    head = context.flag(f"{TP}.vocab_parallel_lm_head")
    if (context.integer(SIZE) or 0) > 1 and context.text(path) == "liger" and head is False:
        yield Hit(
            path,
            '"liger" needs vocab_parallel_lm_head, which is false',
            f"Set {TP}.vocab_parallel_lm_head to true.",
        )


@rule(
    "DS522",
    "warning",
    bad=[
        {"_model": {"attention_heads": 3}, "sequence_parallel_size": 2, "data_parallel_size": 2},
        {"_model": {"attention_heads": 1}, "sequence_parallel_size": 2, "data_parallel_size": 2},
    ],
    good=[
        {"_model": {"attention_heads": 2}, "sequence_parallel_size": 2, "data_parallel_size": 2},
        {"_model": {"attention_heads": 3}, "sequence_parallel_size": 1, "data_parallel_size": 4},
    ],
)
def heads_over_sequence_groups(context: Context) -> Iterator[Hit]:
    """Ulysses gives each rank whole heads (runtime/sequence_parallel/ulysses_sp.py)."""
    size, heads = context.integer(SEQUENCE), context.setting.model and context.setting.model.attention_heads
    if size is not None and size > 1 and heads and heads % size:
        yield Hit(
            SEQUENCE,
            f"{heads} attention heads don't divide by {size}",
            f"Take a divisor of the heads: {divisors(heads)}.",
        )


@rule(
    "DS523",
    "warning",
    bad=[
        {
            "_world_size": 4,
            "tensor_parallel": {"autotp_size": 2},
            "sequence_parallel_size": 2,
            "data_parallel_size": 2,
        },
    ],
    good=[
        {"tensor_parallel": {"autotp_size": 1}, "sequence_parallel_size": 2, "data_parallel_size": 2},
        {"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 1, "data_parallel_size": 4},
    ],
)
def tensor_and_sequence_parallelism(context: Context) -> Iterator[Hit]:
    """AutoTP puts its own groups in the place of the mpu (_configure_tensor_parallel_states in runtime/engine.py).

    They know no sequences: with accelerate's ParallelismConfig the start fails (utils/groups.py).
    """
    size = context.integer(SIZE)
    if size is None or size <= 1:
        return
    advice = "Choose one of the two."
    if _parallelism(context, "sp_size") > 1:
        text = "has no place beside the sp_size of parallelism_config"
        yield Hit(SIZE, text, advice, severity="error", effect=FAILS)
    elif (context.integer(SEQUENCE) or 0) > 1:
        yield Hit(SIZE, f"{size} and {SEQUENCE} {context.integer(SEQUENCE)} don't go together", advice)


@rule(
    "DS530",
    "warning",
    bad=[
        {"pipeline": {"activation_checkpoint_interval": 1}, "zero_optimization": {"stage": 2}},
        {"pipeline": {"pipe_partitioned": True}, "zero_optimization": {"stage": 3}},
    ],
    good=[
        {"pipeline": {"activation_checkpoint_interval": 1}, "zero_optimization": {"stage": 1}},
        {"pipeline": {}, "zero_optimization": {"stage": 2}},
    ],
)
def pipeline_with_split_gradients(context: Context) -> Iterator[Hit]:
    """PipelineEngine refuses stages 2 and 3 (runtime/pipe/engine.py); another model doesn't look at the section."""
    if context.section("pipeline") and context.stage >= 2:
        yield Hit(
            "pipeline",
            f"a PipelineModule can't be trained with ZeRO stage {context.stage}",
            "Set zero_optimization.stage to 1; or remove the section, if the model is no PipelineModule.",
        )


@rule(
    "DS540",
    "error",
    FAILS,
    bad=[
        {"_world_size": 4, "expert_parallel": {"enabled": True, "autoep_size": 3}},
        {"_world_size": 2, "expert_parallel": {"enabled": True, "autoep_size": 4}},
        {
            "_world_size": 4,
            "expert_parallel": {"enabled": True, "autoep_size": 8, "expert_tensor_parallel_size": 1},
        },
    ],
    good=[
        {"_world_size": 4, "expert_parallel": {"enabled": True, "autoep_size": 4}},
        {"_world_size": 4, "expert_parallel": {"enabled": False, "autoep_size": 3}},
        {"_world_size": None, "expert_parallel": {"enabled": True, "autoep_size": 3}},
    ],
)
def expert_parallel_groups(context: Context) -> Iterator[Hit]:
    """The groups of experts must divide the ranks (build_folding_spec in module_inject/auto_ep_folding.py)."""
    ranks, path = context.world_size, f"{EXPERTS}.autoep_size"
    size = context.integer(path) if context.has(path) else 1
    if context.flag(f"{EXPERTS}.enabled") and size and ranks and ranks % size:
        yield Hit(
            path,
            f"{size} doesn't divide {ranks} GPUs",
            f"Take {divisors(ranks)}, and a divisor of the experts.",
        )


@rule(
    "DS541",
    "error",
    FAILS,
    bad=[
        {"_world_size": 4, "expert_parallel": {"enabled": True, "expert_tensor_parallel_size": 2}},
        {
            "expert_parallel": {"enabled": True, "preset_model": "mixtral"},
            "tensor_parallel": {"preset_model": "deepseek_v2"},
        },
        {"expert_parallel": {"enabled": True}, "tensor_parallel": {"autotp_size": 2}},
        {
            "expert_parallel": {"enabled": True, "autoep_size": 2},
            "tensor_parallel": {"autotp_size": 2},
            "use_data_before_expert_parallelism": True,
        },
        {
            "expert_parallel": {"enabled": True, "autoep_size": 2},
            "tensor_parallel": {"autotp_size": 2},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
        {
            "expert_parallel": {"enabled": True, "autoep_size": 2},
            "tensor_parallel": {"autotp_size": 2},
            "compile": {"deepcompile": True},
        },
        {
            "expert_parallel": {"enabled": True, "autoep_size": 2, "async_split_plan": True},
            "tensor_parallel": {"autotp_size": 2},
        },
        {
            "expert_parallel": {"enabled": True, "autoep_size": 2, "combine_impl": "fused_weighted_sum"},
            "tensor_parallel": {"autotp_size": 2},
        },
        {"expert_parallel": {"enabled": True, "gate_up_impl": "fused", "use_grouped_mm": False}},
        {"expert_parallel": {"enabled": True, "autoep_size": 2, "row_weighting_impl": "fused"}},
        {
            "expert_parallel": {
                "enabled": True,
                "row_weighting_impl": "fused",
                "comm_backend": "deepep",
                "comm_max_tokens_per_rank": 8,
            }
        },
        {"expert_parallel": {"enabled": True, "autoep_size": 2, "comm_backend": "deepep"}},
        {
            "expert_parallel": {
                "enabled": True,
                "autoep_size": 2,
                "comm_backend": "deepep",
                "comm_max_tokens_per_rank": 8,
                "combine_impl": "fused_weighted_sum",
            }
        },
        {"expert_parallel": {"enabled": True, "num_limited_groups": 3, "num_expert_groups": 2}},
    ],
    good=[
        {"expert_parallel": {"enabled": True, "autoep_size": 2}, "tensor_parallel": {"autotp_size": 2}},
        {
            "expert_parallel": {"enabled": True, "preset_model": "mixtral"},
            "tensor_parallel": {"preset_model": "mixtral"},
        },
        {"expert_parallel": {"enabled": False, "expert_tensor_parallel_size": 2}},
        {"expert_parallel": {"enabled": True, "autoep_size": 2, "combine_impl": "fused_weighted_sum"}},
        {"expert_parallel": {"enabled": True, "gate_up_impl": "fused"}},
        {
            "expert_parallel": {
                "enabled": True,
                "autoep_size": 2,
                "row_weighting_impl": "fused",
                "comm_backend": "deepep",
                "comm_max_tokens_per_rank": 1,
            }
        },
        {"expert_parallel": {"enabled": True, "num_limited_groups": 2, "num_expert_groups": 2}},
        {
            "expert_parallel": {"enabled": True, "autoep_size": 2},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
    ],
    since=(0, 19),
)
def expert_parallel_limits(context: Context) -> Iterator[Hit]:
    """What AutoEP can't do.

    Source: validate_autoep_config in module_inject/auto_ep_config.py, validate_folding_global in auto_ep_folding.py.
    """
    if context.flag(f"{EXPERTS}.enabled"):
        yield from _experts_beside_tensors(context)
        yield from _experts_by_themselves(context)


def _experts_beside_tensors(context: Context) -> Iterator[Hit]:
    """AutoEP where AutoTP splits the model too."""
    if (context.integer(SIZE) or 0) <= 1:
        return
    size = context.integer(f"{EXPERTS}.autoep_size")
    zero = context.section("zero_optimization")
    beside = f"doesn't go with {SIZE} {context.integer(SIZE)}"
    without = f"Set {SIZE} to 1, or do without it."
    if size == 1 or not context.has(f"{EXPERTS}.autoep_size"):
        yield Hit(
            f"{EXPERTS}.autoep_size", f"1 {beside}", f"Set {EXPERTS}.autoep_size above 1, or {SIZE} to 1."
        )
    if context.flag("use_data_before_expert_parallelism"):
        yield Hit("use_data_before_expert_parallelism", f"{beside} and expert_parallel", without)
    for key in ("offload_optimizer", "offload_param"):
        if isinstance(zero.get(key), dict):
            yield Hit(f"zero_optimization.{key}", f"{beside} and expert_parallel", without)
    if context.flag("compile.deepcompile"):
        yield Hit("compile.deepcompile", f"{beside} and expert_parallel", without)
    if context.flag(f"{EXPERTS}.async_split_plan") and (size or 1) > 1:
        yield Hit(f"{EXPERTS}.async_split_plan", beside, without)
    if context.text(f"{EXPERTS}.combine_impl") == "fused_weighted_sum":
        yield Hit(f"{EXPERTS}.combine_impl", f'"fused_weighted_sum" {beside}', without)


def _experts_by_themselves(context: Context) -> Iterator[Hit]:
    size = context.integer(f"{EXPERTS}.autoep_size") if context.has(f"{EXPERTS}.autoep_size") else 1
    inner = context.integer(f"{EXPERTS}.expert_tensor_parallel_size")
    deepep = context.text(f"{EXPERTS}.comm_backend") == "deepep"
    if inner is not None and inner > 1:
        path = f"{EXPERTS}.expert_tensor_parallel_size"
        yield Hit(
            path, f"{inner} isn't supported yet", "Set it to 1.", Fix((Edit("replace", path, 1),), safe=False)
        )
    own, other = context.text(f"{EXPERTS}.preset_model"), context.text(f"{TP}.preset_model")
    if own and other and own != other:
        yield Hit(
            f"{EXPERTS}.preset_model",
            f'"{own}" is another model than "{other}" of {TP}.preset_model',
            "Name one model in both, or leave one out.",
        )
    if (
        context.text(f"{EXPERTS}.gate_up_impl") == "fused"
        and context.flag(f"{EXPERTS}.use_grouped_mm") is False
    ):
        yield Hit(
            f"{EXPERTS}.gate_up_impl",
            '"fused" needs use_grouped_mm',
            f"Set {EXPERTS}.use_grouped_mm to true.",
        )
    if context.text(f"{EXPERTS}.row_weighting_impl") == "fused" and not (deepep and size != 1):
        yield Hit(
            f"{EXPERTS}.row_weighting_impl",
            '"fused" needs comm_backend "deepep" and autoep_size above 1',
            "Leave it out, or set both.",
        )
    if deepep and not context.get(f"{EXPERTS}.comm_max_tokens_per_rank"):
        yield Hit(
            f"{EXPERTS}.comm_max_tokens_per_rank",
            'must be given for comm_backend "deepep"',
            "Set it to train_micro_batch_size_per_gpu x the longest sequence.",
        )
    if deepep and size != 1 and context.text(f"{EXPERTS}.combine_impl") == "fused_weighted_sum":
        path = f"{EXPERTS}.combine_impl"
        yield Hit(
            path, '"fused_weighted_sum" doesn\'t go with comm_backend "deepep"', 'Set comm_backend to "comm".'
        )
    limited, groups = (context.integer(f"{EXPERTS}.num_{name}_groups") for name in ("limited", "expert"))
    if limited is not None and groups is not None and limited > groups:
        yield Hit(
            f"{EXPERTS}.num_limited_groups",
            f"{limited} is more than num_expert_groups {groups}",
            f"Set it to at most {groups}.",
        )


@rule(
    "DS542",
    "note",
    bad={"expert_parallel": {"enabled": True, "autoep_size": 2}},
    good={"expert_parallel": {"enabled": False, "autoep_size": 2}},
)
def experts_of_a_dense_model(context: Context) -> Iterator[Hit]:
    """In a model without MoE layers AutoEP finds nothing to do, and logs it (ep_parser in module_inject/auto_ep.py)."""
    if context.flag(f"{EXPERTS}.enabled"):
        yield Hit(
            EXPERTS, "acts on the MoE layers of a model, and on no other", "Remove it if the model has none."
        )


@rule(
    "DS543",
    "note",
    bad=[
        {"inference": {"tensor_parallel": {"tp_size": 2}}},
        {"_for": "accelerate", "inference": {"tensor_parallel": {"tp_size": 4}}},
    ],
    good=[{"inference": {"tensor_parallel": {"tp_size": 1}}}, {"tensor_parallel": {"autotp_size": 2}}],
)
def inference_block_in_training(context: Context) -> Iterator[Hit]:
    """Only transformers looks at it, while it loads weights (transformers/integrations/deepspeed.py)."""
    path = "inference.tensor_parallel.tp_size"
    size = context.integer(path)
    if size is not None and size > 1:
        yield Hit(path, f"{size} splits no model in training", f"Set {SIZE} to {size} for that.")


def _specs(context: Context) -> list[dict[str, Any]]:
    specs = context.get(f"{PARTS}.layer_specs")
    return [spec for spec in specs if isinstance(spec, dict)] if isinstance(specs, list) else []


def _parallelism(context: Context, name: str) -> int:
    """A size in TrainingArguments' parallelism_config, which is a dict or accelerate's object; 1 if unknown."""
    given = context.argument("parallelism_config")
    size = given.get(name) if isinstance(given, dict) else getattr(given, name, None)
    return size if isinstance(size, int) else 1
