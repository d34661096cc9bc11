"""DS221, DS222, DS227 to DS229 and DS240: offload, and what of it each stage takes."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules.common import OPTIMIZER, PARAMETERS, STAGE, ZERO, device, removal, setting
from dsrun.config.rules.examples import CPU, made, nvme, zero
from dsrun.config.rules.frame import DIFFERS, FAILS, REFUSED, Context, Fix, Hit, rule

AIO = "aio"


def optimizer_in_use(context: Context) -> str | None:
    """The optimizer's name in small letters; without a section HF Trainer's becomes DeepSpeedCPUAdam."""
    if not context.section("optimizer"):
        return "adam" if context.by_trainer else None
    name = context.text("optimizer.type")
    return name.lower() if name else None


@rule(
    "DS221",
    "error",
    DIFFERS,
    bad=[
        zero(2, offload_param={"device": "cpu"}),
        zero(1, offload_param={"device": "nvme"}),
        {"zero_optimization": {"offload_param": {"device": "cpu"}}},
        zero(2, cpu_offload_param=True),
    ],
    good=[
        zero(3, offload_param={"device": "cpu"}),
        zero(2, offload_param={"device": "none"}),
        CPU,
        zero(2, cpu_offload_param=False),
    ],
)
def parameters_below_stage_3(context: Context) -> Iterator[Hit]:
    """offload_param is read in stage 3 only; below it nothing is said or offloaded (runtime/engine.py)."""
    where = device(context, PARAMETERS)
    if context.stage < 3 and where:
        yield Hit(
            PARAMETERS if context.has(PARAMETERS) else f"{ZERO}.cpu_offload_param",
            f"stage {context.stage} has no use for it: the weights stay on the GPU, not on {where}",
            "Set zero_optimization.stage to 3, or remove it.",
            setting(context, STAGE, 3),
        )


@rule(
    "DS222",
    "error",
    DIFFERS,
    bad=[
        zero(0, offload_optimizer={"device": "cpu"}),
        {"zero_optimization": {"offload_optimizer": nvme()}},
        {"zero_optimization": {"cpu_offload": True}},
    ],
    good=[zero(1, offload_optimizer={"device": "cpu"}), zero(0, offload_optimizer={"device": "none"})],
)
def optimizer_at_stage_0(context: Context) -> Iterator[Hit]:
    """Stage 0 builds the CPU's Adam but leaves the gradients on the GPU (runtime/engine.py)."""
    if context.stage == 0 and device(context, OPTIMIZER):
        yield Hit(
            OPTIMIZER if context.has(OPTIMIZER) else f"{ZERO}.cpu_offload",
            "needs ZeRO, and the stage is 0",
            "Set zero_optimization.stage to 1, 2 or 3, or remove it.",
            setting(context, STAGE, 2),
        )


@rule(
    "DS227",
    "error",
    REFUSED,
    bad=[
        zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5}),
        zero(1, offload_optimizer={"device": "none", "ratio": 0}),
        zero(0, offload_optimizer={"ratio": 0.99}),
    ],
    good=[
        zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5}),
        zero(2, offload_optimizer={"device": "cpu", "ratio": 1.0}),
    ],
    since=(0, 12),
)
def part_of_the_optimizer_below_stage_3(context: Context) -> Iterator[Hit]:
    """Partial offload is asserted to be stage 3's, whatever the device (offload_ratio_check, zero/config.py)."""
    path = f"{OPTIMIZER}.ratio"
    share = context.number(path)
    if share is not None and share < 1 and context.stage < 3:
        yield Hit(
            path,
            f"{share:g} needs stage 3, and the stage is {context.stage}",
            "Set zero_optimization.stage to 3, or ratio to 1.",
            setting(context, path, 1),
        )


