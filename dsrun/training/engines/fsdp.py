"""torch's FSDP2 (torch.distributed.fsdp.fully_shard) as a training engine.

Every weight, its gradient and its optimizer's states are DTensors of which a rank holds some rows: Shard(0), as
torch.chunk divides them. Each part (the embedding, a layer, the output layer) is gathered for its forward and again for
its backward, and the part behind it meanwhile. With fewer `shard_ranks` than ranks the model is there several times:
neighbouring ranks share a copy, and what they have reduced is summed over the copies (hybrid sharding, HSDP).

A bf16 job keeps fp32 weights, gathers them in bf16 and reduces gradients in fp32; weights that are not trained stay in
bf16. How a model gets there, without being whole in any rank but for one weight at a time:

1. `fill`: it is made with shapes only; each rank reads its rows of every weight (`divided`: gets them from rank 0).
2. The adapter, where there is one, is put on. It is small, and whole on every rank.
3. `initialize`: the rows are taken out of the model, which gets shapes again; `fully_shard` divides the layers and the
   model; the rows are put back as what fully_shard has made of the weights.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dsrun.errors import DsrunError
from dsrun.job.job import FsdpSpec, Job
from dsrun.training.engines import MicroSteps
from dsrun.training.engines.checkpoints import sharded_files
from dsrun.training.engines.on_ranks import all_tensors, first_not_finite, room_for
from dsrun.training.engines.optimizers import sharded_optimizer
from dsrun.training.models.layers import layers_of

if TYPE_CHECKING:
    from dsrun.training.models.weights import Skeleton, Stored

NAME = "FSDP"
trained_weights = sharded_files.trained_weights
check_file = sharded_files.check_file


def connect() -> None:
    """See Backend. Without DeepSpeed, whose import takes seconds. Beside NCCL gloo is there for what is offloaded."""
    gpus = os.environ.get("DS_ACCELERATOR") == "cuda"
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")


def awareness(job: Job) -> None:
    """None: transformers makes no partitioned model here."""


def unaware() -> AbstractContextManager[None]:
    """See Backend."""
    return nullcontext()


def held_type(job: Job, computed: torch.dtype) -> torch.dtype:
    """See Backend: fp32 where every weight is trained, as these are what the optimizer steps."""
    return computed if job.peft.freezes else torch.float32


def fill(job: Job, skeleton: Skeleton, stored: Mapping[str, Stored], device: torch.device) -> None:
    """See Backend: each rank reads its own rows from the files, and no others."""
    shard = _spec(job).shard_ranks

    def rows(count: int) -> tuple[int, int]:
        most = -(-count // shard)  # as torch.chunk
        first = min(count, dist.get_rank() % shard * most)
        return first, min(count, first + most) - first

    keeps_on = _keeps_on(job)
    skeleton.fill_rows(stored, device, rows, lambda part, mould: _stand_in(mould, part.to(keeps_on), device))


def divided(job: Job, read: Callable[[], Any], outline: Callable[[], Any], device: torch.device) -> Any:
    """See Backend: only the first rank reads, and every other one gets its rows from it, weight after weight."""
    from dsrun.training.models.weights import move_buffers

    mesh = _mesh(job, _keeps_on(job).type)
    model = read() if dist.get_rank() == 0 else outline()
    move_buffers(model, device)
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in saved:
            dist.broadcast(buffer, 0)
    for names, weight in list(_tied(model)):
        values = torch.empty_like(weight, device="cpu") if weight.is_meta else weight.detach()
        placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
        part = distribute_tensor(values.to(mesh.device_type), mesh, placements)
        _put(model, names, _stand_in(weight, part.to_local(), device))
    return model


def initialize(job: Job, model: Any) -> Fsdp:
    """See Backend. Raises DsrunError for a model that doesn't say what its layers are."""
    device = _device(job)
    rows = _take_out(model, job)
    kept = _shard(model, job, _mesh(job, device.type))
    for names, weight in list(_tied(model)):
        if names[0] in rows:
            _put(model, names, _put_in(rows.pop(names[0]), weight, device, _keeps_on(job)))
    return Fsdp(model, job, device, kept)


def layout(job: Job) -> dict[str, Any]:
    """See Backend. Any number of ranks reads it."""
    return {"engine": "fsdp", "world_size": job.world_size, "optimizer": job.training.optimizer}


def rank_of(job: Job, file: Path) -> int:  # noqa: ARG001
    """See Backend."""
    return sharded_files.rank_of(file)


