"""This machine alone, with the agent as a child process. It isn't chosen by name."""

from __future__ import annotations

from collections.abc import Sequence

from dsrun.jobs.launchers import Launcher


def to_each(_host: str, command: Sequence[str]) -> list[str]:
    """The command itself."""
    return list(command)


LAUNCHER = Launcher("local", to_each=to_each)
