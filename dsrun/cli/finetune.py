"""`dsrun finetune` (jobs): fine-tune a model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsrun.cli.output.columns import echo_folded, folded, screen_width
from dsrun.cli.parsing.completion import models
from dsrun.cli.parsing.options import TableCommand, given, options_of
from dsrun.errors import UnfitFileError
from dsrun.options.commands import FinetuneOptions
from dsrun.options.layers import Resolved
from dsrun.words import counted, printable, width

if TYPE_CHECKING:
    from dsrun.cli.jobs.detach import Detached
    from dsrun.cluster.devices import Machine
    from dsrun.job.checkpoints import CheckpointChoice
    from dsrun.job.job import Job
    from dsrun.jobs.allocation.request import ConnectionOptions
    from dsrun.jobs.allocation.reservation import Allocator
    from dsrun.jobs.assembly import PlannedJob
    from dsrun.jobs.assembly.finetune import FinetuneRequest

ANSWERS_SHOWN, ANSWER_WIDTH = 2, 120
"""Answers at the end of a run, and columns of each where they go into a file."""
PATHS = {"folder", "gguf", "chatglm"}  # sources of a model that was given as a path


@click.command(cls=TableCommand)
@click.argument("words", nargs=-1, metavar="[MODEL] [RUN.toml]", shell_complete=models)
@options_of(FinetuneOptions)
def command(words: tuple[str, ...], **values: Any) -> None:
    """Fine-tune MODEL: a name from `dsrun models`, a Hugging Face folder or a GGUF file. RUN.toml: a run file, with
    options by name and a MODEL; what is typed wins over it.

    Everything is checked first; then DeepSpeed's launcher starts the ranks with explicit numbers. The run folder
    keeps what ran, the logs, the checkpoints and the model, which transformers loads without dsrun.

    \b
    dsrun finetune chatglm2-tiny --gpus 2
    dsrun finetune chatglm2-6b --model-path DIR --train-file train.jsonl --eval-file dev.jsonl --gpus 2
    dsrun finetune llama-2-7b --train-file chats.json --train-file own.jsonl:3 --hostfile hostfile --preset zero3
    dsrun finetune llama-tiny --lr 1e-3 --dry-run -o run.toml; dsrun finetune run.toml --gpus 2
    """
    from dsrun.cli.parsing.run_file import with_run_file

    model, requested = with_run_file(words, given(FinetuneOptions, values))
    if model is None:
        raise click.UsageError("Missing argument 'MODEL': `dsrun models` lists those with a name.")
    start(model, requested)


def start(model: str, requested: Resolved[FinetuneOptions]) -> None:
    """Plan the fine-tune, new or continued, hold its devices, and carry it out."""
    from dsrun.cli.jobs import pushing
    from dsrun.cli.jobs.detach import detached
    from dsrun.cli.jobs.running import allocated, began, join_pods, tell
    from dsrun.cli.parsing.run_file import text_of
    from dsrun.cli.parsing.where import connection_of
    from dsrun.jobs.assembly.finetune import FinetuneRequest

    options = requested.options
    if options.output and not options.dry_run:
        raise click.UsageError(
            "-o writes what --dry-run finds out: give both. A run's folder is --output-dir."
        )
    resume = options.resume or (options.go_on and began(options.output_dir))
    if not resume and (requested.said("checkpoint") or requested.said("digests")):
        raise click.UsageError("--checkpoint and --no-digests are for a run that goes on: --resume.")
    if resume and options.output:
        raise click.UsageError("-o is for a run that is to begin: its file would begin another.")
    if resume and options.explain:
        raise click.UsageError(
            "--explain is for a run that is to begin: `dsrun show RUN` tells of one that did."
        )
    requested, connection = connection_of(requested, again=resume)
    if resume and options.show_examples:
        raise click.UsageError(
            "--show-examples is for a run that is to begin: RUN/data.json has those of one that did."
        )
    only_look = options.dry_run or options.explain or options.show_examples is not None
    # From here on in this order: the child of --detach has to be there before anything is locked or started, and in a
    # pod all but the first never get further than join_pods.
    away = detached(options.detach, connection, as_json=options.as_json, dry_run=only_look)
    join_pods(connection, options.output_dir, dry_run=only_look)
    pushing.goal(options)
    request = FinetuneRequest(model, requested)

    def plan(allocator: Allocator, for_good: bool) -> PlannedJob[Job]:
        return _planned(request, allocator, resume=resume, download=for_good)

    with allocated(plan, connection, options, dry_run=only_look) as (planned, machine):
        tell(planned.notes)
        pushing.check_model(planned.job, options)
        if only_look:
            _show(planned, connection, options, resume=resume)
        else:
            choice = _choice(options) if resume else None
            kept = (
                ""
                if resume
                else text_of(planned, _typed(planned.job), Path(planned.job.run_dir), of_run=True)
            )
            run(planned.job, machine, connection, options, resume=choice, away=away, run_file=kept)


def _choice(options: FinetuneOptions) -> CheckpointChoice:
    """The checkpoint that a run goes on from."""
    from dsrun.jobs.assembly.resume import checkpoint_choice

    return checkpoint_choice(options, Path(options.output_dir or "."), os.environ)


def _show(
    planned: PlannedJob[Job], connection: ConnectionOptions, options: FinetuneOptions, *, resume: bool
) -> None:
    """Do what --explain, --dry-run and -o are for."""
    from dsrun.cli.jobs import dry_run
    from dsrun.cli.parsing.run_file import write

    if options.show_examples is not None:
        dry_run.show_examples(planned.job, options.show_examples, as_json=options.as_json)
    elif options.explain:
        dry_run.explain(planned, as_json=options.as_json)
    elif options.as_json or not options.output:
        choice = _choice(options) if resume else None
        dry_run.show(planned, connection, as_json=options.as_json, resume=choice)
    if options.output:
        write(planned, _typed(planned.job), options.output, overwrite=options.force)


def _typed(job: Job) -> str:
    """MODEL, as it can be typed anywhere."""
    return job.model.location if job.model.source in PATHS else job.model.name


def _planned(
    request: FinetuneRequest, allocator: Allocator, *, resume: bool, download: bool
) -> PlannedJob[Job]:
    """The job, new or continued."""
    if resume:
        from dsrun.jobs.assembly.resume import resumed

        return resumed(request, allocator.machine, os.environ, allocator=allocator)
    from dsrun.jobs.assembly import finetune

    return finetune.plan(request, allocator.machine, os.environ, download=download, allocator=allocator)


def run(
    job: Job,
    machine: Machine,
    connection: ConnectionOptions,
    options: FinetuneOptions,
    *,
    resume: CheckpointChoice | None,
    away: Detached | None = None,
    run_file: str = "",
) -> None:
    """Carry a job out (cli/jobs/running.py), with a view of its progress. run_file: what the run's folder keeps."""
    from shlex import join

    from dsrun.cli.jobs import pushing
    from dsrun.cli.jobs.running import run_job, say
    from dsrun.jobs.allocation.allocation import in_words
    from dsrun.jobs.launchers import ON_THIS_MACHINE
    from dsrun.jobs.supervision.display.progress import LiveView, PlainView, moves_lines

    run_dir = Path(job.run_dir)
    if away:
        away.settle(run_dir)
    where = machine.reason if job.launcher == ON_THIS_MACHINE else in_words(job.hosts)
    summary = (
        f"{job.model.name}, preset {job.preset}, {job.precision}, {counted(job.world_size, 'rank')} on "
        f"{job.accelerator} ({where}), micro batch {job.micro_batch} x accumulation {job.grad_accum}: "
        f"{job.step_size} a step"
    )
    say(folded(summary, screen_width(err=True), 4))
    view = LiveView(run_dir) if moves_lines() else PlainView(run_dir, say)
    again = f"Continue it: {join(['dsrun', 'resume', job.run_dir])}"
    run_job(
        job,
        machine,
        connection,
        options,
        view=view,
        summarise=_summarise,
        again=again,
        resume=resume,
        away=away,
        run_file=run_file,
        after=lambda result: pushing.push_result(job, options, result),
    )


