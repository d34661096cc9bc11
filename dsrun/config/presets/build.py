"""From a preset's name and a user's options to a ds_config: preset -> template -> schema -> rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dsrun.config import rules, tree
from dsrun.config.presets.json_text import render_json
from dsrun.config.presets.options import PLACES, Options
from dsrun.config.presets.sources import SCHEDULER, Sources, drawn, gather, raise_errors
from dsrun.config.rules import Finding, Setting
from dsrun.config.rules.frame import ModelInfo
from dsrun.config.rules.running.batch import TOTAL
from dsrun.options.layers import Source

__all__ = ["BuiltConfig", "Finding", "Options", "build_config", "render_json"]

BY_HAND = tuple(source.words for source in (Source.COMMAND_LINE, Source.ENVIRONMENT, Source.RUN_FILE))
"""Origins of values that the user gives: where such a value has no effect, a finding says so."""


@dataclass(frozen=True)
class BuiltConfig:
    """A checked ds_config; `origins` says for each leaf's dotted path who gave the value."""

    ds_config: dict[str, Any]
    origins: dict[str, str]
    findings: list[Finding]


def build_config(name: str, options: Options) -> BuiltConfig:
    """The ds_config of a preset (a name, or the path of a TOML file).

    Raises DsrunError with every error that was found; warnings and notes come back as findings.
    """
    sources = gather(name, options)
    given = sources.options
    config = drawn(sources)
    origins = {path: sources.of(path, value) for path, value in tree.leaves(config)}
    findings = rules.run(config, _setting(given))
    findings += _without_effect(config, sources, options)
    raise_errors(findings, origins)
    return BuiltConfig(config, origins, findings)


def _setting(given: Options) -> Setting:
    return Setting(
        target=given.target,
        world_size=given.world_size,
        nodes=given.nodes,
        model=ModelInfo(largest_parameter=given.largest_parameter),
    )


def _without_effect(config: Mapping[str, Any], sources: Sources, options: Options) -> Iterator[Finding]:
    """Findings of values that the user or a preset gave and the config doesn't have."""
    if sources.left_out is not None:
        origin = options.origins.get("lr_schedule", "")
        yield Finding(SCHEDULER, f"left out: --lr-schedule decides ({origin})", "", severity="note")
    for field, (option, path) in PLACES.items():
        wanted = getattr(options, field)
        if path == TOTAL and options.group > 1:
            continue  # left out on purpose
        origin = options.origins.get(field, BY_HAND[0])
        if wanted is not None and tree.get(config, path) != wanted and origin.startswith(BY_HAND):
            why = (
                "--set comes last"
                if path in sources.by_hand
                else "the preset or a template has no use for it"
            )
            yield Finding(path, f"{option} has no effect", f"Here {why}.", severity="warning")
    shown = any(path.endswith(".nvme_path") for path, _ in tree.leaves(config))
    if options.nvme_path is not None and not shown:
        message = "--nvme-path has no effect: nothing has device nvme"
        yield Finding("", message, "Take zero3-nvme.", severity="warning")
