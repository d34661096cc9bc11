"""DS203 to DS210, DS218 and DS219: ZeRO stages and the keys that belong to them."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config import schema
from dsrun.config.rules.batch import TENSOR
from dsrun.config.rules.common import (
    GATHER,
    OLD_GATHER,
    OPTIMIZER,
    STAGE,
    ZERO,
    above_1,
    device,
    named,
    removal,
    setting,
    written,
)
from dsrun.config.rules.examples import SAVED_3, ZERO_1, ZERO_2, hf, tensor, zero
from dsrun.config.rules.frame import FAILS, Context, Hit, rule

LEAVES = f"{ZERO}.leaf_module"
GRANULARITY = f"{ZERO}.stage3_module_granularity_threshold"

LATE_KEYS = frozenset(
    (
        "sub_group_size",
        "leaf_module",
        "memory_efficient_linear",
        "override_module_apply",
        "log_trace_cache_warnings",
        "enable_sanity_checks",
        "save_muon_momentum_buffer_in_memory",
    )
)
"""Keys of stage 3 whose names don't begin with stage3_."""

EARLY_KEYS = frozenset(
    (
        "allgather_bucket_size",
        "use_multi_rank_bucket_allreduce",
        "round_robin_gradients",
        "parameter_alignment",
        "ignore_unused_parameters",
    )
)
"""Keys that only stages 1 and 2 read."""

COMMON_KEYS = frozenset(
    (
        "contiguous_gradients",
        "reduce_scatter",
        "reduce_bucket_size",
        "allgather_partitions",
        "overlap_comm",
        "load_from_fp32_weights",
        "round_robin_gradients",
    )
)
"""Keys that stages 1 to 3 read and stage 0 doesn't."""


def _asking(context: Context, keys: frozenset[str], *, stage_3: bool = False) -> list[str]:
    """Paths of keys that ask for something: not null, not "auto", and no flag at its default."""
    found = []
    for key, value in context.section(ZERO).items():
        path = f"{ZERO}.{key}"
        wanted = key in keys or (stage_3 and key.startswith("stage3_") and path != OLD_GATHER)
        default, _ = context.schema.describe(path)
        idle = value is None or value == schema.AUTO or (isinstance(value, bool) and value == default)
        if wanted and not idle and context.schema.node(path) is not None:
            found.append(path)
    return found


@rule(
    "DS203",
    "warning",
    bad=[
        hf(**zero(3)),
        {"_for": "accelerate", **zero(3, gather_16bit_weights_on_model_save=False)},
        zero(3),
        {"_for": "lightning", **zero(3)},
    ],
    good=[
        SAVED_3,
        zero(3, gather_16bit_weights_on_model_save=True),
        zero(3, stage3_gather_fp16_weights_on_model_save=True),
        ZERO_2,
    ],
)
def weights_stay_in_pieces(context: Context) -> Iterator[Hit]:
    """Without gathering, save_16bit_model saves nothing and returns False (runtime/engine.py).

    HF Trainer then leaves ZeRO's pieces in place of model.safetensors. Elsewhere it is the code that calls it, or not.
    """
    if context.stage != 3 or context.flag(GATHER) or context.flag(OLD_GATHER):
        return
    text = "is off: saving gives no model file, only ZeRO's pieces"
    advice = "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards."
    hit = Hit(GATHER, text, advice, setting(context, GATHER, value=True))
    if context.target in schema.FILLING:
        yield hit
    else:
        text = "is off, which only matters if the code calls save_16bit_model: that saves nothing then"
        yield hit._replace(message=text, severity="note")


@rule(
    "DS204",
    "warning",
    bad=[
        zero(2, stage3_prefetch_bucket_size=50000000),
        zero(1, prefetch_bucket_size=1000000),
        zero(2, sub_group_size=1e9),
        zero(1, stage3_gather_16bit_weights_on_model_save=True),
        zero(2, memory_efficient_linear=False),
        zero(2, leaf_module={"names": ["experts"]}),
        zero(2, enable_sanity_checks=True, log_trace_cache_warnings=True),
    ],
    good=[
        hf(**zero(2, stage3_prefetch_bucket_size="auto")),
        zero(2, stage3_gather_16bit_weights_on_model_save=False),
        zero(3, stage3_prefetch_bucket_size=50000000, sub_group_size=1e9),
        zero(0, sub_group_size=1e9),
        zero(2, reduce_bucket_size=50000000),
        {**zero(1, stage3_gather_16bit_weights_on_model_save=True), **tensor(2)},
    ],
)
def stage_3_key_below_stage_3(context: Context) -> Iterator[Hit]:
    """Only DeepSpeedZeroOptimizer_Stage3 and zero.Init are given these (_configure_zero_optimizer, runtime/engine.py).

    The gather flag is the exception: with tensor parallelism accelerate asks for it at any stage
    (get_state_dict in accelerate/accelerator.py).
    """
    if context.stage not in (1, 2):
        return
    parallel = above_1(context, TENSOR)
    for path in _asking(context, LATE_KEYS, stage_3=True):
        if not (parallel and path == GATHER):
            yield Hit(
                written(context, path),
                f"has no effect at stage {context.stage}: only stage 3 reads it",
                "Remove it, or set zero_optimization.stage to 3.",
                removal(context, path),
            )


