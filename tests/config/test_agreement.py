"""dsrun's findings and the real DeepSpeed agree on configs drawn at random (bench/oracle, bench/agreement.py)."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from needed import since

ROOT = Path(__file__).resolve().parents[2]

from oracle import compare, known, reading
from oracle.draw import CHANGES, Case, draw, singles

from dsrun.cluster import extensions
from dsrun.config.rules import Finding

SEED = 7
MOST_KNOWN = 8
BATCH = {"train_micro_batch_size_per_gpu": 1}


@pytest.fixture(scope="module")
def deepspeed():
    pytest.importorskip("deepspeed")
    reading.load()


def error(effect, rule="DS999", path="fp16"):
    return Finding(path, "", "", severity="error", effect=effect, rule=rule)


def kinds(outcome, *findings):
    verdict = compare.Verdict(tuple(findings))
    return [
        disagreement.kind
        for disagreement in compare.compare(Case(BATCH, 1), reading.Outcome(outcome), verdict)
    ]


def all_explained(report):
    """Fail with every disagreement that has no explanation, cut down to what it takes."""
    disagreements = [compare.smallest(tally.first, compare.ask_reading) for tally in report.unexplained]
    if disagreements:
        pytest.fail(
            "\n\n".join(
                [f"{len(disagreements)} kinds of disagreement", *map(compare.example, disagreements)]
            ),
            pytrace=False,
        )


def test_draws_are_the_same_for_the_same_seed():
    assert [draw(Random(number)) for number in range(50)] == [draw(Random(number)) for number in range(50)]


def test_draws_go_through_every_change():
    assert {name for number in range(500) for name in draw(Random(number)).how} == set(CHANGES)


@pytest.mark.parametrize(
    ("outcome", "effects", "expected"),
    [
        ("accepted", [], []),
        ("accepted", ["fails", "differs"], []),
        ("accepted", ["refused"], ["false alarm"]),
        ("refused", [], ["missed"]),
        ("refused", ["differs"], []),
        ("trained", ["differs"], []),
        ("trained", ["fails"], ["false alarm"]),
        ("failed", [], ["missed"]),
        ("unable", ["fails"], []),
    ],
)
def test_what_contradicts_what(outcome, effects, expected):
    assert kinds(outcome, *map(error, effects)) == expected


def test_a_warning_announces_nothing():
    assert kinds("refused", Finding("fp16", "", "", severity="warning", rule="DS999")) == ["missed"]


def test_examples_are_cut_down():
    """Every key goes without which the answer is the same."""

    def ask(case):
        return reading.Outcome(
            "refused" if "stage" in case.config.get("zero_optimization", {}) else "accepted"
        )

    case = Case(
        {**BATCH, "zero_optimization": {"stage": 9, "overlap_comm": True}, "fp16": {"enabled": True}}, 1
    )
    small, _ = compare.minimised(case, ask, lambda _, outcome: outcome.kind == "refused")
    assert small.config == {"zero_optimization": {"stage": 9}}
    assert case.config["fp16"]


def test_an_explained_disagreement_is_no_longer_open(monkeypatch):
    entry = known.Known("the packages of one machine", lambda kind, *_: kind == "missed")
    monkeypatch.setattr(compare, "KNOWN", (entry,))
    report = compare.Report()
    case, outcome, verdict = Case(BATCH, 1), reading.Outcome("refused"), compare.Verdict()
    report.add(compare.Comparison(outcome, verdict, None, tuple(compare.compare(case, outcome, verdict))))
    assert len(report.causes) == 1
    assert not report.unexplained


def test_few_disagreements_are_known():
    assert len(known.KNOWN) <= MOST_KNOWN
    assert all(len(entry.reason) > 20 for entry in known.KNOWN)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (BATCH, "accepted"),
        ({**BATCH, "gradient_accumulation_steps": 2, "train_batch_size": 4}, "accepted"),
        ({**BATCH, "train_batch_size": 3}, "refused"),
        ({**BATCH, "zero_optimization": {"stag": 1}}, "refused"),
        ({}, "refused"),
    ],
)
def test_deepspeed_is_asked(deepspeed, config, expected):
    assert reading.read(config, 2).kind == expected


@since(deepspeed="0.19.8")  # whose rules these are
@pytest.mark.parametrize("count", [300, pytest.param(1500, marks=pytest.mark.full)])
def test_what_deepspeed_reads(deepspeed, count):
    """Where it stops there is an error, and where it doesn't none says that it does."""
    report = compare.Report()
    for number in range(count):
        report.add(compare.compare_reading(draw(Random(f"{SEED}/{number}"))))
    assert sum(report.table["accepted"].values()) > count / 4
    assert sum(report.table["refused"].values()) > count / 4
    all_explained(report)


@since(deepspeed="0.19.8")  # whose rules these are
@pytest.mark.parametrize("every", [100, pytest.param(20, marks=pytest.mark.full)])
def test_what_deepspeed_makes_of_single_keys(deepspeed, every):
    """Each key by itself, at some of the values that bench/agreement.py tries."""
    report = compare.Report()
    for case in itertools.islice(singles(), SEED, None, every):
        report.add(compare.compare_reading(case))
    assert report.table["accepted"] and report.table["refused"]
    all_explained(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "more"),
    [(20, ()), pytest.param(40, ("--build",), marks=pytest.mark.full)],
    ids=["nothing is compiled", "DeepSpeed's Adam"],
)
def test_what_deepspeed_trains(environ, tmp_path, count, more):
    """A few configs through deepspeed.initialize and two steps; bench/agreement.py does many."""
    pytest.importorskip("deepspeed")
    command = [sys.executable, str(ROOT / "bench/agreement.py"), "--parsed", "0", "--initialised", str(count)]
    done = subprocess.run(
        [*command, "--seed", str(SEED), "--jobs", "1", *more],
        check=False,
        env=environ if more else {**environ, extensions.VARIABLE: str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, f"{done.stdout}\n{done.stderr[-3000:]}"
    assert re.search(r"^\| trained \|", done.stdout, re.MULTILINE), "some need nothing that isn't there"
