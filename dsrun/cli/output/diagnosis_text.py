"""A diagnosis on the terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from dsrun.cli.output.columns import echo_folded
from dsrun.words import printable

if TYPE_CHECKING:
    from dsrun.jobs.diagnosis.diagnosis import Diagnosis

WIDTH = 12
AGAIN = {
    True: ("starting it again may help", "重新启动可能会成功"),
    False: ("starting it again as it is won't help", "原样重新启动没有用"),
}
"""By whether it may help: in English and in Chinese."""
CHINESE = {
    "cause": "原因", "no cause": "未知原因", "first": "最先出错", "line": "日志行", "at": "位置", "may be": "可能是",
    "tell apart": "如何区分", "make sure": "确认方法", "next": "下一步", "again": "重新启动", "sure": "把握",
    "source": "来源", "more": "更多", "rank": "进程", "on": "主机", "time": "时间", "high": "高", "medium": "中",
    "low": "低", "none": "无",
}  # fmt: skip
"""What stands before the texts, and how sure it is."""
SENTENCES = ("cause", "no cause", "may be", "tell apart", "next")
"""What is folded in a narrow terminal; a log's line and a command stay in one piece, to be copied."""


def show(found: Diagnosis) -> None:
    """Print it: the headline, then a line for each thing that is known."""
    from dsrun.jobs.diagnosis.diagnosis import speaks_chinese

    chinese = speaks_chinese(os.environ)
    for name, text in rows(found, chinese):
        row = f"{CHINESE[name]}：{printable(text)}" if chinese else f"{name:<{WIDTH}}{printable(text)}"
        if name in SENTENCES and not chinese:
            echo_folded(row, WIDTH)
        else:
            click.echo(row)


def rows(found: Diagnosis, chinese: bool) -> Iterator[tuple[str, str]]:
    """Names and texts, the headline first."""
    yield ("cause" if found.cause else "no cause"), found.summary
    if first := _first(found, chinese):
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
        yield "again", AGAIN[found.retry][chinese]
    yield "sure", CHINESE[found.confidence] if chinese else found.confidence
    if found.source:
        yield "source", found.source
    if found.signature:
        yield "more", f"dsrun explain {found.signature}"


def _first(found: Diagnosis, chinese: bool) -> str:
    """The first failing rank with host and time, as far as they are known."""
    said = (("rank", found.rank), ("on", found.host), ("time" if chinese else "at", found.time))
    parts = [f"{CHINESE[name] if chinese else name} {value}" for name, value in said if value is not None]
    if found.rank_by and not chinese:
        parts.append(f"({found.rank_by})")
    return ("，" if chinese else " ").join(parts)
