"""DS25x: ZenFlow, which updates the important gradients on the GPU and the others on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dsrun.config.rules import conditions as when
from dsrun.config.rules.common import ADAMS, OPTIMIZER, OVERLAP, STAGE, ZENFLOW, ZERO, set_to
from dsrun.config.rules.examples import made
from dsrun.config.rules.frame import DIFFERS, FAILS, Context, Finding, Fix, bad, good, rule
from dsrun.config.rules.kinds import Table, needs, put, report
from dsrun.config.rules.running.batch import ACCUMULATION
from dsrun.config.schemas import schema

STRATEGY = f"{ZENFLOW}.select_strategy"
SELECTION = f"{ZENFLOW}.select_interval"
UPDATE = f"{ZENFLOW}.update_interval"
NEW = (0, 17, 5)
OFFLOADED = when.offloads(OPTIMIZER)
STAGE_2 = "Set zero_optimization.stage to 2, or remove zenflow."
EARLY = when.at_stage(1, 2)
HF = {"_for": "hf", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}


def _config(stage: int = 2, _offload: Any = "cpu", _zero: Any = None, **zenflow: Any) -> dict[str, Any]:
    """An example: ZenFlow as it should be, apart from what is given."""
    good = {"select_strategy": "step", "select_interval": 4, "update_interval": 2}
    flow = {key: value for key, value in {**good, **zenflow}.items() if value is not None}
    offload = {"offload_optimizer": {"device": _offload}} if _offload else {}
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        ZERO: {"stage": stage, **offload, "zenflow": flow, **(_zero or {})},
    }


def flows(context: Context) -> bool:
    return isinstance(context.get(ZENFLOW), dict)


def _strategy(context: Context) -> str:
    return context.text(STRATEGY) or schema.AUTO


def _overlaps(context: Context) -> bool:
    """Whether communication overlaps, which it does by default from stage 3 on."""
    return bool(context.flag(OVERLAP) if context.has(OVERLAP) else context.stage >= 3)


def _selects_more_often(context: Context) -> bool:
    selection, update = context.integer(SELECTION), context.integer(UPDATE)
    return bool(selection and update and selection < update)


def _select_at_updates(context: Context) -> Fix:
    return set_to(context, SELECTION, context.integer(UPDATE))


@rule("DS251", FAILS, since=NEW)
@bad(_config(_offload=None), _config(stage=1, _offload="none"))
@good(_config(), _config(stage=1))
def zenflow_without_offload() -> Table:
    """The other half of the update runs on the CPU (_configure_zenflow in runtime/zenflow/zenflow_stage_1_and_2.py).

    At stage 3 the optimizer's step is called in a way that only the CPU's Adam supports (engine_stage3.py).
    """
    text = 'optimizer offload. Add offload_optimizer: {{"device": "cpu"}}, or remove zenflow.'
    conditions = (
        when.unless(when.at_stage(0)),
        when.unless(OFFLOADED),
        when.unless(when.is_auto(f"{OPTIMIZER}.device")),
    )
    return needs(ZENFLOW, text, conditions, put(f"{OPTIMIZER}.device", "cpu"), given=flows)


@rule("DS252", FAILS, since=NEW)
@bad(_config(stage=0, _offload=None))
@good(_config(stage=1), _config(stage=2))
def zenflow_at_stage_0() -> Table:
    """Only ZeRO's optimizers have ZenFlow's methods: the first step fails (allreduce_gradients, runtime/engine.py)."""
    text = f"ZeRO, but the stage is 0. {STAGE_2}"
    return needs(ZENFLOW, text, when.at_stage(0), put(STAGE, 2), given=flows)


@rule("DS253", FAILS, since=NEW)
@bad({**_config(stage=3), "_device": "cpu"})
@good(_config(stage=3), {**_config(stage=3), "_device": "cuda"})
def zenflow_at_stage_3_on_the_cpu() -> Table:
    """Stage 3's ZenFlow calls CUDA directly (runtime/zenflow/engine_stage3.py)."""
    text = f"NVIDIA GPUs at stage 3, but there are none. {STAGE_2}"
    return needs(ZENFLOW, text, (when.at_stage(3), when.on_cpu), put(STAGE, 2), given=flows)


@rule("DS254", FAILS, since=NEW)
@bad(_config(select_interval=None), _config(select_strategy="epoch", select_interval=None))
@good(_config(), _config(select_strategy="epoch", select_interval=1))
def select_interval_does_not_match_strategy(context: Context) -> Iterator[Finding]:
    """step and epoch need a number; auto chooses its own, and refuses one (runtime/zenflow/engine.py)."""
    if not flows(context):
        return
    strategy, interval = _strategy(context), context.integer(SELECTION)
    if strategy == schema.AUTO and interval is not None:
        yield Finding(
            SELECTION,
            f"is {interval}, but strategy auto chooses its own",
            "Remove it, or set select_strategy to step or epoch.",
            set_to(context, STRATEGY, "step"),
        )
    elif strategy in ("step", "epoch") and interval is None:
        yield Finding(
            SELECTION,
            f"is missing, but select_strategy {strategy} needs a number",
            f"Set it to a number of {strategy}s, such as {4 if strategy == 'step' else 1}.",
        )


