"""DeepSpeed as a training engine: every call of its API in training is in this module, and why it is made that way.

Where a comment names a file, it is DeepSpeed 0.19's.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import compiler

from dsrun.errors import DsrunError
from dsrun.job.job import Job
from dsrun.options.optimizers import ADAMW, MUON
from dsrun.training import pickles
from dsrun.training.engines import (
    MicroSteps,
    cpu_info,
    expert_parallel,
    sequence_parallel,
    tensor_parallel,
    zero,
)
from dsrun.training.engines.checkpoints import resharding
from dsrun.training.engines.checkpoints.experts import FACTS
from dsrun.training.engines.checkpoints.host_copies import CapturedFiles
from dsrun.training.engines.on_ranks import all_tensors, first_not_finite, room_for
from dsrun.training.engines.optimizers import own_optimizer
from dsrun.training.ranks.barrier import barrier

if TYPE_CHECKING:
    from dsrun.training.models.weights import Skeleton, Stored

NAME = "DeepSpeed"
trained_weights = resharding.trained_weights


def connect() -> None:
    """See Backend."""
    cpu_info.remember()
    # comm/torch.py, which alone reads it, would compile this operator at once, and take 69 MB of /dev/shm: on CPUs, for
    # tensor-parallel inference alone. Not there at all, the dictionary is made by trying out a compiler for each.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))


def awareness(job: Job) -> Any:
    """transformers' HfDeepSpeedConfig under ZeRO-3, of which it keeps a weak reference; None below."""
    if job.zero_stage < 3:
        return None
    from transformers.integrations import HfDeepSpeedConfig

    return HfDeepSpeedConfig(job.ds_config)


@contextmanager
def unaware() -> Iterator[None]:
    """See Backend."""
    from transformers.integrations import deepspeed as known

    remembered = known._hf_deepspeed_config_weak_ref
    known.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if remembered is not None and (config := remembered()) is not None:
            known.set_hf_deepspeed_config(config)


def held_type(job: Job, computed: torch.dtype) -> torch.dtype:  # noqa: ARG001
    """See Backend: what is computed with; the optimizer steps a copy."""
    return computed


def fill(job: Job, skeleton: Skeleton, stored: Mapping[str, Stored], device: torch.device) -> None:
    """Under ZeRO-3 zero.Init partitions a module's parameters one after the other: here, as they are made."""
    if not _partitions(job):
        skeleton.fill(stored, device)
        return

    def partition(parameters: Iterator[Any]) -> None:
        deepspeed.zero.Init(module=_Parameters(parameters), config_dict_or_path=dict(job.ds_config))

    skeleton.fill_partitioned(stored, device, partition, reads=dist.get_rank() == 0)


def divided(job: Job, read: Callable[[], Any], outline: Callable[[], Any], device: torch.device) -> Any:  # noqa: ARG001
    """Under ZeRO-3 transformers partitions every parameter as it is made."""
    keep_alive = awareness(job) if _partitions(job) else None
    model = read()
    del keep_alive
    return model


def _partitions(job: Job) -> bool:
    """Whether ZeRO-3 takes each weight apart as it is made; tensor parallelism divides them first."""
    return job.zero_stage == 3 and job.parallel.tp == 1


class _Parameters(torch.nn.Module):  # type: ignore[misc]
    """Stands for a module whose parameters are made while they are asked for."""

    def __init__(self, parameters: Iterator[Any]) -> None:
        super().__init__()
        self._made = parameters

    def parameters(self, recurse: bool = True) -> Iterator[Any]:  # noqa: ARG002
        """See torch.nn.Module."""
        yield from self._made


def initialize(job: Job, model: Any) -> DeepSpeed:
    """See Backend."""
    outlined = expert_parallel.outline(model) if job.parallel.ep > 1 else None
    engine = engine_of(job, model)
    tensor_parallel.engaged(job, engine.module)
    expert_parallel.engaged(job, outlined, engine.module)
    zero.engaged(job, engine)
    if job.training.optimizer != MUON:
        return DeepSpeed(engine, job, outlined=outlined)
    # Muon has a learning rate of its own for matrices; they rise and fall together.
    return DeepSpeed(engine, job, [group["lr"] / job.training.lr for group in engine.optimizer.param_groups])


