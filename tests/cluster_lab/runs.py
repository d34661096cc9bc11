"""dsrun on a lab's hosts: starting jobs there, and what is left of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from lab import Host, Lab, wait_for
from running import REFERENCE, Done, finish

PASSED_ON = ("PYTHONPATH", "DSRUN_CACHE", "DS_ACCELERATOR")
DSRUN = (sys.executable, "-m", "dsrun")
GONE_S = 300
"""Seconds after which nothing of a job is left on any host; dsrun takes a few on a quiet machine."""


@dataclass
class Cluster:
    """A lab whose hosts share `folder`, where the jobs' folders are."""

    lab: Lab
    environ: Mapping[str, str]
    folder: Path
    data: tuple[str, ...]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def dsrun(self, *words: object, at: Host | None = None, env: Mapping[str, str] | None = None):
        """A dsrun that is under way on a host, else on the controller."""
        return self.popen([*DSRUN, *words], at=at, env=env)

    def popen(self, argv, at: Host | None = None, env: Mapping[str, str] | None = None):
        process = (at or self.lab.controller).popen(
            argv, env={**{name: self.environ[name] for name in PASSED_ON}, "OMP_NUM_THREADS": "1", **(env or {})},
            cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def train(
        self, name: str, *options: object, at: Host | None = None, env: Mapping[str, str] | None = None
    ):
        """The reference run, somewhere else; its folder is `folder / name`."""
        return self.dsrun(*self.words(name, *options), at=at, env=env)

    def words(self, name: str, *options: object) -> list[object]:
        return [
            "finetune",
            "llama-tiny",
            *REFERENCE,
            *self.data,
            "--output-dir",
            self.folder / name,
            *options,
        ]

    def finish(self, process: subprocess.Popen[str], name: str, timeout: float = 300) -> Done:
        return finish(process, self.folder / name, timeout)

    def left(self) -> list[str]:
        """Processes on the hosts, without the lab's own and sshd's sessions: sshd learns late that one is cut."""
        found = []
        for host in [*self.lab.hosts, self.lab.controller]:
            for process in _of_jobs(host):
                with suppress(psutil.Error):
                    if not process.name().startswith("sshd"):
                        found.append(f"{host.name}: {process.pid} {' '.join(process.cmdline())[:150]}")
        return found

    def check_nothing_is_left(self) -> None:
        if not wait_for(lambda: not self.left(), GONE_S, 0.1):
            assert self.left() == []

    def end(self) -> None:
        """Whatever the test has left, so that the next one begins with empty hosts."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        self.started.clear()
        for host in [*self.lab.hosts, self.lab.controller]:
            for process in _of_jobs(host):
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def _of_jobs(host: Host) -> list[psutil.Process]:
    """Processes on a host, without those that the lab's own processes have started for themselves."""
    own = set(host.pids.values())
    found = []
    for process in host.processes():
        with suppress(psutil.NoSuchProcess):
            if process.ppid() not in own or not process.name().startswith("slurm"):
                found.append(process)
    return found


def far_agent(host: Host) -> psutil.Process:
    """The host agent on a host."""
    return host.running("dsrun.jobs.supervision.host_agent")[0]
