"""Real differences between two configs: a key that is left out counts as its default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dsrun.config import tree
from dsrun.config.rules import Context, Setting
from dsrun.config.rules.running.batch import ACCUMULATION, MICRO, TOTAL, model_parallel_size
from dsrun.config.schemas import schema
from dsrun.config.schemas import violations as schema_violations
from dsrun.ds_config import ZERO

TRIAD = (TOTAL, MICRO, ACCUMULATION)


@dataclass(frozen=True)
class Difference:
    """One key whose values differ: before in the first config, after in the second."""

    path: str
    before: Any
    after: Any
    given_before: bool
    """Whether the file itself gives the value; else it is a default, or worked out."""
    given_after: bool
    known_before: bool
    """Whether the file or a default gives a value. A batch size that needs the number of GPUs may have none."""
    known_after: bool
    does: str
    """The key's effect, in a sentence."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(left: Mapping[str, Any], right: Mapping[str, Any], setting: Setting) -> list[Difference]:
    """The keys whose values differ, in the order of the first config, then of the second.

    Comments don't count, nor which name of a key is used, nor 2e8 against 200000000.
    """
    known = schema.load(setting.version)
    sides = [_Side.of(config, setting) for config in (left, right)]
    differences = []
    for path in dict.fromkeys(path for side in sides for path in side.values):
        default, does = known.describe(path)
        before, after = (side.value(path, default, known) for side in sides)
        if not _same(before, after):
            differences.append(
                Difference(
                    path,
                    before=None if before is tree.MISSING else before,
                    after=None if after is tree.MISSING else after,
                    given_before=path in sides[0].given,
                    given_after=path in sides[1].given,
                    known_before=before is not tree.MISSING,
                    known_after=after is not tree.MISSING,
                    does=does,
                )
            )
    return differences


@dataclass(frozen=True)
class _Side:
    """One of the two configs, by path."""

    given: Mapping[str, Any]
    """The values in its file, by the keys' own names (aliases resolved)."""
    values: Mapping[str, Any]
    """The same and the batch sizes that DeepSpeed works out."""

    @classmethod
    def of(cls, config: Mapping[str, Any], setting: Setting) -> _Side:
        violations = tuple(schema_violations.check(schema.load(setting.version), config, setting.target))
        plain = Context(config, setting, violations).plain
        if isinstance(plain.get(ZERO), bool):
            plain[ZERO] = {"stage": int(plain[ZERO])}  # the old form
        given = {path: value for path, value in tree.leaves(plain) if not _is_comment(path)}
        return cls(given, {**given, **_triad(plain, setting.world_size)})

    def value(self, path: str, default: Any, known: schema.Schema) -> Any:
        """The value that holds at a path; tree.MISSING where neither the file nor a default gives one.

        A block that is left out as a whole (as the optimizer) has no defaults, nor has a batch size.
        """
        section = path.rpartition(".")[0]
        while section:
            if (known.node(section) or {}).get("required") and not self.has(section):
                return tree.MISSING
            section = section.rpartition(".")[0]
        if path in TRIAD and default is None:
            default = tree.MISSING
        return self.values.get(path, default)

    def has(self, section: str) -> bool:
        return any(tree.under(path, section) for path in self.values)


def _is_comment(path: str) -> bool:
    return any(key.startswith(("_", "//", "#")) for key in path.split("."))


def _same(left: Any, right: Any) -> bool:
    if left is tree.MISSING or right is tree.MISSING:
        return left is right
    empty: tuple[Any, ...] = ({}, None)  # a section without keys does as much as none
    return tree.same(left, right) or (left in empty and right in empty)


def _triad(config: Mapping[str, Any], world_size: int | None) -> dict[str, int]:
    """The batch sizes that DeepSpeed works out (_set_batch_related_parameters in runtime/config.py)."""
    sizes = {path: config[path] for path in TRIAD if isinstance(config.get(path), int)}
    if any(path in config and path not in sizes for path in TRIAD):
        return {}  # "auto", or no number
    # DeepSpeed's own order: the accumulation is 1 where only the micro batch is given; else the number that is missing
    # comes from the other two. Without the number of GPUs only the first can be known.
    ranks = world_size and world_size // model_parallel_size(config)
    if TOTAL not in sizes and MICRO in sizes:
        sizes.setdefault(ACCUMULATION, 1)
        return {**sizes, **({TOTAL: sizes[MICRO] * sizes[ACCUMULATION] * ranks} if ranks else {})}
    if not ranks or TOTAL not in sizes:
        return {}
    if MICRO in sizes:
        return {ACCUMULATION: sizes[TOTAL] // max(1, sizes[MICRO] * ranks), **sizes}
    accumulation = sizes.get(ACCUMULATION, 1)
    return {MICRO: sizes[TOTAL] // max(1, accumulation * ranks), ACCUMULATION: accumulation}
