from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture(scope="session")
def dsrun_here(environ, tmp_path_factory) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`dsrun_here(*words)`: a dsrun that is under way, in a process and a session of its own."""
    started: list[subprocess.Popen[str]] = []
    cwd = tmp_path_factory.mktemp("cwd")

    def run(*words: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "dsrun", *map(str, words)],
            env=environ, cwd=cwd, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
