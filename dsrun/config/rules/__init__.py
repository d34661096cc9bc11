"""Cross-field checks of a ds_config: a room a field, one module a subject, found by looking in this folder.

A new rule is a function under @rule in a subject's module, nothing else:

    @rule("DS210", DIFFERS)
    @bad({...})
    @good({...})
    def offload_below_stage_1(context: Context) -> Iterator[Finding]:
        \"""What DeepSpeed does there, and the file of it.\"""
        if context.stage == 0 and context.text("zero_optimization.offload_optimizer.device") == "cpu":
            yield Finding("zero_optimization.offload_optimizer", "what is wrong", "what would be right")

A rule that is a key, a text and conditions is data, of one of the kinds in kinds.py. What several subjects need is in
common.py, and what their examples are made of in examples.py. A module's first line
says which ids are its own (`head -qn1 */*.py | grep DS`); a new subject takes a block of ten that is free.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from dsrun.config.rules.frame import UNREADABLE, Context, Finding, Rule, Setting, example
from dsrun.config.schemas import schema
from dsrun.config.schemas import violations as schema_violations

if TYPE_CHECKING:
    from dsrun.config.reading.document import SyntaxIssue

__all__ = ["Context", "Finding", "Rule", "Setting", "example", "find_rules", "run"]

SEVERITIES = ("error", "warning", "note")
SCRIPTS = "DS911"
"""The rule of scripts' names."""
OF_ONE_KEY = ("DS00", "DS010", "DS013", "DS018", "DS02")
"""Rules that conclude nothing from other keys, which in a template may be anything."""


@lru_cache(maxsize=1)
def find_rules() -> list[Rule]:
    """Every rule of every subject, by id. Raises RuntimeError where two share an id."""
    rules: dict[str, Rule] = {}
    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Rule) and rules.setdefault(value.id, value) is not value:
                raise RuntimeError(f"two rules are called {value.id}")
    return [rules[rule_id] for rule_id in sorted(rules)]


@cache
def _of_release(release: schema.Version) -> list[Rule]:
    return [rule for rule in find_rules() if rule.holds_in(release)]


def _configures_nothing(context: Context) -> bool:
    from dsrun.config.rules.file.effects import configures_nothing

    return not context.setting.launch and configures_nothing(context)


def run(
    config: Mapping[str, Any], setting: Setting | None = None, issues: tuple[SyntaxIssue, ...] = ()
) -> list[Finding]:
    """The findings of all rules in a config, errors first, then by rule. issues: of its text."""
    setting = setting or Setting()
    schema_of_version = schema.load(setting.version)
    violations = tuple(schema_violations.check(schema_of_version, config, setting.target))
    open_ = {violation.path for violation in violations if violation.kind == "placeholder"}
    context = Context(
        config, setting, violations, tuple(issue for issue in issues if issue.path not in open_)
    )
    rules = _of_release(context.version)
    if any(issue.kind == UNREADABLE for issue in issues):
        rules = [rule for rule in rules if rule.id == "DS020"]  # there are no keys to check
    elif setting.script is not None:
        rules = [rule for rule in rules if rule.id == SCRIPTS]
    elif _configures_nothing(context):
        rules = [rule for rule in rules if rule.id.startswith(("DS016", "DS02"))]
    elif open_:
        rules = [rule for rule in rules if rule.id.startswith(OF_ONE_KEY)]
    findings: list[Finding] = []
    for rule in rules:
        for count, finding in enumerate(rule.function(context), 1):
            findings.append(rule.completed(finding))
            if count == schema_violations.MOST:
                break
    # A wrong value is reported once: by the rule that knows more about it. DS002 is the schema's word on any key.
    known = {finding.path for finding in findings if finding.rule != "DS002" and finding.severity == "error"}
    findings = [finding for finding in findings if finding.rule != "DS002" or finding.path not in known]
    return sorted(findings, key=lambda finding: (SEVERITIES.index(finding.severity), finding.rule))
