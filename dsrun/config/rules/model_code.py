"""DS73x-DS75x: what acts only if the training code, or the model, does its part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsrun.config.rules.effects import known_keys
from dsrun.config.rules.frame import FAILS, REFUSED, Context, Edit, Fix, Hit, rule

ACTIVATIONS = "activation_checkpointing"
DEEP = "compile.deepcompile"
WITHOUT_DEEP = ("deepcompile", "autoep_non_moe")
HYBRID = "hybrid_engine"
QUANTIZATION = "weight_quantization"
SAMPLING = "data_efficiency.data_sampling"
CURRICULUM = f"{SAMPLING}.curriculum_learning"
BATCHING = f"{SAMPLING}.dynamic_batching"
LTD = "data_efficiency.data_routing.random_ltd"
SCHEDULE = f"{LTD}.random_ltd_schedule"

NEEDED_BY_LTD = {
    LTD: ("total_layer_num", "random_ltd_layer_num", "random_ltd_schedule"),
    SCHEDULE: ("min_value", "max_value", "schedule_type", "schedule_config"),
    f"{SCHEDULE}.schedule_config": ("require_steps", "seq_per_step"),
}
NEEDED_BY_CURRICULUM = {
    "fixed_discrete": ("difficulty", "max_step"),
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
}


def _curriculum(metric: dict[str, Any]) -> dict[str, Any]:
    """An example's config with one metric of a curriculum."""
    learning = {"enabled": True, "curriculum_metrics": {"length": metric}}
    return {
        "data_efficiency": {
            "enabled": True,
            "data_sampling": {"enabled": True, "curriculum_learning": learning},
        }
    }


def compiles(context: Context) -> bool | None:
    """Whether the code calls engine.compile; None if it isn't known. HF Trainer does for torch_compile."""
    if not context.by_trainer or context.setting.trainer is None:
        return None
    return bool(context.argument("torch_compile"))


@rule(
    "DS730",
    "note",
    bad=[
        {"activation_checkpointing": {"partition_activations": True}},
        {"_for": "hf", "activation_checkpointing": {"cpu_checkpointing": True}},
        {"_for": "accelerate", "activation_checkpointing": {"number_checkpoints": 4}},
    ],
    good=[
        {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}},
        {"_for": "lightning", "activation_checkpointing": {"partition_activations": True}},
        {"activation_checkpointing": {}},
    ],
)
def activation_checkpointing_without_its_call(context: Context) -> Iterator[Hit]:
    """It waits for deepspeed.checkpointing.configure (runtime/activation_checkpointing/checkpointing.py).

    HF Trainer never calls it: a model's own checkpointing knows nothing of the section. Lightning does.
    """
    rest = [key for key in known_keys(context, ACTIVATIONS) if context.get(f"{ACTIVATIONS}.{key}")]
    if not rest or context.target == "lightning":
        return
    if context.by_trainer:
        yield Hit(
            ACTIVATIONS,
            f"has no effect under HF Trainer: {', '.join(rest)}",
            "Remove it, and set gradient_checkpointing in the TrainingArguments.",
            Fix((Edit("remove", ACTIVATIONS),)),
            severity="warning",
        )
    else:
        yield Hit(
            ACTIVATIONS,
            f"acts only if the code calls deepspeed.checkpointing.configure: {', '.join(rest)}",
            "Call it with this config, and wrap the layers in deepspeed.checkpointing.checkpoint.",
        )


@rule(
    "DS731",
    "warning",
    bad=[
        {"activation_checkpointing": {"contiguous_memory_optimization": True, "number_checkpoints": 4}},
        {"activation_checkpointing": {"contiguous_memory_optimization": True, "partition_activations": True}},
    ],
    good=[
        {
            "activation_checkpointing": {
                "contiguous_memory_optimization": True,
                "partition_activations": True,
                "number_checkpoints": 4,
            }
        },
        {"activation_checkpointing": {"contiguous_memory_optimization": False}},
        {"_for": "hf", "activation_checkpointing": {"contiguous_memory_optimization": True}},
    ],
)
def contiguous_activations(context: Context) -> Iterator[Hit]:
    """configure() stops without the two others (runtime/activation_checkpointing/checkpointing.py)."""
    path = f"{ACTIVATIONS}.contiguous_memory_optimization"
    if not context.flag(path) or context.by_trainer:
        return
    missing = []
    if not context.flag(f"{ACTIVATIONS}.partition_activations"):
        missing.append("partition_activations")
    if context.get(f"{ACTIVATIONS}.number_checkpoints") is None:
        missing.append("number_checkpoints")
    if missing:
        text = f"needs {' and '.join(missing)}, or deepspeed.checkpointing.configure fails"
        yield Hit(path, text, "Set what is missing, or set it to false.")


