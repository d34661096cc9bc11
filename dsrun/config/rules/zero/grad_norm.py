"""DS211 to DS213 and DS220: the norm of the gradients, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules import conditions as when
from dsrun.config.rules.common import CLIPPING, OPTIMIZER, ZENFLOW, ZERO, removal, value_or_default
from dsrun.config.rules.examples import CPU, bf16, zero
from dsrun.config.rules.frame import FAILS, REFUSED, Context, Finding, bad, good, rule
from dsrun.config.rules.kinds import Table, all_of, excludes, in_range, put, remove, report
from dsrun.config.rules.precision.modes import FP32, NAMES
from dsrun.config.schemas import schema

NORM = f"{ZERO}.compute_grad_norm"


def _adds_bf16_up_in_fp32(context: Context) -> bool:
    precise = NAMES.get(context.text("data_types.grad_accum_dtype") or "") == FP32
    return context.stage == 1 and context.precision == "bf16" and precise


@rule("DS211", REFUSED, since=(0, 19, 7))
@bad(
    {**zero(3, compute_grad_norm=False), "gradient_clipping": 0},
    {"zero_optimization": {"compute_grad_norm": False}, "gradient_clipping": 0},
)
@good(
    {**zero(1, compute_grad_norm=False), "gradient_clipping": 0},
    {**zero(2, compute_grad_norm=False), "gradient_clipping": 0},
)
def norm_off_outside_stages_1_and_2() -> Table:
    """Stages 0 and 3 always compute the norm (compute_grad_norm_valid in runtime/zero/config.py)."""
    text = "can't be false at stage {stage}. Remove it, or set zero_optimization.stage to 1 or 2."
    return report(NORM, text, (when.off(NORM), when.unless(when.at_stage(1, 2))), remove(NORM, safe=False))


@rule("DS212", FAILS, since=(0, 19, 7))
@bad(zero(2, compute_grad_norm=False), {**zero(1, compute_grad_norm=False), "gradient_clipping": 0.5})
@good(
    {**zero(2, compute_grad_norm=False), "gradient_clipping": 0},
    {**zero(2, compute_grad_norm=False), "gradient_clipping": -1},
)
def clipping_without_norm(context: Context) -> Iterator[Finding]:
    """Clipping needs the norm, and is on at 1.0 by default (runtime/zero/stage_1_and_2.py, constants.py).

    Under HF Trainer "auto" is max_grad_norm, 1.0 by default; unknown arguments make this a warning.
    """
    if context.flag(NORM) is not False or context.stage not in (1, 2):
        return
    limit = value_or_default(context, CLIPPING)
    known = True
    if context.is_auto(CLIPPING) and context.target in schema.FILLING:
        limit = context.argument("max_grad_norm")
        known = limit is not None
    if not known or (limit or 0) > 0:
        text = f"gradient_clipping is {limit}" if known else "gradient_clipping follows max_grad_norm"
        yield Finding(
            NORM,
            f"is false, but {text}, which needs the norm",
            "Set gradient_clipping to 0, or remove compute_grad_norm.",
            removal(context, NORM, safe=False),
            severity="" if known else "warning",
        )


@rule("DS220", "warning")
@bad({"gradient_clipping": -1}, {"gradient_clipping": -0.5, **zero(2)})
@good({"gradient_clipping": 0}, {"gradient_clipping": 1.0})
def negative_clipping() -> Table:
    """A norm is clipped to only where it is above 0 (runtime/engine.py, runtime/zero/stage_1_and_2.py, stage3.py).

    The fused fp16 optimizer of stage 0 and the pipeline behave so too (runtime/fp16/fused_optimizer.py).
    """
    text = "is {value:g}, which turns clipping off. Write 0, which says so."
    return in_range(CLIPPING, text, fix=put(CLIPPING, 0, safe=True), least=0)


@rule("DS213", FAILS, since=(0, 19, 7))
@bad(
    {**zero(2, compute_grad_norm=False, offload_optimizer={"device": "cpu"}), "gradient_clipping": 0},
    {
        **zero(1, compute_grad_norm=False),
        **bf16(),
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_clipping": 0,
    },
)
@good(
    {**zero(2, compute_grad_norm=False, offload_optimizer={"device": "none"}), "gradient_clipping": 0},
    {**CPU, "gradient_clipping": 0},
)
def norm_off_where_it_is_needed() -> Table:
    """Offload and ZenFlow raise (runtime/zero/stage_1_and_2.py), as does the bf16 optimizer of stage 1.

    That one is used for bf16 weights with fp32 accumulation (_do_optimizer_sanity_check in runtime/engine.py).
    """
    reasons = {
        "offload_optimizer": when.offloads(OPTIMIZER),
        "zenflow": lambda context: context.section(ZENFLOW),
        "bf16 with fp32 accumulation at stage 1": _adds_bf16_up_in_fp32,
    }
    text = "can't be false with {others}. Remove it."
    line = excludes(NORM, reasons, text, remove(NORM, safe=False), given=when.off(NORM))
    return all_of(line, when=when.at_stage(1, 2))
