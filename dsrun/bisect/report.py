"""What a bisection found, in words and as an entry for presets/versions/."""

from __future__ import annotations

import json
from collections.abc import Iterator

from dsrun.bisect.search import BisectResult, Culprit, Versions, in_words


def told(answer: BisectResult, said: str) -> Iterator[str]:
    """The lines for the terminal. said: what the probe said of the first wrong release."""
    for culprit in answer.culprits:
        yield f"{culprit.package} {culprit.first_wrong} is wrong, {culprit.last_right} is right"
        if culprit.untold:
            yield f"  between them it can't be told: {', '.join(culprit.untold)}"
    if len(answer.culprits) > 1:
        yield "It takes all of these packages together."
    if answer.others:
        yield f"Beside {in_words(answer.others)}."
    if said:
        yield f"What it says: {said}"


def entry(answer: BisectResult, good: Versions, bad: Versions, said: str, command: str) -> str:
    """The entry for presets/versions/, to be checked by hand: its severity, who else reports it."""
    name = "-".join(["bisected", *(culprit.package for culprit in answer.culprits)])
    rows = {culprit.package: specifier(culprit, good, bad) for culprit in answer.culprits}
    right = ", ".join(f"{culprit.package} {culprit.last_right}" for culprit in answer.culprits[:1])
    rows |= {
        "severity": "error",
        "happens": said or "the probe fails",
        "do": f"Install {right}.",
        "basis": f"tried: {command}" + (f", beside {in_words(answer.others)}" if answer.others else ""),
    }
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in rows.items()]
    return "\n".join([f"[{name}]", *lines, 'sources = [""]  # the thread or change that tells of it', ""])


def specifier(culprit: Culprit, good: Versions, bad: Versions) -> str:
    """The wrong releases as far as they were tried: from the first wrong one to the bad version."""
    wrong, worst = culprit.first_wrong, bad[culprit.package]
    upwards = _numbers(good[culprit.package]) < _numbers(worst)
    if wrong == worst:
        return f"=={wrong}"
    return f">={wrong},<={worst}" if upwards else f">={worst},<={wrong}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
