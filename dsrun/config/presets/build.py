"""From a preset's name and a user's options to a ds_config: preset -> template -> schema -> rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dsrun.config import rules, tree
from dsrun.config.presets import overrides, preset, template
from dsrun.config.presets.fsdp import HOST
from dsrun.config.presets.options import NVME_VARIABLE, PLACES, Options, with_environment
from dsrun.config.presets.render import render_json
from dsrun.config.rules import Finding, Setting
from dsrun.config.rules.frame import ModelInfo
from dsrun.config.rules.running.batch import TOTAL, model_parallel_size
from dsrun.config.schemas import schema
from dsrun.config.schemas import violations as schema_violations
from dsrun.errors import DsrunError, Problem
from dsrun.options.derived import built_in_step
from dsrun.options.table import Origin, Source

__all__ = ["BuiltConfig", "Finding", "Options", "build_config", "render_json"]

OPTIMIZER, SCHEDULER = "optimizer", "scheduler"
BY_HAND = tuple(source.words for source in (Source.COMMAND_LINE, Source.ENVIRONMENT, Source.RUN_FILE))
"""Origins of what the user says, whose being without effect is worth a word."""


@dataclass(frozen=True)
class BuiltConfig:
    """A checked ds_config; `origins` says for each leaf's dotted path who gave the value."""

    ds_config: dict[str, Any]
    origins: dict[str, str]
    findings: list[Finding]


@dataclass(frozen=True)
class _Sources:
    """Who gave what, before the template."""

    merged: dict[str, Any]
    origins: dict[str, str]
    by_hand: dict[str, Any]
    options: Options
    nvme_origin: str
    left_out: Any = None
    """A scheduler section that the config doesn't get."""

    def of(self, path: str, value: Any) -> str:
        """Where a value of the finished config came from."""
        if path in self.by_hand:
            return overrides.OPTION
        for field, (option, place) in PLACES.items():
            if path == place and getattr(self.options, field) is not None:
                return self.options.origins.get(field, option)
        if path in ("fp16.enabled", "bf16.enabled") and self.options.precision is not None:
            return self.options.origins.get("precision", "--precision")
        if path.endswith(".nvme_path") and value == self.options.nvme_path:
            return self.nvme_origin
        if path in self.origins and tree.get(self.merged, path, tree.MISSING) == value:
            return self.origins[path]
        return template.label(path)


def build_config(name: str, options: Options) -> BuiltConfig:
    """The ds_config of a preset (a name, or the path of a TOML file).

    Raises DsrunError with every error that was found; warnings and notes come back as findings.
    """
    sources = _gather(name, options)
    given = sources.options
    config = _drawn(sources)
    origins = {path: sources.of(path, value) for path, value in tree.leaves(config)}
    findings = rules.run(config, _setting(given))
    findings += _without_effect(config, sources, options)
    _raise_errors(findings, origins)
    return BuiltConfig(config, origins, findings)


def draft(name: str, options: Options) -> dict[str, Any]:
    """The ds_config of a preset before any rule looks at it: for planning with, not for training with.

    Raises DsrunError where the preset, an option or a template is wrong by itself.
    """
    return _drawn(_gather(name, options))


