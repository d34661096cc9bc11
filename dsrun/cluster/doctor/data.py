"""Is the data file the same everywhere?"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from dsrun.cluster.doctor.check import GREEN, GREY, RED, Host, Status, across, commonest
from dsrun.words import size_text

TITLE = "data"
ORDER = 80


@across("data", "data")
def data(hosts: Sequence[Host]) -> Iterator[tuple[Host, Status]]:
    """Ranks that read another file train on other examples, or stop at another step and leave the rest waiting."""
    there = [host for host in hosts if (host["data"] or {}).get("exists")]
    whole = all(host["data"]["sha256"] for host in there)
    marks = {id(host): _mark(host, whole=whole) for host in there}
    usual = commonest(list(marks.values())) if marks else ""
    for host in hosts:
        fact = host["data"]
        if fact is None:
            yield host, Status(GREY, "no --data to look at")
        elif not fact["exists"]:
            fix = "Copy it there, or put it in a folder that all hosts share."
            yield host, Status(RED, f"no file {fact['path']}", fix)
        elif marks[id(host)] != usual:
            good = next(other.name for other in there if marks[id(other)] == usual)
            fix = f"Copy it again: rsync --checksum {good}:{shlex.quote(fact['path'])} the-same-path"
            yield host, Status(RED, f"another file than on {good} ({fact['size']} bytes)", fix)
        else:
            ends = "the same size and ends (too large to read whole)"
            same = f"sha256 {fact['sha256'][:12]}" if whole else ends
            yield host, Status(GREEN, f"{size_text(fact['size'])}, {same}")


def _mark(host: Host, *, whole: bool) -> str:
    fact = host["data"]
    return str(fact["sha256"]) if whole else f"{fact['size']} {fact['ends_sha256']}"
