"""The rate at the end of the warm-up."""

from __future__ import annotations

import pytest

from dsrun.config.rules import Context
from dsrun.config.rules.frame import example
from dsrun.config.rules.optimizer import learning_rate


def built(name, lr=1e-3, **params):
    optimizer = {"type": "AdamW", "params": {"lr": lr}}
    return {"optimizer": optimizer, "scheduler": {"type": name, "params": params}}


@pytest.mark.parametrize(
    ("version", "name", "params", "expected"),
    [
        ("0.19", "WarmupLR", {}, 3e-5),
        ("0.17", "WarmupLR", {}, 3e-5),
        ("0.16", "WarmupLR", {}, 0.001),
        ("0.19", "WarmupDecayLR", {}, 0.001),
        ("0.19", "WarmupDecayLR", {"warmup_max_lr": None}, 3e-5),
        ("0.19", "WarmupDecayLR", {"warmup_max_lr": 0.5}, 0.5),
        ("0.19", "WarmupLR", {"warmup_max_lr": "auto"}, None),
    ],
)
def test_peak(version, name, params, expected):
    config, setting, _ = example({"_version": version, **built(name, 3e-5, **params)})
    assert learning_rate.peak(Context(config, setting)) == expected
