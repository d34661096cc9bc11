"""Each signature by its own examples, and a lab's own."""

from __future__ import annotations

import re

import pytest
from running import each

from dsrun.errors import DsrunError
from dsrun.host.hiding import without_secrets
from dsrun.jobs.diagnosis import signatures
from dsrun.jobs.diagnosis.reading.log_lines import peeled, words
from dsrun.jobs.diagnosis.signatures import HARMLESS, MESSAGE, SignatureIndex, find_signatures
from dsrun.jobs.diagnosis.verdict import judge

ALL = find_signatures()
INDEX = SignatureIndex(ALL)
OWN = """
[lab-lease]
cause = "lab"
pattern = 'lease (?P<name>[a-z]{1,20}) expired'
words = ["lease"]
means = "The lab's lease {name} ran out."
next = "Ask for a new one."
examples = ["agent: lease gpu expired"]
"""


def verdict_on(text, index=INDEX):
    return judge([peeled(0, number, line) for number, line in enumerate(text.split("\n"), 1)], index)


def test_there_are_signatures_of_every_kind():
    assert len(ALL) > 200
    assert {one.kind for one in ALL.values()} == set(signatures.KINDS)
    assert len({one.subject for one in ALL.values()}) > 12


def test_each_is_found_in_its_examples():
    def check(one):
        for example in one.examples:
            if one.kind == HARMLESS:
                assert any(
                    found.id == one.id for line in example.split("\n") for found, _ in INDEX.matches(line)
                )
            else:
                found = verdict_on(example)
                assert found.signature is not None and found.signature.id == one.id, example
                assert (found.cause is None) == (one.confidence == "none")

    each(ALL.values(), check, lambda one: one.id)


def test_each_says_what_to_do_in_both_languages():
    def check(one):
        assert one.source
        assert one.kind == HARMLESS or all((one.means, one.means_zh, one.next, one.next_zh))
        assert set(one.over) <= set(ALL)
        groups = set(one.compiled.groupindex)
        for text in (one.means, one.means_zh, one.next, one.next_zh, one.check, one.tell_apart):
            assert without_secrets(text) == text
        for text in (one.means, one.means_zh, one.next, one.next_zh):
            assert set(re.findall(r"\{(\w+)\}", text)) <= groups
        assert all(words(word) == {word.encode()} for word in one.words), "small letters, without other signs"
        assert all(len(word) > 2 for word in one.words), "short words are everywhere"

    each(ALL.values(), check, lambda one: one.id)


def texts(tree):
    """What a parsed pattern may match, as far as it is said letter by letter; "7", which is left out, elsewhere."""
    found = [""]
    for name, value in tree:
        parts = ["7"]
        match str(name):
            case "LITERAL":
                parts = [chr(value)]
            case "BRANCH":
                parts = [text for branch in value[1] for text in texts(branch)]
            case "SUBPATTERN":
                parts = texts(value[3])
            case "MAX_REPEAT" if value[:2] == (0, 1):
                parts = ["", *texts(value[2])]
            case "IN" if len(value) <= 4 and all(str(kind) == "LITERAL" for kind, _ in value):
                parts = [chr(letter) for _, letter in value]
            case "AT" | "ASSERT" | "ASSERT_NOT":
                parts = [""]
        found = list(dict.fromkeys(one + part for one in found for part in parts))[:4000]
    return found


def test_what_a_pattern_matches_has_one_of_its_words():
    """Else the pattern is never tried there, silently."""
    parser = pytest.importorskip("re._parser", reason="Python's own parser of patterns, since 3.11")

    def check(one):
        known = {word.encode() for word in one.words}
        for text in texts(parser.parse(one.pattern)):
            # What isn't said letter by letter may stand beside a word or be a part of it.
            assert known & (words(text) | words(text.replace("7", " "))), text

    each([one for one in ALL.values() if one.kind != MESSAGE], check, lambda one: one.id)


def test_a_labs_own_come_first(tmp_path, monkeypatch):
    (tmp_path / "signatures").mkdir()
    (tmp_path / "signatures" / "lab.toml").write_text(OWN)
    monkeypatch.setenv("DSRUN_PATH", str(tmp_path))
    found = verdict_on("node1: agent: lease gpu expired", SignatureIndex(find_signatures()))
    assert (found.cause, found.values["name"]) == ("lab", "gpu")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("cause =", "clas ="), ["unknown key 'clas'", "lacks cause"]),
        (("{1,20}) expired", "+) expired"), ["repeat without an end"]),
        (("expired'", "(expired'"), ["no regular expression"]),
        (("means =", 'versions = ["torch-sixx"]\nmeans ='), ["unknown versions 'torch-sixx'", "torch-six"]),
        (('words = ["lease"]', 'words = "lease"'), ["words", "a list of texts"]),
        (("[lab-lease]", 'loose = 1\n[lab-lease]\nkind = "cause"'), ["no table", "kind is 'cause'", "root"]),
    ],
)
def test_what_is_wrong_with_a_labs_own(tmp_path, change, said):
    path = tmp_path / "lab.toml"
    path.write_text(OWN.replace(*change))
    with pytest.raises(DsrunError) as caught:
        signatures.read(path)
    assert all(text in str(caught.value) for text in [*said, str(path)])
