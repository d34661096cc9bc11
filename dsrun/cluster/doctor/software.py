"""Have all hosts the same packages?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dsrun.cluster.doctor.check import GREEN, RED, YELLOW, Host, Status, across, commonest
from dsrun.packages import install

TITLE = "packages"
ORDER = 20
PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "dsrun")
NEEDED = ("torch", "deepspeed")


@across("packages", "packages")
def packages(hosts: Sequence[Host]) -> Iterator[tuple[Host, Status]]:
    """Ranks with other versions hang in the first collective, or train something else."""
    usual = {name: _usual(hosts, name) for name in PACKAGES}
    for host in hosts:
        has = {name: host["packages"].get(name) for name in PACKAGES}
        odd = [name for name in PACKAGES if has[name] != usual[name]]
        absent = [name for name in PACKAGES if has[name] is None and name not in odd]
        if odd:
            differ = ", ".join(f"{name} {has[name] or 'missing'} (the others: {usual[name]})" for name in odd)
            yield host, Status(RED, differ, _install({name: usual[name] for name in odd}))
        elif absent:
            colour = RED if set(absent) & set(NEEDED) else YELLOW
            fix = install(*absent)
            yield host, Status(colour, f"not installed: {', '.join(absent)}", fix)
        else:
            yield host, Status(GREEN, ", ".join(f"{name} {has[name]}" for name in PACKAGES))


def _usual(hosts: Sequence[Host], name: str) -> str | None:
    """The version that most of those have that have one."""
    found = [str(host["packages"][name]) for host in hosts if host["packages"].get(name)]
    return commonest(found) if found else None


def _install(wanted: dict[str, str | None]) -> str:
    words = " ".join(f"{name}=={version}" for name, version in wanted.items() if version)
    return f"In its environment: pip install {words}" + (
        "  # torch from the index it came from: --index-url" if "+" in words else ""
    )
