"""From a text to findings with places, and to the fixed text."""

from __future__ import annotations

import json

import pytest

from dsrun.config.fix import Fix
from dsrun.config.rules import Setting
from dsrun.config.validation.validate import RuleSelection, apply_fixes, count_fixes, validate

ROOT = b'{"train_batch_size": 1, '


def places(data: bytes, **given) -> dict[str, tuple[str, int, int]]:
    """rule -> (path, line, column) of its first finding."""
    result = validate(data, "x.json", Setting(**given))
    first: dict[str, tuple[str, int, int]] = {}
    for located in result.findings:
        first.setdefault(located.finding.rule, (located.path, located.place.line, located.place.column))
    return first


def fixed(
    data: bytes, *, unsafe: bool = False, selection: RuleSelection | None = None, target: str | None = None
) -> str:
    selection = selection or RuleSelection()
    result = validate(data, "x.json", Setting(), selection=selection, target=target)
    after = apply_fixes(result, Setting(), selection, unsafe=unsafe)
    assert after.document is not None
    return after.document.text


def test_a_key_is_underlined():
    data = ROOT + b'\n "zero_optimization": {"stge": 2}}'
    result = validate(data, "x.json", Setting(), selection=RuleSelection(select=("DS006",)))
    (located,) = result.findings
    assert result.document is not None
    assert result.document.text[located.place.start : located.place.end] == '"stge"'
    assert (located.path, located.place.line, located.place.column) == ("zero_optimization.stge", 2, 24)


def test_a_missing_key_is_shown_at_its_section():
    assert places(ROOT + b'\n"zero_optimization": {"stage": 3}}')["DS203"][1:] == (2, 1)
    assert places(b'\n{"steps_per_print": 1}')["DS102"][1:] == (1, 1)


def test_an_alias_is_found_where_it_stands():
    data = ROOT + b'"zero_optimization": {"stage": 3,\n "gather_16bit_weights_on_model_save": false}}'
    assert places(data)["DS203"] == ("zero_optimization.gather_16bit_weights_on_model_save", 2, 2)


def test_slips_are_shown_where_they_stand():
    text = b'{\n  // one\n  "train_batch_size": 1, // two\n  "steps_per_print": 1,\n}'
    result = validate(text, "x.json", Setting(), target="hf", selection=RuleSelection(select=("DS021",)))
    lines = [(located.place.line, located.place.column) for located in result.findings]
    assert lines == [(2, 3), (3, 26), (4, 23)]
    assert places(text)["DS025"][1:] == (2, 3)


def test_the_second_of_two_keys_is_shown():
    assert places(b'{"train_batch_size": 1,\n"train_batch_size": 2}')["DS022"] == ("train_batch_size", 2, 1)


@pytest.mark.parametrize(
    ("data", "place"), [(b"", (1, 1)), (b'{\n "a" 1}', (2, 5)), (b'{\n "\xe9"}', (2, 3)), (b"[]", (1, 1))]
)
def test_what_cannot_be_read(data, place):
    result = validate(data, "a:b.json", Setting())
    (located,) = result.findings
    assert located.finding.rule == "DS020"
    assert (located.place.line, located.place.column) == place
    assert result.document is None
    assert apply_fixes(result, Setting(), RuleSelection(), unsafe=True) is result


def test_who_reads_it():
    assert validate(b"{}", "x", Setting()).target == "deepspeed"
    assert validate(b'{"train_batch_size": "auto"}', "x", Setting()).target == "hf"
    assert validate(b'{"wall_clock_breakdown": "auto"}', "x", Setting()).target == "deepspeed"
    assert validate(b"{}", "x", Setting(trainer={})).target == "hf"
    assert validate(b'{"train_batch_size": "auto"}', "x", Setting(), target="deepspeed").target == "deepspeed"
    assert validate(b"{", "x", Setting(), target="lightning").target == "lightning"


def test_the_reader_decides_the_dialect():
    """A bare True is true to the one who repairs JSON, and a text to DeepSpeed."""
    data = ROOT + b'\n"prescale_gradients": True\n}'
    assert validate(data, "x", Setting()).document.value["prescale_gradients"] == "True"
    assert validate(data, "x", Setting(), target="hf").document.value["prescale_gradients"] is True


def test_choice():
    assert RuleSelection().takes("DS203")
    assert RuleSelection(select=("DS2",)).takes("DS203")
    assert not RuleSelection(select=("DS2",)).takes("DS301")
    assert not RuleSelection(ignore=("DS203",)).takes("DS203")
    assert not RuleSelection(select=("DS2",), ignore=("DS20",)).takes("DS203")


def test_what_cannot_be_read_is_said_whatever_was_chosen():
    assert validate(b"{", "x", Setting(), selection=RuleSelection(select=("DS2",))).findings


@pytest.mark.parametrize(
    "given", ['["DS006", "DS007"]', '"DS006"', '{"DS006": "why"}', "7", "null", '[["DS006"]]']
)
def test_ignored_in_the_file(given):
    data = ROOT + b'"zero_optimization": {"stge": 2}, "_dsrun_ignore": ' + given.encode() + b"}"
    assert ("DS006" in places(data)) == ("DS006" not in given or given.startswith("[["))


def test_safe_fixes_come_before_unsafe_ones():
    """With a stage, overlap_comm is no longer without effect."""
    data = ROOT + b'"zero_optimization": {"stge": 2, "overlap_comm": true}}'
    assert json.loads(fixed(data, unsafe=True))["zero_optimization"] == {"stage": 2, "overlap_comm": True}


def test_fixes_that_meet():
    data = ROOT + b'"zero_optimization": {"stage": "2", "overlap_comm": "true", "reduce_bucket_size": "10"}}'
    section = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 10}
    assert json.loads(fixed(data))["zero_optimization"] == section


def test_mending_twice_changes_nothing():
    data = ROOT + b'"zero_optimisation": {"stage": "2"}, "fp16": {"enabled": "yes"}}'
    once = fixed(data, unsafe=True)
    assert once != data.decode()
    assert fixed(once.encode(), unsafe=True) == once


def test_only_what_was_chosen_is_fixed():
    data = ROOT + b'"zero_optimization": {"stge": 2, "overlap_comm": "true"}}'
    section = json.loads(fixed(data, selection=RuleSelection(ignore=("DS006",))))["zero_optimization"]
    assert section == {"stge": 2, "overlap_comm": True}


def test_the_fixed_text_is_judged_for_the_same_reader():
    data = b'{"train_batch_size": "auto", "zero_optimization": {"stage": "2"}}'
    result = validate(data, "x", Setting())
    after = apply_fixes(result, Setting(), RuleSelection(), unsafe=False)
    assert after.target == "hf"
    assert len(after.findings) < len(result.findings)


def test_fixable():
    result = validate(ROOT + b'"zero_optimization": {"stge": 2, "overlap_comm": "true"}}', "x", Setting())
    fixes = [located.finding.fix for located in result.findings if isinstance(located.finding.fix, Fix)]
    safe = sum(fix.safe for fix in fixes)
    assert count_fixes([result], RuleSelection()) == (safe, len(fixes) - safe)
    assert safe == 2