@rule(
    "DS228",
    "error",
    FAILS,
    bad=[
        {**made("Adagrad", lr=1e-4), **zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5})},
        {
            **made("AdamW", lr=1e-4, torch_adam=True),
            **zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5}),
        },
        zero(3, offload_optimizer={"device": "none", "ratio": 0.5}),
    ],
    good=[
        {**made("AdamW", lr=1e-4), **zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5})},
        {**made("Adagrad", lr=1e-4), **zero(3, offload_optimizer={"device": "cpu", "ratio": 1})},
        zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5}),
        zero(3, offload_optimizer={"device": "none"}),
    ],
    since=(0, 12),
)
def part_of_another_optimizer(context: Context) -> Iterator[Hit]:
    """The part on the GPU is an AdamW made after DeepSpeedCPUAdam's fields (__init__ in runtime/zero/stage3.py)."""
    path = f"{OPTIMIZER}.ratio"
    share = context.number(path)
    if context.stage != 3 or share is None or share >= 1:
        return
    name = optimizer_in_use(context)
    torch_s = bool(context.flag("optimizer.params.torch_adam"))
    if device(context, OPTIMIZER) is None:
        yield Hit(
            path,
            f"{share:g} has no effect: nothing is offloaded",
            "Remove it, or set device to cpu.",
            removal(context, path),
            severity="warning",
        )
    elif torch_s or name not in (None, "adam", "adamw"):
        whose = "torch's Adam" if torch_s else context.text("optimizer.type")
        yield Hit(
            path,
            f"{share:g} works with DeepSpeed's Adam only, not with {whose}",
            "Set ratio to 1, or the optimizer to AdamW.",
            setting(context, path, 1),
        )


@rule(
    "DS229",
    "error",
    FAILS,
    bad=[
        zero(2, offload_optimizer={"device": "cpu", "super_offload": True}),
        zero(3, offload_optimizer={"device": "cpu", "super_offload": True}) | {"_device": "cpu"},
        zero(3, offload_optimizer={"device": "none", "super_offload": True}),
        {**made("Lion", lr=1e-4), **zero(3, offload_optimizer={"device": "cpu", "super_offload": True})},
    ],
    good=[
        zero(3, offload_optimizer={"device": "cpu", "super_offload": True}),
        zero(3, offload_optimizer={"device": "cpu", "super_offload": True})
        | {"_device": "cuda", **made("AdamW", lr=1e-4)},
        zero(2, offload_optimizer={"device": "cpu", "super_offload": False}),
    ],
    since=(0, 18),
)
def super_offload_elsewhere(context: Context) -> Iterator[Hit]:
    """Stage 3's own optimizer class, for CUDA, the CPU's Adam and nothing else (superoffload_stage3.py).

    Below stage 3 it isn't looked at (_configure_zero_optimizer in runtime/engine.py).
    """
    path = f"{OPTIMIZER}.super_offload"
    if not context.flag(path):
        return
    off = removal(context, path).edits
    if context.stage < 3:
        yield Hit(
            path,
            f"has no effect at stage {context.stage}",
            "Set zero_optimization.stage to 3, or remove it.",
            Fix(off, safe=False),
            effect=DIFFERS,
        )
    elif context.setting.device == "cpu":
        yield Hit(path, "needs NVIDIA GPUs, and there are none", "Remove it.", Fix(off, safe=False))
    elif device(context, OPTIMIZER) != "cpu":
        where = device(context, OPTIMIZER) or "none"
        yield Hit(path, f"needs device cpu, and it is {where}", "Set device to cpu, or remove super_offload.")
    elif (name := optimizer_in_use(context)) not in (None, "adam", "adamw"):
        yield Hit(path, f"works with Adam only, not with {name}", "Remove it, or set the optimizer to AdamW.")


ON_ONE = {"_world_size": 1, "_gpu_memory_gib": 23.6, "_model": {"parameters": 6243584000}}


@rule(
    "DS240",
    "error",
    FAILS,
    bad=[
        {**ON_ONE, **CPU},
        {**ON_ONE, **CPU, "bf16": {"enabled": True}, "_gpu_memory_gib": 12.8, "_world_size": 8},
        {**ON_ONE, **CPU, "fp16": {"enabled": True}, "_gpu_memory_gib": 23.2},
    ],
    good=[
        {**ON_ONE, **CPU, "fp16": {"enabled": True}, "_gpu_memory_gib": 31.7},
        {**ON_ONE, **CPU, "fp16": {"enabled": True}, "_world_size": 2, "_gpu_memory_gib": 17.5},
        {**ON_ONE, **zero(3, offload_optimizer={"device": "cpu"})},
        {**CPU, "_world_size": 1, "_gpu_memory_gib": 8},
    ],
    since=(0, 19),
)
def offload_starts_on_the_gpu(context: Context) -> Iterator[Hit]:
    """Stages 1 and 2 clone a rank's share of the weights on the GPU, beside all of them, before it goes to the host.

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
        yield Hit(
            f"{OPTIMIZER}.device" if context.has(f"{OPTIMIZER}.device") else OPTIMIZER,
            f"starting takes {needed:.1f} GiB of each GPU's {memory:.1f}: the weights, and a clone of its share",
            "Set zero_optimization.stage to 3, which divides the weights first, or use more GPUs.",
            setting(context, STAGE, 3),
        )
