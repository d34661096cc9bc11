"""What --fix and --unsafe-fixes do to real files into which mistakes were put, drawn at random.

The files are those in tests/examples, and with $DSRUN_CORPUS those of a collection (test_corpus.py).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random

import pytest
from oracle import reading
from oracle.draw import CHANGES
from running import each, examples

from dsrun.config import tree
from dsrun.config.rules import Setting
from dsrun.config.validation import validate as module
from dsrun.config.validation.validate import RuleSelection, apply_fixes, validate

FOLDERS = [Path(__file__).parents[2] / "examples"]
FOLDERS += [Path(os.environ["DSRUN_CORPUS"])] if "DSRUN_CORPUS" in os.environ else []
MANY = int(os.environ.get("DSRUN_FIXES") or examples(240))
RANKS = 2
SELECTION = RuleSelection(level="warning")


def originals():
    found = []
    for path in sorted(path for folder in FOLDERS for path in folder.rglob("*.json")):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        if isinstance(value, dict) and "compute_environment" not in value:
            found.append((path.name, value))
    return found


def mutated():
    """(name, text): a file with up to three mistakes."""
    files = originals()
    for number in range(MANY):
        rng = Random(f"fixes/{number}")
        name, value = rng.choice(files)
        config = json.loads(json.dumps(value))
        for _, change in rng.choices([*CHANGES.values()], k=rng.randint(0, 3)):
            change(rng, config)
        yield f"{number}: {name}", json.dumps(config, indent=2)


CASES = list(mutated())


def judged(text):
    return validate(text.encode(), "x", Setting(world_size=RANKS), selection=SELECTION)


def fixed(result, *, unsafe):
    return apply_fixes(result, Setting(world_size=RANKS), SELECTION, unsafe=unsafe)


def values(result):
    return dict(tree.leaves(result.document.value))


def named(path, result):
    """Whether a finding is about a key or a section around it, or speaks of the key."""
    findings = [found.finding for found in result.findings]
    words = " ".join(f"{found.path} {found.message} {found.suggestion}" for found in findings)
    around = [found.path for found in findings if found.path != "zero_optimization"]
    return path.rpartition(".")[2] in words or any(tree.under(path, other) for other in around)


def name(case):
    return case[0]


@pytest.fixture(params=[False, True], ids=["fix", "unsafe-fixes"])
def unsafe(request):
    return request.param


def test_what_deepspeed_accepts_it_still_accepts(unsafe):
    """Files for HF Trainer, which DeepSpeed sees with the "auto"s filled in, are judged by dsrun's own errors."""
    pytest.importorskip("deepspeed")
    reading.load()

    def refused(result):
        if result.target == "deepspeed":
            outcome = reading.read(result.document.value, RANKS)
            return outcome.said if outcome.kind == reading.REFUSED else ""
        return [found.finding for found in result.findings if found.finding.effect == "refused"]

    def check(case):
        before = judged(case[1])
        if not refused(before):
            assert not refused(fixed(before, unsafe=unsafe))

    each(CASES, check, name)


def test_no_value_changes_that_no_finding_names(unsafe, monkeypatch):
    monkeypatch.setattr(module, "ROUNDS", 1)

    def check(case):
        before = judged(case[1])
        for _ in range(20):
            after = fixed(before, unsafe=unsafe)
            old, new = values(before), values(after)
            changed = [path for path in old if path not in new or not tree.same(old[path], new[path])]
            assert [path for path in changed if not named(path, before)] == []
            before = after

    each(CASES, check, name)


def test_a_second_time_changes_nothing(unsafe):
    def check(case):
        once = fixed(judged(case[1]), unsafe=unsafe)
        assert fixed(judged(once.document.text), unsafe=unsafe).document.text == once.document.text

    each(CASES, check, name)


def test_no_number_becomes_auto(unsafe):
    def check(case):
        before = judged(case[1])
        old, new = values(before), values(fixed(before, unsafe=unsafe))
        assert [path for path in old if new.get(path) == "auto" and old[path] != "auto"] == []

    each(CASES, check, name)
