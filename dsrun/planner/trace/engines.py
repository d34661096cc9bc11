"""What each engine adds to a traced step: the start, weights that are gathered, gradients, the optimizer's step.

The sizes are those of the planner's formulas (dsrun.planner.gpu_memory); the order is that of the engines' code.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from dsrun.planner.gpu_memory import persistent, temporary
from dsrun.planner.setup import QUANTIZED, Setup
from dsrun.planner.trace.actions import Action, allocate, free, passing
from dsrun.planner.trace.recording import BACKWARD, BEFORE, FORWARD, TURN, Recording, Segment

OWNERS = {"weights": "weights", "adapters": "weights", "secondary": "weights", "master": "optimizer",
          "moments": "optimizer", "gradient_shard": "gradients", "fp32_gradients": "gradients"}  # fmt: skip
"""A standing term -> whose memory it is; the others are buckets."""


GATHERING, REDUCING = "gathering", "reducing"
"""Streams of their own, beside that of the computation."""


class Whole:
    """An engine that keeps every weight and gradient whole on each rank: one process, DDP, ZeRO-0."""

    def __init__(self, setup: Setup, recording: Recording) -> None:
        self.setup, self.recording = setup, recording
        self.held, self.terms = persistent(setup), temporary(setup)
        self.gradients: dict[Hashable, float] = {}
        """Block -> bytes, of the gradients that outlive a micro step."""
        self.summed: set[Hashable] = set()
        """Weights that have a gradient among them."""
        self.micro_step = 0

    def start(self) -> Iterator[Action]:
        """Everything that is there before the first step."""
        yield from self._weights()
        for name, size in self.held.items():
            if name not in ("weights", "adapters", "moments"):
                yield from allocate(name, size, OWNERS.get(name, "buckets"))

    def begin_step(self) -> Iterator[Action]:
        """zero_grad: the gradients of the step before go."""
        for key in self.gradients:
            yield from free(key)
        self.gradients.clear()
        self.summed.clear()

    def enter(self, segment: Segment) -> Iterator[Action]:  # noqa: ARG002 - for others
        """What is made where a segment begins."""
        yield from ()

    def leave(self, segment: Segment) -> Iterator[Action]:  # noqa: ARG002 - for others
        """What goes where a segment ends."""
        yield from ()

    def ready(self, block: Hashable, weight: Hashable, size: float) -> Iterator[Action]:
        """The gradient of a weight is there, in a block: it stays, or is added to the one that is there already."""
        if weight in self.summed:
            yield from free(block)
            return
        self.gradients[block] = size
        self.summed.add(weight)

    def end(self) -> Iterator[Action]:
        """The end of a micro step's backward pass."""
        yield from ()

    def step(self, *, first: bool) -> Iterator[Action]:
        """The optimizer's step: at first it makes its states; torch's foreach has a temporary for each weight."""
        if self.setup.offloads_optimizer:
            return
        if first:
            yield from self._states()
        more = self.terms["step"] - sum(self.gradients.values())
        yield from self._for_each_weight("step", more)

    # Parts

    def _weights(self) -> Iterator[Action]:
        """Each weight by itself, as it is loaded."""
        for number, weight in enumerate(self.recording.weights):
            each: float = weight.element_bytes
            if weight.quantized and self.setup.quantized:
                each = QUANTIZED[self.setup.quantized]
            yield from allocate(("weight", number), each * weight.elements, "weights")

    def _states(self) -> Iterator[Action]:
        """The optimizer's two states of each weight."""
        size = self.held.get("moments", 0.0)
        for moment in range(2):
            for number, share in enumerate(self._shares()):
                yield from allocate(("moment", moment, number), size * share / 2, "optimizer")

    def _for_each_weight(self, name: str, size: float) -> Iterator[Action]:
        """A temporary with a tensor for each trained weight."""
        for number, share in enumerate(self._shares()):
            yield from allocate((name, number), size * share, "step")
        for number in range(len(self._shares())):
            yield from free((name, number))

    def _shares(self) -> list[float]:
        """The share of each trained weight."""
        trained = [weight.elements for weight in self.recording.weights if weight.trained]
        return [elements / sum(trained) for elements in trained]


