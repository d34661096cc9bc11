"""`dsrun diagnose` (runs): why a job died, from any log, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from dsrun.jobs.diagnosis.diagnosis import Diagnosis

ABSTAINED = 3


@click.command("diagnose")
@click.argument("logs", nargs=-1, metavar="[LOG|FOLDER|RUN|-]...")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(logs: tuple[str, ...], as_json: bool) -> int:
    """Say why a job died, from its logs: of DeepSpeed, torchrun, accelerate, Slurm, Kubernetes, Ray, or of dsrun.

    Several logs, one a rank or a host, are read as one job's; - is stdin. Exit 0: a cause is named; 3: the logs don't
    say it; 2: wrong usage.

    \b
    dsrun diagnose train.log
    dsrun diagnose slurm-77.out slurm-77.err
    dsrun diagnose logs/                         torchrun's --log-dir, or a log a rank
    kubectl logs worker-0 | dsrun diagnose -
    """
    from dsrun.cli import _diagnosis_text
    from dsrun.errors import DsrunError
    from dsrun.jobs.diagnosis.diagnosis import as_json as as_value
    from dsrun.jobs.diagnosis.diagnosis import diagnose_files

    if not logs:
        raise click.UsageError("Name a log, a folder of logs or a run; - is stdin.")
    try:
        found = diagnose_files(logs)
    except DsrunError as error:
        error.exit_code = 2
        raise
    if as_json:
        from dsrun.files import json_text

        click.echo(json_text(as_value(found), indent=2))
    else:
        _diagnosis_text.show(found)
    return exit_code(found)


def exit_code(found: Diagnosis) -> int:
    """0 where a cause is named, ABSTAINED where none is."""
    return 0 if found.cause else ABSTAINED
