"""The losses that can be trained with. Adding one is a function here and its entry in `LOSSES`: --loss takes its name.

A loss gets a model, one micro batch and what the whole optimizer step has, and returns that micro batch's part of the
step's loss: a scalar in nats, with gradients. The parts of all micro batches and ranks are summed (Engine.backward,
Trainer._step), so each is divided by the whole step's count of whatever the loss is a mean of.

A micro batch is what the model's `forward` takes: `input_ids` and `labels`, int64, [examples or packed sequences,
tokens]; labels are -100 where nothing is to be predicted. Processes without torch read this module for the names: torch
is imported in the function that needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from dsrun.errors import DsrunError
from dsrun.options.table import MICRO_BATCH_MEAN

if TYPE_CHECKING:
    import torch


class StepTotals(NamedTuple):
    """Totals of one optimizer step, over its micro batches and all ranks."""

    target_tokens: int
    """Tokens that are trained on."""
    micro_batches: int
    """Data-parallel ranks times gradient accumulation."""


def target_loss(model: Any, batch: dict[str, torch.Tensor], target_tokens: int) -> torch.Tensor:
    """Cross-entropy of the next token, summed over the batch's targets and divided by `target_tokens` (nats).

    transformers' own loss function does it, in float32 (a kernel that replaces it is used too).
    """
    return _parts(model, batch, target_tokens)[0]


def token_mean(model: Any, batch: dict[str, torch.Tensor], step: StepTotals) -> torch.Tensor:
    """`target_loss` and, of a mixture whose config asks for it, the mean of the routers' losses over micro batches.

    A router's loss (arXiv:2101.03961, eq. 4) is of the tokens of one forward: it has no sum that a step's could be
    divided by, and transformers adds it whole to each micro batch's share.
    """
    entropy, routers = _parts(model, batch, step.target_tokens)
    return entropy if routers is None else entropy + routers / step.micro_batches


ROUTERS_WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Names in configs for the weight of the routers' loss."""


def routers_weight(config: Any) -> float:
    """The weight of the routers' loss, by the model's own config; 0 where the config asks for none.

    Raises DsrunError where it asks for one and has no weight.
    """
    config = config.get_text_config()
    if not getattr(config, "output_router_logits", False):
        return 0.0
    weight = next((getattr(config, name) for name in ROUTERS_WEIGHTS if hasattr(config, name)), None)
    if weight is None:
        hint = "Set output_router_logits to false there, to train without it."
        what = "asks for the routers' loss, but not with which weight"
        raise DsrunError(what, where="config.json", hint=hint)
    return float(weight)


def _parts(
    model: Any, batch: dict[str, torch.Tensor], target_tokens: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The cross-entropy, and the routers' part, with its weight; None where there is none."""
    output = model(**batch, num_items_in_batch=target_tokens, use_cache=False)
    aux = getattr(output, "aux_loss", None)
    if aux is None:
        return output.loss, None
    # transformers adds the routers' loss to the cross-entropy that is divided by the step's tokens: it is taken out
    # again, for it has to be divided by the step's micro batches.
    routers = routers_weight(getattr(model, "module", model).config) * aux
    return output.loss - routers, routers


def reference_loss(model: Any, batch: dict[str, torch.Tensor], micro_batches: int) -> torch.Tensor:
    """ChatGLM2's own loss: the mean over this micro batch's targets (nats), with the routers' loss. The step takes the
    mean of the micro batches.

    So a token counts more in a micro batch that has few. micro_batches: those of the step, over all ranks.
    """
    return model(**batch, use_cache=False).loss / micro_batches


Loss = Callable[[Any, "dict[str, torch.Tensor]", StepTotals], "torch.Tensor"]
LOSSES: dict[str, Loss] = {
    "token-mean": token_mean,
    MICRO_BATCH_MEAN: lambda model, batch, step: reference_loss(model, batch, step.micro_batches),
}
"""--loss -> the loss. The one table of losses by name."""
