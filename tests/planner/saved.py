"""Tensors that transformers' own blocks save for backward: counted with torch's hooks, a tensor's storage once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def bytes_of(model: Any, tokens: int, *, rows: int = 1, masked: bool = False) -> int:
    """Bytes that a forward pass of a causal language model's blocks keeps, without its weights."""
    import torch

    own = {weight.untyped_storage().data_ptr() for weight in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}
    held = []

    def save(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)  # nothing is given back, so that no address comes twice
        return tensor

    inputs: dict[str, Any] = {"input_ids": torch.ones(rows, tokens, dtype=torch.long)}
    if masked:
        inputs["attention_mask"] = torch.ones(rows, tokens, dtype=torch.long)
        inputs["attention_mask"][0, 0] = 0
    model.train()
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        output = model.base_model(**inputs, use_cache=False)
    assert output is not None
    return sum(kept.values())


def model_of(config: Mapping[str, Any], *, dtype: str = "bfloat16", attention: str | None = None) -> Any:
    """A model of this config, with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    found = AutoConfig.for_model(**config)
    if attention:
        found._attn_implementation = attention
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(found).to(getattr(torch, dtype))


def bytes_a_token(
    config: Mapping[str, Any],
    tokens: int = 64,
    *,
    layers: str = "num_hidden_layers",
    prepare: Any = None,
    **how: Any,
) -> float:
    """Bytes of one block: the difference between a model of three blocks and one of two, so that the ends drop out."""
    masked = how.pop("masked", False)
    sizes = []
    for count in (2, 3):
        model = model_of({**config, layers: count}, **how)
        model = prepare(model) if prepare else model
        sizes.append(bytes_of(model, tokens, masked=masked))
    return (sizes[1] - sizes[0]) / tokens


def operations_a_token(config: Mapping[str, Any], tokens: int, *, reentrant: bool | None) -> float:
    """Operations of a training step's matrix products, as torch counts them, without attention's own kernels.

    reentrant: the kind of checkpointing; None for none.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    model = model_of(config, dtype="float32")
    model.train()
    if reentrant is not None:
        enable = (
            getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    ids = torch.ones(1, tokens, dtype=torch.long)
    with FlopCounterMode(display=False) as counted:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return float(counted.get_total_flops()) / tokens
