"""The run file of an imported training, and the list of what has no counterpart."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsrun.options import run_file
from dsrun.options.commands import FinetuneOptions
from dsrun.options.declare import entries
from dsrun.trainers import arguments
from dsrun.trainers.counterparts import ANYWAY, DIFFERS, LEFT_OUT, SAME, UNKNOWN, Draft, Outcome

HEADS = {
    DIFFERS: "Without a counterpart: the training differs in it",
    UNKNOWN: "Unknown to dsrun: what does it do?",
    LEFT_OUT: "Without a counterpart: the training is the same",
    ANYWAY: "Nothing to say: dsrun does so, or it is off",
}
"""Kinds of arguments that are no option, the gravest first."""
LONGEST = 2000
"""Characters of a value in a comment."""


def run_text(draft: Draft, name: str, folder: Path) -> str:
    """The run file. name: the file it is made of; folder: the place of the new file, which its paths start from."""
    release = arguments.version(draft.trainer.name)
    title = draft.trainer.title + (f" {release}" if release else "")
    lines = [
        f"# Imported from {_comment(name)} ({title}): dsrun finetune FILE. A comment names the argument that",
        "# a value is of. Every option: dsrun finetune --help-all",
        "",
    ]
    model = draft.model
    if model is None:
        lines.append('# model = "..."  # the file names none')
    else:
        shown = run_file.relative(model, folder) if model.startswith("/") else model
        lines.append(f"model = {run_file.toml(shown)}")
    known = entries(FinetuneOptions)
    group = ""
    for entry in known.values():
        if entry.name not in draft.options:
            continue
        if entry.group != group:
            group = entry.group
            lines += ["", f"# --- {group}"]
        setting = draft.options[entry.name]
        value = entry.typed(setting.value)
        lines.append(f"{run_file.assignment(entry, value, folder)}  # {_comment(setting.source)}")
    written = "\n".join(lines)
    beside = [
        outcome
        for outcome in draft.outcomes.values()
        if outcome.kind == SAME and not _is_written(outcome, written)
    ]
    if beside:
        lines += [
            "",
            "# --- Taken over by the options above",
            *(f"# {line}" for outcome in beside for line in _told(outcome)),
        ]
    for kind, head in HEADS.items():
        outcomes = [outcome for outcome in draft.outcomes.values() if outcome.kind == kind]
        if outcomes:
            lines += ["", f"# --- {head}", *(f"# {line}" for outcome in outcomes for line in _told(outcome))]
    if draft.notes:
        lines += ["", "# --- Notes", *(f"# {_comment(note)}" for note in draft.notes)]
    return "\n".join(lines) + "\n"


def _is_written(outcome: Outcome, text: str) -> bool:
    """Whether an option's line names the argument, and has all of its value."""
    inside = isinstance(outcome.value, dict) or any(isinstance(item, dict) for item in _items(outcome.value))
    return not inside and re.search(rf"#[^\n]*(?<![\w.]){re.escape(outcome.key)}(?![\w.])", text) is not None


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _told(outcome: Outcome) -> Iterator[str]:
    yield f"{_comment(outcome.key)} = {_value(outcome.value)}: {_comment(outcome.text)}"


def _value(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return _comment(text if len(text) <= LONGEST else f"{text[:LONGEST]}...")


def _comment(text: str) -> str:
    """A text in a comment: one line, of what can be printed."""
    return "".join(char if char.isprintable() else " " for char in text)


def summary(draft: Draft) -> dict[str, Any]:
    """The import as JSON has it: the options with their sources, what became of each argument, and notes."""
    return {
        "trainer": draft.trainer.name,
        "release": arguments.version(draft.trainer.name),
        "model": draft.model,
        "options": {
            name: {"value": setting.value, "from": setting.source} for name, setting in draft.options.items()
        },
        "arguments": [
            {
                "name": key,
                "value": outcome.value,
                "line": outcome.line or None,
                "kind": outcome.kind,
                "text": outcome.text,
            }
            for key, outcome in draft.outcomes.items()
        ],
        "notes": draft.notes,
    }


def is_whole(draft: Draft) -> bool:
    """Whether the run that is made trains as the file says."""
    return not any(outcome.kind in (DIFFERS, UNKNOWN) for outcome in draft.outcomes.values())


def kinds(draft: Draft) -> dict[str, int]:
    """How many arguments became what."""
    counts = dict.fromkeys((SAME, *HEADS), 0)
    for outcome in draft.outcomes.values():
        counts[outcome.kind] += 1
    return counts


def folder_of(output: Path | None) -> Path:
    """The folder that the run file's paths start from."""
    return Path.cwd() if output is None else output.expanduser().absolute().parent
