"""Faster ways to the same numbers: the attention, and the loss computed together with the output layer.

The fused loss never holds the logits of all tokens, which are the largest tensor of a step: liger-kernel takes the
tokens in chunks, and makes the gradients of the layer's input and weight as it goes. The same targets are summed and
divided by the same count as in transformers' own loss.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dsrun.errors import DsrunError
from dsrun.job.job import Job
from dsrun.models.liger import CHUNK_TOKENS, fuses_loss, parts
from dsrun.models.transformers_code import CAPPED, SDPA
from dsrun.training.data.batches import IGNORED
from dsrun.training.models import varlen
from dsrun.training.models.text_part import class_of

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""A job's precision -> torch's name of it."""
FLASH_ATTN = ("flash_attention_4", "flash_attention_3", "flash_attention_2")
"""transformers' names of flash-attn's generations, the newest first."""
REPEATED = "dsrun_sdpa"
"""torch's SDPA among transformers' attentions, with keys and values repeated for each head."""
NAMES = {"eager": "eager", "varlen": varlen.ATTENTION}
"""dsrun's names of attention -> transformers'."""


def attention_for(folder: str, precision: str) -> str:
    """The attention to load a model folder with: the first that this GPU, precision and model have.

    In order: flash-attn, where it is installed; torch's own kernel for packed examples; torch's SDPA, which can only
    mask, and also computes what the mask then takes away.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    if flash := _flash(config, precision):
        return flash
    # Under a mask older GPUs and CPUs are faster than one example after the other.
    if varlen.has_kernel(getattr(torch, DTYPES[precision])) and not varlen.refuses(config):
        return varlen.register()
    return attention_without_packages(config)


def _flash(config: Any, precision: str) -> str:
    """transformers' name of the newest flash-attn that is installed and takes this GPU and model; empty for none.

    Nothing is fetched: transformers would take kernels from the Hub for a name whose package is missing.
    """
    from transformers import utils

    kind, _ = class_of(config)
    if precision == "fp32" or not getattr(kind, "_supports_flash_attn", False):
        return ""
    # A transformers without a name knows nothing of that generation: `bool` stands for its question, and says no.
    installed = [name for name in FLASH_ATTN if getattr(utils, f"is_flash_attn_{name[-1]}_available", bool)()]
    if not installed:
        return ""
    capability = torch.cuda.get_device_capability()
    return next((name for name in installed if FLASH_TAKES[name](capability)), "")


FLASH_TAKES: dict[str, Callable[[tuple[int, int]], bool]] = {
    "flash_attention_4": lambda capability: capability >= (9, 0),
    "flash_attention_3": lambda capability: capability[0] == 9,
    "flash_attention_2": lambda capability: capability >= varlen.AMPERE,
}
"""Compute capabilities that each generation has kernels for: 4 Hopper and Blackwell, 3 Hopper, 2 from Ampere on."""


def attention_without_packages(config: Any) -> str:
    """torch's SDPA; eager for a network that it doesn't compute, such as gpt-oss."""
    kind, _ = class_of(config)
    computed = getattr(kind, SDPA, True) and config.get_text_config().model_type not in CAPPED
    return _sdpa(config) if computed else "eager"


def _sdpa(config: Any) -> str:
    """torch's SDPA; on GPUs before Ampere with a key and a value for each head of a query.

    Their memory-efficient kernel wants as many, and transformers leaves the copies to torch where there is no mask. The
    kernel that is left holds all scores, [heads, tokens, tokens]: 2 GiB a layer at 4,096 tokens and 32 heads.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    (kind, _), text = class_of(config), config.get_text_config()
    heads = getattr(text, "num_attention_heads", 1)
    grouped = (getattr(text, "num_key_value_heads", None) or heads) < heads
    older = torch.cuda.is_available() and torch.cuda.get_device_capability() < varlen.AMPERE
    if not (older and grouped and getattr(kind, "_supports_attention_backend", False)):
        return "sdpa"
    AttentionInterface.register(REPEATED, attend_repeated)
    AttentionMaskInterface.register(REPEATED, sdpa_mask)
    return REPEATED