@rule(
    "DS732",
    "warning",
    bad=[
        {"compile": {"offload_activation": True}},
        {"compile": {"deepcompile": False, "passes": ["z3"]}},
        {"compile": {"free_activation_threshold": 1}},
    ],
    good=[
        {"compile": {"deepcompile": False}},
        {"compile": {"deepcompile": True, "passes": ["z3"]}, "zero_optimization": {"stage": 3}},
        {"compile": {"double_buffer": False, "deepcompile": True}, "zero_optimization": {"stage": 3}},
        {"compile": {"debug_log": False}},
        {"compile": {"autoep_non_moe": True}},
    ],
)
def compile_details_without_deepcompile(context: Context) -> Iterator[Hit]:
    """engine.compile looks at them for DeepCompile only (runtime/engine.py)."""
    if context.get(DEEP) not in (None, False):
        return
    rest = [key for key in known_keys(context, "compile") if key not in WITHOUT_DEEP]
    rest = [
        key for key in rest if context.get(f"compile.{key}") != context.schema.describe(f"compile.{key}")[0]
    ]
    if rest:
        text = f"has no effect while deepcompile is off: {', '.join(rest)}"
        yield Hit("compile", text, f"Set {DEEP} to true, or remove {'them' if len(rest) > 1 else 'it'}.")


@rule(
    "DS733",
    "note",
    bad=[
        {"compile": {"deepcompile": True}, "zero_optimization": {"stage": 2}},
        {"_for": "hf", "_trainer": {"torch_compile": False}, "compile": {"deepcompile": True}},
        {"_for": "hf", "compile": {"deepcompile": True}},
    ],
    good=[
        {"compile": {"deepcompile": False}},
        {"_for": "hf", "_trainer": {"torch_compile": True}, "compile": {"deepcompile": True}},
    ],
)
def deepcompile_without_compiling(context: Context) -> Iterator[Hit]:
    """Nothing happens before engine.compile(); the log has a line of it (forward in runtime/engine.py)."""
    if not context.flag(DEEP) or compiles(context):
        return
    if compiles(context) is False:
        advice = "Set torch_compile in the TrainingArguments."
        yield Hit(
            DEEP, "has no effect: torch_compile is off, so nothing is compiled", advice, severity="warning"
        )
    else:
        where = (
            "Set torch_compile in the TrainingArguments."
            if context.by_trainer
            else "Call it after deepspeed.initialize."
        )
        yield Hit(DEEP, "acts only after engine.compile()", where)


@rule(
    "DS734",
    "error",
    FAILS,
    bad={
        "_for": "hf",
        "_device": "cpu",
        "_trainer": {"torch_compile": True},
        "compile": {"deepcompile": True},
    },
    good=[
        {
            "_for": "hf",
            "_device": "cuda",
            "_trainer": {"torch_compile": True},
            "compile": {"deepcompile": True},
        },
        {"_for": "hf", "_trainer": {"torch_compile": True}, "compile": {"deepcompile": True}},
        {"_device": "cpu", "compile": {"deepcompile": False}},
    ],
)
def deepcompile_on_the_cpu(context: Context) -> Iterator[Hit]:
    """Its extension is CUDA code (op_builder/dc.py, compile/util.py); without engine.compile() nothing asks for it."""
    if context.flag(DEEP) and context.setting.device == "cpu":
        fix = Fix((Edit("replace", DEEP, False),), safe=False)
        severity = None if compiles(context) else "warning"
        yield Hit(
            DEEP, "needs GPUs: its extension doesn't build on the CPU", "Set it to false.", fix, severity
        )


