"""What starts the ranks and whether all is there for them: the Python, the packages, the folder."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from dsrun.cluster import python_environment
from dsrun.errors import Problem, collected
from dsrun.jobs.build.checks import precision
from dsrun.jobs.build.checks.packages import absent_packages, absent_there, check_operators, check_torch_build
from dsrun.jobs.build.script import accelerate, config
from dsrun.jobs.build.script.draft import ScriptDraft, ScriptRequest
from dsrun.jobs.build.script.source import ACCELERATE, HF
from dsrun.jobs.spec import run_folder
from dsrun.jobs.spec.job import ScriptJob, read_shown
from dsrun.options import derived

LAUNCHER = ("torch", "deepspeed")
"""What DeepSpeed's launcher needs of this Python, whichever runs the script."""
JUDGED = ("torch", "deepspeed", "transformers", "accelerate")
"""Of what a script imports, what is looked for before the start: it may do without others."""


def ask_python(draft: ScriptDraft) -> None:
    """The Python that is named, and what is installed there."""
    if draft.options.python is not None:
        # Not resolved: where a link lies says which environment it is.
        path = os.path.normpath(draft.cwd / draft.options.python.expanduser())
        draft.python = python_environment.ask(Path(path), "--python")


def check_ranks(draft: ScriptDraft) -> None:
    """What the user says of a variable stands before a file's; and what CPU ranks do with them."""
    by_hand = accelerate.named_by_hand(draft.options.env, {})
    draft.env = {name: value for name, value in draft.env.items() if name not in by_hand}
    if draft.placed:
        all_of_them = {**draft.environ, **draft.env, **by_hand}
        draft.judge(accelerate.cpu_problems(draft.source, all_of_them, draft.placed), [])


def choose_starter(draft: ScriptDraft) -> None:
    """Whether DeepSpeed's launcher starts the ranks: not those of a script whose source is read, and has none of it.

    Another Python need not have DeepSpeed, and its ranks are processes of their own: they are never started by it.
    """
    source, env = draft.source, draft.env
    named = config.named(draft.args, source, draft.cwd, draft.options.config_option)
    by_config = draft.config is not None or named is not None or accelerate.USES_DEEPSPEED in env
    wants = source.imports is None or by_config or source.wants_deepspeed
    draft.plain = draft.python is not None or not wants
    if not wants and source.reader == HF and draft.placed:  # DeepSpeed would stop at the batch's size (DS615)
        trainer = config.trainer_of(draft.request.args, source)
        variables = {**draft.environ, **env, **accelerate.named_by_hand(draft.options.env, {})}
        draft.judge(accelerate.trainer_problems(source, trainer, variables, draft.placed), [])


def check_tools(draft: ScriptDraft) -> None:
    if draft.config is not None and draft.placed:
        draft.problems += precision.problems(derived.precision_of(draft.config), draft.placed.own_machine)
        if draft.python is None:  # what another Python has compiled isn't known
            check_operators(draft.config, draft.placed.accelerator, draft.environ)


def check_folder(draft: ScriptDraft) -> None:
    """The run's folder, and what is installed."""
    with collected(draft.problems):
        draft.problems += (
            _check_again(draft.request, draft.run_dir) if draft.request.again else check_new(draft.run_dir)
        )
    draft.problems += check_packages(draft)
    draft.problems += check_torch_build(draft.placed, draft.python)


def check_packages(draft: ScriptDraft) -> list[Problem]:
    """What the ranks need and is not installed: of the script's imports what is judged, and DeepSpeed's launcher."""
    names = [name for name in JUDGED if name in (draft.source.imports or ())]
    names += [ACCELERATE] if draft.accelerate and ACCELERATE not in names else []
    found = [] if draft.plain else absent_packages(LAUNCHER, "launching")
    if draft.python:
        return [*found, *absent_there(names, draft.python)]
    return found or absent_packages(names, "launching")


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
