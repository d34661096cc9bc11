"""DS743 to DS748: curricula, dynamic batches and random-LTD."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsrun.config.rules import conditions as when
from dsrun.config.rules.examples import hf
from dsrun.config.rules.frame import FAILS, REFUSED, Context, Finding, bad, good, rule
from dsrun.config.rules.kinds import Table, report, without_effect
from dsrun.config.schemas import schema

SAMPLING = "data_efficiency.data_sampling"
CURRICULUM = f"{SAMPLING}.curriculum_learning"
BATCHING = f"{SAMPLING}.dynamic_batching"
LTD = "data_efficiency.data_routing.random_ltd"
SCHEDULE = f"{LTD}.random_ltd_schedule"

NEEDED_BY_LTD = {
    LTD: ("total_layer_num", "random_ltd_layer_num", "random_ltd_schedule"),
    SCHEDULE: ("min_value", "max_value", "schedule_type", "schedule_config"),
    f"{SCHEDULE}.schedule_config": ("require_steps", "seq_per_step"),
}

NEEDED_BY_CURRICULUM = {
    "fixed_discrete": ("difficulty", "max_step"),
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
}


LINEAR = {"total_curriculum_step": 10, "difficulty_step": 8}


def _efficient(**blocks: Any) -> dict[str, Any]:
    return {"data_efficiency": {"enabled": True, **blocks}}


def _curriculum(metric: dict[str, Any]) -> dict[str, Any]:
    """An example's config with one metric of a curriculum."""
    learning = {"enabled": True, "curriculum_metrics": {"length": metric}}
    return _efficient(data_sampling={"enabled": True, "curriculum_learning": learning})


def _random_ltd(**schedule: Any) -> dict[str, Any]:
    """An example's config with the whole of random-LTD, and this schedule_config."""
    linear = {"min_value": 8, "max_value": 64, "schedule_type": "fixed_linear", "schedule_config": schedule}
    layers = {"total_layer_num": 4, "random_ltd_layer_num": 2, "random_ltd_schedule": linear}
    return _efficient(data_routing={"enabled": True, "random_ltd": {"enabled": True, **layers}})


@rule("DS743", REFUSED, since=(0, 16, 5))
@bad(
    _efficient(data_sampling={"enabled": True, "dynamic_batching": {"enabled": True}}),
    {"data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": True, "max_batch_size": 8}}}},
)
@good(
    _efficient(data_sampling={"dynamic_batching": {"enabled": True, "max_tokens": 64}}),
    _efficient(data_sampling={"dynamic_batching": {"enabled": False}}),
)
def dynamic_batching_without_tokens() -> Table:
    """Asserted whatever the surrounding sections say (get_dynamic_batching in runtime/data_pipeline/config.py)."""
    path = f"{BATCHING}.max_tokens"
    text = "is required for dynamic batching. Set it to the tokens of one micro batch."
    return report(path, text, (when.on(f"{BATCHING}.enabled"), when.lacks(path)))


@rule("DS744", REFUSED)
@bad(_efficient(data_sampling={"curriculum_learning": {"enabled": True}}))
@good(
    _efficient(data_sampling={"curriculum_learning": {"enabled": True, "curriculum_metrics": {}}}),
    _efficient(data_sampling={"curriculum_learning": {"enabled": False}}),
)
def curriculum_without_metrics() -> Table:
    """Asserted whatever the surrounding sections say (get_curriculum_learning in runtime/data_pipeline/config.py)."""
    path = f"{CURRICULUM}.curriculum_metrics"
    text = "is required for curriculum learning. Name a metric in it, with its difficulties."
    return report(path, text, (when.on(f"{CURRICULUM}.enabled"), when.lacks(path)))


@rule("DS745", FAILS)
@bad(
    _efficient(data_routing={"enabled": True, "random_ltd": {"enabled": True}}), _random_ltd(require_steps=10)
)
@good(
    _random_ltd(require_steps=10, seq_per_step=8),
    _efficient(data_routing={"enabled": True, "random_ltd": {"enabled": False}}),
)
def random_ltd_incomplete(context: Context) -> Iterator[Finding]:
    """A KeyError at the start or the first step (runtime/data_pipeline/data_routing/scheduler.py)."""
    if not context.flag(f"{LTD}.enabled"):
        return
    for section, keys in NEEDED_BY_LTD.items():
        if missing := [key for key in keys if key not in context.section(section)]:
            yield Finding(section, f"lacks {', '.join(missing)}", f"Add {section}.{missing[0]}.")
            return


