"""The networks that liger-kernel's kernels are used for, by transformers' model_type.

Its loss takes the output layer's input and weight and is the same for all networks. Its RMSNorm, rotary positions and
gated layers (SwiGLU, GEGLU) are put in by functions of its own, one a network, which know the network's code. Those
named here compute what transformers does, to rounding: its kernels were run on small models by Triton's interpreter.
"""

from __future__ import annotations

LOSS = ("glm", "glm4", "llama", "mistral", "qwen2", "qwen3")
"""Networks whose logits are the output layer's product and nothing else. Gemma 2 and Cohere, for two, scale or cap
theirs. liger-kernel's own list has no glm."""
_SWIGLU = (
    "exaone4", "falcon_h1", "glm4", "granite", "hunyuan_v1_dense", "llama", "llama4_text", "ministral", "mistral",
    "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "smollm3",
)  # fmt: skip
_GEGLU = ("gemma", "gemma2", "gemma3_text", "gemma4_text")
_EXPERTS = ("gpt_oss", "hunyuan_v1_moe", "mixtral", "qwen3_moe")
"""Their experts are multiplied by transformers' own grouped products."""
LAYERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_SWIGLU, ("rope", "rms_norm", "swiglu")),
    **dict.fromkeys(_GEGLU, ("rope", "rms_norm", "geglu")),
    **dict.fromkeys(_EXPERTS, ("rope", "rms_norm")),
}
"""Parts of a network that are replaced: arguments of liger-kernel's function for it (transformers/monkey_patch.py)."""
GATED = {"swiglu": ("silu", "swish"), "geglu": ("gelu_pytorch_tanh",)}
"""The activation that a gated layer's kernel computes: others are left as they are."""


CHUNK_TOKENS = 2048
"""Tokens whose logits dsrun has its loss hold at once, about: 0.5 GiB of them in 16 bits for a vocabulary of 128,000.
By itself it takes vocabulary / hidden chunks, however few tokens there are."""


def fuses_loss(model_type: str | None) -> bool:
    """Whether liger-kernel's loss is used for a network. ChatGLM's original checkpoints are computed as glm."""
    return model_type in LOSS


def parts(model_type: str, activation: str | None) -> tuple[str, ...]:
    """The parts of a network's layers that are replaced. activation: the config's hidden_act."""
    return tuple(
        part for part in LAYERS.get(model_type, ()) if part not in GATED or activation in GATED[part]
    )
