"""Locks on files: flock(2), and the lease where a file system has none."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import time
from dataclasses import asdict, replace

import pytest
from running import waiting_processes

from dsrun import file_lock
from dsrun.errors import DsrunError
from dsrun.file_lock import FileLock, holder_of, is_held, is_holder
from dsrun.host.locks import NO_FLOCK
from dsrun.job import run_folder

HOLD = """
import errno, fcntl, sys
from pathlib import Path
from dsrun import file_lock
if sys.argv[2] == "lease":
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")
    fcntl.flock = flock
file_lock.RENEW_S = 0.05
lock = file_lock.FileLock(Path(sys.argv[1]))
print(lock.take(), flush=True)
sys.stdin.read()
"""


def wait_for(true) -> None:
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a user's 锁"


@pytest.fixture
def holder(path):
    """`holder("lease")`: another process that holds the lock, with flock or without."""
    with waiting_processes() as start:
        yield lambda kind: start(HOLD, str(path), kind, says="True")


@pytest.fixture
def no_flock(monkeypatch):
    def refuse(number: int = errno.ENOSYS) -> None:
        def flock(*_):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", flock)

    refuse()
    return refuse


def elsewhere(path, **fields) -> None:
    """A lease of a host that this one can't look at."""
    there = replace(file_lock._own_record(), host="node9", machine="another boot", pid=7, **fields)
    file_lock._lease_of(path).write_text(json.dumps(asdict(there)))


@pytest.mark.parametrize("number", NO_FLOCK)
def test_a_run_starts_where_flock_is_missing(tmp_path, no_flock, number):
    no_flock(number)
    with run_folder.held(tmp_path):
        run_folder.write_state(tmp_path, "running")
        assert run_folder.in_use(tmp_path)
        assert run_folder.describe_state(tmp_path) == "running"
        with (
            pytest.raises(DsrunError, match=f"another dsrun.*process {os.getpid()}"),
            run_folder.held(tmp_path),
        ):
            pass
    assert not run_folder.in_use(tmp_path)
    assert run_folder.describe_state(tmp_path) == "interrupted"
    assert {entry.name for entry in tmp_path.iterdir()} == {".lock", "logs", "run.json"}


@pytest.mark.parametrize("kind", ["flock", "lease"])
@pytest.mark.parametrize("here", ["flock", "lease"])
def test_another_process_holds_it(path, holder, monkeypatch, kind, here):
    """All four ways are tried: hosts may mount one file system with and without flock."""
    process = holder(kind)
    if here == "lease":
        monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSYS, "")))
    assert is_held(path)
    assert not FileLock(path).take()
    assert holder_of(path).pid == process.pid
    if kind == here:
        assert is_holder(path, process.pid)
    assert not is_holder(path, os.getpid())
    process.kill()
    process.wait()
    assert not is_held(path), "a process of this machine is known to be gone"
    lock = FileLock(path)
    assert lock.take()
    assert is_held(path)
    lock.release()
    assert not is_held(path)


def test_a_reused_process_id_holds_nothing(path, no_flock):
    path.touch()
    mine = file_lock._own_record()
    lease = file_lock._lease_of(path)
    lease.write_text(json.dumps(asdict(mine)))
    assert is_held(path)
    lease.write_text(json.dumps(asdict(replace(mine, started=mine.started - 1))))
    assert not is_held(path)


def test_a_lease_of_another_host_is_watched_before_it_is_taken(path, no_flock, monkeypatch):
    monkeypatch.setattr(file_lock, "WATCH_S", 0.2)
    path.touch()
    elsewhere(path)
    assert is_held(path), "renewed a moment ago"
    assert not FileLock(path).take()
    os.utime(file_lock._lease_of(path), (1, 1))
    assert not is_held(path), "silent for years"
    lock = FileLock(path)
    assert lock.take()
    assert holder_of(path).pid == os.getpid()
    lock.release()


def test_a_clock_that_is_hours_off_takes_no_lock_from_the_living(path, no_flock, monkeypatch):
    path.touch()
    elsewhere(path, count=1)
    hours_ago = time.time() - 9000
    os.utime(file_lock._lease_of(path), (hours_ago, hours_ago))

    def renewed(_):
        elsewhere(path, count=2)

    monkeypatch.setattr(file_lock.time, "sleep", renewed)
    assert not FileLock(path).take()


def test_a_lease_that_another_host_took_is_given_back(path, no_flock):
    """The lease that was judged dead isn't the one that lies there now."""
    path.touch()
    elsewhere(path, count=5)
    living = file_lock._lease_of(path).read_bytes()
    dead = replace(file_lock._read(file_lock._lease_of(path)), count=4)
    assert not file_lock._removed(file_lock._lease_of(path), dead)
    assert file_lock._lease_of(path).read_bytes() == living
    assert [entry.name for entry in path.parent.iterdir() if entry.suffix == ".tmp"] == []


def test_who_slept_and_lost_its_lease_asks_itself_to_end(path, no_flock, monkeypatch):
    monkeypatch.setattr(file_lock, "RENEW_S", 0.02)
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    lock = FileLock(path)
    try:
        assert lock.take()
        elsewhere(path)
        wait_for(lambda: received)
    finally:
        signal.signal(signal.SIGTERM, before)
        lock.release()
    assert holder_of(path).host == "node9", "the other's is left alone"


def test_a_lease_that_somebody_removed_is_made_again(path, no_flock, monkeypatch):
    monkeypatch.setattr(file_lock, "RENEW_S", 0.02)
    lock = FileLock(path)
    assert lock.take()
    file_lock._lease_of(path).unlink()
    wait_for(lambda: is_held(path))
    lock.release()
    assert not file_lock._lease_of(path).exists()


def test_what_cannot_be_looked_at_is_not_free(path, monkeypatch):
    path.touch()
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(PermissionError(errno.EACCES, "")))
    assert is_held(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"pid": "x"}'])
def test_a_broken_lease_is_over_once_it_is_silent(path, no_flock, monkeypatch, content):
    monkeypatch.setattr(file_lock, "WATCH_S", 0.1)
    path.touch()
    lease = file_lock._lease_of(path)
    lease.write_bytes(content)
    assert is_held(path)
    os.utime(lease, (1, 1))
    assert not is_held(path)
    assert FileLock(path).take()
