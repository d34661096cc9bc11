"""Which optimizer is made of a config, and that what is known of the classes is current."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dsrun.config.rules import Context, signatures
from dsrun.config.schemas import signatures as made_by

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


def test_the_data_are_current(capsys):
    """optimizers.json is what schemas/signatures.py makes, with the versions that it was made from."""
    pytest.importorskip("deepspeed")
    pytest.importorskip("torch")
    if made_by.made_from() != signatures.data()["made_from"]:
        pytest.skip("made from other versions")
    assert made_by.main(["--check"]) == 0, capsys.readouterr().out


def test_stale_data_are_found(tmp_path, monkeypatch, capsys):
    pytest.importorskip("deepspeed")
    stale = tmp_path / "optimizers.json"
    stale.write_text("{}", encoding="utf-8")
    monkeypatch.setattr(made_by, "FILE", stale)
    assert made_by.main(["--check"]) == 1
    assert made_by.main([]) == 0
    assert made_by.main(["--check"]) == 0
    assert "-{}" in capsys.readouterr().out


def test_data_are_read_without_torch():
    code = "import sys; from dsrun.config.rules import run; run({'optimizer': {'type': 'SGD'}})"
    code += "; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
