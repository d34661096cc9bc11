"""Whether a job fits the devices it is given, before it starts; and the preset that --preset auto means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dsrun.cluster.devices import Gpu, Machine
from dsrun.errors import DsrunError, Problem
from dsrun.job.job import FsdpSpec, Job
from dsrun.jobs.allocation.allocation import Allocation
from dsrun.jobs.assembly import plan_target
from dsrun.jobs.assembly.checks import kernels, optimizers
from dsrun.jobs.assembly.planning import search, setups, traced, words
from dsrun.models import resolve
from dsrun.models.adapters import PREFIX
from dsrun.models.liger import fuses_loss
from dsrun.models.text_shape import shape_of
from dsrun.options.commands import PlanOptions
from dsrun.options.optimizers import ADAMW, ADAMW_8BIT
from dsrun.options.table import GATHERED_SHARE, ComputeOptions, ParallelismOptions, PeftOptions
from dsrun.planner.advice import Advice, advise
from dsrun.planner.buckets import Size, bucket_sizes
from dsrun.planner.gpu_memory import gpu_memory
from dsrun.planner.layouts import Layout, judge_divided
from dsrun.planner.model_config import UnknownShapeError
from dsrun.planner.plan import OUT, Calibration, MemoryBudget, Plan, judge
from dsrun.planner.setup import Setup

ALL_OF_IT = 0.98
"""Share of a plan's own size that makes a budget in which it is just too large."""
AUTO = "auto"
"""The preset's name that stands for the planner's first choice."""


@dataclass(frozen=True)
class MemoryRequest:
    """The demands of a job on its devices: the model's config (empty where it isn't known), batch, lengths, precision.

    devices: one for each rank, on `nodes` hosts, as allocate.Allocation counts them. compute: its packing, and what is
    computed again. fused_loss: it is computed without logits of all tokens.
    """

    architecture: Mapping[str, Any]
    name: str
    devices: Sequence[int]
    precision: str
    seq_len: int
    micro_batch: int
    grad_accum: int
    nodes: int = 1
    compute: ComputeOptions = field(default_factory=ComputeOptions)
    peft: PeftOptions = field(default_factory=PeftOptions)
    optimizer: str = ADAMW
    fused_loss: bool = False
    parallel: ParallelismOptions = field(default_factory=ParallelismOptions)
    async_save: bool = False
    folder: Path | None = None
    """The model's folder, where it has one: what of its weights is no text part is counted there."""

    def modelled(self, machine: Machine) -> bool:
        """Whether the planner knows what ranks that share examples take: on GPUs."""
        return self.parallel.alone or machine.accelerator != "cpu"

    def judged(self, preset: str, setup: Setup, room: MemoryBudget) -> Plan:
        """A set-up's plan, with ranks that share examples where the job has them."""
        if self.parallel.alone:
            return judge(preset, setup, room)
        shares = len(self.devices) // self.parallel.group
        return judge_divided(preset, setup, room, Layout(shares, stage=setup.stage, **asdict(self.parallel)))

    @property
    def tracer(self) -> traced.Tracer:
        """The traces of the model that are in the cache."""
        return traced.tracer_for(self, self.peft, makes=False)

    def room(self, machine: Machine, nvme_bytes: float | None = None) -> MemoryBudget:
        """The free memory of its devices."""
        return plan_target.room_here(machine, self.devices, nvme_bytes, self.nodes)

    def base(self, machine: Machine) -> Setup | None:
        """The set-up before it is divided; None for a network that the planner does not describe."""
        try:
            shape = shape_of(self.architecture, self.name, folder=self.folder)
        except UnknownShapeError:
            return None
        options = PlanOptions(
            seq_len=self.seq_len, micro_batch=self.micro_batch, grad_accum=self.grad_accum,
            activation_checkpointing=self.compute.activation_checkpointing,
            recompute_every=self.compute.recompute_every, optimizer=optimizers.planned(self.optimizer),
            packing=self.compute.packing, tile_tokens=self.compute.tile_tokens or 0, async_save=self.async_save,
            fp8=self.compute.fp8, compile=self.compute.compile,
        )  # fmt: skip
        setup = setups.base_setup(
            shape,
            self.room(machine),
            options,
            self.precision,
            peft=self.peft,
            flash=not kernels.keeps_scores(self.compute.attention, self.architecture),
            fused_loss=self.fused_loss,
        )
        # Hosts may have different numbers of devices.
        return replace(setup, gpus=len(self.devices))

    def presets(self, base: Setup, room: MemoryBudget) -> list[str]:
        """The presets that fit the job's optimizer."""
        return setups.presets_for(self.optimizer, base, room)

    def never(self, machine: Machine) -> tuple[str, ...]:
        """Kinds of change that finetune has no option for, takes by itself where it can (the fused loss), that nobody
        can follow (more hosts have to be there), or that would be of no use: LoRA instead of a prefix or in a pipeline,
        QLoRA on a CPU."""
        fixed = self.peft.method == PREFIX or machine.accelerator == "cpu" or self.parallel.pp > 1
        return ("loss", "nodes", "method") if fixed else ("loss", "nodes")


