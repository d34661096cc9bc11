"""Shared by chat and evaluate: decoding and the device."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from dsrun.job.inference_request import Decoding
    from dsrun.jobs.assembly.inference import InferenceDevice
    from dsrun.options.table import InferenceOptions


def decoding_of(options: InferenceOptions, seed: int) -> Decoding:
    """Greedy decoding, unless an option asks for sampling."""
    from dataclasses import replace

    from dsrun.job.inference_request import CHATGLM2, Decoding

    temperature, top_p = options.temperature, options.top_p
    if temperature == 0 and (options.sample or top_p is not None):
        drawn = "--sample" if options.sample else "--top-p"
        raise click.UsageError(f"--temperature 0 always takes the likeliest token, but {drawn} samples.")
    if not options.sample and temperature is None and top_p is None:
        return Decoding(seed=seed)
    base = CHATGLM2 if options.sample else Decoding(temperature=1.0)
    return replace(
        base,
        temperature=base.temperature if temperature is None else temperature,
        top_p=base.top_p if top_p is None else top_p,
        seed=seed,
    )


def device_of(device: int | None, precision: str | None) -> InferenceDevice:
    """The device and precision to use."""
    from dsrun.cluster.devices import detect
    from dsrun.jobs.assembly import inference

    return inference.choose_device(detect(os.environ), device, precision, os.environ)


def print_device(device: InferenceDevice, *, quiet: bool = False) -> None:
    """Print the device and precision to stderr. quiet: only a note."""
    if device.note:
        click.echo(f"note: {device.note}", err=True)
    if not quiet:
        click.echo(f"on {device.device}, {device.precision}", err=True)


def is_terminal() -> bool:
    """Whether stdin is a terminal."""
    return sys.stdin.isatty()
