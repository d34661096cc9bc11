"""Whether what a run writes fits the disk of its folder: its checkpoints, and the model that comes out of it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from dsrun.data.chat_templates import CHAT_TEMPLATE
from dsrun.data.conversations import BadRowError, TextDocument, columns_of, content_of
from dsrun.data.rows import format_of, read_rows
from dsrun.errors import Problem
from dsrun.job.job import Job
from dsrun.job.layout import CHECKPOINTS
from dsrun.jobs.assembly.checks.optimizers import planned
from dsrun.jobs.assembly.planning.setups import of_job, peft_fields
from dsrun.models import resolve
from dsrun.models.adapters import PREFIX
from dsrun.models.text_shape import shape_of_model
from dsrun.options.commands import FinetuneOptions
from dsrun.options.layers import NOTHING, Layer, Resolved, Source
from dsrun.options.table import NO_EXPORT
from dsrun.planner.disk import checkpoint_bytes, model_bytes
from dsrun.planner.model_config import UnknownShapeError
from dsrun.planner.setup import Setup
from dsrun.words import size_text

APART = ("chatglm2", CHAT_TEMPLATE, "auto")
"""Prompt formats that give, or may give, each answer of a conversation a sequence of its own."""


@dataclass(frozen=True)
class Need:
    """The most that lies in a run's folder at one time. checkpoints: with the one that is being written."""

    checkpoint_bytes: int
    model_bytes: int
    checkpoints: int

    @property
    def total(self) -> int:
        """Bytes of all together."""
        return self.checkpoint_bytes * self.checkpoints + self.model_bytes


def check(job: Job) -> list[Problem]:
    """The problem of a run that its disk has no room for; empty if it fits, or if the model's shape is not known.

    A checkpoint is removed when a newer one is whole, so that one more than are kept must fit. What an earlier part of
    the run has written is there already.
    """
    setup = setup_of(job)
    if setup is None:
        return []
    run_dir = Path(job.run_dir)
    room = free_bytes(run_dir) + size_of(run_dir / CHECKPOINTS)
    if need_of(job, setup).total <= room:  # however many steps it takes: the rows need not be counted
        return []
    steps = total_steps(job)
    need = need_of(job, setup, steps)
    return [] if need.total <= room else [_problem(job, need, steps, room)]


def fewer(job: Job, resolved: Resolved[FinetuneOptions]) -> Layer:
    """Fewer checkpoints, or the model alone, where nobody asked for the number and the disk has no room for them.

    NOTHING where all fit, or where no number of them does: then `check` says what would help. A first run that is
    refused for a checkpoint it may never need teaches nothing; one that can't be continued has to say so.
    """
    if not check(job):
        return NOTHING
    steps, spec = total_steps(job), job.training
    choices: list[dict[str, Any]] = []
    if not _given(resolved, "keep_checkpoints"):
        choices.append({"keep_checkpoints": 1})
        if not _given(resolved, "save_steps", "last_checkpoint", "max_restarts", "save_on_stop"):
            choices.append({"save_steps": max(steps, spec.save_steps), "last_checkpoint": False})
    for values in choices:
        setup = setup_of(job)
        if setup is not None and not check(replace(job, training=replace(spec, **values))):
            return _layer(job, need_of(job, setup, steps), values)
    return NOTHING


def _given(resolved: Resolved[FinetuneOptions], *names: str) -> bool:
    """Whether one of the options is more than a default, or a model file's."""
    return any(resolved.source(name) > Source.MODEL_FILE for name in names)


def _layer(job: Job, need: Need, values: Mapping[str, object]) -> Layer:
    """Values for less on the disk, and a note on what they cost. need: the whole run's."""
    room = size_text(free_bytes(Path(job.run_dir)) + size_of(Path(job.run_dir) / CHECKPOINTS))
    why = f"{room} free, and the run needs {size_text(need.total)}"
    many = f"{need.checkpoints} checkpoints" if need.checkpoints > 1 else "a checkpoint"
    of_it = f"{job.run_dir} has {why} with {many} of {size_text(need.checkpoint_bytes)}"
    what = (
        "one checkpoint is kept"
        if "keep_checkpoints" in values
        else "no checkpoint is written, only the model: if the run dies, it starts from the beginning"
    )
    return Layer.settled(
        values, why, f"{of_it}, so {what}; an --output-dir on a larger disk has room for all"
    )


def check_export(job: Job, folder: Path) -> list[Problem]:
    """The problem of a model that is to be written there, and that the disk has no room for; empty if it fits."""
    setup = setup_of(job)
    need, room = _exported(job, setup) if setup else 0, free_bytes(folder)
    if need <= room:
        return []
    fault = f"has {size_text(room)} free, and the model needs {size_text(need)}"
    return [Problem(fault, str(folder), "Free some room, or name a folder on a larger disk: -o DIR")]


