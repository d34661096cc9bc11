"""Assertions without a message: the expression that the frame shows is quoted, and what its form says."""

from __future__ import annotations

import pytest
from test_phases import answer

LIBRARY = "/o/lib/python3.11/site-packages/deepspeed/runtime/zero/stage3.py"
FORMS = [
    ("assert x.grad is not None", "`x.grad` is `None`"),
    ("assert size % world == 0, ''", "`size` isn't a multiple of `world`"),
    ("assert isinstance(batch, dict)", "`batch` is of another type than `dict`"),
    ("assert os.path.exists(path)", "the path `path` isn't there"),
    ("assert not self.frozen", "`self.frozen` is true"),
    ("assert name in groups", "`name` isn't in `groups`"),
    ("assert all(found)", ""),
    ("assert (\n      ^^^^\n        a.b == len(c)\n    )", "`a.b` isn't equal to `len(c)`"),
]


def raised(code, file=LIBRARY):
    return (
        f'Traceback (most recent call last):\n  File "/home/u/train.py", line 8, in main\n    engine.step()\n'
        f'  File "{file}", line 1829, in step\n    {code}\nAssertionError'
    )


@pytest.mark.parametrize(("code", "fact"), FORMS)
def test_the_expression_and_what_its_form_says(code, fact):
    diagnosis = answer(raised(code))
    assert fact in diagnosis.summary
    assert diagnosis.summary.startswith("deepspeed asserts `")
    assert "(called from /home/u/train.py:8)" in diagnosis.next_step
    assert diagnosis.confidence in ("medium", "low")


def test_of_the_users_own_file():
    diagnosis = answer(raised("assert len(rows) == 3", "/home/u/data.py"))
    assert diagnosis.summary.startswith(
        "The script asserts `len(rows) == 3`, which doesn't hold: `len(rows)` isn't equal to `3`."
    )


def test_a_known_one_is_explained():
    diagnosis = answer(raised("assert all_groups_norm > 0."))
    assert diagnosis.cause == "nan" and diagnosis.signature == "assert-gradient-norm"
    assert "(AssertionError: assert all_groups_norm > 0.)" in diagnosis.summary


def test_a_message_says_more_than_the_code():
    diagnosis = answer(
        raised('assert rank in ranks, "rank must be one of the group"') + ": rank must be one of the group"
    )
    assert "rank must be one of the group" in diagnosis.summary and "asserts" not in diagnosis.summary


def test_one_that_is_cut_at_its_first_line_says_nothing():
    assert "asserts" not in answer(raised("assert (")).summary
