"""What rules are about, in Chinese."""

from __future__ import annotations

import re

import pytest

from dsrun.config.rules import find_rules
from dsrun.config.rules.chinese import explanations

CHINESE = re.compile("[\u4e00-\u9fff]")


def test_the_commonest_rules_are_explained():
    known = explanations()
    assert len(known) >= 40
    assert list(known) == sorted(known)
    assert known.keys() <= {rule.id for rule in find_rules()}


@pytest.mark.parametrize("rule_id", explanations())
def test_every_text_is_chinese(rule_id):
    explanation = explanations()[rule_id]
    for text in (explanation.title, explanation.means, explanation.next):
        assert CHINESE.search(text)
        assert not text.endswith(" ") and "TODO" not in text
    assert explanation.means.endswith("。") and explanation.next.endswith("。")
