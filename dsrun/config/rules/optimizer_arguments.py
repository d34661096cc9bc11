"""DS401, DS405 to DS409, DS417, DS418 and DS420: the optimizer's arguments."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config import schema
from dsrun.config.rules.common import ADAMS, removal, setting
from dsrun.config.rules.examples import CPU, hf, made
from dsrun.config.rules.frame import DIFFERS, FAILS, LARGEST, Context, Edit, Fix, Hit, rule
from dsrun.config.rules.optimizer import MUON, PARAMS, TYPE
from dsrun.config.rules.signatures import TORCH, argument_meant, optimizer_class, optimizer_name, takes

NO_AMSGRAD = ("FusedAdam", "DeepSpeedCPUAdam", "ZenFlowCPUAdam", "FusedLamb")


def called(name: str) -> str:
    """A class for a message: torch.optim.SGD, FusedAdam, Muon."""
    return "Muon" if name == MUON else name


@rule(
    "DS401",
    "error",
    FAILS,
    bad=[made("AdamW", max_grad_norm=0), made("SGD", lr=0.1, max_grad_norm=1.0)],
    good=[{**made("AdamW", lr=1e-3), "gradient_clipping": 1.0}],
)
def clipping_in_optimizer(context: Context) -> Iterator[Hit]:
    """max_grad_norm is refused here, even 0 (_configure_basic_optimizer in runtime/engine.py)."""
    path = f"{PARAMS}.max_grad_norm"
    if context.has(path):
        free = not context.has("gradient_clipping")
        edit = Edit("move", path, "gradient_clipping") if free else Edit("remove", path)
        yield Hit(
            path,
            f"is {schema.shorten(context.get(path))}: DeepSpeed refuses the key here, whatever its value",
            "Clip with the top-level gradient_clipping.",
            Fix((edit,), safe=False),
        )


@rule(
    "DS405",
    "error",
    FAILS,
    bad=[
        made("AdamW", learning_rate=1e-3),
        made("AdamW", lr=1e-3, torch_adam=True, bias_correction=True),
        {**CPU, **made("AdamW", lr=1e-3, set_grad_none=True)},
        made("AdamW", lr=1e-3, foreach=True),
        made("Adagrad", lr=1e-3, betas=[0.9, 0.99]),
        {"_device": "cuda", **made("Lion", lr=1e-4, eps=1e-8)},
        made("SGD", lr=0.1, zzz=1),
        made("Muon", lr=1e-3, nesterov=True),
    ],
    good=[
        made("AdamW", lr=1e-3, bias_correction=True, set_grad_none=True, adam_w_mode=True),
        made("AdamW", lr=1e-3, torch_adam=True, foreach=True, fused=False),
        {**CPU, **made("AdamW", lr=1e-3, bias_correction=True, fp32_optimizer_states=True)},
        made("Muon", lr=1e-3, muon_lr=0.02, adam_lr=1e-3, momentum=0.9, per_head_muon=True),
        made("SGD", lr=0.1, momentum=0.9, nesterov=True),
        made("MuAdam", lr=1e-3, anything=1),
        {"optimizer": {"type": "AdamW", "params": None}},
    ],
)
def argument_not_taken(context: Context) -> Iterator[Hit]:
    """params go to the class as they are: TypeError (_configure_basic_optimizer in runtime/engine.py).

    Which class that is depends on torch_adam and on offload. Muon alone picks out what it knows and passes over
    the rest (_muon_half_defaults).
    """
    known, kind = takes(context), optimizer_class(context)
    if known is None or kind is None:
        return
    for key in context.section(PARAMS):
        if key in known or key == "max_grad_norm":
            continue
        path = f"{PARAMS}.{key}"
        meant = argument_meant(key, known)
        taken = meant is None or context.has(f"{PARAMS}.{meant}")
        edit = Edit("remove", path) if taken else Edit("rename", path, meant)
        muon = kind == MUON
        yield Hit(
            path,
            f"{called(kind)} {'ignores it' if muon else 'takes no such argument'}",
            (f"Did you mean {meant}? " if meant else "") + f"It takes {', '.join(known)}.",
            Fix((edit,), safe=False),
            effect=DIFFERS if muon else None,
        )


@rule(
    "DS406",
    "error",
    FAILS,
    bad=[
        made("AdamW", amsgrad=True),
        {**CPU, **made("Adam", amsgrad=True)},
        {"_device": "cuda", **made("Lamb", amsgrad=True)},
    ],
    good=[made("AdamW", amsgrad=False), made("AdamW", amsgrad=True, torch_adam=True)],
)
def amsgrad_not_there(context: Context) -> Iterator[Hit]:
    """DeepSpeed's own Adams and Lamb raise at amsgrad (ops/adam/fused_adam.py, ops/adam/cpu_adam.py, ops/lamb)."""
    kind = optimizer_class(context)
    if kind in NO_AMSGRAD and context.flag(f"{PARAMS}.amsgrad"):
        torch_too = optimizer_name(context) in ADAMS
        yield Hit(
            f"{PARAMS}.amsgrad",
            f"{kind} has no AMSGrad",
            "Remove it" + (', or add "torch_adam": true for PyTorch\'s Adam.' if torch_too else "."),
            removal(context, f"{PARAMS}.amsgrad", safe=False),
        )


