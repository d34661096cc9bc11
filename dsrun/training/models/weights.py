"""Weights in their shards: listed without being read, and copied out in small parts.

How a model is loaded, shard by shard:

1. `listed`: the headers of all shards say which weight lies where (`Stored`); no weight is read.
2. `Skeleton`: the model is made with shapes only. Names and shapes are compared with what is stored (`problems`).
3. `Skeleton.fill`: weight after weight, in the order of the files, gets its memory on the rank's device, and `Reader`
   copies its values there, cast to the type that is computed in. On a CPU, in the file's own type, the mapped file is
   the memory. `Skeleton.fill_partitioned` does the same under ZeRO-3: rank 0 reads, all ranks get the values from it
   and keep their part. With `Skeleton.fill_rows` each rank reads some rows of every weight (FSDP).

Every part is looked at as it is read: a weight that is NaN or infinite is named with its file (`finite.check`).

A shard is mapped into memory, and every PART_BYTES it is mapped again: pages that were read then no longer count as
this process's memory. So a rank holds its own weights and one part of a shard, whatever the shard's size.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dsrun.errors import DsrunError, Problem
from dsrun.training import finite, pickles
from dsrun.training.models.text_part import class_of

PART_BYTES = 32 << 20
"""Bytes of a shard that are read before it is mapped again."""
COMPUTED = re.compile(r"(.*\.)?rotary(_pos)?_emb\.inv_freq")
"""Tables of rotary positions, which old checkpoints hold; the model computes its own."""
INDEXES = (
    ("model.safetensors.index.json", "*.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model*.bin"),
)
MOST_NAMED = 5
"""Weights that an error names."""


@dataclass(frozen=True)
class Stored:
    """A weight's place: some rows of a tensor in a shard. A tensor without dimensions counts as one row."""

    path: Path
    """The shard."""
    name: str
    """The tensor's name in the shard."""
    shape: tuple[int, ...]
    """Shape of these rows."""
    dtype: torch.dtype
    """The type in the shard."""
    first: int = 0
    """The tensor's row that is the first of these."""

    def part(self, first: int, rows: int) -> Stored:
        """Some of these rows."""
        return dataclasses.replace(self, first=self.first + first, shape=(rows, *self.shape[1:]))

    @property
    def start(self) -> int:
        """The first element's place in the whole tensor."""
        return self.first * math.prod(self.shape[1:])


def write_index(folder: Path, files: Mapping[str, str], total: int) -> None:
    """Write the index of shards. files: each weight's; total: bytes of all weights."""
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    (folder / INDEXES[0][0]).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def weight_files(folder: Path) -> list[Path]:
    """The shards of a checkpoint folder, safetensors before .bin: those that an index names, the one file, or all."""
    for index, pattern in INDEXES:
        if (folder / index).is_file():
            names = set(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values())
            return [folder / name for name in sorted(names)]
        single = folder / index.removesuffix(".index.json")
        if files := [single] if single.is_file() else sorted(folder.glob(pattern)):
            return files
    raise DsrunError("holds no weights", where=str(folder))


