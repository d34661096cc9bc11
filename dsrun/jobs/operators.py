"""DeepSpeed's operators are compiled on a host before its ranks need them: one dsrun at a time, past dead locks."""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dsrun.cluster import extensions
from dsrun.jobs.job import AnyJob


def build(
    job: AnyJob,
    env: Mapping[str, str],
    run: Callable[[list[str]], None],
    say: Callable[[str], None],
    wait: Callable[[], None],
) -> None:
    """Compile what is missing.

    env: of the ranks, with TORCH_EXTENSIONS_DIR; run: runs a command to its end, and raises where it fails; say: called
    with a line for the user; wait: called again and again while another dsrun compiles.
    """
    directory = Path(env[extensions.VARIABLE])
    # Which ones a script wants that brings its own config is its own affair: they are compiled as it asks for them.
    names = extensions.needed(job.ds_config, job.accelerator) if job.ds_config is not None else []
    if not extensions.missing(names, directory) and not list(directory.glob("*/lock")):
        return
    with _building(directory, say, wait):
        for lock in extensions.stale_locks(directory):
            say(f"removing {lock}: a build that was killed left it, and every later run would wait for it")
            lock.unlink(missing_ok=True)
        for name in extensions.missing(names, directory):
            say(f"compiling DeepSpeed's {name} (once per environment, one to three minutes)")
            run([sys.executable, "-m", "dsrun.training.build_operator", extensions.BUILDERS[name]])


@contextmanager
def _building(directory: Path, say: Callable[[str], None], wait: Callable[[], None]) -> Iterator[None]:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".dsrun.lock").open("w") as file:
        said = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not said:
                    say("waiting for another dsrun that is compiling operators")
                said = True
                wait()
        yield
