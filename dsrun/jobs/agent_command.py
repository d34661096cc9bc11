"""The words that start dsrun's agent on a host of a job."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from dsrun.jobs.environment import of_checkout

AGENT = "dsrun.jobs.agent"


def agent_command(environ: Mapping[str, str]) -> list[str]:
    """This Python, which has to be at the same place on every host. What else they need of the environment the head
    tells them; only a bare checkout has to be found before that."""
    told = [f"{name}={value}" for name, value in of_checkout(environ).items()]
    return [*(["env", *told] if told else []), sys.executable, "-m", AGENT]
