"""DS22x and DS23x: offload to CPU memory and to NVMe."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import PurePosixPath

from dsrun.config import schema
from dsrun.config.rules.frame import DIFFERS, FAILS, REFUSED, Context, Edit, Fix, Hit, rule
from dsrun.config.rules.zero import (
    BYTES,
    GATHER,
    GIB,
    OLD_GATHER,
    OPTIMIZER,
    PARAMETERS,
    STAGE,
    ZERO,
    device,
    named,
    removal,
    setting,
    value_or_default,
    written,
)

AIO = "aio"
SECTIONS = (OPTIMIZER, PARAMETERS)
NVME_KEYS = {
    OPTIMIZER: ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init"),
    PARAMETERS: ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"),
}
STATES = {"adam": 4, "adamw": 4, "adagrad": 3, "lion": 4}
"""Tensors of a swapped sub-group: the weights, the gradient and the moments, of which Lion keeps one unused."""

FEWEST_STATES = 2

OLD_FLAGS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
SMALLEST_SWAP_BYTES = 1024**2
SECTOR_BYTES = 512
FEW_ELEMENTS = 1_000_000
BIG_PINNED_GIB = 8
PSEUDO_FOLDERS = ("/proc", "/sys")
IN_MEMORY = "/dev/shm"  # noqa: S108 - looked for, not written to
NO_FOLDER = ("", "none", "None")


def _on_nvme(context: Context, section: str) -> bool:
    """Whether a section's device is nvme where that means something, in stage 3."""
    return context.stage == 3 and device(context, section) == "nvme"


def _optimizer_name(context: Context) -> str | None:
    """The optimizer's name in small letters; without a section HF Trainer's becomes DeepSpeedCPUAdam."""
    if not context.section("optimizer"):
        return "adam" if context.by_trainer else None
    name = context.text("optimizer.type")
    return name.lower() if name else None


def _smallest_swap(context: Context) -> int:
    """Bytes below which a tensor stays in memory."""
    return max(SMALLEST_SWAP_BYTES, context.integer(f"{AIO}.block_size") or 0)


@rule(
    "DS221",
    "error",
    DIFFERS,
    bad=[
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        {"zero_optimization": {"stage": 1, "offload_param": {"device": "nvme"}}},
        {"zero_optimization": {"offload_param": {"device": "cpu"}}},
        {"zero_optimization": {"stage": 2, "cpu_offload_param": True}},
    ],
    good=[
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "none"}}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        {"zero_optimization": {"stage": 2, "cpu_offload_param": False}},
    ],
)
def parameters_below_stage_3(context: Context) -> Iterator[Hit]:
    """offload_param is read in stage 3 only; below it nothing is said or offloaded (runtime/engine.py)."""
    where = device(context, PARAMETERS)
    if context.stage < 3 and where:
        yield Hit(
            PARAMETERS if context.has(PARAMETERS) else f"{ZERO}.cpu_offload_param",
            f"stage {context.stage} has no use for it: the weights stay on the GPU, not on {where}",
            "Set zero_optimization.stage to 3, or remove it.",
            setting(context, STAGE, 3),
        )


@rule(
    "DS222",
    "error",
    DIFFERS,
    bad=[
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
        {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}},
        {"zero_optimization": {"cpu_offload": True}},
    ],
    good=[
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "none"}}},
    ],
)
def optimizer_at_stage_0(context: Context) -> Iterator[Hit]:
    """Stage 0 builds the CPU's Adam but leaves the gradients on the GPU (runtime/engine.py)."""
    if context.stage == 0 and device(context, OPTIMIZER):
        yield Hit(
            OPTIMIZER if context.has(OPTIMIZER) else f"{ZERO}.cpu_offload",
            "needs ZeRO, and the stage is 0",
            "Set zero_optimization.stage to 1, 2 or 3, or remove it.",
            setting(context, STAGE, 2),
        )


