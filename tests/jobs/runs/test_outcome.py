"""What came of a fine-tune: whether it made the model worse, and which score says so first."""

import json
from math import inf, nan

import pytest

from dsrun.errors import UnfitFileError
from dsrun.jobs.runs.outcome import AFTER, Score, answers, is_worse, main_score

WORSE = {
    "held-out rows": ([8.0, 7.0, 6.0], [7.5, 7.6]),
    "held-out rows that end with no number": ([8.0, 7.0], [7.5, None]),
    "each last loss": ([8.4, 9.0, 30.0, 40.0, 2000.0, 2010.0, 2015.0, 2014.0], []),
    "two steps far apart": ([8.0, 80.0], []),
    "no number at the end": ([8.0, 7.0, None], []),
    "infinity": ([8.0, 7.0, inf], []),
}
FINE = {
    "held-out rows decide": ([8.0, 9.0], [7.5, 7.4]),
    "batches differ": ([8.0, 7.9, 8.1, 7.8, 8.0, 7.9, 8.2, 7.0], []),
    "two steps close together": ([8.0, 8.1], []),
    "one step": ([8.0], []),
    "none": ([], []),
    "evaluated once": ([8.0, 7.0], [7.5]),
    "no number at the start either": ([nan, nan], []),
}


@pytest.mark.parametrize("name", WORSE)
def test_a_run_that_made_the_model_worse(name):
    assert is_worse(*WORSE[name])


@pytest.mark.parametrize("name", FINE)
def test_a_run_that_did_not(name):
    assert not is_worse(*FINE[name])


def test_classes_are_held_against_the_commonest_one():
    scores = {"exact-match": 49.0, "accuracy": 49.0, "macro-f1": 40.0, "majority": 51.0}
    assert main_score(scores) == Score("accuracy", 49.0, 51.0)
    assert main_score(scores).beside == "majority 51.00"
    assert main_score({"rouge-1": 20.0, "rouge-l": 25.071}) == Score("ROUGE-L", 25.071, None)
    assert main_score({"own": 1.0}) == Score("own", 1.0, None)


def test_answers_beside_what_was_expected(tmp_path):
    rows = [{"prompt": f"q{n}", "labels": f"a{n}", "predict": f"p{n}"} for n in range(3)]
    (tmp_path / AFTER).write_text("".join(json.dumps(row) + "\n" for row in rows) + "{half")
    shown = answers(tmp_path, 2)
    assert [(each.prompt, each.expected, each.before, each.after) for each in shown] == [
        ("q0", "a0", None, "p0"), ("q1", "a1", None, "p1"),
    ]  # fmt: skip
    assert answers(tmp_path / "nothing", 2) == []


def test_a_link_out_of_the_folder_is_not_read(tmp_path):
    (tmp_path / "secret").write_text("{}\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / AFTER).symlink_to(tmp_path / "secret")
    with pytest.raises(UnfitFileError):
        answers(tmp_path / "run", 2)
