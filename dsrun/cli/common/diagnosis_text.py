"""A diagnosis on the terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from dsrun.jobs.diagnosis.diagnosis import Diagnosis

WIDTH = 12
AGAIN = {
    True: ("starting it again may help", "重新启动可能会成功"),
    False: ("starting it again as it is won't help", "原样重新启动没有用"),
}
"""By whether it may help: in English and in Chinese."""


def show(found: Diagnosis) -> None:
    """Print it: the headline, then a line for each thing that is known."""
    from dsrun.cli.common.columns import printable

    for name, text in rows(found):
        click.echo(f"{name:<{WIDTH}}{printable(text)}")


def rows(found: Diagnosis) -> Iterator[tuple[str, str]]:
    """Names and texts, the headline first."""
    from dsrun.jobs.diagnosis.diagnosis import speaks_chinese

    yield ("cause" if found.cause else "no cause"), found.summary
    if first := _first(found):
        yield "first", first
    if found.line:
        yield "line", found.line
        yield "at", found.where or ""
    if found.causes:
        yield "may be", "; ".join(found.causes)
    if found.tell_apart:
        yield "tell apart", found.tell_apart
    if found.check:
        yield "make sure", found.check
    yield "next", found.next_step
    if found.retry is not None:
        yield "again", AGAIN[found.retry][speaks_chinese(os.environ)]
    yield "sure", found.confidence
    if found.source:
        yield "source", found.source
    if found.signature:
        yield "more", f"dsrun explain {found.signature}"


def _first(found: Diagnosis) -> str:
    """The first failing rank with host and time, as far as they are known."""
    parts = [
        f"rank {found.rank}" if found.rank is not None else "",
        f"on {found.host}" if found.host else "",
        f"at {found.time}" if found.time else "",
        f"({found.rank_by})" if found.rank_by else "",
    ]
    return " ".join(filter(None, parts))
