"""The precision that the model gets."""

from __future__ import annotations

import pytest

from dsrun.config.rules import Context, Setting
from dsrun.config.rules.precision import modes

ON = {"fp16": {"enabled": True}}


@pytest.mark.parametrize(
    ("config", "target", "trainer", "expected"),
    [
        ({}, "deepspeed", None, "fp32"),
        ({"bf16": {"enabled": True}}, "deepspeed", None, "bf16"),
        ({"bfloat16": {"enabled": True}}, "deepspeed", None, "bf16"),
        (ON, "deepspeed", None, "fp16"),
        ({"bf16": {"enabled": "auto"}}, "deepspeed", None, None),
        ({}, "hf", None, None),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": False}}, "hf", None, "fp32"),
        ({"bf16": {"enabled": False}, "fp16": {}}, "hf", {"fp16": True}, "fp32"),
        ({}, "hf", {"bf16": True}, "bf16"),
        ({}, "hf", {"fp16": True}, "fp16"),
        ({}, "hf", {"fp16_full_eval": True}, "fp16"),
        ({}, "hf", {"bf16": False}, "fp32"),
        ({"bf16": {"enabled": "auto"}}, "hf", {"bf16": True}, "bf16"),
        ({"bf16": {"enabled": "auto"}}, "accelerate", None, None),
        ({"bf16": {"enabled": False}}, "hf", {"bf16": True}, "fp32"),
        (ON, "hf", {"bf16": True}, "fp16"),
    ],
)
def test_mode(config, target, trainer, expected):
    assert modes.mode(Context(config, Setting(target, trainer=trainer))) == expected
