"""One `ssh` for each host, over whose pipes coordinator and agent communicate. Needs nothing else, and no open port.

What the hosts are called, keys, users, jump hosts: as the user's own ssh has them.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsrun.cluster import ssh
from dsrun.job.job import LOCAL
from dsrun.jobs.launchers import Launcher


def to_each(host: str, command: Sequence[str]) -> list[str]:
    """Through ssh, or directly where the host is this machine."""
    if host == LOCAL or ssh.is_here(host):
        return list(command)
    return ssh.words(ssh.program() or "ssh", host, command)


LAUNCHER = Launcher("ssh", program="ssh", package="openssh-client", to_each=to_each)
