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

Experts that ranks divide have a group of their own, of which only the ranks with the same experts have shares; in
pieces they have transformers' names and places (`experts`).

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

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dsrun.errors import DsrunError
from dsrun.training import pickles
from dsrun.training.engines.checkpoints.divided import Rejoined, divisions, whole_weights
from dsrun.training.engines.checkpoints.experts import DividedExperts
from dsrun.training.engines.checkpoints.saved import LazyWeights, Piece, Saved, Shard, laid_flat

MP_RANK = re.compile(r"mp_rank_(\d+)_")
SCALING = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of fp16's loss scaler that change; the others are in the config (runtime/fp16/loss_scaler.py)."""
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""The counters of DeepSpeed's engine."""
MALFORMED = (KeyError, IndexError, AttributeError, ValueError, TypeError)
"""Errors of reading files that have another form than DeepSpeed's."""
Inner = list[dict[str, Any]]
"""The inner optimizer's states: one a flat tensor, or at stage 0 one a weight."""


def load(
    engine: Any, folder: Path, *, tp: int = 1, wrote: int = 1, experts: DividedExperts | None = None
) -> int:
    """Restore weights, optimizer and loss scale on every rank, whatever wrote them; returns the steps done.

    Every rank reads, through memory maps, what it is going to hold; under tensor parallelism one whole weight at a
    time.
    tp: tensor-parallel ranks of this job; wrote: of the job that wrote the checkpoint. experts: those that this job's
    ranks divide.
    Raises DsrunError where the files are not ones that this knows, or don't hold the whole model.
    """
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    parts = [read(folder, _sizes(engine, experts), rank) for rank in range(wrote)]
    saved = parts[0]  # counters, loss scale and schedule are the same in every rank's files
    content: Saved | Rejoined = saved
    if tp > 1 or wrote > 1:
        content = Rejoined(parts, divisions(engine), folder)
    if stage == 3:
        optimizer.checkpoint_event_prologue()
    for shard in _held(engine, tp, experts):
        _fill(shard, content, folder)
        _put_states(optimizer, shard, saved.adam_steps)
    _update_16_bit_weights(engine)
    if stage == 3:
        optimizer.checkpoint_event_epilogue()
    scaler = getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)
    for name, value in saved.scaling.items():
        if hasattr(scaler, name):
            setattr(scaler, name, value)
    for name in COUNTERS:
        setattr(engine, name, saved.counters[name])
    if engine.lr_scheduler is not None and saved.schedule:
        engine.lr_scheduler.load_state_dict(saved.schedule)
        engine.lr_scheduler.step(saved.schedule["last_batch_iteration"])  # sets the rate as that step did
    return saved.counters["step"]


def read(folder: Path, sizes: Mapping[str, int], rank: int = 0) -> Saved:
    """A checkpoint's files, mapped into memory. sizes: elements of every trained weight, in the optimizer's order.

    rank: the tensor-parallel rank that wrote the files.
    """
    try:
        model, files = _files(folder, rank)
        shapes, experts = _shapes(model, files), DividedExperts.of_checkpoint(model)
        if not files:
            # This job's sizes give the order alone: another number of tensor-parallel ranks wrote other shapes.
            # Nor the order, where ranks divide experts: DeepSpeed's layers have it their own way.
            order = {name: number for number, name in enumerate(shapes)}
            sizes = {
                name: math.prod(shapes.get(name, (sizes[name],)))
                for name in sorted(sizes, key=lambda name: order.get(name, len(order)))
            }
            shards, inner = _of_stage_0(model, sizes)
            scaler = model["optimizer"]
        else:
            of_stage = _of_stage_3 if _is_stage_3(files) else _of_stages_1_and_2
            shards, inner = of_stage(files, model.get("param_shapes") or [], experts)
            scaler = vars(files[0]["loss_scaler"])
        counters = {name: int(model[name]) for name in ("step", *COUNTERS)}
    except MALFORMED as error:
        what = f"is not a checkpoint that other ranks can continue ({type(error).__name__}: {error})"
        hint = "Continue it with the preset and the number of ranks that wrote it."
        raise DsrunError(what, where=str(folder), hint=hint) from error
    # At stage 0 in fp32 FusedAdam counts in the last weight's state alone (ops/adam/fused_adam.py).
    steps = max((int(state["step"]) for state in inner if "step" in state), default=0)
    scaling = {name: scaler[name] for name in SCALING if name in scaler}
    return Saved(shards, steps, scaling, counters, model.get("lr_scheduler") or {}, shapes)


