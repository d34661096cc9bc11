"""DS90x: what changes when a config goes from one release of DeepSpeed to another."""

from __future__ import annotations

import json
from collections.abc import Iterator

from dsrun.config import tree
from dsrun.config.rules.frame import Context, Edit, Finding, Fix, bad, good, rule
from dsrun.config.schemas import schema


@rule("DS901", "warning")
@bad(
    {"_upgrade_from": "0.14", "zero_optimization": {"stage": 1}},
    {
        "_upgrade_from": "0.18",
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    },
)
@good(
    {"_upgrade_from": "0.14", "gradient_clipping": 0.5, "steps_per_print": 10},
    {"_upgrade_from": "0.18", "_for": "hf"},
)
def default_changed(context: Context) -> Iterator[Finding]:
    """A key that is left out has the default of the release in use: since 0.19.3 gradients are clipped at 1.0.

    Source: runtime/constants.py and the pydantic models of each release.
    """
    if context.setting.upgrade_from is None:
        return
    old = schema.load(context.setting.upgrade_from)
    for path in context.schema.paths:
        before, after = old.describe(path)[0], context.schema.describe(path)[0]
        if _left_out(context, path) and tree.MISSING not in (before, after) and not tree.same(before, after):
            first, second = json.dumps(before), json.dumps(after)
            then, now = old.release, context.schema.release
            yield Finding(
                path,
                f"is left out: the default was {first} in DeepSpeed {then} and is {second} in {now}",
                f"Write {first} to keep the old behaviour.",
                Fix((Edit("add", path, before),)),
            )


def _left_out(context: Context, path: str) -> bool:
    """Whether the default of a key counts: its section is there, and nothing else fills it in."""
    section = path.rpartition(".")[0]
    filled = context.by_trainer and context.schema.is_auto(path)
    return not context.has(path) and not filled and (not section or bool(context.section(section)))
