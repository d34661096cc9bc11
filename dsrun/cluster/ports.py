"""A free port for the ranks to meet on."""

from __future__ import annotations

import random
import socket

from dsrun.errors import DsrunError

FIRST, LAST = 20000, 32000
"""Below the range from which Linux takes ports for outgoing connections (32768 and up), so that none of those can
take the port between its choice and its use."""


def free_port() -> int:
    """A port that nothing listens on, drawn at random so that two jobs started at once differ."""
    for port in random.SystemRandom().sample(range(FIRST, LAST), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise DsrunError(f"no free port between {FIRST} and {LAST}")
