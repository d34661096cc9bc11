"""DS20x and DS21x: ZeRO stages, the keys that belong to them, and buckets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsrun.config import schema, tree
from dsrun.config.rules.frame import FAILS, REFUSED, Context, Edit, Fix, Hit, rule

ZERO = "zero_optimization"
STAGE = f"{ZERO}.stage"
OPTIMIZER = f"{ZERO}.offload_optimizer"
PARAMETERS = f"{ZERO}.offload_param"
OVERLAP = f"{ZERO}.overlap_comm"
NORM = f"{ZERO}.compute_grad_norm"
CLIPPING = "gradient_clipping"
GATHER = f"{ZERO}.stage3_gather_16bit_weights_on_model_save"
OLD_GATHER = f"{ZERO}.stage3_gather_fp16_weights_on_model_save"
LIVE = f"{ZERO}.stage3_max_live_parameters"
PREFETCH = f"{ZERO}.stage3_prefetch_bucket_size"
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

BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
FP32_NAMES = frozenset(("fp32", "float32", "float", "torch.float32"))
GIB = 1024**3
FEW_ELEMENTS = 10_000
BIG_BUCKET_GIB = 4
FIXED_OVERLAP = (0, 19)


def written(context: Context, path: str) -> str:
    """A key's path under the name that it has in the file: itself, or an alias of it."""
    section, _, _ = path.rpartition(".")
    holder = tree.get(context.config, section) if section else context.config
    names = [f"{section}.{key}" for key in holder] if isinstance(holder, dict) else []
    return next((name for name in names if context.schema.canonical(name) == path), path)


def removal(context: Context, *paths: str) -> Fix:
    """Takes out keys that do nothing."""
    return Fix(tuple(Edit("remove", written(context, path)) for path in paths))


def setting(context: Context, path: str, value: Any) -> Fix:
    """Sets a key to what would be right, where that is no more than a guess at what was wanted."""
    return Fix((Edit("replace" if context.has(path) else "add", written(context, path), value),), safe=False)


def device(context: Context, section: str) -> str | None:
    """Where a section offloads to, cpu or nvme; the old flags mean cpu."""
    old = {OPTIMIZER: "cpu_offload", PARAMETERS: "cpu_offload_param"}[section]
    if context.flag(f"{ZERO}.{old}"):
        return "cpu"
    found = context.text(f"{section}.device")
    return found if found in ("cpu", "nvme") else None


def value_or_default(context: Context, path: str) -> float | None:
    """The number that holds at a key; None where it is "auto" or no number."""
    if not context.has(path):
        default, _ = context.schema.describe(path)
        return default if isinstance(default, (int, float)) else None
    return context.number(path)


def named(keys: list[str]) -> str:
    """a, b and c"""
    return " and ".join([", ".join(keys[:-1]), keys[-1]] if len(keys) > 1 else keys)


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
    "DS201",
    "error",
    FAILS,
    bad=[
        {"zero_optimization": {"stage": 1, "allgather_bucket_size": 5}},
        {"zero_optimization": {"stage": 2, "allgather_bucket_size": 500000001}},
    ],
    good=[
        {"zero_optimization": {"stage": 1, "allgather_bucket_size": 50000}},
        {"zero_optimization": {"stage": 2, "allgather_bucket_size": 0}},
        {"zero_optimization": {"stage": 3, "allgather_bucket_size": 5}},
        {"zero_optimization": {"stage": 0, "allgather_bucket_size": 5}},
    ],
)
def odd_allgather_bucket(context: Context) -> Iterator[Hit]:
    """Stages 1 and 2 assert a multiple of NCCL's start alignment, 2 (runtime/zero/stage_1_and_2.py)."""
    path = f"{ZERO}.allgather_bucket_size"
    size = context.integer(path)
    if size is not None and size % 2 and context.stage in (1, 2):
        yield Hit(
            path,
            f"{size} is odd",
            f"Set an even number of elements, such as {size + 1}.",
            Fix((Edit("replace", path, size + 1),)),
        )


