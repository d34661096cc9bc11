"""The network that NCCL will use: InfiniBand, EFA or sockets, and the interface."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from dsrun.cluster.doctor import network
from dsrun.cluster.doctor.check import GREEN, GREY, RED, YELLOW, Host, Status, across

TITLE = "NCCL"
ORDER = 75
OFI = re.compile(r"libnccl-net(-ofi|-aws-ofi)?\.so")
NOT_FIRST = ("lo", "docker")


@across("nccl-net", "fabric", "variables", "gpus", several=True)
def way(hosts: Sequence[Host]) -> Iterator[tuple[Host, Status]]:
    """NCCL falls back to sockets silently where it can't use a fast card: ten times slower, and no error."""
    for host in hosts:
        yield host, _way(host) if host.trains_on_gpus else Status(GREY, "no GPU")


def _way(host: Host) -> Status:
    fact = host["fabric"]
    active = [card for card in fact["cards"] if card["state"] in ("ACTIVE", None)]
    efa = [card["name"] for card in active if card["efa"]]
    verbs = [card["name"] for card in active if not card["efa"]]
    if efa and not any(OFI.search(plugin) for plugin in fact["plugins"]):
        state = f"EFA ({', '.join(efa)}), and no NCCL plug-in for it: NCCL takes sockets"
        return Status(
            YELLOW,
            state,
            "Install aws-ofi-nccl and put its lib folder on LD_LIBRARY_PATH (--env LD_LIBRARY_PATH).",
        )
    if efa:
        return Status(GREEN, f"EFA by {', '.join(efa)}")
    down = [card["name"] for card in fact["cards"] if card not in active]
    if down and not verbs:
        return Status(
            YELLOW,
            f"{', '.join(down)} is down: NCCL takes sockets",
            "See: ibstat (or rdma link), then the cable.",
        )
    if not verbs:
        return Status(GREEN, "sockets: there is no other card")
    names = ", ".join(f"{card['name']} ({card['layer'] or '?'})" for card in active)
    if network.variable(host, "NCCL_IB_DISABLE") not in ("", "0"):
        return Status(
            YELLOW, f"{names}, and NCCL_IB_DISABLE is set: NCCL takes sockets", "unset NCCL_IB_DISABLE"
        )
    if fact["verbs"] is False:
        return Status(
            YELLOW,
            f"{names}, and no libibverbs: NCCL takes sockets",
            "apt-get install libibverbs1 ibverbs-providers",
        )
    return Status(GREEN, names)


@across("nccl-interface", "interfaces", "variables", "gpus", several=True)
def bootstrap(hosts: Sequence[Host]) -> Iterator[tuple[Host, Status]]:
    """NCCL's ranks find one another by the first interface that fits, whatever the data takes (ncclFindInterfaces);
    one that leads nowhere is a hang, not an error."""
    ways = [network.used(host, hosts) for host in hosts]
    known = ",".join(dict.fromkeys(name for name in ways if name))
    on_ib = all((_first(host) or "").startswith("ib") for host in hosts if host.trains_on_gpus)
    for host, way in zip(hosts, ways, strict=True):
        checked = host.trains_on_gpus
        yield host, _bootstrap(host, way, known, on_ib) if checked else Status(GREY, "no GPU")


def _bootstrap(host: Host, leading: str | None, known: str, on_ib: bool) -> Status:
    """The status of the interface that NCCL meets by.

    leading: the interface that leads to the others; known: those of all hosts, a list of which NCCL takes what is
    there; on_ib: whether all hosts take InfiniBand's.
    """
    name, wanted = _first(host), network.variable(host, "NCCL_SOCKET_IFNAME")
    fix = (
        f"export NCCL_SOCKET_IFNAME={known or 'NAME'}  # where dsrun is called: it is forwarded to every host"
    )
    if name is None:
        why = f"none that NCCL_SOCKET_IFNAME={wanted} names" if wanted else "none with an address"
        return Status(RED, why, f"It has {', '.join(host['interfaces'])}: {fix}")
    if name.startswith(NOT_FIRST):
        return Status(RED, f"{name}, which leads to no other host", fix)
    others = [other for other in network.leading_out(host) if other != leading]
    if leading and others and not wanted and not on_ib:
        state = f"reaches the others by {leading}, and has {', '.join(others)} too: NCCL may take any"
        return Status(YELLOW, state, fix)
    return Status(GREEN, name)


def _first(host: Host) -> str | None:
    """The interface that NCCL takes first: the variable's; else one that begins with ib; else none of docker's or
    lo."""
    there = network.addressed(host)
    wanted = network.variable(host, "NCCL_SOCKET_IFNAME")
    if wanted:
        without, exact = wanted.startswith("^"), wanted.lstrip("^").startswith("=")
        parts = [part for part in wanted.lstrip("^=").split(",") if part]
        fits = [
            name for name in there if any(name == part if exact else name.startswith(part) for part in parts)
        ]
        return next((name for name in there if (name in fits) != without), None)
    ordinary = [name for name in there if not name.startswith(NOT_FIRST)]
    order = [*(name for name in there if name.startswith("ib")), *ordinary, *there]
    return order[0] if order else None
