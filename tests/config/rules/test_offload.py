# ruff: noqa: E501 - texts and paths stand here as they are shown
"""Offload: what exactly is said of a config, and that nothing is said of its right neighbour."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from dsrun.config.edits import apply
from dsrun.config.rules import offload, run
from dsrun.config.rules.frame import Fix, Rule, example

OWN = {rule.id: rule for rule in vars(offload).values() if isinstance(rule, Rule)}


class Said(NamedTuple):
    """A finding; fix is (edits, safe)."""

    rule: str
    severity: str
    effect: str
    path: str
    message: str
    suggestion: str
    fix: tuple | None = None


CASES = [
    (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        [
            Said(
                "DS221",
                "error",
                "differs",
                "zero_optimization.offload_param",
                "stage 2 has no use for it: the weights stay on the GPU, not on cpu",
                "Set zero_optimization.stage to 3, or remove it.",
                ((("replace", "zero_optimization.stage", 3),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 1, "offload_param": {"device": "nvme"}}},
        [
            Said(
                "DS221",
                "error",
                "differs",
                "zero_optimization.offload_param",
                "stage 1 has no use for it: the weights stay on the GPU, not on nvme",
                "Set zero_optimization.stage to 3, or remove it.",
                ((("replace", "zero_optimization.stage", 3),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"offload_param": {"device": "cpu"}}},
        [
            Said(
                "DS221",
                "error",
                "differs",
                "zero_optimization.offload_param",
                "stage 0 has no use for it: the weights stay on the GPU, not on cpu",
                "Set zero_optimization.stage to 3, or remove it.",
                ((("add", "zero_optimization.stage", 3),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "cpu_offload_param": True}},
        [
            Said(
                "DS221",
                "error",
                "differs",
                "zero_optimization.cpu_offload_param",
                "stage 2 has no use for it: the weights stay on the GPU, not on cpu",
                "Set zero_optimization.stage to 3, or remove it.",
                ((("replace", "zero_optimization.stage", 3),), False),
            ),
            Said(
                "DS230",
                "warning",
                "",
                "zero_optimization.cpu_offload_param",
                "is the old form of offload_param",
                'Write offload_param: {"device": "cpu"}.',
                (
                    (
                        ("remove", "zero_optimization.cpu_offload_param", None),
                        ("add", "zero_optimization.offload_param", {"device": "cpu"}),
                    ),
                    True,
                ),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, []),
    ({"zero_optimization": {"stage": 2, "offload_param": {"device": "none"}}}, []),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, []),
    (
        {"zero_optimization": {"stage": 2, "cpu_offload_param": False}},
        [
            Said(
                "DS230",
                "warning",
                "",
                "zero_optimization.cpu_offload_param",
                "is the old form of offload_param",
                "Remove it.",
                ((("remove", "zero_optimization.cpu_offload_param", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
        [
            Said(
                "DS222",
                "error",
                "differs",
                "zero_optimization.offload_optimizer",
                "needs ZeRO, and the stage is 0",
                "Set zero_optimization.stage to 1, 2 or 3, or remove it.",
                ((("replace", "zero_optimization.stage", 2),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}},
        [
            Said(
                "DS222",
                "error",
                "differs",
                "zero_optimization.offload_optimizer",
                "needs ZeRO, and the stage is 0",
                "Set zero_optimization.stage to 1, 2 or 3, or remove it.",
                ((("add", "zero_optimization.stage", 2),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"cpu_offload": True}},
        [
            Said(
                "DS222",
                "error",
                "differs",
                "zero_optimization.cpu_offload",
                "needs ZeRO, and the stage is 0",
                "Set zero_optimization.stage to 1, 2 or 3, or remove it.",
                ((("add", "zero_optimization.stage", 2),), False),
            ),
            Said(
                "DS230",
                "warning",
                "",
                "zero_optimization.cpu_offload",
                "is the old form of offload_optimizer",
                'Write offload_optimizer: {"device": "cpu"}.',
                (
                    (
                        ("remove", "zero_optimization.cpu_offload", None),
                        ("add", "zero_optimization.offload_optimizer", {"device": "cpu"}),
                    ),
                    True,
                ),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, []),
    ({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "none"}}}, []),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
        [
            Said(
                "DS223",
                "error",
                "fails",
                "zero_optimization.offload_optimizer.nvme_path",
                "device is nvme and no folder is given",
                "Name a folder on a local NVMe disk, such as /nvme/swap.",
            ),
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "4 buffers of 1000000000 elements pin up to 14.9 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": None}}},
        [
            Said(
                "DS223",
                "error",
                "fails",
                "zero_optimization.offload_param.nvme_path",
                "device is nvme and no folder is given",
                "Name a folder on a local NVMe disk, such as /nvme/swap.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": ""}}},
        [
            Said(
                "DS223",
                "error",
                "differs",
                "zero_optimization.offload_param.nvme_path",
                'is "": swaps to the folder a rank is started in',
                "Name a folder on a local NVMe disk, such as /nvme/swap.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "_for": "hf",
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "none"}},
        },
        [
            Said(
                "DS223",
                "error",
                "differs",
                "zero_optimization.offload_optimizer.nvme_path",
                'is "none": swaps to a folder called none',
                "Name a folder on a local NVMe disk, such as /nvme/swap.",
            ),
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "4 buffers of 1000000000 elements pin up to 14.9 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/proc/x"}}},
        [
            Said(
                "DS223",
                "error",
                "fails",
                "zero_optimization.offload_optimizer.nvme_path",
                "/proc/x is on no disk: nothing can be written there",
                "Name a folder on a local NVMe disk, such as /nvme/swap.",
            ),
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "4 buffers of 1000000000 elements pin up to 14.9 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/sys"}}},
        [
            Said(
                "DS223",
                "error",
                "fails",
                "zero_optimization.offload_param.nvme_path",
                "/sys is on no disk: nothing can be written there",
                "Name a folder on a local NVMe disk, such as /nvme/swap.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}},
        [
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "4 buffers of 1000000000 elements pin up to 14.9 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "nvme_path": None}}}, []),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/process"}}},
        [
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "4 buffers of 1000000000 elements pin up to 14.9 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}},
        [
            Said(
                "DS224",
                "error",
                "differs",
                "zero_optimization.offload_optimizer.device",
                "stage 2 takes nvme for cpu: the optimizer stays in memory",
                "Set zero_optimization.stage to 3, or device to cpu.",
                ((("replace", "zero_optimization.offload_optimizer.device", "cpu"),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
        [
            Said(
                "DS224",
                "error",
                "differs",
                "zero_optimization.offload_optimizer.device",
                "stage 1 takes nvme for cpu: the optimizer stays in memory",
                "Set zero_optimization.stage to 3, or device to cpu.",
                ((("replace", "zero_optimization.offload_optimizer.device", "cpu"),), False),
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 3},
            },
        },
        [
            Said(
                "DS225",
                "error",
                "fails",
                "zero_optimization.offload_optimizer.buffer_count",
                "3 is too few: adamw swaps 4 tensors of each sub-group",
                "Set it to 4 or more.",
                ((("replace", "zero_optimization.offload_optimizer.buffer_count", 4),), False),
            ),
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "3 buffers of 1000000000 elements pin up to 11.2 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "Adam", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "pipeline_read": True},
            },
        },
        [
            Said(
                "DS225",
                "error",
                "fails",
                "zero_optimization.offload_optimizer.buffer_count",
                "4 is too few: adam swaps 4 tensors of each sub-group, and a second one ahead",
                "Set it to 8 or more.",
                ((("add", "zero_optimization.offload_optimizer.buffer_count", 8),), False),
            ),
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "4 buffers of 1000000000 elements pin up to 14.9 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
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
        [
            Said(
                "DS225",
                "error",
                "fails",
                "zero_optimization.offload_optimizer.buffer_count",
                "7 is too few: adam swaps 4 tensors of each sub-group, and a second one ahead",
                "Set it to 8 or more.",
                ((("replace", "zero_optimization.offload_optimizer.buffer_count", 8),), False),
            ),
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "7 buffers of 1000000000 elements pin up to 26.1 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "Adagrad", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 2},
            },
        },
        [
            Said(
                "DS225",
                "error",
                "fails",
                "zero_optimization.offload_optimizer.buffer_count",
                "2 is too few: adagrad swaps 3 tensors of each sub-group",
                "Set it to 3 or more.",
                ((("replace", "zero_optimization.offload_optimizer.buffer_count", 3),), False),
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "Lion", "params": {"lr": 0.0001}},
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
        [
            Said(
                "DS225",
                "error",
                "fails",
                "zero_optimization.offload_optimizer.buffer_count",
                "7 is too few: lion swaps 4 tensors of each sub-group, and a second one ahead",
                "Set it to 8 or more.",
                ((("replace", "zero_optimization.offload_optimizer.buffer_count", 8),), False),
            ),
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "7 buffers of 1000000000 elements pin up to 26.1 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 0},
            }
        },
        [
            Said(
                "DS225",
                "error",
                "fails",
                "zero_optimization.offload_optimizer.buffer_count",
                "0 is too few: Adam swaps 4 tensors of each sub-group",
                "Set it to 4 or more.",
                ((("replace", "zero_optimization.offload_optimizer.buffer_count", 4),), False),
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
        },
        [
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "4 buffers of 1000000000 elements pin up to 14.9 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
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
        [
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "8 buffers of 1000000000 elements pin up to 29.8 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "Adagrad", "params": {"lr": 0.0001}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 3},
            },
        },
        [
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "3 buffers of 1000000000 elements pin up to 11.2 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "buffer_count": 1, "pipeline_read": True},
            }
        },
        [
            Said(
                "DS232",
                "warning",
                "",
                "zero_optimization.offload_optimizer",
                "buffer_count and pipeline_read: without effect while device is cpu",
                "Remove what belongs to NVMe, or set device to nvme.",
                (
                    (
                        ("remove", "zero_optimization.offload_optimizer.buffer_count", None),
                        ("remove", "zero_optimization.offload_optimizer.pipeline_read", None),
                    ),
                    True,
                ),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "swap"}}},
        [
            Said(
                "DS226",
                "warning",
                "",
                "zero_optimization.offload_optimizer.nvme_path",
                "swap depends on where a rank is started",
                "Give the whole path.",
            ),
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "4 buffers of 1000000000 elements pin up to 14.9 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "~/swap"}}},
        [
            Said(
                "DS226",
                "warning",
                "",
                "zero_optimization.offload_param.nvme_path",
                "~/swap isn't expanded: a folder of that very name is made",
                "Give the whole path.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/dev/shm/swap"},
            }
        },
        [
            Said(
                "DS226",
                "warning",
                "",
                "zero_optimization.offload_param.nvme_path",
                "/dev/shm/swap is memory, not a disk",
                "Name a disk's folder, or set device to cpu.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/swap"}}},
        [
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "4 buffers of 1000000000 elements pin up to 14.9 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "nvme_path": "swap"}}},
        [
            Said(
                "DS232",
                "warning",
                "",
                "zero_optimization.offload_optimizer",
                "nvme_path: without effect while device is cpu",
                "Remove what belongs to NVMe, or set device to nvme.",
                ((("remove", "zero_optimization.offload_optimizer.nvme_path", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/dev/nvme0"}}},
        [
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        [
            Said(
                "DS227",
                "error",
                "refused",
                "zero_optimization.offload_optimizer.ratio",
                "0.5 needs stage 3, and the stage is 2",
                "Set zero_optimization.stage to 3, or ratio to 1.",
                ((("replace", "zero_optimization.offload_optimizer.ratio", 1),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none", "ratio": 0}}},
        [
            Said(
                "DS227",
                "error",
                "refused",
                "zero_optimization.offload_optimizer.ratio",
                "0 needs stage 3, and the stage is 1",
                "Set zero_optimization.stage to 3, or ratio to 1.",
                ((("replace", "zero_optimization.offload_optimizer.ratio", 1),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"ratio": 0.99}}},
        [
            Said(
                "DS227",
                "error",
                "refused",
                "zero_optimization.offload_optimizer.ratio",
                "0.99 needs stage 3, and the stage is 0",
                "Set zero_optimization.stage to 3, or ratio to 1.",
                ((("replace", "zero_optimization.offload_optimizer.ratio", 1),), False),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, []),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 1.0}}}, []),
    (
        {
            "optimizer": {"type": "Adagrad", "params": {"lr": 0.0001}},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        },
        [
            Said(
                "DS228",
                "error",
                "fails",
                "zero_optimization.offload_optimizer.ratio",
                "0.5 works with DeepSpeed's Adam only, not with Adagrad",
                "Set ratio to 1, or the optimizer to AdamW.",
                ((("replace", "zero_optimization.offload_optimizer.ratio", 1),), False),
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001, "torch_adam": True}},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        },
        [
            Said(
                "DS228",
                "error",
                "fails",
                "zero_optimization.offload_optimizer.ratio",
                "0.5 works with DeepSpeed's Adam only, not with torch's Adam",
                "Set ratio to 1, or the optimizer to AdamW.",
                ((("replace", "zero_optimization.offload_optimizer.ratio", 1),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none", "ratio": 0.5}}},
        [
            Said(
                "DS228",
                "warning",
                "",
                "zero_optimization.offload_optimizer.ratio",
                "0.5 has no effect: nothing is offloaded",
                "Remove it, or set device to cpu.",
                ((("remove", "zero_optimization.offload_optimizer.ratio", None),), True),
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        },
        [],
    ),
    (
        {
            "optimizer": {"type": "Adagrad", "params": {"lr": 0.0001}},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1}},
        },
        [],
    ),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}}}, []),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
        [
            Said(
                "DS229",
                "error",
                "differs",
                "zero_optimization.offload_optimizer.super_offload",
                "has no effect at stage 2",
                "Set zero_optimization.stage to 3, or remove it.",
                ((("remove", "zero_optimization.offload_optimizer.super_offload", None),), False),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}},
            "_device": "cpu",
        },
        [
            Said(
                "DS229",
                "error",
                "fails",
                "zero_optimization.offload_optimizer.super_offload",
                "needs NVIDIA GPUs, and there are none",
                "Remove it.",
                ((("remove", "zero_optimization.offload_optimizer.super_offload", None),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none", "super_offload": True}}},
        [
            Said(
                "DS229",
                "error",
                "fails",
                "zero_optimization.offload_optimizer.super_offload",
                "needs device cpu, and it is none",
                "Set device to cpu, or remove super_offload.",
            ),
        ],
    ),
    (
        {
            "optimizer": {"type": "Lion", "params": {"lr": 0.0001}},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}},
        },
        [
            Said(
                "DS229",
                "error",
                "fails",
                "zero_optimization.offload_optimizer.super_offload",
                "works with Adam only, not with lion",
                "Remove it, or set the optimizer to AdamW.",
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}}, []),
    (
        {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}},
            "_device": "cuda",
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        },
        [],
    ),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": False}}}, []),
    (
        {"zero_optimization": {"stage": 2, "cpu_offload": True}},
        [
            Said(
                "DS230",
                "warning",
                "",
                "zero_optimization.cpu_offload",
                "is the old form of offload_optimizer",
                'Write offload_optimizer: {"device": "cpu"}.',
                (
                    (
                        ("remove", "zero_optimization.cpu_offload", None),
                        ("add", "zero_optimization.offload_optimizer", {"device": "cpu"}),
                    ),
                    True,
                ),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "cpu_offload_param": True}},
        [
            Said(
                "DS230",
                "warning",
                "",
                "zero_optimization.cpu_offload_param",
                "is the old form of offload_param",
                'Write offload_param: {"device": "cpu"}.',
                (
                    (
                        ("remove", "zero_optimization.cpu_offload_param", None),
                        ("add", "zero_optimization.offload_param", {"device": "cpu"}),
                    ),
                    True,
                ),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "cpu_offload": False}},
        [
            Said(
                "DS230",
                "warning",
                "",
                "zero_optimization.cpu_offload",
                "is the old form of offload_optimizer",
                "Remove it.",
                ((("remove", "zero_optimization.cpu_offload", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "cpu_offload_use_pin_memory": True}},
        [
            Said(
                "DS230",
                "warning",
                "",
                "zero_optimization.cpu_offload_use_pin_memory",
                "is an old key without effect",
                "Remove it; offload_optimizer and offload_param have pin_memory, which is true by default.",
                ((("remove", "zero_optimization.cpu_offload_use_pin_memory", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}},
        [
            Said(
                "DS230",
                "warning",
                "",
                "zero_optimization.stage3_gather_fp16_weights_on_model_save",
                "is the old name of stage3_gather_16bit_weights_on_model_save",
                "Call it stage3_gather_16bit_weights_on_model_save.",
                (
                    (
                        (
                            "rename",
                            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
                            "stage3_gather_16bit_weights_on_model_save",
                        ),
                    ),
                    True,
                ),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}}, []),
    (
        {"zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}},
        [
            Said(
                "DS231",
                "error",
                "refused",
                "zero_optimization.cpu_offload",
                "stands beside offload_optimizer, its new form",
                "Keep offload_optimizer only.",
                ((("remove", "zero_optimization.cpu_offload", None),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "cpu_offload_param": False, "offload_param": {"device": "cpu"}}},
        [
            Said(
                "DS231",
                "error",
                "refused",
                "zero_optimization.cpu_offload_param",
                "stands beside offload_param, its new form",
                "Keep offload_param only.",
                ((("remove", "zero_optimization.cpu_offload_param", None),), False),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "stage3_gather_fp16_weights_on_model_save": True,
                "stage3_gather_16bit_weights_on_model_save": True,
            }
        },
        [
            Said(
                "DS231",
                "error",
                "refused",
                "zero_optimization.stage3_gather_fp16_weights_on_model_save",
                "stands beside stage3_gather_16bit_weights_on_model_save, its new form",
                "Keep stage3_gather_16bit_weights_on_model_save only.",
                ((("remove", "zero_optimization.stage3_gather_fp16_weights_on_model_save", None),), False),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 2,
                "cpu_offload_use_pin_memory": True,
                "offload_optimizer": {"device": "cpu"},
            }
        },
        [
            Said(
                "DS230",
                "warning",
                "",
                "zero_optimization.cpu_offload_use_pin_memory",
                "is an old key without effect",
                "Remove it; offload_optimizer and offload_param have pin_memory, which is true by default.",
                ((("remove", "zero_optimization.cpu_offload_use_pin_memory", None),), True),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "nvme_path": "/nvme", "buffer_count": 4},
            }
        },
        [
            Said(
                "DS232",
                "warning",
                "",
                "zero_optimization.offload_optimizer",
                "nvme_path and buffer_count: without effect while device is cpu",
                "Remove what belongs to NVMe, or set device to nvme.",
                (
                    (
                        ("remove", "zero_optimization.offload_optimizer.nvme_path", None),
                        ("remove", "zero_optimization.offload_optimizer.buffer_count", None),
                    ),
                    True,
                ),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "max_in_cpu": 1000000000.0}}},
        [
            Said(
                "DS232",
                "warning",
                "",
                "zero_optimization.offload_param",
                "max_in_cpu: without effect while device is cpu",
                "Remove what belongs to NVMe, or set device to nvme.",
                ((("remove", "zero_optimization.offload_param.max_in_cpu", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pipeline_read": True}}},
        [
            Said(
                "DS232",
                "warning",
                "",
                "zero_optimization.offload_optimizer",
                "pipeline_read: without effect while device is cpu",
                "Remove what belongs to NVMe, or set device to nvme.",
                ((("remove", "zero_optimization.offload_optimizer.pipeline_read", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none", "fast_init": True}}},
        [
            Said(
                "DS232",
                "warning",
                "",
                "zero_optimization.offload_optimizer",
                "fast_init: without effect while device is none",
                "Remove what belongs to NVMe, or set device to nvme.",
                ((("remove", "zero_optimization.offload_optimizer.fast_init", None),), True),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pipeline_read": False}}}, []),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 4},
            }
        },
        [
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "4 buffers of 1000000000 elements pin up to 14.9 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {"_for": "hf", "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 1}}},
        [],
    ),
    (
        {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
            "aio": {"queue_depth": 16},
        },
        [
            Said(
                "DS233",
                "warning",
                "",
                "aio",
                "has no effect: nothing is offloaded to nvme",
                "Remove it, or set a device to nvme at stage 3.",
                ((("remove", "aio", None),), True),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 2, "offload_param": {"device": "none", "nvme_path": None}},
            "aio": {"block_size": 1048576},
        },
        [
            Said(
                "DS233",
                "warning",
                "",
                "aio",
                "has no effect: nothing is offloaded to nvme",
                "Remove it, or set a device to nvme at stage 3.",
                ((("remove", "aio", None),), True),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"use_gds": True},
            "_device": "cuda",
        },
        [
            Said(
                "DS233",
                "warning",
                "",
                "aio.use_gds",
                "has no effect: only offload_param uses GPUDirect Storage",
                "Remove it.",
                ((("remove", "aio.use_gds", None),), True),
            ),
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "4 buffers of 1000000000 elements pin up to 14.9 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"queue_depth": 16, "use_gds": False},
        },
        [
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "4 buffers of 1000000000 elements pin up to 14.9 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"use_gds": True},
        },
        [],
    ),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "aio": {}}, []),
    (
        {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"block_size": 0},
        },
        [
            Said(
                "DS234",
                "error",
                "fails",
                "aio.block_size",
                "is 0: the first read or write ends the process",
                "Set it to 1048576, the default, or remove it.",
                ((("replace", "aio.block_size", 1048576),), False),
            ),
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "4 buffers of 1000000000 elements pin up to 14.9 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"intra_op_parallelism": 0, "queue_depth": 0},
        },
        [
            Said(
                "DS234",
                "error",
                "fails",
                "aio.intra_op_parallelism",
                "is 0: the sizes of the requests are divided by it",
                "Set it to 1, the default, or remove it.",
                ((("replace", "aio.intra_op_parallelism", 1),), False),
            ),
            Said(
                "DS234",
                "error",
                "differs",
                "aio.queue_depth",
                "is 0: nothing is read, and the weights become NaN",
                "Set it to 8, the default, or remove it.",
                ((("replace", "aio.queue_depth", 8),), False),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"block_size": 1000000},
        },
        [
            Said(
                "DS234",
                "error",
                "differs",
                "aio.block_size",
                "1000000 is no multiple of 512: the weights that are read back are wrong",
                "Set it to 999936, or 1048576, the default.",
                ((("replace", "aio.block_size", 999936),), False),
            ),
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "4 buffers of 1000000000 elements pin up to 14.9 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"block_size": 512, "intra_op_parallelism": 1, "queue_depth": 1},
        },
        [
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "4 buffers of 1000000000 elements pin up to 14.9 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"block_size": 1049088},
        },
        [
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "4 buffers of 1000000000 elements pin up to 14.9 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio.block_size",
                "tensors under 1.00049 MiB stay in memory",
                "Set it to 1048576 to swap all from 1 MiB on.",
            ),
        ],
    ),
    (
        {
            "_device": "cpu",
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"use_gds": True},
        },
        [
            Said(
                "DS235",
                "error",
                "refused",
                "aio.use_gds",
                "needs NVIDIA GPUs, and there are none",
                "Set it to false.",
                ((("replace", "aio.use_gds", False),), False),
            ),
        ],
    ),
    (
        {
            "_device": "cuda",
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"use_gds": True},
        },
        [],
    ),
    (
        {
            "_device": "cpu",
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"use_gds": False},
        },
        [],
    ),
    (
        {
            "_model": {"largest_parameter": 4194304},
            "_world_size": 2,
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 2097151},
            },
        },
        [
            Said(
                "DS236",
                "error",
                "fails",
                "zero_optimization.offload_param.buffer_size",
                "2097151 elements don't hold a GPU's part of the largest weight, 2097152",
                "Set it to 2097152 or more.",
                ((("replace", "zero_optimization.offload_param.buffer_size", 2097152),), False),
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "_model": {"largest_parameter": 400000001},
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
        },
        [
            Said(
                "DS236",
                "error",
                "fails",
                "zero_optimization.offload_param.buffer_size",
                "100000000 elements don't hold a GPU's part of the largest weight, 100000001",
                "Set it to 100000001 or more.",
                ((("add", "zero_optimization.offload_param.buffer_size", 100000001),), False),
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 262143},
            }
        },
        [
            Said(
                "DS236",
                "error",
                "differs",
                "zero_optimization.offload_param.buffer_size",
                "262143 elements: no weight that is swapped, 262144 elements and more, fits",
                "Set it to one GPU's part of the largest weight or more; the default is 100000000.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 524287},
            },
        },
        [
            Said(
                "DS236",
                "error",
                "differs",
                "zero_optimization.offload_param.buffer_size",
                "524287 elements: no weight that is swapped, 524288 elements and more, fits",
                "Set it to one GPU's part of the largest weight or more; the default is 100000000.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 999999},
            }
        },
        [
            Said(
                "DS236",
                "warning",
                "",
                "zero_optimization.offload_param.buffer_size",
                "999999 elements hold no large weight",
                "It counts elements: set it to the largest weight's, divided by the number of GPUs, or more.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 0},
            }
        },
        [
            Said(
                "DS236",
                "error",
                "differs",
                "zero_optimization.offload_param.buffer_count",
                "is 0: no weight can be swapped",
                "Set it to 5, the default.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "_model": {"largest_parameter": 4194304},
            "_world_size": 2,
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 2097152},
            },
        },
        [
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "_model": {"largest_parameter": 400000000},
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
        },
        [
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 1000000},
            }
        },
        [
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "_model": {"largest_parameter": 1200000},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 300000},
            },
        },
        [
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 1},
            }
        },
        [
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 858993460},
            },
        },
        [
            Said(
                "DS237",
                "warning",
                "",
                "zero_optimization.offload_param",
                "5 buffers of 858993460 elements pin 8.0 GiB of memory for each GPU",
                "Lower buffer_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 22},
            }
        },
        [
            Said(
                "DS237",
                "warning",
                "",
                "zero_optimization.offload_param",
                "22 buffers of 100000000 elements pin 8.2 GiB of memory for each GPU",
                "Lower buffer_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 858993459},
            },
        },
        [
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 21},
            }
        },
        [
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 536870911,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
            }
        },
        [
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}, []),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "fast_init": True},
            }
        },
        [
            Said(
                "DS238",
                "warning",
                "",
                "zero_optimization.offload_optimizer.fast_init",
                "has no effect unless offload_param is on nvme as well",
                "Remove it.",
                ((("remove", "zero_optimization.offload_optimizer.fast_init", None),), True),
            ),
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "4 buffers of 1000000000 elements pin up to 14.9 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 100000001,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "fast_init": True},
                "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
            }
        },
        [
            Said(
                "DS238",
                "warning",
                "",
                "zero_optimization.offload_optimizer.fast_init",
                "stops where a sub-group, up to 100000001 elements, is larger than offload_param.buffer_size, 100000000",
                "Set sub_group_size to 100000000, or fast_init to false.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 100000000,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "fast_init": True},
                "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
            }
        },
        [
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "fast_init": False},
            }
        },
        [
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "4 buffers of 1000000000 elements pin up to 14.9 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"block_size": 8388608},
        },
        [
            Said(
                "DS239",
                "note",
                "",
                "aio.block_size",
                "tensors under 8 MiB stay in memory",
                "Set it to 1048576 to swap all from 1 MiB on.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 262143,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
            },
            "aio": {"queue_depth": 32},
        },
        [
            Said(
                "DS239",
                "note",
                "",
                "zero_optimization.sub_group_size",
                "sub-groups of 262143 elements are under 1 MiB, and stay in memory",
                "Set it to 1e8 or more for the optimizer to leave memory.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 262144,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
            },
            "aio": {"block_size": 1048576},
        },
        [],
    ),
    (
        {"zero_optimization": {"stage": 0, "offload_param": {"device": "nvme"}}},
        [
            Said(
                "DS221",
                "error",
                "differs",
                "zero_optimization.offload_param",
                "stage 0 has no use for it: the weights stay on the GPU, not on nvme",
                "Set zero_optimization.stage to 3, or remove it.",
                ((("replace", "zero_optimization.stage", 3),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 1, "cpu_offload_param": True}},
        [
            Said(
                "DS221",
                "error",
                "differs",
                "zero_optimization.cpu_offload_param",
                "stage 1 has no use for it: the weights stay on the GPU, not on cpu",
                "Set zero_optimization.stage to 3, or remove it.",
                ((("replace", "zero_optimization.stage", 3),), False),
            ),
            Said(
                "DS230",
                "warning",
                "",
                "zero_optimization.cpu_offload_param",
                "is the old form of offload_param",
                'Write offload_param: {"device": "cpu"}.',
                (
                    (
                        ("remove", "zero_optimization.cpu_offload_param", None),
                        ("add", "zero_optimization.offload_param", {"device": "cpu"}),
                    ),
                    True,
                ),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 2, "offload_param": {"device": "auto"}}}, []),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "cpu_offload_param": True,
                "stage3_gather_16bit_weights_on_model_save": True,
            }
        },
        [
            Said(
                "DS230",
                "warning",
                "",
                "zero_optimization.cpu_offload_param",
                "is the old form of offload_param",
                'Write offload_param: {"device": "cpu"}.',
                (
                    (
                        ("remove", "zero_optimization.cpu_offload_param", None),
                        ("add", "zero_optimization.offload_param", {"device": "cpu"}),
                    ),
                    True,
                ),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 0, "cpu_offload": True}},
        [
            Said(
                "DS222",
                "error",
                "differs",
                "zero_optimization.cpu_offload",
                "needs ZeRO, and the stage is 0",
                "Set zero_optimization.stage to 1, 2 or 3, or remove it.",
                ((("replace", "zero_optimization.stage", 2),), False),
            ),
            Said(
                "DS230",
                "warning",
                "",
                "zero_optimization.cpu_offload",
                "is the old form of offload_optimizer",
                'Write offload_optimizer: {"device": "cpu"}.',
                (
                    (
                        ("remove", "zero_optimization.cpu_offload", None),
                        ("add", "zero_optimization.offload_optimizer", {"device": "cpu"}),
                    ),
                    True,
                ),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "nvme"},
                "offload_param": {"device": "nvme"},
            }
        },
        [
            Said(
                "DS221",
                "error",
                "differs",
                "zero_optimization.offload_param",
                "stage 2 has no use for it: the weights stay on the GPU, not on nvme",
                "Set zero_optimization.stage to 3, or remove it.",
                ((("replace", "zero_optimization.stage", 3),), False),
            ),
            Said(
                "DS224",
                "error",
                "differs",
                "zero_optimization.offload_optimizer.device",
                "stage 2 takes nvme for cpu: the optimizer stays in memory",
                "Set zero_optimization.stage to 3, or device to cpu.",
                ((("replace", "zero_optimization.offload_optimizer.device", "cpu"),), False),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "None"},
                "offload_param": {"device": "nvme", "nvme_path": "/sys/x"},
            }
        },
        [
            Said(
                "DS223",
                "error",
                "differs",
                "zero_optimization.offload_optimizer.nvme_path",
                'is "None": swaps to a folder called None',
                "Name a folder on a local NVMe disk, such as /nvme/swap.",
            ),
            Said(
                "DS223",
                "error",
                "fails",
                "zero_optimization.offload_param.nvme_path",
                "/sys/x is on no disk: nothing can be written there",
                "Name a folder on a local NVMe disk, such as /nvme/swap.",
            ),
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "4 buffers of 1000000000 elements pin up to 14.9 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "_for": "hf",
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "auto"}},
        },
        [
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "4 buffers of 1000000000 elements pin up to 14.9 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "$SCRATCH/x"},
                "offload_param": {"device": "nvme", "nvme_path": "a/b"},
            }
        },
        [
            Said(
                "DS226",
                "warning",
                "",
                "zero_optimization.offload_optimizer.nvme_path",
                "$SCRATCH/x isn't expanded: a folder of that very name is made",
                "Give the whole path.",
            ),
            Said(
                "DS226",
                "warning",
                "",
                "zero_optimization.offload_param.nvme_path",
                "a/b depends on where a rank is started",
                "Give the whole path.",
            ),
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "4 buffers of 1000000000 elements pin up to 14.9 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/dev/shm"}}},
        [
            Said(
                "DS226",
                "warning",
                "",
                "zero_optimization.offload_optimizer.nvme_path",
                "/dev/shm is memory, not a disk",
                "Name a disk's folder, or set device to cpu.",
            ),
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "4 buffers of 1000000000 elements pin up to 14.9 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 3},
            }
        },
        [
            Said(
                "DS225",
                "warning",
                "",
                "zero_optimization.offload_optimizer.buffer_count",
                "3 is too few: Adam swaps 4 tensors of each sub-group",
                "Set it to 4 or more.",
                ((("replace", "zero_optimization.offload_optimizer.buffer_count", 4),), False),
            ),
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "3 buffers of 1000000000 elements pin up to 11.2 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": "/nvme",
                    "buffer_count": 7,
                    "pipeline_read": True,
                },
            }
        },
        [
            Said(
                "DS225",
                "warning",
                "",
                "zero_optimization.offload_optimizer.buffer_count",
                "7 is too few: Adam swaps 4 tensors of each sub-group, and a second one ahead",
                "Set it to 8 or more.",
                ((("replace", "zero_optimization.offload_optimizer.buffer_count", 8),), False),
            ),
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "7 buffers of 1000000000 elements pin up to 26.1 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": "/nvme",
                    "buffer_count": 8,
                    "pipeline_write": True,
                },
            }
        },
        [
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "8 buffers of 1000000000 elements pin up to 29.8 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 1},
            },
            "optimizer": {"type": "Muon", "params": {}},
        },
        [
            Said(
                "DS225",
                "error",
                "fails",
                "zero_optimization.offload_optimizer.buffer_count",
                "1 is too few: muon swaps 2 tensors of each sub-group",
                "Set it to 2 or more.",
                ((("replace", "zero_optimization.offload_optimizer.buffer_count", 2),), False),
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 2},
            },
            "optimizer": {"type": "Muon", "params": {}},
        },
        [
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": "/nvme",
                    "buffer_count": 3,
                    "pipeline_read": True,
                },
            },
            "optimizer": {"type": "Muon", "params": {}},
        },
        [
            Said(
                "DS225",
                "error",
                "fails",
                "zero_optimization.offload_optimizer.buffer_count",
                "3 is too few: muon swaps 2 tensors of each sub-group, and a second one ahead",
                "Set it to 4 or more.",
                ((("replace", "zero_optimization.offload_optimizer.buffer_count", 4),), False),
            ),
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "3 buffers of 1000000000 elements pin up to 11.2 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 3},
            },
            "optimizer": {"params": {}},
        },
        [
            Said(
                "DS225",
                "warning",
                "",
                "zero_optimization.offload_optimizer.buffer_count",
                "3 is too few: Adam swaps 4 tensors of each sub-group",
                "Set it to 4 or more.",
                ((("replace", "zero_optimization.offload_optimizer.buffer_count", 4),), False),
            ),
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "3 buffers of 1000000000 elements pin up to 11.2 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": "/nvme",
                    "buffer_count": 5,
                    "pipeline_read": True,
                },
            },
            "optimizer": {"type": "Adagrad", "params": {}},
        },
        [
            Said(
                "DS225",
                "error",
                "fails",
                "zero_optimization.offload_optimizer.buffer_count",
                "5 is too few: adagrad swaps 3 tensors of each sub-group, and a second one ahead",
                "Set it to 6 or more.",
                ((("replace", "zero_optimization.offload_optimizer.buffer_count", 6),), False),
            ),
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "5 buffers of 1000000000 elements pin up to 18.6 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": "/nvme",
                    "buffer_count": 6,
                    "pipeline_read": True,
                },
            },
            "optimizer": {"type": "Adagrad", "params": {}},
        },
        [
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "6 buffers of 1000000000 elements pin up to 22.4 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 3},
            },
            "optimizer": {"type": "Lion", "params": {}},
        },
        [
            Said(
                "DS225",
                "error",
                "fails",
                "zero_optimization.offload_optimizer.buffer_count",
                "3 is too few: lion swaps 4 tensors of each sub-group",
                "Set it to 4 or more.",
                ((("replace", "zero_optimization.offload_optimizer.buffer_count", 4),), False),
            ),
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "3 buffers of 1000000000 elements pin up to 11.2 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 4},
            },
            "optimizer": {"type": "Lion", "params": {}},
        },
        [
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "4 buffers of 1000000000 elements pin up to 14.9 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.999}}}, []),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.999}}},
        [
            Said(
                "DS227",
                "error",
                "refused",
                "zero_optimization.offload_optimizer.ratio",
                "0.999 needs stage 3, and the stage is 2",
                "Set zero_optimization.stage to 3, or ratio to 1.",
                ((("replace", "zero_optimization.offload_optimizer.ratio", 1),), False),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"ratio": 1}}}, []),
    (
        {
            "_for": "hf",
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        },
        [],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/n", "ratio": 0.5},
            },
            "optimizer": {"type": "Lion", "params": {}},
        },
        [
            Said(
                "DS228",
                "error",
                "fails",
                "zero_optimization.offload_optimizer.ratio",
                "0.5 works with DeepSpeed's Adam only, not with Lion",
                "Set ratio to 1, or the optimizer to AdamW.",
                ((("replace", "zero_optimization.offload_optimizer.ratio", 1),), False),
            ),
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "4 buffers of 1000000000 elements pin up to 14.9 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1}},
            "optimizer": {"type": "Lion", "params": {}},
        },
        [],
    ),
    (
        {
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
            "optimizer": {"type": "Lion", "params": {}},
        },
        [
            Said(
                "DS227",
                "error",
                "refused",
                "zero_optimization.offload_optimizer.ratio",
                "0.5 needs stage 3, and the stage is 2",
                "Set zero_optimization.stage to 3, or ratio to 1.",
                ((("replace", "zero_optimization.offload_optimizer.ratio", 1),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"super_offload": True}}},
        [
            Said(
                "DS229",
                "error",
                "differs",
                "zero_optimization.offload_optimizer.super_offload",
                "has no effect at stage 0",
                "Set zero_optimization.stage to 3, or remove it.",
                ((("remove", "zero_optimization.offload_optimizer.super_offload", None),), False),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "super_offload": True}},
            "_device": "cpu",
        },
        [
            Said(
                "DS229",
                "error",
                "differs",
                "zero_optimization.offload_optimizer.super_offload",
                "has no effect at stage 1",
                "Set zero_optimization.stage to 3, or remove it.",
                ((("remove", "zero_optimization.offload_optimizer.super_offload", None),), False),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "super_offload": True},
            }
        },
        [
            Said(
                "DS229",
                "error",
                "fails",
                "zero_optimization.offload_optimizer.super_offload",
                "needs device cpu, and it is nvme",
                "Set device to cpu, or remove super_offload.",
            ),
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "4 buffers of 1000000000 elements pin up to 14.9 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}},
            "optimizer": {"type": "Adam", "params": {}},
        },
        [],
    ),
    (
        {"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": False}},
        [
            Said(
                "DS230",
                "warning",
                "",
                "zero_optimization.stage3_gather_fp16_weights_on_model_save",
                "is the old name of stage3_gather_16bit_weights_on_model_save",
                "Call it stage3_gather_16bit_weights_on_model_save.",
                (
                    (
                        (
                            "rename",
                            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
                            "stage3_gather_16bit_weights_on_model_save",
                        ),
                    ),
                    True,
                ),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3, "cpu_offload_param": False}},
        [
            Said(
                "DS230",
                "warning",
                "",
                "zero_optimization.cpu_offload_param",
                "is the old form of offload_param",
                "Remove it.",
                ((("remove", "zero_optimization.cpu_offload_param", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "cpu_offload_use_pin_memory": False}},
        [
            Said(
                "DS230",
                "warning",
                "",
                "zero_optimization.cpu_offload_use_pin_memory",
                "is an old key without effect",
                "Remove it; offload_optimizer and offload_param have pin_memory, which is true by default.",
                ((("remove", "zero_optimization.cpu_offload_use_pin_memory", None),), True),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "stage3_gather_fp16_weights_on_model_save": False,
                "gather_16bit_weights_on_model_save": True,
            }
        },
        [
            Said(
                "DS231",
                "error",
                "refused",
                "zero_optimization.stage3_gather_fp16_weights_on_model_save",
                "stands beside gather_16bit_weights_on_model_save, its new form",
                "Keep gather_16bit_weights_on_model_save only.",
                ((("remove", "zero_optimization.stage3_gather_fp16_weights_on_model_save", None),), False),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "cpu_offload": None, "offload_optimizer": {"device": "cpu"}}},
        [
            Said(
                "DS231",
                "error",
                "refused",
                "zero_optimization.cpu_offload",
                "stands beside offload_optimizer, its new form",
                "Keep offload_optimizer only.",
                ((("remove", "zero_optimization.cpu_offload", None),), False),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 2, "cpu_offload": "auto", "offload_optimizer": {"device": "cpu"}}}, []),
    ({"zero_optimization": {"stage": 3, "cpu_offload_param": True, "offload_param": "auto"}}, []),
    (
        {
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {
                    "device": "none",
                    "nvme_path": "/n",
                    "buffer_count": 4,
                    "pipeline_read": True,
                    "pipeline_write": True,
                    "fast_init": True,
                },
            }
        },
        [
            Said(
                "DS232",
                "warning",
                "",
                "zero_optimization.offload_optimizer",
                "nvme_path, buffer_count, pipeline_read, pipeline_write and fast_init: without effect while device is none",
                "Remove what belongs to NVMe, or set device to nvme.",
                (
                    (
                        ("remove", "zero_optimization.offload_optimizer.nvme_path", None),
                        ("remove", "zero_optimization.offload_optimizer.buffer_count", None),
                        ("remove", "zero_optimization.offload_optimizer.pipeline_read", None),
                        ("remove", "zero_optimization.offload_optimizer.pipeline_write", None),
                        ("remove", "zero_optimization.offload_optimizer.fast_init", None),
                    ),
                    True,
                ),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {
                    "device": "cpu",
                    "nvme_path": "/n",
                    "buffer_count": 4,
                    "buffer_size": 5,
                    "max_in_cpu": 0,
                },
            }
        },
        [
            Said(
                "DS232",
                "warning",
                "",
                "zero_optimization.offload_param",
                "nvme_path, buffer_count and buffer_size: without effect while device is cpu",
                "Remove what belongs to NVMe, or set device to nvme.",
                (
                    (
                        ("remove", "zero_optimization.offload_param.nvme_path", None),
                        ("remove", "zero_optimization.offload_param.buffer_count", None),
                        ("remove", "zero_optimization.offload_param.buffer_size", None),
                    ),
                    True,
                ),
            ),
        ],
    ),
    (
        {
            "_for": "hf",
            "zero_optimization": {"stage": 3, "offload_param": {"device": "auto", "buffer_count": 4}},
        },
        [],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
                "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
            },
            "aio": {"use_gds": True},
        },
        [
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "4 buffers of 1000000000 elements pin up to 14.9 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"queue_depth": 4},
        },
        [
            Said(
                "DS224",
                "error",
                "differs",
                "zero_optimization.offload_optimizer.device",
                "stage 2 takes nvme for cpu: the optimizer stays in memory",
                "Set zero_optimization.stage to 3, or device to cpu.",
                ((("replace", "zero_optimization.offload_optimizer.device", "cpu"),), False),
            ),
            Said(
                "DS233",
                "warning",
                "",
                "aio",
                "has no effect: nothing is offloaded to nvme",
                "Remove it, or set a device to nvme at stage 3.",
                ((("remove", "aio", None),), True),
            ),
        ],
    ),
    ({"zero_optimization": {"stage": 3}, "aio": {"qdepth": 4}}, []),
    (
        {"zero_optimization": {"stage": 3}, "aio": {"use_gds": True}},
        [
            Said(
                "DS233",
                "warning",
                "",
                "aio",
                "has no effect: nothing is offloaded to nvme",
                "Remove it, or set a device to nvme at stage 3.",
                ((("remove", "aio", None),), True),
            ),
        ],
    ),
    (
        {
            "_for": "hf",
            "zero_optimization": {"stage": 3, "offload_param": {"device": "auto"}},
            "aio": {"queue_depth": 4},
        },
        [],
    ),
    (
        {
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"block_size": 0, "queue_depth": 0, "intra_op_parallelism": 0},
        },
        [
            Said(
                "DS234",
                "error",
                "fails",
                "aio.block_size",
                "is 0: the first read or write ends the process",
                "Set it to 1048576, the default, or remove it.",
                ((("replace", "aio.block_size", 1048576),), False),
            ),
            Said(
                "DS234",
                "error",
                "fails",
                "aio.intra_op_parallelism",
                "is 0: the sizes of the requests are divided by it",
                "Set it to 1, the default, or remove it.",
                ((("replace", "aio.intra_op_parallelism", 1),), False),
            ),
            Said(
                "DS234",
                "error",
                "differs",
                "aio.queue_depth",
                "is 0: nothing is read, and the weights become NaN",
                "Set it to 8, the default, or remove it.",
                ((("replace", "aio.queue_depth", 8),), False),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"block_size": 0},
        },
        [
            Said(
                "DS224",
                "error",
                "differs",
                "zero_optimization.offload_optimizer.device",
                "stage 2 takes nvme for cpu: the optimizer stays in memory",
                "Set zero_optimization.stage to 3, or device to cpu.",
                ((("replace", "zero_optimization.offload_optimizer.device", "cpu"),), False),
            ),
            Said(
                "DS233",
                "warning",
                "",
                "aio",
                "has no effect: nothing is offloaded to nvme",
                "Remove it, or set a device to nvme at stage 3.",
                ((("remove", "aio", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 3}, "_device": "cpu", "aio": {"use_gds": True}},
        [
            Said(
                "DS235",
                "error",
                "refused",
                "aio.use_gds",
                "needs NVIDIA GPUs, and there are none",
                "Set it to false.",
                ((("replace", "aio.use_gds", False),), False),
            ),
            Said(
                "DS233",
                "warning",
                "",
                "aio",
                "has no effect: nothing is offloaded to nvme",
                "Remove it, or set a device to nvme at stage 3.",
                ((("remove", "aio", None),), True),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 524287},
            },
            "_model": {"largest_parameter": 1048576},
            "_world_size": 2,
        },
        [
            Said(
                "DS236",
                "error",
                "fails",
                "zero_optimization.offload_param.buffer_size",
                "524287 elements don't hold a GPU's part of the largest weight, 524288",
                "Set it to 524288 or more.",
                ((("replace", "zero_optimization.offload_param.buffer_size", 524288),), False),
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 524287},
            },
            "_model": {"largest_parameter": 1048576},
            "_world_size": 2,
            "fp16": {"enabled": True},
        },
        [
            Said(
                "DS236",
                "error",
                "fails",
                "zero_optimization.offload_param.buffer_size",
                "524287 elements don't hold a GPU's part of the largest weight, 524288",
                "Set it to 524288 or more.",
                ((("replace", "zero_optimization.offload_param.buffer_size", 524288),), False),
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 262143},
            },
            "_model": {"largest_parameter": 1048575},
            "_world_size": 4,
        },
        [
            Said(
                "DS236",
                "error",
                "fails",
                "zero_optimization.offload_param.buffer_size",
                "262143 elements don't hold a GPU's part of the largest weight, 262144",
                "Set it to 262144 or more.",
                ((("replace", "zero_optimization.offload_param.buffer_size", 262144),), False),
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 262144},
            },
            "_model": {"largest_parameter": 1048577},
            "_world_size": 4,
        },
        [
            Said(
                "DS236",
                "error",
                "fails",
                "zero_optimization.offload_param.buffer_size",
                "262144 elements don't hold a GPU's part of the largest weight, 262145",
                "Set it to 262145 or more.",
                ((("replace", "zero_optimization.offload_param.buffer_size", 262145),), False),
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 262142},
            },
            "_model": {"largest_parameter": 1048572},
            "_world_size": 4,
        },
        [
            Said(
                "DS236",
                "note",
                "",
                "zero_optimization.offload_param.buffer_size",
                "a GPU's part of the largest weight, 262143 elements, is too small to be swapped: all stay in memory",
                "Set device to cpu.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 251},
            },
            "_model": {"largest_parameter": 1001},
        },
        [
            Said(
                "DS236",
                "note",
                "",
                "zero_optimization.offload_param.buffer_size",
                "a GPU's part of the largest weight, 251 elements, is too small to be swapped: all stay in memory",
                "Set device to cpu.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 999999},
            },
            "_model": {"hidden_size": 8},
        },
        [
            Said(
                "DS236",
                "warning",
                "",
                "zero_optimization.offload_param.buffer_size",
                "999999 elements hold no large weight",
                "It counts elements: set it to the largest weight's, divided by the number of GPUs, or more.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
            "_world_size": None,
            "_model": {"largest_parameter": 400000001},
        },
        [
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 1048575},
            },
            "aio": {"block_size": 4194304},
        },
        [
            Said(
                "DS236",
                "error",
                "differs",
                "zero_optimization.offload_param.buffer_size",
                "1048575 elements: no weight that is swapped, 1048576 elements and more, fits",
                "Set it to one GPU's part of the largest weight or more; the default is 100000000.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio.block_size",
                "tensors under 4 MiB stay in memory",
                "Set it to 1048576 to swap all from 1 MiB on.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 1048576},
            },
            "aio": {"block_size": 4194304},
        },
        [
            Said(
                "DS239",
                "note",
                "",
                "aio.block_size",
                "tensors under 4 MiB stay in memory",
                "Set it to 1048576 to swap all from 1 MiB on.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 262144},
            }
        },
        [
            Said(
                "DS236",
                "warning",
                "",
                "zero_optimization.offload_param.buffer_size",
                "262144 elements hold no large weight",
                "It counts elements: set it to the largest weight's, divided by the number of GPUs, or more.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "_for": "hf",
            "bf16": {"enabled": "auto"},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 262143},
            },
        },
        [
            Said(
                "DS236",
                "error",
                "differs",
                "zero_optimization.offload_param.buffer_size",
                "262143 elements: no weight that is swapped, 262144 elements and more, fits",
                "Set it to one GPU's part of the largest weight or more; the default is 100000000.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "_for": "hf",
            "bf16": {"enabled": "auto"},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 9000000000.0},
            },
        },
        [
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {
                    "device": "nvme",
                    "nvme_path": "/nvme",
                    "buffer_size": 536870912,
                    "buffer_count": 4,
                },
            }
        },
        [
            Said(
                "DS237",
                "warning",
                "",
                "zero_optimization.offload_param",
                "4 buffers of 536870912 elements pin 8.0 GiB of memory for each GPU",
                "Lower buffer_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {
                    "device": "nvme",
                    "nvme_path": "/nvme",
                    "buffer_size": 536870911,
                    "buffer_count": 4,
                },
            }
        },
        [
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 536870912,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
            }
        },
        [
            Said(
                "DS237",
                "note",
                "",
                "zero_optimization.offload_optimizer",
                "4 buffers of 536870912 elements pin up to 8.0 GiB of memory for each GPU",
                "Lower sub_group_size or buffer_count if the node hasn't got that for all its GPUs.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 9000000000.0},
            }
        },
        [
            Said(
                "DS221",
                "error",
                "differs",
                "zero_optimization.offload_param",
                "stage 2 has no use for it: the weights stay on the GPU, not on nvme",
                "Set zero_optimization.stage to 3, or remove it.",
                ((("replace", "zero_optimization.stage", 3),), False),
            ),
            Said(
                "DS224",
                "error",
                "differs",
                "zero_optimization.offload_optimizer.device",
                "stage 2 takes nvme for cpu: the optimizer stays in memory",
                "Set zero_optimization.stage to 3, or device to cpu.",
                ((("replace", "zero_optimization.offload_optimizer.device", "cpu"),), False),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 100000000.0,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "fast_init": True},
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 99999999},
            }
        },
        [
            Said(
                "DS238",
                "warning",
                "",
                "zero_optimization.offload_optimizer.fast_init",
                "stops where a sub-group, up to 100000000 elements, is larger than offload_param.buffer_size, 99999999",
                "Set sub_group_size to 99999999, or fast_init to false.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
                "offload_optimizer": {"device": "cpu", "fast_init": True},
            }
        },
        [
            Said(
                "DS232",
                "warning",
                "",
                "zero_optimization.offload_optimizer",
                "fast_init: without effect while device is cpu",
                "Remove what belongs to NVMe, or set device to nvme.",
                ((("remove", "zero_optimization.offload_optimizer.fast_init", None),), True),
            ),
            Said(
                "DS239",
                "note",
                "",
                "aio",
                "isn't set: NVMe runs with 8 requests of 1 MiB at a time, in one thread",
                "Let ds_nvme_tune find queue_depth, block_size and intra_op_parallelism for the disk.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
                "sub_group_size": 262144,
            },
            "aio": {"block_size": 1049088},
        },
        [
            Said(
                "DS239",
                "note",
                "",
                "aio.block_size",
                "tensors under 1.00049 MiB stay in memory",
                "Set it to 1048576 to swap all from 1 MiB on.",
            ),
            Said(
                "DS239",
                "note",
                "",
                "zero_optimization.sub_group_size",
                "sub-groups of 262144 elements are under 1.00049 MiB, and stay in memory",
                "Set it to 1e8 or more for the optimizer to leave memory.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"block_size": 511},
        },
        [
            Said(
                "DS234",
                "error",
                "differs",
                "aio.block_size",
                "511 is no multiple of 512: the weights that are read back are wrong",
                "Set it to 512, or 1048576, the default.",
                ((("replace", "aio.block_size", 512),), False),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"block_size": 1025, "queue_depth": -1},
        },
        [
            Said(
                "DS234",
                "error",
                "differs",
                "aio.block_size",
                "1025 is no multiple of 512: the weights that are read back are wrong",
                "Set it to 1024, or 1048576, the default.",
                ((("replace", "aio.block_size", 1024),), False),
            ),
            Said(
                "DS234",
                "error",
                "differs",
                "aio.queue_depth",
                "is -1: nothing is read, and the weights become NaN",
                "Set it to 8, the default, or remove it.",
                ((("replace", "aio.queue_depth", 8),), False),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
            "aio": {"block_size": 511},
        },
        [
            Said(
                "DS224",
                "error",
                "differs",
                "zero_optimization.offload_optimizer.device",
                "stage 2 takes nvme for cpu: the optimizer stays in memory",
                "Set zero_optimization.stage to 3, or device to cpu.",
                ((("replace", "zero_optimization.offload_optimizer.device", "cpu"),), False),
            ),
            Said(
                "DS233",
                "warning",
                "",
                "aio",
                "has no effect: nothing is offloaded to nvme",
                "Remove it, or set a device to nvme at stage 3.",
                ((("remove", "aio", None),), True),
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
                "sub_group_size": 524288,
            },
            "aio": {"block_size": 2097152},
        },
        [
            Said(
                "DS239",
                "note",
                "",
                "aio.block_size",
                "tensors under 2 MiB stay in memory",
                "Set it to 1048576 to swap all from 1 MiB on.",
            ),
        ],
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
                "sub_group_size": 5,
            },
            "aio": {"queue_depth": 2},
        },
        [],
    ),
]


def plain(fix: Fix | None):
    return (tuple(tuple(edit) for edit in fix.edits), fix.safe) if fix else None


def findings(config, setting, *rest):
    return [finding for finding in run(config, setting, *rest) if finding.rule in OWN]


@pytest.mark.parametrize(("given", "expected"), CASES)
def test_what_is_said(given, expected):
    said = [
        Said(
            found.rule,
            found.severity,
            found.effect,
            found.path,
            found.message,
            found.suggestion,
            plain(found.fix),
        )
        for found in findings(*example(given))
    ]
    assert said == expected


@pytest.mark.parametrize(("given", "expected"), [case for case in CASES if any(said.fix for said in case[1])])
def test_a_fix_settles_its_finding(given, expected):
    config, setting, *_ = example(given)
    for found in findings(config, setting):
        if found.fix:
            again = findings(apply(config, found.fix.edits), setting)
            assert (found.rule, found.path) not in [(other.rule, other.path) for other in again]


def test_every_rule_is_seen_at_work():
    assert {said.rule for _, expected in CASES for said in expected} == set(OWN)
