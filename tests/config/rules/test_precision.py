# ruff: noqa: E501 - texts and paths stand here as they are shown
"""fp16, bf16, the loss scale, data types and autocast: the exact words, and both sides of each limit."""

from __future__ import annotations

import pytest

from dsrun.config.edits import apply
from dsrun.config.rules import Context, Setting, precision, run
from dsrun.config.rules.frame import Rule, example

RULES = {rule.id: rule for rule in vars(precision).values() if isinstance(rule, Rule)}

SAID = {
    "DS301": [
        "error refused bf16.enabled: fp16 is enabled as well | Enable one of them: bf16 where the GPUs have it, fp16 elsewhere. | unsafe replace fp16.enabled False",
    ],
    "DS302": [
        "error differs fp16.hysteresis: is 0: the loss scale is never lowered, and once a step overflows all are skipped | Write 2, DeepSpeed's default; 1 lowers the scale at the first overflow. | unsafe replace fp16.hysteresis 2",
        "error differs fp16.hysteresis: is -1: the loss scale is never lowered, and once a step overflows all are skipped | Write 2, DeepSpeed's default; 1 lowers the scale at the first overflow. | unsafe replace fp16.hysteresis 2",
    ],
    "DS303": [
        "warning fp16.loss_scale: is 65505, above 65504, the largest number of fp16: steps overflow and are skipped | Write 0: DeepSpeed then finds the scale by itself. | unsafe replace fp16.loss_scale 0",
        "warning fp16.loss_scale: is 1e+09, above 65504, the largest number of fp16: steps overflow and are skipped | Write 0: DeepSpeed then finds the scale by itself. | unsafe replace fp16.loss_scale 0",
    ],
    "DS304": [
        "error differs fp16.min_loss_scale: is 17, above 16, the first scale (2^4) | Write 1, DeepSpeed's default. | unsafe replace fp16.min_loss_scale 1",
        "error differs fp16.min_loss_scale: is 65537, above 65536, the first scale (2^16) | Write 1, DeepSpeed's default. | unsafe replace fp16.min_loss_scale 1",
        "warning fp16.min_loss_scale: is 16, the first scale itself (2^4): an overflow ends the run | Write 1, DeepSpeed's default. | unsafe replace fp16.min_loss_scale 1",
        "error fails fp16.min_loss_scale: is 8589934592, the first scale itself (2^33): an overflow ends the run | Write 1, DeepSpeed's default. | unsafe replace fp16.min_loss_scale 1",
    ],
    "DS305": [
        'warning fp16: has no effect without fp16.enabled | Add "enabled": true to fp16, or remove the section. | unsafe add fp16.enabled True',
        'warning bf16: has no effect without bf16.enabled | Add "enabled": true to bf16, or remove the section. | unsafe add bf16.enabled True',
        "warning fp16: has no effect without fp16.enabled | Remove it: bf16 is enabled. | unsafe remove fp16",
    ],
    "DS306": [
        "warning fp16.enabled: at stage 0 DeepSpeed never multiplies the loss by the loss scale | Use ZeRO stage 1, or bf16; dsrun's own training loop scales the loss itself.",
    ],
    "DS307": [
        "warning fp16.initial_scale_power: has no effect: loss_scale is 128, a fixed scale | Remove it, or set loss_scale to 0 for a scale that adapts itself. | safe remove fp16.initial_scale_power",
        "warning fp16.loss_scale_window: has no effect: loss_scale is 1, a fixed scale | Remove it, or set loss_scale to 0 for a scale that adapts itself. | safe remove fp16.loss_scale_window",
        "warning fp16.consecutive_hysteresis: has no effect: loss_scale is 1, a fixed scale | Remove it, or set loss_scale to 0 for a scale that adapts itself. | safe remove fp16.consecutive_hysteresis",
    ],
    "DS308": [
        "error fails fp16.initial_scale_power: is 64: torch can't multiply the loss by 2^64, and the first step fails | Write 16, DeepSpeed's default; 63 is the most that works. | unsafe replace fp16.initial_scale_power 16",
        "error fails fp16.initial_scale_power: is 2000: torch can't multiply the loss by 2^2000, and the first step fails | Write 16, DeepSpeed's default; 63 is the most that works. | unsafe replace fp16.initial_scale_power 16",
        "warning fp16.initial_scale_power: is 63: steps overflow and are skipped until the scale has come down from 2^63 | Write 16, DeepSpeed's default. | unsafe replace fp16.initial_scale_power 16",
        "warning fp16.initial_scale_power: is 33: steps overflow and are skipped until the scale has come down from 2^33 | Write 16, DeepSpeed's default. | unsafe replace fp16.initial_scale_power 16",
        "warning fp16.initial_scale_power: is -1: the loss is made smaller, where fp16 loses small gradients | Write 16, DeepSpeed's default; 0 starts with no scaling. | unsafe replace fp16.initial_scale_power 16",
        "warning fp16.initial_scale_power: is 64: steps overflow and are skipped until the scale has come down from 2^64 | Write 16, DeepSpeed's default. | unsafe replace fp16.initial_scale_power 16",
    ],
    "DS309": [
        "error refused fp16.loss_scale_window: is 0, and must be above 0 where the loss scale adapts itself | Write 1000, DeepSpeed's default. | unsafe replace fp16.loss_scale_window 1000",
        "error refused fp16.loss_scale_window: is -1, and must be above 0 where the loss scale adapts itself | Write 1000, DeepSpeed's default. | unsafe replace fp16.loss_scale_window 1000",
        "error refused fp16.min_loss_scale: is 0, and must be above 0 where the loss scale adapts itself | Write 1, DeepSpeed's default. | unsafe replace fp16.min_loss_scale 1",
        "error refused fp16.min_loss_scale: is -1, and must be above 0 where the loss scale adapts itself | Write 1, DeepSpeed's default. | unsafe replace fp16.min_loss_scale 1",
    ],
    "DS310": [
        "error refused fp16.loss_scale: is true: DeepSpeed wants a number here and converts nothing | Write 1. | unsafe replace fp16.loss_scale 1",
        "error refused fp16.min_loss_scale: is true: DeepSpeed wants a number here and converts nothing | Write 1. | unsafe replace fp16.min_loss_scale 1",
        'error refused fp16.loss_scale_window: is "8.0": DeepSpeed wants a number here and converts nothing | Write 8. | safe replace fp16.loss_scale_window 8',
        'error refused fp16.min_loss_scale: is "1.0": DeepSpeed wants a number here and converts nothing | Write 1. | safe replace fp16.min_loss_scale 1',
    ],
    "DS311": [
        "error fails fp16.auto_cast: casts the inputs to fp16, and the model is in fp32 | Remove it, or enable fp16. | unsafe remove fp16.auto_cast",
        "error fails fp16.auto_cast: casts the inputs to fp16, and the model is in bf16 | Remove it, or enable fp16. | unsafe remove fp16.auto_cast",
        "warning fp16.auto_cast: casts the inputs to fp16, and the model is in bf16 | Remove it, or enable fp16. | unsafe remove fp16.auto_cast",
    ],
    "DS312": [
        "note fp16.enabled: these GPUs compute in bfloat16, which needs no loss scale | Enable bf16 instead, unless a model or a checkpoint asks for fp16.",
    ],
    "DS313": [
        "warning bf16.enabled: these GPUs have no units for bfloat16: it is emulated, and slow | Use fp16: on such GPUs it is what is fast.",
        "warning torch_autocast.dtype: these GPUs have no units for bfloat16: it is emulated, and slow | Use fp16: on such GPUs it is what is fast.",
    ],
    "DS314": [
        "error refused bf16.bf16_master_weights_and_grads: needs ZeRO, and stage is 0 | Set zero_optimization.stage to 1, 2 or 3.",
        "error refused fp16.fp16_master_weights_and_grads: needs ZeRO, and stage is 0 | Set zero_optimization.stage to 1, 2 or 3.",
        "error refused bf16.bf16_optimizer_states: needs ZeRO, and stage is 0 | Set zero_optimization.stage to 1, 2 or 3.",
    ],
    "DS315": [
        "error refused bf16.bf16_optimizer_states: needs bf16_master_weights_and_grads | Set bf16.bf16_master_weights_and_grads to true as well. | unsafe add bf16.bf16_master_weights_and_grads True",
        "error refused bf16.bf16_optimizer_states: needs bf16_master_weights_and_grads | Set bf16.bf16_master_weights_and_grads to true as well. | unsafe replace bf16.bf16_master_weights_and_grads True",
    ],
    "DS316": [
        "error fails bf16.bf16_master_weights_and_grads: needs DeepSpeedCPUAdam, and the optimizer isn't offloaded | Offload the optimizer to the CPU with optimizer.type AdamW, or set bf16.bf16_optimizer_states to true.",
        "error fails fp16.fp16_master_weights_and_grads: needs DeepSpeedCPUAdam, and the optimizer isn't offloaded | Offload the optimizer to the CPU with optimizer.type AdamW.",
        "error fails bf16.bf16_master_weights_and_grads: needs DeepSpeedCPUAdam, and the optimizer is DeepSpeedCPUAdagrad | Offload the optimizer to the CPU with optimizer.type AdamW.",
    ],
    "DS317": [
        "error fails fp16.fp16_master_weights_and_grads: master weights can't be in fp16 and in bf16 | Remove fp16.fp16_master_weights_and_grads. | unsafe remove fp16.fp16_master_weights_and_grads",
    ],
    "DS318": [
        "error fails data_types.param_dtype: is fp32, and the model is in bf16 | Remove it: the precision follows fp16.enabled and bf16.enabled. | unsafe remove data_types.param_dtype",
        "error fails data_types.param_dtype: is torch.bfloat16, and the model is in fp16 | Remove it: the precision follows fp16.enabled and bf16.enabled. | unsafe remove data_types.param_dtype",
        "error fails data_types.param_dtype: is half, and the model is in fp32 | Remove it: the precision follows fp16.enabled and bf16.enabled. | unsafe remove data_types.param_dtype",
    ],
    "DS319": [
        "error fails data_types.grad_accum_dtype: is fp32, and the model is in bf16: stage 0 can't mix them | Set zero_optimization.stage to 1, or remove it. | unsafe remove data_types.grad_accum_dtype",
        "error fails data_types.grad_accum_dtype: is bf16, and the model is in fp16: stage 0 can't mix them | Set zero_optimization.stage to 1, or remove it. | unsafe remove data_types.grad_accum_dtype",
        "error fails data_types.grad_accum_dtype: is float16, and the model is in fp32: stage 0 can't mix them | Set zero_optimization.stage to 1, or remove it. | unsafe remove data_types.grad_accum_dtype",
    ],
    "DS320": [
        "error differs data_types.grad_accum_dtype: is fp16, and the model is in bf16 | Remove it: gradients are then added up in bf16. | unsafe remove data_types.grad_accum_dtype",
        "error differs data_types.grad_accum_dtype: is bf16, and the model is in fp16 | Remove it: gradients are then added up in fp16. | unsafe remove data_types.grad_accum_dtype",
        "warning data_types.grad_accum_dtype: is bf16, and the model is in fp32 | Remove it: gradients are then added up in fp32. | unsafe remove data_types.grad_accum_dtype",
    ],
    "DS321": [
        "warning torch_autocast.enabled: is meant for weights in fp32, and bf16 keeps them in 16 bits | Remove torch_autocast, or set bf16.enabled to false. | unsafe replace bf16.enabled False",
        "warning torch_autocast.enabled: is meant for weights in fp32, and fp16 keeps them in 16 bits | Remove torch_autocast, or set fp16.enabled to false. | unsafe replace fp16.enabled False",
    ],
    "DS322": [
        'warning torch_autocast: has no effect without torch_autocast.enabled | Add "enabled": true, or remove the section. | unsafe add torch_autocast.enabled True',
    ],
    "DS323": [
        'error fails torch_autocast.lower_precision_safe_modules: is "torch.nn.Linear", a text: DeepSpeed goes through it letter by letter | Write a list: ["torch.nn.Linear"]. | safe replace torch_autocast.lower_precision_safe_modules [\'torch.nn.Linear\']',
        'error fails torch_autocast.lower_precision_safe_modules.1: is "Conv2d", a class without its module | Write the full name, such as torch.nn.Conv2d.',
    ],
    "DS324": [
        "warning torch_autocast.dtype: casts to fp32, which is what the weights are in | Write bfloat16 or float16.",
    ],
    "DS325": [
        'warning bf16.immediate_grad_update: has no effect at stage 2 here | Remove it; it acts at stage 1 with "data_types": {"grad_accum_dtype": "fp32"}. | safe remove bf16.immediate_grad_update',
        'warning bf16.immediate_grad_update: has no effect at stage 1 here | Remove it; it acts at stage 1 with "data_types": {"grad_accum_dtype": "fp32"}. | safe remove bf16.immediate_grad_update',
        "warning bf16.check_grad_overflow: has no effect at stage 3, which always looks | Remove it. | safe remove bf16.check_grad_overflow",
    ],
    "DS326": [
        "note bf16.check_grad_overflow: lets a step with infinite gradients into the weights | Leave it at true.",
    ],
    "DS327": [
        "warning data_types.keep_in_fp32_modules: has no effect: the model is in fp32 | Remove it, or enable bf16. | safe remove data_types.keep_in_fp32_modules",
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


ON = {"fp16": {"enabled": True}}
AUTO = {"fp16": {"enabled": "auto", "hysteresis": 0}}
HF = {"_for": "hf", "zero_optimization": {"stage": 2}}


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
    assert precision.mode(Context(config, Setting(target, trainer=trainer))) == expected


def test_a_section_that_the_trainer_may_turn_on_counts():
    assert said({**HF, **AUTO}, "DS302")
    assert said({**HF, **AUTO, "_trainer": {"fp16": True}}, "DS302")
    assert not said({**HF, **AUTO, "_trainer": {"fp16": False}}, "DS302")
    assert not said({**HF, **AUTO, "_trainer": {"bf16": True}}, "DS302")


@pytest.mark.parametrize(
    ("rule_id", "silent"),
    [
        ("DS302", {"fp16": {"enabled": True, "hysteresis": 0}}),
        (
            "DS302",
            {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True, "hysteresis": 0, "loss_scale": 2}},
        ),
        ("DS302", {"zero_optimization": {"stage": 1}, "fp16": {"enabled": False, "hysteresis": 0}}),
        ("DS304", {"zero_optimization": {"stage": 1}, "fp16": {"enabled": False, "min_loss_scale": 65537}}),
        (
            "DS304",
            {
                "zero_optimization": {"stage": 1},
                "fp16": {"enabled": True, "initial_scale_power": 64, "min_loss_scale": 2**65},
            },
        ),
        (
            "DS304",
            {
                "zero_optimization": {"stage": 1},
                "fp16": {"enabled": True, "initial_scale_power": -64, "min_loss_scale": 1},
            },
        ),
        ("DS309", {"_for": "hf", "fp16": {"enabled": "auto", "min_loss_scale": 0}}),
        ("DS316", {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}),
        (
            "DS317",
            {
                "fp16": {"fp16_master_weights_and_grads": True},
                "bf16": {"bf16_master_weights_and_grads": True},
            },
        ),
        ("DS315", {"bf16": {"enabled": True, "bf16_optimizer_states": True}}),
    ],
)
def test_silent(rule_id, silent):
    assert not said(silent, rule_id)


@pytest.mark.parametrize(
    ("power", "severities"), [(63, ["warning"]), (64, ["error"]), (33, ["warning"]), (32, [])]
)
def test_powers(power, severities):
    given = {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True, "initial_scale_power": power}}
    assert [finding.severity for finding in said(given, "DS308")] == severities