@rule(
    "DS205",
    "warning",
    bad=[
        zero(3, round_robin_gradients=True),
        zero(3, allgather_bucket_size=200000000),
        zero(3, use_multi_rank_bucket_allreduce=False),
        zero(3, parameter_alignment=True),
        zero(3, ignore_unused_parameters=False),
    ],
    good=[
        zero(3, round_robin_gradients=False),
        zero(2, round_robin_gradients=True, allgather_bucket_size=200000000),
        zero(3, reduce_bucket_size=200000000, contiguous_gradients=False),
    ],
)
def stage_1_and_2_key_at_stage_3(context: Context) -> Iterator[Hit]:
    """Only the optimizer of stages 1 and 2 is given these (_configure_zero_optimizer in runtime/engine.py)."""
    if context.stage == 3:
        for path in _asking(context, EARLY_KEYS):
            yield Hit(
                path,
                "has no effect at stage 3: only stages 1 and 2 read it",
                "Remove it.",
                removal(context, path),
            )


@rule(
    "DS206",
    "warning",
    bad=[
        zero(0, reduce_bucket_size=1000000),
        {"zero_optimization": {"overlap_comm": True, "contiguous_gradients": False}},
        zero(0, stage3_max_live_parameters=1000000),
    ],
    good=[
        zero(0, contiguous_gradients=True),
        zero(0),
        zero(1, reduce_bucket_size=1000000),
        hf(**zero(0, reduce_bucket_size="auto")),
    ],
)
def zero_keys_at_stage_0(context: Context) -> Iterator[Hit]:
    """Stage 0 is no ZeRO: its keys aren't handed on (zero_enabled in runtime/config.py, runtime/engine.py)."""
    if context.stage != 0:
        return
    paths = _asking(context, LATE_KEYS | EARLY_KEYS | COMMON_KEYS, stage_3=True)
    if paths:
        keys = named([path.rpartition(".")[2] for path in paths])
        fix = removal(context, *paths, safe=context.has(STAGE))
        yield Hit(
            ZERO,
            f"stage 0 has no use for {keys}"
            if context.has(STAGE)
            else f"names no stage, and 0 has no use for {keys}",
            "Set zero_optimization.stage to 1, 2 or 3, or remove what has no effect.",
            fix,
        )


@rule(
    "DS207",
    "warning",
    bad=[
        {"zero_optimization": True},
        {"zero_optimization": False},
        hf(_bare=True, train_micro_batch_size_per_gpu="auto", zero_optimization=True),
    ],
    good=[ZERO_1, {"zero_optimization": {}}],
)
def flag_for_a_section(context: Context) -> Iterator[Hit]:
    """true is stage 1 with a warning in the log (read_zero_config_deprecated in runtime/zero/config.py).

    accelerate looks for the stage inside, and has no .get on a flag (find_config_node in
    accelerate/utils/deepspeed.py).
    """
    old = context.get(ZERO)
    if not isinstance(old, bool):
        return
    fix = setting(context, ZERO, {"stage": int(old)}, safe=True)
    text = f"{'true' if old else 'false'} is the old form of stage {int(old)}"
    advice = f'Write {{"stage": {int(old)}}}.'
    if context.target in schema.FILLING:
        yield Hit(ZERO, f"{text}, and accelerate stops at it", advice, fix, severity="error", effect=FAILS)
    else:
        yield Hit(ZERO, text, advice, fix)


@rule(
    "DS208",
    "error",
    FAILS,
    bad=[zero(1, legacy_stage1=True), zero(3, legacy_stage1=True)],
    good=[zero(1, legacy_stage1=False), ZERO_1],
)
def legacy_stage_1(context: Context) -> Iterator[Hit]:
    """The first ZeRO-1 is gone: asking for it raises (_configure_zero_optimizer in runtime/engine.py)."""
    path = f"{ZERO}.legacy_stage1"
    if context.flag(path) and context.stage:
        yield Hit(
            path,
            f"stops stage {context.stage}: that ZeRO-1 was removed",
            "Remove it: stage 1 itself is there.",
            removal(context, path, safe=context.stage == 1),
        )


