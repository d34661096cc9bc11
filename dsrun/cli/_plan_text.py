"""How plans are shown: tables and sentences, and the same as values for --json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import click

from dsrun.planner import terms
from dsrun.planner.advice import Advice
from dsrun.planner.plan import FITS, OUT, Plan, Room, around, largest_micro_batch
from dsrun.planner.setup import Setup

GIB = 2**30
COLOURS = {FITS: "green", "tight": "yellow", OUT: "red"}


def gib(size: float) -> str:
    """Bytes as a table shows them."""
    value = size / GIB
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def batch_text(setup: Setup) -> str:
    """What is trained on, in one line."""
    method = {"full": "all weights", "lora": "LoRA", "qlora": "QLoRA"}[setup.method]
    return (
        f"{method}, {setup.precision}, {setup.optimizer}; rows of {setup.seq_len} tokens, micro batch "
        f"{setup.micro_batch} x accumulation {setup.grad_accum} x {setup.gpus} ranks"
    )


def table(plans: Sequence[Plan], room: Room) -> None:
    """The ranked plans, to stdout."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    cpu = room.accelerator == "cpu"
    grid.add_column("preset", no_wrap=True)
    grid.add_column("verdict", no_wrap=True)
    headings = [*([] if cpu else ["GPU peak", "nvidia-smi"]), "host/node", "checkpoint"]
    nvme = any(plan.nvme_bytes for plan in plans)
    headings += ["NVMe/node"] * nvme + ["speed", "s/step", "most rows"]
    for heading in headings:
        grid.add_column(heading, justify="right", no_wrap=True)
    grid.add_column("decides", overflow="fold", min_width=20)
    first = plans[0].seconds_per_token
    for plan in plans:
        checkpointing = " +ckpt" if plan.setup.checkpointing else ""
        cells = [
            f"{plan.preset}{checkpointing}",
            f"[{COLOURS[plan.verdict]}]{plan.verdict}[/]",
            *([] if cpu else [gib(plan.gpu.allocated), gib(min(plan.gpu.smi, room.gpu_bytes))]),
            gib(plan.host.peak),
            gib(plan.checkpoint_bytes),
            *([gib(plan.nvme_bytes) if plan.nvme_bytes else "-"] if nvme else []),
            f"{first / plan.seconds_per_token:.2f}",
            _seconds(plan.speed.seconds_per_step),
            str(largest_micro_batch(plan, room)),
            plan.reason,
        ]
        grid.add_row(*cells)
    console = Console()
    # Not folded to 80 columns where nobody looks: a pipe gets whole lines.
    Console(width=console.width if console.is_terminal else 200, highlight=False).print(grid)


def _seconds(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def components(plan: Plan, room: Room) -> None:
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
            f"  outside torch: {around(plan.setup.gpus):.1f} GiB (CUDA's context, NCCL); with the allocator's holes "
            f"nvidia-smi shows about {gib(plan.gpu.smi)} GiB\n"
        )
    _terms(f"host, of {gib(plan.host.peak)} GiB a node at the peak", plan.host.terms, terms.HOST, GIB)
    peaks = ", ".join(f"{name} {gib(size)}" for name, size in plan.host.peaks.items())
    click.echo(f"  peaks, GiB: {peaks}\n")
    _terms(f"seconds, of {_seconds(plan.speed.seconds_per_step)} a step", plan.speed.terms, terms.SPEED, 1)


def _terms(title: str, values: Mapping[str, float], known: Mapping[str, terms.Term], unit: float) -> None:
    click.echo(title)
    width = max((len(name) for name in values), default=0)
    for name, value in values.items():
        if value:
            term = known[name]
            click.echo(f"  {value / unit:9.3f}  {name:<{width}}  {term.what}: {term.formula} ({term.source})")


def advice(found: Advice | None) -> None:
    """What to change where nothing fits."""
    if found is None:
        click.echo("\nNothing fits, and no list of up to four changes makes it fit.")
        return
    click.echo("\nNothing fits. The shortest list of changes that does:")
    for number, step in enumerate(found.steps, 1):
        saves = (
            f"saves {gib(step.saves_bytes)} GiB a GPU"
            if step.saves_bytes > 0
            else "saves no GPU memory by itself"
        )
        click.echo(f"  {number}. {step.text}: {saves}; the price: {step.costs}{_slower(step.slower)}")
    plan = found.plan
    click.echo(f"  Then: {plan.preset}, {plan.verdict}, {plan.reason}")


def _slower(factor: float) -> str:
    if factor > 1.05:
        return f" ({factor:.1f} times the time)"
    return f" ({1 / factor:.1f} times as fast)" if factor < 0.95 else ""


def as_value(plan: Plan, room: Room) -> dict[str, Any]:
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
