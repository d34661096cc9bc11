"""DS233 to DS235: how NVMe is read and written."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules.common import OFFLOADS, OPTIMIZER, on_nvme, removal, setting
from dsrun.config.rules.examples import nvme, zero
from dsrun.config.rules.frame import DIFFERS, FAILS, REFUSED, Context, Hit, rule
from dsrun.config.rules.offload import AIO

SECTOR_BYTES = 512


@rule(
    "DS233",
    "warning",
    bad=[
        {**zero(3, offload_optimizer={"device": "cpu"}), "aio": {"queue_depth": 16}},
        {**zero(2, offload_param={"device": "none", "nvme_path": None}), "aio": {"block_size": 1048576}},
        {**zero(3, offload_optimizer=nvme()), "aio": {"use_gds": True}, "_device": "cuda"},
    ],
    good=[
        {**zero(3, offload_optimizer=nvme()), "aio": {"queue_depth": 16, "use_gds": False}},
        {**zero(3, offload_param=nvme()), "aio": {"use_gds": True}},
        {**zero(3, offload_optimizer={"device": "cpu"}), "aio": {}},
    ],
)
def aio_without_nvme(context: Context) -> Iterator[Hit]:
    """Only the swappers of NVMe read it, and GPUDirect only that of the weights.

    Source: runtime/swap_tensor/partitioned_param_swapper.py and partitioned_optimizer_swapper.py.
    """
    used = [section for section in OFFLOADS if on_nvme(context, section)]
    open_ = any(context.is_auto(f"{section}.device") for section in OFFLOADS)
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
        {**zero(3, offload_optimizer=nvme()), "aio": {"block_size": 0}},
        {**zero(3, offload_param=nvme()), "aio": {"intra_op_parallelism": 0, "queue_depth": 0}},
        {**zero(3, offload_optimizer=nvme()), "aio": {"block_size": 1000000}},
    ],
    good=[
        {
            **zero(3, offload_optimizer=nvme()),
            "aio": {"block_size": 512, "intra_op_parallelism": 1, "queue_depth": 1},
        },
        {**zero(3, offload_optimizer=nvme()), "aio": {"block_size": 1049088}},
    ],
)
def aio_sizes(context: Context) -> Iterator[Hit]:
    """Requests go past the page cache, in whole sectors: at other sizes what is read back is something else, to NaN.

    So it is with no requests in the queue; a block of 0 ends the process (csrc/aio), and parallelism of 0 divides
    (_io_aligned_numel in runtime/swap_tensor/optimizer_utils.py).
    """
    if not any(on_nvme(context, section) for section in OFFLOADS):
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
    bad={"_device": "cpu", **zero(3, offload_param=nvme()), "aio": {"use_gds": True}},
    good=[
        {"_device": "cuda", **zero(3, offload_param=nvme()), "aio": {"use_gds": True}},
        {**zero(3, offload_param=nvme()), "aio": {"use_gds": True}},
        {"_device": "cpu", **zero(3, offload_param=nvme()), "aio": {"use_gds": False}},
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
