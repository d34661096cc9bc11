# ruff: noqa: E501 - texts stand here as they are shown
"""What needs the training code: what exactly is said of a config, and that nothing is said of its right neighbour."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from dsrun.config.rules import model_code, run
from dsrun.config.rules.frame import Rule, example

OWN = {rule.id for rule in vars(model_code).values() if isinstance(rule, Rule)}


class Said(NamedTuple):
    """A finding; fix is (edits, safe)."""

    rule: str
    severity: str
    effect: str
    path: str
    message: str
    suggestion: str
    fix: tuple | None = None


CASES = [
    (
        {"activation_checkpointing": {"partition_activations": True}},
        [
            Said(
                "DS730",
                "note",
                "",
                "activation_checkpointing",
                "acts only if the code calls deepspeed.checkpointing.configure: partition_activations",
                "Call it with this config, and wrap the layers in deepspeed.checkpointing.checkpoint.",
            ),
        ],
    ),
    (
        {"_for": "hf", "activation_checkpointing": {"cpu_checkpointing": True}},
        [
            Said(
                "DS730",
                "warning",
                "",
                "activation_checkpointing",
                "has no effect under HF Trainer: cpu_checkpointing",
                "Remove it, and set gradient_checkpointing in the TrainingArguments.",
                ((("remove", "activation_checkpointing", None),), True),
            ),
        ],
    ),
    (
        {"_for": "accelerate", "activation_checkpointing": {"number_checkpoints": 4}},
        [
            Said(
                "DS730",
                "note",
                "",
                "activation_checkpointing",
                "acts only if the code calls deepspeed.checkpointing.configure: number_checkpoints",
                "Call it with this config, and wrap the layers in deepspeed.checkpointing.checkpoint.",
            ),
        ],
    ),
    (
        {"activation_checkpointing": {"contiguous_memory_optimization": True, "number_checkpoints": 4}},
        [
            Said(
                "DS731",
                "warning",
                "",
                "activation_checkpointing.contiguous_memory_optimization",
                "needs partition_activations, or deepspeed.checkpointing.configure fails",
                "Set what is missing, or set it to false.",
            ),
            Said(
                "DS730",
                "note",
                "",
                "activation_checkpointing",
                "acts only if the code calls deepspeed.checkpointing.configure: contiguous_memory_optimization, number_checkpoints",
                "Call it with this config, and wrap the layers in deepspeed.checkpointing.checkpoint.",
            ),
        ],
    ),
    (
        {"activation_checkpointing": {"contiguous_memory_optimization": True, "partition_activations": True}},
        [
            Said(
                "DS731",
                "warning",
                "",
                "activation_checkpointing.contiguous_memory_optimization",
                "needs number_checkpoints, or deepspeed.checkpointing.configure fails",
                "Set what is missing, or set it to false.",
            ),
            Said(
                "DS730",
                "note",
                "",
                "activation_checkpointing",
                "acts only if the code calls deepspeed.checkpointing.configure: contiguous_memory_optimization, partition_activations",
                "Call it with this config, and wrap the layers in deepspeed.checkpointing.checkpoint.",
            ),
        ],
    ),
    (
        {"compile": {"offload_activation": True}},
        [
            Said(
                "DS732",
                "warning",
                "",
                "compile",
                "has no effect while deepcompile is off: offload_activation",
                "Set compile.deepcompile to true, or remove it.",
            ),
        ],
    ),
    (
        {"compile": {"deepcompile": False, "passes": ["z3"]}},
        [
            Said(
                "DS732",
                "warning",
                "",
                "compile",
                "has no effect while deepcompile is off: passes",
                "Set compile.deepcompile to true, or remove it.",
            ),
        ],
    ),
    (
        {"compile": {"free_activation_threshold": 1}},
        [
            Said(
                "DS732",
                "warning",
                "",
                "compile",
                "has no effect while deepcompile is off: free_activation_threshold",
                "Set compile.deepcompile to true, or remove it.",
            ),
        ],
    ),
    (
        {"compile": {"deepcompile": True}, "zero_optimization": {"stage": 2}},
        [
            Said(
                "DS733",
                "note",
                "",
                "compile.deepcompile",
                "acts only after engine.compile()",
                "Call it after deepspeed.initialize.",
            ),
        ],
    ),
    (
        {"_for": "hf", "_trainer": {"torch_compile": False}, "compile": {"deepcompile": True}},
        [
            Said(
                "DS733",
                "warning",
                "",
                "compile.deepcompile",
                "has no effect: torch_compile is off, so nothing is compiled",
                "Set torch_compile in the TrainingArguments.",
            ),
        ],
    ),
    (
        {"_for": "hf", "compile": {"deepcompile": True}},
        [
            Said(
                "DS733",
                "note",
                "",
                "compile.deepcompile",
                "acts only after engine.compile()",
                "Set torch_compile in the TrainingArguments.",
            ),
        ],
    ),
    (
        {
            "_for": "hf",
            "_device": "cpu",
            "_trainer": {"torch_compile": True},
            "compile": {"deepcompile": True},
        },
        [
            Said(
                "DS734",
                "error",
                "fails",
                "compile.deepcompile",
                "needs GPUs: its extension doesn't build on the CPU",
                "Set it to false.",
                ((("replace", "compile.deepcompile", False),), False),
            ),
        ],
    ),
    (
        {"compile": {"deepcompile": True}},
        [
            Said(
                "DS735",
                "warning",
                "",
                "compile.deepcompile",
                "needs ZeRO stage 1, 2 or 3, and this is stage 0: torch.compile takes over",
                "Set zero_optimization.stage.",
            ),
            Said(
                "DS733",
                "note",
                "",
                "compile.deepcompile",
                "acts only after engine.compile()",
                "Call it after deepspeed.initialize.",
            ),
        ],
    ),
    (
        {"compile": {"deepcompile": True, "passes": ["autosp"]}, "zero_optimization": {"stage": 2}},
        [
            Said(
                "DS735",
                "warning",
                "",
                "compile.passes",
                '"autosp" doesn\'t go with ZeRO stage 2: torch.compile takes over',
                "Set zero_optimization.stage to 0 or 1.",
            ),
            Said(
                "DS733",
                "note",
                "",
                "compile.deepcompile",
                "acts only after engine.compile()",
                "Call it after deepspeed.initialize.",
            ),
        ],
    ),
    (
        {"compile": {"deepcompile": True, "passes": ["autotp"]}, "zero_optimization": {"stage": 2}},
        [
            Said(
                "DS735",
                "warning",
                "",
                "compile.passes",
                '"autotp" needs tensor_parallel.autotp_size above 1: torch.compile takes over',
                "Set tensor_parallel.autotp_size.",
            ),
            Said(
                "DS733",
                "note",
                "",
                "compile.deepcompile",
                "acts only after engine.compile()",
                "Call it after deepspeed.initialize.",
            ),
        ],
    ),
    (
        {
            "_for": "hf",
            "_trainer": {"torch_compile": True},
            "tensor_parallel": {"autotp_size": 2},
            "zero_optimization": {"stage": 2, "stage3_gather_16bit_weights_on_model_save": True},
            "compile": {"deepcompile": True, "passes": ["autotp", "z3"]},
        },
        [
            Said(
                "DS736",
                "error",
                "fails",
                "compile.passes",
                '"autotp" can\'t be combined with z3',
                "Keep one of them.",
            ),
        ],
    ),
    (
        {
            "compile": {"deepcompile": True, "offload_activation": True, "offload_parameters": True},
            "zero_optimization": {"stage": 3},
        },
        [
            Said(
                "DS738",
                "warning",
                "",
                "compile",
                "can't have offload_activation, offload_parameters together: engine.compile() fails",
                "Keep one of them.",
            ),
            Said(
                "DS733",
                "note",
                "",
                "compile.deepcompile",
                "acts only after engine.compile()",
                "Call it after deepspeed.initialize.",
            ),
        ],
    ),
    (
        {
            "compile": {"deepcompile": True, "offload_activation": True, "offload_opt_states": True},
            "zero_optimization": {"stage": 3},
        },
        [
            Said(
                "DS738",
                "warning",
                "",
                "compile",
                "can't have offload_activation, offload_opt_states together: engine.compile() fails",
                "Keep one of them.",
            ),
            Said(
                "DS733",
                "note",
                "",
                "compile.deepcompile",
                "acts only after engine.compile()",
                "Call it after deepspeed.initialize.",
            ),
        ],
    ),
    (
        {
            "compile": {"deepcompile": True, "offload_parameters": True, "offload_opt_states": True},
            "zero_optimization": {"stage": 3},
        },
        [
            Said(
                "DS738",
                "warning",
                "",
                "compile",
                "can't have offload_parameters, offload_opt_states together: engine.compile() fails",
                "Keep one of them.",
            ),
            Said(
                "DS733",
                "note",
                "",
                "compile.deepcompile",
                "acts only after engine.compile()",
                "Call it after deepspeed.initialize.",
            ),
        ],
    ),
    (
        {
            "compile": {"deepcompile": True, "offload_opt_states": True},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        },
        [
            Said(
                "DS738",
                "warning",
                "",
                "compile.offload_opt_states",
                "doesn't go with zero_optimization.offload_optimizer: engine.compile() fails",
                "Keep one of the two.",
            ),
            Said(
                "DS733",
                "note",
                "",
                "compile.deepcompile",
                "acts only after engine.compile()",
                "Call it after deepspeed.initialize.",
            ),
        ],
    ),
    (
        {"compile": {"autoep_non_moe": True}, "zero_optimization": {"stage": 3}},
        [
            Said(
                "DS739",
                "warning",
                "",
                "compile.autoep_non_moe",
                "doesn't go with ZeRO stage 3: engine.compile() fails",
                "Set it to false, or do without the other.",
            ),
        ],
    ),
    (
        {"compile": {"autoep_non_moe": True, "deepcompile": True}, "zero_optimization": {"stage": 1}},
        [
            Said(
                "DS739",
                "warning",
                "",
                "compile.autoep_non_moe",
                "doesn't go with compile.deepcompile: engine.compile() fails",
                "Set it to false, or do without the other.",
            ),
            Said(
                "DS733",
                "note",
                "",
                "compile.deepcompile",
                "acts only after engine.compile()",
                "Call it after deepspeed.initialize.",
            ),
        ],
    ),
    (
        {"compile": {"autoep_non_moe": True}, "tensor_parallel": {"autotp_size": 2}},
        [
            Said(
                "DS739",
                "warning",
                "",
                "compile.autoep_non_moe",
                "doesn't go with tensor_parallel.autotp_size: engine.compile() fails",
                "Set it to false, or do without the other.",
            ),
        ],
    ),
    (
        {
            "compile": {"autoep_non_moe": True},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
        [
            Said(
                "DS739",
                "warning",
                "",
                "compile.autoep_non_moe",
                "doesn't go with offload_optimizer: engine.compile() fails",
                "Set it to false, or do without the other.",
            ),
        ],
    ),
    (
        {"compile": {"autoep_non_moe": True}, "expert_parallel": {"comm_backend": "deepep"}},
        [
            Said(
                "DS739",
                "warning",
                "",
                "compile.autoep_non_moe",
                'doesn\'t go with comm_backend "deepep": engine.compile() fails',
                "Set it to false, or do without the other.",
            ),
        ],
    ),
    (
        {"_world_size": 4, "hybrid_engine": {"enabled": True, "inference_tp_size": 3}},
        [
            Said(
                "DS740",
                "warning",
                "",
                "hybrid_engine.inference_tp_size",
                "3 doesn't divide 4 GPUs: 1 of them get no group",
                "Take a divisor of the GPUs.",
            ),
        ],
    ),
    (
        {"_world_size": 2, "hybrid_engine": {"enabled": True, "inference_tp_size": 4}},
        [
            Said(
                "DS740",
                "warning",
                "",
                "hybrid_engine.inference_tp_size",
                "4 doesn't divide 2 GPUs: 2 of them get no group",
                "Take a divisor of the GPUs.",
            ),
        ],
    ),
    (
        {"hybrid_engine": {"enabled": True, "enable_cuda_graph": True}, "zero_optimization": {"stage": 3}},
        [
            Said(
                "DS741",
                "warning",
                "",
                "hybrid_engine.enable_cuda_graph",
                "has no effect at ZeRO stage 3",
                "Set it to false.",
                ((("replace", "hybrid_engine.enable_cuda_graph", False),), True),
            ),
        ],
    ),
    (
        {"_device": "cpu", "hybrid_engine": {"enabled": True, "enable_cuda_graph": True}},
        [
            Said(
                "DS741",
                "warning",
                "",
                "hybrid_engine.enable_cuda_graph",
                "has no effect on the CPU",
                "Set it to false.",
                ((("replace", "hybrid_engine.enable_cuda_graph", False),), True),
            ),
        ],
    ),
    (
        {"hybrid_engine": {"enabled": True, "enable_cuda_graph": True, "release_inference_cache": True}},
        [
            Said(
                "DS741",
                "warning",
                "",
                "hybrid_engine.enable_cuda_graph",
                "has no effect with release_inference_cache",
                "Set it to false.",
                ((("replace", "hybrid_engine.enable_cuda_graph", False),), True),
            ),
        ],
    ),
    (
        {"hybrid_engine": {"enabled": True, "enable_cuda_graph": True, "inference_tp_size": 2}},
        [
            Said(
                "DS741",
                "warning",
                "",
                "hybrid_engine.enable_cuda_graph",
                "has no effect with inference_tp_size above 1",
                "Set it to false.",
                ((("replace", "hybrid_engine.enable_cuda_graph", False),), True),
            ),
        ],
    ),
    (
        {"weight_quantization": {"enabled": True}},
        [
            Said(
                "DS742",
                "warning",
                "",
                "weight_quantization",
                "has no effect without quantized_initialization",
                "Remove it, or describe the weights there (ZeRO stage 3, zero.Init).",
                ((("remove", "weight_quantization", None),), True),
            ),
        ],
    ),
    (
        {"weight_quantization": {"num_bits": 4, "quantized_initialization": {}}},
        [
            Said(
                "DS742",
                "warning",
                "",
                "weight_quantization",
                "has no effect without quantized_initialization",
                "Remove it, or describe the weights there (ZeRO stage 3, zero.Init).",
                ((("remove", "weight_quantization", None),), True),
            ),
        ],
    ),
    (
        {
            "weight_quantization": {"quantized_initialization": {"num_bits": 4}},
            "zero_optimization": {"stage": 2},
        },
        [
            Said(
                "DS742",
                "warning",
                "",
                "weight_quantization.quantized_initialization",
                "has no effect at ZeRO stage 2",
                "Set zero_optimization.stage to 3, and use zero.Init.",
            ),
        ],
    ),
    (
        {
            "data_efficiency": {
                "enabled": True,
                "data_sampling": {"enabled": True, "dynamic_batching": {"enabled": True}},
            }
        },
        [
            Said(
                "DS743",
                "error",
                "refused",
                "data_efficiency.data_sampling.dynamic_batching.max_tokens",
                "must be given for dynamic batching",
                "Set it to the tokens of one micro batch.",
            ),
        ],
    ),
    (
        {"data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": True, "max_batch_size": 8}}}},
        [
            Said(
                "DS743",
                "error",
                "refused",
                "data_efficiency.data_sampling.dynamic_batching.max_tokens",
                "must be given for dynamic batching",
                "Set it to the tokens of one micro batch.",
            ),
            Said(
                "DS746",
                "warning",
                "",
                "data_efficiency.data_sampling.dynamic_batching.enabled",
                "is on, though data_efficiency.enabled isn't: only its own enabled counts",
                "Set data_efficiency.enabled and data_efficiency.data_sampling.enabled to true too, or this to false.",
            ),
        ],
    ),
    (
        {"data_efficiency": {"enabled": True, "data_sampling": {"curriculum_learning": {"enabled": True}}}},
        [
            Said(
                "DS744",
                "error",
                "refused",
                "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics",
                "must be given for curriculum learning",
                "Name a metric in it, with its difficulties.",
            ),
            Said(
                "DS746",
                "warning",
                "",
                "data_efficiency.data_sampling.curriculum_learning.enabled",
                "is on, though data_efficiency.data_sampling.enabled isn't: only its own enabled counts",
                "Set data_efficiency.data_sampling.enabled to true too, or this to false.",
            ),
        ],
    ),
    (
        {
            "data_efficiency": {
                "enabled": True,
                "data_routing": {"enabled": True, "random_ltd": {"enabled": True}},
            }
        },
        [
            Said(
                "DS745",
                "error",
                "fails",
                "data_efficiency.data_routing.random_ltd",
                "lacks total_layer_num, random_ltd_layer_num, random_ltd_schedule",
                "Add data_efficiency.data_routing.random_ltd.total_layer_num.",
            ),
        ],
    ),
    (
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
        [
            Said(
                "DS745",
                "error",
                "fails",
                "data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_config",
                "lacks seq_per_step",
                "Add data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_config.seq_per_step.",
            ),
        ],
    ),
    (
        {
            "data_efficiency": {
                "data_sampling": {"curriculum_learning": {"enabled": True, "curriculum_metrics": {}}}
            }
        },
        [
            Said(
                "DS746",
                "warning",
                "",
                "data_efficiency.data_sampling.curriculum_learning.enabled",
                "is on, though data_efficiency.enabled isn't: only its own enabled counts",
                "Set data_efficiency.enabled and data_efficiency.data_sampling.enabled to true too, or this to false.",
            ),
        ],
    ),
    (
        {
            "data_efficiency": {
                "enabled": True,
                "data_sampling": {"enabled": False, "dynamic_batching": {"enabled": True, "max_tokens": 64}},
            }
        },
        [
            Said(
                "DS746",
                "warning",
                "",
                "data_efficiency.data_sampling.dynamic_batching.enabled",
                "is on, though data_efficiency.data_sampling.enabled isn't: only its own enabled counts",
                "Set data_efficiency.data_sampling.enabled to true too, or this to false.",
            ),
        ],
    ),
    (
        {
            "data_efficiency": {
                "enabled": True,
                "data_sampling": {
                    "enabled": True,
                    "curriculum_learning": {
                        "enabled": True,
                        "curriculum_metrics": {
                            "length": {
                                "min_difficulty": 8,
                                "max_difficulty": 64,
                                "schedule_type": "fixed_linear",
                            }
                        },
                    },
                },
            }
        },
        [
            Said(
                "DS747",
                "warning",
                "",
                "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.length.schedule_config",
                'lacks total_curriculum_step, difficulty_step for schedule_type "fixed_linear"',
                "Add data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.length.schedule_config.total_curriculum_step.",
            ),
        ],
    ),
    (
        {
            "data_efficiency": {
                "enabled": True,
                "data_sampling": {
                    "enabled": True,
                    "curriculum_learning": {
                        "enabled": True,
                        "curriculum_metrics": {
                            "length": {
                                "min_difficulty": 8,
                                "max_difficulty": 64,
                                "schedule_type": "fixed_root",
                                "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
                            }
                        },
                    },
                },
            }
        },
        [
            Said(
                "DS747",
                "warning",
                "",
                "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.length.schedule_config",
                'lacks root_degree for schedule_type "fixed_root"',
                "Add data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.length.schedule_config.root_degree.",
            ),
        ],
    ),
    (
        {
            "data_efficiency": {
                "enabled": True,
                "data_sampling": {
                    "enabled": True,
                    "curriculum_learning": {
                        "enabled": True,
                        "curriculum_metrics": {
                            "length": {
                                "min_difficulty": 1,
                                "max_difficulty": 3,
                                "schedule_type": "fixed_discrete",
                                "schedule_config": {"difficulty": [1, 2], "max_step": [5, 10]},
                            }
                        },
                    },
                },
            }
        },
        [
            Said(
                "DS747",
                "warning",
                "",
                "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.length.schedule_config",
                "has 2 max_step for 2 difficulties",
                "Give 1: the last difficulty has no end.",
            ),
        ],
    ),
    (
        {
            "data_efficiency": {
                "enabled": True,
                "data_sampling": {
                    "enabled": True,
                    "curriculum_learning": {
                        "enabled": True,
                        "curriculum_metrics": {
                            "length": {"min_difficulty": 65, "max_difficulty": 64, "schedule_type": "custom"}
                        },
                    },
                },
            }
        },
        [
            Said(
                "DS747",
                "warning",
                "",
                "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.length.min_difficulty",
                "65 is above max_difficulty 64",
                "Set it to at most 64.",
            ),
        ],
    ),
    (
        {
            "_for": "hf",
            "data_efficiency": {
                "enabled": True,
                "data_sampling": {
                    "enabled": True,
                    "curriculum_learning": {"enabled": True, "curriculum_metrics": {}},
                },
            },
        },
        [
            Said(
                "DS748",
                "warning",
                "",
                "data_efficiency.data_sampling.curriculum_learning",
                "has no effect under HF Trainer, which loads the data itself",
                "Remove it.",
                ((("remove", "data_efficiency.data_sampling.curriculum_learning", None),), True),
            ),
        ],
    ),
    (
        {"_for": "hf", "activation_checkpointing": {"contiguous_memory_optimization": True}},
        [
            Said(
                "DS730",
                "warning",
                "",
                "activation_checkpointing",
                "has no effect under HF Trainer: contiguous_memory_optimization",
                "Remove it, and set gradient_checkpointing in the TrainingArguments.",
                ((("remove", "activation_checkpointing", None),), True),
            ),
        ],
    ),
    (
        {"activation_checkpointing": {"contiguous_memory_optimization": True}},
        [
            Said(
                "DS731",
                "warning",
                "",
                "activation_checkpointing.contiguous_memory_optimization",
                "needs partition_activations and number_checkpoints, or deepspeed.checkpointing.configure fails",
                "Set what is missing, or set it to false.",
            ),
            Said(
                "DS730",
                "note",
                "",
                "activation_checkpointing",
                "acts only if the code calls deepspeed.checkpointing.configure: contiguous_memory_optimization",
                "Call it with this config, and wrap the layers in deepspeed.checkpointing.checkpoint.",
            ),
        ],
    ),
    (
        {
            "_for": "hf",
            "_device": "cpu",
            "_trainer": {"torch_compile": False},
            "compile": {"deepcompile": True},
        },
        [
            Said(
                "DS733",
                "warning",
                "",
                "compile.deepcompile",
                "has no effect: torch_compile is off, so nothing is compiled",
                "Set torch_compile in the TrainingArguments.",
            ),
            Said(
                "DS734",
                "warning",
                "",
                "compile.deepcompile",
                "needs GPUs: its extension doesn't build on the CPU",
                "Set it to false.",
                ((("replace", "compile.deepcompile", False),), False),
            ),
        ],
    ),
    (
        {"_device": "cpu", "compile": {"deepcompile": True}},
        [
            Said(
                "DS734",
                "warning",
                "",
                "compile.deepcompile",
                "needs GPUs: its extension doesn't build on the CPU",
                "Set it to false.",
                ((("replace", "compile.deepcompile", False),), False),
            ),
            Said(
                "DS735",
                "warning",
                "",
                "compile.deepcompile",
                "needs ZeRO stage 1, 2 or 3, and this is stage 0: torch.compile takes over",
                "Set zero_optimization.stage.",
            ),
            Said(
                "DS733",
                "note",
                "",
                "compile.deepcompile",
                "acts only after engine.compile()",
                "Call it after deepspeed.initialize.",
            ),
        ],
    ),
    (
        {"compile": {"passes": ["z1"], "debug_log": True}},
        [
            Said(
                "DS732",
                "warning",
                "",
                "compile",
                "has no effect while deepcompile is off: passes, debug_log",
                "Set compile.deepcompile to true, or remove them.",
            ),
        ],
    ),
    (
        {"compile": {"deepcompile": True, "passes": ["autotp", "z1"]}, "tensor_parallel": {"autotp_size": 2}},
        [
            Said(
                "DS736",
                "warning",
                "",
                "compile.passes",
                '"autotp" can\'t be combined with z1',
                "Keep one of them.",
            ),
            Said(
                "DS733",
                "note",
                "",
                "compile.deepcompile",
                "acts only after engine.compile()",
                "Call it after deepspeed.initialize.",
            ),
        ],
    ),
    (
        {"compile": {"deepcompile": True, "passes": ["autosp"]}, "zero_optimization": {"stage": 3}},
        [
            Said(
                "DS735",
                "warning",
                "",
                "compile.passes",
                '"autosp" doesn\'t go with ZeRO stage 3: torch.compile takes over',
                "Set zero_optimization.stage to 0 or 1.",
            ),
            Said(
                "DS733",
                "note",
                "",
                "compile.deepcompile",
                "acts only after engine.compile()",
                "Call it after deepspeed.initialize.",
            ),
        ],
    ),
    (
        {
            "compile": {
                "deepcompile": True,
                "offload_activation": True,
                "offload_parameters": True,
                "offload_opt_states": True,
            },
            "zero_optimization": {"stage": 3},
        },
        [
            Said(
                "DS738",
                "warning",
                "",
                "compile",
                "can't have offload_activation, offload_parameters, offload_opt_states together: engine.compile() fails",
                "Keep one of them.",
            ),
            Said(
                "DS733",
                "note",
                "",
                "compile.deepcompile",
                "acts only after engine.compile()",
                "Call it after deepspeed.initialize.",
            ),
        ],
    ),
    (
        {
            "compile": {"deepcompile": True, "offload_activation": True, "offload_parameters": True},
            "zero_optimization": {"stage": 2},
        },
        [
            Said(
                "DS733",
                "note",
                "",
                "compile.deepcompile",
                "acts only after engine.compile()",
                "Call it after deepspeed.initialize.",
            ),
        ],
    ),
    (
        {
            "compile": {"autoep_non_moe": True},
            "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
            "tensor_parallel": {"autotp_size": 2},
        },
        [
            Said(
                "DS739",
                "warning",
                "",
                "compile.autoep_non_moe",
                "doesn't go with ZeRO stage 3, tensor_parallel.autotp_size, offload_param: engine.compile() fails",
                "Set it to false, or do without the other.",
            ),
        ],
    ),
    (
        {
            "_device": "cpu",
            "hybrid_engine": {"enabled": True, "enable_cuda_graph": True, "inference_tp_size": 2},
        },
        [
            Said(
                "DS741",
                "warning",
                "",
                "hybrid_engine.enable_cuda_graph",
                "has no effect on the CPU and with inference_tp_size above 1",
                "Set it to false.",
                ((("replace", "hybrid_engine.enable_cuda_graph", False),), True),
            ),
        ],
    ),
    (
        {"weight_quantization": {"quantized_initialization": {"num_bits": 4}}},
        [
            Said(
                "DS742",
                "warning",
                "",
                "weight_quantization.quantized_initialization",
                "has no effect at ZeRO stage 0",
                "Set zero_optimization.stage to 3, and use zero.Init.",
            ),
        ],
    ),
    (
        {
            "data_efficiency": {
                "data_routing": {
                    "random_ltd": {
                        "enabled": True,
                        "total_layer_num": 1,
                        "random_ltd_layer_num": 1,
                        "random_ltd_schedule": {"min_value": 1},
                    }
                }
            }
        },
        [
            Said(
                "DS745",
                "error",
                "fails",
                "data_efficiency.data_routing.random_ltd.random_ltd_schedule",
                "lacks max_value, schedule_type, schedule_config",
                "Add data_efficiency.data_routing.random_ltd.random_ltd_schedule.max_value.",
            ),
            Said(
                "DS746",
                "warning",
                "",
                "data_efficiency.data_routing.random_ltd.enabled",
                "is on, though data_efficiency.enabled isn't: only its own enabled counts",
                "Set data_efficiency.enabled and data_efficiency.data_routing.enabled to true too, or this to false.",
            ),
        ],
    ),
    (
        {
            "data_efficiency": {
                "enabled": True,
                "data_sampling": {
                    "enabled": True,
                    "curriculum_learning": {
                        "enabled": True,
                        "curriculum_metrics": {
                            "n": {
                                "min_difficulty": 1,
                                "max_difficulty": 3,
                                "schedule_type": "fixed_discrete",
                                "schedule_config": {"difficulty": [1, 2, 3], "max_step": [5]},
                            }
                        },
                    },
                },
            }
        },
        [
            Said(
                "DS747",
                "warning",
                "",
                "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.n.schedule_config",
                "has 1 max_step for 3 difficulties",
                "Give 2: the last difficulty has no end.",
            ),
        ],
    ),
    (
        {
            "data_efficiency": {
                "enabled": True,
                "data_sampling": {
                    "enabled": True,
                    "curriculum_learning": {
                        "enabled": True,
                        "curriculum_metrics": {
                            "n": {
                                "min_difficulty": 1,
                                "max_difficulty": 3,
                                "schedule_type": "fixed_discrete",
                                "schedule_config": {"max_step": [5]},
                            }
                        },
                    },
                },
            }
        },
        [
            Said(
                "DS747",
                "warning",
                "",
                "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.n.schedule_config",
                'lacks difficulty for schedule_type "fixed_discrete"',
                "Add data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.n.schedule_config.difficulty.",
            ),
        ],
    ),
    ({"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}}, []),
    ({"_for": "lightning", "activation_checkpointing": {"partition_activations": True}}, []),
    ({"activation_checkpointing": {}}, []),
    (
        {
            "activation_checkpointing": {
                "contiguous_memory_optimization": True,
                "partition_activations": True,
                "number_checkpoints": 4,
            }
        },
        [
            Said(
                "DS730",
                "note",
                "",
                "activation_checkpointing",
                "acts only if the code calls deepspeed.checkpointing.configure: contiguous_memory_optimization, partition_activations, number_checkpoints",
                "Call it with this config, and wrap the layers in deepspeed.checkpointing.checkpoint.",
            ),
        ],
    ),
    ({"activation_checkpointing": {"contiguous_memory_optimization": False}}, []),
    ({"compile": {"deepcompile": False}}, []),
    (
        {"compile": {"deepcompile": True, "passes": ["z3"]}, "zero_optimization": {"stage": 3}},
        [
            Said(
                "DS733",
                "note",
                "",
                "compile.deepcompile",
                "acts only after engine.compile()",
                "Call it after deepspeed.initialize.",
            ),
        ],
    ),
    (
        {"compile": {"double_buffer": False, "deepcompile": True}, "zero_optimization": {"stage": 3}},
        [
            Said(
                "DS733",
                "note",
                "",
                "compile.deepcompile",
                "acts only after engine.compile()",
                "Call it after deepspeed.initialize.",
            ),
        ],
    ),
    ({"compile": {"debug_log": False}}, []),
    ({"compile": {"autoep_non_moe": True}}, []),
    ({"_for": "hf", "_trainer": {"torch_compile": True}, "compile": {"deepcompile": True}}, []),
    (
        {
            "_for": "hf",
            "_device": "cuda",
            "_trainer": {"torch_compile": True},
            "compile": {"deepcompile": True},
        },
        [],
    ),
    ({"_device": "cpu", "compile": {"deepcompile": False}}, []),
    (
        {"compile": {"deepcompile": True}, "zero_optimization": {"stage": 1}},
        [
            Said(
                "DS733",
                "note",
                "",
                "compile.deepcompile",
                "acts only after engine.compile()",
                "Call it after deepspeed.initialize.",
            ),
        ],
    ),
    (
        {"compile": {"deepcompile": True, "passes": ["autosp"]}, "zero_optimization": {"stage": 1}},
        [
            Said(
                "DS733",
                "note",
                "",
                "compile.deepcompile",
                "acts only after engine.compile()",
                "Call it after deepspeed.initialize.",
            ),
        ],
    ),
    (
        {"compile": {"deepcompile": True, "passes": ["autosp"]}},
        [
            Said(
                "DS733",
                "note",
                "",
                "compile.deepcompile",
                "acts only after engine.compile()",
                "Call it after deepspeed.initialize.",
            ),
        ],
    ),
    (
        {"compile": {"deepcompile": True, "passes": ["autotp"]}, "tensor_parallel": {"autotp_size": 2}},
        [
            Said(
                "DS733",
                "note",
                "",
                "compile.deepcompile",
                "acts only after engine.compile()",
                "Call it after deepspeed.initialize.",
            ),
        ],
    ),
    (
        {
            "_for": "hf",
            "_trainer": {"torch_compile": True},
            "compile": {"deepcompile": True, "passes": ["z1", "z3"]},
        },
        [],
    ),
    (
        {"compile": {"deepcompile": False, "passes": ["autotp", "z3"]}},
        [
            Said(
                "DS732",
                "warning",
                "",
                "compile",
                "has no effect while deepcompile is off: passes",
                "Set compile.deepcompile to true, or remove it.",
            ),
        ],
    ),
    (
        {"compile": {"deepcompile": True, "offload_activation": True}, "zero_optimization": {"stage": 3}},
        [
            Said(
                "DS733",
                "note",
                "",
                "compile.deepcompile",
                "acts only after engine.compile()",
                "Call it after deepspeed.initialize.",
            ),
        ],
    ),
    (
        {"compile": {"deepcompile": True, "offload_opt_states": True}, "zero_optimization": {"stage": 3}},
        [
            Said(
                "DS733",
                "note",
                "",
                "compile.deepcompile",
                "acts only after engine.compile()",
                "Call it after deepspeed.initialize.",
            ),
        ],
    ),
    (
        {
            "compile": {"deepcompile": True, "offload_parameters": True},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        },
        [
            Said(
                "DS733",
                "note",
                "",
                "compile.deepcompile",
                "acts only after engine.compile()",
                "Call it after deepspeed.initialize.",
            ),
        ],
    ),
    (
        {
            "compile": {"deepcompile": False, "offload_activation": True, "offload_parameters": True},
            "zero_optimization": {"stage": 3},
        },
        [
            Said(
                "DS732",
                "warning",
                "",
                "compile",
                "has no effect while deepcompile is off: offload_activation, offload_parameters",
                "Set compile.deepcompile to true, or remove them.",
            ),
        ],
    ),
    ({"compile": {"autoep_non_moe": True}, "zero_optimization": {"stage": 2}}, []),
    ({"compile": {"autoep_non_moe": True}, "expert_parallel": {"comm_backend": "comm"}}, []),
    (
        {
            "compile": {"autoep_non_moe": True},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}},
        },
        [],
    ),
    ({"compile": {"autoep_non_moe": False}, "zero_optimization": {"stage": 3}}, []),
    ({"_world_size": 4, "hybrid_engine": {"enabled": True, "inference_tp_size": 4}}, []),
    ({"_world_size": 4, "hybrid_engine": {"enabled": False, "inference_tp_size": 3}}, []),
    ({"_world_size": None, "hybrid_engine": {"enabled": True, "inference_tp_size": 3}}, []),
    ({"hybrid_engine": {"enabled": True, "enable_cuda_graph": True}, "zero_optimization": {"stage": 2}}, []),
    (
        {
            "_device": "cuda",
            "hybrid_engine": {"enabled": True, "enable_cuda_graph": True, "inference_tp_size": 1},
        },
        [],
    ),
    ({"hybrid_engine": {"enabled": True, "enable_cuda_graph": False}, "zero_optimization": {"stage": 3}}, []),
    ({"hybrid_engine": {"enabled": False, "enable_cuda_graph": True}, "zero_optimization": {"stage": 3}}, []),
    (
        {
            "weight_quantization": {"quantized_initialization": {"num_bits": 4}},
            "zero_optimization": {"stage": 3},
        },
        [],
    ),
    (
        {
            "weight_quantization": {
                "post_init_quant": {
                    "fc": {"num_bits": 4, "group_size": 64, "group_dim": 1, "symmetric": False}
                }
            }
        },
        [],
    ),
    ({"_weight_quantization": {"enabled": True}}, []),
    (
        {
            "data_efficiency": {
                "enabled": True,
                "data_sampling": {"dynamic_batching": {"enabled": True, "max_tokens": 64}},
            }
        },
        [
            Said(
                "DS746",
                "warning",
                "",
                "data_efficiency.data_sampling.dynamic_batching.enabled",
                "is on, though data_efficiency.data_sampling.enabled isn't: only its own enabled counts",
                "Set data_efficiency.data_sampling.enabled to true too, or this to false.",
            ),
        ],
    ),
    ({"data_efficiency": {"enabled": True, "data_sampling": {"dynamic_batching": {"enabled": False}}}}, []),
    (
        {
            "data_efficiency": {
                "enabled": True,
                "data_sampling": {"curriculum_learning": {"enabled": True, "curriculum_metrics": {}}},
            }
        },
        [
            Said(
                "DS746",
                "warning",
                "",
                "data_efficiency.data_sampling.curriculum_learning.enabled",
                "is on, though data_efficiency.data_sampling.enabled isn't: only its own enabled counts",
                "Set data_efficiency.data_sampling.enabled to true too, or this to false.",
            ),
        ],
    ),
    (
        {"data_efficiency": {"enabled": True, "data_sampling": {"curriculum_learning": {"enabled": False}}}},
        [],
    ),
    (
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
        [],
    ),
    (
        {
            "data_efficiency": {
                "enabled": True,
                "data_routing": {"enabled": True, "random_ltd": {"enabled": False}},
            }
        },
        [],
    ),
    (
        {
            "data_efficiency": {
                "enabled": True,
                "data_sampling": {
                    "enabled": True,
                    "curriculum_learning": {"enabled": True, "curriculum_metrics": {}},
                },
            }
        },
        [],
    ),
    (
        {"data_efficiency": {"enabled": False, "data_sampling": {"curriculum_learning": {"enabled": False}}}},
        [],
    ),
    (
        {
            "data_efficiency": {
                "enabled": True,
                "data_sampling": {
                    "enabled": True,
                    "curriculum_learning": {
                        "enabled": True,
                        "curriculum_metrics": {
                            "length": {
                                "min_difficulty": 8,
                                "max_difficulty": 64,
                                "schedule_type": "fixed_linear",
                                "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
                            }
                        },
                    },
                },
            }
        },
        [],
    ),
    (
        {
            "data_efficiency": {
                "enabled": True,
                "data_sampling": {
                    "enabled": True,
                    "curriculum_learning": {
                        "enabled": True,
                        "curriculum_metrics": {
                            "length": {
                                "min_difficulty": 1,
                                "max_difficulty": 3,
                                "schedule_type": "fixed_discrete",
                                "schedule_config": {"difficulty": [1, 2, 3], "max_step": [5, 10]},
                            }
                        },
                    },
                },
            }
        },
        [],
    ),
    (
        {
            "data_efficiency": {
                "enabled": True,
                "data_sampling": {
                    "enabled": True,
                    "curriculum_learning": {
                        "enabled": True,
                        "curriculum_metrics": {
                            "length": {"min_difficulty": 64, "max_difficulty": 64, "schedule_type": "custom"}
                        },
                    },
                },
            }
        },
        [],
    ),
    (
        {
            "_for": "hf",
            "data_efficiency": {
                "enabled": True,
                "data_sampling": {"curriculum_learning": {"enabled": False}},
            },
        },
        [],
    ),
]


def said(given):
    """What this module's rules say of a config, as Said."""
    for found in run(*example(given)):
        if found.rule in OWN:
            fix = found.fix and (tuple(tuple(edit) for edit in found.fix.edits), found.fix.safe)
            yield Said(
                found.rule, found.severity, found.effect, found.path, found.message, found.suggestion, fix
            )


@pytest.mark.parametrize(("given", "expected"), CASES)
def test_said(given, expected):
    assert list(said(given)) == expected


def test_every_rule_is_seen():
    assert {found.rule for _, expected in CASES for found in expected} == OWN
