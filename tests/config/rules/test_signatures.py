"""Which optimizer is made of a config, without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dsrun.config.rules import Context
from dsrun.config.rules.optimizer import signatures

CPU = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


def made(name, **params):
    return {"optimizer": {"type": name, "params": params}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (made("AdamW"), "FusedAdam"),
        (made("ADAM"), "FusedAdam"),
        ({**CPU, **made("AdamW")}, "DeepSpeedCPUAdam"),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}, **made("adam")},
            "DeepSpeedCPUAdam",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}}, **made("adam")},
            "FusedAdam",
        ),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}, **made("Adam")}, "DeepSpeedCPUAdam"),
        (
            {
                "zero_optimization": {
                    "stage": 2,
                    "offload_optimizer": {"device": "cpu"},
                    "zenflow": {"topk_ratio": 0.1},
                },
                **made("Adam"),
            },
            "ZenFlowCPUAdam",
        ),
        (made("AdamW", torch_adam=True), "torch.optim.AdamW"),
        (made("AdamW", torch_adam=True, adam_w_mode=False), "torch.optim.AdamW"),
        (made("Adam", torch_adam=True), "torch.optim.AdamW"),
        (made("Adam", torch_adam=True, adam_w_mode=False), "torch.optim.Adam"),
        ({**CPU, **made("Adam", torch_adam=True)}, "torch.optim.AdamW"),
        (made("Adagrad"), "torch.optim.Adagrad"),
        ({**CPU, **made("adagrad")}, "DeepSpeedCPUAdagrad"),
        (made("Lion"), "FusedLion"),
        ({**CPU, **made("Lion")}, "DeepSpeedCPULion"),
        (made("lamb"), "FusedLamb"),
        (made("Muon"), "MuonWithAuxAdam"),
        (made("MuAdam"), None),
        (made("SGD"), "torch.optim.SGD"),
        (made("sgd"), None),
        ({}, None),
    ],
)
def test_which_class_is_made(config, expected):
    assert signatures.optimizer_class(Context(config)) == expected


def test_data_are_read_without_torch():
    code = "import sys; from dsrun.config.rules import run; run({'optimizer': {'type': 'SGD'}})"
    code += "; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
