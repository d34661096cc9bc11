"""The ranks of one host: started through DeepSpeed's launcher, watched, and ended. The one module that starts ranks.

DeepSpeed's launcher leaves its ranks running when it is killed; here nothing is left, whatever ends first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsrun.cluster.host import host_ram
from dsrun.jobs.diagnosis import NodeEnd, RankEnd, Ranks, end_of, oom_kills
from dsrun.jobs.processes import GRACE_S, end_processes, remove_shared_memory
from dsrun.jobs.run_folder import launcher_log

SAMPLE_S = 1.0
"""Between two looks at the host's memory."""


class Node:
    """The job's part on this host. number: of the host, from 0; ranks: the global ones that run here."""

    def __init__(self, run_dir: Path, number: int, ranks: Sequence[int]) -> None:
        self.run_dir, self.number = run_dir, number
        self.ranks = Ranks(run_dir, ranks)
        self._told: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._master = ("", 0)
        self._ooms = oom_kills()
        self._log = run_dir / launcher_log(number)
        self._before = 0
        self._sampled = 0.0
        ram = host_ram()
        self._least, self._total = ram.available, ram.total

    def start(self, argv: Sequence[str], env: Mapping[str, str], master: tuple[str, int]) -> None:
        """Start the launcher in a session of its own. master: address and port that the ranks meet at."""
        self._master = master
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._before = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        """The launcher's exit code; None while it runs."""
        return self._process.poll() if self._process else None

    def look(self) -> list[RankEnd]:
        """The ranks that have ended without finishing since the last look."""
        if time.monotonic() - self._sampled >= SAMPLE_S:
            self._sampled = time.monotonic()
            self._least = min(self._least, host_ram().available)
        self.ranks.look()
        new = [end for rank, end in self.ranks.ends.items() if rank not in self._told]
        self._told |= {end.rank for end in new}
        return new

    def stacks(self) -> None:
        """Have every rank print its threads' stacks into its log."""
        for state in self.ranks.states().values():
            if state.get("stacks") and state["status"] == "running":  # else the signal would end it
                with contextlib.suppress(OSError):
                    os.kill(int(state["pid"]), signal.SIGUSR2)

    def end(self, grace_s: float = GRACE_S, hurried: Callable[[], bool] = lambda: False) -> NodeEnd:
        """End what still runs, clear up, and say how it went. hurried: as for `end_processes`."""
        self.ranks.look()
        self.ranks.close()
        killed = -code if (code := self.code) is not None and code < 0 else 0
        if self._process:
            end_processes(self._process.pid, self.ranks.pids(), grace_s, hurried)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            remove_shared_memory(self._master)
        return NodeEnd(
            node=self.number,
            code=self.code,
            said=self._said(),
            ooms=max(0, oom_kills() - self._ooms),
            least_ram_bytes=self._least,
            ram_bytes=self._total,
            killed_by=killed,
            statuses={str(rank): state["status"] for rank, state in self.ranks.states().items()},
        )

    def _said(self) -> str:
        try:
            return end_of(self._log, self._before).decode("utf-8", errors="replace")[-8000:]
        except OSError:
            return ""

    def message(self, end: RankEnd) -> dict[str, Any]:
        """A rank's end for the head: how long ago instead of when, as hosts' clocks differ."""
        return {"rank_end": {**end._asdict(), "when": time.time() - end.when}}
