# ruff: noqa: E501 - texts and paths stand here as they are shown
"""The schedule: the exact words, and both sides of each limit."""

from __future__ import annotations

import pytest

from dsrun.config.edits import apply
from dsrun.config.rules import Context, run, scheduler
from dsrun.config.rules.frame import Rule, example

RULES = {rule.id: rule for rule in vars(scheduler).values() if isinstance(rule, Rule)}

SAID = {
    "DS431": [
        "error fails scheduler.type: cosine is no schedule of DeepSpeed | Did you mean WarmupCosineLR? There are LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR. | unsafe replace scheduler.type 'WarmupCosineLR'",
        "error fails scheduler.type: linear is no schedule of DeepSpeed | Did you mean WarmupDecayLR? There are LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR. | unsafe replace scheduler.type 'WarmupDecayLR'",
        "error fails scheduler.type: constant_with_warmup is no schedule of DeepSpeed | Did you mean WarmupLR? There are LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR. | unsafe replace scheduler.type 'WarmupLR'",
        "error fails scheduler.type: warmuplr is no schedule of DeepSpeed | Did you mean WarmupLR? There are LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR. | safe replace scheduler.type 'WarmupLR'",
        "error fails scheduler.type: WarmupDecayLr is no schedule of DeepSpeed | Did you mean WarmupDecayLR? There are LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR. | safe replace scheduler.type 'WarmupDecayLR'",
        "error fails scheduler.type: zzz is no schedule of DeepSpeed | There are LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR.",
        "error fails scheduler.type: WarmupCosineLR is no schedule of DeepSpeed | Did you mean WarmupLR? There are LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR. | unsafe replace scheduler.type 'WarmupLR'",
    ],
    "DS432": [
        "error fails scheduler.type: torch.optim.lr_scheduler.StepLR can't work with ZeRO stage 1, which wraps the optimizer | Take one of LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, or let the code make the schedule.",
        "error fails scheduler.type: torch.optim.lr_scheduler.CosineAnnealingLR can't work with ZeRO stage 2, which wraps the optimizer | Take one of LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, or let the code make the schedule.",
        "error fails scheduler.type: torch.optim.lr_scheduler.StepLR can't work with bf16, which wraps the optimizer | Take one of LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, or let the code make the schedule.",
    ],
    "DS433": [
        "error fails scheduler: has no params, and DeepSpeed fails without them | Add params, if only as {}. | unsafe add scheduler.params {}",
        "error fails scheduler: has no params, and DeepSpeed fails without them | Add params with cycle_min_lr and cycle_max_lr.",
    ],
    "DS434": [
        "error fails scheduler.params.warmup_steps: WarmupLR takes no such argument | Did you mean warmup_num_steps? WarmupLR takes last_batch_iteration, warmup_max_lr, warmup_min_lr, warmup_num_steps, warmup_type. | unsafe rename scheduler.params.warmup_steps 'warmup_num_steps'",
        "error fails scheduler.params.warmup_max_lr: WarmupCosineLR takes no such argument | WarmupLR and WarmupDecayLR take it. WarmupCosineLR takes cos_min_ratio, last_batch_iteration, total_num_steps, warmup_min_ratio, warmup_num_steps, warmup_type. | unsafe remove scheduler.params.warmup_max_lr",
        "error fails scheduler.params.total_num_steps: WarmupLR takes no such argument | WarmupDecayLR and WarmupCosineLR take it. WarmupLR takes last_batch_iteration, warmup_max_lr, warmup_min_lr, warmup_num_steps, warmup_type. | unsafe remove scheduler.params.total_num_steps",
        "error fails scheduler.params.cycle_max_lr: WarmupLR takes no such argument | OneCycle takes it. WarmupLR takes last_batch_iteration, warmup_max_lr, warmup_min_lr, warmup_num_steps, warmup_type. | unsafe remove scheduler.params.cycle_max_lr",
        "error fails scheduler.params.zzz: WarmupLR takes no such argument | WarmupLR takes last_batch_iteration, warmup_max_lr, warmup_min_lr, warmup_num_steps, warmup_type. | unsafe remove scheduler.params.zzz",
        "error fails scheduler.params.lr: WarmupLR takes no such argument | Did you mean warmup_max_lr? WarmupLR takes last_batch_iteration, warmup_max_lr, warmup_min_lr, warmup_num_steps, warmup_type. | unsafe rename scheduler.params.lr 'warmup_max_lr'",
    ],
    "DS435": [
        "error fails scheduler.params: OneCycle needs cycle_min_lr and cycle_max_lr | Add scheduler.params.cycle_min_lr.",
        "error fails scheduler.params: OneCycle needs cycle_max_lr | Add scheduler.params.cycle_max_lr.",
        "error fails scheduler.params: WarmupDecayLR needs total_num_steps | Add scheduler.params.total_num_steps.",
        "error fails scheduler.params: WarmupCosineLR needs total_num_steps | Add scheduler.params.total_num_steps.",
        "error fails scheduler.params: torch.optim.lr_scheduler.StepLR needs step_size | Add scheduler.params.step_size.",
    ],
    "DS436": [
        "error differs scheduler.params.total_num_steps: is 9, and the warm-up alone takes 10 steps (warmup_num_steps) | Write the optimizer steps of the whole run, the warm-up among them.",
        "error differs scheduler.params.total_num_steps: is 5, and the warm-up alone takes 10 steps (warmup_num_steps) | Write the optimizer steps of the whole run, the warm-up among them.",
        "error differs scheduler.params.total_num_steps: is 999, and the warm-up alone takes 1000 steps (warmup_num_steps, the default) | Write the optimizer steps of the whole run, the warm-up among them.",
        "error differs scheduler.params.total_num_steps: is 0, and the warm-up alone takes 10 steps (warmup_num_steps) | Write the optimizer steps of the whole run, the warm-up among them.",
        "warning scheduler.params.total_num_steps: is just 10, and the warm-up alone takes 10 steps (warmup_num_steps) | Write the optimizer steps of the whole run, the warm-up among them.",
    ],
    "DS437": [
        "error fails scheduler.params.warmup_num_steps: is 10.0: DeepSpeed wants a whole number without a point or an exponent | Write 10. | safe replace scheduler.params.warmup_num_steps 10",
        "error fails scheduler.params.warmup_num_steps: is 100.0: DeepSpeed wants a whole number without a point or an exponent | Write 100. | safe replace scheduler.params.warmup_num_steps 100",
        "error fails scheduler.params.lr_range_test_step_size: is 200.0: DeepSpeed wants a whole number without a point or an exponent | Write 200. | safe replace scheduler.params.lr_range_test_step_size 200",
    ],
    "DS438": [
        "error fails scheduler.params.warmup_num_steps: is 0, and must be above 0 | Write 1 for no warm-up to speak of. | unsafe replace scheduler.params.warmup_num_steps 1",
        "error fails scheduler.params.warmup_num_steps: is -5, and must be above 0 | Write 1 for no warm-up to speak of. | unsafe replace scheduler.params.warmup_num_steps 1",
        "error fails scheduler.params.lr_range_test_step_size: is 0, and must be above 0 | Write a number above 0. | unsafe replace scheduler.params.lr_range_test_step_size 1",
        "error fails scheduler.params.cycle_first_step_size: is 0, and must be above 0 | Write a number above 0. | unsafe replace scheduler.params.cycle_first_step_size 1",
    ],
    "DS439": [
        "warning scheduler.params.warmup_min_lr: is 0.01, above the peak (0.001) | Write at most 0.001.",
        "warning scheduler.params.cycle_min_lr: is 0.01, above cycle_max_lr (0.001) | Write at most 0.001.",
        "warning scheduler.params.warmup_min_ratio: is 1.5, above the optimizer's rate (1) | Write at most 1.",
        "warning scheduler.params.cos_min_ratio: is 1.01, above the optimizer's rate (1) | Write at most 1.",
    ],
    "DS440": [
        "error differs scheduler.params.warmup_type: is cosine: DeepSpeed takes it for log | Write linear or log. | unsafe replace scheduler.params.warmup_type 'linear'",
        "error differs scheduler.params.warmup_type: is Linear: DeepSpeed takes it for log | Write linear or log. | safe replace scheduler.params.warmup_type 'linear'",
    ],
    "DS441": [
        "error differs scheduler.params.warmup_max_lr: is 0.5, and replaces the optimizer's lr of 0.001 | Write 0.001 here, or the same lr in both places. | unsafe replace scheduler.params.warmup_max_lr 0.001",
        "error differs scheduler.params.warmup_max_lr: is 0.002, and replaces the optimizer's lr of 0.001 | Write 0.001 here, or the same lr in both places. | unsafe replace scheduler.params.warmup_max_lr 0.001",
        "error differs scheduler.params.warmup_max_lr: is 0.001, the default, and replaces the optimizer's lr of 3e-05 | Write 3e-05 here, or the same lr in both places. | unsafe add scheduler.params.warmup_max_lr 3e-05",
    ],
    "DS442": [
        "error differs scheduler: has no type, and means no schedule at all | Set scheduler.type to WarmupLR, or remove the section.",
    ],
    "DS443": [
        "note scheduler: there is no optimizer section: it acts on the code's optimizer, if the code brings one | Add an optimizer section, or make sure that the code gives deepspeed.initialize an optimizer.",
    ],
    "DS444": [
        'note scheduler.params: the warm-up is logarithmic, DeepSpeed\'s default: half of the rate is there after a few steps | Add "warmup_type": "linear" for the warm-up that other tools have, or "log" if it is meant.',
    ],
    "DS445": [
        "note scheduler.type: is LRRangeTest, whose rate climbs without end | Take it for a test only.",
    ],
    "DS446": [
        "warning scheduler.params.last_batch_iteration: is 0: the schedule starts in the middle | Remove it: checkpoints bring it. | unsafe remove scheduler.params.last_batch_iteration",
        "warning scheduler.params.last_batch_iteration: is 100: the schedule starts in the middle | Remove it: checkpoints bring it. | unsafe remove scheduler.params.last_batch_iteration",
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


def built(name, lr=1e-3, **params):
    optimizer = {"type": "AdamW", "params": {"lr": lr}}
    return {"optimizer": optimizer, "scheduler": {"type": name, "params": params}}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cosine_with_restarts", "WarmupCosineLR"),
        ("polynomial", "WarmupDecayLR"),
        ("WarmupDecay", "WarmupDecayLR"),
        ("constant", "WarmupLR"),
        ("onecyclelr", "OneCycle"),
        ("LRRangeTst", "LRRangeTest"),
        ("steplr", "StepLR"),
    ],
)
def test_what_a_name_was_meant_to_be(name, expected):
    (found,) = said(built(name), "DS431")
    assert found.fix.edits == (("replace", "scheduler.type", expected),)


