"""DS540 to DS542: expert parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules.common import above_1, divisors, set_to
from dsrun.config.rules.examples import tensor
from dsrun.config.rules.frame import FAILS, Context, Finding, bad, good, rule
from dsrun.config.rules.parallel.tensor_parallel import EXPERTS, TP
from dsrun.config.rules.running.batch import TENSOR

NAMES = (
    *("expert_w1", "expert_w2", "expert_w3", "num_experts_attr", "top_k_attr"),
    *("router_pattern", "expert_pattern", "shared_experts_pattern", "shared_experts_gate_pattern"),
)
"""Keys that name an attribute of the model, or of its config."""


@rule("DS540", FAILS)
@bad(
    {"_world_size": 4, "expert_parallel": {"enabled": True, "autoep_size": 3}},
    {"_world_size": 2, "expert_parallel": {"enabled": True, "autoep_size": 4}},
)
@good(
    {"_world_size": 4, "expert_parallel": {"enabled": True, "autoep_size": 4}},
    {"_world_size": 4, "expert_parallel": {"enabled": False, "autoep_size": 3}},
)
def expert_parallel_groups(context: Context) -> Iterator[Finding]:
    """The groups of experts must divide the ranks (build_folding_spec in module_inject/auto_ep_folding.py)."""
    ranks, path = context.world_size, f"{EXPERTS}.autoep_size"
    size = context.integer(path)
    if context.flag(f"{EXPERTS}.enabled") and size and ranks and ranks % size:
        yield Finding(
            path,
            f"{size} doesn't divide {ranks} GPUs",
            f"Use {divisors(ranks, ' or ')}, which must also divide the experts.",
        )


@rule("DS541", FAILS, since=(0, 19))
@bad(
    {"_world_size": 4, "expert_parallel": {"enabled": True, "expert_tensor_parallel_size": 2}},
    {
        "expert_parallel": {"enabled": True, "preset_model": "mixtral"},
        "tensor_parallel": {"preset_model": "deepseek_v2"},
    },
)
@good(
    {"expert_parallel": {"enabled": True, "autoep_size": 2}, **tensor(2)},
    {
        "expert_parallel": {"enabled": True, "preset_model": "mixtral"},
        "tensor_parallel": {"preset_model": "mixtral"},
    },
)
def expert_parallel_limits(context: Context) -> Iterator[Finding]:
    """What AutoEP can't do.

    Source: validate_autoep_config in module_inject/auto_ep_config.py, validate_folding_global in auto_ep_folding.py.
    """
    if context.flag(f"{EXPERTS}.enabled"):
        yield from _experts_beside_tensors(context)
        yield from _experts_by_themselves(context)


def _experts_beside_tensors(context: Context) -> Iterator[Finding]:
    """AutoEP with a model that AutoTP splits too."""
    if not above_1(context, TENSOR):
        return
    size = context.integer(f"{EXPERTS}.autoep_size")
    zero = context.section("zero_optimization")
    beside = f"can't be combined with {TENSOR} {context.integer(TENSOR)}"
    without = f"Set {TENSOR} to 1, or remove it."
    if size == 1 or not context.has(f"{EXPERTS}.autoep_size"):
        yield Finding(
            f"{EXPERTS}.autoep_size", f"1 {beside}", f"Set {EXPERTS}.autoep_size above 1, or {TENSOR} to 1."
        )
    if context.flag("use_data_before_expert_parallelism"):
        yield Finding("use_data_before_expert_parallelism", f"{beside} and expert_parallel", without)
    for key in ("offload_optimizer", "offload_param"):
        if isinstance(zero.get(key), dict):
            yield Finding(f"zero_optimization.{key}", f"{beside} and expert_parallel", without)
    if context.flag("compile.deepcompile"):
        yield Finding("compile.deepcompile", f"{beside} and expert_parallel", without)
    if context.flag(f"{EXPERTS}.async_split_plan") and above_1(context, f"{EXPERTS}.autoep_size"):
        yield Finding(f"{EXPERTS}.async_split_plan", beside, without)
    if context.text(f"{EXPERTS}.combine_impl") == "fused_weighted_sum":
        yield Finding(f"{EXPERTS}.combine_impl", f'"fused_weighted_sum" {beside}', without)


def _experts_by_themselves(context: Context) -> Iterator[Finding]:
    size = context.integer(f"{EXPERTS}.autoep_size") if context.has(f"{EXPERTS}.autoep_size") else 1
    inner = context.integer(f"{EXPERTS}.expert_tensor_parallel_size")
    deepep = context.text(f"{EXPERTS}.comm_backend") == "deepep"
    if inner is not None and inner > 1:
        path = f"{EXPERTS}.expert_tensor_parallel_size"
        yield Finding(path, f"{inner} isn't supported yet", "Set it to 1.", set_to(context, path, 1))
    own, other = context.text(f"{EXPERTS}.preset_model"), context.text(f"{TP}.preset_model")
    if own and other and own != other:
        yield Finding(
            f"{EXPERTS}.preset_model",
            f'"{own}" differs from "{other}" in {TP}.preset_model',
            "Name one model in both, or leave one out.",
        )
    if (
        context.text(f"{EXPERTS}.gate_up_impl") == "fused"
        and context.flag(f"{EXPERTS}.use_grouped_mm") is False
    ):
        yield Finding(
            f"{EXPERTS}.gate_up_impl",
            '"fused" needs use_grouped_mm',
            f"Set {EXPERTS}.use_grouped_mm to true.",
        )
    if context.text(f"{EXPERTS}.row_weighting_impl") == "fused" and not (deepep and size != 1):
        yield Finding(
            f"{EXPERTS}.row_weighting_impl",
            '"fused" needs comm_backend "deepep" and autoep_size above 1',
            "Leave it out, or set both.",
        )
    if deepep and not context.get(f"{EXPERTS}.comm_max_tokens_per_rank"):
        yield Finding(
            f"{EXPERTS}.comm_max_tokens_per_rank",
            'is required by comm_backend "deepep"',
            "Set it to train_micro_batch_size_per_gpu x the longest sequence.",
        )
    if deepep and size != 1 and context.text(f"{EXPERTS}.combine_impl") == "fused_weighted_sum":
        path = f"{EXPERTS}.combine_impl"
        yield Finding(
            path,
            '"fused_weighted_sum" can\'t be combined with comm_backend "deepep"',
            'Set comm_backend to "comm".',
        )
    if (
        context.text(f"{EXPERTS}.combine_impl") == "fused_weighted_sum"
        and context.text(f"{EXPERTS}.score_apply") == "pre"
    ):
        text = '"fused_weighted_sum" needs score_apply "post"'
        yield Finding(f"{EXPERTS}.combine_impl", text, "Leave combine_impl out.")
    for key in NAMES:
        name = context.get(f"{EXPERTS}.{key}")
        if isinstance(name, str) and (not name or "." in name):
            text = f'is "{name}", but must be the name of an attribute, without dots'
            yield Finding(f"{EXPERTS}.{key}", text, "Write the name alone, or leave it out.")
    limited, groups = (context.integer(f"{EXPERTS}.num_{name}_groups") for name in ("limited", "expert"))
    if limited is not None and groups is not None and limited > groups:
        yield Finding(
            f"{EXPERTS}.num_limited_groups",
            f"{limited} is more than num_expert_groups {groups}",
            f"Set it to at most {groups}.",
        )


@rule("DS542", "note")
@bad({"expert_parallel": {"enabled": True, "autoep_size": 2}})
@good({"expert_parallel": {"enabled": False, "autoep_size": 2}})
def experts_of_a_dense_model(context: Context) -> Iterator[Finding]:
    """In a model without MoE layers AutoEP does nothing, and logs it (ep_parser in module_inject/auto_ep.py)."""
    if context.flag(f"{EXPERTS}.enabled"):
        yield Finding(EXPERTS, "acts on a model's MoE layers only", "Remove it if the model has none.")
