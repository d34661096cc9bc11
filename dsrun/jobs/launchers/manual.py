"""You: dsrun prints a command for each host and waits until all were started. For hosts with no way between them."""

from __future__ import annotations

from collections.abc import Sequence

from dsrun.jobs.launchers import Launcher
from dsrun.jobs.launchers.common.shell_scripts import quoted


def by_hand(hosts: Sequence[str], command: Sequence[str]) -> list[str]:
    """A line for every host."""
    return [f"on {host}:  {quoted([*command, '--node', str(number)])}" for number, host in enumerate(hosts)]


LAUNCHER = Launcher("manual", by_hand=by_hand)