def engine_of(job: Job, model: Any) -> Any:
    """DeepSpeed's own engine, made ready for what `DeepSpeed` does with it."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if job.training.optimizer != MUON or job.accelerator == "cpu":
        _import_muon_uncompiled()
    mpu = sequence_parallel.register(job, model)
    with tensor_parallel.dividing(job), expert_parallel.dividing(job):
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=trained, optimizer=own_optimizer(job, trained), config=job.ds_config,
            mpu=mpu,
        )  # fmt: skip
    _own_checkpoint_engine(engine)
    if job.zero_stage == 0 and job.precision != "fp32":
        # DeepSpeed has taken a step with empty gradients by now (FP16_Optimizer.initialize_optimizer_states), which
        # would put Adam's bias correction one step ahead of every other stage's.
        engine.optimizer.optimizer.state.clear()
    if job.zero_stage == 0 and job.precision == "fp32":
        _step_finite_only(engine, job)
    return engine


def _step_finite_only(engine: Any, job: Job) -> None:
    """Have the plain optimizer of stage 0 in fp32 skip a step whose gradient is not finite, as every other stage and
    precision does: DeepSpeed neither looks at that gradient nor keeps its norm (runtime/engine.py, _take_model_step).
    """
    optimizer, take, apply = engine.optimizer, engine._take_model_step, engine.optimizer.step
    alone = job.parallel.pp == job.parallel.tp == 1

    def take_finite(lr_kwargs: Any) -> None:
        gradients = [weight.grad for weight in engine.module.parameters() if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not alone:  # each stage and each neighbour has a part of the gradient
            norm = norm.isfinite().logical_not().to(torch.float32)
            dist.all_reduce(norm, dist.ReduceOp.MAX)
            norm = torch.where(norm > 0, math.nan, 0.0)
        optimizer.overflow = not math.isfinite(number := float(norm))
        if alone:
            engine._global_grad_norm = number
        take(lr_kwargs)

    def step(*args: Any, **kwargs: Any) -> Any:
        return None if optimizer.overflow else apply(*args, **kwargs)

    engine._take_model_step, optimizer.step, optimizer.overflow = take_finite, step, False


def _import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon without torch.compile: where no Muon steps, or on a CPU, where compiling takes minutes.

    DeepSpeed looks at every optimizer under ZeRO whether it is Muon (runtime/zero/utils.py). Importing Muon's module
    imports all of torch's compiler, which takes longer than all the rest of `initialize`.
    """
    compile_function = compiler.compile
    compiler.compile = lambda: compiler.dummy_decorator
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = compile_function


def _own_checkpoint_engine(engine: Any) -> None:
    """Have DeepSpeed read checkpoints as dsrun does, and its ranks wait for one another once they have written one.

    All of its reading goes through `checkpoint_engine.load`: weights, a pipeline's layers, the optimizer's files under
    ZeRO (runtime/engine.py, state_dict_factory.py, pipe/module.py). Every kind of checkpoint engine that a config may
    choose unpickles whatever a file names, so the methods of the one that is there are replaced.

    The ranks wait without a time limit. Otherwise they would wait in save_checkpoint's own barrier at its end, which
    has one, while rank 0 writes the weights.
    """
    checkpoints = engine.checkpoint_engine
    commit = checkpoints.commit

    def load(path: str, map_location: Any = None) -> Any:
        # Not mapped: the optimizer goes on with the tensors themselves.
        return pickles.load(Path(path), map_location=map_location, mapped=False)

    def commit_together(info: Any) -> Any:
        barrier()
        return commit(info)

    checkpoints.load, checkpoints.commit = load, commit_together


def check_file(file: Path) -> None:
    """See Backend. Swap files are an optimizer's bare numbers."""
    if file.suffix == ".pt":
        pickles.load(file)


def layout(job: Job) -> dict[str, Any]:
    """See Backend; the folders of NVMe swap files are no part of it."""
    zero = json.loads(json.dumps(job.ds_config.get("zero_optimization", {})))
    for section in ("offload_optimizer", "offload_param"):
        (zero.get(section) or {}).pop("nvme_path", None)
    optimizer = job.ds_config.get("optimizer", {})
    return {
        "world_size": job.world_size, "precision": job.precision, "zero_optimization": zero,
        "optimizer": optimizer.get("type"), "torch_adam": optimizer.get("params", {}).get("torch_adam", False),
        "tp": job.parallel.tp, **({"ep": job.parallel.ep} if job.parallel.ep > 1 else {}),
    }  # fmt: skip


def rank_of(job: Job, file: Path) -> int:
    """See Backend. A swap file's folder has the rank; another file's name has the data-parallel rank, and under tensor
    parallelism which of the neighbours. A file whose name has none is the first rank's."""
    if swapped := re.search(r"(?:^|/)rank(\d+)/", str(file)):
        return int(swapped[1])
    shares, neighbours = (re.search(rf"{name}_rank_(\d+)_", file.name) for name in ("_pp", "mp"))
    return int(shares[1] if shares else 0) * job.parallel.tp + int(neighbours[1] if neighbours else 0)


