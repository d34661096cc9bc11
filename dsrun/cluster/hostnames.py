"""Names of machines: those that can be a machine's, and placeholders for one still to be filled in."""

from __future__ import annotations

import ipaddress
import re
import unicodedata
from typing import NamedTuple

LONGEST_NAME = 253
"""Characters of a host name (RFC 1035, section 2.3.4, in text)."""
LONGEST_SHOWN = 60
NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
"""RFC 1123's letters, digits, hyphens and dots, and the underscore that names in private networks have."""
ONLY_NUMBERS = re.compile(r"[0-9.]+")
# Reserved for documentation: RFC 5737, RFC 3849, RFC 2606.
DOCUMENTATION = tuple(
    ipaddress.ip_network(net)
    for net in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32")
)
PLACEHOLDER = re.compile(
    r"""<.*> | \$.+ | \{.*\} | x+(\.x+)* | \.\.\.
    | ip[-_]?\d{0,3} | ip[-_]?addr(ess)?[-_]?\d*
    | your[-_].+ | (your|my)[-_]?(host|node|ip|server|machine)([-_]?(name|ip|addr(ess)?))?[-_]?\d*
    | (host|node|worker|server|machine|master|slave|head|remote)[-_]?(ip|name|hostname|addr(ess)?)[-_]?\d*
    | .*[.](example|invalid) | (.*[.])?example[.](com|org|net)
    """,
    re.VERBOSE | re.IGNORECASE,
)
SEEN_AS_ANOTHER = re.compile(r"[\uff01-\uff5e]")


class Fault(NamedTuple):
    """The fault of a value."""

    rule: str
    """Its id, see hostfile.RULES."""
    message: str
    hint: str
    """The right form."""


def shown(value: str) -> str:
    """A text of a user's file for a message: quoted, on one line, without control codes, cut where it is long."""
    text = value if len(value) <= LONGEST_SHOWN else f"{value[:LONGEST_SHOWN]}..."
    return repr(text)


def name_fault(host: str) -> Fault | None:
    """The reason why no machine can be reached by a name in a hostfile; None where one can.

    An IPv6 address is a name like any other here. Names that consist of digits and dots must be whole IPv4
    addresses: getaddrinfo takes "4" for 0.0.0.4 and "010" in an address for 8 (inet_aton(3)).
    """
    user, at, rest = host.rpartition("@")
    name, colon, port = host.rpartition(":")
    name_text = shown(host)
    if at and user and NAME.fullmatch(rest):
        name_text += " names a user: DeepSpeed's --include and --exclude end a host's name at the @"
        return Fault(
            "H011", name_text, f"Write {rest}, and `User {user}` below `Host {rest}` in ~/.ssh/config."
        )
    if is_ipv6(host):
        return None
    if ONLY_NUMBERS.fullmatch(host) and not _is_ipv4(host):
        hint = "Four numbers from 0 to 255 without leading zeros, as 192.168.1.10; or the machine's name."
        return Fault("H012", f"{name_text} is not an address", hint)
    if colon and NAME.fullmatch(name) and port.isascii() and port.isdigit():
        hint = f"Write {name} slots=N; an ssh port belongs below `Host {name}` in ~/.ssh/config, or in --ssh_port."
        return Fault("H013", f"{name_text} has a port or a number of slots behind the name", hint)
    if host.startswith("[") and is_ipv6(inner := host[1:].partition("]")[0]):
        return Fault("H012", f"{name_text} is not a host name: ssh takes no brackets", f"Write {inner}")
    if "[" in host and "]" in host:
        hint = f'One host a line: `dsrun hosts expand "{host}:8"` writes them.'
        return Fault("H014", f"{name_text} is a list of hosts, which DeepSpeed takes for one name", hint)
    if not NAME.fullmatch(host):
        return _bad_characters(host)
    if len(host) > LONGEST_NAME or ".." in host:
        why = "two dots in a row" if ".." in host else f"{len(host)} characters"
        hint = f"At most {LONGEST_NAME} characters, with parts between single dots."
        return Fault("H012", f"{name_text} is not a host name: {why}", hint)
    return None


def _bad_characters(host: str) -> Fault:
    odd = sorted({char for char in set(host) if not NAME.fullmatch(char) and char not in ".-"})
    ends = "a hyphen or dot at its beginning, or a hyphen at its end"
    message = f"{shown(host)} is not a host name: it has {', '.join(map(shown, odd[:5])) if odd else ends}"
    hint = "Letters, digits, hyphens, underscores and dots; the name that `ssh NAME` takes."
    return Fault("H012", message, hint)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _is_ipv4(host: str) -> bool:
    return isinstance(_address(host), ipaddress.IPv4Address)


def is_ipv6(host: str) -> bool:
    """An IPv6 address, perhaps with a zone (fe80::1%eth0)."""
    address = _address(host)
    if not isinstance(address, ipaddress.IPv6Address):
        return False
    return address.scope_id is None or NAME.fullmatch(address.scope_id) is not None


def is_loopback(host: str) -> bool:
    """localhost, its usual other names, 127.0.0.0/8 and ::1: whoever connects there reaches itself."""
    plain = host.lower().rstrip(".")
    if plain in {"localhost", "localhost.localdomain", "ip6-localhost"} or plain.endswith(".localhost"):
        return True
    address = _address(plain)
    return address is not None and address.is_loopback


def identity(host: str) -> str:
    """The same text for names that are plainly one machine's, whatever the case, a last dot, the form of an address."""
    plain = host.lower().rstrip(".")
    if is_loopback(plain):
        return "localhost"
    return ipaddress.IPv6Address(plain).compressed if is_ipv6(plain) else plain


def is_placeholder(host: str) -> bool:
    """A name that documentation writes where the reader's own belongs: node_ip, ip1, <host>, your-host."""
    address = _address(host)
    return bool(PLACEHOLDER.fullmatch(host)) or any(address in net for net in DOCUMENTATION if address)


def odd_character(text: str) -> str | None:
    """The first character that looks like another one or like nothing, and is read as neither."""
    if text.isascii() and text.isprintable():
        return None
    for char in text:
        if char == "\t":
            continue
        # Z: every kind of space; C: control codes, zero-width signs, U+FEFF; the full-width forms of ASCII.
        kind = unicodedata.category(char)
        if (kind[0] in "ZC" and char != " ") or SEEN_AS_ANOTHER.fullmatch(char):
            return char
    return None


def plain(text: str) -> str:
    """The text with ASCII in place of what looks like it, and nothing in place of what can't be seen."""
    text = unicodedata.normalize("NFKC", text)
    visible = "".join(" " if unicodedata.category(char)[0] == "Z" else char for char in text)
    return "".join(char for char in visible if unicodedata.category(char)[0] != "C" or char == "\t").strip()


def named(char: str) -> str:
    """`a FULLWIDTH EQUALS SIGN (U+FF1D)`."""
    name = unicodedata.name(char, "control character").lower()
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name} (U+{ord(char):04X})"
