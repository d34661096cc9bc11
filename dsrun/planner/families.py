"""Families of networks that the planner knows: where their config says what, and how many weights they have.

A family is one entry of FAMILIES. Its count is exact: tests compare it with transformers' own classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from dsrun.planner.model_config import ModelConfig
    from dsrun.planner.shape import Shape


@dataclass(frozen=True, slots=True)
class Block:
    """The parts of a block beside its matrices, as far as memory depends on them. The defaults are Llama's."""

    norm: str = "rms"
    """rms; gemma: an RMSNorm that multiplies by its weight in fp32; layer: torch's LayerNorm."""
    norms: int = 2
    """Norms one hidden size wide."""
    outputs: int = 2
    """Norms whose output enters matrices (the others' is added to the residual stream)."""
    qk_norm: bool = False
    """Norms on queries and keys, one head wide."""
    fused_qkv: bool = False
    """Queries, keys and values are slices of one matrix's output, which stays whole as long as one of them does."""
    copied: bool = False
    """Attention's output is laid out anew before its matrix."""
    gated_output: bool = False
    """Attention's output is multiplied by a gate of its width."""
    capped: bool = False
    """Attention's scores have a soft cap."""
    inside: float | None = None
    """Tensors of its width that the feed-forward block keeps beside the last matrix's input; None: 3 with a gate (gate,
    the other matrix's output, the gate's activation), 1 without (the activation's input)."""
    into_down: int = 1
    """Whether the last matrix's input is kept for it alone."""
    dropouts: int = 0
    """Dropout's masks on the residual stream."""
    attention_dropout: bool = False
    """Whether scores are dropped out: where a matrix of them is made, the mask and a dropped copy are kept, too."""
    scores: tuple[float, float] | None = None
    """Bytes a score in 16 bits, kept and at the peak of a block that is computed again; None: transformers' usual."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """A config's keys for its experts."""

    count: tuple[str, ...]
    """Keys of their number in a block; the first that is there counts."""
    width: str = "moe_intermediate_size"
    """The key of an expert's width."""
    shared: str = ""
    """The key of the shared experts: their width, or (see shared_are_experts) their number."""
    shared_are_experts: bool = False
    dense: str = ""
    """The key of the number of blocks, the first ones, that have no experts."""
    gates: int = 0
    """Vectors of a hidden size in a block beside the router's matrix."""
    biased: bool = False
    """Router and experts have biases."""
    step: str = ""
    """The key of n, where only every n-th block has experts; the others' feed-forward block is as wide as
    Shape.intermediate."""
    always_shared: bool = False
    """A shared expert as wide as the others, without a key."""
    wide_router: bool = False
    """The router computes in fp32, from a copy of the block's input."""


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Layers that go through a sequence token by token with a state, beside attention or in its place, and their
    convolution. All numbers are of one such layer."""

    layers: int
    """Layers that have it."""
    weights: int
    linears: tuple[tuple[int, int], ...]
    """Sizes (in, out) of its linear layers."""
    kept: float
    """Elements that backward needs of a token, in the type that is computed with, where its kernels are installed."""
    kept_fp32: float
    """Elements that it needs in fp32 beside them."""
    state: int
    """Elements that answering keeps of a sequence, whatever its length."""
    replaces: bool = True
    """Whether there is no attention in these layers."""


FLA_CHUNK = 64
"""Tokens of a chunk in flash-linear-attention's kernels."""


def gated_delta(config: ModelConfig, layers: int, hidden: int) -> Recurrent:
    """Gated DeltaNet's layers (arXiv:2412.06464), as Qwen3-Next and Qwen3.5 have them.

    Kept, with heads of values H and widths K of keys and V of values: the convolution's input (2K + V), normed queries
    and keys and the values (2K + V), and of each head its row of the chunk's triangular system. The gated norm computes
    in fp32: its input, the gate and what the gate gives; and keeps the normed, the weighted and the gated values.
    """
    key_heads, heads = (config.needed(f"linear_num_{kind}_heads") for kind in ("key", "value"))
    key_dim, dim = (config.needed(f"linear_{kind}_head_dim") for kind in ("key", "value"))
    kernel = config.needed("linear_conv_kernel_dim")
    keys, values = key_heads * key_dim, heads * dim
    mixed = 2 * keys + values
    linears = ((hidden, mixed), (hidden, values), (hidden, heads), (hidden, heads), (values, hidden))
    weights = sum(map(math.prod, linears)) + mixed * kernel + 2 * heads + dim
    return Recurrent(
        layers=linear_layers(config, layers), weights=weights, linears=linears,
        kept=2 * mixed + heads * (FLA_CHUNK + 2) + 3 * values, kept_fp32=3 * values + 4 * heads,
        state=heads * key_dim * dim + mixed * kernel,
    )  # fmt: skip


