"""The layers of a model that a trace needs: those between neighbours that no other layer has."""

from __future__ import annotations

from collections.abc import Sequence

ENDS = -1
"""The kind of what is before the first layer and behind the last."""


def chosen_layers(kinds: Sequence[int]) -> list[int]:
    """Numbers of few layers in which each layer with its two neighbours occurs, kinds[n] being layer n's.

    Three of a model whose layers are all alike: of 32 layers the second one stands for 30. Runs of layers are left out,
    the longest first, as long as the same triples of neighbours are left.
    """
    wanted, chosen, place = _triples(kinds), list(range(len(kinds))), 0
    while place < len(chosen):
        for length in range(len(chosen) - 1, 0, -1):
            without = chosen[:place] + chosen[place + length :]
            if len(without) < len(chosen) and _triples([kinds[number] for number in without]) == wanted:
                chosen = without
                break
        else:
            place += 1
    return chosen


def _triples(kinds: Sequence[int]) -> set[tuple[int, int, int]]:
    padded = [ENDS, *kinds, ENDS]
    return set(zip(padded, padded[1:], padded[2:], strict=False))
