"""The file that names the machines of a job: a line `HOST slots=N` each.

What DeepSpeed reads is `^(\\S+)\\s+slots=(\\d+)` at the beginning of a line, and whatever follows is swallowed
(deepspeed/launcher/runner.py, _parse_hostfile): `slots=4x` is 4, and so is `slots=4.5`. Open MPI reads the same
file with --launcher openmpi (hostfile_lex.l, hostfile.c), where `max_slots=M` and a # at a line's end are meant.
Wherever both this module and DeepSpeed accept a file, hosts, slots and their order are the same.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dsrun.cluster import hostnames
from dsrun.cluster.hostnames import Fault, shown
from dsrun.errors import DsrunError, Problem
from dsrun.files import read_text

MOST_SLOTS = 1000
"""More devices than any machine has."""
LONGEST = 300
"""Characters of a message or hint: a line of another kind of file may have millions."""
BOM = "\ufeff"
LINE_END = re.compile(r"\r\n|\r|\n")
"""Ends of lines as Python's text files know them. Not str.splitlines: for DeepSpeed a form feed or U+2028 ends no
line."""
ENTRY = re.compile(r"(\S+)\s+slots=([0-9]+)((?:\s.*)?)")
MAX_SLOTS = re.compile(r"\s+(?:max[-_]slots|slots[-_]max)=([0-9]+)\s*")
KEY = re.compile(r"(?P<key>[A-Za-z_-]+)(?P<sign>\s*[=:]\s*)(?P<value>.*)")
NUMBER_START = re.compile(r"[0-9]+")
FORM_HINT = "A line is HOST slots=N, as: gpu01 slots=8"

RULES = {
    "H001": "a host without a number of slots",
    "H002": "spaces around the = of slots=N",
    "H003": "another word or sign than slots=",
    "H004": "HOST:N, MPICH's form",
    "H005": "slots= without a whole number",
    "H006": "the number or slots= in front of the host",
    "H007": "text behind the number of slots",
    "H008": "a max_slots that is not a number, or less than slots",
    "H009": "a host that is listed twice",
    "H010": "slots that no machine has: 0, negative, more than 1000",
    "H011": "USER@HOST",
    "H012": "a name that no host can have",
    "H013": "a port behind a host's name",
    "H014": "a list of hosts in brackets",
    "H015": "no host at all",
    "H016": "a byte-order mark",
    "H017": "characters that look like others, or are invisible",
    "H018": "another kind of line",
    "H101": "a name from documentation",
    "H102": "this machine's own name among several hosts",
    "H103": "one machine under two names",
    "H201": "one host only",
    "H202": "unequal numbers of slots",
}
"""Every id: H0 errors, H1 warnings, H2 notes."""
ABOUT_SLOTS = ("H002", "H003", "H005")
"""Rules on the text behind a host's name: its name is judged as well."""
SEVERITIES = {"0": "error", "1": "warning", "2": "note"}


@dataclass(frozen=True)
class HostSlots:
    """A host and its devices."""

    host: str
    slots: int
    line: int
    """Its line in the file, from 1."""


@dataclass(frozen=True)
class HostfileFinding:
    """One remark on a hostfile."""

    line: int
    rule: str
    """A key of RULES."""
    severity: str
    """error, warning or note."""
    message: str
    hint: str
    """The right form."""


@dataclass(frozen=True)
class Hostfile:
    entries: tuple[HostSlots, ...]
    """The lines that are right, in their order."""
    findings: tuple[HostfileFinding, ...]
    """All remarks, by line."""

    @property
    def errors(self) -> tuple[HostfileFinding, ...]:
        """The findings for which a job is not started."""
        return tuple(finding for finding in self.findings if finding.severity == "error")


def parse(text: str) -> Hostfile:
    """A hostfile's entries and all findings. Raises nothing: a fault becomes a finding."""
    entries: list[HostSlots] = []
    findings: list[HostfileFinding] = []
    first: dict[str, int] = {}
    lines = LINE_END.split(text)
    if text.startswith(BOM):
        lines[0] = lines[0][1:]
        hint = "Save it as UTF-8 without BOM: sed -i '1s/^\\xEF\\xBB\\xBF//' FILE"
        message = "the file begins with a byte-order mark, which DeepSpeed takes as part of the first name"
        findings.append(_finding(1, Fault("H016", message, hint)))
    for number, line in enumerate(lines, 1):
        body = line.partition("#")[0]
        if not body.strip():
            continue
        got = _line(body)
        if isinstance(got, list):
            findings += [_finding(number, fault) for fault in got]
            if hostnames.is_placeholder(name := body.split()[0]):
                findings.append(_finding(number, _placeholder(name)))
        elif got[0] in first:
            message = f"{shown(got[0])} is already in line {first[got[0]]}"
            hint = f"Remove one of the lines. {_devices_hint(got[1])}"
            findings.append(_finding(number, Fault("H009", message, hint)))
        else:
            first[got[0]] = number
            entries.append(HostSlots(*got, number))
    if not entries and not any(finding.rule != "H016" for finding in findings):
        commented = any("#" in line for line in lines)
        message = "it has only comments" if commented else "it is empty"
        findings.append(_finding(1, Fault("H015", f"no host in this file: {message}", FORM_HINT)))
    # A file that is to be changed anyway needs no remarks on the whole.
    notes = [] if findings else [*_notes(entries)]
    findings += [*_warnings(entries), *notes]
    findings.sort(key=lambda finding: finding.line)
    return Hostfile(tuple(entries), tuple(findings))


