"""Plans as tables and sentences, and as values for --json."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from dsrun.cli.output.columns import echo_folded, folded, screen_width
from dsrun.options.table import FULL, NO_RECOMPUTING, OFFLOADED, SELECTIVE
from dsrun.planner import terms
from dsrun.planner.gpu_memory import untracked_gib
from dsrun.planner.plan import FITS, OUT, MemoryBudget, Plan, demand, largest_micro_batch
from dsrun.planner.setup import Setup
from dsrun.words import GIB, counted

if TYPE_CHECKING:
    from dsrun.jobs.assembly.plan_target import PlanTarget
    from dsrun.jobs.assembly.planning.remarks import Cost
    from dsrun.jobs.assembly.planning.subjects import PlanSubject
    from dsrun.planner.advice import Advice
    from dsrun.planner.analysis.knobs import Knob

COLOURS = {FITS: "green", "tight": "yellow", OUT: "red"}
LEFT = ("preset", "layout", "batch", "verdict", "decides", "card")
"""Columns that are aligned to the left."""
BRIEF = ("preset", "batch", "verdict", "chance", "GPU", "host", "s/step")
"""Columns without --wide."""


def gib(size: float) -> str:
    """Bytes as a table shows them."""
    value = size / GIB
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def batch_text(setup: Setup) -> str:
    """Method, precision, optimizer and batch, in one line."""
    method = {"full": "all weights", "lora": "LoRA", "qlora": "QLoRA"}[setup.method]
    examples = setup.micro_batch * setup.grad_accum * setup.gpus
    loss = "; fused loss" if setup.fused_loss else ""
    return (
        f"{method}, {setup.precision}, {setup.optimizer}; rows of {setup.seq_len} tokens, {examples} a step on "
        f"{counted(setup.gpus, 'rank')}{loss}; in GiB"
    )


def say(text: str, *, err: bool = False) -> None:
    """A line, which goes on in the next where the terminal is narrower."""
    echo_folded(text, 4, err=err)


def heading(subject: PlanSubject, target: PlanTarget) -> None:
    """The lines above a table: the model and the target."""
    size = f"{subject.shape.parameters / 1e9:.4g}e9 parameters"
    name = size if subject.name == size else f"{subject.name}: {size}"
    say(f"{name}, {subject.shape.layers} layers of {subject.shape.hidden}")
    say(f"on {target.text}")


def print_notes(notes: Iterable[str]) -> None:
    """Notes, to stderr."""
    for note in notes:
        say(f"note: {note}", err=True)


def table(plans: Sequence[Plan], room: MemoryBudget, *, wide: bool = False, runs: bool = True) -> None:
    """The ranked plans, to stdout; what decides the first, and how to start it, in lines of their own.

    runs: whether `dsrun finetune` trains like the first.
    """
    aligned(_columns(plans, room, wide=wide))
    if not wide:
        say(f"{plans[0].preset}: {plans[0].reason}")
    if runs and plans[0].verdict != OUT:
        setup = plans[0].setup
        micro = f"--micro-batch {setup.micro_batch}"
        with_finetune(f"--preset {plans[0].preset} {micro} {_recomputing(setup)}")


def with_finetune(options: str) -> None:
    """A line to copy: where the terminal is narrower, its ends are those of a shell's."""
    columns = screen_width()
    text = folded(f"With finetune: {options}", columns and columns - len(" \\"), 2)
    click.echo(text.replace("\n", " \\\n"))


def aligned(columns: Mapping[str, Sequence[str]]) -> None:
    """Columns by their headings, to stdout."""
    padded = []
    for name, cells in columns.items():
        width = max(map(len, (name, *cells)))
        aligned = str.ljust if name in LEFT else str.rjust
        texts = [aligned(text, width) for text in (name, "─" * width, *cells)]
        padded.append(texts[:2] + [_coloured(text) for text in texts[2:]])
    lines = ("  ".join(line).rstrip() for line in zip(*padded, strict=True))
    click.echo("\n" + "\n".join(lines) + "\n")