@rule(
    "DS407",
    "error",
    DIFFERS,
    bad=[
        made("AdamW", lr=-1e-3),
        made("AdamW", lr=1e-3, betas=[0.9, 1.0]),
        made("AdamW", lr=1e-3, weight_decay=-0.1),
        made("AdamW", lr=-1e-3, torch_adam=True),
        made("RAdam", betas=[0.9, 1.5]),
        made("SGD", lr=0.1, momentum=1.0),
    ],
    good=[
        made("AdamW", lr=1e-3, betas=[0.9, 0.999], weight_decay=0, eps=1e-8),
        made("AdamW", lr=1e-3, betas=[0, 0.99]),
        made("SGD", lr=0.1, momentum=0.99),
    ],
)
def number_out_of_range(context: Context) -> Iterator[Hit]:
    """DeepSpeed's optimizers compute with whatever they get: measured, a negative lr trains and moves away.

    A beta of 1 makes every weight NaN at the first step (ops/adam/fused_adam.py, ops/adam/cpu_adam.py).
    PyTorch's own raise ValueError at what is negative, and at betas (torch/optim/adamw.py).
    """
    kind = optimizer_class(context) or ""
    for violation in context.violations:
        key = violation.path.removeprefix(f"{PARAMS}.").split(".")[0]
        value = violation.value
        if (
            violation.kind != "value"
            or not violation.path.startswith(f"{PARAMS}.")
            or isinstance(value, bool)
        ):
            continue
        if isinstance(value, (int, float)) and abs(value) <= LARGEST:
            raised = kind.startswith(TORCH) and (value < 0 or key == "betas")
            end = "stops at it" if raised else "computes with it all the same"
            yield Hit(
                violation.path,
                f"is {value:g}, out of range: {kind or 'the optimizer'} {end}",
                violation.suggestion,
                effect=FAILS if raised else None,
            )


@rule(
    "DS408",
    "warning",
    bad=[made("AdamW", lr=1.5), made("AdamW", lr=0), {**CPU, **made("Adam", lr=0, weight_decay=0.1)}],
    good=[
        made("AdamW", lr=1.0),
        made("AdamW", lr=1e-9),
        {
            **made("AdamW", lr=0),
            "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1e-3}},
        },
        made("Adadelta", lr=1.5),
        made("AdamW"),
    ],
)
def learning_rate_unlikely(context: Context) -> Iterator[Hit]:
    """Adam's steps are as long as lr, whatever the gradient; with lr 0 there are none (ops/adam/fused_adam.py)."""
    path = f"{PARAMS}.lr"
    value = context.number(path)
    if value is None:
        return
    if value == 0 and not context.has("scheduler"):
        yield Hit(path, "is 0, and no scheduler changes it: nothing is learnt", "Write a rate, such as 1e-4.")
    if value > 1 and optimizer_name(context) in ADAMS:
        yield Hit(
            path,
            f"is {value:g}: a step of Adam changes each weight by about that much",
            "Usual are 1e-5 to 1e-3.",
        )


