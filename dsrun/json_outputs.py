"""The forms of what commands print with --json: each has a name, and a version that stands in it.

Within a version keys are only added; a key that goes or means something else raises it. tools/json_forms.py has the
types, from which docs/reference/json/ is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VERSIONS = {
    "bisect": 1, "compare": 1, "detached": 1, "diagnose": 1, "diff": 1, "doctor": 1, "dry-run": 1, "evaluate": 1,
    "examples": 1, "explain": 1, "explanation": 1, "export": 1, "finetune": 1, "hosts-check": 1, "import": 1,
    "launch": 1, "models": 1, "plan": 1, "plan-calibrate": 1, "plan-inference": 1, "plan-layouts": 1,
    "preset-explain": 1, "presets": 1, "runs": 1, "show": 1, "show-script": 1, "submit": 1, "submit-manifest": 1,
    "submit-script": 1, "tune": 1, "validate": 1,
}  # fmt: skip


def versioned(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """A result with the version of its form in front."""
    return {"version": VERSIONS[name], **value}
