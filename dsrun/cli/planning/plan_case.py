"""The case that `dsrun plan` answers: a model and a target, and options in which nothing is open any more."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from dsrun.errors import DsrunError
from dsrun.options.commands import PlanOptions
from dsrun.options.layers import Resolved, Source

if TYPE_CHECKING:
    from dsrun.data.sequence_lengths import ExampleLength, SequenceLengths
    from dsrun.jobs.assembly.plan_target import PlanTarget
    from dsrun.jobs.assembly.planning.search import RankedPlans
    from dsrun.jobs.assembly.planning.subjects import PlanSubject
    from dsrun.planner.setup import Setup
    from dsrun.planner.trainers import TrainerDefaults

USUAL_LENGTH = 2048
"""Tokens of an example where only numbers describe the model."""
LENGTHS = ("max_source_length", "max_target_length")


@dataclasses.dataclass(frozen=True)
class PlanCase:
    """A training that is planned: what is trained, where, and how."""

    subject: PlanSubject
    target: PlanTarget
    requested: Resolved[PlanOptions]
    """The options, with the model's and those that follow from the data."""
    lengths: SequenceLengths | None
    """Lengths of the examples; None where they were not measured."""
    notes: list[str]

    @property
    def options(self) -> PlanOptions:
        return self.requested.options

    @property
    def mean_tokens(self) -> int:
        """Tokens of an example in the mean; 0 where they were not measured."""
        return round(self.lengths.mean) if self.lengths else 0


def prepared(
    subject: PlanSubject, target: PlanTarget, requested: Resolved[PlanOptions], *, model: str | None
) -> PlanCase:
    """The case, ready to be searched. model: the one to train a few steps of first (--measure).

    Raises DsrunError for activation checkpointing that the model or the devices don't have.
    """
    from dsrun.jobs.assembly.checks import recomputing
    from dsrun.jobs.assembly.planning import subjects

    case = _with_lengths(subject, target, subjects.with_model(requested, subject))
    if case.options.compile:
        from dsrun.jobs.assembly.checks import compiling

        case.notes.append(compiling.NOT_MODELLED)
    trainer_of(case)
    if problems := list(recomputing.problems(case.requested, target.room.accelerator, subject.architecture)):
        raise DsrunError(problems)
    return _measured(case, model) if model is not None else case


def _with_lengths(subject: PlanSubject, target: PlanTarget, requested: Resolved[PlanOptions]) -> PlanCase:
    """The case with the lengths of an example, as finetune settles them: given, measured, or the model's own."""
    from dsrun.jobs.assembly.planning.subjects import measured

    options, lengths = requested.options, None
    examples: list[ExampleLength] = []
    notes: list[str] = []
    if options.seq_len is not None:
        if {*LENGTHS, "max_length"} & set(requested.user) or options.train_file:
            raise click.UsageError(
                "--seq-len says how long an example is; leave the other lengths and --train-file out."
            )
        return PlanCase(subject, target, requested, None, notes)
    if options.train_file:
        lengths, examples = measured(subject, options)
        notes.append(
            f"{options.train_file}: {lengths.rows} examples of {lengths.mean:.0f} tokens in the mean, "
            f"{lengths.median} in the median, 95 % up to {lengths.p95}, the longest {lengths.longest}."
        )
    elif options.params and not {*LENGTHS, "max_length"} & set(requested.user):
        requested = requested.filled(Source.DERIVED, {"seq_len": USUAL_LENGTH}, "assumed")
        note = f"Rows of {USUAL_LENGTH} tokens are assumed; say --seq-len."
        return PlanCase(subject, target, requested, None, [note])
    from dsrun.jobs.assembly.finetune.lengths import needed_limits

    requested = requested.with_layers(needed_limits(requested, examples, subject.shape.positions))
    options = requested.options
    parts = f"{options.max_source_length} + {options.max_target_length}"
    notes.append(
        f"Rows of {options.max_length or parts} tokens, the longest that finetune's settings let through."
    )
    return PlanCase(subject, target, requested, lengths, notes)


def _measured(case: PlanCase, model: str) -> PlanCase:
    """The case with constants that a few steps on its target gave, and notes on them."""
    from dsrun.cli.planning.measure import measured
    from dsrun.jobs.assembly.planning import search, setups

    def answer(target: PlanTarget, rows: int) -> RankedPlans:
        base = dataclasses.replace(base_of(case, target, case.options, 0), micro_batch=rows, grad_accum=1)
        presets = case.options.presets or setups.presets_for(case.options.optimizer, base, target.room)
        return search.answer(base, target, presets, recomputed=recomputed(case))

    calibration, notes = measured(model, case.requested, case.target, answer)
    room = dataclasses.replace(case.target.room, calibration=calibration)
    target = dataclasses.replace(case.target, room=room)
    return dataclasses.replace(case, target=target, notes=case.notes + notes)


def trainer_of(case: PlanCase) -> TrainerDefaults:
    """Who trains. Raises DsrunError for a name that there isn't."""
    from dsrun.planner import trainers

    return trainers.load(case.options.trainer)


def given_fields(case: PlanCase) -> set[str]:
    """The fields of a Setup that the user gave, which a trainer's defaults leave alone."""
    from dsrun.planner import trainers

    return trainers.fields_of(case.requested.user)


def recomputed(case: PlanCase) -> tuple[int, ...]:
    """The activation checkpointing that is tried (Setup.checkpointing); empty where the user or a trainer fixed it."""
    from dsrun.jobs.assembly.planning import search

    fixed = case.requested.said("activation_checkpointing") or not trainer_of(case).own
    return () if fixed else search.RECOMPUTED


def base_of(case: PlanCase, target: PlanTarget, options: PlanOptions, example: int) -> Setup:
    """The setup that every preset changes, with the kernels that finetune would take, or as another trainer has it."""
    own = own_base(case, target, options, example)
    trainer = trainer_of(case)
    return own if trainer.own else own.changed(**trainer.fields(own, given=given_fields(case)))


def own_base(case: PlanCase, target: PlanTarget, options: PlanOptions, example: int) -> Setup:
    """The setup that every preset changes, with the kernels that finetune would take.

    example: tokens of an example in the mean; 0 where it isn't known.
    """
    from dsrun.jobs.assembly.checks import kernels, tiles
    from dsrun.jobs.assembly.planning import setups
    from dsrun.models import chatglm

    subject = case.subject
    precision = options.precision or setups.default_precision(target)
    network = chatglm.network_of(subject.architecture)
    devices = kernels.Devices(target.room.accelerator, target.capability)
    # The kernels first: a fused loss never makes the logits that tiles would divide.
    fused = kernels.chosen(options, devices, network, precision).fused_loss
    flash = not kernels.keeps_scores(options.attention, subject.architecture)
    tokens, vocabulary = setups.seq_len_of(options), subject.shape.vocab
    tile = tiles.settled(options, tokens=tokens, vocabulary=vocabulary, network=network, fused_loss=fused)
    options = dataclasses.replace(options, tile_tokens=tile)
    return setups.base_setup(
        subject.shape, target.room, options, precision, flash=flash, fused_loss=fused, example=example
    )
