"""DS402 to DS404, DS410 to DS416, DS419 and DS421: which optimizer it is, and where it can run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsrun.catalog import closest
from dsrun.config.rules import conditions as when
from dsrun.config.rules.common import OPTIMIZER, removal, set_to
from dsrun.config.rules.examples import CPU, ZERO_1, ZERO_2, bf16, fp16, made, zero
from dsrun.config.rules.frame import FAILS, Context, Edit, Finding, Fix, bad, good, rule
from dsrun.config.rules.kinds import Table, put, report
from dsrun.config.rules.optimizer.signatures import (
    MUP,
    TORCH,
    bare,
    data,
    offloaded,
    optimizer_class,
    optimizer_name,
    own,
    spelled,
    torch_names,
)
from dsrun.config.rules.precision.modes import mode

TYPE = "optimizer.type"
PARAMS = "optimizer.params"
UNTESTED = "zero_allow_untested_optimizer"
MUON = "MuonWithAuxAdam"

NEVER = {
    "SparseAdam": "accepts sparse gradients only, but DeepSpeed's are dense",
    "LBFGS": "needs a closure at each step, but DeepSpeed passes none",
}
"""Classes of torch.optim that no engine can step."""


# runtime/config.py names these as optimizers that went with the compression code.
GONE = {"onebitadam": "Adam", "zerooneadam": "Adam", "onebitlamb": "Lamb"}
ALLOWED: dict[str, Any] = {**ZERO_1, UNTESTED: True}


def _is_untested(context: Context) -> bool:
    kind = optimizer_class(context)
    return kind is not None and kind not in data()["zero"]


@rule("DS402", FAILS)
@bad(made("OneBitAdam", lr=1e-3), made("zerooneadam"))
@good(made("Adam", lr=1e-3), {"_version": "0.18", **made("OneBitAdam", lr=1e-3)})
def removed_optimizer(context: Context) -> Iterator[Finding]:
    """DeepSpeed finds no such optimizer and stops (_do_sanity_check in runtime/engine.py)."""
    name, known = context.text(TYPE), own(context, TYPE)
    if name and known and name.lower() in GONE and name.lower() not in known:
        instead = GONE[name.lower()]
        yield Finding(
            TYPE,
            f"{name} was removed from DeepSpeed",
            f"Use {instead}; DeepSpeed up to 0.18 has the 1-bit optimizers.",
            set_to(context, TYPE, instead),
        )


@rule("DS403", FAILS)
@bad(made("sgd", lr=0.1), made("AdamWW", lr=1e-3))
@good(made("SGD", lr=0.1), made("ADAMW", lr=1e-3))
def unknown_optimizer(context: Context) -> Iterator[Finding]:
    """DeepSpeed's own names match in any case, those of torch.optim exactly (_is_supported_optimizer).

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
    yield Finding(
        TYPE,
        f"{name} is neither an optimizer of DeepSpeed nor a class of torch.optim",
        f"{advice}; DeepSpeed's own are {', '.join(ours.values())}.",
        set_to(context, TYPE, likely, safe=likely == other_case) if likely else None,
    )


@rule("DS404", FAILS)
@bad({"optimizer": {"params": {"lr": 1e-3}}}, {**ZERO_2, "optimizer": {}})
@good(made("AdamW", lr=1e-3), ZERO_2)
def optimizer_without_type(context: Context) -> Iterator[Finding]:
    """A section without `type` means no optimizer, even with `name` (get_optimizer_name in runtime/config.py).

    Unless the code brings one: stages 1 and 2 stop, stages 0 and 3 at the first backward (runtime/engine.py).
    """
    if isinstance(context.get("optimizer"), dict) and not context.has(TYPE):
        name = context.text("optimizer.name")
        edit = Edit("move", "optimizer.name", TYPE) if name else Edit("add", TYPE, "AdamW")
        yield Finding(
            "optimizer",
            "has no type, so there is no optimizer" + (": name isn't read" if name else ""),
            f"Set optimizer.type to {name or 'AdamW'}, or remove the section if the code makes the optimizer.",
            Fix((edit,), safe=False),
        )


