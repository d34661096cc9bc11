"""`dsrun plan`: what a job will need, and which preset to take, before a GPU is touched."""

from __future__ import annotations

import dataclasses
import os
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from dsrun.jobs.places import Place
    from dsrun.jobs.planning import Answer, Subject
    from dsrun.planner.setup import Setup

COUNT = click.IntRange(min=1)
SIZE = "SIZE"
USUAL_LENGTH = 2048
"""Tokens of a row where only numbers describe the model."""
GIB = 2**30
UNSAID = {"flash": True, "packing": False}
"""Options that have a value even where nobody gave one."""
SPOKEN = {"presets": "preset", "flash": "no-flash"}
"""How options are written whose value has another name here."""
FOR_INFERENCE = {
    "params", "hidden", "layers", "intermediate", "heads", "kv_heads", "vocab", "gpus", "nodes", "gpu", "gpu_memory",
    "host_memory", "seq_len", "micro_batch",
}  # fmt: skip
"""The options that --for inference listens to, and those that say what a machine is."""


class Number(click.ParamType):  # type: ignore[type-arg]  # generic in click's newer stubs only
    """A count such as 6.2e9, 6.2B or 6_243_584_000."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from dsrun.errors import DsrunError
        from dsrun.planner.units import count

        if isinstance(value, float):
            return value
        try:
            return count(value, "")
        except DsrunError as error:
            problem = error.problems[0]
            self.fail(f"{problem.what}. {problem.hint or ''}".strip(), param, ctx)


@click.command("plan")
@click.argument("models", nargs=-1, metavar="[MODEL]")
@click.option("--params", type=Number(), help="Parameters of a Llama-like model, in place of MODEL: 6.2e9.")
@click.option("--hidden", type=COUNT, help="Its hidden size.")
@click.option("--layers", type=COUNT, help="Its layers.")
@click.option("--intermediate", type=COUNT, help="Its feed-forward width.")
@click.option("--heads", type=COUNT, help="Its query heads.")
@click.option("--kv-heads", type=COUNT, help="Its key/value heads.")
@click.option("--vocab", type=COUNT, help="Its vocabulary.")
@click.option("--gpus", type=COUNT, help="GPUs per node.  [default: 1, or all of this machine]")
@click.option("--nodes", type=COUNT, help="Number of nodes.  [default: 1]")
@click.option("--gpu", metavar="NAME", help="Kind of GPU: v100-32g, a100-80g, ... (presets/gpus).")
@click.option("--gpu-memory", metavar=SIZE, help="Memory of each GPU, as 32GiB: all of it, or what is free.")
@click.option("--host-memory", metavar=SIZE, help="Memory of each node, as 256GiB.")
@click.option("--nvme", metavar=SIZE, help="Room on each node's NVMe disk, as 2TB.")
@click.option(
    "--network",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GBIT",
    help="Gbit/s between nodes, per node.  [default: 100]",
)
@click.option("--preset", "presets", multiple=True, help="Only this preset (repeat for more).")
@click.option("--seq-len", type=COUNT, help="Tokens of a row.  [default: the model file's lengths]")
@click.option("--train-file", type=click.Path(path_type=Path), help="Measure the rows of this file instead.")
@click.option(
    "--model-path", type=click.Path(path_type=Path), help="Folder with the tokenizer, for --train-file."
)
@click.option("--prompt-column", help="Column of the prompt.  [default: content]")
@click.option("--response-column", help="Column of the response.  [default: summary]")
@click.option("--max-source-length", type=COUNT, help="Tokens of a prompt, at most.")
@click.option("--max-target-length", type=COUNT, help="Tokens of a response, at most.")
@click.option("--micro-batch", type=COUNT, help="Rows per GPU and micro-step.  [default: 4]")
@click.option("--grad-accum", type=COUNT, help="Micro-steps per optimizer step.  [default: 1]")
@click.option(
    "--precision",
    type=click.Choice(["fp16", "bf16", "fp32"]),
    help="[default: bf16 where the GPU has it, else fp16]",
)
@click.option(
    "--optimizer", type=click.Choice(["adamw", "adamw-8bit", "lion", "sgd"]), help="[default: adamw]"
)
@click.option(
    "--method", type=click.Choice(["full", "lora", "qlora"]), help="What is trained.  [default: full]"
)
@click.option("--lora-rank", type=COUNT, help="LoRA's rank, on every linear layer.  [default: 16]")
@click.option(
    "--gradient-checkpointing/--no-gradient-checkpointing",
    default=None,
    help="[default: the model's; else where a preset doesn't fit without]",
)
@click.option("--packing", is_flag=True, help="Rows are packed to one length: no padding.")
@click.option(
    "--flash/--no-flash", default=True, help="Attention without a matrix of scores.  [default: with]"
)
@click.option(
    "--for",
    "purpose",
    type=click.Choice(["training", "inference"]),
    default="training",
    help="[default: training]",
)
@click.option("--components", is_flag=True, help="Every term of the first plan, with formula and source.")
@click.option("--plot", metavar="FILE", help="Draw the plans against the card, as PNG, SVG or PDF.")
@click.option(
    "--calibrate", is_flag=True, help="Learn from finished runs: MODEL is then one or more run folders."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    models: tuple[str, ...],
    *,
    purpose: str,
    components: bool,
    plot: str | None,
    calibrate: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Say what fits before anything is started.

    MODEL: a name from `dsrun models`, a Hugging Face folder, or a config.json. Without --gpu and --gpu-memory the
    plan is for this machine, with the memory that is free now.

    \b
    dsrun plan chatglm2-6b --gpu v100-32g --gpus 2 --host-memory 256GiB
    dsrun plan llama-2-70b --gpu a100-80g --gpus 8 --nodes 2 --seq-len 2048 --micro-batch 1
    dsrun plan --params 6.2e9 --hidden 4096 --layers 28 --gpu-memory 24GiB --gpus 4
    dsrun plan llama-3-8b --gpu rtx-4090 --for inference
    """
    given = {name: value for name, value in options.items() if value not in (None, ())}
    _check_together(purpose, calibrate=calibrate, picture=bool(plot), components=components, given=given)
    if calibrate:
        from dsrun.cli._calibrate import calibrate as learn

        learn(models, as_json)
        return
    if len(models) > 1:
        raise click.UsageError("Name one MODEL (several run folders go with --calibrate).")
    from dsrun.cluster.devices import detect
    from dsrun.errors import DsrunError, Problem
    from dsrun.jobs import places, planning

    model = models[0] if models else None
    named = given.get("gpu") or given.get("gpu_memory")
    machine = None if named else places.visible(detect(os.environ), os.environ)
    what = planning.subject(model, given)
    where = places.place(given, machine)
    if purpose == "inference":
        _inference(what, where, given, as_json)
        return
    settings, lengths = _settings(what, given)
    precision = given.get("precision") or planning.default_precision(where)
    base = planning.base_setup(what.shape, where.room, settings, precision)
    names = list(given.get("presets") or planning.all_presets())
    answer = planning.answer(base, where, names, checkpointing=settings.get("gradient_checkpointing"))
    if "presets" in given and answer.skipped:
        raise DsrunError([Problem(why, f"--preset {name}") for name, why in answer.skipped.items()])
    notes = [*lengths, *planning.notes(what, where, answer)]
    if plot:
        from dsrun.cli._plot import draw

        draw(answer.plans, where.room, Path(plot))
    if as_json:
        from dsrun.cli._plan_text import advice_value, as_value

        result = {
            "model": {"name": what.name, **dataclasses.asdict(what.shape)},
            "place": where.text,
            "plans": [as_value(plan, where.room) for plan in answer.plans],
            "skipped": answer.skipped,
            "advice": advice_value(answer.advice),
            "notes": notes,
        }
        click.echo(planning.as_json(result))
        return
    _print(what, where, base, answer, notes)
    if components and answer.plans:
        from dsrun.cli._plan_text import components as show

        show(answer.plans[0], where.room)


