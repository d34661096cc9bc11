"""How ranks and hosts ended, and which of the ranks' ends may be why the job did.

A failed rank takes the others along: they lose their peer, wait for it in vain, or are killed by the launcher.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from dsrun.job.rank_state import GONE

RUNTIME, DISTRIBUTED = (
    re.compile(r"RuntimeError(?=:|$)"),
    re.compile(r"(torch\.distributed\.)?Dist(Backend|Network|Store)?Error(?=:|$)"),
)
"""Types of the errors that torch raises in a rank whose peers are gone or silent. Any other type is a cause of its own:
a Hub's ReadTimeout or ConnectionError is none of torch's."""
PEERS = re.compile(
    r"\b(connection (closed|reset|refused)|socket closed) by (remote )?peer\b|\b(recvValue|sendBytes) failed\b"
    r"|\btimed out waiting \d+ ?ms\b|\bmonitoredBarrier\b|\bstore[- ]based barrier\b|\bconnectFullMesh failed\b"
    r"|\bNCCL (error|communicator|operations? ha)|\bnccl(Remote|System|Internal|UnhandledCuda)Error\b"
    r"|\bcaught collective operation timeout\b|\bgloo/transport/[^\n]{1,120}\bbroken pipe\b"
    r"|\btimeout caused pair closure\b",
    re.IGNORECASE,
)
"""Messages of a RuntimeError in a collective whose other side closed its end, or did not come."""
CLOSED = re.compile(
    r"\b(connection (closed|reset)|socket closed) by (remote )?peer\b|\bbroken pipe\b|\bremote process exited\b",
    re.IGNORECASE,
)
"""Messages that say the other process is gone, and not merely late."""
TIMED_OUT = re.compile(
    r"\btimed out waiting \d+ ?ms\b|\bmonitoredBarrier\b|\bcaught collective operation timeout\b"
    r"|\bbefore timing out\b|\bcollective operation timeout\b|\btimeout caused pair closure\b",
    re.IGNORECASE,
)
"""Messages of a collective that a rank waited in until its time was over: another rank is there and does not come."""
OWN_MISTAKE = re.compile(
    r"\bEADDRINUSE\b|\baddress already in use\b|\bfailed to listen\b|\bncclInvalid(Usage|Argument)\b|\bout of memory\b"
    r"|\bno (usable )?(socket )?interface\b",
    re.IGNORECASE,
)
"""Messages of torch's network about a mistake of this rank alone."""


class RankEnd(NamedTuple):
    """How a rank ended without finishing."""

    rank: int
    when: float
    """Seconds since 1970, by the clock of the rank's host, also in messages between hosts."""
    error: str
    """The error's last line."""
    killed: bool
    """Whether it wrote no last state: a signal or os._exit ended it."""
    pid: int = 0
    """Process id on the rank's host."""
    agreed: bool = False
    """Whether all ranks ended with this same error, which is the job's and no rank's own."""
    code: int | None = None
    """Its exit code, -N for signal N; None where neither it nor the kernel tells."""


class HostEnd(NamedTuple):
    """How the launcher on a host ended."""

    host: int
    """The host's number in the job."""
    code: int | None
    """The launcher's exit code; None where it had none."""
    output: str = ""
    """The end of the launcher's output in this attempt."""
    ooms: int = 0
    """Strikes of the kernel's OOM killer during it."""
    least_ram_bytes: int = 0
    """Least free host memory during it."""
    ram_bytes: int = 0
    killed_by: int = 0
    """The signal that ended the launcher, unless dsrun sent it."""
    statuses: Mapping[str, str] = {}
    """Last states of its ranks, by number (as text)."""


def lost_others(error: str) -> bool:
    """Whether an error is a consequence of others that are gone or silent. Its type decides before its words."""
    if error == GONE:
        return True
    blames_peers = DISTRIBUTED.match(error) or (RUNTIME.match(error) and PEERS.search(error))
    return bool(blames_peers) and not OWN_MISTAKE.search(error)


def timed_out(error: str) -> bool:
    """Whether an error says that the rank waited for another one until its time was over."""
    return lost_others(error) and bool(TIMED_OUT.search(error))


def may_have_waited(end: RankEnd) -> bool:
    """Whether a rank waited for another one until its time was over, as far as its end tells: NCCL's watchdog ends the
    process, which then writes no last state."""
    return end.killed or timed_out(end.error)


def causes(ends: Iterable[RankEnd], struck: Collection[int] = ()) -> list[RankEnd]:
    """The ends that may be why the job died, the first one first.

    The others lost a rank, timed out waiting for one, or were killed because another had failed, as the launcher does.
    struck: ranks that something else is known to have ended.
    """
    # A killed rank leaves no word: the launcher notices it later than its peers notice a closed connection. So by the
    # clock alone these would be to blame. Where all of them say "closed" and one rank was killed, that one was first.
    in_order = sorted(ends, key=lambda end: end.when)
    killed = [end for end in in_order if end.killed]
    failed = [end for end in in_order if not end.killed]
    was_first = len(killed) == 1 and all(
        lost_others(end.error) and CLOSED.search(end.error) for end in failed
    )
    failed_at = float("inf") if was_first or not failed else failed[0].when
    return [
        end
        for end in in_order
        if (end.when <= failed_at or end.rank in struck if end.killed else not lost_others(end.error))
    ]


def first_of(ends: Collection[RankEnd], struck: Collection[int] = ()) -> RankEnd | None:
    """The rank whose end is the cause; of ranks that all merely lost one another, the first."""
    return next(iter(causes(ends, struck)), min(ends, key=lambda end: end.when, default=None))