def usual(plans: Mapping[str, Plan]) -> None:
    """The best plan on each of a few usual machines, a line each."""
    if plans:
        click.echo("\nOn GPUs, host memory not counted (--gpu NAME --gpus N):")
    for place, plan in plans.items():
        setup = plan.setup
        split = f"{plan.preset}{_checkpointing(setup)}, {setup.micro_batch} x {setup.grad_accum}"
        speed = f", {seconds_text(plan.speed.seconds_per_step)} s/step" if plan.verdict != OUT else ""
        click.echo(f"  {place:<{max(map(len, plans))}}  {_coloured(plan.verdict)}: {split}{speed}")


def _recomputing(setup: Setup) -> str:
    """finetune's options for what a plan computes again."""
    way = (
        OFFLOADED
        if setup.activations_device == "cpu"
        else {0: NO_RECOMPUTING, 1: FULL}.get(setup.checkpointing, SELECTIVE)
    )
    often = f" --recompute-every {setup.checkpointing}" if way == SELECTIVE else ""
    return f"--activation-checkpointing {way}{often}"


def _checkpointing(setup: Setup) -> str:
    """The same behind a preset's name."""
    some = f"/{setup.checkpointing}" if setup.checkpointing > 1 else ""
    return f" +ckpt{some}" + "+cpu" * (setup.activations_device == "cpu") if setup.checkpointing else ""


def _coloured(text: str) -> str:
    """A verdict in its colour, on a terminal that has them."""
    colour = COLOURS.get(text.strip())
    return click.style(text, fg=colour) if colour and sys.stdout.isatty() else text


def _columns(plans: Sequence[Plan], room: MemoryBudget, *, wide: bool) -> dict[str, list[str]]:
    """Heading -> a cell for each plan.

    GPU: what it has to have, which is compared with the card; torch: the most that torch has in use; nvidia-smi: what
    it will show, where there is room for that. speed: relative to the first.
    """
    first = plans[0].seconds_per_token
    cells: dict[str, Callable[[Plan], str]] = {
        "preset": lambda plan: plan.preset + _checkpointing(plan.setup),
        "batch": lambda plan: f"{plan.setup.micro_batch} x {plan.setup.grad_accum}",
        "verdict": lambda plan: plan.verdict,
        "chance": lambda plan: f"{100 * plan.chance:.0f} %",
        "GPU": lambda plan: gib(demand(plan.setup, plan.gpu, expandable=room.expandable)),
        "torch": lambda plan: gib(plan.gpu.allocated),
        "nvidia-smi": lambda plan: gib(plan.gpu.smi),
        "host": lambda plan: gib(plan.host.peak),
        "checkpoint": lambda plan: gib(plan.checkpoint_bytes),
        "NVMe": lambda plan: gib(plan.nvme_bytes) if plan.nvme_bytes else "-",
        "speed": lambda plan: f"{first / plan.seconds_per_token:.2f}",
        "s/step": lambda plan: seconds_text(plan.speed.seconds_per_step),
        "most rows": lambda plan: str(largest_micro_batch(plan, room)),
        "decides": lambda plan: plan.reason,
    }
    if room.accelerator == "cpu":
        del cells["GPU"], cells["torch"], cells["nvidia-smi"]
    if not any(plan.nvme_bytes for plan in plans):
        del cells["NVMe"]
    return {name: list(map(cell, plans)) for name, cell in cells.items() if wide or name in BRIEF}


def cost(estimate: Cost) -> None:
    """Hours and money, in a line."""

    def money(value: float | None) -> str:
        return "" if value is None else f", at a price of {value:,.2f}"

    if estimate.epoch_hours is not None:
        say(
            f"An epoch: {estimate.epoch_examples:,} examples, {estimate.epoch_tokens:,.0f} tokens, "
            f"{estimate.epoch_steps:,} steps, {estimate.epoch_hours:.2g} hours{money(estimate.epoch_price)}"
        )
    elif estimate.price_per_million_tokens is not None:
        seconds = seconds_text(estimate.seconds_per_million_tokens)
        say(f"A million tokens: {seconds} s{money(estimate.price_per_million_tokens)}")