@rule(
    "DS735",
    "warning",
    bad=[
        {"compile": {"deepcompile": True}},
        {"compile": {"deepcompile": True, "passes": ["autosp"]}, "zero_optimization": {"stage": 2}},
        {"compile": {"deepcompile": True, "passes": ["autotp"]}, "zero_optimization": {"stage": 2}},
    ],
    good=[
        {"compile": {"deepcompile": True}, "zero_optimization": {"stage": 1}},
        {"compile": {"deepcompile": True, "passes": ["autosp"]}, "zero_optimization": {"stage": 1}},
        {"compile": {"deepcompile": True, "passes": ["autosp"]}},
        {"compile": {"deepcompile": True, "passes": ["autotp"]}, "tensor_parallel": {"autotp_size": 2}},
        {"compile": {"deepcompile": False}},
    ],
    since=(0, 18),
)
def deepcompile_that_falls_back(context: Context) -> Iterator[Hit]:
    """Where its passes don't fit, plain torch.compile takes over, with one line in the log.

    Source: get_deepcompile_backend, get_autosp_backend and get_autotp_backend in runtime/engine.py.
    """
    if not context.flag(DEEP):
        return
    passes = _passes(context)
    end = "torch.compile takes over"
    if "autosp" in passes:
        if context.stage >= 2:
            text = f'"autosp" doesn\'t go with ZeRO stage {context.stage}: {end}'
            yield Hit("compile.passes", text, "Set zero_optimization.stage to 0 or 1.")
    elif "autotp" in passes:
        if (context.integer("tensor_parallel.autotp_size") or 0) <= 1:
            text = f'"autotp" needs tensor_parallel.autotp_size above 1: {end}'
            yield Hit("compile.passes", text, "Set tensor_parallel.autotp_size.")
    elif context.stage == 0:
        yield Hit(
            DEEP, f"needs ZeRO stage 1, 2 or 3, and this is stage 0: {end}", "Set zero_optimization.stage."
        )


@rule(
    "DS736",
    "error",
    FAILS,
    bad={
        "_for": "hf",
        "_trainer": {"torch_compile": True},
        "tensor_parallel": {"autotp_size": 2},
        "zero_optimization": {"stage": 2, "stage3_gather_16bit_weights_on_model_save": True},
        "compile": {"deepcompile": True, "passes": ["autotp", "z3"]},
    },
    good=[
        {
            "_for": "hf",
            "_trainer": {"torch_compile": True},
            "compile": {"deepcompile": True, "passes": ["z1", "z3"]},
        },
        {"compile": {"deepcompile": False, "passes": ["autotp", "z3"]}},
        {"compile": {"deepcompile": True, "passes": ["autotp"]}, "tensor_parallel": {"autotp_size": 2}},
    ],
    since=(0, 18),
)
def passes_that_do_not_mix(context: Context) -> Iterator[Hit]:
    """autotp stands alone (get_deepspeed_compile_backend in runtime/engine.py)."""
    passes = _passes(context)
    others = [name for name in passes if name != "autotp"]
    if context.flag(DEEP) and "autotp" in passes and others:
        severity = None if compiles(context) else "warning"
        text = f'"autotp" can\'t be combined with {", ".join(others)}'
        yield Hit("compile.passes", text, "Keep one of them.", None, severity)


@rule(
    "DS738",
    "warning",
    bad=[
        {
            "compile": {"deepcompile": True, "offload_activation": True, "offload_parameters": True},
            "zero_optimization": {"stage": 3},
        },
        {
            "compile": {"deepcompile": True, "offload_activation": True, "offload_opt_states": True},
            "zero_optimization": {"stage": 3},
        },
        {
            "compile": {"deepcompile": True, "offload_parameters": True, "offload_opt_states": True},
            "zero_optimization": {"stage": 3},
        },
        {
            "compile": {"deepcompile": True, "offload_opt_states": True},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        },
    ],
    good=[
        {"compile": {"deepcompile": True, "offload_activation": True}, "zero_optimization": {"stage": 3}},
        {"compile": {"deepcompile": True, "offload_opt_states": True}, "zero_optimization": {"stage": 3}},
        {
            "compile": {"deepcompile": True, "offload_parameters": True},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        },
        {
            "compile": {"deepcompile": False, "offload_activation": True, "offload_parameters": True},
            "zero_optimization": {"stage": 3},
        },
    ],
)
def offloads_that_exclude_each_other(context: Context) -> Iterator[Hit]:
    """engine.compile() stops at them (compile/init_z3.py)."""
    if not context.flag(DEEP) or context.stage != 3:
        return
    on = [
        f"offload_{name}"
        for name in ("activation", "parameters", "opt_states")
        if context.flag(f"compile.offload_{name}")
    ]
    if len(on) > 1:
        text = f"can't have {', '.join(on)} together: engine.compile() fails"
        yield Hit("compile", text, "Keep one of them.")
    elif on == ["offload_opt_states"] and context.text("zero_optimization.offload_optimizer.device") in (
        "cpu",
        "nvme",
    ):
        yield Hit(
            "compile.offload_opt_states",
            "doesn't go with zero_optimization.offload_optimizer: engine.compile() fails",
            "Keep one of the two.",
        )


