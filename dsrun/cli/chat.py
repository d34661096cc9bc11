"""`dsrun chat`: talk with a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dsrun.cli._asking import asking_options


@click.command()
@click.argument("model", metavar="RUN|FOLDER")
@click.option(
    "--prompt", metavar="TEXT", help="One question, one answer; -: the question is what stdin holds."
)
@click.option("--system", metavar="TEXT", help="What the model is told before the talk.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Of an answer, at most.",
)
@asking_options
def command(
    model: str,
    *,
    prompt: str | None,
    system: str | None,
    max_new_tokens: int,
    device: int | None,
    precision: str | None,
    adapter: Path | None,
    prompt_format: str | None,
    seed: int | None,
    **drawn: Any,
) -> None:
    """Talk with the model of a finished run, or with a folder's: Hugging Face's, an original ChatGLM's, an adapter's.

    The answers come as they are made; what was said before counts, until it is longer than the model's context.
    Special tokens in what you type stay text. Ctrl-C stops an answer, Ctrl-D ends the talk, /help says what else
    there is.

    \b
    dsrun chat runs/mine
    dsrun chat runs/mine --prompt 类型#裙*颜色#红色
    dsrun chat DIR --sample --seed 3 < questions.txt
    """
    from dsrun.cli._asking import decoding_of, is_terminal, place_of, tell_place
    from dsrun.jobs import answering
    from dsrun.jobs.question import Talk

    decoding = decoding_of(seed=_new_seed() if seed is None else seed, **drawn)
    found = answering.find(model, adapter)
    answering.check_packages(answering.CHAT)
    where = place_of(device, precision)
    tell_place(where, quiet=prompt is not None or not is_terminal())
    asked = Talk(
        answering.model_of(found, where, prompt_format),
        decoding,
        max_new_tokens,
        system=system,
        prompt=prompt,
    )
    if decoding.temperature and seed is None:
        click.echo(f"seed {decoding.seed}", err=True)
    answering.become(asked, where)


def _new_seed() -> int:
    """Another talk each time; it is said, so that a talk can be had again."""
    import secrets

    return secrets.randbelow(10**6)
