"""A model's shape in numbers: what its memory and its speed depend on, read from a transformers config or typed in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from dsrun.errors import DsrunError, Problem
from dsrun.json_numbers import is_finite
from dsrun.planner.families import FAMILIES, LLAMAS, Block, Family, Recurrent
from dsrun.planner.model_config import MOST, ModelConfig, UnknownShapeError, quoted

SIZES = (
    (0.135e9, 30, 576), (0.5e9, 24, 1024), (1.1e9, 22, 2048), (3.2e9, 28, 3072), (6.7e9, 32, 4096),
    (13.0e9, 40, 5120), (32.5e9, 60, 6656), (69.0e9, 80, 8192), (175e9, 96, 12288), (405e9, 126, 16384),
)  # fmt: skip
"""(Parameters, layers, hidden size) of the Llama models and those built like them, small to large: what a network of
a size usually has, for a user who knows only the parameters."""
ROLES = ("q", "k", "v", "o", "gate", "up", "down")
"""A block's matrices, whatever a network calls them: into queries, keys and values, out of attention, the feed-forward
block's gate, the other one into it, and the one out of it."""
WIDEST = 16
"""A feed-forward block is at most this many times as wide as the hidden size (4 is usual, Gemma's is 8)."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The feed-forward block of a mixture of experts."""

    count: int
    """Experts in each block."""
    chosen: int
    """Experts that a token goes through."""
    width: int
    """Width inside one expert."""
    shared: int = 0
    """Width of the shared experts, which every token goes through."""
    dense: int = 0
    """Blocks without experts, whose feed-forward block is as wide as Shape.intermediate."""
    wide_router: bool = False
    """Whether the router computes in fp32."""
    gated: bool = False
    """Whether the shared experts' output is multiplied by a gate of its own."""


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: queries, keys and values come out of narrow vectors."""

    queries: int
    """Width of the queries' vector; 0: they come from the hidden size."""
    keys: int
    """Width of the vector of keys and values, which the cache holds."""
    rotary: int
    """The rotated part of a head's width, which all heads of the keys share."""
    value_dim: int
    """Width of a head's values."""


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer."""

    parameters: int
    """All weights, tied ones once."""
    layers: int
    """Blocks."""
    hidden: int
    """Width of the residual stream."""
    intermediate: int
    """Width inside the feed-forward block."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key/value heads."""
    head_dim: int
    """Width of one head."""
    vocab: int
    """Rows of the embedding."""
    gated: bool = True
    """Whether the feed-forward block has a gate (SwiGLU: three matrices, else two)."""
    tied: bool = False
    """Whether the output weights are the embedding's."""
    positions: int | None = None
    """Longest context in tokens that the model was made for, None where it is not known."""
    fused: bool = False
    """The gate and the other matrix into the feed-forward block are one weight."""
    block: Block = LLAMAS
    """Tensors that its blocks keep for backward."""
    experts: Experts | None = None
    """The mixture's experts; None for a dense network."""
    latent: Latent | None = None
    """The vectors of latent attention; None for keys and values of their own."""
    recurrent: Recurrent | None = None
    """The layers with a state; None where all have attention alone."""
    frozen: int = 0
    """Weights among the parameters that are no part of the text part, and never trained."""
    assumed: tuple[str, ...] = ()
    """Assumed sizes, in words."""

    @property
    def attention_layers(self) -> int:
        """Blocks with attention."""
        return self.layers - (self.recurrent.layers if self.recurrent and self.recurrent.replaces else 0)

    @property
    def query_width(self) -> int:
        """Elements of a token's queries in one layer."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of a token's keys in one layer; its values take as many."""
        return self.kv_heads * self.head_dim

    @property
    def cached_width(self) -> int:
        """Elements that answering keeps of a token in one layer."""
        return 2 * self.kv_width if self.latent is None else self.latent.keys + self.latent.rotary

    @property
    def embedding(self) -> int:
        """Elements of the embedding."""
        return self.vocab * self.hidden

    @property
    def ends(self) -> int:
        """Elements of the embedding and the output weights, tied ones once."""
        return self.embedding * (1 if self.tied else 2)

    @property
    def mlp_matrices(self) -> int:
        """Matrices of the feed-forward block."""
        return 3 if self.gated else 2

    @property
    def active(self) -> int:
        """Weights that a token goes through: of a mixture's experts, those that are chosen."""
        if (experts := self.experts) is None:
            return self.parameters - self.frozen
        idle = self.in_experts * (experts.count - experts.chosen) // experts.count
        return self.parameters - self.frozen - idle

    @property
    def in_experts(self) -> int:
        """Weights of all experts, without the shared ones: one tensor a block and direction (transformers 5)."""
        if (experts := self.experts) is None:
            return 0
        each = self.mlp_matrices * self.hidden * experts.width
        return (self.layers - experts.dense) * experts.count * each

    @cached_property
    def matrices(self) -> Counter[int]:
        """Elements -> how many matrices have that many; the vectors are not worth counting."""
        gate, attention = self.block.gated_output, self.attention_layers
        counts = Counter({self.hidden * self.query_width: (1 if gate else 2) * attention})
        counts[2 * self.hidden * self.query_width] += attention * gate
        counts[self.hidden * self.kv_width] += 2 * attention
        if (recurrent := self.recurrent) is not None:
            for rows, columns in recurrent.linears:
                counts[rows * columns] += recurrent.layers
        if (experts := self.experts) is None:
            counts[self.hidden * self.intermediate] += self.mlp_matrices * self.layers
        else:  # a block's experts are two weights: into them and out
            mixed = self.layers - experts.dense
            counts[experts.count * self.hidden * experts.width * (self.mlp_matrices - 1)] += mixed
            counts[experts.count * self.hidden * experts.width] += mixed
            counts[self.hidden * max(1, experts.shared)] += self.mlp_matrices * mixed
            counts[self.hidden * self.intermediate] += self.mlp_matrices * experts.dense
        counts[self.embedding] += 1 if self.tied else 2
        return counts

    @property
    def largest(self) -> int:
        """Elements of the largest single weight: the embedding, or the matrix into the feed-forward block."""
        inside = self.intermediate * (2 if self.fused else 1)
        if self.experts is not None:
            inside = self.experts.count * self.experts.width * (self.mlp_matrices - 1)
        return max(self.embedding, self.hidden * inside)

    @property
    def layer_parameters(self) -> int:
        """Weights of one block, about: what is not embedding, divided evenly."""
        return max(0, self.parameters - self.frozen - self.ends) // self.layers


