"""The losses that can be trained with. Adding one is a function here and its entry in `LOSSES`: --loss takes its name.

A loss gets a model, one micro batch and what the whole optimizer step has, and returns that micro batch's part of the
step's loss: a scalar in nats, with gradients. The parts of all micro batches and ranks are summed (Engine.backward,
Trainer._step), so each is divided by what the whole step has of whatever the loss is a mean of.

A micro batch is what the model's `forward` takes: `input_ids` and `labels`, int64, [examples or packed sequences,
tokens]; labels are -100 where nothing is to be predicted. This module is read for the names alone, too, by processes
without torch: import it in the function that needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from dsrun.options.groups import MICRO_BATCH_MEAN

if TYPE_CHECKING:
    import torch


class StepTotals(NamedTuple):
    """What one optimizer step has in all: over its micro batches and all ranks."""

    target_tokens: int
    """Tokens that are trained on."""
    micro_batches: int
    """World size times gradient accumulation."""


def target_loss(model: Any, batch: dict[str, torch.Tensor], target_tokens: int) -> torch.Tensor:
    """Cross-entropy of the next token, summed over the batch's targets and divided by `target_tokens` (nats).

    transformers' own loss function does it, in float32 (a kernel that replaces it is used too).
    """
    return model(**batch, num_items_in_batch=target_tokens, use_cache=False).loss


def reference_loss(model: Any, batch: dict[str, torch.Tensor], micro_batches: int) -> torch.Tensor:
    """ChatGLM2's own: the mean over this micro batch's targets (nats), of which the step takes the mean.

    A token counts more in a micro batch that has few. micro_batches: of the step, over all ranks.
    """
    return model(**batch, use_cache=False).loss / micro_batches


Loss = Callable[[Any, "dict[str, torch.Tensor]", StepTotals], "torch.Tensor"]
LOSSES: dict[str, Loss] = {
    "token-mean": lambda model, batch, step: target_loss(model, batch, step.target_tokens),
    MICRO_BATCH_MEAN: lambda model, batch, step: reference_loss(model, batch, step.micro_batches),
}
"""--loss -> the loss. All that knows of a loss by name; the trainer asks here."""
