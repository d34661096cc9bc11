"""Texts that people check, each judged by its kind; in place of one that is no config stands what it names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from dsrun.config.validation import validate as validation
from dsrun.config.validation.sources import ConfigText, is_plainly_a_config
from dsrun.errors import Problem

if TYPE_CHECKING:
    from dsrun.config.rules import Setting
    from dsrun.config.validation.validate import RuleSelection, ValidationResult


def with_inner(
    texts: Iterable[ConfigText], problems: list[Problem], tell: Callable[[str], None]
) -> Iterator[ConfigText]:
    """The texts, and those that they name. In place of a file that is no config stands the one that it names.

    tell: gets what such a file is; where there is nothing to check, it is a problem.
    """
    for file in texts:
        foreign = None
        if not is_plainly_a_config(file):
            from dsrun.trainers.configs_within import within

            foreign = within(file)
        if foreign is None or foreign.holds_some:
            yield file
        if foreign is not None and foreign.configs:
            names = ", ".join(text.name for text in foreign.configs)
            tell(f"{file.name} {foreign.what}; checked: {names}")
            yield from foreign.configs
        elif foreign is not None and not foreign.holds_some:
            problems.append(
                Problem(f"{foreign.what}, and holds no DeepSpeed config", file.name, foreign.next_step)
            )


def judged(
    file: ConfigText, setting: Setting, selection: RuleSelection, target: str | None
) -> list[ValidationResult]:
    """The results on a text: a YAML may name a second one, a script may hold several. Raises DsrunError."""
    if file.is_script:
        from dsrun.config.validation import scripts

        return scripts.validate(file, setting, selection, target=target)
    if file.is_yaml:
        from dsrun.config.accelerate import findings as accelerate_yaml

        return accelerate_yaml.validate(file, setting, selection, target=target)
    return [validation.validate(file.data, file.name, setting, target=target, selection=selection)]
