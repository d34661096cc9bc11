"""DS740 to DS742: the hybrid engine, and weights that are quantised."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules import conditions as when
from dsrun.config.rules.common import no_effect
from dsrun.config.rules.examples import ZERO_2, zero
from dsrun.config.rules.frame import Context, Finding, bad, good, rule
from dsrun.config.rules.kinds import Table, all_of, excludes, groups, put

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
def hybrid_engine_groups() -> Table:
    """The remaining ranks get no group to generate in (create_inference_module in runtime/hybrid_engine.py)."""
    text = "{value} doesn't divide {gpus} GPUs: {rest} of them get no group. Use a divisor of the number of GPUs."
    return groups(f"{HYBRID}.inference_tp_size", text, when.on(f"{HYBRID}.enabled"))


@rule("DS741", "warning", since=(0, 19, 6))
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
def cuda_graphs_not_used() -> Table:
    """It then generates without graphs, and logs why (validate_cuda_graph_support, runtime/hybrid_engine_graph.py)."""
    path = f"{HYBRID}.enable_cuda_graph"
    reasons = {
        "on the CPU": when.on_cpu,
        "at ZeRO stage 3": when.at_stage(3),
        "with release_inference_cache": when.on(f"{HYBRID}.release_inference_cache"),
        "with inference_tp_size above 1": when.several(f"{HYBRID}.inference_tp_size"),
    }
    fix = put(path, False, safe=True)
    return all_of(
        excludes(path, reasons, "has no effect {others}. Set it to false.", fix),
        when=when.on(f"{HYBRID}.enabled"),
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
