"""Ways to divide a job over many GPUs: data, tensor, sequence, pipeline and expert parallelism beside ZeRO.

A layout is dp x tp x sp x pp with a ZeRO stage, over all ranks. The ranks of a tensor- or sequence-parallel group are
neighbours, data-parallel ones come next, and pipeline stages are furthest apart, as DeepSpeed numbers them.

1. A rank's part of the model is a smaller model: 1/pp of the blocks, 1/tp of their matrices, 1/sp of the tokens; the
   embedding and the output layer are whole, as dsrun divides models (dsrun/models/tensor_parallel.py). Its memory is
   that of a Setup with these numbers, whose ZeRO shards are the dp x sp ranks with the same part.
2. In a pipeline the first stage holds as many micro batches' activations as there are stages (1F1B: Narayanan et al.,
   arXiv 2104.04473), the last has the logits; the fuller of the two decides.
3. Ranks that divide a layer's experts (ep) are data parallel: a rank has 1/ep of the experts, which the dp/ep ranks
   with the same ones share under ZeRO, and sends each token to k experts and back in every layer.
4. A micro step takes its computing, what tensor, sequence and expert parallelism exchange in every layer, which nothing
   hides, and ZeRO's traffic, some of which computing hides. A pipeline waits (pp - 1) micro steps more (its bubble).

Bytes: b micro batch, s length, h hidden size, w bytes of a number, L blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dsrun.planner import speed as speeds
from dsrun.planner.gpu_memory import gpu_memory, untracked_gib
from dsrun.planner.plan import FITS, OUT, TIGHT, TIGHT_FROM, MemoryBudget, Plan, chance, demand, judge
from dsrun.planner.setup import Setup
from dsrun.planner.shape import Shape
from dsrun.words import GIB

EXCHANGES = 2
"""All-reduces of tensor parallelism in a block's forward, and as many in its backward: behind attention's last
matrix and the feed-forward block's (Shoeybi et al., arXiv 1909.08053)."""
RECOMPUTED = (0, 2, 1)
"""Setup.checkpointing's values that are tried: none, every second layer, all."""
ALIKE = 1.1
"""Factor in seconds below which layouts count as equally fast: the model has no latency of collectives."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A use of the ranks, whose number is dp x tp x sp x pp."""

    dp: int
    tp: int = 1
    sp: int = 1
    pp: int = 1
    stage: int = 0
    """ZeRO's stage, over dp x sp ranks."""
    ep: int = 1
    """Ranks, of the data-parallel ones, that divide every layer's experts."""

    @property
    def shards(self) -> int:
        """Ranks with the same part of the model, which ZeRO shares its states among."""
        return self.dp * self.sp

    @property
    def ways(self) -> int:
        """Ways in which it divides beside data parallelism."""
        return sum(size > 1 for size in (self.tp, self.sp, self.pp, self.ep))

    @property
    def divided(self) -> int:
        """Ranks that a part of the model, or of its experts, is one of."""
        return self.tp * self.sp * self.pp * self.ep

    @property
    def text(self) -> str:
        """The layout in a table: "tp 8 x dp 2, ZeRO-1"."""
        sizes = {"tp": self.tp, "sp": self.sp, "pp": self.pp, "dp": self.dp}
        parts = [f"{name} {size}" for name, size in sizes.items() if size > 1] or ["1 GPU"]
        experts = f", ep {self.ep}" if self.ep > 1 else ""
        return " x ".join(parts) + experts + (f", ZeRO-{self.stage}" if self.stage else "")


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """A layout, judged."""

    layout: Layout
    micro_batch: int
    grad_accum: int
    """Micro steps; in a pipeline the micro batches that are on their way through it."""
    checkpointing: int
    """Activation checkpointing, as in Setup."""
    gpu_bytes: float
    """Memory that the fullest GPU can't do without."""
    used: float
    """Share of a GPU's memory that this is."""
    seconds: float
    """Seconds of an optimizer step."""
    terms: dict[str, float]
    """Name -> seconds that it adds."""
    link_bytes: float
    """Bytes that a GPU sends over the links in its node in a step."""
    network_bytes: float
    """Bytes that a node sends to others in a step."""

    @property
    def verdict(self) -> str:
        """FITS, TIGHT or OUT."""
        return OUT if self.used > 1 else TIGHT if self.used > TIGHT_FROM else FITS


