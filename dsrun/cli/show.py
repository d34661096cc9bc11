"""`dsrun show` (runs): one run in full."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dsrun.cli.output.columns import echo_folded
from dsrun.cli.output.results import print_json
from dsrun.cli.parsing.completion import runs
from dsrun.host.hiding import shown_arguments
from dsrun.models.adapters import ALL
from dsrun.words import gib_text, printable, span_text, time_text

if TYPE_CHECKING:
    from dsrun.job.job import ScriptJob
    from dsrun.jobs.runs.past_runs import Run
    from dsrun.options.table import PeftOptions

MEMORY = {
    "gpu_allocated_bytes": "in use on the fullest GPU",
    "gpu_reserved_bytes": "held on the fullest GPU",
    "host_bytes": "of host memory",
}
EVALS = 8
"""Evaluations in a line, at most; of more the first and the last ones are shown."""


@click.command()
@click.argument("run", shell_complete=runs)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(run: str, as_json: bool) -> None:
    """Say what RUN was, how it stands or why it failed, what came of it, and how to go on.

    RUN is a run's folder, or its name in runs/.
    """
    from dsrun.jobs.runs import past_runs

    run_read = past_runs.read(past_runs.named(run))
    if as_json:
        from dsrun.jobs.runs.run_details import value

        form = "show-script" if run_read.script else "show"
        print_json(form, value(run_read))
    elif run_read.script:
        _show_script(run_read, run_read.script)
    else:
        _show(run_read)


def _show(run: Run) -> None:
    job = run.job
    total = run.total_steps
    launches = f", in {len(run.launches)} launches" if len(run.launches) > 1 else ""
    _head(run, f", {max(run.losses, default=0)} of {'?' if total is None else total} steps", launches)
    _line("base model", f"{job.model.name} ({job.model.source}: {job.model.location})")
    weights = job.data.weights or (1,) * len(job.data.train_files)
    files = [
        file + (f" x {weight:g}" if weight != 1 else "")
        for file, weight in zip(job.data.train_files, weights, strict=True)
    ]
    _line("data", ", ".join(files) + (f", held out: {job.data.eval_file}" if job.data.eval_file else ""))
    _line("preset", f"{job.preset} ({job.division}), {job.precision}")
    _devices(run)
    split = f"micro batch {job.micro_batch} x accumulation {job.grad_accum} x {job.dp_size}"
    _line("batch", f"{job.step_size} a step: {split}")
    _line("training", f"lr {job.training.lr:g} ({job.training.lr_schedule}), seed {job.training.seed}")
    if job.peft.freezes:
        _line("method", _method(job.peft))
    _results(run)
    _end(run)


def _head(run: Run, steps: str, starts: str) -> None:
    """The lines that begin each run. steps, starts: its progress, and how often it was started, in words."""
    state = f"{run.state}: {printable(run.why)}" if run.why else run.state_text
    _line("run", printable(str(run.path)))
    times = f"started {time_text(run.started)}, took {span_text(run.seconds)}"
    _line("state", f"{state}{steps}; {times}{starts}")
    for problem in run.problems:
        _line("error", problem)


def _devices(run: Run) -> None:
    from dsrun.jobs.allocation.allocation import in_words

    job = run.any_job
    on = f" of {run.host}" if run.host else ""
    _line("devices", f"{job.world_size} on {job.accelerator}{on}; {in_words(job.hosts)}")


def _method(peft: PeftOptions) -> str:
    layers = "all linear layers" if peft.lora_target == ALL else peft.lora_target
    parts = f"rank {peft.lora_rank}, alpha {peft.lora_alpha:g}, on {layers}"
    if peft.method == "ptuning":
        parts = f"{peft.pre_seq_len} positions"
    start = f"; from {printable(peft.adapter)}" if peft.adapter else ""
    return f"{peft.method}: {parts}{start}"


def _show_script(run: Run, job: ScriptJob) -> None:
    from shlex import join

    _head(run, "", f", started again {run.restarts} times" if run.restarts else "")
    command = join([*(["-m"] if job.module else []), job.script, *shown_arguments(job.args)])
    _line("script", printable(command))
    _line("in", printable(job.cwd))
    if job.python:
        _line("python", printable(job.python))
    if job.preset:
        _line("preset", job.preset)
    _devices(run)
    _end(run)


def _end(run: Run) -> None:
    """Print the places of checkpoints, models and logs, and the next commands."""
    from dsrun.jobs.runs.run_details import next_commands, places

    if not run.script:
        _checkpoints(run)
    for name, place in places(run).items():
        if place and name != "checkpoints":
            _line(name, printable(str(place.relative_to(run.path))))
    for name, text in next_commands(run, _short(run.path)).items():
        _line(name, text)


def _short(folder: Path) -> str:
    """A folder as it can be typed here."""
    here = Path.cwd()
    return str(folder.relative_to(here)) if folder != here and folder.is_relative_to(here) else str(folder)


def _checkpoints(run: Run) -> None:
    """Print each checkpoint's state, by its mark and the sizes of its files: digests are compared before a resume."""
    from dsrun.job.checkpoints import states

    checkpoints = states(run.path)
    if checkpoints:
        names = [f"    {checkpoint.folder.name}: {printable(checkpoint.state)}" for checkpoint in checkpoints]
        head = f"{checkpoints[0].folder.parent.name} (sizes of files were compared, not their digests)"
        _line("checkpoints", "\n".join([printable(head), *names]))


def _results(run: Run) -> None:
    from dsrun.jobs.runs.run_details import ends_of

    ends = ends_of(run.losses)
    if ends:
        _line("loss", f"{ends['first']:.4f} -> {ends['last']:.4f}")
    if run.eval_losses:
        texts = [f"step {step}: {loss:.4f}" for step, loss in run.eval_losses.items()]
        if len(texts) > EVALS:
            texts = [*texts[: EVALS // 2], "...", *texts[-EVALS // 2 :]]
        _line("evaluation", ", ".join(texts))
    for when, scores in run.scores.items():
        _line(when, "  ".join(f"{name.upper()} {score:.2f}" for name, score in scores.items()))
    if run.tokens_per_second:
        _line("speed", f"{run.tokens_per_second:,.0f} tokens/s")
    if run.health and run.health.slow:
        _line("slow", run.health.words)
    _memory(run)


def _memory(run: Run) -> None:
    """Measured beside predicted, where either is known."""
    from dsrun.jobs.runs.metrics_file import number

    peaks, prediction = run.peaks, run.job.prediction or {}
    if peaks is None:
        latest = run.metrics_end.get("memory_bytes")
        if number(latest):
            _line("memory", f"{gib_text(latest)} at most so far on rank 0")
    for name, place in MEMORY.items():
        if run.job.accelerator == "cpu" and name != "host_bytes":
            continue
        measured, predicted = (peaks or {}).get(name), prediction.get(name)
        expected = f"predicted {gib_text(predicted)}" if number(predicted) else ""
        if measured is not None:
            _line("memory", f"{gib_text(measured)} {place}" + (f" ({expected})" if expected else ""))
        elif expected:
            _line("memory", f"{expected} {place}")


def _line(name: str, text: str) -> None:
    """A fact; of several lines those of a log, which stand 4 columns in, stay as they are."""
    for number, line in enumerate(text.split("\n")):
        whole = f"{'' if number else name:<11} {line}"
        if line.startswith("    "):
            click.echo(whole)
        else:
            echo_folded(whole, len(whole) - len(line.lstrip()))
