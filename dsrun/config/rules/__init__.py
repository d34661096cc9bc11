"""Cross-field checks of a ds_config: one module a subject, found by looking in this folder.

A new rule is a function under @rule in a subject's module, nothing else:

    @rule("DS210", "error")
    def offload_below_stage_1(context: Context) -> Iterator[Hit]:
        \"""What DeepSpeed does there, and the file of it.\"""
        if context.stage == 0 and context.text("zero_optimization.offload_optimizer.device") == "cpu":
            yield Hit("zero_optimization.offload_optimizer", "what is wrong", "what would be right")

DS0xx keys and types, DS1xx batch, DS2xx ZeRO and offload, DS3xx precision, DS4xx optimizer.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from dsrun.config.rules.frame import Context, Finding, Rule
from dsrun.config.schema import check

__all__ = ["Context", "Finding", "Rule", "find_rules", "run"]

SEVERITIES = ("error", "warning", "note")


def find_rules() -> list[Rule]:
    """Every rule of every subject, by id. Raises RuntimeError where two share an id."""
    found: dict[str, Rule] = {}
    for module in pkgutil.iter_modules(__path__):
        for value in vars(importlib.import_module(f"{__name__}.{module.name}")).values():
            if isinstance(value, Rule) and found.setdefault(value.id, value) is not value:
                raise RuntimeError(f"two rules are called {value.id}")
    return [found[rule_id] for rule_id in sorted(found)]


def run(
    config: Mapping[str, Any], *, target: str = "deepspeed", world_size: int | None = None
) -> list[Finding]:
    """What every rule says about a config, errors first, then by rule.

    world_size: all GPUs of the job; None leaves out what depends on it.
    """
    context = Context(config, target, world_size, tuple(check(config, target)))
    findings = [finding for rule in find_rules() for finding in rule.findings(context)]
    explained = {finding.path for finding in findings if finding.rule > "DS1" and finding.severity == "error"}
    findings = [finding for finding in findings if finding.rule != "DS002" or finding.path not in explained]
    return sorted(findings, key=lambda finding: (SEVERITIES.index(finding.severity), finding.rule))
