"""The sources of a ds_config, before any rule looks at it: preset, --set and options, and the template's config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dsrun.config import tree
from dsrun.config.presets import preset, template
from dsrun.config.presets.fsdp import HOST
from dsrun.config.presets.options import NVME_VARIABLE, PLACES, SET, Options, with_environment
from dsrun.config.schemas import schema
from dsrun.ds_config import offload_sections
from dsrun.errors import DsrunError, Problem, raise_all
from dsrun.options.derived import built_in_step
from dsrun.options.layers import Origin, Source

if TYPE_CHECKING:
    from dsrun.config.rules import Finding

OPTIMIZER, SCHEDULER = "optimizer", "scheduler"


@dataclass(frozen=True)
class Sources:
    """The values that go into the template, and their origins."""

    merged: dict[str, Any]
    origins: dict[str, str]
    by_hand: dict[str, Any]
    options: Options
    nvme_origin: str
    left_out: Any = None
    """A scheduler section that the config doesn't get."""

    def of(self, path: str, value: Any) -> str:
        """The origin of a value in the finished config."""
        if path in self.by_hand:
            return SET
        # The strongest source first: --set, then options, then the preset. A value that none of them has is the
        # template's, and so is one of the preset's that a template has changed.
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


def gather(name: str, options: Options) -> Sources:
    """The preset's values with --set on top. A fault here is the file's, not the template's."""
    # --set goes into the preset before the template, so that the template sees it, and once more behind it (`drawn`),
    # so that no template takes it back. An option beside it gives way, so that the template doesn't write its value.
    chosen = for_deepspeed(name)
    given, nvme_origin = with_environment(options)
    values = _typed(given)
    merged, origins = chosen.merged(given.target)
    for path, value in values.items():
        tree.put(merged, path, value)
    by_hand = dict(tree.leaves(values))
    origins.update(dict.fromkeys(by_hand, SET))
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
    if by_hand or not chosen.shipped:  # dsrun's own is judged once, as part of the finished config
        merged = _judged(merged, origins, given.target)
    origins = {path: origins[path] for path, _ in tree.leaves(merged)}
    _check_required(chosen, merged, given)
    beaten: dict[str, Any] = {field: None for field, (_, place) in PLACES.items() if place in by_hand}
    return Sources(merged, origins, by_hand, replace(given, **beaten), nvme_origin, left_out)


def _typed(given: Options) -> dict[str, Any]:
    """The values of --set by their paths."""
    if not given.overrides:
        return {}
    from dsrun.config.presets import overrides

    return overrides.parse(given.overrides, given.target)


def _judged(merged: dict[str, Any], origins: Mapping[str, str], target: str) -> dict[str, Any]:
    """The values with whole numbers as such. Raises DsrunError where they violate the schema."""
    from dsrun.config.rules import Finding
    from dsrun.config.schemas import violations

    merged = schema.load().whole_numbers(merged)
    violated = violations.check(schema.load(), merged, target)
    raise_errors((Finding(v.path, v.message, v.suggestion, severity="error") for v in violated), origins)
    return merged


def _fill_in(merged: dict[str, Any], origins: dict[str, str]) -> None:
    """Fill in the built-in batch, clipping and learning rate where the preset has none."""
    for field, value in built_in_step().items():
        path = PLACES[field][1]
        section = path.rpartition(".")[0].partition(".")[0]
        if tree.get(merged, path) is None and (not section or section in merged):
            tree.put(merged, path, value)
            origins[path] = str(Origin(Source.BUILT_IN))


def _check_required(chosen: preset.Preset, merged: Mapping[str, Any], options: Options) -> None:
    wanting = [section for section in offload_sections(merged) if section.get("device") == "nvme"]
    missing = options.nvme_path is None and not all(section.get("nvme_path") for section in wanting)
    if "nvme_path" in chosen.requires and missing:
        raise DsrunError(
            "needs a folder on a local NVMe disk",
            where=f"preset {chosen.name}",
            hint=f"Add --nvme-path FOLDER, or set {NVME_VARIABLE}.",
        )


def for_deepspeed(name: str) -> preset.Preset:
    """The preset. Raises DsrunError for one of FSDP, of which no ds_config can be made."""
    chosen = preset.load(name)
    if chosen.fsdp:
        message = "is trained with FSDP, which has no deepspeed.json"
        hint = (
            f"Train with it: dsrun finetune MODEL --preset {name}. Or write what another program reads: dsrun preset "
            f"{name} --for accelerate, or --for hf. For DeepSpeed take zero3."
        )
        raise DsrunError(message, where=f"preset {chosen.name}", hint=hint)
    return chosen


def draft(name: str, options: Options) -> dict[str, Any]:
    """The ds_config of a preset before any rule looks at it.

    Raises DsrunError where the preset, an option or a template is wrong by itself.
    """
    return drawn(gather(name, options))


def strategy(name: str, options: Options) -> dict[str, Any]:
    """A preset's ds_config as far as plans need it: ZeRO, the optimizer and the types of numbers.

    dsrun's own template hands these on as they are, so it isn't rendered; a lab's may change them.
    Raises DsrunError where the preset, an option or a lab's template is wrong by itself.
    """
    sources = gather(name, options)
    return sources.merged if template.shipped() else drawn(sources)


def drawn(sources: Sources) -> dict[str, Any]:
    """The template's config, with the values of --set on top."""
    from dsrun.config.rules.running.batch import TOTAL, model_parallel_size

    given, merged = sources.options, sources.merged
    ranks = max(1, given.world_size // model_parallel_size(merged))
    config = template.render(merged, given, ranks)
    # --set holds, whatever a template made of it.
    for path, value in sources.by_hand.items():
        tree.put(config, path, value)
    if given.group > 1:
        # DeepSpeed compares the total with all ranks under tensor parallelism, with the data-parallel ones under an mpu
        # (runtime/config.py). Without it DeepSpeed makes its own of micro batch and accumulation.
        config.pop(TOTAL, None)
    return schema.load().whole_numbers(config)


def raise_errors(findings: Iterable[Finding], origins: Mapping[str, str]) -> None:
    problems = []
    for finding in findings:
        if finding.severity == "error":
            origin = _source(finding.path, origins)
            where = f"{origin}: $.{finding.path}" if origin else f"$.{finding.path}"
            problems.append(Problem(finding.cited, where, finding.suggestion))
    raise_all(problems)


def _source(path: str, origins: Mapping[str, str]) -> str | None:
    """The origin of the value at a path that may be a section, or an entry of a list."""
    for known, origin in origins.items():
        if tree.under(known, path) or tree.under(path, known):
            return origin
    return None