@rule(
    "DS202",
    "warning",
    bad=[
        {"_version": "0.18", "zero_optimization": {"stage": 1, "overlap_comm": True}},
        {"_version": "0.14", "zero_optimization": {"stage": 2, "overlap_comm": True}},
        {"zero_optimization": {"stage": 2, "overlap_comm": True}},
    ],
    good=[
        {"_version": "0.18", "zero_optimization": {"stage": 2, "overlap_comm": False}},
        {"_version": "0.18", "zero_optimization": {"stage": 2}},
        {"_version": "0.18", "zero_optimization": {"stage": 3, "overlap_comm": True}},
        {"_version": "0.18", "zero_optimization": {"stage": 0, "overlap_comm": True}},
    ],
)
def overlap_below_stage_3(context: Context) -> Iterator[Hit]:
    """The reduction read buckets that were still being filled (DeepSpeed issues 5523, 5545, 7965 and 8061).

    runtime/zero/stage_1_and_2.py (average_tensor) of 0.19.8 waits for every stream that fills one and keeps the
    buffers alive; so from 0.19 on this is a note.
    """
    if not (context.flag(OVERLAP) and context.stage in (1, 2)):
        return
    if context.version >= FIXED_OVERLAP:
        yield Hit(
            OVERLAP,
            f"has given wrong gradients at stage {context.stage}, up to early 0.19 releases",
            "Use 0.19.8 or newer: https://github.com/deepspeedai/DeepSpeed/issues/8061",
            severity="note",
        )
    else:
        yield Hit(
            OVERLAP,
            f"has given wrong gradients at stage {context.stage}",
            "Set it to false, which is slower and right: https://github.com/deepspeedai/DeepSpeed/issues/5523",
            setting(context, OVERLAP, value=False),
        )


@rule(
    "DS203",
    "warning",
    bad=[
        {"zero_optimization": {"stage": 3}},
        {"zero_optimization": {"stage": 3, "gather_16bit_weights_on_model_save": False}},
    ],
    good=[
        {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}},
        {"zero_optimization": {"stage": 3, "gather_16bit_weights_on_model_save": True}},
        {"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}},
        {"zero_optimization": {"stage": 2}},
    ],
)
def weights_stay_in_pieces(context: Context) -> Iterator[Hit]:
    """Without gathering, save_16bit_model saves nothing and returns False (runtime/engine.py).

    HF Trainer then leaves ZeRO's pieces in place of model.safetensors.
    """
    if context.stage == 3 and not context.flag(GATHER) and not context.flag(OLD_GATHER):
        yield Hit(
            GATHER,
            "is off: saving gives no model file, only ZeRO's pieces",
            "Set it to true, or turn the pieces into a model with zero_to_fp32.py afterwards.",
            setting(context, GATHER, value=True),
        )