class Fsdp(MicroSteps):
    """A model that fully_shard has divided, behind the names of dsrun.training.engines.Engine."""

    def __init__(self, model: Any, job: Job, device: torch.device, kept: Sequence[Any] = ()) -> None:
        """kept: the modules whose weights stay gathered from their forward to their backward."""
        if device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):  # torch 2.6
            hint = "Install torch 2.7 or newer, or take a preset of ZeRO, such as zero3."
            raise DsrunError("FSDP on CPUs needs torch 2.7", where=f"torch {torch.__version__}", hint=hint)
        self.module = self.outline = model
        self.device, self._job, self._spec = device, job, _spec(job)
        self._kept = [model, *kept]
        self.train, self.eval = model.train, model.eval
        parameters = model.named_parameters()
        self._trained = {name: weight for name, weight in parameters if weight.requires_grad}
        self.optimizer = sharded_optimizer(job, self._trained.values())
        self._micro_steps, self._skipped = 0, 0
        self._norm: torch.Tensor | None = None
        self._given_last: bool | None = None
        check_engaged(model, self._spec.shard_ranks)

    def __call__(self, **batch: Any) -> Any:
        return self.module(**batch)

    def set_learning_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def backward(self, share: torch.Tensor) -> None:
        """FSDP averages over all ranks, which is undone by multiplying; micro-steps are summed.

        Before the last micro-step gradients are not summed over copies of the model. Over the ranks of a copy they are,
        so that nobody keeps more than its rows of them, unless the job has the room (whole_gradients).
        """
        last = self._is_last
        self.module.set_requires_gradient_sync(last or not self._spec.whole_gradients)
        self.module.set_requires_all_reduce(last)
        (share * dist.get_world_size()).backward()

    def last_micro_step(self, last: bool) -> None:
        self._given_last = last

    @property
    def _is_last(self) -> bool:
        """Whether the present micro-step is a step's last: as `last_micro_step` says, or by its number."""
        if self._given_last is not None:
            return self._given_last
        return self._micro_steps + 1 == self._spec.grad_accum

    def step(self) -> None:
        """See Engine. The norm is that of the whole gradient; the host waits for it, so as not to step where it is no
        number."""
        if not self._is_last:
            self._micro_steps += 1
            return
        self._micro_steps = 0
        weights = [weight for weight in self._trained.values() if weight.grad is not None]
        self._norm = norm = whole_norm([weight.grad for weight in weights])
        if math.isfinite(float(norm)):
            if self._spec.grad_clip:
                nn.utils.clip_grads_with_norm_(weights, self._spec.grad_clip, norm)
            self.optimizer.step()
        else:  # one step would spoil every weight, and the optimizer's states
            self._skipped += 1
        self.optimizer.zero_grad()

    def gradient_norm(self) -> torch.Tensor | None:
        return self._norm

    def loss_scale(self) -> None:
        """None: there is no fp16."""

    def skipped_steps(self) -> int:
        """See Engine: those whose gradient was not finite."""
        return self._skipped

    def non_finite(self) -> str | None:
        """See Engine. Each rank looks at its rows."""
        self._reshard()
        rows = ((name, weight.to_local()) for name, weight in self._trained.items())
        return first_not_finite(rows, self.device)

    def full_weights(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """See Engine. One weight at a time is gathered on every rank, in the type that is computed with."""
        self._reshard()
        weights, dtype = {}, _computed(self._job)
        tensors = all_tensors(self.module)
        for name in names:
            whole = tensors[name].detach()
            if isinstance(whole, DTensor):
                whole = whole.to(self.device, dtype).full_tensor()
            if dist.get_rank() == 0:
                weights[name] = whole.cpu()
        return weights

    @contextmanager
    def whole(self) -> Iterator[bool]:
        """See Engine. Weights are gathered once, and kept past each forward."""
        wanted = sum(map(torch.numel, self.module.parameters())) * _computed(self._job).itemsize
        if not room_for(wanted, self.device):
            yield False
            return
        self.module.set_reshard_after_forward(False)
        for part in _parts(self.module):
            part.unshard()
        try:
            yield True
        finally:
            self._reshard()
            for part in _parts(self.module):
                kept = any(part is module for module in self._kept)
                part.set_reshard_after_forward(not kept, recurse=False)

    def save(self, folder: Path, step: int) -> None:
        """See Engine: torch's own distributed format (sharded_files)."""
        sharded_files.save(folder, self._saved(step))

    def capture(self, folder: Path, step: int) -> sharded_files.CapturedRows:
        """See Engine."""
        return sharded_files.CapturedRows(folder, self._saved(step))

    def _saved(self, step: int) -> dict[str, torch.Tensor]:
        """All tensors of a checkpoint, by their names in it."""
        tensors = self._weights()
        for name, weight in self._trained.items():
            for key, state in self.optimizer.state[weight].items():
                if isinstance(state, torch.Tensor):
                    tensors[f"{sharded_files.OPTIMIZER}{name}.{key}"] = state
        return {**tensors, sharded_files.STEP: torch.tensor(step)}

    def load(self, folder: Path, written: Mapping[str, Any]) -> int:
        """See Engine; however many ranks wrote it. The optimizer's states are made as the folder has them."""
        if written.get("engine") != "fsdp":
            hint = "Continue it with the preset that wrote it."
            raise DsrunError("is no checkpoint of FSDP's", where=str(folder), hint=hint)
        steps = torch.tensor(0)
        tensors = {sharded_files.STEP: steps, **self._weights()}
        states: dict[str, dict[str, torch.Tensor]] = {}
        # An optimizer makes its states in its first step, so there are none yet: room is made for those in the folder.
        for path, saved in sharded_files.stored(folder).items():
            name, _, key = path.removeprefix(sharded_files.OPTIMIZER).rpartition(".")
            if path.startswith(sharded_files.OPTIMIZER) and name in self._trained:
                tensors[path] = states.setdefault(name, {})[key] = self._state(self._trained[name], saved)
        sharded_files.load(folder, tensors)
        for name, state in states.items():
            self.optimizer.state[self._trained[name]] = state
        return int(steps)

    def _weights(self) -> dict[str, torch.Tensor]:
        """The rows of the trained weights, by their names in a checkpoint."""
        self._reshard()
        return {sharded_files.MODEL + name: weight.detach() for name, weight in self._trained.items()}

    def _state(self, weight: DTensor, saved: Any) -> torch.Tensor:
        """An empty state of a weight: of its shape and division, or one number (Adam's count)."""
        if saved.size == weight.shape:
            return torch.zeros_like(weight, dtype=saved.properties.dtype)
        fused = self.optimizer.param_groups[0].get("fused")  # which counts on the device
        device = weight.to_local().device if fused else "cpu"
        return torch.zeros(saved.size, dtype=saved.properties.dtype, device=device)

    def _reshard(self) -> None:
        """Make rows of weights again: after a forward without a backward the model's own stay gathered."""
        for part in _parts(self.module):
            part.reshard()


def whole_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of all gradients together, a scalar in float32, after one all-reduce where they are DTensors.

    Summed in fp64, as DeepSpeed does under ZeRO: on CPUs torch's fp32 sum over four million numbers is off by 7e-4.
    """
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).float()


def check_engaged(model: Any, shard_ranks: int) -> None:
    """Raise RuntimeError where a weight is not divided over this many ranks: it would train all the same, in more
    memory."""
    for name, weight in model.named_parameters():
        mesh = weight.device_mesh if isinstance(weight, DTensor) else None
        most = -(-weight.shape[0] // shard_ranks)
        if mesh is None or mesh.size(mesh.ndim - 1) != shard_ranks or weight.to_local().shape[0] > most:
            raise RuntimeError(f"{name} is not sharded over {shard_ranks} ranks")
    if not isinstance(model, FSDPModule):
        raise RuntimeError(f"{type(model).__name__} is not FSDP's")


def _spec(job: Job) -> FsdpSpec:
    if job.fsdp is None:
        raise RuntimeError("the job is another engine's")
    return job.fsdp


def _device(job: Job) -> torch.device:
    """The device that this rank computes on."""
    gpus = job.accelerator == "cuda"
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")


def _keeps_on(job: Job) -> torch.device:
    """The device that keeps rows between steps."""
    return torch.device("cpu") if _spec(job).offload else _device(job)


def _computed(job: Job) -> torch.dtype:
    return torch.bfloat16 if job.precision == "bf16" else torch.float32


def _mesh(job: Job, kind: str) -> DeviceMesh:
    """All ranks, in copies of neighbouring ones where there are several. kind: of their devices."""
    shard = _spec(job).shard_ranks
    copies = job.world_size // shard
    if copies == 1:
        return init_device_mesh(kind, (shard,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (copies, shard), mesh_dim_names=("copies", "shard"))


def _stand_in(mould: nn.Parameter, rows: torch.Tensor, device: torch.device) -> nn.Parameter:
    """A weight of the whole shape, which takes no memory and bears a rank's own rows of it.

    So an adapter that is put on the model sees the layer's size and device. Of a DTensor, PEFT would take a rank's rows
    for the whole weight (tuners_utils.py, for tensor parallelism).
    """
    zero = torch.zeros((), dtype=rows.dtype, device=device)
    weight = nn.Parameter(zero.expand(mould.shape), requires_grad=mould.requires_grad)
    weight.rows = rows
    return weight


def _put_in(
    rows: torch.Tensor, weight: DTensor, device: torch.device, keeps_on: torch.device
) -> nn.Parameter:
    """A weight that fully_shard has divided, with this rank's rows. weight: the same, without values."""
    part = DTensor.from_local(
        rows.to(device), weight.device_mesh, weight.placements, run_check=False, shape=weight.shape,
        stride=weight.stride(),
    )  # fmt: skip
    return nn.Parameter(part.to(keeps_on), requires_grad=weight.requires_grad)


def _shard(model: Any, job: Job, mesh: DeviceMesh) -> list[Any]:
    """fully_shard on the embedding, every layer, the output layer, and then on the model, which keeps the rest.

    In one group with the model, both ends would be gathered before the first layer and reduced after the last, with
    nothing to compute meanwhile. Returns the parts that stay gathered after their forward, beside the model.
    """
    cast = MixedPrecisionPolicy()
    if job.precision == "bf16":
        cast = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    pinned = CPUOffloadPolicy(pin_memory=job.accelerator == "cuda")
    offload = pinned if _spec(job).offload else OffloadPolicy()
    layers = layers_of(model)
    if not layers:
        what = f"{type(model).__name__} doesn't say which of its modules are layers"
        raise DsrunError(what, where=f"--preset {job.preset}", hint="Take --preset zero3.")
    first, last = ends_of(model, layers)
    for module in [*first, *layers]:
        fully_shard(module, mesh=mesh, mp_policy=cast, offload_policy=offload)
    for module in last:  # backward begins with it, so it would be gathered again at once
        fully_shard(module, mesh=mesh, mp_policy=cast, offload_policy=offload, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=cast, offload_policy=offload)
    _prefetch([*first, *layers, *last])
    return last


def ends_of(model: Any, layers: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The embedding and the output layer of a model, in a list each, which is empty where it can't be sharded apart.

    That is where they share a weight, as a tied embedding does: it is needed from the first layer to the last.
    """
    shared = {id(weight) for names, weight in _tied(model) if len(names) > 1}
    inside = {id(module) for layer in layers for module in layer.modules()}

    def apart(module: Any) -> bool:
        weights = [id(weight) for weight in module.parameters()]
        return bool(weights) and shared.isdisjoint(weights) and id(module) not in inside

    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:  # transformers knows it by none of the usual names: the model keeps it
        embedding = None
    ends = (embedding, model.get_output_embeddings())
    first, last = ([module] if isinstance(module, nn.Module) and apart(module) else [] for module in ends)
    return first, last


def _prefetch(parts: Sequence[Any]) -> None:
    """Have each part gather the one that comes behind it, forward and backward, before it computes.

    Backward that is the order that FSDP takes by itself. Forward it gathers a part only as the host comes to it, which
    is late where layers are short or the host waits for the device.
    """
    for part, behind in pairwise(parts):
        part.set_modules_to_forward_prefetch([behind])
        behind.set_modules_to_backward_prefetch([part])


def _take_out(model: Any, job: Job) -> dict[str, torch.Tensor]:
    """Take the rows out of a model, which keeps shapes; returns them by the first of each weight's names.

    Trained weights without rows, an adapter's, become fp32 in a bf16 job.
    """
    rows: dict[str, torch.Tensor] = {}
    for names, weight in list(_tied(model)):
        if hasattr(weight, "rows"):
            rows[names[0]] = weight.rows
            shape = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            _put(model, names, nn.Parameter(shape, requires_grad=weight.requires_grad))
        elif weight.requires_grad and job.precision == "bf16":
            weight.data = weight.data.float()
    return rows


def _tied(model: Any) -> Iterator[tuple[list[str], Any]]:
    """Each parameter once, with all its names, in their order."""
    by_id: dict[int, tuple[list[str], Any]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(weight), ([], weight))[0].append(name)
    yield from by_id.values()


def _put(model: Any, names: list[str], weight: nn.Parameter) -> None:
    """Set a parameter under all its names."""
    for name in names:
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, weight)


def _parts(model: Any) -> list[Any]:
    """The modules that fully_shard was called on, the model first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
