"""Checkpoints of FSDP's: torch's distributed format (torch.distributed.checkpoint), in which any number of ranks reads.

In a folder lie each rank's rows of every tensor, `__RANK_N.distcp`, and `.metadata`, which says what lies where. Both
are pickles, read as dsrun.training.pickles says: the metadata by its unpickler, a tensor by torch's as weights only
(torch/distributed/checkpoint/filesystem.py).
"""

from __future__ import annotations

import inspect
import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dsrun.errors import DsrunError
from dsrun.files import explained
from dsrun.training import pickles
from dsrun.training.engines.checkpoints.host_copies import tensor_copy
from dsrun.training.engines.checkpoints.saved import LazyWeights
from dsrun.training.ranks.barrier import from_all_ranks

MODEL, OPTIMIZER, STEP = "model.", "optimizer.", "step"
"""Prefixes of the names of weights and of the optimizer's states; and the name of the count of steps done."""
FILE = re.compile(r"__(\d+)_\d+\.distcp")


class _Files(FileSystem):  # type: ignore[misc]
    """torch's file system, which remembers the file that was opened last."""

    opened = Path()

    def create_stream(self, path: Any, mode: str) -> Any:
        """See FileSystem."""
        self.opened = Path(path)
        return super().create_stream(path, mode)


class _Planner(dcp.DefaultLoadPlanner):  # type: ignore[misc]
    """torch's planner, for tensors alone."""

    def load_bytes(self, read_item: Any, value: Any) -> None:  # noqa: ARG002
        """Refuse anything else: torch would unpickle it, whatever it names."""
        raise pickle.UnpicklingError(f"GLOBAL {read_item.storage_index.fqn}")


class _Reader(dcp.FileSystemReader):  # type: ignore[misc]
    """torch's reader, which takes metadata as data, and says which file is refused."""

    def __init__(self, folder: Path) -> None:
        """Raises as `metadata` does: in `read_metadata` it would be lost in an error of torch's."""
        super().__init__(folder)
        self.fs = _Files()
        self._metadata = metadata(folder)

    def read_data(self, plan: Any, planner: Any) -> Any:
        """See FileSystemReader. Raises as pickles.load does."""
        try:
            return super().read_data(plan, planner)
        except (pickle.UnpicklingError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "PytorchStreamReader" not in str(error):
                raise  # no word on the file
            raise pickles.refusal(self.fs.opened, error) from None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """See FileSystemReader."""
        self._metadata.storage_meta = dcp.metadata.StorageMeta(load_id=self.load_id)
        return self._metadata


def metadata(folder: Path) -> Metadata:
    """The places of all tensors. Raises DsrunError where the folder's file isn't one that torch writes, or names a file
    outside the folder."""
    path = folder / ".metadata"
    with explained("can't be read", path):
        content = pickles.load_metadata(path)
    places = content.storage_data if isinstance(content, Metadata) else None
    if not isinstance(places, dict) or not all(
        isinstance(place, _StorageInfo) and FILE.fullmatch(place.relative_path) for place in places.values()
    ):
        raise DsrunError("is damaged: it is no checkpoint's metadata", where=str(path))
    return content


def check_file(file: Path) -> None:
    """See Backend. Each tensor in a file is a pickle of its own; its numbers are not read."""
    if file.name == ".metadata":
        metadata(file.parent)
    elif FILE.fullmatch(file.name):
        reader = _Reader(file.parent)
        places = reader.read_metadata().storage_data.values()
        with reader.fs.create_stream(file, "rb") as stream, pickles.explained(file), FakeTensorMode():
            for place in places:
                if place.relative_path == file.name:
                    torch.load(reader._slice_file(stream, place), map_location="cpu", weights_only=True)


def rank_of(file: Path) -> int:
    """The rank that writes this file of a checkpoint; the metadata are the first one's."""
    rank = FILE.fullmatch(file.name)
    return int(rank[1]) if rank else 0


def save(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors, each rank its rows, on all ranks at once. Raises OSError or RuntimeError where one can't."""
    try:
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder))
    except CheckpointException as error:
        raise _first(error) from error


