"""DS221, DS222, DS227 to DS229 and DS240: offload, and what of it each stage takes."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules import conditions as when
from dsrun.config.rules.common import OPTIMIZER, PARAMETERS, STAGE, ZERO, device, removal, set_to
from dsrun.config.rules.examples import CPU, made, nvme, zero
from dsrun.config.rules.frame import DIFFERS, FAILS, REFUSED, Context, Finding, Fix, bad, good, rule
from dsrun.config.rules.kinds import Table, in_range, put


def optimizer_in_use(context: Context) -> str | None:
    """The optimizer's name in small letters; without a section HF Trainer's becomes DeepSpeedCPUAdam."""
    if not context.section("optimizer"):
        return "adam" if context.by_trainer else None
    name = context.text("optimizer.type")
    return name.lower() if name else None


@rule("DS221", DIFFERS)
@bad(zero(2, offload_param={"device": "cpu"}), zero(1, offload_param={"device": "nvme"}))
@good(zero(3, offload_param={"device": "cpu"}), zero(2, offload_param={"device": "none"}))
def parameter_offload_below_stage_3(context: Context) -> Iterator[Finding]:
    """offload_param is read in stage 3 only; below it DeepSpeed ignores it silently (runtime/engine.py)."""
    where = device(context, PARAMETERS)
    if context.stage < 3 and where:
        path = PARAMETERS if context.has(PARAMETERS) else f"{ZERO}.cpu_offload_param"
        yield Finding(
            path,
            f"stage {context.stage} ignores it: the weights stay on the GPU instead of {where}",
            "Set zero_optimization.stage to 3, or remove it.",
            # The job trains in its stage today: a fix that changes it trains another way.
            removal(context, path, safe=False),
        )


@rule("DS222", DIFFERS)
@bad(zero(0, offload_optimizer={"device": "cpu"}), {"zero_optimization": {"offload_optimizer": nvme()}})
@good(zero(1, offload_optimizer={"device": "cpu"}), zero(0, offload_optimizer={"device": "none"}))
def optimizer_offload_at_stage_0(context: Context) -> Iterator[Finding]:
    """Stage 0 builds the CPU's Adam but leaves the gradients on the GPU (runtime/engine.py)."""
    if context.stage == 0 and device(context, OPTIMIZER):
        yield Finding(
            OPTIMIZER if context.has(OPTIMIZER) else f"{ZERO}.cpu_offload",
            "needs ZeRO, but the stage is 0",
            "Set zero_optimization.stage to 1, 2 or 3, or remove it.",
            set_to(context, STAGE, 2),
        )


@rule("DS227", REFUSED, since=(0, 15))
@bad(
    zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5}),
    zero(1, offload_optimizer={"device": "none", "ratio": 0}),
)
@good(
    zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5}),
    zero(2, offload_optimizer={"device": "cpu", "ratio": 1.0}),
)
def partial_offload_below_stage_3() -> Table:
    """Partial offload needs stage 3 by an assertion, whatever the device (offload_ratio_check, zero/config.py).

    Before 0.15 the check looked for the section where it never was, and asserted nothing.
    """
    text = (
        "{value:g} needs stage 3, but the stage is {stage}. Set zero_optimization.stage to 3, or ratio to 1."
    )
    path = f"{OPTIMIZER}.ratio"
    return in_range(path, text, when.below_stage(3), put(path, 1), least=1)


@rule("DS228", FAILS, since=(0, 12, 3))
@bad(
    {**made("Adagrad", lr=1e-4), **zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5})},
    {**made("AdamW", lr=1e-4, torch_adam=True), **zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5})},
)
@good(
    {**made("AdamW", lr=1e-4), **zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5})},
    {**made("Adagrad", lr=1e-4), **zero(3, offload_optimizer={"device": "cpu", "ratio": 1})},
)
def partial_offload_of_another_optimizer(context: Context) -> Iterator[Finding]:
    """The part on the GPU is an AdamW made from DeepSpeedCPUAdam's fields (__init__ in runtime/zero/stage3.py)."""
    path = f"{OPTIMIZER}.ratio"
    share = context.number(path)
    if context.stage != 3 or share is None or share >= 1:
        return
    name = optimizer_in_use(context)
    torch_s = bool(context.flag("optimizer.params.torch_adam"))
    if device(context, OPTIMIZER) is None:
        yield Finding(
            path,
            f"{share:g} has no effect: nothing is offloaded",
            "Remove it, or set device to cpu.",
            removal(context, path),
            severity="warning",
        )
    elif torch_s or name not in (None, "adam", "adamw"):
        whose = "torch's Adam" if torch_s else context.text("optimizer.type")
        yield Finding(
            path,
            f"{share:g} works with DeepSpeed's Adam only, not with {whose}",
            "Set ratio to 1, or the optimizer to AdamW.",
            set_to(context, path, 1),
        )


