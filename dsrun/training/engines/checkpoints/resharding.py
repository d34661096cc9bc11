"""Continue from a checkpoint that other ranks wrote: another number of them, another ZeRO stage, another offload.

DeepSpeed's own way (ds_to_universal, then checkpoint.load_universal) writes everything once more, can't go from stages
1 and 2 to 3 or back, and knows nothing of stage 0. Here the files are read as they are. Every stage keeps an
optimizer's numbers in a few flat tensors; what differs is only which elements of which weight lie where:

| stage | flat tensors | what lies in rank r's |
| --- | --- | --- |
| 0, fp32 | none: the model's own weights | every weight |
| 0, 16 bits | one (fused Adam), or a copy of each weight | every weight, one after the other |
| 1, 2 | one a parameter group | the r-th of equal runs through all weights; a weight goes on with the next rank |
| 3 | one a parameter group | the r-th of equal shares of every weight, the last one padded |

So both sides are described by the same two values, `Piece` and `Shard`. A weight w of 10 elements, saved at stage 3
by two ranks and read at stage 3 by three (x: padding):

    saved    rank 0: w[0:5] = Piece(w, first=0, ..., count=5)    rank 1: w[5:10]
    held     rank 0: w[0:4]    rank 1: w[4:8]    rank 2: w[8:10] x x

Rank 1 copies w[4:5] from the first file and w[5:8] from the second. Each rank does the same (`load`):

1. `read`: the files of all ranks, mapped into memory, as shards: what lies where in them.
2. `_held`: the flat tensors of this rank's own optimizer, as shards.
3. `_fill`: of each piece that this rank holds, copy what overlaps with the saved ones: the fp32 weights, and what the
   optimizer keeps of each (Adam's two moments). Missing elements are an error, padding is zero.
4. `_put_states`: hand the moments and Adam's step count to the optimizer.
5. `_update_16_bit_weights`: make the weights that are computed with from the fp32 ones.
6. The loss scaler, the engine's counters, and where a scheduler of the config's is.

Where a term says a file, it is DeepSpeed 0.19's.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dsrun.errors import DsrunError
from dsrun.training import pickles
from dsrun.training.engines.checkpoints.divided import Rejoined, WholeWeights, divisions
from dsrun.training.engines.checkpoints.saved import Piece, Saved, Shard

MP_RANK = re.compile(r"mp_rank_(\d+)_")
SCALING = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What fp16's loss scaler has learnt; the rest of it is in the config (runtime/fp16/loss_scaler.py)."""


def load(engine: Any, folder: Path, *, tp: int = 1, wrote: int = 1) -> int:
    """Restore weights, optimizer and loss scale on every rank, whatever wrote them; returns the steps done.

    Every rank reads, through memory maps, what it is going to hold, and no more; under tensor parallelism, tp of this
    job, or `wrote` of the one that wrote it, whole weights one at a time.
    Raises DsrunError where the files are not ones that this knows, or don't hold the whole model.
    """
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    content: Saved | Rejoined
    parts = [read(folder, _sizes(engine), rank) for rank in range(wrote)]
    saved = parts[0]
    divided = tp > 1 or wrote > 1
    content = Rejoined(parts, divisions(engine), folder) if divided else saved
    if stage == 3:
        optimizer.checkpoint_event_prologue()
    for shard in _held(engine, tp):
        _fill(shard, content, folder)
        _put_states(optimizer, shard, saved.adam_steps)
    _update_16_bit_weights(engine)
    if stage == 3:
        optimizer.checkpoint_event_epilogue()
    scaler = getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)
    for name, value in saved.scaling.items():
        if hasattr(scaler, name):
            setattr(scaler, name, value)
    for name in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, name, saved.counters[name])
    if engine.lr_scheduler is not None and saved.schedule:
        engine.lr_scheduler.load_state_dict(saved.schedule)
        engine.lr_scheduler.step(saved.schedule["last_batch_iteration"])  # sets the rate as that step did
    return saved.counters["step"]


