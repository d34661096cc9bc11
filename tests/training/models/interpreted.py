"""liger-kernel's own kernels on CPU tensors, by Triton's interpreter: run by test_liger_interpreted.py.

Prints a line of JSON for each case.
"""

from __future__ import annotations

import json
import os

os.environ |= {"TRITON_INTERPRET": "1", "DS_ACCELERATOR": "cpu"}

import torch

from dsrun.training.models import kernels

HIDDEN, VOCABULARY, IGNORED = 32, 96, -100
TOKENS = (1, 40, 500)
SHARES = (1.0, 0.1)
CHUNKED = 3
"""A budget with which 500 tokens are computed in several chunks."""


def losses(tokens: int, share: float, budget: int) -> list[float]:
    """Distances between the kernel's and the plain loss, and between the gradients of both factors."""
    torch.manual_seed(tokens)
    hidden, weight = torch.randn(tokens, HIDDEN), torch.randn(VOCABULARY, HIDDEN)
    targets = torch.randint(0, VOCABULARY, (tokens,))
    targets[torch.rand(tokens) > share] = IGNORED
    targets[0] = 3
    results = []
    for fused in (True, False):
        given = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if fused:
            loss = kernels.liger()(
                *given, targets, bias=None, ignore_index=IGNORED, reduction="sum", accum_dtype=torch.float32,
                chunk_mem_const=budget,
            )  # fmt: skip
        else:
            logits = given[0] @ given[1].T
            loss = torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        loss.backward()
        results.append((loss.detach(), given[0].grad, given[1].grad))
    (ours, *mine), (plain, *theirs) = results
    return [
        float((ours - plain).abs() / plain),
        *(float((a - b).abs().max() / b.abs().max()) for a, b in zip(mine, theirs, strict=True)),
    ]


def step() -> list[float]:
    """A small Llama's loss and gradients' norm with liger's loss, relative to those without. Its layers' kernels take
    Python's numbers where the interpreter wants tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        ).train()
        assert not fused or kernels.fuse_loss(model) == ""
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.stack([weight.grad.norm() for weight in model.parameters()]).norm()
        results.append((float(loss.detach()), float(norm)))
    (plain, norm), (ours, own) = results
    return [abs(ours - plain) / plain, abs(own - norm) / norm]


if __name__ == "__main__":
    for tokens in TOKENS:
        for share in SHARES:
            for budget in (kernels.chunk_budget(tokens, torch.empty(VOCABULARY, HIDDEN)), CHUNKED):
                print(json.dumps({"case": [tokens, share, budget], "off": losses(tokens, share, budget)}))
    print(json.dumps({"case": "step", "off": step()}))
