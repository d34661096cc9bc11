"""DS314 to DS317: master weights in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules import conditions as when
from dsrun.config.rules.common import removal
from dsrun.config.rules.examples import ADAMW, CPU, ZERO_1, ZERO_2, bf16, fp16
from dsrun.config.rules.frame import FAILS, REFUSED, Context, Finding, bad, good, rule
from dsrun.config.rules.kinds import Table, all_of, needs, put
from dsrun.config.rules.optimizer.signatures import offloaded, optimizer_class
from dsrun.config.rules.precision.modes import FP16, MASTER, by_bf16_optimizer, mode

STATES = "bf16.bf16_optimizer_states"


@rule("DS314", REFUSED, since=(0, 18, 3))
@bad(
    bf16(bf16_master_weights_and_grads=True),
    bf16(bf16_master_weights_and_grads=True, bf16_optimizer_states=True),
)
@good(
    {**CPU, **ADAMW, **bf16(bf16_master_weights_and_grads=True)},
    bf16(bf16_master_weights_and_grads=False, bf16_optimizer_states=False),
)
def master_weights_without_zero() -> Table:
    """16-bit master weights belong to ZeRO, and the check doesn't look at `enabled` (_do_error_check).

    Source: runtime/config.py.
    """
    text = "ZeRO, but the stage is 0. Set zero_optimization.stage to 1, 2 or 3."
    return all_of(*(needs(path, text, when.at_stage(0)) for path in (*MASTER, STATES)))


@rule("DS315", REFUSED, since=(0, 18, 3))
@bad(
    {**ZERO_2, **bf16(bf16_optimizer_states=True)},
    {**ZERO_1, **bf16(bf16_optimizer_states=True, bf16_master_weights_and_grads=False)},
)
@good(
    {**ZERO_2, **ADAMW, **bf16(bf16_optimizer_states=True, bf16_master_weights_and_grads=True)},
    {**ZERO_2, **bf16(bf16_optimizer_states=False)},
)
def bf16_states_without_bf16_master_weights() -> Table:
    """Optimizer states in bf16 need master weights in bf16 (_do_error_check in runtime/config.py)."""
    text = "bf16_master_weights_and_grads. Set bf16.bf16_master_weights_and_grads to true as well."
    conditions = (when.unless(when.below_stage(1)), when.unless(when.on(MASTER[1])))
    return needs(STATES, text, conditions, put(MASTER[1], True))


@rule("DS316", FAILS, since=(0, 18, 3))
@bad(
    {**ZERO_2, **ADAMW, **bf16(bf16_master_weights_and_grads=True)},
    {**CPU, "optimizer": {"type": "Adagrad"}, **bf16(bf16_master_weights_and_grads=True)},
)
@good(
    {**CPU, **ADAMW, **bf16(bf16_master_weights_and_grads=True)},
    {**CPU, **ADAMW, **fp16(fp16_master_weights_and_grads=True)},
)
def master_weights_without_cpu_adam(context: Context) -> Iterator[Finding]:
    """16-bit master weights need offload and exactly DeepSpeedCPUAdam, or optimizer states in bf16 too.

    Source: _configure_master_weights in runtime/base_optimizer.py, with the checks in
    runtime/zero/stage_1_and_2.py and stage3.py. BF16_Optimizer doesn't check.
    """
    kind, on_cpu = optimizer_class(context), offloaded(context)
    if context.stage == 0 or (on_cpu and kind in (None, "DeepSpeedCPUAdam")) or by_bf16_optimizer(context):
        return
    for path in MASTER:
        spared = path == MASTER[1] and context.flag(STATES) and not on_cpu
        if context.flag(path) and not spared:
            text = f"the optimizer is {kind}" if on_cpu else "the optimizer isn't offloaded"
            way_out = "" if path == MASTER[0] or on_cpu else ", or set bf16.bf16_optimizer_states to true"
            yield Finding(
                path,
                f"needs DeepSpeedCPUAdam, but {text}",
                f"Offload the optimizer to the CPU with optimizer.type AdamW{way_out}.",
            )


@rule("DS317", FAILS, since=(0, 18, 3))
@bad(
    {
        **CPU,
        **ADAMW,
        **bf16(bf16_master_weights_and_grads=True),
        "fp16": {"enabled": False, "fp16_master_weights_and_grads": True},
    }
)
@good(
    {
        **CPU,
        **ADAMW,
        **bf16(bf16_master_weights_and_grads=True),
        "fp16": {"enabled": False, "fp16_master_weights_and_grads": False},
    }
)
def both_master_weights(context: Context) -> Iterator[Finding]:
    """Master weights are either in fp16 or in bf16 (_configure_master_weights in runtime/base_optimizer.py)."""
    if context.stage > 0 and all(context.flag(path) for path in MASTER):
        off = MASTER[1] if mode(context) == FP16 else MASTER[0]
        yield Finding(
            off,
            "master weights can't be in fp16 and in bf16",
            f"Remove {off}.",
            removal(context, off, safe=False),
        )
