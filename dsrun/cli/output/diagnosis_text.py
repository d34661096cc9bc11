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
RETRY_TEXTS = {
    True: ("starting it again may help", "重新启动可能会成功"),
    False: ("starting it again as it is won't help", "原样重新启动没有用"),
}
"""Texts by whether a retry may help, in English and in Chinese."""
CHINESE = {
    "cause": "原因", "no cause": "未知原因", "first": "最先出错", "line": "日志行", "at": "位置", "may be": "可能是",
    "tell apart": "如何区分", "make sure": "确认方法", "next": "下一步", "again": "重新启动", "sure": "把握",
    "source": "来源", "more": "更多", "rank": "进程", "on": "主机", "time": "时间", "high": "高", "medium": "中",
    "low": "低", "none": "无", "it says": "程序自述", "looks like": "类似于", "stood in": "停在",
    "slow": "较慢", "memory": "显存",
}  # fmt: skip
"""Labels of the lines, and grades of confidence."""
SENTENCES = ("cause", "no cause", "it says", "looks like", "slow", "may be", "tell apart", "next")
"""Lines that are folded in a narrow terminal; a log's line and a command stay in one piece, to be copied."""


def show(diagnosis: Diagnosis) -> None:
    """Print it: the headline, then a line for each thing that is known."""
    from dsrun.jobs.diagnosis.diagnosis import speaks_chinese

    chinese = speaks_chinese(os.environ)
    for name, text in rows(diagnosis, chinese):
        row = f"{CHINESE[name]}：{printable(text)}" if chinese else f"{name:<{WIDTH}}{printable(text)}"
        if name in SENTENCES and not chinese:
            echo_folded(row, WIDTH)
        else:
            click.echo(row)


def rows(diagnosis: Diagnosis, chinese: bool) -> Iterator[tuple[str, str]]:
    """Names and texts, the headline first."""
    from dsrun.jobs.diagnosis.memory import division_text

    yield ("cause" if diagnosis.cause else "no cause"), diagnosis.summary
    if first := _first(diagnosis, chinese):
        yield "first", first
    if diagnosis.line:
        yield "line", diagnosis.line
        yield "at", diagnosis.where or ""
    for line in diagnosis.lines:
        if diagnosis.line and not line.endswith(diagnosis.line):
            yield "line", line
    for call in diagnosis.stack:
        yield "stood in", call
    for quote in diagnosis.quotes:
        if quote not in diagnosis.next_step and quote not in diagnosis.summary:
            yield "it says", f'"{quote}"'
    if diagnosis.memory:
        for line in division_text.rows(diagnosis.memory, chinese):
            yield "memory", line
    for note in diagnosis.slow:
        yield "slow", note["means"]
    if like := diagnosis.looks_like:
        yield (
            "looks like",
            f"{like['signature']} ({like['cause']}), which this isn't for sure: {like['summary']}",
        )
    if diagnosis.causes:
        yield "may be", "; ".join(diagnosis.causes)
    if diagnosis.tell_apart:
        yield "tell apart", diagnosis.tell_apart
    if diagnosis.check:
        yield "make sure", diagnosis.check
    yield "next", diagnosis.next_step
    if diagnosis.retry is not None:
        yield "again", RETRY_TEXTS[diagnosis.retry][chinese]
    yield "sure", CHINESE[diagnosis.confidence] if chinese else diagnosis.confidence
    if diagnosis.source:
        yield "source", diagnosis.source
    if diagnosis.signature:
        yield "more", f"dsrun explain {diagnosis.signature}"


def _first(diagnosis: Diagnosis, chinese: bool) -> str:
    """The first failing rank with host and time, as far as they are known."""
    facts = (("rank", diagnosis.rank), ("on", diagnosis.host), ("time" if chinese else "at", diagnosis.time))
    parts = [f"{CHINESE[name] if chinese else name} {value}" for name, value in facts if value is not None]
    if diagnosis.rank_by and not chinese:
        parts.append(f"({diagnosis.rank_by})")
    return ("，" if chinese else " ").join(parts)