def planned(
    request: MemoryRequest,
    machine: Machine,
    overrides: tuple[str, ...],
    *,
    nvme: bool,
    recomputed: Sequence[int] = (),
    batches: Sequence[tuple[int, int]] = (),
) -> search.RankedPlans:
    """The plans of all presets on the job's devices, the best first.

    nvme: whether a folder on an NVMe disk is named. recomputed, batches: what may be chosen beside the preset, as
    `search.answer` has it. Raises DsrunError for a network that the planner does not describe.
    """
    base = request.base(machine)
    if base is None:
        raise DsrunError(
            f"can't choose: the shape of {request.name} is not one that dsrun plans for",
            where="--preset auto",
            hint="Name a preset: `dsrun preset` lists them.",
        )
    room = request.room(machine, nvme_bytes=float("inf") if nvme else None)
    where = plan_target.PlanTarget(room, "", plan_target.computes_bf16(machine, request.devices))
    plans = search.answer(
        base, where, request.presets(base, room),
        recomputed=recomputed, batches=batches, overrides=overrides, never=request.never(machine),
    )  # fmt: skip
    return traced.retraced(plans, room, request.tracer)[0] if request.parallel.alone else plans


def check(
    request: MemoryRequest,
    ds_config: Mapping[str, Any],
    preset: str,
    machine: Machine,
    fsdp: FsdpSpec | None = None,
) -> tuple[Plan, dict[str, Any]] | None:
    """The plan of a finished config, or of FSDP, on these devices, as much as they have free now, and the prediction.

    The prediction, for the run's record, is of the plain model: what earlier runs have taught is in the plan alone.
    None if it can't be made.
    """
    base = request.base(machine)
    if base is None or not request.modelled(machine):
        return None
    setup = setups.of_job(ds_config, base, fsdp)
    if request.optimizer == ADAMW_8BIT:
        setup = replace(setup, fused_adam=True)  # the config doesn't name it; its kernel needs no temporaries
    room = request.room(machine)
    plain = request.judged(preset, setup, replace(room, calibration=Calibration()))
    plan = request.judged(preset, setup, room)
    if request.parallel.alone:
        plan = traced.rejudged(plan, room, request.tracer)
    return plan, prediction(plain, plan_target.device_name(machine, request.devices))


def sizes(request: MemoryRequest, ds_config: Mapping[str, Any], machine: Machine) -> dict[str, Size]:
    """ZeRO's buckets by the model and the memory that is free there, by path; empty where it can't be told."""
    base = request.base(machine)
    if base is None or request.parallel.group > 1:
        return {}
    room = request.room(machine)
    buckets = bucket_sizes(setups.of_job(ds_config, base), room.gpu_bytes)
    return {f"zero_optimization.{bucket.key}": bucket for bucket in buckets}


def answers_from_partitions(plan: Plan, gpu_bytes: float) -> bool:
    """Whether ranks that share weights have no room for them whole while they answer held-out prompts on GPUs."""
    setup = plan.setup
    if setup.engine != "fsdp" and setup.stage < 3:
        return False
    left = gpu_bytes - gpu_memory(setup).held
    computed_bytes = 4 if setup.precision == "fp32" else 2
    return setup.shape.parameters * computed_bytes > GATHERED_SHARE * left


def on_other_devices(job: Job, placed: Allocation) -> bool:
    """Whether a stored job was planned for devices of another kind than those that it gets now."""
    before = (job.prediction or {}).get("device")
    return placed.known and before not in (None, plan_target.device_name(placed.machine, placed.devices))


def predicted(job: Job, placed: Allocation, *, force: bool) -> tuple[Job, tuple[str, ...]]:
    """The job with what it is predicted to take there, and what is worth saying.

    Raises DsrunError where it will run out of memory and is not forced.
    """
    request = asked_by(job, placed.devices, len(placed.hosts))
    checked = check(request, job.ds_config, job.preset, placed.machine, job.fsdp) if placed.known else None
    if checked is None:
        return replace(job, prediction=None), ()
    plan, prediction = checked
    if plan.verdict == OUT and not force:
        raise DsrunError([refusal(plan, placed.machine, request)])
    notes = (f"preset {job.preset} will run out of memory ({plan.reason})",) if plan.verdict == OUT else ()
    return replace(job, prediction=prediction), notes


