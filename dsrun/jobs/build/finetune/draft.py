"""A fine-tune on its way from a request to a job: what is known of it so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dsrun.config.presets.build import BuiltConfig
from dsrun.data.conversations import Columns, columns_of
from dsrun.jobs.build import JobDraft
from dsrun.jobs.build.checks import kernels
from dsrun.jobs.spec.job import FsdpSpec, HostDevices, ModelSpec
from dsrun.models import chatglm, resolve
from dsrun.options.commands import FinetuneOptions
from dsrun.options.groups import ParallelismOptions, PeftOptions
from dsrun.options.table import Resolved, select
from dsrun.planner.buckets import Size
from dsrun.planner.model_config import UnknownShapeError
from dsrun.planner.shape import Shape, from_config


class Files(NamedTuple):
    """Where the examples are."""

    train: tuple[Path, ...]
    evaluation: Path | None
    weights: tuple[float, ...] = ()
    """How often the examples of each training file are in an epoch."""

    @property
    def all(self) -> tuple[Path, ...]:
        """Every file."""
        return self.train if self.evaluation is None else (*self.train, self.evaluation)


@dataclass(kw_only=True)
class Draft(JobDraft):
    """A fine-tune on its way."""

    name: str
    """MODEL."""
    asked: Resolved[FinetuneOptions]
    model: ModelSpec | None = None
    dataset: str | None = None
    """The data set that ships with the model."""
    files: Files | None = None
    kernels: kernels.Chosen = field(default_factory=kernels.Chosen)
    hosts: tuple[HostDevices, ...] = ()
    """With the devices of each, once they are known."""
    preset: str | None = None
    own_overrides: Mapping[str, str] = field(default_factory=dict)
    """What the devices want, as --set says it, and why: no part of what was asked for; other devices want otherwise."""
    config: BuiltConfig | None = None
    """Empty where FSDP trains it."""
    fsdp: FsdpSpec | None = None
    sizes: Mapping[str, Size] = field(default_factory=dict)
    """Of ZeRO's buckets, by their paths: the planner's."""
    optimizer_params: dict[str, Any] = field(default_factory=dict)
    prediction: dict[str, float | str] | None = None

    @property
    def options(self) -> FinetuneOptions:
        return self.asked.options

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
    def network(self) -> str | None:
        """model_type of the network that is trained; None where it isn't known yet."""
        return chatglm.network_of(resolve.architecture(self.model)) if self.model else None

    @property
    def shape(self) -> Shape | None:
        """None where it isn't known yet, or not one that dsrun plans for."""
        if self.model is None:
            return None
        try:
            return from_config(resolve.architecture(self.model), self.model.name)
        except UnknownShapeError:
            return None
