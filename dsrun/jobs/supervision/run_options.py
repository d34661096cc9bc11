"""Options of supervision, whatever a job computes: what to do where it stands still, fails or is asked to end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from dsrun.job.log_parts import GIB
from dsrun.options.table import SaveOnStopOptions, SupervisionOptions

GROUP_TIMEOUT = "DEEPSPEED_TIMEOUT"
"""Whole minutes until a rank gives an exchange with the others up (deepspeed/constants.py: default_pg_timeout)."""


class RunOptions(SupervisionOptions, SaveOnStopOptions):
    """The run's options as the command line names them, and what comes of those about other hosts."""

    check: bool = True
    """Whether the hosts are checked before the start."""
    env: Mapping[str, str] = field(default_factory=dict)
    """The user's variables for ranks on other hosts."""
    master_addr: str = ""
    """Address where the ranks meet; empty: the first address of the first host that all hosts reach."""
    master_port: int = 0
    """0: a free port."""

    @property
    def hang_timeout_s(self) -> float:
        """In seconds; 0 for none."""
        return (self.hang_timeout or 0.0) * 60

    @property
    def host_timeout_s(self) -> float:
        """In seconds."""
        return self.host_timeout * 60

    @property
    def log_bytes(self) -> int:
        """Bytes that are kept of each rank's log; 0 for all of it."""
        return int(self.log_limit * GIB)

    @property
    def save_on_stop_s(self) -> float:
        """In seconds; 0 for none."""
        return (self.save_on_stop or 0.0) * 60
