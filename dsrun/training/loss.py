"""The losses that are trained with: each takes a model and a micro batch, and returns a scalar that has gradients.

What a step adds up are the shares of its micro batches (Engine.backward), so a loss is divided by what the whole step
has, whatever it is the mean of. Which one a job trains with is decided in dsrun.training.loop, `Trainer._share`.
"""

from __future__ import annotations

from typing import Any

import torch


def target_loss(model: Any, batch: dict[str, torch.Tensor], target_tokens: int) -> torch.Tensor:
    """Cross-entropy of the next token, summed over the batch's targets and divided by `target_tokens` (nats).

    transformers' own loss function does it, in float32 (a kernel that replaces it is used too).
    """
    return model(**batch, num_items_in_batch=target_tokens, use_cache=False).loss


def reference_loss(model: Any, batch: dict[str, torch.Tensor], micro_batches: int) -> torch.Tensor:
    """ChatGLM2's own: the mean over this micro batch's targets, of which the step takes the mean.

    micro_batches: of the step, over all ranks.
    """
    return model(**batch, use_cache=False).loss / micro_batches
