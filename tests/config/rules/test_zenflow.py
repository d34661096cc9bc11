"""ZenFlow: what exactly is said of a config, and that nothing is said of its right neighbour."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from dsrun.config.edits import apply
from dsrun.config.rules import run, zenflow
from dsrun.config.rules.frame import Fix, Rule, example

OWN = {rule.id: rule for rule in vars(zenflow).values() if isinstance(rule, Rule)}


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
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
        },
        [
            Said(
                "DS251",
                "error",
                "fails",
                "zero_optimization.zenflow",
                "needs optimizer offload, and there is none",
                'Add offload_optimizer: {"device": "cpu"}, or remove zenflow.',
                ((("add", "zero_optimization.offload_optimizer.device", "cpu"),), False),
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 1,
                "offload_optimizer": {"device": "none"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
        },
        [
            Said(
                "DS251",
                "error",
                "fails",
                "zero_optimization.zenflow",
                "needs optimizer offload, and there is none",
                'Add offload_optimizer: {"device": "cpu"}, or remove zenflow.',
                ((("replace", "zero_optimization.offload_optimizer.device", "cpu"),), False),
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 3,
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
        },
        [
            Said(
                "DS251",
                "error",
                "fails",
                "zero_optimization.zenflow",
                "needs optimizer offload, and there is none",
                'Add offload_optimizer: {"device": "cpu"}, or remove zenflow.',
                ((("add", "zero_optimization.offload_optimizer.device", "cpu"),), False),
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
        },
        [],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 1,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
        },
        [],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
        },
        [],
    ),
    ({"zero_optimization": {"stage": 2, "zenflow": None}}, []),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 0,
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
        },
        [
            Said(
                "DS252",
                "error",
                "fails",
                "zero_optimization.zenflow",
                "needs ZeRO, and the stage is 0",
                "Set zero_optimization.stage to 2, or remove zenflow.",
                ((("replace", "zero_optimization.stage", 2),), False),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 0, "zenflow": None}}, []),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
            "_device": "cpu",
        },
        [
            Said(
                "DS253",
                "error",
                "fails",
                "zero_optimization.zenflow",
                "needs NVIDIA GPUs at stage 3, and there are none",
                "Set zero_optimization.stage to 2, or remove zenflow.",
                ((("replace", "zero_optimization.stage", 2),), False),
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
            "_device": "cuda",
        },
        [],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
            "_device": "cpu",
        },
        [],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "update_interval": 2},
            },
        },
        [
            Said(
                "DS254",
                "error",
                "fails",
                "zero_optimization.zenflow.select_interval",
                "is missing, and select_strategy step needs a number",
                "Set it to a number of steps, such as 4.",
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "epoch", "update_interval": 2},
            },
        },
        [
            Said(
                "DS254",
                "error",
                "fails",
                "zero_optimization.zenflow.select_interval",
                "is missing, and select_strategy epoch needs a number",
                "Set it to a number of epochs, such as 1.",
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_interval": 4, "update_interval": 2},
            },
        },
        [
            Said(
                "DS254",
                "error",
                "fails",
                "zero_optimization.zenflow.select_interval",
                "is 4, and the strategy is auto, which sets its own",
                "Remove it, or set select_strategy to step or epoch.",
                ((("add", "zero_optimization.zenflow.select_strategy", "step"),), False),
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 1,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "auto", "select_interval": 3, "update_interval": 1},
            },
        },
        [
            Said(
                "DS254",
                "error",
                "fails",
                "zero_optimization.zenflow.select_interval",
                "is 3, and the strategy is auto, which sets its own",
                "Remove it, or set select_strategy to step or epoch.",
                ((("replace", "zero_optimization.zenflow.select_strategy", "step"),), False),
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "epoch", "select_interval": 1, "update_interval": 2},
            },
        },
        [],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"update_interval": 2},
            },
        },
        [],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 2, "update_interval": 4},
            },
        },
        [
            Said(
                "DS255",
                "error",
                "fails",
                "zero_optimization.zenflow.select_interval",
                "2 is below update_interval, 4",
                "Set it to 4 or more.",
                ((("replace", "zero_optimization.zenflow.select_interval", 4),), False),
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 1, "update_interval": 2},
            },
        },
        [
            Said(
                "DS255",
                "error",
                "fails",
                "zero_optimization.zenflow.select_interval",
                "1 is below update_interval, 2",
                "Set it to 2 or more.",
                ((("replace", "zero_optimization.zenflow.select_interval", 2),), False),
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 4},
            },
        },
        [],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "epoch", "select_interval": 1, "update_interval": 4},
            },
        },
        [],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4},
            },
        },
        [
            Said(
                "DS256",
                "error",
                "differs",
                "zero_optimization.zenflow.update_interval",
                "is auto, which divides the loss by 0: NaN from the second step on",
                "Set it to a number of steps, such as 4.",
                ((("add", "zero_optimization.zenflow.update_interval", 4),), False),
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}, "zenflow": {}},
        },
        [
            Said(
                "DS256",
                "error",
                "differs",
                "zero_optimization.zenflow.update_interval",
                "is auto, which divides the loss by 0: NaN from the second step on",
                "Set it to a number of steps, such as 4.",
                ((("add", "zero_optimization.zenflow.update_interval", 4),), False),
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 1},
            },
        },
        [],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {
                    "select_strategy": "step",
                    "select_interval": 4,
                    "update_interval": 2,
                    "offload": True,
                },
            },
        },
        [
            Said(
                "DS257",
                "error",
                "fails",
                "zero_optimization.zenflow.offload",
                "needs overlap_comm, which is off",
                "Set overlap_comm to true, or zenflow.offload to false.",
                ((("add", "zero_optimization.overlap_comm", True),), False),
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {
                    "select_strategy": "step",
                    "select_interval": 4,
                    "update_interval": 2,
                    "offload": True,
                },
                "overlap_comm": False,
            },
        },
        [
            Said(
                "DS257",
                "error",
                "fails",
                "zero_optimization.zenflow.offload",
                "needs overlap_comm, which is off",
                "Set overlap_comm to true, or zenflow.offload to false.",
                ((("replace", "zero_optimization.overlap_comm", True),), False),
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {
                    "select_strategy": "step",
                    "select_interval": 4,
                    "update_interval": 2,
                    "offload": True,
                },
                "overlap_comm": True,
            },
        },
        [],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {
                    "select_strategy": "step",
                    "select_interval": 4,
                    "update_interval": 2,
                    "offload": True,
                },
            },
        },
        [],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {
                    "select_strategy": "step",
                    "select_interval": 4,
                    "update_interval": 2,
                    "offload": False,
                },
            },
        },
        [],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
            "gradient_accumulation_steps": 3,
        },
        [
            Said(
                "DS258",
                "error",
                "differs",
                "gradient_accumulation_steps",
                "is 3, and zenflow.update_interval makes it 2",
                "Set both to the same number, or gradient_accumulation_steps to 1.",
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 1},
            },
            "gradient_accumulation_steps": 2,
        },
        [
            Said(
                "DS258",
                "error",
                "differs",
                "gradient_accumulation_steps",
                "is 2, and zenflow.update_interval makes it 1",
                "Set both to the same number, or gradient_accumulation_steps to 1.",
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
            "_for": "hf",
            "_trainer": {"gradient_accumulation_steps": 8},
            "gradient_accumulation_steps": "auto",
        },
        [
            Said(
                "DS258",
                "error",
                "differs",
                "gradient_accumulation_steps",
                "is 8, and zenflow.update_interval makes it 2",
                "Set both to the same number, or gradient_accumulation_steps to 1.",
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
            "gradient_accumulation_steps": 2,
        },
        [],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
            "gradient_accumulation_steps": 1,
        },
        [],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
            "_for": "hf",
            "_trainer": {"gradient_accumulation_steps": 2},
            "gradient_accumulation_steps": "auto",
        },
        [],
    ),
    (
        {
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            }
        },
        [
            Said(
                "DS259",
                "error",
                "fails",
                "zero_optimization.zenflow",
                "needs the optimizer in the config, and there is none",
                'Set optimizer to {"type": "AdamW", "params": {...}} with its learning rate.',
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
        },
        [
            Said(
                "DS259",
                "error",
                "fails",
                "optimizer",
                "has no params, which zenflow needs",
                'Set optimizer to {"type": "AdamW", "params": {...}} with its learning rate.',
                ((("add", "optimizer.params", {}),), False),
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "Adagrad", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 1,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
        },
        [
            Said(
                "DS259",
                "error",
                "fails",
                "optimizer.type",
                "zenflow works with Adam and AdamW, not with Adagrad",
                'Set optimizer to {"type": "AdamW", "params": {...}} with its learning rate.',
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "Adam", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
        },
        [],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            }
        },
        [],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 0,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 1, "update_interval": 2},
            },
        },
        [
            Said(
                "DS252",
                "error",
                "fails",
                "zero_optimization.zenflow",
                "needs ZeRO, and the stage is 0",
                "Set zero_optimization.stage to 2, or remove zenflow.",
                ((("replace", "zero_optimization.stage", 2),), False),
            ),
            Said(
                "DS255",
                "error",
                "fails",
                "zero_optimization.zenflow.select_interval",
                "1 is below update_interval, 2",
                "Set it to 2 or more.",
                ((("replace", "zero_optimization.zenflow.select_interval", 2),), False),
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "auto"},
                "zenflow": {"update_interval": 1},
            },
            "_for": "hf",
        },
        [],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "nvme"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
        },
        [],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4},
            },
        },
        [],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {
                    "select_strategy": "step",
                    "select_interval": 4,
                    "update_interval": 2,
                    "offload": True,
                },
                "overlap_comm": False,
            },
        },
        [
            Said(
                "DS257",
                "error",
                "fails",
                "zero_optimization.zenflow.offload",
                "needs overlap_comm, which is off",
                "Set overlap_comm to true, or zenflow.offload to false.",
                ((("replace", "zero_optimization.overlap_comm", True),), False),
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 0,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {
                    "select_strategy": "step",
                    "select_interval": 4,
                    "update_interval": 2,
                    "offload": True,
                },
            },
        },
        [
            Said(
                "DS252",
                "error",
                "fails",
                "zero_optimization.zenflow",
                "needs ZeRO, and the stage is 0",
                "Set zero_optimization.stage to 2, or remove zenflow.",
                ((("replace", "zero_optimization.stage", 2),), False),
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 1, "update_interval": 1},
            },
        },
        [],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 3, "update_interval": 4},
            },
        },
        [
            Said(
                "DS255",
                "error",
                "fails",
                "zero_optimization.zenflow.select_interval",
                "3 is below update_interval, 4",
                "Set it to 4 or more.",
                ((("replace", "zero_optimization.zenflow.select_interval", 4),), False),
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": "auto", "update_interval": 2},
            },
        },
        [
            Said(
                "DS254",
                "error",
                "fails",
                "zero_optimization.zenflow.select_interval",
                "is missing, and select_strategy step needs a number",
                "Set it to a number of steps, such as 4.",
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 0,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
            "gradient_accumulation_steps": 3,
        },
        [
            Said(
                "DS252",
                "error",
                "fails",
                "zero_optimization.zenflow",
                "needs ZeRO, and the stage is 0",
                "Set zero_optimization.stage to 2, or remove zenflow.",
                ((("replace", "zero_optimization.stage", 2),), False),
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
            "gradient_accumulation_steps": 3,
        },
        [
            Said(
                "DS258",
                "error",
                "differs",
                "gradient_accumulation_steps",
                "is 3, and zenflow.update_interval makes it 2",
                "Set both to the same number, or gradient_accumulation_steps to 1.",
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4},
            },
            "gradient_accumulation_steps": 3,
        },
        [
            Said(
                "DS256",
                "error",
                "differs",
                "zero_optimization.zenflow.update_interval",
                "is auto, which divides the loss by 0: NaN from the second step on",
                "Set it to a number of steps, such as 4.",
                ((("add", "zero_optimization.zenflow.update_interval", 4),), False),
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "Lion", "params": {"lr": 1}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
        },
        [
            Said(
                "DS259",
                "error",
                "fails",
                "optimizer.type",
                "zenflow works with Adam and AdamW, not with Lion",
                'Set optimizer to {"type": "AdamW", "params": {...}} with its learning rate.',
            ),
        ],
    ),
    (
        {
            "optimizer": {"params": {"lr": 1}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
        },
        [],
    ),
    (
        {
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
            "_for": "hf",
        },
        [
            Said(
                "DS259",
                "error",
                "fails",
                "optimizer",
                "has no params, which zenflow needs",
                'Set optimizer to {"type": "AdamW", "params": {...}} with its learning rate.',
                ((("add", "optimizer.params", {}),), False),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
            "_for": "hf",
        },
        [
            Said(
                "DS259",
                "error",
                "fails",
                "zero_optimization.zenflow",
                "needs the optimizer in the config, and there is none",
                'Set optimizer to {"type": "AdamW", "params": {...}} with its learning rate.',
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
        },
        [],
    ),
    (
        {
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {
                "stage": 0,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            },
        },
        [
            Said(
                "DS252",
                "error",
                "fails",
                "zero_optimization.zenflow",
                "needs ZeRO, and the stage is 0",
                "Set zero_optimization.stage to 2, or remove zenflow.",
                ((("replace", "zero_optimization.stage", 2),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "cpu_offload": True, "zenflow": {"update_interval": 1}}},
        [
            Said(
                "DS259",
                "error",
                "fails",
                "zero_optimization.zenflow",
                "needs the optimizer in the config, and there is none",
                'Set optimizer to {"type": "AdamW", "params": {...}} with its learning rate.',
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "zenflow": {}},
            "_device": "cpu",
        },
        [
            Said(
                "DS253",
                "error",
                "fails",
                "zero_optimization.zenflow",
                "needs NVIDIA GPUs at stage 3, and there are none",
                "Set zero_optimization.stage to 2, or remove zenflow.",
                ((("replace", "zero_optimization.stage", 2),), False),
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
