"""Weights of mixtures whose experts ranks divide, by transformers' names and places.

AutoEP has layers of its own in the place of transformers' (DeepSpeed 0.19: module_inject/auto_ep_layer.py). Outside of
the engine nobody is to know: an export has transformers' names, and a checkpoint continues on any number of ranks.

| AutoEP, on one of n ranks | transformers, whole |
| --- | --- |
| router.gate.weight, router.e_score_correction_bias | gate.weight, gate.e_score_correction_bias |
| shared_experts..., shared_experts_gate... | the same, or shared_expert..., shared_expert_gate... |
| experts.w1, experts.w3: [experts / n, width, hidden] | experts.gate_up_proj: [experts, 2 width, hidden] |
| experts.w2: [experts / n, hidden, width] | experts.down_proj: [experts, hidden, width] |

A rank's experts are neighbours, in the order of the ranks. So each expert's matrix is a run of transformers' weight
laid flat, and a `Piece` of the one is some pieces of the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dsrun.training.engines.checkpoints.saved import Piece

FACTS = "dsrun_experts"
"""Key of a checkpoint's model file, where ranks divided the experts: the fields of DividedExperts."""
ROUTER = (("router.gate.", "gate."), ("router.", "gate."))
SHARED = (
    ("shared_experts.", ("shared_experts.", "shared_expert.")),
    ("shared_experts_gate.", ("shared_experts_gate.", "shared_expert_gate.")),
)
"""Beginnings of names in AutoEP's layer, and in transformers' layers of one family or another."""


class Matrix(NamedTuple):
    """The place of a matrix of AutoEP's in a weight of transformers'."""

    weight: str
    number: int
    """Its number among those that lie in the weight, for each expert."""
    of: int


MATRICES = {
    "w1": Matrix("gate_up_proj", 0, 2), "w3": Matrix("gate_up_proj", 1, 2), "w2": Matrix("down_proj", 0, 1),
}  # fmt: skip


@dataclass(frozen=True)
class DividedExperts:
    """The layers of a model whose experts are divided."""

    layers: tuple[str, ...]
    """Names of the layers, each with a dot at its end."""
    ranks: int
    """Ranks that divide the experts of a layer; ranks r, r + 1, ... are one group."""
    renamed: tuple[tuple[str, str], ...] = ROUTER
    """Beginnings of names in AutoEP's layers, and in transformers'; the first that fits counts."""

    @classmethod
    def of_layers(cls, layers: Iterable[str], ranks: int, names: Iterable[str]) -> DividedExperts:
        """layers: their names, without a dot. names: those of transformers' weights."""
        layers, names = tuple(f"{layer}." for layer in layers), tuple(names)
        shared = [
            (inner, outer)
            for inner, candidates in SHARED
            for outer in candidates
            if any(name.startswith(f"{layer}{outer}") for layer in layers for name in names)
        ]
        return cls(layers, ranks, (*ROUTER, *shared))

    @classmethod
    def of_checkpoint(cls, model: Mapping[str, Any]) -> DividedExperts | None:
        """Those of a checkpoint, by its model file; None where nothing is divided.

        Raises KeyError, TypeError, ValueError where the file has them in another form.
        """
        facts = model.get(FACTS)
        if facts is None:
            return None
        renamed = tuple((inner, outer) for inner, outer in facts["renamed"])
        return cls(tuple(facts["layers"]), int(facts["ranks"]), renamed)

    def matrix(self, name: str) -> Matrix | None:
        """The place of a weight of AutoEP's that has a rank's experts; None for another one."""
        layer, _, last = name.rpartition("experts.")
        return MATRICES.get(last) if layer in self.layers else None

    def outside(self, name: str) -> str:
        """transformers' name of a weight of AutoEP's."""
        layer = next((layer for layer in self.layers if name.startswith(layer)), None)
        if layer is None:
            return name
        if matrix := self.matrix(name):
            return f"{layer}experts.{matrix.weight}"
        rest = name.removeprefix(layer)
        begin = next((pair for pair in self.renamed if rest.startswith(pair[0])), ("", ""))
        return f"{layer}{begin[1]}{rest.removeprefix(begin[0])}"

    def pieces(self, piece: Piece, shape: Sequence[int], rank: int) -> Iterator[Piece]:
        """A piece of a rank's weight as pieces of transformers'.

        shape: of the rank's weight, whose name and elements the piece has. rank: number of the rank in its group.
        """
        matrix = self.matrix(piece.name)
        if matrix is None:
            yield Piece(self.outside(piece.name), piece.first, piece.offset, piece.count)
            return
        experts, size = shape[0], shape[1] * shape[2]
        name, position, end = self.outside(piece.name), piece.first, piece.first + piece.count
        while position < end:
            expert, inside = divmod(position, size)
            count = min(end - position, size - inside)
            first = ((rank * experts + expert) * matrix.of + matrix.number) * size + inside
            yield Piece(name, first, piece.offset + position - piece.first, count)
            position += count

    def shapes(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        """Shapes of transformers' weights. shapes: those of a rank's, by AutoEP's names."""
        whole = {}
        for name, shape in shapes.items():
            matrix = self.matrix(name)
            experts = (shape[0] * self.ranks, shape[1] * matrix.of, shape[2]) if matrix else tuple(shape)
            whole[self.outside(name)] = experts
        return whole

    def sources(self, names: Iterable[str]) -> dict[str, list[str]]:
        """AutoEP's names of each of transformers' weights, in the order in which they lie in it. names: AutoEP's."""
        sources: dict[str, list[str]] = {}
        for name in sorted(names, key=self._number):
            sources.setdefault(self.outside(name), []).append(name)
        return sources

    def _number(self, name: str) -> int:
        matrix = self.matrix(name)
        return matrix.number if matrix else 0