def _drawn(sources: _Sources) -> dict[str, Any]:
    """The template's config, with what is set by hand on top."""
    given, merged = sources.options, sources.merged
    ranks = max(1, given.world_size // model_parallel_size(merged))
    config = template.render(merged, given, ranks)
    # What is set by hand holds, whatever a template made of it.
    for path, value in sources.by_hand.items():
        tree.put(config, path, value)
    if given.group > 1:
        # What DeepSpeed compares it with counts all ranks under tensor parallelism, the data-parallel ones under an mpu
        # (runtime/config.py); from micro batch and accumulation it makes its own.
        config.pop(TOTAL, None)
    return schema.load().whole_numbers(config)


def _setting(given: Options) -> Setting:
    return Setting(
        target=given.target,
        world_size=given.world_size,
        nodes=given.nodes,
        model=ModelInfo(largest_parameter=given.largest_parameter),
    )


def for_deepspeed(name: str) -> preset.Preset:
    """The preset. Raises DsrunError for one of FSDP's, which come to no ds_config."""
    chosen = preset.load(name)
    if chosen.fsdp:
        what = "is trained with FSDP, which has no deepspeed.json"
        hint = (
            f"Train with it: dsrun finetune MODEL --preset {name}. Or write what another program reads: dsrun preset "
            f"{name} --for accelerate, or --for hf. For DeepSpeed take zero3."
        )
        raise DsrunError(what, where=f"preset {chosen.name}", hint=hint)
    return chosen


def _gather(name: str, options: Options) -> _Sources:
    """The preset's values with --set on top. What is wrong here is the file's fault, not the template's."""
    chosen = for_deepspeed(name)
    given, nvme_origin = with_environment(options)
    values = overrides.parse(given.overrides, given.target)
    merged, origins = chosen.merged(given.target)
    for path, value in values.items():
        tree.put(merged, path, value)
    by_hand = dict(tree.leaves(values))
    origins.update(dict.fromkeys(by_hand, overrides.OPTION))
    if tree.get(merged, preset.SECOND_COPY) == HOST:
        tree.put(merged, preset.SECOND_COPY, given.gpus if given.nodes > 1 else 1)
        origins[preset.SECOND_COPY] += (
            ": the ranks of a host" if given.nodes > 1 else ": off, as there is one host"
        )
    if given.target == "deepspeed":
        _fill_in(merged, origins)
    left_out = merged.pop(SCHEDULER, None) if given.own_schedule else None
    if given.target == schema.ACCELERATE and not any(tree.under(path, OPTIMIZER) for path in by_hand):
        # accelerate refuses one here beside the script's own (_prepare_deepspeed in accelerate/accelerator.py).
        merged.pop(OPTIMIZER, None)
    merged = schema.load().whole_numbers(merged)
    origins = {path: origins[path] for path, _ in tree.leaves(merged)}
    # A shipped preset is judged once, as part of the finished config.
    own = chosen.shipped and not by_hand
    violations = [] if own else schema_violations.check(schema.load(), merged, given.target)
    _raise_errors((Finding(v.path, v.message, v.suggestion, severity="error") for v in violations), origins)
    _check_required(chosen, merged, given)
    beaten: dict[str, Any] = {field: None for field, (_, place) in PLACES.items() if place in by_hand}
    return _Sources(merged, origins, by_hand, replace(given, **beaten), nvme_origin, left_out)


def _fill_in(merged: dict[str, Any], origins: dict[str, str]) -> None:
    """The built-in batch, clipping and learning rate where the preset says none."""
    for field, value in built_in_step().items():
        path = PLACES[field][1]
        section = path.rpartition(".")[0].partition(".")[0]
        if tree.get(merged, path) is None and (not section or section in merged):
            tree.put(merged, path, value)
            origins[path] = str(Origin(Source.BUILT_IN))


def _check_required(chosen: preset.Preset, merged: Mapping[str, Any], options: Options) -> None:
    sections = [
        tree.get(merged, f"zero_optimization.{name}") for name in ("offload_optimizer", "offload_param")
    ]
    wanting = [
        section for section in sections if isinstance(section, dict) and section.get("device") == "nvme"
    ]
    missing = options.nvme_path is None and not all(section.get("nvme_path") for section in wanting)
    if "nvme_path" in chosen.requires and missing:
        raise DsrunError(
            "needs a folder on a local NVMe disk",
            where=f"preset {chosen.name}",
            hint=f"Add --nvme-path FOLDER, or set {NVME_VARIABLE}.",
        )


def _without_effect(config: Mapping[str, Any], sources: _Sources, options: Options) -> Iterator[Finding]:
    """What the user or a preset gave and the config doesn't show."""
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


def _raise_errors(findings: Iterable[Finding], origins: Mapping[str, str]) -> None:
    problems = []
    for finding in findings:
        if finding.severity == "error":
            origin = _source(finding.path, origins)
            where = f"{origin}: $.{finding.path}" if origin else f"$.{finding.path}"
            rule = f" [{finding.rule}]" if finding.rule else ""
            problems.append(Problem(f"{finding.message}{rule}", where, finding.suggestion))
    if problems:
        raise DsrunError(problems)


def _source(path: str, origins: Mapping[str, str]) -> str | None:
    """Who gave the value at a path that may be a section, or an entry of a list."""
    for known, origin in origins.items():
        if tree.under(known, path) or tree.under(path, known):
            return origin
    return None
