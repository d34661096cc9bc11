"""`dsrun finetune`: train a model, here and now."""

from __future__ import annotations

import os
import re
from math import inf, isfinite
from pathlib import Path
from typing import Any

import click

from dsrun.cli._running import going_options, save_option
from dsrun.cli._where import wait_options, where_options
from dsrun.jobs.kernels import ATTENTIONS
from dsrun.jobs.optimizers import OPTIMIZERS
from dsrun.talks import AUTO, FORMATS

FILE = click.Path(path_type=Path)
PATHS = {"folder", "gguf", "chatglm"}  # sources of a model that was given as a path
POSITIVE = click.IntRange(min=1)
WEIGHTED = re.compile(r"(?P<file>.+):(?P<weight>\d+(\.\d+)?|\.\d+)")


def _train_files(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> Path | None:
    """The first file; the others and the weights become values of their own, more_files and weights."""
    if not values:
        return None
    files = [_weighted(value) for value in values]
    if any(weight == 0 for _, weight in files):
        raise click.BadParameter("a weight is more than 0: FILE:2 takes each row twice.", ctx, param)
    if len(files) > 1:
        ctx.params["more_files"] = tuple(str(path.absolute()) for path, _ in files[1:])
    if any(weight != 1 for _, weight in files):
        ctx.params["weights"] = tuple(weight for _, weight in files)
    return files[0][0]


def _weighted(value: str) -> tuple[Path, float]:
    """FILE or FILE:WEIGHT; a file whose name ends so is the file."""
    found = WEIGHTED.fullmatch(value)
    if found is None or Path(value).exists():
        return Path(value), 1.0
    return Path(found["file"]), float(found["weight"])


@click.command()
@click.argument("model")
@click.option(
    "--preset", help="Preset, a preset file's path, or auto: the fastest that fits.  [default: the model's]"
)
@where_options
@wait_options
@click.option(
    "--train-file",
    multiple=True,
    callback=_train_files,
    metavar="FILE[:WEIGHT]",
    help="Training rows: JSONL, JSON, CSV or Parquet. May be repeated; FILE:2 takes each row twice an epoch.",
)
@click.option("--eval-file", type=FILE, help="Held-out rows, for the evaluation loss and the scores.")
@click.option("--prompt-column", help="Column of the prompt.  [default: content]")
@click.option("--response-column", help="Column of the response.  [default: summary]")
@click.option("--history-column", help="Column of earlier rounds, where there is one.  [default: history]")
@click.option(
    "--data-format",
    type=click.Choice([AUTO, *FORMATS]),
    help="What a row is.  [default: auto, by the file's columns]",
)
@click.option("--train-on-prompt", is_flag=True, default=None, help="Train on prompts as on responses.")
@click.option("--strict-data", is_flag=True, default=None, help="Stop where a row would be left out.")
@click.option("--max-source-length", type=POSITIVE, help="Tokens of a prompt, at most.  [default: 64]")
@click.option("--max-target-length", type=POSITIVE, help="Tokens of a response, at most.  [default: 64]")
@click.option("--micro-batch", type=POSITIVE, help="Rows per device and micro-step.  [default: 4]")
@click.option("--grad-accum", type=POSITIVE, help="Micro-steps per optimizer step.  [default: 1]")
@click.option(
    "--grad-clip", type=click.FloatRange(min=0), help="Gradient norm to clip at; 0: never.  [default: 1.0]"
)
@click.option(
    "--precision",
    type=click.Choice(["fp16", "bf16", "fp32"]),
    help="Of weights and activations.  [default: what the devices do best]",
)
@click.option(
    "--method",
    type=click.Choice(["full", "lora", "qlora", "ptuning"]),
    help="What is trained: every weight, LoRA's, LoRA's on 4-bit weights, P-Tuning v2's prefix.  [default: full]",
)
@click.option("--lora-rank", type=POSITIVE, help="Rank of LoRA's matrices.  [default: 8]")
@click.option(
    "--lora-alpha",
    type=click.FloatRange(min=0, min_open=True),
    help="LoRA's scale times its rank.  [default: 16]",
)
@click.option(
    "--lora-dropout", type=click.FloatRange(0, 1, max_open=True), help="Of LoRA's inputs.  [default: 0]"
)
@click.option(
    "--lora-target",
    metavar="NAMES",
    help="Linear layers that get LoRA's: q_proj,v_proj.  [default: all, but the output's]",
)
@click.option("--pre-seq-len", type=POSITIVE, help="Positions of P-Tuning's prefix.  [default: 128]")
@click.option(
    "--prefix-dropout",
    type=click.FloatRange(0, 1, max_open=True),
    help="Of P-Tuning's prefix.  [default: 0.1]",
)
@click.option("--adapter", type=FILE, help="Go on with this one: LoRA's folder, or a P-Tuning checkpoint.")
@click.option(
    "--lr",
    type=click.FloatRange(min=0, min_open=True),
    help="Learning rate.  [default: 1e-4; LoRA 2e-4, P-Tuning 2e-2]",
)
@click.option(
    "--lr-schedule",
    type=click.Choice(["linear", "cosine", "constant"]),
    help="After the warm-up.  [default: linear]",
)
@click.option(
    "--optimizer",
    type=click.Choice(OPTIMIZERS),
    help="adamw-8bit: states of 2 bytes a weight, not 8 (bitsandbytes; GPUs).  [default: adamw]",
)
@click.option(
    "--warmup-steps", type=click.IntRange(min=0), help="Steps until the full learning rate.  [default: 0]"
)
@click.option(
    "--epochs", type=click.FloatRange(min=0, min_open=True), help="Passes over the rows.  [default: 3]"
)
@click.option("--max-steps", type=POSITIVE, help="Optimizer steps, instead of epochs.")
@click.option("--seed", type=int, help="Decides the order of the rows.  [default: 42]")
@click.option("--save-steps", type=POSITIVE, help="Steps between checkpoints.  [default: 1000]")
@click.option("--keep", "keep_checkpoints", type=POSITIVE, help="Newest checkpoints to keep.  [default: 2]")
@click.option("--eval-steps", type=POSITIVE, help="Steps between evaluations.  [default: a fifth of the run]")
@click.option(
    "--generate-rows", type=click.IntRange(min=0), help="Held-out prompts to answer.  [default: 100]"
)
@click.option("--score-before/--no-score-before", default=None, help="Answer them before training, too.")
@click.option(
    "--compute-metrics/--no-compute-metrics",
    default=None,
    help="Answer and score them at each evaluation, too: slow.  [default: the loss only]",
)
@click.option(
    "--gradient-checkpointing/--no-gradient-checkpointing", default=None, help="Less memory, slower."
)
@click.option(
    "--attention",
    type=click.Choice(ATTENTIONS),
    help="[default: auto, flash-attn where it is installed and works, else torch's SDPA]",
)
@click.option(
    "--liger/--no-liger",
    default=None,
    help="Loss and output layer fused (liger-kernel).  [default: where GPU and model have it]",
)
@click.option(
    "--packing/--no-packing", default=None, help="Several rows in one line, kept apart.  [default: packing]"
)
@click.option(
    "--official", is_flag=True, default=None, help="ChatGLM2's own recipe, number for number; slower."
)
@click.option(
    "--export-format",
    type=click.Choice(["transformers", "chatglm", "adapter"]),
    help="chatglm: write an original ChatGLM checkpoint back in its own format, too. adapter: not the merged model.",
)
@click.option("--nvme-path", help="A folder on an NVMe disk, for presets that offload to it.")
@click.option(
    "--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Set a key of the DeepSpeed config."
)
@going_options
@save_option
@click.option("--output-dir", type=FILE, help="The run's folder.  [default: runs/MODEL-PRESET-TIME]")
@click.option("--model-path", type=FILE, help="The folder that holds a named model.")
@click.option("--resume", is_flag=True, help="Continue the run in --output-dir from its newest checkpoint.")
@click.option(
    "--continue",
    "go_on",
    is_flag=True,
    help="Continue the run in --output-dir if there is one, else start it.",
)
@click.option("--force", is_flag=True, help="Start what is predicted to run out of memory.")
@click.option("--dry-run", is_flag=True, help="Print what would run; start and write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result (or the dry run) as JSON.")
def command(
    model: str,
    *,
    overrides: tuple[str, ...],
    wait: bool,
    wait_timeout: float | None,
    resume: bool,
    go_on: bool,
    force: bool,
    dry_run: bool,
    as_json: bool,
    hang_timeout: float | None,
    max_restarts: int | None,
    save_on_stop: float | None,
    **options: Any,
) -> None:
    """Fine-tune MODEL: a name from `dsrun models`, a Hugging Face folder or a GGUF file.

    Everything is checked first; then DeepSpeed's launcher starts the ranks with explicit numbers. The run folder
    keeps what ran, the logs, the checkpoints and the model, which transformers loads without dsrun.

    \b
    dsrun finetune chatglm2-tiny --gpus 2
    dsrun finetune chatglm2-6b --model-path DIR --train-file train.jsonl --eval-file dev.jsonl --gpus 2
    dsrun finetune llama-2-7b --train-file talks.json --train-file own.jsonl:3 --hostfile hostfile --preset zero3
    """
    from dsrun.cli import _dry_run
    from dsrun.cli._running import began, join_pods
    from dsrun.cli._where import reach_of
    from dsrun.cluster.devices import detect
    from dsrun.jobs import claims
    from dsrun.jobs.finetune import Request
    from dsrun.jobs.placed import ask_hosts, remembered

    resume = resume or (go_on and began(options["output_dir"]))
    reach, ask = reach_of(options, again=resume), remembered(ask_hosts)
    join_pods(reach, options["output_dir"], dry_run=dry_run)
    ways = {"hang_timeout": hang_timeout, "max_restarts": max_restarts, "save_on_stop": save_on_stop}
    given = {name: value for name, value in options.items() if value is not None}
    numbers = [name for name, value in given.items() if isinstance(value, float) and not isfinite(value)]
    limits = {"wait_timeout": wait_timeout, "hang_timeout": hang_timeout, "save_on_stop": save_on_stop}
    numbers += [name for name, value in limits.items() if value is not None and not isfinite(value)]
    if numbers:
        raise click.UsageError(f"--{numbers[0].replace('_', '-')} is not a finite number.")
    if "epochs" in given and "max_steps" in given:
        raise click.UsageError("--epochs and --max-steps both say how long to train; give one of them.")
    machine = detect(os.environ)
    request = Request(model, given, overrides)
    wait_min = wait_timeout if wait_timeout is not None else inf if wait else None

    alone = claims.left_alone(machine)  # as it will be when the wait is over
    if dry_run:
        take = claims.Look(machine if wait_min is None else alone, os.environ, reach, ask)
        job, notes = _planned(request, take, resume=resume, download=False, force=True)
        _tell(notes)
        _dry_run.show(job, reach, as_json=as_json, resume=resume)
        return
    if wait_min is not None and machine.accelerator == "cuda":
        # What else is wrong is said before hours of waiting.
        take = claims.Look(alone, os.environ, reach, ask)
        _planned(request, take, resume=resume, download=False, force=force)
    with claims.claim(
        machine, os.environ, lambda: detect(os.environ), _say, reach=reach, ask=ask, wait_min=wait_min
    ) as claim:
        job, notes = _planned(request, claim, resume=resume, download=True, force=force)
        claim.name(job.run_dir)
        _tell(notes)
        run(job, claim.machine, as_json, resume, reach, **ways)


def _planned(
    request: Any, take: Any, *, resume: bool, download: bool, force: bool
) -> tuple[Any, tuple[str, ...]]:
    """The job, new or continued, and what is worth saying about it."""
    if resume:
        from dsrun.jobs.resume import resumed

        job = resumed(request, take.machine, os.environ, force=force, take=take)
        return job, take.notes
    from dsrun.jobs import finetune

    planned = finetune.plan(request, take.machine, os.environ, download=download, force=force, take=take)
    return planned.job, planned.notes


def _say(line: str) -> None:
    click.echo(line, err=True)


def _tell(notes: tuple[str, ...]) -> None:
    for note in notes:
        _say(f"note: {note}")


def run(job: Any, machine: Any, as_json: bool, resume: bool, reach: Any, **ways: Any) -> None:
    """Carry a job out and say what came of it. Exits with the signal's code where it is asked to end.

    machine: this one; reach: how other hosts are reached (dsrun.jobs.placed.Reach); ways: as `going_of` takes them.
    """
    import sys
    from shlex import join

    from dsrun.cli._running import ending, going_of
    from dsrun.jobs.placed import ON_THIS_MACHINE, in_words
    from dsrun.jobs.run import carry_out

    where = machine.reason if job.launcher == ON_THIS_MACHINE else in_words(job.hosts)
    click.echo(
        f"{job.model.name}, preset {job.preset}, {job.precision}, {job.world_size} ranks on {job.accelerator} "
        f"({where}), micro batch {job.micro_batch} x accumulation {job.grad_accum}",
        err=True,
    )
    name = job.model.location if job.model.source in PATHS else job.model.name
    again = join(["dsrun", "finetune", name, "--output-dir", job.run_dir, "--resume"])
    again = f"Continue it: {again}"
    going, environ = going_of(reach, job.launcher, **ways)
    with ending(again):
        result = carry_out(job, machine, environ, _say, live=sys.stderr.isatty(), resume=resume, going=going)
    if as_json:
        import json

        click.echo(json.dumps(result, ensure_ascii=False, indent=2))
    else:
        _summarise(result)


def _summarise(result: dict[str, Any]) -> None:
    """What came out, and how to use it."""
    click.echo(f"\nmodel       {result['model']}")
    if result["eval_loss"]:
        first, last = result["eval_loss"]["first"], result["eval_loss"]["last"]
        click.echo(f"evaluation  loss {first:.4f} -> {last:.4f}")
    for when, scores in result["scores"].items():
        text = "  ".join(f"{name.upper()} {value:.2f}" for name, value in scores.items())
        click.echo(f"{when:<11} {text}")
    click.echo(f"memory      {_memory_text(result)}")
    click.echo(
        f"run folder  {result['run_dir']}  (deepspeed.json, command.sh, metrics.jsonl, loss.png, logs/)"
    )
    click.echo(f"use it      {_use(result)}")


def _use(result: dict[str, Any]) -> str:
    """How the model is asked: with transformers alone, unless there is only an adapter."""
    from shlex import join

    if (Path(result["model"]) / "adapter_config.json").is_file():
        return join(["dsrun", "chat", result["run_dir"]])
    return use_command(result["model"], result["example_prompt"] or "Hello")


def _memory_text(result: dict[str, Any]) -> str:
    """What it took beside what was predicted: of the fullest GPU, or of the host where there is none."""
    took, said = result["measured"], result["predicted"] or {}
    name = "host_bytes" if took["gpu_allocated_bytes"] is None else "gpu_allocated_bytes"
    what = "of host memory, all ranks" if name == "host_bytes" else "in use on the fullest GPU"
    predicted = f" (predicted {said[name] / 2**30:.2f})" if name in said else ""
    return f"{took[name] / 2**30:.2f} GiB {what}{predicted}"


def use_command(model: str, prompt: str) -> str:
    """A command that asks the exported model something, with transformers alone."""
    import sys
    from json import dumps
    from shlex import join

    # JSON's strings are Python's, and need no quoting inside the shell's single quotes.
    code = (
        f'from transformers import pipeline; ask = pipeline("text-generation", {dumps(model, ensure_ascii=False)}); '
        f'answer = ask([dict(role="user", content={dumps(prompt, ensure_ascii=False)})], max_new_tokens=96); '
        'print(answer[0]["generated_text"][-1]["content"])'
    )
    return join([sys.executable, "-c", code])
