"""A recorded step of a model with few layers, read back, and unrolled to all of its layers.

The recording (dsrun.training.tracing) cuts into segments: what is before the first layer, each layer's forward pass,
what is between forward and backward (output layer and loss), each layer's backward pass, the rest. A layer of the whole
model takes the segments of a recorded layer of its kind whose neighbours are of the same kinds, too. What one segment
frees of another is found again at the same distance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

BEFORE, FORWARD, TURN, BACKWARD, REST = "before", "forward", "turn", "backward", "rest"
"""The kinds of segments, in the order of a step."""
ENDS = -1


class UnrollError(Exception):
    """A recording whose layers don't repeat; the text says where."""


class Weight(NamedTuple):
    """A weight of the whole model. layer: -1 for one that is in none."""

    layer: int
    elements: int
    trained: bool
    element_bytes: int
    quantized: bool


class Segment(NamedTuple):
    """A part of a step. layer: -1 where it is no layer's."""

    kind: str
    layer: int


class Event(NamedTuple):
    """One event of a step. kind: "allocate", "free", "enter" a segment, "gradient" where a weight's is ready.

    block: the allocation's number in the step, source: its number in the recording, where its size is found.
    """

    kind: str
    segment: Segment
    block: int = -1
    source: int = -1
    weight: int = -1


@dataclass(frozen=True)
class Recording:
    """A recorded step, as dsrun.training.tracing wrote it."""

    kinds: Sequence[int]
    """A number for each layer of the whole model; layers that compute the same have the same."""
    chosen: Sequence[int]
    """The layers that were recorded."""
    weights: Sequence[Weight]
    """Weights of the whole model."""
    points: Sequence[tuple[int, int]]
    """(Rows, tokens of a row) of each time that the step was recorded."""
    events: Sequence[int]
    """Allocations by number, ~number where one is freed."""
    marks: Sequence[Sequence[Any]]
    """(Position in events, word, number, ...), see the recorder."""
    sizes: Sequence[Sequence[int]]
    """Bytes of each allocation, a list for each point."""
    loss: bool = True
    """Whether the model's own loss was recorded, or none."""
    stream: Sequence[int] = ()
    """Bytes of an element of each recorded layer's input."""

    @classmethod
    def of(cls, value: Mapping[str, Any], points: Sequence[tuple[int, int]]) -> Recording:
        """The recording in a JSON answer."""
        return cls(
            kinds=value["kinds"],
            chosen=value["chosen"],
            weights=[Weight(*weight) for weight in value["weights"]],
            points=[(rows, tokens) for rows, tokens in points],
            events=value["events"],
            marks=value["marks"],
            sizes=value["sizes"],
            loss=value["loss"],
            stream=value["stream"],
        )

    def sizes_at(self, rows: int, tokens: int) -> list[int]:
        """Bytes of each allocation with a micro batch of these rows: lines through the points.

        A size is linear in the rows. Over lengths its constant part is linear, its part by rows has no constant and may
        be quadratic (attention's scores). Raises ValueError where the points don't say it.
        """
        if (rows, tokens) in self.points:
            return list(self.sizes[self.points.index((rows, tokens))])
        alone = sorted((length, sizes) for (count, length), sizes in self._recorded() if count == rows)
        if len(alone) > 2:
            return [_parabola([length for length, _ in alone], three, tokens) for three in _columns(alone)]
        by_length: dict[int, list[tuple[int, Sequence[int]]]] = {}
        for (count, length), sizes in self._recorded():
            by_length.setdefault(length, []).append((count, sizes))
        lines = {length: _lines(pairs) for length, pairs in by_length.items() if len(pairs) > 1}
        if tokens in lines:
            return [round(constant + slope * rows) for constant, slope in lines[tokens]]
        if len(lines) < 2:
            raise ValueError(f"{rows} x {tokens} tokens were not recorded")
        (first, near), (second, far) = sorted(lines.items())[-2:]
        sizes = []
        for (constant, slope), (other_constant, other_slope) in zip(near, far, strict=True):
            rate = (other_constant - constant) / (second - first)
            square = (other_slope / second - slope / first) / (second - first)
            a_token = slope / first - square * first
            by_rows = a_token * tokens + square * tokens * tokens
            sizes.append(max(0, round(constant + rate * (tokens - first) + by_rows * rows)))
        return sizes

    def _recorded(self) -> Iterator[tuple[tuple[int, int], Sequence[int]]]:
        return zip(self.points, self.sizes, strict=True)

    def unrolled(self) -> list[Event]:
        """The events of a step of the whole model. Raises UnrollError."""
        return list(_Unrolling(self).events())