def asked_by(job: Job, devices: Sequence[int], nodes: int) -> MemoryRequest:
    """The demands of a stored job on its devices."""
    return MemoryRequest(
        architecture=resolve.architecture(job.model),
        name=job.model.name,
        folder=resolve.folder_of(job.model),
        devices=devices,
        nodes=nodes,
        precision=job.precision,
        seq_len=job.data.max_source_length + job.data.max_target_length,
        micro_batch=job.micro_batch,
        grad_accum=job.grad_accum,
        compute=job.training,
        peft=job.peft,
        optimizer=job.training.optimizer,
        fused_loss=bool(job.training.liger) and fuses_loss(resolve.architecture(job.model).get("model_type")),
        parallel=job.parallel,
        async_save=job.training.async_save,
    )


def refusal(plan: Plan, machine: Machine, request: MemoryRequest) -> Problem:
    """The problem of a plan that is out of memory, with the shortest way out."""
    advice = words.advice_text(_changes(plan, machine, request))
    return Problem(
        f"out of memory: {plan.reason}", f"preset {plan.preset}", f"{advice} --force starts it all the same."
    )


def _changes(plan: Plan, machine: Machine, request: MemoryRequest) -> Advice | None:
    """The shortest list of changes with which a plan fits that is out of memory."""
    room = request.room(machine)
    fields, _ = setups.preset_fields(request.presets(plan.setup, room), room, plan.setup)
    if not request.parallel.alone:  # beside which nothing is offloaded; a pipeline has ZeRO-1 alone
        fields = {
            name: division
            for name, division in fields.items()
            if division["optimizer_device"] == division["parameter_device"] == "gpu"
            and (request.parallel.pp == 1 or division["stage"] == 1)
        }
    bf16 = plan_target.computes_bf16(machine, request.devices)
    return advise(plan, fields, room, bf16=bf16, never=request.never(machine), judged=request.judged)


def changes_after_oom(job: Job, numbers: Mapping[str, float]) -> Advice | None:
    """The shortest list of changes with which a fine-tune fits that ran out of GPU memory.

    numbers: GiB, as the line says them (jobs.diagnosis.memory.memory_text). None where the line, or what is known of
    the network, says too little. The job took all that there was: where its plan is smaller than that, the planner's
    cards are made smaller by as much.
    """
    if "total" not in numbers or job.accelerator != "cuda":
        return None
    request = asked_by(job, range(job.world_size), len(job.hosts))
    free = numbers["total"] - numbers.get("others", 0.0)
    machine = _cards(job, free)
    checked = check(request, job.ds_config, job.preset, machine, job.fsdp)
    # The run has shown that the plan is too small by some share: the same share is taken off each change's room.
    if checked and checked[0].verdict != OUT:
        machine = _cards(job, free * checked[0].used * ALL_OF_IT)
        checked = check(request, job.ds_config, job.preset, machine, job.fsdp)
    if checked is None or checked[0].verdict != OUT or checked[0].scarce != "GPU":
        return None
    return _changes(checked[0], machine, request)


def way_out(job: Job, numbers: Mapping[str, float]) -> str:
    """The same list in words; empty where there is none."""
    changes = changes_after_oom(job, numbers)
    return words.advice_text(changes) if changes else ""


def _cards(job: Job, free_gib: float) -> Machine:
    """A machine with a card for each rank of a job, and so much free on each; host memory isn't judged."""
    size, capability = int(free_gib * 2**30), (8, 0) if job.precision == "bf16" else (7, 0)
    cards = (Gpu(index, "", "", size, capability, size) for index in range(job.world_size))
    return Machine("cuda", tuple(cards), 1, "")


def prediction(plan: Plan, device: str) -> dict[str, Any]:
    """The numbers that the run will be measured against: bytes of one GPU, of the node, seconds; device: what it ran
    on. Of both memories also each term's bytes, to be held against what runs out."""
    return {
        "device": device,
        "gpu_held_bytes": plan.gpu.held,
        "gpu_allocated_bytes": plan.gpu.allocated,
        "gpu_reserved_bytes": plan.gpu.reserved,
        "host_bytes": plan.host.peak,
        "step_seconds": plan.speed.seconds_per_step,
        "gpu_terms": _rounded(plan.gpu.terms),
        "host_terms": _rounded(plan.host.terms),
    }


def _rounded(terms: Mapping[str, float]) -> dict[str, int]:
    return {name: round(size) for name, size in terms.items() if size >= 1}
