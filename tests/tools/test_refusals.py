"""Refusals of DeepSpeed beside dsrun's rules (tools/schemas/refusals.py)."""

from __future__ import annotations

import pytest
from needed import since

from dsrun.config.rules import find_rules
from tools.schemas.refusals import ENGINE, Refusal, compared, known, main, refusals
from tools.schemas.source import ReleaseSource

CODE = """
def _do_error_check(self):
    assert self.stage <= 3, f"stage {self.stage} is too high"
    assert self.stage
    if self.new:
        raise ValueError("a new refusal: " "{}".format(self.new))
"""


@since(deepspeed="0.19.8")
def test_every_refusal_is_known(capsys):
    pytest.importorskip("deepspeed")
    assert main([]) == 0, capsys.readouterr().out


def test_the_rules_named_exist():
    rules = {rule.id for rule in find_rules()}
    answers = known().values()
    assert all(answers)
    assert {rule for answer in answers if isinstance(answer, list) for rule in answer} <= rules


def test_what_a_new_release_refuses_is_shown():
    source = ReleaseSource("0.99.0", {"runtime/config.py": CODE, ENGINE: CODE})
    texts = [refusal.text for refusal in refusals(source)]
    assert texts == ["stage {} is too high", "assert self.stage", "a new refusal: {}"]
    new, gone = compared(source)
    assert Refusal("runtime/config.py", "_do_error_check", "a new refusal: {}") in new
    assert set(gone) == set(known())