def test_another_case_is_a_safe_fix():
    assert said(built("onecycle"), "DS431")[0].fix.safe
    assert not said(built("onecyclee"), "DS431")[0].fix.safe


def test_a_name_is_taken_for_the_type():
    (found,) = said({"scheduler": {"name": "OneCycle", "params": {}}}, "DS442")
    assert found.message == "has no type, and means no schedule at all: name isn't read"
    assert found.suggestion.startswith("Set scheduler.type to OneCycle")
    assert found.fix.edits == (("move", "scheduler.name", "scheduler.type"),)


def test_an_argument_is_not_renamed_over_another():
    (found,) = said(built("WarmupLR", warmup_steps=1, warmup_num_steps=1), "DS434")
    assert found.fix.edits[0].op == "remove"


@pytest.mark.parametrize(
    ("total", "warmup", "severities"),
    [
        (9, 10, ["error"]),
        (10, 10, ["warning"]),
        (11, 10, []),
        (999, None, ["error"]),
        (1000, None, ["warning"]),
        (1001, None, []),
        (5, "auto", []),
        ("auto", 5, []),
    ],
)
def test_warmup_and_run(total, warmup, severities):
    params = {"total_num_steps": total} | ({} if warmup is None else {"warmup_num_steps": warmup})
    found = said({"_for": "hf", **built("WarmupDecayLR", "auto", **params)}, "DS436")
    assert [finding.severity for finding in found] == severities


