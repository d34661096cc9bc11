"""DS91x: versions that don't go together, and what they lack of a script's names."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules.common import OVERLAP, STAGE
from dsrun.config.rules.examples import ZERO_1, ZERO_2, zero
from dsrun.config.rules.frame import DIFFERS, FAILS, Context, Finding, bad, good, rule
from dsrun.config.rules.running.batch import ACCUMULATION
from dsrun.config.rules.running.checkpoint import has_writer
from dsrun.versions import ERROR, NOTE, WARNING, Circumstances, VersionMatch, judge

WARMUP = "scheduler.params.warmup_num_steps"
PLACES = {
    "overlap_comm": OVERLAP,
    "python_writer": "checkpoint.writer",
    "zero_warmup": WARMUP,
    "stage": STAGE,
    "accumulates": ACCUMULATION,
}
"""Condition -> the key that meets it; the first one is where the finding is shown."""
LESSER = {ERROR: WARNING, WARNING: NOTE, NOTE: NOTE}
"""The severity of a combination where it is open whether it concerns the job."""
OLD = {"deepspeed": "0.18.1"}


def circumstances(context: Context) -> Circumstances:
    """The circumstances of a job, as far as its config tells them."""
    steps = context.integer(ACCUMULATION)
    ranks = context.world_size
    return Circumstances(
        stage=None if context.is_auto(STAGE) else context.stage,
        precision=context.precision,
        loop=context.target,
        accumulates=None if steps is None else steps > 1,
        several_ranks=None if ranks is None else ranks > 1,
        expert_parallel=bool(context.flag("expert_parallel.enabled")),
        overlap_comm=None if context.is_auto(OVERLAP) else bool(context.flag(OVERLAP)),
        python_writer=has_writer(context),
        zero_warmup=None if context.is_auto(WARMUP) else context.number(WARMUP) == 0,
        checkpointing=context.argument("gradient_checkpointing"),
        resumes=bool(context.argument("resume_from_checkpoint")) or None,
    )


def _matches(context: Context) -> Iterator[VersionMatch]:
    """The combinations that are met, without those that another rule reports."""
    if context.setting.versions:
        matches = judge(context.setting.versions, circumstances(context))
        yield from (match for match in matches if not match.combination.rule)


def _place(match: VersionMatch) -> str:
    conditions = match.combination.conditions
    return next((path for condition, path in PLACES.items() if condition in conditions), "")


@rule("DS910", DIFFERS)
@bad({"_with": OLD, **ZERO_2}, {"_with": {"deepspeed": "0.13.0", "numpy": "2.1"}, **zero(3)})
@good(
    {"_with": {"deepspeed": "0.19.5"}, **ZERO_2}, {"_with": {"deepspeed": "0.19.5", "numpy": "2.1"}, **ZERO_1}
)
def versions_that_do_not_go_together(context: Context) -> Iterator[Finding]:
    """A combination that is known to be bad: presets/versions/, each with the issues or releases that say so.

    Nothing is said where no version is known. Where the config leaves open whether it concerns the job, it is a
    warning or a note.
    """
    for match in _matches(context):
        stops = match.combination.happens.startswith(("stops", "import "))
        severity = match.severity if match.certain else LESSER[match.combination.severity]
        yield Finding(
            _place(match),
            str(match),
            f"{match.combination.do} More: dsrun explain {match.combination.name}",
            severity=severity,
            effect=FAILS if stops else DIFFERS,
        )


@rule("DS911", FAILS)
@bad(
    {"_script": "from transformers import AdamW", "_with": {"transformers": "5.0.0"}},
    {"_script": "import trl\ntrl.SFTTrainer(max_seq_length=8)", "_with": {"trl": "0.13.0"}},
)
@good(
    {"_script": "from transformers import AdamW", "_with": {"transformers": "4.49.0"}},
    {
        "_script": "try:\n    from transformers import AdamW\nexcept ImportError:\n    pass",
        "_with": {"transformers": "5.0.0"},
    },
)
def name_that_a_version_lacks(context: Context) -> Iterator[Finding]:
    """A script's names and parameters that other releases of their package have (dsrun/releases/script_names.py).

    The releases' own files say since when and until when, and mostly what took their place. Names that a script looks
    out for itself, in a try or by a version, are left out. Inside a function, which may never run, it is a warning.
    """
    if context.setting.script is None:
        return
    from dsrun.releases.script_names import missing

    for name in missing(context.setting.script, context.setting.versions or {}):
        severity = "" if name.use.at_start else "warning"
        yield Finding("", name.text, name.advice, severity=severity, line=name.use.line)
