from __future__ import annotations

import pytest
from lab import Lab, UnavailableError
from slurm import Slurm


@pytest.fixture(scope="session")
def lab():
    """Two hosts, for all tests that ask for them; skips where this machine cannot hold them."""
    made = Lab()
    try:
        made.__enter__()
    except UnavailableError as error:
        pytest.skip(f"no cluster lab: {error}")
    yield made
    made.close()


@pytest.fixture(scope="session")
def slurm(lab):
    """Slurm on the lab's hosts."""
    made = Slurm(lab)
    try:
        made.__enter__()
    except UnavailableError as error:
        pytest.skip(f"no Slurm: {error}")
    yield made
    made.close()
