"""Operators that CUDA computes with other tensors than CPUs do: while a model is traced, they take CUDA's way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional


class FusedAttention(torch.autograd.Function):  # type: ignore[misc]
    """Attention without scores, for values that are narrower than keys (torch's memory-efficient kernel on CUDA).

    It keeps queries, keys, values, the output and a number for each row and head, and lays the output out by tokens.
    query, key: [rows, heads, tokens, head]; value: [rows, heads, tokens, head of the values].
    """

    @staticmethod
    def forward(context: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        rows, heads, tokens, _ = query.shape
        output = query.new_empty(rows, tokens, heads, value.shape[-1]).transpose(1, 2)
        sums = query.new_empty(rows, heads, tokens, dtype=torch.float32)
        context.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(context: Any, *_: torch.Tensor) -> Any:
        query, key, value, *_ = context.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """While it lasts, dropout is one kernel with a mask of one byte, a softmax in fp32 reads 16 bits, and attention
    makes no scores: with dropout it makes its mask again from a seed."""
    dropout, softmax = functional.dropout, functional.softmax
    attention = functional.scaled_dot_product_attention

    def one_kernel(
        inputs: torch.Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,  # noqa: ARG001 - torch's own
    ) -> torch.Tensor:
        return torch.native_dropout(inputs, p, training)[0] if training and p else inputs

    def widening(
        inputs: torch.Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
    ) -> torch.Tensor:
        if dim is not None and dtype is torch.float32 and inputs.dtype in (torch.float16, torch.bfloat16):
            return torch._softmax(inputs, dim, half_to_float=True)
        return softmax(inputs, dim, _stacklevel, dtype)

    def without_scores(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any, **others: Any
    ) -> torch.Tensor:
        if value.shape[-1] != query.shape[-1] and key.shape[1] == query.shape[1]:
            return FusedAttention.apply(query, key, value)
        return attention(query, key, value, *more, **{**others, "dropout_p": 0.0})

    replaced = {"dropout": one_kernel, "softmax": widening, "scaled_dot_product_attention": without_scores}
    for name, function in replaced.items():
        setattr(functional, name, function)
    try:
        yield
    finally:
        functional.dropout, functional.softmax = dropout, softmax
        functional.scaled_dot_product_attention = attention