def _summarise(result: dict[str, Any]) -> None:
    """Print the run's results, and the command that uses the model."""
    click.echo(f"\nmodel       {result['model'] or 'none, as asked for'}")
    if result["template_args"]:
        arguments = json.dumps(result["template_args"], ensure_ascii=False)
        echo_folded(
            f"serve it    with chat_template_kwargs {arguments}: the exported template has them as defaults",
            12,
        )
    if result["eval_loss"]:
        first, last = result["eval_loss"]["first"], result["eval_loss"]["last"]
        click.echo(f"evaluation  loss {first:.4f} -> {last:.4f}{_perplexity(result)}{_best_text(result)}")
    for when, scores in result["scores"].items():
        text = "  ".join(f"{name.upper()} {value:.2f}" for name, value in scores.items())
        echo_folded(f"{when:<11} {text}{_share(result['answered'].get(when, {}))}", 12)
    _show_answers(Path(result["run_dir"]))
    if left_out := _left_out(Path(result["run_dir"])):
        echo_folded(f"left out    {left_out}", 12)
    click.echo(f"memory      {_memory_text(result)}")
    names = ("run.toml", "deepspeed.json", "command.sh", "metrics.jsonl", "loss.png", "logs")
    there = ", ".join(name for name in names if (Path(result["run_dir"]) / name).exists())
    echo_folded(f"run folder  {result['run_dir']}  ({there})", 12)
    if use := _use(result):
        click.echo(f"use it      {use}")
    if result["worse"]:
        worse = "worse than it began: its loss is above where it was. A lower --lr is the first thing to try."
        echo_folded(f"finished    {worse}", 12)


