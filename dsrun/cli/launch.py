"""`dsrun launch`: run a DeepSpeed script of the user's own, here and now."""

from __future__ import annotations

import os
import sys
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsrun.cli._running import going_options
from dsrun.cli._where import wait_options, where_options

if TYPE_CHECKING:
    from dsrun.cluster.devices import Machine
    from dsrun.jobs.claims import Take
    from dsrun.jobs.job import ScriptJob
    from dsrun.jobs.placed import Reach
    from dsrun.jobs.runs import Run
    from dsrun.jobs.scripted import Planned, Request

POSITIVE = click.IntRange(min=1)


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as with python -m.")
@click.option("--preset", help="Make the DeepSpeed config of a preset, and hand it to the script.")
@click.option("--micro-batch", type=POSITIVE, help="Preset: rows per device and micro-step.")
@click.option("--grad-accum", type=POSITIVE, help="Preset: micro-steps per optimizer step.")
@click.option("--grad-clip", type=click.FloatRange(min=0), help="Preset: gradient norm to clip at; 0: never.")
@click.option(
    "--precision",
    type=click.Choice(["fp16", "bf16", "fp32"]),
    help="Preset: of weights and activations.  [default: what the devices do best, or HF Trainer's choice]",
)
@click.option(
    "--lr", type=click.FloatRange(min=0, min_open=True), help="Preset: the optimizer's learning rate."
)
@click.option("--nvme-path", help="Preset: a folder on an NVMe disk, where it offloads to it.")
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Preset: set a key.")
@click.option(
    "--config-option",
    metavar="NAME",
    help="How SCRIPT takes a config, where its source doesn't tell: --ds-config, or ds= for one word.",
)
@where_options
@wait_options
@going_options
@click.option(
    "--local-rank/--no-local-rank",
    default=None,
    help="Give SCRIPT --local_rank=N first, as DeepSpeed does.  [default: if it can take it]",
)
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path),
    help="The run's folder.  [default: runs/SCRIPT-TIME]",
)
@click.option(
    "--continue", "go_on", is_flag=True, help="Start it again in --output-dir, where it was started before."
)
@click.option("--force", is_flag=True, help="Start it with a config that is wrong.")
@click.option("--dry-run", is_flag=True, help="Print what would run; start and write nothing.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the result (or the dry run) as JSON, the rest to stderr."
)
def command(
    script: str,
    args: tuple[str, ...],
    *,
    wait: bool,
    wait_timeout: float | None,
    hang_timeout: float | None,
    max_restarts: int | None,
    go_on: bool,
    force: bool,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Run SCRIPT, a training script for DeepSpeed, on every device, and watch it to its end.

    All that follows SCRIPT is its own. A config that it names is validated first. What the ranks print is shown as one
    text, [rank N] where they differ, and kept in the run folder. A script that is started again has to find its own
    checkpoint.

    \b
    dsrun launch --gpus 2 train.py --deepspeed_config ds.json
    dsrun launch --devices 2,3 --preset zero2-offload train.py --epochs 3
    dsrun launch --hosts "node[01-04]:8" -m lab.train --lr 1e-5
    """
    from dsrun.cli import _dry_run
    from dsrun.cli._running import began, join_pods
    from dsrun.cli._where import reach_of
    from dsrun.cluster.devices import detect
    from dsrun.jobs import claims
    from dsrun.jobs.placed import ask_hosts, remembered

    _check_finite(wait_timeout=wait_timeout, hang_timeout=hang_timeout, **options)
    go_on = go_on and began(options["output_dir"])
    reach, ask = reach_of(options), remembered(ask_hosts)
    join_pods(reach, options["output_dir"], dry_run=dry_run)
    request = _request(script, args, options, again=go_on)
    machine = detect(os.environ)
    wait_min = wait_timeout if wait_timeout is not None else inf if wait else None
    ways: dict[str, Any] = {"hang_timeout": hang_timeout, "max_restarts": max_restarts}
    alone = claims.left_alone(machine)  # as it will be when the wait is over
    if dry_run:
        planned = _planned(
            request,
            claims.Look(machine if wait_min is None else alone, os.environ, reach, ask),
            force=force,
        )
        _dry_run.show(planned.job, reach, as_json=as_json)
        return
    if wait_min is not None and machine.accelerator == "cuda":
        # What else is wrong is said before hours of waiting.
        _planned(request, claims.Look(alone, os.environ, reach, ask), force=force, quiet=True)
    with claims.claim(
        machine, os.environ, lambda: detect(os.environ), _say, reach=reach, ask=ask, wait_min=wait_min
    ) as claim:
        planned = _planned(request, claim, force=force)
        claim.name(planned.job.run_dir)
        run(planned.job, claim.machine, reach, as_json=as_json, **ways)


def _check_finite(**numbers: Any) -> None:
    for name, value in numbers.items():
        if isinstance(value, float) and not isfinite(value):
            raise click.UsageError(f"--{name.replace('_', '-')} is not a finite number.")


def _request(script: str, args: tuple[str, ...], options: dict[str, Any], *, again: bool) -> Request:
    from dsrun.jobs.scripted import Request

    return Request(
        script=script,
        args=args,
        module=options.pop("module"),
        local_rank=options.pop("local_rank"),
        config_option=options.pop("config_option"),
        overrides=options.pop("overrides"),
        again=again,
        given={name: value for name, value in options.items() if value is not None},
    )


def _planned(request: Request, take: Take, *, force: bool, quiet: bool = False) -> Planned:
    from dsrun.jobs import scripted

    planned = scripted.plan(request, take.machine, os.environ, force=force, take=take)
    for note in () if quiet else planned.notes:
        _say(f"note: {note}")
    return planned


def _say(line: str) -> None:
    click.echo(line, err=True)


def again(found: Run, *, output_dir: Path | None, wait: bool, as_json: bool, options: dict[str, Any]) -> None:
    """What `dsrun rerun` does with a script's run. options: of where it is to run."""
    from dsrun.cli._where import reach_of
    from dsrun.cluster.devices import detect
    from dsrun.jobs import claims
    from dsrun.jobs.placed import Wanted
    from dsrun.jobs.scripted import repeated

    assert found.script is not None  # noqa: S101  (who calls has looked)
    machine, reach = detect(os.environ), reach_of(options, again=True)
    with claims.claim(
        machine,
        os.environ,
        lambda: detect(os.environ),
        _say,
        reach=reach,
        wait_min=inf if wait else None,
    ) as claim:
        wanted = Wanted.of(options)
        planned = repeated(
            found, found.script, machine, os.environ, output_dir=output_dir, wanted=wanted, take=claim
        )
        claim.name(planned.job.run_dir)
        for note in planned.notes:
            _say(f"note: {note}")
        run(planned.job, claim.machine, reach, hang_timeout=None, max_restarts=None, as_json=as_json)


def run(
    job: ScriptJob,
    machine: Machine,
    reach: Reach,
    *,
    hang_timeout: float | None,
    max_restarts: int | None,
    as_json: bool,
) -> None:
    """Carry a script's job out and say what came of it. Exits with the signal's code where it is asked to end."""
    from shlex import join

    from dsrun.cli._columns import span_text
    from dsrun.cli._running import ending, going_of
    from dsrun.jobs import scripted
    from dsrun.jobs.placed import in_words
    from dsrun.jobs.script_view import Output, ScriptView

    going, environ = going_of(reach, job.launcher, hang_timeout=hang_timeout, max_restarts=max_restarts)
    preset = f", preset {job.preset}" if job.preset else ""
    ranks = f"{job.world_size} rank{'s' * (job.world_size > 1)}"
    _say(f"{job.title}{preset}: {ranks} on {job.accelerator} ({in_words(job.hosts)})")
    output = Output(sys.stderr if as_json else sys.stdout, _say)
    view = ScriptView(Path(job.run_dir), job.world_size, output)
    with ending(f"Start it again: {join(['dsrun', 'rerun', job.run_dir])}"):
        result = scripted.carry_out(job, machine, environ, _say, view, going=going)
    if as_json:
        import json

        click.echo(json.dumps(result, ensure_ascii=False, indent=2))
    else:
        _say(f"finished after {span_text(result['seconds'])}; run folder {result['run_dir']}")
