"""DS203 to DS210, DS218, DS219 and DS260: ZeRO stages and the keys that belong to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsrun.config.rules import conditions as when
from dsrun.config.rules.common import (
    GATHER,
    OLD_GATHER,
    OPTIMIZER,
    STAGE,
    ZERO,
    above_1,
    device,
    no_effect,
    removal,
    set_to,
    written,
)
from dsrun.config.rules.examples import SAVED_3, ZERO_1, hf, zero
from dsrun.config.rules.frame import FAILS, Context, Finding, bad, good, rule
from dsrun.config.rules.kinds import Table, report, without_effect
from dsrun.config.rules.running.batch import TENSOR
from dsrun.config.schemas import schema
from dsrun.words import listed

LEAVES = f"{ZERO}.leaf_module"
GRANULARITY = f"{ZERO}.stage3_module_granularity_threshold"
LAUNCHED_LEAVES = "deepspeed_moe_layer_cls_names"
"""What accelerate's file calls leaf modules."""

EXPERT_BLOCKS = {
    "mixtral": "MixtralSparseMoeBlock", "qwen2_moe": "Qwen2MoeSparseMoeBlock", "qwen3_moe": "Qwen3MoeSparseMoeBlock",
    "olmoe": "OlmoeSparseMoeBlock", "phimoe": "PhimoeSparseMoeBlock", "jamba": "JambaSparseMoeBlock",
    "deepseek_v2": "DeepseekV2MoE", "deepseek_v3": "DeepseekV3MoE", "glm4_moe": "Glm4MoeMoE",
}  # fmt: skip
"""model_type -> the block whose experts are modules apart in transformers 4 (LLaMA-Factory's add_z3_leaf_module)."""
LEAVES_OF_ITS_OWN = frozenset({"mixtral", "qwen2_moe", "qwen3_moe"})
"""Those whose blocks DeepSpeed makes leaves by itself since it has leaf_module (0.18)."""

LATE_KEYS = frozenset({
    "sub_group_size", "leaf_module", "memory_efficient_linear", "override_module_apply", "log_trace_cache_warnings",
    "enable_sanity_checks", "save_muon_momentum_buffer_in_memory",
})  # fmt: skip
"""Keys of stage 3 whose names don't begin with stage3_."""

EARLY_KEYS = frozenset({
    "allgather_bucket_size", "use_multi_rank_bucket_allreduce", "round_robin_gradients", "parameter_alignment",
    "ignore_unused_parameters",
})  # fmt: skip
"""Keys that only stages 1 and 2 read."""

COMMON_KEYS = frozenset({
    "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "allgather_partitions", "overlap_comm",
    "load_from_fp32_weights",
})  # fmt: skip
"""Keys that stages 1 to 3 read and stage 0 doesn't."""


MEANT = 3
"""Keys of stage 3 that stand together where stage 3 was meant: fewer are left over from another config."""


def _asking(context: Context, keys: frozenset[str], *, stage_3: bool = False) -> list[str]:
    """Paths of keys that ask for something: not null, not "auto", and no flag at its default."""
    paths = []
    for key, value in context.section(ZERO).items():
        path = f"{ZERO}.{key}"
        wanted = key in keys or (stage_3 and key.startswith("stage3_") and path != OLD_GATHER)
        default, _ = context.schema.describe(path)
        idle = value is None or value == schema.AUTO or (isinstance(value, bool) and value == default)
        if wanted and not idle and context.schema.node(path) is not None:
            paths.append(path)
    return paths


