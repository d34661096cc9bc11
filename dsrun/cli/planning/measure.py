"""`dsrun plan --measure`: a few steps on one GPU with two micro batches, and the constants in them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsrun.cli.jobs.running import say
from dsrun.errors import DsrunError
from dsrun.options.commands import FinetuneOptions, PlanOptions
from dsrun.options.declare import entries
from dsrun.options.layers import Resolved
from dsrun.options.table import recomputing
from dsrun.planner.plan import OUT, Calibration, Plan, judge
from dsrun.words import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dsrun.jobs.assembly.plan_target import PlanTarget
    from dsrun.jobs.assembly.planning.search import RankedPlans

STEPS = 3
"""Steps of each run: the first makes the optimizer's states; the median's seconds count."""
MICRO_BATCHES = (1, 2, 4, 8, 16)
"""The smaller of the two, in the order in which they are tried."""
EXAMPLES = 128
"""Examples in the file that the runs train on, each at least as long as a row may be."""
WORDS_A_TOKEN = 2
"""Words written for a token that is wanted: none of them is less than one token."""
SET_HERE = {
    "micro_batch", "grad_accum", "global_batch", "tokens_per_batch", "seq_len", "activation_checkpointing",
    "recompute_every", "data_format", "prompt_column", "response_column", "history_column", "text_column", "nodes",
    "max_source_length", "max_target_length",
}  # fmt: skip
"""Options of plan and finetune that the runs have values of their own for."""


def measured(
    model: str,
    requested: Resolved[PlanOptions],
    target: PlanTarget,
    answer: Callable[[PlanTarget, int], RankedPlans],
) -> tuple[Calibration, list[str]]:
    """Constants for this model on this machine's GPU or CPU, and lines that say what was measured.

    Two fine-tunes of STEPS steps each on one device, in a folder that is gone afterwards. answer: plans of a target by
    the number of rows in a rank's step. Raises DsrunError where nothing fits one, or where a run fails.
    """
    from dsrun.jobs.runs.calibration import of_two

    cpu = target.room.accelerator == "cpu"
    plans = _pair(
        requested,
        replace(target, room=replace(target.room, gpus=1, nodes=1, calibration=Calibration())),
        answer,
    )
    with tempfile.TemporaryDirectory(prefix="dsrun-measure-") as folder:
        took = [_train(model, requested, plan, Path(folder)) for plan in plans]
    constants = of_two(plans, took, cpu=cpu)
    return constants, _lines(plans, took, constants, cpu=cpu)


def _pair(
    requested: Resolved[PlanOptions], target: PlanTarget, answer: Callable[[PlanTarget, int], RankedPlans]
) -> list[Plan]:
    """Plans of two micro batches under the fastest preset that has room for both.

    The first one whose peak grows with its rows, where nobody said how many: what is largest in the optimizer's step
    tells nothing of a row. Raises DsrunError where even the smallest have no room.
    """
    sizes = (requested.options.micro_batch,) if requested.said("micro_batch") else MICRO_BATCHES
    pair: list[Plan] = []
    for rows in sizes:
        plans = answer(target, 2 * rows).plans
        if not plans or plans[0].verdict == OUT:
            break
        large = plans[0]
        pair = [
            judge(large.preset, replace(large.setup, micro_batch=count), target.room)
            for count in (rows, 2 * rows)
        ]
        if pair[0].gpu.moment != "step":
            break
    if not pair:
        message = f"no preset has room for {2 * sizes[0]} rows on one GPU, which is what is measured"
        hint = "Take --method lora, shorter examples, or a smaller model of the same kind; or leave --measure out."
        raise DsrunError(message, where="--measure", hint=hint)
    return pair


def _train(
    model: str, requested: Resolved[PlanOptions], plan: Plan, folder: Path
) -> Mapping[str, float | None]:
    """Memory and seconds of a run of the plan (jobs.runs.calibration.measured). Raises DsrunError with its last
    lines."""
    from dsrun.job.job import Job
    from dsrun.jobs.runs import calibration

    out = folder / f"rows-{plan.setup.micro_batch}"
    train = _write_examples(folder, plan.setup.seq_len)
    file = folder / f"{out.name}.toml"
    values = _options(requested, plan, train, out)
    text = "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items())
    file.write_text(text, encoding="utf-8")
    say(
        f"measuring {plan.setup.micro_batch} x {plan.setup.seq_len} tokens under {plan.preset}, {STEPS} steps ..."
    )
    command = [sys.executable, "-m", "dsrun", "finetune", model, str(file), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-8:])
        raise DsrunError(f"the run that was to be measured failed:\n{last}", where="--measure")
    return calibration.measured(out, Job.read(out / "job.json"))


def _options(requested: Resolved[PlanOptions], plan: Plan, train: Path, out: Path) -> dict[str, Any]:
    """The run's options by name: those of the plan, and values that make it one of the two runs."""
    setup = plan.setup
    lasting = {name for name, entry in entries(FinetuneOptions).items() if not entry.option.command_line_only}
    shared = entries(PlanOptions).keys() & lasting - SET_HERE
    fixed = {name: value for name, value in requested.user.items() if name in shared}
    values: dict[str, Any] = {
        **{name: list(value) if isinstance(value, tuple) else value for name, value in fixed.items()},
        **recomputing(setup.checkpointing),
        "preset": plan.preset, "precision": setup.precision, "micro_batch": setup.micro_batch, "grad_accum": 1,
        "max_length": setup.seq_len,
        "train_file": [str(train)], "prompt_column": "content", "response_column": "summary",
        "allow_truncation": True, "generate_rows": 0, "score_before": False, "max_steps": STEPS, "warmup_steps": 0,
        "gpus": 1, "output_dir": str(out),
    }  # fmt: skip
    return {
        name: str(value.expanduser().absolute()) if isinstance(value, Path) else value
        for name, value in values.items()
        if value is not None
    }


