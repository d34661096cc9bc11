"""What the commands that run a job have in common: how it goes on, and how they end when it is ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from dsrun.jobs.placed import Reach
    from dsrun.jobs.run import Going

EX_TEMPFAIL = 75
"""sysexits.h: the same again may succeed."""
F = TypeVar("F", bound=Callable[..., Any])
GOING = (
    click.option(
        "--hang-timeout",
        type=click.FloatRange(min=0, min_open=True),
        metavar="MINUTES",
        help="End a job of which nothing was heard for so long, with every rank's stack in its log.",
    ),
    click.option(
        "--max-restarts", type=click.IntRange(min=0), help="Start it again where it fails, so often at most."
    ),
)
"""How a job goes on: the arguments of `going_of`."""


save_option = click.option(
    "--save-on-stop",
    type=click.FloatRange(min=0, min_open=True),
    metavar="MINUTES",
    help="When it is asked to end, write a checkpoint first; it has so long.",
)


def going_options(function: F) -> F:
    """Give a command all of them, in this order."""
    for option in reversed(GOING):
        function = option(function)
    return function


def going_of(
    reach: Reach,
    launcher: str,
    *,
    hang_timeout: float | None = None,
    max_restarts: int | None = None,
    save_on_stop: float | None = None,
) -> tuple[Going, dict[str, str]]:
    """How a job goes on, and the environment that it is started in: the user's, and what the cluster's file and --env
    add. Raises DsrunError.

    launcher: the job's; hang_timeout, save_on_stop: in minutes.
    """
    from dsrun.jobs.head import Wishes
    from dsrun.jobs.placed import ON_THIS_MACHINE
    from dsrun.jobs.run import Going
    from dsrun.jobs.travel import travelling

    # What DeepSpeed's launcher would take to other hosts out of a file, it doesn't take into a job of this machine.
    files = () if launcher == ON_THIS_MACHINE else None
    env = travelling(os.environ, add=reach.env, files=files, site=reach.site)
    names = [*reach.site, *(text.partition("=")[0] for text in reach.env)]
    added = {name: env[name] for name in names}
    wishes = Wishes(
        env=env,
        master_addr=reach.master_addr or "",
        master_port=reach.master_port or 0,
        hang_timeout_s=(hang_timeout or 0.0) * 60,
        save_s=(save_on_stop or 0.0) * 60,
    )
    return Going(wishes, max_restarts or 0, check=reach.check), {**os.environ, **added}


def began(run_dir: Path | None) -> bool:
    """Whether a run that is to go on was started before: what --continue asks. Raises click.UsageError."""
    from dsrun.jobs.run_folder import JOB

    if run_dir is None:
        raise click.UsageError("--continue goes on with the run in a folder. Name it: --output-dir RUN")
    return (run_dir / JOB).exists()


def join_pods(reach: Reach, run_dir: Path | None, *, dry_run: bool) -> None:
    """In a Kubernetes job's pods, which all run the same command: all but the first help that one, and exit."""
    from dsrun.jobs.placed import KUBERNETES
    from dsrun.jobs.pods import become_agent

    if reach.launcher == KUBERNETES and not dry_run:
        become_agent(os.environ, run_dir)


@contextmanager
def ending(again: str) -> Iterator[None]:
    """Exit with the signal's code where the job is asked to end. again: how to go on, in words."""
    from dsrun.jobs.processes import TerminatedError, TimeLimitError

    try:
        yield
    except TimeLimitError:
        click.echo(f"dsrun: the time limit is near (SIGUSR1); the job has ended\n  {again}", err=True)
        _requeue()
        sys.exit(EX_TEMPFAIL)
    except KeyboardInterrupt:
        click.echo(f"dsrun: interrupted; every process of the job has ended\n  {again}", err=True)
        sys.exit(130)
    except TerminatedError:
        click.echo(f"dsrun: asked to end; every process of the job has ended\n  {again}", err=True)
        sys.exit(143)  # 128 + SIGTERM, as shells say it


def _requeue() -> None:
    """Put Slurm's job back into the queue, where it was sent to come back. Ends this process soon, so it comes last."""
    import subprocess

    from dsrun.jobs.slurm import allocation

    given = allocation(os.environ)
    if given is None or not given.requeue:
        return
    sys.stderr.flush()
    done = subprocess.run(
        ["scontrol", "requeue", given.job_id], check=False, stdin=subprocess.DEVNULL, timeout=60
    )
    if done.returncode:
        click.echo(f"dsrun: scontrol requeue {given.job_id} ended with {done.returncode}", err=True)
