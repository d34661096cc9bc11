"""The ranks of one host for a script that wants no DeepSpeed: `python -m dsrun.jobs.supervision.plain_launcher
RUN/job.json --node N --master ADDRESS PORT`.

In the place of DeepSpeed's launcher, which has to be installed and takes seconds to import. Ranks get the variables of
torchrun (torch/distributed/elastic/agent/server/local_elastic_agent.py) that say which one they are, and those that
DeepSpeed's gives them for that (launcher/launch.py); nothing that they print waits in a buffer, as with both.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from dsrun.job.job import AnyJob, ranks_of, read
from dsrun.job.layout import RANK_MODULE
from dsrun.job.processes import GRACE_S

POLL_S = 0.1
TOGETHER_S = 1.0
"""After the first failure, for ranks that fail on their own to say why: DeepSpeed's launcher looks as seldom."""


def main() -> None:
    """Start this host's ranks and wait for them. One that fails ends the others; its code is this process's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--master", nargs=2, required=True)
    arguments = parser.parse_args()
    command = [sys.executable, "-u", "-m", RANK_MODULE, str(arguments.job)]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **variables})
        for variables in variables_of(read(arguments.job), arguments.node, tuple(arguments.master))
    ]
    signal.signal(signal.SIGTERM, lambda *_: _end(ranks))
    sys.exit(_wait(ranks))


def variables_of(job: AnyJob, node: int, master: tuple[str, str]) -> list[dict[str, str]]:
    """Each rank's place in the job, for the ranks of host number `node`. master: where they meet, address and port."""
    ranks = ranks_of(job.hosts, node)
    same = {
        "WORLD_SIZE": job.world_size, "LOCAL_WORLD_SIZE": len(ranks), "LOCAL_SIZE": len(ranks), "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": len(job.hosts), "CROSS_RANK": node, "CROSS_SIZE": len(job.hosts),
        "MASTER_ADDR": master[0], "MASTER_PORT": master[1],
    }  # fmt: skip
    places = [{**same, "RANK": rank, "LOCAL_RANK": local} for local, rank in enumerate(ranks)]
    return [{name: str(value) for name, value in place.items()} for place in places]


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    """The code of the first rank that failed, 0 where none did; of one that a signal ended minus its number, as
    DeepSpeed's launcher tells it."""
    while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
        time.sleep(POLL_S)
    failed = next((code for code in codes if code), 0)
    if failed:
        time.sleep(TOGETHER_S)
        _end(ranks)
    return failed


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Ask the ranks that still run to end, and kill those that don't."""
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    until = time.monotonic() + GRACE_S
    for rank in ranks:
        try:
            rank.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()


if __name__ == "__main__":
    main()
