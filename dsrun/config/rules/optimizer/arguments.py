"""DS401, DS405 to DS409, DS417, DS418, DS420 and DS422: the optimizer's arguments."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules import conditions as when
from dsrun.config.rules.common import ADAMS, no_effect, removal
from dsrun.config.rules.examples import CPU, hf, made
from dsrun.config.rules.frame import DIFFERS, FAILS, Context, Edit, Finding, Fix, bad, good, rule
from dsrun.config.rules.kinds import Table, all_of, in_range, put, report, without_effect
from dsrun.config.rules.optimizer.signatures import (
    TORCH,
    argument_meant,
    optimizer_class,
    optimizer_name,
    takes,
)
from dsrun.config.rules.optimizer.types import MUON, PARAMS, TYPE
from dsrun.config.schemas import schema
from dsrun.json_numbers import is_finite

DECAY_THAT_SHOWS = 1e-3
NO_AMSGRAD = ("FusedAdam", "DeepSpeedCPUAdam", "ZenFlowCPUAdam", "FusedLamb")


def called(name: str) -> str:
    """A class for a message: torch.optim.SGD, FusedAdam, Muon."""
    return "Muon" if name == MUON else name


@rule("DS401", FAILS)
@bad(made("AdamW", max_grad_norm=0), made("SGD", lr=0.1, max_grad_norm=1.0))
@good({**made("AdamW", lr=1e-3), "gradient_clipping": 1.0})
def max_grad_norm_in_optimizer(context: Context) -> Iterator[Finding]:
    """max_grad_norm is refused here, even if 0 (_configure_basic_optimizer in runtime/engine.py)."""
    path = f"{PARAMS}.max_grad_norm"
    if context.has(path):
        free = not context.has("gradient_clipping")
        edit = Edit("move", path, "gradient_clipping") if free else Edit("remove", path)
        yield Finding(
            path,
            f"is {schema.shorten(context.get(path))}: DeepSpeed refuses this key here, whatever its value",
            "Clip with the top-level gradient_clipping.",
            Fix((edit,), safe=False),
        )


@rule("DS405", FAILS)
@bad(made("AdamW", learning_rate=1e-3), made("AdamW", lr=1e-3, torch_adam=True, bias_correction=True))
@good(
    made("AdamW", lr=1e-3, bias_correction=True, set_grad_none=True, adam_w_mode=True),
    made("AdamW", lr=1e-3, torch_adam=True, foreach=True, fused=False),
)
def unknown_optimizer_argument(context: Context) -> Iterator[Finding]:
    """params are passed to the class unchanged: TypeError (_configure_basic_optimizer in runtime/engine.py).

    Which class that is depends on torch_adam and on offload. Only Muon picks out what it knows and ignores
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
        yield Finding(
            path,
            f"{called(kind)} {'ignores it' if muon else 'has no such argument'}",
            (f"Did you mean {meant}? " if meant else "") + f"It takes {', '.join(known)}.",
            Fix((edit,), safe=False),
            effect=DIFFERS if muon else "",
        )


@rule("DS406", FAILS)
@bad(made("AdamW", amsgrad=True), {**CPU, **made("Adam", amsgrad=True)})
@good(made("AdamW", amsgrad=False), made("AdamW", amsgrad=True, torch_adam=True))
def amsgrad_not_supported(context: Context) -> Iterator[Finding]:
    """DeepSpeed's own Adams and Lamb refuse amsgrad (ops/adam/fused_adam.py, ops/adam/cpu_adam.py, ops/lamb)."""
    kind = optimizer_class(context)
    if kind in NO_AMSGRAD and context.flag(f"{PARAMS}.amsgrad"):
        torch_too = optimizer_name(context) in ADAMS
        yield Finding(
            f"{PARAMS}.amsgrad",
            f"{kind} has no AMSGrad",
            "Remove it" + (', or add "torch_adam": true for PyTorch\'s Adam.' if torch_too else "."),
            removal(context, f"{PARAMS}.amsgrad", safe=False),
        )


@rule("DS407", DIFFERS)
@bad(made("AdamW", lr=-1e-3), made("AdamW", lr=1e-3, betas=[0.9, 1.0]))
@good(
    made("AdamW", lr=1e-3, betas=[0.9, 0.999], weight_decay=0, eps=1e-8),
    made("AdamW", lr=1e-3, betas=[0, 0.99]),
)
def number_out_of_range(context: Context) -> Iterator[Finding]:
    """DeepSpeed's optimizers compute with any number: measured, a negative lr trains and diverges.

    A beta of 1 makes every weight NaN at the first step (ops/adam/fused_adam.py, ops/adam/cpu_adam.py).
    PyTorch's own raise ValueError for negative values, and for betas (torch/optim/adamw.py).
    """
    kind = optimizer_class(context) or ""
    for violation in context.violations:
        key = violation.path.removeprefix(f"{PARAMS}.").split(".")[0]
        value = violation.value
        if violation.kind == "value" and violation.path.startswith(f"{PARAMS}.") and is_finite(value):
            raised = kind.startswith(TORCH) and (value < 0 or key == "betas")
            end = "stops at it" if raised else "computes with it anyway"
            yield Finding(
                violation.path,
                f"is {value:g}, out of range: {kind or 'the optimizer'} {end}",
                violation.suggestion,
                effect=FAILS if raised else "",
            )


