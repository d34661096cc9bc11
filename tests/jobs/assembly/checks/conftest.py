from __future__ import annotations

import pytest

from dsrun.host import toolkit


@pytest.fixture(autouse=True)
def cpu_build(monkeypatch) -> None:
    """A CPU build of torch, whichever is installed: one for CUDA has no code for some cards that tests plan for."""
    monkeypatch.setattr(toolkit, "torch_build", lambda path: {"cuda": None, "cpu_build": True})