def _check_together(
    purpose: str, *, calibrate: bool, picture: bool, components: bool, given: dict[str, Any]
) -> None:
    """Refuse options that would go unheard, and a speed that is no number."""
    shown = {"plot": picture, "components": components}
    asked = {name for name, value in given.items() if value != UNSAID.get(name)}
    asked |= {name for name, value in shown.items() if value}
    if calibrate:
        _refuse(asked | ({"for"} if purpose != "training" else set()), "has no use beside --calibrate")
    elif purpose == "inference":
        _refuse(asked - FOR_INFERENCE, "is for training, not for --for inference")
    if "train_file" not in given:
        _refuse(asked & {"model_path", "prompt_column", "response_column"}, "goes with --train-file")
    if given.get("method", "full") == "full":
        _refuse(asked & {"lora_rank"}, "goes with --method lora or qlora")
    if not isfinite(given.get("network", 1)):
        raise click.UsageError("--network is not a finite number.")


def _refuse(names: set[str], why: str) -> None:
    if names:
        name = SPOKEN.get(min(names), min(names))
        raise click.UsageError(f"--{name.replace('_', '-')} {why}.")


def _settings(what: Subject, given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The batch and the lengths: given, else the model file's, else finetune's; and what is worth saying."""
    from dsrun.jobs.planning import measured, settings_of

    settings = settings_of(what, given)
    prompt, response = settings["max_source_length"], settings["max_target_length"]
    lengths = {"max_source_length", "max_target_length"}
    if "seq_len" in given:
        if lengths & set(given) or "train_file" in given:
            raise click.UsageError(
                "--seq-len says how long a row is; leave the other lengths and --train-file out."
            )
        return settings, []
    if "train_file" in given:
        found = measured(what, settings)
        settings["seq_len"] = found.longest
        return settings, [
            f"{given['train_file']}: {found.rows} rows of {found.mean:.0f} tokens in the mean, {found.median} in the "
            f"median, 95 % up to {found.p95}, the longest {found.longest}; {found.cut:.1%} cut. "
            "The longest is planned for."
        ]
    if "params" in given and not lengths & set(given):
        settings["seq_len"] = USUAL_LENGTH
        return settings, [f"Rows of {USUAL_LENGTH} tokens are assumed; say --seq-len."]
    return settings, [
        f"Rows of {prompt} + {response} tokens, the longest that finetune's settings let through."
    ]


def _print(what: Subject, where: Place, base: Setup, answer: Answer, notes: list[str]) -> None:
    from dsrun.cli import _plan_text as text
    from dsrun.planner.plan import OUT

    size = f"{what.shape.parameters / 1e9:.4g}e9 parameters"
    name = size if what.name == size else f"{what.name}: {size}"
    click.echo(f"{name}, {what.shape.layers} layers of {what.shape.hidden}")
    click.echo(f"on {where.text}")
    click.echo(f"{text.batch_text(base)}; memory in GiB")
    if answer.plans:
        text.table(answer.plans, where.room)
        if answer.plans[0].verdict == OUT:
            text.advice(answer.advice)
    for note in notes:
        click.echo(f"note: {note}", err=True)
    for name, why in answer.skipped.items():
        click.echo(f"note: {name} is left out: {why}", err=True)


def _inference(what: Subject, where: Place, given: dict[str, Any], as_json: bool) -> None:
    from dsrun.jobs.planning import as_json as dump
    from dsrun.planner.inference import WIDTHS, inference, longest_context
    from dsrun.planner.plan import FITS, OUT

    room = where.room
    length, batch = (
        given.get("seq_len") or min(what.shape.positions or USUAL_LENGTH, USUAL_LENGTH),
        given.get("micro_batch") or 1,
    )
    rows: list[dict[str, Any]] = []
    for width in WIDTHS:
        found = inference(what.shape, width, seq_len=length, batch=batch, gpus=room.gpus)
        longest = longest_context(what.shape, width, gpu_bytes=room.gpu_bytes, batch=batch, gpus=room.gpus)
        longest = min(longest, what.shape.positions or longest)
        rows.append(
            {
                "width": width, "bytes": found.total, "terms": found.terms, "longest_context": longest,
                "verdict": FITS if found.total <= room.gpu_bytes else OUT,
            }
        )  # fmt: skip
    if as_json:
        click.echo(
            dump(
                {
                    "model": what.name,
                    "place": where.text,
                    "seq_len": length,
                    "batch": batch,
                    "inference": rows,
                }
            )
        )
        return
    click.echo(f"{what.name} answering, {batch} x {length} tokens, on {where.text}\n")
    for row in rows:
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in row["terms"].items())
        context = (
            f"contexts up to {row['longest_context']}" if row["longest_context"] else "not even the weights"
        )
        click.echo(
            f"  {row['width']:<7} {row['bytes'] / GIB:7.2f} GiB  {row['verdict']:<14} {parts}; {context}"
        )
