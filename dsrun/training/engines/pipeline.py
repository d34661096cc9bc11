"""DeepSpeed's pipeline as a training engine: a rank holds the layers of one stage, micro batches go through all stages.

A step's micro batches are the pipeline's: while one stage works on one, the stage before works on the next
(runtime/pipe/schedule.py, TrainSchedule: one forward, one backward). With m micro batches and p stages a rank waits
(p-1)/(m+p-1) of the time. Ranks lie stage by stage: rank = stage * dp_size + data-parallel index.

Any model fits whose base has `embed_tokens`, `layers` that take `position_embeddings`, `norm` and `rotary_emb`, beside
an `lm_head`: Llama's pattern, and GLM's. Nothing but hidden states goes from stage to stage, so there is no mask:
attention is causal by itself, padding is on the right, and examples are not packed. Where a comment names a file, it is
DeepSpeed 0.19's.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.utils import partition_balanced

from dsrun.errors import DsrunError, TrainingError
from dsrun.job.job import Job
from dsrun.training import pickles
from dsrun.training.data.batches import IGNORED
from dsrun.training.engines import deepspeed, zero
from dsrun.training.engines.deepspeed import (
    NAME,
    awareness,
    check_file,
    connect,
    divided,
    fill,
    held_type,
    unaware,
)
from dsrun.training.engines.on_ranks import first_not_finite
from dsrun.training.loss import StepTotals
from dsrun.training.ranks.barrier import from_all_ranks

__all__ = [
    "NAME", "awareness", "check_file", "connect", "divided", "fill", "held_type", "initialize", "layout", "rank_of",
    "trained_weights", "unaware",
]  # fmt: skip
TIED = "embeddings"
LAYER_FILE = re.compile(r"layer_(\d+)-model")


class PipelineEmbedding(torch.nn.Module):  # type: ignore[misc]
    """Token ids, [examples, tokens], to hidden states, [examples, tokens, hidden]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embed = model.model.embed_tokens

    @property
    def weight(self) -> torch.Tensor:
        """The weight that TiedLayerSpec ties."""
        return self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids)


