"""One name for one thing: the field's terms, and no home-made words beside them, in all that people read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A pattern of home-made words -> the term in their place.
TERMS = {
    r"in silence": "silently",
    r"(begins?|start(s|ed)?|read|divided|given|made) anew": "starts over, again",
    r"go(es)? with(?! -)": "matches, works with",
    r"(is|are) no key": "unknown key",
    r"so many(?! \w+ that)": "the number, that many",
    r"mend(s|ed|ing)?": "fix",
    r"wish(es)?": "request, run options",
    r"dealt|deals? out": "sharded",
    r"talks?": "conversation, chat, communicate",
    r"(environment|variables?|what) travels?|travelling": "forwarded environment",
    r"(a )?faults? (in|of) dsrun( itself|'s own)?": "internal error (bug in dsrun)",
    r"its own affair": "(say what follows)",
    r"tuning method": "PEFT method",
    r"spoken to": "prompt format",
    r"brake|pen of": "interrupt handler, streamer",
    r"oddit(y|ies)": "syntax issue",
    r"departures?": "schema violation",
    r"contrast(s|ed)?": "compare runs",
}
HOME_MADE = re.compile(rf"\b({'|'.join(TERMS)})\b", re.IGNORECASE)
CODE_SPAN = re.compile(r"`[^`]*`")
CLASSES = {
    "Talk", "Round", "Lengths", "Wish", "Wishes", "Going", "Wanted", "Reach", "Placed", "Share", "Claim", "Take",
    "Look", "Head", "Peer", "Orders", "Oddity", "Contrast", "Letters", "Pen", "Brake", "Ask",
}  # fmt: skip
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
MODULES = sorted((ROOT / "dsrun").rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a page, without code; the texts of a module that have several words: messages, help, docstrings."""
    if path.suffix != ".py":
        lines = path.read_text(encoding="utf-8").splitlines()
        yield from enumerate((CODE_SPAN.sub("", line) for line in lines), 1)
        return
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, " ".join(node.value.split())


def test_there_are_texts():
    assert len(MODULES) > 200 and len(PAGES) > 30


@pytest.mark.parametrize("paths", [PAGES, MODULES], ids=["pages", "modules"])
def test_the_terms_of_the_field(paths):
    found = [
        f"{path.relative_to(ROOT)}:{line}: {hit[0]!r} in {text[max(0, hit.start() - 30) : hit.end() + 30]!r}"
        for path in paths
        for line, text in texts(path)
        for hit in HOME_MADE.finditer(text)
    ]
    assert found == []


def test_class_names():
    trees = [parsed(path) for path in MODULES]
    found = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    assert len(found) > 200
    assert not found & CLASSES
