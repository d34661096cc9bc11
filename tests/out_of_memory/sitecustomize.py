"""For a Python whose ranks run out of a memory that isn't there: OUT_OF_MEMORY says where, "STEP FUNCTION".

A stand-in for torch's allocator of a GPU: every tensor that a rank makes on the CPU is a block of it, with the Python
calls that made it, and its snapshot is in torch's own form. The first allocation of a call of FUNCTION after so many
optimizer steps fails as torch's does. Everything else is the rank's own: model, engine, optimizer, graph. The snapshot
is also written into the folder OUT_OF_MEMORY_SNAPSHOTS, as torch's _dump_snapshot does.
"""

import functools
import gc
import os
import pickle
import sys
import traceback
import weakref
from importlib.abc import MetaPathFinder
from pathlib import Path

gc.set_threshold(200_000, 50, 1000)  # as in tests/light
LOOP = "dsrun.training.loop"
GIB = 2**30
FREE, HOLE, REQUESTED = 4 << 20, 3 << 20, 2 * GIB
WORDS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4.00 GiB of which 512.00 MiB is "
    "free. Including non-PyTorch memory, this process has 3.50 GiB memory in use. Of the allocated memory 3.00 GiB is "
    "allocated by PyTorch, and 300.00 MiB is reserved by PyTorch but unallocated."
)


def install() -> None:
    import torch
    from torch._subclasses.fake_tensor import is_fake
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    step, function = os.environ["OUT_OF_MEMORY"].split()
    blocks: dict[int, tuple[weakref.ref, list]] = {}
    steps, failed = [0], []

    def drop(number: int, _: weakref.ref) -> None:
        blocks.pop(number, None)

    def held() -> list[tuple[int, int, list]]:
        """Address, size and calls of the blocks that are still there: a storage may have been emptied."""
        there = [(storage(), frames) for storage, frames in blocks.values()]
        return sorted(
            (
                (one.data_ptr(), one.nbytes(), frames)
                for one, frames in there
                if one is not None and one.nbytes()
            ),
            key=lambda block: block[0],
        )

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, call, types, args=(), kwargs=None):
            result = call(*args, **(kwargs or {}))
            for made in tree_iter(result):
                tensor = getattr(made, "_local_tensor", made)  # a DTensor's
                if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
                    continue  # what a wrapper is made of comes by itself
                storage = tensor.untyped_storage()
                if is_fake(tensor) or not storage.nbytes() or storage._cdata in blocks:
                    continue
                stack = traceback.extract_stack(sys._getframe(1))[::-1]
                frames = [{"filename": one.filename, "line": one.lineno, "name": one.name} for one in stack]
                if steps[0] >= int(step) and any(frame.name == function for frame in stack):
                    failed.append({"action": "oom", "size": REQUESTED, "device_free": FREE, "frames": frames})
                    raise torch.OutOfMemoryError(WORDS)
                forget = functools.partial(drop, storage._cdata)
                blocks[storage._cdata] = (weakref.ref(storage, forget), frames)
            return result

    class StandIn:
        device = torch.device("cpu")

        def record(self) -> None:
            self.mode = Recording()
            self.mode.__enter__()

        def free_and_total(self) -> tuple[int, int]:
            return FREE, FREE + HOLE + sum(size for _, size, _ in held())

        def snapshot(self) -> dict:
            listed = [
                {
                    "address": address,
                    "size": size,
                    "requested_size": size,
                    "state": "active_allocated",
                    "frames": frames,
                }
                for address, size, frames in held()
            ]
            listed.append(
                {"address": 0, "size": HOLE, "requested_size": 0, "state": "inactive", "frames": []}
            )
            whole = sum(size for _, size, _ in held())
            segment = {
                "device": 0, "address": 0, "total_size": whole + HOLE, "allocated_size": whole, "active_size": whole,
                "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "blocks": listed,
            }  # fmt: skip
            taken = {"segments": [segment], "device_traces": [failed]}
            folder = Path(os.environ["OUT_OF_MEMORY_SNAPSHOTS"])
            (folder / f"{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(taken))
            return taken

    from dsrun.training.reports import memory_record, report

    memory_record.allocator = StandIn
    written = report.Report.metrics

    def metrics(self, **fields):
        steps[0] += "loss" in fields
        written(self, **fields)

    report.Report.metrics = metrics


class AtTheLoop(MetaPathFinder):
    """Installs all that as training's loop is imported, before a model is made."""

    def find_spec(self, name, path=None, target=None):
        if name == LOOP:
            sys.meta_path.remove(self)
            install()


if "OUT_OF_MEMORY" in os.environ:
    sys.meta_path.insert(0, AtTheLoop())