def read(path: Path) -> Hostfile:
    """A hostfile from a disk. Raises DsrunError where it can't be read.

    DeepSpeed continues with this machine alone if the file is missing or a folder, and says so in one line of its
    log (runner.py, fetch_hostfile).
    """
    try:
        return parse(read_text(path))
    except DsrunError as error:
        (problem,) = error.problems
        hint = ""
        if not os.path.isfile(path):  # noqa: PTH113 - Path.is_file raises where a folder may not be looked into
            hint = "DeepSpeed itself would continue with this machine alone. " + FORM_HINT
        elif "UTF-8" in problem.what:
            hint = "Save it as UTF-8."
        raise DsrunError([Problem(problem.what, problem.where, hint)]) from error


def checked(path: Path) -> tuple[HostSlots, ...]:
    """The entries of a hostfile without an error. Raises DsrunError with all errors, each with `file:line`."""
    hostfile = read(path)
    if hostfile.errors:
        raise DsrunError(
            Problem(f"{error.message} ({error.rule})", f"{path}:{error.line}", error.hint)
            for error in hostfile.errors
        )
    return hostfile.entries


def text_of(entries: Iterable[HostSlots]) -> str:
    """The entries as a hostfile."""
    return "".join(f"{entry.host} slots={entry.slots}\n" for entry in entries)


def slots_fault(slots: str) -> Fault | None:
    """The fault of a text of digits, perhaps with a sign, as a number of slots; None where it is one."""
    digits = slots.lstrip("+-").lstrip("0")
    if not digits:
        message = "0 slots: DeepSpeed would start nothing there, and report success"
        return Fault("H010", message, "Give the number of its GPUs, or remove the line.")
    if slots.startswith("-"):
        return Fault("H010", f"a negative number of slots: {shown(slots)}", "Give the number of its GPUs.")
    # Compared by length first: int() refuses texts of more than 4300 digits.
    if len(digits) > len(str(MOST_SLOTS)) or int(digits) > MOST_SLOTS:
        message = f"{shown(slots)} slots: no machine has more than {MOST_SLOTS} devices"
        return Fault(
            "H010", message, "Give the number of its GPUs: slots are counted on each host, not in all."
        )
    return None


def _line(body: str) -> tuple[str, int] | list[Fault]:
    """A line's host and slots, or all its faults. body: the line without its comment, not blank."""
    if odd := hostnames.odd_character(body):
        message = f"{hostnames.named(odd)}, which does not belong in a hostfile"
        typed = hostnames.plain(body)
        return [Fault("H017", message, f"Type it again: {typed}" if typed else "Remove the line.")]
    body = body.strip()
    match = ENTRY.fullmatch(body)
    if not match:
        return _bad_line_and_name(body)
    host, slots, rest = match.groups()
    faults = [hostnames.name_fault(host), slots_fault(slots)]
    if rest.strip() and not faults[1]:
        faults.append(_behind(rest, int(slots)))
    return [fault for fault in faults if fault] or (host, int(slots))


def _bad_line_and_name(body: str) -> list[Fault]:
    """The fault of a line that is not `HOST slots=N`, and that of its host's name where it is another."""
    fault = _bad_line(body)
    name = hostnames.name_fault(body.split(maxsplit=1)[0]) if fault.rule in ABOUT_SLOTS else None
    return [name, fault] if name else [fault]


def _behind(rest: str, slots: int) -> Fault | None:
    """The fault of the text behind `slots=N`: only Open MPI's max_slots may be there, not below slots (hostfile.c)."""
    word = rest.strip()
    if match := MAX_SLOTS.fullmatch(rest):
        most = match[1].lstrip("0")
        if len(most) > len(str(MOST_SLOTS)) or int(most or "0") >= slots:
            return None
        message = f"max_slots={match[1]} is less than slots={slots}: Open MPI refuses the file, DeepSpeed ignores it"
        return Fault("H008", message, f"Give at least max_slots={slots}, or leave it out.")
    if re.match(r"(max[-_]slots|slots[-_]max)\b", word):
        return Fault("H008", f"{shown(word)} is not max_slots=M", f"As: max_slots={slots}; or leave it out.")
    hint = "Remove it, or put a # in front of it; only max_slots=M may follow."
    return Fault("H007", f"{shown(word)} behind slots={slots}, which DeepSpeed ignores", hint)


