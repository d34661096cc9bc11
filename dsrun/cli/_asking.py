"""The options of the commands that ask a model something."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from dsrun.jobs.answering import Place
    from dsrun.jobs.question import Decoding

F = TypeVar("F", bound=Callable[..., Any])
OPTIONS = (
    click.option(
        "--sample",
        is_flag=True,
        help="Draw tokens as ChatGLM2's own evaluation does: temperature 0.95, top-p 0.7.",
    ),
    click.option(
        "--temperature",
        type=click.FloatRange(min=0),
        help="Draw tokens; 0: always the likeliest.  [default: 0]",
    ),
    click.option(
        "--top-p",
        type=click.FloatRange(min=0, max=1, min_open=True),
        help="Draw among the likeliest tokens that have so much of the probability together.",
    ),
    click.option("--seed", type=click.IntRange(min=0), help="Decides what is drawn."),
    click.option("--device", type=click.IntRange(min=0), help="Which GPU.  [default: one that nobody uses]"),
    click.option(
        "--precision",
        type=click.Choice(["fp16", "bf16", "fp32"]),
        help="Of weights and activations.  [default: what the device does best]",
    ),
    click.option(
        "--adapter",
        type=click.Path(path_type=Path),
        help="What was trained beside the model in FOLDER: LoRA's folder, or a P-Tuning checkpoint.",
    ),
    click.option(
        "--prompt-format",
        metavar="NAME",
        help="How prompts are framed: chatglm2, chatglm3, llama-2, ...  [default: the run's; a folder's own]",
    ),
)


def asking_options(function: F) -> F:
    """Give a command all of them, in this order."""
    for option in reversed(OPTIONS):
        function = option(function)
    return function


def decoding_of(*, sample: bool, temperature: float | None, top_p: float | None, seed: int) -> Decoding:
    """How tokens are chosen: greedily, unless one of the options says that they are drawn."""
    from dataclasses import replace
    from math import isfinite

    from dsrun.jobs.question import CHATGLM2, Decoding

    for name, value in (("temperature", temperature), ("top-p", top_p)):
        if value is not None and not isfinite(value):
            raise click.UsageError(f"--{name} is not a finite number.")
    if temperature == 0 and (sample or top_p is not None):
        drawn = "--sample" if sample else "--top-p"
        raise click.UsageError(f"--temperature 0 always takes the likeliest token, and {drawn} draws.")
    if not sample and temperature is None and top_p is None:
        return Decoding(seed=seed)
    base = CHATGLM2 if sample else Decoding(temperature=1.0)
    return replace(
        base,
        temperature=base.temperature if temperature is None else temperature,
        top_p=base.top_p if top_p is None else top_p,
        seed=seed,
    )


def place_of(device: int | None, precision: str | None) -> Place:
    """Where it computes."""
    from dsrun.cluster.devices import detect
    from dsrun.jobs import answering

    return answering.place(detect(os.environ), device, precision, os.environ)


def tell_place(where: Place, *, quiet: bool = False) -> None:
    """Say on stderr where it computes. quiet: only what is worth a note."""
    if where.note:
        click.echo(f"note: {where.note}", err=True)
    if not quiet:
        click.echo(f"on {where.device}, {where.precision}", err=True)


def is_terminal() -> bool:
    """Whether somebody types."""
    return sys.stdin.isatty()
