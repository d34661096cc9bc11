"""`dsrun plan --calibrate RUN...`: correct the planner by finished runs on this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import click

from dsrun.cli.output.results import print_json
from dsrun.words import counted

NAMES = {
    "gpu_allocated_bytes": "GPU memory in use",
    "gpu_reserved_bytes": "GPU memory held",
    "host_bytes": "host memory",
    "step_seconds": "seconds a step",
}


def calibrate(folders: Sequence[str], as_json: bool) -> None:
    """Fit the corrections to the runs, write the user's file, and print the errors before and after."""
    from dsrun.jobs.runs import calibration

    if not folders:
        raise click.UsageError("--calibrate needs run folders: dsrun plan --calibrate runs/*")
    devices = calibration.learn(calibration.read_all([Path(folder).expanduser() for folder in folders]))
    path = calibration.save(devices)
    if as_json:
        values = [dataclasses.asdict(device) for device in devices]
        print_json("plan-calibrate", {"file": str(path), "devices": values})
        return
    for device in devices:
        click.echo(f"{device.device}, {counted(device.runs, 'run')}:")
        for name, (before, after) in device.errors.items():
            click.echo(f"  {NAMES[name]:<20} median error {before:.1%} -> {after:.1%}")
    click.echo(f"written to {path}; plans for these devices use it from now on")