class PipelineLayer(torch.nn.Module):  # type: ignore[misc]
    """One layer. Rotary positions are computed in each stage, from a copy of what makes them: it has no weights."""

    def __init__(self, model: Any, number: int) -> None:
        super().__init__()
        self.layer = model.model.layers[number]
        self.rotary = copy.deepcopy(model.model.rotary_emb)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[examples, tokens, hidden] in and out."""
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        output = self.layer(
            hidden, attention_mask=None, position_ids=positions,
            position_embeddings=self.rotary(hidden, positions), use_cache=False,
        )  # fmt: skip
        return output[0] if isinstance(output, tuple) else output


class PipelineEnd(torch.nn.Module):  # type: ignore[misc]
    """The last norm, or the head: hidden states to logits, [examples, tokens, vocabulary]. name: see `prefix`."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        super().__init__()
        self.add_module(name, module)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [examples, tokens, hidden]."""
        (module,) = self.children()
        return module(hidden)


def specs(model: Any) -> list[LayerSpec]:
    """The pipeline's layers, of which each stage builds its own: embedding, layers, norm, head."""
    middle = [LayerSpec(PipelineLayer, model, number) for number in range(model.config.num_hidden_layers)]
    middle.append(LayerSpec(PipelineEnd, "norm", model.model.norm))
    if not model.config.tie_word_embeddings:
        return [LayerSpec(PipelineEmbedding, model), *middle, LayerSpec(PipelineEnd, "head", model.lm_head)]

    def head(tied: PipelineEmbedding, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ tied.weight.t()

    tied = TiedLayerSpec(TIED, PipelineEmbedding, model)
    return [tied, *middle, TiedLayerSpec(TIED, PipelineEmbedding, model, forward_fn=head)]


def prefix(key: str, place: int) -> str:
    """transformers' name of a weight that a layer of the pipeline calls `key`. place: the layer's, from 0."""
    kind, _, rest = key.partition(".")
    where = {"embed": "model.embed_tokens", "layer": f"model.layers.{place - 1}", "norm": "model.norm"}
    return f"{where.get(kind, 'lm_head')}.{rest}"


def initialize(job: Job, model: Any) -> Pipeline:
    """See Backend. model: whole, on the CPU; the other stages' layers lose their memory, and only their shapes stay."""
    net = PipelineModule(
        specs(model), num_stages=job.parallel.pp, partition_method="type:PipelineLayer", dynamic_shape=True
    )
    held = set(map(id, net.modules()))
    for module in model.modules():
        if not any(id(part) in held for part in module.modules()):
            module.to("meta")
    engine = deepspeed.engine_of(job, net)
    zero.engaged(job, engine)
    return Pipeline(engine, job, model)


def layout(job: Job) -> dict[str, Any]:
    """See Backend."""
    return {**deepspeed.layout(job), "pp": job.parallel.pp}


def rank_of(job: Job, file: Path) -> int:
    """See Backend. The first rank of a stage writes its layers' files (PipelineModule.save_state_dict). The names of
    the others have the stage (mp_rank) and, where each data-parallel rank writes one, that rank."""
    if layer := LAYER_FILE.search(file.name):
        return _stage_of(int(layer[1]), _layers(job), job.parallel.pp) * job.dp_size
    share, stage = (re.search(rf"{name}_rank_(\d+)_", file.name) for name in ("_pp", "mp"))
    return (int(stage[1]) if stage else 0) * job.dp_size + int(share[1] if share else 0)


def _layers(job: Job) -> int:
    """The number of layers in the job's model."""
    path = Path(job.prepared.model_dir, "config.json")
    config = job.model.architecture or json.loads(path.read_text(encoding="utf-8"))
    return int(config["num_hidden_layers"])


def _stage_of(place: int, layers: int, stages: int) -> int:
    """The stage that has a layer of the pipeline, as PipelineModule divides them by their type."""
    bounds = partition_balanced([0, *([1] * layers), 0, 0], stages)
    return next(stage for stage in range(stages) if place < bounds[stage + 1])


def trained_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every weight in a checkpoint's files of layers, by transformers' name; a tied head has none of its own."""
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("layer_*-model_states.pt")):
        place = int(LAYER_FILE.search(file.name)[1])  # type: ignore[index]
        for key, value in pickles.load(file).items():
            if not key.startswith("rotary."):
                weights[prefix(key, place)] = value
    return weights


class Pipeline(deepspeed.DeepSpeed):
    """A PipelineEngine behind the names of dsrun.training.engines.Engine, which says what each does."""

    def __init__(self, engine: Any, job: Job, model: Any) -> None:
        super().__init__(engine, job)
        self.module = self.outline = model
        self._divisor = 1.0
        engine.module.loss_fn = self.loss
        self._names = {
            prefix(key, place): weight
            for place, layer in _own_layers(engine.module)
            for key, weight in layer.named_parameters()
        }
        if (
            model.config.tie_word_embeddings
        ):  # a head tied to another stage's weight is a shape of its own by now
            model.lm_head.weight = model.model.embed_tokens.weight
        names = from_all_ranks(list(self._names))
        # The owner is the first rank that has a weight: going backwards, it is written last.
        self._owners = {name: rank for rank in reversed(range(job.world_size)) for name in names[rank]}
        self._check()

    def _check(self) -> None:
        """Raise TrainingError unless this rank has its stage's layers and no others.

        With all of them on every rank the losses would be the same.
        """
        grid, parallel = self._engine.grid, self._job.parallel
        layers = {name.split(".")[2] for name in self._names if name.startswith("model.layers.")}
        total = self.module.config.num_hidden_layers
        engaged = (
            grid.get_pipe_parallel_world_size() == parallel.pp
            and grid.get_data_parallel_world_size() == self._job.dp_size
            and grid.get_data_parallel_id() == self._job.dp_index(dist.get_rank())
            and 0 < len(layers) < total
        )
        if not engaged:
            what = f"DeepSpeed has given this rank {len(layers)} of {total} layers in {parallel.pp} stages"
            hint = "Train without it, and report it with the version of DeepSpeed."
            raise TrainingError(what, where=f"--pp {parallel.pp}", hint=hint)

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """A micro batch's cross-entropy of the next token: the sum, divided by what `take_step` or a call has set."""
        targets = labels[:, 1:].flatten()
        entropy = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), targets, ignore_index=IGNORED, reduction="sum"
        )
        return entropy / self._divisor

    def take_step(
        self, batches: Sequence[Mapping[str, Any]], totals: StepTotals, loss: Any, *, varies: bool = False
    ) -> torch.Tensor:
        """See Engine. DeepSpeed averages over micro batches and pipelines, which is undone in the divisor."""
        del loss, varies  # one would take a model's whole forward, the other is refused before the start
        self._divisor = totals.target_tokens / totals.micro_batches
        self._engine.train_batch(data_iter=((batch["input_ids"], batch["labels"]) for batch in batches))
        # All stages know the pipeline's mean. Only the first gives it, for the parts of all ranks are to add up.
        part = self._engine.dp_group_loss.detach().float() / self._job.dp_size
        return part if self._engine.is_first_stage() else torch.zeros_like(part)

    def __call__(self, **batch: Any) -> Any:
        """A forward without gradients, for all ranks at once. The same loss on all stages; no logits."""
        self._divisor = float(batch["num_items_in_batch"])
        pair = (batch["input_ids"], batch["labels"])
        losses = self._engine.eval_batch(
            iter([pair]), reduce_output=None, bcast_loss=False, num_micro_batches=1
        )
        grid, stages = self._engine.grid, self._job.parallel.pp
        value = torch.zeros((), device=self.device)
        if self._engine.is_last_stage():
            value.copy_(losses[0].detach())
        dist.broadcast(value, grid.stage_to_global(stage_id=stages - 1), group=grid.get_pipe_parallel_group())
        return SimpleNamespace(loss=value)

    def non_finite(self) -> str | None:
        """See Engine. Each rank looks at its stage."""
        return first_not_finite(((name, self._names.get(name)) for name in self._owners), self.device)

    def full_weights(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """See Engine. One weight at a time comes from the first rank of its stage."""
        rank, weights = dist.get_rank(), {}
        for name in names:
            owner = self._owners[name]
            if owner == rank == 0:
                weights[name] = self._names[name].detach().cpu()
            elif owner == rank:
                dist.send(self._names[name].detach().contiguous(), 0)
            elif rank == 0:
                received = torch.empty_like(self.module.get_parameter(name), device=self.device)
                dist.recv(received, owner)
                weights[name] = received.cpu()
        return weights

    @contextmanager
    def whole(self) -> Iterator[bool]:
        """See Engine. No rank can hold all weights: a forward takes every stage."""
        yield False

    def load(self, folder: Path, written: Mapping[str, Any]) -> int:
        """See Engine. Only the layout that wrote it reads it: layers and the optimizer's states are divided by
        stage."""
        if written != layout(self._job):
            what = f"was written by {written.get('world_size')} ranks in {written.get('pp', 1)} stages"
            hint = "Continue it as it was started: as many ranks, --pp and preset."
            raise DsrunError(what, where=str(folder), hint=hint)
        return self._load_alike(folder)


def _own_layers(net: Any) -> Iterator[tuple[int, Any]]:
    """This stage's layers with weights of their own, each with its place in the pipeline."""
    for place, layer in enumerate(net.forward_funcs, net._local_start):
        if isinstance(layer, torch.nn.Module):
            yield place, layer
