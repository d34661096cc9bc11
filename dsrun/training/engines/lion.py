"""Lion (arXiv:2302.06675, algorithm 2): the sign of an interpolation of gradient and momentum is the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):  # type: ignore[misc]
    """Lion over weights that are stepped one by one, so that ZeRO may divide them. One state, of a weight's own
    type."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every weight that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            mixing, keeping = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                gradient = weight.grad.to(weight.dtype)
                state = self.state[weight]
                if not state:
                    state["exp_avg"] = torch.zeros_like(weight)
                momentum = state["exp_avg"]
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(torch.lerp(gradient, momentum, mixing).sign_(), alpha=-group["lr"])
                momentum.lerp_(gradient, 1 - keeping)
        return loss
