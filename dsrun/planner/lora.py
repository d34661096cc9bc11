"""LoRA's matrices: on which of a block's weights they are, and how many weights they add."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from dsrun.planner.shape import ROLES, Shape

QKV, GATE_UP = "q+k+v", "gate+up"
"""Matrices that hold several of a block's in one."""
Q_IN, Q_OUT, KV_IN, KV_OUT = "q in", "q out", "kv in", "kv out"
"""Matrices into the narrow vectors of latent attention, and out of them."""
ALL = "all"
FROM_HIDDEN = {"q", "k", "v", QKV, Q_IN, KV_IN}
"""Attention's matrices that share the block's normed input."""
ATTENTION = {*FROM_HIDDEN, Q_OUT, KV_OUT, "o"}
NAMES: dict[str, tuple[str, ...]] = {
    "q_proj": ("q",), "query": ("q",), "wq": ("q",), "k_proj": ("k",), "key": ("k",), "wk": ("k",), "v_proj": ("v",),
    "value": ("v",), "wv": ("v",), "o_proj": ("o",), "out_proj": ("o",), "dense": ("o",), "wo": ("o",),
    "query_key_value": (QKV,), "qkv": (QKV,), "c_attn": (QKV,),
    "q_a_proj": (Q_IN,), "q_b_proj": (Q_OUT,), "kv_a_proj_with_mqa": (KV_IN,), "kv_b_proj": (KV_OUT,),
    "w_pack": (QKV,), "wqkv": (QKV,), "qkv_proj": (QKV,), "gate_proj": ("gate",),
    "up_proj": ("up",), "w1": ("gate",), "w3": ("up",), "fc1": ("up",), "fc_in": ("up",), "c_fc": ("up",),
    "down_proj": ("down",), "w2": ("down",), "fc2": ("down",), "fc_out": ("down",), "dense_4h_to_h": ("down",),
    "dense_h_to_4h": (GATE_UP,), "gate_up_proj": (GATE_UP,), "c_proj": ("o", "down"),
}  # fmt: skip
"""A module's name, as projects give it, in small letters -> the matrices that it is."""
QWEN = {"w2": ("up",)}
"""Qwen's own code calls the matrices into the feed-forward block w1 and w2; beside a fused c_attn they are these."""


def roles(targets: str | Iterable[str]) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """The matrices that LoRA's targets name ("q_proj,v_proj" or a list), and the names that are unknown.

    None: "all", whatever the network has. A name that is unknown stands for no matrix.
    """
    names = targets.split(",") if isinstance(targets, str) else targets
    lower_names = [name.strip().lower() for name in names if name.strip()]
    if any(name.replace("_", "-") in (ALL, "all-linear") for name in lower_names):
        return None, ()
    known = {**NAMES, **{role: (role,) for role in ROLES}, **(QWEN if "c_attn" in lower_names else {})}
    known_roles = dict.fromkeys(chain.from_iterable(known.get(name, ()) for name in lower_names))
    return tuple(known_roles), tuple(name for name in lower_names if name not in known)


def every(shape: Shape) -> tuple[str, ...]:
    """All matrices of a block that LoRA can be put on.

    Of a mixture of experts, attention's only: PEFT doesn't put LoRA on experts unless it is asked by parameter.
    """
    attention: tuple[str, ...] = (QKV, "o") if shape.block.fused_qkv else ("q", "k", "v", "o")
    if shape.latent is not None:
        attention = (*((Q_IN, Q_OUT) if shape.latent.queries else ("q",)), KV_IN, KV_OUT, "o")
    if shape.experts is not None:
        return attention
    into = (GATE_UP,) if shape.fused else ("gate", "up") if shape.gated else ("up",)
    return (*attention, *into, "down")


def sizes(shape: Shape, targets: Iterable[str] | None = None) -> dict[str, tuple[int, int]]:
    """Target -> (elements into the matrix, elements out of it), of those that the network has. None: all of them."""
    hidden, query, kv, inner = shape.hidden, shape.query_width, shape.kv_width, shape.intermediate
    known = {
        "q": (hidden, query * (1 + shape.block.gated_output)), "k": (hidden, kv), "v": (hidden, kv),
        QKV: (hidden, query + 2 * kv),
        "o": (query, hidden), "up": (hidden, inner), "down": (inner, hidden),
        GATE_UP: (hidden, (2 if shape.gated else 1) * inner),
    }  # fmt: skip
    if shape.gated:
        known["gate"] = (hidden, inner)
    if (latent := shape.latent) is not None:
        values = shape.heads * latent.value_dim
        known |= {
            Q_IN: (hidden, latent.queries), Q_OUT: (latent.queries, query),
            KV_IN: (hidden, latent.keys + latent.rotary),
            KV_OUT: (latent.keys, query - shape.heads * latent.rotary + values), "o": (values, hidden),
        }  # fmt: skip
    return {name: known[name] for name in (every(shape) if targets is None else targets) if name in known}


def lora_weights(shape: Shape, rank: int, targets: Iterable[str] | None = None) -> int:
    """Weights that LoRA adds: rank x (rows + columns) of every matrix that it is put on."""
    by_role = sizes(shape, targets)
    mixers = sum(sum(by_role[role]) for role in by_role.keys() & ATTENTION)
    others = sum(map(sum, by_role.values())) - mixers
    recurrent = shape.recurrent if targets is None else None
    beside = recurrent.layers * sum(map(sum, recurrent.linears)) if recurrent else 0
    return rank * (shape.attention_layers * mixers + shape.layers * others + beside)


def expert_weights(shape: Shape, rank: int) -> int:
    """Weights that LoRA adds on all experts of a mixture, of which each has a matrix in and one out; 0 without any."""
    if (experts := shape.experts) is None:
        return 0
    into, out = (2 if shape.gated else 1) * experts.width, experts.width
    return (shape.layers - experts.dense) * experts.count * rank * (into + out + 2 * shape.hidden)
