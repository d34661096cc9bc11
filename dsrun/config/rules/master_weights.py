"""DS314 to DS317: master weights in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules.common import removal, setting
from dsrun.config.rules.examples import ADAMW, CPU, SAVED_3, ZERO_1, ZERO_2, bf16, fp16
from dsrun.config.rules.frame import FAILS, REFUSED, Context, Hit, rule
from dsrun.config.rules.precision import FP16, MASTER, by_bf16_optimizer, mode
from dsrun.config.rules.signatures import offloaded, optimizer_class

STATES = "bf16.bf16_optimizer_states"


@rule(
    "DS314",
    "error",
    REFUSED,
    bad=[
        bf16(bf16_master_weights_and_grads=True),
        {"bf16": {"enabled": False, "bf16_master_weights_and_grads": True}},
        fp16(fp16_master_weights_and_grads=True),
        bf16(bf16_master_weights_and_grads=True, bf16_optimizer_states=True),
    ],
    good=[
        {**CPU, **ADAMW, **bf16(bf16_master_weights_and_grads=True)},
        bf16(bf16_master_weights_and_grads=False, bf16_optimizer_states=False),
        {"_version": "0.17", **fp16(fp16_master_weights_and_grads=True)},
    ],
    since=(0, 18),
)
def master_weights_without_zero(context: Context) -> Iterator[Hit]:
    """16-bit master weights are a part of ZeRO, and the check asks not for `enabled` (_do_error_check).

    Source: runtime/config.py.
    """
    for path in (*MASTER, STATES):
        if context.stage == 0 and context.flag(path):
            yield Hit(path, "needs ZeRO, and stage is 0", "Set zero_optimization.stage to 1, 2 or 3.")


@rule(
    "DS315",
    "error",
    REFUSED,
    bad=[
        {**ZERO_2, **bf16(bf16_optimizer_states=True)},
        {**ZERO_1, **bf16(bf16_optimizer_states=True, bf16_master_weights_and_grads=False)},
    ],
    good=[
        {**ZERO_2, **ADAMW, **bf16(bf16_optimizer_states=True, bf16_master_weights_and_grads=True)},
        {**ZERO_2, **bf16(bf16_optimizer_states=False)},
    ],
    since=(0, 18),
)
def states_without_master_weights(context: Context) -> Iterator[Hit]:
    """Optimizer states in bf16 go with master weights in bf16 (_do_error_check in runtime/config.py)."""
    if context.stage > 0 and context.flag(STATES) and not context.flag(MASTER[1]):
        yield Hit(
            STATES,
            "needs bf16_master_weights_and_grads",
            "Set bf16.bf16_master_weights_and_grads to true as well.",
            setting(context, MASTER[1], value=True),
        )


@rule(
    "DS316",
    "error",
    FAILS,
    bad=[
        {**ZERO_2, **ADAMW, **bf16(bf16_master_weights_and_grads=True)},
        {**ZERO_1, **ADAMW, **fp16(fp16_master_weights_and_grads=True)},
        {**SAVED_3, **bf16(bf16_master_weights_and_grads=True)},
        {**CPU, "optimizer": {"type": "Adagrad"}, **bf16(bf16_master_weights_and_grads=True)},
        {
            **CPU,
            "optimizer": {"type": "Adagrad"},
            **bf16(bf16_master_weights_and_grads=True, bf16_optimizer_states=True),
        },
    ],
    good=[
        {**CPU, **ADAMW, **bf16(bf16_master_weights_and_grads=True)},
        {**CPU, **ADAMW, **fp16(fp16_master_weights_and_grads=True)},
        {**CPU, **bf16(bf16_master_weights_and_grads=True)},
        {**ZERO_2, **ADAMW, **bf16(bf16_master_weights_and_grads=True, bf16_optimizer_states=True)},
        {**ZERO_2, **ADAMW, **bf16(bf16_master_weights_and_grads=False)},
        {
            **ZERO_1,
            **ADAMW,
            **bf16(bf16_master_weights_and_grads=True),
            "data_types": {"grad_accum_dtype": "fp32"},
        },
    ],
    since=(0, 18),
)
def master_weights_without_cpu_adam(context: Context) -> Iterator[Hit]:
    """16-bit master weights want offload and exactly DeepSpeedCPUAdam, or the optimizer's states in bf16 too.

    Source: _configure_master_weights in runtime/base_optimizer.py, with the checks in
    runtime/zero/stage_1_and_2.py and stage3.py. BF16_Optimizer doesn't ask.
    """
    kind, on_cpu = optimizer_class(context), offloaded(context)
    if context.stage == 0 or (on_cpu and kind in (None, "DeepSpeedCPUAdam")) or by_bf16_optimizer(context):
        return
    for path in MASTER:
        spared = path == MASTER[1] and context.flag(STATES) and not on_cpu
        if context.flag(path) and not spared:
            text = f"the optimizer is {kind}" if on_cpu else "the optimizer isn't offloaded"
            way_out = "" if path == MASTER[0] or on_cpu else ", or set bf16.bf16_optimizer_states to true"
            yield Hit(
                path,
                f"needs DeepSpeedCPUAdam, and {text}",
                f"Offload the optimizer to the CPU with optimizer.type AdamW{way_out}.",
            )


@rule(
    "DS317",
    "error",
    FAILS,
    bad={
        **CPU,
        **ADAMW,
        **bf16(bf16_master_weights_and_grads=True),
        "fp16": {"enabled": False, "fp16_master_weights_and_grads": True},
    },
    good={
        **CPU,
        **ADAMW,
        **bf16(bf16_master_weights_and_grads=True),
        "fp16": {"enabled": False, "fp16_master_weights_and_grads": False},
    },
    since=(0, 18),
)
def both_master_weights(context: Context) -> Iterator[Hit]:
    """Master weights are in fp16 or in bf16 (_configure_master_weights in runtime/base_optimizer.py)."""
    if context.stage > 0 and all(context.flag(path) for path in MASTER):
        off = MASTER[1] if mode(context) == FP16 else MASTER[0]
        yield Hit(
            off,
            "master weights can't be in fp16 and in bf16",
            f"Remove {off}.",
            removal(context, off, safe=False),
        )