class Flat(Whole):
    """ZeRO-1 and 2: weights and each rank's share of the states lie flat; gradients go through buckets."""

    bucket = 0.0
    """Bytes of gradients that wait to be reduced."""

    def start(self) -> Iterator[Action]:
        """Trained weights are laid out flat, on the GPU or by way of the host, and a rank's share becomes fp32."""
        setup = self.setup
        yield from self._weights()
        yield Action("phase", "flat")
        flat = float(setup.weight_bytes * setup.trained)
        if setup.flattens_on_gpu:
            yield from allocate("flat", flat, "weights")
        for number, weight in enumerate(self.recording.weights):
            if weight.trained:
                yield from free(("weight", number))
        if not setup.flattens_on_gpu:
            yield from allocate("flat", flat, "weights")
        yield Action("phase", "start")
        yield from allocate("clone", setup.weight_bytes * setup.share, "start")
        yield from allocate("master", self.held.get("master", 0.0), "optimizer")
        yield from free("clone")
        if not setup.offloads_optimizer:
            yield from passing("zeros", 4 * setup.share, "start")
        for name, size in self.held.items():
            if name not in ("weights", "adapters", "master", "moments"):
                yield from allocate(name, size, OWNERS.get(name, "buckets"))

    def enter(self, segment: Segment) -> Iterator[Action]:
        """The buckets are made before the backward pass, of which the loss is the first part."""
        if segment.kind == TURN:
            yield from allocate("buckets", self.terms.get("buckets", 0.0), "buckets")

    def ready(self, block: Hashable, weight: Hashable, size: float) -> Iterator[Action]:
        """At stage 1 a gradient stays until the step, at stage 2 it goes into the bucket."""
        self.bucket += size
        if self.setup.stage == 1:
            yield from super().ready(block, weight, size)
        else:
            yield from free(block)
        if self.bucket >= self.setup.reduce_bucket * self.setup.weight_bytes:
            yield from self._reduce()

    def end(self) -> Iterator[Action]:
        """The last bucket is reduced."""
        yield from self._reduce()
        yield from free("buckets")

    def step(self, *, first: bool) -> Iterator[Action]:
        """The share of the gradients is laid out flat, then in fp32 beside that (stage_1_and_2.py)."""
        setup = self.setup
        if setup.offloads_optimizer:
            return
        if first:
            half = self.held.get("moments", 0.0) / 2
            yield from allocate("moment-0", half, "optimizer")
            yield from allocate("moment-1", half, "optimizer")
        flat = setup.weight_bytes * setup.share
        live = sum(self.gradients.values())
        yield from allocate("flat-gradients", flat, "step")
        yield from allocate("fp32-gradients", self.terms["step"] - live - flat, "step")
        yield from free("flat-gradients")
        yield from free("fp32-gradients")

    def _reduce(self) -> Iterator[Action]:
        """Empty the bucket: it is laid out flat and reduced; at stage 2 this rank keeps its share."""
        size, self.bucket = self.bucket, 0.0
        # stage_1_and_2.py: average_tensor
        stream = REDUCING if self.setup.overlap_comm else ""
        yield from passing("reduce_copy", min(self.terms.get("reduce_copy", 0.0), size), "buckets", stream)
        if self.setup.stage == 2 and not self.setup.offloads_optimizer:
            key = ("share", self.micro_step, len(self.gradients))
            self.gradients[key] = size / self.setup.gpus
            yield from allocate(key, self.gradients[key], "gradients")