@rule(
    "DS223",
    "error",
    FAILS,
    bad=[
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": None}}},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": ""}}},
        {"_for": "hf"}
        | {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "none"}}},
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/proc/x"}}},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/sys"}}},
    ],
    good=[
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "nvme_path": None}}},
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/process"}}},
    ],
)
def nvme_without_path(context: Context) -> Iterator[Hit]:
    """A missing folder fails once the model is loaded (runtime/zero/stage3.py, partition_parameters.py).

    accelerate's own default is the text "none" (accelerate/utils/dataclasses.py), which then is a folder's name.
    """
    for section in SECTIONS:
        path = f"{section}.nvme_path"
        if not _on_nvme(context, section) or context.is_auto(path):
            continue
        folder = context.text(path)
        advice = "Name a folder on a local NVMe disk, such as /nvme/swap."
        if folder is None:
            yield Hit(path, "device is nvme and no folder is given", advice)
        elif folder in NO_FOLDER:
            where = "the folder a rank is started in" if not folder else f"a folder called {folder}"
            yield Hit(path, f'is "{folder}": swaps to {where}', advice, effect=DIFFERS)
        elif any(PurePosixPath(folder).is_relative_to(name) for name in PSEUDO_FOLDERS):
            yield Hit(path, f"{folder} is on no disk: nothing can be written there", advice)


@rule(
    "DS224",
    "error",
    DIFFERS,
    bad=[
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}},
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
    ],
    good=[
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    ],
)
def nvme_below_stage_3(context: Context) -> Iterator[Hit]:
    """Stages 1 and 2 take nvme for cpu: nothing is written to disk (runtime/zero/stage_1_and_2.py)."""
    path = f"{OPTIMIZER}.device"
    if context.text(path) == "nvme" and context.stage in (1, 2):
        yield Hit(
            path,
            f"stage {context.stage} takes nvme for cpu: the optimizer stays in memory",
            "Set zero_optimization.stage to 3, or device to cpu.",
            setting(context, path, "cpu"),
        )


@rule(
    "DS225",
    "error",
    FAILS,
    bad=[
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 3},
            },
        },
        {
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "pipeline_read": True},
            },
        },
        {
            "_for": "hf",
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": "/nvme",
                    "buffer_count": 7,
                    "pipeline_write": True,
                },
            },
        },
        {
            "optimizer": {"type": "Adagrad", "params": {"lr": 1e-4}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 2},
            },
        },
        {
            "optimizer": {"type": "Lion", "params": {"lr": 1e-4}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": "/nvme",
                    "buffer_count": 7,
                    "pipeline_read": True,
                },
            },
        },
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 0},
            }
        },
    ],
    good=[
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
            },
        },
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": "/nvme",
                    "buffer_count": 8,
                    "pipeline_read": True,
                    "pipeline_write": True,
                },
            },
        },
        {
            "optimizer": {"type": "Adagrad", "params": {"lr": 1e-4}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 3},
            },
        },
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "buffer_count": 1, "pipeline_read": True},
            }
        },
    ],
)
def too_few_optimizer_buffers(context: Context) -> Iterator[Hit]:
    """Weight, gradient and moments of a sub-group are swapped together; too few buffers and an early step dies.

    Reading or writing ahead keeps a second sub-group in memory (partitioned_optimizer_swapper.py and
    pipelined_optimizer_swapper.py in runtime/swap_tensor). An optimizer that isn't in the config is taken for Adam,
    and that makes it a warning.
    """
    if not _on_nvme(context, OPTIMIZER):
        return
    path = f"{OPTIMIZER}.buffer_count"
    name = _optimizer_name(context)
    count = value_or_default(context, path)
    states = STATES.get(name or "adam", FEWEST_STATES)
    if count is None:
        return
    ahead = any(context.flag(f"{OPTIMIZER}.{key}") for key in ("pipeline_read", "pipeline_write"))
    needed = states * (2 if ahead else 1)
    if count < needed:
        why = f"{name or 'Adam'} swaps {states} tensors of each sub-group"
        yield Hit(
            path,
            f"{count:.0f} is too few: {why}{', and a second one ahead' if ahead else ''}",
            f"Set it to {needed} or more.",
            setting(context, path, needed),
            severity=None if name or not count else "warning",
        )