def open_shard(path: Path) -> dict[str, torch.Tensor]:
    """A shard's tensors as views of the mapped file. A .bin file is read as weights only: no code in it runs.

    Raises DsrunError where it can't be read.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
        content = pickles.load(path, engine=False)
        return {name: tensor for name, tensor in content.items() if isinstance(tensor, torch.Tensor)}
    except pickles.CodeRefusedError:
        raise
    except Exception as error:  # damaged files end in errors of many kinds: pickle's, zip's, safetensors' own
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DsrunError(
            f"can't be read as weights: {reason[0]}", where=str(path), hint="Is the download complete?"
        ) from error


def listed(folder: Path) -> dict[str, Stored]:
    """Every weight of a checkpoint folder by its name there; nothing but headers is read."""
    weights = {}
    for path in weight_files(folder):
        for name, tensor in open_shard(path).items():
            weights[name] = Stored(path, name, tuple(tensor.shape), tensor.dtype)
    return weights


class Reader:
    """Copies weights out of shards; one shard is open at a time."""

    def __init__(self, part_bytes: int = PART_BYTES) -> None:
        self._part_bytes = part_bytes
        self._path: Path | None = None
        self._views: dict[str, torch.Tensor] = {}
        self._left = 0

    def copy(self, stored: Stored, target: torch.Tensor) -> None:
        """Fill a contiguous tensor of the same shape; its type and device are its own. Raises as `finite.check` does.

        To a GPU the numbers are sent in the checkpoint's type and cast there, so that the host holds no second copy.
        """
        flat, begin = target.detach().view(-1), stored.start
        done = 0
        while done < flat.numel():
            source = self._view(stored)
            if self._left < source.element_size():
                del source
                self._close()
                continue
            count = min(flat.numel() - done, self._left // source.element_size())
            part = source[begin + done : begin + done + count]
            self._left -= part.nbytes
            copied = flat[done : done + count]
            copied.copy_(part if target.device.type == "cpu" else part.to(target.device))
            finite.check(copied, stored.name, str(stored.path), original=part)
            done += count
            del source, part  # views keep a closed shard mapped

    def view(self, stored: Stored) -> torch.Tensor:
        """The weight in the mapped file: what is written there stays in this process's memory.

        Raises as `finite.check` does.
        """
        begin, size, step = stored.start, math.prod(stored.shape), max(1, self._part_bytes // 8)
        whole = self._view(stored)[begin : begin + size]
        for first in range(0, size, step):
            finite.check(whole[first : first + step], stored.name, str(stored.path))
        return whole.view(stored.shape)

    def _view(self, stored: Stored) -> torch.Tensor:
        if self._path != stored.path or not self._views:
            self._close()
            self._views, self._path, self._left = open_shard(stored.path), stored.path, self._part_bytes
        return self._views[stored.name].reshape(-1)

    def _close(self) -> None:
        self._views, self._path = {}, None


def problems(
    stored: Mapping[str, Stored],
    wanted: Mapping[str, Sequence[int]],
    aliases: Mapping[str, str],
    where: str,
    *,
    hint: str = "Is the download complete, and config.json the checkpoint's own?",
) -> list[Problem]:
    """Problems of a checkpoint: weights that are missing, have another shape, or don't belong to the model.

    wanted: the model's names and shapes; aliases: names of tied weights -> the wanted name that stands for them.
    """
    names = {aliases.get(name, name) for name in stored}
    missing = sorted(wanted.keys() - names)
    unknown = sorted(
        name for name in stored.keys() - wanted.keys() - aliases.keys() if not COMPUTED.fullmatch(name)
    )
    texts = (
        missing and f"lacks {len(missing)} of {len(wanted)} weights: {_few(missing)}",
        mis_shaped(stored, wanted),
        unknown and f"holds {len(unknown)} weights that the model has no place for: {_few(unknown)}",
    )
    return [Problem(text, where, hint) for text in texts if text]


def mis_shaped(stored: Mapping[str, Stored], wanted: Mapping[str, Sequence[int]]) -> str:
    """The weights of another shape than the model's, in words; empty where there are none."""
    shapes = [
        f"{stored[name].name} has shape {list(stored[name].shape)}, the model wants {list(shape)}"
        for name, shape in wanted.items()
        if name in stored and tuple(stored[name].shape) != tuple(shape)
    ]
    return _few(shapes, "; ")


def _few(texts: Sequence[str], between: str = ", ") -> str:
    return between.join(texts[:MOST_NAMED]) + (" ..." if len(texts) > MOST_NAMED else "")


