"""The DeepSpeed config of a user's script: one that its arguments name, or a preset's, handed over as it takes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsrun.cluster.python_environment import PythonEnvironment
from dsrun.config import trainer_args
from dsrun.config.rules import Setting
from dsrun.config.schemas import schema
from dsrun.config.validation.sources import read
from dsrun.config.validation.validate import ValidationResult, validate
from dsrun.ds_config import section
from dsrun.errors import DsrunError, Problem
from dsrun.jobs.allocation.allocation import Allocation
from dsrun.jobs.assembly.script.source import HF, OPTION, ScriptSource
from dsrun.options import derived
from dsrun.versions import installed

BY_HAND = "--config-option"
YAML = (".yaml", ".yml")
ARGUMENT_FILES = (*YAML, ".json")
KEY = "deepspeed"
"""The config's name among Hugging Face's arguments, in a file too."""


@dataclass(frozen=True)
class Named:
    """A config that the user's own arguments name. option: as it is written there; file: as they have it."""

    option: str
    file: str


def argument_file(args: Sequence[str], source: ScriptSource) -> str | None:
    """The file that the script takes all of its arguments from, where it does: the first one."""
    if source.argv_file and args and Path(args[0]).suffix in ARGUMENT_FILES:
        return args[0]
    return None


def named(args: Sequence[str], source: ScriptSource, cwd: Path, by_hand: str | None) -> Named | None:
    """The config among a script's arguments; the last one where there are several, as parsers take it."""
    config = None
    for place, word in enumerate(args):
        if word == "--":
            break
        option, equals, value = word.partition("=")
        if source.dotlist and option == KEY and equals:
            config = Named(f"{KEY}=", value)
        elif not (OPTION.fullmatch(option) or option == by_hand):
            continue
        elif equals:
            config = Named(option, value)
        elif place + 1 < len(args) and _takes(option, args[place + 1], source, cwd, by_hand):
            config = Named(option, args[place + 1])
    file = argument_file(args, source)
    if config is None and file is not None:
        return _named_in(cwd / file)
    return config


def _takes(option: str, value: str, source: ScriptSource, cwd: Path, by_hand: str | None) -> bool:
    """Whether the word after an option is its value, and a config."""
    if option == by_hand or any(way[-1] == option for way in source.ways):
        return not value.startswith("-")
    if option in source.flags:
        return False
    return value.endswith(".json") or (not value.startswith("-") and (cwd / value).is_file())


def _named_in(file: Path) -> Named | None:
    """The config that a file of arguments names."""
    import yaml

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return None  # the script will say what is wrong with it
    value = content.get(KEY) if isinstance(content, dict) else None
    return Named(f"{file}: {KEY}", value) if isinstance(value, str) and value else None


def way_of(
    source: ScriptSource, by_hand: str | None, args: Sequence[str], script: str, already: Named | None
) -> tuple[str, ...]:
    """The words that hand a config over, before the file's name. Raises DsrunError where that can't be told."""
    if already is not None:
        fault = f"the script's arguments name a config already: {already.option} {already.file}"
        raise DsrunError(fault, where="--preset", hint="Leave one of them out.")
    if by_hand is not None:
        return (by_hand,)
    file = argument_file(args, source)
    if file is not None and source.dotlist:
        return (f"{KEY}=",)
    if file is not None:
        fault = f"{script} takes its arguments from {file}, and none beside it"
        hint = (
            f"Write the file with `dsrun preset NAME --for hf -o ds.json`, and name it there: {KEY}: ds.json"
        )
        raise DsrunError(fault, where="--preset", hint=hint)
    if source.own_config:
        fault = f"the script makes its DeepSpeed config itself ({source.own_config})"
        hint = f"Set it there. If an option takes a file nevertheless, name it: {BY_HAND} NAME"
        raise DsrunError(fault, where="--preset", hint=hint)
    if len(source.ways) == 1:
        return source.ways[0]
    hint = f"Name the option: {BY_HAND} NAME (NAME= where the file follows in the same word)."
    if not source.ways:
        fault = f"no option of {script} takes a DeepSpeed config, as far as its source tells"
        raise DsrunError(fault, where="--preset", hint=hint)
    ways = " or ".join(f"{' '.join(way)} FILE" for way in source.ways)
    raise DsrunError(
        f"{script} takes a DeepSpeed config in several ways: {ways}", where="--preset", hint=hint
    )


