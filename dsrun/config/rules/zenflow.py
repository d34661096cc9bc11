"""DS25x: ZenFlow, which updates the important gradients on the GPU and the others on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsrun.config import schema
from dsrun.config.rules.batch import ACCUMULATION
from dsrun.config.rules.common import ADAMS, OPTIMIZER, OVERLAP, ZENFLOW, ZERO, device, setting
from dsrun.config.rules.examples import made, zero
from dsrun.config.rules.frame import DIFFERS, FAILS, Context, Hit, rule

STRATEGY = f"{ZENFLOW}.select_strategy"
SELECTION = f"{ZENFLOW}.select_interval"
UPDATE = f"{ZENFLOW}.update_interval"
NEW = (0, 17)
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


@rule(
    "DS251",
    "error",
    FAILS,
    bad=[_config(_offload=None), _config(stage=1, _offload="none"), _config(stage=3, _offload=None)],
    good=[_config(), _config(stage=1), _config(stage=3), zero(2, zenflow=None)],
    since=NEW,
)
def flow_without_offload(context: Context) -> Iterator[Hit]:
    """The other half of the update runs on the CPU (_configure_zenflow in runtime/zenflow/zenflow_stage_1_and_2.py).

    At stage 3 the optimizer's step is called in a way that only the CPU's Adam knows (engine_stage3.py).
    """
    if flows(context) and context.stage and not device(context, OPTIMIZER):
        if context.is_auto(f"{OPTIMIZER}.device"):
            return
        yield Hit(
            ZENFLOW,
            "needs optimizer offload, and there is none",
            'Add offload_optimizer: {"device": "cpu"}, or remove zenflow.',
            setting(context, f"{OPTIMIZER}.device", "cpu"),
        )


@rule(
    "DS252",
    "error",
    FAILS,
    bad=[_config(stage=0, _offload=None)],
    good=[_config(stage=1), _config(stage=2), zero(0, zenflow=None)],
    since=NEW,
)
def flow_at_stage_0(context: Context) -> Iterator[Hit]:
    """Only ZeRO's optimizers have ZenFlow's methods: the first step fails (allreduce_gradients, runtime/engine.py)."""
    if flows(context) and context.stage == 0:
        yield Hit(
            ZENFLOW,
            "needs ZeRO, and the stage is 0",
            "Set zero_optimization.stage to 2, or remove zenflow.",
            setting(context, f"{ZERO}.stage", 2),
        )


@rule(
    "DS253",
    "error",
    FAILS,
    bad=[{**_config(stage=3), "_device": "cpu"}],
    good=[_config(stage=3), {**_config(stage=3), "_device": "cuda"}, {**_config(), "_device": "cpu"}],
    since=NEW,
)
def flow_at_stage_3_on_the_cpu(context: Context) -> Iterator[Hit]:
    """Stage 3's ZenFlow calls CUDA by name (runtime/zenflow/engine_stage3.py)."""
    if flows(context) and context.stage == 3 and context.setting.device == "cpu":
        yield Hit(
            ZENFLOW,
            "needs NVIDIA GPUs at stage 3, and there are none",
            "Set zero_optimization.stage to 2, or remove zenflow.",
            setting(context, f"{ZERO}.stage", 2),
        )


@rule(
    "DS254",
    "error",
    FAILS,
    bad=[
        _config(select_interval=None),
        _config(select_strategy="epoch", select_interval=None),
        _config(select_strategy=None),
        _config(stage=1, select_strategy="auto", select_interval=3, update_interval=1),
    ],
    good=[
        _config(),
        _config(select_strategy="epoch", select_interval=1),
        _config(select_strategy=None, select_interval=None),
    ],
    since=NEW,
)
def interval_that_the_strategy_lacks(context: Context) -> Iterator[Hit]:
    """step and epoch need a number; auto picks its own, and raises at one (runtime/zenflow/engine.py)."""
    if not flows(context):
        return
    strategy, interval = _strategy(context), context.integer(SELECTION)
    if strategy == schema.AUTO and interval is not None:
        yield Hit(
            SELECTION,
            f"is {interval}, and the strategy is auto, which sets its own",
            "Remove it, or set select_strategy to step or epoch.",
            setting(context, STRATEGY, "step"),
        )
    elif strategy in ("step", "epoch") and interval is None:
        yield Hit(
            SELECTION,
            f"is missing, and select_strategy {strategy} needs a number",
            f"Set it to a number of {strategy}s, such as {4 if strategy == 'step' else 1}.",
        )


@rule(
    "DS255",
    "error",
    FAILS,
    bad=[_config(select_interval=2, update_interval=4), _config(select_interval=1, update_interval=2)],
    good=[
        _config(select_interval=4, update_interval=4),
        _config(select_strategy="epoch", select_interval=1, update_interval=4),
    ],
    since=NEW,
)
def selection_more_often_than_update(context: Context) -> Iterator[Hit]:
    """The columns may not change between two updates of the rest (configure_zenflow in runtime/zenflow/engine.py)."""
    selection, update = context.integer(SELECTION), context.integer(UPDATE)
    if flows(context) and _strategy(context) == "step" and selection and update and selection < update:
        yield Hit(
            SELECTION,
            f"{selection} is below update_interval, {update}",
            f"Set it to {update} or more.",
            setting(context, SELECTION, update),
        )


