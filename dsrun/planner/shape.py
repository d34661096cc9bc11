"""A model's shape in numbers: what its memory and its speed depend on, read from a transformers config or typed in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dsrun.errors import DsrunError, Problem
from dsrun.planner.families import FAMILIES, Family

SIZES = (
    # parameters, layers, hidden: of the Llama models and those built like them, small to large
    (0.135e9, 30, 576),
    (0.5e9, 24, 1024),
    (1.1e9, 22, 2048),
    (3.2e9, 28, 3072),
    (6.7e9, 32, 4096),
    (13.0e9, 40, 5120),
    (32.5e9, 60, 6656),
    (69.0e9, 80, 8192),
    (175e9, 96, 12288),
    (405e9, 126, 16384),
)
"""Layers and hidden size that a network of a size usually has, for a user who knows only the parameters."""


MOST = 1e15
"""Parameters: no network has more, nor anything in it."""
WIDEST = 16
"""A feed-forward block is at most so many times as wide as the hidden size (4 is usual, Gemma's is 8)."""


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer.

    parameters: all weights, tied ones once. layers: blocks. hidden: width of the residual stream.
    intermediate: width inside the feed-forward block. heads, kv_heads: query heads, key/value heads.
    head_dim: width of one head. vocab: rows of the embedding. gated: whether the feed-forward block has a gate
    (SwiGLU: three matrices) or not (two). tied: whether the output weights are the embedding's.
    positions: longest context that the model was made for, None where it is not known.
    fused: the gate and the other matrix into the feed-forward block are one weight.
    dropout: it trains with dropout on the residual stream, whose masks are kept. assumed: what nobody said, in words.
    """

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool = True
    tied: bool = False
    positions: int | None = None
    fused: bool = False
    dropout: bool = False
    assumed: tuple[str, ...] = ()

    @property
    def query_width(self) -> int:
        """Elements of a token's queries in one layer."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of a token's keys in one layer; its values are as many."""
        return self.kv_heads * self.head_dim

    @property
    def embedding(self) -> int:
        """Elements of the embedding."""
        return self.vocab * self.hidden

    @property
    def largest(self) -> int:
        """Elements of the largest single weight: the embedding, or the matrix into the feed-forward block."""
        return max(self.embedding, self.hidden * self.intermediate * (2 if self.fused else 1))

    @property
    def layer_parameters(self) -> int:
        """Weights of one block, about: what is not embedding, shared evenly."""
        outside = self.embedding if self.tied else 2 * self.embedding
        return max(0, self.parameters - outside) // self.layers


def from_config(config: Mapping[str, Any], where: str, parameters: int | None = None) -> Shape:
    """The shape that a transformers config.json (as a dict) describes.

    parameters: the count, where it is known; counted from the fields otherwise.
    Raises DsrunError with all that is missing, and for networks that this arithmetic does not describe: mixtures of
    experts, models of images or sound, encoder-decoders.
    """
    _refuse(config, where)
    family = _family(config, where)
    sizes = _sizes(config, family, where)
    shape = Shape(
        parameters=0,
        layers=sizes["num_hidden_layers"],
        hidden=sizes["hidden_size"],
        intermediate=sizes["intermediate_size"],
        heads=sizes["num_attention_heads"],
        kv_heads=sizes["num_key_value_heads"],
        head_dim=sizes["head_dim"],
        vocab=sizes["vocab_size"],
        gated=family.gated,
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        positions=sizes.get("max_position_embeddings"),
        fused=family.fused,
        dropout=family.dropout is not None and bool(config.get(*family.dropout)),
    )
    counted = family.count(shape, config)
    return replace(shape, parameters=parameters or counted)


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
    """A Llama-like shape of so many parameters; what is not given is assumed, and the shape says so.

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
    usual_layers, usual_hidden = _usual(parameters)
    layers = layers or _say(assumed, "layers", usual_layers)
    hidden = hidden or _say(assumed, "hidden", usual_hidden)
    vocab = vocab or _say(assumed, "vocab", 32000)
    heads = heads or _say(assumed, "heads", max(1, hidden // 128))
    kv_heads = kv_heads or _say(assumed, "kv-heads", heads)
    if heads % kv_heads:
        raise DsrunError(
            f"{kv_heads} doesn't divide {heads}", where="--kv-heads", hint="As in --heads 32 --kv-heads 8."
        )
    if heads > hidden:
        raise DsrunError(
            f"{heads} heads are more than the hidden size, {hidden}",
            where="--heads",
            hint="A head is 64 or 128 wide.",
        )
    head_dim = hidden // heads
    if intermediate is None:
        blocks = (parameters - 2 * vocab * hidden) / layers - 2 * hidden * head_dim * (heads + kv_heads)
        left = round(blocks / (3 * hidden))
        intermediate = _say(assumed, "intermediate", left if left > hidden else 8 * hidden // 3)
    shape = Shape(
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
    held = layers * hidden * (2 * head_dim * (heads + kv_heads) + 3 * intermediate) + vocab * hidden
    if not 0.4 <= held / parameters <= 2.5 or intermediate > WIDEST * hidden:
        raise DsrunError(
            f"{parameters:.4g} parameters don't agree with the shape: {layers} layers of hidden size {hidden} hold "
            f"about {held / 1e9:.3g}e9",
            where="--params",
            hint="Check --layers, --hidden and --intermediate, or give --params alone.",
        )
    return shape


def _short(value: float) -> str:
    if isinstance(value, int):
        return str(value) if abs(value) < MOST else "so large"
    return "infinite" if value == float("inf") else f"{value:g}"


def _say(assumed: list[str], name: str, value: int) -> int:
    assumed.append(f"{name} {value}")
    return value


def _usual(parameters: float) -> tuple[int, int]:
    """Layers and hidden size of the nearest size (by ratio)."""
    nearest = min(SIZES, key=lambda row: abs(row[0] / parameters - 1) + abs(parameters / row[0] - 1))
    return nearest[1], nearest[2]


def _family(config: Mapping[str, Any], where: str) -> Family:
    model_type = config.get("model_type")
    for nested in ("vision_config", "audio_config"):
        if isinstance(config.get(nested), Mapping):
            raise DsrunError(
                f"{model_type} has a {nested.split('_')[0]} part, which is not modelled",
                where=where,
                hint=LIMITS,
            )
    if config.get("is_encoder_decoder"):
        raise DsrunError(
            f"{model_type} is an encoder-decoder, which is not modelled", where=where, hint=LIMITS
        )
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise DsrunError(
            f"model_type {model_type!r} is not one of those that dsrun plans for: {', '.join(sorted(FAMILIES))}",
            where=where,
            hint="If it is built like Llama, give its numbers: --params 6.2e9 --hidden 4096 --layers 28 --vocab 65024",
        )
    return family


LIMITS = "dsrun plans for dense decoder-only language models."
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")


def _refuse(config: Mapping[str, Any], where: str) -> None:
    for key in EXPERTS:
        value = config.get(key)
        if isinstance(value, (int, float)) and value > 1:
            raise DsrunError(
                f"{key} is {value}: mixtures of experts are not modelled", where=where, hint=LIMITS
            )


def _sizes(config: Mapping[str, Any], family: Family, where: str) -> dict[str, int]:
    """Every size by its name here. Raises DsrunError with all that is missing, or can't be."""
    found: dict[str, int] = {}
    problems = [
        Problem(f"{key} is {config[key]}, which makes another network of it: not modelled", where, LIMITS)
        for key, right in family.only.items()
        if config.get(key, right) != right
    ]
    for name in (*Family.SIZES, "max_position_embeddings"):
        value = _number(config, family.names(name))
        if value is None:
            value = family.default(name, config, found)
        if value is not None and not (1 <= value <= MOST and value == int(value)):
            problems.append(Problem(f"{name} is {value}", where, "A whole number, at least 1."))
        elif value is not None:
            found[name] = int(value)
        elif name not in Family.OPTIONAL:
            problems.append(
                Problem(f"lacks {' or '.join(family.names(name))}", where, "Is it a whole config.json?")
            )
    if not problems:
        problems += _contradictions(config, found, where)
    if problems:
        raise DsrunError(problems)
    found.setdefault("head_dim", found["hidden_size"] // found["num_attention_heads"])
    return found


def _contradictions(config: Mapping[str, Any], found: Mapping[str, int], where: str) -> Iterator[Problem]:
    heads, groups, hidden = found["num_attention_heads"], found["num_key_value_heads"], found["hidden_size"]
    if heads % groups:
        yield Problem(f"num_key_value_heads {groups} doesn't divide num_attention_heads {heads}", where)
    if "head_dim" not in found and heads > hidden:
        yield Problem(f"num_attention_heads {heads} is more than hidden_size {hidden}", where)
    narrow = config.get("word_embed_proj_dim", hidden)
    if narrow != hidden:
        yield Problem(
            f"word_embed_proj_dim is {narrow} and not hidden_size {hidden}: not modelled", where, LIMITS
        )


def _number(config: Mapping[str, Any], names: Iterable[str]) -> float | None:
    values = (config.get(name) for name in names)
    return next(
        (value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)), None
    )