@rule("DS203", "warning")
@bad(hf(**zero(3)), zero(3))
@good(SAVED_3, zero(3, gather_16bit_weights_on_model_save=True))
def weights_stay_sharded(context: Context) -> Iterator[Finding]:
    """Without gathering, save_16bit_model saves nothing and returns False (runtime/engine.py).

    HF Trainer then leaves ZeRO's shards in place of model.safetensors. Elsewhere it depends on the code's call.
    """
    if context.stage != 3 or context.flag(GATHER) or context.flag(OLD_GATHER):
        return
    off = 'is "auto", which counts as off' if context.is_auto(GATHER) else "is off"
    text = f"{off}: saving gives no model file, only ZeRO's shards"
    advice = "Set it to true, or convert the shards to a model with zero_to_fp32.py afterwards."
    finding = Finding(GATHER, text, advice, set_to(context, GATHER, value=True))
    if context.target in schema.FILLING:
        yield finding
    else:
        text = f"{off}: save_16bit_model saves nothing, if the code calls it"
        yield replace(finding, message=text, severity="note")


@rule("DS204", "warning")
@bad(
    zero(2, stage3_prefetch_bucket_size=50000000),
    zero(2, stage3_max_live_parameters=1, enable_sanity_checks=True, log_trace_cache_warnings=True),
)
@good(
    hf(**zero(2, stage3_prefetch_bucket_size="auto")),
    zero(2, stage3_gather_16bit_weights_on_model_save=False),
)
def stage_3_key_below_stage_3(context: Context) -> Iterator[Finding]:
    """Only DeepSpeedZeroOptimizer_Stage3 and zero.Init receive these (_configure_zero_optimizer, runtime/engine.py).

    The gather flag is the exception: with tensor parallelism accelerate reads it at any stage
    (get_state_dict in accelerate/accelerator.py). One or two are leftovers, and a note.
    """
    if context.stage not in (1, 2):
        return
    parallel = above_1(context, TENSOR)
    unread = [path for path in _asking(context, LATE_KEYS, stage_3=True) if not (parallel and path == GATHER)]
    for path in unread:
        finding = no_effect(
            context,
            written(context, path),
            f" at stage {context.stage}: only stage 3 reads it",
            "Remove it, or set zero_optimization.stage to 3.",
            safe=False,
        )
        yield finding if len(unread) >= MEANT else replace(finding, severity="note")


@rule("DS205", "note")
@bad(zero(3, round_robin_gradients=True), zero(3, allgather_bucket_size=200000000))
@good(
    zero(3, round_robin_gradients=False), zero(2, round_robin_gradients=True, allgather_bucket_size=200000000)
)
def stage_1_and_2_key_at_stage_3(context: Context) -> Iterator[Finding]:
    """Only the optimizer of stages 1 and 2 receives these (_configure_zero_optimizer in runtime/engine.py)."""
    if context.stage == 3:
        for path in _asking(context, EARLY_KEYS):
            yield no_effect(context, path, " at stage 3: only stages 1 and 2 read it")


@rule("DS206", "warning")
@bad(
    zero(0, reduce_bucket_size=1000000),
    {"zero_optimization": {"overlap_comm": True, "contiguous_gradients": False}},
)
@good(zero(0, contiguous_gradients=True), zero(0))
def zero_keys_at_stage_0(context: Context) -> Iterator[Finding]:
    """Stage 0 is plain data parallelism, without ZeRO's keys (zero_enabled in runtime/config.py, runtime/engine.py).

    With stage 0 written, the keys are left over from another stage, and this is a note.
    """
    if context.stage != 0:
        return
    paths = _asking(context, LATE_KEYS | EARLY_KEYS | COMMON_KEYS, stage_3=True)
    if paths:
        keys = listed([path.rpartition(".")[2] for path in paths])
        fix = removal(context, *paths, safe=False)
        yield Finding(
            ZERO,
            f"stage 0 ignores {keys}" if context.has(STAGE) else f"has no stage, and stage 0 ignores {keys}",
            "Set zero_optimization.stage to 1, 2 or 3, or remove what has no effect.",
            fix,
            severity="note" if context.has(STAGE) else "",
        )


