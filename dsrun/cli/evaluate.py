"""`dsrun evaluate`: the loss and the scores of a model on held-out rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dsrun.cli._asking import asking_options
from dsrun.talks import AUTO, FORMATS

FILE = click.Path(path_type=Path)
POSITIVE = click.IntRange(min=1)
SEED = 42


@click.command()
@click.argument("model", metavar="RUN|FOLDER")
@click.option("--eval-file", type=FILE, help="Held-out rows.  [default: the run's]")
@click.option("--prompt-column", help="Column of the prompt.  [default: the run's, or content]")
@click.option("--response-column", help="Column of the response.  [default: the run's, or summary]")
@click.option("--history-column", help="Column of earlier rounds.  [default: the run's, or history]")
@click.option(
    "--data-format",
    type=click.Choice([AUTO, *FORMATS]),
    help="What a row is.  [default: the run's; of another file what its columns tell]",
)
@click.option("--max-source-length", type=POSITIVE, help="Tokens of a prompt.  [default: the run's, or 64]")
@click.option("--max-target-length", type=POSITIVE, help="Tokens of a response, and of an answer, at most.")
@click.option("--limit", type=POSITIVE, metavar="N", help="Only the first N rows.")
@click.option(
    "--generate-rows",
    type=click.IntRange(min=0),
    help="Prompts to answer; 0: only the loss.  [default: all; of the run's own file as many as it answered]",
)
@click.option(
    "--micro-batch", type=POSITIVE, help="Rows at once; prompts: four times as many.  [default: the run's]"
)
@asking_options
@click.option(
    "--output", type=FILE, help="The answers' file.  [default: predictions-....jsonl in the run's folder]"
)
@click.option("--force", is_flag=True, help="Replace that file.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    model: str,
    *,
    as_json: bool,
    device: int | None,
    precision: str | None,
    adapter: Path | None,
    prompt_format: str | None,
    sample: bool,
    temperature: float | None,
    top_p: float | None,
    seed: int | None,
    **options: Any,
) -> None:
    """Answer held-out prompts with the model of a finished run, or of any folder that `dsrun chat` takes, and score it.

    Printed: the loss per target token, and ROUGE and BLEU as fine-tuning prints them. The answers are kept, one JSON
    object a line. Greedy unless an option says otherwise; with a seed the same answers come again. One device is used.

    \b
    dsrun evaluate runs/mine
    dsrun evaluate runs/mine --eval-file test.jsonl --sample --seed 3
    dsrun evaluate DIR --eval-file test.jsonl --prompt-column question --response-column answer
    """
    from dataclasses import asdict

    from dsrun.cli._asking import decoding_of, place_of, tell_place
    from dsrun.cli._running import ending
    from dsrun.jobs import answering

    decoding = decoding_of(
        sample=sample, temperature=temperature, top_p=top_p, seed=SEED if seed is None else seed
    )
    given = {name: value for name, value in options.items() if value is not None}
    found = answering.find(model, adapter)
    answering.check_packages(answering.EVALUATE)
    where = place_of(device, precision)
    asked = answering.evaluation(
        found, answering.model_of(found, where, prompt_format), decoding, given, Path.cwd()
    )
    tell_place(where)
    with ending("No answers were written."):
        result = answering.carry_out(asked, where)
    result = {
        "model": asked.model.folder, "eval_file": asked.data.eval_file, **result,
        "decoding": asdict(decoding), "device": where.device, "precision": where.precision,
    }  # fmt: skip
    if as_json:
        import json

        from dsrun.jobs.runs import plain

        click.echo(json.dumps(plain(result), ensure_ascii=False, indent=2))
    else:
        _show(result, str(decoding))


def _show(result: dict[str, Any], decoding: str) -> None:
    from math import exp

    from dsrun.cli._columns import columns, printable

    loss = result["eval_loss"]
    perplexity = f"{exp(loss):.2f}" if loss < 100 else "inf"
    click.echo(f"model       {printable(result['model'])}")
    click.echo(f"rows        {result['rows']} of {printable(result['eval_file'])}")
    click.echo(f"loss        {loss:.4f} over {result['target_tokens']:,} tokens (perplexity {perplexity})")
    if not result["scores"]:
        return
    click.echo(f"answers     {result['answered']}, {decoding}: {printable(result['predictions'])}")
    names, values = zip(
        *((name.upper(), f"{value:.2f}") for name, value in result["scores"].items()), strict=True
    )
    for line in columns([names, values], left=()):
        click.echo(f"            {line}")
