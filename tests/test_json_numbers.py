"""Numbers in what JSON holds: one judgement for all rooms."""

from __future__ import annotations

from math import inf, nan

import pytest

from dsrun.json_numbers import LARGEST, is_finite, is_number


@pytest.mark.parametrize("value", [0, -3, 2.5, LARGEST, -LARGEST])
def test_a_finite_number(value):
    assert is_number(value)
    assert is_finite(value)


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_a_number_that_is_not_finite(value):
    assert is_number(value)
    assert not is_finite(value)


@pytest.mark.parametrize("value", [True, False, None, "3", [1], 10**400, -(10**400)])
def test_what_is_no_number_to_compute_with(value):
    assert not is_number(value)
    assert not is_finite(value)


def test_a_limit_is_for_whole_numbers():
    assert is_number(8, largest=8)
    assert not is_number(9, largest=8)
    assert is_number(9.0, largest=8)
