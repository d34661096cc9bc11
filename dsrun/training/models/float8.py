"""Products of a model's linear layers in fp8, by torchao: `--fp8`, under FSDP.

Each layer casts its input, its weight and its output's gradient to 8 bits, by a scale for each row (`rowwise`) or for
the whole tensor (`tensorwise`), and multiplies them with the GPU's fp8 units. Weights stay what they are: FSDP keeps
fp32 rows and gathers bf16, and checkpoints and exports know nothing of it.

The output's layer and routers stay in bf16, where rounding would show most, and so do layers with a size that is no
multiple of 16, which the units don't take. In evaluation and answers all layers compute in bf16: as the exported model.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dsrun.errors import TrainingError
from dsrun.job.job import Job
from dsrun.training.models.adapters import linear_layers

MULTIPLE = 16
"""The units' products take sizes that are a multiple of that (torch._scaled_mm)."""
HINT = "Leave it out, or install a torch that can on these GPUs."


def take_float8(model: Any, job: Job) -> str:
    """Have the model's linear layers compute in fp8 while they train; returns a note.

    Raises TrainingError where none can, or where this device can't multiply in it.
    """
    from torchao.float8 import convert_to_float8_training

    way = job.training.fp8
    config = float8_config(way, emulate=job.accelerator != "cuda")
    check(config, next(model.parameters()).device, way)
    layers = linear_layers(model)
    able = {
        id(layer) for layer in layers if not (layer.in_features % MULTIPLE or layer.out_features % MULTIPLE)
    }
    if not able:
        sizes = f"sizes that are multiples of {MULTIPLE}"
        raise TrainingError(f"{type(model).__name__} has no linear layers with {sizes}", where=f"--fp8 {way}")
    convert_to_float8_training(model, module_filter_fn=lambda layer, _: id(layer) in able, config=config)
    taken = [layer for layer in linear_layers(model) if is_float8(layer)]
    if len(taken) != len(able):
        raise TrainingError(f"torchao has taken {len(taken)} of {len(able)} layers", where=f"--fp8 {way}")
    for layer in taken:
        _in_training_alone(layer)
    emulated = ", emulated: this device has no fp8 units" * bool(config.emulate)
    left = f"; {len(layers) - len(able)} have odd sizes" * (len(layers) > len(able))
    return f"fp8, {way}: {len(taken)} linear layers{left}{emulated}"


def float8_config(way: str, *, emulate: bool) -> Any:
    """torchao's settings. emulate: numbers are rounded as in fp8, and multiplied in fp32."""
    from torchao.float8 import Float8LinearConfig

    # A weight's gradient sums over the tokens, of which there may be any number: zeros fill them up to a multiple.
    return replace(Float8LinearConfig.from_recipe_name(way), pad_inner_dim=True, emulate=emulate)


def check(config: Any, device: torch.device, way: str) -> None:
    """Take a small layer forward and back. Raises TrainingError where the device can't, in torch's words: which of its
    kernels are there for which GPU differs from release to release."""
    from torchao.float8 import convert_to_float8_training

    small = nn.Linear(2 * MULTIPLE, MULTIPLE, bias=False, device=device, dtype=torch.bfloat16)
    try:
        layer = convert_to_float8_training(small, config=config)
        inputs = torch.ones(
            MULTIPLE + 1, 2 * MULTIPLE, device=device, dtype=torch.bfloat16, requires_grad=True
        )
        layer(inputs).sum().backward()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TrainingError(
            f"can't be computed on {device}: {reason}", where=f"--fp8 {way}", hint=HINT
        ) from error


def is_float8(layer: Any) -> bool:
    """Whether a linear layer is torchao's."""
    return type(layer).__name__ == "Float8Linear"


def _in_training_alone(layer: Any) -> None:
    in_fp8 = layer.forward

    @functools.wraps(in_fp8)
    def forward(inputs: torch.Tensor) -> torch.Tensor:
        if layer.training:
            return in_fp8(inputs)
        return nn.functional.linear(inputs, layer.weight, layer.bias)

    layer.forward = forward
