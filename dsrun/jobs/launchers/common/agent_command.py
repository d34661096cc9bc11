"""The words that start dsrun's agent on a host of a job."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from dsrun.jobs.launchers.common.environment import of_checkout

AGENT = "dsrun.jobs.supervision.host_agent"


def agent_command(environ: Mapping[str, str]) -> list[str]:
    """This Python, which has to be at the same place on every host, with the folders that it looks for modules in.
    What else of the environment the agents need, the coordinator tells them."""
    path = {**environ, **of_checkout(environ)}.get("PYTHONPATH")
    return [*(["env", f"PYTHONPATH={path}"] if path else []), sys.executable, "-m", AGENT]
