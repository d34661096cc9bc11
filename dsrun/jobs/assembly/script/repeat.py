"""The same command of a run again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dsrun import __version__
from dsrun.cluster import python_environment
from dsrun.cluster.devices import Machine
from dsrun.errors import Problem, collected, raise_all
from dsrun.job import run_folder
from dsrun.job.job import ScriptJob
from dsrun.jobs.allocation.request import DeviceRequest
from dsrun.jobs.allocation.reservation import Allocator, Preview
from dsrun.jobs.assembly import PlannedJob
from dsrun.jobs.assembly.checks.packages import absent_packages
from dsrun.jobs.assembly.rerun import beside, taken_again
from dsrun.jobs.assembly.script.start import LAUNCHER, check_new
from dsrun.jobs.launchers.common import environment
from dsrun.jobs.runs.past_runs import Run


def repeated(
    run: Run,
    job: ScriptJob,
    machine: Machine,
    environ: Mapping[str, str],
    *,
    output_dir: Path | None = None,
    wanted: DeviceRequest | None = None,
    allocator: Allocator | None = None,
) -> PlannedJob[ScriptJob]:
    """The same command of a run again, in a folder of its own: same script, arguments, config and number of ranks.

    output_dir: beside the run unless given; wanted: where it is to run, or as DeviceRequest.or_like has it.
    Raises DsrunError with all the problems where it can't be: of what the script and its data were nothing is known.
    """
    target = (output_dir or beside(run.path)).expanduser().absolute()
    problems = [*check_new(target)]
    problems += [] if job.plain else absent_packages(LAUNCHER, "launching")
    python = None
    if job.python:
        with collected(problems):
            python = python_environment.ask(Path(job.python), "--python")
    cwd = Path(job.cwd)
    if not cwd.is_dir():
        problems.append(Problem("is gone, and the script was run there", str(cwd)))
    elif not job.module and not (cwd / job.script).is_file():
        problems.append(Problem("is gone", str(cwd / job.script)))
    raise_all(problems)
    placed = taken_again(job, wanted or DeviceRequest(), allocator or Preview(machine, environ))
    # A preset's config lies in the run's folder, and the arguments name it there.
    before, after = (str(folder / run_folder.CONFIG) for folder in (Path(job.run_dir), target))
    args = tuple(word.replace(before, after) if job.ds_config is not None else word for word in job.args)
    again = replace(
        job,
        run_dir=str(target),
        args=args,
        env={name: value.replace(before, after) for name, value in job.env.items()},
        hosts=placed.hosts,
        launcher=placed.launcher,
        dsrun_version=__version__,
    )
    notes = [*placed.notes, *environment.differences(run.environment, python)]
    if not job.module and run.started and (cwd / job.script).stat().st_mtime > run.started:
        notes.append(f"{job.script} changed after the run was started")
    return PlannedJob(again, tuple(notes))
