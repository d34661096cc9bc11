"""The same job again, in a folder of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dsrun import __version__
from dsrun.cluster.devices import Machine
from dsrun.errors import DsrunError, Problem, collected, raise_all
from dsrun.job import run_folder
from dsrun.job.job import AnyJob, Job
from dsrun.jobs.allocation.allocation import Allocation, in_words
from dsrun.jobs.allocation.request import DeviceRequest
from dsrun.jobs.allocation.reservation import Allocator, Preview
from dsrun.jobs.assembly import PlannedJob, same_inputs
from dsrun.jobs.assembly.checks import disk_check, memory_check, precision, version_check
from dsrun.jobs.assembly.checks.packages import check_torch_build, check_trackers
from dsrun.jobs.assembly.finetune.folder import check_packages, scores
from dsrun.jobs.launchers import ON_THIS_MACHINE
from dsrun.jobs.launchers.common import environment
from dsrun.jobs.runs.past_runs import Run
from dsrun.models import peft_methods


def repeated(
    run: Run,
    machine: Machine,
    environ: Mapping[str, str],
    *,
    output_dir: Path | None,
    wanted: DeviceRequest | None = None,
    force: bool = False,
    allocator: Allocator | None = None,
) -> PlannedJob[Job]:
    """The job of a run, to be done again from its beginning, and what is worth saying about it.

    The config, the data, the seed and the number of ranks are the run's. force: start what is predicted to run out of
    memory. allocator: chooses the devices; unless given, they are not locked. wanted: where the user wants it to
    run; where nothing is said it is as DeviceRequest.or_like has it.

    Raises DsrunError, with all the problems together, where the model or the data are gone or not what they were (as
    far as job.json tells), where the machine trains on something else, or where it will not fit and isn't forced.
    """
    job, wanted = run.job, wanted or DeviceRequest()
    target = (output_dir or beside(run.path)).expanduser().absolute()
    problems = [*run_folder.check_new(target), *check_packages(scored=scores(job))]
    problems += peft_methods.check_packages(job.peft)
    problems += peft_methods.check_device(job.peft, job.accelerator, job.ds_config)
    allocator = allocator or Preview(machine, environ)
    problems += check_trackers(job.trackers, environ, allocator.connection)
    if (
        job.launcher == ON_THIS_MACHINE
        and machine.accelerator != job.accelerator
        and wanted == DeviceRequest()
    ):
        problems.append(another_kind(job, machine))
    with collected(problems):
        prepared, about_files = same_inputs.for_rerun(run)
    raise_all(problems)
    taken = taken_again(job, wanted, allocator)
    again = replace(
        job,
        run_dir=str(target),
        hosts=taken.hosts,
        launcher=taken.launcher,
        prepared=prepared,
        dsrun_version=__version__,
    )
    raise_all(
        [
            *precision.problems(again.precision, taken.own_machine),
            *disk_check.check(again),
            *check_torch_build(taken),
        ]
    )
    known = version_check.check(again, force=force)
    again, memory_notes = memory_check.predicted(again, taken, force=force)
    return PlannedJob(
        again, (*taken.notes, *about_files, *environment.differences(run.environment), *known, *memory_notes)
    )


def taken_again(job: AnyJob, wanted: DeviceRequest, allocator: Allocator) -> Allocation:
    """An allocation of as many devices as the run had, of the same kind. Raises DsrunError where they are others."""
    taken = allocator.allocate(wanted.or_like(job.hosts, job.launcher))
    if taken.accelerator != job.accelerator:
        raise DsrunError([another_kind(job, taken.machine)])
    if taken.world_size != job.world_size:
        raise DsrunError(
            f"the run had {job.world_size} ranks, and {taken.world_size} devices are named ({in_words(taken.hosts)})"
        )
    return taken


def another_kind(job: AnyJob, machine: Machine) -> Problem:
    """The problem of a run on a machine that trains on something else."""
    return Problem(
        f"the run trained on {job.accelerator}, this machine on {machine.accelerator} ({machine.reason})",
        hint="Go on where it ran, with the same torch and DS_ACCELERATOR.",
    )


def beside(path: Path) -> Path:
    """Beside the run, under its name with another time."""
    return path.with_name(run_folder.stamped(path.name))