@rule(
    "DS226",
    "warning",
    bad=[
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "swap"}}},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "~/swap"}}},
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": f"{IN_MEMORY}/swap"},
            }
        },
    ],
    good=[
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/swap"}}},
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "nvme_path": "swap"}}},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/dev/nvme0"}}},
    ],
)
def nvme_path_elsewhere(context: Context) -> Iterator[Hit]:
    """The path is joined as it stands, in each rank's own folder; ~ and variables aren't expanded.

    Source: _configure_aio in runtime/swap_tensor/partitioned_param_swapper.py, runtime/zero/stage3.py.
    """
    for section in SECTIONS:
        path = f"{section}.nvme_path"
        folder = context.text(path) or ""
        if not _on_nvme(context, section) or folder in NO_FOLDER:
            continue
        if folder.startswith(("~", "$")):
            text, advice = (
                f"{folder} isn't expanded: a folder of that very name is made",
                "Give the whole path.",
            )
        elif not PurePosixPath(folder).is_absolute():
            text, advice = f"{folder} depends on where a rank is started", "Give the whole path."
        elif PurePosixPath(folder).is_relative_to(IN_MEMORY):
            text, advice = f"{folder} is memory, not a disk", "Name a disk's folder, or set device to cpu."
        else:
            continue
        yield Hit(path, text, advice)


@rule(
    "DS227",
    "error",
    REFUSED,
    bad=[
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none", "ratio": 0}}},
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"ratio": 0.99}}},
    ],
    good=[
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 1.0}}},
    ],
    since=(0, 12),
)
def part_of_the_optimizer_below_stage_3(context: Context) -> Iterator[Hit]:
    """Partial offload is asserted to be stage 3's, whatever the device (offload_ratio_check, zero/config.py)."""
    path = f"{OPTIMIZER}.ratio"
    share = context.number(path)
    if share is not None and share < 1 and context.stage < 3:
        yield Hit(
            path,
            f"{share:g} needs stage 3, and the stage is {context.stage}",
            "Set zero_optimization.stage to 3, or ratio to 1.",
            setting(context, path, 1),
        )


@rule(
    "DS228",
    "error",
    FAILS,
    bad=[
        {
            "optimizer": {"type": "Adagrad", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        },
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        },
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none", "ratio": 0.5}}},
    ],
    good=[
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        },
        {
            "optimizer": {"type": "Adagrad", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1}},
        },
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}}},
    ],
    since=(0, 12),
)
def part_of_another_optimizer(context: Context) -> Iterator[Hit]:
    """The part on the GPU is an AdamW made after DeepSpeedCPUAdam's fields (__init__ in runtime/zero/stage3.py)."""
    path = f"{OPTIMIZER}.ratio"
    share = context.number(path)
    if context.stage != 3 or share is None or share >= 1:
        return
    name = _optimizer_name(context)
    torch_s = bool(context.flag("optimizer.params.torch_adam"))
    if device(context, OPTIMIZER) is None:
        yield Hit(
            path,
            f"{share:g} has no effect: nothing is offloaded",
            "Remove it, or set device to cpu.",
            removal(context, path),
            severity="warning",
        )
    elif torch_s or name not in (None, "adam", "adamw"):
        whose = "torch's Adam" if torch_s else context.text("optimizer.type")
        yield Hit(
            path,
            f"{share:g} works with DeepSpeed's Adam only, not with {whose}",
            "Set ratio to 1, or the optimizer to AdamW.",
            setting(context, path, 1),
        )


@rule(
    "DS229",
    "error",
    FAILS,
    bad=[
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}}
        | {"_device": "cpu"},
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none", "super_offload": True}}},
        {
            "optimizer": {"type": "Lion", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}},
        },
    ],
    good=[
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}}
        | {"_device": "cuda", "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": False}}},
    ],
    since=(0, 18),
)
def super_offload_elsewhere(context: Context) -> Iterator[Hit]:
    """Stage 3's own optimizer class, for CUDA, the CPU's Adam and nothing else (superoffload_stage3.py).

    Below stage 3 it isn't looked at (_configure_zero_optimizer in runtime/engine.py).
    """
    path = f"{OPTIMIZER}.super_offload"
    if not context.flag(path):
        return
    off = removal(context, path).edits
    if context.stage < 3:
        yield Hit(
            path,
            f"has no effect at stage {context.stage}",
            "Set zero_optimization.stage to 3, or remove it.",
            Fix(off, safe=False),
            effect=DIFFERS,
        )
    elif context.setting.device == "cpu":
        yield Hit(path, "needs NVIDIA GPUs, and there are none", "Remove it.", Fix(off, safe=False))
    elif device(context, OPTIMIZER) != "cpu":
        where = device(context, OPTIMIZER) or "none"
        yield Hit(path, f"needs device cpu, and it is {where}", "Set device to cpu, or remove super_offload.")
    elif (name := _optimizer_name(context)) not in (None, "adam", "adamw"):
        yield Hit(path, f"works with Adam only, not with {name}", "Remove it, or set the optimizer to AdamW.")


