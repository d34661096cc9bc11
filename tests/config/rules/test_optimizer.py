# ruff: noqa: E501 - texts and paths stand here as they are shown
"""The optimizer: the exact words, which class is made, and both sides of each limit."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dsrun.config.edits import apply
from dsrun.config.rules import Context, optimizer, run, signatures
from dsrun.config.rules.frame import Rule, example
from dsrun.config.schemas import signatures as made_by

RULES = {rule.id: rule for rule in vars(optimizer).values() if isinstance(rule, Rule)}

SAID = {
    "DS401": [
        "error fails optimizer.params.max_grad_norm: is 0: DeepSpeed refuses the key here, whatever its value | Clip with the top-level gradient_clipping. | unsafe move optimizer.params.max_grad_norm 'gradient_clipping'",
        "error fails optimizer.params.max_grad_norm: is 1.0: DeepSpeed refuses the key here, whatever its value | Clip with the top-level gradient_clipping. | unsafe move optimizer.params.max_grad_norm 'gradient_clipping'",
    ],
    "DS402": [
        "error fails optimizer.type: OneBitAdam was removed from DeepSpeed | Take Adam; the 1-bit optimizers are in DeepSpeed up to 0.18. | unsafe replace optimizer.type 'Adam'",
        "error fails optimizer.type: zerooneadam was removed from DeepSpeed | Take Adam; the 1-bit optimizers are in DeepSpeed up to 0.18. | unsafe replace optimizer.type 'Adam'",
        "error fails optimizer.type: OneBitLamb was removed from DeepSpeed | Take Lamb; the 1-bit optimizers are in DeepSpeed up to 0.18. | unsafe replace optimizer.type 'Lamb'",
    ],
    "DS403": [
        "error fails optimizer.type: sgd is neither an optimizer of DeepSpeed nor a class of torch.optim | Write SGD; DeepSpeed's own are Adagrad, Adam, AdamW, Lamb, MuAdam, MuAdamW, MuSGD, Lion, Muon. | safe replace optimizer.type 'SGD'",
        "error fails optimizer.type: AdamWW is neither an optimizer of DeepSpeed nor a class of torch.optim | Write AdamW; DeepSpeed's own are Adagrad, Adam, AdamW, Lamb, MuAdam, MuAdamW, MuSGD, Lion, Muon. | unsafe replace optimizer.type 'AdamW'",
        "error fails optimizer.type: FusedAdam is neither an optimizer of DeepSpeed nor a class of torch.optim | Write Adam; DeepSpeed's own are Adagrad, Adam, AdamW, Lamb, MuAdam, MuAdamW, MuSGD, Lion, Muon. | unsafe replace optimizer.type 'Adam'",
        "error fails optimizer.type: adamw_torch_fused is neither an optimizer of DeepSpeed nor a class of torch.optim | Write AdamW; DeepSpeed's own are Adagrad, Adam, AdamW, Lamb, MuAdam, MuAdamW, MuSGD, Lion, Muon. | unsafe replace optimizer.type 'AdamW'",
        "error fails optimizer.type: zzz is neither an optimizer of DeepSpeed nor a class of torch.optim | Write AdamW; DeepSpeed's own are Adagrad, Adam, AdamW, Lamb, MuAdam, MuAdamW, MuSGD, Lion, Muon.",
        "error fails optimizer.type: Lion is neither an optimizer of DeepSpeed nor a class of torch.optim | Write AdamW; DeepSpeed's own are Adagrad, Adam, AdamW, Lamb, OneBitAdam, OneBitLamb, ZeroOneAdam, MuAdam, MuAdamW, MuSGD.",
        "error fails optimizer.type: Optimizer is neither an optimizer of DeepSpeed nor a class of torch.optim | Write AdamW; DeepSpeed's own are Adagrad, Adam, AdamW, Lamb, MuAdam, MuAdamW, MuSGD, Lion, Muon.",
    ],
    "DS404": [
        "error fails optimizer: has no type, and means no optimizer at all | Set optimizer.type to AdamW, or remove the section if the code brings an optimizer. | unsafe add optimizer.type 'AdamW'",
    ],
    "DS405": [
        "error fails optimizer.params.learning_rate: FusedAdam takes no such argument | Did you mean lr? It takes adam_w_mode, amsgrad, betas, bias_correction, eps, fp32_optimizer_states, lr, set_grad_none, torch_adam, weight_decay. | unsafe rename optimizer.params.learning_rate 'lr'",
        "error fails optimizer.params.bias_correction: torch.optim.AdamW takes no such argument | It takes adam_w_mode, amsgrad, betas, capturable, differentiable, eps, foreach, fp32_optimizer_states, fused, lr, maximize, torch_adam, weight_decay. | unsafe remove optimizer.params.bias_correction",
        "error fails optimizer.params.set_grad_none: DeepSpeedCPUAdam takes no such argument | It takes adam_w_mode, amsgrad, betas, bias_correction, eps, fp32_optimizer_states, lr, torch_adam, weight_decay. | unsafe remove optimizer.params.set_grad_none",
        "error fails optimizer.params.foreach: FusedAdam takes no such argument | It takes adam_w_mode, amsgrad, betas, bias_correction, eps, fp32_optimizer_states, lr, set_grad_none, torch_adam, weight_decay. | unsafe remove optimizer.params.foreach",
        "error fails optimizer.params.betas: torch.optim.Adagrad takes no such argument | It takes differentiable, eps, foreach, fused, initial_accumulator_value, lr, lr_decay, maximize, weight_decay. | unsafe remove optimizer.params.betas",
        "error fails optimizer.params.eps: FusedLion takes no such argument | It takes betas, lr, set_grad_none, weight_decay. | unsafe remove optimizer.params.eps",
        "error fails optimizer.params.zzz: torch.optim.SGD takes no such argument | It takes dampening, differentiable, foreach, fused, lr, maximize, momentum, nesterov, weight_decay. | unsafe remove optimizer.params.zzz",
        "error differs optimizer.params.nesterov: Muon ignores it | It takes adam_lr, adam_w_mode, betas, eps, foreach, fp32_optimizer_states, lr, momentum, muon_lr, ns_method, per_head_muon, torch_adam, weight_decay. | unsafe remove optimizer.params.nesterov",
    ],
    "DS406": [
        'error fails optimizer.params.amsgrad: FusedAdam has no AMSGrad | Remove it, or add "torch_adam": true for PyTorch\'s Adam. | unsafe remove optimizer.params.amsgrad',
        'error fails optimizer.params.amsgrad: DeepSpeedCPUAdam has no AMSGrad | Remove it, or add "torch_adam": true for PyTorch\'s Adam. | unsafe remove optimizer.params.amsgrad',
        "error fails optimizer.params.amsgrad: FusedLamb has no AMSGrad | Remove it. | unsafe remove optimizer.params.amsgrad",
    ],
    "DS407": [
        "error differs optimizer.params.lr: is -0.001, out of range: FusedAdam computes with it all the same | Write a number, at least 0.",
        "error differs optimizer.params.betas.1: is 1, out of range: FusedAdam computes with it all the same | Write a number, at least 0, less than 1.",
        "error differs optimizer.params.weight_decay: is -0.1, out of range: FusedAdam computes with it all the same | Write a number, at least 0.",
        "error fails optimizer.params.lr: is -0.001, out of range: torch.optim.AdamW stops at it | Write a number, at least 0.",
        "error fails optimizer.params.betas.1: is 1.5, out of range: torch.optim.RAdam stops at it | Write a number, at least 0, less than 1.",
        "error differs optimizer.params.momentum: is 1, out of range: torch.optim.SGD computes with it all the same | Write a number, at least 0, less than 1.",
    ],
    "DS408": [
        "warning optimizer.params.lr: is 1.5: a step of Adam changes each weight by about that much | Usual are 1e-5 to 1e-3.",
        "warning optimizer.params.lr: is 0, and no scheduler changes it: nothing is learnt | Write a rate, such as 1e-4.",
    ],
    "DS409": [
        "warning optimizer.params.eps: is 0: a weight without gradient becomes NaN | Write 1e-08, the default. | unsafe replace optimizer.params.eps 1e-08",
    ],
    "DS410": [
        "warning optimizer.params.torch_adam: the step runs in torch.optim.AdamW on the CPU, which DeepSpeed has no fast version of | Remove torch_adam: AdamW is then DeepSpeedCPUAdam. | unsafe remove optimizer.params.torch_adam",
        "warning optimizer.type: the step runs in torch.optim.SGD on the CPU, which DeepSpeed has no fast version of | Take AdamW, Adagrad or Lion, which have a version for the CPU, or don't offload.",
        "warning optimizer.type: the step runs in FusedLamb on the CPU, which DeepSpeed has no fast version of | Take AdamW, Adagrad or Lion, which have a version for the CPU, or don't offload.",
    ],
    "DS411": [
        "error fails optimizer.type: FusedLion needs a GPU | Offload the optimizer to the CPU, which has a Lion of its own.",
        "error fails optimizer.type: FusedLamb needs a GPU | Take AdamW.",
    ],
    "DS412": [
        "error fails fp16.loss_scale: is 128, and Lamb wants a loss scale that adapts itself | Write 0, or take another optimizer. | unsafe replace fp16.loss_scale 0",
        "error fails fp16.loss_scale: is 1, and Lamb wants a loss scale that adapts itself | Write 0, or take another optimizer. | unsafe replace fp16.loss_scale 0",
    ],
    "DS413": [
        "warning optimizer.type: MuAdam comes from the package mup, which DeepSpeed doesn't bring | pip install mup, and give the model its base shapes with mup.set_base_shapes.",
        "warning optimizer.type: MuAdamW comes from the package mup, which DeepSpeed doesn't bring | pip install mup, and give the model its base shapes with mup.set_base_shapes.",
        "warning optimizer.type: MuSGD comes from the package mup, which DeepSpeed doesn't bring | pip install mup, and give the model its base shapes with mup.set_base_shapes.",
    ],
    "DS414": [
        "error fails zero_optimization.reduce_scatter: is true, by default, and Muon can't have it at stage 3 | Set zero_optimization.reduce_scatter to false, or take stage 2. | unsafe add zero_optimization.reduce_scatter False",
        "error fails zero_optimization.reduce_scatter: is true, and Muon can't have it at stage 3 | Set zero_optimization.reduce_scatter to false, or take stage 2. | unsafe replace zero_optimization.reduce_scatter False",
    ],
    "DS415": [
        "error fails optimizer.type: torch.optim.SGD is not among the optimizers that ZeRO was tested with, and stops it | Set zero_allow_untested_optimizer to true, take AdamW, or set zero_optimization.stage to 0. | unsafe add zero_allow_untested_optimizer True",
        "error fails optimizer.type: FusedLamb is not among the optimizers that ZeRO was tested with, and stops it | Set zero_allow_untested_optimizer to true, take AdamW, or set zero_optimization.stage to 0. | unsafe replace zero_allow_untested_optimizer True",
        "error fails optimizer.type: torch.optim.RMSprop is not among the optimizers that ZeRO was tested with, and stops it | Set zero_allow_untested_optimizer to true, take AdamW, or set zero_optimization.stage to 0. | unsafe add zero_allow_untested_optimizer True",
    ],
    "DS416": [
        "error fails optimizer.type: torch.optim.LBFGS needs a closure at each step, and DeepSpeed gives none | Take AdamW.",
        "error fails optimizer.type: torch.optim.SparseAdam takes sparse gradients only, and DeepSpeed's are dense | Take AdamW.",
    ],
    "DS417": [
        'note optimizer.type: is Adam, which in DeepSpeed is AdamW: weight_decay is taken off the weights | Write AdamW for that, or add "adam_w_mode": false for Adam with an L2 penalty.',
    ],
    "DS418": [
        "warning optimizer.params.adam_w_mode: has no effect: the type is AdamW | Write Adam for an L2 penalty, or remove it. | safe remove optimizer.params.adam_w_mode",
    ],
    "DS419": [
        "note zero_optimization.offload_optimizer: there is no optimizer section: the code has to bring DeepSpeedCPUAdam, and no other Adam | Add an optimizer section, or set zero_force_ds_cpu_optimizer to false for any optimizer.",
    ],
    "DS420": [
        "warning optimizer.params.fp32_optimizer_states: has no effect: FusedAdam keeps its moments in the precision of what it steps | Remove it; it acts where the optimizer is offloaded to the CPU. | safe remove optimizer.params.fp32_optimizer_states",
        "warning optimizer.params.fp32_optimizer_states: has no effect: torch.optim.AdamW keeps its moments in the precision of what it steps | Remove it; it acts where the optimizer is offloaded to the CPU. | safe remove optimizer.params.fp32_optimizer_states",
    ],
    "DS421": [
        "error fails optimizer.legacy_fusion: calls FusedAdam in a way that it refuses, and the first step fails | Remove it. | safe remove optimizer.legacy_fusion",
        "warning optimizer.legacy_fusion: has no effect: it is for Adam at stage 0 in 16 bits | Remove it. | safe remove optimizer.legacy_fusion",
    ],
}
"""What each rule says of its own bad examples, each thing once, in their order."""


def said(given, rule_id):
    return [finding for finding in run(*example(given)) if finding.rule == rule_id]


def line(finding):
    text = f"{finding.severity}{' ' * bool(finding.effect)}{finding.effect} {finding.path}: "
    text += f"{finding.message} | {finding.suggestion}"
    if finding.fix:
        edits = (
            f"{edit.op} {edit.path}" + ("" if edit.op == "remove" else f" {edit.value!r}")
            for edit in finding.fix.edits
        )
        text += f" | {'safe' if finding.fix.safe else 'unsafe'} {', '.join(edits)}"
    return text


def test_every_rule_has_its_words():
    assert SAID.keys() == RULES.keys()


@pytest.mark.parametrize("rule_id", RULES)
def test_words(rule_id):
    lines = [line(finding) for given in RULES[rule_id].bad for finding in said(given, rule_id)]
    assert list(dict.fromkeys(lines)) == SAID[rule_id]


@pytest.mark.parametrize("rule_id", RULES)
def test_fixes_mend(rule_id):
    """After what is proposed the rule has nothing left to say; where it is safe, no other has more to say."""
    for given in RULES[rule_id].bad:
        config, setting, oddities = example(given)
        before = run(config, setting, oddities)
        edits = [edit for found in before if found.rule == rule_id and found.fix for edit in found.fix.edits]
        if edits:
            after = run(apply(config, tuple(edits)), setting)
            unmended = {found.path for found in before if found.rule == rule_id and not found.fix}
            assert {found.path for found in after if found.rule == rule_id} <= unmended
            assert len([found for found in after if found.severity == "error"]) <= len(
                [found for found in before if found.severity == "error"]
            )


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


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("FusedAdam", "Adam"),
        ("DeepSpeedCPUAdam", "Adam"),
        ("adamw_bnb_8bit", "AdamW"),
        ("paged_lion_32bit", "Lion"),
        ("rmsprop", "RMSprop"),
        ("adafactr", "Adafactor"),
    ],
)
def test_what_a_name_was_meant_to_be(name, expected):
    (found,) = said(made(name), "DS403")
    assert found.fix.edits[0].value == expected
    assert found.fix.safe == (name.lower() == expected.lower())


def test_one_error_for_a_missing_type():
    """The schema has nothing to add."""
    found = [
        finding
        for finding in run(*example({"optimizer": {"params": {"lr": 1e-3}}}))
        if finding.severity == "error"
    ]
    assert [finding.rule for finding in found] == ["DS404"]


def test_a_name_is_taken_for_the_type():
    (found,) = said({"optimizer": {"name": "Lion", "params": {}}}, "DS404")
    assert found.message == "has no type, and means no optimizer at all: name isn't read"
    assert found.suggestion.startswith("Set optimizer.type to Lion")
    assert found.fix.edits == (("move", "optimizer.name", "optimizer.type"),)


def test_clipping_is_not_moved_over_another():
    (found,) = said({**made("AdamW", max_grad_norm=1.0), "gradient_clipping": 0.5}, "DS401")
    assert found.fix.edits[0].op == "remove"


def test_an_argument_is_not_renamed_over_another():
    (found,) = said(made("AdamW", lr=1e-3, learning_rate=1e-3), "DS405")
    assert found.fix.edits[0].op == "remove"
    assert said(made("AdamW", learning_rate=1e-3), "DS405")[0].fix.edits[0].op == "rename"


def test_one_error_for_each_number_out_of_range():
    found = [
        f for f in run(*example(made("AdamW", lr=-1, betas=[1.0, 0.99], eps=-1))) if f.severity == "error"
    ]
    assert [(f.rule, f.path) for f in found] == [
        ("DS407", f"optimizer.params.{key}") for key in ("lr", "betas.0", "eps")
    ]


@pytest.mark.parametrize(
    ("rule_id", "silent"),
    [
        ("DS402", {"_version": "0.9", **made("OneBitLamb")}),
        ("DS403", made("OneBitAdam")),
        ("DS405", made("OneBitAdam", anything=1)),
        ("DS405", made("AdamW", max_grad_norm=1.0)),
        ("DS406", made("AdamW", amsgrad=True, torch_adam=True)),
        ("DS407", made("AdamW", lr="1e-3")),
        ("DS407", made("AdamW", lr=True)),
        ("DS407", {"gradient_accumulation_steps": -1}),
        ("DS408", made("SGD", lr=2)),
        ("DS410", made("SGD", lr=0.1)),
        ("DS410", CPU),
        ("DS414", {"zero_optimization": {"stage": 2, "reduce_scatter": True}, **made("Muon")}),
        ("DS415", {"zero_optimization": {"stage": 1}, **made("MuAdam")}),
        ("DS415", {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": "yes", **made("SGD")}),
        ("DS420", {"zero_optimization": {"stage": 1}, **made("Adagrad", fp32_optimizer_states=False)}),
        ("DS421", {"_for": "hf", "optimizer": {"type": "AdamW", "legacy_fusion": True}}),
    ],
)
def test_silent(rule_id, silent):
    assert not said(silent, rule_id)


def test_the_data_are_current(capsys):
    """optimizers-0.19.json is what schemas/signatures.py makes, with the versions that it was made from."""
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
    code = "import sys; from dsrun.config.rules import run; run({'optimizer': {'type': 'SGD'}}); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
