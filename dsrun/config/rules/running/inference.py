"""DS740 to DS742: the hybrid engine, and weights that are quantised."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules.common import above_1, no_effect, set_to
from dsrun.config.rules.examples import ZERO_2, zero
from dsrun.config.rules.frame import Context, Finding, bad, good, rule

HYBRID = "hybrid_engine"
QUANTIZATION = "weight_quantization"


@rule("DS740", "warning")
@bad(
    {"_world_size": 4, "hybrid_engine": {"enabled": True, "inference_tp_size": 3}},
    {"_world_size": 2, "hybrid_engine": {"enabled": True, "inference_tp_size": 4}},
)
@good(
    {"_world_size": 4, "hybrid_engine": {"enabled": True, "inference_tp_size": 4}},
    {"_world_size": 4, "hybrid_engine": {"enabled": False, "inference_tp_size": 3}},
)
def hybrid_engine_groups(context: Context) -> Iterator[Finding]:
    """The remaining ranks get no group to generate in (create_inference_module in runtime/hybrid_engine.py)."""
    path, ranks = f"{HYBRID}.inference_tp_size", context.world_size
    size = context.integer(path)
    if context.flag(f"{HYBRID}.enabled") and size and ranks and ranks % size:
        yield Finding(
            path,
            f"{size} doesn't divide {ranks} GPUs: {ranks % size} of them get no group",
            "Use a divisor of the number of GPUs.",
        )


@rule("DS741", "warning", since=(0, 19))
@bad(
    {"hybrid_engine": {"enabled": True, "enable_cuda_graph": True}, **zero(3)},
    {"_device": "cpu", "hybrid_engine": {"enabled": True, "enable_cuda_graph": True}},
)
@good(
    {"hybrid_engine": {"enabled": True, "enable_cuda_graph": True}, **ZERO_2},
    {
        "_device": "cuda",
        "hybrid_engine": {"enabled": True, "enable_cuda_graph": True, "inference_tp_size": 1},
    },
)
def cuda_graphs_not_used(context: Context) -> Iterator[Finding]:
    """It then generates without graphs, and logs why (validate_cuda_graph_support, runtime/hybrid_engine_graph.py)."""
    path = f"{HYBRID}.enable_cuda_graph"
    if not context.flag(path) or not context.flag(f"{HYBRID}.enabled"):
        return
    reasons = {
        "on the CPU": context.setting.device == "cpu",
        "at ZeRO stage 3": context.stage == 3,
        "with release_inference_cache": context.flag(f"{HYBRID}.release_inference_cache"),
        "with inference_tp_size above 1": above_1(context, f"{HYBRID}.inference_tp_size"),
    }
    if found := [reason for reason, there in reasons.items() if there]:
        yield Finding(
            path,
            f"has no effect {' and '.join(found)}",
            "Set it to false.",
            set_to(context, path, value=False, safe=True),
        )


@rule("DS742", "warning")
@bad(
    {"weight_quantization": {"enabled": True}},
    {"weight_quantization": {"quantized_initialization": {"num_bits": 4}}, **ZERO_2},
)
@good(
    {"weight_quantization": {"quantized_initialization": {"num_bits": 4}}, **zero(3)},
    {
        "weight_quantization": {
            "post_init_quant": {"fc": {"num_bits": 4, "group_size": 64, "group_dim": 1, "symmetric": False}}
        }
    },
)
def weights_not_quantised(context: Context) -> Iterator[Finding]:
    """zero.Init reads quantized_initialization (runtime/zero/partition_parameters.py); post_init_quant is for the code

    that calls deepspeed.inference.quantization (inference/quantization/quantization.py). Nothing reads the rest.
    """
    if not context.has(QUANTIZATION) or context.get(f"{QUANTIZATION}.post_init_quant"):
        return
    if not context.get(f"{QUANTIZATION}.quantized_initialization"):
        yield no_effect(
            context,
            QUANTIZATION,
            " without quantized_initialization",
            "Remove it, or describe the weights there (ZeRO stage 3, zero.Init).",
        )
    elif context.stage < 3:
        path = f"{QUANTIZATION}.quantized_initialization"
        yield Finding(
            path,
            f"has no effect at ZeRO stage {context.stage}",
            "Set zero_optimization.stage to 3, and use zero.Init.",
        )