def read(folder: Path, sizes: Mapping[str, int], rank: int = 0) -> Saved:
    """A checkpoint's files, mapped into memory. sizes: elements of every trained weight, in the optimizer's order.

    rank: the tensor-parallel one whose they are.
    """
    try:
        model, files = _files(folder, rank)
        shapes = _shapes(model, files)
        if not files:
            sizes = {name: math.prod(shapes.get(name, (size,))) for name, size in sizes.items()}
            shards, inner = _of_stage_0(model, sizes)
            scaler = model["optimizer"]
        elif "fp32_flat_groups" in files[0]:
            shards, inner = _of_stage_3(files, model["param_shapes"])
            scaler = vars(files[0]["loss_scaler"])
        else:
            shards, inner = _of_stages_1_and_2(files)
            scaler = vars(files[0]["loss_scaler"])
        counters = {
            name: int(model[name]) for name in ("step", "global_steps", "global_samples", "skipped_steps")
        }
    except (KeyError, IndexError, AttributeError, ValueError, TypeError) as error:
        raise DsrunError(
            f"is not a checkpoint that other ranks can continue ({type(error).__name__}: {error})",
            where=str(folder),
            hint="Continue it with the preset and the number of ranks that wrote it.",
        ) from error
    # At stage 0 in fp32 FusedAdam counts in the last weight's state alone (ops/adam/fused_adam.py).
    steps = max((int(state["step"]) for state in inner if "step" in state), default=0)
    scaling = {name: scaler[name] for name in SCALING if name in scaler}
    return Saved(shards, steps, scaling, counters, model.get("lr_scheduler") or {}, shapes)


def _shapes(model: Mapping[str, Any], files: list[Any]) -> dict[str, tuple[int, ...]]:
    """Of the weights in a file of a model; at stage 3, which has none there, by what is written beside them."""
    if files and "fp32_flat_groups" in files[0]:
        return {name: tuple(shape) for named in model["param_shapes"] for name, shape in named.items()}
    return {name: tuple(one.shape) for name, one in model.get("module", {}).items() if torch.is_tensor(one)}


def trained_weights(folder: Path) -> Mapping[str, torch.Tensor]:
    """Every trained weight in a checkpoint, whole, by its name in the model; read in one process, on the CPU.

    What is divided is put together as it is asked for, so that no more than that is in memory; the rest is mapped.

    Stages 0 to 2 keep them as they are computed with in one file, stage 3 the ranks' shares of their fp32 copies; of
    tensor-parallel ranks each has its parts.
    Raises DsrunError where the files are not ones that this knows, or don't hold the whole weights.
    """
    ranks = len(
        {found[1] for path in folder.glob("*model_states.pt") if (found := MP_RANK.search(path.name))}
    )
    try:
        parts = [_weights_of(*_files(folder, rank)) for rank in range(max(1, ranks))]
    except (KeyError, IndexError, AttributeError, ValueError, TypeError) as error:
        raise DsrunError(
            f"holds no whole weights ({type(error).__name__}: {error})",
            where=str(folder),
            hint="Continue the run: its end writes the model.",
        ) from error
    return WholeWeights(parts) if ranks > 1 else parts[0]


def _files(folder: Path, rank: int) -> tuple[Any, list[Any]]:
    """What a tensor-parallel rank wrote, mapped into memory: its model, and the optimizer's states of each
    data-parallel rank; none at stage 0. Raises IndexError where there is nothing."""
    models = sorted(folder.glob(f"*mp_rank_{rank:02d}_model_states.pt"), key=_rank_of)
    states = sorted(folder.glob(f"*zero_pp_rank_*_mp_rank_{rank:02d}_optim_states.pt"), key=_rank_of)
    return pickles.load(models[0]), [pickles.load(path)["optimizer_state_dict"] for path in states]


def _weights_of(model: Any, files: list[Any]) -> Mapping[str, torch.Tensor]:
    if not files or "fp32_flat_groups" not in files[0]:
        return {name: tensor for name, tensor in model["module"].items() if torch.is_tensor(tensor)}
    return _Joined(files, model["param_shapes"])