def _lines(pairs: Sequence[tuple[int, Sequence[int]]]) -> list[tuple[float, float]]:
    """(Constant, slope by rows) of each size, from the first two counts of rows."""
    (rows, sizes), (more, larger) = pairs[:2]
    slopes = [(large - small) / (more - rows) for small, large in zip(sizes, larger, strict=True)]
    return [(small - slope * rows, slope) for small, slope in zip(sizes, slopes, strict=True)]


def _columns(alone: Sequence[tuple[int, Sequence[int]]]) -> Iterator[tuple[int, ...]]:
    """The sizes of each allocation at the recorded lengths."""
    return zip(*(sizes for _, sizes in alone), strict=True)


def _parabola(lengths: Sequence[int], sizes: Sequence[int], tokens: int) -> int:
    """A size at a length, by the parabola through its first three."""
    (first, second, third), (low, middle, high) = lengths[:3], sizes[:3]
    slope = (middle - low) / (second - first)
    bend = ((high - middle) / (third - second) - slope) / (third - first)
    return max(0, round(low + slope * (tokens - first) + bend * (tokens - first) * (tokens - second)))


class _Unrolling:
    """The segments of a recording, put together again for every layer."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.count, self.whole = len(recording.chosen), len(recording.kinds)
        self.spans = dict(_spans(recording, self.count))
        self.owner: dict[int, tuple[Segment, int]] = {}
        """Allocation -> its segment, and its number there."""
        self.members: dict[Segment, list[int]] = {}
        for segment, (start, end) in self.spans.items():
            members = [event for event in recording.events[start:end] if event >= 0]
            self.members[segment] = members
            self.owner |= {event: (segment, number) for number, event in enumerate(members)}
        self.templates = self._templates()

    def _templates(self) -> list[int]:
        """The recorded layer that stands for each layer of the whole model."""
        kinds = self.recording.kinds
        if self.count == self.whole:
            return list(range(self.whole))
        recorded = [kinds[number] for number in self.recording.chosen]
        places: dict[tuple[int, int, int], int] = {}
        for place, triple in enumerate(_triples(recorded)):
            places.setdefault(triple, place)
        try:
            return [places[triple] for triple in _triples(kinds)]
        except KeyError as error:
            raise UnrollError(f"no recorded layer has the neighbours {error}") from None

    def events(self) -> Iterator[Event]:
        """The step's events. Raises UnrollError where something is freed twice, or before it is allocated."""
        numbers: dict[tuple[Segment, int], int] = {}
        ready = self._gradients()
        events: list[Event] = []
        freed: dict[int, int] = {}
        for segment in self._order():
            template = self._template(segment)
            start, end = self.spans[template]
            events.append(Event("enter", segment))
            count = 0
            for place in range(start, end + 1):
                for weight, layer, source in ready.get((template, place), ()):
                    block = numbers[self._moved(self.owner[source], template, segment)]
                    owner = Segment(segment.kind, segment.layer if layer >= 0 else -1)
                    events.append(Event("gradient", owner, block, source, weight))
                if place == end:
                    break
                event = self.recording.events[place]
                if event >= 0:
                    block = numbers[segment, count] = len(numbers)
                    events.append(Event("allocate", segment, block, event))
                    count += 1
                    continue
                for key in self._freed(~event, template, segment):
                    if key not in numbers:
                        raise UnrollError(f"{segment} frees what {key[0]} has not allocated")
                    block = numbers[key]
                    if block in freed:
                        # What all layers share goes with the last of them.
                        if key[0].layer >= 0:
                            raise UnrollError(f"{segment} frees a block of {key[0]} again")
                        events[freed[block]] = Event("passed", segment)
                    freed[block] = len(events)
                    events.append(Event("free", segment, block, ~event))
        self._check(numbers, freed)
        return (event for event in events if event.kind != "passed")

    def _freed(self, source: int, template: Segment, place: Segment) -> list[tuple[Segment, int]]:
        """The blocks that a free of a recorded allocation stands for, where a template's segment frees it.

        Behind the layers it may be one of each layer (16-bit copies of weights, which autocast keeps until forward is
        over): of all for which the recorded one stands, but for those that a layer frees.
        """
        segment, number = owner = self.owner[source]
        if segment.layer < 0 or template.layer >= 0:
            return [self._moved(owner, template, place)]
        instances = [
            (Segment(segment.kind, layer), number)
            for layer, recorded in enumerate(self.templates)
            if recorded == segment.layer
        ]
        return [key for key in instances if key not in self.by_layers]

    @cached_property
    def by_layers(self) -> set[tuple[Segment, int]]:
        """The blocks that segments of layers free."""
        keys = set()
        for segment in self._order():
            if segment.layer >= 0:
                template = self._template(segment)
                start, end = self.spans[template]
                for event in self.recording.events[start:end]:
                    if event < 0 and self.owner[~event][0].layer >= 0:
                        keys.add(self._moved(self.owner[~event], template, segment))
        return keys

    def _check(self, numbers: Mapping[tuple[Segment, int], int], freed: Mapping[int, int]) -> None:
        """Raises UnrollError where a block that the recording frees is never freed."""
        gone = {~event for event in self.recording.events if event < 0}
        for (segment, number), block in numbers.items():
            source = self.members[self._template(segment)][number]
            if (source in gone) != (block in freed):
                raise UnrollError(f"a block of {segment} is {'never' if source in gone else 'wrongly'} freed")

    def _order(self) -> Iterator[Segment]:
        yield Segment(BEFORE, ENDS)
        yield from (Segment(FORWARD, layer) for layer in range(self.whole))
        yield Segment(TURN, ENDS)
        yield from (Segment(BACKWARD, layer) for layer in reversed(range(self.whole)))
        yield Segment(REST, ENDS)

    def _template(self, segment: Segment) -> Segment:
        return segment if segment.layer < 0 else Segment(segment.kind, self.templates[segment.layer])

    def _moved(self, owner: tuple[Segment, int], template: Segment, place: Segment) -> tuple[Segment, int]:
        """An allocation of a recorded segment, seen from `template`, as it is seen from `place`."""
        segment, number = owner
        if segment.layer < 0:
            return owner
        # Behind the layers only the gradients of weights outside of them get ready: those of the last ones' own.
        layer = place.layer + segment.layer - template.layer if template.layer >= 0 else segment.layer
        return Segment(segment.kind, layer), number

    def _gradients(self) -> dict[tuple[Segment, int], list[tuple[int, int, int]]]:
        """(Segment, position) -> weights (number in its layer, layer, allocation) whose gradients are ready there."""
        ready: dict[tuple[Segment, int], list[tuple[int, int, int]]] = {}
        for position, word, *more in self.recording.marks:
            if word == "gradient" and more[2] is not None:
                # A mark at a border belongs to the segment that it ends.
                segment = next(
                    name
                    for name, (start, end) in self.spans.items()
                    if name.kind in (TURN, BACKWARD, REST) and start < position <= end
                )
                ready.setdefault((segment, position), []).append((more[0], more[1], more[2]))
        return ready


