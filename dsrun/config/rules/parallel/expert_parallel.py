"""DS540 to DS542: expert parallelism."""

from __future__ import annotations

from dsrun.config.rules import conditions as when
from dsrun.config.rules.common import DEEP, OFFLOADS, above_1
from dsrun.config.rules.conditions import Condition
from dsrun.config.rules.examples import tensor
from dsrun.config.rules.frame import FAILS, Context, bad, good, rule
from dsrun.config.rules.kinds import Table, all_of, groups, in_range, needs, put, report
from dsrun.config.rules.parallel.tensor_parallel import EXPERTS, TP
from dsrun.config.rules.running.batch import TENSOR

NAMES = (
    *("expert_w1", "expert_w2", "expert_w3", "num_experts_attr", "top_k_attr"),
    *("router_pattern", "expert_pattern", "shared_experts_pattern", "shared_experts_gate_pattern"),
)
"""Keys that name an attribute of the model, or of its config."""

ENABLED = when.on(f"{EXPERTS}.enabled")
SIZE = f"{EXPERTS}.autoep_size"
INNER = f"{EXPERTS}.expert_tensor_parallel_size"
PRESET, OTHER_PRESET = f"{EXPERTS}.preset_model", f"{TP}.preset_model"
GATE_UP, GROUPED = f"{EXPERTS}.gate_up_impl", f"{EXPERTS}.use_grouped_mm"
ROWS, TOKENS = f"{EXPERTS}.row_weighting_impl", f"{EXPERTS}.comm_max_tokens_per_rank"
COMBINE, SCORE = f"{EXPERTS}.combine_impl", f"{EXPERTS}.score_apply"
LIMITED, GROUPS = f"{EXPERTS}.num_limited_groups", f"{EXPERTS}.num_expert_groups"
ASYNC, DATA_FIRST = f"{EXPERTS}.async_split_plan", "use_data_before_expert_parallelism"
SUM = "fused_weighted_sum"
DEEPEP = when.is_one_of(f"{EXPERTS}.comm_backend", "deepep")
NOT_WITH_BOTH = {DATA_FIRST: when.on, **dict.fromkeys(OFFLOADS, when.is_section), DEEP: when.on}
"""Keys that can't stand beside tensor and expert parallelism together, and the condition that they do."""


def _is_shared(context: Context) -> bool:
    """Whether ranks share the experts, or "auto" leaves it open; without a size they don't."""
    return context.has(SIZE) and context.integer(SIZE) != 1


def _names_differ(context: Context) -> bool:
    """Whether both sections name a model, and not the same."""
    return len({context.text(PRESET), context.text(OTHER_PRESET)} - {None, ""}) == 2


def _is_no_name(path: str) -> Condition:
    return lambda context: (name := context.text(path)) is not None and (not name or "." in name)


def _beside_tensors(path: str, given: Condition, begin: str = "", end: str = "") -> Table:
    """A line for what AutoEP can't do in a model that AutoTP splits, too."""
    text = f"{begin}can't be combined with {TENSOR} {{size}}{end}. Set {TENSOR} to 1, or remove it."
    return report(path, text, (when.several(TENSOR), given), size=TENSOR)


@rule("DS540", FAILS)
@bad(
    {"_world_size": 4, "expert_parallel": {"enabled": True, "autoep_size": 3}},
    {"_world_size": 2, "expert_parallel": {"enabled": True, "autoep_size": 4}},
)
@good(
    {"_world_size": 4, "expert_parallel": {"enabled": True, "autoep_size": 4}},
    {"_world_size": 4, "expert_parallel": {"enabled": False, "autoep_size": 3}},
)
def expert_parallel_groups() -> Table:
    """The groups of experts must divide the ranks (build_folding_spec in module_inject/auto_ep_folding.py)."""
    text = "{value} doesn't divide {gpus} GPUs. Use {sizes}, which must also divide the experts."
    return groups(SIZE, text, ENABLED, " or ")


@rule("DS541", FAILS, since=(0, 19, 2))
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
def expert_parallel_limits() -> Table:
    """What AutoEP can't do.

    Source: validate_autoep_config in module_inject/auto_ep_config.py, validate_folding_global in auto_ep_folding.py.
    """
    return all_of(
        report(
            SIZE,
            f"1 can't be combined with {TENSOR} {{size}}. Set {SIZE} above 1, or {TENSOR} to 1.",
            (when.several(TENSOR), when.unless(_is_shared)),
            size=TENSOR,
        ),
        *(
            _beside_tensors(path, given(path), end=" and expert_parallel")
            for path, given in NOT_WITH_BOTH.items()
        ),
        _beside_tensors(ASYNC, lambda context: context.flag(ASYNC) and above_1(context, SIZE)),
        _beside_tensors(COMBINE, when.is_one_of(COMBINE, SUM), f'"{SUM}" '),
        report(INNER, "{value} isn't supported yet. Set it to 1.", when.several(INNER), put(INNER, 1)),
        report(
            PRESET,
            f'"{{value}}" differs from "{{other}}" in {OTHER_PRESET}. '
            "Name one model in both, or leave one out.",
            _names_differ,
            other=OTHER_PRESET,
        ),
        needs(GATE_UP, f"use_grouped_mm. Set {GROUPED} to true.", when.off(GROUPED), given="fused"),
        needs(
            ROWS,
            'comm_backend "deepep" and autoep_size above 1. Leave it out, or set both.',
            when.unless(lambda context: DEEPEP(context) and _is_shared(context)),
            given="fused",
        ),
        report(
            TOKENS,
            'is required by comm_backend "deepep". '
            "Set it to train_micro_batch_size_per_gpu x the longest sequence.",
            (DEEPEP, lambda context: not context.get(TOKENS)),
        ),
        report(
            COMBINE,
            f'"{SUM}" can\'t be combined with comm_backend "deepep". Set comm_backend to "comm".',
            (DEEPEP, _is_shared, when.is_one_of(COMBINE, SUM)),
        ),
        needs(
            COMBINE, 'score_apply "post". Leave combine_impl out.', when.is_one_of(SCORE, "pre"), given=SUM
        ),
        *(
            report(
                path,
                'is "{value}", but must be the name of an attribute, without dots. '
                "Write the name alone, or leave it out.",
                _is_no_name(path),
            )
            for path in (f"{EXPERTS}.{key}" for key in NAMES)
        ),
        in_range(
            LIMITED,
            "{value} is more than num_expert_groups {most}. Set it to at most {most}.",
            (when.is_whole(LIMITED), when.is_whole(GROUPS)),
            most=GROUPS,
        ),
        when=ENABLED,
    )


@rule("DS542", "note")
@bad({"expert_parallel": {"enabled": True, "autoep_size": 2}})
@good({"expert_parallel": {"enabled": False, "autoep_size": 2}})
def experts_of_a_dense_model() -> Table:
    """In a model without MoE layers AutoEP does nothing, and logs it (ep_parser in module_inject/auto_ep.py)."""
    return report(EXPERTS, "acts on a model's MoE layers only. Remove it if the model has none.", ENABLED)