def from_config(config: Mapping[str, Any], where: str, parameters: int | None = None) -> Shape:
    """The shape that a transformers config.json (as a dict) describes.

    parameters: the count, where it is known; counted from the fields otherwise.
    Raises DsrunError with all that can't be, and UnknownShapeError with all that is missing, or for networks that this
    arithmetic does not describe: mixtures of experts, models of images or sound, encoder-decoders.
    """
    reader = ModelConfig(config, where)
    family = _family(reader)
    sizes = _sizes(reader, family)
    experts, latent = family.experts_of(reader, sizes.get("layers", 1)), family.latent_of(reader)
    layers, hidden = sizes.get("layers", 1), sizes.get("hidden", 1)
    recurrent = family.recurrent(reader, layers, hidden) if family.recurrent else None
    tied, block = reader.switch("tie_word_embeddings", family.tied), family.block_of(reader)
    reader.check()
    shape = Shape(
        parameters=0,
        gated=family.gated,
        tied=tied,
        fused=family.fused,
        block=block,
        experts=Experts(**experts) if experts else None,
        latent=Latent(**latent) if latent else None,
        recurrent=recurrent,
        **sizes,
    )
    count = family.count(shape, reader)
    if count > MOST:
        reader.wrong.append(
            Problem(f"describes {count:.3g} weights", where, f"No network has more than {MOST:g}.")
        )
    reader.check()
    return replace(shape, parameters=parameters or count)


def described(sizes: Mapping[str, Any], model_type: str) -> Shape:
    """The shape of a network without formulas, from what its own class says: for the terms of weights and speed.

    sizes: Shape's fields. What its blocks keep is taken for a Llama's, and the shape says so.
    """
    assumed = (f"{model_type} has no formulas: where no trace is, its blocks are taken for a Llama's",)
    return Shape(**{**sizes, "assumed": assumed})


