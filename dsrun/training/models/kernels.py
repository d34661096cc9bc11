"""Faster ways to the same numbers: the attention, and the loss computed together with the output layer.

The fused loss never holds the logits of all tokens, which are the largest tensor of a step: liger-kernel takes the
tokens in chunks, and makes the gradients of the layer's input and weight as it goes. The same targets are summed and
divided by the same count as in transformers' own loss.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from dsrun.errors import DsrunError
from dsrun.jobs.spec.job import Job
from dsrun.training.data.batches import IGNORED

NAMES = {"sdpa": "sdpa", "flash": "flash_attention_2", "eager": "eager"}
"""dsrun's names of attention -> transformers'."""
AMPERE = (8, 0)
"""The first GPUs that flash-attn 2 has kernels for: not V100 and T4."""


def attention_for(folder: str, precision: str) -> str:
    """The attention to load a model folder with: flash-attn's where it is there for this GPU, precision and model.

    Beside it torch's own can only mask, and computes what the mask then takes away.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, utils

    config = AutoConfig.from_pretrained(folder)
    plain = attention_without_packages(config)
    if precision == "fp32" or not utils.is_flash_attn_2_available():
        return plain
    if torch.cuda.get_device_capability() < AMPERE:
        return plain
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return "flash_attention_2" if getattr(kind, "_supports_flash_attn", False) else plain


def attention_without_packages(config: Any) -> str:
    """torch's SDPA; eager for a network whose class in transformers has no other, such as gpt-oss."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return "sdpa" if getattr(kind, "_supports_sdpa", True) else "eager"


def attention_of(job: Job) -> str:
    """transformers' name of the attention that the job computes with. Raises DsrunError where there is none such."""
    wanted = job.training.attention
    if wanted == "auto":
        return attention_for(job.prepared.model_dir, job.precision)
    if wanted == "flash" and attention_for(job.prepared.model_dir, job.precision) != NAMES["flash"]:
        raise DsrunError(
            "transformers has no flash-attn for this model, or can't use the one that is installed",
            where="--attention flash",
            hint="Take --attention sdpa.",
        )
    return NAMES[wanted]


def liger() -> Any:
    """liger-kernel's fused output layer and cross-entropy. Raises DsrunError where it can't be imported."""
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError as error:
        raise DsrunError(
            f"liger-kernel can't be imported: {error}",
            where="--liger",
            hint="Install it where the ranks run (pip install liger-kernel), or train with --no-liger.",
        ) from error
    return liger_fused_linear_cross_entropy


def fuse_loss(model: Any, kernel: Any = None) -> str:
    """Make a causal language model compute its loss fused, wherever it is given labels; it then returns no logits.

    kernel: `liger()` unless given. Returns why it can't be; empty where it is. Without labels the model is as it was.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    head, body = inner.get_output_embeddings(), inner.base_model
    if type(head) is not torch.nn.Linear or body is inner:
        return f"the output layer of {type(inner).__name__} is not a plain one"
    kernel = kernel or liger()
    own_head, own = head.forward, inner.forward

    # In the layer's own forward: ZeRO-3 gathers a layer's weight for as long as that runs, and once more for the
    # backward of what it returns.
    @functools.wraps(own_head)
    def head_forward(hidden: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        if targets is None:
            return own_head(hidden)
        return kernel(
            hidden.reshape(-1, hidden.shape[-1]), head.weight, targets.reshape(-1), bias=head.bias,
            ignore_index=IGNORED, reduction="sum", accum_dtype=torch.float32,
        )  # fmt: skip

    @functools.wraps(own)  # generate looks at the signature
    def forward(*args: Any, labels: torch.Tensor | None = None, **rest: Any) -> Any:
        if labels is None:
            return own(*args, **rest)
        return _fused(body, head, labels, *args, **rest)

    head.forward, inner.forward = head_forward, forward
    return ""


def _fused(
    body: Any,
    head: Any,
    labels: torch.Tensor,
    *args: Any,
    shift_labels: torch.Tensor | None = None,
    logits_to_keep: int | torch.Tensor = 0,
    num_items_in_batch: int | torch.Tensor | None = None,
    **rest: Any,
) -> Any:
    """As the forward of transformers' causal models and its ForCausalLMLoss (loss/loss_utils.py), without logits."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    hidden = body(*args, **rest).last_hidden_state
    hidden = hidden[:, slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep]
    targets = shift_labels
    if targets is None:
        targets = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    loss = head(hidden, targets=targets)
    count = (targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    return CausalLMOutputWithPast(loss=loss / count)
