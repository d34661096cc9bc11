"""The table of examples beside what transformers renders (bench/chat_text.py): what it finds equal, and what not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from needed import needs

needs("transformers")

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "bench"))

import chat_text


def test_two_families_are_equal_but_for_named_differences(tmp_path):
    page = tmp_path / "page.md"
    argv = [sys.executable, str(ROOT / "bench/chat_text.py"), "--family", "QwQ", "--family", "GLM-4"]
    subprocess.run([*argv, "--trl", str(tmp_path), "--output", str(page)], check=True, timeout=300)
    text = page.read_text(encoding="utf-8")
    assert "| GLM-4 | equal M | equal M |" in text
    assert "| QwQ | equal T | equal A T |" in text
    assert "own template of the same form" in text


def test_a_section_that_another_script_made_stays(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"old\n\n{chat_text.TITLE}\n\nkept\n", encoding="utf-8")
    argv = [sys.executable, str(ROOT / "bench/chat_text.py"), "--family", "ChatGLM3", "--output", str(page)]
    subprocess.run(argv, check=True, timeout=300)
    text = page.read_text(encoding="utf-8")
    assert text.endswith(f"{chat_text.TITLE}\n\nkept\n")
    assert "old" not in text


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda ids, start: [*ids[: start - 1], *ids[start:]], "prompt"),
        (lambda ids, start: [*ids[:start], *ids[start + 1 :]], "for"),
        (lambda ids, _: ids[:-1], "mark"),
        (lambda ids, start: [*ids[:start], *ids], "for"),
    ],
)
def test_any_other_difference_is_one(change, why, monkeypatch):
    """A prompt without its last token, an answer without its first, one without its end, and one with the prompt."""
    family = chat_text.FAMILIES["Phi-4"]
    judge = chat_text.Judge("Phi-4", family, family.own)
    made = judge._examples

    def changed(case, hostile):
        (example,) = made(case, hostile)
        start = example.prompt_tokens
        ids = change(example.ids, start)
        start -= len(example.ids) - len(ids) if len(ids) < len(example.ids) and why == "prompt" else 0
        return [example._replace(ids=ids, spans=((start, len(ids)),))]

    case = chat_text.CASES["one turn"]
    assert judge.cell(case)[0] == "equal"
    monkeypatch.setattr(judge, "_examples", changed)
    with pytest.raises(chat_text.UnexplainedError, match=why):
        judge.cell(case)


def test_what_has_a_place_and_is_refused_all_the_same_is_told(monkeypatch):
    family = chat_text.FAMILIES["QwQ"]
    judge = chat_text.Judge("QwQ", family, family.own)

    def refuse(*_):
        raise chat_text.BadRowError("for no reason")

    monkeypatch.setattr(judge, "_examples", refuse)
    with pytest.raises(chat_text.UnexplainedError, match="refused: for no reason"):
        judge.cell(chat_text.CASES["one turn"])