@rule(
    "DS230",
    "warning",
    bad=[
        {"zero_optimization": {"stage": 2, "cpu_offload": True}},
        {"zero_optimization": {"stage": 3, "cpu_offload_param": True}},
        {"zero_optimization": {"stage": 2, "cpu_offload": False}},
        {"zero_optimization": {"stage": 2, "cpu_offload_use_pin_memory": True}},
        {"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}},
    ],
    good=[
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}},
    ],
)
def old_offload_keys(context: Context) -> Iterator[Hit]:
    """The old flags still work, with a warning in the log; pinned memory's does nothing (runtime/zero/config.py).

    What they become is in _process_deprecated_field of runtime/config_utils.py.
    """
    for key, new in OLD_FLAGS.items():
        path = f"{ZERO}.{key}"
        value = context.flag(path)
        if value is None or context.has(f"{ZERO}.{new}"):
            continue
        edits = (Edit("remove", path), *([Edit("add", f"{ZERO}.{new}", {"device": "cpu"})] if value else []))
        advice = f'Write {new}: {{"device": "cpu"}}.' if value else "Remove it."
        yield Hit(path, f"is the old form of {new}", advice, Fix(edits))
    path = f"{ZERO}.cpu_offload_use_pin_memory"
    if context.flag(path) is not None:
        advice = "Remove it; offload_optimizer and offload_param have pin_memory, which is true by default."
        yield Hit(path, "is an old key without effect", advice, removal(context, path))
    if context.flag(OLD_GATHER) is not None and not context.has(GATHER):
        name = GATHER.rpartition(".")[2]
        fix = Fix((Edit("rename", OLD_GATHER, name),))
        yield Hit(OLD_GATHER, f"is the old name of {name}", f"Call it {name}.", fix)


@rule(
    "DS231",
    "error",
    REFUSED,
    bad=[
        {"zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}},
        {"zero_optimization": {"stage": 3, "cpu_offload_param": False, "offload_param": {"device": "cpu"}}},
        {
            "zero_optimization": {
                "stage": 3,
                "stage3_gather_fp16_weights_on_model_save": True,
                "stage3_gather_16bit_weights_on_model_save": True,
            }
        },
    ],
    good=[
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        {"zero_optimization": {"stage": 2, "cpu_offload": True}},
        {
            "zero_optimization": {
                "stage": 2,
                "cpu_offload_use_pin_memory": True,
                "offload_optimizer": {"device": "cpu"},
            }
        },
    ],
)
def old_key_beside_the_new(context: Context) -> Iterator[Hit]:
    """Both forms of one setting stop the start, whatever they say (runtime/config_utils.py)."""
    pairs = {f"{ZERO}.{old}": f"{ZERO}.{new}" for old, new in OLD_FLAGS.items()} | {OLD_GATHER: GATHER}
    for old, new in pairs.items():
        if context.has(old) and context.has(new) and not context.is_auto(old) and not context.is_auto(new):
            name = written(context, new).rpartition(".")[2]
            yield Hit(
                old,
                f"stands beside {name}, its new form",
                f"Keep {name} only.",
                Fix(removal(context, old).edits, safe=False),
            )


@rule(
    "DS232",
    "warning",
    bad=[
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "nvme_path": "/nvme", "buffer_count": 4},
            }
        },
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "max_in_cpu": 1e9}}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pipeline_read": True}}},
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none", "fast_init": True}}},
    ],
    good=[
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "nvme_path": None}}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pipeline_read": False}}},
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 4},
            }
        },
        {"_for": "hf", "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 1}}},
    ],
)
def nvme_keys_without_nvme(context: Context) -> Iterator[Hit]:
    """Buffers, pipelines and paths belong to the swappers, which device nvme alone makes.

    Source: _configure_tensor_swapping in runtime/zero/stage3.py, Init.__init__ in partition_parameters.py.
    """
    for section, keys in NVME_KEYS.items():
        if device(context, section) == "nvme" or context.is_auto(f"{section}.device"):
            continue
        given = [key for key in keys if context.section(section).get(key) not in (None, False, schema.AUTO)]
        if given:
            yield Hit(
                section,
                f"{named(given)}: without effect while device is {device(context, section) or 'none'}",
                "Remove what belongs to NVMe, or set device to nvme.",
                removal(context, *(f"{section}.{key}" for key in given)),
            )


