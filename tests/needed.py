"""Which tests a machine can run, said without importing anything."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs(*packages: str) -> None:
    """Skip the whole file unless these are installed.

    pytest.importorskip would import them: every worker reads every file, and DeepSpeed, peft and what they import take
    seconds in each.
    """
    for name in packages:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)
