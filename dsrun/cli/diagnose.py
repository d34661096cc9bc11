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
        found = _of_logs(logs)
    except DsrunError as error:
        error.exit_code = 2
        raise
    if as_json:
        from dataclasses import asdict

        print_json("diagnose", asdict(found))
    else:
        diagnosis_text.show(found)
    return exit_code(found)


def _of_logs(given: Sequence[str]) -> Diagnosis:
    """What some logs say; of a run of dsrun's own also what dsrun saw. Raises DsrunError."""
    from dsrun.jobs.diagnosis import run_logs
    from dsrun.jobs.diagnosis.diagnosis import diagnose_files
    from dsrun.jobs.runs import past_runs

    path = Path(given[0]).expanduser()
    named = path if path.exists() or len(given) > 1 else Path(past_runs.HOME) / path
    if len(given) > 1 or not past_runs.is_run(named):
        return diagnose_files(given)
    run = past_runs.read(named)
    rank = run.diagnosis.get("rank")
    found = run_logs.of_run(named, rank=rank, said="\n".join(run.problems), since=run.diagnosis.get("since"))
    return found if run.script else _with_changes(found, run.job)


def _with_changes(found: Diagnosis, job: Job) -> Diagnosis:
    """Of a fine-tune that ran out of GPU memory: the planner's shortest list of changes before the next step."""
    if found.cause != "gpu_oom" or not found.numbers:
        return found
    from dataclasses import replace

    from dsrun.jobs.assembly.checks import memory_check
    from dsrun.jobs.assembly.planning import words

    changes = memory_check.changes_after_oom(job, found.numbers)
    return replace(found, next_step=f"{words.advice_text(changes)} {found.next_step}") if changes else found


def exit_code(found: Diagnosis) -> int:
    """0 where a cause is named, ABSTAINED where none is."""
    return 0 if found.cause else ABSTAINED