@rule(
    "DS233",
    "warning",
    bad=[
        {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
            "aio": {"queue_depth": 16},
        },
        {
            "zero_optimization": {"stage": 2, "offload_param": {"device": "none", "nvme_path": None}},
            "aio": {"block_size": 1048576},
        },
        {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"use_gds": True},
            "_device": "cuda",
        },
    ],
    good=[
        {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"queue_depth": 16, "use_gds": False},
        },
        {
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"use_gds": True},
        },
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "aio": {}},
    ],
)
def aio_without_nvme(context: Context) -> Iterator[Hit]:
    """Only the swappers of NVMe read it, and GPUDirect only that of the weights.

    Source: runtime/swap_tensor/partitioned_param_swapper.py and partitioned_optimizer_swapper.py.
    """
    used = [section for section in SECTIONS if _on_nvme(context, section)]
    open_ = any(context.is_auto(f"{section}.device") for section in SECTIONS)
    gds = f"{AIO}.use_gds"
    known = [key for key in context.section(AIO) if context.schema.node(f"{AIO}.{key}")]
    if known and not used and not open_:
        yield Hit(
            AIO,
            "has no effect: nothing is offloaded to nvme",
            "Remove it, or set a device to nvme at stage 3.",
            removal(context, AIO),
        )
    elif context.flag(gds) and used == [OPTIMIZER]:
        yield Hit(
            gds,
            "has no effect: only offload_param uses GPUDirect Storage",
            "Remove it.",
            removal(context, gds),
        )


@rule(
    "DS234",
    "error",
    FAILS,
    bad=[
        {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"block_size": 0},
        },
        {
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"intra_op_parallelism": 0, "queue_depth": 0},
        },
        {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"block_size": 1000000},
        },
    ],
    good=[
        {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"block_size": 512, "intra_op_parallelism": 1, "queue_depth": 1},
        },
        {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"block_size": 1049088},
        },
    ],
)
def aio_sizes(context: Context) -> Iterator[Hit]:
    """Requests go past the page cache, in whole sectors: at other sizes what is read back is something else, to NaN.

    So it is with no requests in the queue; a block of 0 ends the process (csrc/aio), and parallelism of 0 divides
    (_io_aligned_numel in runtime/swap_tensor/optimizer_utils.py).
    """
    if not any(_on_nvme(context, section) for section in SECTIONS):
        return
    harms = {
        "block_size": ("the first read or write ends the process", FAILS),
        "intra_op_parallelism": ("the sizes of the requests are divided by it", FAILS),
        "queue_depth": ("nothing is read, and the weights become NaN", DIFFERS),
    }
    for key, (harm, effect) in harms.items():
        path = f"{AIO}.{key}"
        value = context.integer(path)
        if value is None:
            continue
        if value < 1:
            default, _ = context.schema.describe(path)
            advice = f"Set it to {default}, the default, or remove it."
            yield Hit(path, f"is {value}: {harm}", advice, setting(context, path, default), effect=effect)
        elif key == "block_size" and value % SECTOR_BYTES:
            near = value // SECTOR_BYTES * SECTOR_BYTES or SECTOR_BYTES
            yield Hit(
                path,
                f"{value} is no multiple of {SECTOR_BYTES}: the weights that are read back are wrong",
                f"Set it to {near}, or 1048576, the default.",
                setting(context, path, near),
                effect=DIFFERS,
            )


