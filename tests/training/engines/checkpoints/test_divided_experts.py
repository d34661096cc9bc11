"""Divided experts by transformers' names and places."""

from __future__ import annotations

import itertools

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("deepspeed")

from dsrun.training.engines.checkpoints.experts import FACTS, DividedExperts
from dsrun.training.engines.checkpoints.saved import Piece, laid_flat

LAYER, EXPERTS, WIDTH, HIDDEN = "model.layers.0.mlp", 6, 3, 5
THEIRS = (f"{LAYER}.gate.weight", f"{LAYER}.experts.gate_up_proj", f"{LAYER}.shared_expert.up_proj.weight")


def divided(ranks: int) -> DividedExperts:
    return DividedExperts.of_layers([LAYER], ranks, THEIRS)


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("cut", [1, 7, 15, 1000])
def test_ranks_pieces_make_transformers_weight(ranks, cut):
    """Whatever runs of elements ZeRO makes of a rank's matrices."""
    gate_up = torch.arange(EXPERTS * 2 * WIDTH * HIDDEN).reshape(EXPERTS, 2 * WIDTH, HIDDEN).float()
    parts = []
    for rank, (name, number) in itertools.product(range(ranks), (("w1", 0), ("w3", 1))):
        own = gate_up.chunk(ranks)[rank].chunk(2, dim=1)[number].contiguous()
        for first in range(0, own.numel(), cut):
            piece = Piece(f"{LAYER}.experts.{name}", first, first, min(cut, own.numel() - first))
            pieces = divided(ranks).pieces(piece, own.shape, rank)
            parts += [(one, own.reshape(-1)) for one in pieces]
    assert {piece.name for piece, _ in parts} == {f"{LAYER}.experts.gate_up_proj"}
    assert torch.equal(laid_flat(parts).reshape(gate_up.shape), gate_up)


@pytest.mark.parametrize(
    ("own", "theirs"),
    [
        ("router.gate.weight", "gate.weight"),
        ("router.e_score_correction_bias", "gate.e_score_correction_bias"),
        ("experts.w2", "experts.down_proj"),
        ("shared_experts.up_proj.weight", "shared_expert.up_proj.weight"),
    ],
)
def test_names(own, theirs):
    assert divided(2).outside(f"{LAYER}.{own}") == f"{LAYER}.{theirs}"
    assert divided(2).outside(f"model.layers.1.mlp.{own}") == f"model.layers.1.mlp.{own}", "a dense layer's"


def test_shapes_are_those_of_all_experts():
    shapes = divided(3).shapes({f"{LAYER}.experts.w1": (2, WIDTH, HIDDEN), "lm_head.weight": (8, HIDDEN)})
    assert shapes == {
        f"{LAYER}.experts.gate_up_proj": (6, 2 * WIDTH, HIDDEN),
        "lm_head.weight": (8, HIDDEN),
    }


def test_matrices_come_in_their_order():
    names = [f"{LAYER}.experts.{name}" for name in ("w3", "w2", "w1")]
    assert divided(2).sources(names)[f"{LAYER}.experts.gate_up_proj"] == [names[2], names[0]]


def test_a_checkpoint_says_them():
    facts = {
        "layers": list(divided(2).layers),
        "ranks": 2,
        "renamed": [list(pair) for pair in divided(2).renamed],
    }
    assert DividedExperts.of_checkpoint({FACTS: facts}) == divided(2)
    assert DividedExperts.of_checkpoint({"step": 3}) is None
    with pytest.raises(KeyError):
        DividedExperts.of_checkpoint({FACTS: {"layers": []}})