@rule(
    "DS739",
    "warning",
    bad=[
        {"compile": {"autoep_non_moe": True}, "zero_optimization": {"stage": 3}},
        {"compile": {"autoep_non_moe": True, "deepcompile": True}, "zero_optimization": {"stage": 1}},
        {"compile": {"autoep_non_moe": True}, "tensor_parallel": {"autotp_size": 2}},
        {
            "compile": {"autoep_non_moe": True},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
        {"compile": {"autoep_non_moe": True}, "expert_parallel": {"comm_backend": "deepep"}},
    ],
    good=[
        {"compile": {"autoep_non_moe": True}, "zero_optimization": {"stage": 2}},
        {"compile": {"autoep_non_moe": True}, "expert_parallel": {"comm_backend": "comm"}},
        {
            "compile": {"autoep_non_moe": True},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}},
        },
        {"compile": {"autoep_non_moe": False}, "zero_optimization": {"stage": 3}},
    ],
    since=(0, 19),
)
def compiling_around_experts(context: Context) -> Iterator[Hit]:
    """engine.compile() refuses these beside autoep_non_moe (compile in runtime/engine.py)."""
    if not context.flag("compile.autoep_non_moe"):
        return
    against = {
        DEEP: context.flag(DEEP),
        "ZeRO stage 3": context.stage == 3,
        "tensor_parallel.autotp_size": (context.integer("tensor_parallel.autotp_size") or 0) > 1,
        "offload_optimizer": context.text("zero_optimization.offload_optimizer.device") in ("cpu", "nvme"),
        "offload_param": context.text("zero_optimization.offload_param.device") in ("cpu", "nvme"),
        'comm_backend "deepep"': context.text("expert_parallel.comm_backend") == "deepep",
    }
    if found := [name for name, there in against.items() if there]:
        text = f"doesn't go with {', '.join(found)}: engine.compile() fails"
        yield Hit("compile.autoep_non_moe", text, "Set it to false, or do without the other.")


@rule(
    "DS740",
    "warning",
    bad=[
        {"_world_size": 4, "hybrid_engine": {"enabled": True, "inference_tp_size": 3}},
        {"_world_size": 2, "hybrid_engine": {"enabled": True, "inference_tp_size": 4}},
    ],
    good=[
        {"_world_size": 4, "hybrid_engine": {"enabled": True, "inference_tp_size": 4}},
        {"_world_size": 4, "hybrid_engine": {"enabled": False, "inference_tp_size": 3}},
        {"_world_size": None, "hybrid_engine": {"enabled": True, "inference_tp_size": 3}},
    ],
)
def hybrid_engine_groups(context: Context) -> Iterator[Hit]:
    """Ranks that are left over get no group to generate in (create_inference_module in runtime/hybrid_engine.py)."""
    path, ranks = f"{HYBRID}.inference_tp_size", context.world_size
    size = context.integer(path)
    if context.flag(f"{HYBRID}.enabled") and size and ranks and ranks % size:
        yield Hit(
            path,
            f"{size} doesn't divide {ranks} GPUs: {ranks % size} of them get no group",
            "Take a divisor of the GPUs.",
        )