@pytest.mark.parametrize(
    ("version", "effect"), [("0.18", "differs"), ("0.19", "fails")], ids=["before", "since the check"]
)
def test_a_warmup_of_0_steps(version, effect):
    (found,) = said({"_version": version, **built("WarmupLR", warmup_num_steps=0)}, "DS438")
    assert found.effect == effect
    (found,) = said({"_version": version, **built("LRRangeTest", lr_range_test_step_size=0)}, "DS438")
    assert found.effect == "fails"


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
    assert scheduler.peak(Context(config, setting)) == expected


@pytest.mark.parametrize(
    ("rule_id", "silent"),
    [
        ("DS432", {"_for": "hf", "zero_optimization": {"stage": 0}, **built("StepLR", "auto", step_size=1)}),
        ("DS433", {"scheduler": {"type": "zzz"}}),
        ("DS434", built("zzz", anything=1)),
        ("DS435", {"scheduler": {"type": "OneCycle"}}),
        ("DS435", {"scheduler": {"type": "OneCycle", "params": None}}),
        ("DS437", built("WarmupLR", warmup_num_steps=10.5)),
        ("DS437", built("WarmupLR", warmup_num_steps=0.0)),
        ("DS440", built("WarmupLR", warmup_type="auto")),
        ("DS441", {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5}}}),
        ("DS441", {"_for": "hf", **built("WarmupDecayLR", "auto", total_num_steps="auto")}),
        ("DS441", built("WarmupCosineLR", total_num_steps=2000, warmup_max_lr=0.5)),
        ("DS443", {"scheduler": {}}),
        ("DS444", {"scheduler": {"type": "StepLR", "params": {"step_size": 1}}}),
    ],
)
def test_silent(rule_id, silent):
    assert not said(silent, rule_id)


def test_one_error_for_each_wrong_argument():
    wrong = (
        built("WarmupLR", warmup_num_steps=0),
        built("WarmupLR", warmup_type="cubic"),
        {"scheduler": {"params": {}}},
    )
    for given in wrong:
        assert len([found for found in run(*example(given)) if found.severity == "error"]) == 1
