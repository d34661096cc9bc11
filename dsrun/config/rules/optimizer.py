"""DS40x-DS42x: the optimizer and its arguments."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from dsrun.catalog import closest
from dsrun.config import schema
from dsrun.config.rules.frame import DIFFERS, FAILS, Context, Edit, Fix, Hit, rule
from dsrun.config.rules.precision import mode
from dsrun.config.rules.signatures import (
    ADAMS,
    MUP,
    TORCH,
    argument_meant,
    bare,
    data,
    offloaded,
    optimizer_class,
    optimizer_name,
    own,
    spelled,
    takes,
    torch_names,
)

TYPE = "optimizer.type"
PARAMS = "optimizer.params"
UNTESTED = "zero_allow_untested_optimizer"
MUON = "MuonWithAuxAdam"
NO_AMSGRAD = ("FusedAdam", "DeepSpeedCPUAdam", "ZenFlowCPUAdam", "FusedLamb")
NEVER = {
    "SparseAdam": "takes sparse gradients only, and DeepSpeed's are dense",
    "LBFGS": "needs a closure at each step, and DeepSpeed gives none",
}
"""Classes of torch.optim that no engine can step."""

# runtime/config.py names these as optimizers that went with the compression code.
GONE = {"onebitadam": "Adam", "zerooneadam": "Adam", "onebitlamb": "Lamb"}

ZERO_1: dict[str, Any] = {"zero_optimization": {"stage": 1}}
ZERO_2: dict[str, Any] = {"zero_optimization": {"stage": 2}}
CPU: dict[str, Any] = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
ALLOWED: dict[str, Any] = {**ZERO_1, UNTESTED: True}


def made(name: str, **params: Any) -> dict[str, Any]:
    """An optimizer section, for the examples."""
    return {"optimizer": {"type": name, "params": params}}


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
    "DS402",
    "error",
    FAILS,
    bad=[made("OneBitAdam", lr=1e-3), made("zerooneadam"), made("OneBitLamb")],
    good=[made("Adam", lr=1e-3), {"_version": "0.18", **made("OneBitAdam", lr=1e-3)}],
)
def removed_optimizer(context: Context) -> Iterator[Hit]:
    """DeepSpeed finds no such optimizer and stops (_do_sanity_check in runtime/engine.py)."""
    name, known = context.text(TYPE), own(context, TYPE)
    if name and known and name.lower() in GONE and name.lower() not in known:
        instead = GONE[name.lower()]
        yield Hit(
            TYPE,
            f"{name} was removed from DeepSpeed",
            f"Take {instead}; the 1-bit optimizers are in DeepSpeed up to 0.18.",
            Fix((Edit("replace", TYPE, instead),), safe=False),
        )


@rule(
    "DS403",
    "error",
    FAILS,
    bad=[
        made("sgd", lr=0.1),
        made("AdamWW", lr=1e-3),
        made("FusedAdam", lr=1e-3),
        made("adamw_torch_fused", lr=1e-3),
        made("zzz"),
        {"_version": "0.10", **made("Lion", lr=1e-4)},
        made("Optimizer"),
    ],
    good=[
        made("SGD", lr=0.1),
        made("ADAMW", lr=1e-3),
        made("adam", lr=1e-3),
        made("Muon", lr=1e-3),
        made("RAdam"),
    ],
)
def unknown_optimizer(context: Context) -> Iterator[Hit]:
    """DeepSpeed's own names are taken in any case, those of torch.optim exactly (_is_supported_optimizer).

    Source: runtime/engine.py and runtime/config.py.
    """
    name, known = context.text(TYPE), own(context, TYPE)
    torchs = torch_names("optimizers", TORCH)
    if not name or not known or name in torchs or name.lower() in {*known, *GONE}:
        return
    ours = {value: spelled(value) for value in known}
    other_case = next((value for value in torchs if value.lower() == name.lower()), None)
    likely = other_case or ours.get(bare(name)) or closest(name, [*ours.values(), *torchs])
    advice = f"Write {likely}" if likely else "Write AdamW"
    yield Hit(
        TYPE,
        f"{name} is neither an optimizer of DeepSpeed nor a class of torch.optim",
        f"{advice}; DeepSpeed's own are {', '.join(ours.values())}.",
        Fix((Edit("replace", TYPE, likely),), safe=likely == other_case) if likely else None,
    )


@rule(
    "DS404",
    "error",
    FAILS,
    bad=[{"optimizer": {"params": {"lr": 1e-3}}}, {**ZERO_2, "optimizer": {}}],
    good=[made("AdamW", lr=1e-3), {**ZERO_2}],
)
def optimizer_without_type(context: Context) -> Iterator[Hit]:
    """A section without `type` is no optimizer at all, `name` or not (get_optimizer_name in runtime/config.py).

    Unless the code brings one: stages 1 and 2 stop, stages 0 and 3 at the first backward (runtime/engine.py).
    """
    if isinstance(context.get("optimizer"), dict) and not context.has(TYPE):
        name = context.text("optimizer.name")
        edit = Edit("move", "optimizer.name", TYPE) if name else Edit("add", TYPE, "AdamW")
        yield Hit(
            "optimizer",
            "has no type, and means no optimizer at all" + (": name isn't read" if name else ""),
            f"Set optimizer.type to {name or 'AdamW'}, or remove the section if the code brings an optimizer.",
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
            Fix((Edit("remove", f"{PARAMS}.amsgrad"),), safe=False),
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
        if isinstance(value, (int, float)) and math.isfinite(value):
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
        fix = Fix((Edit("replace", path, 1e-8),), safe=False)
        yield Hit(path, "is 0: a weight without gradient becomes NaN", "Write 1e-08, the default.", fix)


@rule(
    "DS410",
    "warning",
    bad=[
        {**CPU, **made("AdamW", lr=1e-3, torch_adam=True)},
        {**CPU, **made("SGD", lr=0.1), UNTESTED: True},
        {**CPU, **made("Lamb", lr=1e-3), UNTESTED: True},
    ],
    good=[
        {**CPU, **made("AdamW", lr=1e-3)},
        {**CPU, **made("Adagrad", lr=1e-3)},
        {**CPU, **made("Lion", lr=1e-4)},
        {**CPU, **made("Muon", lr=1e-3)},
        {**ZERO_2, **made("AdamW", lr=1e-3, torch_adam=True)},
        {**CPU, "zero_force_ds_cpu_optimizer": False, **made("AdamW", lr=1e-3)},
    ],
)
def offload_without_cpu_optimizer(context: Context) -> Iterator[Hit]:
    """Only Adam, Adagrad and Lion have a version for the CPU (_configure_basic_optimizer in runtime/engine.py).

    Any other runs there as it is, several times slower; FusedLamb's kernels are for the GPU alone.
    """
    kind = optimizer_class(context)
    if not kind or not offloaded(context) or kind == MUON or "CPU" in kind:
        return
    if context.flag(f"{PARAMS}.torch_adam"):
        path, advice = f"{PARAMS}.torch_adam", "Remove torch_adam: AdamW is then DeepSpeedCPUAdam."
        fix = Fix((Edit("remove", path),), safe=False)
    else:
        path, fix = TYPE, None
        advice = "Take AdamW, Adagrad or Lion, which have a version for the CPU, or don't offload."
    yield Hit(
        path, f"the step runs in {kind} on the CPU, which DeepSpeed has no fast version of", advice, fix
    )


@rule(
    "DS411",
    "error",
    FAILS,
    bad=[{"_device": "cpu", **made("Lion", lr=1e-4)}, {"_device": "cpu", **made("Lamb", lr=1e-3)}],
    good=[
        {"_device": "cuda", **made("Lion", lr=1e-4)},
        made("Lamb", lr=1e-3),
        {"_device": "cpu", **CPU, **made("Lion", lr=1e-4)},
        {"_device": "cpu", **made("AdamW", lr=1e-3)},
    ],
)
def fused_on_a_cpu(context: Context) -> Iterator[Hit]:
    """FusedLion and FusedLamb have no CPU kernels: "This op had not been implemented on CPU backend".

    Source: ops/op_builder/cpu/no_impl.py. FusedAdam has them.
    """
    kind = optimizer_class(context)
    if context.setting.device == "cpu" and kind in ("FusedLion", "FusedLamb"):
        lion = kind == "FusedLion"
        yield Hit(
            TYPE,
            f"{kind} needs a GPU",
            "Offload the optimizer to the CPU, which has a Lion of its own." if lion else "Take AdamW.",
        )


@rule(
    "DS412",
    "error",
    FAILS,
    bad=[
        {**made("Lamb", lr=1e-3), "fp16": {"enabled": True, "loss_scale": 128}},
        {**made("lamb"), "fp16": {"enabled": False, "loss_scale": 1}},
    ],
    good=[
        {**made("Lamb", lr=1e-3), "fp16": {"enabled": True, "loss_scale": 0}},
        {**made("AdamW", lr=1e-3), "fp16": {"enabled": True, "loss_scale": 128}},
    ],
)
def lamb_with_a_fixed_scale(context: Context) -> Iterator[Hit]:
    """Lamb is checked for a loss scale that adapts itself, with or without fp16 (_do_sanity_check).

    Source: runtime/engine.py.
    """
    scale = context.number("fp16.loss_scale")
    if optimizer_name(context) == "lamb" and scale:
        yield Hit(
            "fp16.loss_scale",
            f"is {scale:g}, and Lamb wants a loss scale that adapts itself",
            "Write 0, or take another optimizer.",
            Fix((Edit("replace", "fp16.loss_scale", 0),), safe=False),
        )


@rule(
    "DS413",
    "warning",
    bad=[made("MuAdam", lr=1e-3), made("muadamw", lr=1e-3), made("MuSGD", lr=0.1)],
    good=[made("Adam", lr=1e-3), made("Muon", lr=1e-3)],
)
def mup_needed(context: Context) -> Iterator[Hit]:
    """MuAdam, MuAdamW and MuSGD come from the package mup; without it the error names a variable.

    "cannot access local variable 'MuAdam'" (_configure_basic_optimizer in runtime/engine.py).
    """
    if (name := optimizer_name(context)) in MUP:
        yield Hit(
            TYPE,
            f"{spelled(name or '')} comes from the package mup, which DeepSpeed doesn't bring",
            "pip install mup, and give the model its base shapes with mup.set_base_shapes.",
        )


@rule(
    "DS414",
    "error",
    FAILS,
    bad=[
        {"zero_optimization": {"stage": 3}, **made("Muon", lr=1e-3)},
        {"zero_optimization": {"stage": 3, "reduce_scatter": True}, **made("muon", lr=1e-3)},
    ],
    good=[
        {"zero_optimization": {"stage": 3, "reduce_scatter": False}, **made("Muon", lr=1e-3)},
        {"zero_optimization": {"stage": 2}, **made("Muon", lr=1e-3)},
        {"zero_optimization": {"stage": 3}, **made("AdamW", lr=1e-3)},
    ],
    since=(0, 18),
)
def muon_with_reduce_scatter(context: Context) -> Iterator[Hit]:
    """At stage 3 Muon needs whole gradients: "Muon and reduce scatter cannot be used together".

    Source: runtime/zero/stage3.py.
    """
    path = "zero_optimization.reduce_scatter"
    if context.stage == 3 and optimizer_class(context) == MUON and context.flag(path) is not False:
        op = "replace" if context.has(path) else "add"
        default = "" if context.has(path) else ", by default"
        yield Hit(
            path,
            f"is true{default}, and Muon can't have it at stage 3",
            "Set zero_optimization.reduce_scatter to false, or take stage 2.",
            Fix((Edit(op, path, False),), safe=False),
        )


@rule(
    "DS415",
    "error",
    FAILS,
    bad=[
        {**ZERO_1, **made("SGD", lr=0.1)},
        {**ZERO_2, **made("Lamb", lr=1e-3), UNTESTED: False},
        {"_for": "hf", **made("RMSprop", lr=0.1)},
    ],
    good=[
        {**ALLOWED, **made("SGD", lr=0.1)},
        made("SGD", lr=0.1),
        {**ZERO_1, **made("AdamW", lr=1e-3, torch_adam=True)},
        {**ZERO_1, **made("Adagrad", lr=1e-3)},
        {**ZERO_1, **made("Muon", lr=1e-3)},
    ],
)
def untested_with_zero(context: Context) -> Iterator[Hit]:
    """ZeRO takes a list of optimizers, and others only where it is told to (_do_optimizer_sanity_check).

    Source: runtime/engine.py, ZERO_SUPPORTED_OPTIMIZERS in runtime/zero/utils.py.
    """
    kind = optimizer_class(context)
    if context.stage > 0 and kind and kind not in data()["zero"] and not context.get(UNTESTED):
        op = "replace" if context.has(UNTESTED) else "add"
        yield Hit(
            TYPE,
            f"{kind} is not among the optimizers that ZeRO was tested with, and stops it",
            f"Set {UNTESTED} to true, take AdamW, or set zero_optimization.stage to 0.",
            Fix((Edit(op, UNTESTED, True),), safe=False),
        )


@rule(
    "DS416",
    "error",
    FAILS,
    bad=[made("LBFGS", lr=1), {**ALLOWED, **made("SparseAdam", lr=1e-3)}],
    good=[made("Adam", lr=1e-3), made("RAdam", lr=1e-3)],
)
def optimizer_that_no_engine_steps(context: Context) -> Iterator[Hit]:
    """Two classes of torch.optim fail at the first step (torch/optim/lbfgs.py, torch/optim/sparse_adam.py)."""
    name = (optimizer_class(context) or "").removeprefix(TORCH)
    if name in NEVER:
        yield Hit(TYPE, f"torch.optim.{name} {NEVER[name]}", "Take AdamW.")


@rule(
    "DS417",
    "note",
    bad=[made("Adam", weight_decay=0.1), {"_for": "hf", **made("adam", weight_decay="auto")}],
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
            Fix((Edit("remove", path),)),
        )


@rule(
    "DS419",
    "note",
    bad=[
        {**CPU},
        {
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}},
            "zero_force_ds_cpu_optimizer": True,
        },
    ],
    good=[
        {**CPU, **made("AdamW", lr=1e-3)},
        {**CPU, "zero_force_ds_cpu_optimizer": False},
        {**ZERO_2},
        {"_for": "hf", **CPU},
    ],
)
def offload_with_the_codes_optimizer(context: Context) -> Iterator[Hit]:
    """With offload the code's optimizer has to be DeepSpeedCPUAdam or DeepSpeedCPULion (_configure_optimizer).

    "You are using ZeRO-Offload with a client provided optimizer" (runtime/engine.py). accelerate puts
    DeepSpeedCPUAdam in its place.
    """
    forced = context.flag("zero_force_ds_cpu_optimizer") is not False
    if context.target == "deepspeed" and not context.has("optimizer") and offloaded(context) and forced:
        yield Hit(
            "zero_optimization.offload_optimizer",
            "there is no optimizer section: the code has to bring DeepSpeedCPUAdam, and no other Adam",
            "Add an optimizer section, or set zero_force_ds_cpu_optimizer to false for any optimizer.",
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
            Fix((Edit("remove", path),)),
        )


@rule(
    "DS421",
    "error",
    FAILS,
    bad=[
        {"optimizer": {"type": "AdamW", "legacy_fusion": True}, "bf16": {"enabled": True}},
        {"optimizer": {"type": "Adam", "legacy_fusion": True}, "fp16": {"enabled": True}},
        {**ZERO_1, "optimizer": {"type": "AdamW", "legacy_fusion": True}, "bf16": {"enabled": True}},
        {"optimizer": {"type": "AdamW", "legacy_fusion": True}},
    ],
    good=[
        {"optimizer": {"type": "AdamW", "legacy_fusion": False}, "bf16": {"enabled": True}},
        {"optimizer": {"type": "AdamW"}, "fp16": {"enabled": True}},
    ],
)
def legacy_fusion_at_stage_0(context: Context) -> Iterator[Hit]:
    """The old way of fusing calls FusedAdam as it no longer is: "FusedAdam has been updated" at the first step.

    Measured at stage 0 in 16 bits; nothing else reads the key (_configure_fp16_optimizer in runtime/engine.py).
    """
    path, kind = "optimizer.legacy_fusion", optimizer_class(context)
    if not context.flag(path) or mode(context) is None:
        return
    fix = Fix((Edit("remove", path),))
    if context.stage == 0 and mode(context) != "fp32" and kind == "FusedAdam":
        yield Hit(
            path, "calls FusedAdam in a way that it refuses, and the first step fails", "Remove it.", fix
        )
    else:
        text = "has no effect: it is for Adam at stage 0 in 16 bits"
        yield Hit(path, text, "Remove it.", fix, "warning")
