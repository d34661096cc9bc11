"""Tensor parallelism as DeepSpeed does it (AutoTP), and three things that dsrun has to see to around it.

Where a comment names a file, it is DeepSpeed 0.19's. dsrun/models/tensor_parallel.py says how a network is divided.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dsrun.errors import TrainingError
from dsrun.job.job import Job
from dsrun.models.tensor_parallel import NETWORKS
from dsrun.training.engines.optimizers import WHOLE_ELEMENTS

DIVIDED = "ds_is_replaced_module"
"""Attribute that AutoTP sets on a weight of which a rank has a part (module_inject/layers.py)."""
KINDS = ("LinearLayer", "LinearAllreduce", "SubParamLinearLayer")
"""Classes that AutoTP puts in the place of divided layers."""


@contextmanager
def dividing(job: Job) -> Iterator[None]:
    """While DeepSpeed divides the model, PEFT's layers hide that they have a weight.

    AutoTP takes whatever has a `weight` of two dimensions for a linear layer and looks no further
    (`_replace_module` in module_inject/auto_tp.py), and PEFT's layers show their inner layer's.
    """
    if job.parallel.tp == 1 or not job.peft.freezes:
        yield
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    weight = BaseTunerLayer.weight
    del BaseTunerLayer.weight
    try:
        yield
    finally:
        BaseTunerLayer.weight = weight


def engaged(job: Job, model: Any) -> None:
    """Raise TrainingError unless the model is divided as the job says: every layer of each block, over that many ranks.

    Each divided weight gets the size of the whole one (WHOLE_ELEMENTS). Losses are the same where nothing was divided,
    so that nobody would see it by them.
    """
    if job.parallel.tp == 1:
        return
    config = model.config.get_text_config()
    layers = NETWORKS[config.model_type].layers
    divided = [
        module
        for name, module in model.named_modules()
        if name.removesuffix(".base_layer").rpartition(".")[2] in layers
        and type(module).__name__ in KINDS
        and module.tp_world_size == job.parallel.tp
    ]
    wanted = len(layers) * config.num_hidden_layers
    if len(divided) != wanted:
        what = f"DeepSpeed has divided {len(divided)} of {wanted} layers over {job.parallel.tp} ranks"
        hint = "Train without it, and report it with the version of DeepSpeed."
        raise TrainingError(what, where=f"--tp {job.parallel.tp}", hint=hint)
    for module in model.modules():
        if type(module).__name__ in KINDS:
            setattr(module.weight, WHOLE_ELEMENTS, math.prod(module._orig_weight_shape))
            if getattr(module.bias, DIVIDED, False):
                setattr(module.bias, WHOLE_ELEMENTS, math.prod(module._orig_bias_shape))


@contextmanager
def gathered(module: Any, parameter: Any) -> Iterator[None]:
    """While it lasts a divided weight is whole on every rank of its group, which all have to come here.

    Afterwards the rank has the very tensor that it had. DeepSpeed's own way (GatherReplacedLayerParams) cuts a new one
    out of the whole weight, so that under ZeRO 1 and 2 the optimizer would go on with a tensor that the model no longer
    computes with.

    module: the layer that the weight belongs to.
    """
    if not getattr(parameter, DIVIDED, False):
        yield
        return
    part = parameter.data
    module.gather_params([parameter])
    try:
        yield
    finally:
        parameter.data = part