class _Joined(Mapping[str, torch.Tensor]):
    """What stage 3 divided: each weight is put together when it is asked for."""

    def __init__(self, files: list[Any], shapes: list[Mapping[str, Any]]) -> None:
        self._shapes = {name: shape for named in shapes for name, shape in named.items()}
        self._parts: dict[str, list[tuple[torch.Tensor, Piece]]] = {name: [] for name in self._shapes}
        for rank, file in enumerate(files):
            for flat, named in zip(file["fp32_flat_groups"], shapes, strict=True):
                sizes = {name: shape.numel() for name, shape in named.items()}
                if flat.numel() < sum(_share(size, len(files)) for size in sizes.values()):
                    raise KeyError("the optimizer's states are in an NVMe disk's swap files")
                for piece in _shares(sizes, rank, len(files)):
                    self._parts[piece.name].append((flat.reshape(-1), piece))

    def __getitem__(self, name: str) -> torch.Tensor:
        parts = self._parts[name]
        whole = torch.empty(self._shapes[name], dtype=parts[0][0].dtype)
        for flat, piece in parts:
            part = flat[piece.offset : piece.offset + piece.count]
            whole.view(-1)[piece.first : piece.first + piece.count] = part
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def _rank_of(path: Path) -> int:
    """The rank that wrote a file; 0 for one that all share."""
    found = re.search(r"zero_pp_rank_(\d+)_", path.name)
    return int(found[1]) if found else 0


# What a checkpoint's files hold. Each returns the shards, and the optimizer's own states.


def _of_stages_1_and_2(files: list[Any]) -> tuple[list[Shard], list[dict[str, Any]]]:
    """A rank's flat tensor holds a run of the weights; a weight goes on with the next rank (stage_1_and_2.py)."""
    shards, inner = [], []
    begun: dict[str, int] = defaultdict(int)
    for file in files:
        base = file["base_optimizer_state"]
        for group, weights, lies in zip(
            base["param_groups"],
            file["single_partition_of_fp32_groups"],
            file["param_slice_mappings"],
            strict=True,
        ):
            state = base["state"][group["params"][0]]
            pieces = []
            for name, address in lies.items():
                pieces.append(Piece(name, begun[name], address.start, address.numel))
                begun[name] += address.numel
            shards.append(Shard(weights, _like(weights, state), pieces))
            inner.append(state)
    return shards, inner


def _of_stage_3(
    files: list[Any], shapes: list[Mapping[str, Any]]
) -> tuple[list[Shard], list[dict[str, Any]]]:
    """Every rank holds an equal share of every weight, the last one a padded one (partition_parameters.py)."""
    shards, inner = [], []
    for rank, file in enumerate(files):
        states = file["optimizer_state_dict"]["state"]
        for number, (weights, named) in enumerate(zip(file["fp32_flat_groups"], shapes, strict=True)):
            sizes = {name: shape.numel() for name, shape in named.items()}
            if weights.numel() < sum(_share(size, len(files)) for size in sizes.values()):
                raise KeyError("the optimizer's states are in an NVMe disk's swap files")
            shards.append(Shard(weights, _like(weights, states[number]), _shares(sizes, rank, len(files))))
            inner.append(states[number])
    return shards, inner


def _of_stage_0(
    model: Mapping[str, Any], sizes: Mapping[str, int]
) -> tuple[list[Shard], list[dict[str, Any]]]:
    """In fp32 the model's weights are the optimizer's; in 16 bits they are one flat tensor, or a list of copies."""
    file = model["optimizer"]
    base = file.get("optimizer_state_dict", file)
    states = [base["state"][number] for group in base["param_groups"] for number in group["params"]]
    if "fp32_groups_flat" in file:
        (weights,) = file["fp32_groups_flat"]
        return [Shard(weights, _like(weights, states[0]), _in_a_row(sizes))], states
    if "fp32_groups" in file:
        tensors = [tensor for group in file["fp32_groups"] for tensor in group]
    else:
        tensors = [model["module"][name] for name in sizes]
    return [
        Shard(tensor.reshape(-1), _like(tensor, state), [Piece(name, 0, 0, sizes[name])])
        for name, tensor, state in zip(sizes, tensors, states, strict=True)
    ], states


# What this rank's engine holds


def _sizes(engine: Any) -> dict[str, int]:
    """Elements of every trained weight, or of this rank's part, in the order that the optimizer was given them."""
    return {
        engine.param_names[weight]: int(getattr(weight, "ds_numel", None) or weight.numel())
        for weight in engine.module.parameters()
        if weight.requires_grad
    }