def linear_layers(config: ModelConfig, layers: int) -> int:
    """Layers whose attention is linear: by their list, or all but every n-th."""
    types = config.values.get("layer_types")
    if isinstance(types, list):
        if len(types) != layers:
            config.refuse("layer_types", types, f"There are {layers} layers.")
        return sum(kind == "linear_attention" for kind in types)
    return layers - layers // (config.size("full_attention_interval") or 4)


LLAMAS = Block()
"""Two RMSNorms, three matrices in the feed-forward block."""


@dataclass(frozen=True)
class Family:
    """The reading of a model_type's config, and the weights that it has besides the matrices of every block."""

    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """A size of SIZES -> the config's own names for it, where they differ."""
    gated: bool = True
    """The feed-forward block has a gate."""
    tied: bool = False
    """The output weights are the embedding's, where the config doesn't say."""
    block: Block = LLAMAS
    """Tensors that a block keeps for backward."""
    norm_bias: bool = False
    qkv_bias: bool | str = False
    """Whether there is a bias, or the config's key that says so; out_bias and mlp_bias likewise."""
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    key_default: bool = False
    """The value of such a key where it is absent."""
    positions: int | None = None
    """Rows of a learned table of positions beyond the config's number; None without such a table."""
    embedding_norm: bool = False
    """A norm behind the embedding."""
    head_bias: bool = False
    """A bias on the output."""
    inner: int | None = None
    """The feed-forward width as a multiple of the hidden size, where the config doesn't say."""
    head: int | None = None
    """The width of a head, where the config doesn't say."""
    fused: bool = False
    """The gate and the other matrix into the feed-forward block are one weight."""
    dropout: tuple[str, float] | None = None
    """The config's key for dropout on the residual stream, and its value where it is absent."""
    attention_dropout: tuple[str, float] = ("attention_dropout", 0.0)
    """The same for dropout on attention's scores."""
    experts: Mixture | None = None
    """The keys of a mixture's experts."""
    latent: bool = False
    """Queries, keys and values come through narrow matrices (DeepSeek's multi-head latent attention)."""
    recurrent: Callable[[ModelConfig, int, int], Recurrent] | None = None
    """The reading of its recurrent layers, by its config, number of layers and hidden size."""
    gated_queries: bool = False
    """The queries' matrix has a gate for each element of attention's output, too."""
    wide_qk_norm: bool = False
    """Norms on queries and keys are as wide as all heads together."""
    sinks: bool = False
    """A learned weight for each head."""
    qk_norm_key: str = ""
    """The config's key that says whether there are norms on queries and keys."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Keys that make it a different network, with the one value that doesn't."""

    SIZES: ClassVar[Mapping[str, str]] = {
        "num_hidden_layers": "layers", "hidden_size": "hidden", "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads", "head_dim": "head_dim", "intermediate_size": "intermediate",
        "vocab_size": "vocab", "max_position_embeddings": "positions",
    }  # fmt: skip
    """A config's name of a size -> Shape's."""
    OPTIONAL: ClassVar[tuple[str, ...]] = ("head_dim", "max_position_embeddings")

    def names(self, size: str) -> tuple[str, ...]:
        """The config's names for a size."""
        return self.keys.get(size, (size,))

    def default(self, size: str, config: ModelConfig, sizes: Mapping[str, int]) -> int | None:
        """A size that the config leaves out; None for one that it must have."""
        if size == "num_key_value_heads":
            # Multi-query attention: one key/value head, where a config only says that it has it.
            return 1 if config.switch("multi_query", default=False) else sizes.get("num_attention_heads")
        if size == "intermediate_size" and self.inner and "hidden_size" in sizes:
            return self.inner * sizes["hidden_size"]
        if size == "head_dim" and self.latent:
            plain, rotary = (config.size(name, least=0) for name in ("qk_nope_head_dim", "qk_rope_head_dim"))
            return plain + rotary if plain and rotary else None
        return self.head if size == "head_dim" else None

    def block_of(self, config: ModelConfig) -> Block:
        """The tensors that its blocks keep, with the dropout that this config trains with."""
        masks = self.dropout is not None and config.share(*self.dropout) > 0
        block = replace(self.block, dropouts=2) if masks else self.block
        if config.share(*self.attention_dropout) > 0:
            block = replace(block, attention_dropout=True)
        return (
            replace(block, qk_norm=config.switch(self.qk_norm_key, default=False))
            if self.qk_norm_key
            else block
        )

    def experts_of(self, config: ModelConfig, layers: int) -> dict[str, Any] | None:
        """Experts' fields, as the config has them; None for a dense network."""
        keys = self.experts
        if keys is None:
            return None
        count, chosen = config.needed(*keys.count), config.needed("num_experts_per_tok")
        width = config.needed(keys.width)
        shared = config.size(keys.shared, least=0) or 0 if keys.shared else width * keys.always_shared
        every = config.size(keys.step) or 1 if keys.step else 1
        dense = config.size(keys.dense, least=0) or 0 if keys.dense else layers - layers // every
        if chosen > count and not config.wrong and not config.missing:
            config.refuse("num_experts_per_tok", chosen, f"There are {count} experts.")
        return {
            "count": count,
            "chosen": chosen,
            "width": width,
            "shared": shared * width if keys.shared_are_experts else shared,
            "dense": min(layers, dense),
            "wide_router": keys.wide_router,
            "gated": bool(keys.gates and shared),
        }

    def latent_of(self, config: ModelConfig) -> dict[str, int] | None:
        """Latent's fields, as the config has them; None without it."""
        if not self.latent:
            return None
        return {
            "queries": config.size("q_lora_rank", least=0) or 0,
            "keys": config.needed("kv_lora_rank"),
            "rotary": config.needed("qk_rope_head_dim"),
            "value_dim": config.needed("v_head_dim"),
        }

    def count(self, shape: Shape, config: ModelConfig) -> int:
        """Weights in all, tied ones once."""
        hidden, inner = shape.hidden, shape.intermediate
        norm = hidden * (2 if self.norm_bias else 1)
        mixers = shape.attention_layers * self._mixer(shape, config)
        mixers += shape.recurrent.layers * shape.recurrent.weights if shape.recurrent else 0
        feed = shape.mlp_matrices * hidden * inner
        feed += ((shape.mlp_matrices - 1) * inner + hidden) * self._has(self.mlp_bias, config)
        ends = shape.ends + norm * (2 if self.embedding_norm else 1)
        ends += shape.vocab * self.head_bias
        if self.positions is not None:
            ends += ((shape.positions or 0) + self.positions) * hidden
        if (experts := shape.experts) is None or self.experts is None:
            return mixers + shape.layers * (self.block.norms * norm + feed) + ends
        each = shape.mlp_matrices * hidden
        mixed = (
            experts.count * (each * experts.width + hidden)
            + each * experts.shared
            + self.experts.gates * hidden
        )
        if self.experts.biased:
            mixed += experts.count * (1 + (shape.mlp_matrices - 1) * experts.width + hidden)
        feeds = experts.dense * feed + (shape.layers - experts.dense) * mixed
        return mixers + shape.layers * self.block.norms * norm + feeds + ends

    def _mixer(self, shape: Shape, config: ModelConfig) -> int:
        """Weights of one layer's attention, with its biases and norms."""
        query, kv = shape.query_width, shape.kv_width
        bias = (query * (1 + self.gated_queries) + 2 * kv) * self._has(self.qkv_bias, config)
        bias += shape.hidden * self._has(self.out_bias, config)
        normed = query + kv if self.wide_qk_norm else 2 * shape.head_dim
        return self._attention(shape) + shape.heads * self.sinks + bias + normed * shape.block.qk_norm

    def _attention(self, shape: Shape) -> int:
        """Weights of attention's matrices."""
        hidden = shape.hidden
        if (latent := shape.latent) is None:
            return hidden * (
                2 * (shape.query_width + shape.kv_width) + shape.query_width * self.gated_queries
            )
        # Queries and keys come down to a narrow vector, through a norm (the 1), and up to the heads. The rotated part
        # of
        # the keys skips that: one for all heads, straight from the hidden size.
        values = shape.heads * latent.value_dim
        narrow = latent.queries * (hidden + 1 + shape.query_width)
        weights = narrow if latent.queries else hidden * shape.query_width
        weights += hidden * (latent.keys + latent.rotary)
        weights += latent.keys * (1 + shape.query_width - shape.heads * latent.rotary + values)
        return weights + values * hidden

    def _has(self, which: bool | str, config: ModelConfig) -> bool:
        return config.switch(which, self.key_default) if isinstance(which, str) else which