@rule("DS408", "warning")
@bad(made("AdamW", lr=1.5), made("AdamW", lr=0))
@good(made("AdamW", lr=1.0), made("AdamW", lr=1e-9))
def unlikely_learning_rate() -> Table:
    """Adam's steps have the size of lr, whatever the gradient; with lr 0 there are none (ops/adam/fused_adam.py)."""
    path = f"{PARAMS}.lr"
    idle = "is 0, and no scheduler changes it: nothing is learned. Write a rate, such as 1e-4."
    large = (
        "is {value:g}: each step of Adam changes a weight by about that much. Usual values are 1e-5 to 1e-3."
    )
    return all_of(
        report(path, idle, (lambda context: context.number(path) == 0, when.lacks("scheduler"))),
        in_range(path, large, lambda context: optimizer_name(context) in ADAMS, most=1),
    )


@rule("DS409", "warning")
@bad(made("AdamW", eps=0), {**CPU, **made("Adam", eps=0.0)})
@good(made("AdamW", eps=1e-12), made("AdamW"))
def eps_of_0() -> Table:
    """A weight whose gradient is 0 is divided by 0: measured, NaN after one step (ops/adam/fused_adam.py)."""
    path = f"{PARAMS}.eps"
    text = "is 0: a weight with a gradient of 0 becomes NaN. Write 1e-08, the default."
    conditions = (lambda context: context.number(path) == 0, lambda context: optimizer_name(context) in ADAMS)
    return report(path, text, conditions, put(path, 1e-8))


@rule("DS417", "warning")
@bad(made("Adam", weight_decay=0.1), hf(**made("adam", weight_decay="auto")))
@good(made("AdamW", weight_decay=0.1), made("Adam", weight_decay=0.1, adam_w_mode=True))
def adam_is_adamw(context: Context) -> Iterator[Finding]:
    """adam_w_mode is true by default (_configure_basic_optimizer in runtime/engine.py).

    Where the decay is too small to show, or left to the Trainer (0 by default), this is a note.
    """
    decay = f"{PARAMS}.weight_decay"
    decays = context.number(decay) or context.is_auto(decay)
    shows = (context.number(decay) or 0) >= DECAY_THAT_SHOWS
    if optimizer_name(context) == "adam" and decays and not context.has(f"{PARAMS}.adam_w_mode"):
        yield Finding(
            TYPE,
            "is Adam, which in DeepSpeed is AdamW: weight_decay is decoupled from the gradient",
            'Write AdamW for that, or add "adam_w_mode": false for Adam with an L2 penalty.',
            severity="" if shows else "note",
        )


@rule("DS418", "warning")
@bad(made("AdamW", adam_w_mode=False, weight_decay=0.1), {**CPU, **made("adamw", adam_w_mode=False)})
@good(made("Adam", adam_w_mode=False), made("AdamW", adam_w_mode=True))
def adamw_with_adam_w_mode_false() -> Table:
    """The name AdamW wins over adam_w_mode (_configure_basic_optimizer in runtime/engine.py)."""
    advice = "Write Adam for an L2 penalty, or remove it."
    conditions = (when.off(f"{PARAMS}.adam_w_mode"), lambda context: optimizer_name(context) == "adamw")
    return without_effect(f"{PARAMS}.adam_w_mode", ": the type is AdamW", conditions, advice)


@rule("DS422", "warning", since=(0, 18))
@bad(made("Muon", lr=0.02), made("muon", lr=0.02, momentum=0.95))
@good(made("Muon", muon_lr=0.02, adam_lr=1e-3), made("Muon", lr=1e-3, muon_lr=0.02))
def one_rate_for_both_halves_of_muon(context: Context) -> Iterator[Finding]:
    """lr alone is the rate of Muon's matrices and of Adam's embeddings and norms (_muon_half_defaults in
    runtime/engine.py), which need rates that are ten to a hundred times apart: measured, with 0.02 the loss rises.
    """
    path = f"{PARAMS}.lr"
    apart = any(context.has(f"{PARAMS}.{key}") for key in ("muon_lr", "adam_lr"))
    if optimizer_class(context) == MUON and context.has(path) and not apart:
        yield Finding(
            path,
            f"is {schema.shorten(context.get(path))} for Muon's matrices and for Adam's embeddings and norms alike",
            "Write muon_lr and adam_lr, such as 0.02 and 0.001.",
        )


@rule("DS420", "warning", since=(0, 19))
@bad(
    made("AdamW", fp32_optimizer_states=False),
    {**CPU, **made("AdamW", torch_adam=True, fp32_optimizer_states=False)},
)
@good({**CPU, **made("AdamW", fp32_optimizer_states=False)}, made("AdamW", fp32_optimizer_states=True))
def fp32_optimizer_states_on_the_gpu(context: Context) -> Iterator[Finding]:
    """Only the CPU's Adam reads the precision of the moments (get_optimizer_configuration, runtime/engine.py)."""
    path, kind = f"{PARAMS}.fp32_optimizer_states", optimizer_class(context)
    if context.flag(path) is False and optimizer_name(context) in ADAMS and kind and "CPU" not in kind:
        yield no_effect(
            context,
            path,
            f": {kind} keeps its moments in the precision of the weights",
            "Remove it; it acts only with optimizer offload to the CPU.",
        )