@rule(
    "DS204",
    "warning",
    bad=[
        {"zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": 50000000}},
        {"zero_optimization": {"stage": 1, "prefetch_bucket_size": 1000000}},
        {"zero_optimization": {"stage": 2, "sub_group_size": 1e9}},
        {"zero_optimization": {"stage": 1, "stage3_gather_16bit_weights_on_model_save": True}},
        {"zero_optimization": {"stage": 2, "memory_efficient_linear": False}},
        {"zero_optimization": {"stage": 2, "leaf_module": {"names": ["experts"]}}},
        {"zero_optimization": {"stage": 2, "enable_sanity_checks": True, "log_trace_cache_warnings": True}},
    ],
    good=[
        {"_for": "hf", "zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": "auto"}},
        {"zero_optimization": {"stage": 2, "stage3_gather_16bit_weights_on_model_save": False}},
        {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 50000000, "sub_group_size": 1e9}},
        {"zero_optimization": {"stage": 0, "sub_group_size": 1e9}},
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": 50000000}},
        {
            "zero_optimization": {"stage": 1, "stage3_gather_16bit_weights_on_model_save": True},
            "tensor_parallel": {"autotp_size": 2},
        },
    ],
)
def stage_3_key_below_stage_3(context: Context) -> Iterator[Hit]:
    """Only DeepSpeedZeroOptimizer_Stage3 and zero.Init are given these (_configure_zero_optimizer, runtime/engine.py).

    The gather flag is the exception: with tensor parallelism accelerate asks for it at any stage
    (get_state_dict in accelerate/accelerator.py).
    """
    if context.stage not in (1, 2):
        return
    parallel = (context.integer("tensor_parallel.autotp_size") or 0) > 1
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
        {"zero_optimization": {"stage": 3, "round_robin_gradients": True}},
        {"zero_optimization": {"stage": 3, "allgather_bucket_size": 200000000}},
        {"zero_optimization": {"stage": 3, "use_multi_rank_bucket_allreduce": False}},
        {"zero_optimization": {"stage": 3, "parameter_alignment": True}},
        {"zero_optimization": {"stage": 3, "ignore_unused_parameters": False}},
    ],
    good=[
        {"zero_optimization": {"stage": 3, "round_robin_gradients": False}},
        {
            "zero_optimization": {
                "stage": 2,
                "round_robin_gradients": True,
                "allgather_bucket_size": 200000000,
            }
        },
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": 200000000, "contiguous_gradients": False}},
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
        {"zero_optimization": {"stage": 0, "reduce_bucket_size": 1000000}},
        {"zero_optimization": {"overlap_comm": True, "contiguous_gradients": False}},
        {"zero_optimization": {"stage": 0, "stage3_max_live_parameters": 1000000}},
    ],
    good=[
        {"zero_optimization": {"stage": 0, "contiguous_gradients": True}},
        {"zero_optimization": {"stage": 0}},
        {"zero_optimization": {"stage": 1, "reduce_bucket_size": 1000000}},
        {"_for": "hf", "zero_optimization": {"stage": 0, "reduce_bucket_size": "auto"}},
    ],
)
def zero_keys_at_stage_0(context: Context) -> Iterator[Hit]:
    """Stage 0 is no ZeRO: its keys aren't handed on (zero_enabled in runtime/config.py, runtime/engine.py)."""
    if context.stage != 0:
        return
    paths = _asking(context, LATE_KEYS | EARLY_KEYS | COMMON_KEYS, stage_3=True)
    if paths:
        keys = named([path.rpartition(".")[2] for path in paths])
        fix = removal(context, *paths)
        yield Hit(
            ZERO,
            f"stage 0 has no use for {keys}"
            if context.has(STAGE)
            else f"names no stage, and 0 has no use for {keys}",
            "Set zero_optimization.stage to 1, 2 or 3, or remove what has no effect.",
            Fix(fix.edits, safe=context.has(STAGE)),
        )


@rule(
    "DS207",
    "warning",
    bad=[
        {"zero_optimization": True},
        {"zero_optimization": False},
        {"_for": "hf", "_bare": True, "train_micro_batch_size_per_gpu": "auto", "zero_optimization": True},
    ],
    good=[{"zero_optimization": {"stage": 1}}, {"zero_optimization": {}}],
)
def flag_for_a_section(context: Context) -> Iterator[Hit]:
    """true is stage 1 with a warning in the log (read_zero_config_deprecated in runtime/zero/config.py).

    accelerate looks for the stage inside, and has no .get on a flag (find_config_node in
    accelerate/utils/deepspeed.py).
    """
    old = context.get(ZERO)
    if not isinstance(old, bool):
        return
    fix = Fix((Edit("replace", ZERO, {"stage": int(old)}),))
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
    bad=[
        {"zero_optimization": {"stage": 1, "legacy_stage1": True}},
        {"zero_optimization": {"stage": 3, "legacy_stage1": True}},
    ],
    good=[{"zero_optimization": {"stage": 1, "legacy_stage1": False}}, {"zero_optimization": {"stage": 1}}],
)
def legacy_stage_1(context: Context) -> Iterator[Hit]:
    """The first ZeRO-1 is gone: asking for it raises (_configure_zero_optimizer in runtime/engine.py)."""
    path = f"{ZERO}.legacy_stage1"
    if context.flag(path) and context.stage:
        yield Hit(
            path,
            f"stops stage {context.stage}: that ZeRO-1 was removed",
            "Remove it: stage 1 itself is there.",
            Fix((Edit("remove", path),), safe=context.stage == 1),
        )