@rule("DS746", "warning")
@bad(
    {
        "data_efficiency": {
            "data_sampling": {"curriculum_learning": {"enabled": True, "curriculum_metrics": {}}}
        }
    },
    _efficient(data_sampling={"enabled": False, "dynamic_batching": {"enabled": True, "max_tokens": 64}}),
)
@good(
    _efficient(
        data_sampling={"enabled": True, "curriculum_learning": {"enabled": True, "curriculum_metrics": {}}}
    ),
    {"data_efficiency": {"enabled": False, "data_sampling": {"curriculum_learning": {"enabled": False}}}},
)
def data_efficiency_stays_on(context: Context) -> Iterator[Finding]:
    """Only the innermost `enabled` is read (curriculum_learning_enabled, random_ltd_enabled in runtime/engine.py)."""
    for path in (CURRICULUM, BATCHING, LTD):
        if context.flag(f"{path}.enabled"):
            outer = path.rpartition(".")[0]
            off = [name for name in ("data_efficiency", outer) if not context.get(f"{name}.enabled")]
            if off:
                text = f"is on although {off[0]}.enabled isn't: only its own enabled counts"
                yield Finding(
                    f"{path}.enabled",
                    text,
                    f"Set {' and '.join(f'{name}.enabled' for name in off)} to true too, or this to false.",
                )


@rule("DS747", "warning")
@bad(
    _curriculum({"min_difficulty": 8, "max_difficulty": 64, "schedule_type": "fixed_linear"}),
    _curriculum(
        {"min_difficulty": 8, "max_difficulty": 64, "schedule_type": "fixed_root", "schedule_config": LINEAR}
    ),
)
@good(
    _curriculum(
        {
            "min_difficulty": 8,
            "max_difficulty": 64,
            "schedule_type": "fixed_linear",
            "schedule_config": LINEAR,
        }
    ),
    _curriculum(
        {
            "min_difficulty": 1,
            "max_difficulty": 3,
            "schedule_type": "fixed_discrete",
            "schedule_config": {"difficulty": [1, 2, 3], "max_step": [5, 10]},
        }
    ),
)
def curriculum_incomplete(context: Context) -> Iterator[Finding]:
    """Asserted if deepspeed.initialize gets training_data (runtime/data_pipeline/curriculum_scheduler.py)."""
    if not context.flag(f"{CURRICULUM}.enabled"):
        return
    for name, metric in context.section(f"{CURRICULUM}.curriculum_metrics").items():
        if isinstance(metric, dict):
            yield from _metric(f"{CURRICULUM}.curriculum_metrics.{name}", metric)


@rule("DS748", "warning")
@bad(
    hf(
        **_efficient(
            data_sampling={
                "enabled": True,
                "curriculum_learning": {"enabled": True, "curriculum_metrics": {}},
            }
        )
    )
)
@good(
    _efficient(
        data_sampling={"enabled": True, "curriculum_learning": {"enabled": True, "curriculum_metrics": {}}}
    ),
    hf(**_efficient(data_sampling={"curriculum_learning": {"enabled": False}})),
)
def curriculum_under_hf_trainer() -> Table:
    """DeepSpeed's own data loader does it (deepspeed_io in runtime/engine.py), but HF Trainer uses its own."""
    conditions = (when.on(f"{CURRICULUM}.enabled"), when.read_by(schema.HF))
    return without_effect(CURRICULUM, " under HF Trainer, which loads the data itself", conditions)


def _metric(path: str, metric: dict[str, Any]) -> Iterator[Finding]:
    low, high = metric.get("min_difficulty"), metric.get("max_difficulty")
    if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low > high:
        yield Finding(
            f"{path}.min_difficulty", f"{low} is above max_difficulty {high}", f"Set it to at most {high}."
        )
    needed = NEEDED_BY_CURRICULUM.get(str(metric.get("schedule_type")), ())
    config = metric.get("schedule_config")
    given = config if isinstance(config, dict) else {}
    if missing := [key for key in needed if key not in given]:
        text = f'lacks {", ".join(missing)} for schedule_type "{metric["schedule_type"]}"'
        yield Finding(f"{path}.schedule_config", text, f"Add {path}.schedule_config.{missing[0]}.")
    elif (
        "max_step" in needed and isinstance(given["difficulty"], list) and isinstance(given["max_step"], list)
    ):
        difficulties, steps = len(given["difficulty"]), len(given["max_step"])
        if difficulties != steps + 1:
            text = f"has {steps} max_step for {difficulties} difficulties"
            yield Finding(
                f"{path}.schedule_config", text, f"Give {difficulties - 1}: the last difficulty has no end."
            )
