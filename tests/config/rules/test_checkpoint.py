"""Checkpoints: what exactly is said of a config, and that nothing is said of its right neighbour."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from dsrun.config.rules import checkpoint, run
from dsrun.config.rules.frame import Rule, example

OWN = {rule.id for rule in vars(checkpoint).values() if isinstance(rule, Rule)}


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
        {"checkpoint": {"parallel_write": {"pipeline_stage": "true"}}},
        [
            Said(
                "DS700",
                "error",
                "refused",
                "checkpoint.parallel_write.pipeline_stage",
                'is "true", a text, and DeepSpeed stops at it',
                "Write true or false.",
            ),
        ],
    ),
    (
        {"checkpoint": {"parallel_write": {"pipeline_stage": "yes"}}},
        [
            Said(
                "DS700",
                "error",
                "refused",
                "checkpoint.parallel_write.pipeline_stage",
                'is "yes", a text, and DeepSpeed stops at it',
                "Write true or false.",
            ),
        ],
    ),
    (
        {"checkpoint": {"writer": {"type": "python"}}},
        [
            Said(
                "DS701",
                "error",
                "fails",
                "checkpoint.writer.data_parallel",
                "must be given below stage 3: this is stage 0, and the start fails",
                'Set it to "replica"; "socket" or "machine" let fewer ranks write.',
                ((("add", "checkpoint.writer.data_parallel", "replica"),), False),
            ),
            Said(
                "DS709",
                "note",
                "",
                "checkpoint.writer",
                "needs CROSS_RANK and CROSS_SIZE, which the deepspeed launcher sets and torchrun doesn't",
                "Start with the deepspeed launcher, or set both: the node's number, and how many there are.",
            ),
        ],
    ),
    (
        {
            "checkpoint": {"writer": {"type": "mock", "data_parallel": None}},
            "zero_optimization": {"stage": 2},
        },
        [
            Said(
                "DS701",
                "error",
                "fails",
                "checkpoint.writer.data_parallel",
                "must be given below stage 3: this is stage 2, and the start fails",
                'Set it to "replica"; "socket" or "machine" let fewer ranks write.',
                ((("replace", "checkpoint.writer.data_parallel", "replica"),), False),
            ),
            Said(
                "DS703",
                "warning",
                "",
                "checkpoint.writer.type",
                '"mock" leaves every checkpoint empty: it is for measuring',
                'Set it to "python" or "fast".',
            ),
            Said(
                "DS709",
                "note",
                "",
                "checkpoint.writer",
                "needs CROSS_RANK and CROSS_SIZE, which the deepspeed launcher sets and torchrun doesn't",
                "Start with the deepspeed launcher, or set both: the node's number, and how many there are.",
            ),
        ],
    ),
    (
        {"checkpoint": {"writer": {}}, "_device": "cuda"},
        [
            Said(
                "DS701",
                "error",
                "fails",
                "checkpoint.writer.data_parallel",
                "must be given below stage 3: this is stage 0, and the start fails",
                'Set it to "replica"; "socket" or "machine" let fewer ranks write.',
                ((("add", "checkpoint.writer.data_parallel", "replica"),), False),
            ),
            Said(
                "DS709",
                "note",
                "",
                "checkpoint.writer",
                "needs CROSS_RANK and CROSS_SIZE, which the deepspeed launcher sets and torchrun doesn't",
                "Start with the deepspeed launcher, or set both: the node's number, and how many there are.",
            ),
        ],
    ),
    (
        {"_device": "cpu", "checkpoint": {"writer": {"type": "fast", "data_parallel": "replica"}}},
        [
            Said(
                "DS702",
                "error",
                "fails",
                "checkpoint.writer.type",
                '"fast", needs a GPU',
                'Set it to "python", or remove checkpoint.writer.',
                ((("replace", "checkpoint.writer.type", "python"),), False),
            ),
            Said(
                "DS709",
                "note",
                "",
                "checkpoint.writer",
                "needs CROSS_RANK and CROSS_SIZE, which the deepspeed launcher sets and torchrun doesn't",
                "Start with the deepspeed launcher, or set both: the node's number, and how many there are.",
            ),
        ],
    ),
    (
        {"_device": "cpu", "checkpoint": {"writer": {"data_parallel": "machine"}}},
        [
            Said(
                "DS702",
                "error",
                "fails",
                "checkpoint.writer.type",
                '"fast", the default, needs a GPU',
                'Set it to "python", or remove checkpoint.writer.',
                ((("add", "checkpoint.writer.type", "python"),), False),
            ),
            Said(
                "DS709",
                "note",
                "",
                "checkpoint.writer",
                "needs CROSS_RANK and CROSS_SIZE, which the deepspeed launcher sets and torchrun doesn't",
                "Start with the deepspeed launcher, or set both: the node's number, and how many there are.",
            ),
        ],
    ),
    (
        {"checkpoint": {"writer": {"type": "mock", "data_parallel": "replica"}}},
        [
            Said(
                "DS703",
                "warning",
                "",
                "checkpoint.writer.type",
                '"mock" leaves every checkpoint empty: it is for measuring',
                'Set it to "python" or "fast".',
            ),
            Said(
                "DS709",
                "note",
                "",
                "checkpoint.writer",
                "needs CROSS_RANK and CROSS_SIZE, which the deepspeed launcher sets and torchrun doesn't",
                "Start with the deepspeed launcher, or set both: the node's number, and how many there are.",
            ),
        ],
    ),
    (
        {
            "_device": "cpu",
            "checkpoint": {"writer": {"type": "python", "data_parallel": "replica", "decoupled": True}},
        },
        [
            Said(
                "DS704",
                "warning",
                "",
                "checkpoint.writer.decoupled",
                "fails on the CPU when the first checkpoint is saved",
                "Set it to false.",
                ((("replace", "checkpoint.writer.decoupled", False),), False),
            ),
            Said(
                "DS709",
                "note",
                "",
                "checkpoint.writer",
                "needs CROSS_RANK and CROSS_SIZE, which the deepspeed launcher sets and torchrun doesn't",
                "Start with the deepspeed launcher, or set both: the node's number, and how many there are.",
            ),
        ],
    ),
    (
        {"checkpoint": {"load_universal": True}},
        [
            Said(
                "DS705",
                "note",
                "",
                "checkpoint.load_universal",
                "resuming works from a universal checkpoint only",
                "Convert the checkpoint with ds_to_universal.py; set it back to false for the runs after that.",
            ),
        ],
    ),
    (
        {"_nodes": 1, "checkpoint": {"use_node_local_storage": True}},
        [
            Said(
                "DS706",
                "note",
                "",
                "checkpoint.use_node_local_storage",
                "changes nothing on one node",
                "Remove it.",
                ((("remove", "checkpoint.use_node_local_storage", None),), True),
            ),
        ],
    ),
    (
        {"_nodes": 2, "checkpoint": {"use_node_local_storage": True}},
        [
            Said(
                "DS706",
                "note",
                "",
                "checkpoint.use_node_local_storage",
                "leaves a part of each checkpoint on each of 2 nodes",
                "Save to a disk of the node, and resume on the same nodes; on a shared disk set it to false.",
            ),
        ],
    ),
    (
        {"datastates_ckpt": {"enabled": False}},
        [
            Said(
                "DS707",
                "error",
                "differs",
                "datastates_ckpt",
                "is on, though enabled is false: nothing reads enabled",
                "Remove it, or set it to false.",
                ((("replace", "datastates_ckpt", False),), True),
            ),
        ],
    ),
    (
        {"datastates_ckpt": {"enabled": False, "host_cache_size": 16}},
        [
            Said(
                "DS707",
                "error",
                "differs",
                "datastates_ckpt",
                "is on, though enabled is false: nothing reads enabled",
                "Remove it, or set it to false.",
                ((("replace", "datastates_ckpt", False),), True),
            ),
        ],
    ),
    (
        {"datastates_ckpt": {"host_cache_size": 16}},
        [
            Said(
                "DS708",
                "note",
                "",
                "datastates_ckpt",
                "needs the package datastates, or the start fails",
                "Install it from https://github.com/DataStates/datastates-llm on every node.",
            ),
        ],
    ),
    (
        {"datastates_ckpt": {}},
        [
            Said(
                "DS708",
                "note",
                "",
                "datastates_ckpt",
                "needs the package datastates, or the start fails",
                "Install it from https://github.com/DataStates/datastates-llm on every node.",
            ),
        ],
    ),
    (
        {"datastates_ckpt": True},
        [
            Said(
                "DS708",
                "note",
                "",
                "datastates_ckpt",
                "needs the package datastates, or the start fails",
                "Install it from https://github.com/DataStates/datastates-llm on every node.",
            ),
        ],
    ),
    (
        {"checkpoint": {"writer": {"type": "python", "data_parallel": "replica"}}},
        [
            Said(
                "DS709",
                "note",
                "",
                "checkpoint.writer",
                "needs CROSS_RANK and CROSS_SIZE, which the deepspeed launcher sets and torchrun doesn't",
                "Start with the deepspeed launcher, or set both: the node's number, and how many there are.",
            ),
        ],
    ),
    (
        {"_device": "cpu", "checkpoint": {"writer": {"type": "mock", "data_parallel": "replica"}}},
        [
            Said(
                "DS703",
                "warning",
                "",
                "checkpoint.writer.type",
                '"mock" leaves every checkpoint empty: it is for measuring',
                'Set it to "python" or "fast".',
            ),
            Said(
                "DS709",
                "note",
                "",
                "checkpoint.writer",
                "needs CROSS_RANK and CROSS_SIZE, which the deepspeed launcher sets and torchrun doesn't",
                "Start with the deepspeed launcher, or set both: the node's number, and how many there are.",
            ),
        ],
    ),
    (
        {"checkpoint": {"writer": {"type": "python"}}, "zero_optimization": {"stage": 1}},
        [
            Said(
                "DS701",
                "error",
                "fails",
                "checkpoint.writer.data_parallel",
                "must be given below stage 3: this is stage 1, and the start fails",
                'Set it to "replica"; "socket" or "machine" let fewer ranks write.',
                ((("add", "checkpoint.writer.data_parallel", "replica"),), False),
            ),
            Said(
                "DS709",
                "note",
                "",
                "checkpoint.writer",
                "needs CROSS_RANK and CROSS_SIZE, which the deepspeed launcher sets and torchrun doesn't",
                "Start with the deepspeed launcher, or set both: the node's number, and how many there are.",
            ),
        ],
    ),
    (
        {
            "datastates_ckpt": {"a": 1},
            "checkpoint": {"writer": {"type": "python", "data_parallel": "machine"}},
        },
        [
            Said(
                "DS708",
                "warning",
                "",
                "datastates_ckpt",
                "has no effect beside checkpoint.writer",
                "Remove one of the two.",
            ),
            Said(
                "DS709",
                "note",
                "",
                "checkpoint.writer",
                "needs CROSS_RANK and CROSS_SIZE, which the deepspeed launcher sets and torchrun doesn't",
                "Start with the deepspeed launcher, or set both: the node's number, and how many there are.",
            ),
        ],
    ),
    (
        {"_nodes": 3, "checkpoint": {"use_node_local_storage": True}},
        [
            Said(
                "DS706",
                "note",
                "",
                "checkpoint.use_node_local_storage",
                "leaves a part of each checkpoint on each of 3 nodes",
                "Save to a disk of the node, and resume on the same nodes; on a shared disk set it to false.",
            ),
        ],
    ),
    (
        {"checkpoint": {"writer": {"type": "python"}}, "tensor_parallel": {"autotp_size": 1}},
        [
            Said(
                "DS701",
                "error",
                "fails",
                "checkpoint.writer.data_parallel",
                "must be given below stage 3: this is stage 0, and the start fails",
                'Set it to "replica"; "socket" or "machine" let fewer ranks write.',
                ((("add", "checkpoint.writer.data_parallel", "replica"),), False),
            ),
            Said(
                "DS709",
                "note",
                "",
                "checkpoint.writer",
                "needs CROSS_RANK and CROSS_SIZE, which the deepspeed launcher sets and torchrun doesn't",
                "Start with the deepspeed launcher, or set both: the node's number, and how many there are.",
            ),
        ],
    ),
    ({"checkpoint": {"parallel_write": {"pipeline_stage": True}}}, []),
    ({"checkpoint": {"parallel_write": {"pipeline_stage": 0}}}, []),
    (
        {"checkpoint": {"writer": {"type": "python"}}, "zero_optimization": {"stage": 3}},
        [
            Said(
                "DS709",
                "note",
                "",
                "checkpoint.writer",
                "needs CROSS_RANK and CROSS_SIZE, which the deepspeed launcher sets and torchrun doesn't",
                "Start with the deepspeed launcher, or set both: the node's number, and how many there are.",
            ),
        ],
    ),
    ({"checkpoint": {"writer": None}}, []),
    (
        {"checkpoint": {"writer": {"type": "python"}}, "tensor_parallel": {"autotp_size": 2}},
        [
            Said(
                "DS709",
                "note",
                "",
                "checkpoint.writer",
                "needs CROSS_RANK and CROSS_SIZE, which the deepspeed launcher sets and torchrun doesn't",
                "Start with the deepspeed launcher, or set both: the node's number, and how many there are.",
            ),
        ],
    ),
    (
        {"_device": "cuda", "checkpoint": {"writer": {"type": "fast", "data_parallel": "replica"}}},
        [
            Said(
                "DS709",
                "note",
                "",
                "checkpoint.writer",
                "needs CROSS_RANK and CROSS_SIZE, which the deepspeed launcher sets and torchrun doesn't",
                "Start with the deepspeed launcher, or set both: the node's number, and how many there are.",
            ),
        ],
    ),
    (
        {"checkpoint": {"writer": {"type": "fast", "data_parallel": "replica"}}},
        [
            Said(
                "DS709",
                "note",
                "",
                "checkpoint.writer",
                "needs CROSS_RANK and CROSS_SIZE, which the deepspeed launcher sets and torchrun doesn't",
                "Start with the deepspeed launcher, or set both: the node's number, and how many there are.",
            ),
        ],
    ),
    (
        {"_device": "cpu", "checkpoint": {"writer": {"type": "python", "data_parallel": "replica"}}},
        [
            Said(
                "DS709",
                "note",
                "",
                "checkpoint.writer",
                "needs CROSS_RANK and CROSS_SIZE, which the deepspeed launcher sets and torchrun doesn't",
                "Start with the deepspeed launcher, or set both: the node's number, and how many there are.",
            ),
        ],
    ),
    ({"_device": "cpu", "checkpoint": {"tag_validation": "Warn"}}, []),
    (
        {
            "_device": "cuda",
            "checkpoint": {"writer": {"type": "python", "data_parallel": "replica", "decoupled": True}},
        },
        [
            Said(
                "DS709",
                "note",
                "",
                "checkpoint.writer",
                "needs CROSS_RANK and CROSS_SIZE, which the deepspeed launcher sets and torchrun doesn't",
                "Start with the deepspeed launcher, or set both: the node's number, and how many there are.",
            ),
        ],
    ),
    (
        {
            "_device": "cpu",
            "checkpoint": {"writer": {"type": "python", "data_parallel": "replica", "decoupled": False}},
        },
        [
            Said(
                "DS709",
                "note",
                "",
                "checkpoint.writer",
                "needs CROSS_RANK and CROSS_SIZE, which the deepspeed launcher sets and torchrun doesn't",
                "Start with the deepspeed launcher, or set both: the node's number, and how many there are.",
            ),
        ],
    ),
    ({"checkpoint": {"load_universal": False}}, []),
    ({"_nodes": 2, "checkpoint": {"use_node_local_storage": False}}, []),
    ({"checkpoint": {"use_node_local_storage": True}}, []),
    ({"datastates_ckpt": False}, []),
    ({"steps_per_print": 1}, []),
    ({"checkpoint": {"tag_validation": "Fail"}}, []),
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
