"""`dsrun plan` (configs): memory and time of a job, and which preset fits."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsrun.cli.common.completion import models
from dsrun.cli.common.json_output import print_json
from dsrun.cli.common.options import TableCommand, given, options_of
from dsrun.errors import DsrunError, Problem
from dsrun.options.commands import PlanOptions
from dsrun.options.declare import entries
from dsrun.options.layers import Resolved, Source
from dsrun.words import GIB

if TYPE_CHECKING:
    from dsrun.data.sequence_lengths import SequenceLengths
    from dsrun.jobs.assembly.plan_target import PlanTarget
    from dsrun.jobs.assembly.planning.search import RankedPlans
    from dsrun.jobs.assembly.planning.setups import Divided
    from dsrun.jobs.assembly.planning.subjects import PlanSubject
    from dsrun.planner.plan import Plan
    from dsrun.planner.setup import Setup

USUAL_LENGTH = 2048
"""Tokens of an example where only numbers describe the model."""
FOR_INFERENCE = {
    "params", "hidden", "layers", "intermediate", "heads", "kv_heads", "vocab", "gpus", "nodes", "gpu", "gpu_memory",
    "host_memory", "seq_len", "micro_batch", "as_json", "purpose", "beams", "offload_weights",
}  # fmt: skip
"""The options that --for inference listens to, and those that say what a machine is."""


@click.command("plan", cls=TableCommand)
@click.argument("models", nargs=-1, metavar="[MODEL] [RUN.toml]", shell_complete=models)
@options_of(PlanOptions)
def command(models: Sequence[str], **values: Any) -> None:
    """Say what fits before anything is started.

    MODEL: a name from `dsrun models`, a Hugging Face folder, or a config.json. RUN.toml: a run file.
    Without --gpu and --gpu-memory the plan is for this machine, with the memory that is free now.

    \b
    dsrun plan chatglm2-6b --gpu v100-32g --gpus 2 --host-memory 256GiB
    dsrun plan llama-2-70b --gpu a100-80g --gpus 8 --nodes 2 --seq-len 2048 --micro-batch 1
    dsrun plan --params 6.2e9 --hidden 4096 --layers 28 --gpu-memory 24GiB --gpus 4
    dsrun plan llama-3-8b --gpu rtx-4090 --for inference
    """
    from dsrun.cli.common.run_file import for_plan

    asked = given(PlanOptions, values)
    _check_together(asked)
    models, asked = for_plan(models, asked)
    options = asked.options
    if options.calibrate:
        from dsrun.cli.common.calibrate import calibrate as learn

        learn(models, options.as_json)
        return
    if len(models) > 1:
        raise click.UsageError("Name one MODEL (several run folders go with --calibrate).")
    from dsrun.cluster.devices import detect
    from dsrun.jobs.assembly import plan_target
    from dsrun.jobs.assembly.planning import subjects

    what = subjects.subject(models[0] if models else None, options)
    machine = (
        None if options.gpu or options.gpu_memory else plan_target.visible(detect(os.environ), os.environ)
    )
    where = plan_target.target(options, machine)
    if options.measure and not models:
        raise click.UsageError("--measure trains a MODEL: name it.")
    if options.purpose == "inference":
        _inference(what, where, asked)
    else:
        _training(what, where, asked, measure=models[0] if options.measure else None)


def _training(
    what: PlanSubject, where: PlanTarget, asked: Resolved[PlanOptions], *, measure: str | None = None
) -> None:
    """measure: the model to train a few steps of first."""
    from dsrun.cli.common import plan_text as text
    from dsrun.jobs.assembly.checks import recomputing
    from dsrun.jobs.assembly.planning import remarks, search, subjects
    from dsrun.planner.plan import OUT

    asked, measured, lines = _settled(what, subjects.with_model(asked, what))
    if asked.options.compile:
        from dsrun.jobs.assembly.checks import compiling

        lines.append(compiling.NOT_MODELLED)
    if wrong := list(recomputing.problems(asked, where.room.accelerator, what.architecture)):
        raise DsrunError(wrong)
    options = asked.options
    example = round(measured.mean) if measured else 0
    if measure is not None:
        where, more = _after_measuring(measure, what, where, asked)
        lines += more
    if options.layouts:
        _layouts(what, where, asked, example)
        return
    base, plans, split = _search(what, where, asked, example)
    answer = plans(base)
    usual = _on_usual_gpus(what, where, asked, example, answer)
    if options.presets and answer.skipped:
        raise DsrunError([Problem(why, f"--preset {name}") for name, why in answer.skipped.items()])
    lines += [*split, *remarks.notes(what, where, answer)]
    fixed = asked.said("micro_batch") or asked.said("grad_accum")
    again = asked.said("activation_checkpointing")
    lines += search.faster(base, answer, plans, batch=fixed, checkpointing=again)
    cost = remarks.cost(answer.plans[0], measured, options.price) if answer.plans else None
    if options.plot:
        from dsrun.cli.common.plot import draw

        draw(answer.plans, where.room, Path(options.plot))
    if options.as_json:
        result = {
            "model": {"name": what.name, **dataclasses.asdict(what.shape)},
            "place": where.text,
            "plans": [text.as_value(plan, where.room) for plan in answer.plans],
            "skipped": answer.skipped,
            "advice": text.advice_value(answer.advice),
            "usual": [{"gpus": name, **text.as_value(plan, place.room)} for name, place, plan in usual],
            "cost": cost and dataclasses.asdict(cost),
            "notes": lines,
        }
        print_json("plan", result)
    else:
        _print(what, where, answer, lines, wide=options.wide)
        text.usual({name: plan for name, _, plan in usual})
        if cost and answer.plans[0].verdict != OUT:
            text.cost(cost)
        if options.components and answer.plans:
            text.components(answer.plans[0], where.room)
    if not answer.plans or answer.plans[0].verdict == OUT:
        raise SystemExit(1)


def _layouts(what: PlanSubject, where: PlanTarget, asked: Resolved[PlanOptions], example: int) -> None:
    from dsrun.cli.common import plan_text as text
    from dsrun.jobs.assembly import layouts
    from dsrun.jobs.assembly.planning import search
    from dsrun.planner.layouts import RECOMPUTED
    from dsrun.planner.plan import OUT

    if where.room.accelerator == "cpu":
        raise click.UsageError("--layouts is for GPUs: name them with --gpu, --gpus and --nodes.")
    asked, _, notes = search.batches(asked, where.room.ranks)
    base = _base(what, where, asked.options, example)
    options = asked.options
    own = () if asked.said("activation_checkpointing") else RECOMPUTED
    found = layouts.best_layouts(
        base, where.room, what.architecture, examples=options.global_batch, method=options.method,
        optimizer=options.optimizer, recomputed=own or (base.checkpointing,),
    )  # fmt: skip
    if asked.options.as_json:
        values = [text.layout_value(one) for one in found]
        shown = {"model": what.name, "place": where.text, "layouts": values, "notes": notes}
        print_json("plan-layouts", shown)
    else:
        _heading(what, where)
        text.say(text.batch_text(base))
        text.layout_table(found, where.room, wide=asked.options.wide)
        for note in [*notes, *where.notes]:
            text.say(f"note: {note}", err=True)
    if not found or found[0].plan.verdict == OUT:
        raise SystemExit(1)


def _search(
    what: PlanSubject,
    where: PlanTarget,
    asked: Resolved[PlanOptions],
    example: int,
    known: dict[Hashable, Divided] | None = None,
) -> tuple[Setup, Callable[[Setup], RankedPlans], list[str]]:
    """The base of the plans there, what ranks the plans of such a base, and notes on how a step is split.

    example: tokens of an example in the mean; 0 where it isn't known. known: what the presets were found to say for
    other machines, by all of a machine that it depends on; filled.
    """
    from dsrun.jobs.assembly.planning import search, setups

    asked, batches, split = search.batches(asked, where.room.ranks)
    options = asked.options
    base = _base(what, where, options, example)
    recomputed = _recomputed(asked)
    room, known = where.room, {} if known is None else known
    alike = room.gpus, room.nodes, room.nvme_bytes is None, base.precision, base.micro_batch, base.grad_accum
    if alike not in known:
        names = options.presets or setups.presets_for(options.optimizer, base, room)
        known[alike] = setups.preset_fields(names, room, base)
    divided = known[alike]

    def plans(base: Setup) -> RankedPlans:
        splits = batches if len(batches) > 1 else ()  # one alone is the base's
        return search.answer(base, where, divided[0], recomputed=recomputed, batches=splits, divided=divided)

    return base, plans, split


def _recomputed(asked: Resolved[PlanOptions]) -> tuple[int, ...]:
    """What is tried of activation checkpointing (Setup.checkpointing); empty where it was said."""
    from dsrun.jobs.assembly.planning import search

    return () if asked.said("activation_checkpointing") else search.RECOMPUTED


def _after_measuring(
    model: str, what: PlanSubject, where: PlanTarget, asked: Resolved[PlanOptions]
) -> tuple[PlanTarget, list[str]]:
    """The target with constants that were measured on it, and what to say of them."""
    from dsrun.cli.common.measure import check, measured
    from dsrun.jobs.assembly.planning import search, setups

    check(where)

    def answer(one: PlanTarget, rows: int) -> RankedPlans:
        base = dataclasses.replace(_base(what, one, asked.options, 0), micro_batch=rows, grad_accum=1)
        return search.answer(base, one, names(base, one), recomputed=_recomputed(asked))

    def names(base: Setup, one: PlanTarget) -> Sequence[str]:
        return asked.options.presets or setups.presets_for(asked.options.optimizer, base, one.room)

    found, lines = measured(model, asked, where, answer)
    return dataclasses.replace(where, room=dataclasses.replace(where.room, calibration=found)), lines


def _on_usual_gpus(
    what: PlanSubject, where: PlanTarget, asked: Resolved[PlanOptions], example: int, found: RankedPlans
) -> list[tuple[str, PlanTarget, Plan]]:
    """For one whose machine has no GPU and who named none: the best plan on each of a few usual ones."""
    from dsrun.jobs.assembly import plan_target
    from dsrun.planner.plan import OUT

    if where.room.accelerator != "cpu" or (found.plans and found.plans[0].verdict != OUT):
        return []
    usual = []
    known: dict[Hashable, Divided] = {}
    for gpu, gpus in plan_target.USUAL_GPUS:
        there = asked.settled(
            {"gpu": gpu, "gpus": gpus, "host_memory": None, "nvme": None}, "a usual machine"
        )
        place = plan_target.target(there.options, None)
        with suppress(DsrunError):  # what is asked can't be divided by so many
            base, plans, _ = _search(what, place, there, example, known)
            usual += [(f"{gpus} x {gpu}", place, plan) for plan in plans(base).plans[:1]]
    return usual


def _base(what: PlanSubject, where: PlanTarget, options: PlanOptions, example: int) -> Setup:
    """What every preset is planned with, with the kernels that finetune would take."""
    from dsrun.jobs.assembly.checks import kernels, tiles
    from dsrun.jobs.assembly.planning import setups
    from dsrun.models import chatglm

    precision = options.precision or setups.default_precision(where)
    kind = chatglm.network_of(what.architecture)
    devices = kernels.Devices(where.room.accelerator, where.capability)
    fused = kernels.chosen(options, devices, kind, precision).fused_loss
    flash = not kernels.keeps_scores(options.attention, what.architecture)
    tile = tiles.settled(
        options, tokens=setups.seq_len_of(options), vocabulary=what.shape.vocab, network=kind, fused_loss=fused
    )  # fmt: skip
    options = dataclasses.replace(options, tile_tokens=tile)
    return setups.base_setup(
        what.shape, where.room, options, precision, flash=flash, fused_loss=fused, example=example
    )


def _check_together(asked: Resolved[PlanOptions]) -> None:
    """Refuse options that would go unheard."""
    said, options = set(asked.user), asked.options
    if options.calibrate:
        _refuse(asked, said - {"calibrate", "as_json"}, "has no use beside --calibrate")
    elif options.purpose == "inference":
        _refuse(asked, said - FOR_INFERENCE, "is for training, not for --for inference")
    else:
        _refuse(asked, said & {"beams", "offload_weights"}, "is for --for inference")
    if options.measure:
        _refuse(
            asked,
            said & {"gpu", "gpu_memory", "params"},
            "names what isn't here; --measure is for this machine",
        )
    if options.train_file is None:
        _refuse(
            asked,
            said
            & {
                "model_path",
                "prompt_column",
                "response_column",
                "history_column",
                "text_column",
                "data_format",
            },
            "is for --train-file",
        )
    if options.method not in ("lora", "qlora"):
        _refuse(asked, said & {"lora_rank", "lora_target", "lora_dropout"}, "is for --method lora or qlora")


def _refuse(asked: Resolved[PlanOptions], names: set[str], why: str) -> None:
    for name in sorted(names):
        said = entries(PlanOptions)[name].spelled(getattr(asked.options, name))
        raise click.UsageError(f"{said} {why}.")


def _settled(
    what: PlanSubject, asked: Resolved[PlanOptions]
) -> tuple[Resolved[PlanOptions], SequenceLengths | None, list[str]]:
    """The options with the lengths of an example, as finetune settles them: given, measured, or its own; what was
    measured; and what is worth saying."""
    from dsrun.jobs.assembly.planning.subjects import measured

    options = asked.options
    lengths = ("max_source_length", "max_target_length")
    if options.seq_len is not None:
        if set(lengths) & set(asked.user) or options.train_file:
            raise click.UsageError(
                "--seq-len says how long an example is; leave the other lengths and --train-file out."
            )
        return asked, None, []
    found = None
    lines = []
    if options.train_file:
        found, limits = measured(what, options)
        if limits:
            asked = asked.filled(
                Source.DERIVED, dict(zip(lengths, limits, strict=True)), "99 % of the examples"
            )
            options = asked.options
        lines.append(
            f"{options.train_file}: {found.rows} examples of {found.mean:.0f} tokens in the mean, {found.median} in "
            f"the median, 95 % up to {found.p95}, the longest {found.longest}."
        )
    elif options.params and not set(lengths) & set(asked.user):
        asked = asked.filled(Source.DERIVED, {"seq_len": USUAL_LENGTH}, "assumed")
        return asked, None, [f"Rows of {USUAL_LENGTH} tokens are assumed; say --seq-len."]
    prompt, response = options.max_source_length, options.max_target_length
    lines.append(f"Rows of {prompt} + {response} tokens, the longest that finetune's settings let through.")
    return asked, found, lines


def _print(
    what: PlanSubject, where: PlanTarget, answer: RankedPlans, notes: list[str], *, wide: bool
) -> None:
    from dsrun.cli.common import plan_text as text
    from dsrun.planner.plan import OUT

    _heading(what, where)
    if answer.plans:
        text.say(text.batch_text(answer.plans[0].setup))
        text.table(answer.plans, where.room, wide=wide)
        if answer.plans[0].verdict == OUT:
            text.advice(answer.advice)
    for note in notes:
        text.say(f"note: {note}", err=True)
    for name, why in answer.skipped.items():
        text.say(f"note: {name} is left out: {why}", err=True)


def _heading(what: PlanSubject, where: PlanTarget) -> None:
    from dsrun.cli.common import plan_text as text

    size = f"{what.shape.parameters / 1e9:.4g}e9 parameters"
    name = size if what.name == size else f"{what.name}: {size}"
    text.say(f"{name}, {what.shape.layers} layers of {what.shape.hidden}")
    text.say(f"on {where.text}")


def _inference(what: PlanSubject, where: PlanTarget, asked: Resolved[PlanOptions]) -> None:
    from dsrun.cli.common import plan_text as text
    from dsrun.planner.inference import UNQUANTIZED, WIDTHS, inference, longest_context
    from dsrun.planner.plan import FITS, OUT

    room, options = where.room, asked.options
    length = options.seq_len or min(what.shape.positions or USUAL_LENGTH, USUAL_LENGTH)
    batch = options.micro_batch if asked.said("micro_batch") else 1
    beams, offloaded = options.beams, options.offload_weights
    how: dict[str, Any] = {"batch": batch, "beams": beams, "gpus": room.gpus, "offloaded": offloaded}
    rows: list[dict[str, Any]] = []
    for width in UNQUANTIZED if offloaded else WIDTHS:
        found = inference(what.shape, width, seq_len=length, **how)
        longest = longest_context(what.shape, width, gpu_bytes=room.gpu_bytes, **how)
        longest = min(longest, what.shape.positions or longest)
        here = room.host_bytes is None or found.host <= room.host_bytes
        rows.append(
            {
                "width": width, "bytes": found.total, "terms": found.terms, "longest_context": longest if here else 0,
                "verdict": FITS if here and found.total <= room.gpu_bytes else OUT, "host_bytes": found.host,
            }
        )  # fmt: skip
    if options.as_json:
        shown = {
            "model": what.name, "place": where.text, "seq_len": length, "batch": batch, "beams": beams,
            "inference": rows,
        }  # fmt: skip
        print_json("plan-inference", shown)
    else:
        search = f" with {beams} beams" if beams > 1 else ""
        click.echo(f"{what.name} answering, {batch} x {length} tokens{search}, on {where.text}\n")
        for row in rows:
            parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in row["terms"].items())
            context = (
                f"contexts up to {row['longest_context']}"
                if row["longest_context"]
                else "not even the weights"
            )
            text.say(
                f"  {row['width']:<7} {row['bytes'] / GIB:7.2f} GiB  {row['verdict']:<14} {parts}; {context}"
            )
            if offloaded:
                seconds = row["host_bytes"] / (1e9 * room.hardware.pcie_gb_s)
                text.say(
                    f"          {row['host_bytes'] / GIB:.1f} GiB in host memory go to the GPU for every token: "
                    f"{seconds:.2g} s at {room.hardware.pcie_gb_s:g} GB/s"
                )
    if all(row["verdict"] == OUT for row in rows):
        raise SystemExit(1)
