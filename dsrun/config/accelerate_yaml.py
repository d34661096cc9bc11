"""`dsrun validate` of an accelerate YAML: its own keys, and the ds_config that it holds or names."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsrun.config import rules, schema
from dsrun.config import validate as judging
from dsrun.config.accelerate_launch import BESIDE, INLINE, MISSING, PATHS, REFERENCED, SECTION, Launch
from dsrun.config.rules.accelerate_file import TOP
from dsrun.config.rules.text import IGNORE, unreadable
from dsrun.config.sources import Source, read
from dsrun.config.validate import Choice, Located, Verdict
from dsrun.errors import DsrunError

if TYPE_CHECKING:
    from dsrun.config.document import Document
    from dsrun.config.rules import Finding, Setting

TARGET = "accelerate"
HERE = f"{TOP}."
# Paths, not words such as zero_optimization; the longest first, so that none is cut short.
SPOKEN = re.compile(
    "|".join(rf"\b{re.escape(path)}\b(?!\.\w)" for path in sorted(PATHS, reverse=True) if "." in path)
)


def validate(source: Source, setting: Setting, choice: Choice, *, target: str | None = None) -> list[Verdict]:
    """The verdict on the YAML, and the one on the DeepSpeed config that it names, if it does.

    target: "hf" where the script that is launched trains with HF Trainer, which fills in "auto" by itself; so it
    does where there are TrainingArguments. Otherwise it is accelerate alone. Raises DsrunError for other readers.

    What accelerate builds of the YAML's own settings is judged as the YAML. Fixes are left out: they are made
    for JSON. So are notes on what only a DeepSpeed config can say.
    """
    from dsrun.config import yaml_document

    if target not in (None, *schema.FILLING):
        hint = "Say --for hf (the script trains with HF Trainer) or --for accelerate."
        raise DsrunError(f"is accelerate's: {target} doesn't read it", where=source.name, hint=hint)
    by_trainer = target == schema.HF or (target is None and setting.trainer is not None)
    setting = replace(setting, target=schema.HF if by_trainer else TARGET)
    try:
        document = yaml_document.read(source.data, source.name)
    except DsrunError as error:
        return [_unread(error, source.name, setting)]
    launch = Launch(document.value)
    around = _around(launch, setting)
    if not launch.by_deepspeed:
        return [_launched(document, launch.given, {}, around, choice)]
    if launch.file is None:
        config = launch.config()
        if by_trainer:
            # TrainingArguments decide the precision, before accelerate writes mixed_precision into the config.
            config = {key: value for key, value in config.items() if key not in ("bf16", "fp16")}
        verdict = _translated(_judged(document, launch.given, config, around, choice))
        return [_only(verdict, lambda finding: finding.severity != "note" or _sayable(finding.path))]
    found, path = _find(launch.file, source.path)
    given = {**launch.given, **({REFERENCED: found} if found else {})}
    theirs = [_referenced(path, around, choice)] if path else []
    config = theirs[0].document.value if theirs and theirs[0].document else {}
    return [_launched(document, given, config, around, choice), *theirs]


def _around(launch: Launch, setting: Setting) -> Setting:
    """The setting with what the YAML says of the job."""
    return replace(
        setting,
        world_size=setting.world_size or launch.world_size,
        nodes=setting.nodes or (launch.machines if launch.by_deepspeed else None),
    )


def _launched(
    document: Document, given: Mapping[str, Any], config: Mapping[str, Any], setting: Setting, choice: Choice
) -> Verdict:
    """The verdict on the launch config alone, where the ds_config is none or stands elsewhere."""
    verdict = _judged(document, given, config, setting, choice)
    return _only(verdict, lambda finding: finding.path.startswith(HERE))


def _only(verdict: Verdict, wanted: Callable[[Finding], bool]) -> Verdict:
    kept = (located for located in verdict.findings if wanted(located.finding))
    return replace(verdict, findings=tuple(kept))


def _translated(verdict: Verdict) -> Verdict:
    """The verdict with the YAML's paths in its texts."""
    return replace(verdict, findings=tuple(_in_yaml(located) for located in verdict.findings))


def _in_yaml(located: Located) -> Located:
    finding = located.finding
    said = [SPOKEN.sub(lambda path: PATHS[path[0]], text) for text in (finding.message, finding.suggestion)]
    return replace(located, finding=replace(finding, message=said[0], suggestion=said[1]))


def _sayable(path: str) -> bool:
    return path.startswith(HERE) or path in PATHS


def _judged(
    document: Document, given: Mapping[str, Any], config: Mapping[str, Any], setting: Setting, choice: Choice
) -> Verdict:
    ours = {IGNORE: options[IGNORE]} if IGNORE in (options := Launch(given).options) else {}
    oddities = tuple(replace(oddity, path=HERE + oddity.path) for oddity in document.oddities)
    # The value is what DeepSpeed gets, the text and its places are the YAML's.
    asked = replace(document, value={**config, **ours}, oddities=oddities)
    verdict = judging.judge(asked, replace(setting, launch=given), choice, Places())
    return replace(verdict, findings=tuple(_unfixed(located) for located in verdict.findings))


def _unfixed(located: Located) -> Located:
    return replace(located, finding=replace(located.finding, fix=None))


class Places(Mapping[str, str]):
    """For each path of a finding the one in the YAML: after "launch." as it is, others as PATHS has it."""

    def __getitem__(self, path: str) -> str:
        if path.startswith(HERE):
            return path.removeprefix(HERE)
        while path and path not in PATHS:
            path = path.rpartition(".")[0]
        return PATHS.get(path, SECTION)

    def __iter__(self) -> Iterator[str]:
        return iter(PATHS)

    def __len__(self) -> int:
        return len(PATHS)


def _find(name: str, beside: Path | None) -> tuple[str | None, Path | None]:
    """What is to be said of deepspeed_config_file, and where it is."""
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
    if text.lstrip().startswith("{"):
        return True
    try:
        return base64.urlsafe_b64decode(text).lstrip().startswith(b"{")
    except (binascii.Error, ValueError):
        return False


def _referenced(path: Path, setting: Setting, choice: Choice) -> Verdict:
    try:
        return judging.validate(read(path), str(path), setting, target=setting.target, choice=choice)
    except DsrunError as error:
        return _unread(error, str(path), setting)


def _unread(error: DsrunError, name: str, setting: Setting) -> Verdict:
    oddities = tuple(unreadable(problem, name) for problem in error.problems)
    places = (oddity.place for oddity in oddities)
    found = zip(rules.run({}, setting, oddities), places, strict=True)
    return Verdict(name, setting.target, tuple(Located(finding, "", place) for finding, place in found))
