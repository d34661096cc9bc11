"""Names and parameters in a script that the installed packages don't have, before anything is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from dsrun import packages
from dsrun.errors import Findings, Problem
from dsrun.jobs.assembly.script import source
from dsrun.jobs.assembly.script.stages import KnownScript, judge
from dsrun.releases.script_names import MissingName, missing


def check_names(script: KnownScript, findings: Findings) -> None:
    """Note what the ranks' packages lack of the names in a script and the modules beside it.

    A line that runs at the start of the script refuses the job, unless it is forced; any other is a note, as it may
    never run.
    """
    versions = packages.installed(script.python.path if script.python else None)
    # Of a build from a repository it isn't known which names it has.
    released = {name: version for name, version in versions.items() if "dev" not in version}
    problems = []
    for file in _files(script):
        for name in missing(_text(file), released):
            place = f"{_shown(file, script.cwd)}:{name.use.line}"
            if name.use.at_start:
                problems.append(Problem(name.text, place, name.advice))
            else:
                findings.notes.append(_note(place, name))
    judge(script.options, problems, findings)


def _note(place: str, name: MissingName) -> str:
    return f"{place}: {name.text}. {name.advice}"


def _files(script: KnownScript) -> Iterator[Path]:
    """The script and the modules that it imports from beside it; none where its source isn't read."""
    request = script.request
    if script.source.imports is None:
        return
    if request.options.module:
        path, root = source.module_file(request.script, [str(script.cwd), *sys.path])
    else:
        path = script.cwd / request.script
        root = path.resolve().parent
    yield from source.own_files(path, root)


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def _shown(file: Path, cwd: Path) -> str:
    """A file's name as seen from the folder that the script is run in."""
    return os.path.relpath(file, cwd) if file.is_relative_to(cwd) else str(file)