def layouts(shape: Shape, gpus: int, nodes: int, stages: Sequence[int] = (0, 1, 2, 3)) -> Iterator[Layout]:
    """Every layout that makes sense for a network on `nodes` hosts with this many GPUs each.

    Tensor parallelism stays in a host and divides the key/value heads; sequence parallelism divides the heads, and is
    combined with neither; a pipeline has at least a block a stage, and ZeRO-1: no more (pipe/engine.py),
    and without ZeRO DeepSpeed clips by one stage's norm. Experts are divided under ZeRO, beside nothing else.
    """
    world = gpus * nodes
    divided = [(tp, 1, pp) for tp in _divisors(gpus) for pp in _divisors(world // tp)]
    divided += [(1, sp, 1) for sp in _divisors(world)[1:]]
    for tp, sp, pp in divided:
        if shape.kv_heads % tp or shape.heads % sp or pp > shape.layers:
            continue
        dp = world // (tp * sp * pp)
        for stage in stages:
            if stage == 1 if pp > 1 else not (stage and dp * sp == 1):
                yield Layout(dp, tp, sp, pp, stage)
    for ep in _divisors(math.gcd(world, shape.experts.count))[1:] if shape.experts else ():
        yield from (Layout(world, stage=stage, ep=ep) for stage in stages if stage)


def judge_layouts(
    base: Setup,
    room: MemoryBudget,
    candidates: Iterable[Layout],
    *,
    examples: int,
    recomputed: Sequence[int] = RECOMPUTED,
    by_stage: Mapping[int, Mapping[str, Any]] | None = None,
) -> list[LayoutPlan]:
    """Each layout's best split of a step of `examples`: those that fit, the fastest first; then the others.

    Layouts that can't share the examples equally are left out. recomputed: Setup.checkpointing's values to try.
    by_stage: ZeRO's stage -> fields of a Setup that a preset of the stage has, as its buckets.
    """
    plans = []
    for layout in candidates:
        if examples % layout.dp:
            continue
        share, preset_fields = examples // layout.dp, (by_stage or {}).get(layout.stage, {})
        tried = (
            base.changed(micro_batch=size, grad_accum=share // size, checkpointing=again, **preset_fields)
            for size in _sizes(share)
            for again in recomputed
        )
        plans.append(_fastest(tried, room, layout))
    return _simplest_first(sorted(plans, key=_order))


def _fastest(setups: Iterable[Setup], room: MemoryBudget, layout: Layout) -> LayoutPlan:
    """The best of them by `_order`. Setups slower than one that fits are not judged, as in plan.fastest."""
    first, *others = sorted(
        (_timed(setup, room, layout) for setup in setups), key=lambda timed: timed.seconds
    )
    best = _judged(first, room, layout)
    for timed in others:
        if best.verdict == FITS and timed.seconds > best.seconds:
            break
        best = min(best, _judged(timed, room, layout), key=_order)
    return best


def _simplest_first(plans: list[LayoutPlan]) -> list[LayoutPlan]:
    """The plans with another one in front: of those about as fast as the fastest, the one that divides least."""
    running = [plan for plan in plans if plan.verdict != OUT]
    if not running:
        return plans
    close = [plan for plan in running if _order(plan)[1] <= ALIKE * _order(running[0])[1]]
    first = min(close, key=lambda plan: plan.layout.divided)
    return [first, *(plan for plan in plans if plan is not first)]


def _order(plan: LayoutPlan) -> tuple[bool, float, int]:
    """The key of a plan's rank: the fastest first, tight ones by their chance, and the one that divides less of
    equals."""
    out, divided = plan.verdict == OUT, plan.layout.divided
    if out:
        return out, plan.used, divided
    return out, plan.seconds / (chance(plan.used) if plan.verdict == TIGHT else 1), divided


def judge_layout(setup: Setup, room: MemoryBudget, layout: Layout) -> LayoutPlan:
    """One layout with one split of a step. setup: the whole job's; its micro batch is of a data-parallel group."""
    return _judged(_timed(setup, room, layout), room, layout)


def _judged(timed: _Timed, room: MemoryBudget, layout: Layout) -> LayoutPlan:
    setup = timed.setup
    needed = max(
        demand(part, gpu_memory(part, room=room.gpu_bytes), expandable=room.expandable)
        + (untracked_gib(room.ranks) - untracked_gib(part.gpus)) * GIB
        for part in timed.parts
    )
    return LayoutPlan(
        layout, setup.micro_batch, setup.grad_accum, setup.checkpointing, needed, needed / room.gpu_bytes,
        timed.seconds, timed.terms, timed.link_bytes, timed.network_bytes,
    )  # fmt: skip


def judge_divided(preset: str, setup: Setup, room: MemoryBudget, layout: Layout) -> Plan:
    """The plan of a job whose ranks share examples: memory of the fullest GPU, seconds of the layout.

    Its setup is that GPU's part, so that advice holds; host memory is that of all ranks, each with all of its part.
    """
    whole, divided = judge(preset, setup, room), judge_layout(setup, room, layout)
    counted_already = untracked_gib(room.ranks) * GIB
    plans = [
        judge(
            preset,
            part,
            replace(room, gpu_bytes=room.gpu_bytes - counted_already + untracked_gib(part.gpus) * GIB),
        )
        for part in parts(setup, layout)
    ]
    seconds = divided.seconds * room.calibration.seconds
    tokens = layout.dp * setup.grad_accum * setup.tokens
    pace = replace(
        whole.speed, seconds_per_step=seconds, tokens_per_second=tokens / seconds, terms=divided.terms,
        bytes_per_step=divided.network_bytes,
    )  # fmt: skip
    return replace(max(plans, key=lambda plan: plan.used), host=whole.host, speed=pace)


def parts(setup: Setup, layout: Layout) -> list[Setup]:
    """A rank's part of the job as a job of its own: of each stage that can be the fullest, the first and the last."""
    shape, pp = setup.shape, layout.pp
    blocks = -(-shape.layers // pp)
    inner = max(0, shape.parameters - shape.ends) * blocks / shape.layers

    def part(ends: int, held: int, logits: float) -> Setup:
        part_shape = replace(
            shape, parameters=round(inner / layout.tp + ends), layers=blocks * held,
            heads=max(1, shape.heads // layout.tp), kv_heads=max(1, shape.kv_heads // layout.tp),
            intermediate=-(-shape.intermediate // layout.tp),
        )  # fmt: skip
        return setup.changed(
            shape=part_shape, logits_bytes=logits, engine="deepspeed", stage=layout.stage, gpus=layout.shards, nodes=1,
            seq_len=-(-setup.seq_len // layout.sp), ep=layout.ep,
        )  # fmt: skip

    if pp == 1:
        return [part(shape.ends, 1, setup.logits_bytes)]
    # The first stage holds the activations of every micro batch that is under way, and no logits; the last one's
    # micro batch comes and goes, but ends in logits. Those between lie below the first.
    on_the_way = min(pp, setup.grad_accum)
    return [part(shape.embedding, on_the_way, 0.0), part(shape.embedding, 1, setup.logits_bytes)]


class _Timed(NamedTuple):
    """A split of a step whose memory was not judged yet. The last four are LayoutPlan's."""

    setup: Setup
    parts: list[Setup]
    """A rank's parts, from `parts`."""
    seconds: float
    terms: dict[str, float]
    link_bytes: float
    network_bytes: float


def _timed(setup: Setup, room: MemoryBudget, layout: Layout) -> _Timed:
    """A step's seconds, and the bytes that it sends."""
    hardware = room.hardware
    shape, pp, m = setup.shape, layout.pp, setup.grad_accum
    in_group = layout.tp * layout.sp * pp
    width = 4 if setup.precision == "fp32" else 2
    rate = speeds.peak_rate(setup, hardware) * hardware.efficiency
    work = setup.tokens * speeds.computed_a_token(setup) / (in_group * rate)
    blocks = -(-shape.layers // pp)
    launch = max(0.0, 1e-3 * blocks * speeds.LAUNCH_MS[layout.stage] - work)
    passes = 2 + setup.recomputed_share  # forward, backward, and forward again
    hidden = setup.tokens / layout.sp * shape.hidden * width
    tensor = passes * EXCHANGES * blocks * hidden * _ring(2, layout.tp)
    tokens = setup.tokens / layout.sp
    heads = (2 * shape.query_width + 2 * max(shape.kv_width, layout.sp * shape.head_dim)) / layout.tp
    sequence = passes * blocks * tokens * heads * width * _ring(1, layout.sp)
    onward = 2 * hidden if pp > 1 else 0.0
    divided = parts(setup, layout)
    zero = speeds.traffic(divided[0])
    # DeepSpeed numbers neighbours first: tensor, then sequence, then data-parallel ranks fill a node, and stages lie
    # furthest apart. So each kind of traffic has links of its own, and a group that is wider than a node the network's.
    per_node = room.gpus
    inside = layout.tp * layout.sp <= per_node
    # Each layer sends its tokens out and gets them back, all but those of its own experts.
    experts = divided[0].exchanged * 2 * passes * _mixed_layers(shape) * _ring(1, layout.ep)
    experts_inside = layout.ep <= per_node or room.nodes == 1
    zero_inside = layout.tp * layout.shards <= per_node or room.nodes == 1
    pipe_inside = room.nodes == 1
    network = hardware.network_gb_s / per_node * 1e9  # a GPU's share of its node's
    link = hardware.link_gb_s * 1e9
    sequence_rate = link if inside else min(link, network)
    # tp rings of ZeRO's cross the border of a node side by side.
    zero_rate = link if zero_inside else min(link, hardware.network_gb_s / layout.tp * 1e9)
    pipe_rate = link if pipe_inside else min(link, network)
    pace = _ring(1, layout.shards) / zero_rate
    # What tensor and sequence parallelism exchange stands between one matrix and the next: nothing can hide it, and it
    # counts as computing for ZeRO's traffic, which is hidden behind both.
    experts_rate = link if experts_inside else min(link, network)
    busy = work + launch + tensor / link + sequence / sequence_rate + experts / experts_rate
    each = speeds.waiting(busy, pace * zero.micro_step)
    last = speeds.waiting(busy, pace * (zero.micro_step + zero.last))
    terms = {
        "compute": m * work,
        "launch": m * launch,
        "tensor": m * tensor / link,
        "sequence": m * sequence / sequence_rate,
        "experts": m * experts / experts_rate,
        "pipeline": m * onward / pipe_rate,
        # The last stage waits for pp - 1 micro batches to come through, and the first for them to come back.
        "bubble": (pp - 1) * (busy + onward / pipe_rate),
        "communication": (m - 1) * each + last + speeds.EXPOSED * pace * zero.after,
    }
    adam: dict[str, float] = {}
    speeds.optimizer_terms(divided[0], hardware, adam)
    reduced = zero.step(m) * _ring(1, layout.shards)
    near = m * tensor + (m * sequence if inside else 0.0) + (m * onward if pipe_inside else 0.0)
    far = (0.0 if inside else m * sequence * per_node) + (0.0 if pipe_inside else m * onward * per_node)
    near += m * experts if experts_inside else 0.0
    near += reduced if zero_inside else 0.0
    far += 0.0 if experts_inside else m * experts * per_node
    far += 0.0 if zero_inside else reduced * layout.tp
    terms = {name: value for name, value in {**terms, **adam}.items() if value}
    return _Timed(setup, divided, math.fsum(terms.values()), terms, near, far)


def reasons(plan: LayoutPlan, room: MemoryBudget) -> list[str]:
    """The reasons for a layout, a sentence each."""
    layout = plan.layout
    sentences = []
    if layout.tp > 1:
        where = f"inside a node, over links of {room.hardware.link_gb_s:.3g} GB/s"
        sentences.append(f"tp {layout.tp}: each layer's matrices are divided {where}")
    if layout.sp > 1:
        sentences.append(
            f"sp {layout.sp}: a long sequence's activations are divided, heads are exchanged in each layer"
        )
    if layout.pp > 1:
        share = plan.terms.get("bubble", 0.0) / plan.seconds
        sentences.append(
            f"pp {layout.pp}: stages send little, and wait for {share:.0%} of a step (the bubble)"
        )
    if layout.ep > 1:
        sentences.append(
            f"ep {layout.ep}: a rank has 1 in {layout.ep} of every layer's experts, and tokens are sent to them"
        )
    if layout.stage:
        shared = {1: "the optimizer's states", 2: "states and gradients", 3: "states, gradients and weights"}
        sentences.append(f"ZeRO-{layout.stage}: {layout.shards} ranks share {shared[layout.stage]}")
    return sentences


def _mixed_layers(shape: Shape) -> int:
    """Layers with experts."""
    return shape.layers - shape.experts.dense if shape.experts else 0


def _ring(times: int, ranks: int) -> float:
    """The share of a tensor that passes through each rank of a ring: all-reduce 2 (N-1)/N, others half of it."""
    return times * (ranks - 1) / ranks


def _sizes(share: int) -> list[int]:
    """Micro batches to try: powers of two that divide a share, and all of it."""
    powers = [2**power for power in range(share.bit_length()) if share % 2**power == 0]
    return powers if share in powers else [*powers, share]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
