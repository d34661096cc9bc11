"""`dsrun plan --for inference`: decided first (`decide`), then shown as text or JSON (`report`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from dsrun.cli.output.results import print_json
from dsrun.cli.planning.plan_case import USUAL_LENGTH
from dsrun.cli.planning.plan_text import say
from dsrun.planner.plan import FITS, OUT
from dsrun.planner.units import significant
from dsrun.words import GIB

if TYPE_CHECKING:
    from dsrun.jobs.assembly.plan_target import PlanTarget
    from dsrun.jobs.assembly.planning.subjects import PlanSubject
    from dsrun.options.commands import PlanOptions
    from dsrun.options.layers import Resolved


@dataclass(frozen=True)
class InferencePlans:
    """The memory of a model that answers, for each width of its weights."""

    model: str
    target: PlanTarget
    seq_len: int
    batch: int
    beams: int
    offloaded: bool
    """Whether the weights stay in the host's memory."""
    widths: list[dict[str, Any]]
    """A row for each width, as in --json."""
    as_json: bool

    def report(self) -> bool:
        """Print the plans. Returns whether one fits."""
        if self.as_json:
            print_json("plan-inference", value_of(self))
        else:
            show(self)
        return any(row["verdict"] != OUT for row in self.widths)


def decide(subject: PlanSubject, target: PlanTarget, requested: Resolved[PlanOptions]) -> InferencePlans:
    """The memory of each width of the weights, and the longest context that it leaves room for."""
    from dsrun.planner.inference import UNQUANTIZED, WIDTHS, inference, longest_context

    room, shape, options = target.room, subject.shape, requested.options
    length = options.seq_len or min(shape.positions or USUAL_LENGTH, USUAL_LENGTH)
    batch = options.micro_batch if requested.said("micro_batch") else 1
    offloaded = options.offload_weights
    use: dict[str, Any] = {"batch": batch, "beams": options.beams, "gpus": room.gpus, "offloaded": offloaded}
    rows: list[dict[str, Any]] = []
    for width in UNQUANTIZED if offloaded else WIDTHS:
        memory = inference(shape, width, seq_len=length, **use)
        longest = longest_context(shape, width, gpu_bytes=room.gpu_bytes, **use)
        longest = min(longest, shape.positions or longest)
        host_fits = room.host_bytes is None or memory.host <= room.host_bytes
        rows.append(
            {
                "width": width,
                "bytes": memory.total,
                "terms": memory.terms,
                "longest_context": longest if host_fits else 0,
                "verdict": FITS if host_fits and memory.total <= room.gpu_bytes else OUT,
                "host_bytes": memory.host,
            }
        )
    return InferencePlans(
        subject.name, target, length, batch, options.beams, offloaded, rows, options.as_json
    )


def value_of(plans: InferencePlans) -> dict[str, Any]:
    """The plans for machines."""
    return significant(
        {
            "model": plans.model,
            "place": plans.target.text,
            "seq_len": plans.seq_len,
            "batch": plans.batch,
            "beams": plans.beams,
            "inference": plans.widths,
        }
    )


def show(plans: InferencePlans) -> None:
    """Print the plans for people: a line for each width."""
    search = f" with {plans.beams} beams" if plans.beams > 1 else ""
    tokens = f"{plans.batch} x {plans.seq_len} tokens{search}"
    click.echo(f"{plans.model} answering, {tokens}, on {plans.target.text}\n")
    for row in plans.widths:
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in row["terms"].items())
        longest = row["longest_context"]
        context = f"contexts up to {longest}" if longest else "not even the weights"
        say(f"  {row['width']:<7} {row['bytes'] / GIB:7.2f} GiB  {row['verdict']:<14} {parts}; {context}")
        if plans.offloaded:
            speed = plans.target.room.hardware.pcie_gb_s
            say(
                f"          {row['host_bytes'] / GIB:.1f} GiB in host memory go to the GPU for every token: "
                f"{row['host_bytes'] / (1e9 * speed):.2g} s at {speed:g} GB/s"
            )
