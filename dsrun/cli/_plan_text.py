"""Plans as tables and sentences, and as values for --json."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from dsrun.planner import terms
from dsrun.planner.advice import Advice
from dsrun.planner.gpu_memory import untracked_gib
from dsrun.planner.plan import FITS, OUT, MemoryBudget, Plan, largest_micro_batch
from dsrun.planner.setup import Setup

if TYPE_CHECKING:
    from rich.table import Table

GIB = 2**30
COLOURS = {FITS: "green", "tight": "yellow", OUT: "red"}
WHOLE = 200
"""Width of a line that holds every column, at most."""
LEFT = ("preset", "verdict", "decides")
"""Columns that are aligned to the left."""
BRIEF = ("preset", "verdict", "GPU peak", "host/node", "s/step", "most rows")
"""Columns for a narrow terminal."""


def gib(size: float) -> str:
    """Bytes as a table shows them."""
    value = size / GIB
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def batch_text(setup: Setup) -> str:
    """Method, precision, optimizer and batch, in one line."""
    method = {"full": "all weights", "lora": "LoRA", "qlora": "QLoRA"}[setup.method]
    return (
        f"{method}, {setup.precision}, {setup.optimizer}; rows of {setup.seq_len} tokens, micro batch "
        f"{setup.micro_batch} x accumulation {setup.grad_accum} x {setup.gpus} rank{'s' if setup.gpus > 1 else ''}"
    )


def table(plans: Sequence[Plan], room: MemoryBudget) -> None:
    """The ranked plans, to stdout: in colours and cut to its width on a terminal, in whole lines elsewhere."""
    columns = _columns(plans, room)
    if sys.stdout.isatty():
        _on_terminal(plans, columns)
    else:
        _plainly(columns)


def _columns(plans: Sequence[Plan], room: MemoryBudget) -> dict[str, list[str]]:
    """Heading -> a cell for each plan."""
    first = plans[0].seconds_per_token
    cells: dict[str, Callable[[Plan], str]] = {
        "preset": lambda plan: plan.preset + (" +ckpt" if plan.setup.checkpointing else ""),
        "verdict": lambda plan: plan.verdict,
        "GPU peak": lambda plan: gib(plan.gpu.allocated),
        "nvidia-smi": lambda plan: gib(min(plan.gpu.smi, room.gpu_bytes)),
        "host/node": lambda plan: gib(plan.host.peak),
        "checkpoint": lambda plan: gib(plan.checkpoint_bytes),
        "NVMe/node": lambda plan: gib(plan.nvme_bytes) if plan.nvme_bytes else "-",
        "speed": lambda plan: f"{first / plan.seconds_per_token:.2f}",
        "s/step": lambda plan: _seconds(plan.speed.seconds_per_step),
        "most rows": lambda plan: str(largest_micro_batch(plan, room)),
        "decides": lambda plan: plan.reason,
    }
    if room.accelerator == "cpu":
        del cells["GPU peak"], cells["nvidia-smi"]
    if not any(plan.nvme_bytes for plan in plans):
        del cells["NVMe/node"]
    return {name: [cell(plan) for plan in plans] for name, cell in cells.items()}


def _plainly(columns: Mapping[str, Sequence[str]]) -> None:
    """Without rich, which takes longer to import than a plan to make."""
    padded = []
    for name, cells in columns.items():
        width = max(map(len, (name, *cells)))
        aligned = str.ljust if name in LEFT else str.rjust
        padded.append([aligned(text, width) for text in (name, "─" * width, *cells)])
    lines = ("  ".join(line).rstrip() for line in zip(*padded, strict=True))
    click.echo("\n" + "\n".join(lines) + "\n")


def _on_terminal(plans: Sequence[Plan], columns: Mapping[str, Sequence[str]]) -> None:
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(highlight=False)
    grid = _grid(columns)
    needed = Measurement.get(console, console.options.update(max_width=WHOLE), grid).minimum
    if needed <= console.width:
        console.print(grid)
        return
    # Too narrow for everything: the main columns, and the reasons below.
    console.print(_grid({name: columns[name] for name in BRIEF if name in columns}), soft_wrap=True)
    for plan in plans:
        console.print(f"  {plan.preset}: {plan.reason}", markup=False)


def _grid(columns: Mapping[str, Sequence[str]]) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    brief = "decides" not in columns
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0) if brief else (0, 1))
    for name in columns:
        if name == "decides":
            grid.add_column(name, overflow="fold", min_width=20)
        else:
            grid.add_column(name, justify="left" if name in LEFT else "right", no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        grid.add_row(*(f"[{COLOURS[cell]}]{cell}[/]" if cell in COLOURS else escape(cell) for cell in row))
    return grid


def _seconds(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def components(plan: Plan, room: MemoryBudget) -> None:
    """Every term of a plan, with what it is, its formula and its source."""
    click.echo(f"\n{plan.preset}: every term\n")
    if room.accelerator == "cuda":
        _terms(
            f"GPU, of {gib(plan.gpu.allocated)} GiB at the peak ({terms.MOMENTS[plan.gpu.moment]})",
            plan.gpu.terms,
            terms.GPU,
            GIB,
        )
        peaks = ", ".join(
            f"{terms.MOMENTS[name]} {gib(size)}" for name, size in plan.gpu.peaks.items() if size
        )
        click.echo(f"  peaks, GiB: {peaks}")
        click.echo(
            f"  outside torch: {untracked_gib(plan.setup.gpus):.1f} GiB (CUDA's context, NCCL); "
            f"with the allocator's holes nvidia-smi shows about {gib(plan.gpu.smi)} GiB\n"
        )
    # On CPUs what a GPU would hold lies in the host's memory, under the GPU's names.
    known = terms.HOST if room.accelerator == "cuda" else {**terms.HOST, **terms.GPU}
    _terms(f"host, of {gib(plan.host.peak)} GiB a node at the peak", plan.host.terms, known, GIB)
    peaks = ", ".join(f"{name} {gib(size)}" for name, size in plan.host.peaks.items())
    click.echo(f"  peaks, GiB: {peaks}\n")
    _terms(f"seconds, of {_seconds(plan.speed.seconds_per_step)} a step", plan.speed.terms, terms.SPEED, 1)


def _terms(title: str, values: Mapping[str, float], known: Mapping[str, terms.Term], unit: float) -> None:
    click.echo(title)
    width = max((len(name) for name in values), default=0)
    for name, value in values.items():
        if value:
            term = known.get(name)
            text = f"{term.what}: {term.formula} ({term.source})" if term else ""
            click.echo(f"  {value / unit:9.3f}  {name:<{width}}  {text}".rstrip())


def advice(found: Advice | None) -> None:
    """What to change where nothing fits."""
    if found is None:
        click.echo("\nNothing fits, and no list of up to four changes makes it fit.")
        return
    click.echo("\nNothing fits. The shortest list of changes that does:")
    for number, step in enumerate(found.steps, 1):
        of = {"GPU": "a GPU", "host": "of the host's memory"}.get(found.scarce, f"of {found.scarce}")
        saves = (
            f"saves {gib(step.saves_bytes)} GiB {of}" if step.saves_bytes > 0 else "saves nothing by itself"
        )
        click.echo(f"  {number}. {step.text}: {saves}; the price: {step.costs}{_slower(step.slower)}")
    plan = found.plan
    click.echo(f"  Then: {plan.preset}, {plan.verdict}, {plan.reason}")


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
        "used": plan.used,
        "reason": plan.reason,
        "largest_micro_batch": largest_micro_batch(plan, room),
        "gpu": {
            "allocated_bytes": plan.gpu.allocated,
            "reserved_bytes": plan.gpu.reserved,
            "nvidia_smi_bytes": plan.gpu.smi,
            "peak_at": plan.gpu.moment,
            "peaks": plan.gpu.peaks,
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


def advice_value(found: Advice | None) -> dict[str, Any] | None:
    """Advice for machines."""
    if found is None:
        return None
    return {
        "steps": [dataclasses.asdict(step) for step in found.steps],
        "preset": found.plan.preset,
        "verdict": found.plan.verdict,
        "nodes": found.nodes,
    }
