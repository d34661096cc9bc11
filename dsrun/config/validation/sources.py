"""The texts that `dsrun validate` checks: files, folders, and a pipe's."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dsrun.catalog import suggestion
from dsrun.config.reading.places import MAX_BYTES
from dsrun.config.reading.scripts import PYTHON, SHELL, suffix_of
from dsrun.config.schemas import schema
from dsrun.errors import DsrunError, Problem, collected

STDIN, PIPE = "-", "<stdin>"
SUFFIXES = (".json", ".json5", ".jsonc", ".hjson")
YAML = (".yaml", ".yml")
SKIPPED = frozenset(("node_modules", "__pycache__", "site-packages"))
# Usual names of a DeepSpeed config, for texts that can't tell by themselves.
NAME = re.compile(r"deepspeed|(?:^|[^a-z])(?:ds|zero)(?:[^a-z]|$)", re.IGNORECASE)
# Keys that only a DeepSpeed config has at the top level.
TELLING = frozenset({
    "zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer",
})  # fmt: skip


@dataclass(frozen=True)
class ConfigText:
    """A text to check."""

    name: str
    data: bytes
    path: Path | None
    """Its file, or what a text's would be called; None for the pipe's text."""

    @property
    def is_python(self) -> bool:
        return self.path is not None and self.path.suffix.lower() in PYTHON

    @property
    def is_script(self) -> bool:
        return self.is_python or (self.path is not None and self.path.suffix.lower() in SHELL)

    @property
    def is_yaml(self) -> bool:
        return self.path is not None and self.path.suffix.lower() in YAML


def of_text(data: bytes, name: str | None) -> ConfigText:
    """A text that is in no file. name: a file's, whose ending says what the text is; None: its lines say it."""
    if name is None:
        suffix = suffix_of(data[:MAX_BYTES].decode("utf-8", "replace"))
        if suffix in SUFFIXES:
            return ConfigText("config", data, None)
        name = f"config{suffix}"
    return ConfigText(name, data, Path(name))


def gather(names: Iterable[str]) -> tuple[list[ConfigText], list[Problem]]:
    """The texts behind the names, in order, each once, and the problems of names that lead to none.

    In a folder, every file that looks like a DeepSpeed config.
    """
    texts: dict[str, ConfigText] = {}
    problems: list[Problem] = []
    for name in names:
        with collected(problems):
            for source in _behind(name, problems):
                texts.setdefault(_identity(source), source)
    return list(texts.values()), problems


def one(name: str) -> ConfigText:
    """The text behind the name of a file. Raises DsrunError where there is none."""
    if name != STDIN and os.path.isdir(os.path.expanduser(name)):  # noqa: PTH111, PTH112 - see _behind
        raise DsrunError("is a folder", where=name, hint="Name a file.")
    return next(_behind(name, []))


def _identity(source: ConfigText) -> str:
    """The identity of a text, the same for two names of one file."""
    return STDIN if source.path is None else os.path.realpath(source.path)


def _behind(name: str, problems: list[Problem]) -> Iterator[ConfigText]:
    if name == STDIN:
        yield ConfigText(PIPE, from_base64(sys.stdin.buffer.read(MAX_BYTES + 1)), None)
        return
    # Not Path's own methods, which raise where a name is too long or the home of nobody's.
    expanded = os.path.expanduser(name)  # noqa: PTH111
    path = Path(expanded)
    if not os.path.isdir(expanded):  # noqa: PTH112
        yield ConfigText(name, read(path), path)
        return
    refused: list[Problem] = []
    inside = list(_inside(path, refused))
    if not inside and not refused:
        raise DsrunError("holds no DeepSpeed config", where=name, hint="Name the file itself.")
    problems += refused
    yield from inside


def from_base64(data: bytes) -> bytes:
    """DeepSpeed takes a config as url-safe base64 too, in place of a file's name (runtime/config.py)."""
    text = data.strip()
    if text[:1] in (b"{", b"[", b'"') or not 8 < len(text) < MAX_BYTES or len(text) % 4:
        return data
    try:
        decoded = base64.b64decode(text, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return data
    return decoded if decoded.lstrip()[:1] == b"{" else data


def read(path: Path) -> bytes:
    """A file's bytes, one more than the largest a config may have. Raises DsrunError where it can't be read."""
    try:
        with open(path, "rb", opener=_opened) as file:
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        other = "" if path.suffix in YAML else " DeepSpeed would take the name for a config in base64."
        hint = suggestion(path.name, _beside(path), f"Check the path.{other}")
        raise DsrunError("no such file", where=str(path), hint=hint) from None
    except OSError as error:
        raise DsrunError(f"can't be read: {error.strerror}", where=str(path)) from error


def _opened(path: str, flags: int) -> int:
    """Opens without waiting for a pipe's writer: a pipe that nobody writes to is empty."""
    handle = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISFIFO(os.fstat(handle).st_mode):
        os.set_blocking(handle, True)
    return handle


def _beside(path: Path) -> list[str]:
    """The names in the folder where a file would be."""
    try:
        return os.listdir(path.parent)  # noqa: PTH208 - names are enough
    except OSError:
        return []


def _inside(folder: Path, problems: list[Problem]) -> Iterator[ConfigText]:
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in SKIPPED and not name.startswith("."))
        for name in sorted(files):
            path = Path(root) / name
            if path.suffix.lower() not in SUFFIXES + YAML or not _is_fit(path):
                continue
            try:
                source = ConfigText(str(path), read(path), path)
            except DsrunError as error:
                problems += error.problems
                continue
            if _looks_like_a_config(source):
                yield source


def _is_fit(path: Path) -> bool:
    """Whether a name in a folder is a file, and none too large for a config."""
    try:
        return path.is_file() and path.stat().st_size <= MAX_BYTES
    except OSError:
        return False


def is_plainly_a_config(source: ConfigText) -> bool:
    """Whether a text is a DeepSpeed config, or meant as one, by its top level: JSON with a key of DeepSpeed's, or what
    can't be read as JSON alone. What a pipe brings is taken for one."""
    if source.path is None:
        return True
    if source.path.suffix.lower() not in SUFFIXES:
        return False
    try:
        value = json.loads(source.data)
    except (ValueError, RecursionError):
        return True
    return (
        not isinstance(value, dict) or not value or bool(set(schema.load().root["properties"]) & set(value))
    )


def _looks_like_a_config(source: ConfigText) -> bool:
    if source.is_yaml:
        return re.search(rb"^(deepspeed|fsdp)_config:", source.data, re.MULTILINE) is not None
    try:
        value = json.loads(source.data)
    except (ValueError, RecursionError):
        return bool(NAME.search(source.name.rpartition("/")[2]))
    if not isinstance(value, dict) or "json-schema.org" in str(value.get("$schema")):
        return False
    known = set(schema.load().root["properties"]) if NAME.search(source.name.rpartition("/")[2]) else TELLING
    return bool(known & set(value)) or bool(TELLING & set(value))