def _bad_line(body: str) -> Fault:
    """The fault of a line that is not `HOST slots=N`."""
    host, *others = body.split(None, 1)
    rest = others[0] if others else ""
    if re.match(r"slots\s*=", body) or (NUMBER_START.fullmatch(host) and rest):
        return Fault("H006", f"{shown(body)}: the host's name comes first", FORM_HINT)
    if not rest:
        name, colon, number = host.rpartition(":")
        if colon and not hostnames.is_ipv6(host) and re.fullmatch(r"[0-9]+", number):
            return Fault("H004", f"{shown(host)} is MPICH's form", f"Write {name} slots={number}")
        if match := re.fullmatch(r"(.+?)slots=([0-9]+)", host):
            message = f"{shown(host)} has no space between name and slots"
            return Fault("H018", message, f"Write {match[1]} slots={match[2]}")
        message = f"{shown(host)} without slots: DeepSpeed needs its number of devices"
        return Fault(
            "H001", message, f"Write {host} slots=N" if not hostnames.name_fault(host) else FORM_HINT
        )
    key = KEY.fullmatch(rest)
    if key is None:
        message = f"{shown(rest)} behind {shown(host)} is not slots=N"
        if match := re.fullmatch(r"[0-9]+", rest):
            return Fault("H003", message, f"Write {host} slots={match[0]}")
        return Fault("H018", message, FORM_HINT)
    return _bad_key(host, key["key"], key["sign"], key["value"])


def _bad_key(host: str, key: str, sign: str, value: str) -> Fault:
    """The fault of `KEY=VALUE` behind a host, which is not slots=N. sign: = or :, with the spaces around it."""
    number = NUMBER_START.match(value)
    right = f"Write {host} slots={number[0] if number else 'N'}"
    if re.fullmatch(r"max[-_]slots|slots[-_]max", key):
        return Fault("H003", f"{key} without slots in front of it", f"As: {host} slots=8 max_slots=8")
    if key != "slots" or sign.strip() != "=":
        return Fault("H003", f"{shown(key + sign.strip())} is not slots=", right)
    if sign != "=":
        return Fault("H002", "spaces around the =, which DeepSpeed does not read", right)
    if re.fullmatch(r"-[0-9]+", value):
        return slots_fault(value) or Fault("H005", f"{shown(value)} is not a number", right)
    if number and value != number[0]:
        message = f"slots={shown(value)[1:-1]} is not a whole number, and DeepSpeed reads it as {number[0]}"
        return Fault("H005", message, right)
    message = f"{shown(value)} is not a whole number" if value else "no number behind slots="
    return Fault("H005", message, right)


def _devices_hint(slots: int) -> str:
    return f"All devices of a host go in one line, as slots={max(slots, 2)}."


def _placeholder(host: str) -> Fault:
    message = f"{shown(host)} looks like a name from documentation"
    return Fault("H101", message, "Write the machine's own name or address.")


def _warnings(entries: list[HostSlots]) -> Iterator[HostfileFinding]:
    """Warnings on lines that are right by themselves."""
    loopback = {entry.host for entry in entries if hostnames.is_loopback(entry.host)}
    seen: dict[str, HostSlots] = {}
    for entry in entries:
        if hostnames.is_placeholder(entry.host):
            yield _finding(entry.line, _placeholder(entry.host))
        if entry.host in loopback and len(loopback) < len(entries):
            message = f"{shown(entry.host)} among several hosts: on each of the others it is that host itself"
            yield _finding(entry.line, Fault("H102", message, "Write the name that the others reach it by."))
        before = seen.setdefault(hostnames.identity(entry.host), entry)
        if before is not entry:
            message = f"{shown(entry.host)} is the same machine as {shown(before.host)} in line {before.line}"
            hint = f"Remove one of the lines: two ranks would share a device. {_devices_hint(entry.slots)}"
            yield _finding(entry.line, Fault("H103", message, hint))


def _notes(entries: list[HostSlots]) -> Iterator[HostfileFinding]:
    """Notes on the whole file, where nothing in it is refused."""
    if len(entries) == 1:
        message = "one host: the `deepspeed` command starts the job on the machine where it is called"
        here = hostnames.is_loopback(entries[0].host)
        hint = "That is this machine." if here else f"Call it on {entries[0].host}, or give it --force_multi."
        yield _finding(entries[0].line, Fault("H201", message, hint))
    counts = Counter(entry.slots for entry in entries)
    if len(counts) > 1:
        common = counts.most_common(1)[0][0]
        other = next(entry for entry in entries if entry.slots != common)
        shares = ", ".join(f"{slots} on {count}" for slots, count in sorted(counts.items(), reverse=True)[:5])
        message = f"unequal slots ({shares}{', ...' if len(counts) > 5 else ''}), here {other.slots}"
        hint = "The launchers mpich, impi, mvapich and slurm need equal ones; pdsh and openmpi take any."
        yield _finding(other.line, Fault("H202", message, hint))


def _finding(line: int, fault: Fault) -> HostfileFinding:
    message, hint = (text if len(text) <= LONGEST else f"{text[:LONGEST]}..." for text in fault[1:])
    return HostfileFinding(line, fault.rule, SEVERITIES[fault.rule[1]], message, hint)
