"""Checkpoints of FSDP's: torch's distributed format (torch.distributed.checkpoint), in which any number of ranks reads.

In a folder lie each rank's rows of every tensor, `__RANK_N.distcp`, and `.metadata`, which says what lies where. The
metadata is a pickle; torch would run whatever code it names. Here only the classes that it is made of are let in, and
the tensors' files are read as weights only (torch/distributed/checkpoint/filesystem.py).
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dsrun.errors import DsrunError

MODEL, OPTIMIZER, STEP = "model.", "optimizer.", "step"
"""What the names of weights and of the optimizer's states begin with; and the count of steps done."""
METADATA = {
    "torch": {"Size", "device", "float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},
}  # fmt: skip
"""Module -> what of it the metadata may name."""


class _OnlyMetadata(pickle.Unpickler):
    """An unpickler that knows the parts of METADATA."""

    def find_class(self, module: str, name: str) -> Any:
        """The class of that name. Raises UnpicklingError for any other."""
        if name not in METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):  # type: ignore[misc]
    """torch's reader, which takes metadata as data."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """See FileSystemReader. Raises DsrunError where it is none."""
        found = metadata(Path(self.path))
        found.storage_meta = dcp.metadata.StorageMeta(load_id=self.load_id)
        return found


def metadata(folder: Path) -> Metadata:
    """What lies where. Raises DsrunError where the folder's isn't what torch writes."""
    path = folder / ".metadata"
    hint = "Continue the run from an earlier checkpoint, or start it again."
    try:
        with path.open("rb") as file:
            found = _read(file)
    except OSError as error:
        raise DsrunError(f"can't be read: {error.strerror}", where=str(path), hint=hint) from error
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, IndexError) as error:
        raise DsrunError(f"is no checkpoint's metadata: {error}", where=str(path), hint=hint) from error
    if not isinstance(found, Metadata):
        raise DsrunError("is no checkpoint's metadata", where=str(path), hint=hint)
    return found


def _read(file: IO[bytes]) -> Any:
    return _OnlyMetadata(file).load()


def rank_of(file: Path) -> int:
    """The rank that writes this file of a checkpoint; the metadata are the first one's."""
    found = re.fullmatch(r"__(\d+)_\d+\.distcp", file.name)
    return int(found[1]) if found else 0


def save(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors, each rank its rows, on all ranks at once. Raises OSError or RuntimeError where one can't."""
    try:
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder))
    except CheckpointException as error:
        raise _first(error) from error


def load(folder: Path, tensors: Mapping[str, torch.Tensor], *, alone: bool = False) -> None:
    """Fill tensors with what a folder has under their names, however it was divided. alone: in one process.

    Raises DsrunError where it lacks one, or has another shape of it.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # alone is what is meant
            dcp.load(dict(tensors), storage_reader=_Reader(folder), no_dist=alone)
    except CheckpointException as error:
        reason = str(_first(error)).strip().splitlines()[0]
        hint = "Was job.json changed, or the model that it names?"
        raise DsrunError(f"can't be read: {reason}", where=str(folder), hint=hint) from error


def stored(folder: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors in a folder, by their names: `size`, `properties.dtype`. Raises as `metadata` does."""
    return dict(metadata(folder).state_dict_metadata)


def trained_weights(folder: Path) -> Mapping[str, torch.Tensor]:
    """See Backend. Raises as `metadata` does."""
    return _Whole(folder)


class _Whole(Mapping[str, torch.Tensor]):
    """The weights in a folder: each is put together when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stored = {
            name.removeprefix(MODEL): one for name, one in stored(folder).items() if name.startswith(MODEL)
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        one = self._stored[name]
        weight = torch.empty(one.size, dtype=one.properties.dtype)
        load(self._folder, {MODEL + name: weight}, alone=True)
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def _first(error: CheckpointException) -> Exception:
    """What went wrong on the first rank on which something did."""
    cause = next((cause for cause, _ in error.failures.values()), None)
    if isinstance(cause, (OSError, RuntimeError, DsrunError)):
        return cause
    return RuntimeError(str(cause or error))