@rule(
    "DS256",
    "error",
    DIFFERS,
    bad=[
        _config(update_interval=None),
        _config(stage=1, select_strategy=None, select_interval=None, update_interval=None),
    ],
    good=[_config(), _config(update_interval=1)],
    since=NEW,
)
def update_interval_auto(context: Context) -> Iterator[Hit]:
    """It makes gradient_accumulation_steps 0, and the loss is divided by that: NaN from the second step on.

    Source: the end of configure_zenflow in runtime/zenflow/engine.py, the loss in backward of runtime/engine.py.
    """
    if flows(context) and context.stage in (1, 2) and context.integer(UPDATE) is None:
        yield Hit(
            UPDATE,
            "is auto, which divides the loss by 0: NaN from the second step on",
            "Set it to a number of steps, such as 4.",
            setting(context, UPDATE, 4),
        )


@rule(
    "DS257",
    "error",
    FAILS,
    bad=[_config(offload=True), _config(offload=True, _zero={"overlap_comm": False})],
    good=[
        _config(offload=True, _zero={"overlap_comm": True}),
        _config(stage=3, offload=True),
        _config(offload=False),
    ],
    since=NEW,
)
def flow_offload_without_overlap(context: Context) -> Iterator[Hit]:
    """Its states travel beside the reduction (ZenFlowZeroOptimizer.__init__, engine_stage3.py in runtime/zenflow).

    overlap_comm is on by default at stage 3 only (overlap_comm_valid in runtime/zero/config.py).
    """
    overlap = context.flag(OVERLAP) if context.has(OVERLAP) else context.stage == 3
    if context.flag(f"{ZENFLOW}.offload") and context.stage and not overlap:
        yield Hit(
            f"{ZENFLOW}.offload",
            "needs overlap_comm, which is off",
            "Set overlap_comm to true, or zenflow.offload to false.",
            setting(context, OVERLAP, value=True),
        )


@rule(
    "DS258",
    "error",
    DIFFERS,
    bad=[
        {**_config(), "gradient_accumulation_steps": 3},
        {**_config(update_interval=1), "gradient_accumulation_steps": 2},
        {
            "_trainer": {"gradient_accumulation_steps": 8},
            **_config(),
            **HF,
            "gradient_accumulation_steps": "auto",
        },
    ],
    good=[
        {**_config(), "gradient_accumulation_steps": 2},
        {**_config(), "gradient_accumulation_steps": 1},
        _config(),
        {
            "_trainer": {"gradient_accumulation_steps": 2},
            **_config(),
            **HF,
            "gradient_accumulation_steps": "auto",
        },
    ],
    since=NEW,
)
def accumulation_that_flow_replaces(context: Context) -> Iterator[Hit]:
    """update_interval overwrites the accumulation steps, after the batch sizes were worked out with them.

    Source: the last line of configure_zenflow in runtime/zenflow/engine.py.
    """
    steps, update = context.integer(ACCUMULATION), context.integer(UPDATE)
    if context.is_auto(ACCUMULATION):
        steps = context.argument(ACCUMULATION)
    if flows(context) and context.stage and update and steps and steps not in (1, update):
        yield Hit(
            ACCUMULATION,
            f"is {steps}, and zenflow.update_interval makes it {update}",
            f"Set both to the same number, or {ACCUMULATION} to 1.",
        )


@rule(
    "DS259",
    "error",
    FAILS,
    bad=[
        {key: value for key, value in _config().items() if key != "optimizer"},
        {**_config(), "optimizer": {"type": "AdamW"}},
        {**_config(stage=1), **made("Adagrad", lr=1e-4)},
    ],
    good=[
        _config(),
        {**_config(), **made("Adam", lr=1e-4)},
        {key: value for key, value in _config(stage=3).items() if key != "optimizer"},
    ],
    since=NEW,
)
def flow_without_adam(context: Context) -> Iterator[Hit]:
    """ZenFlow's own AdamW is made of optimizer.params, and the CPU's must know its step_id.

    Source: ZenFlowZeroOptimizer.__init__ in runtime/zenflow/zenflow_stage_1_and_2.py; ops/adagrad and ops/lion don't.
    """
    if not flows(context) or context.stage not in (1, 2):
        return
    name = context.text("optimizer.type")
    advice = 'Set optimizer to {"type": "AdamW", "params": {...}} with its learning rate.'
    if not context.section("optimizer"):
        yield Hit(ZENFLOW, "needs the optimizer in the config, and there is none", advice)
    elif not context.has("optimizer.params"):
        fix = setting(context, "optimizer.params", {})
        yield Hit("optimizer", "has no params, which zenflow needs", advice, fix)
    elif name and name.lower() not in ADAMS:
        yield Hit("optimizer.type", f"zenflow works with Adam and AdamW, not with {name}", advice)