class DeepSpeed(MicroSteps):
    """A DeepSpeedEngine behind the names of dsrun.training.engines.Engine, which says what each does."""

    def __init__(self, engine: Any, job: Job, ratios: Sequence[float] = (1.0,), outlined: Any = None) -> None:
        """ratios: the learning rate of each parameter group beside the job's. outlined: see Engine.outline, where
        DeepSpeed has other layers than the model had."""
        self._engine, self._job, self._ratios = engine, job, ratios
        self.module, self.device = engine.module, engine.device
        self.outline = outlined or engine.module
        self._experts = expert_parallel.experts_of(job, self.outline, engine.module)
        self.train, self.eval = engine.train, engine.eval
        self._looked_at_copies = False
        self._freezes = not all(weight.requires_grad for weight in self.module.parameters())

    @property
    def optimizer(self) -> Any:
        """See Engine."""
        return self._engine.optimizer

    def __call__(self, **batch: Any) -> Any:
        output = self._engine(**batch)
        if not self._looked_at_copies and torch.is_grad_enabled():
            # Second copies come with the first forward of training.
            self._looked_at_copies = True
            if (ranks := zero.second_copy_ranks(self._job)) > 1:
                zero.check_second_copy(list(self.module.parameters()), ranks)
        return output

    def set_learning_rate(self, rate: float) -> None:
        for group, ratio in zip(self._engine.optimizer.param_groups, itertools.cycle(self._ratios)):
            group["lr"] = rate * ratio

    def learning_rate(self) -> float:
        """See Engine; a config's scheduler has set it at the end of the step before."""
        return float(self._engine.optimizer.param_groups[0]["lr"]) / self._ratios[0]

    def backward(self, share: torch.Tensor) -> None:
        """DeepSpeed averages over ranks and micro-steps, which is undone by multiplying.

        At stage 0 in fp16 it divides by the loss scale in the step and never multiplies by it in backward
        (DeepSpeedEngine.backward looks for a ZeROOptimizer). So the gradient that flows into the loss is set to exactly
        that factor here; an engine that scales by itself is not scaled twice.
        """
        loss = share * (sequence_parallel.averaged(self._job) * self._job.grad_accum)
        scale = self.loss_scale()
        if scale is not None and self._job.zero_stage == 0:
            factor = scale / self._job.grad_accum
            loss.register_hook(lambda gradient: torch.full_like(gradient, factor))
        self._engine.backward(loss)

    def last_micro_step(self, last: bool) -> None:
        """See Engine. The config's gradient_accumulation_steps then only divides, which `backward` undoes."""
        self._engine.set_gradient_accumulation_boundary(last)

    def step(self) -> None:
        """See Engine. What is raised at the lowest scale is a plain Exception (runtime/fp16/loss_scaler.py)."""
        try:
            self._engine.step()
        except Exception as error:
            if "loss scale already at minimum" in str(error):
                raise FloatingPointError(str(error)) from error
            raise

    def gradient_norm(self) -> torch.Tensor | float | None:
        """See Engine; a float at stage 0 in fp32, a tensor at the others.

        None with Muon: DeepSpeed puts what Muon made of a gradient into its place before it takes the norm
        (runtime/zero/stage_1_and_2.py, stage3.py).
        """
        return None if self._job.training.optimizer == MUON else self._engine.get_global_grad_norm()

    def loss_scale(self) -> float | None:
        return float(self._engine.optimizer.loss_scale) if self._job.precision == "fp16" else None

    def skipped_steps(self) -> int:
        return int(self._engine.skipped_steps)

    def non_finite(self) -> str | None:
        """Under ZeRO-3 each rank looks at its parts, as far as they are not on an NVMe disk."""
        return first_not_finite(self._held(), self.device)

    def _held(self) -> Iterator[tuple[str, Any]]:
        """Each trained weight's name, and this rank's part of it; None for a part on an NVMe disk."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                part = getattr(parameter, "ds_tensor", parameter)
                in_memory = getattr(getattr(part, "status", None), "name", "AVAILABLE") == "AVAILABLE"
                yield name, part if in_memory else None

    def full_weights(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Under ZeRO-3 one parameter at a time is gathered on every rank, so that no device needs room for two."""
        weights: dict[str, torch.Tensor] = {}
        tensors = all_tensors(self.module)
        sources = self._experts.sources(tensors) if self._experts else {}
        for name in names:
            own = sources.get(name, [name])
            if self._experts and self._experts.matrix(own[0]):
                whole = self._all_experts(own)
                weights |= {} if whole is None else {name: whole}
                continue
            tensor = tensors[own[0]]
            partitioned = hasattr(tensor, "ds_id")
            layer = self.module.get_submodule(own[0].rpartition(".")[0])
            with (
                deepspeed.zero.GatheredParameters([tensor], enabled=partitioned),
                tensor_parallel.gathered(layer, tensor),
            ):
                if dist.get_rank() == 0:
                    whole = tensor.detach()
                    # A gathered weight that is on the CPU already is released again: `cpu` would not copy it.
                    weights[name] = whole.clone() if partitioned and not whole.is_cuda else whole.cpu()
        return weights

    def _all_experts(self, names: Sequence[str]) -> torch.Tensor | None:
        """Matrices of all of a layer's experts, which lie in one weight of transformers'; None but on rank 0."""
        layer = self.module.get_submodule(names[0].rpartition(".experts.")[0])
        matrices = [name.rpartition(".")[2] for name in names]
        parts = [getattr(layer.experts, name) for name in matrices]
        with deepspeed.zero.GatheredParameters(parts, enabled=hasattr(parts[0], "ds_id")):
            return expert_parallel.gathered(layer, matrices)

    @contextmanager
    def whole(self) -> Iterator[bool]:
        """See Engine. Under ZeRO-3 weights are gathered once, without the hooks that gather and release each layer."""
        parameters = list(self.module.parameters())
        if self._experts:
            yield False  # a rank's tokens need the others' experts
        elif self._job.zero_stage < 3:
            yield True
        elif not room_for(sum(weight.ds_numel * weight.element_size() for weight in parameters), self.device):
            yield False
        else:
            with (
                deepspeed.zero.GatheredParameters(parameters),
                _without_hooks(self._engine.optimizer.parameter_offload),
            ):
                yield True

    def save(self, folder: Path, step: int) -> None:
        facts, experts = {"step": step}, self._experts
        with expert_parallel.without_expert_files(self._engine) if experts else nullcontext():
            self._engine.save_checkpoint(
                str(folder.parent), tag=folder.name, save_latest=False, exclude_frozen_parameters=self._freezes,
                client_state={**facts, FACTS: asdict(experts)} if experts else facts,
            )  # fmt: skip

    def capture(self, folder: Path, step: int) -> CapturedFiles:
        """See Engine. All that DeepSpeed writes into a file goes through its checkpoint engine's `save`.

        Swap files on an NVMe disk, which DeepSpeed copies by itself, are there before this returns.
        """
        checkpoints = self._engine.checkpoint_engine
        files = CapturedFiles(checkpoints.save)
        checkpoints.save = files.take
        try:
            self.save(folder, step)
        finally:
            del checkpoints.save  # which leaves the class's own
        return files

    def load(self, folder: Path, written: Mapping[str, Any]) -> int:
        """See Engine. DeepSpeed reads what the same layout wrote, `resharding` everything else."""
        job, wanted = self._job, layout(self._job)
        if (
            written == wanted and not self._experts
        ):  # whose files DeepSpeed doesn't get (without_expert_files)
            return self._load_alike(folder)
        hint, why = "Continue it with the preset and the number of ranks that wrote it.", ""
        if written.get("pp", 1) > 1:
            why = f"was written in {written['pp']} stages of a pipeline, which no other ranks read"
            hint = "Continue it as it was started."
        elif _uses_nvme(written) or _uses_nvme(wanted):
            why = "what an NVMe disk's swap files hold can't be divided over other ranks"
        elif job.training.optimizer != ADAMW and written != wanted:
            why = f"states of {job.training.optimizer} can't be divided over other ranks"
        if why:
            raise DsrunError(why, where=str(folder), hint=hint)
        return resharding.load(
            self._engine, folder, tp=job.parallel.tp, wrote=written.get("tp", 1), experts=self._experts
        )

    def _load_alike(self, folder: Path) -> int:
        """Load a checkpoint of the same layout; returns the steps done."""
        # Weights that aren't trained are in no checkpoint: they were read from the model's own folder.
        path, state = self._engine.load_checkpoint(
            str(folder.parent), tag=folder.name, load_module_strict=not self._freezes
        )
        if path is None:
            raise RuntimeError(f"DeepSpeed could not load {folder}")
        return int(state["step"])


@contextmanager
def _without_hooks(offload: Any) -> Iterator[None]:
    """Forwards without ZeRO-3's own hooks (runtime/zero/parameter_offload.py), which are put back where they were.

    Other hooks stay. DeepSpeed's way of registering its own again would number the layers anew, and forget the order in
    which weights are fetched ahead.
    """
    handles = [offload.fwd_pre_hook, *offload.forward_hooks, *offload.backward_hooks]
    # Hooks run in the order of these dictionaries: all of their items are put back, not only what was taken out.
    before = [(handle.hooks_dict_ref(), list(handle.hooks_dict_ref().items())) for handle in handles]
    for handle in handles:
        handle.hooks_dict_ref().pop(handle.id, None)
    try:
        yield
    finally:
        for hooks, items in before:
            hooks.clear()
            hooks.update(items)


def _uses_nvme(layout: Mapping[str, Any]) -> bool:
    """Whether a layout keeps the optimizer's states or the weights in swap files."""
    zero = layout.get("zero_optimization", {})
    sections = [zero.get(name) or {} for name in ("offload_optimizer", "offload_param")]
    return any(section.get("device") == "nvme" for section in sections)
