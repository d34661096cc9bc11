"""The probes: whether an environment is right. A config, four training steps on two CPU ranks, or a command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsrun.bisect.environments import Environment
from dsrun.bisect.search import RIGHT, UNTOLD, WRONG, Versions

SKIP = 125
"""The exit code of a command that can't tell, as of `git bisect run`."""
FINDING = re.compile(r"DS\d+\s+error: .*")
"""An error of `dsrun validate`."""
PYTHONS = ("python", "python3")
ROWS = 16


@dataclass(frozen=True)
class ProbeOutcome:
    """outcome: RIGHT, WRONG or UNTOLD; said: the last line of what the probe printed."""

    outcome: str
    said: str = ""


@dataclass(frozen=True)
class CommandProbe:
    """The user's command: right where it ends with 0, and untold where with 125.

    says: text that the output of a wrong one has; any other failure can't be told.
    """

    words: tuple[str, ...]
    folder: Path
    """Where what it prints is kept."""
    seconds: float = 600
    says: str = ""
    needs_environment: bool = True

    def outcome(self, environment: Environment, versions: Versions) -> ProbeOutcome:
        """The outcome in an environment. One that takes too long is wrong."""
        words = [environment.python if word in PYTHONS else word for word in self.words]
        return _ran(words, environment.variables, self, versions)


@dataclass(frozen=True)
class StepsProbe:
    """Four optimizer steps of a tiny model with DeepSpeed, on two CPU ranks."""

    folder: Path
    seconds: float = 600
    says: str = ""
    options: tuple[str, ...] = ()
    """More options of `dsrun finetune`."""
    needs_environment: bool = True

    def outcome(self, environment: Environment, versions: Versions) -> ProbeOutcome:
        rows = self.folder / "rows.jsonl"
        texts = [{"content": f"say {number}", "summary": f"word {number}"} for number in range(ROWS)]
        rows.write_text("".join(f"{json.dumps(row)}\n" for row in texts), encoding="utf-8")
        run = self.folder / f"run-{_named(versions)}"
        words = [
            environment.python, "-m", "dsrun", "finetune", "llama-tiny", "--gpus", "2", "--max-steps", "4",
            "--train-file", str(rows), "--export-format", "none", "--output-dir", str(run), *self.options,
        ]  # fmt: skip
        own = str(Path(__file__).resolve().parents[2])
        variables = {**environment.variables, "DS_ACCELERATOR": "cpu"}
        variables["PYTHONPATH"] = ":".join(filter(None, [variables.get("PYTHONPATH", ""), own]))
        return _ran(words, variables, self, versions)


@dataclass(frozen=True)
class ValidateProbe:
    """A config or script that `dsrun validate --with` finds an error in, or not. No environment is made."""

    file: str
    folder: Path
    seconds: float = 600
    says: str = ""
    needs_environment: bool = False

    def outcome(self, environment: Environment, versions: Versions) -> ProbeOutcome:
        pins = ",".join(f"{name}=={version}" for name, version in versions.items())
        words = [sys.executable, "-m", "dsrun", "validate", self.file, "--with", pins]
        return _ran(words, environment.variables, self, versions)


Probe = CommandProbe | StepsProbe | ValidateProbe


def _ran(
    words: Sequence[str], variables: Mapping[str, str], probe: Probe, versions: Versions
) -> ProbeOutcome:
    log = probe.folder / f"{_named(versions)}.log"
    seconds, says = probe.seconds, probe.says
    with log.open("w", encoding="utf-8") as file:
        try:
            code = subprocess.run(
                words, env=dict(variables), stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                timeout=seconds, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            return ProbeOutcome(WRONG, f"not done within {seconds:g} s")
        except OSError as error:
            return ProbeOutcome(UNTOLD, f"{words[0]}: {error.strerror}")
    printed = log.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    if code == 0:
        return ProbeOutcome(RIGHT)
    telling = next((line for line in lines if says and says in line), "")
    if code == SKIP or (says and not telling):
        return ProbeOutcome(UNTOLD, lines[-1] if lines else "")
    return ProbeOutcome(WRONG, telling or _error(lines))


def _error(lines: Sequence[str]) -> str:
    """The line that says most of a failure: a rule's error, the last exception, else the last line."""
    if found := next(filter(None, map(FINDING.search, lines)), None):
        return found[0]
    errors = [
        line for line in lines if line.partition(":")[0].endswith(("Error", "Exception")) and ":" in line
    ]
    return (errors or list(lines) or [""])[-1]


def _named(versions: Versions) -> str:
    return "_".join(f"{name}-{version}" for name, version in sorted(versions.items()))
