"""A fine-tune on its way from a request to a job, in four stages; each has all that the one before has.

A step takes the first stage that has what it needs. What a step refuses makes no further stage, and what would need
that one is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from dsrun.cluster.devices import Machine
from dsrun.config.presets.build import BuiltConfig
from dsrun.data.conversations import Columns, columns_of
from dsrun.errors import Findings
from dsrun.job.job import FsdpSpec, HostDevices, ModelSpec, world_size_of
from dsrun.jobs.allocation.allocation import Allocation
from dsrun.jobs.assembly.checks import kernels
from dsrun.jobs.assembly.finetune.precedence import Sources
from dsrun.models import chatglm, resolve
from dsrun.models.text_shape import shape_of_model
from dsrun.options import layers
from dsrun.options.commands import FinetuneOptions
from dsrun.options.declare import select
from dsrun.options.layers import Layer, Resolved
from dsrun.options.table import ParallelismOptions, PeftOptions
from dsrun.planner.buckets import Size
from dsrun.planner.model_config import UnknownShapeError
from dsrun.planner.shape import Shape

S = TypeVar("S", bound="Requested")


@dataclass(frozen=True, kw_only=True)
class Requested:
    """The options, and what is known of where it is to run."""

    name: str
    """MODEL."""
    resolved: Resolved[FinetuneOptions]
    machine: Machine
    """This machine; what the planner counts with, once the devices are chosen."""
    environ: Mapping[str, str]
    hosts: tuple[HostDevices, ...] = ()
    """With the devices of each; none where they aren't known."""
    launcher: str = ""
    """Hosts of the job; empty where they are not known."""

    @property
    def options(self) -> FinetuneOptions:
        return self.resolved.options

    @property
    def architecture(self) -> Mapping[str, Any]:
        """The model's config; empty where it isn't known."""
        return {}

    @property
    def forced(self) -> bool:
        """Whether what will run out of memory is a note, not a problem: a dry run only says so."""
        return self.options.force or self.options.dry_run

    @property
    def peft(self) -> PeftOptions:
        return select(PeftOptions, self.options)

    @property
    def parallel(self) -> ParallelismOptions:
        return select(ParallelismOptions, self.options)

    @property
    def columns(self) -> Columns:
        return columns_of(self.options)

    @property
    def shape(self) -> Shape | None:
        """None where the model isn't known, or not one that dsrun plans for."""
        return None

    @property
    def shares(self) -> int:
        """Data-parallel ranks; 1 where the devices aren't known."""
        return max(1, world_size_of(self.hosts) // self.parallel.group)

    @property
    def longest_example(self) -> int:
        """Tokens, at most."""
        return self.options.longest_example


@dataclass(frozen=True, kw_only=True)
class WithModel(Requested):
    """With the model, and the defaults of its file among the options."""

    model: ModelSpec
    dataset: str | None
    """The data set that ships with the model; None where none does."""

    @property
    def architecture(self) -> Mapping[str, Any]:
        return resolve.architecture(self.model)

    @property
    def network(self) -> str | None:
        """model_type of the network that is trained; None where it isn't known yet."""
        return chatglm.network_of(self.architecture)

    @property
    def shape(self) -> Shape | None:
        try:
            return shape_of_model(self.model)
        except UnknownShapeError:
            return None


@dataclass(frozen=True, kw_only=True)
class WithDevices(WithModel):
    """With the devices, and what they compute with."""

    allocation: Allocation
    kernels: kernels.Chosen = field(default_factory=kernels.Chosen)


@dataclass(frozen=True)
class Strategy:
    """The preset, and what the devices want of its config."""

    preset: str
    """The preset's name, also where dsrun chose it."""
    overrides: Mapping[str, str] = field(default_factory=dict)
    """Overrides for these devices, in --set's words, and why. They are no part of the request: other devices need
    others."""
    sizes: Mapping[str, Size] = field(default_factory=dict)
    """Sizes of ZeRO's buckets that the planner has worked out, by their paths in the config."""


@dataclass(frozen=True)
class WithConfig(Generic[S]):
    """With the DeepSpeed config, or what stands for it with FSDP; and the stage that it was made for."""

    before: S
    strategy: Strategy
    config: BuiltConfig
    """Empty where FSDP trains it."""
    optimizer_params: dict[str, Any]
    fsdp: FsdpSpec | None = None
    """None where DeepSpeed trains it."""
    prediction: dict[str, Any] | None = None
    """The planner's prediction; None where there is none."""


def layered(requested: S, *layers: Layer) -> S:
    """The stage with the values of layers among its options."""
    return replace(requested, resolved=requested.resolved.with_layers(*layers))


def resolved(requested: S, sources: Sources, findings: Findings) -> tuple[S, bool]:
    """The stage with what sources say of its options, and whether none of them was refused."""
    resolution = layers.resolve(requested.resolved, sources)
    findings.notes.extend(resolution.notes)
    findings.problems.extend(resolution.problems)
    return replace(requested, resolved=resolution.known), not resolution.problems


def located(requested: S, allocation: Allocation) -> S:
    """The stage with what devices say of where it is to run."""
    return replace(
        requested, machine=allocation.machine, hosts=allocation.hosts, launcher=allocation.launcher
    )
