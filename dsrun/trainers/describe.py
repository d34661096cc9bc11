"""What a file of somebody else's is, and which command of dsrun takes it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError
from dsrun.files import read_text
from dsrun.trainers import files, recognise, shell

ACCELERATE = "accelerate"
DEEPSPEED = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu")
"""Keys of which one at least stands in a DeepSpeed config."""
NAMING = ("deepspeed", "deepspeed_config", "deepspeed_config_file")
"""Keys by which a file names a DeepSpeed config, or holds one."""


@dataclass(frozen=True)
class Description:
    """A file, in words."""

    what: str
    """As a sentence about the file: "is a file of LLaMA-Factory's"."""
    next_step: str = ""
    named: str | dict[str, Any] | None = None
    """The DeepSpeed config that it names, or holds."""
    readable: bool = True
    foreign: bool = False
    """Whether it is known to be neither accelerate's nor DeepSpeed's."""


def describe(path: Path) -> Description:
    """What a file is. One that can't be read is said to be so; nothing is raised."""
    try:
        text = read_text(path)
        if path.suffix.lower() not in files.DOCUMENTS:
            return of_script(path, text)
        values, _ = files.arguments_of(path, text)
    except DsrunError as error:
        return Description(f"can't be read: {error.problems[0].what}", readable=False)
    return of_values(values, str(path))


def of_values(values: Mapping[str, Any], name: str) -> Description:
    """What a file with these keys is. name: its path, for the commands."""
    quoted = shlex.quote(name)
    known, what = recognise.recognised(values), recognise.other(values)
    if what and (known is None or not {"dataset", "datasets", "train_file"} & set(values)):
        return Description(f"looks like {what}", named=_named(values), foreign=True)
    if known is not None and known.name == ACCELERATE:
        step = f"It says how ranks are started: dsrun launch --accelerate {quoted} SCRIPT, or dsrun import {quoted}"
        return Description("is accelerate's YAML", step, _named(values))
    if known is not None:
        step = f"Make a run file of it: dsrun import {quoted} -o run.toml"
        return Description(f"looks like a training of {known.title}'s", step, _named(values), foreign=True)
    if set(DEEPSPEED) & set(values):
        return Description(
            "is a DeepSpeed config", f"Train with it: dsrun finetune MODEL --deepspeed {quoted}"
        )
    return Description(files.not_a_trainers(values), named=_named(values))


def _named(values: Mapping[str, Any]) -> str | dict[str, Any] | None:
    """A DeepSpeed config that a file names, or holds."""
    for key in NAMING:
        value = values.get(key)
        if isinstance(value, str) and value.lower() not in ("none", "true", "false", "") and "." in value:
            return value
        if isinstance(value, dict) and set(DEEPSPEED) & set(value):
            return value
    return None


def of_script(path: Path, text: str) -> Description:
    """What a shell's script is, by its first command that starts a training."""
    script = shell.read(text)
    quoted = shlex.quote(str(path))
    if not script.commands:
        return Description("is a script that starts no training that dsrun knows")
    command = script.commands[0]
    given, _ = shell.own_arguments(command.words)
    step = f"Make a run file of it: dsrun import {quoted} -o run.toml"
    return Description(f"is a script; line {command.line} starts {command.program}", step, _named(given))