@rule(
    "DS209",
    "warning",
    bad={"zero_optimization": {"stage": 3, "elastic_checkpoint": True}},
    good=[
        {"zero_optimization": {"stage": 3, "elastic_checkpoint": False}},
        {"zero_optimization": {"stage": 2, "elastic_checkpoint": True}},
    ],
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
    bad=[
        {"zero_optimization": {"stage": 2, "pipeline_loading_checkpoint": True}},
        {"zero_optimization": {"stage": 0, "pipeline_loading_checkpoint": True}},
    ],
    good=[
        {"zero_optimization": {"stage": 3, "pipeline_loading_checkpoint": True}},
        {"zero_optimization": {"stage": 2, "pipeline_loading_checkpoint": False}},
    ],
)
def loading_in_turn_below_stage_3(context: Context) -> Iterator[Hit]:
    """Ranks that load one after the other: stage 3 only, by an assertion (_load_zero_checkpoint, runtime/engine.py)."""
    path = f"{ZERO}.pipeline_loading_checkpoint"
    if context.flag(path) and context.stage < 3:
        harm = ", and stops the loading of a checkpoint" if context.stage else ""
        yield Hit(path, f"has no effect at stage {context.stage}{harm}", "Remove it.", removal(context, path))


@rule(
    "DS211",
    "error",
    REFUSED,
    bad=[
        {"zero_optimization": {"stage": 3, "compute_grad_norm": False}, "gradient_clipping": 0},
        {"zero_optimization": {"compute_grad_norm": False}, "gradient_clipping": 0},
    ],
    good=[
        {"zero_optimization": {"stage": 1, "compute_grad_norm": False}, "gradient_clipping": 0},
        {"zero_optimization": {"stage": 2, "compute_grad_norm": False}, "gradient_clipping": 0},
        {"zero_optimization": {"stage": 3, "compute_grad_norm": True}},
    ],
    since=(0, 19),
)
def no_norm_outside_stage_1_and_2(context: Context) -> Iterator[Hit]:
    """Stages 0 and 3 always compute the norm (compute_grad_norm_valid in runtime/zero/config.py)."""
    if context.flag(NORM) is False and context.stage not in (1, 2):
        yield Hit(
            NORM,
            f"can't be false at stage {context.stage}",
            "Remove it, or set zero_optimization.stage to 1 or 2.",
            Fix((Edit("remove", NORM),), safe=False),
        )