@rule(
    "DS409",
    "warning",
    bad=[made("AdamW", eps=0), {**CPU, **made("Adam", eps=0.0)}],
    good=[made("AdamW", eps=1e-12), made("AdamW")],
)
def eps_of_0(context: Context) -> Iterator[Hit]:
    """A weight whose gradient is 0 is divided by 0: measured, NaN after one step (ops/adam/fused_adam.py)."""
    path = f"{PARAMS}.eps"
    if context.number(path) == 0 and optimizer_name(context) in ADAMS:
        fix = setting(context, path, 1e-8)
        yield Hit(path, "is 0: a weight without gradient becomes NaN", "Write 1e-08, the default.", fix)


@rule(
    "DS417",
    "note",
    bad=[made("Adam", weight_decay=0.1), hf(**made("adam", weight_decay="auto"))],
    good=[
        made("AdamW", weight_decay=0.1),
        made("Adam", weight_decay=0.1, adam_w_mode=True),
        made("Adam", weight_decay=0.1, adam_w_mode=False),
        made("Adam", weight_decay=0),
        made("Adam"),
    ],
)
def adam_is_adamw(context: Context) -> Iterator[Hit]:
    """adam_w_mode is true where it is left out (_configure_basic_optimizer in runtime/engine.py)."""
    decay = f"{PARAMS}.weight_decay"
    decays = context.number(decay) or context.is_auto(decay)
    if optimizer_name(context) == "adam" and decays and not context.has(f"{PARAMS}.adam_w_mode"):
        yield Hit(
            TYPE,
            "is Adam, which in DeepSpeed is AdamW: weight_decay is taken off the weights",
            'Write AdamW for that, or add "adam_w_mode": false for Adam with an L2 penalty.',
        )


@rule(
    "DS418",
    "warning",
    bad=[made("AdamW", adam_w_mode=False, weight_decay=0.1), {**CPU, **made("adamw", adam_w_mode=False)}],
    good=[made("Adam", adam_w_mode=False), made("AdamW", adam_w_mode=True), made("AdamW")],
)
def adamw_without_its_mode(context: Context) -> Iterator[Hit]:
    """The name AdamW wins over adam_w_mode (_configure_basic_optimizer in runtime/engine.py)."""
    path = f"{PARAMS}.adam_w_mode"
    if optimizer_name(context) == "adamw" and context.flag(path) is False:
        yield Hit(
            path,
            "has no effect: the type is AdamW",
            "Write Adam for an L2 penalty, or remove it.",
            removal(context, path),
        )


@rule(
    "DS420",
    "warning",
    bad=[
        made("AdamW", fp32_optimizer_states=False),
        {**CPU, **made("AdamW", torch_adam=True, fp32_optimizer_states=False)},
    ],
    good=[
        {**CPU, **made("AdamW", fp32_optimizer_states=False)},
        made("AdamW", fp32_optimizer_states=True),
        {**CPU, **made("Lion", lr=1e-4, fp32_optimizer_states=False)},
    ],
    since=(0, 19),
)
def states_on_the_gpu(context: Context) -> Iterator[Hit]:
    """The precision of the moments is the CPU's Adam's alone (get_optimizer_configuration, runtime/engine.py)."""
    path, kind = f"{PARAMS}.fp32_optimizer_states", optimizer_class(context)
    if context.flag(path) is False and optimizer_name(context) in ADAMS and kind and "CPU" not in kind:
        yield Hit(
            path,
            f"has no effect: {kind} keeps its moments in the precision of what it steps",
            "Remove it; it acts where the optimizer is offloaded to the CPU.",
            removal(context, path),
        )
