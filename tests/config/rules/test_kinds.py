"""Rules that are data: what their texts show, and where each kind begins to hold."""

from __future__ import annotations

import pytest

from dsrun.config.rules import conditions as when
from dsrun.config.rules.frame import Context, Setting
from dsrun.config.rules.kinds import (
    all_of,
    excludes,
    groups,
    in_range,
    needs,
    put,
    remove,
    report,
    without_effect,
)

CLIPPING, STEPS, TYPE = "gradient_clipping", "gradient_accumulation_steps", "optimizer.type"


def findings(table, config, **setting):
    return list(table(Context(config, Setting(**setting))))


def shown(table, config, **setting):
    return [
        (finding.path, finding.message, finding.suggestion) for finding in findings(table, config, **setting)
    ]


def test_a_text_is_two_sentences_with_facts():
    line = report(
        STEPS, 'is {value} beside {other} on {gpus}: {{"a"}}. Write {value}. Or not', (), other=CLIPPING
    )
    config = {STEPS: 2e8, CLIPPING: 0.5}
    assert shown(line, config, world_size=4) == [
        (STEPS, 'is 200000000 beside 0.5 on 4: {"a"}', "Write 200000000. Or not")
    ]


def test_a_users_braces_are_shown_as_they_are():
    assert shown(report(TYPE, "is {value}. No", ()), {"optimizer": {"type": "{gpus}"}})[0][1] == "is {gpus}"


def test_what_a_key_needs():
    flag = needs("prescale_gradients", "{stage}. Do", when.at_stage(0), put(STEPS, 1))
    (finding,) = findings(flag, {"prescale_gradients": True})
    assert (finding.message, finding.fix.edits[0].path, finding.fix.safe) == ("needs 0", STEPS, False)
    assert not findings(flag, {"prescale_gradients": False})
    assert not findings(flag, {"prescale_gradients": True, "zero_optimization": {"stage": 1}})
    text = needs(TYPE, "more. Do", given="Adam")
    assert shown(text, {"optimizer": {"type": "Adam"}}) == [(TYPE, '"Adam" needs more', "Do")]
    assert not findings(text, {"optimizer": {"type": "Lion"}})


def test_what_a_key_excludes_is_listed():
    others = {"a": when.has("a"), "b": when.has("b"), "c": when.has("c")}
    table = excludes("prescale_gradients", others, "not with {others}. Choose")
    assert not findings(table, {"prescale_gradients": True})
    assert not findings(table, {"prescale_gradients": False, "a": 1})
    assert shown(table, {"prescale_gradients": True, "a": 1, "b": 1, "c": 1})[0][1] == "not with a, b and c"


def test_a_key_without_effect_goes_by_its_own_name():
    path = "zero_optimization.stage3_prefetch_bucket_size"
    config = {"zero_optimization": {"stage": 1, "prefetch_bucket_size": 5}}
    (finding,) = findings(without_effect(path, " here", when.has(path)), config)
    assert finding.path == "zero_optimization.prefetch_bucket_size"
    assert finding.fix == remove(path)(Context(config))
    assert (finding.message, finding.suggestion, finding.fix.safe) == (
        "has no effect here",
        "Remove it.",
        True,
    )


@pytest.mark.parametrize(("value", "outside"), [(0.9, True), (1, False), (2, False), ("auto", False)])
def test_least(value, outside):
    assert bool(findings(in_range(CLIPPING, "a. b", least=1), {CLIPPING: value})) == outside


@pytest.mark.parametrize(("value", "outside"), [(3, True), (2, False), (None, False)])
def test_most_is_another_keys(value, outside):
    table = in_range(STEPS, "above {most}. b", most=CLIPPING)
    assert [finding.message for finding in findings(table, {STEPS: value, CLIPPING: 2})] == [
        "above 2"
    ] * outside
    assert not findings(table, {STEPS: 3})


def test_most_is_a_number():
    table = in_range(CLIPPING, "above {most}. b", most=10)
    assert [finding.message for finding in findings(table, {CLIPPING: 10.5})] == ["above 10"]
    assert not findings(table, {CLIPPING: 10}) and not findings(table, {CLIPPING: -1e9})


@pytest.mark.parametrize(("gpus", "size", "rest"), [(4, 3, 1), (4, 2, 0), (None, 3, 0), (4, 0, 0)])
def test_groups(gpus, size, rest):
    table = groups(STEPS, "leaves {rest}. Use {sizes}", (), " or ")
    expected = [(STEPS, f"leaves {rest}", "Use 1, 2 or 4")] if rest else []
    assert shown(table, {STEPS: size}, world_size=gpus) == expected


def test_lines_with_conditions_of_all():
    table = all_of(report("a", "1. b", ()), report("c", "2. d", when.has("e")), when=when.has("f"))
    assert shown(table, {"f": 1, "e": 1}) == [("a", "1", "b"), ("c", "2", "d")]
    assert len(findings(table, {"f": 1})) == 1
    assert not findings(table, {"e": 1})