def _write_examples(folder: Path, tokens: int) -> Path:
    """A file of examples that fill a row: prompt and response are cut to its halves."""
    path = folder / "examples.jsonl"
    words = " ".join(f"word{number % 97}" for number in range(WORDS_A_TOKEN * tokens))
    line = json.dumps({"content": words, "summary": words})
    path.write_text(f"{line}\n" * EXAMPLES, encoding="utf-8")
    return path


def _lines(
    plans: list[Plan], took: list[Mapping[str, float | None]], calibration: Calibration, *, cpu: bool
) -> list[str]:
    setup = plans[0].setup
    if cpu:
        held = " and ".join(f"{(run['host_bytes'] or 0.0) / GIB:.2f}" for run in took)
        expected = " and ".join(f"{plan.host.peak / GIB:.2f}" for plan in plans)
        return [
            f"Measured on one CPU rank under {plans[0].preset}: {held} GiB with {setup.micro_batch} and "
            f"{plans[1].setup.micro_batch} x {setup.seq_len} tokens (expected: {expected}).",
            f"The plans use it: {calibration.process_gib:+.2f} GiB a rank, seconds x {calibration.seconds:.2f}.",
        ]
    sizes = [(run["gpu_allocated_bytes"] or 0.0) / GIB for run in took]
    a_row = (sizes[1] - sizes[0]) / (plans[1].setup.micro_batch - setup.micro_batch)
    return [
        f"Measured on one GPU under {plans[0].preset}: {sizes[0]:.2f} GiB with {setup.micro_batch} x {setup.seq_len} "
        f"tokens, {sizes[1]:.2f} with {plans[1].setup.micro_batch} (expected: {plans[0].gpu.allocated / GIB:.2f} and "
        f"{plans[1].gpu.allocated / GIB:.2f}): {a_row:.2f} GiB a row.",
        f"The plans use it: activations and logits x {calibration.lengths:.2f}, {calibration.gpu_gib:+.2f} GiB, "
        f"seconds x {calibration.seconds:.2f}.",
    ]