def _triples(kinds: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    padded = [ENDS, *kinds, ENDS]
    return zip(padded, padded[1:], padded[2:], strict=False)


def _spans(recording: Recording, count: int) -> Iterator[tuple[Segment, tuple[int, int]]]:
    """Each segment, with its first event and the one behind its last. Raises UnrollError where a mark is missing."""
    first: dict[tuple[str, int], int] = {}
    for position, word, number, *_ in recording.marks:
        if word != "gradient":
            first.setdefault((word, number), position)
    try:
        forward = [first["forward", layer] for layer in range(count)]
        turn, backward = first["after", count - 1], [first["backward", layer] for layer in range(count)]
    except KeyError as error:
        raise UnrollError(f"the recording lacks the mark {error}") from None
    end = len(recording.events)
    last = first.get(("backward", -1), end)
    borders = [*reversed(backward), last]
    if sorted([*forward, turn, *borders]) != [*forward, turn, *borders]:
        raise UnrollError("the layers don't run one after the other")
    yield Segment(BEFORE, ENDS), (0, forward[0])
    for layer, (start, stop) in enumerate(zip(forward, [*forward[1:], turn], strict=True)):
        yield Segment(FORWARD, layer), (start, stop)
    yield Segment(TURN, ENDS), (turn, borders[0])
    for number, (start, stop) in enumerate(pairwise(borders)):
        yield Segment(BACKWARD, count - 1 - number), (start, stop)
    yield Segment(REST, ENDS), (last, end)