@pytest.mark.parametrize(
    ("power", "minimum", "expected"),
    [
        (32, 2**32, "warning"),
        (33, 2**33, "error"),
        (1, 2, "warning"),
        (0, 1, None),
        (63, 2**63, "error"),
        (-1, 1, "error"),
        (-63, 1, "error"),
    ],
)
def test_minimum_at_the_first_scale(power, minimum, expected):
    fields = {"enabled": True, "initial_scale_power": power, "min_loss_scale": minimum}
    found = said({"zero_optimization": {"stage": 1}, "fp16": fields}, "DS304")
    assert [finding.severity for finding in found] == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("device", "silent"),
    [("none", True), ("cpu", False), ("nvme", True)],
)
def test_bf16_optimizer_takes_over(device, silent):
    """At stage 1 with gradients in fp32, unless the optimizer is offloaded to the CPU's memory."""
    zero = {"stage": 1, "offload_optimizer": {"device": device, "nvme_path": "/nvme"}}
    given = {"zero_optimization": zero, "bf16": {"enabled": True, "immediate_grad_update": True}}
    found = said({**given, "data_types": {"grad_accum_dtype": "float32"}}, "DS325")
    assert bool(found) != silent


def test_both_master_weights_keeps_what_the_model_is_in():
    both = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "fp16": {"enabled": True, "fp16_master_weights_and_grads": True},
        "bf16": {"enabled": False, "bf16_master_weights_and_grads": True},
    }
    (found,) = said(both, "DS317")
    assert found.path == "bf16.bf16_master_weights_and_grads"


@pytest.mark.parametrize("value", ["Linear", "torch.nn.Linear"])
def test_a_name_alone_is_no_safe_fix(value):
    section = {"enabled": True, "lower_precision_safe_modules": value}
    (found,) = said({"torch_autocast": section}, "DS323")
    assert found.fix.safe == ("." in value)


def test_one_error_for_a_wrong_loss_scale():
    for value in (-1, True, "inf", "", None, [1]):
        errors = [
            finding
            for finding in run(*example({"fp16": {"enabled": True, "loss_scale": value}}))
            if finding.severity == "error"
        ]
        assert [finding.path for finding in errors] == ["fp16.loss_scale"], value
