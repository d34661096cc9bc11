"""dsrun from Python: the checks, the planner, the diagnosis and the explanations, without a terminal.

`from dsrun import validate, plan, diagnose, explain`. Each returns what its command prints with --json, in the
documented forms (docs/reference/json.md), which have versions, and starts nothing. Faults of a request are raised as
DsrunError, whose `problems` say where, what, and what would be right. Neither torch nor DeepSpeed is imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from dsrun.errors import DsrunError, Problem, raise_all
from dsrun.files import plain


def validate(
    config: Mapping[str, Any] | str | bytes | os.PathLike[str],
    *,
    name: str | None = None,
    target: str | None = None,
    world_size: int | None = None,
    nodes: int | None = None,
    gpu: str | None = None,
    model: str | None = None,
    deepspeed_version: str | None = None,
    upgrade_to: str | None = None,
    versions: Mapping[str, str] | None = None,
    trainer_args: Mapping[str, Any] | None = None,
    level: str = "warning",
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
) -> dict[str, Any]:
    """Everything that is wrong with a DeepSpeed config, as `dsrun validate --json`: {"version": 1, "findings": [...]}.

    config: a dict, a text, or a file's path (os.PathLike: a str is text). A text is JSON, an accelerate or a trainer's
    YAML, a shell's script or Python, by the ending of `name`, or else by its lines. target: who reads it, "hf",
    "deepspeed", "accelerate" or "lightning"; None: hf where there is an "auto", else deepspeed. The rest is as the
    command's options of these names; versions is --with, trainer_args --arg. Raises DsrunError.
    """
    from dsrun.config.validation import report, sources
    from dsrun.config.validation.validate import RuleSelection
    from dsrun.jobs.assembly.judging import setting_of
    from dsrun.trainers.judging import judged, with_inner

    if isinstance(config, os.PathLike):
        source = sources.one(os.fspath(config))
    else:
        text = config if isinstance(config, (str, bytes)) else json.dumps(config)
        source = sources.of_text(text if isinstance(text, bytes) else text.encode(), name)
    setting, _ = setting_of(
        os.environ,
        world_size=world_size,
        nodes=nodes,
        gpu=gpu,
        model=model,
        deepspeed_version=deepspeed_version,
        upgrade_to=upgrade_to,
        beside=versions,
        trainer=trainer_args,
    )
    selection = RuleSelection(tuple(select), tuple(ignore), level)
    problems: list[Problem] = []
    results = [
        result
        for each in with_inner([source], problems, lambda _: None)
        for result in judged(each, setting, selection, target)
    ]
    raise_all(problems)
    return _value(report.as_json(results))


def plan(model: str | os.PathLike[str] | None = None, **options: Any) -> dict[str, Any]:
    """What fits and how fast, as `dsrun plan --json`.

    model: a name from `dsrun models`, a folder or a config.json; None with params=6.2e9 and the numbers beside it.
    options: those of the command, with underscores: gpu="a100-80g", gpus=4, seq_len=2048. Without gpu and gpu_memory
    the plan is for this machine. Raises DsrunError.
    """
    import click

    from dsrun.cli.plan import decided
    from dsrun.cli.planning import inference, layouts, training
    from dsrun.json_outputs import versioned
    from dsrun.options.commands import PlanOptions
    from dsrun.options.layers import Resolved

    if unknown := {"as_json", "plot", "calibrate"} & options.keys():
        raise DsrunError(f"{min(unknown)} is for the command line alone", where="dsrun.plan")
    requested = Resolved.by_user(
        PlanOptions, {name: value for name, value in options.items() if value is not None}
    )
    try:
        plans = decided(None if model is None else os.fspath(model), requested)
    except click.UsageError as error:
        raise DsrunError(error.message, where="dsrun.plan") from None
    if isinstance(plans, inference.InferencePlans):
        return _plain(versioned("plan-inference", inference.value_of(plans)))
    if isinstance(plans, training.TrainingPlans):
        return _plain(versioned("plan", training.value_of(plans)))
    return _plain(versioned("plan-layouts", layouts.value_of(plans)))


def diagnose(log: str | bytes | os.PathLike[str], *more: str | bytes | os.PathLike[str]) -> dict[str, Any]:
    """Why a job died, as `dsrun diagnose --json`: cause (None where the logs name none), summary, next_step ...

    log, more: a job's logs, each as text or as a file's path (os.PathLike: a str is text). Raises DsrunError for
    one that is empty or can't be read.
    """
    from dataclasses import asdict

    from dsrun.jobs.diagnosis import log_files
    from dsrun.jobs.diagnosis.diagnosis import diagnose_logs
    from dsrun.json_outputs import versioned

    logs: list[log_files.LogSource] = []
    for number, each in enumerate((log, *more), 1):
        if isinstance(each, os.PathLike):
            logs += log_files.sources([os.fspath(each)])
        else:
            name = "log" if not more else f"log {number}"
            logs.append(
                log_files.LogSource(name, None, content=each if isinstance(each, bytes) else each.encode())
            )
    return _plain(versioned("diagnose", asdict(diagnose_logs(logs))))


def explain(name: str | None = None, *, parameter: str | None = None) -> dict[str, Any]:
    """What a name stands for, as `dsrun explain --json`: {"version": 1, "kind": ..., "name": ..., "lines": [...]}.

    name: a rule, a key of deepspeed.json, a signature of a failure, versions that don't go together, a name in
    transformers, torch and the like; "signatures" and "versions" list these, None lists the rules. parameter: one of
    the function or class that is named. Raises DsrunError for a name that nothing has.
    """
    from dataclasses import asdict

    from dsrun.cli.explain import explanation
    from dsrun.json_outputs import versioned

    return _plain(versioned("explanation", asdict(explanation(name, parameter))))


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """A result as JSON has it: lists for tuples, null for what is not finite."""
    return _value(json.dumps(plain(value)))


def _value(text: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(text)
    return value
