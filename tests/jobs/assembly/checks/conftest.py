from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def cpu_build(cpu_build) -> None:
    """The CPU build of torch that stands in, for all checks."""
