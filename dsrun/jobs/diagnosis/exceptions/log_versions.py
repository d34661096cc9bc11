"""Releases of packages that a log shows: in a list of them, a banner, a requirement that was found wanting."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from dsrun.jobs.diagnosis.reading.log_lines import PeeledLine

ALSO = {"torch": "pytorch", "flash-attn": "flash[-_ ]attention"}
"""Other names that logs give a package."""
MOST_LINES = 4000
"""Lines of a log's beginning and of its end that are read for releases."""
WANTED = re.compile(r"[<>~!]=?|(?i:requir|need|support|since|from|until|before|upgrade|install )")
"""Marks of a line that speaks of a release that is wanted, and not of the one that is there."""
FOUND = re.compile(r"(?i)\b(?:but (?:found|got|you have)|found|detected|installed|version is)\b[: ]{1,3}")
"""Words after which such a line names the one that is there."""


@lru_cache(maxsize=32)
def _pattern(package: str) -> re.Pattern[str]:
    name = re.escape(package).replace(r"\-", "[-_]")
    if other := ALSO.get(package):
        name = f"(?:{name}|{other})"
    return re.compile(
        rf"(?i)(?<![\w./-]){name}['\"`]?(?:[\s_]{{1,40}}(?:info[: ]{{1,2}})?version(?: \(GPU\?\))?)?"
        rf"['\"`]?(?:\s?(?:==|[:=-])\s?|\s{{1,40}}|\sversion\s?)v?(?P<release>\d{{1,4}}\.\d{{1,4}}(?:\.\d{{1,6}})?)"
        rf"(?P<suffix>[\w.+]{{0,30}})"
    )


def releases_in(lines: Iterable[PeeledLine], packages: Iterable[str]) -> Mapping[str, str]:
    """The release of each package that the lines show; the first that a line states counts."""
    texts = [line.whole for line in lines]
    if len(texts) > 2 * MOST_LINES:
        texts = texts[:MOST_LINES] + texts[-MOST_LINES:]
    found: dict[str, str] = {}
    for package in packages:
        key = (ALSO.get(package, package)[:5], package[:5])
        for text in texts:
            lower = text.lower()
            if any(part in lower for part in key) and (release := _release(text, package)):
                found[package] = release
                break
    return found


def _release(text: str, package: str) -> str:
    """The release that a line states a package to have; empty where it only wants one."""
    if stated := FOUND.search(text):
        text = text[stated.end() :]
    elif WANTED.search(text):
        return ""
    hit = _pattern(package).search(text)
    return hit["release"] if hit else ""