@rule("DS410", "warning")
@bad({**CPU, **made("AdamW", lr=1e-3, torch_adam=True)}, {**CPU, **made("SGD", lr=0.1), UNTESTED: True})
@good({**CPU, **made("AdamW", lr=1e-3)}, {**CPU, **made("Adagrad", lr=1e-3)})
def offload_without_cpu_optimizer(context: Context) -> Iterator[Finding]:
    """Only Adam, Adagrad and Lion have a CPU version (_configure_basic_optimizer in runtime/engine.py).

    Any other runs there unchanged, several times slower; FusedLamb's kernels are for the GPU only. torch_adam asks for
    exactly that: then it is a note.
    """
    kind = optimizer_class(context)
    if not kind or not offloaded(context) or kind == MUON or "CPU" in kind:
        return
    if context.flag(f"{PARAMS}.torch_adam"):
        path, advice = f"{PARAMS}.torch_adam", "Remove torch_adam: AdamW is then DeepSpeedCPUAdam."
        fix, severity = removal(context, path, safe=False), "note"
    else:
        path, fix, severity = TYPE, None, ""
        advice = "Use AdamW, Adagrad or Lion, which have a CPU version, or don't offload."
    text = f"the step runs in {kind} on the CPU, for which DeepSpeed has no fast version"
    yield Finding(path, text, advice, fix, severity)


@rule("DS411", FAILS)
@bad({"_device": "cpu", **made("Lion", lr=1e-4)}, {"_device": "cpu", **made("Lamb", lr=1e-3)})
@good({"_device": "cuda", **made("Lion", lr=1e-4)}, made("Lamb", lr=1e-3))
def fused_optimizer_on_the_cpu(context: Context) -> Iterator[Finding]:
    """FusedLion and FusedLamb have no CPU kernels: "This op had not been implemented on CPU backend".

    Source: ops/op_builder/cpu/no_impl.py. FusedAdam has them.
    """
    kind = optimizer_class(context)
    if context.setting.device == "cpu" and kind in ("FusedLion", "FusedLamb"):
        lion = kind == "FusedLion"
        yield Finding(
            TYPE,
            f"{kind} needs a GPU",
            "Offload the optimizer to the CPU, which has its own Lion." if lion else "Use AdamW.",
        )


@rule("DS412", FAILS)
@bad(
    {**made("Lamb", lr=1e-3), **fp16(loss_scale=128)},
    {**made("lamb"), "fp16": {"enabled": False, "loss_scale": 1}},
)
@good({**made("Lamb", lr=1e-3), **fp16(loss_scale=0)}, {**made("AdamW", lr=1e-3), **fp16(loss_scale=128)})
def lamb_with_a_fixed_scale() -> Table:
    """Lamb requires a dynamic loss scale, with or without fp16 (_do_sanity_check).

    Source: runtime/engine.py.
    """
    path = "fp16.loss_scale"
    text = "is {value:g}, but Lamb needs a dynamic loss scale. Write 0, or use another optimizer."
    conditions = (lambda context: optimizer_name(context) == "lamb", lambda context: context.number(path))
    return report(path, text, conditions, put(path, 0))


@rule("DS413", "warning")
@bad(made("MuAdam", lr=1e-3), made("muadamw", lr=1e-3))
@good(made("Adam", lr=1e-3), made("Muon", lr=1e-3))
def package_mup_needed(context: Context) -> Iterator[Finding]:
    """MuAdam, MuAdamW and MuSGD come from the package mup; without it the error names a variable.

    "cannot access local variable 'MuAdam'" (_configure_basic_optimizer in runtime/engine.py).
    """
    if (name := optimizer_name(context)) in MUP:
        yield Finding(
            TYPE,
            f"{spelled(name or '')} needs the package mup, which DeepSpeed doesn't install",
            "pip install mup, and give the model its base shapes with mup.set_base_shapes.",
        )


@rule("DS414", FAILS, since=(0, 18))
@bad({**zero(3), **made("Muon", lr=1e-3)}, {**zero(3, reduce_scatter=True), **made("muon", lr=1e-3)})
@good({**zero(3, reduce_scatter=False), **made("Muon", lr=1e-3)}, {**ZERO_2, **made("Muon", lr=1e-3)})
def muon_with_reduce_scatter(context: Context) -> Iterator[Finding]:
    """At stage 3 Muon needs whole gradients: "Muon and reduce scatter cannot be used together".

    Source: runtime/zero/stage3.py.
    """
    path = "zero_optimization.reduce_scatter"
    if context.stage == 3 and optimizer_class(context) == MUON and context.flag(path) is not False:
        default = "" if context.has(path) else ", by default"
        yield Finding(
            path,
            f"is true{default}, which Muon doesn't support at stage 3",
            "Set zero_optimization.reduce_scatter to false, or use stage 2.",
            set_to(context, path, value=False),
        )