@rule(
    "DS741",
    "warning",
    bad=[
        {"hybrid_engine": {"enabled": True, "enable_cuda_graph": True}, "zero_optimization": {"stage": 3}},
        {"_device": "cpu", "hybrid_engine": {"enabled": True, "enable_cuda_graph": True}},
        {"hybrid_engine": {"enabled": True, "enable_cuda_graph": True, "release_inference_cache": True}},
        {"hybrid_engine": {"enabled": True, "enable_cuda_graph": True, "inference_tp_size": 2}},
    ],
    good=[
        {"hybrid_engine": {"enabled": True, "enable_cuda_graph": True}, "zero_optimization": {"stage": 2}},
        {
            "_device": "cuda",
            "hybrid_engine": {"enabled": True, "enable_cuda_graph": True, "inference_tp_size": 1},
        },
        {"hybrid_engine": {"enabled": True, "enable_cuda_graph": False}, "zero_optimization": {"stage": 3}},
        {"hybrid_engine": {"enabled": False, "enable_cuda_graph": True}, "zero_optimization": {"stage": 3}},
    ],
    since=(0, 19),
)
def cuda_graphs_that_are_left_out(context: Context) -> Iterator[Hit]:
    """It generates without graphs then, and logs why (validate_cuda_graph_support, runtime/hybrid_engine_graph.py)."""
    path = f"{HYBRID}.enable_cuda_graph"
    if not context.flag(path) or not context.flag(f"{HYBRID}.enabled"):
        return
    reasons = {
        "on the CPU": context.setting.device == "cpu",
        "at ZeRO stage 3": context.stage == 3,
        "with release_inference_cache": context.flag(f"{HYBRID}.release_inference_cache"),
        "with inference_tp_size above 1": (context.integer(f"{HYBRID}.inference_tp_size") or 1) > 1,
    }
    if found := [reason for reason, there in reasons.items() if there]:
        yield Hit(
            path,
            f"has no effect {' and '.join(found)}",
            "Set it to false.",
            Fix((Edit("replace", path, False),)),
        )


@rule(
    "DS742",
    "warning",
    bad=[
        {"weight_quantization": {"enabled": True}},
        {"weight_quantization": {"num_bits": 4, "quantized_initialization": {}}},
        {
            "weight_quantization": {"quantized_initialization": {"num_bits": 4}},
            "zero_optimization": {"stage": 2},
        },
    ],
    good=[
        {
            "weight_quantization": {"quantized_initialization": {"num_bits": 4}},
            "zero_optimization": {"stage": 3},
        },
        {
            "weight_quantization": {
                "post_init_quant": {
                    "fc": {"num_bits": 4, "group_size": 64, "group_dim": 1, "symmetric": False}
                }
            }
        },
        {"_weight_quantization": {"enabled": True}},
    ],
)
def weights_that_are_not_quantised(context: Context) -> Iterator[Hit]:
    """zero.Init reads quantized_initialization (runtime/zero/partition_parameters.py); post_init_quant is for the code

    that calls deepspeed.inference.quantization (inference/quantization/quantization.py). Nothing reads the rest.
    """
    if not context.has(QUANTIZATION) or context.get(f"{QUANTIZATION}.post_init_quant"):
        return
    if not context.get(f"{QUANTIZATION}.quantized_initialization"):
        yield Hit(
            QUANTIZATION,
            "has no effect without quantized_initialization",
            "Remove it, or describe the weights there (ZeRO stage 3, zero.Init).",
            Fix((Edit("remove", QUANTIZATION),)),
        )
    elif context.stage < 3:
        path = f"{QUANTIZATION}.quantized_initialization"
        yield Hit(
            path,
            f"has no effect at ZeRO stage {context.stage}",
            "Set zero_optimization.stage to 3, and use zero.Init.",
        )


@rule(
    "DS743",
    "error",
    REFUSED,
    bad=[
        {
            "data_efficiency": {
                "enabled": True,
                "data_sampling": {"enabled": True, "dynamic_batching": {"enabled": True}},
            }
        },
        {"data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": True, "max_batch_size": 8}}}},
    ],
    good=[
        {
            "data_efficiency": {
                "enabled": True,
                "data_sampling": {"dynamic_batching": {"enabled": True, "max_tokens": 64}},
            }
        },
        {"data_efficiency": {"enabled": True, "data_sampling": {"dynamic_batching": {"enabled": False}}}},
    ],
    since=(0, 13),
)
def dynamic_batching_without_tokens(context: Context) -> Iterator[Hit]:
    """Asserted whatever the blocks around it say (get_dynamic_batching in runtime/data_pipeline/config.py)."""
    path = f"{BATCHING}.max_tokens"
    if context.flag(f"{BATCHING}.enabled") and not context.has(path):
        yield Hit(path, "must be given for dynamic batching", "Set it to the tokens of one micro batch.")


