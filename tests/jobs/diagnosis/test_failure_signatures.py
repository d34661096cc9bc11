"""Each signature by its own examples, and a lab's own."""

from __future__ import annotations

import random
import re

import pytest
from running import each

from dsrun.errors import DsrunError
from dsrun.host.hiding import without_secrets
from dsrun.jobs.diagnosis import log_files, signatures
from dsrun.jobs.diagnosis.reading.log_lines import folded, narrow_bytes, peeled
from dsrun.jobs.diagnosis.signatures import HARMLESS, MESSAGE, SignatureIndex, find_signatures
from dsrun.jobs.diagnosis.signatures.literals import needed
from dsrun.jobs.diagnosis.verdict import judge

ALL = find_signatures()
INDEX = SignatureIndex(ALL)
OWN = """
[lab-lease]
cause = "lab"
pattern = 'lease (?P<name>[a-z]{1,20}) expired'
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
            assert set(re.findall(r"\{(\w+)\}", text)) <= groups | {"caller", "distribution"}

    each(ALL.values(), check, lambda one: one.id)


def drawn(tree, draw):
    """A text that a parsed pattern matches, but for what it looks at without taking it."""
    return "".join(drawn_part(str(name), value, draw) for name, value in tree)


def drawn_part(name, value, draw):
    match name:
        case "LITERAL":
            return chr(value) if draw.random() < 0.7 else chr(value).upper()
        case "BRANCH":
            return drawn(draw.choice(value[1]), draw)
        case "SUBPATTERN":
            return drawn(value[3], draw)
        case "MAX_REPEAT" | "MIN_REPEAT":
            return "".join(
                drawn(value[2], draw) for _ in range(draw.randint(value[0], min(value[1], value[0] + 3)))
            )
        case "IN":
            kind, what = draw.choice(value)
            return (
                chr(what if str(kind) == "LITERAL" else what[0]) if str(kind) in ("LITERAL", "RANGE") else "7"
            )
        case "AT" | "ASSERT" | "ASSERT_NOT":
            return ""
    return "7"


def test_each_pattern_has_a_text_that_it_cant_do_without():
    """Else it is tried on every line of every log. Texts of fewer than three letters or signs are everywhere."""
    parser = pytest.importorskip("re._parser", reason="Python's own parser of patterns, since 3.11")

    def check(one):
        texts = needed(one.pattern)
        assert texts and all(len(text) > 2 for text in texts), texts
        assert all(narrow_bytes(text) in texts for text in texts), "blocks are searched narrowed"
        tree, draw = parser.parse(one.pattern), random.Random(one.id)
        for _ in range(50):
            text = folded(drawn(tree, draw).encode())
            assert any(needed_one in text for needed_one in texts), text

    each([one for one in ALL.values() if one.kind != MESSAGE], check, lambda one: one.id)


def test_a_pattern_without_such_a_text_is_tried_everywhere(tmp_path, monkeypatch):
    (tmp_path / "signatures").mkdir()
    (tmp_path / "signatures" / "lab.toml").write_text(
        OWN.replace("lease (?P<name>[a-z]{1,20}) expired", "(?P<name>Q{3})")
    )
    monkeypatch.setenv("DSRUN_PATH", str(tmp_path))
    text = tmp_path / "train.log"
    text.write_text("step\n" * 2000 + "agent: QQQ\n" + "step\n" * 2000)
    index = SignatureIndex(find_signatures())
    found = judge(log_files.read([log_files.named(text)], index), index)
    assert (found.cause, found.values["name"]) == ("lab", "QQQ")


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
        (('examples = ["agent: lease gpu expired"]', 'examples = "lease"'), ["examples", "a list of texts"]),
        (("[lab-lease]", 'loose = 1\n[lab-lease]\nkind = "cause"'), ["no table", "kind is 'cause'", "root"]),
    ],
)
def test_what_is_wrong_with_a_labs_own(tmp_path, change, said):
    path = tmp_path / "lab.toml"
    path.write_text(OWN.replace(*change))
    with pytest.raises(DsrunError) as caught:
        signatures.read(path)
    assert all(text in str(caught.value) for text in [*said, str(path)])
