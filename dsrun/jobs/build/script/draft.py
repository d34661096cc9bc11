"""What the user asked for, and a script's job on its way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsrun.cluster.devices import Machine
from dsrun.cluster.python_environment import PythonEnvironment
from dsrun.errors import Problem
from dsrun.jobs.allocation.allocation import Allocation
from dsrun.jobs.allocation.reservation import Allocator
from dsrun.jobs.build.script.accelerate import AccelerateFile
from dsrun.jobs.build.script.source import ScriptSource
from dsrun.jobs.spec import run_folder
from dsrun.options.commands import LaunchOptions
from dsrun.options.table import Resolved


@dataclass(frozen=True)
class ScriptRequest:
    """What the user asked for."""

    script: str
    """A file, or a module's name where the options say so."""
    args: tuple[str, ...]
    """What follows it, which is its own."""
    asked: Resolved[LaunchOptions]
    again: bool = False
    """The script was started in that folder before, and is started there again."""

    @property
    def options(self) -> LaunchOptions:
        return self.asked.options


@dataclass(kw_only=True)
class ScriptDraft:
    """A script's job on its way."""

    asked: Resolved[LaunchOptions]
    machine: Machine
    environ: Mapping[str, str]
    allocator: Allocator
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    placed: Allocation | None = None
    request: ScriptRequest
    cwd: Path
    """The folder that the script is run in."""
    run_dir: Path
    source: ScriptSource = field(default_factory=ScriptSource)
    args: tuple[str, ...] = ()
    """The script's arguments, with a preset's config among them."""
    config: dict[str, Any] | None = None
    python: PythonEnvironment | None = None
    """The Python of the ranks, where it isn't this one."""
    plain: bool = False
    """It wants no DeepSpeed, as far as its source tells."""
    accelerate: AccelerateFile | None = None
    env: dict[str, str] = field(default_factory=dict)
    """Variables that the ranks get for the script's sake."""

    @property
    def config_file(self) -> Path:
        """Where the ranks find `config`."""
        return self.run_dir / run_folder.CONFIG

    @property
    def options(self) -> LaunchOptions:
        return self.request.options

    def judge(self, found: list[Problem], notes: Sequence[str]) -> None:
        """What is wrong with a config refuses the job, unless it is forced."""
        self.notes += notes
        if self.options.force:
            self.notes += [f"{problem} (started all the same: --force)" for problem in found]
        else:
            self.problems += found


def default_run_dir(request: ScriptRequest) -> Path:
    """Where a run lies unless the user says so: below runs/ in the folder that dsrun is called in."""
    name = request.script.rpartition(".")[2] if request.options.module else Path(request.script).stem
    return Path("runs") / run_folder.stamped(name)
