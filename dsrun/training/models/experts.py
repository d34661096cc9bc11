"""Routers of a mixture of experts in training: how evenly they spread tokens, and their loss.

In every family transformers' blocks hand their experts the numbers of the chosen ones (int64, [tokens, chosen]). These
are counted on the device, and read once a step with everything else. Where ranks divide the experts, a rank's get other
ranks' tokens, too: there the routers' own answers are counted.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from dsrun.training.loss import routers_weight

REAL_TOKENS = "real_tokens"
"""The keyword of a batch's mask: which of its tokens are no padding (bool, as input_ids)."""
DIVIDED = "AutoEPMoELayer"
"""DeepSpeed's class of a layer whose experts ranks divide (module_inject/auto_ep_layer.py)."""
LOSS_FUNCTION = "load_balancing_loss_func"
"""transformers' name of the routers' loss, in the module of each model that has one."""


def leave_out_padding(model: Any) -> bool:
    """Have the model's forward take REAL_TOKENS, and the routers' loss leave the other tokens out; whether it does.

    transformers leaves out the tokens that an attention mask leaves out. Batches have no such mask: beside it the
    borders of packed examples would not be seen, and attention would take a slower kernel. So the loss gets a mask of
    its own: during a forward, its function in the model's module is replaced by one that has the mask.
    """
    if not routers_weight(model.config):
        return False
    modules = [vars(sys.modules[kind.__module__]) for kind in type(model).__mro__]
    namespace = next((namespace for namespace in modules if LOSS_FUNCTION in namespace), None)
    if namespace is None:
        return False
    forward = model.forward

    @functools.wraps(forward)
    def without_padding(*inputs: Any, real_tokens: torch.Tensor | None = None, **named: Any) -> Any:
        if real_tokens is None:
            return forward(*inputs, **named)
        loss = namespace[LOSS_FUNCTION]
        namespace[LOSS_FUNCTION] = lambda logits, experts, chosen, _mask: loss(
            logits, experts, chosen, real_tokens
        )
        try:
            return forward(*inputs, **named)
        finally:
            namespace[LOSS_FUNCTION] = loss

    model.forward = without_padding
    return True


class ExpertLoad:
    """Counts of a rank's tokens for each expert, from one `taken` to the next. Padding counts as tokens do.

    A layer that is computed again in backward is counted twice, all of it, which changes no share.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        """model: transformers'; a dense one has nothing to count."""
        divided = [block.router for block in model.modules() if type(block).__name__ == DIVIDED]
        blocks = [block for block in model.modules() if type(block).__name__.endswith("Experts")]
        blocks = divided or [
            block for block in blocks if isinstance(getattr(block, "num_experts", None), int)
        ]
        self._counts = [torch.zeros(block.num_experts, device=device) for block in blocks]
        self._chosen = [1] * len(blocks)
        for number, block in enumerate(blocks):
            if divided:
                block.register_forward_hook(self._counting_answers(number))
            else:
                block.register_forward_pre_hook(self._counting(number))
        self._weight = routers_weight(model.config)
        self._loss = torch.zeros((), device=device)
        if blocks and self._weight:
            model.register_forward_hook(self._adding)

    def _counting(self, number: int) -> Any:
        def count(block: Any, inputs: tuple[Any, ...]) -> None:
            if block.training and len(inputs) > 1:
                self._count(number, inputs[1].detach())

        return count

    def _counting_answers(self, number: int) -> Any:
        def count(router: Any, _inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
            if router.training:
                self._count(number, output[1].detach())

        return count

    def _count(self, number: int, chosen: torch.Tensor) -> None:
        self._chosen[number] = chosen.shape[-1]
        ones = torch.ones(chosen.numel(), device=chosen.device)
        self._counts[number].scatter_add_(0, chosen.flatten().long(), ones)

    def _adding(self, model: Any, _inputs: Any, output: Any) -> None:
        if model.training and torch.is_tensor(output.aux_loss):
            self._loss += self._weight * output.aux_loss.detach()

    def taken(self) -> torch.Tensor:
        """The routers' part of the loss and the counts since the last time, to be summed over ranks.

        float32, [1 + experts of all layers]; empty for a dense model.
        """
        if not self._counts:
            return self._loss[None][:0]
        sums = torch.cat([self._loss[None], *self._counts])
        for tensor in (self._loss, *self._counts):
            tensor.zero_()
        return sums

    def metrics(self, summed: list[float], micro_batches: int) -> dict[str, float]:
        """A step's fields in metrics.jsonl. summed: the sums of `taken` over all ranks and micro batches.

        expert_share: of the tokens in one layer, the most that went to one of its experts; with n experts of which k
        are chosen k/n is even, and 1 is all of them. router_loss: see `routers_weight`; only where there is one.
        """
        if not self._counts:
            return {}
        loss, *counts = summed
        losses, start = {"router_loss": loss / micro_batches} if self._weight else {}, 0
        shares = []
        for layer, chosen in zip(self._counts, self._chosen, strict=True):
            of_layer = counts[start : start + len(layer)]
            start += len(layer)
            shares.append(chosen * max(of_layer) / max(1.0, sum(of_layer)))
        return {"expert_share": max(shares), **losses}