def with_config(args: Sequence[str], way: Sequence[str], file: str) -> tuple[str, ...]:
    """A script's arguments with the config's file: behind them, but before what no parser looks at any more."""
    *switches, last = way
    words = [word for word in switches if word not in args]
    words += [f"{last}{file}"] if last.endswith("=") else [last, file]
    end = args.index("--") if "--" in args else len(args)
    return (*args[:end], *words, *args[end:])


def setting(
    placed: Allocation | None,
    target: str | None,
    trainer: dict[str, Any] | None,
    python: PythonEnvironment | None,
) -> Setting:
    """The surroundings that a config is judged for; placed: None where that is not known. python: the ranks' own."""
    there = python.packages if python else installed()
    surroundings = Setting(
        target=target or "deepspeed",
        trainer=trainer if target == HF else None,
        versions=there,
        **_version(there.get("deepspeed", "")),
    )
    if placed is None:
        return surroundings
    gpus = placed.machine.gpus if placed.accelerator == "cuda" else ()
    return replace(
        surroundings,
        world_size=placed.world_size,
        nodes=len(placed.hosts),
        device=placed.accelerator,
        bf16=all(gpu.compute_capability >= (8, 0) for gpu in gpus) if gpus else None,
        fp16=placed.machine.takes_fp16 if gpus else True,  # a CPU is asked itself (checks.precision)
        gpu_memory_gib=min(gpu.memory_bytes for gpu in gpus) / 2**30 if gpus else None,
    )


def _version(text: str) -> dict[str, Any]:
    """A DeepSpeed's; nothing where it is one without a schema."""
    try:
        return {"version": schema.version_of(text)}
    except DsrunError:
        return {}


def trainer_of(args: Sequence[str], source: ScriptSource) -> dict[str, Any] | None:
    """The Trainer's arguments, from the command line; None where that doesn't have all of them."""
    if not source.plain_arguments or argument_file(args, source):
        return None
    known, pairs = trainer_args.names(), []
    for place, word in enumerate(args):
        option, equals, value = word.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if not option.startswith("--") or name not in known:
            continue
        if not equals:
            following = args[place + 1] if place + 1 < len(args) else "--"
            value = "true" if following.startswith("--") else following
        pairs.append(f"{name}={value}")
    try:
        return trainer_args.given(None, pairs) or {}
    except DsrunError:
        return None  # the Trainer says it better


def judged(
    data: bytes, name: str, surroundings: Setting, target: str | None
) -> tuple[list[Problem], list[str]]:
    """Problems of a config, and remarks on it."""
    return parted([validate(data, name, surroundings, target=target)])


def parted(results: Iterable[ValidationResult]) -> tuple[list[Problem], list[str]]:
    """Errors as problems, warnings as lines for the user."""
    problems, notes = [], []
    for result in results:
        for located in result.findings:
            finding, where = located.finding, f"{result.name}:{located.place.line}:{located.place.column}"
            text = f"$.{located.path}: {finding.cited}"
            if finding.severity == "error":
                problems.append(Problem(text, where, finding.suggestion))
            elif finding.severity == "warning":
                notes.append(f"{where}: {text}. {finding.suggestion}")
    return problems, notes


def judged_file(
    config: Named, cwd: Path, surroundings: Setting, target: str | None
) -> tuple[list[Problem], list[str]]:
    """Problems of the config that the arguments name, and remarks on it. Raises DsrunError where it can't be read."""
    name, content = _content(config, cwd)
    return judged(content, name, surroundings, target)


def precision_of(config: Named, cwd: Path, trainer: Mapping[str, Any] | None) -> str | None:
    """The precision that the config switches on, or leaves to the Trainer's arguments; None where that is open.

    Raises DsrunError where it can't be read; what is no JSON object says nothing, and is refused as that.
    """
    try:
        content = json.loads(_content(config, cwd)[1])
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    left_open = section(content, "fp16").get("enabled") == schema.AUTO
    fp16 = left_open and (trainer or {}).get("fp16") is True
    return "fp16" if fp16 else derived.precision_of(content)


def _content(config: Named, cwd: Path) -> tuple[str, bytes]:
    """The config's name in messages, and its bytes. Raises DsrunError where there is none."""
    if config.file.lstrip().startswith("{"):  # Hugging Face takes the JSON itself
        return config.option, config.file.encode()
    path = cwd / Path(config.file).expanduser() if config.file.startswith("~") else cwd / config.file
    if path.is_dir():
        raise DsrunError("is a folder", where=f"{config.option} {config.file}")
    try:
        return config.file, read(path)
    except DsrunError as error:
        raise DsrunError(
            replace(problem, where=f"{config.option} {config.file}") for problem in error.problems
        ) from error
