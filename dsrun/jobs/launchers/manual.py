"""No way at all: the user starts one command on every host, and dsrun waits for them to call in."""

from __future__ import annotations

from collections.abc import Sequence

from dsrun.jobs.launchers import Launcher
from dsrun.jobs.scripts import quoted


def by_hand(hosts: Sequence[str], command: Sequence[str]) -> list[str]:
    """A line for every host."""
    return [f"on {host}:  {quoted([*command, '--node', str(number)])}" for number, host in enumerate(hosts)]


LAUNCHER = Launcher("manual", by_hand=by_hand)
