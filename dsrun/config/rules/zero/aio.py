"""DS233 to DS235: how NVMe is read and written."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules import conditions as when
from dsrun.config.rules.common import AIO, OFFLOADS, OPTIMIZER, no_effect, on_nvme, reads_aio, set_to
from dsrun.config.rules.examples import nvme, zero
from dsrun.config.rules.frame import DIFFERS, FAILS, REFUSED, Context, Finding, bad, good, rule
from dsrun.config.rules.kinds import Table, needs, put

SECTOR_BYTES = 512
GDS = f"{AIO}.use_gds"


@rule("DS233", "warning")
@bad(
    {**zero(3, offload_optimizer={"device": "cpu"}), "aio": {"queue_depth": 16}},
    {**zero(3, offload_optimizer=nvme()), "aio": {"use_gds": True}, "_device": "cuda"},
)
@good(
    {**zero(3, offload_optimizer=nvme()), "aio": {"queue_depth": 16, "use_gds": False}},
    {**zero(3, offload_param=nvme()), "aio": {"use_gds": True}},
)
def aio_without_nvme(context: Context) -> Iterator[Finding]:
    """Only the NVMe swappers read it, and GPUDirect only the one of the weights.

    Source: runtime/swap_tensor/partitioned_param_swapper.py and partitioned_optimizer_swapper.py.
    """
    used = [section for section in OFFLOADS if on_nvme(context, section)]
    known = [key for key in context.section(AIO) if context.schema.node(f"{AIO}.{key}")]
    if known and not reads_aio(context):
        advice = "Remove it, or set a device to nvme at stage 3."
        yield no_effect(context, AIO, ": nothing is offloaded to nvme", advice, safe=False)
    elif context.flag(GDS) and used == [OPTIMIZER]:
        yield no_effect(context, GDS, ": only offload_param uses GPUDirect Storage")


@rule("DS234", FAILS)
@bad(
    {**zero(3, offload_optimizer=nvme()), "aio": {"block_size": 0}},
    {**zero(3, offload_param=nvme()), "aio": {"intra_op_parallelism": 0, "queue_depth": 0}},
)
@good(
    {
        **zero(3, offload_optimizer=nvme()),
        "aio": {"block_size": 512, "intra_op_parallelism": 1, "queue_depth": 1},
    },
    {**zero(3, offload_optimizer=nvme()), "aio": {"block_size": 1049088}},
)
def invalid_aio_sizes(context: Context) -> Iterator[Finding]:
    """Requests bypass the page cache, in whole sectors: with other sizes wrong data is read back, even NaN.

    The same with a queue depth of 0; a block size of 0 ends the process (csrc/aio), and a parallelism of 0 is a divisor
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
        if value is None or context.schema.node(path) is None:  # a version without the key: DS009 says so
            continue
        if value < 1:
            default, _ = context.schema.describe(path)
            advice = f"Set it to {default}, the default, or remove it."
            yield Finding(path, f"is {value}: {harm}", advice, set_to(context, path, default), effect=effect)
        elif key == "block_size" and value % SECTOR_BYTES:
            near = value // SECTOR_BYTES * SECTOR_BYTES or SECTOR_BYTES
            yield Finding(
                path,
                f"{value} is not a multiple of {SECTOR_BYTES}: wrong weights are read back",
                f"Set it to {near}, or 1048576, the default.",
                set_to(context, path, near),
                effect=DIFFERS,
            )


@rule("DS235", REFUSED)
@bad({"_device": "cpu", **zero(3, offload_param=nvme()), "aio": {"use_gds": True}})
@good(
    {"_device": "cuda", **zero(3, offload_param=nvme()), "aio": {"use_gds": True}},
    {**zero(3, offload_param=nvme()), "aio": {"use_gds": True}},
)
def gpudirect_storage_without_gpu() -> Table:
    """GPUDirect Storage needs CUDA, by an assertion (get_aio_config in runtime/swap_tensor/aio_config.py)."""
    return needs(GDS, "NVIDIA GPUs, but there are none. Set it to false.", when.on_cpu, put(GDS, False))
