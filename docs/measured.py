"""The pages of measurements: what they are found by, and their index in both languages.

They stand outside of the site's navigation, which leads to their index alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from dsrun.catalog import read_toml

PAGES = Path(__file__).resolve().parent / "reference"
SUBJECTS = PAGES.parent / "measured.toml"
MADE = re.compile(r"^Made by `[^`]+` on (\d{4}-\d\d-\d\d)[,:.]", re.MULTILINE)


def pages() -> dict[str, str]:
    """The date of each page of measurements, by the page's name."""
    heads = {path.stem: MADE.search(path.read_text(encoding="utf-8")) for path in sorted(PAGES.glob("*.md"))}
    return {name: made[1] for name, made in heads.items() if made}


def rows(suffix: str) -> Iterator[list[str]]:
    """The index's rows: what was measured, with the page's link; where; date. suffix: "" or "_zh"."""
    made = pages()
    subjects = read_toml(SUBJECTS)
    if wrong := subjects.keys() ^ made.keys():
        raise ValueError(
            f"{', '.join(sorted(wrong))}: a page of measurements has a table in docs/{SUBJECTS.name} "
            'and a line "Made by `COMMAND` on DATE:" below its heading'
        )
    for name, subject in subjects.items():
        yield [f"[{subject[f'what{suffix}']}]({name}.md)", subject[f"where{suffix}"], made[name]]


def english() -> Iterator[str]:
    """The index's text above its table."""
    yield "# What was measured"
    yield ""
    yield "No machine here had a GPU: cores and ranks are a CPU's, and seconds are those of a shared machine. The"
    yield "versions head each page. [What has run on GPUs](gpu.md) is a page of its own;"
    yield "[packing's speed](../../bench/results/packing-2026-11-22.md) and"
    yield "[memory while a model is loaded](../../bench/results/loading-2026-11-22.md) stand beside their benches."
    yield ""


def chinese() -> Iterator[str]:
    """The index's text above its table, in Chinese."""
    yield "# 实测"
    yield ""
    yield "这里的机器都没有 GPU：核和 rank 都是 CPU 的，时间来自与别人共用的机器。各页（英文）开头写明所用的版本。"
    yield "[哪些功能已在 GPU 上运行过](gpu.md)（英文）另有一页；"
    yield "[packing 的速度](../../bench/results/packing-2026-11-22.md)和"
    yield "[加载模型时的内存](../../bench/results/loading-2026-11-22.md)（均为英文）的表放在测量脚本旁边。"
    yield ""
