"""Shared by the commands that run a job: its run options, its devices, and how the command exits."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dsrun.cli.output.results import print_json

if TYPE_CHECKING:
    from dsrun.cli.jobs.detach import Detached
    from dsrun.cluster.devices import Machine
    from dsrun.job.checkpoints import CheckpointChoice
    from dsrun.job.job import AnyJob
    from dsrun.jobs.allocation.request import ConnectionOptions
    from dsrun.jobs.allocation.reservation import Allocator
    from dsrun.jobs.assembly import PlannedJob
    from dsrun.jobs.supervision.run import View
    from dsrun.jobs.supervision.run_options import RunOptions
    from dsrun.options.commands import FinetuneOptions, LaunchOptions, RerunOptions
    from dsrun.options.table import SupervisionOptions

EX_TEMPFAIL = 75
"""sysexits.h: the same again may succeed."""
P = TypeVar("P", bound="PlannedJob[Any]")


def run_options_of(
    connection: ConnectionOptions, launcher: str, options: SupervisionOptions | None = None
) -> tuple[RunOptions, dict[str, str]]:
    """The options of a job's run, and the environment that it is started in. Raises DsrunError.

    The environment is the user's, with what the cluster's file and --env add. launcher: the job's; options: the
    command's.
    """
    from dsrun.jobs.launchers import ON_THIS_MACHINE
    from dsrun.jobs.launchers.common.forwarded_environment import forwarded
    from dsrun.jobs.supervision.run_options import GROUP_TIMEOUT, RunOptions
    from dsrun.options.declare import select

    # DeepSpeed's launcher takes variables of .deepspeed_env to other hosts only; here the ranks have this environment.
    files = () if launcher == ON_THIS_MACHINE else None
    env = forwarded(os.environ, add=connection.env, files=files, cluster=connection.cluster_env)
    names = [*connection.cluster_env, *(text.partition("=")[0] for text in connection.env)]
    added = {name: env[name] for name in names}
    if options and options.timeout:
        added[GROUP_TIMEOUT] = env[GROUP_TIMEOUT] = str(options.timeout)
    run_options = select(
        RunOptions, options, check=connection.check, env=env, master_addr=connection.master_addr or "",
        master_port=connection.master_port or 0,
    )  # fmt: skip
    return run_options, {**os.environ, **added}


def run_job(
    job: AnyJob,
    machine: Machine,
    connection: ConnectionOptions,
    options: FinetuneOptions | LaunchOptions,
    *,
    view: View,
    summarise: Callable[[dict[str, Any]], None],
    again: str,
    resume: CheckpointChoice | None = None,
    away: Detached | None = None,
    run_file: str = "",
    after: Callable[[dict[str, Any]], dict[str, str]] = lambda _: {},
) -> None:
    """Carry a job out and print its result. Exits with the signal's code where one ends it.

    machine: this one; again: the way to go on then, in words; resume, run_file: see carry_out; away: with --detach.
    after: called with the result of a job that ended well; returns what it adds to it.
    """
    from dsrun.jobs.assembly.checks import memory_check
    from dsrun.jobs.supervision.run import carry_out

    run_options, environ = run_options_of(connection, job.launcher, options)
    view = away.watching(view) if away else view
    with ending(again):
        result = carry_out(
            job, machine, environ, say, view, options=run_options, resume=resume, run_file=run_file,
            way_out=memory_check.way_out,
        )  # fmt: skip
        if options.as_json:
            from dsrun.job.job import ScriptJob

            form = "launch" if isinstance(job, ScriptJob) else "finetune"
            print_json(form, result | after(result))
        else:
            summarise(result)
            after(result)


def began(run_dir: Path | None) -> bool:
    """Whether the run was started before, for --continue. Raises click.UsageError."""
    from dsrun.job.run_folder import JOB

    if run_dir is None:
        raise click.UsageError("--continue needs the run's folder: --output-dir RUN")
    return os.path.lexists(run_dir / JOB)  # a folder that may not be looked into is judged later, in words


@contextmanager
def allocated(
    plan: Callable[[Allocator, bool], P],
    connection: ConnectionOptions,
    options: FinetuneOptions | LaunchOptions | RerunOptions,
    *,
    dry_run: bool = False,
) -> Iterator[tuple[P, Machine]]:
    """A planned job and this machine, with its devices locked until the body ends; a dry run only looks.

    plan: makes the job with an allocator; its second argument is whether it is for good. options: the command's; with
    --force CPU ranks may share the cores. Raises DsrunError.
    """
    from math import inf

    from dsrun.cluster.devices import detect
    from dsrun.jobs.allocation import reservation
    from dsrun.jobs.allocation.allocation import ask_hosts, remembered

    cpu_slots = options.gpus if options.force else None
    machine, ask = detect(os.environ).with_cpu_slots(cpu_slots), remembered(ask_hosts)
    wait_min = options.wait_timeout if options.wait_timeout is not None else inf if options.wait else None
    # What can be planned while the GPUs are busy is planned for the machine as it will be when the wait is over.
    idle = reservation.idle(machine)
    if dry_run:
        machine_seen = machine if wait_min is None else idle
        yield plan(reservation.Preview(machine_seen, os.environ, connection, ask), False), machine
        return
    if wait_min is not None and machine.accelerator == "cuda":
        # Every other problem is reported before hours of waiting.
        plan(reservation.Preview(idle, os.environ, connection, ask), False)
    with reservation.Reservation(
        machine,
        os.environ,
        lambda: detect(os.environ).with_cpu_slots(cpu_slots),
        say,
        connection=connection,
        ask=ask,
        wait_min=wait_min,
    ) as reserved:
        planned = plan(reserved, True)
        yield planned, reserved.machine


def say(line: str) -> None:
    """Print to stderr, without secrets."""
    from dsrun.host.hiding import without_secrets

    click.echo(without_secrets(line), err=True)


def tell(notes: Iterable[str]) -> None:
    """Print notes to stderr."""
    from dsrun.cli.output.columns import folded, screen_width

    for note in notes:
        say(folded(f"note: {note}", screen_width(err=True), 4))


def join_pods(connection: ConnectionOptions, run_dir: Path | None, *, dry_run: bool) -> None:
    """Become a host agent in all pods of a Kubernetes job but the first; they all run the same command. Agents exit
    here."""
    from dsrun.jobs.launchers import KUBERNETES
    from dsrun.jobs.launchers.kubernetes.pods import become_agent

    if connection.launcher == KUBERNETES and not dry_run:
        become_agent(os.environ, run_dir)


@contextmanager
def ending(again: str) -> Iterator[None]:
    """Exit with the signal's code where one ends the job, which outlives the readers of its output.

    again: the way to go on, in words.
    """
    from dsrun.job.processes import TerminalClosedError, TerminatedError, TimeLimitError
    from dsrun.streams import lasting_streams

    with lasting_streams():
        try:
            yield
        except TimeLimitError:
            click.echo(f"dsrun: the time limit is near (SIGUSR1); the job has ended\n  {again}", err=True)
            _requeue()
            sys.exit(EX_TEMPFAIL)
        except KeyboardInterrupt:
            click.echo(f"dsrun: interrupted; every process of the job has ended\n  {again}", err=True)
            sys.exit(130)
        except TerminalClosedError:
            click.echo(
                f"dsrun: the terminal was closed; every process of the job has ended\n  {again}\n"
                "  With --detach it goes on without a terminal.",
                err=True,
            )
            sys.exit(129)  # 128 + SIGHUP
        except TerminatedError:
            click.echo(f"dsrun: asked to end; every process of the job has ended\n  {again}", err=True)
            sys.exit(143)  # 128 + SIGTERM, as shells say it


def _requeue() -> None:
    """Put Slurm's job back into the queue, where it was sent to come back. Ends this process soon, so it comes last."""
    import subprocess

    from dsrun.jobs.launchers.slurm.allocation import current_job

    slurm_job = current_job(os.environ)
    if slurm_job is None or not slurm_job.requeue:
        return
    sys.stderr.flush()
    done = subprocess.run(
        ["scontrol", "requeue", slurm_job.job_id], check=False, stdin=subprocess.DEVNULL, timeout=60
    )
    if done.returncode:
        click.echo(f"dsrun: scontrol requeue {slurm_job.job_id} ended with {done.returncode}", err=True)
