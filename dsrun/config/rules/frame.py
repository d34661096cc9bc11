"""The contract of a rule: what it is given, what it gives, how it is registered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from dsrun.config import schema, tree


@dataclass(frozen=True)
class Finding:
    """What a rule has to say. severity: error (it fails or does something else), warning, or note."""

    rule: str
    severity: str
    path: str
    message: str
    suggestion: str


class Hit(NamedTuple):
    """A finding as a rule's function yields it: the place, what is wrong, what would be right."""

    path: str
    message: str
    suggestion: str


@dataclass(frozen=True)
class Context:
    """What a rule looks at. The getters answer None for a key that is absent, "auto" or of a wrong type:

    a rule judges values that are there; types are the schema's matter.
    """

    config: Mapping[str, Any]
    target: str = "deepspeed"
    world_size: int | None = None
    violations: tuple[schema.Violation, ...] = ()

    @cached_property
    def plain(self) -> dict[str, Any]:
        """The config with each alias under the name it stands for."""
        plain: dict[str, Any] = {}
        for path, value in tree.leaves(self.config):
            tree.put(plain, schema.canonical(path), value)
        return plain

    @cached_property
    def stage(self) -> int:
        """The ZeRO stage; the old `zero_optimization: true` is stage 1 (runtime/zero/config.py)."""
        if isinstance(old := self.get("zero_optimization"), bool):
            return int(old)
        return self.integer("zero_optimization.stage") or 0

    def get(self, path: str) -> Any:
        return tree.get(self.plain, path)

    def has(self, path: str) -> bool:
        return tree.get(self.plain, path, tree.MISSING) is not tree.MISSING

    def section(self, path: str) -> dict[str, Any]:
        """The section at a path; {} where there is none."""
        value = self.get(path)
        return value if isinstance(value, dict) else {}

    def number(self, path: str) -> float | None:
        value = self.get(path)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def integer(self, path: str) -> int | None:
        """A whole number; 2e8 counts, as DeepSpeed takes it for one."""
        value = self.number(path)
        return int(value) if value is not None and float(value).is_integer() else None

    def flag(self, path: str) -> bool | None:
        value = self.get(path)
        return value if isinstance(value, bool) else None

    def text(self, path: str) -> str | None:
        value = self.get(path)
        return value if isinstance(value, str) and value != schema.AUTO else None


@dataclass(frozen=True)
class Rule:
    """One check: `source` is its function's docstring, which names where DeepSpeed does what it says."""

    id: str
    severity: str
    function: Callable[[Context], Iterator[Hit]]

    @property
    def source(self) -> str:
        return self.function.__doc__ or ""

    def findings(self, context: Context) -> Iterator[Finding]:
        for hit in self.function(context):
            yield Finding(self.id, self.severity, *hit)


def rule(rule_id: str, severity: str) -> Callable[[Callable[[Context], Iterator[Hit]]], Rule]:
    """Makes a function a rule."""
    return lambda function: Rule(rule_id, severity, function)
