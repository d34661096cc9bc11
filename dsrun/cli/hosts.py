"""`dsrun hosts` (machines): check a hostfile, or write one from short names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsrun.cli.output.columns import echo_folded
from dsrun.cli.output.results import file_of, print_json, write_out
from dsrun.words import counted, listed

if TYPE_CHECKING:
    from dsrun.cluster.hostfile import Hostfile


@click.group("hosts")
def command() -> None:
    """Check a hostfile, or write one.

    \b
    dsrun hosts check hostfile
    dsrun hosts expand "node[01-16]:8" -o hostfile
    """


@command.command("check", short_help="Say what is wrong with a hostfile.")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def check(file: Path, *, as_json: bool) -> int:
    """Say everything that is wrong with a hostfile, and what would be right. Exit 1 if there is an error."""
    from dsrun.cluster import hostfile

    result = hostfile.read(file)
    if as_json:
        print_json("hosts-check", _json(result))
    else:
        _show(file, result)
    return int(bool(result.errors))


@command.command("expand", short_help="Write a hostfile from short names.")
@click.argument("hosts", metavar="HOSTS")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="The file to write; stdout if left out."
)
@click.option("--slots", type=click.IntRange(min=1), help="Devices of the hosts that have no :N behind them.")
@click.option("--force", is_flag=True, help="Replace the file.")
def expand(hosts: str, *, output: Path | None, slots: int | None, force: bool) -> None:
    """Write the hostfile of short names: gpu[1,3-5]:8 is gpu1, gpu3, gpu4 and gpu5 with 8 devices each.

    \b
    dsrun hosts expand "node[01-16]:8,login1:2" -o hostfile
    dsrun hosts expand "$SLURM_JOB_NODELIST" --slots 4
    """
    from dsrun.cluster import hostfile, hostlist

    text = hostfile.text_of(hostlist.expand(hosts, default_slots=slots))
    write_out(text, file_of(output), overwrite=force)


def _show(file: Path, result: Hostfile) -> None:
    """Print each finding with its hint, folded where stdout is a terminal; the count goes to stderr."""
    for row in result.findings:
        head = f"{file}:{row.line}  {row.rule}  {row.severity}: {row.message}"
        for line in (head, f"    {row.hint}", ""):
            echo_folded(line, 4)
    click.echo(f"dsrun: {_summary(result)}", err=True)


def _json(result: Hostfile) -> dict[str, Any]:
    return {
        "hosts": [{"host": entry.host, "slots": entry.slots} for entry in result.entries],
        "findings": [
            {
                "line": row.line,
                "rule": row.rule,
                "severity": row.severity,
                "message": row.message,
                "hint": row.hint,
            }
            for row in result.findings
        ],
    }


def _summary(result: Hostfile) -> str:
    """`2 errors and 1 note; 3 hosts with 24 slots`."""
    counts = {
        name: sum(row.severity == name for row in result.findings) for name in ("error", "warning", "note")
    }
    remarks = [counted(count, name) for name, count in counts.items() if count] or ["nothing to say"]
    slots = sum(entry.slots for entry in result.entries)
    accepted = f"{counted(len(result.entries), 'host')} with {counted(slots, 'slot')}"
    return f"{listed(remarks)}; {'accepted: ' if result.errors else ''}{accepted}"