@rule(
    "DS744",
    "error",
    REFUSED,
    bad={"data_efficiency": {"enabled": True, "data_sampling": {"curriculum_learning": {"enabled": True}}}},
    good=[
        {
            "data_efficiency": {
                "enabled": True,
                "data_sampling": {"curriculum_learning": {"enabled": True, "curriculum_metrics": {}}},
            }
        },
        {"data_efficiency": {"enabled": True, "data_sampling": {"curriculum_learning": {"enabled": False}}}},
    ],
)
def curriculum_without_metrics(context: Context) -> Iterator[Hit]:
    """Asserted whatever the blocks around it say (get_curriculum_learning in runtime/data_pipeline/config.py)."""
    path = f"{CURRICULUM}.curriculum_metrics"
    if context.flag(f"{CURRICULUM}.enabled") and not context.has(path):
        yield Hit(
            path, "must be given for curriculum learning", "Name a metric in it, with its difficulties."
        )


@rule(
    "DS745",
    "error",
    FAILS,
    bad=[
        {
            "data_efficiency": {
                "enabled": True,
                "data_routing": {"enabled": True, "random_ltd": {"enabled": True}},
            }
        },
        {
            "data_efficiency": {
                "enabled": True,
                "data_routing": {
                    "enabled": True,
                    "random_ltd": {
                        "enabled": True,
                        "total_layer_num": 4,
                        "random_ltd_layer_num": 2,
                        "random_ltd_schedule": {
                            "min_value": 8,
                            "max_value": 64,
                            "schedule_type": "fixed_linear",
                            "schedule_config": {"require_steps": 10},
                        },
                    },
                },
            }
        },
    ],
    good=[
        {
            "data_efficiency": {
                "enabled": True,
                "data_routing": {
                    "enabled": True,
                    "random_ltd": {
                        "enabled": True,
                        "total_layer_num": 4,
                        "random_ltd_layer_num": 2,
                        "random_ltd_schedule": {
                            "min_value": 8,
                            "max_value": 64,
                            "schedule_type": "fixed_linear",
                            "schedule_config": {"require_steps": 10, "seq_per_step": 8},
                        },
                    },
                },
            }
        },
        {
            "data_efficiency": {
                "enabled": True,
                "data_routing": {"enabled": True, "random_ltd": {"enabled": False}},
            }
        },
    ],
)
def random_ltd_that_lacks_numbers(context: Context) -> Iterator[Hit]:
    """A KeyError at the start or the first step (runtime/data_pipeline/data_routing/scheduler.py)."""
    if not context.flag(f"{LTD}.enabled"):
        return
    for section, keys in NEEDED_BY_LTD.items():
        if missing := [key for key in keys if key not in context.section(section)]:
            yield Hit(section, f"lacks {', '.join(missing)}", f"Add {section}.{missing[0]}.")
            return


@rule(
    "DS746",
    "warning",
    bad=[
        {
            "data_efficiency": {
                "data_sampling": {"curriculum_learning": {"enabled": True, "curriculum_metrics": {}}}
            }
        },
        {
            "data_efficiency": {
                "enabled": True,
                "data_sampling": {"enabled": False, "dynamic_batching": {"enabled": True, "max_tokens": 64}},
            }
        },
    ],
    good=[
        {
            "data_efficiency": {
                "enabled": True,
                "data_sampling": {
                    "enabled": True,
                    "curriculum_learning": {"enabled": True, "curriculum_metrics": {}},
                },
            }
        },
        {"data_efficiency": {"enabled": False, "data_sampling": {"curriculum_learning": {"enabled": False}}}},
    ],
)
def data_efficiency_that_stays_on(context: Context) -> Iterator[Hit]:
    """Only the innermost `enabled` is asked (curriculum_learning_enabled, random_ltd_enabled in runtime/engine.py)."""
    for path in (CURRICULUM, BATCHING, LTD):
        if context.flag(f"{path}.enabled"):
            outer = path.rpartition(".")[0]
            off = [name for name in ("data_efficiency", outer) if not context.get(f"{name}.enabled")]
            if off:
                text = f"is on, though {off[0]}.enabled isn't: only its own enabled counts"
                yield Hit(
                    f"{path}.enabled",
                    text,
                    f"Set {' and '.join(f'{name}.enabled' for name in off)} to true too, or this to false.",
                )


