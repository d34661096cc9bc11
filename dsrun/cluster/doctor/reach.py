"""Is the host there, and can it run the job's Python?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dsrun.cluster.doctor.check import GREEN, RED, Host, Status, across, commonest

TITLE = "reach"
ORDER = 10


@across("reachable", silent_too=True)
def reachable(hosts: Sequence[Host]) -> Iterator[tuple[Host, Status]]:
    """Every host answers without asking for a password."""
    for host in hosts:
        if host.facts is None:
            yield host, Status(RED, host.fault, host.fix)
        else:
            yield host, Status(GREEN, "answers")


@across("python", "python")
def python(hosts: Sequence[Host]) -> Iterator[tuple[Host, Status]]:
    """The launcher starts the same path on every host (deepspeed/launcher/multinode_runner.py: sys.executable)."""
    here = [host for host in hosts if not host["python"].get("missing")]
    usual = commonest([host.python_minor for host in here]) if here else ""
    for host in hosts:
        if missing := host["python"].get("missing"):
            fix = f"Make the same environment at {missing} there, or put it in a folder that all hosts share."
            yield host, Status(RED, f"no {missing}", fix)
        elif host.python_minor != usual:
            state = f"Python {host['python']['version']}, the others have {usual}"
            yield host, Status(RED, state, f"Make its environment again with Python {usual}.")
        else:
            yield host, Status(GREEN, f"Python {host['python']['version']}")
