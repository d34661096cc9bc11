"""The reader of every pickle in a checkpoint: tensors, plain values and a short list of classes; nothing else.

A pickle names functions, which whoever unpickles it calls: so a file that somebody else can write runs code in the
process that reads it. Two unpicklers are kept from that here, by the same list:

- torch's own for `weights_only` reads files of tensors (torch/_weights_only_unpickler.py);
- Python's reads the metadata of FSDP's files, which torch's can't: it knows protocol 2 alone.

Python 3.11.0 to 3.11.3 pickle a member of an enumeration as a call of getattr; later and earlier ones as a call of the
class. In getattr's place stands `_member`, which gives members of an enumeration and nothing else.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import EnumMeta
from pathlib import Path
from typing import Any

import torch

from dsrun.errors import DsrunError

METADATA = {
    "torch": {"Size", "device", "float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},
}  # fmt: skip
"""Module -> the names in it that the metadata of FSDP's files may use (torch/distributed/checkpoint).

Not BytesStorageMetadata: torch unpickles what it describes, whatever that names (default_planner.py, load_bytes)."""
GETATTR = {("builtins", "getattr"), ("__builtin__", "getattr")}
NAMED = re.compile(r"GLOBAL ([\w.]+)")
"""The words in which torch's unpickler names what it refuses."""
NO_MEMORY = re.compile(r"can't allocate memory|out of memory")
HINT = "It would run with your rights: who else can write there?"


class CodeRefusedError(DsrunError):
    """A file asks for code, which isn't run. No accident makes such a file, so nothing goes on without it."""


def load(path: Path, *, map_location: Any = "cpu", mapped: bool = True, engine: bool = True) -> Any:
    """The content of a file that torch.save has written.

    mapped: tensors stay in the file until they are used. engine: four classes of DeepSpeed's may be named, beside
    tensors and plain values. Raises CodeRefusedError where anything else is, DsrunError where the file is damaged, and
    OSError where it can't be read.
    """

    classes = _classes_of_deepspeed() if engine else []
    with explained(path), torch.serialization.safe_globals(classes):
        return torch.load(path, map_location=map_location, mmap=mapped and is_zip(path), weights_only=True)


def load_metadata(path: Path) -> Any:
    """The content of FSDP's `.metadata`. Raises as `load` does."""

    with explained(path), path.open("rb") as file:
        return _OnlyMetadata(file).load()


def is_zip(path: Path) -> bool:
    """Whether a file can be mapped: files of torch before 1.6 are no zip archives."""
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def refusal(path: Path, error: BaseException) -> DsrunError:
    """The error of an unpickler in words. torch's own words advise to run the code."""
    if named := NAMED.search(str(error)):
        what = f"this checkpoint asks for code ({named[1]}), which is not run: its files hold values alone"
        return CodeRefusedError(what, where=str(path), hint=HINT)
    return DsrunError(f"is damaged: it is no whole file of values ({type(error).__name__})", where=str(path))


class _OnlyMetadata(pickle.Unpickler):
    """An unpickler that knows the parts of METADATA."""

    def find_class(self, module: str, name: str) -> Any:
        """The class of that name. Raises UnpicklingError for any other."""
        if (module, name) in GETATTR:
            return _member
        if name not in METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return super().find_class(module, name)


def _member(owner: Any, name: str) -> Any:
    """A member of an enumeration: the one call of getattr that is allowed."""
    if not isinstance(owner, EnumMeta) or name not in owner.__members__:
        raise pickle.UnpicklingError(f"GLOBAL builtins.getattr of {name!r}")
    return owner.__members__[name]


def _classes_of_deepspeed() -> list[Any]:
    """Classes of the loss scale, the stage, and a weight's place in a flat tensor: values without code of their own."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address, (_member, "builtins.getattr")]


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Put errors of an unpickler into words; the system's own pass."""
    try:
        yield
    except (OSError, MemoryError, DsrunError):
        raise
    except Exception as error:  # a damaged file ends in errors of many kinds: pickle's, zip's, torch's own
        if NO_MEMORY.search(str(error)):
            raise
        # Not "from error": a log would quote torch's advice, and a diagnosis would repeat it.
        raise refusal(path, error) from None