@rule(
    "DS747",
    "warning",
    bad=[
        _curriculum({"min_difficulty": 8, "max_difficulty": 64, "schedule_type": "fixed_linear"}),
        _curriculum(
            {
                "min_difficulty": 8,
                "max_difficulty": 64,
                "schedule_type": "fixed_root",
                "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
            }
        ),
        _curriculum(
            {
                "min_difficulty": 1,
                "max_difficulty": 3,
                "schedule_type": "fixed_discrete",
                "schedule_config": {"difficulty": [1, 2], "max_step": [5, 10]},
            }
        ),
        _curriculum({"min_difficulty": 65, "max_difficulty": 64, "schedule_type": "custom"}),
    ],
    good=[
        _curriculum(
            {
                "min_difficulty": 8,
                "max_difficulty": 64,
                "schedule_type": "fixed_linear",
                "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
            }
        ),
        _curriculum(
            {
                "min_difficulty": 1,
                "max_difficulty": 3,
                "schedule_type": "fixed_discrete",
                "schedule_config": {"difficulty": [1, 2, 3], "max_step": [5, 10]},
            }
        ),
        _curriculum({"min_difficulty": 64, "max_difficulty": 64, "schedule_type": "custom"}),
    ],
)
def curriculum_that_fails_with_its_data(context: Context) -> Iterator[Hit]:
    """Asserted where deepspeed.initialize gets training_data (runtime/data_pipeline/curriculum_scheduler.py)."""
    if not context.flag(f"{CURRICULUM}.enabled"):
        return
    for name, metric in context.section(f"{CURRICULUM}.curriculum_metrics").items():
        if isinstance(metric, dict):
            yield from _metric(f"{CURRICULUM}.curriculum_metrics.{name}", metric)


@rule(
    "DS748",
    "warning",
    bad={
        "_for": "hf",
        "data_efficiency": {
            "enabled": True,
            "data_sampling": {
                "enabled": True,
                "curriculum_learning": {"enabled": True, "curriculum_metrics": {}},
            },
        },
    },
    good=[
        {
            "data_efficiency": {
                "enabled": True,
                "data_sampling": {
                    "enabled": True,
                    "curriculum_learning": {"enabled": True, "curriculum_metrics": {}},
                },
            }
        },
        {
            "_for": "hf",
            "data_efficiency": {
                "enabled": True,
                "data_sampling": {"curriculum_learning": {"enabled": False}},
            },
        },
    ],
)
def curriculum_without_the_data(context: Context) -> Iterator[Hit]:
    """DeepSpeed's own data loader does it (deepspeed_io in runtime/engine.py), and HF Trainer brings another."""
    if context.by_trainer and context.flag(f"{CURRICULUM}.enabled"):
        yield Hit(
            CURRICULUM,
            "has no effect under HF Trainer, which loads the data itself",
            "Remove it.",
            Fix((Edit("remove", CURRICULUM),)),
        )


def _metric(path: str, metric: dict[str, Any]) -> Iterator[Hit]:
    low, high = metric.get("min_difficulty"), metric.get("max_difficulty")
    if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low > high:
        yield Hit(
            f"{path}.min_difficulty", f"{low} is above max_difficulty {high}", f"Set it to at most {high}."
        )
    needed = NEEDED_BY_CURRICULUM.get(str(metric.get("schedule_type")), ())
    config = metric.get("schedule_config")
    given = config if isinstance(config, dict) else {}
    if missing := [key for key in needed if key not in given]:
        text = f'lacks {", ".join(missing)} for schedule_type "{metric["schedule_type"]}"'
        yield Hit(f"{path}.schedule_config", text, f"Add {path}.schedule_config.{missing[0]}.")
    elif (
        "max_step" in needed and isinstance(given["difficulty"], list) and isinstance(given["max_step"], list)
    ):
        difficulties, steps = len(given["difficulty"]), len(given["max_step"])
        if difficulties != steps + 1:
            text = f"has {steps} max_step for {difficulties} difficulties"
            yield Hit(
                f"{path}.schedule_config", text, f"Give {difficulties - 1}: the last difficulty has no end."
            )


def _passes(context: Context) -> list[str]:
    passes = context.get("compile.passes")
    return [name for name in passes if isinstance(name, str)] if isinstance(passes, list) else []
