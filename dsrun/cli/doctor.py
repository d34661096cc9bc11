"""`dsrun doctor` (machines): check that this machine, or every machine of a job, is ready."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsrun.cli.output.columns import folded, screen_width
from dsrun.cli.output.results import print_json
from dsrun.jobs.launchers import CHOICES
from dsrun.words import counted, printable

if TYPE_CHECKING:
    from dsrun.cluster.doctor.check import CheckResult, Host
    from dsrun.jobs.supervision.smoke import Smoke

WORDS = {"green": "ok", "yellow": "look", "red": "bad", "grey": "-"}
STYLES = {"green": "green", "yellow": "yellow", "red": "red", "grey": "bright_black"}
MOST_ROWS = 50
"""Hosts that the table shows: the ones with something to say come first."""
LEAST_NAME = 6
"""Columns of a host's name on a terminal that is too narrow for the table."""
MOST_ALIKE = 5
"""Texts of one check that are shown: a thousand hosts may be off by a thousand different numbers."""


@click.command("doctor")
@click.option("--hostfile", metavar="FILE", help="Every machine in a hostfile, and its slots.")
@click.option(
    "--hosts", metavar="LIST", help="These machines: gpu01,gpu02 or gpu[01-08], with slots: gpu[01-08]:4."
)
@click.option("--data", metavar="FILE", help="A data file that must be the same everywhere.")
@click.option("--nvme", metavar="FOLDER", help="The folder for offload to NVMe.")
@click.option("--port", type=click.IntRange(1, 65535), help="The port where the ranks meet (else 29500).")
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=30,
    show_default=True,
    help="Seconds a host has to answer.",
)
@click.option(
    "--smoke",
    is_flag=True,
    help="Then a real all-reduce for two seconds, matrix products, and each pair of hosts.",
)
@click.option(
    "--launcher",
    type=click.Choice(CHOICES),
    default="auto",
    help="How hosts are reached.  [default: auto]",
)
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="For --smoke: a folder that all hosts share.",
)
@click.option("--json", "as_json", is_flag=True, help="Print every fact and every result as JSON.")
def command(
    hostfile: str | None, hosts: str | None, smoke: bool, output_dir: Path, as_json: bool, **given: Any
) -> int:
    """Say what stands in the way of a job on this machine, or on every machine of it, and what to do about it.

    Other machines are asked through ssh, all at once; nothing needs to be installed there but python3, and nothing is
    changed. Exit 1 if anything is red. --smoke starts ranks as a job does, and leaves nothing where all went well.

    \b
    dsrun doctor                                     this machine
    dsrun doctor --hostfile hostfile                 every machine of a job
    dsrun doctor --hosts gpu[01-08] --data train.jsonl
    dsrun doctor --hostfile hostfile --smoke         and do they train together
    """
    from dsrun.cluster import doctor

    if hostfile and hosts:
        raise click.UsageError("--hostfile and --hosts both name the machines: give one of them.")
    named = _wanted(hostfile, hosts)
    given["launcher"] = _launcher(given["launcher"], named)
    env = _forwarded(named)
    hosts_asked = _asked(named, given, env)
    results = doctor.examine(hosts_asked)
    # Before --smoke starts ranks, which takes a minute: a check often says why they will fail.
    if not as_json:
        _print_list(hosts_asked[0], results) if len(hosts_asked) == 1 else _print_table(hosts_asked, results)
        _print_fixes(hosts_asked, results)
    smoke_result = _smoke(hosts_asked, output_dir, given, env) if smoke else None
    if as_json:
        _print_json(hosts_asked, results, smoke_result)
    elif smoke_result:
        _print_smoke(smoke_result)
    failed = smoke_result is not None and smoke_result.found is None
    judged = [*results, *(smoke_result.remarks if smoke_result else ())]
    return int(failed or any(result.colour == "red" for result in judged))


def _launcher(choice: str, hosts: Sequence[tuple[str, int | None]]) -> str:
    from dsrun.cluster import ssh
    from dsrun.jobs.launchers import AUTO, ON_THIS_MACHINE, SSH

    if choice != AUTO:
        return choice
    return ON_THIS_MACHINE if len(hosts) == 1 and ssh.is_here(hosts[0][0]) else SSH


