"""A user's decisions about a config, and the key of each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dsrun.options.declare import entries
from dsrun.options.table import OverrideOptions

SET = "--set"
"""The option whose texts hold whatever a preset or a template says."""
NVME = entries(OverrideOptions)["nvme_path"]
NVME_VARIABLE = NVME.option.variable
# Field -> the option's name, and its key in deepspeed.json.
PLACES = {
    "global_batch": ("--global-batch", "train_batch_size"),
    "micro_batch": ("--micro-batch", "train_micro_batch_size_per_gpu"),
    "grad_accum": ("--grad-accum", "gradient_accumulation_steps"),
    "grad_clip": ("--grad-clip", "gradient_clipping"),
    "lr": ("--lr", "optimizer.params.lr"),
}


@dataclass(frozen=True)
class Options:
    """A user's decisions about a config. None leaves a value to the preset."""

    gpus: int = 1
    """GPUs of each node."""
    nodes: int = 1
    precision: str | None = None
    """fp16, bf16 or fp32."""
    global_batch: int | None = None
    micro_batch: int | None = None
    grad_accum: int | None = None
    grad_clip: float | None = None
    target: str = "deepspeed"
    """deepspeed (numbers for deepspeed.initialize), hf or accelerate ("auto" where that one fills it in)."""
    nvme_path: str | None = None
    """A folder; $DSRUN_NVME_PATH where it is None."""
    lr: float | None = None
    overrides: tuple[str, ...] = ()
    """path=value texts."""
    largest_parameter: int | None = None
    """Elements of the model's largest weight, where it is known; it sizes the NVMe buffers."""
    own_schedule: bool = False
    """The job sets the learning rate itself, so that a scheduler section is left out."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """The values' origins by field; a field that isn't here has its option as origin."""

    group: int = 1
    """Ranks that work on the same examples (--tp, --sp)."""

    @property
    def world_size(self) -> int:
        return self.gpus * self.nodes


def with_environment(options: Options) -> tuple[Options, str]:
    """The options with $DSRUN_NVME_PATH filled in, and the origin of nvme_path."""
    if options.nvme_path is None and (folder := NVME.in_environment(os.environ)):
        return replace(options, nvme_path=folder), f"environment {NVME_VARIABLE}"
    return options, "--nvme-path"
