"""Families of networks that the planner knows: where their config says what, and how many weights they have.

A family is one entry of FAMILIES. Its count is exact: tests compare it with transformers' own classes.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    fp32_sharded: bool = False
    """In published runs with LoRA under ZeRO-3 and FSDP the residual stream is fp32 (Setup.fp32_stream)."""
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
    wide_router: bool = False
    """The router computes in fp32, from a copy of the block's input."""


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
        shared = config.size(keys.shared, least=0) or 0 if keys.shared else 0
        if chosen > count and not config.wrong and not config.missing:
            config.refuse("num_experts_per_tok", chosen, f"There are {count} experts.")
        return {
            "count": count,
            "chosen": chosen,
            "width": width,
            "shared": shared * width if keys.shared_are_experts else shared,
            "dense": min(layers, config.size(keys.dense, least=0) or 0) if keys.dense else 0,
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
        qkv = shape.query_width + 2 * shape.kv_width
        norm = hidden * (2 if self.norm_bias else 1)
        block = self._attention(shape) + self.block.norms * norm
        block += shape.heads * self.sinks
        block += qkv * self._has(self.qkv_bias, config) + hidden * self._has(self.out_bias, config)
        block += 2 * shape.head_dim * shape.block.qk_norm
        feed = shape.mlp_matrices * hidden * inner
        feed += ((shape.mlp_matrices - 1) * inner + hidden) * self._has(self.mlp_bias, config)
        ends = shape.ends + norm * (2 if self.embedding_norm else 1)
        ends += shape.vocab * self.head_bias
        if self.positions is not None:
            ends += ((shape.positions or 0) + self.positions) * hidden
        if (experts := shape.experts) is None or self.experts is None:
            return shape.layers * (block + feed) + ends
        each = shape.mlp_matrices * hidden
        mixed = (
            experts.count * (each * experts.width + hidden)
            + each * experts.shared
            + self.experts.gates * hidden
        )
        if self.experts.biased:
            mixed += experts.count * (1 + (shape.mlp_matrices - 1) * experts.width + hidden)
        return shape.layers * block + experts.dense * feed + (shape.layers - experts.dense) * mixed + ends

    def _attention(self, shape: Shape) -> int:
        """Weights of attention's matrices."""
        hidden = shape.hidden
        if (latent := shape.latent) is None:
            return 2 * hidden * (shape.query_width + shape.kv_width)
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


LLAMA = Family(
    block=Block(fp32_sharded=True), qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"
)
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
FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
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
        block=QWEN3, experts=Mixture(EXPERTS), qkv_bias="attention_bias", out_bias="attention_bias", head=128,
        only={"decoder_sparse_step": 1, "mlp_only_layers": []}),
    "gpt_oss": Family(
        block=Block(norm="gemma", inside=6, scores=(2, 6)), head=64,
        experts=Mixture(("num_local_experts",), "intermediate_size", biased=True),
        qkv_bias="attention_bias", out_bias="attention_bias", key_default=True, sinks=True),
    "deepseek_v2": Family(latent=True, experts=DEEPSEEK, keys={"head_dim": ()}),
    "deepseek_v3": Family(latent=True, experts=DEEPSEEK, keys={"head_dim": ()}),
    "glm4_moe": Family(
        block=Block(copied=True), experts=DEEPSEEK, qkv_bias="attention_bias", head=128, qk_norm_key="use_qk_norm"),
}  # fmt: skip
"""model_type -> family."""