class Sharded(Whole):
    """What ZeRO-3 and FSDP share: shards instead of weights, and what a layer takes where it is gathered."""

    def __init__(self, setup: Setup, recording: Recording) -> None:
        super().__init__(setup, recording)
        self.layers = len(recording.kinds)
        self.weights: list[list[float]] = [[] for _ in range(self.layers)]
        """Bytes of each layer's weights, gathered: quantized ones as they are."""
        for weight in recording.weights:
            if weight.layer >= 0:
                each = (
                    QUANTIZED[setup.quantized]
                    if weight.quantized and setup.quantized
                    else setup.computed_bytes
                )
                self.weights[weight.layer].append(each * weight.elements)
        self.sizes = [sum(weights) for weights in self.weights]
        self.gathers = self.terms.get("gathered", 0.0) > 0

    def start(self) -> Iterator[Action]:
        """This rank's shards. Stage 3 makes the optimizer's states at once."""
        for name, size in self.held.items():
            if name != "moments" or self.setup.engine == "deepspeed":
                yield from allocate(name, size, OWNERS.get(name, "buckets"))


class Stage3(Sharded):
    """ZeRO-3: layers are gathered one ahead, and stay between forward and backward where they are used again soon."""

    ends = 0.0
    """Bytes of the output weights, which are gathered beside layers."""
    bucket = 0.0

    def __init__(self, setup: Setup, recording: Recording) -> None:
        super().__init__(setup, recording)
        self.gathered: set[int] = set()
        self.stream = GATHERING if setup.overlap_comm else ""
        """The stream that weights are gathered on (parameter_offload.py: __allgather_stream)."""
        self.viewed = self.terms.get("viewed", 0.0) / self.layers
        """Bytes of a layer that autograd keeps gathered until its backward pass, a mean over the layers."""

    def enter(self, segment: Segment) -> Iterator[Action]:
        """A layer's weights and the next one's are gathered."""
        if not self.gathers:
            return
        if segment.kind == BEFORE:
            self.ends = float(self.setup.computed_bytes * self.setup.shape.embedding)
            yield from allocate("ends", self.ends, "gathered", self.stream)
        elif segment.kind in (FORWARD, BACKWARD):
            ahead = 1 if segment.kind == FORWARD else -1
            for layer in (segment.layer, segment.layer + ahead):
                if 0 <= layer < self.layers:
                    yield from self._gather(layer)

    def leave(self, segment: Segment) -> Iterator[Action]:
        """A layer's weights go, but for those that backward uses again soon."""
        stays = self.ends + sum(self.sizes[segment.layer :]) <= self.terms.get("gathered", 0.0)
        if segment.kind == BACKWARD or (segment.kind == FORWARD and not stays):
            yield from self._release(segment.layer)
        if segment.kind == FORWARD and not stays:
            yield from allocate(("viewed", segment.layer), self.viewed, "gathered", self.stream)
        elif segment.kind == BACKWARD:
            yield from free(("viewed", segment.layer))

    def ready(self, block: Hashable, weight: Hashable, size: float) -> Iterator[Action]:  # noqa: ARG002 - the base's
        """A gradient is copied into the standing bucket."""
        yield from free(block)
        self.bucket += size
        if self.bucket >= self.setup.reduce_bucket * self.setup.weight_bytes:
            yield from self._reduce()

    def end(self) -> Iterator[Action]:
        """What is left is reduced, and nothing stays gathered."""
        yield from self._reduce()
        for layer in sorted(self.gathered):
            yield from self._release(layer)
        yield from free("ends")

    def step(self, *, first: bool) -> Iterator[Action]:  # noqa: ARG002 - the states are there
        """The temporaries of a group of weights."""
        yield from passing("step", self.terms["step"], "step")

    def _reduce(self) -> Iterator[Action]:
        size, self.bucket = self.bucket, 0.0
        stream = REDUCING if self.setup.overlap_comm else ""
        yield from passing("reduce_copy", min(self.terms.get("reduce_copy", 0.0), size), "buckets", stream)

    def _gather(self, layer: int) -> Iterator[Action]:
        """Each weight by itself, as modules are fetched (partitioned_param_coordinator.py: fetch_sub_module)."""
        if layer not in self.gathered:
            self.gathered.add(layer)
            for number, size in enumerate(self.weights[layer]):
                yield from allocate(("gathered", layer, number), size, "gathered", self.stream)

    def _release(self, layer: int) -> Iterator[Action]:
        if layer in self.gathered:
            self.gathered.remove(layer)
            for number in range(len(self.weights[layer])):
                yield from free(("gathered", layer, number))


