"""DeepSpeed configs in files that are none: named by a key, held in a section, written by a script, a dict of Python's.

Nothing is run: a script's heredocs and a Python file's dict literals are read from their texts.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.config.accelerate.launch import KEYS
from dsrun.config.validation.sources import SUFFIXES, YAML, ConfigText
from dsrun.errors import DsrunError
from dsrun.trainers import files, recognise, shell, trainers
from dsrun.trainers.counterparts import Draft
from dsrun.trainers.describe import ACCELERATE, DEEPSPEED, Description, describe, of_values

SCRIPTS, PYTHON = (".sh", ".bash", ".slurm", ".sbatch"), (".py",)


@dataclass(frozen=True)
class ForeignFile:
    """What a file is, and the DeepSpeed configs behind it."""

    what: str
    """As a sentence about the file."""
    next_step: str
    configs: tuple[ConfigText, ...]


def within(source: ConfigText) -> ForeignFile | None:
    """What a file is, where it is no config that is checked as it stands; else None."""
    if source.path is None:
        return None
    suffix = source.path.suffix.lower()
    if suffix in PYTHON:
        return _of_python(source)
    if suffix in SCRIPTS:
        return _of_script(source)
    if suffix in YAML or suffix in SUFFIXES:
        return _of_document(source, is_yaml=suffix in YAML)
    return None


def _of_document(source: ConfigText, *, is_yaml: bool) -> ForeignFile | None:
    """A YAML that isn't accelerate's, or a JSON without any key of DeepSpeed's."""
    try:
        values, _ = files.arguments_of(Path(source.name), source.data.decode("utf-8-sig"))
    except (DsrunError, UnicodeDecodeError):
        return None  # its reader says what is wrong
    if set(DEEPSPEED) & set(values) and not is_yaml:
        return None
    known = recognise.recognised(values)
    if is_yaml and set(KEYS) & set(values) and (known is None or known.name == ACCELERATE):
        return None
    described = of_values(values, source.name)
    if not is_yaml and known is None and not recognise.other(values) and described.named is None:
        return None  # keys that DeepSpeed doesn't know are told one by one
    return _found(source, described)


def _found(source: ConfigText, described: Description) -> ForeignFile:
    named = described.named
    if isinstance(named, dict):
        text = ConfigText(f"{source.name} (deepspeed)", json.dumps(named).encode(), None)
        return ForeignFile(described.what, "", (text,))
    if named is None:
        return ForeignFile(described.what, described.next_step or "It names no DeepSpeed config.", ())
    path = Draft(trainers()[ACCELERATE], {}, folder=Path(str(source.path)).absolute().parent).find(named)
    if path is None or not path.is_file():
        return ForeignFile(f"{described.what}, and names {named}, which isn't here", described.next_step, ())
    return ForeignFile(described.what, "", (ConfigText(str(path), path.read_bytes(), path),))


def _of_script(source: ConfigText) -> ForeignFile:
    """The configs that a script writes by heredocs, and the one that its command names."""
    script = shell.read(source.data.decode("utf-8", "replace"))
    written = [
        ConfigText(f"{source.name} ({name})", text.encode(), None)
        for name, text in script.documents.items()
        if any(f'"{key}"' in text for key in DEEPSPEED)
    ]
    described = describe(Path(str(source.path)))
    held = {text.name.rpartition("(")[2].removesuffix(")") for text in written}
    if described.named is None or described.named in held:
        step = described.next_step or "It names no DeepSpeed config."
        return ForeignFile(described.what, "" if written else step, tuple(written))
    found = _found(source, described)
    return ForeignFile(found.what, found.next_step, (*written, *found.configs))


def _of_python(source: ConfigText) -> ForeignFile:
    """The dict literals of a Python file that are DeepSpeed configs."""
    try:
        tree = ast.parse(source.data)
    except (SyntaxError, ValueError) as error:
        return ForeignFile(f"is a Python file that can't be read: {error}", "", ())
    texts = tuple(
        ConfigText(f"{source.name}:{line}", json.dumps(value).encode(), None)
        for line, value in _literals(tree)
    )
    step = "" if texts else "No dict in it is a DeepSpeed config that can be read without running it."
    return ForeignFile("is a Python file", step, texts)


def _literals(tree: ast.AST) -> Iterator[tuple[int, dict[str, Any]]]:
    """The outermost dicts with keys of a DeepSpeed config, and their lines. One with a value that only running it would
    tell has that value left out."""
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Dict) or node in inside:
            continue
        value = _value(node)
        if isinstance(value, dict) and set(DEEPSPEED) & set(value):
            inside |= set(ast.walk(node))
            yield node.lineno, value


def _value(node: ast.expr) -> Any:
    """A literal's value; None for what is worked out when it runs."""
    if isinstance(node, ast.Dict):
        return {
            key.value: inner
            for key, item in zip(node.keys, node.values, strict=True)
            if isinstance(key, ast.Constant)
            and isinstance(key.value, str)
            and (inner := _value(item)) is not None
        }
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(item) for item in node.elts]
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return None
    return value if isinstance(value, (str, int, float, bool)) else None