def _forwarded(hosts: Sequence[tuple[str, int | None]]) -> dict[str, str]:
    """This machine's variables that ranks on the hosts get. On this machine alone they have them all."""
    from dsrun.cluster import ssh
    from dsrun.jobs.launchers.common.forwarded_environment import forwarded

    return forwarded(os.environ, files=[] if all(ssh.is_here(host) for host, _ in hosts) else None)


def _wanted(hostfile: str | None, hosts: str | None) -> list[tuple[str, int | None]]:
    """The hosts and their slots."""
    if hostfile:
        from dsrun.cluster.hostfile import checked

        return [(entry.host, entry.slots) for entry in checked(Path(hostfile))]
    if hosts:
        from dsrun.cluster.hostlist import with_open_slots

        return with_open_slots(hosts)
    import socket

    return [(socket.gethostname() or "localhost", None)]


def _asked(
    named: Sequence[tuple[str, int | None]], given: dict[str, Any], env: Mapping[str, str]
) -> list[Host]:
    """The hosts with what they answered."""
    from dsrun.jobs.supervision import host_checks

    ask = host_checks.way(given["launcher"])
    if ask is None:
        raise click.UsageError(f"--launcher {given['launcher']}: there is no way to ask the hosts.")
    options = {
        "cwd": str(Path.cwd()),
        "data": str(Path(given["data"]).expanduser().absolute()) if given["data"] else None,
        "nvme": str(Path(given["nvme"]).expanduser().absolute()) if given["nvme"] else None,
        "port": given["port"],
        "import_torch": True,
    }
    return host_checks.asked(named, options, env, ask, given["timeout"])


def _smoke(hosts: Sequence[Host], parent: Path, given: dict[str, Any], env: Mapping[str, str]) -> Smoke:
    """The result of --smoke. Exits with the signal's code where one ends it."""
    from dsrun.job.processes import TerminatedError
    from dsrun.jobs.supervision.run_options import RunOptions
    from dsrun.jobs.supervision.smoke import smoke

    options = RunOptions(env=env, master_port=given["port"] or 0)
    try:
        return smoke(
            hosts, given["launcher"], parent, os.environ, options, say=lambda line: click.echo(line, err=True)
        )
    except TerminatedError:
        raise SystemExit(143) from None  # 128 + SIGTERM, as shells say it


def _print_smoke(smoke: Smoke) -> None:
    """A line with what came of it, or the failing host's own error."""
    if smoke.found is None:
        word = _word("red")
        for problem in smoke.problems:
            lines = map(printable, str(problem).split("\n"))
            click.echo(f"\n{word}  smoke: " + "\n".join(lines))
        if smoke.run_dir:
            click.echo(f"  Its run folder: {smoke.run_dir}")
        return
    measured = smoke.found
    across = f"{smoke.hosts} hosts" if smoke.hosts > 1 else "this machine"
    by = f" by {measured['interface']}" if measured["interface"] else ""
    size = f"{measured['bytes'] >> 20} MiB"
    summary = (
        f"{smoke.ranks} ranks on {across} add up {size} in {measured['seconds'] * 1000:.1f} ms "
        f"({measured['bus_gb_s']:.2f} GB/s of bus bandwidth), 8 bytes in {measured['small_us']:.0f} us"
        if smoke.ranks > 1
        else f"the only rank on {across} has nobody to add up with; {measured['backend']} starts"
    )
    word = _word("green")
    click.echo(
        f"\n{word}  smoke: {printable(summary + by)} ({measured['backend']}; {smoke.seconds:.0f} s in all)"
    )
    click.echo(f"{word}  matrix: {printable(_speeds(measured['cards']))}")
    if pairs := measured["pairs"]:
        rates = sorted(pair[2] for pair in pairs)
        click.echo(
            f"{word}  pairs: {len(rates)} of hosts exchange {rates[0]:.2f} to {rates[-1]:.2f} GB/s each way"
        )
    for result in smoke.remarks:
        word = _word(result.colour)
        click.echo(
            f"\n{word}  {result.check}: {printable(result.host)}: {printable(result.what)}\n  {printable(result.fix)}"
        )


def _speeds(cards: Sequence[Mapping[str, Any]]) -> str:
    """The products' speed, by kind of device."""
    kinds: dict[tuple[str, str], list[float]] = {}
    for card in cards:
        kinds.setdefault((card["device"], card["dtype"]), []).append(card["tflops"])
    return "; ".join(
        f"{len(rates)} x {device} multiply in {dtype} at {min(rates):.3g} to {max(rates):.3g} TFLOP/s"
        for (device, dtype), rates in kinds.items()
    )


