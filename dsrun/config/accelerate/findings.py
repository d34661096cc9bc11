"""`dsrun validate` of an accelerate YAML: its own keys, and the ds_config that it holds or names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsrun.config.accelerate.launch import BESIDE, INLINE, MISSING, PATHS, REFERENCED, SECTION, LaunchConfig
from dsrun.config.rules.file.text import IGNORE
from dsrun.config.rules.readers.accelerate_file import TOP
from dsrun.config.schemas import schema
from dsrun.config.validation import validate as validation
from dsrun.config.validation.sources import ConfigText, from_base64, read
from dsrun.config.validation.validate import RuleSelection, ValidationResult
from dsrun.errors import DsrunError

if TYPE_CHECKING:
    from dsrun.config.reading.document import Document
    from dsrun.config.rules import Setting

HERE = f"{TOP}."
# Paths, not words such as zero_optimization; the longest first, so that none is cut short.
SPOKEN = re.compile(
    "|".join(rf"\b{re.escape(path)}\b(?!\.\w)" for path in sorted(PATHS, reverse=True) if "." in path)
)


def validate(
    source: ConfigText, setting: Setting, selection: RuleSelection, *, target: str | None = None
) -> list[ValidationResult]:
    """The result on the YAML, and the one on the DeepSpeed config that it names, if it does.

    target: "hf" where the script that is launched trains with HF Trainer, which fills in "auto" by itself; so it
    does where there are TrainingArguments. Otherwise it is accelerate alone. Raises DsrunError for other readers.

    What accelerate builds of the YAML's own settings is judged as the YAML. Fixes are left out: they are made
    for JSON. So are notes on what only a DeepSpeed config can say.
    """
    from dsrun.config.reading import yaml_document

    if target not in (None, *schema.FILLING):
        hint = "Say --for hf (the script trains with HF Trainer) or --for accelerate."
        raise DsrunError(
            f"a launch config is for accelerate: {target} doesn't read it", where=source.name, hint=hint
        )
    by_trainer = target == schema.HF or (target is None and setting.trainer is not None)
    setting = replace(setting, target=schema.HF if by_trainer else schema.ACCELERATE)
    try:
        document = yaml_document.read(source.data, source.name)
    except DsrunError as error:
        return [validation.unread(error, source.name, setting)]
    launch = LaunchConfig(document.value)
    around = _around(launch, setting)
    if not launch.by_deepspeed:
        return [_judged(document, launch.given, {}, around, selection)]
    if launch.file is None:
        config = launch.config()
        if by_trainer:
            # TrainingArguments decide the precision, before accelerate writes mixed_precision into the config.
            config = {key: value for key, value in config.items() if key not in ("bf16", "fp16")}
        return [_judged(document, launch.given, config, around, selection, builds=True)]
    fault, path = find(launch.file, source.path)
    given = {**launch.given, **({REFERENCED: fault} if fault else {})}
    theirs = [_referenced(path, around, selection)] if path else []
    config = theirs[0].document.value if theirs and theirs[0].document else {}
    return [_judged(document, given, config, around, selection), *theirs]


def _around(launch: LaunchConfig, setting: Setting) -> Setting:
    """The setting with the YAML's facts about the job."""
    return replace(
        setting,
        world_size=setting.world_size or launch.world_size,
        nodes=setting.nodes or (launch.machines if launch.by_deepspeed else None),
    )


def _judged(
    document: Document,
    given: Mapping[str, Any],
    config: Mapping[str, Any],
    setting: Setting,
    selection: RuleSelection,
    *,
    builds: bool = False,
) -> ValidationResult:
    """The result on the YAML. builds: whether accelerate builds the config from it, which is then judged with it.

    The config's findings name the YAML's paths, and notes are left out where it has no key to say it.
    """
    ours = {IGNORE: options[IGNORE]} if IGNORE in (options := LaunchConfig(given).options) else {}
    issues = tuple(replace(issue, path=HERE + issue.path) for issue in document.issues)
    # The value is what DeepSpeed gets, the text and its places are the YAML's.
    read = replace(document, value={**config, **ours}, issues=issues)
    every = replace(selection, level="note")
    result = validation.validate_document(read, replace(setting, launch=given), every, _in_file)
    shown, hidden = [], 0
    for located in result.findings:
        finding = replace(located.finding, fix=None)
        here = finding.path.startswith(HERE)
        if builds:
            here |= finding.severity != "note" or finding.path in PATHS
            texts = (finding.message, finding.suggestion)
            message, suggestion = (SPOKEN.sub(lambda path: PATHS[path[0]], text) for text in texts)
            finding = replace(finding, message=message, suggestion=suggestion)
        if here and selection.shows(finding):
            shown.append(replace(located, finding=finding))
        hidden += here and not selection.shows(finding)
    return replace(result, findings=tuple(shown), hidden=hidden)


def _in_file(path: str) -> str:
    """The path in the YAML for the path of a finding: after "launch." as it is, others as in PATHS."""
    if path.startswith(HERE):
        return path.removeprefix(HERE)
    while path and path not in PATHS:
        path = path.rpartition(".")[0]
    return PATHS.get(path, SECTION)


def find(name: str, beside: Path | None) -> tuple[str | None, Path | None]:
    """The reason that accelerate wouldn't find deepspeed_config_file (None: it would), and its path."""
    here = Path(name)
    if _is_file(here):
        return None, here
    if beside is not None and _is_file(beside.parent / name):
        return BESIDE, beside.parent / name
    return (INLINE if _is_config(name) else MISSING), None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name too long for one, or with a NUL
        return False


def _is_config(text: str) -> bool:
    """Whether a text is a config itself, in JSON or base64 (HfDeepSpeedConfig in accelerate/utils/deepspeed.py)."""
    return from_base64(text.encode(errors="replace")).lstrip().startswith(b"{")


def _referenced(path: Path, setting: Setting, selection: RuleSelection) -> ValidationResult:
    try:
        return validation.validate(read(path), str(path), setting, target=setting.target, selection=selection)
    except DsrunError as error:
        return validation.unread(error, str(path), setting)
