"""`dsrun report` (runs): runs as a page for the browser, in one file."""

from __future__ import annotations

from typing import Any

import click

from dsrun.cli.parsing import completion
from dsrun.cli.parsing.options import given, options_of
from dsrun.errors import Problem, collected, raise_all
from dsrun.options.commands import ReportOptions


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, shell_complete=completion.runs)
@options_of(ReportOptions)
def command(runs: tuple[str, ...], **values: Any) -> None:
    """Write RUNs into one HTML file: curves, memory beside the plan, config, answers, why it failed, how to go on.

    RUN is a run's folder, or its name in runs/. The file needs no network and no server. It shows the runs' data and
    settings; keys, tokens and passwords are hidden. Several runs are compared first.

    \b
    dsrun report runs/a -o a.html
    dsrun report runs/a runs/b
    dsrun report runs/a --watch
    """
    from dsrun.jobs.runs import past_runs
    from dsrun.reports import report

    options = given(ReportOptions, values).options
    paths, problems = [], list[Problem]()
    for text in runs:
        with collected(problems):
            paths.append(past_runs.named(text))
    problems += [past_runs.no_run(path) for path in paths if not past_runs.is_run(path)]
    problems += filter(None, map(past_runs.kept_out, paths))
    raise_all(problems)
    file = options.output.expanduser()
    report.check_replaceable(file, force=options.force)
    reported = report.of_runs(list(dict.fromkeys(paths)))
    if not options.watch:
        report.write(reported, file)
        click.echo(f"dsrun: written to {file}", err=True)
        return
    click.echo(
        f"dsrun: {file} is written every {report.WATCH_S:g} s until the runs end; Ctrl-C ends the writing, not them",
        err=True,
    )
    report.watch(reported, file)
    click.echo("dsrun: every run has ended; the report is whole", err=True)