@rule(
    "DS212",
    "error",
    FAILS,
    bad=[
        {"zero_optimization": {"stage": 2, "compute_grad_norm": False}},
        {"zero_optimization": {"stage": 1, "compute_grad_norm": False}, "gradient_clipping": 0.5},
        {
            "_for": "hf",
            "_trainer": {"max_grad_norm": 0.3},
            "zero_optimization": {"stage": 2, "compute_grad_norm": False},
        },
    ],
    good=[
        {"zero_optimization": {"stage": 2, "compute_grad_norm": False}, "gradient_clipping": 0},
        {"zero_optimization": {"stage": 2, "compute_grad_norm": False}, "gradient_clipping": -1},
        {"zero_optimization": {"stage": 2, "compute_grad_norm": True}},
        {
            "_for": "hf",
            "_trainer": {"max_grad_norm": 0},
            "zero_optimization": {"stage": 2, "compute_grad_norm": False},
        },
    ],
    since=(0, 19),
)
def clipping_without_norm(context: Context) -> Iterator[Hit]:
    """Clipping needs the norm, and is on at 1.0 where nothing is said (runtime/zero/stage_1_and_2.py, constants.py).

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
        yield Hit(
            NORM,
            f"is false, and {text}, which needs the norm",
            "Set gradient_clipping to 0, or remove compute_grad_norm.",
            Fix((Edit("remove", NORM),), safe=False),
            severity=None if known else "warning",
        )


@rule(
    "DS213",
    "error",
    FAILS,
    bad=[
        {
            "zero_optimization": {
                "stage": 2,
                "compute_grad_norm": False,
                "offload_optimizer": {"device": "cpu"},
            },
            "gradient_clipping": 0,
        },
        {
            "zero_optimization": {"stage": 1, "compute_grad_norm": False, "cpu_offload": True},
            "gradient_clipping": 0,
        },
        {
            "zero_optimization": {"stage": 1, "compute_grad_norm": False},
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "gradient_clipping": 0,
        },
    ],
    good=[
        {
            "zero_optimization": {
                "stage": 2,
                "compute_grad_norm": False,
                "offload_optimizer": {"device": "none"},
            },
            "gradient_clipping": 0,
        },
        {
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "gradient_clipping": 0,
        },
        {
            "zero_optimization": {"stage": 2, "compute_grad_norm": False},
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "gradient_clipping": 0,
        },
        {
            "zero_optimization": {"stage": 1, "compute_grad_norm": False},
            "bf16": {"enabled": True},
            "gradient_clipping": 0,
        },
    ],
    since=(0, 19),
)
def no_norm_beside_what_needs_it(context: Context) -> Iterator[Hit]:
    """Offload and ZenFlow raise (runtime/zero/stage_1_and_2.py), as does the bf16 optimizer of stage 1.

    That one is taken for bf16 weights with fp32 accumulation (_do_optimizer_sanity_check in runtime/engine.py).
    """
    if context.flag(NORM) is not False or context.stage not in (1, 2):
        return
    precise = context.text("data_types.grad_accum_dtype") in FP32_NAMES
    reasons = {
        "offload_optimizer": device(context, OPTIMIZER) is not None,
        "zenflow": bool(context.section(f"{ZERO}.zenflow")),
        "bf16 with fp32 accumulation at stage 1": context.stage == 1
        and precise
        and context.precision == "bf16",
    }
    if given := [name for name, holds in reasons.items() if holds]:
        yield Hit(
            NORM,
            f"can't be false with {named(given)}",
            "Remove it.",
            Fix((Edit("remove", NORM),), safe=False),
        )


@rule(
    "DS214",
    "warning",
    bad=[
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": 500}},
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": 9999}},
        {"zero_optimization": {"stage": 1, "allgather_bucket_size": 200}},
    ],
    good=[
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": 10000}},
        {"zero_optimization": {"stage": 3, "allgather_bucket_size": 200}},
        {"zero_optimization": {"stage": 0, "reduce_bucket_size": 500}},
    ],
)
def tiny_bucket(context: Context) -> Iterator[Hit]:
    """A bucket counts elements, and each one that is full is sent by itself (runtime/zero/stage3.py)."""
    keys = {1: ("reduce", "allgather"), 2: ("reduce", "allgather"), 3: ("reduce",)}
    for key in keys.get(context.stage, ()):
        path = f"{ZERO}.{key}_bucket_size"
        size = context.integer(path)
        if size is not None and size < FEW_ELEMENTS:
            yield Hit(
                path,
                f"{size} elements: each weight is sent by itself, which is slow",
                "It counts elements, not MB; 5e7 to 5e8 is usual.",
            )


@rule(
    "DS215",
    "note",
    bad=[
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": 2147483648}, "bf16": {"enabled": True}},
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1073741824}},
        {
            "_version": "0.19",
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 1073741824, "overlap_comm": True},
            "fp16": {"enabled": True},
        },
    ],
    good=[
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": 2147483647}, "bf16": {"enabled": True}},
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1073741824}, "bf16": {"enabled": True}},
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1073741823}},
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": 2147483648, "contiguous_gradients": False}},
        {"zero_optimization": {"stage": 0, "reduce_bucket_size": 2147483648}},
    ],
)
def big_bucket(context: Context) -> Iterator[Hit]:
    """A contiguous bucket is allocated whole on each GPU (_setup_for_real_optimizer in runtime/zero/stage3.py).

    Stages 1 and 2 keep two where communication overlaps (setup_buckets in runtime/zero/stage_1_and_2.py).
    """
    path = f"{ZERO}.reduce_bucket_size"
    size = context.integer(path)
    if size is None or not context.stage or context.precision is None:
        return
    if context.flag(f"{ZERO}.contiguous_gradients") is False and device(context, OPTIMIZER) is None:
        return
    count = 2 if context.flag(OVERLAP) and context.stage < 3 else 1
    gib = size * BYTES[context.precision] * count / GIB
    if gib >= BIG_BUCKET_GIB:
        twice = ", twice as communication overlaps" if count == 2 else ""
        yield Hit(
            path,
            f"{size} elements take {gib:.1f} GiB on each GPU{twice}",
            "5e7 to 5e8 is usual, and seldom slower.",
        )


@rule(
    "DS216",
    "warning",
    bad=[
        {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 2e9}},
        {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 49999999}},
        {"zero_optimization": {"stage": 3, "max_live_parameters": 100, "prefetch_bucket_size": 101}},
    ],
    good=[
        {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 1e9}},
        {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 50000000}},
        {
            "_for": "hf",
            "zero_optimization": {
                "stage": 3,
                "stage3_max_live_parameters": 10,
                "stage3_prefetch_bucket_size": "auto",
            },
        },
        {"zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": 2e9}},
    ],
)
def prefetch_above_what_may_live(context: Context) -> Iterator[Hit]:
    """No more is fetched ahead than may be live at all (fetch_sub_module in partitioned_param_coordinator.py)."""
    live, ahead = value_or_default(context, LIVE), value_or_default(context, PREFETCH)
    if context.stage == 3 and live is not None and ahead is not None and ahead > live:
        path = LIVE if context.has(LIVE) and not context.has(PREFETCH) else PREFETCH
        yield Hit(
            written(context, path),
            f"{ahead:.0f} elements are to be fetched ahead and only {live:.0f} may be live",
            f"Set stage3_prefetch_bucket_size to {live:.0f} or less, or stage3_max_live_parameters to "
            f"{ahead:.0f} or more.",
        )


@rule(
    "DS217",
    "warning",
    bad=[
        {"zero_optimization": {"stage": 3, "stage3_model_persistence_threshold": 99999}},
        {
            "zero_optimization": {
                "stage": 3,
                "param_persistence_threshold": 11,
                "model_persistence_threshold": 10,
            }
        },
    ],
    good=[
        {"zero_optimization": {"stage": 3, "stage3_model_persistence_threshold": 100000}},
        {
            "zero_optimization": {
                "stage": 3,
                "param_persistence_threshold": 10,
                "model_persistence_threshold": 10,
            }
        },
        {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10000000000}},
        {"zero_optimization": {"stage": 2, "stage3_model_persistence_threshold": 99999}},
    ],
)
def weight_threshold_above_the_model_s(context: Context) -> Iterator[Hit]:
    """A weight above the model's limit is always partitioned (mark_persistent_parameters, parameter_offload.py)."""
    path, limit = f"{ZERO}.stage3_param_persistence_threshold", f"{ZERO}.stage3_model_persistence_threshold"
    one, whole = value_or_default(context, path), value_or_default(context, limit)
    if context.stage == 3 and one is not None and whole is not None and one > whole:
        yield Hit(
            written(context, limit),
            f"{whole:.0f} for all weights is below stage3_param_persistence_threshold, {one:.0f} for each",
            f"Set it to {one:.0f} or more, or the threshold of one weight to {whole:.0f} or less.",
        )


