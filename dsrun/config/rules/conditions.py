"""Conditions for rules that are data (kinds.py): functions of the Context that say whether something holds.

As with the getters of Context, a key that is absent, "auto" or of a wrong type meets none of them, but `lacks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsrun.config.rules.common import above_1, device
from dsrun.config.rules.frame import Context

Condition = Callable[[Context], Any]


def on(path: str) -> Condition:
    """A flag is true."""
    return lambda context: context.flag(path)


def off(path: str) -> Condition:
    """A flag is false, and written."""
    return lambda context: context.flag(path) is False


def has(path: str) -> Condition:
    return lambda context: context.has(path)


def lacks(path: str) -> Condition:
    return lambda context: not context.has(path)


def is_auto(path: str) -> Condition:
    return lambda context: context.is_auto(path)


def is_section(path: str) -> Condition:
    return lambda context: isinstance(context.get(path), dict)


def is_one_of(path: str, *texts: str) -> Condition:
    return lambda context: context.text(path) in texts


def is_whole(path: str) -> Condition:
    """A whole number is written."""
    return lambda context: context.integer(path) is not None


def several(path: str) -> Condition:
    """A size splits something: it is a whole number above 1."""
    return lambda context: above_1(context, path)


def at_stage(*stages: int) -> Condition:
    return lambda context: context.stage in stages


def below_stage(stage: int) -> Condition:
    return lambda context: context.stage < stage


def offloads(section: str) -> Condition:
    """A section, one of OFFLOADS, moves something to cpu or nvme."""
    return lambda context: device(context, section)


def on_cpu(context: Context) -> bool:
    """The job is known to run without GPUs."""
    return context.setting.device == "cpu"


def read_by(*targets: str) -> Condition:
    return lambda context: context.target in targets


def unless(condition: Condition) -> Condition:
    return lambda context: not condition(context)