def stated(config: Mapping[str, Any], where: str, parameters: int) -> Shape:
    """The shape of a network without formulas whose parameters are known, from its config alone, as `described`.

    Raises DsrunError for a config without the sizes that every network has.
    """
    reader = ModelConfig(config, where)
    layers, hidden, heads = map(reader.needed, ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    sizes = {
        "parameters": parameters,
        "layers": layers,
        "hidden": hidden,
        "intermediate": reader.size("intermediate_size", "shared_intermediate_size") or 4 * hidden,
        "heads": heads,
        "kv_heads": reader.size("num_key_value_heads") or heads,
        "head_dim": reader.size("head_dim") or max(1, hidden // heads),
        "vocab": reader.needed("vocab_size"),
        "tied": reader.switch("tie_word_embeddings", False),
        "positions": reader.size("max_position_embeddings"),
    }
    reader.check()
    return described(sizes, str(config.get("model_type")))


def config_of(shape: Shape, model_type: str = "llama") -> dict[str, Any] | None:
    """A transformers config of this shape, the other way round from `from_config`; None where the network differs.

    model_type: the family whose blocks it has.
    """
    family = FAMILIES[model_type]
    if (
        shape.block != family.block
        or (shape.experts, shape.latent) != (None, None)
        or shape.gated != family.gated
    ):
        return None
    sizes = {
        family.names(name)[0]: getattr(shape, field)
        for name, field in Family.SIZES.items()
        if family.names(name)
    }
    return {
        "model_type": model_type,
        **{name: size for name, size in sizes.items() if size is not None},
        "tie_word_embeddings": shape.tied,
    }


def from_numbers(
    parameters: float,
    *,
    layers: int | None = None,
    hidden: int | None = None,
    intermediate: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    vocab: int | None = None,
) -> Shape:
    """A Llama-like shape with this many parameters; what is not given is assumed, and the shape says so.

    Raises DsrunError for numbers that no network has.
    """
    given = {
        "params": parameters, "layers": layers, "hidden": hidden, "intermediate": intermediate, "heads": heads,
        "kv-heads": kv_heads, "vocab": vocab,
    }  # fmt: skip
    wrong = [
        Problem(f"can't be {_short(value)}", f"--{name}", f"A number, 1 to {MOST:g}.")
        for name, value in given.items()
        if value is not None and not 1 <= value <= MOST
    ]
    if wrong:
        raise DsrunError(wrong)
    assumed: list[str] = []

    def assume(name: str, value: int) -> int:
        assumed.append(f"{name} {value}")
        return value

    _, usual_layers, usual_hidden = min(
        SIZES, key=lambda size: abs(size[0] / parameters - 1) + abs(parameters / size[0] - 1)
    )
    layers = layers or assume("layers", usual_layers)
    hidden = hidden or assume("hidden", usual_hidden)
    vocab = vocab or assume("vocab", 32000)
    heads = heads or assume("heads", max(1, hidden // 128))
    kv_heads = kv_heads or assume("kv-heads", heads)
    if heads % kv_heads:
        message = f"{kv_heads} doesn't divide {heads}"
        raise DsrunError(message, where="--kv-heads", hint="As in --heads 32 --kv-heads 8.")
    if heads > hidden:
        message = f"{heads} heads are more than the hidden size, {hidden}"
        raise DsrunError(message, where="--heads", hint="A head is 64 or 128 wide.")
    head_dim = hidden // heads
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    if intermediate is None:
        # What the parameters leave for the feed-forward block's three matrices; 8/3 h where that can't be right.
        left = round(((parameters - 2 * vocab * hidden) / layers - attention) / (3 * hidden))
        intermediate = assume("intermediate", left if left > hidden else 8 * hidden // 3)
    # Numbers that are typed in needn't be exact, and networks differ; a slip of a digit is out by more than these.
    held = layers * (attention + 3 * hidden * intermediate) + vocab * hidden
    if not 0.4 <= held / parameters <= 2.5 or intermediate > WIDEST * hidden:
        message = f"{layers} layers of hidden size {hidden} hold about {held / 1e9:.3g}e9"
        raise DsrunError(
            f"{parameters:.4g} parameters don't agree with the shape: {message}",
            where="--params",
            hint="Check --layers, --hidden and --intermediate, or give --params alone.",
        )
    return Shape(
        round(parameters),
        layers,
        hidden,
        intermediate,
        heads,
        kv_heads,
        head_dim,
        vocab,
        assumed=tuple(assumed),
    )


def _short(value: float) -> str:
    if isinstance(value, int):
        return str(value) if abs(value) < MOST else "so large"
    return "infinite" if value == float("inf") else f"{value:g}"


LIMITS = (
    "dsrun plans for decoder-only language models: dense ones and the mixtures of experts among its families."
)
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""A config's keys for the experts of a block."""
CHOSEN = ("num_experts_per_tok", "top_k_experts")
"""Its keys for those that a token goes through."""
EXPERTS = (*EXPERT_COUNTS, *CHOSEN)


def _mixes(model_type: str) -> bool:
    return model_type in FAMILIES and FAMILIES[model_type].experts is not None


def _family(reader: ModelConfig) -> Family:
    """The family of a config's model_type.

    Raises UnknownShapeError for a network that is not modelled, DsrunError where its usual sizes can't be.
    """
    config, where = reader.values, reader.where
    model_type = config.get("model_type")
    unlike = [
        f"{key} is {value}: mixtures of experts are"
        for key in EXPERTS
        if is_finite(value := config.get(key)) and value > 1 and not _mixes(str(model_type))
    ]
    unlike += [
        f"{model_type} has a {part} part, which is"
        for part in ("vision", "audio")
        if isinstance(config.get(f"{part}_config"), Mapping)
    ]
    if config.get("is_encoder_decoder"):
        unlike.append(f"{model_type} is an encoder-decoder, which is")
    if unlike or str(model_type) not in FAMILIES:
        for name in Family.SIZES:
            if not isinstance(config.get(name), (list, dict)):  # some have a size of each block
                reader.size(name)
        reader.check()
    if unlike:
        raise UnknownShapeError(f"{unlike[0]} not modelled", where=where, hint=LIMITS)
    if str(model_type) not in FAMILIES:
        raise UnknownShapeError(
            f"dsrun does not plan for model_type {model_type!r}, only for {', '.join(sorted(FAMILIES))}",
            where=where,
            hint="If it is built like Llama, give its numbers: --params 6.2e9 --hidden 4096 --layers 28 --vocab 65024",
        )
    return FAMILIES[str(model_type)]


def _sizes(reader: ModelConfig, family: Family) -> dict[str, Any]:
    """The sizes by Shape's names; what is missing or can't be is collected."""
    config = reader.values
    reader.missing += [
        Problem(
            f"{key} is {quoted(config[key])}, a different network, which is not modelled",
            reader.where,
            LIMITS,
        )
        for key, right in family.only.items()
        if config.get(key) not in (None, right)
    ]
    sizes: dict[str, int] = {}
    for name in Family.SIZES:
        wrong, value = len(reader.wrong), reader.size(*family.names(name))
        if value is None and len(reader.wrong) == wrong:
            value = family.default(name, reader, sizes)
        if value is not None:
            sizes[name] = value
        elif name not in Family.OPTIONAL and len(reader.wrong) == wrong:
            reader.lack(*family.names(name))
    if not reader.wrong and not reader.missing:
        reader.wrong += _contradictions(sizes, reader.where)
        hidden = sizes["hidden_size"]
        if (narrow := config.get("word_embed_proj_dim", hidden)) != hidden:
            message = f"word_embed_proj_dim is {quoted(narrow)} and not hidden_size {hidden}: not modelled"
            reader.missing.append(Problem(message, reader.where, LIMITS))
        sizes.setdefault("head_dim", hidden // sizes["num_attention_heads"])
    return {Family.SIZES[name]: value for name, value in sizes.items()}


def _contradictions(sizes: Mapping[str, int], where: str) -> Iterator[Problem]:
    heads, groups, hidden = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["hidden_size"]
    if heads % groups:
        yield Problem(f"num_key_value_heads {groups} doesn't divide num_attention_heads {heads}", where)
    if "head_dim" not in sizes and heads > hidden:
        yield Problem(f"num_attention_heads {heads} is more than hidden_size {hidden}", where)