def _shapes(model: Mapping[str, Any], files: list[Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights in a model's file; stage 3 has no weights there, and writes their shapes instead. Nor has
    it divided experts, at any stage."""
    experts = DividedExperts.of_checkpoint(model)
    shapes: dict[str, tuple[int, ...]] = {}
    if not _is_stage_3(files):
        weights = model.get("module", {})
        shapes = {name: tuple(weight.shape) for name, weight in weights.items() if torch.is_tensor(weight)}
    if _is_stage_3(files) or experts:
        shapes |= {name: tuple(shape) for name, shape in _in_one(model["param_shapes"]).items()}
    return experts.shapes(shapes) if experts else shapes


def _in_one(groups: list[Mapping[str, Any]]) -> dict[str, Any]:
    """What all parameter groups have, by the weights' names."""
    return {name: value for group in groups for name, value in group.items()}


def _is_stage_3(files: list[Any]) -> bool:
    return bool(files) and "fp32_flat_groups" in files[0]


def trained_weights(folder: Path) -> Mapping[str, torch.Tensor]:
    """Every trained weight in a checkpoint, whole, by its name in the model; read in one process, on the CPU.

    Stages 0 to 2 keep the weights that are computed with in one file, which is mapped into memory. Stage 3 keeps the
    ranks' shares of the fp32 copies, tensor-parallel ranks keep parts: those are put together when they are asked for.
    Raises DsrunError where the files are not ones that this knows, or don't hold the whole weights.
    """
    names = [MP_RANK.search(path.name) for path in folder.glob("*model_states.pt")]
    ranks = len({name[1] for name in names if name})
    try:
        parts = [_weights_of(*_files(folder, rank)) for rank in range(max(1, ranks))]
    except MALFORMED as error:
        what = f"holds no whole weights ({type(error).__name__}: {error})"
        hint = "Continue the run: its end writes the model."
        raise DsrunError(what, where=str(folder), hint=hint) from error
    return whole_weights(parts) if ranks > 1 else parts[0]


def _files(folder: Path, rank: int) -> tuple[Any, list[Any]]:
    """A tensor-parallel rank's files, mapped into memory: its model, and the optimizer's states of each data-parallel
    rank; no states at stage 0. Raises IndexError where there is nothing."""
    models = sorted(folder.glob(f"*mp_rank_{rank:02d}_model_states.pt"), key=_rank_of)
    states = sorted(folder.glob(f"*zero_pp_rank_*_mp_rank_{rank:02d}_optim_states.pt"), key=_rank_of)
    return pickles.load(models[0]), [pickles.load(path)["optimizer_state_dict"] for path in states]


def _weights_of(model: Any, files: list[Any]) -> Mapping[str, torch.Tensor]:
    experts, shapes = DividedExperts.of_checkpoint(model), _shapes(model, files)
    whole: dict[str, torch.Tensor] = {}
    parts: dict[str, list[tuple[Piece, torch.Tensor]]] = defaultdict(list)
    if _is_stage_3(files):
        for _, _, flat, pieces in _stage_3_parts(files, model["param_shapes"], experts):
            for piece in pieces:
                parts[piece.name].append((piece, flat))
    else:
        whole = {name: tensor for name, tensor in model["module"].items() if torch.is_tensor(tensor)}
        if experts is None:
            return whole
        whole = {experts.outside(name): tensor for name, tensor in whole.items()}
        for shard in _of_stages_1_and_2(files, model["param_shapes"], experts)[0]:
            for piece in shard.pieces:
                parts[piece.name].append((piece, shard.weights))

    def weight(name: str) -> torch.Tensor:
        return whole[name] if name in whole else laid_flat(parts[name]).reshape(shapes[name])

    return LazyWeights(shapes, weight)


def _rank_of(path: Path) -> int:
    """The rank that wrote a file; 0 for one that all share."""
    rank = re.search(r"zero_pp_rank_(\d+)_", path.name)
    return int(rank[1]) if rank else 0


# What a checkpoint's files hold: the shards, and the optimizer's own states.


def _of_stages_1_and_2(
    files: list[Any], shapes: list[Mapping[str, Any]], experts: DividedExperts | None
) -> tuple[list[Shard], Inner]:
    """A rank's flat tensor holds a run of the weights; a weight goes on with the next rank (stage_1_and_2.py)."""
    shards, inner = [], []
    # The files say where in the flat tensor a weight's run lies, not which of the weight's elements it begins with: in
    # the order of the ranks that is where the rank before stopped that has elements of the same weight.
    begun: dict[tuple[str, int], int] = defaultdict(int)
    for rank, file in enumerate(files):
        base = file["base_optimizer_state"]
        flats, slices = file["single_partition_of_fp32_groups"], file["param_slice_mappings"]
        for group, weights, addresses in zip(base["param_groups"], flats, slices, strict=True):
            state = base["state"][group["params"][0]]
            pieces: list[Piece] = []
            for name, address in addresses.items():
                number = rank % experts.ranks if experts and experts.matrix(name) else 0
                piece = Piece(name, begun[name, number], address.start, address.numel)
                pieces += _outside(piece, experts, shapes, number)
                begun[name, number] += address.numel
            shards.append(Shard(weights, _like(weights, state), pieces))
            inner.append(state)
    return shards, inner


def _outside(
    piece: Piece, experts: DividedExperts | None, shapes: list[Mapping[str, Any]], rank: int
) -> Iterable[Piece]:
    """A piece by transformers' names and places. shapes: those of each group's weights; rank: that of the experts."""
    return experts.pieces(piece, _in_one(shapes)[piece.name], rank) if experts else (piece,)


def _of_stage_3(
    files: list[Any], shapes: list[Mapping[str, Any]], experts: DividedExperts | None
) -> tuple[list[Shard], Inner]:
    """Every rank holds an equal share of every weight, the last one a padded one (partition_parameters.py)."""
    shards, inner = [], []
    for file, group, weights, pieces in _stage_3_parts(files, shapes, experts):
        state = file["optimizer_state_dict"]["state"][group]
        shards.append(Shard(weights, _like(weights, state), pieces))
        inner.append(state)
    return shards, inner


def _stage_3_parts(
    files: list[Any], shapes: list[Mapping[str, Any]], experts: DividedExperts | None
) -> Iterator[tuple[Any, int, torch.Tensor, list[Piece]]]:
    """Each rank's file, with each parameter group's number, flat tensor, and what lies where in it."""
    for rank, file in enumerate(files):
        for number, (flat, group) in enumerate(zip(file["fp32_flat_groups"], shapes, strict=True)):
            pieces = _group_shares(group, rank, len(files), experts)
            sizes = (shape.numel() for shape in group.values())
            if flat.numel() < sum(_share(size, len(files)) for size in sizes):
                raise KeyError("the optimizer's states are in an NVMe disk's swap files")
            yield file, number, flat, pieces


def _group_shares(
    group: Mapping[str, Any], rank: int, ranks: int, experts: DividedExperts | None
) -> list[Piece]:
    """One rank's share, at stage 3, of every weight in a parameter group, by transformers' names. group: shapes.

    Ranks with the same experts have shares of them, all ranks of the other weights.
    """
    in_group = experts.ranks if experts and any(map(experts.matrix, group)) else 1
    sizes = {name: math.prod(shape) for name, shape in group.items()}
    shares = _shares(sizes, rank // in_group, ranks // in_group)
    return [part for piece in shares for part in _outside(piece, experts, [group], rank % in_group)]


def _of_stage_0(model: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[list[Shard], Inner]:
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


def _shapes_held(engine: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of every trained weight, or of this rank's part, in the order that the optimizer was given them."""
    return {
        engine.param_names[weight]: tuple(getattr(weight, "ds_shape", None) or weight.shape)
        for weight in engine.module.parameters()
        if weight.requires_grad
    }


def _sizes(engine: Any, experts: DividedExperts | None = None) -> dict[str, int]:
    """Elements of every trained weight, or of this rank's part, in the order that the optimizer was given them."""
    shapes = _shapes_held(engine)
    return {name: math.prod(shape) for name, shape in (experts.shapes(shapes) if experts else shapes).items()}


def _held(engine: Any, tp: int = 1, experts: DividedExperts | None = None) -> Iterator[Shard]:
    """The flat tensors that this rank's optimizer steps on, with what lies in them.

    Of tp neighbours each has a part of every weight, which ZeRO divides over the ranks with the same part.
    """
    optimizer, names, shapes = engine.optimizer, engine.param_names, _shapes_held(engine)
    rank, ranks = dist.get_rank() // tp, dist.get_world_size() // tp
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3
        for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
            of_group = {names[weight]: shapes[names[weight]] for weight in group}
            yield Shard(flat, {}, _group_shares(of_group, rank, ranks, experts))
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):  # stages 1 and 2
        flats = optimizer.single_partition_of_fp32_groups
        for group, flat in zip(optimizer.bit16_groups, flats, strict=True):
            pieces: list[Piece] = []
            for weight in group:
                if mapping := weight._hp_mapping:  # None: no element of it lies on this rank
                    master = mapping.hp_fragment_address
                    first = mapping.lp_fragment_address.start
                    piece = Piece(names[weight], first, master.start, master.numel)
                    pieces += _outside(piece, experts, [shapes], rank % experts.ranks if experts else 0)
            yield Shard(flat, {}, pieces)
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
    """Copy a shard's weights, and make tensors for its states, in which padding is zero.

    Raises DsrunError where the checkpoint lacks an element: every piece has to be met in full, for the weights would
    keep what the model was loaded with, and nobody would see it but by the loss.
    """
    weights = shard.weights.data.view(-1)
    for piece in shard.pieces:
        copied = 0
        for source, start, offset, count in saved.overlaps(piece):
            weights[offset : offset + count].copy_(source.weights.reshape(-1)[start : start + count])
            for name, values in source.states.items():
                if name not in shard.states:
                    shard.states[name] = torch.zeros_like(
                        shard.weights, dtype=values.dtype, requires_grad=False
                    )
                target = shard.states[name].view(-1)
                target[offset : offset + count].copy_(values.reshape(-1)[start : start + count])
            copied += count
        if copied != piece.count:
            what = f"holds {copied} of {piece.count} elements of {piece.name}"
            raise DsrunError(what, where=str(folder), hint="Was it written by the same model?")


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
    if stage in (1, 2):
        optimizer.update_lp_params()
        return
    computed: list[Any] = []  # at stage 0 in fp32 the optimizer steps the model's own weights
    masters: list[Any] = []
    if stage == 3:
        computed, masters = optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat
    elif hasattr(optimizer, "fp32_groups_flat"):  # the model's weights are views of the flat tensors
        computed, masters = optimizer.fp16_groups_flat, optimizer.fp32_groups_flat
    elif hasattr(optimizer, "fp32_groups"):
        computed = [*itertools.chain(*optimizer.fp16_groups)]
        masters = [*itertools.chain(*optimizer.fp32_groups)]
    for weights, master in zip(computed, masters, strict=True):
        weights.data.copy_(master.data)


def _like(weights: torch.Tensor, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The entries of an optimizer's state that have a value for each weight. They may be padded."""
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