@rule("DS229", FAILS, since=(0, 18))
@bad(
    zero(2, offload_optimizer={"device": "cpu", "super_offload": True}),
    zero(3, offload_optimizer={"device": "cpu", "super_offload": True}) | {"_device": "cpu"},
)
@good(
    zero(3, offload_optimizer={"device": "cpu", "super_offload": True}),
    zero(3, offload_optimizer={"device": "cpu", "super_offload": True})
    | {"_device": "cuda", **made("AdamW", lr=1e-4)},
)
def super_offload_not_possible(context: Context) -> Iterator[Finding]:
    """An optimizer class of stage 3, for CUDA and the CPU's Adam only (superoffload_stage3.py).

    Below stage 3 it isn't read (_configure_zero_optimizer in runtime/engine.py).
    """
    path = f"{OPTIMIZER}.super_offload"
    if not context.flag(path):
        return
    off = removal(context, path).edits
    if context.stage < 3:
        yield Finding(
            path,
            f"has no effect at stage {context.stage}",
            "Set zero_optimization.stage to 3, or remove it.",
            Fix(off, safe=False),
            effect=DIFFERS,
        )
    elif context.setting.device == "cpu":
        yield Finding(path, "needs NVIDIA GPUs, but there are none", "Remove it.", Fix(off, safe=False))
    elif device(context, OPTIMIZER) != "cpu":
        where = device(context, OPTIMIZER) or "none"
        yield Finding(
            path, f"needs device cpu, but it is {where}", "Set device to cpu, or remove super_offload."
        )
    elif (name := optimizer_in_use(context)) not in (None, "adam", "adamw"):
        yield Finding(
            path, f"works with Adam only, not with {name}", "Remove it, or set the optimizer to AdamW."
        )


ON_ONE = {"_world_size": 1, "_gpu_memory_gib": 23.6, "_model": {"parameters": 6243584000}}


@rule("DS240", FAILS, since=(0, 19))
@bad(
    {**ON_ONE, **CPU}, {**ON_ONE, **CPU, "bf16": {"enabled": True}, "_gpu_memory_gib": 12.8, "_world_size": 8}
)
@good(
    {**ON_ONE, **CPU, "fp16": {"enabled": True}, "_gpu_memory_gib": 31.7},
    {**ON_ONE, **CPU, "fp16": {"enabled": True}, "_world_size": 2, "_gpu_memory_gib": 17.5},
)
def offload_starts_on_the_gpu(context: Context) -> Iterator[Finding]:
    """Stages 1 and 2 clone a rank's share of the weights on the GPU, next to the full weights, before offloading it.

    On one GPU that is 4 bytes a parameter in 16 bits (stage_1_and_2.py: the partition's `.detach().clone()`).
    """
    model, memory = context.setting.model, context.setting.gpu_memory_gib
    ranks = context.setting.world_size
    if not model or not model.parameters or memory is None or not ranks or context.stage not in (1, 2):
        return
    if not device(context, OPTIMIZER):
        return
    width = 2 if context.flag("fp16.enabled") or context.flag("bf16.enabled") else 4
    needed = width * model.parameters * (1 + 1 / ranks) / 2**30
    if needed > memory:
        yield Finding(
            f"{OPTIMIZER}.device" if context.has(f"{OPTIMIZER}.device") else OPTIMIZER,
            f"starting needs {needed:.1f} GiB of each GPU's {memory:.1f}: the weights, and a copy of its share",
            "Set zero_optimization.stage to 3, which shards the weights first, or use more GPUs.",
            set_to(context, STAGE, 3),
        )
