"""The hosts of a job, by its options and the cluster's file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsrun.errors import DsrunError
from dsrun.options.declare import T, entries
from dsrun.options.layers import Resolved, Source

if TYPE_CHECKING:
    from dsrun.jobs.allocation.request import ConnectionOptions
    from dsrun.jobs.launchers.common.cluster_files import ClusterFile

SUBMITTED = {
    "slurm": ("through Slurm's queue", "ask for hosts first: salloc --nodes 2"),
    "kubernetes": ("as pods", "choose other machines: --hosts node[01-16]:8"),
}
"""Launchers whose jobs are submitted: how they start, and what to do instead."""


def connection_of(requested: Resolved[T], *, again: bool = False) -> tuple[Resolved[T], ConnectionOptions]:
    """The way to hosts, and the options with the cluster's hosts where the user names none.

    requested: options that have DeviceOptions and HostOptions among them. again: it is about a run, which had hosts of
    its own: those that only a variable leads to don't count. Raises DsrunError for a cluster whose jobs don't start
    from here.
    """
    from dsrun.jobs.allocation.request import ConnectionOptions
    from dsrun.options.declare import select
    from dsrun.options.table import HostOptions

    host_options = select(HostOptions, requested.options)
    cluster, name, by_variable = _cluster_file(host_options.cluster)
    # $DSRUN_CLUSTER is a habit and not a request: it doesn't move a run that has hosts of its own, nor a job that
    # Slurm has placed already.
    if cluster and not (by_variable and (again or _in_slurm())):
        values = _from_cluster(requested, cluster, name, by_variable=by_variable)
        requested = requested.filled(Source.CLUSTER_FILE, values, str(cluster.path))
        if by_variable:
            requested = requested.filled(Source.ENVIRONMENT, {"cluster": name}, "$DSRUN_CLUSTER")
    host_options = select(HostOptions, requested.options)
    connection = ConnectionOptions(
        launcher=host_options.launcher,
        check=not host_options.no_check,
        master_addr=host_options.master_addr,
        master_port=host_options.master_port,
        env=host_options.env,
        cluster_env=cluster.exports if cluster else {},
    )
    return requested, connection


def _from_cluster(
    requested: Resolved[Any], cluster: ClusterFile, name: str, *, by_variable: bool
) -> Mapping[str, object]:
    """Options from a cluster's file: its hosts where the user names none, and its launcher."""
    hosts_named = _hosts_are_named(requested)
    if cluster.launcher in SUBMITTED:
        if not hosts_named and not requested.said("launcher"):
            _check_here(cluster, name, by_variable=by_variable)
            return {"launcher": "kubernetes"} if cluster.launcher == "kubernetes" else {}
        return {}
    hosts: dict[str, object] = {}
    if (
        requested.options.hosts is None
        and requested.options.hostfile is None
        and (cluster.hosts or cluster.hostfile)
    ):
        hosts = {"hosts": cluster.hosts, "hostfile": Path(cluster.hostfile) if cluster.hostfile else None}
        if by_variable:
            click.echo(f"note: the hosts are those of {cluster.path} ($DSRUN_CLUSTER)", err=True)
    return {**hosts, "launcher": cluster.launcher} if hosts or hosts_named else {}


def _hosts_are_named(requested: Resolved[Any]) -> bool:
    options = requested.options
    by_option = options.hosts is not None or options.hostfile is not None
    return (
        by_option
        or ":" in (options.devices or "")
        or entries(type(options))["hostfile"].in_environment(os.environ) is not None
    )


def _cluster_file(option: str | None) -> tuple[ClusterFile | None, str, bool]:
    """The cluster's file if there is one, its name, and whether only $DSRUN_CLUSTER names it."""
    from dsrun.jobs.launchers.common import cluster_files
    from dsrun.options.table import HostOptions

    name = option or entries(HostOptions)["cluster"].in_environment(os.environ) or ""
    return (cluster_files.load(name) if name else None), name, option is None


def _in_slurm() -> bool:
    from dsrun.jobs.launchers.slurm.allocation import current_job

    return current_job(os.environ) is not None


def _check_here(cluster: ClusterFile, name: str, *, by_variable: bool) -> None:
    """Raise DsrunError where the cluster's jobs are submitted, unless this process is in one."""
    from shlex import quote

    from dsrun.jobs.launchers.kubernetes.pods import is_pod

    if is_pod(os.environ) if cluster.launcher == "kubernetes" else _in_slurm():
        return
    how, other = SUBMITTED[cluster.launcher]
    here = "; or, on this machine: DSRUN_CLUSTER= dsrun ..." if by_variable else ""
    raise DsrunError(
        f"starts its jobs {how}, not from here",
        where=str(cluster.path),
        hint=f"Send it: dsrun submit --cluster {quote(name)} -- finetune ...; or {other}{here}",
    )
