"""`dsrun diagnose` (runs): why a job died, from any log, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dsrun.cli.output.results import print_json
from dsrun.cli.parsing.completion import files
from dsrun.errors import DsrunError

if TYPE_CHECKING:
    from dsrun.job.job import Job
    from dsrun.jobs.diagnosis.diagnosis import Diagnosis

ABSTAINED = 3


@click.command("diagnose")
@click.argument("logs", nargs=-1, metavar="[LOG|FOLDER|RUN|-]...", shell_complete=files)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(logs: tuple[str, ...], as_json: bool) -> int:
    """Say why a job died, from its logs: of DeepSpeed, torchrun, accelerate, Slurm, Kubernetes, Ray, or of dsrun.

    Several logs, one a rank or a host, are read as one job's; - is stdin. Exit 0: a cause is named; 3: the logs don't
    say it; 2: wrong usage.

    \b
    dsrun diagnose train.log
    dsrun diagnose slurm-77.out slurm-77.err
    dsrun diagnose logs/                     torchrun's --log-dir, or a log a rank
    kubectl logs worker-0 | dsrun diagnose -
    """
    from dsrun.cli.output import diagnosis_text

    if not logs:
        raise click.UsageError("Name a log, a folder of logs or a run; - is stdin.")
    try:
        diagnosis = _of_logs(logs)
    except DsrunError as error:
        error.exit_code = 2
        raise
    if as_json:
        from dataclasses import asdict

        print_json("diagnose", asdict(diagnosis))
    else:
        diagnosis_text.show(diagnosis)
    return exit_code(diagnosis)


def _of_logs(logs: Sequence[str]) -> Diagnosis:
    """The diagnosis of some logs; for a run of dsrun's own with what dsrun saw. Raises DsrunError."""
    from dsrun.jobs.diagnosis import run_logs
    from dsrun.jobs.diagnosis.diagnosis import diagnose_files
    from dsrun.jobs.runs import past_runs

    path = Path(logs[0]).expanduser()
    folder = path if path.exists() or len(logs) > 1 else Path(past_runs.HOME) / path
    if len(logs) > 1 or not past_runs.is_run(folder):
        return diagnose_files(logs)
    run = past_runs.read(folder)
    rank = run.diagnosis.get("rank")
    diagnosis = run_logs.of_run(
        folder,
        rank=rank,
        said="\n".join(run.problems),
        since=run.diagnosis.get("since"),
        hosts=run.any_job.hosts,
    )
    return diagnosis if run.script else _with_changes(diagnosis, run.job)


def _with_changes(diagnosis: Diagnosis, job: Job) -> Diagnosis:
    """The diagnosis with the planner's list of changes before its next step, where a fine-tune ran out of GPU
    memory."""
    if diagnosis.cause != "gpu_oom" or not diagnosis.numbers:
        return diagnosis
    from dataclasses import replace

    from dsrun.jobs.assembly.checks import memory_check

    changes = memory_check.way_out(job, diagnosis.numbers)
    return replace(diagnosis, next_step=f"{changes} {diagnosis.next_step}") if changes else diagnosis


def exit_code(diagnosis: Diagnosis) -> int:
    """0 where a cause is named, ABSTAINED where none is."""
    return 0 if diagnosis.cause else ABSTAINED
