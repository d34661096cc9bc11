"""The options that say where a job runs, the same for every command that starts one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dsrun.jobs.launchers import CHOICES

if TYPE_CHECKING:
    from dsrun.jobs.placed import Reach
    from dsrun.jobs.sites import Site

COUNT = click.IntRange(min=1)
LAUNCHERS = CHOICES
HERE = {
    "slurm": ("through Slurm's queue", "ask for hosts first: salloc --nodes 2"),
    "kubernetes": ("as pods", "choose other machines: --hosts node[01-16]:8"),
}
"""Launchers whose jobs are sent from elsewhere: how they start there, and another way."""
F = TypeVar("F", bound=Callable[..., Any])
PLACES = (
    click.option(
        "--gpus",
        type=COUNT,
        help="How many GPUs, free ones (or, without GPUs, CPU ranks); with hosts: of each.",
    ),
    click.option(
        "--devices", help='Which devices, in the order of ranks: "2,3", "0-3", "host1:0-3,host2:all".'
    ),
    click.option(
        "--hostfile",
        type=click.Path(path_type=Path),
        help="The hosts and their slots, as DeepSpeed reads them.",
    ),
    click.option("--hosts", metavar="LIST", help='The hosts, in short: "node[01-16]:8".'),
    click.option("--nodes", type=COUNT, help="The first so many of the hosts."),
    click.option(
        "-i", "--include", metavar="FILTER", help='Only these, as DeepSpeed writes it: "h1@h2:0,2".'
    ),
    click.option("-e", "--exclude", metavar="FILTER", help="All but these."),
)
"""Which devices of which hosts: the fields of dsrun.jobs.placed.Wanted."""
WAYS = (
    click.option(
        "--cluster",
        metavar="NAME",
        help="A file of launch/clusters, by name or path: hosts, launcher, variables.  [default: $DSRUN_CLUSTER]",
    ),
    click.option("--launcher", type=click.Choice(LAUNCHERS), help="How hosts are reached.  [default: auto]"),
    click.option("--no-check", is_flag=True, help="Don't ask the hosts first what they have."),
    click.option("--master-addr", metavar="ADDRESS", help="Where the ranks meet.  [default: the first host]"),
    click.option("--master-port", type=click.IntRange(1, 65535), help="[default: a free one]"),
    click.option(
        "--env", multiple=True, metavar="NAME[=VALUE]", help="A variable that the ranks are to have, too."
    ),
)
"""How the hosts are reached: the fields of dsrun.jobs.placed.Reach."""


WAITS = (
    click.option("--wait", is_flag=True, help="Wait for GPUs of this machine that others use."),
    click.option(
        "--wait-timeout",
        type=click.FloatRange(min=0),
        metavar="MINUTES",
        help="Wait, and give up after so many minutes.",
    ),
)
"""Of the commands that may begin hours later."""


def wait_options(function: F) -> F:
    """Give a command both of them."""
    for option in reversed(WAITS):
        function = option(function)
    return function


def where_options(function: F) -> F:
    """Give a command all of them, in this order."""
    for option in reversed((*PLACES, *WAYS)):
        function = option(function)
    return function


def reach_of(options: dict[str, Any], *, again: bool = False) -> Reach:
    """Take WAYS' values out of a command's options, and put the cluster's hosts into them where the user names none.

    again: it is about a run, which had hosts of its own: those that only a variable leads to don't count. Raises
    DsrunError for a cluster whose jobs don't start from here.
    """
    from dsrun.jobs.placed import Reach

    site, name, by_variable = _site(options.pop("cluster", None))
    launcher = options.pop("launcher", None)
    if site and not (by_variable and (again or _in_slurm())):
        launcher = _of_site(site, name, launcher, options, by_variable=by_variable)
    return Reach(
        launcher=launcher or "auto",
        check=not options.pop("no_check", False),
        master_addr=options.pop("master_addr", None),
        master_port=options.pop("master_port", None),
        env=tuple(options.pop("env", ()) or ()),
        site=site.exports if site else {},
    )


def _site(named: str | None) -> tuple[Site | None, str, bool]:
    """The cluster, if there is one, what it was called, and whether it is only the variable that names it."""
    from dsrun.jobs import sites

    name = named or os.environ.get(sites.CLUSTER) or ""
    return (sites.load(name) if name else None), name, named is None


def _in_slurm() -> bool:
    from dsrun.jobs.slurm import allocation

    return allocation(os.environ) is not None


def _of_site(
    site: Site, name: str, launcher: str | None, options: dict[str, Any], *, by_variable: bool
) -> str | None:
    """The launcher that is left when the cluster has had its say; its hosts go into the options."""
    if site.launcher in HERE:
        if launcher is None and not _hosts_are_named(options):
            _check_here(site, name, by_variable=by_variable)
            return "kubernetes" if site.launcher == "kubernetes" else None
        return launcher
    if options.get("hosts") is None and options.get("hostfile") is None and (site.hosts or site.hostfile):
        options["hosts"] = site.hosts
        options["hostfile"] = Path(site.hostfile) if site.hostfile else None
        if by_variable:
            click.echo(f"note: the hosts are those of {site.path} ($DSRUN_CLUSTER)", err=True)
    return launcher or (site.launcher if _hosts_are_named(options) else None)


def _hosts_are_named(options: dict[str, Any]) -> bool:
    by_option = any(options.get(name) is not None for name in ("hosts", "hostfile"))
    return by_option or ":" in (options.get("devices") or "") or bool(os.environ.get("DSRUN_HOSTFILE"))


def _check_here(site: Site, name: str, *, by_variable: bool) -> None:
    """Raise DsrunError where the cluster's jobs are sent, and this is none that was."""
    from shlex import quote

    from dsrun.errors import DsrunError
    from dsrun.jobs.pods import is_pod

    if is_pod(os.environ) if site.launcher == "kubernetes" else _in_slurm():
        return
    how, other = HERE[site.launcher]
    here = "; or, on this machine: DSRUN_CLUSTER= dsrun ..." if by_variable else ""
    raise DsrunError(
        f"starts its jobs {how}, and this is none of them",
        where=str(site.path),
        hint=f"Send it: dsrun submit --cluster {quote(name)} -- finetune ...; or {other}{here}",
    )
