"""Measurements that decide a default: the TOML files under presets/measured/.

bench/gpu/page.py writes them from the bench's results; a lab may put its own on DSRUN_PATH. Where there is no
measurement of a GPU, nothing changes there. A file's name says what it is of: compile-GPU-ENGINE.toml, with the name of
a file in presets/gpus and one of ENGINES.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsrun import catalog
from dsrun.errors import DsrunError, Problem
from dsrun.json_numbers import is_finite

KIND = "presets/measured"
ENGINES = ("zero", "fsdp")
"""DeepSpeed's stages 0 to 2, and FSDP: at ZeRO-3 layers are not compiled."""
WORTH_IT = 1.05
"""A gain below that is a tie, of which the simpler way is taken."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What --compile did to one model's step on one kind of GPU; every field is a key of its file."""

    seconds_without: float
    """Seconds of a step."""
    seconds_with: float
    """Seconds of a step, once all is compiled."""
    start_seconds: float
    """Seconds that the first step takes longer."""
    day: str
    """When it was measured."""
    with_what: str
    """The model, and the versions that compute."""

    @property
    def gain(self) -> float:
        """How many times as fast a step is."""
        return self.seconds_without / self.seconds_with

    def pays_in(self, steps: float) -> bool:
        """Whether a run of that many steps gets its start back."""
        return steps * (self.seconds_without - self.seconds_with) > self.start_seconds


def compiled(gpu: str, engine: str) -> Compiled | None:
    """What was measured of --compile on a kind of GPU (planner.gpus); None where nothing was.

    Raises DsrunError for a file with all that is missing, wrong or unknown in it.
    """
    path = catalog.files(KIND).get(f"compile-{gpu}-{engine}")
    if path is None:
        return None
    values = catalog.read_toml(path)
    problems = [
        Problem(f"{key} is {values[key]!r}" if key in values else f"{key} is missing", str(path), hint)
        for key, hint in KEYS.items()
        if not _is_right(key, values.get(key))
    ]
    problems += [
        Problem(f"{key} is not a key of a measurement", str(path)) for key in values if key not in KEYS
    ]
    if problems:
        raise DsrunError(problems)
    return Compiled(**values)


KEYS = {
    "seconds_without": "Seconds of a step, above 0.",
    "seconds_with": "Seconds of a step with --compile, above 0.",
    "start_seconds": "Seconds, 0 or more.",
    "day": 'A text: "2026-11-24".',
    "with_what": 'A text: "llama-3-8b; torch 2.11.0".',
}
"""Key -> what it takes."""


def _is_right(key: str, value: Any) -> bool:
    if key in ("day", "with_what"):
        return isinstance(value, str) and bool(value.strip())
    return is_finite(value) and (value >= 0 if key == "start_seconds" else value > 0)