def attend_repeated(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: query [rows, heads, tokens, head], keys and values with fewer heads."""
    if attention_mask is not None or query.shape[2] != key.shape[2]:  # transformers repeats them under a mask
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    causal = query.shape[2] > 1 and bool(getattr(module, "is_causal", True))
    answer = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, scale=scaling, is_causal=causal
    )
    return answer.transpose(1, 2).contiguous(), None


def attention_of(job: Job) -> str:
    """transformers' name of the attention that the job computes with. Raises DsrunError where there is none such."""
    from transformers import AutoConfig

    wanted, folder = job.training.attention, job.prepared.model_dir
    if wanted == "auto" and job.parallel.sp > 1:
        wanted = "varlen"  # it takes the borders of a sequence of which each rank has a part
    if wanted == "auto":
        return attention_for(folder, job.precision)
    if wanted == "flash":
        if flash := _flash(AutoConfig.from_pretrained(folder), job.precision):
            return flash
        what = "transformers has no flash-attn for this model, or can't use the one that is installed"
        raise DsrunError(what, where="--attention flash", hint="Take --attention sdpa.")
    if wanted == "varlen":
        if why := varlen.refuses(AutoConfig.from_pretrained(folder)):
            raise DsrunError(f"can't be: {why}", where="--attention varlen", hint="Take --attention sdpa.")
        varlen.register()
    if wanted == "sdpa":
        return _sdpa(AutoConfig.from_pretrained(folder))
    return NAMES[wanted]


def liger() -> Any:
    """liger-kernel's fused output layer and cross-entropy. Raises DsrunError where it can't be imported."""
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError as error:
        hint = "Install it where the ranks run (pip install liger-kernel), or train with --no-liger."
        raise DsrunError(f"liger-kernel can't be imported: {error}", where="--liger", hint=hint) from error
    return liger_fused_linear_cross_entropy


def take_liger(model: Any) -> list[str]:
    """Put all kernels that liger-kernel has for a model into it; returns a note on each."""
    inner = unwrapped(model)
    done, why = fuse_layers(model, liger_layers())
    notes = [f"liger-kernel computes {', '.join(done)}"] if done else []
    if why:
        notes.append(f"no layers of liger-kernel's: {why}")
    if fuses_loss(inner.config.model_type) and (why := fuse_loss(model)):
        notes.append(f"no fused cross-entropy: {why}")
    return notes


def liger_layers() -> dict[str, Callable[..., None]]:
    """liger-kernel's own functions that put its layers into a model, by model_type."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    functions: dict[str, Callable[..., None]] = MODEL_TYPE_TO_APPLY_LIGER_FN
    return functions


def fuse_layers(model: Any, functions: Mapping[str, Callable[..., None]]) -> tuple[tuple[str, ...], str]:
    """Replace a loaded model's norms, rotary positions and gated layers, as far as `dsrun.models.liger` says.

    Only their forwards change: weights, names and what is saved stay. Returns the replaced parts, and why nothing
    was replaced where something should have been.
    """
    inner = unwrapped(model)
    kind, config = inner.config.model_type, inner.config.get_text_config()
    wanted = parts(kind, getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None))
    if not wanted:
        return (), ""
    if kind not in functions:
        return (), f"the one that is installed has none for {kind}"
    # Whatever else it offers is off: the loss is fused by `fuse_loss`.
    switches = set(inspect.signature(functions[kind]).parameters) - {"model"}
    if absent := [part for part in wanted if part not in switches]:
        return (), f"the one that is installed has no {absent[0]} for {kind}"
    functions[kind](model=inner, **{name: name in wanted for name in switches})
    return wanted, ""


def unwrapped(model: Any) -> Any:
    """transformers' model in an adapter's."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def fuse_loss(model: Any, kernel: Any = None) -> str:
    """Make a causal language model compute its loss fused, wherever it is given labels; it then returns no logits.

    kernel: `liger()` unless given. Returns the reason where it can't; else "". Without labels the model is as it was.
    """
    inner = unwrapped(model)
    head, body = inner.get_output_embeddings(), inner.base_model
    if type(head) is not torch.nn.Linear or body is inner:
        return f"the output layer of {type(inner).__name__} is not a plain one"
    kernel = kernel or liger()
    chunked = "chunk_mem_const" in inspect.signature(kernel).parameters
    head_only, whole_forward = head.forward, inner.forward

    # In the layer's own forward: ZeRO-3 gathers a layer's weight for as long as that runs, and once more for the
    # backward of what it returns.
    @functools.wraps(head_only)
    def head_forward(hidden: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        if targets is None:
            return head_only(hidden)
        flat = hidden.reshape(-1, hidden.shape[-1])
        chunks = {"chunk_mem_const": chunk_budget(len(flat), head.weight)} if chunked else {}
        return kernel(
            flat, head.weight, targets.reshape(-1), bias=head.bias,
            ignore_index=IGNORED, reduction="sum", accum_dtype=torch.float32, **chunks,
        )  # fmt: skip

    @functools.wraps(whole_forward)  # generate looks at the signature
    def forward(*args: Any, labels: torch.Tensor | None = None, **rest: Any) -> Any:
        if labels is None:
            return whole_forward(*args, **rest)
        return _fused(body, head, labels, *args, **rest)

    head.forward, inner.forward = head_forward, forward
    return ""


def chunk_budget(tokens: int, weight: torch.Tensor) -> int:
    """liger-kernel's chunk_mem_const with which a chunk has about CHUNK_TOKENS.

    By itself it takes vocabulary / hidden chunks however few tokens there are, and each chunk reads the weight twice
    and its gradient too: 500 tokens in 32 chunks cost as much time as 8,000.
    """
    vocabulary, hidden = weight.shape
    return max(1, math.ceil(vocabulary / (hidden * math.ceil(max(1, tokens) / CHUNK_TOKENS))))


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
    """The forward of transformers' causal models, with its ForCausalLMLoss (loss/loss_utils.py), without logits."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    hidden = body(*args, **rest).last_hidden_state
    hidden = hidden[:, slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep]
    targets = shift_labels
    if targets is None:
        targets = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    loss = head(hidden, targets=targets)
    count = (targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    return CausalLMOutputWithPast(loss=loss / count)