@rule("DS207", "warning")
@bad({"zero_optimization": True}, {"zero_optimization": False})
@good(ZERO_1, {"zero_optimization": {}})
def true_or_false_as_zero_section(context: Context) -> Iterator[Finding]:
    """true is stage 1 with a warning in the log (read_zero_config_deprecated in runtime/zero/config.py).

    accelerate looks for the stage inside, which fails for true and false (find_config_node in
    accelerate/utils/deepspeed.py).
    """
    old = context.get(ZERO)
    if not isinstance(old, bool):
        return
    fix = set_to(context, ZERO, {"stage": int(old)}, safe=True)
    text = f"{'true' if old else 'false'} is the old way to write stage {int(old)}"
    advice = f'Write {{"stage": {int(old)}}}.'
    if context.target in schema.FILLING:
        yield Finding(ZERO, f"{text}; accelerate stops at it", advice, fix, severity="error", effect=FAILS)
    else:
        yield Finding(ZERO, text, advice, fix)


@rule("DS208", FAILS)
@bad(zero(1, legacy_stage1=True), zero(3, legacy_stage1=True))
@good(zero(1, legacy_stage1=False), ZERO_1)
def removed_stage_1() -> Table:
    """The first ZeRO-1 was removed: asking for it raises (_configure_zero_optimizer in runtime/engine.py)."""
    path = f"{ZERO}.legacy_stage1"
    text = "stops the start: that form of ZeRO-1 was removed. Remove it: stage 1 itself still exists."
    conditions = (when.on(path), when.unless(when.at_stage(0)))
    return report(path, text, conditions, lambda context: removal(context, path, safe=context.stage == 1))


@rule("DS209", "warning")
@bad(zero(3, elastic_checkpoint=True))
@good(zero(3, elastic_checkpoint=False), zero(2, elastic_checkpoint=True))
def elastic_checkpoint_at_stage_3() -> Table:
    """Stage 3 never receives it (elastic_checkpoint_deprecated in runtime/zero/config.py, runtime/engine.py)."""
    path = f"{ZERO}.elastic_checkpoint"
    advice = "Remove it; ds_to_universal makes a checkpoint for another number of GPUs."
    return without_effect(path, " at stage 3", (when.on(path), when.at_stage(3)), advice)


@rule("DS210", "warning")
@bad(zero(2, pipeline_loading_checkpoint=True), zero(0, pipeline_loading_checkpoint=True))
@good(zero(3, pipeline_loading_checkpoint=True), zero(2, pipeline_loading_checkpoint=False))
def pipelined_loading_below_stage_3(context: Context) -> Iterator[Finding]:
    """Ranks load one after the other: stage 3 only, by an assertion (_load_zero_checkpoint, runtime/engine.py)."""
    path = f"{ZERO}.pipeline_loading_checkpoint"
    if context.flag(path) and context.stage < 3:
        harm = ", and loading a checkpoint fails" if context.stage else ""
        yield no_effect(context, path, f" at stage {context.stage}{harm}")


@rule("DS218", "note")
@bad(
    zero(2, ignore_unused_parameters=False),
    zero(2, contiguous_gradients=False, offload_optimizer={"device": "cpu"}),
)
@good(
    zero(2, ignore_unused_parameters=False, offload_optimizer={"device": "cpu"}),
    zero(1, contiguous_gradients=False),
)
def key_without_effect_because_of_offload(context: Context) -> Iterator[Finding]:
    """Unused parameters are only looked for when gradients go to the CPU, where they are always contiguous.

    Source: complete_grad_norm_calculation_for_cpu_offload and __init__ in runtime/zero/stage_1_and_2.py.
    """
    if context.stage not in (1, 2):
        return
    offloaded = device(context, OPTIMIZER) is not None
    key, why = ("contiguous_gradients", "with") if offloaded else ("ignore_unused_parameters", "without")
    path = f"{ZERO}.{key}"
    if context.flag(path) is False:
        yield Finding(
            path, f"false has no effect {why} optimizer offload", "Remove it.", removal(context, path)
        )


