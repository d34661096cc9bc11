"""Logs like a signature's examples that mean something else: none is named with high confidence."""

from __future__ import annotations

import near_misses
import pytest
from running import each

from dsrun.jobs.diagnosis import likeness
from dsrun.jobs.diagnosis.diagnosis import in_words
from dsrun.jobs.diagnosis.log_files import LogSource
from dsrun.jobs.diagnosis.reading.log_lines import peeled
from dsrun.jobs.diagnosis.signatures import HARMLESS, SignatureIndex, alternatives, find_signatures
from dsrun.jobs.diagnosis.verdict import judge

ALL = find_signatures()
INDEX = SignatureIndex(ALL)
FAILURES = [one for one in ALL.values() if one.kind != HARMLESS]
MOST_WITHOUT_EXAMPLE = 900
"""Alternatives of patterns that no example shows: fewer may be written, not more."""


def answer(text):
    lines = [peeled(0, number, line) for number, line in enumerate(text.split("\n"), 1)]
    return in_words(judge(lines, INDEX), [LogSource("train.log", None)], {})


@pytest.mark.slow
def test_none_is_named_with_high_confidence():
    def check(signature):
        cases = list(near_misses.near_misses(signature))
        assert len({text for _, text in cases}) >= 3
        sure = [
            (name, found.signature) for name, text in cases if (found := answer(text)).confidence == "high"
        ]
        assert [case for case in sure if not case[0].startswith("near_misses")] == []

    each(FAILURES, check, lambda signature: signature.id)


def test_those_of_its_own_table_are_not_its():
    def check(signature):
        for text in signature.near_misses:
            assert answer(text).signature != signature.id, text

    each([one for one in FAILURES if one.near_misses], check, lambda signature: signature.id)


def test_a_wording_that_no_example_has_is_less_sure():
    def without_example(signature):
        all_of_it = alternatives.alternatives(signature.pattern)
        return len(all_of_it) - len(alternatives.shown(signature.pattern, signature.examples))

    assert sum(map(without_example, FAILURES)) <= MOST_WITHOUT_EXAMPLE
    assert answer("OSError: [Errno 28] No space left on device").confidence == "high"
    assert answer("OSError: There is not enough free disk space").confidence == "medium"


def test_the_bars_of_a_pattern():
    def parts(pattern):
        return [one.pattern for one in alternatives.alternatives(pattern)]

    assert parts(r"a|b") == ["a", "b"]
    assert parts(r"(?i)a(?:b|c)|[|)]d\||e") == [r"(?i)a(?:b|c)", r"(?i)[|)]d\|", "(?i)e"]
    assert parts(r"[]|]x|y") == ["[]|]x", "y"]


def test_code_and_data_are_no_failure():
    code = '  File "/home/u/train.py", line 3, in f\n    raise RuntimeError("No space left on device")\nKeyError: \'x\''
    assert answer(f"Traceback (most recent call last):\n{code}").cause == "script_error"
    record = '{"prompt": "what is this?", "text": "OSError: [Errno 28] No space left on device", "label": 1}'
    assert answer(record).cause is None
    assert answer(record.replace("prompt", "id")).confidence == "low"


def test_a_second_opinion_names_no_cause():
    few = SignatureIndex({name: ALL[name] for name in ("shm-loader", "hostfile-bad", "disk-full")})
    text = "FrobError: the hostfile has a bad entry: node1 slot=8, not able to proceed with the launch"
    found = in_words(judge([peeled(0, 1, text)], few), [LogSource("train.log", None)], {})
    assert found.cause is None and found.confidence == "none"
    assert found.looks_like["cause"] == "hostfile" and 0 < found.looks_like["likeness"] < 1
    assert answer("FrobError: qwrtz plmnk vbxy").looks_like is None


def test_examples_lie_nearest_to_their_own_class():
    """As a lint: an example that is most like one of another class may stand with the wrong signature."""
    index = likeness.index_of(tuple(ALL.values()))
    astray = []
    for signature in FAILURES:
        if signature.kind in ("root", "symptom"):
            text = near_misses.matched(signature)
            nearest = index.nearest(text, without=[signature.id])
            if nearest and nearest.score > 0.75 and nearest.signature.cause != signature.cause:
                astray.append((signature.id, nearest.signature.id, round(nearest.score, 2)))
    known = {frozenset(pair) for pair in NEIGHBOURS}
    assert [case for case in astray if frozenset(case[:2]) not in known] == []


NEIGHBOURS = (
    ("slurm-preempted", "slurm-time-limit"), ("illegal-instruction", "segfault"), ("path-not-set", "compiler-missing"),
    ("config-path-as-text", "json-decode"), ("killed-9", "illegal-instruction"), ("killed-9-first", "killed-9"),
    ("pinned-memory", "gpu-oom"), ("loader-worker-killed", "loader-worker-segfault"),
    ("shm-semaphore-raised", "disk-full"), ("recorder-behind", "recorder-differs"), ("path-backslash", "path-not-set"),
    ("hub-name-unset", "hub-no-such-name"), ("reshape", "zero3-empty-shape"),
    ("no-optimizer", "zero-offload-attribute"), ("triton-ops", "triton-missing"),
)  # fmt: skip
"""Pairs whose wording is almost the same, and whose difference is a word that decides."""