class CapturedRows:
    """The rows of a checkpoint that this rank writes, as they were when it was taken (host_copies.Capture).

    torch's own async_save exchanges between ranks in its thread, for which it needs a second process group beside the
    training's. Here a thread writes, and no more: what the ranks have to agree on comes before it and after it, with
    the calls of torch's own `save` (state_dict_saver.py: _save_state_dict).
    """

    def __init__(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Divide the work and copy this rank's part of it. Every rank makes the same call."""
        first = dist.get_rank() == 0
        self._writer, self._planner = dcp.FileSystemWriter(folder), _CapturedPlanner()
        self._planner.set_up_planner(
            dict(tensors), storage_meta=self._writer.storage_meta(), is_coordinator=first
        )
        self._writer.set_up_storage_writer(first)
        plans = from_all_ranks(self._writer.prepare_local_plan(self._planner.create_local_plan()))
        self._metadata: Any = None
        if first:
            plans, self._metadata = self._planner.create_global_plan(plans)
            plans = self._writer.prepare_global_plan(plans)
        dist.broadcast_object_list(plans)
        self._plan: Any = self._planner.finish_plan(plans[dist.get_rank()])
        self._planner.capture(self._plan)
        self._results: Any = None

    def write(self) -> None:
        """See Capture."""
        self._results = self._writer.write_data(self._plan, self._planner).value()
        self._planner.captured.clear()

    def close(self) -> None:
        """See Capture: the metadata, which say where in which rank's file a tensor lies."""
        results = from_all_ranks(self._results)
        if dist.get_rank() == 0:
            self._writer.finish(self._metadata, results)


class _CapturedPlanner(dcp.DefaultSavePlanner):  # type: ignore[misc]
    """torch's planner, which gives copies in place of the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.captured: dict[Any, Any] = {}

    def capture(self, plan: Any) -> None:
        """Copy what a rank writes."""
        for item in plan.items:
            self.captured[item.index] = tensor_copy(super().resolve_data(item))
        self.state_dict: Any = {}  # the tensors themselves are not needed any more

    def resolve_data(self, write_item: Any) -> Any:
        """See SavePlanner."""
        return self.captured[write_item.index]


def _read(tensors: dict[str, torch.Tensor], *, no_dist: bool, **options: Any) -> None:
    # torch 2.6's load has no such switch, and would wait for ranks that don't read; the older function has it.
    if "no_dist" in inspect.signature(dcp.load).parameters:
        dcp.load(tensors, no_dist=no_dist, **options)
    elif no_dist:
        warnings.filterwarnings("ignore", "`load_state_dict` is deprecated")
        dcp.load_state_dict(tensors, no_dist=True, **options)
    else:
        dcp.load(tensors, **options)


def load(folder: Path, tensors: Mapping[str, torch.Tensor], *, alone: bool = False) -> None:
    """Fill tensors from a folder, by their names, however it was divided. alone: in one process.

    Raises DsrunError where it lacks one, or has another shape of it.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # alone is what is meant
            _read(dict(tensors), storage_reader=_Reader(folder), planner=_Planner(), no_dist=alone)
    except CheckpointException as error:
        first = _first(error)
        if isinstance(first, DsrunError):
            raise first from None
        reason = str(first).strip().splitlines()[0]
        hint = "Was job.json changed, or the model that it names?"
        raise DsrunError(f"can't be read: {reason}", where=str(folder), hint=hint) from error


def stored(folder: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors in a folder, by their names: `size`, `properties.dtype`. Raises as `metadata` does."""
    return dict(metadata(folder).state_dict_metadata)


def trained_weights(folder: Path) -> LazyWeights:
    """See Backend. Raises as `metadata` does."""
    tensors = stored(folder)

    def read(name: str) -> torch.Tensor:
        known = tensors[MODEL + name]
        weight = torch.empty(known.size, dtype=known.properties.dtype)
        load(folder, {MODEL + name: weight}, alone=True)
        return weight

    return LazyWeights((name.removeprefix(MODEL) for name in tensors if name.startswith(MODEL)), read)


def _first(error: CheckpointException) -> Exception:
    """The error of the first rank that has one."""
    cause = next((cause for cause, _ in error.failures.values()), None)
    if isinstance(cause, (OSError, RuntimeError, DsrunError)):
        return cause
    return RuntimeError(str(cause or error))
