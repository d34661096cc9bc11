"""What rules are about, in Chinese."""

from __future__ import annotations

import re

import pytest

from dsrun.config.rules import find_rules
from dsrun.config.rules.chinese import explanations

CHINESE = re.compile("[\u4e00-\u9fff]")


def test_the_commonest_rules_are_explained():
    found = explanations()
    assert len(found) >= 40
    assert list(found) == sorted(found)
    assert found.keys() <= {rule.id for rule in find_rules()}


@pytest.mark.parametrize("rule_id", explanations())
def test_every_text_is_chinese(rule_id):
    one = explanations()[rule_id]
    for text in (one.title, one.means, one.next):
        assert CHINESE.search(text)
        assert not text.endswith(" ") and "TODO" not in text
    assert one.means.endswith("。") and one.next.endswith("。")
