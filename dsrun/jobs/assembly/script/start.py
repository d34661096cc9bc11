"""The start of the ranks, and whether all is there for them: the Python, the packages, the folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsrun.cluster import python_environment
from dsrun.cluster.python_environment import PythonEnvironment
from dsrun.errors import Findings, Problem, collected
from dsrun.job import run_folder
from dsrun.job.job import ScriptJob, read_shown
from dsrun.jobs.allocation.allocation import Allocation
from dsrun.jobs.assembly.checks import precision
from dsrun.jobs.assembly.checks.packages import (
    absent_packages,
    absent_there,
    check_operators,
    check_torch_build,
)
from dsrun.jobs.assembly.script import accelerate, config
from dsrun.jobs.assembly.script.settle import named_config
from dsrun.jobs.assembly.script.source import ACCELERATE, HF
from dsrun.jobs.assembly.script.stages import KnownScript, RankInputs, ScriptRequest, judge
from dsrun.options import derived
from dsrun.options.commands import LaunchOptions

LAUNCHER = ("torch", "deepspeed")
"""Packages of this Python that DeepSpeed's launcher needs, whichever runs the script."""
JUDGED = ("torch", "deepspeed", "transformers", "accelerate")
"""Imports of a script that are looked for before the start: it may do without others."""


def ask_python(options: LaunchOptions, cwd: Path) -> PythonEnvironment | None:
    """The Python that is named, and what is installed there; None where none is named."""
    if options.python is None:
        return None
    # Not resolved: where a link lies says which environment it is.
    path = os.path.normpath(cwd / options.python.expanduser())
    return python_environment.ask(Path(path), "--python")


def check_ranks(
    script: KnownScript, inputs: RankInputs, placed: Allocation | None, findings: Findings
) -> RankInputs:
    """The inputs without variables that the user sets by hand; problems of CPU ranks with them are noted."""
    by_hand = accelerate.named_by_hand(script.options.env, {})
    env = {name: value for name, value in inputs.env.items() if name not in by_hand}
    if placed:
        all_of_them = {**script.environ, **env, **by_hand}
        judge(script.options, accelerate.cpu_problems(script.source, all_of_them, placed), findings)
    return replace(inputs, env=env)


def is_plain(script: KnownScript, inputs: RankInputs, placed: Allocation | None, findings: Findings) -> bool:
    """Whether the ranks are started without DeepSpeed's launcher: those of a script whose source is read, and has none
    of it.

    Another Python need not have DeepSpeed, and its ranks are processes of their own: they are never started by it.
    """
    source, env, options = script.source, inputs.env, script.options
    by_config = inputs.config is not None or named_config(script, inputs.args) is not None
    by_config = by_config or accelerate.USES_DEEPSPEED in env
    wants = source.imports is None or by_config or source.wants_deepspeed
    if not wants and source.reader == HF and placed:  # DeepSpeed would stop at the batch's size (DS615)
        trainer = config.trainer_of(script.request.args, source)
        variables = {**script.environ, **env, **accelerate.named_by_hand(options.env, {})}
        judge(options, accelerate.trainer_problems(source, trainer, variables, placed), findings)
    return script.python is not None or not wants


def check_tools(
    script: KnownScript, ds_config: Mapping[str, Any], placed: Allocation, findings: Findings
) -> None:
    """Whether the devices compute in the config's precision, and its operators can be compiled."""
    findings.problems.extend(precision.problems(derived.precision_of(ds_config), placed.own_machine))
    if script.python is None:  # what another Python has compiled isn't known
        check_operators(ds_config, placed.accelerator, script.environ)


def check_folder(script: KnownScript, placed: Allocation | None, findings: Findings, *, plain: bool) -> None:
    """The run's folder, and what is installed."""
    run_dir = script.run_dir
    with collected(findings.problems):
        problems = _check_again(script.request, run_dir) if script.request.again else check_new(run_dir)
        findings.problems.extend(problems)
    findings.problems.extend(check_packages(script, plain=plain))
    findings.problems.extend(check_torch_build(placed, script.python))


def check_packages(script: KnownScript, *, plain: bool) -> list[Problem]:
    """Problems of packages that the ranks lack: imports of the script (JUDGED), and DeepSpeed's launcher."""
    names = [name for name in JUDGED if name in (script.source.imports or ())]
    names += [ACCELERATE] if script.accelerate and ACCELERATE not in names else []
    missing = [] if plain else absent_packages(LAUNCHER, "launching")
    if script.python:
        return [*missing, *absent_there(names, script.python)]
    return missing or absent_packages(names, "launching")


def check_new(run_dir: Path) -> list[Problem]:
    """Why the run can't go into this folder. A script's run is not continued from a checkpoint of dsrun's."""
    hint = "Choose another --output-dir."
    return [replace(problem, hint=problem.hint and hint) for problem in run_folder.check_new(run_dir)]


def _check_again(request: ScriptRequest, run_dir: Path) -> list[Problem]:
    """Why the script can't be started again in its folder. Raises DsrunError where the folder's job can't be read."""
    job = read_shown(run_dir / run_folder.JOB)
    if not isinstance(job, ScriptJob) or (job.script, job.module) != (request.script, request.options.module):
        return [
            Problem(
                f"is the folder of another run: {job.title}", str(run_dir), "Choose another --output-dir."
            )
        ]
    return run_folder.check_unfinished(run_dir)