@rule(
    "DS235",
    "error",
    REFUSED,
    bad={
        "_device": "cpu",
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
        "aio": {"use_gds": True},
    },
    good=[
        {
            "_device": "cuda",
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"use_gds": True},
        },
        {
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"use_gds": True},
        },
        {
            "_device": "cpu",
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"use_gds": False},
        },
    ],
)
def gds_without_gpu(context: Context) -> Iterator[Hit]:
    """GPUDirect Storage is asserted to be CUDA's (get_aio_config in runtime/swap_tensor/aio_config.py)."""
    path = f"{AIO}.use_gds"
    if context.flag(path) and context.setting.device == "cpu":
        yield Hit(
            path,
            "needs NVIDIA GPUs, and there are none",
            "Set it to false.",
            setting(context, path, value=False),
        )


@rule(
    "DS236",
    "error",
    FAILS,
    bad=[
        {
            "_model": {"largest_parameter": 4194304},
            "_world_size": 2,
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 2097151},
            },
        },
        {
            "_model": {"largest_parameter": 400000001},
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
        },
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 262143},
            },
        },
        {
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 524287},
            },
        },
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 999999},
            },
        },
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 0},
            },
        },
    ],
    good=[
        {
            "_model": {"largest_parameter": 4194304},
            "_world_size": 2,
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 2097152},
            },
        },
        {
            "_model": {"largest_parameter": 400000000},
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
        },
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 1000000},
            },
        },
        {
            "_model": {"largest_parameter": 1200000},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 300000},
            },
        },
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 1},
            },
        },
    ],
)
def small_parameter_buffer(context: Context) -> Iterator[Hit]:
    """A buffer holds one GPU's part of one weight, of 1 MiB or more: smaller ones aren't swapped.

    Source: get_buffer and swappable_tensor in runtime/swap_tensor/partitioned_param_swapper.py.
    """
    path, count = f"{PARAMETERS}.buffer_size", f"{PARAMETERS}.buffer_count"
    size = value_or_default(context, path)
    if not _on_nvme(context, PARAMETERS) or size is None:
        return
    if context.integer(count) == 0:
        yield Hit(count, "is 0: no weight can be swapped", "Set it to 5, the default.", effect=DIFFERS)
        return
    model, world = context.setting.model, context.world_size
    least = math.ceil(_smallest_swap(context) / BYTES[context.precision or "fp32"])
    largest = model.largest_parameter if model else None
    part = math.ceil(largest / world) if largest and world else None
    if part is not None and part < least:
        yield Hit(
            path,
            f"a GPU's part of the largest weight, {part} elements, is too small to be swapped: all stay in memory",
            "Set device to cpu.",
            severity="note",
        )
    elif part is not None and size < part:
        yield Hit(
            path,
            f"{size:.0f} elements don't hold a GPU's part of the largest weight, {part}",
            f"Set it to {part} or more.",
            setting(context, path, part),
        )
    elif part is None and size < least:
        yield Hit(
            path,
            f"{size:.0f} elements: no weight that is swapped, {least} elements and more, fits",
            "Set it to one GPU's part of the largest weight or more; the default is 100000000.",
            effect=DIFFERS,
        )
    elif part is None and size < FEW_ELEMENTS:
        yield Hit(
            path,
            f"{size:.0f} elements hold no large weight",
            "It counts elements: set it to the largest weight's, divided by the number of GPUs, or more.",
            severity="warning",
        )


