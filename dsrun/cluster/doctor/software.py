"""Have all hosts the same packages, and do their versions go together?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dsrun import versions
from dsrun.cluster.doctor.check import GREEN, GREY, RED, YELLOW, Host, Status, across, commonest, each
from dsrun.packages import install

TITLE = "packages"
ORDER = 20
PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "dsrun")
NEEDED = ("torch", "deepspeed")
OTHERS = tuple(name for name in versions.PACKAGES if name not in PACKAGES)
"""Packages that not every job imports."""
MOST_TOLD = 3
"""Combinations that are described in full."""


@across("packages", "packages")
def packages(hosts: Sequence[Host]) -> Iterator[tuple[Host, Status]]:
    """Ranks with other versions hang in the first collective, or train something else."""
    usual = {name: _usual(hosts, name) for name in PACKAGES}
    for host in hosts:
        has = {name: host["packages"].get(name) for name in (*PACKAGES, *OTHERS)}
        odd = [name for name in PACKAGES if has[name] != usual[name]]
        absent = [name for name in PACKAGES if has[name] is None and name not in odd]
        if odd:
            differ = ", ".join(f"{name} {has[name] or 'missing'} (the others: {usual[name]})" for name in odd)
            yield host, Status(RED, differ, _install({name: usual[name] for name in odd}))
        elif absent:
            colour = RED if set(absent) & set(NEEDED) else YELLOW
            fix = install(*absent)
            yield host, Status(colour, f"not installed: {', '.join(absent)}", fix)
        elif others := _odd_others(host, hosts):
            has_other = [f"{name} {has[name]} (the others: {most})" for name, most in others.items()]
            yield host, Status(YELLOW, ", ".join(has_other), _install(others))
        else:
            yield host, Status(GREEN, ", ".join(f"{name} {has[name]}" for name in PACKAGES))


def _odd_others(host: Host, hosts: Sequence[Host]) -> dict[str, str]:
    """The packages of OTHERS that a host has in another version than most hosts, with that version."""
    usual = {name: _usual(hosts, name) for name in OTHERS}
    has = host["packages"]
    return {name: most for name, most in usual.items() if most and has.get(name) not in (None, most)}


@each("versions", "packages", "hostname")
def together(host: Host) -> Status:
    """Some versions fail together, or train on wrong gradients (docs/reference/versions.md)."""
    has = {name: text for name, text in host["packages"].items() if isinstance(text, str)}
    kernel = {versions.LINUX: str(host["hostname"].get("kernel", ""))}
    # dsrun's own jobs divide no experts; of a script's config `launch` and `validate` say it.
    like = versions.Circumstances(gpus=bool(host.gpus), several_ranks=host.ranks > 1, expert_parallel=False)
    matches = [
        match
        for match in versions.judge({**has, **kernel}, like)
        if match.combination.cured_by_versions and match.combination.severity != versions.NOTE
    ]
    if not matches:
        return Status(GREEN, "no combination that is known to be bad") if has else Status(GREY, "no packages")
    state = "; ".join(map(str, matches[:MOST_TOLD]))
    more = [match.combination.name for match in matches[MOST_TOLD:]]
    state += f"; and {', '.join(more)} (dsrun explain NAME)" if more else ""
    fix = " ".join(dict.fromkeys(match.combination.do for match in matches[:MOST_TOLD]))
    return Status(RED if matches[0].severity == versions.ERROR else YELLOW, state, fix)


def _usual(hosts: Sequence[Host], name: str) -> str | None:
    """The version that most of the hosts with the package have."""
    versions_there = [str(host["packages"][name]) for host in hosts if host["packages"].get(name)]
    return commonest(versions_there) if versions_there else None


def _install(wanted: Mapping[str, str | None]) -> str:
    words = " ".join(f"{name}=={version}" for name, version in wanted.items() if version)
    return f"In its environment: pip install {words}" + (
        "  # torch from the index it came from: --index-url" if "+" in words else ""
    )
