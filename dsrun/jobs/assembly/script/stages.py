"""The stages of a script's job: the user's request, the known script, and the inputs of its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsrun.cluster.python_environment import PythonEnvironment
from dsrun.errors import Findings, Problem
from dsrun.job import run_folder
from dsrun.jobs.assembly.script.accelerate import AccelerateFile
from dsrun.jobs.assembly.script.source import ScriptSource
from dsrun.options.commands import LaunchOptions
from dsrun.options.layers import Resolved


@dataclass(frozen=True)
class ScriptRequest:
    """The user's request to run a script."""

    script: str
    """A file, or a module's name where the options say so."""
    args: tuple[str, ...]
    """The script's own arguments."""
    resolved: Resolved[LaunchOptions]
    again: bool = False
    """The script was started in that folder before, and is started there again."""

    @property
    def options(self) -> LaunchOptions:
        return self.resolved.options


@dataclass(frozen=True, kw_only=True)
class KnownScript:
    """A script that was requested, with what its text and the files that are named tell."""

    request: ScriptRequest
    environ: Mapping[str, str]
    cwd: Path
    """The folder that the script is run in."""
    run_dir: Path
    python: PythonEnvironment | None = None
    """The Python of the ranks, where it isn't this one."""
    source: ScriptSource = field(default_factory=ScriptSource)
    accelerate: AccelerateFile | None = None
    """The launch config, where one is named."""

    @property
    def config_file(self) -> Path:
        """The file in which the ranks find their config."""
        return self.run_dir / run_folder.CONFIG

    @property
    def options(self) -> LaunchOptions:
        return self.request.options


@dataclass(frozen=True, kw_only=True)
class RankInputs:
    """Arguments, config and variables of the ranks."""

    args: tuple[str, ...]
    """The script's arguments, with a preset's config among them."""
    config: dict[str, Any] | None = None
    """A preset's, or the launch config's; None where the script has its own, or none."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables for the script's sake."""


def judge(options: LaunchOptions, problems: Iterable[Problem], findings: Findings) -> None:
    """Let a config's problems refuse the job, unless it is forced."""
    if options.force:
        findings.notes.extend(f"{problem} (started all the same: --force)" for problem in problems)
    else:
        findings.problems.extend(problems)


def default_run_dir(request: ScriptRequest) -> Path:
    """The default folder of a run: below runs/ in the folder that dsrun is called in."""
    name = request.script.rpartition(".")[2] if request.options.module else Path(request.script).stem
    return Path("runs") / run_folder.stamped(name)