class _Unmade(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
    """Gives tensors of torch.empty a shape and no memory: layers make their weights so, and nothing else."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.empty:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


class Skeleton:
    """A model whose parameters have shapes and no memory yet; its buffers are computed as always.

    config: a transformers config; kind: a class of transformers', by default the one that computes the config's text.
    wanted: names and shapes of the weights that a checkpoint must hold, tied ones once; aliases: the other names of
    tied weights -> the name in `wanted`.
    """

    def __init__(self, config: Any, dtype: torch.dtype, *, kind: Any = None, **options: Any) -> None:
        if kind is None:
            kind, config = class_of(config)
        with _Unmade():
            self.model = kind._from_config(config, dtype=dtype, **options)
        self._tensors: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, str] = {}
        first_name: dict[int, str] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) in first_name:
                self.aliases[name] = first_name[id(tensor)]
            else:
                first_name[id(tensor)] = name
                self._tensors[name] = tensor

    @property
    def wanted(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all weights, by their names."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def fits(self, stored: Mapping[str, Stored]) -> bool:
        """Whether these are the model's weights, each once and in a type that can be cast, and all else is computed."""
        names = [self.aliases.get(name, name) for name in stored if not COMPUTED.fullmatch(name)]
        return (
            not problems(stored, self.wanted, self.aliases, "")
            and len(names) == len(set(names))
            and all(place.dtype.is_floating_point and place.dtype.itemsize > 1 for place in stored.values())
            and not any(buffer.is_meta for buffer in self.model.buffers())
        )

    def fill(self, stored: Mapping[str, Stored], device: torch.device) -> None:
        """Give every weight its memory on the device and its value.

        On a CPU and in the file's own type, the mapped file itself is the memory until something is written there: the
        file stays as it is.
        """
        reader, by_name = Reader(), self._by_name(stored)
        for name in self._in_file_order(by_name):
            self._place(name, self._read(reader, by_name[name], name, device, views=True))
        self._move_buffers(device)

    def fill_partitioned(
        self,
        stored: Mapping[str, Stored],
        device: torch.device,
        partition: Callable[[Iterator[torch.nn.Parameter]], None],
        *,
        reads: bool,
    ) -> None:
        """Fill a model of which every rank keeps only its part of each weight.

        partition: takes each parameter as it is made, on all ranks at once, and leaves this rank's part of it.
        reads: whether this rank reads the files (the first one does); the others get the values from it.
        """
        reader, by_name = Reader(), self._by_name(stored)
        # Each weight is whole on every rank for a moment: the largest come first, while memory holds little else.
        names = sorted(self._in_file_order(by_name), key=lambda name: -self._tensors[name].numel())

        def made() -> Iterator[torch.nn.Parameter]:
            for name in names:
                source = by_name[name] if reads else None
                # No variable may go on holding the whole weight here once it is partitioned: `self._read(...)` has
                # none.
                if (parameter := self._place(name, self._read(reader, source, name, device))) is not None:
                    yield parameter
                    give_back()
                else:  # a buffer: it is not partitioned
                    torch.distributed.broadcast(self._tensors[name], 0)

        self._move_buffers(device)
        partition(made())

    def fill_rows(
        self,
        stored: Mapping[str, Stored],
        device: torch.device,
        rows: Callable[[int], tuple[int, int]],
        made: Callable[[torch.Tensor, torch.nn.Parameter], torch.nn.Parameter],
    ) -> None:
        """Fill a model of which every rank reads some rows of each weight: those along its first dimension.

        rows: a weight's number of rows -> this rank's first row and their number. made: this rank's rows, on the CPU,
        and a parameter of the whole shape -> the parameter that stands in the model. device: where buffers go.
        """
        reader, by_name = Reader(), self._by_name(stored)
        self._move_buffers(device)
        for name in self._in_file_order(by_name):
            mould = self._tensors[name]
            if not _is_parameter(mould):
                reader.copy(by_name[name], mould.data)
                continue
            first, count = rows(mould.shape[0])
            part = torch.empty((count, *mould.shape[1:]), dtype=mould.dtype)
            if count:
                reader.copy(by_name[name].part(first, count), part)
            self._place(name, made(part, mould))

    def _by_name(self, stored: Mapping[str, Stored]) -> dict[str, Stored]:
        return {
            self.aliases.get(name, name): place
            for name, place in stored.items()
            if name in self._tensors or name in self.aliases
        }

    def _in_file_order(self, by_name: Mapping[str, Stored]) -> list[str]:
        return sorted(self._tensors, key=lambda name: str(by_name[name].path))

    def _read(
        self, reader: Reader, source: Stored | None, name: str, device: torch.device, *, views: bool = False
    ) -> torch.Tensor:
        """The memory of a weight; with its value unless source is None."""
        mould = self._tensors[name]
        if views and source and source.dtype == mould.dtype and device.type == "cpu" and _is_parameter(mould):
            return reader.view(source)
        target = mould.data  # a buffer has its memory already
        if _is_parameter(mould):
            target = torch.empty(mould.shape, dtype=mould.dtype, device=device)
        if source is not None:
            reader.copy(source, target)
        return target

    def _place(self, name: str, tensor: torch.Tensor) -> torch.nn.Parameter | None:
        """Put a parameter into the model under all its names; None for a buffer, which is there already."""
        mould = self._tensors[name]
        if not _is_parameter(mould):
            return None
        parameter = tensor
        if not _is_parameter(tensor):
            parameter = torch.nn.Parameter(tensor, requires_grad=mould.requires_grad)
        for each in (name, *(alias for alias, main in self.aliases.items() if main == name)):
            path, _, attribute = each.rpartition(".")
            setattr(self.model.get_submodule(path), attribute, parameter)
        return parameter

    def _move_buffers(self, device: torch.device) -> None:
        move_buffers(self.model, device)
        state = self.model.state_dict(keep_vars=True)
        self._tensors |= {name: state[name] for name, old in self._tensors.items() if not _is_parameter(old)}


def move_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Move a model's buffers to a device, and nothing else."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                raise RuntimeError(f"{type(module).__name__}.{name} was made without values")
            module._buffers[name] = buffer.to(device)


def give_back() -> None:
    """Return freed memory to the system, where the C library can: it lies in holes between parts that stay."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)
