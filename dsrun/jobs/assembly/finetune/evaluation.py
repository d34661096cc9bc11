"""Options of evaluations that nothing would come of: what they need is looked for before the start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dsrun.data.conversations import TEXT
from dsrun.data.rows import format_of
from dsrun.errors import Problem
from dsrun.jobs.assembly.finetune.data import asked_format
from dsrun.jobs.assembly.finetune.stages import Requested
from dsrun.options.commands import FinetuneOptions
from dsrun.options.declare import flag_of
from dsrun.options.table import AUTO_METRICS

OF_ANSWERS = ("score_before", "compute_metrics")
"""Options that say something of the answers to held-out prompts."""
OF_EVALUATIONS = ("eval_steps", "keep_best", "generate_rows", *OF_ANSWERS)
"""All options about held-out examples."""


def problems(requested: Requested, held_out: Path | None, *, readable: bool) -> Iterator[Problem]:
    """Options of evaluations that the user gives and that lack examples, or prompts where they are about answers.

    held_out: the file, None where there is none; readable: nothing is wrong with it, nor with anything else.
    """
    names = [name for name in OF_EVALUATIONS if _wanted(requested, name)]
    if held_out is None:
        hint = "Name some with --eval-file, or leave it out."
        yield from (_problem(name, "needs held-out examples, and there are none", hint) for name in names)
    elif not requested.options.generate_rows:
        none = f"answers held-out prompts, and --generate-rows is 0 ({requested.resolved.origins['generate_rows']})"
        hint = "Leave it out, or take --generate-rows 100."
        if requested.parallel.pp > 1:
            hint = "Leave it out: dsrun evaluate RUN answers with the exported model."
        yield from (_problem(name, none, hint) for name in names if name in OF_ANSWERS)
    elif readable and format_of(held_out, requested.columns, asked_format(requested.resolved)) == TEXT:
        none, hint = (
            f"answers prompts, and {held_out} is plain text",
            "Leave it out: of text there is a loss.",
        )
        answers = ("generate_rows", *OF_ANSWERS)
        yield from (_problem(name, none, hint) for name in names if name in answers)


def _wanted(requested: Requested, name: str) -> bool:
    """Whether the user asks for something by it."""
    return requested.resolved.said(name) and getattr(requested.options, name) not in (
        None,
        False,
        0,
        AUTO_METRICS,
    )


def _problem(name: str, what: str, hint: str) -> Problem:
    return Problem(what, flag_of(FinetuneOptions, name), hint)