@rule(
    "DS237",
    "warning",
    bad=[
        {
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 858993460},
            },
        },
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 22},
            },
        },
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
            },
        },
    ],
    good=[
        {
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 858993459},
            },
        },
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 21},
            },
        },
        {
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 536870911,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
            },
        },
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
    ],
)
def pinned_swap_buffers(context: Context) -> Iterator[Hit]:
    """Each rank pins buffer_count buffers at the start: of buffer_size for weights, of a sub-group for the optimizer.

    Source: _configure_aio in partitioned_param_swapper.py, SwapBufferManager in runtime/swap_tensor/utils.py. A
    sub-group is no larger than one GPU's part of the model, which isn't known here: of it this is a note.
    """
    for section, elements in (
        (PARAMETERS, f"{PARAMETERS}.buffer_size"),
        (OPTIMIZER, f"{ZERO}.sub_group_size"),
    ):
        path = f"{section}.buffer_count"
        count, size = value_or_default(context, path), value_or_default(context, elements)
        element = 4 if section == OPTIMIZER else BYTES.get(context.precision or "")
        if not _on_nvme(context, section) or count is None or size is None or element is None:
            continue
        gib = count * size * element / GIB
        if gib >= BIG_PINNED_GIB:
            up_to = "up to " if section == OPTIMIZER else ""
            name = elements.rpartition(".")[2]
            yield Hit(
                section,
                f"{count:.0f} buffers of {size:.0f} elements pin {up_to}{gib:.1f} GiB of memory for each GPU",
                f"Lower {name} or buffer_count if the node hasn't got that for all its GPUs.",
                severity="note" if section == OPTIMIZER else None,
            )


@rule(
    "DS238",
    "warning",
    bad=[
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "fast_init": True},
            }
        },
        {
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 100000001,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "fast_init": True},
                "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
            }
        },
    ],
    good=[
        {
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 100000000,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "fast_init": True},
                "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
            }
        },
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "fast_init": False},
            }
        },
    ],
)
def fast_init_without_room(context: Context) -> Iterator[Hit]:
    """It fills sub-groups through the weights' buffers: those must be there, and as large (stage3.py).

    Source: _create_fp32_partitions in runtime/zero/stage3.py and _initialize_from_swapped_fp16_params in
    runtime/swap_tensor/optimizer_utils.py.
    """
    path = f"{OPTIMIZER}.fast_init"
    if not (context.flag(path) and _on_nvme(context, OPTIMIZER)):
        return
    group = value_or_default(context, f"{ZERO}.sub_group_size")
    buffer = value_or_default(context, f"{PARAMETERS}.buffer_size")
    if not _on_nvme(context, PARAMETERS):
        yield Hit(
            path,
            "has no effect unless offload_param is on nvme as well",
            "Remove it.",
            removal(context, path),
        )
    elif group is not None and buffer is not None and buffer < group:
        yield Hit(
            path,
            f"stops where a sub-group, up to {group:.0f} elements, is larger than offload_param.buffer_size, "
            f"{buffer:.0f}",
            f"Set sub_group_size to {buffer:.0f}, or fast_init to false.",
        )


@rule(
    "DS239",
    "note",
    bad=[
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}},
        {
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"block_size": 8388608},
        },
        {
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 262143,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
            },
            "aio": {"queue_depth": 32},
        },
    ],
    good=[
        {
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 262144,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
            },
            "aio": {"block_size": 1048576},
        },
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
    ],
)
def what_nvme_leaves_in_memory(context: Context) -> Iterator[Hit]:
    """Tensors under 1 MiB and under aio.block_size aren't swapped (is_swappable_tensor in optimizer_utils.py).

    aio's defaults are modest; ds_nvme_tune measures what a disk takes (runtime/swap_tensor/aio_config.py).
    """
    sections = [section for section in SECTIONS if _on_nvme(context, section)]
    if not sections:
        return
    block = _smallest_swap(context)
    group = context.integer(f"{ZERO}.sub_group_size")
    if not context.section(AIO):
        yield Hit(
            AIO,
            "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
            "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
        )
    if block > SMALLEST_SWAP_BYTES:
        yield Hit(
            f"{AIO}.block_size",
            f"tensors under {block / SMALLEST_SWAP_BYTES:g} MiB stay in memory",
            "Set it to 1048576 to swap all from 1 MiB on.",
        )
    if OPTIMIZER in sections and group is not None and group * 4 < block:
        yield Hit(
            f"{ZERO}.sub_group_size",
            f"sub-groups of {group} elements are under {block / SMALLEST_SWAP_BYTES:g} MiB, and stay in memory",
            "Set it to 1e8 or more for the optimizer to leave memory.",
        )
