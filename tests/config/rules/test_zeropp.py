# ruff: noqa: E501 - texts stand here as they are shown
"""ZeRO++ and MiCS: what exactly is said of a config, and that nothing is said of its right neighbour."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from dsrun.config.edits import apply
from dsrun.config.rules import run, zeropp
from dsrun.config.rules.frame import Fix, Rule, example

OWN = {rule.id: rule for rule in vars(zeropp).values() if isinstance(rule, Rule)}


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
        {"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 2}},
        [
            Said(
                "DS241",
                "error",
                "differs",
                "zero_optimization.zero_hpz_partition_size",
                "stage 2 has no use for zero_hpz_partition_size",
                "Set zero_optimization.stage to 3, or remove it.",
                ((("remove", "zero_optimization.zero_hpz_partition_size", None),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "zero_quantized_weights": True}},
        [
            Said(
                "DS241",
                "error",
                "differs",
                "zero_optimization.zero_quantized_weights",
                "stage 2 has no use for zero_quantized_weights",
                "Set zero_optimization.stage to 3, or remove it.",
                ((("remove", "zero_optimization.zero_quantized_weights", None),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 1, "zero_quantized_nontrainable_weights": True}},
        [
            Said(
                "DS241",
                "error",
                "differs",
                "zero_optimization.zero_quantized_nontrainable_weights",
                "stage 1 has no use for zero_quantized_nontrainable_weights",
                "Set zero_optimization.stage to 3, or remove it.",
                ((("remove", "zero_optimization.zero_quantized_nontrainable_weights", None),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"zero_quantized_gradients": True, "zero_hpz_partition_size": 2}},
        [
            Said(
                "DS241",
                "error",
                "differs",
                "zero_optimization.zero_quantized_gradients",
                "stage 0 has no use for zero_quantized_gradients and zero_hpz_partition_size",
                "Set zero_optimization.stage to 3, or remove it.",
                ((("add", "zero_optimization.stage", 3),), False),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 1, "zero_quantized_weights": False}}, []),
    ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2, "zero_quantized_weights": True}}, []),
    (
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}},
        [
            Said(
                "DS242",
                "error",
                "fails",
                "zero_optimization.zero_hpz_partition_size",
                "groups of 3 don't divide 4 GPUs",
                "Set it to one of 1, 2, 4; the GPUs of a node are usual.",
            ),
        ],
    ),
    (
        {"_world_size": 3, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
        [
            Said(
                "DS242",
                "error",
                "fails",
                "zero_optimization.zero_hpz_partition_size",
                "groups of 2 don't divide 3 GPUs",
                "Set it to one of 1, 3; the GPUs of a node are usual.",
            ),
        ],
    ),
    (
        {"_world_size": 16, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 12}},
        [
            Said(
                "DS242",
                "error",
                "fails",
                "zero_optimization.zero_hpz_partition_size",
                "groups of 12 don't divide 16 GPUs",
                "Set it to one of 1, 2, 4, 8, 16; the GPUs of a node are usual.",
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, []),
    (
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 5}},
        [
            Said(
                "DS243",
                "warning",
                "",
                "zero_optimization.zero_hpz_partition_size",
                "5 is more than the 4 GPUs there are, and counts as 4",
                "Set it to the GPUs of a node, 4 at most.",
            ),
        ],
    ),
    ({"_world_size": None, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}, []),
    ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 0}}, []),
    (
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}},
        [
            Said(
                "DS243",
                "warning",
                "",
                "zero_optimization.zero_hpz_partition_size",
                "8 is more than the 4 GPUs there are, and counts as 4",
                "Set it to the GPUs of a node, 4 at most.",
            ),
        ],
    ),
    (
        {"_nodes": 2, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}},
        [
            Said(
                "DS243",
                "warning",
                "",
                "zero_optimization.zero_hpz_partition_size",
                "groups of 4 reach over nodes of 2 GPUs, which saves no traffic between them",
                "Set it to 2.",
                ((("replace", "zero_optimization.zero_hpz_partition_size", 2),), False),
            ),
        ],
    ),
    ({"_nodes": 1, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}, []),
    ({"_nodes": 2, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, []),
    ({"_nodes": 3, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}, []),
    ({"_nodes": 2, "zero_optimization": {"stage": 3}}, []),
    (
        {"_device": "cpu", "zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
        [
            Said(
                "DS244",
                "error",
                "fails",
                "zero_optimization.zero_quantized_weights",
                "needs NVIDIA GPUs, and there are none",
                "Remove it.",
                ((("remove", "zero_optimization.zero_quantized_weights", None),), False),
            ),
        ],
    ),
    (
        {"_device": "cpu", "zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}},
        [
            Said(
                "DS244",
                "error",
                "fails",
                "zero_optimization.zero_quantized_nontrainable_weights",
                "needs NVIDIA GPUs, and there are none",
                "Remove it.",
                ((("remove", "zero_optimization.zero_quantized_nontrainable_weights", None),), False),
            ),
        ],
    ),
    (
        {"_device": "cpu", "zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
        [
            Said(
                "DS244",
                "error",
                "differs",
                "zero_optimization.zero_quantized_gradients",
                "needs NVIDIA GPUs, and there are none",
                "Remove it.",
                ((("remove", "zero_optimization.zero_quantized_gradients", None),), False),
            ),
        ],
    ),
    ({"_device": "cuda", "zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, []),
    ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, []),
    ({"_device": "cpu", "zero_optimization": {"stage": 3, "zero_quantized_weights": False}}, []),
    (
        {"_nodes": 1, "zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
        [
            Said(
                "DS245",
                "warning",
                "",
                "zero_optimization.zero_quantized_gradients",
                "has no effect on a single node",
                "Remove it.",
                ((("remove", "zero_optimization.zero_quantized_gradients", None),), True),
            ),
        ],
    ),
    ({"_nodes": 2, "zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, []),
    ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, []),
    ({"_nodes": 1, "zero_optimization": {"stage": 3, "zero_quantized_gradients": False}}, []),
    (
        {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True, "reduce_scatter": False}},
        [
            Said(
                "DS246",
                "error",
                "fails",
                "zero_optimization.zero_quantized_gradients",
                "needs reduce_scatter, which is false",
                "Set reduce_scatter to true, its default.",
                ((("replace", "zero_optimization.reduce_scatter", True),), False),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True, "reduce_scatter": True}}, []),
    ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": False, "reduce_scatter": False}}, []),
    (
        {"_version": "0.18", "zero_optimization": {"stage": 2, "mics_shard_size": 2}},
        [
            Said(
                "DS247",
                "error",
                "differs",
                "zero_optimization.mics_shard_size",
                "stage 2 has no use for it",
                "Set zero_optimization.stage to 3, or remove it.",
                ((("replace", "zero_optimization.stage", 3),), False),
            ),
        ],
    ),
    (
        {"_version": "0.10", "zero_optimization": {"mics_shard_size": 1}},
        [
            Said(
                "DS247",
                "error",
                "differs",
                "zero_optimization.mics_shard_size",
                "stage 0 has no use for it",
                "Set zero_optimization.stage to 3, or remove it.",
                ((("add", "zero_optimization.stage", 3),), False),
            ),
        ],
    ),
    ({"_version": "0.18", "zero_optimization": {"stage": 3, "mics_shard_size": 2}}, []),
    ({"_version": "0.18", "zero_optimization": {"stage": 2, "mics_shard_size": -1}}, []),
    (
        {"_version": "0.18", "zero_optimization": {"stage": 3, "mics_shard_size": 3}},
        [
            Said(
                "DS248",
                "error",
                "fails",
                "zero_optimization.mics_shard_size",
                "shards of 3 don't divide 4 GPUs",
                "Set it to one of 1, 2, 4.",
            ),
        ],
    ),
    (
        {"_version": "0.18", "zero_optimization": {"stage": 3, "mics_shard_size": 8}},
        [
            Said(
                "DS248",
                "error",
                "fails",
                "zero_optimization.mics_shard_size",
                "shards of 8 don't divide 4 GPUs",
                "Set it to one of 1, 2, 4.",
            ),
        ],
    ),
    ({"_version": "0.18", "zero_optimization": {"stage": 3, "mics_shard_size": 4}}, []),
    ({"_version": "0.18", "_world_size": None, "zero_optimization": {"stage": 3, "mics_shard_size": 3}}, []),
    ({"_version": "0.18", "zero_optimization": {"stage": 3, "mics_shard_size": -1}}, []),
    (
        {"_version": "0.18", "zero_optimization": {"stage": 3, "mics_hierarchical_params_gather": True}},
        [
            Said(
                "DS249",
                "warning",
                "",
                "zero_optimization.mics_hierarchical_params_gather",
                "has no effect without mics_shard_size",
                "Set mics_shard_size, or remove it.",
                ((("remove", "zero_optimization.mics_hierarchical_params_gather", None),), True),
            ),
        ],
    ),
    (
        {
            "_version": "0.18",
            "zero_optimization": {"stage": 3, "mics_shard_size": 2, "mics_hierarchical_params_gather": True},
        },
        [],
    ),
    ({"_version": "0.18", "zero_optimization": {"stage": 3, "mics_hierarchical_params_gather": False}}, []),
    (
        {"zero_optimization": {"stage": 0, "zero_hpz_partition_size": 2}},
        [
            Said(
                "DS241",
                "error",
                "differs",
                "zero_optimization.zero_hpz_partition_size",
                "stage 0 has no use for zero_hpz_partition_size",
                "Set zero_optimization.stage to 3, or remove it.",
                ((("replace", "zero_optimization.stage", 3),), False),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 2,
                "zero_hpz_partition_size": 2,
                "zero_quantized_weights": True,
                "zero_quantized_gradients": True,
                "zero_quantized_nontrainable_weights": True,
            }
        },
        [
            Said(
                "DS241",
                "error",
                "differs",
                "zero_optimization.zero_quantized_weights",
                "stage 2 has no use for zero_quantized_weights, zero_quantized_nontrainable_weights, zero_quantized_gradients and zero_hpz_partition_size",
                "Set zero_optimization.stage to 3, or remove it.",
                (
                    (
                        ("remove", "zero_optimization.zero_quantized_weights", None),
                        ("remove", "zero_optimization.zero_quantized_nontrainable_weights", None),
                        ("remove", "zero_optimization.zero_quantized_gradients", None),
                        ("remove", "zero_optimization.zero_hpz_partition_size", None),
                    ),
                    False,
                ),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 1}}, []),
    ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}, []),
    (
        {"_nodes": 2, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}},
        [
            Said(
                "DS242",
                "error",
                "fails",
                "zero_optimization.zero_hpz_partition_size",
                "groups of 3 don't divide 4 GPUs",
                "Set it to one of 1, 2, 4; the GPUs of a node are usual.",
            ),
            Said(
                "DS243",
                "warning",
                "",
                "zero_optimization.zero_hpz_partition_size",
                "groups of 3 reach over nodes of 2 GPUs, which saves no traffic between them",
                "Set it to 2.",
                ((("replace", "zero_optimization.zero_hpz_partition_size", 2),), False),
            ),
        ],
    ),
    (
        {"_world_size": 16, "_nodes": 2, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 16}},
        [
            Said(
                "DS243",
                "warning",
                "",
                "zero_optimization.zero_hpz_partition_size",
                "groups of 16 reach over nodes of 8 GPUs, which saves no traffic between them",
                "Set it to 8.",
                ((("replace", "zero_optimization.zero_hpz_partition_size", 8),), False),
            ),
        ],
    ),
    ({"_world_size": 16, "_nodes": 2, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, []),
    (
        {"_world_size": 16, "_nodes": 2, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 17}},
        [
            Said(
                "DS243",
                "warning",
                "",
                "zero_optimization.zero_hpz_partition_size",
                "17 is more than the 16 GPUs there are, and counts as 16",
                "Set it to the GPUs of a node, 16 at most.",
            ),
        ],
    ),
    ({"_nodes": 2, "_world_size": None, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, []),
    (
        {"_nodes": 2, "zero_optimization": {"stage": 2, "zero_hpz_partition_size": 4}},
        [
            Said(
                "DS241",
                "error",
                "differs",
                "zero_optimization.zero_hpz_partition_size",
                "stage 2 has no use for zero_hpz_partition_size",
                "Set zero_optimization.stage to 3, or remove it.",
                ((("remove", "zero_optimization.zero_hpz_partition_size", None),), False),
            ),
        ],
    ),
    (
        {"_world_size": 3, "zero_optimization": {"stage": 2, "zero_hpz_partition_size": 2}},
        [
            Said(
                "DS241",
                "error",
                "differs",
                "zero_optimization.zero_hpz_partition_size",
                "stage 2 has no use for zero_hpz_partition_size",
                "Set zero_optimization.stage to 3, or remove it.",
                ((("remove", "zero_optimization.zero_hpz_partition_size", None),), False),
            ),
        ],
    ),
    (
        {
            "_device": "cpu",
            "zero_optimization": {
                "stage": 3,
                "zero_quantized_weights": True,
                "zero_quantized_gradients": True,
                "zero_quantized_nontrainable_weights": True,
            },
        },
        [
            Said(
                "DS244",
                "error",
                "fails",
                "zero_optimization.zero_quantized_weights",
                "needs NVIDIA GPUs, and there are none",
                "Remove it.",
                ((("remove", "zero_optimization.zero_quantized_weights", None),), False),
            ),
            Said(
                "DS244",
                "error",
                "fails",
                "zero_optimization.zero_quantized_nontrainable_weights",
                "needs NVIDIA GPUs, and there are none",
                "Remove it.",
                ((("remove", "zero_optimization.zero_quantized_nontrainable_weights", None),), False),
            ),
            Said(
                "DS244",
                "error",
                "differs",
                "zero_optimization.zero_quantized_gradients",
                "needs NVIDIA GPUs, and there are none",
                "Remove it.",
                ((("remove", "zero_optimization.zero_quantized_gradients", None),), False),
            ),
        ],
    ),
    (
        {"_device": "cpu", "zero_optimization": {"stage": 2, "zero_quantized_weights": True}},
        [
            Said(
                "DS241",
                "error",
                "differs",
                "zero_optimization.zero_quantized_weights",
                "stage 2 has no use for zero_quantized_weights",
                "Set zero_optimization.stage to 3, or remove it.",
                ((("remove", "zero_optimization.zero_quantized_weights", None),), False),
            ),
        ],
    ),
    (
        {"_nodes": 1, "zero_optimization": {"stage": 2, "zero_quantized_gradients": True}},
        [
            Said(
                "DS241",
                "error",
                "differs",
                "zero_optimization.zero_quantized_gradients",
                "stage 2 has no use for zero_quantized_gradients",
                "Set zero_optimization.stage to 3, or remove it.",
                ((("remove", "zero_optimization.zero_quantized_gradients", None),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "zero_quantized_gradients": True, "reduce_scatter": False}},
        [
            Said(
                "DS241",
                "error",
                "differs",
                "zero_optimization.zero_quantized_gradients",
                "stage 2 has no use for zero_quantized_gradients",
                "Set zero_optimization.stage to 3, or remove it.",
                ((("remove", "zero_optimization.zero_quantized_gradients", None),), False),
            ),
        ],
    ),
    (
        {"_version": "0.18", "zero_optimization": {"stage": 2, "mics_shard_size": 1}},
        [
            Said(
                "DS247",
                "error",
                "differs",
                "zero_optimization.mics_shard_size",
                "stage 2 has no use for it",
                "Set zero_optimization.stage to 3, or remove it.",
                ((("replace", "zero_optimization.stage", 3),), False),
            ),
        ],
    ),
    ({"_version": "0.18", "zero_optimization": {"stage": 2, "mics_shard_size": 0}}, []),
    (
        {"_version": "0.18", "zero_optimization": {"stage": 2, "mics_shard_size": 3}},
        [
            Said(
                "DS247",
                "error",
                "differs",
                "zero_optimization.mics_shard_size",
                "stage 2 has no use for it",
                "Set zero_optimization.stage to 3, or remove it.",
                ((("replace", "zero_optimization.stage", 3),), False),
            ),
        ],
    ),
    (
        {"_version": "0.18", "zero_optimization": {"stage": 3, "mics_shard_size": 5}},
        [
            Said(
                "DS248",
                "error",
                "fails",
                "zero_optimization.mics_shard_size",
                "shards of 5 don't divide 4 GPUs",
                "Set it to one of 1, 2, 4.",
            ),
        ],
    ),
    ({"_version": "0.18", "zero_optimization": {"stage": 3, "mics_shard_size": 0}}, []),
    (
        {
            "_version": "0.18",
            "zero_optimization": {"stage": 3, "mics_shard_size": 1, "mics_hierarchical_params_gather": True},
        },
        [],
    ),
    (
        {
            "_version": "0.18",
            "zero_optimization": {"stage": 3, "mics_shard_size": 0, "mics_hierarchical_params_gather": True},
        },
        [
            Said(
                "DS249",
                "warning",
                "",
                "zero_optimization.mics_hierarchical_params_gather",
                "has no effect without mics_shard_size",
                "Set mics_shard_size, or remove it.",
                ((("remove", "zero_optimization.mics_hierarchical_params_gather", None),), True),
            ),
        ],
    ),
    ({"_version": "0.9", "zero_optimization": {"stage": 2}}, []),
    ({"zero_optimization": {"stage": 3, "mics_shard_size": 3}}, []),
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