def _share(answered: Mapping[str, int | None]) -> str:
    """How many of the held-out rows were answered, where they were not all."""
    rows, there = answered.get("rows"), answered.get("of")
    if rows is None or there is None or rows == there:
        return ""
    return f"  ({rows:,} of {there:,} rows; --generate-rows {there} scores all)"


def _show_answers(run_dir: Path) -> None:
    """Print the first answers beside the expected ones."""
    from dsrun.jobs.runs.outcome import AFTER, answers

    try:
        shown = answers(run_dir, ANSWERS_SHOWN)
    except UnfitFileError as error:
        click.echo(f"answers     {AFTER} {error.problems[0].what}")
        return
    for answer in shown:
        click.echo(f"prompt      {_shortened(answer.prompt)}")
        click.echo(f"  expected  {_shortened(answer.expected)}")
        click.echo(f"  answer    {_shortened(answer.after) or '(nothing)'}")


def _shortened(text: str) -> str:
    """The start of a text, in one line of the terminal; a Chinese character takes two columns of it."""
    text, room = " ".join(text.split()), (screen_width() or ANSWER_WIDTH) - len("  expected  ...")
    fits = len(text) if width(text) <= room else len(text) * room // width(text)
    return printable(text, fits)


def _left_out(run_dir: Path) -> str:
    """The rows that could not be trained on, with the place of their list; empty where there are none."""
    from dsrun.data.data_file import BadRows
    from dsrun.job.layout import DATA_REPORT

    try:
        report = json.loads((run_dir / DATA_REPORT).read_text(encoding="utf-8"))["train"]
    except (OSError, ValueError, KeyError):
        return ""  # a run of an older dsrun, or one whose rows were prepared elsewhere
    found = BadRows(report["read"], report["bad"] + report["empty"], tuple(report["dropped"].items()))
    return f"{found.words}, listed in {report['bad_rows_file']}" if found.bad else ""


def _perplexity(result: dict[str, Any]) -> str:
    """The perplexity of plain text; empty for a model of answers."""
    perplexity = result["perplexity"]
    if perplexity is None:
        return ""
    first, last = (
        "inf" if perplexity[when] is None else f"{perplexity[when]:,.2f}" for when in ("first", "last")
    )
    return f", perplexity {first} -> {last}"


def _best_text(result: dict[str, Any]) -> str:
    """The step whose evaluation loss was lower than at the end, and the model that is kept of it."""
    best = result["best"]
    if best is None or best["step"] == result["steps"]:
        return ""
    text = f"; lowest {best['loss']:.4f} at step {best['step']}"
    if best["model"]:
        return f"{text}: {best['model']}"
    return text + (" (--keep-best keeps that model, too)" if best["step"] else ", before training")


def _use(result: dict[str, Any]) -> str:
    """The command that asks the model, or that has one of plain text go on with a text. Without a model the one that
    writes it; empty where no checkpoint is left, either."""
    from shlex import join

    from dsrun.job.layout import whole_checkpoints

    if result["model"] is None:
        kept = whole_checkpoints(Path(result["run_dir"]))
        return join(["dsrun", "export", result["run_dir"]]) if kept else ""
    if result["perplexity"] is None or (Path(result["model"]) / "adapter_config.json").is_file():
        return join(["dsrun", "chat", result["run_dir"]])
    return go_on_command(result["model"], result["example_prompt"] or "Hello")


def _memory_text(result: dict[str, Any]) -> str:
    """The measured memory beside the predicted: the fullest GPU's, or the host's where there is no GPU."""
    measured, prediction = result["measured"], result["predicted"] or {}
    name = "host_bytes" if measured["gpu_allocated_bytes"] is None else "gpu_allocated_bytes"
    place = "of host memory, all ranks" if name == "host_bytes" else "in use on the fullest GPU"
    predicted = f" (predicted {prediction[name] / 2**30:.2f})" if name in prediction else ""
    return f"{measured[name] / 2**30:.2f} GiB {place}{predicted}"


def go_on_command(model: str, text: str) -> str:
    """A command that has the exported model of plain text go on with a text, with transformers alone."""
    import sys
    from shlex import join

    # JSON's strings are Python's, and need no quoting inside the shell's single quotes.
    name, start = (json.dumps(value, ensure_ascii=False) for value in (model, text))
    code = (
        f'from transformers import pipeline; ask = pipeline("text-generation", {name}); '
        f'print(ask({start}, max_new_tokens=96)[0]["generated_text"])'
    )
    return join([sys.executable, "-c", code])