class FsdpParts(Sharded):
    """FSDP: the embedding, each layer and the output layer are parts, gathered one ahead into a flat tensor.

    The weights are copied out of that. Parts are numbered: the embedding is -1. A tied embedding stays with the model.
    """

    def __init__(self, setup: Setup, recording: Recording) -> None:
        super().__init__(setup, recording)
        self.parts = dict(enumerate(self.sizes))
        self.root = 0.0
        embedding = float(setup.computed_bytes * setup.shape.embedding)
        if setup.shape.tied:
            self.root = embedding
        else:
            self.parts |= {-1: embedding, self.layers: embedding}
        self.flat: set[int] = set()
        self.part: int | None = None
        """The part at work."""
        self.waiting: list[tuple[Hashable, Hashable, float]] = []
        """Gradients of the part at work: blocks, weights and bytes."""

    def enter(self, segment: Segment) -> Iterator[Action]:
        """The part at work is copied out of its flat tensor, and the next one is gathered."""
        if segment.kind == BEFORE:
            yield from allocate("root", self.root if self.gathers else 0.0, "gathered")
        number = {BEFORE: -1, TURN: self.layers}.get(segment.kind, segment.layer)
        if not self.gathers or number not in self.parts:
            return
        if number not in self.flat:
            yield from self._gather(number)
        yield from allocate(("weights", number), self.parts[number], "gathered")
        self.flat.discard(number)
        yield from free(("flat", number))
        self.part = number
        ahead = number + (1 if segment.kind in (BEFORE, FORWARD) else -1)
        if ahead in self.parts:
            yield from self._gather(ahead)

    def leave(self, segment: Segment) -> Iterator[Action]:
        """The part's weights go; in backward its gradients are reduced then."""
        if self.part is not None:
            yield from free(("weights", self.part))
            self.part = None
        if segment.kind in (TURN, BACKWARD):
            yield from self._reduce()

    def ready(self, block: Hashable, weight: Hashable, size: float) -> Iterator[Action]:
        """A gradient waits for the others of its part; where they are reduced once a step, it stays whole."""
        if self.setup.whole_gradients:
            yield from super().ready(block, weight, size)
        else:
            self.waiting.append((block, weight, size))

    def end(self) -> Iterator[Action]:
        """The last part is reduced, and nothing stays gathered."""
        yield from self._reduce()
        for number in sorted(self.flat):
            yield from free(("flat", number))
        self.flat.clear()
        yield from free("root")

    def _gather(self, number: int) -> Iterator[Action]:
        self.flat.add(number)
        # torch's _fsdp_collectives.py: foreach_all_gather
        yield from allocate(("flat", number), self.parts[number], "gathered", GATHERING)

    def _reduce(self) -> Iterator[Action]:
        """The gradients that are there go through a flat fp32 copy, and become this rank's share."""
        waiting, self.waiting = self.waiting, []
        if not waiting:
            return
        setup, weight = self.setup, waiting[0][1]
        size = sum(size for _, _, size in waiting)
        yield from allocate("flat-gradients", size * 4 / setup.computed_bytes, "buckets")
        for block, _, _ in waiting:
            yield from free(block)
        key = ("share", self.micro_step, weight)
        share = size / setup.shards * setup.weight_bytes / setup.computed_bytes
        yield from allocate(key, share, "gradients", REDUCING)  # foreach_reduce
        yield from free("flat-gradients")
        if setup.offloads:
            yield from free(key)
        else:
            yield from Whole.ready(self, key, ("share", weight), share)


def engine_of(setup: Setup, recording: Recording) -> Whole:
    """The engine of a setup."""
    if setup.sharded:
        return FsdpParts(setup, recording) if setup.engine == "fsdp" else Stage3(setup, recording)
    return Flat(setup, recording) if setup.engine == "deepspeed" and setup.stage else Whole(setup, recording)
