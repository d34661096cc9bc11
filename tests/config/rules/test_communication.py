"""Communication: what exactly is said of a config, and that nothing is said of its right neighbour."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from dsrun.config.edits import apply
from dsrun.config.rules import communication, run
from dsrun.config.rules.frame import Fix, Rule, example

OWN = {rule.id: rule for rule in vars(communication).values() if isinstance(rule, Rule)}


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
        {"zero_optimization": {"stage": 2}, "gradient_predivide_factor": 2.0},
        [
            Said(
                "DS261",
                "error",
                "fails",
                "gradient_predivide_factor",
                "2 doesn't go with reduce_scatter at stage 2",
                "Remove gradient_predivide_factor, or set zero_optimization.reduce_scatter to false.",
                ((("remove", "gradient_predivide_factor", None),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3}, "gradient_predivide_factor": 0.5},
        [
            Said(
                "DS261",
                "error",
                "fails",
                "gradient_predivide_factor",
                "0.5 doesn't go with reduce_scatter at stage 3",
                "Remove gradient_predivide_factor, or set zero_optimization.reduce_scatter to false.",
                ((("remove", "gradient_predivide_factor", None),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "reduce_scatter": True}, "prescale_gradients": True},
        [
            Said(
                "DS261",
                "error",
                "fails",
                "prescale_gradients",
                "true doesn't go with reduce_scatter at stage 2",
                "Remove prescale_gradients, or set zero_optimization.reduce_scatter to false.",
                ((("remove", "prescale_gradients", None),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3}, "prescale_gradients": True},
        [
            Said(
                "DS261",
                "error",
                "fails",
                "prescale_gradients",
                "true doesn't go with reduce_scatter at stage 3",
                "Remove prescale_gradients, or set zero_optimization.reduce_scatter to false.",
                ((("remove", "prescale_gradients", None),), False),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 2, "reduce_scatter": False}, "prescale_gradients": True}, []),
    ({"zero_optimization": {"stage": 3, "reduce_scatter": False}, "gradient_predivide_factor": 2.0}, []),
    ({"zero_optimization": {"stage": 2}, "gradient_predivide_factor": 1.0, "prescale_gradients": False}, []),
    (
        {"zero_optimization": {"stage": 1}, "prescale_gradients": True},
        [
            Said(
                "DS263",
                "warning",
                "",
                "prescale_gradients",
                "has no effect: stage 1 divides by itself while reduce_scatter is true",
                "Remove it.",
                ((("remove", "prescale_gradients", None),), True),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 0}, "gradient_predivide_factor": 2.0}, []),
    (
        {"zero_optimization": {"stage": 2}, "gradient_predivide_factor": 2.0, "gradient_allreduce_op": "sum"},
        [
            Said(
                "DS263",
                "warning",
                "",
                "gradient_predivide_factor",
                "has no effect: gradient_allreduce_op is sum, and nothing is divided",
                "Remove it.",
                ((("remove", "gradient_predivide_factor", None),), True),
            ),
            Said(
                "DS265",
                "note",
                "",
                "gradient_allreduce_op",
                "sum makes gradients 4 times as large as their mean",
                "Divide the loss by the batch of all GPUs yourself, or set it to mean.",
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "reduce_scatter": False}, "gradient_predivide_factor": 4},
        [
            Said(
                "DS262",
                "error",
                "differs",
                "gradient_predivide_factor",
                "4 is the number of GPUs: stage 3 makes the gradients 4 times too small",
                "Remove it, or set another factor than 4.",
                ((("remove", "gradient_predivide_factor", None),), False),
            ),
        ],
    ),
    (
        {
            "_world_size": 2,
            "zero_optimization": {"stage": 3, "reduce_scatter": False},
            "gradient_predivide_factor": 2.0,
        },
        [
            Said(
                "DS262",
                "error",
                "differs",
                "gradient_predivide_factor",
                "2 is the number of GPUs: stage 3 makes the gradients 2 times too small",
                "Remove it, or set another factor than 2.",
                ((("remove", "gradient_predivide_factor", None),), False),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 2, "reduce_scatter": False}, "gradient_predivide_factor": 4}, []),
    (
        {
            "_world_size": None,
            "zero_optimization": {"stage": 3, "reduce_scatter": False},
            "gradient_predivide_factor": 4,
        },
        [],
    ),
    (
        {
            "zero_optimization": {"stage": 3, "reduce_scatter": False},
            "gradient_predivide_factor": 4,
            "prescale_gradients": True,
        },
        [
            Said(
                "DS263",
                "warning",
                "",
                "gradient_predivide_factor",
                "has no effect: prescale_gradients divides by the number of GPUs at once",
                "Remove it.",
                ((("remove", "gradient_predivide_factor", None),), True),
            ),
        ],
    ),
    (
        {
            "_world_size": 1,
            "zero_optimization": {"stage": 3, "reduce_scatter": False},
            "gradient_predivide_factor": 1,
        },
        [],
    ),
    (
        {"zero_optimization": {"stage": 1}, "gradient_predivide_factor": 8},
        [
            Said(
                "DS263",
                "warning",
                "",
                "gradient_predivide_factor",
                "has no effect: stage 1 divides by itself while reduce_scatter is true",
                "Remove it.",
                ((("remove", "gradient_predivide_factor", None),), True),
            ),
        ],
    ),
    (
        {"prescale_gradients": True, "gradient_predivide_factor": 8},
        [
            Said(
                "DS263",
                "warning",
                "",
                "gradient_predivide_factor",
                "has no effect: prescale_gradients divides by the number of GPUs at once",
                "Remove it.",
                ((("remove", "gradient_predivide_factor", None),), True),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 2, "reduce_scatter": False},
            "prescale_gradients": True,
            "gradient_predivide_factor": 8,
        },
        [
            Said(
                "DS263",
                "warning",
                "",
                "gradient_predivide_factor",
                "has no effect: prescale_gradients divides by the number of GPUs at once",
                "Remove it.",
                ((("remove", "gradient_predivide_factor", None),), True),
            ),
        ],
    ),
    (
        {"gradient_allreduce_op": "sum", "prescale_gradients": True},
        [
            Said(
                "DS263",
                "warning",
                "",
                "prescale_gradients",
                "has no effect: gradient_allreduce_op is sum, and nothing is divided",
                "Remove it.",
                ((("remove", "prescale_gradients", None),), True),
            ),
            Said(
                "DS265",
                "note",
                "",
                "gradient_allreduce_op",
                "sum makes gradients 4 times as large as their mean",
                "Divide the loss by the batch of all GPUs yourself, or set it to mean.",
            ),
        ],
    ),
    ({"prescale_gradients": True}, []),
    ({"gradient_predivide_factor": 8}, []),
    ({"zero_optimization": {"stage": 1, "reduce_scatter": False}, "prescale_gradients": True}, []),
    ({"zero_optimization": {"stage": 1}, "prescale_gradients": False, "gradient_predivide_factor": 1}, []),
    (
        {"zero_optimization": {"stage": 3}, "gradient_allreduce_op": "sum"},
        [
            Said(
                "DS264",
                "error",
                "refused",
                "gradient_allreduce_op",
                "sum doesn't go with stage 3",
                "Set it to mean, and the learning rate to what fits an average.",
                ((("replace", "gradient_allreduce_op", "mean"),), False),
            ),
            Said(
                "DS265",
                "note",
                "",
                "gradient_allreduce_op",
                "sum makes gradients 4 times as large as their mean",
                "Divide the loss by the batch of all GPUs yourself, or set it to mean.",
            ),
        ],
    ),
    (
        {"gradient_allreduce_op": "SUM", "compile": {"deepcompile": True}, "zero_optimization": {"stage": 1}},
        [
            Said(
                "DS264",
                "error",
                "refused",
                "gradient_allreduce_op",
                "sum doesn't go with deepcompile",
                "Set it to mean, and the learning rate to what fits an average.",
                ((("replace", "gradient_allreduce_op", "mean"),), False),
            ),
            Said(
                "DS265",
                "note",
                "",
                "gradient_allreduce_op",
                "sum makes gradients 4 times as large as their mean",
                "Divide the loss by the batch of all GPUs yourself, or set it to mean.",
            ),
        ],
    ),
    (
        {
            "gradient_allreduce_op": "sum",
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
        },
        [
            Said(
                "DS264",
                "error",
                "refused",
                "gradient_allreduce_op",
                "sum doesn't go with zenflow",
                "Set it to mean, and the learning rate to what fits an average.",
                ((("replace", "gradient_allreduce_op", "mean"),), False),
            ),
            Said(
                "DS265",
                "note",
                "",
                "gradient_allreduce_op",
                "sum makes gradients 4 times as large as their mean",
                "Divide the loss by the batch of all GPUs yourself, or set it to mean.",
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 3}, "gradient_allreduce_op": "mean"}, []),
    (
        {"zero_optimization": {"stage": 2}, "gradient_allreduce_op": "sum"},
        [
            Said(
                "DS265",
                "note",
                "",
                "gradient_allreduce_op",
                "sum makes gradients 4 times as large as their mean",
                "Divide the loss by the batch of all GPUs yourself, or set it to mean.",
            ),
        ],
    ),
    (
        {"gradient_allreduce_op": "sum", "compile": {"deepcompile": False}},
        [
            Said(
                "DS265",
                "note",
                "",
                "gradient_allreduce_op",
                "sum makes gradients 4 times as large as their mean",
                "Divide the loss by the batch of all GPUs yourself, or set it to mean.",
            ),
        ],
    ),
    (
        {"gradient_allreduce_op": "sum"},
        [
            Said(
                "DS265",
                "note",
                "",
                "gradient_allreduce_op",
                "sum makes gradients 4 times as large as their mean",
                "Divide the loss by the batch of all GPUs yourself, or set it to mean.",
            ),
        ],
    ),
    (
        {"_world_size": None, "gradient_allreduce_op": "SUM"},
        [
            Said(
                "DS265",
                "note",
                "",
                "gradient_allreduce_op",
                "sum makes gradients as many times as there are GPUs as large as their mean",
                "Divide the loss by the batch of all GPUs yourself, or set it to mean.",
            ),
        ],
    ),
    ({"gradient_allreduce_op": "mean"}, []),
    ({"_world_size": 1, "gradient_allreduce_op": "sum"}, []),
    (
        {"zero_optimization": {"stage": 1, "overlap_comm": True}, "managed_gradient_accumulation": False},
        [
            Said(
                "DS266",
                "error",
                "fails",
                "managed_gradient_accumulation",
                "false doesn't go with overlap_comm at stage 1",
                "Set zero_optimization.overlap_comm to false, or remove managed_gradient_accumulation.",
                ((("replace", "zero_optimization.overlap_comm", False),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"overlap_comm": True}, "managed_gradient_accumulation": False},
        [
            Said(
                "DS266",
                "error",
                "fails",
                "managed_gradient_accumulation",
                "false doesn't go with overlap_comm at stage 0",
                "Set zero_optimization.overlap_comm to false, or remove managed_gradient_accumulation.",
                ((("replace", "zero_optimization.overlap_comm", False),), False),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 2, "overlap_comm": True}, "managed_gradient_accumulation": False}, []),
    ({"zero_optimization": {"stage": 1, "overlap_comm": False}, "managed_gradient_accumulation": False}, []),
    ({"zero_optimization": {"stage": 1}, "managed_gradient_accumulation": False}, []),
    ({"zero_optimization": {"stage": 1, "overlap_comm": True}, "managed_gradient_accumulation": True}, []),
    (
        {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
        [
            Said(
                "DS267",
                "note",
                "",
                "communication_data_type",
                "fp32 doubles what bf16 gradients take on the way",
                "Remove it to send bf16.",
            ),
        ],
    ),
    (
        {"fp16": {"enabled": True}, "communication_data_type": "FP32"},
        [
            Said(
                "DS267",
                "note",
                "",
                "communication_data_type",
                "fp32 doubles what fp16 gradients take on the way",
                "Remove it to send fp16.",
            ),
        ],
    ),
    (
        {"communication_data_type": "bf16"},
        [
            Said(
                "DS267",
                "note",
                "",
                "communication_data_type",
                "bf16 rounds fp32 gradients to 8 bits on the way",
                "Remove it to send fp32.",
            ),
        ],
    ),
    (
        {"communication_data_type": "fp16"},
        [
            Said(
                "DS267",
                "warning",
                "",
                "communication_data_type",
                "fp16 overflows above 65504, and fp32 training has no loss scale against it",
                "Set it to fp32, or remove it.",
                ((("remove", "communication_data_type", None),), False),
            ),
        ],
    ),
    (
        {"bf16": {"enabled": True}, "communication_data_type": "fp16"},
        [
            Said(
                "DS267",
                "warning",
                "",
                "communication_data_type",
                "fp16 overflows above 65504, and bf16 training has no loss scale against it",
                "Set it to bf16, or remove it.",
                ((("remove", "communication_data_type", None),), False),
            ),
        ],
    ),
    ({"bf16": {"enabled": True}, "communication_data_type": "bf16"}, []),
    ({"communication_data_type": "FP32"}, []),
    ({"bf16": {"enabled": True}}, []),
    ({"fp16": {"enabled": True}, "communication_data_type": "bf16"}, []),
    (
        {"seq_parallel_communication_data_type": "bf16"},
        [
            Said(
                "DS268",
                "note",
                "",
                "seq_parallel_communication_data_type",
                "has no effect without sequence parallelism",
                "Set communication_data_type for data parallelism, or remove it.",
            ),
        ],
    ),
    (
        {"sequence_parallel_size": 1, "seq_parallel_communication_data_type": "fp16"},
        [
            Said(
                "DS268",
                "note",
                "",
                "seq_parallel_communication_data_type",
                "has no effect without sequence parallelism",
                "Set communication_data_type for data parallelism, or remove it.",
            ),
        ],
    ),
    (
        {
            "sequence_parallel_size": 2,
            "data_parallel_size": 2,
            "bf16": {"enabled": True},
            "communication_data_type": "bf16",
        },
        [
            Said(
                "DS268",
                "note",
                "",
                "communication_data_type",
                "has no effect with sequence parallelism: seq_parallel_communication_data_type, fp32, takes its place",
                "Set seq_parallel_communication_data_type instead.",
            ),
        ],
    ),
    ({"seq_parallel_communication_data_type": "fp32"}, []),
    ({"communication_data_type": "fp32"}, []),
    (
        {
            "sequence_parallel_size": 2,
            "data_parallel_size": 2,
            "seq_parallel_communication_data_type": "bf16",
        },
        [],
    ),
    (
        {"gradient_predivide_factor": 2.0, "prescale_gradients": True, "zero_optimization": {"stage": 2}},
        [
            Said(
                "DS261",
                "error",
                "fails",
                "gradient_predivide_factor",
                "2 doesn't go with reduce_scatter at stage 2",
                "Remove gradient_predivide_factor, or set zero_optimization.reduce_scatter to false.",
                ((("remove", "gradient_predivide_factor", None),), False),
            ),
            Said(
                "DS261",
                "error",
                "fails",
                "prescale_gradients",
                "true doesn't go with reduce_scatter at stage 2",
                "Remove prescale_gradients, or set zero_optimization.reduce_scatter to false.",
                ((("remove", "prescale_gradients", None),), False),
            ),
        ],
    ),
    (
        {"gradient_predivide_factor": 0.25, "zero_optimization": {"stage": 3}},
        [
            Said(
                "DS261",
                "error",
                "fails",
                "gradient_predivide_factor",
                "0.25 doesn't go with reduce_scatter at stage 3",
                "Remove gradient_predivide_factor, or set zero_optimization.reduce_scatter to false.",
                ((("remove", "gradient_predivide_factor", None),), False),
            ),
        ],
    ),
    (
        {"gradient_allreduce_op": "SUM", "gradient_predivide_factor": 2.0, "zero_optimization": {"stage": 2}},
        [
            Said(
                "DS263",
                "warning",
                "",
                "gradient_predivide_factor",
                "has no effect: gradient_allreduce_op is sum, and nothing is divided",
                "Remove it.",
                ((("remove", "gradient_predivide_factor", None),), True),
            ),
            Said(
                "DS265",
                "note",
                "",
                "gradient_allreduce_op",
                "sum makes gradients 4 times as large as their mean",
                "Divide the loss by the batch of all GPUs yourself, or set it to mean.",
            ),
        ],
    ),
    (
        {
            "gradient_predivide_factor": 2.0,
            "prescale_gradients": True,
            "gradient_allreduce_op": "sum",
            "zero_optimization": {"stage": 1},
        },
        [
            Said(
                "DS263",
                "warning",
                "",
                "prescale_gradients",
                "has no effect: gradient_allreduce_op is sum, and nothing is divided",
                "Remove it.",
                ((("remove", "prescale_gradients", None),), True),
            ),
            Said(
                "DS263",
                "warning",
                "",
                "gradient_predivide_factor",
                "has no effect: gradient_allreduce_op is sum, and nothing is divided",
                "Remove it.",
                ((("remove", "gradient_predivide_factor", None),), True),
            ),
            Said(
                "DS265",
                "note",
                "",
                "gradient_allreduce_op",
                "sum makes gradients 4 times as large as their mean",
                "Divide the loss by the batch of all GPUs yourself, or set it to mean.",
            ),
        ],
    ),
    (
        {"gradient_predivide_factor": 2.0, "prescale_gradients": True, "zero_optimization": {"stage": 1}},
        [
            Said(
                "DS263",
                "warning",
                "",
                "prescale_gradients",
                "has no effect: stage 1 divides by itself while reduce_scatter is true",
                "Remove it.",
                ((("remove", "prescale_gradients", None),), True),
            ),
            Said(
                "DS263",
                "warning",
                "",
                "gradient_predivide_factor",
                "has no effect: stage 1 divides by itself while reduce_scatter is true",
                "Remove it.",
                ((("remove", "gradient_predivide_factor", None),), True),
            ),
        ],
    ),
    (
        {
            "gradient_predivide_factor": 2.0,
            "prescale_gradients": True,
            "zero_optimization": {"stage": 3, "reduce_scatter": False},
        },
        [
            Said(
                "DS263",
                "warning",
                "",
                "gradient_predivide_factor",
                "has no effect: prescale_gradients divides by the number of GPUs at once",
                "Remove it.",
                ((("remove", "gradient_predivide_factor", None),), True),
            ),
        ],
    ),
    (
        {
            "gradient_predivide_factor": 2.0,
            "prescale_gradients": True,
            "zero_optimization": {"stage": 1, "reduce_scatter": False},
        },
        [
            Said(
                "DS263",
                "warning",
                "",
                "gradient_predivide_factor",
                "has no effect: prescale_gradients divides by the number of GPUs at once",
                "Remove it.",
                ((("remove", "gradient_predivide_factor", None),), True),
            ),
        ],
    ),
    (
        {
            "_world_size": 8,
            "gradient_predivide_factor": 8,
            "zero_optimization": {"stage": 3, "reduce_scatter": False},
        },
        [
            Said(
                "DS262",
                "error",
                "differs",
                "gradient_predivide_factor",
                "8 is the number of GPUs: stage 3 makes the gradients 8 times too small",
                "Remove it, or set another factor than 8.",
                ((("remove", "gradient_predivide_factor", None),), False),
            ),
        ],
    ),
    (
        {"gradient_predivide_factor": 4, "zero_optimization": {"stage": 3}},
        [
            Said(
                "DS261",
                "error",
                "fails",
                "gradient_predivide_factor",
                "4 doesn't go with reduce_scatter at stage 3",
                "Remove gradient_predivide_factor, or set zero_optimization.reduce_scatter to false.",
                ((("remove", "gradient_predivide_factor", None),), False),
            ),
        ],
    ),
    ({"_world_size": 1, "zero_optimization": {"stage": 3, "reduce_scatter": False}}, []),
    (
        {"gradient_allreduce_op": "sum", "compile": {"deepcompile": True}, "zero_optimization": {"stage": 3}},
        [
            Said(
                "DS264",
                "error",
                "refused",
                "gradient_allreduce_op",
                "sum doesn't go with stage 3 and deepcompile",
                "Set it to mean, and the learning rate to what fits an average.",
                ((("replace", "gradient_allreduce_op", "mean"),), False),
            ),
            Said(
                "DS265",
                "note",
                "",
                "gradient_allreduce_op",
                "sum makes gradients 4 times as large as their mean",
                "Divide the loss by the batch of all GPUs yourself, or set it to mean.",
            ),
        ],
    ),
    (
        {"_world_size": 2, "gradient_allreduce_op": "sum"},
        [
            Said(
                "DS265",
                "note",
                "",
                "gradient_allreduce_op",
                "sum makes gradients 2 times as large as their mean",
                "Divide the loss by the batch of all GPUs yourself, or set it to mean.",
            ),
        ],
    ),
    (
        {"managed_gradient_accumulation": False, "zero_optimization": {"stage": 0, "overlap_comm": True}},
        [
            Said(
                "DS266",
                "error",
                "fails",
                "managed_gradient_accumulation",
                "false doesn't go with overlap_comm at stage 0",
                "Set zero_optimization.overlap_comm to false, or remove managed_gradient_accumulation.",
                ((("replace", "zero_optimization.overlap_comm", False),), False),
            ),
        ],
    ),
    ({"managed_gradient_accumulation": False, "zero_optimization": {"stage": 3, "overlap_comm": True}}, []),
    (
        {"communication_data_type": "FP16", "bf16": {"enabled": True}},
        [
            Said(
                "DS267",
                "warning",
                "",
                "communication_data_type",
                "fp16 overflows above 65504, and bf16 training has no loss scale against it",
                "Set it to bf16, or remove it.",
                ((("remove", "communication_data_type", None),), False),
            ),
        ],
    ),
    (
        {"communication_data_type": "BF16"},
        [
            Said(
                "DS267",
                "note",
                "",
                "communication_data_type",
                "bf16 rounds fp32 gradients to 8 bits on the way",
                "Remove it to send fp32.",
            ),
        ],
    ),
    ({"_for": "hf", "bf16": {"enabled": "auto"}, "communication_data_type": "fp32"}, []),
    (
        {
            "sequence_parallel_size": 2,
            "data_parallel_size": 2,
            "communication_data_type": "fp32",
            "seq_parallel_communication_data_type": "fp16",
        },
        [
            Said(
                "DS268",
                "note",
                "",
                "communication_data_type",
                "has no effect with sequence parallelism: seq_parallel_communication_data_type, fp16, takes its place",
                "Set seq_parallel_communication_data_type instead.",
            ),
        ],
    ),
    (
        {"seq_parallel_communication_data_type": "FP16"},
        [
            Said(
                "DS268",
                "note",
                "",
                "seq_parallel_communication_data_type",
                "has no effect without sequence parallelism",
                "Set communication_data_type for data parallelism, or remove it.",
            ),
        ],
    ),
    (
        {"sequence_parallel_size": 2, "data_parallel_size": 2, "communication_data_type": "fp32"},
        [
            Said(
                "DS268",
                "note",
                "",
                "communication_data_type",
                "has no effect with sequence parallelism: seq_parallel_communication_data_type, fp32, takes its place",
                "Set seq_parallel_communication_data_type instead.",
            ),
        ],
    ),
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