@rule("DS219", "warning", since=(0, 16))
@bad(zero(3, stage3_module_granularity_threshold=100000), zero(3, leaf_module={"names": ["layers.0"]}))
@good(zero(3, stage3_module_granularity_threshold=0), zero(3, leaf_module={"names": [], "classes": []}))
def single_layers_as_leaf_modules(context: Context) -> Iterator[Finding]:
    """A leaf fetches its weights together; a leaf that is a single layer fails in the first backward pass.

    A name without a module is only logged (apply_zero_leaf_module_config in utils/z3_leaf_module.py); the threshold
    makes leaves of every small module (runtime/zero/parameter_offload.py).
    """
    if context.stage != 3:
        return
    threshold = context.integer(GRANULARITY)
    if threshold is not None and threshold > 0:
        yield Finding(
            written(context, GRANULARITY),
            f"{threshold} also makes leaves of single layers, which fails in the backward pass",
            "Name the blocks in zero_optimization.leaf_module.classes, or set it to 0.",
        )
    for key in ("classes", "names", "name_suffixes"):
        given = context.section(LEAVES).get(key)
        if given and isinstance(given, (str, list)):
            shown = given if isinstance(given, str) else ", ".join(map(str, given))
            yield Finding(
                f"{LEAVES}.{key}",
                f"{shown}: a single layer as a leaf fails in the first backward pass, and a name that matches no "
                "module is skipped with a line in the log",
                "Name blocks of several layers only, and compare the names with the model's named_modules().",
                severity="note",
            )


@rule("DS260", "warning")
@bad(
    {**zero(3), "_version": "0.17.0", "_model": {"model_type": "qwen3_moe", "experts": 128}},
    {**zero(3), "_with": {"transformers": "4.57.1"}, "_model": {"model_type": "deepseek_v3", "experts": 256}},
)
@good(
    {**zero(2), "_version": "0.17.0", "_model": {"model_type": "qwen3_moe", "experts": 128}},
    {**zero(3), "_model": {"model_type": "qwen3_moe", "experts": 128}},
    {
        **zero(3), "_version": "0.17.0", "_with": {"transformers": "5.1.0"},
        "_model": {"model_type": "qwen3_moe", "experts": 128},
    },
)  # fmt: skip
def experts_that_are_no_leaf_modules(context: Context) -> Iterator[Finding]:
    """Each rank gathers the experts that its own tokens chose, and all ranks have to gather the same.

    With other experts they wait for one another for ever. A block as a leaf gathers all of its experts at once
    (set_z3_leaf_modules in utils/z3_leaf_module.py). DeepSpeed 0.18 does so for three families by itself
    (runtime/zero/leaf_module_config.py); in transformers 5 a block's experts are one tensor.
    """
    model, named = context.setting.model, (context.setting.versions or {}).get("transformers")
    if context.stage != 3 or model is None or not model.experts or context.section(LEAVES):
        return
    kind, launch = str(model.model_type), context.setting.launch or {}
    block, old = EXPERT_BLOCKS.get(kind), named is not None and schema.plain_version(named) < (5,)
    if block is None or (named and not old) or LAUNCHED_LEAVES in (launch.get("deepspeed_config") or launch):
        return
    key = context.schema.node(LEAVES) is not None
    if key and (kind in LEAVES_OF_ITS_OWN or not old):
        return
    ways = f"deepspeed.utils.set_z3_leaf_modules(model, [{block}]) before deepspeed.initialize"
    if key:
        ways = f'{LEAVES}.classes: ["{block}"]'
    elif kind in LEAVES_OF_ITS_OWN:
        ways += ", or take DeepSpeed 0.18, which does it by itself"
    yield Finding(
        STAGE,
        f"{kind} has {model.experts} experts a block, modules apart in transformers before 5: where ranks choose other "
        "ones, stage 3 waits for ever",
        f"Make its blocks leaf modules: {ways}. Or take transformers 5.",
    )
