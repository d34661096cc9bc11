"""Serves the board with uvicorn until somebody ends it."""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dsrun.errors import DsrunError
from dsrun.packages import needed
from dsrun.reports.board.known_runs import KnownRuns

LOOPBACK, USUAL_PORT = "127.0.0.1", 8420
COMMAND = "dsrun board"
GRACE_S = 2
SWITCH_S = 0.0005
"""After so long a thread that makes a page or reads a run gives way to one that answers; Python's own is ten times as
long, and an answer takes some twenty turns."""


def serve(folder: Path, port: int | None, say: Callable[[str], None]) -> None:
    """Serve the runs below a folder on the loopback address, until Ctrl-C. say: gets the address.

    port: None for the usual one, or another where that is taken. Raises DsrunError where the folder is not there, a
    package is missing, or the port is taken.
    """
    for name in ("starlette", "uvicorn", "matplotlib"):
        with needed(name, COMMAND):
            __import__(name)
    import uvicorn

    from dsrun.reports.board.app import make_app

    sys.setswitchinterval(SWITCH_S)
    runs, token = KnownRuns(folder), secrets.token_urlsafe(16)
    count = len(runs.lines())
    with listening(port) as listener:
        number = listener.getsockname()[1]
        config = uvicorn.Config(
            make_app(runs, token, number), log_level="warning", access_log=False, lifespan="off", ws="none",
            server_header=False, timeout_graceful_shutdown=GRACE_S,
        )  # fmt: skip
        say(f"{count} runs in {folder}: http://{LOOPBACK}:{number}/?token={token}")
        say(
            "Ctrl-C ends the board, not the runs. It is for this machine alone; from elsewhere: docs/howto/board.md"
        )
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


def listening(port: int | None) -> socket.socket:
    """A socket on the loopback address. Raises DsrunError where the port is taken."""
    for number in (USUAL_PORT, 0) if port is None else (port,):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, number))
        except OSError as error:
            listener.close()
            if port is not None:
                hint = "Name another one, or leave it out."
                raise DsrunError(
                    f"can't be used: {error.strerror}", where=f"--port {port}", hint=hint
                ) from error
        else:
            return listener
    raise DsrunError("no port is free on the loopback address", where=COMMAND)