@rule("DS255", FAILS, since=NEW)
@bad(_config(select_interval=2, update_interval=4), _config(select_interval=1, update_interval=2))
@good(
    _config(select_interval=4, update_interval=4),
    _config(select_strategy="epoch", select_interval=1, update_interval=4),
)
def select_interval_below_update_interval() -> Table:
    """The columns must not change between two updates of the rest (configure_zenflow in runtime/zenflow/engine.py)."""
    text = "{value} is below update_interval, {update}. Set it to {update} or more."
    conditions = (flows, lambda context: _strategy(context) == "step", _selects_more_often)
    return report(SELECTION, text, conditions, _select_at_updates, update=UPDATE)


@rule("DS256", DIFFERS, since=NEW)
@bad(
    _config(update_interval=None),
    _config(stage=1, select_strategy=None, select_interval=None, update_interval=None),
)
@good(_config(), _config(update_interval=1))
def update_interval_auto() -> Table:
    """It sets gradient_accumulation_steps to 0, and the loss is divided by that: NaN from the second step on.

    Source: the end of configure_zenflow in runtime/zenflow/engine.py, the loss in backward of runtime/engine.py.
    """
    text = (
        "is auto, which divides the loss by 0: NaN from the second step on. "
        "Set it to a number of steps, such as 4."
    )
    return report(UPDATE, text, (flows, EARLY, when.unless(when.is_whole(UPDATE))), put(UPDATE, 4))


@rule("DS257", FAILS, since=NEW)
@bad(_config(offload=True), _config(offload=True, _zero={"overlap_comm": False}))
@good(_config(offload=True, _zero={"overlap_comm": True}), _config(stage=3, offload=True))
def zenflow_offload_without_overlap() -> Table:
    """Its states are copied during the reduction (ZenFlowZeroOptimizer.__init__, engine_stage3.py in runtime/zenflow).

    overlap_comm is on by default at stage 3 only (overlap_comm_valid in runtime/zero/config.py).
    """
    text = "overlap_comm, which is off. Set overlap_comm to true, or zenflow.offload to false."
    conditions = (when.unless(when.at_stage(0)), when.unless(_overlaps))
    return needs(f"{ZENFLOW}.offload", text, conditions, put(OVERLAP, True))


@rule("DS258", DIFFERS, since=NEW)
@bad(
    {**_config(), "gradient_accumulation_steps": 3},
    {**_config(update_interval=1), "gradient_accumulation_steps": 2},
)
@good({**_config(), "gradient_accumulation_steps": 2}, _config())
def accumulation_replaced_by_zenflow(context: Context) -> Iterator[Finding]:
    """update_interval overwrites the accumulation steps after the batch sizes were computed from them.

    Source: the last line of configure_zenflow in runtime/zenflow/engine.py.
    """
    steps, update = context.integer(ACCUMULATION), context.integer(UPDATE)
    if context.is_auto(ACCUMULATION):
        steps = context.argument(ACCUMULATION)
    if flows(context) and context.stage and update and (steps or 0) > 0 and steps != update:
        finding = Finding(
            ACCUMULATION,
            f"is {steps}, but zenflow.update_interval changes it to {update}",
            "Set both to the same number, or leave it out.",
        )
        # A 1 is often written for its own sake.
        yield replace(finding, severity="warning") if steps == 1 else finding


@rule("DS250", "warning", since=(0, 19))
@bad(_config(), _config(stage=1))
@good(_config(stage=3), {**_config(), "_version": "0.18"})
def zenflow_transposes_weights() -> Table:
    """Below stage 3 every weight matrix gets its transposed values at the start: measured with 0.19.8.

    The weights are flattened transposed, and viewed as they were (_update_model_bit16_weights in
    runtime/zero/stage_1_and_2.py).
    """
    text = (
        "at stage {stage} DeepSpeed 0.19.8 fills every weight matrix with its transposed values at the start. "
        "Compare the first loss with a run without zenflow, or remove it."
    )
    return report(ZENFLOW, text, (flows, EARLY, OFFLOADED))


@rule("DS259", FAILS, since=NEW)
@bad(
    {key: value for key, value in _config().items() if key != "optimizer"},
    {**_config(), "optimizer": {"type": "AdamW"}},
)
@good(_config(), {**_config(), **made("Adam", lr=1e-4)})
def zenflow_without_adam(context: Context) -> Iterator[Finding]:
    """ZenFlow's own AdamW is made from optimizer.params, and the CPU's must accept its step_id.

    Source: ZenFlowZeroOptimizer.__init__ in runtime/zenflow/zenflow_stage_1_and_2.py; ops/adagrad and ops/lion don't.
    """
    if not flows(context) or context.stage not in (1, 2):
        return
    name = context.text("optimizer.type")
    advice = 'Set optimizer to {"type": "AdamW", "params": {...}} with its learning rate.'
    if not context.section("optimizer"):
        yield Finding(ZENFLOW, "needs an optimizer in the config", advice)
    elif not context.has("optimizer.params"):
        fix = set_to(context, "optimizer.params", {})
        yield Finding("optimizer", "has no params, but zenflow needs them", advice, fix)
    elif name and name.lower() not in ADAMS:
        yield Finding("optimizer.type", f"zenflow works with Adam and AdamW, not with {name}", advice)
