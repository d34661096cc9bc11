"""`dsrun evaluate` (runs): loss and scores of a model on held-out examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dsrun.cli.output.columns import columns
from dsrun.cli.output.results import print_json
from dsrun.cli.parsing.completion import runs
from dsrun.cli.parsing.options import TableCommand, given, options_of
from dsrun.options.commands import EvaluateOptions
from dsrun.words import printable


@click.command(cls=TableCommand)
@click.argument("model", metavar="RUN|FOLDER", shell_complete=runs)
@options_of(EvaluateOptions)
def command(model: str, **values: Any) -> None:
    """Answer held-out prompts with the model of a finished run, or of any folder that `dsrun chat` takes, and score it.

    Printed: the loss per target token, and the scores that fine-tuning prints (--metrics). The answers are kept, one
    JSON object a line. Greedy unless an option says otherwise; with a seed the same answers come again. One device is
    used.

    \b
    dsrun evaluate runs/mine
    dsrun evaluate runs/mine --eval-file test.jsonl --sample --seed 3
    dsrun evaluate DIR --eval-file test.jsonl --prompt-column question --response-column answer
    """
    from dataclasses import asdict

    from dsrun.cli.jobs.inference import decoding_of, device_of, print_device
    from dsrun.cli.jobs.running import ending
    from dsrun.jobs.assembly import inference

    requested = given(EvaluateOptions, values)
    options = requested.options
    decoding = decoding_of(options, options.seed)
    model_found = inference.find(model, options.adapter)
    inference.check_packages(inference.EVALUATE)
    device = device_of(options.device, options.precision)
    request = inference.evaluation(
        model_found, inference.model_of(model_found, device, options), decoding, requested, Path.cwd()
    )
    print_device(device)
    with ending("No answers were written."):
        result = inference.run_evaluation(request, device)
    result = {
        "model": request.model.folder, "eval_file": request.data.eval_file, **result,
        "decoding": asdict(decoding), "device": device.device, "precision": device.precision,
    }  # fmt: skip
    if options.as_json:
        print_json("evaluate", result)
    else:
        _show(result, str(decoding))


def _show(result: dict[str, Any], decoding: str) -> None:
    from math import exp

    loss = result["eval_loss"]
    if loss is None:  # JSON has no NaN
        loss_text = "not finite"
    else:
        perplexity = f"{exp(loss):.2f}" if loss < 100 else "inf"
        loss_text = f"{loss:.4f} over {result['target_tokens']:,} tokens (perplexity {perplexity})"
    click.echo(f"model       {printable(result['model'])}")
    click.echo(f"rows        {result['rows']} of {printable(result['eval_file'])}")
    click.echo(f"loss        {loss_text}")
    if not result["scores"]:
        return
    click.echo(f"answers     {result['answered']}, {decoding}: {printable(result['predictions'])}")
    names, values = zip(
        *((name.upper(), f"{value:.2f}") for name, value in result["scores"].items()), strict=True
    )
    for line in columns([names, values], left=()):
        click.echo(f"            {line}")
