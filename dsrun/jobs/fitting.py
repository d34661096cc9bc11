"""Whether a job fits the devices it is given, before it starts; and the preset that --preset auto means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsrun.cluster.devices import Machine
from dsrun.errors import DsrunError, Problem
from dsrun.jobs import models, places, planning
from dsrun.jobs.job import Job
from dsrun.jobs.placed import Placed
from dsrun.planner.advice import advise
from dsrun.planner.plan import OUT, Calibration, Plan, Room, judge
from dsrun.planner.setup import Setup
from dsrun.planner.shape import from_config

AUTO = "auto"
"""The preset's name that stands for the planner's first choice."""


@dataclass(frozen=True)
class Wish:
    """What a job asks of its devices: the model's config (empty where it isn't known), batch, lengths, precision.

    devices: one for each rank, on `nodes` hosts, as dsrun.jobs.placement.Placed counts them.
    """

    architecture: Mapping[str, Any]
    name: str
    devices: Sequence[int]
    precision: str
    seq_len: int
    micro_batch: int
    grad_accum: int
    checkpointing: bool
    nodes: int = 1

    def room(self, machine: Machine, nvme_bytes: float | None = None) -> Room:
        """What its devices have free."""
        return places.room_here(machine, self.devices, nvme_bytes, self.nodes)

    def base(self, machine: Machine) -> Setup | None:
        """The set-up before it is divided; None for a network that the planner does not describe."""
        try:
            shape = from_config(self.architecture, self.name)
        except DsrunError:
            return None
        given = {
            "seq_len": self.seq_len, "micro_batch": self.micro_batch, "grad_accum": self.grad_accum,
            "gradient_checkpointing": self.checkpointing,
        }  # fmt: skip
        setup = planning.base_setup(shape, self.room(machine), given, self.precision)
        return replace(setup, gpus=len(self.devices))  # hosts may have different numbers of them


NEVER = ("method", "loss", "nodes")
"""Kinds of change that finetune has no option for, or that nobody can follow: more hosts have to be there."""


def chosen_preset(
    wish: Wish, machine: Machine, overrides: tuple[str, ...], *, nvme: bool, force: bool
) -> tuple[str, str]:
    """The fastest preset that fits, and a line that says why. Raises DsrunError where none does, unless it is forced.

    nvme: whether a folder on an NVMe disk is named.
    """
    base = wish.base(machine)
    if base is None:
        raise DsrunError(
            f"can't choose: the shape of {wish.name} is not one that dsrun plans for",
            where="--preset auto",
            hint="Name a preset: `dsrun preset` lists them.",
        )
    room = wish.room(machine, nvme_bytes=float("inf") if nvme else None)
    where = places.Place(room, "", places.computes_bf16(machine, wish.devices))
    found = planning.answer(
        base,
        where,
        planning.all_presets(),
        checkpointing=wish.checkpointing,
        overrides=overrides,
        never=NEVER,
    )
    best, why = planning.best_of(found, force=force)
    return best.preset, why


def check(
    wish: Wish, ds_config: Mapping[str, Any], preset: str, machine: Machine
) -> tuple[Plan, dict[str, float | str]] | None:
    """The plan of a finished config on these devices, as much as they have free now, and the prediction for the record.

    The record is of the plain model: what earlier runs have taught is in the plan alone. None if it can't be made.
    """
    base = wish.base(machine)
    if base is None:
        return None
    setup = planning.of_job(ds_config, base)
    room = wish.room(machine)
    plain = judge(preset, setup, replace(room, calibration=Calibration()))
    return judge(preset, setup, room), prediction(plain, places.device_name(machine, wish.devices))


def predicted(job: Job, placed: Placed, *, force: bool) -> tuple[Job, tuple[str, ...]]:
    """The job with what it is predicted to take there, and what is worth saying.

    Raises DsrunError where it will run out of memory and is not forced.
    """
    wish = Wish(
        architecture=models.architecture(job.model),
        name=job.model.name,
        devices=placed.devices,
        nodes=len(placed.hosts),
        precision=job.precision,
        seq_len=job.data.max_source_length + job.data.max_target_length,
        micro_batch=job.micro_batch,
        grad_accum=job.grad_accum,
        checkpointing=job.training.gradient_checkpointing,
    )
    found = check(wish, job.ds_config, job.preset, placed.machine) if placed.known else None
    if found is None:
        return replace(job, prediction=None), ()
    plan, prediction = found
    if plan.verdict == OUT and not force:
        raise DsrunError([refusal(plan, placed.machine, wish)])
    told = (f"preset {job.preset} will run out of memory ({plan.reason})",) if plan.verdict == OUT else ()
    return replace(job, prediction=prediction), told


def refusal(plan: Plan, machine: Machine, wish: Wish) -> Problem:
    """The problem of a plan that is out of memory, with the shortest way out."""
    room = wish.room(machine)
    fields, _ = planning.preset_fields(planning.all_presets(), room, plan.setup)
    found = advise(plan, fields, room, bf16=places.computes_bf16(machine, wish.devices), never=NEVER)
    return Problem(
        f"out of memory: {plan.reason}",
        f"preset {plan.preset}",
        f"{planning.advice_text(found)} --force starts it all the same.",
    )


def prediction(plan: Plan, device: str) -> dict[str, float | str]:
    """What the run will be measured against: bytes of one GPU, of the node, seconds; device: what it ran on."""
    return {
        "device": device,
        "gpu_held_bytes": plan.gpu.held,
        "gpu_allocated_bytes": plan.gpu.allocated,
        "gpu_reserved_bytes": plan.gpu.reserved,
        "host_bytes": plan.host.peak,
        "step_seconds": plan.speed.seconds_per_step,
    }
