"""What a user decides about a config, and where each decision ends up in it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dsrun.errors import DsrunError, Problem

NVME_VARIABLE = "DSRUN_NVME_PATH"
TARGETS = ("deepspeed", "hf")
PRECISIONS = ("fp16", "bf16", "fp32")
COUNTS = ("gpus", "nodes", "micro_batch", "grad_accum", "largest_parameter")
# Field -> the option's name, and its key in deepspeed.json.
PLACES = {
    "micro_batch": ("--micro-batch", "train_micro_batch_size_per_gpu"),
    "grad_accum": ("--grad-accum", "gradient_accumulation_steps"),
    "grad_clip": ("--grad-clip", "gradient_clipping"),
    "lr": ("--lr", "optimizer.params.lr"),
}


@dataclass(frozen=True)
class Options:
    """What a user decides about a config. None leaves a value to the preset.

    gpus: per node.
    precision: fp16, bf16 or fp32.
    target: deepspeed (numbers for deepspeed.initialize) or hf ("auto" where HF Trainer fills it in).
    nvme_path: a folder; $DSRUN_NVME_PATH where it is None.
    overrides: "path=value" texts.
    largest_parameter: elements of the model's largest weight, where it is known; it sizes the NVMe buffers.
    """

    gpus: int = 1
    nodes: int = 1
    precision: str | None = None
    micro_batch: int | None = None
    grad_accum: int | None = None
    grad_clip: float | None = None
    target: str = "deepspeed"
    nvme_path: str | None = None
    lr: float | None = None
    overrides: tuple[str, ...] = ()
    largest_parameter: int | None = None

    @property
    def world_size(self) -> int:
        return self.gpus * self.nodes


def checked(options: Options) -> Options:
    """The options, if they make sense. Raises DsrunError with all that don't."""
    if problems := list(_problems(options)):
        raise DsrunError(problems)
    return options


def with_environment(options: Options) -> tuple[Options, str]:
    """The options with $DSRUN_NVME_PATH filled in, and where nvme_path came from."""
    if options.nvme_path is None and (folder := os.environ.get(NVME_VARIABLE)):
        return replace(options, nvme_path=folder), f"environment {NVME_VARIABLE}"
    return options, "--nvme-path"


def _problems(options: Options) -> Iterator[Problem]:
    for name in COUNTS:
        count = getattr(options, name)
        if count is not None and (type(count) is not int or count < 1):
            yield Problem(f"can't be {count!r}", _option(name), "A whole number, at least 1.")
    clip, lr = options.grad_clip, options.lr
    if clip is not None and not (math.isfinite(clip) and clip >= 0):
        yield Problem(
            f"can't be {clip!r}", _option("grad_clip"), "A number, at least 0; 0 turns clipping off."
        )
    if lr is not None and not (math.isfinite(lr) and lr > 0):
        yield Problem(f"can't be {lr!r}", _option("lr"), "A number above 0.")
    if options.precision not in (None, *PRECISIONS):
        yield Problem(f"can't be {options.precision!r}", "--precision", f"One of {', '.join(PRECISIONS)}.")
    if options.target not in TARGETS:
        yield Problem(f"can't be {options.target!r}", "--for", f"One of {', '.join(TARGETS)}.")
    if options.nvme_path == "":
        yield Problem("is empty", "--nvme-path", "A folder on a local NVMe disk.")


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"
