"""A lock on a file that ends with the process that holds it: flock(2), or a lease where the file system has none.

flock is missing on Lustre mounted without `-o flock` (ENOSYS), on NFS version 3 without lockd (ENOLCK) and on some FUSE
file systems (EOPNOTSUPP, EINVAL, EIO). There a second file, NAME.lease, says who holds the lock, and its holder counts
it up every RENEW_S. Whether the holder lives is judged by

1. its process id and that process's start time, where it is on the same boot of the same machine and in the same
   namespace of processes. That is exact, and sees a reused process id;
2. otherwise by silence. Hosts' clocks differ, so the time of the last renewal is good enough to show a state, and not
   to take a lock: whoever wants the lock watches the count for WATCH_S of its own monotonic clock first.

A holder that was suspended for longer than that, and finds another one's lease when it wakes up, asks its own process
to end (SIGTERM). Two who find the same dead lease can't both take it: a lease is made with O_EXCL, removed by renaming
it to a name of one's own, and read again before it counts.

A holder by flock writes down who it is, too: hosts may mount one file system with and without flock.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from dsrun.host.locks import NO_FLOCK

TRIES, TRY_S = 10, 0.05
"""Tries to take a lock, and the seconds between. A process that only looks at it holds it for less than that."""
RENEW_S = 10.0
WATCH_S = 3 * RENEW_S
"""Seconds for which a lease of another host is watched before it is taken."""
EXPIRED_S = 6 * RENEW_S
"""Seconds without a renewal, by clocks that may differ, after which a lease of another host is shown as over."""
SETTLE_S = 0.2
"""Seconds between making a lease and reading it again."""
RECORD_BYTES = 512
"""A record is padded to this size: a renewal needs no room on a full disk, and nobody reads half of one."""


@dataclass(frozen=True)
class LockRecord:
    """The holder of a lock, as it wrote itself down."""

    host: str = ""
    user: str = ""
    pid: int = 0
    started: int = 0
    """The process's start, in the kernel's ticks since the boot (proc(5), /proc/PID/stat, field 22)."""
    machine: str = ""
    """The boot and the namespace of processes in which `pid` means something; empty where they are unknown."""
    token: str = ""
    count: int = 0

    def __str__(self) -> str:
        """For messages: "process 12 of alice on node1"."""
        return f"process {self.pid} of {self.user} on {self.host}" if self.pid else "an unknown process"


class FileLock:
    """A lock that this process takes and gives back. path: the file, made if need be; its folder has to be there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None
        self._lease: _Lease | None = None

    def take(self) -> bool:
        """Take the lock; False where somebody keeps it. May watch a lease for WATCH_S. Raises OSError."""
        record = _own_record()
        # Not "w": that would empty the record of a holder before it is known whether there is one.
        file = self.path.open("a+")
        try:
            locked = _locked(file)
            # A lock by flock isn't enough: a host whose mount of this file system has no flock may hold a lease.
            if locked is not False and _is_free(self.path, by_flock=locked is True):
                if locked is None:
                    self._lease = _Lease(_lease_of(self.path), record)
                if self._lease is None or self._lease.make():
                    self._file = file
                    if locked:
                        with contextlib.suppress(OSError):  # a full disk: the lock holds without its record
                            file.truncate(0)
                            _write(file.fileno(), record)
                    return True
        finally:
            if self._file is None:
                file.close()
        return False

    def release(self) -> None:
        """Give the lock back."""
        if self._lease:
            self._lease.end()
        elif self._file:
            with contextlib.suppress(OSError):
                self._file.truncate(0)
        if self._file:
            self._file.close()
        self._file = self._lease = None


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock. Changes nothing, waits for nothing.

    A lock that can't be looked at counts as held: nobody may take it for free.
    """
    try:
        with path.open() as file:
            locked = _flock(file, fcntl.LOCK_SH)  # shared: two who look at once don't see each other
    except FileNotFoundError:
        return False
    except OSError:
        return True
    if locked is False:
        return True
    if lease := _read(_lease_of(path)):
        return _lives(lease, _age(_lease_of(path)))
    return locked is None and _may_hold(_read(path))


def holder_of(path: Path) -> LockRecord | None:
    """The holder by its own record; None where nothing is written down."""
    return _read(_lease_of(path)) or _read(path)


def is_holder(path: Path, pid: int) -> bool:
    """Whether a process of this machine holds the lock: it has the file open, with a lock of its own or with its lease.

    Raises OSError where the process may not be looked at.
    """
    wanted = path.stat()
    lease = _read(_lease_of(path))
    own_lease = lease is not None and lease.pid == pid and _is_here(lease) and _runs(lease)
    for handle in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, or no file of this machine's
            if os.path.samestat(handle.stat(), wanted):
                info = Path(f"/proc/{pid}/fdinfo/{handle.name}").read_text(encoding="ascii", errors="replace")
                if own_lease or any(
                    line.startswith("lock:") and " WRITE " in line for line in info.splitlines()
                ):
                    return True
    return False


class _Lease:
    """A lease of this process, renewed by a thread."""

    def __init__(self, path: Path, record: LockRecord) -> None:
        self._path, self._record = path, record
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew_all, daemon=True, name="dsrun-lease")

    def make(self) -> bool:
        """Make the file and keep it; False where another process was faster."""
        if not self._put():
            return False
        # Not every NFS makes a file with O_EXCL in one step (open(2)), and a slower process may have moved this lease
        # away to look at it (`_removed`), so that a third made its own. The token in the file decides.
        time.sleep(SETTLE_S)
        if not self._is_own():
            return False
        self._thread.start()
        return True

    def _put(self) -> bool:
        try:
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        try:
            _write(handle, self._record)
            os.fsync(handle)
        finally:
            os.close(handle)
        return True

    def _is_own(self) -> bool:
        record = _read(self._path)
        return record is not None and record.token == self._record.token

    def _renew_all(self) -> None:
        while not self._ended.wait(RENEW_S):
            with contextlib.suppress(OSError):  # the server may be away: tried again
                if not self._renew():
                    sys.stderr.write(f"dsrun: {self._path}: taken by {_read(self._path)}; this one ends\n")
                    os.kill(os.getpid(), signal.SIGTERM)
                    return

    def _renew(self) -> bool:
        """Count up; False where the lease is another process's by now. A lease that somebody removed is made again."""
        self._record = replace(self._record, count=self._record.count + 1)
        if not self._path.exists():
            return self._put() or self._is_own()
        if not self._is_own():
            return False
        handle = os.open(self._path, os.O_WRONLY)
        try:
            _write(handle, self._record)
        finally:
            os.close(handle)
        return True

    def end(self) -> None:
        """Stop renewing, and remove the lease."""
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            if self._is_own():
                self._path.unlink()