def _print_json(hosts: Sequence[Host], results: Sequence[CheckResult], smoke: Smoke | None) -> None:
    import dataclasses

    rows = [
        {"host": host.name, "slots": host.slots, "facts": host.facts, "fault": host.fault or None}
        for host in hosts
    ]
    value: dict[str, Any] = {"hosts": rows, "results": [dataclasses.asdict(result) for result in results]}
    if smoke:
        value["smoke"] = {**dataclasses.asdict(smoke), "found": dict(smoke.found) if smoke.found else None}
    print_json("doctor", value)


def _print_list(host: Host, results: Sequence[CheckResult]) -> None:
    """One host: a line for each check."""
    width = max(len(result.check) for result in results)
    click.echo(printable(host.name))
    for result in results:
        word = _word(result.colour, 4)
        line = f"{' ' * 6}  {result.check:<{width}}  {printable(result.what)}"  # a colour's code has no width
        click.echo(f"  {word}{folded(line, screen_width(), width + 10)[6:]}")


def _print_table(hosts: Sequence[Host], results: Sequence[CheckResult]) -> None:
    """A row a host, a column a group of checks."""
    import sys

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from dsrun.cluster.doctor import groups, worst

    group_of = {check.name: group.name for group in groups() for check in group.checks}
    colours: dict[tuple[str, str], list[str]] = {}
    for result in results:
        colours.setdefault((result.host, group_of[result.check]), []).append(result.colour)
    names = max(len(host.name) for host in hosts)
    room = screen_width() or sys.maxsize
    others = sum(len(group.title) + 1 for group in groups())
    # One blank between the columns where two leave a name too little; a name that is longer goes on below.
    close = names + others + len(groups()) > room
    table = Table(box=None, pad_edge=False, collapse_padding=close)
    table.add_column("host", overflow="fold", width=min(names, max(room - others, LEAST_NAME)))
    for group in groups():
        table.add_column(group.title, no_wrap=True)
    cells = {
        host.name: [worst(colours.get((host.name, group.name), [])) for group in groups()] for host in hosts
    }
    shown = sorted(hosts, key=lambda host: ("red" not in cells[host.name], "yellow" not in cells[host.name]))
    shown = shown[:MOST_ROWS]
    for host in hosts if len(hosts) <= MOST_ROWS else shown:
        row = [Text(WORDS[colour], style=STYLES[colour]) for colour in cells[host.name]]
        table.add_row(Text(printable(host.name)), *row)
    # Elsewhere than on a terminal nothing is cut.
    Console(width=None if screen_width() else 100 + names, highlight=False).print(table)
    if len(hosts) > MOST_ROWS:
        rest = {host.name for host in hosts} - {host.name for host in shown}
        fine = sum(1 for name in rest if not {"red", "yellow"} & set(cells[name]))
        click.echo(f"and {len(rest)} hosts more, {fine} of them without a remark")


def _print_fixes(hosts: Sequence[Host], results: Sequence[CheckResult]) -> None:
    """Every red and yellow result with what to do; the same of several hosts once. The count goes to stderr."""
    from dsrun.cluster.doctor.check import alike
    from dsrun.jobs.allocation.allocation import few

    counts = {colour: sum(1 for result in results if result.colour == colour) for colour in ("red", "yellow")}
    for colour in counts:
        for check, groups in alike(results, colour).items():
            for group in groups[:MOST_ALIKE]:
                where = f"{printable(few([result.host for result in group]))}: " if len(hosts) > 1 else ""
                click.echo(f"\n{_word(colour)}  {check}: {where}{printable(group[0].what)}")
                like = " (likewise for the others)" if len({result.fix for result in group}) > 1 else ""
                click.echo(f"  {printable(group[0].fix)}{like}")
            if rest := [result for group in groups[MOST_ALIKE:] for result in group]:
                click.echo(f"\n{_word(colour)}  {check}: {len(rest)} hosts more: --json")
    silent = sum(1 for host in hosts if host.facts is None)
    summary = counted(len(hosts), "host") + (f", {silent} without an answer" if silent else "")
    click.echo(f"\ndsrun: {summary}; {counts['red']} red, {counts['yellow']} yellow", err=True)


def _word(colour: str, width: int = 0) -> str:
    return click.style(f"{WORDS[colour]:<{width}}", fg=STYLES[colour])