def seconds_text(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def components(plan: Plan, room: MemoryBudget) -> None:
    """Every term of a plan, with what it is, its formula and its source."""
    say(f"\n{plan.preset}: every term\n")
    if room.accelerator == "cuda":
        _gpu_terms(plan)
        peaks = ", ".join(
            f"{terms.MOMENTS[name]} {gib(size)}" for name, size in plan.gpu.peaks.items() if size
        )
        say(f"  peaks, GiB: {peaks}")
        say(
            f"  outside torch: {untracked_gib(plan.setup.gpus):.1f} GiB (CUDA's context, NCCL); "
            f"with the allocator's holes nvidia-smi shows about {gib(plan.gpu.smi)} GiB\n"
        )
    # On CPUs what a GPU would hold lies in the host's memory, under the GPU's names.
    known = terms.HOST if room.accelerator == "cuda" else {**terms.HOST, **terms.GPU}
    _terms(f"host, of {gib(plan.host.peak)} GiB a node at the peak", plan.host.terms, known, GIB)
    peaks = ", ".join(f"{name} {gib(size)}" for name, size in plan.host.peaks.items())
    say(f"  peaks, GiB: {peaks}\n")
    _terms(
        f"seconds, of {seconds_text(plan.speed.seconds_per_step)} a step", plan.speed.terms, terms.SPEED, 1
    )


def _gpu_terms(plan: Plan) -> None:
    """What is on the GPU at the peak: by the trace, and every term of the formulas."""
    moment = terms.MOMENTS[plan.gpu.moment]
    if (traced := plan.gpu.traced) is None:
        title = f"GPU: {gib(plan.gpu.allocated)} GiB at the peak ({moment}), of what is marked *"
        _terms(title, plan.gpu.terms, terms.GPU, GIB, plan.at_peak)
        return
    parts = ", ".join(
        f"{owner} {gib(size)}" for owner, size in sorted(plan.at_peak.items(), key=lambda part: -part[1])
    )
    say(f"GPU by the trace: {gib(plan.gpu.allocated)} GiB at the peak ({moment}): {parts}")
    say(
        f"  reserved {gib(plan.gpu.reserved)} GiB with room to spare; {gib(traced.capacity)} GiB are enough, holes "
        "included"
    )
    _terms(
        f"GPU by formula: {gib(traced.formula)} GiB at the peak, of these terms",
        plan.gpu.terms,
        terms.GPU,
        GIB,
    )


def _terms(
    title: str,
    values: Mapping[str, float],
    known: Mapping[str, terms.Term],
    unit: float,
    marked: Mapping[str, float] | None = None,
) -> None:
    """Lines of terms. marked: those that are there at the peak (*), which add up to it, with their part of it."""
    click.echo(title)
    width = max((len(name) for name in values), default=0)
    for name, value in values.items():
        if value:
            term = known.get(name)
            text = f"{term.what}: {term.formula} ({term.source})" if term else ""
            part = (marked or {}).get(name, 0.0)
            star = " " if not part else "*" if part == value else f"* {part / unit:.3f} of"
            say(f"{star:<10}{value / unit:9.3f}  {name:<{width}}  {text}".rstrip())


def knobs(found: Sequence[Knob]) -> None:
    """What makes a tight plan safe, a line each."""
    if not found:
        return
    say("The first is tight. By itself each of these gives back memory:")
    width = max(len(knob.text) for knob in found)
    for knob in found:
        say(
            f"  {knob.text:<{width}}  {gib(knob.saves_bytes):>5} GiB  {knob.seconds:+7.2g} s a step  "
            f"{knob.verdict}, {100 * knob.chance:.0f} %; {knob.costs}"
        )


TIMELINE_BAR = 30
"""Characters of the longest bar."""
SHOWN_PARTS = 3
"""Terms named beside a bar."""


def timeline(plan: Plan) -> None:
    """A step's memory over time, a bar a moment."""
    from dsrun.planner.analysis.timeline import timeline as instants_of

    instants = instants_of(plan)
    most, width = max(one.size for one in instants), max(len(one.when) for one in instants)
    say(f"\n{plan.preset}: GiB that torch has in use over a step")
    for one in instants:
        bar = "█" * max(1, round(TIMELINE_BAR * one.size / most))
        parts = ", ".join(f"{name} {gib(size)}" for name, size in list(one.parts.items())[:SHOWN_PARTS])
        say(f"  {one.when:<{width}}  {bar:<{TIMELINE_BAR}} {gib(one.size):>5}  {parts}".rstrip())


def timeline_value(plan: Plan) -> list[dict[str, Any]]:
    """A step's memory over time, for machines."""
    from dsrun.planner.analysis.timeline import timeline as instants_of

    return [{"when": one.when, "bytes": one.size, "terms": one.parts} for one in instants_of(plan)]


def advice(changes: Advice | None) -> None:
    """What to change where nothing fits."""
    if changes is None:
        say("\nNothing fits, and no list of up to four changes makes it fit.")
        return
    say("\nNothing fits. The shortest list of changes that does:")
    for number, step in enumerate(changes.steps, 1):
        of = {"GPU": "a GPU", "host": "of the host's memory"}.get(changes.scarce, f"of {changes.scarce}")
        saves = (
            f"saves {gib(step.saves_bytes)} GiB {of}" if step.saves_bytes > 0 else "saves nothing by itself"
        )
        say(f"  {number}. {step.text}: {saves}; the price: {step.costs}{_slower(step.slower)}")
    plan = changes.plan
    say(f"  Then: {plan.preset}, {plan.verdict}, {plan.reason}")


def _slower(factor: float) -> str:
    if factor > 1.05:
        return f" ({factor:.1f} times the time)"
    return f" ({1 / factor:.1f} times as fast)" if factor < 0.95 else ""


def as_value(plan: Plan, room: MemoryBudget) -> dict[str, Any]:
    """A plan for machines: bytes, seconds."""
    setup = dataclasses.asdict(plan.setup)
    setup.pop("shape")
    return {
        "preset": plan.preset,
        "verdict": plan.verdict,
        "chance": plan.chance,
        "used": plan.used,
        "reason": plan.reason,
        "largest_micro_batch": largest_micro_batch(plan, room),
        "gpu": {
            "by": "formula" if plan.gpu.traced is None else "trace",
            "formula_allocated_bytes": plan.gpu.traced.formula if plan.gpu.traced else plan.gpu.allocated,
            "needed_bytes": demand(plan.setup, plan.gpu, expandable=room.expandable),
            "allocated_bytes": plan.gpu.allocated,
            "reserved_bytes": plan.gpu.reserved,
            "nvidia_smi_bytes": plan.gpu.smi,
            "peak_at": plan.gpu.moment,
            "peaks": plan.gpu.peaks,
            "at_peak": plan.at_peak,
            "terms": plan.gpu.terms,
        },
        "host": {"peak_bytes": plan.host.peak, "peaks": plan.host.peaks, "terms": plan.host.terms},
        "nvme_bytes": plan.nvme_bytes,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "speed": {
            "seconds_per_step": plan.speed.seconds_per_step,
            "tokens_per_second": plan.speed.tokens_per_second,
            "terms": plan.speed.terms,
        },
        "setup": setup,
    }


def advice_value(changes: Advice | None) -> dict[str, Any] | None:
    """Advice for machines."""
    if changes is None:
        return None
    return {
        "steps": [dataclasses.asdict(step) for step in changes.steps],
        "preset": changes.plan.preset,
        "verdict": changes.plan.verdict,
        "nodes": changes.nodes,
    }
