"""`pdsh -R ssh`, DeepSpeed's own default, where your cluster's documentation says so.

It hands the command to each host's shell and fills in the host's number for %n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dsrun.jobs.launchers import Launcher
from dsrun.jobs.launchers.common.shell_scripts import quoted

MOST = 1024
"""Connections at once; pdsh alone would take 32, and the rest would wait for the first to end."""


def to_all(hosts: Sequence[str], command: Sequence[str], _environ: Mapping[str, str]) -> list[str]:
    """`pdsh -w hosts command`. A % in the command is doubled: pdsh replaces what follows one."""
    text = quoted([word.replace("%", "%%") for word in command])
    return ["pdsh", "-R", "ssh", "-S", "-f", str(MOST), "-w", ",".join(hosts), f"{text} --node %n"]


LAUNCHER = Launcher("pdsh", program="pdsh", package="pdsh", to_all=to_all)