def _held(engine: Any, tp: int = 1) -> Iterator[Shard]:
    """The flat tensors that this rank's optimizer steps on, with what lies in them; of tp neighbours each has a part of
    every weight, which ZeRO divides over the ranks with the same part."""
    optimizer, names = engine.optimizer, engine.param_names
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3
        for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
            sizes = {names[weight]: weight.ds_numel for weight in group}
            yield Shard(flat, {}, _shares(sizes, dist.get_rank() // tp, dist.get_world_size() // tp))
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):  # stages 1 and 2
        for group, flat in zip(
            optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True
        ):
            lies = [(names[weight], weight._hp_mapping) for weight in group if weight._hp_mapping]
            yield Shard(flat, {}, [
                Piece(name, found.lp_fragment_address.start, found.hp_fragment_address.start,
                      found.hp_fragment_address.numel)
                for name, found in lies
            ])  # fmt: skip
    elif hasattr(optimizer, "fp32_groups_flat"):  # stage 0 in 16 bits, with a fused Adam
        (flat,) = optimizer.fp32_groups_flat
        yield Shard(flat, {}, _in_a_row(_sizes(engine)))
    else:
        tensors = [tensor for group in _base(optimizer).param_groups for tensor in group["params"]]
        for (name, size), tensor in zip(_sizes(engine).items(), tensors, strict=True):
            yield Shard(tensor, {}, [Piece(name, 0, 0, size)])


def _base(optimizer: Any) -> Any:
    """The Adam inside DeepSpeed's optimizer; at stage 0 in fp32 there is nothing around it."""
    return getattr(optimizer, "optimizer", optimizer)


@torch.no_grad()
def _fill(shard: Shard, saved: Saved | Rejoined, folder: Path) -> None:
    """Copy what belongs into a shard: its weights, and new tensors for its states. Padding is zero in the latter."""
    weights = shard.weights.data.view(-1)
    for piece in shard.pieces:
        found = 0
        for source, start, offset, count in saved.overlaps(piece):
            weights[offset : offset + count].copy_(source.weights.reshape(-1)[start : start + count])
            for name, values in source.states.items():
                if name not in shard.states:
                    shard.states[name] = torch.zeros_like(
                        shard.weights, dtype=values.dtype, requires_grad=False
                    )
                target = shard.states[name].view(-1)
                target[offset : offset + count].copy_(values.reshape(-1)[start : start + count])
            found += count
        if found != piece.count:
            raise DsrunError(
                f"holds {found} of {piece.count} elements of {piece.name}",
                where=str(folder),
                hint="Was it written by the same model?",
            )


def _put_states(optimizer: Any, shard: Shard, adam_steps: int) -> None:
    """Give the optimizer its states. torch's own optimizers count in a tensor, DeepSpeed's in an int."""
    base = _base(optimizer)
    plain = type(base).__module__.startswith("torch.optim")
    step = torch.tensor(float(adam_steps)) if plain else adam_steps
    base.state[shard.weights] = {"step": step, **shard.states}


@torch.no_grad()
def _update_16_bit_weights(engine: Any) -> None:
    """Make the weights that are computed with from the fp32 ones, as the end of a step does."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 3:
        flats = zip(
            optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True
        )
        for computed, master in flats:
            computed.data.copy_(master.data)
    elif stage > 0:
        optimizer.update_lp_params()
    elif hasattr(optimizer, "fp32_groups_flat"):
        for computed, master in zip(optimizer.fp16_groups_flat, optimizer.fp32_groups_flat, strict=True):
            computed.data.copy_(master.data)  # the model's weights are views of it
    elif hasattr(optimizer, "fp32_groups"):
        for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for weight, master in zip(weights, masters, strict=True):
                weight.data.copy_(master.data)


def _like(weights: torch.Tensor, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The entries of an optimizer's state that have a value for each weight. Some are padded, where weights are not."""
    return {
        name: value
        for name, value in state.items()
        if torch.is_tensor(value) and value.dim() and value.numel() >= weights.numel()
    }


def _share(size: int, ranks: int) -> int:
    """Elements of a weight that each rank holds at stage 3, padding included."""
    return -(-size // ranks)


def _shares(sizes: Mapping[str, int], rank: int, ranks: int) -> list[Piece]:
    """One rank's share of every weight, one after another. The last shares may be short of elements, or empty."""
    pieces, offset = [], 0
    for name, size in sizes.items():
        share = _share(size, ranks)
        first = min(rank * share, size)
        pieces.append(Piece(name, first, offset, min(share, size - first)))
        offset += share
    return pieces


def _in_a_row(sizes: Mapping[str, int]) -> list[Piece]:
    """Whole weights, one after another."""
    pieces: list[Piece] = []
    for name, size in sizes.items():
        pieces.append(Piece(name, 0, pieces[-1].offset + pieces[-1].count if pieces else 0, size))
    return pieces
