"""What is wrong in one way is said once: neither the schema nor another rule has an error to add."""

from __future__ import annotations

import pytest

from dsrun.config.rules import run
from dsrun.config.rules.frame import example


def warmup(**params):
    scheduler = {"type": "WarmupLR", "params": params}
    return {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "scheduler": scheduler}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"optimizer": {"params": {"lr": 1e-3}}}, ["DS404 optimizer"]),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": -1, "betas": [1.0, 0.99], "eps": -1}}},
            [f"DS407 optimizer.params.{key}" for key in ("lr", "betas.0", "eps")],
        ),
        (warmup(warmup_num_steps=0), ["DS438 scheduler.params.warmup_num_steps"]),
        (warmup(warmup_type="cubic"), ["DS440 scheduler.params.warmup_type"]),
        ({"scheduler": {"params": {}}}, ["DS442 scheduler"]),
        *(
            ({"fp16": {"enabled": True, "loss_scale": value}}, [f"{rule} fp16.loss_scale"])
            for value, rule in ((-1, "DS310"), (True, "DS002"), ("inf", "DS002"), ("", "DS002"))
        ),
        *(
            ({"fp16": {"enabled": True, "loss_scale": value}}, ["DS002 fp16.loss_scale"])
            for value in (None, [1])
        ),
    ],
)
def test_one_error(given, expected):
    errors = [finding for finding in run(*example(given)) if finding.severity == "error"]
    assert [f"{finding.rule} {finding.path}" for finding in errors] == expected
