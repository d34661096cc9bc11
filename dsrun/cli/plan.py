"""`dsrun plan` (configs): memory and time of a job, and which preset fits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from dsrun.cli.parsing.completion import models
from dsrun.cli.parsing.options import TableCommand, given, options_of
from dsrun.options.commands import PlanOptions
from dsrun.options.declare import entries
from dsrun.options.layers import Layer, Resolved, Source

if TYPE_CHECKING:
    from dsrun.cli.planning.inference import InferencePlans
    from dsrun.cli.planning.layouts import RankedLayouts
    from dsrun.cli.planning.training import TrainingPlans

FOR_INFERENCE = {
    "params", "hidden", "layers", "intermediate", "heads", "kv_heads", "vocab", "gpus", "nodes", "gpu", "gpu_memory",
    "host_memory", "seq_len", "micro_batch", "as_json", "purpose", "beams", "offload_weights",
}  # fmt: skip
"""The options that --for inference listens to, and those that say what a machine is."""


OF_TRAIN_FILE = {
    "model_path", "prompt_column", "response_column", "history_column", "text_column", "data_format",
}  # fmt: skip
"""Options that say how --train-file is read."""


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
    from dsrun.cli.parsing.run_file import for_plan

    requested = given(PlanOptions, values)
    _check_together(requested)
    models, requested = for_plan(models, _by_environment(requested))
    options = requested.options
    if options.calibrate:
        from dsrun.cli.planning.calibrate import calibrate

        calibrate(models, options.as_json)
        return
    if len(models) > 1:
        raise click.UsageError("Name one MODEL (several run folders go with --calibrate).")
    plans = decided(models[0] if models else None, requested)
    if not plans.report():
        raise SystemExit(1)


def decided(
    model: str | None, requested: Resolved[PlanOptions]
) -> TrainingPlans | InferencePlans | RankedLayouts:
    """The plans that some options ask for. Raises DsrunError, and click.UsageError for options that exclude each
    other."""
    from dsrun.cluster.devices import detect
    from dsrun.jobs.assembly import plan_target
    from dsrun.jobs.assembly.planning import subjects

    _check_together(requested)
    options = requested.options
    subject = subjects.subject(model, options)
    machine = (
        None if options.gpu or options.gpu_memory else plan_target.visible(detect(os.environ), os.environ)
    )
    target = plan_target.target(options, machine)
    if options.measure and model is None:
        raise click.UsageError("--measure trains a MODEL: name it.")
    if options.purpose == "inference":
        from dsrun.cli.planning import inference

        return inference.decide(subject, target, requested)
    from dsrun.cli.planning import layouts, plan_case, training

    case = plan_case.prepared(subject, target, requested, model=model if options.measure else None)
    return layouts.decide(case) if options.layouts else training.decide(case)


def _by_environment(requested: Resolved[PlanOptions]) -> Resolved[PlanOptions]:
    """The options with $DSRUN_TRACE, where the command line doesn't say whether to trace."""
    entry = entries(PlanOptions)["trace"]
    text = entry.in_environment(os.environ)
    if text is None or requested.said("trace"):
        return requested
    values = {"trace": text.lower() not in ("0", "false", "no", "off")}
    return requested.with_layers(Layer(Source.ENVIRONMENT, values, entry.option.variable))


def _check_together(requested: Resolved[PlanOptions]) -> None:
    """Refuse options that would go unheard."""
    named = {name for name in requested.user if requested.source(name) != Source.ENVIRONMENT}
    options = requested.options
    if options.calibrate:
        _refuse(requested, named - {"calibrate", "as_json"}, "has no use beside --calibrate")
    elif options.purpose == "inference":
        _refuse(requested, named - FOR_INFERENCE, "is for training, not for --for inference")
    else:
        _refuse(requested, named & {"beams", "offload_weights"}, "is for --for inference")
    if options.layouts and options.trainer != "dsrun":
        _refuse(requested, {"trainer"}, "is for plans of presets, not for --layouts")
    if options.measure:
        elsewhere = named & {"gpu", "gpu_memory", "params", "trainer"}
        _refuse(requested, elsewhere, "names what isn't here; --measure is for this machine")
    if options.train_file is None:
        _refuse(requested, named & OF_TRAIN_FILE, "is for --train-file")
    if options.method not in ("lora", "qlora"):
        _refuse(
            requested, named & {"lora_rank", "lora_target", "lora_dropout"}, "is for --method lora or qlora"
        )


def _refuse(requested: Resolved[PlanOptions], names: set[str], why: str) -> None:
    for name in sorted(names):
        words = entries(PlanOptions)[name].spelled(getattr(requested.options, name))
        raise click.UsageError(f"{words} {why}.")