@rule("DS415", FAILS)
@bad({**ZERO_1, **made("SGD", lr=0.1)}, {**ZERO_2, **made("Lamb", lr=1e-3), UNTESTED: False})
@good({**ALLOWED, **made("SGD", lr=0.1)}, made("SGD", lr=0.1))
def optimizer_untested_with_zero() -> Table:
    """ZeRO accepts a list of optimizers, and others only when told to (_do_optimizer_sanity_check).

    Source: runtime/engine.py, ZERO_SUPPORTED_OPTIMIZERS in runtime/zero/utils.py.
    """
    text = (
        "{kind} is not on ZeRO's list of tested optimizers, so ZeRO refuses it. "
        f"Set {UNTESTED} to true, use AdamW, or set zero_optimization.stage to 0."
    )
    conditions = (_is_untested, when.unless(when.at_stage(0)), lambda context: not context.get(UNTESTED))
    return report(TYPE, text, conditions, put(UNTESTED, True), kind=optimizer_class)


@rule("DS416", FAILS)
@bad(made("LBFGS", lr=1), {**ALLOWED, **made("SparseAdam", lr=1e-3)})
@good(made("Adam", lr=1e-3), made("RAdam", lr=1e-3))
def optimizer_deepspeed_cannot_step(context: Context) -> Iterator[Finding]:
    """Two classes of torch.optim fail at the first step (torch/optim/lbfgs.py, torch/optim/sparse_adam.py)."""
    name = (optimizer_class(context) or "").removeprefix(TORCH)
    if name in NEVER:
        yield Finding(TYPE, f"torch.optim.{name} {NEVER[name]}", "Use AdamW.")


@rule("DS419", "note")
@bad(CPU, {**zero(2, offload_optimizer={"device": "nvme"}), "zero_force_ds_cpu_optimizer": True})
@good({**CPU, **made("AdamW", lr=1e-3)}, {**CPU, "zero_force_ds_cpu_optimizer": False})
def offload_with_an_optimizer_from_code() -> Table:
    """With offload the code's optimizer has to be DeepSpeedCPUAdam or DeepSpeedCPULion (_configure_optimizer).

    "You are using ZeRO-Offload with a client provided optimizer" (runtime/engine.py). accelerate puts
    DeepSpeedCPUAdam in its place.
    """
    forced = when.unless(when.off("zero_force_ds_cpu_optimizer"))
    text = (
        "is missing: the code must pass DeepSpeedCPUAdam, not another Adam. "
        "Add an optimizer section, or set zero_force_ds_cpu_optimizer to false for any optimizer."
    )
    conditions = (when.read_by("deepspeed"), when.lacks("optimizer"), offloaded, forced)
    return report(OPTIMIZER, text, conditions)


@rule("DS421", FAILS)
@bad(
    {"optimizer": {"type": "AdamW", "legacy_fusion": True}, **bf16()},
    {**ZERO_1, "optimizer": {"type": "AdamW", "legacy_fusion": True}, **bf16()},
)
@good(
    {"optimizer": {"type": "AdamW", "legacy_fusion": False}, **bf16()},
    {"optimizer": {"type": "AdamW"}, **fp16()},
)
def legacy_fusion_at_stage_0(context: Context) -> Iterator[Finding]:
    """It calls FusedAdam in a way that is no longer possible: "FusedAdam has been updated" at the first step.

    Measured at stage 0 in 16 bits; nothing else reads the key (_configure_fp16_optimizer in runtime/engine.py).
    """
    path, kind = "optimizer.legacy_fusion", optimizer_class(context)
    if not context.flag(path) or mode(context) is None:
        return
    fix = removal(context, path)
    if context.stage == 0 and mode(context) != "fp32" and kind == "FusedAdam":
        yield Finding(
            path, "calls FusedAdam in a way that it refuses: the first step fails", "Remove it.", fix
        )
    else:
        text = "has no effect: it is for Adam at stage 0 in 16 bits"
        yield Finding(path, text, "Remove it.", fix, "warning")
