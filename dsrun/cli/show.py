"""`dsrun show` (runs): one run in full."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dsrun.cli.common.completion import runs

if TYPE_CHECKING:
    from dsrun.jobs.runs.past_runs import Run
    from dsrun.jobs.spec.job import ScriptJob
    from dsrun.options.groups import PeftOptions

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

    found = past_runs.read(past_runs.named(run))
    if as_json:
        from dsrun.files import json_text

        click.echo(json_text(value(found), indent=2))
    else:
        _show(found)


def next_commands(run: Run) -> dict[str, str]:
    """What one does next with a run in this state: purpose -> the command."""
    from shlex import join

    from dsrun.jobs.spec.layout import NOT_FINITE

    path = str(run.path)
    if run.alive:
        return {"follow": join(["dsrun", "logs", "-f", path]), "stop": join(["dsrun", "stop", path])}
    again = {"repeat": join(["dsrun", "rerun", path])}
    if run.state == "finished" or run.script:
        asked = run.model or (run.path / "adapter").is_dir()
        return ({"ask": join(["dsrun", "chat", path])} if asked and not run.script else {}) | again
    export = {"export": join(["dsrun", "export", path])} if run.checkpoints and not run.model else {}
    if NOT_FINITE in run.why:  # the same steps with the same learning rate would end there again
        return {**export, **again}
    return {"continue": join(["dsrun", "resume", path]), **export, **again}


def value(run: Run) -> dict[str, Any]:
    """Everything, for machines: bytes, seconds, times since 1970."""
    from dataclasses import asdict

    if run.script:
        return _value_of_script(run, run.script)
    job = run.job
    last = run.metrics_end
    return {
        "path": run.path,
        "state": run.state,
        "why": run.why or None,
        "problems": run.problems,
        "diagnosis": run.diagnosis or None,
        "model": {"name": job.model.name, "source": job.model.source, "location": job.model.location},
        "data": asdict(job.data),
        "training": asdict(job.training),
        "peft": asdict(job.peft),
        "preset": job.preset,
        "zero_stage": job.zero_stage,
        "precision": job.precision,
        "accelerator": job.accelerator,
        "host": run.host,
        "hosts": [asdict(host) for host in job.hosts],
        "ranks": job.world_size,
        "micro_batch": job.micro_batch,
        "grad_accum": job.grad_accum,
        "dsrun_version": job.dsrun_version,
        "started": run.started,
        "seconds": run.seconds,
        "launches": len(run.launches),
        "steps": max(run.losses, default=0),
        "total_steps": run.total_steps,
        "loss": _ends(run.losses),
        "eval_losses": [{"step": step, "loss": loss} for step, loss in run.eval_losses.items()],
        "scores": run.scores,
        "skipped_steps": last.get("skipped"),
        "tokens_per_second": run.tokens_per_second,
        "predicted": job.prediction,
        "measured": run.peaks,
        "rank_0_memory_bytes": last.get("memory_bytes"),
        "places": {name: place for name, place in _places(run).items() if place},
        "commands": next_commands(run),
    }


def _value_of_script(run: Run, job: ScriptJob) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "path": run.path,
        "state": run.state,
        "why": run.why or None,
        "problems": run.problems,
        "diagnosis": run.diagnosis or None,
        "script": job.script,
        "module": job.module,
        "args": job.args,
        "cwd": job.cwd,
        "preset": job.preset,
        "accelerator": job.accelerator,
        "host": run.host,
        "hosts": [asdict(host) for host in job.hosts],
        "launcher": job.launcher,
        "ranks": job.world_size,
        "dsrun_version": job.dsrun_version,
        "started": run.started,
        "seconds": run.seconds,
        "restarts": run.restarts,
        "places": {name: place for name, place in _places(run).items() if place},
        "commands": next_commands(run),
    }


def _ends(curve: dict[int, float]) -> dict[str, float] | None:
    return {"first": curve[min(curve)], "last": curve[max(curve)]} if curve else None


def _places(run: Run) -> dict[str, Any]:
    """Where things are, of those that are there."""
    from dsrun.jobs.spec.run_folder import COMMAND, CONFIG, LOGS, PREPARE_LOG

    names = {
        "logs": LOGS, "preparing": PREPARE_LOG, "config": CONFIG, "command": COMMAND, "picture": "loss.png",
        "rows": "data.json", "adapter": "adapter", "answers": "generated_predictions.jsonl",
    }  # fmt: skip
    return {
        "model": run.model,
        "checkpoints": run.checkpoints,
        **{name: run.path / file for name, file in names.items() if (run.path / file).exists()},
    }


def _show(run: Run) -> None:
    from dsrun.cli.common.columns import printable, span_text, time_text
    from dsrun.jobs.allocation.allocation import in_words

    if run.script:
        _show_script(run, run.script)
        return
    job = run.job
    total = run.total_steps
    steps = f"{max(run.losses, default=0)} of {'?' if total is None else total} steps"
    launches = f", in {len(run.launches)} launches" if len(run.launches) > 1 else ""
    rows = job.micro_batch * job.grad_accum * job.world_size
    _line("run", printable(str(run.path)))
    _line(
        "state",
        f"{_state(run)}, {steps}; started {time_text(run.started)}, took {span_text(run.seconds)}{launches}",
    )
    for problem in run.problems:
        _line("error", problem.replace("\n", "\n" + " " * 12))
    _line("base model", f"{job.model.name} ({job.model.source}: {job.model.location})")
    weights = job.data.weights or (1,) * len(job.data.train_files)
    files = [
        file + (f" x {weight:g}" if weight != 1 else "")
        for file, weight in zip(job.data.train_files, weights, strict=True)
    ]
    _line("data", ", ".join(files) + (f", held out: {job.data.eval_file}" if job.data.eval_file else ""))
    _line("preset", f"{job.preset} (ZeRO stage {job.zero_stage}), {job.precision}")
    on = f" of {run.host}" if run.host else ""
    _line("devices", f"{job.world_size} on {job.accelerator}{on}; {in_words(job.hosts)}")
    _line(
        "batch",
        f"{rows} rows a step: micro batch {job.micro_batch} x accumulation {job.grad_accum} x {job.world_size}",
    )
    _line("training", f"lr {job.training.lr:g} ({job.training.lr_schedule}), seed {job.training.seed}")
    if job.peft.freezes:
        _line("method", _method(job.peft))
    _results(run)
    _end(run)


def _state(run: Run) -> str:
    """The state, and why it failed."""
    from dsrun.cli.common.columns import printable

    return f"{run.state}: {printable(run.why)}" if run.why else run.state


def _method(peft: PeftOptions) -> str:
    from dsrun.cli.common.columns import printable

    layers = "all linear layers" if peft.lora_target == "all" else peft.lora_target
    what = f"rank {peft.lora_rank}, alpha {peft.lora_alpha:g}, on {layers}"
    if peft.method == "ptuning":
        what = f"{peft.pre_seq_len} positions"
    start = f"; from {printable(peft.adapter)}" if peft.adapter else ""
    return f"{peft.method}: {what}{start}"


def _show_script(run: Run, job: ScriptJob) -> None:
    from shlex import join

    from dsrun.cli.common.columns import printable, span_text, time_text
    from dsrun.jobs.allocation.allocation import in_words

    _line("run", printable(str(run.path)))
    again = f", started again {run.restarts} times" if run.restarts else ""
    _line(
        "state",
        f"{_state(run)}; started {time_text(run.started)}, took {span_text(run.seconds)}{again}",
    )
    for problem in run.problems:
        _line("error", problem.replace("\n", "\n" + " " * 12))
    _line("script", printable(join([*(["-m"] if job.module else []), job.script, *job.args])))
    _line("in", printable(job.cwd))
    if job.preset:
        _line("preset", job.preset)
    on = f" of {run.host}" if run.host else ""
    _line("devices", f"{job.world_size} on {job.accelerator}{on}; {in_words(job.hosts)}")
    _end(run)


def _end(run: Run) -> None:
    """Where things are, and what to do next."""
    from dsrun.cli.common.columns import printable

    for name, place in _places(run).items():
        if place:
            text = (
                f"{place[-1]}" + (f" and {len(place) - 1} older" * (len(place) > 1))
                if isinstance(place, list)
                else place
            )
            _line(name, printable(str(text)))
    for name, text in next_commands(run).items():
        _line(name, text)


def _results(run: Run) -> None:
    ends = _ends(run.losses)
    if ends:
        _line("loss", f"{ends['first']:.4f} -> {ends['last']:.4f}")
    if run.eval_losses:
        told = [f"step {step}: {loss:.4f}" for step, loss in run.eval_losses.items()]
        if len(told) > EVALS:
            told = [*told[: EVALS // 2], "...", *told[-EVALS // 2 :]]
        _line("evaluation", ", ".join(told))
    for when, scores in run.scores.items():
        _line(when, "  ".join(f"{name.upper()} {score:.2f}" for name, score in scores.items()))
    if run.tokens_per_second:
        _line("speed", f"{run.tokens_per_second:,.0f} tokens/s")
    _memory(run)


def _memory(run: Run) -> None:
    """Measured beside predicted, where either is known."""
    from dsrun.cli.common.columns import gib_text
    from dsrun.jobs.runs.past_runs import number

    took, said = run.peaks, run.job.prediction or {}
    if took is None:
        latest = run.metrics_end.get("memory_bytes")
        if number(latest):
            _line("memory", f"{gib_text(latest)} at most so far on rank 0")
    for name, what in MEMORY.items():
        if run.job.accelerator == "cpu" and name != "host_bytes":
            continue
        measured, predicted = (took or {}).get(name), said.get(name)
        expected = f"predicted {gib_text(predicted)}" if number(predicted) else ""
        if measured is not None:
            _line("memory", f"{gib_text(measured)} {what}" + (f" ({expected})" if expected else ""))
        elif expected:
            _line("memory", f"{expected} {what}")


def _line(name: str, text: str) -> None:
    click.echo(f"{name:<11} {text}")
