"""DeepSpeed configs behind files that are none: named by a key or a command, or held in a section. Nothing is run."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from dsrun.config.accelerate.launch import KEYS
from dsrun.config.validation.sources import SUFFIXES, YAML, ConfigText
from dsrun.errors import DsrunError
from dsrun.trainers import files, recognise, shell, trainers
from dsrun.trainers.counterparts import Draft
from dsrun.trainers.describe import ACCELERATE, DEEPSPEED, Description, of_script, of_values

SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")


@dataclass(frozen=True)
class ForeignFile:
    """What a file is, and the DeepSpeed configs behind it."""

    what: str
    """As a sentence about the file."""
    next_step: str
    configs: tuple[ConfigText, ...]
    """The configs in other files, which the file names."""
    holds_some: bool = False
    """Whether configs stand in the file itself."""


def within(source: ConfigText) -> ForeignFile | None:
    """What a file is, where it is no config that is checked as it stands; else None."""
    if source.path is None:
        return None
    suffix = source.path.suffix.lower()
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
    """The config that a script's command names; those that it writes itself are checked at their lines in it."""
    text = source.data.decode("utf-8", "replace")
    written = {
        name
        for name, document in shell.read(text).documents.items()
        if any(f'"{key}"' in document for key in DEEPSPEED)
    }
    described = of_script(Path(str(source.path)), text)
    if described.named is None or described.named in written:
        step = described.next_step or "It names no DeepSpeed config."
        return ForeignFile(described.what, "" if written else step, (), holds_some=bool(written))
    return replace(_found(source, described), holds_some=bool(written))
