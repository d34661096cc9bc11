"""Parts of weights under tensor parallelism: along which dimension, and that they make up the whole again."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dsrun.models.tensor_parallel import divided_along
from dsrun.training.engines.checkpoints.divided import Division, Rejoined, joined, whole_weights
from dsrun.training.engines.checkpoints.saved import LazyWeights, Piece, Saved, Shard, laid_flat

RANKS = 2
WHERE = {
    "model.layers.0.self_attn.q_proj.weight": (0, 1),
    "model.layers.0.self_attn.q_proj.bias": (0, 1),
    "model.layers.0.self_attn.o_proj.weight": (1, 1),
    "model.layers.0.self_attn.o_proj.bias": (None, 1),
    "model.layers.0.mlp.down_proj.weight": (1, 1),
    "model.layers.0.mlp.gate_up_proj.weight": (0, 2),
    "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight": (0, 1),
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight": (None, 1),
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight": (0, 1),
    "base_model.model.model.layers.0.mlp.down_proj.lora_A.default.weight": (1, 1),
    "base_model.model.model.layers.0.mlp.down_proj.lora_B.default.weight": (None, 1),
    "model.layers.0.self_attn.q_norm.weight": (None, 1),
    "model.embed_tokens.weight": (None, 1),
    "lm_head.weight": (None, 1),
}
SIZES = {0: (2, 6), 1: (5, 3)}
"""Of unequal parts of 8, as heads may be."""


@pytest.mark.parametrize(("name", "how"), WHERE.items())
def test_how_a_weight_is_divided(name, how):
    assert divided_along(name) == how


def parts_of(name: str, whole: torch.Tensor) -> list[torch.Tensor]:
    dim, layers = divided_along(name)
    if dim is None:
        return [whole] * RANKS
    sizes = (2, 2) if layers == 2 else SIZES[dim]
    return [Division(tuple(whole.shape), dim, layers, sizes, rank).part(whole) for rank in range(RANKS)]


@pytest.mark.parametrize("name", WHERE)
def test_parts_make_up_the_whole(name):
    whole = torch.arange(8.0) if name.endswith("bias") else torch.arange(64.0).reshape(8, 8)
    parts = parts_of(name, whole)
    assert torch.equal(joined(name, parts), whole)
    assert torch.equal(whole_weights([{name: part} for part in parts])[name], whole)


def test_gate_and_up_are_divided_each_by_itself():
    whole = torch.arange(8.0)[:, None]
    first, second = parts_of("mlp.gate_up_proj.weight", whole)
    assert first.flatten().tolist() == [0, 1, 4, 5]
    assert second.flatten().tolist() == [2, 3, 6, 7]


def saved(name: str, part: torch.Tensor) -> Saved:
    """One rank's files: its part in two shards, the second one behind padding."""
    flat = part.reshape(-1)
    half = len(flat) // 2
    padded = torch.cat([torch.full((3,), -1.0), flat[half:]])
    shards = [
        Shard(flat[:half], {"exp_avg": 2 * flat[:half]}, [Piece(name, 0, 0, half)]),
        Shard(padded, {"exp_avg": 2 * padded}, [Piece(name, half, 3, len(flat) - half)]),
    ]
    return Saved(shards, 1, {}, {}, shapes={name: tuple(part.shape)})


@pytest.mark.parametrize("name", [name for name in WHERE if not name.endswith("bias")])
def test_two_ranks_parts_for_another_division(name, tmp_path):
    """By equal parts, of which this rank has the second; the fp32 weights and what the optimizer keeps."""
    whole = torch.arange(64.0).reshape(8, 8)
    dim, layers = divided_along(name)
    own = Division((8, 8), dim, layers, (2, 2) if layers == 2 else (4, 4), 1)
    content = Rejoined([saved(name, part) for part in parts_of(name, whole)], {name: own}, tmp_path)
    wanted = own.part(whole).reshape(-1)
    (overlap,) = content.overlaps(Piece(name, 5, 11, 7))
    assert (overlap.start, overlap.target, overlap.length) == (5, 11, 7)
    assert torch.equal(overlap.saved.weights, wanted)
    assert torch.equal(overlap.saved.states["exp_avg"], 2 * wanted)


def test_a_part_that_is_missing(tmp_path):
    from dsrun.errors import DsrunError

    name = "o_proj.weight"
    content = Rejoined([saved(name, torch.zeros(8, 5))], {name: Division((8, 8))}, tmp_path)
    with pytest.raises(DsrunError, match="no whole o_proj"):
        list(content.overlaps(Piece(name, 0, 0, 64)))


def test_pieces_of_several_tensors_are_laid_in_the_weights_order():
    first, second = torch.tensor([9.0, 0.0, 1.0]), torch.tensor([2.0, 3.0, 9.0])
    parts = [(Piece("w", 2, 0, 2), second), (Piece("w", 0, 1, 2), first)]
    assert laid_flat(parts).tolist() == [0, 1, 2, 3]


def test_a_lazy_weight_is_made_when_it_is_asked_for_and_not_before():
    made = []
    weights = LazyWeights(["a", "b"], lambda name: made.append(name) or torch.zeros(1))
    assert "a" in weights and "c" not in weights and list(weights) == ["a", "b"] and len(weights) == 2
    assert not made
    assert len(weights["b"]) == 1 and made == ["b"]
    with pytest.raises(KeyError):
        weights["c"]