LLAMA = Family(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias")
GPT_KEYS = {
    "num_hidden_layers": ("n_layer", "num_hidden_layers", "n_layers"),
    "hidden_size": ("n_embd", "hidden_size", "d_model"),
    "num_attention_heads": ("n_head", "num_attention_heads", "n_heads"),
    "intermediate_size": ("n_inner", "intermediate_size", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "max_position_embeddings", "max_seq_len"),
}
CHATGLM_KEYS = {
    "num_hidden_layers": ("num_layers",),
    "num_key_value_heads": ("multi_query_group_num",),
    "head_dim": ("kv_channels",),
    "intermediate_size": ("ffn_hidden_size",),
    "vocab_size": ("padded_vocab_size",),
    "max_position_embeddings": ("seq_length",),
}
BIASED: dict[str, Any] = {
    "norm_bias": True, "qkv_bias": True, "out_bias": True, "mlp_bias": True, "gated": False,
}  # fmt: skip
"""GPT's blocks: biases everywhere, and no gate."""

EXPERTS = ("num_experts", "num_local_experts")
DEEPSEEK = Mixture(
    ("n_routed_experts",),
    shared="n_shared_experts",
    shared_are_experts=True,
    dense="first_k_dense_replace",
    wide_router=True,
)
QWEN3 = Block(qk_norm=True)
GEMMA = Block(norm="gemma")
GEMMA2 = Block(norm="gemma", norms=4, capped=True)
GPT = Block(norm="layer")
GELU_NEW = Block(norm="layer", inside=4)
"""GPT-2's and Phi's activation, which torch has not as one function: x^3, tanh and two products are kept."""
GATED = Block(norm="gemma", qk_norm=True, gated_output=True)
"""Qwen3.5's and Qwen3-Next's: the queries' matrix gives a gate for attention's output, too."""
DELTA: dict[str, Any] = {
    "block": GATED, "qkv_bias": "attention_bias", "out_bias": "attention_bias", "head": 256, "gated_queries": True,
    "recurrent": gated_delta,
}  # fmt: skip
DELTA_EXPERTS = Mixture(EXPERTS, shared="shared_expert_intermediate_size", gates=1)
OLMO = Family(
    block=Block(qk_norm=True), wide_qk_norm=True, qkv_bias="attention_bias", out_bias="attention_bias")  # fmt: skip
FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "granite": LLAMA,
    "internlm3": replace(LLAMA, head=128, only={"qkv_bias": False, "bias": False}),
    "smollm3": replace(LLAMA, tied=True),
    "mistral": Family(),
    "ministral3": Family(head=128),
    "olmo2": OLMO,
    "olmo3": OLMO,
    "exaone4": Family(block=Block(qk_norm=True)),
    "qwen2": Family(qkv_bias=True),
    "qwen2_vl_text": Family(qkv_bias=True),
    "qwen2_5_vl_text": Family(qkv_bias=True),
    "qwen3_vl_text": Family(
        block=Block(qk_norm=True), qkv_bias="attention_bias", out_bias="attention_bias", head=128),
    "qwen3_vl_moe_text": Family(
        block=Block(qk_norm=True), experts=Mixture(EXPERTS), qkv_bias="attention_bias",
        out_bias="attention_bias", only={"decoder_sparse_step": 1, "mlp_only_layers": []}),
    "qwen3_5_text": Family(**DELTA),
    "qwen3_5_moe_text": Family(
        **DELTA, experts=DELTA_EXPERTS, keys={"intermediate_size": ("intermediate_size", "moe_intermediate_size")}),
    "qwen3_next": Family(**DELTA, experts=DELTA_EXPERTS, only={"decoder_sparse_step": 1, "mlp_only_layers": []}),
    "llama4_text": Family(
        keys={"intermediate_size": ("intermediate_size_mlp",)}, qkv_bias="attention_bias", out_bias="attention_bias",
        head=128,
        experts=Mixture(
            ("num_local_experts",), "intermediate_size", step="interleave_moe_layer_step", always_shared=True)),
    "glm4v_text": Family(
        block=Block(copied=True, norms=4), fused=True, qkv_bias="attention_bias", key_default=True),
    "glm4v_moe_text": Family(
        block=Block(copied=True), experts=DEEPSEEK, qkv_bias="attention_bias", key_default=True),
    "qwen3": Family(block=QWEN3, qkv_bias="attention_bias", out_bias="attention_bias", head=128),
    "glm": Family(block=Block(copied=True), fused=True, qkv_bias="attention_bias", key_default=True, head=128),
    "glm4": Family(
        block=Block(copied=True, norms=4), fused=True, qkv_bias="attention_bias", key_default=True, head=128),
    "chatglm": Family(block=Block(copied=True), fused=True, keys=CHATGLM_KEYS, qkv_bias="add_qkv_bias"),
    "gemma": Family(block=GEMMA, tied=True, head=256, qkv_bias="attention_bias", out_bias="attention_bias"),
    "gemma2": Family(block=GEMMA2, tied=True, head=256, qkv_bias="attention_bias", out_bias="attention_bias"),
    "gemma3_text": Family(
        block=Block(norm="gemma", norms=4, qk_norm=True), tied=True, head=256, qkv_bias="attention_bias",
        out_bias="attention_bias"),
    "phi3": Family(block=Block(fused_qkv=True, copied=True), fused=True),
    "gpt2": Family(
        block=GELU_NEW, dropout=("resid_pdrop", 0.1), attention_dropout=("attn_pdrop", 0.1), keys=GPT_KEYS, tied=True,
        positions=0, inner=4, **BIASED),
    "gpt_neox": Family(
        block=Block(norm="layer", fused_qkv=True), dropout=("hidden_dropout", 0.0), key_default=True,
        **{**BIASED, "qkv_bias": "attention_bias", "out_bias": "attention_bias"}),
    "opt": Family(
        block=Block(norm="layer", into_down=0),
        only={"do_layer_norm_before": True, "enable_bias": True}, dropout=("dropout", 0.1),
        keys={"intermediate_size": ("ffn_dim",)}, tied=True, positions=2, **BIASED),
    "bloom": Family(
        block=GPT, dropout=("hidden_dropout", 0.0), keys=GPT_KEYS, tied=True, embedding_norm=True, inner=4, **BIASED),
    "falcon": Family(
        block=Block(norm="layer", norms=1, outputs=1),
        only={"new_decoder_architecture": False, "parallel_attn": True, "bias": False}, inner=4,
        dropout=("hidden_dropout", 0.0), keys=GPT_KEYS, gated=False, tied=True, norm_bias=True),
    "mpt": Family(
        block=GPT, dropout=("resid_pdrop", 0.0), keys=GPT_KEYS, gated=False, tied=True, inner=4),
    "phi": Family(
        block=Block(norm="layer", norms=1, outputs=1, inside=4, copied=True),
        only={"qk_layernorm": False}, dropout=("resid_pdrop", 0.0),
        head_bias=True, **BIASED),
    "mixtral": Family(experts=Mixture(("num_local_experts",), "intermediate_size")),
    "qwen2_moe": Family(
        experts=Mixture(EXPERTS, shared="shared_expert_intermediate_size", gates=1), qkv_bias=True,
        only={"decoder_sparse_step": 1, "mlp_only_layers": []}),
    "qwen3_moe": Family(
        block=QWEN3, experts=Mixture(EXPERTS), qkv_bias="attention_bias", out_bias="attention_bias",
        only={"decoder_sparse_step": 1, "mlp_only_layers": []}),
    "gpt_oss": Family(
        block=Block(norm="gemma", inside=6, scores=(2, 6)), head=64,
        experts=Mixture(("num_local_experts",), "intermediate_size", biased=True),
        qkv_bias="attention_bias", out_bias="attention_bias", key_default=True, sinks=True),
    "deepseek_v2": Family(latent=True, experts=DEEPSEEK, keys={"head_dim": ()}),
    "deepseek_v3": Family(latent=True, experts=DEEPSEEK, keys={"head_dim": ()}),
    "glm4_moe": Family(
        block=Block(copied=True), experts=DEEPSEEK, qkv_bias="attention_bias", qk_norm_key="use_qk_norm"),
}  # fmt: skip
"""model_type -> family."""