def setup_of(job: Job) -> Setup | None:
    """The job in the planner's words; None for a model that it doesn't describe."""
    try:
        shape = shape_of_model(job.model)
    except UnknownShapeError:
        return None
    base = Setup(
        shape, gpus=job.world_size, nodes=len(job.hosts), optimizer=planned(job.training.optimizer),
        precision=job.precision, **peft_fields(job.peft, shape),
    )  # fmt: skip
    return of_job(job.ds_config, base, job.fsdp)


def need_of(job: Job, setup: Setup, steps: int | None = None) -> Need:
    """The run's need in that many steps; None: enough of them for every checkpoint that it may keep."""
    spec = job.training
    written = (steps - 1) // spec.save_steps + spec.writes_last(steps) if steps is not None else math.inf
    checkpoints = int(min(spec.keep_checkpoints + 1, written))
    # A better one is written while the best so far is still there, so both have to fit.
    best = model_bytes(setup) if spec.keep_best else 0
    return Need(checkpoint_bytes(_trained(setup)), _exported(job, setup) + best, checkpoints)


def _trained(setup: Setup) -> Setup:
    """The set-up of what is trained alone: a checkpoint holds nothing that stays as it is (training/checkpoint.py)."""
    if setup.method == "full":
        return setup
    shape = replace(setup.shape, parameters=setup.trained)
    return replace(setup, shape=shape, method="full", adapters=0, quantized=None)


def _exported(job: Job, setup: Setup) -> int:
    """The exported model; beside LoRA's adapter the whole one, in the type of the model that it came from."""
    if job.training.export_format == NO_EXPORT:
        return 0
    alone = job.peft.method == PREFIX or job.training.export_format == "adapter"
    if not job.peft.freezes or alone:
        return model_bytes(setup)
    return model_bytes(setup) + _type_bytes(job, setup) * setup.shape.parameters


def _type_bytes(job: Job, setup: Setup) -> int:
    config = resolve.architecture(job.model)
    name = str(config.get("dtype") or config.get("torch_dtype") or "")
    usual = 4 if job.model.source == "random" else setup.weight_bytes
    return {"float32": 4, "float16": 2, "bfloat16": 2}.get(name, usual)


def total_steps(job: Job) -> int:
    """The run's steps, as training.data.batches.Plan counts them. Reads the whole data file where epochs are given."""
    spec, data = job.training, job.data
    if spec.max_steps is not None:
        return spec.max_steps
    weights = data.weights or (1.0,) * len(data.train_files)
    rows = sum(
        int(Fraction(str(weight)) * _sequences(Path(file), job))
        for file, weight in zip(data.train_files, weights, strict=True)
    )
    return max(1, math.ceil(Fraction(str(spec.epochs)) * rows / job.step_examples))


def _sequences(path: Path, job: Job) -> int:
    """The most sequences that a file's rows become: a conversation is one sequence, or one for each of its answers.

    A document is as many as its characters fill: tokenizers make fewer tokens of them, but for rare scripts.
    """
    data = job.data
    columns = columns_of(data)
    data_format = format_of(path, columns, data.data_format)
    apart = data.official or job.model.prompt_format in APART
    count = 0
    for _, row in read_rows(path):
        with suppress(BadRowError):
            content = content_of(row, data_format, columns)
            if isinstance(content, TextDocument):
                count += math.ceil(len(content.text) / (data.max_source_length + data.max_target_length))
            else:
                count += sum(turn.trained for turn in content.turns) if apart else 1
    return count


def free_bytes(folder: Path) -> int:
    """Bytes that this user can still write where a folder is, or will be made."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    stat = os.statvfs(there)
    return stat.f_bavail * stat.f_frsize


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder; 0 if there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _problem(job: Job, need: Need, steps: int, room: int) -> Problem:
    parts = [f"the model of {size_text(need.model_bytes)}"]
    if need.checkpoints:
        many = f"{need.checkpoints} checkpoints" if need.checkpoints > 1 else "a checkpoint"
        parts.insert(0, f"{many} of {size_text(need.checkpoint_bytes)}")
    ways = []
    one = replace(need, checkpoints=min(need.checkpoints, 2))
    if one.total < need.total and one.total <= room:
        ways.append(f"--keep 1 needs {size_text(one.total)}")
    none = replace(need, checkpoints=0)
    if need.checkpoints and none.total <= room:
        flags = [f"--save-steps {steps}"] * (steps > job.training.save_steps)
        flags += ["--no-last-checkpoint"] * job.training.writes_last(steps)
        ways.append(f"{' '.join(flags)} writes no checkpoint and needs {size_text(none.total)}")
    ways.append("or choose an --output-dir on a larger disk")
    return Problem(
        f"has {size_text(room)} free, and the run needs {size_text(need.total)}: {' and '.join(parts)}",
        job.run_dir,
        _sentence(", ".join(ways).removeprefix("or ")),
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if not text.startswith("--") else f"{text}."
