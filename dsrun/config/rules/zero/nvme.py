"""DS223 to DS226, DS232 and DS236 to DS239: what is swapped to NVMe."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import PurePosixPath

from dsrun.config.rules import conditions as when
from dsrun.config.rules.common import (
    AIO,
    BYTES,
    OFFLOADS,
    OPTIMIZER,
    PARAMETERS,
    ZERO,
    device,
    no_effect,
    on_nvme,
    removal,
    set_to,
    value_or_default,
)
from dsrun.config.rules.examples import CPU, bf16, made, nvme, zero
from dsrun.config.rules.frame import DIFFERS, FAILS, Context, Finding, bad, good, rule
from dsrun.config.rules.kinds import Table, put, report
from dsrun.config.rules.zero.offload import optimizer_in_use
from dsrun.config.schemas import schema
from dsrun.words import GIB, listed

NVME_KEYS = {
    OPTIMIZER: ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init"),
    PARAMETERS: ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"),
}

STATES = {"adam": 4, "adamw": 4, "adagrad": 3, "lion": 4}
"""Tensors of a swapped sub-group: the weights, the gradient and the moments, of which Lion keeps one unused."""

FEWEST_STATES = 2
SMALLEST_SWAP_BYTES = 1024**2
FEW_ELEMENTS = 1_000_000
BIG_PINNED_GIB = 8
PSEUDO_FOLDERS = ("/proc", "/sys")
IN_MEMORY = "/dev/shm"  # noqa: S108 - looked for, not written to
NO_FOLDER = ("", "none", "None")


def _smallest_swap(context: Context) -> int:
    """Bytes below which a tensor stays in memory."""
    return max(SMALLEST_SWAP_BYTES, context.integer(f"{AIO}.block_size") or 0)


@rule("DS223", FAILS)
@bad(
    zero(3, offload_optimizer={"device": "nvme"}), zero(3, offload_param={"device": "nvme", "nvme_path": ""})
)
@good(zero(3, offload_optimizer=nvme()), zero(3, offload_param={"device": "cpu", "nvme_path": None}))
def nvme_without_path(context: Context) -> Iterator[Finding]:
    """A missing folder fails once the model is loaded (runtime/zero/stage3.py, partition_parameters.py).

    accelerate's default is the string "none" (accelerate/utils/dataclasses.py), which becomes a folder's name.
    """
    for section in OFFLOADS:
        path = f"{section}.nvme_path"
        if not on_nvme(context, section) or context.is_auto(path):
            continue
        folder = context.text(path)
        advice = "Name a folder on a local NVMe disk, such as /nvme/swap."
        if folder is None:
            yield Finding(path, "is missing, but device is nvme", advice)
        elif folder in NO_FOLDER:
            where = "the folder a rank is started in" if not folder else f"a folder called {folder}"
            yield Finding(path, f'is "{folder}": swaps to {where}', advice, effect=DIFFERS)
        elif any(PurePosixPath(folder).is_relative_to(name) for name in PSEUDO_FOLDERS):
            yield Finding(path, f"{folder} is not on a disk: nothing can be written there", advice)


@rule("DS224", DIFFERS)
@bad(zero(2, offload_optimizer=nvme()), zero(1, offload_optimizer={"device": "nvme"}))
@good(zero(3, offload_optimizer=nvme()), CPU)
def nvme_below_stage_3() -> Table:
    """Stages 1 and 2 treat nvme as cpu: nothing is written to disk (runtime/zero/stage_1_and_2.py)."""
    path = f"{OPTIMIZER}.device"
    text = (
        "stage {stage} treats nvme as cpu: the optimizer stays in memory. "
        "Set zero_optimization.stage to 3, or device to cpu."
    )
    return report(path, text, (when.at_stage(1, 2), when.is_one_of(path, "nvme")), put(path, "cpu"))


@rule("DS225", FAILS)
@bad(
    {**made("AdamW", lr=1e-4), **zero(3, offload_optimizer=nvme(buffer_count=3))},
    {**made("Adam", lr=1e-4), **zero(3, offload_optimizer=nvme(pipeline_read=True))},
)
@good(
    {**made("AdamW", lr=1e-4), **zero(3, offload_optimizer=nvme())},
    {
        **made("AdamW", lr=1e-4),
        **zero(3, offload_optimizer=nvme(buffer_count=8, pipeline_read=True, pipeline_write=True)),
    },
)
def too_few_optimizer_buffers(context: Context) -> Iterator[Finding]:
    """Weight, gradient and moments of a sub-group are swapped together; with too few buffers an early step fails.

    Reading or writing ahead keeps a second sub-group in memory (partitioned_optimizer_swapper.py and
    pipelined_optimizer_swapper.py in runtime/swap_tensor). Without an optimizer in the config Adam is assumed,
    and this is a warning.
    """
    if not on_nvme(context, OPTIMIZER):
        return
    path = f"{OPTIMIZER}.buffer_count"
    name = optimizer_in_use(context)
    count = value_or_default(context, path)
    states = STATES.get(name or "adam", FEWEST_STATES)
    if count is None:
        return
    ahead = any(context.flag(f"{OPTIMIZER}.{key}") for key in ("pipeline_read", "pipeline_write"))
    needed = states * (2 if ahead else 1)
    if count < needed:
        why = f"{name or 'Adam'} swaps {states} tensors of each sub-group"
        yield Finding(
            path,
            f"{count:.0f} is too few: {why}{', and prefetches a second one' if ahead else ''}",
            f"Set it to {needed} or more.",
            set_to(context, path, needed),
            severity="" if name or not count else "warning",
        )


@rule("DS226", "warning")
@bad(
    zero(3, offload_optimizer={"device": "nvme", "nvme_path": "swap"}),
    zero(3, offload_param={"device": "nvme", "nvme_path": "~/swap"}),
)
@good(
    zero(3, offload_optimizer={"device": "nvme", "nvme_path": "/swap"}),
    zero(3, offload_optimizer={"device": "cpu", "nvme_path": "swap"}),
)
def unreliable_nvme_path(context: Context) -> Iterator[Finding]:
    """The path is used as written, relative to each rank's own folder; ~ and variables aren't expanded.

    Source: _configure_aio in runtime/swap_tensor/partitioned_param_swapper.py, runtime/zero/stage3.py.
    """
    for section in OFFLOADS:
        path = f"{section}.nvme_path"
        folder = context.text(path) or ""
        if not on_nvme(context, section) or folder in NO_FOLDER:
            continue
        if folder.startswith(("~", "$")):
            text, advice = (
                f"{folder} isn't expanded: a folder with that name is made",
                "Write the absolute path.",
            )
        elif not PurePosixPath(folder).is_absolute():
            text, advice = (
                f"{folder} is relative to the folder a rank is started in",
                "Write the absolute path.",
            )
        elif PurePosixPath(folder).is_relative_to(IN_MEMORY):
            text, advice = f"{folder} is memory, not a disk", "Name a disk's folder, or set device to cpu."
        else:
            continue
        yield Finding(path, text, advice)


@rule("DS232", "note")
@bad(
    zero(3, offload_optimizer={"device": "cpu", "nvme_path": "/nvme", "buffer_count": 4}),
    zero(3, offload_param={"device": "cpu", "max_in_cpu": 1e9}),
)
@good(
    zero(3, offload_param={"device": "cpu", "nvme_path": None}),
    zero(2, offload_optimizer={"device": "cpu", "pipeline_read": False}),
)
def nvme_keys_without_nvme(context: Context) -> Iterator[Finding]:
    """Buffers, pipelines and paths belong to the swappers, which only device nvme creates.

    Source: _configure_tensor_swapping in runtime/zero/stage3.py, Init.__init__ in partition_parameters.py.
    """
    for section, keys in NVME_KEYS.items():
        if device(context, section) == "nvme" or context.is_auto(f"{section}.device"):
            continue
        given = [key for key in keys if context.section(section).get(key) not in (None, False, schema.AUTO)]
        if given:
            yield Finding(
                section,
                f"{listed(given)}: no effect while device is {device(context, section) or 'none'}",
                "Remove what belongs to NVMe, or set device to nvme.",
                removal(context, *(f"{section}.{key}" for key in given)),
            )


@rule("DS236", FAILS)
@bad(
    {
        "_model": {"largest_parameter": 4194304},
        "_world_size": 2,
        **zero(3, offload_param=nvme(buffer_size=2097151)),
    },
    zero(3, offload_param=nvme(buffer_size=262143)),
)
@good(
    {
        "_model": {"largest_parameter": 4194304},
        "_world_size": 2,
        **zero(3, offload_param=nvme(buffer_size=2097152)),
    },
    {"_model": {"largest_parameter": 400000000}, **zero(3, offload_param=nvme())},
)
def small_parameter_buffer(context: Context) -> Iterator[Finding]:
    """A buffer holds one GPU's part of one weight of at least 1 MiB: smaller ones aren't swapped.

    Source: get_buffer and swappable_tensor in runtime/swap_tensor/partitioned_param_swapper.py.
    """
    path, count = f"{PARAMETERS}.buffer_size", f"{PARAMETERS}.buffer_count"
    size = value_or_default(context, path)
    if not on_nvme(context, PARAMETERS) or size is None:
        return
    if context.integer(count) == 0:
        yield Finding(count, "is 0: no weight can be swapped", "Set it to 5, the default.", effect=DIFFERS)
        return
    model, world = context.setting.model, context.world_size
    least = math.ceil(_smallest_swap(context) / BYTES[context.precision or "fp32"])
    largest = model.largest_parameter if model else None
    part = math.ceil(largest / world) if largest and world else None
    if part is not None and part < least:
        yield Finding(
            path,
            f"one GPU's part of the largest weight, {part} elements, is too small to be swapped: all stay in memory",
            "Set device to cpu.",
            severity="note",
        )
    elif part is not None and size < part:
        yield Finding(
            path,
            f"{size:.0f} elements are less than one GPU's part of the largest weight, {part}",
            f"Set it to {part} or more.",
            set_to(context, path, part),
        )
    elif part is None and size < least:
        yield Finding(
            path,
            f"{size:.0f} elements: weights are swapped from {least} elements on, and none of them fits",
            "Set it to one GPU's part of the largest weight or more; the default is 100000000.",
            effect=DIFFERS,
        )
    elif part is None and size < FEW_ELEMENTS:
        yield Finding(
            path,
            f"{size:.0f} elements are too few for a large weight",
            "It counts elements: set it to at least those of the largest weight divided by the number of GPUs.",
            severity="warning",
        )


@rule("DS237", "warning")
@bad({**bf16(), **zero(3, offload_param=nvme(buffer_size=858993460))}, zero(3, offload_optimizer=nvme()))
@good(
    {**bf16(), **zero(3, offload_param=nvme(buffer_size=858993459))},
    zero(3, offload_param=nvme(buffer_count=21)),
)
def pinned_swap_buffers(context: Context) -> Iterator[Finding]:
    """Each rank pins buffer_count buffers at the start: of buffer_size for weights, of a sub-group for the optimizer.

    Source: _configure_aio in partitioned_param_swapper.py, SwapBufferManager in runtime/swap_tensor/utils.py. A
    sub-group is at most one GPU's part of the model, which isn't known here: then this is a note.
    """
    for section, elements, element in (
        (PARAMETERS, f"{PARAMETERS}.buffer_size", BYTES.get(context.precision or "")),
        (OPTIMIZER, f"{ZERO}.sub_group_size", 4),
    ):
        path = f"{section}.buffer_count"
        count, size = value_or_default(context, path), value_or_default(context, elements)
        if not on_nvme(context, section) or count is None or size is None or element is None:
            continue
        gib = count * size * element / GIB
        if gib >= BIG_PINNED_GIB:
            up_to = "up to " if section == OPTIMIZER else ""
            name = elements.rpartition(".")[2]
            yield Finding(
                section,
                f"{count:.0f} buffers of {size:.0f} elements pin {up_to}{gib:.1f} GiB of memory for each GPU",
                f"Lower {name} or buffer_count if the node doesn't have that much for all its GPUs.",
                severity="note" if section == OPTIMIZER else "",
            )


@rule("DS238", "warning")
@bad(
    zero(3, offload_optimizer=nvme(fast_init=True)),
    zero(3, sub_group_size=100000001, offload_optimizer=nvme(fast_init=True), offload_param=nvme()),
)
@good(
    zero(3, sub_group_size=100000000, offload_optimizer=nvme(fast_init=True), offload_param=nvme()),
    zero(3, offload_optimizer=nvme(fast_init=False)),
)
def fast_init_without_large_buffers(context: Context) -> Iterator[Finding]:
    """It fills sub-groups through the weights' buffers, which must exist and be at least as large (stage3.py).

    Source: _create_fp32_partitions in runtime/zero/stage3.py and _initialize_from_swapped_fp16_params in
    runtime/swap_tensor/optimizer_utils.py.
    """
    path = f"{OPTIMIZER}.fast_init"
    if not (context.flag(path) and on_nvme(context, OPTIMIZER)):
        return
    group = value_or_default(context, f"{ZERO}.sub_group_size")
    buffer = value_or_default(context, f"{PARAMETERS}.buffer_size")
    if not on_nvme(context, PARAMETERS):
        yield no_effect(context, path, " unless offload_param is on nvme too")
    elif group is not None and buffer is not None and buffer < group:
        yield Finding(
            path,
            f"fails if a sub-group, up to {group:.0f} elements, is larger than offload_param.buffer_size, "
            f"{buffer:.0f}",
            f"Set sub_group_size to {buffer:.0f}, or fast_init to false.",
        )


@rule("DS239", "note")
@bad(zero(3, offload_optimizer=nvme()), {**zero(3, offload_param=nvme()), "aio": {"block_size": 8388608}})
@good(
    {**zero(3, sub_group_size=262144, offload_optimizer=nvme()), "aio": {"block_size": 1048576}},
    zero(3, offload_optimizer={"device": "cpu"}),
)
def what_nvme_leaves_in_memory(context: Context) -> Iterator[Finding]:
    """Tensors under 1 MiB and under aio.block_size aren't swapped (is_swappable_tensor in optimizer_utils.py).

    aio's defaults are modest; ds_nvme_tune measures what a disk can do (runtime/swap_tensor/aio_config.py).
    """
    sections = [section for section in OFFLOADS if on_nvme(context, section)]
    if not sections:
        return
    block = _smallest_swap(context)
    group = context.integer(f"{ZERO}.sub_group_size")
    if not context.section(AIO):
        yield Finding(
            AIO,
            "isn't set: NVMe gets 8 requests of 1 MiB at a time, from one thread",
            "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
        )
    if block > SMALLEST_SWAP_BYTES:
        yield Finding(
            f"{AIO}.block_size",
            f"tensors under {block / SMALLEST_SWAP_BYTES:g} MiB stay in memory",
            "Set it to 1048576 to swap everything from 1 MiB on.",
        )
    if OPTIMIZER in sections and group is not None and group * 4 < block:
        yield Finding(
            f"{ZERO}.sub_group_size",
            f"sub-groups of {group} elements are under {block / SMALLEST_SWAP_BYTES:g} MiB, and stay in memory",
            "Set it to 1e8 or more to move the optimizer out of memory.",
        )
