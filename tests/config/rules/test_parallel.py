"""Parallelism: what exactly is said of a config, and that nothing is said of its right neighbour."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from dsrun.config.rules import parallel, run
from dsrun.config.rules.frame import Rule, example

OWN = {rule.id for rule in vars(parallel).values() if isinstance(rule, Rule)}


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
        {"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}},
        [
            Said(
                "DS502",
                "error",
                "fails",
                "tensor_parallel.tp.tp_size",
                "4 is another size than autotp_size 2",
                "Remove it: autotp_size is enough.",
                ((("remove", "tensor_parallel.tp.tp_size", None),), False),
            ),
        ],
    ),
    (
        {"tensor_parallel": {"autotp_size": 4, "tp": {"tp_size": 2}}},
        [
            Said(
                "DS502",
                "error",
                "fails",
                "tensor_parallel.tp.tp_size",
                "2 is another size than autotp_size 4",
                "Remove it: autotp_size is enough.",
                ((("remove", "tensor_parallel.tp.tp_size", None),), False),
            ),
        ],
    ),
    (
        {"tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 2}}},
        [
            Said(
                "DS503",
                "error",
                "differs",
                "tensor_parallel.tp.tp_size",
                "2 has no effect: autotp_size is 1",
                "Set tensor_parallel.autotp_size to 2.",
                ((("replace", "tensor_parallel.autotp_size", 2),), False),
            ),
        ],
    ),
    (
        {"tensor_parallel": {"autotp_size": 0, "tp": {"tp_size": 4}}},
        [
            Said(
                "DS503",
                "error",
                "differs",
                "tensor_parallel.tp.tp_size",
                "4 has no effect: autotp_size is 0",
                "Set tensor_parallel.autotp_size to 4.",
                ((("replace", "tensor_parallel.autotp_size", 4),), False),
            ),
        ],
    ),
    (
        {"tensor_parallel": {"autotp_size": 1, "preset_model": "llama"}},
        [
            Said(
                "DS504",
                "warning",
                "",
                "tensor_parallel",
                "is off while autotp_size isn't above 1, and so without effect: preset_model",
                "Set tensor_parallel.autotp_size to the GPUs that share a model, or remove the section.",
            ),
        ],
    ),
    (
        {"tensor_parallel": {"partition_config": {"strict_mode": True}}},
        [
            Said(
                "DS504",
                "warning",
                "",
                "tensor_parallel",
                "is off while autotp_size isn't above 1, and so without effect: partition_config",
                "Set tensor_parallel.autotp_size to the GPUs that share a model, or remove the section.",
            ),
        ],
    ),
    (
        {"tensor_parallel": {"tp_overlap_comm": True, "autotp_size": 0}},
        [
            Said(
                "DS504",
                "warning",
                "",
                "tensor_parallel",
                "is off while autotp_size isn't above 1, and so without effect: tp_overlap_comm",
                "Set tensor_parallel.autotp_size to the GPUs that share a model, or remove the section.",
            ),
        ],
    ),
    (
        {"_model": {"attention_heads": 9}, "tensor_parallel": {"autotp_size": 2}},
        [
            Said(
                "DS505",
                "warning",
                "",
                "tensor_parallel.autotp_size",
                "9 attention heads don't divide by 2: the GPUs get unequal shares",
                "Take a divisor of the heads: 1, 3 or 9.",
            ),
        ],
    ),
    (
        {"_model": {"attention_heads": 2}, "tensor_parallel": {"autotp_size": 4}},
        [
            Said(
                "DS505",
                "warning",
                "",
                "tensor_parallel.autotp_size",
                "2 attention heads don't divide by 4: the GPUs get unequal shares",
                "Take a divisor of the heads: 1 or 2.",
            ),
        ],
    ),
    (
        {
            "tensor_parallel": {
                "autotp_size": 2,
                "preset_model": "llama",
                "partition_config": {"use_default_specs": False},
            }
        },
        [
            Said(
                "DS506",
                "warning",
                "",
                "tensor_parallel.preset_model",
                '"llama" has no effect: partition_config.use_default_specs is false',
                "Remove one of the two.",
            ),
        ],
    ),
    (
        {
            "tensor_parallel": {
                "autotp_size": 2,
                "partition_config": {"layer_specs": [{"partition_type": "row"}]},
            }
        },
        [
            Said(
                "DS507",
                "warning",
                "",
                "tensor_parallel.partition_config.layer_specs.0",
                "has no patterns, and so matches no layer",
                'Add "patterns": regular expressions of names.',
            ),
        ],
    ),
    (
        {
            "tensor_parallel": {
                "autotp_size": 2,
                "partition_config": {"layer_specs": [{"patterns": [], "partition_type": "row"}]},
            }
        },
        [
            Said(
                "DS507",
                "warning",
                "",
                "tensor_parallel.partition_config.layer_specs.0",
                "has no patterns, and so matches no layer",
                'Add "patterns": regular expressions of names.',
            ),
        ],
    ),
    (
        {
            "tensor_parallel": {
                "autotp_size": 2,
                "partition_config": {"layer_specs": [{"patterns": [".*(q_proj"]}]},
            }
        },
        [
            Said(
                "DS508",
                "error",
                "fails",
                "tensor_parallel.partition_config.layer_specs.0.patterns",
                '".*(q_proj" is no regular expression: missing ), unterminated subpattern at position 2',
                "Write it as Python's re has it; a literal bracket needs a backslash.",
            ),
        ],
    ),
    (
        {
            "tensor_parallel": {
                "autotp_size": 2,
                "vocab_parallel_ce_backend": "liger",
                "vocab_parallel_lm_head": False,
            }
        },
        [
            Said(
                "DS509",
                "error",
                "fails",
                "tensor_parallel.vocab_parallel_ce_backend",
                '"liger" needs vocab_parallel_lm_head, which is false',
                "Set tensor_parallel.vocab_parallel_lm_head to true.",
            ),
        ],
    ),
    (
        {"_model": {"attention_heads": 3}, "sequence_parallel_size": 2, "data_parallel_size": 2},
        [
            Said(
                "DS522",
                "warning",
                "",
                "sequence_parallel_size",
                "3 attention heads don't divide by 2",
                "Take a divisor of the heads: 1 or 3.",
            ),
        ],
    ),
    (
        {"_model": {"attention_heads": 1}, "sequence_parallel_size": 2, "data_parallel_size": 2},
        [
            Said(
                "DS522",
                "warning",
                "",
                "sequence_parallel_size",
                "1 attention heads don't divide by 2",
                "Take a divisor of the heads: 1.",
            ),
        ],
    ),
    (
        {
            "_world_size": 4,
            "tensor_parallel": {"autotp_size": 2},
            "sequence_parallel_size": 2,
            "data_parallel_size": 2,
        },
        [
            Said(
                "DS523",
                "warning",
                "",
                "tensor_parallel.autotp_size",
                "2 and sequence_parallel_size 2 don't go together",
                "Choose one of the two.",
            ),
        ],
    ),
    (
        {"pipeline": {"activation_checkpoint_interval": 1}, "zero_optimization": {"stage": 2}},
        [
            Said(
                "DS530",
                "warning",
                "",
                "pipeline",
                "a PipelineModule can't be trained with ZeRO stage 2",
                "Set zero_optimization.stage to 1; or remove the section, if the model is no PipelineModule.",
            ),
        ],
    ),
    (
        {"pipeline": {"pipe_partitioned": True}, "zero_optimization": {"stage": 3}},
        [
            Said(
                "DS530",
                "warning",
                "",
                "pipeline",
                "a PipelineModule can't be trained with ZeRO stage 3",
                "Set zero_optimization.stage to 1; or remove the section, if the model is no PipelineModule.",
            ),
        ],
    ),
    (
        {"_world_size": 4, "expert_parallel": {"enabled": True, "autoep_size": 3}},
        [
            Said(
                "DS540",
                "error",
                "fails",
                "expert_parallel.autoep_size",
                "3 doesn't divide 4 GPUs",
                "Take 1, 2 or 4, and a divisor of the experts.",
            ),
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {"_world_size": 2, "expert_parallel": {"enabled": True, "autoep_size": 4}},
        [
            Said(
                "DS540",
                "error",
                "fails",
                "expert_parallel.autoep_size",
                "4 doesn't divide 2 GPUs",
                "Take 1 or 2, and a divisor of the experts.",
            ),
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {
            "_world_size": 4,
            "expert_parallel": {"enabled": True, "autoep_size": 8, "expert_tensor_parallel_size": 1},
        },
        [
            Said(
                "DS540",
                "error",
                "fails",
                "expert_parallel.autoep_size",
                "8 doesn't divide 4 GPUs",
                "Take 1, 2 or 4, and a divisor of the experts.",
            ),
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {"_world_size": 4, "expert_parallel": {"enabled": True, "expert_tensor_parallel_size": 2}},
        [
            Said(
                "DS541",
                "error",
                "fails",
                "expert_parallel.expert_tensor_parallel_size",
                "2 isn't supported yet",
                "Set it to 1.",
                ((("replace", "expert_parallel.expert_tensor_parallel_size", 1),), False),
            ),
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {
            "expert_parallel": {"enabled": True, "preset_model": "mixtral"},
            "tensor_parallel": {"preset_model": "deepseek_v2"},
        },
        [
            Said(
                "DS541",
                "error",
                "fails",
                "expert_parallel.preset_model",
                '"mixtral" is another model than "deepseek_v2" of tensor_parallel.preset_model',
                "Name one model in both, or leave one out.",
            ),
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {"expert_parallel": {"enabled": True}, "tensor_parallel": {"autotp_size": 2}},
        [
            Said(
                "DS541",
                "error",
                "fails",
                "expert_parallel.autoep_size",
                "1 doesn't go with tensor_parallel.autotp_size 2",
                "Set expert_parallel.autoep_size above 1, or tensor_parallel.autotp_size to 1.",
            ),
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {
            "expert_parallel": {"enabled": True, "autoep_size": 2},
            "tensor_parallel": {"autotp_size": 2},
            "use_data_before_expert_parallelism": True,
        },
        [
            Said(
                "DS541",
                "error",
                "fails",
                "use_data_before_expert_parallelism",
                "doesn't go with tensor_parallel.autotp_size 2 and expert_parallel",
                "Set tensor_parallel.autotp_size to 1, or do without it.",
            ),
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {
            "expert_parallel": {"enabled": True, "autoep_size": 2},
            "tensor_parallel": {"autotp_size": 2},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
        [
            Said(
                "DS541",
                "error",
                "fails",
                "zero_optimization.offload_optimizer",
                "doesn't go with tensor_parallel.autotp_size 2 and expert_parallel",
                "Set tensor_parallel.autotp_size to 1, or do without it.",
            ),
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {
            "expert_parallel": {"enabled": True, "autoep_size": 2},
            "tensor_parallel": {"autotp_size": 2},
            "compile": {"deepcompile": True},
        },
        [
            Said(
                "DS541",
                "error",
                "fails",
                "compile.deepcompile",
                "doesn't go with tensor_parallel.autotp_size 2 and expert_parallel",
                "Set tensor_parallel.autotp_size to 1, or do without it.",
            ),
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {
            "expert_parallel": {"enabled": True, "autoep_size": 2, "async_split_plan": True},
            "tensor_parallel": {"autotp_size": 2},
        },
        [
            Said(
                "DS541",
                "error",
                "fails",
                "expert_parallel.async_split_plan",
                "doesn't go with tensor_parallel.autotp_size 2",
                "Set tensor_parallel.autotp_size to 1, or do without it.",
            ),
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {
            "expert_parallel": {"enabled": True, "autoep_size": 2, "combine_impl": "fused_weighted_sum"},
            "tensor_parallel": {"autotp_size": 2},
        },
        [
            Said(
                "DS541",
                "error",
                "fails",
                "expert_parallel.combine_impl",
                '"fused_weighted_sum" doesn\'t go with tensor_parallel.autotp_size 2',
                "Set tensor_parallel.autotp_size to 1, or do without it.",
            ),
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {"expert_parallel": {"enabled": True, "gate_up_impl": "fused", "use_grouped_mm": False}},
        [
            Said(
                "DS541",
                "error",
                "fails",
                "expert_parallel.gate_up_impl",
                '"fused" needs use_grouped_mm',
                "Set expert_parallel.use_grouped_mm to true.",
            ),
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {"expert_parallel": {"enabled": True, "autoep_size": 2, "row_weighting_impl": "fused"}},
        [
            Said(
                "DS541",
                "error",
                "fails",
                "expert_parallel.row_weighting_impl",
                '"fused" needs comm_backend "deepep" and autoep_size above 1',
                "Leave it out, or set both.",
            ),
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {
            "expert_parallel": {
                "enabled": True,
                "row_weighting_impl": "fused",
                "comm_backend": "deepep",
                "comm_max_tokens_per_rank": 8,
            }
        },
        [
            Said(
                "DS541",
                "error",
                "fails",
                "expert_parallel.row_weighting_impl",
                '"fused" needs comm_backend "deepep" and autoep_size above 1',
                "Leave it out, or set both.",
            ),
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {"expert_parallel": {"enabled": True, "autoep_size": 2, "comm_backend": "deepep"}},
        [
            Said(
                "DS541",
                "error",
                "fails",
                "expert_parallel.comm_max_tokens_per_rank",
                'must be given for comm_backend "deepep"',
                "Set it to train_micro_batch_size_per_gpu x the longest sequence.",
            ),
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {
            "expert_parallel": {
                "enabled": True,
                "autoep_size": 2,
                "comm_backend": "deepep",
                "comm_max_tokens_per_rank": 8,
                "combine_impl": "fused_weighted_sum",
            }
        },
        [
            Said(
                "DS541",
                "error",
                "fails",
                "expert_parallel.combine_impl",
                '"fused_weighted_sum" doesn\'t go with comm_backend "deepep"',
                'Set comm_backend to "comm".',
            ),
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {"expert_parallel": {"enabled": True, "num_limited_groups": 3, "num_expert_groups": 2}},
        [
            Said(
                "DS541",
                "error",
                "fails",
                "expert_parallel.num_limited_groups",
                "3 is more than num_expert_groups 2",
                "Set it to at most 2.",
            ),
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {"expert_parallel": {"enabled": True, "autoep_size": 2}},
        [
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {"inference": {"tensor_parallel": {"tp_size": 2}}},
        [
            Said(
                "DS543",
                "note",
                "",
                "inference.tensor_parallel.tp_size",
                "2 splits no model in training",
                "Set tensor_parallel.autotp_size to 2 for that.",
            ),
        ],
    ),
    (
        {"_for": "accelerate", "inference": {"tensor_parallel": {"tp_size": 4}}},
        [
            Said(
                "DS543",
                "note",
                "",
                "inference.tensor_parallel.tp_size",
                "4 splits no model in training",
                "Set tensor_parallel.autotp_size to 4 for that.",
            ),
        ],
    ),
    (
        {
            "_for": "hf",
            "_trainer": {"parallelism_config": {"sp_size": 2}},
            "tensor_parallel": {"autotp_size": 2},
        },
        [
            Said(
                "DS523",
                "error",
                "fails",
                "tensor_parallel.autotp_size",
                "has no place beside the sp_size of parallelism_config",
                "Choose one of the two.",
            ),
        ],
    ),
    (
        {
            "_for": "hf",
            "_trainer": {"parallelism_config": {"sp_size": 1}},
            "tensor_parallel": {"autotp_size": 2},
        },
        [],
    ),
    (
        {"tensor_parallel": {"tp": {"tp_size": 2}}},
        [
            Said(
                "DS503",
                "warning",
                "",
                "tensor_parallel.tp.tp_size",
                "2 has no effect without autotp_size",
                "Set tensor_parallel.autotp_size to 2.",
                ((("add", "tensor_parallel.autotp_size", 2),), False),
            ),
        ],
    ),
    ({"tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 1}}}, []),
    (
        {
            "tensor_parallel": {
                "autotp_size": 2,
                "partition_config": {"layer_specs": [{"patterns": ["a"]}, {"patterns": ["["]}]},
            }
        },
        [
            Said(
                "DS508",
                "error",
                "fails",
                "tensor_parallel.partition_config.layer_specs.1.patterns",
                '"[" is no regular expression: unterminated character set at position 0',
                "Write it as Python's re has it; a literal bracket needs a backslash.",
            ),
        ],
    ),
    (
        {
            "expert_parallel": {"enabled": True, "autoep_size": 2},
            "tensor_parallel": {"autotp_size": 2},
            "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
        },
        [
            Said(
                "DS541",
                "error",
                "fails",
                "zero_optimization.offload_param",
                "doesn't go with tensor_parallel.autotp_size 2 and expert_parallel",
                "Set tensor_parallel.autotp_size to 1, or do without it.",
            ),
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {"expert_parallel": {"enabled": True, "autoep_size": 1}, "tensor_parallel": {"autotp_size": 2}},
        [
            Said(
                "DS541",
                "error",
                "fails",
                "expert_parallel.autoep_size",
                "1 doesn't go with tensor_parallel.autotp_size 2",
                "Set expert_parallel.autoep_size above 1, or tensor_parallel.autotp_size to 1.",
            ),
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {
            "expert_parallel": {"enabled": True, "autoep_size": 2, "async_split_plan": True},
            "tensor_parallel": {"autotp_size": 1},
        },
        [
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {"_world_size": 6, "expert_parallel": {"enabled": True, "autoep_size": 4}},
        [
            Said(
                "DS540",
                "error",
                "fails",
                "expert_parallel.autoep_size",
                "4 doesn't divide 6 GPUs",
                "Take 1, 2, 3 or 6, and a divisor of the experts.",
            ),
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {"_model": {"attention_heads": 6}, "tensor_parallel": {"autotp_size": 4}},
        [
            Said(
                "DS505",
                "warning",
                "",
                "tensor_parallel.autotp_size",
                "6 attention heads don't divide by 4: the GPUs get unequal shares",
                "Take a divisor of the heads: 1, 2, 3 or 6.",
            ),
        ],
    ),
    (
        {
            "expert_parallel": {
                "enabled": True,
                "comm_backend": "deepep",
                "comm_max_tokens_per_rank": 4,
                "combine_impl": "fused_weighted_sum",
            }
        },
        [
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {
            "tensor_parallel": {"preset_model": "mixtral"},
            "expert_parallel": {"enabled": True, "preset_model": "mixtral"},
        },
        [
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {"tensor_parallel": {"preset_model": "mixtral"}},
        [
            Said(
                "DS504",
                "warning",
                "",
                "tensor_parallel",
                "is off while autotp_size isn't above 1, and so without effect: preset_model",
                "Set tensor_parallel.autotp_size to the GPUs that share a model, or remove the section.",
            ),
        ],
    ),
    (
        {
            "tensor_parallel": {
                "autotp_size": 1,
                "vocab_parallel_ce_backend": "liger",
                "vocab_parallel_lm_head": False,
            }
        },
        [
            Said(
                "DS504",
                "warning",
                "",
                "tensor_parallel",
                "is off while autotp_size isn't above 1, and so without effect: vocab_parallel_ce_backend",
                "Set tensor_parallel.autotp_size to the GPUs that share a model, or remove the section.",
            ),
        ],
    ),
    ({"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 2}}}, []),
    ({"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 1}}}, []),
    ({"tensor_parallel": {"autotp_size": 2}}, []),
    ({"tensor_parallel": {"tp": {"tp_size": 1}}}, []),
    ({"tensor_parallel": {"autotp_size": 1}}, []),
    ({"tensor_parallel": {"autotp_size": 2, "preset_model": "llama"}}, []),
    ({"tensor_parallel": {}}, []),
    (
        {
            "tensor_parallel": {
                "autotp_size": 1,
                "tp": {"tp_size": 1},
                "preset_model": None,
                "tp_overlap_comm": False,
            }
        },
        [],
    ),
    ({"_model": {"attention_heads": 4}, "tensor_parallel": {"autotp_size": 4}}, []),
    ({"_model": {"attention_heads": 9}, "tensor_parallel": {"autotp_size": 1}}, []),
    ({"_model": {}, "tensor_parallel": {"autotp_size": 4}}, []),
    (
        {
            "tensor_parallel": {
                "autotp_size": 2,
                "preset_model": "llama",
                "partition_config": {"use_default_specs": True},
            }
        },
        [],
    ),
    (
        {
            "tensor_parallel": {
                "autotp_size": 2,
                "preset_model": "llama",
                "partition_config": {"strict_mode": True},
            }
        },
        [],
    ),
    ({"tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": False}}}, []),
    (
        {
            "tensor_parallel": {
                "autotp_size": 2,
                "partition_config": {"layer_specs": [{"patterns": [".*o_proj.*"]}]},
            }
        },
        [],
    ),
    ({"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": []}}}, []),
    (
        {
            "tensor_parallel": {
                "autotp_size": 2,
                "partition_config": {"layer_specs": [{"patterns": [".*(q_proj)"]}]},
            }
        },
        [],
    ),
    (
        {
            "tensor_parallel": {
                "autotp_size": 1,
                "partition_config": {"layer_specs": [{"patterns": [".*(q_proj"]}]},
            }
        },
        [
            Said(
                "DS504",
                "warning",
                "",
                "tensor_parallel",
                "is off while autotp_size isn't above 1, and so without effect: partition_config",
                "Set tensor_parallel.autotp_size to the GPUs that share a model, or remove the section.",
            ),
        ],
    ),
    (
        {
            "tensor_parallel": {
                "autotp_size": 2,
                "vocab_parallel_ce_backend": "torch",
                "vocab_parallel_lm_head": False,
            }
        },
        [],
    ),
    (
        {
            "tensor_parallel": {
                "autotp_size": 2,
                "vocab_parallel_ce_backend": "liger",
                "vocab_parallel_lm_head": True,
            }
        },
        [],
    ),
    ({"tensor_parallel": {"autotp_size": 2, "vocab_parallel_ce_backend": "liger"}}, []),
    ({"_model": {"attention_heads": 2}, "sequence_parallel_size": 2, "data_parallel_size": 2}, []),
    ({"_model": {"attention_heads": 3}, "sequence_parallel_size": 1, "data_parallel_size": 4}, []),
    ({"tensor_parallel": {"autotp_size": 1}, "sequence_parallel_size": 2, "data_parallel_size": 2}, []),
    ({"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 1, "data_parallel_size": 4}, []),
    ({"pipeline": {"activation_checkpoint_interval": 1}, "zero_optimization": {"stage": 1}}, []),
    ({"pipeline": {}, "zero_optimization": {"stage": 2}}, []),
    (
        {"_world_size": 4, "expert_parallel": {"enabled": True, "autoep_size": 4}},
        [
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    ({"_world_size": 4, "expert_parallel": {"enabled": False, "autoep_size": 3}}, []),
    (
        {"_world_size": None, "expert_parallel": {"enabled": True, "autoep_size": 3}},
        [
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {"expert_parallel": {"enabled": True, "autoep_size": 2}, "tensor_parallel": {"autotp_size": 2}},
        [
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    ({"expert_parallel": {"enabled": False, "expert_tensor_parallel_size": 2}}, []),
    (
        {"expert_parallel": {"enabled": True, "autoep_size": 2, "combine_impl": "fused_weighted_sum"}},
        [
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {"expert_parallel": {"enabled": True, "gate_up_impl": "fused"}},
        [
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {
            "expert_parallel": {
                "enabled": True,
                "autoep_size": 2,
                "row_weighting_impl": "fused",
                "comm_backend": "deepep",
                "comm_max_tokens_per_rank": 1,
            }
        },
        [
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {"expert_parallel": {"enabled": True, "num_limited_groups": 2, "num_expert_groups": 2}},
        [
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    (
        {
            "expert_parallel": {"enabled": True, "autoep_size": 2},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
        [
            Said(
                "DS542",
                "note",
                "",
                "expert_parallel",
                "acts on the MoE layers of a model, and on no other",
                "Remove it if the model has none.",
            ),
        ],
    ),
    ({"expert_parallel": {"enabled": False, "autoep_size": 2}}, []),
    ({"inference": {"tensor_parallel": {"tp_size": 1}}}, []),
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
