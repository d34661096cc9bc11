"""The network of this machine: addresses, the way to another host, a port, and the cards that NCCL takes.

Sent to hosts as part of the probe: Python 3.8, its own library.
"""

from __future__ import annotations

import fcntl
import re
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsrun.host.system import folders_of, output_of, text_of

CARDS = Path("/sys/class/infiniband")
PLUGIN_FOLDERS = (
    "/opt/amazon/ofi-nccl/lib",
    "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu",
    "/opt/aws-ofi-nccl/lib",
)
"""Folders of NCCL's plug-in for EFA in Amazon's images, which no variable names."""
AMAZON = "0x1d0f"
"""PCI's number of the vendor."""
SIOCGIFCONF = 0x8912
"""The request for all interfaces with IPv4 addresses (netdevice(7))."""
LAUNCHERS_PORT = 29500
"""The port where ranks meet if no other is named (deepspeed/constants.py)."""


def interfaces() -> dict[str, list[str]]:
    """Each interface's addresses."""
    try:
        rows = [line.split() for line in output_of("ip", "-o", "addr", "show").splitlines()]
        pairs = [(row[1].split("@")[0], row[3].split("/")[0]) for row in rows if row[2] in ("inet", "inet6")]
    except (OSError, IndexError, subprocess.SubprocessError):
        pairs = _from_the_kernel()
    addresses: dict[str, list[str]] = {}
    for name, address in pairs:
        addresses.setdefault(name, []).append(address)
    return addresses


def route_to(master: str) -> dict[str, Any]:
    """The way to the master: its address here, and by which interface and from which address it is reached."""
    try:
        rows = socket.getaddrinfo(master, None, type=socket.SOCK_DGRAM)
    except OSError as error:
        fault = f"can't find the name {master}: {error.strerror or error}"
        return {"master": master, "address": None, "fault": fault}
    rows.sort(key=lambda row: row[0] != socket.AF_INET)  # as ranks do: IPv4 where there is both
    family, address = rows[0][0], str(rows[0][4][0])
    way = {"master": master, "address": address}
    try:
        words = output_of("ip", "route", "get", address).split()
        source = words[words.index("src") + 1] if "src" in words else None
        return {**way, "interface": words[words.index("dev") + 1], "source": source}
    except (OSError, ValueError, subprocess.SubprocessError):
        pass  # no `ip` tool
    try:
        # Connecting a UDP socket sends nothing; the kernel chooses the way.
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            source = str(probe.getsockname()[0])
    except OSError as error:
        return {**way, "fault": f"no route to {address}: {error.strerror or error}"}
    names = [name for name, addresses in interfaces().items() if source in addresses]
    return {**way, "interface": names[0] if names else None, "source": source}


def is_free_port(port: int) -> bool:
    """Whether nobody listens on a port, tried as torch's TCPStore takes it: on both families at once."""
    try:
        probe = socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET)
    except OSError:
        probe = socket.socket()
    with probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if probe.family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def fabric(environ: Mapping[str, str]) -> dict[str, Any]:
    """The cards that NCCL can use between hosts (InfiniBand, RoCE, EFA), libraries for them, plug-ins.

    verbs: None where neither the folders nor ldconfig can tell.
    """
    cards = [_card(path) for path in sorted(CARDS.glob("*"))]
    folders = [*folders_of(environ, "LD_LIBRARY_PATH"), *map(Path, PLUGIN_FOLDERS)]
    plugins = [str(path) for folder in folders for path in sorted(folder.glob("libnccl-net*.so*"))]
    try:
        known = output_of("ldconfig", "-p")
    except (OSError, subprocess.SubprocessError):
        known = ""
    plugins += re.findall(r"=> (\S*libnccl-net\S*)", known)
    verbs = "libibverbs.so.1" in known or any((folder / "libibverbs.so.1").exists() for folder in folders)
    return {
        "cards": cards,
        "plugins": list(dict.fromkeys(plugins)),
        "verbs": True if verbs else None if not known else False,
    }


def _card(path: Path) -> dict[str, Any]:
    port = path / "ports" / "1"
    return {
        "name": path.name,
        "efa": text_of(path / "device" / "vendor").strip() == AMAZON,
        "layer": text_of(port / "link_layer").strip() or None,
        "state": text_of(port / "state").strip().rpartition(" ")[2] or None,
    }


def _from_the_kernel() -> list[tuple[str, str]]:
    """(interface, address) pairs without the `ip` tool: by SIOCGIFCONF for IPv4, from /proc for IPv6."""
    import array
    import ctypes
    import struct

    space = array.array("B", b"\0" * 16384)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iL", len(space), space.buffer_info()[0])
        size = struct.unpack("iL", fcntl.ioctl(probe.fileno(), SIOCGIFCONF, request))[0]
    # struct ifreq: 16 bytes of a name, then a union whose largest member holds pointers.
    record = 40 if ctypes.sizeof(ctypes.c_void_p) == 8 else 32
    data = space.tobytes()[:size]
    pairs = []
    for start in range(0, size, record):
        name = data[start : start + 16].split(b"\0", 1)[0].decode().split(":")[0]
        pairs.append((name, socket.inet_ntoa(data[start + 20 : start + 24])))
    for line in text_of("/proc/net/if_inet6").splitlines():
        words = line.split()
        pairs.append((words[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0]))))
    return pairs
