"""Do the hosts find one another: names, clocks, the master's port, routes, interfaces?"""

from __future__ import annotations

import ipaddress
import statistics
from collections.abc import Iterator, Sequence

from dsrun.cluster.doctor.check import GREEN, GREY, RED, YELLOW, Host, Status, across, commonest
from dsrun.cluster.hostnames import is_loopback

TITLE = "network"
ORDER = 70
SKEW_S = 2.0
GLOO = "GLOO_SOCKET_IFNAME"
"""The variable of Gloo's interface. A user's is forwarded to every host; else dsrun's agents set it to the interface
that leads to the first host."""
INSIDE = ("lo", "docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "tailscale", "tun", "podman")
"""Interfaces that lead to no other host of a job."""


@across("clock", "clock", several=True)
def clock(hosts: Sequence[Host]) -> Iterator[tuple[Host, Status]]:
    """With clocks apart, logs can't be put in order, and make and ninja compile what is compiled."""
    # A host read its clock between the question and the answer, so each has a least and a most that it is ahead of
    # this machine's: only what is certain is reported.
    least = [float(host["clock"]["time"]) - host.answered_at for host in hosts]
    most = [float(host["clock"]["time"]) - host.asked_at for host in hosts]
    usual = (statistics.median(least), statistics.median(most)) if len(hosts) > 2 else (least[0], most[0])
    for host, low, high in zip(hosts, least, most, strict=True):
        if low - usual[1] > SKEW_S or usual[0] - high > SKEW_S:
            ahead = low > usual[1]
            seconds = low - usual[1] if ahead else usual[0] - high
            state = f"at least {seconds:.0f} s {'ahead of' if ahead else 'behind'} the others"
            yield host, Status(YELLOW, state, "timedatectl set-ntp true (or start chrony)")
        else:
            yield host, Status(GREEN, "as the others'")


@across("port", "port")
def port(hosts: Sequence[Host]) -> Iterator[tuple[Host, Status]]:
    """The first host's port is where the ranks meet; if it is taken they die with EADDRINUSE."""
    for host in hosts:
        fact = host["port"]
        if not host.first:
            yield host, Status(GREY, "the ranks meet on the first host")
        elif fact["free"]:
            yield host, Status(GREEN, f"{fact['port']} is free")
        else:
            fix = f"See who has it: ss -ltnp 'sport = :{fact['port']}'; or choose another: --master-port."
            yield host, Status(RED if fact["asked"] else YELLOW, f"{fact['port']} is taken", fix)


@across("own-name", "hostname", "route", "interfaces", several=True)
def own_name(hosts: Sequence[Host]) -> Iterator[tuple[Host, Status]]:
    """Gloo listens on the address that the host's own name leads to, unless it is told an interface."""
    for host in hosts:
        name, addresses = host["hostname"]["name"], host["hostname"]["resolves_to"]
        if variable(host, "GLOO_SOCKET_IFNAME"):
            yield host, Status(GREEN, "GLOO_SOCKET_IFNAME is set")
        elif addresses and not all(map(is_loopback, addresses)):
            yield host, Status(GREEN, f"{name} is {addresses[0]}")
        elif way := used(host, hosts):
            yield host, Status(GREEN, f"{_leading(name, addresses)}: Gloo is told to take {way}")
        else:
            fix = f"Add a line to its /etc/hosts: ITS-ADDRESS {name}; or set GLOO_SOCKET_IFNAME."
            yield host, Status(YELLOW, _leading(name, addresses), fix)


def _leading(name: str, addresses: Sequence[str]) -> str:
    return f"its own name, {name}, leads {f'to {addresses[0]}' if addresses else 'nowhere'}"


@across("route", "route", "interfaces", several=True)
def route(hosts: Sequence[Host]) -> Iterator[tuple[Host, Status]]:
    """Every rank connects to the first host."""
    master = next((host for host in hosts if host.first), None)
    own = (
        {address for addresses in master["interfaces"].values() for address in addresses} if master else set()
    )
    for host in hosts:
        if host is master:
            yield host, Status(GREEN, "the others come here")
        else:
            yield host, _route(host, own)


def _route(host: Host, addresses_there: set[str]) -> Status:
    """The way from a host to the first one. addresses_there: the first one's addresses; none where it didn't answer."""
    fact = host["route"] or {}
    address, name = fact.get("address"), fact.get("master")
    if not address:
        # dsrun's agents go by the first host's addresses; a bare `deepspeed` and some MPIs by its name.
        return Status(YELLOW, fact.get("fault", "not asked for"), f"Add {name} to DNS or to its /etc/hosts.")
    if fact.get("fault"):
        return Status(RED, fact["fault"], "Put both in one network, or add a route: ip route add")
    if is_loopback(address):
        state = f"{name} leads to {address}: back to this host itself"
        fix = f"Write {name}'s real address in its /etc/hosts, or use the address as its name."
        return Status(YELLOW, state, fix)
    if addresses_there and address not in addresses_there:
        state = f"{name} is {address} here, which is none of that host's own addresses"
        other = [address for address in sorted(addresses_there) if not is_loopback(address)]
        return Status(YELLOW, state, f"Give --master-addr one of: {', '.join(other[:4])}")
    return Status(GREEN, f"to {address} by {fact.get('interface') or '?'} as {fact.get('source')}")


@across("interface", "route", "interfaces", "variables", several=True)
def interface(hosts: Sequence[Host]) -> Iterator[tuple[Host, Status]]:
    """Ranks on CPUs, and the set-up of those on GPUs, go by the interface that leads to the others (what NCCL takes:
    nccl-interface)."""
    for host in hosts:
        yield host, _interface(host, used(host, hosts))


def _interface(host: Host, name: str | None) -> Status:
    """The status of Gloo's variable and of the interface (name) that leads to the others."""
    wanted = variable(host, GLOO).lstrip("=")
    if wanted and not all(part in host["interfaces"] for part in wanted.split(",") if part):
        there = ", ".join(host["interfaces"])
        return Status(RED, f"{GLOO}={wanted}, and it has {there}", f"Unset {GLOO}.  # where dsrun is called")
    return Status(GREEN, name) if name else Status(GREY, "the way to the others isn't known")


def variable(host: Host, name: str) -> str:
    """A variable as the ranks there will have it."""
    fact = (host.facts or {}).get("variables", {})
    return str(fact.get(name) or "") if isinstance(fact, dict) else ""


def used(host: Host, hosts: Sequence[Host]) -> str | None:
    """The interface by which a host meets the others; for the first host the one with the address that they use."""
    if not host.first:
        way = host["route"] or {}
        name = way.get("interface")
        return str(name) if name and name != "lo" else None
    goals = [
        other["route"]["address"]
        for other in hosts
        if other is not host and (other["route"] or {}).get("address")
    ]
    if not goals:
        return None
    address = commonest(goals)
    return next((name for name, own in host["interfaces"].items() if address in own and name != "lo"), None)


def addressed(host: Host) -> list[str]:
    """Its interfaces with an address that isn't link-local."""
    return [
        name
        for name, addresses in host["interfaces"].items()
        if any(not ipaddress.ip_address(address.split("%")[0]).is_link_local for address in addresses)
    ]


def leading_out(host: Host) -> list[str]:
    """Interfaces that may lead to other hosts."""
    return [name for name in addressed(host) if not name.startswith(INSIDE)]