@rule(
    "DS218",
    "warning",
    bad=[
        {"zero_optimization": {"stage": 2, "ignore_unused_parameters": False}},
        {
            "zero_optimization": {
                "stage": 2,
                "contiguous_gradients": False,
                "offload_optimizer": {"device": "cpu"},
            }
        },
    ],
    good=[
        {
            "zero_optimization": {
                "stage": 2,
                "ignore_unused_parameters": False,
                "offload_optimizer": {"device": "cpu"},
            }
        },
        {"zero_optimization": {"stage": 1, "contiguous_gradients": False}},
        {"zero_optimization": {"stage": 2, "ignore_unused_parameters": True}},
        {
            "zero_optimization": {
                "stage": 3,
                "contiguous_gradients": False,
                "offload_optimizer": {"device": "cpu"},
            }
        },
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
        {"zero_optimization": {"stage": 3, "stage3_module_granularity_threshold": 100000}},
        {"zero_optimization": {"stage": 3, "leaf_module": {"names": ["layers.0"]}}},
        {
            "zero_optimization": {
                "stage": 3,
                "leaf_module": {"classes": ["MoeBlock"], "name_suffixes": ["mlp"]},
            }
        },
    ],
    good=[
        {"zero_optimization": {"stage": 3, "stage3_module_granularity_threshold": 0}},
        {"zero_optimization": {"stage": 3, "leaf_module": {"names": [], "classes": []}}},
        {"zero_optimization": {"stage": 2, "stage3_module_granularity_threshold": 100000}},
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
        if given:
            shown = given if isinstance(given, str) else ", ".join(map(str, given))
            yield Hit(
                f"{LEAVES}.{key}",
                f"{shown}: one that is a single layer fails, and one that isn't in the model is only logged",
                "Name blocks that hold several layers, as the model's named_modules() calls them.",
            )