def _flock(file: IO[str], how: int) -> bool | None:
    """Whether the lock was got at once; None where the file system has no flock."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_FLOCK:
            raise
        return None
    return True


def _locked(file: IO[str]) -> bool | None:
    for _ in range(TRIES - 1):
        if (locked := _flock(file, fcntl.LOCK_EX)) is not False:
            return locked
        time.sleep(TRY_S)
    return _flock(file, fcntl.LOCK_EX)


def _is_free(path: Path, *, by_flock: bool) -> bool:
    """Whether nobody else holds the lock in the other way. A dead lease is removed.

    by_flock: whether this process has the lock by flock already.
    """
    lease_path = _lease_of(path)
    if lease := _read(lease_path):
        if _is_here(lease):
            if _runs(lease):
                return False
        elif _age(lease_path) <= EXPIRED_S or _is_renewed(lease_path, lease):
            return False
        return _removed(lease_path, lease)
    return by_flock or not _may_hold(_read(path))


def _lease_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lease")


def _read(path: Path) -> LockRecord | None:
    """The record in a file; one without a holder where the file has none, None where there is no file."""
    try:
        with path.open("rb") as file:
            content = file.read(RECORD_BYTES)
    except FileNotFoundError:
        return None
    except OSError:
        return LockRecord()
    with contextlib.suppress(ValueError, TypeError, KeyError):
        fields: dict[str, Any] = json.loads(content)
        return LockRecord(**{name: kind(fields[name]) for name, kind in _FIELDS.items()})
    return LockRecord()


_FIELDS = {name: type(value) for name, value in asdict(LockRecord()).items()}


def _write(handle: int, record: LockRecord) -> None:
    os.pwrite(handle, json.dumps(asdict(record)).encode().ljust(RECORD_BYTES - 1) + b"\n", 0)


def _own_record() -> LockRecord:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    pid = os.getpid()
    return LockRecord(
        socket.gethostname()[:100], user[:100], pid, _start_of(pid) or 0, _machine(), secrets.token_hex(8)
    )


def _machine() -> str:
    """This boot of this machine, and the namespace of this process's id; empty where they are unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 - no path of a file
    except OSError:
        return ""


def _start_of(pid: int) -> int | None:
    """The start of a process, in ticks; None where there is no such process, or it has ended and waits to be reaped."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = words.rpartition(")")[2].split()  # the name before may hold anything; this begins with field 3
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _is_here(record: LockRecord) -> bool:
    return bool(record.machine) and record.machine == _machine()


def _runs(record: LockRecord) -> bool:
    return _start_of(record.pid) == record.started


def _may_hold(record: LockRecord | None) -> bool:
    """Whether a holder by flock, which can't be seen without flock, may still be there."""
    return record is not None and (_runs(record) if _is_here(record) else bool(record.pid))


def _age(lease: Path) -> float:
    """Seconds between a lease's last renewal and now, whichever clock is ahead."""
    try:
        return abs(time.time() - lease.stat().st_mtime)
    except OSError:
        return 0.0


def _lives(record: LockRecord, age_s: float) -> bool:
    return _runs(record) if _is_here(record) else age_s <= EXPIRED_S


def _is_renewed(lease: Path, record: LockRecord) -> bool:
    """Whether a lease changes while it is watched, for WATCH_S."""
    until = time.monotonic() + WATCH_S
    while time.monotonic() < until:
        time.sleep(min(1.0, WATCH_S / 10))
        if _read(lease) != record:
            return True
    return False


def _removed(lease: Path, dead: LockRecord) -> bool:
    """Remove a dead lease; False where it is another process's by now, which gets it back."""
    # Not unlink: since it was read another process may have put its own there. A rename takes out one file for sure,
    # which is then compared, and linked back where it is a living one.
    own = lease.with_name(f"{lease.name}.{secrets.token_hex(6)}.tmp")
    try:
        lease.rename(own)
    except FileNotFoundError:
        return True
    try:
        if _read(own) == dead:
            return True
        with contextlib.suppress(OSError):
            os.link(own, lease)
        return False
    finally:
        own.unlink(missing_ok=True)
