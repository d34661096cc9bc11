# ruff: noqa: E501 - texts stand here as they are shown
"""ZeRO: what exactly is said of a config, and that nothing is said of its right neighbour."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from dsrun.config.edits import apply
from dsrun.config.rules import run, zero
from dsrun.config.rules.frame import Fix, Rule, example

OWN = {rule.id: rule for rule in vars(zero).values() if isinstance(rule, Rule)}


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
        {"zero_optimization": {"stage": 1, "allgather_bucket_size": 5}},
        [
            Said(
                "DS201",
                "error",
                "fails",
                "zero_optimization.allgather_bucket_size",
                "5 is odd",
                "Set an even number of elements, such as 6.",
                ((("replace", "zero_optimization.allgather_bucket_size", 6),), True),
            ),
            Said(
                "DS214",
                "warning",
                "",
                "zero_optimization.allgather_bucket_size",
                "5 elements: each weight is sent by itself, which is slow",
                "It counts elements, not MB; 5e7 to 5e8 is usual.",
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "allgather_bucket_size": 500000001}},
        [
            Said(
                "DS201",
                "error",
                "fails",
                "zero_optimization.allgather_bucket_size",
                "500000001 is odd",
                "Set an even number of elements, such as 500000002.",
                ((("replace", "zero_optimization.allgather_bucket_size", 500000002),), True),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 1, "allgather_bucket_size": 50000}}, []),
    (
        {"zero_optimization": {"stage": 2, "allgather_bucket_size": 0}},
        [
            Said(
                "DS214",
                "warning",
                "",
                "zero_optimization.allgather_bucket_size",
                "0 elements: each weight is sent by itself, which is slow",
                "It counts elements, not MB; 5e7 to 5e8 is usual.",
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "allgather_bucket_size": 5}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
            Said(
                "DS205",
                "warning",
                "",
                "zero_optimization.allgather_bucket_size",
                "has no effect at stage 3: only stages 1 and 2 read it",
                "Remove it.",
                ((("remove", "zero_optimization.allgather_bucket_size", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 0, "allgather_bucket_size": 5}},
        [
            Said(
                "DS206",
                "warning",
                "",
                "zero_optimization",
                "stage 0 has no use for allgather_bucket_size",
                "Set zero_optimization.stage to 1, 2 or 3, or remove what has no effect.",
                ((("remove", "zero_optimization.allgather_bucket_size", None),), True),
            ),
        ],
    ),
    (
        {"_version": "0.18", "zero_optimization": {"stage": 1, "overlap_comm": True}},
        [
            Said(
                "DS202",
                "warning",
                "",
                "zero_optimization.overlap_comm",
                "has given wrong gradients at stage 1",
                "Set it to false, which is slower and right: https://github.com/deepspeedai/DeepSpeed/issues/5523",
                ((("replace", "zero_optimization.overlap_comm", False),), False),
            ),
        ],
    ),
    (
        {"_version": "0.14", "zero_optimization": {"stage": 2, "overlap_comm": True}},
        [
            Said(
                "DS202",
                "warning",
                "",
                "zero_optimization.overlap_comm",
                "has given wrong gradients at stage 2",
                "Set it to false, which is slower and right: https://github.com/deepspeedai/DeepSpeed/issues/5523",
                ((("replace", "zero_optimization.overlap_comm", False),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "overlap_comm": True}},
        [
            Said(
                "DS202",
                "note",
                "",
                "zero_optimization.overlap_comm",
                "has given wrong gradients at stage 2, up to early 0.19 releases",
                "Use 0.19.8 or newer: https://github.com/deepspeedai/DeepSpeed/issues/8061",
            ),
        ],
    ),
    ({"_version": "0.18", "zero_optimization": {"stage": 2, "overlap_comm": False}}, []),
    ({"_version": "0.18", "zero_optimization": {"stage": 2}}, []),
    (
        {"_version": "0.18", "zero_optimization": {"stage": 3, "overlap_comm": True}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
        ],
    ),
    (
        {"_version": "0.18", "zero_optimization": {"stage": 0, "overlap_comm": True}},
        [
            Said(
                "DS206",
                "warning",
                "",
                "zero_optimization",
                "stage 0 has no use for overlap_comm",
                "Set zero_optimization.stage to 1, 2 or 3, or remove what has no effect.",
                ((("remove", "zero_optimization.overlap_comm", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "gather_16bit_weights_on_model_save": False}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("replace", "zero_optimization.gather_16bit_weights_on_model_save", True),), False),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}}, []),
    ({"zero_optimization": {"stage": 3, "gather_16bit_weights_on_model_save": True}}, []),
    ({"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}}, []),
    ({"zero_optimization": {"stage": 2}}, []),
    (
        {"zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": 50000000}},
        [
            Said(
                "DS204",
                "warning",
                "",
                "zero_optimization.stage3_prefetch_bucket_size",
                "has no effect at stage 2: only stage 3 reads it",
                "Remove it, or set zero_optimization.stage to 3.",
                ((("remove", "zero_optimization.stage3_prefetch_bucket_size", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 1, "prefetch_bucket_size": 1000000}},
        [
            Said(
                "DS204",
                "warning",
                "",
                "zero_optimization.prefetch_bucket_size",
                "has no effect at stage 1: only stage 3 reads it",
                "Remove it, or set zero_optimization.stage to 3.",
                ((("remove", "zero_optimization.prefetch_bucket_size", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "sub_group_size": 1000000000.0}},
        [
            Said(
                "DS204",
                "warning",
                "",
                "zero_optimization.sub_group_size",
                "has no effect at stage 2: only stage 3 reads it",
                "Remove it, or set zero_optimization.stage to 3.",
                ((("remove", "zero_optimization.sub_group_size", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 1, "stage3_gather_16bit_weights_on_model_save": True}},
        [
            Said(
                "DS204",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "has no effect at stage 1: only stage 3 reads it",
                "Remove it, or set zero_optimization.stage to 3.",
                ((("remove", "zero_optimization.stage3_gather_16bit_weights_on_model_save", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "memory_efficient_linear": False}},
        [
            Said(
                "DS204",
                "warning",
                "",
                "zero_optimization.memory_efficient_linear",
                "has no effect at stage 2: only stage 3 reads it",
                "Remove it, or set zero_optimization.stage to 3.",
                ((("remove", "zero_optimization.memory_efficient_linear", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "leaf_module": {"names": ["experts"]}}},
        [
            Said(
                "DS204",
                "warning",
                "",
                "zero_optimization.leaf_module",
                "has no effect at stage 2: only stage 3 reads it",
                "Remove it, or set zero_optimization.stage to 3.",
                ((("remove", "zero_optimization.leaf_module", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "enable_sanity_checks": True, "log_trace_cache_warnings": True}},
        [
            Said(
                "DS204",
                "warning",
                "",
                "zero_optimization.enable_sanity_checks",
                "has no effect at stage 2: only stage 3 reads it",
                "Remove it, or set zero_optimization.stage to 3.",
                ((("remove", "zero_optimization.enable_sanity_checks", None),), True),
            ),
            Said(
                "DS204",
                "warning",
                "",
                "zero_optimization.log_trace_cache_warnings",
                "has no effect at stage 2: only stage 3 reads it",
                "Remove it, or set zero_optimization.stage to 3.",
                ((("remove", "zero_optimization.log_trace_cache_warnings", None),), True),
            ),
        ],
    ),
    ({"_for": "hf", "zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": "auto"}}, []),
    ({"zero_optimization": {"stage": 2, "stage3_gather_16bit_weights_on_model_save": False}}, []),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "stage3_prefetch_bucket_size": 50000000,
                "sub_group_size": 1000000000.0,
            }
        },
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 0, "sub_group_size": 1000000000.0}},
        [
            Said(
                "DS206",
                "warning",
                "",
                "zero_optimization",
                "stage 0 has no use for sub_group_size",
                "Set zero_optimization.stage to 1, 2 or 3, or remove what has no effect.",
                ((("remove", "zero_optimization.sub_group_size", None),), True),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 2, "reduce_bucket_size": 50000000}}, []),
    (
        {
            "zero_optimization": {"stage": 1, "stage3_gather_16bit_weights_on_model_save": True},
            "tensor_parallel": {"autotp_size": 2},
        },
        [],
    ),
    (
        {"zero_optimization": {"stage": 3, "round_robin_gradients": True}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
            Said(
                "DS205",
                "warning",
                "",
                "zero_optimization.round_robin_gradients",
                "has no effect at stage 3: only stages 1 and 2 read it",
                "Remove it.",
                ((("remove", "zero_optimization.round_robin_gradients", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "allgather_bucket_size": 200000000}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
            Said(
                "DS205",
                "warning",
                "",
                "zero_optimization.allgather_bucket_size",
                "has no effect at stage 3: only stages 1 and 2 read it",
                "Remove it.",
                ((("remove", "zero_optimization.allgather_bucket_size", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "use_multi_rank_bucket_allreduce": False}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
            Said(
                "DS205",
                "warning",
                "",
                "zero_optimization.use_multi_rank_bucket_allreduce",
                "has no effect at stage 3: only stages 1 and 2 read it",
                "Remove it.",
                ((("remove", "zero_optimization.use_multi_rank_bucket_allreduce", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "parameter_alignment": True}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
            Said(
                "DS205",
                "warning",
                "",
                "zero_optimization.parameter_alignment",
                "has no effect at stage 3: only stages 1 and 2 read it",
                "Remove it.",
                ((("remove", "zero_optimization.parameter_alignment", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "ignore_unused_parameters": False}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
            Said(
                "DS205",
                "warning",
                "",
                "zero_optimization.ignore_unused_parameters",
                "has no effect at stage 3: only stages 1 and 2 read it",
                "Remove it.",
                ((("remove", "zero_optimization.ignore_unused_parameters", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "round_robin_gradients": False}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 2,
                "round_robin_gradients": True,
                "allgather_bucket_size": 200000000,
            }
        },
        [],
    ),
    (
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": 200000000, "contiguous_gradients": False}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 0, "reduce_bucket_size": 1000000}},
        [
            Said(
                "DS206",
                "warning",
                "",
                "zero_optimization",
                "stage 0 has no use for reduce_bucket_size",
                "Set zero_optimization.stage to 1, 2 or 3, or remove what has no effect.",
                ((("remove", "zero_optimization.reduce_bucket_size", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"overlap_comm": True, "contiguous_gradients": False}},
        [
            Said(
                "DS206",
                "warning",
                "",
                "zero_optimization",
                "names no stage, and 0 has no use for overlap_comm and contiguous_gradients",
                "Set zero_optimization.stage to 1, 2 or 3, or remove what has no effect.",
                (
                    (
                        ("remove", "zero_optimization.overlap_comm", None),
                        ("remove", "zero_optimization.contiguous_gradients", None),
                    ),
                    False,
                ),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 0, "stage3_max_live_parameters": 1000000}},
        [
            Said(
                "DS206",
                "warning",
                "",
                "zero_optimization",
                "stage 0 has no use for stage3_max_live_parameters",
                "Set zero_optimization.stage to 1, 2 or 3, or remove what has no effect.",
                ((("remove", "zero_optimization.stage3_max_live_parameters", None),), True),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 0, "contiguous_gradients": True}}, []),
    ({"zero_optimization": {"stage": 0}}, []),
    ({"zero_optimization": {"stage": 1, "reduce_bucket_size": 1000000}}, []),
    ({"_for": "hf", "zero_optimization": {"stage": 0, "reduce_bucket_size": "auto"}}, []),
    (
        {"zero_optimization": True},
        [
            Said(
                "DS207",
                "warning",
                "",
                "zero_optimization",
                "true is the old form of stage 1",
                'Write {"stage": 1}.',
                ((("replace", "zero_optimization", {"stage": 1}),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": False},
        [
            Said(
                "DS207",
                "warning",
                "",
                "zero_optimization",
                "false is the old form of stage 0",
                'Write {"stage": 0}.',
                ((("replace", "zero_optimization", {"stage": 0}),), True),
            ),
        ],
    ),
    (
        {"_for": "hf", "_bare": True, "train_micro_batch_size_per_gpu": "auto", "zero_optimization": True},
        [
            Said(
                "DS207",
                "error",
                "fails",
                "zero_optimization",
                "true is the old form of stage 1, and accelerate stops at it",
                'Write {"stage": 1}.',
                ((("replace", "zero_optimization", {"stage": 1}),), True),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 1}}, []),
    ({"zero_optimization": {}}, []),
    (
        {"zero_optimization": {"stage": 1, "legacy_stage1": True}},
        [
            Said(
                "DS208",
                "error",
                "fails",
                "zero_optimization.legacy_stage1",
                "stops stage 1: that ZeRO-1 was removed",
                "Remove it: stage 1 itself is there.",
                ((("remove", "zero_optimization.legacy_stage1", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "legacy_stage1": True}},
        [
            Said(
                "DS208",
                "error",
                "fails",
                "zero_optimization.legacy_stage1",
                "stops stage 3: that ZeRO-1 was removed",
                "Remove it: stage 1 itself is there.",
                ((("remove", "zero_optimization.legacy_stage1", None),), False),
            ),
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 1, "legacy_stage1": False}}, []),
    (
        {"zero_optimization": {"stage": 3, "elastic_checkpoint": True}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
            Said(
                "DS209",
                "warning",
                "",
                "zero_optimization.elastic_checkpoint",
                "has no effect at stage 3",
                "Remove it; ds_to_universal makes a checkpoint for another number of GPUs.",
                ((("remove", "zero_optimization.elastic_checkpoint", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "elastic_checkpoint": False}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 2, "elastic_checkpoint": True}}, []),
    (
        {"zero_optimization": {"stage": 2, "pipeline_loading_checkpoint": True}},
        [
            Said(
                "DS210",
                "warning",
                "",
                "zero_optimization.pipeline_loading_checkpoint",
                "has no effect at stage 2, and stops the loading of a checkpoint",
                "Remove it.",
                ((("remove", "zero_optimization.pipeline_loading_checkpoint", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 0, "pipeline_loading_checkpoint": True}},
        [
            Said(
                "DS210",
                "warning",
                "",
                "zero_optimization.pipeline_loading_checkpoint",
                "has no effect at stage 0",
                "Remove it.",
                ((("remove", "zero_optimization.pipeline_loading_checkpoint", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "pipeline_loading_checkpoint": True}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 2, "pipeline_loading_checkpoint": False}}, []),
    (
        {"zero_optimization": {"stage": 3, "compute_grad_norm": False}, "gradient_clipping": 0},
        [
            Said(
                "DS211",
                "error",
                "refused",
                "zero_optimization.compute_grad_norm",
                "can't be false at stage 3",
                "Remove it, or set zero_optimization.stage to 1 or 2.",
                ((("remove", "zero_optimization.compute_grad_norm", None),), False),
            ),
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"compute_grad_norm": False}, "gradient_clipping": 0},
        [
            Said(
                "DS211",
                "error",
                "refused",
                "zero_optimization.compute_grad_norm",
                "can't be false at stage 0",
                "Remove it, or set zero_optimization.stage to 1 or 2.",
                ((("remove", "zero_optimization.compute_grad_norm", None),), False),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 1, "compute_grad_norm": False}, "gradient_clipping": 0}, []),
    ({"zero_optimization": {"stage": 2, "compute_grad_norm": False}, "gradient_clipping": 0}, []),
    (
        {"zero_optimization": {"stage": 3, "compute_grad_norm": True}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "compute_grad_norm": False}},
        [
            Said(
                "DS212",
                "error",
                "fails",
                "zero_optimization.compute_grad_norm",
                "is false, and gradient_clipping is 1, which needs the norm",
                "Set gradient_clipping to 0, or remove compute_grad_norm.",
                ((("remove", "zero_optimization.compute_grad_norm", None),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 1, "compute_grad_norm": False}, "gradient_clipping": 0.5},
        [
            Said(
                "DS212",
                "error",
                "fails",
                "zero_optimization.compute_grad_norm",
                "is false, and gradient_clipping is 0.5, which needs the norm",
                "Set gradient_clipping to 0, or remove compute_grad_norm.",
                ((("remove", "zero_optimization.compute_grad_norm", None),), False),
            ),
        ],
    ),
    (
        {
            "_for": "hf",
            "_trainer": {"max_grad_norm": 0.3},
            "zero_optimization": {"stage": 2, "compute_grad_norm": False},
        },
        [
            Said(
                "DS212",
                "error",
                "fails",
                "zero_optimization.compute_grad_norm",
                "is false, and gradient_clipping is 0.3, which needs the norm",
                "Set gradient_clipping to 0, or remove compute_grad_norm.",
                ((("remove", "zero_optimization.compute_grad_norm", None),), False),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 2, "compute_grad_norm": False}, "gradient_clipping": -1}, []),
    ({"zero_optimization": {"stage": 2, "compute_grad_norm": True}}, []),
    (
        {
            "_for": "hf",
            "_trainer": {"max_grad_norm": 0},
            "zero_optimization": {"stage": 2, "compute_grad_norm": False},
        },
        [],
    ),
    (
        {
            "zero_optimization": {
                "stage": 2,
                "compute_grad_norm": False,
                "offload_optimizer": {"device": "cpu"},
            },
            "gradient_clipping": 0,
        },
        [
            Said(
                "DS213",
                "error",
                "fails",
                "zero_optimization.compute_grad_norm",
                "can't be false with offload_optimizer",
                "Remove it.",
                ((("remove", "zero_optimization.compute_grad_norm", None),), False),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 1, "compute_grad_norm": False, "cpu_offload": True},
            "gradient_clipping": 0,
        },
        [
            Said(
                "DS213",
                "error",
                "fails",
                "zero_optimization.compute_grad_norm",
                "can't be false with offload_optimizer",
                "Remove it.",
                ((("remove", "zero_optimization.compute_grad_norm", None),), False),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 1, "compute_grad_norm": False},
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "gradient_clipping": 0,
        },
        [
            Said(
                "DS213",
                "error",
                "fails",
                "zero_optimization.compute_grad_norm",
                "can't be false with bf16 with fp32 accumulation at stage 1",
                "Remove it.",
                ((("remove", "zero_optimization.compute_grad_norm", None),), False),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 2,
                "compute_grad_norm": False,
                "offload_optimizer": {"device": "none"},
            },
            "gradient_clipping": 0,
        },
        [],
    ),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "gradient_clipping": 0}, []),
    (
        {
            "zero_optimization": {"stage": 2, "compute_grad_norm": False},
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "gradient_clipping": 0,
        },
        [],
    ),
    (
        {
            "zero_optimization": {"stage": 1, "compute_grad_norm": False},
            "bf16": {"enabled": True},
            "gradient_clipping": 0,
        },
        [],
    ),
    (
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": 500}},
        [
            Said(
                "DS214",
                "warning",
                "",
                "zero_optimization.reduce_bucket_size",
                "500 elements: each weight is sent by itself, which is slow",
                "It counts elements, not MB; 5e7 to 5e8 is usual.",
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": 9999}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
            Said(
                "DS214",
                "warning",
                "",
                "zero_optimization.reduce_bucket_size",
                "9999 elements: each weight is sent by itself, which is slow",
                "It counts elements, not MB; 5e7 to 5e8 is usual.",
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 1, "allgather_bucket_size": 200}},
        [
            Said(
                "DS214",
                "warning",
                "",
                "zero_optimization.allgather_bucket_size",
                "200 elements: each weight is sent by itself, which is slow",
                "It counts elements, not MB; 5e7 to 5e8 is usual.",
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 2, "reduce_bucket_size": 10000}}, []),
    (
        {"zero_optimization": {"stage": 3, "allgather_bucket_size": 200}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
            Said(
                "DS205",
                "warning",
                "",
                "zero_optimization.allgather_bucket_size",
                "has no effect at stage 3: only stages 1 and 2 read it",
                "Remove it.",
                ((("remove", "zero_optimization.allgather_bucket_size", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 0, "reduce_bucket_size": 500}},
        [
            Said(
                "DS206",
                "warning",
                "",
                "zero_optimization",
                "stage 0 has no use for reduce_bucket_size",
                "Set zero_optimization.stage to 1, 2 or 3, or remove what has no effect.",
                ((("remove", "zero_optimization.reduce_bucket_size", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": 2147483648}, "bf16": {"enabled": True}},
        [
            Said(
                "DS215",
                "note",
                "",
                "zero_optimization.reduce_bucket_size",
                "2147483648 elements take 4.0 GiB on each GPU",
                "5e7 to 5e8 is usual, and seldom slower.",
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1073741824}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
            Said(
                "DS215",
                "note",
                "",
                "zero_optimization.reduce_bucket_size",
                "1073741824 elements take 4.0 GiB on each GPU",
                "5e7 to 5e8 is usual, and seldom slower.",
            ),
        ],
    ),
    (
        {
            "_version": "0.19",
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 1073741824, "overlap_comm": True},
            "fp16": {"enabled": True},
        },
        [
            Said(
                "DS202",
                "note",
                "",
                "zero_optimization.overlap_comm",
                "has given wrong gradients at stage 1, up to early 0.19 releases",
                "Use 0.19.8 or newer: https://github.com/deepspeedai/DeepSpeed/issues/8061",
            ),
            Said(
                "DS215",
                "note",
                "",
                "zero_optimization.reduce_bucket_size",
                "1073741824 elements take 4.0 GiB on each GPU, twice as communication overlaps",
                "5e7 to 5e8 is usual, and seldom slower.",
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 2, "reduce_bucket_size": 2147483647}, "bf16": {"enabled": True}}, []),
    (
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1073741824}, "bf16": {"enabled": True}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1073741823}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": 2147483648, "contiguous_gradients": False}},
        [],
    ),
    (
        {"zero_optimization": {"stage": 0, "reduce_bucket_size": 2147483648}},
        [
            Said(
                "DS206",
                "warning",
                "",
                "zero_optimization",
                "stage 0 has no use for reduce_bucket_size",
                "Set zero_optimization.stage to 1, 2 or 3, or remove what has no effect.",
                ((("remove", "zero_optimization.reduce_bucket_size", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 2000000000.0}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
            Said(
                "DS216",
                "warning",
                "",
                "zero_optimization.stage3_prefetch_bucket_size",
                "2000000000 elements are to be fetched ahead and only 1000000000 may be live",
                "Set stage3_prefetch_bucket_size to 1000000000 or less, or stage3_max_live_parameters to 2000000000 or more.",
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 49999999}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
            Said(
                "DS216",
                "warning",
                "",
                "zero_optimization.stage3_max_live_parameters",
                "50000000 elements are to be fetched ahead and only 49999999 may be live",
                "Set stage3_prefetch_bucket_size to 49999999 or less, or stage3_max_live_parameters to 50000000 or more.",
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "max_live_parameters": 100, "prefetch_bucket_size": 101}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
            Said(
                "DS216",
                "warning",
                "",
                "zero_optimization.prefetch_bucket_size",
                "101 elements are to be fetched ahead and only 100 may be live",
                "Set stage3_prefetch_bucket_size to 100 or less, or stage3_max_live_parameters to 101 or more.",
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 1000000000.0}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 50000000}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
        ],
    ),
    (
        {
            "_for": "hf",
            "zero_optimization": {
                "stage": 3,
                "stage3_max_live_parameters": 10,
                "stage3_prefetch_bucket_size": "auto",
            },
        },
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": 2000000000.0}},
        [
            Said(
                "DS204",
                "warning",
                "",
                "zero_optimization.stage3_prefetch_bucket_size",
                "has no effect at stage 2: only stage 3 reads it",
                "Remove it, or set zero_optimization.stage to 3.",
                ((("remove", "zero_optimization.stage3_prefetch_bucket_size", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "stage3_model_persistence_threshold": 99999}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
            Said(
                "DS217",
                "warning",
                "",
                "zero_optimization.stage3_model_persistence_threshold",
                "99999 for all weights is below stage3_param_persistence_threshold, 100000 for each",
                "Set it to 100000 or more, or the threshold of one weight to 99999 or less.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "param_persistence_threshold": 11,
                "model_persistence_threshold": 10,
            }
        },
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
            Said(
                "DS217",
                "warning",
                "",
                "zero_optimization.model_persistence_threshold",
                "10 for all weights is below stage3_param_persistence_threshold, 11 for each",
                "Set it to 11 or more, or the threshold of one weight to 10 or less.",
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "stage3_model_persistence_threshold": 100000}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "param_persistence_threshold": 10,
                "model_persistence_threshold": 10,
            }
        },
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10000000000}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "stage3_model_persistence_threshold": 99999}},
        [
            Said(
                "DS204",
                "warning",
                "",
                "zero_optimization.stage3_model_persistence_threshold",
                "has no effect at stage 2: only stage 3 reads it",
                "Remove it, or set zero_optimization.stage to 3.",
                ((("remove", "zero_optimization.stage3_model_persistence_threshold", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "ignore_unused_parameters": False}},
        [
            Said(
                "DS218",
                "warning",
                "",
                "zero_optimization.ignore_unused_parameters",
                "false has no effect without optimizer offload",
                "Remove it.",
                ((("remove", "zero_optimization.ignore_unused_parameters", None),), True),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 2,
                "contiguous_gradients": False,
                "offload_optimizer": {"device": "cpu"},
            }
        },
        [
            Said(
                "DS218",
                "warning",
                "",
                "zero_optimization.contiguous_gradients",
                "false has no effect with optimizer offload",
                "Remove it.",
                ((("remove", "zero_optimization.contiguous_gradients", None),), True),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 2,
                "ignore_unused_parameters": False,
                "offload_optimizer": {"device": "cpu"},
            }
        },
        [],
    ),
    ({"zero_optimization": {"stage": 1, "contiguous_gradients": False}}, []),
    ({"zero_optimization": {"stage": 2, "ignore_unused_parameters": True}}, []),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "contiguous_gradients": False,
                "offload_optimizer": {"device": "cpu"},
            }
        },
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "stage3_module_granularity_threshold": 100000}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
            Said(
                "DS219",
                "warning",
                "",
                "zero_optimization.stage3_module_granularity_threshold",
                "100000 makes single layers leaves as well, which fails in the backward pass",
                "Name the blocks in zero_optimization.leaf_module.classes, or set it to 0.",
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "leaf_module": {"names": ["layers.0"]}}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
            Said(
                "DS219",
                "warning",
                "",
                "zero_optimization.leaf_module.names",
                "layers.0: one that is a single layer fails, and one that isn't in the model is only logged",
                "Name blocks that hold several layers, as the model's named_modules() calls them.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "leaf_module": {"classes": ["MoeBlock"], "name_suffixes": ["mlp"]},
            }
        },
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
            Said(
                "DS219",
                "warning",
                "",
                "zero_optimization.leaf_module.classes",
                "MoeBlock: one that is a single layer fails, and one that isn't in the model is only logged",
                "Name blocks that hold several layers, as the model's named_modules() calls them.",
            ),
            Said(
                "DS219",
                "warning",
                "",
                "zero_optimization.leaf_module.name_suffixes",
                "mlp: one that is a single layer fails, and one that isn't in the model is only logged",
                "Name blocks that hold several layers, as the model's named_modules() calls them.",
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "stage3_module_granularity_threshold": 0}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "leaf_module": {"names": [], "classes": []}}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "stage3_module_granularity_threshold": 100000}},
        [
            Said(
                "DS204",
                "warning",
                "",
                "zero_optimization.stage3_module_granularity_threshold",
                "has no effect at stage 2: only stage 3 reads it",
                "Remove it, or set zero_optimization.stage to 3.",
                ((("remove", "zero_optimization.stage3_module_granularity_threshold", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "round_robin_gradients": True, "allgather_bucket_size": 3}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
            Said(
                "DS205",
                "warning",
                "",
                "zero_optimization.round_robin_gradients",
                "has no effect at stage 3: only stages 1 and 2 read it",
                "Remove it.",
                ((("remove", "zero_optimization.round_robin_gradients", None),), True),
            ),
            Said(
                "DS205",
                "warning",
                "",
                "zero_optimization.allgather_bucket_size",
                "has no effect at stage 3: only stages 1 and 2 read it",
                "Remove it.",
                ((("remove", "zero_optimization.allgather_bucket_size", None),), True),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 2, "stage3_gather_fp16_weights_on_model_save": True}}, []),
    (
        {
            "zero_optimization": {
                "stage": 2,
                "sub_group_size": 1000000000.0,
                "stage3_max_live_parameters": 5,
                "prefetch_bucket_size": 7,
            }
        },
        [
            Said(
                "DS204",
                "warning",
                "",
                "zero_optimization.sub_group_size",
                "has no effect at stage 2: only stage 3 reads it",
                "Remove it, or set zero_optimization.stage to 3.",
                ((("remove", "zero_optimization.sub_group_size", None),), True),
            ),
            Said(
                "DS204",
                "warning",
                "",
                "zero_optimization.stage3_max_live_parameters",
                "has no effect at stage 2: only stage 3 reads it",
                "Remove it, or set zero_optimization.stage to 3.",
                ((("remove", "zero_optimization.stage3_max_live_parameters", None),), True),
            ),
            Said(
                "DS204",
                "warning",
                "",
                "zero_optimization.prefetch_bucket_size",
                "has no effect at stage 2: only stage 3 reads it",
                "Remove it, or set zero_optimization.stage to 3.",
                ((("remove", "zero_optimization.prefetch_bucket_size", None),), True),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 2, "sub_group_size": None}}, []),
    ({"zero_optimization": {"stage": 2, "stage3_module_granularity_threshold": 3}, "_version": "0.9"}, []),
    (
        {
            "zero_optimization": {"stage": 1, "stage3_gather_16bit_weights_on_model_save": True},
            "tensor_parallel": {"autotp_size": 1},
        },
        [
            Said(
                "DS204",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "has no effect at stage 1: only stage 3 reads it",
                "Remove it, or set zero_optimization.stage to 3.",
                ((("remove", "zero_optimization.stage3_gather_16bit_weights_on_model_save", None),), True),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 1,
                "stage3_gather_16bit_weights_on_model_save": True,
                "stage3_max_live_parameters": 5,
            },
            "tensor_parallel": {"autotp_size": 2},
        },
        [
            Said(
                "DS204",
                "warning",
                "",
                "zero_optimization.stage3_max_live_parameters",
                "has no effect at stage 1: only stage 3 reads it",
                "Remove it, or set zero_optimization.stage to 3.",
                ((("remove", "zero_optimization.stage3_max_live_parameters", None),), True),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 0,
                "reduce_bucket_size": 5,
                "stage3_max_live_parameters": 6,
                "sub_group_size": 8,
                "allgather_bucket_size": 9,
            }
        },
        [
            Said(
                "DS206",
                "warning",
                "",
                "zero_optimization",
                "stage 0 has no use for reduce_bucket_size, stage3_max_live_parameters, sub_group_size and allgather_bucket_size",
                "Set zero_optimization.stage to 1, 2 or 3, or remove what has no effect.",
                (
                    (
                        ("remove", "zero_optimization.reduce_bucket_size", None),
                        ("remove", "zero_optimization.stage3_max_live_parameters", None),
                        ("remove", "zero_optimization.sub_group_size", None),
                        ("remove", "zero_optimization.allgather_bucket_size", None),
                    ),
                    True,
                ),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 0,
                "reduce_scatter": False,
                "load_from_fp32_weights": False,
                "allgather_partitions": False,
            }
        },
        [
            Said(
                "DS206",
                "warning",
                "",
                "zero_optimization",
                "stage 0 has no use for reduce_scatter, load_from_fp32_weights and allgather_partitions",
                "Set zero_optimization.stage to 1, 2 or 3, or remove what has no effect.",
                (
                    (
                        ("remove", "zero_optimization.reduce_scatter", None),
                        ("remove", "zero_optimization.load_from_fp32_weights", None),
                        ("remove", "zero_optimization.allgather_partitions", None),
                    ),
                    True,
                ),
            ),
        ],
    ),
    (
        {"zero_optimization": {"reduce_bucket_size": 10000, "overlap_comm": False}},
        [
            Said(
                "DS206",
                "warning",
                "",
                "zero_optimization",
                "names no stage, and 0 has no use for reduce_bucket_size and overlap_comm",
                "Set zero_optimization.stage to 1, 2 or 3, or remove what has no effect.",
                (
                    (
                        ("remove", "zero_optimization.reduce_bucket_size", None),
                        ("remove", "zero_optimization.overlap_comm", None),
                    ),
                    False,
                ),
            ),
        ],
    ),
    (
        {
            "_for": "accelerate",
            "_bare": True,
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": False,
        },
        [
            Said(
                "DS207",
                "error",
                "fails",
                "zero_optimization",
                "false is the old form of stage 0, and accelerate stops at it",
                'Write {"stage": 0}.',
                ((("replace", "zero_optimization", {"stage": 0}),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "legacy_stage1": True}},
        [
            Said(
                "DS208",
                "error",
                "fails",
                "zero_optimization.legacy_stage1",
                "stops stage 2: that ZeRO-1 was removed",
                "Remove it: stage 1 itself is there.",
                ((("remove", "zero_optimization.legacy_stage1", None),), False),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 0, "legacy_stage1": True}}, []),
    (
        {"zero_optimization": {"stage": 1, "pipeline_loading_checkpoint": True}},
        [
            Said(
                "DS210",
                "warning",
                "",
                "zero_optimization.pipeline_loading_checkpoint",
                "has no effect at stage 1, and stops the loading of a checkpoint",
                "Remove it.",
                ((("remove", "zero_optimization.pipeline_loading_checkpoint", None),), True),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 1, "elastic_checkpoint": True}}, []),
    (
        {"zero_optimization": {"stage": 1, "compute_grad_norm": False}},
        [
            Said(
                "DS212",
                "error",
                "fails",
                "zero_optimization.compute_grad_norm",
                "is false, and gradient_clipping is 1, which needs the norm",
                "Set gradient_clipping to 0, or remove compute_grad_norm.",
                ((("remove", "zero_optimization.compute_grad_norm", None),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "compute_grad_norm": False}, "gradient_clipping": 0.1},
        [
            Said(
                "DS212",
                "error",
                "fails",
                "zero_optimization.compute_grad_norm",
                "is false, and gradient_clipping is 0.1, which needs the norm",
                "Set gradient_clipping to 0, or remove compute_grad_norm.",
                ((("remove", "zero_optimization.compute_grad_norm", None),), False),
            ),
        ],
    ),
    (
        {"_for": "hf", "zero_optimization": {"stage": 2, "compute_grad_norm": False}},
        [
            Said(
                "DS212",
                "warning",
                "",
                "zero_optimization.compute_grad_norm",
                "is false, and gradient_clipping follows max_grad_norm, which needs the norm",
                "Set gradient_clipping to 0, or remove compute_grad_norm.",
                ((("remove", "zero_optimization.compute_grad_norm", None),), False),
            ),
        ],
    ),
    (
        {"_for": "accelerate", "zero_optimization": {"stage": 1, "compute_grad_norm": False}},
        [
            Said(
                "DS212",
                "warning",
                "",
                "zero_optimization.compute_grad_norm",
                "is false, and gradient_clipping follows max_grad_norm, which needs the norm",
                "Set gradient_clipping to 0, or remove compute_grad_norm.",
                ((("remove", "zero_optimization.compute_grad_norm", None),), False),
            ),
        ],
    ),
    (
        {
            "_for": "hf",
            "_trainer": {"max_grad_norm": 1.0},
            "zero_optimization": {"stage": 1, "compute_grad_norm": False},
        },
        [
            Said(
                "DS212",
                "error",
                "fails",
                "zero_optimization.compute_grad_norm",
                "is false, and gradient_clipping is 1.0, which needs the norm",
                "Set gradient_clipping to 0, or remove compute_grad_norm.",
                ((("remove", "zero_optimization.compute_grad_norm", None),), False),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 2,
                "compute_grad_norm": False,
                "offload_optimizer": {"device": "nvme"},
                "zenflow": {"update_interval": 1},
            },
            "gradient_clipping": 0,
        },
        [
            Said(
                "DS213",
                "error",
                "fails",
                "zero_optimization.compute_grad_norm",
                "can't be false with offload_optimizer and zenflow",
                "Remove it.",
                ((("remove", "zero_optimization.compute_grad_norm", None),), False),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 2, "compute_grad_norm": False, "zenflow": {"update_interval": 1}},
            "gradient_clipping": 0,
        },
        [
            Said(
                "DS213",
                "error",
                "fails",
                "zero_optimization.compute_grad_norm",
                "can't be false with zenflow",
                "Remove it.",
                ((("remove", "zero_optimization.compute_grad_norm", None),), False),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 1, "compute_grad_norm": False},
            "gradient_clipping": 0,
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "float"},
        },
        [
            Said(
                "DS213",
                "error",
                "fails",
                "zero_optimization.compute_grad_norm",
                "can't be false with bf16 with fp32 accumulation at stage 1",
                "Remove it.",
                ((("remove", "zero_optimization.compute_grad_norm", None),), False),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 1, "compute_grad_norm": False},
            "gradient_clipping": 0,
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "bf16"},
        },
        [],
    ),
    (
        {
            "zero_optimization": {"stage": 1, "compute_grad_norm": False},
            "gradient_clipping": 0,
            "data_types": {"grad_accum_dtype": "fp32"},
        },
        [],
    ),
    (
        {
            "zero_optimization": {"stage": 1, "compute_grad_norm": False},
            "gradient_clipping": 0,
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "float32"},
        },
        [
            Said(
                "DS213",
                "error",
                "fails",
                "zero_optimization.compute_grad_norm",
                "can't be false with bf16 with fp32 accumulation at stage 1",
                "Remove it.",
                ((("remove", "zero_optimization.compute_grad_norm", None),), False),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 1, "compute_grad_norm": False},
            "gradient_clipping": 0,
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "torch.float32"},
        },
        [
            Said(
                "DS213",
                "error",
                "fails",
                "zero_optimization.compute_grad_norm",
                "can't be false with bf16 with fp32 accumulation at stage 1",
                "Remove it.",
                ((("remove", "zero_optimization.compute_grad_norm", None),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 0, "compute_grad_norm": False}, "gradient_clipping": 0},
        [
            Said(
                "DS211",
                "error",
                "refused",
                "zero_optimization.compute_grad_norm",
                "can't be false at stage 0",
                "Remove it, or set zero_optimization.stage to 1 or 2.",
                ((("remove", "zero_optimization.compute_grad_norm", None),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 0, "compute_grad_norm": False}},
        [
            Said(
                "DS211",
                "error",
                "refused",
                "zero_optimization.compute_grad_norm",
                "can't be false at stage 0",
                "Remove it, or set zero_optimization.stage to 1 or 2.",
                ((("remove", "zero_optimization.compute_grad_norm", None),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 1, "reduce_bucket_size": 9999, "allgather_bucket_size": 9998}},
        [
            Said(
                "DS214",
                "warning",
                "",
                "zero_optimization.reduce_bucket_size",
                "9999 elements: each weight is sent by itself, which is slow",
                "It counts elements, not MB; 5e7 to 5e8 is usual.",
            ),
            Said(
                "DS214",
                "warning",
                "",
                "zero_optimization.allgather_bucket_size",
                "9998 elements: each weight is sent by itself, which is slow",
                "It counts elements, not MB; 5e7 to 5e8 is usual.",
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 2, "reduce_bucket_size": 10000, "allgather_bucket_size": 10000}}, []),
    (
        {"zero_optimization": {"stage": 2, "allgather_bucket_size": 9998}},
        [
            Said(
                "DS214",
                "warning",
                "",
                "zero_optimization.allgather_bucket_size",
                "9998 elements: each weight is sent by itself, which is slow",
                "It counts elements, not MB; 5e7 to 5e8 is usual.",
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 1, "reduce_bucket_size": 9999}},
        [
            Said(
                "DS214",
                "warning",
                "",
                "zero_optimization.reduce_bucket_size",
                "9999 elements: each weight is sent by itself, which is slow",
                "It counts elements, not MB; 5e7 to 5e8 is usual.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 1073741824, "overlap_comm": True},
            "bf16": {"enabled": True},
        },
        [
            Said(
                "DS202",
                "note",
                "",
                "zero_optimization.overlap_comm",
                "has given wrong gradients at stage 2, up to early 0.19 releases",
                "Use 0.19.8 or newer: https://github.com/deepspeedai/DeepSpeed/issues/8061",
            ),
            Said(
                "DS215",
                "note",
                "",
                "zero_optimization.reduce_bucket_size",
                "1073741824 elements take 4.0 GiB on each GPU, twice as communication overlaps",
                "5e7 to 5e8 is usual, and seldom slower.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 1073741823, "overlap_comm": True},
            "bf16": {"enabled": True},
        },
        [
            Said(
                "DS202",
                "note",
                "",
                "zero_optimization.overlap_comm",
                "has given wrong gradients at stage 2, up to early 0.19 releases",
                "Use 0.19.8 or newer: https://github.com/deepspeedai/DeepSpeed/issues/8061",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 3, "reduce_bucket_size": 1073741824, "overlap_comm": True},
            "bf16": {"enabled": True},
        },
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 2,
                "reduce_bucket_size": 2147483648,
                "contiguous_gradients": False,
                "offload_optimizer": {"device": "cpu"},
            }
        },
        [
            Said(
                "DS218",
                "warning",
                "",
                "zero_optimization.contiguous_gradients",
                "false has no effect with optimizer offload",
                "Remove it.",
                ((("remove", "zero_optimization.contiguous_gradients", None),), True),
            ),
            Said(
                "DS215",
                "note",
                "",
                "zero_optimization.reduce_bucket_size",
                "2147483648 elements take 8.0 GiB on each GPU",
                "5e7 to 5e8 is usual, and seldom slower.",
            ),
        ],
    ),
    (
        {
            "_for": "hf",
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 9147483648},
        },
        [],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "stage3_prefetch_bucket_size": 11,
                "stage3_max_live_parameters": 10,
            }
        },
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
            Said(
                "DS216",
                "warning",
                "",
                "zero_optimization.stage3_prefetch_bucket_size",
                "11 elements are to be fetched ahead and only 10 may be live",
                "Set stage3_prefetch_bucket_size to 10 or less, or stage3_max_live_parameters to 11 or more.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "stage3_prefetch_bucket_size": 10,
                "stage3_max_live_parameters": 10,
            }
        },
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 1000000,
                "stage3_model_persistence_threshold": 999999,
            }
        },
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
            Said(
                "DS217",
                "warning",
                "",
                "zero_optimization.stage3_model_persistence_threshold",
                "999999 for all weights is below stage3_param_persistence_threshold, 1000000 for each",
                "Set it to 1000000 or more, or the threshold of one weight to 999999 or less.",
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "cpu_offload": True, "ignore_unused_parameters": False}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
            Said(
                "DS205",
                "warning",
                "",
                "zero_optimization.ignore_unused_parameters",
                "has no effect at stage 3: only stages 1 and 2 read it",
                "Remove it.",
                ((("remove", "zero_optimization.ignore_unused_parameters", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "cpu_offload": True, "contiguous_gradients": False}},
        [
            Said(
                "DS218",
                "warning",
                "",
                "zero_optimization.contiguous_gradients",
                "false has no effect with optimizer offload",
                "Remove it.",
                ((("remove", "zero_optimization.contiguous_gradients", None),), True),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 1,
                "contiguous_gradients": False,
                "offload_optimizer": {"device": "nvme"},
            }
        },
        [
            Said(
                "DS218",
                "warning",
                "",
                "zero_optimization.contiguous_gradients",
                "false has no effect with optimizer offload",
                "Remove it.",
                ((("remove", "zero_optimization.contiguous_gradients", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 1, "ignore_unused_parameters": False}},
        [
            Said(
                "DS218",
                "warning",
                "",
                "zero_optimization.ignore_unused_parameters",
                "false has no effect without optimizer offload",
                "Remove it.",
                ((("remove", "zero_optimization.ignore_unused_parameters", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 0, "ignore_unused_parameters": False}},
        [
            Said(
                "DS206",
                "warning",
                "",
                "zero_optimization",
                "stage 0 has no use for ignore_unused_parameters",
                "Set zero_optimization.stage to 1, 2 or 3, or remove what has no effect.",
                ((("remove", "zero_optimization.ignore_unused_parameters", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "stage3_module_granularity_threshold": 1}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
            Said(
                "DS219",
                "warning",
                "",
                "zero_optimization.stage3_module_granularity_threshold",
                "1 makes single layers leaves as well, which fails in the backward pass",
                "Name the blocks in zero_optimization.leaf_module.classes, or set it to 0.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "leaf_module": {"names": ["a", "b"], "classes": ["C"], "name_suffixes": ["d"]},
            }
        },
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
            Said(
                "DS219",
                "warning",
                "",
                "zero_optimization.leaf_module.classes",
                "C: one that is a single layer fails, and one that isn't in the model is only logged",
                "Name blocks that hold several layers, as the model's named_modules() calls them.",
            ),
            Said(
                "DS219",
                "warning",
                "",
                "zero_optimization.leaf_module.names",
                "a, b: one that is a single layer fails, and one that isn't in the model is only logged",
                "Name blocks that hold several layers, as the model's named_modules() calls them.",
            ),
            Said(
                "DS219",
                "warning",
                "",
                "zero_optimization.leaf_module.name_suffixes",
                "d: one that is a single layer fails, and one that isn't in the model is only logged",
                "Name blocks that hold several layers, as the model's named_modules() calls them.",
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "leaf_module": {"names": "a"}}},
        [
            Said(
                "DS203",
                "warning",
                "",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "is off: saving gives no model file, only ZeRO's pieces",
                "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
                ((("add", "zero_optimization.stage3_gather_16bit_weights_on_model_save", True),), False),
            ),
            Said(
                "DS219",
                "warning",
                "",
                "zero_optimization.leaf_module.names",
                "a: one that is a single layer fails, and one that isn't in the model is only logged",
                "Name blocks that hold several layers, as the model's named_modules() calls them.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
            "_version": "0.15",
        },
        [],
    ),
    (
        {"_version": "0.19", "zero_optimization": {"stage": 1, "overlap_comm": True}},
        [
            Said(
                "DS202",
                "note",
                "",
                "zero_optimization.overlap_comm",
                "has given wrong gradients at stage 1, up to early 0.19 releases",
                "Use 0.19.8 or newer: https://github.com/deepspeedai/DeepSpeed/issues/8061",
            ),
        ],
    ),
    ({"_version": "0.18", "zero_optimization": {"stage": 2, "compute_grad_norm": False}}, []),
]


def plain(fix: Fix | None):
    return (tuple(tuple(edit) for edit in fix.edits), fix.safe) if fix else None


def findings(config, setting, *rest):
    return [finding for finding in run(config, setting, *rest) if finding.rule in OWN]


@pytest.mark.parametrize(("given", "expected"), CASES)
def test_what_is_said(given, expected):
    said = [
        Said(
            found.rule,
            found.severity,
            found.effect,
            found.path,
            found.message,
            found.suggestion,
            plain(found.fix),
        )
        for found in findings(*example(given))
    ]
    assert said == expected


@pytest.mark.parametrize(("given", "expected"), [case for case in CASES if any(said.fix for said in case[1])])
def test_a_fix_settles_its_finding(given, expected):
    config, setting, *_ = example(given)
    for found in findings(config, setting):
        if found.fix:
            again = findings(apply(config, found.fix.edits), setting)
            assert (found.rule, found.path) not in [(other.rule, other.path) for other in again]


def test_every_rule_is_seen_at_work():
    assert {said.rule for _, expected in CASES for said in expected} == set(OWN)