@rule(
    "DS209",
    "warning",
    bad=zero(3, elastic_checkpoint=True),
    good=[zero(3, elastic_checkpoint=False), zero(2, elastic_checkpoint=True)],
)
def elastic_checkpoint_at_stage_3(context: Context) -> Iterator[Hit]:
    """Stage 3 is never given it (elastic_checkpoint_deprecated in runtime/zero/config.py, runtime/engine.py)."""
    path = f"{ZERO}.elastic_checkpoint"
    if context.flag(path) and context.stage == 3:
        yield Hit(
            path,
            "has no effect at stage 3",
            "Remove it; ds_to_universal makes a checkpoint for another number of GPUs.",
            removal(context, path),
        )


@rule(
    "DS210",
    "warning",
    bad=[zero(2, pipeline_loading_checkpoint=True), zero(0, pipeline_loading_checkpoint=True)],
    good=[zero(3, pipeline_loading_checkpoint=True), zero(2, pipeline_loading_checkpoint=False)],
)
def loading_in_turn_below_stage_3(context: Context) -> Iterator[Hit]:
    """Ranks that load one after the other: stage 3 only, by an assertion (_load_zero_checkpoint, runtime/engine.py)."""
    path = f"{ZERO}.pipeline_loading_checkpoint"
    if context.flag(path) and context.stage < 3:
        harm = ", and stops the loading of a checkpoint" if context.stage else ""
        yield Hit(path, f"has no effect at stage {context.stage}{harm}", "Remove it.", removal(context, path))


@rule(
    "DS218",
    "warning",
    bad=[
        zero(2, ignore_unused_parameters=False),
        zero(2, contiguous_gradients=False, offload_optimizer={"device": "cpu"}),
    ],
    good=[
        zero(2, ignore_unused_parameters=False, offload_optimizer={"device": "cpu"}),
        zero(1, contiguous_gradients=False),
        zero(2, ignore_unused_parameters=True),
        zero(3, contiguous_gradients=False, offload_optimizer={"device": "cpu"}),
    ],
)
def key_that_offload_decides(context: Context) -> Iterator[Hit]:
    """Unused parameters are only looked for where gradients go to the CPU, and those are always contiguous.

    Source: complete_grad_norm_calculation_for_cpu_offload and __init__ in runtime/zero/stage_1_and_2.py.
    """
    if context.stage not in (1, 2):
        return
    offloaded = device(context, OPTIMIZER) is not None
    key, why = ("contiguous_gradients", "with") if offloaded else ("ignore_unused_parameters", "without")
    path = f"{ZERO}.{key}"
    if context.flag(path) is False:
        yield Hit(path, f"false has no effect {why} optimizer offload", "Remove it.", removal(context, path))


@rule(
    "DS219",
    "warning",
    bad=[
        zero(3, stage3_module_granularity_threshold=100000),
        zero(3, leaf_module={"names": ["layers.0"]}),
        zero(3, leaf_module={"classes": ["MoeBlock"], "name_suffixes": ["mlp"]}),
    ],
    good=[
        zero(3, stage3_module_granularity_threshold=0),
        zero(3, leaf_module={"names": [], "classes": []}),
        zero(2, stage3_module_granularity_threshold=100000),
    ],
    since=(0, 16),
)
def modules_as_leaves(context: Context) -> Iterator[Hit]:
    """A leaf fetches its weights as one; one that is a single layer fails in the first backward pass.

    A name that fits no module is only logged (apply_zero_leaf_module_config in utils/z3_leaf_module.py); the threshold
    makes leaves of every small module (runtime/zero/parameter_offload.py).
    """
    if context.stage != 3:
        return
    threshold = context.integer(GRANULARITY)
    if threshold is not None and threshold > 0:
        yield Hit(
            written(context, GRANULARITY),
            f"{threshold} makes single layers leaves as well, which fails in the backward pass",
            "Name the blocks in zero_optimization.leaf_module.classes, or set it to 0.",
        )
    for key in ("classes", "names", "name_suffixes"):
        given = context.section(LEAVES).get(key)
        if given and isinstance(given, (str, list)):
            shown = given if isinstance(given, str) else ", ".join(map(str, given))
            yield Hit(
                f"{LEAVES}.{key}",
                f"{shown}: a single layer as a leaf fails in the first backward pass, and what fits no module of the "
                "model is skipped with a line in the log",
                "Name blocks of several layers only, and compare the names with the model's named_modules().",
                severity="note",
            )
