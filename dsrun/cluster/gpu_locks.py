"""One lock for each GPU of this machine, so that two dsrun never train on the same one.

A lock is flock(2) on a file that is named after the GPU's UUID. The kernel gives it back when the process that holds it
ends, by whatever signal; no lock is ever left behind, and a file that lies there means nothing by itself. Python opens
descriptors so that child processes don't inherit them (PEP 446): ranks that outlive their dsrun do not keep the lock.

All users of the machine meet in FOLDER. It is in /tmp because that is the one place where everybody may write on every
distribution (/run/lock is root's on Red Hat's, and /dev/shm loses the files of a user who logs out: RemoveIPC in
logind.conf(5)). It is made as /tmp itself is: everybody writes, and nobody but the owner removes (mode 1777). The files
are 0666, since whoever comes first makes them for all. Where /tmp is private (a container, PrivateTmp), or was swept
while a run went on, the lock isn't seen; that the GPU is in use is seen all the same, by what NVML says.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pwd
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from dsrun.cluster.gpu_use import MOST, BusyError, LockHolder
from dsrun.errors import DsrunError
from dsrun.words import printable

FOLDER = Path("/tmp/dsrun-gpus")  # noqa: S108  what is found there is checked before it is used
EVERYBODY = 0o1777
"""The folder's mode."""
SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Follow no link, wait for no reader of a pipe, leave nothing to child processes."""
TRIES, PAUSE_S = 10, 0.02
"""Who only asks whether a GPU is held locks its file for some microseconds; that must not look as if it were held."""
MOST_BYTES = 4096
"""A note is shorter than this; more is not read."""


class GpuLocks:
    """GPUs that are held."""

    def __init__(self, files: dict[str, int], who: LockHolder) -> None:
        self._files = files
        self.describe(who)

    def describe(self, who: LockHolder) -> None:
        """Write down who holds them, for others' messages."""
        text = json.dumps(asdict(who), ensure_ascii=False).encode("utf-8", errors="replace")
        for file in self._files.values():
            with contextlib.suppress(OSError):  # a full disk: the lock holds without its note
                os.ftruncate(file, 0)
                os.pwrite(file, text, 0)


def this_process(run_dir: str = "") -> LockHolder:
    """This process, as a holder."""
    return LockHolder(_name(os.getuid()), os.getpid(), run_dir, f"{datetime.now():%Y-%m-%d %H:%M}")


@contextlib.contextmanager
def locked(uuids: Iterable[str], who: LockHolder) -> Iterator[GpuLocks]:
    """Hold GPUs, all or none, until the block ends or this process does.

    Raises BusyError with who has one of them, at once; DsrunError where the folder or a file in it can't be trusted.
    """
    files: dict[str, int] = {}
    try:
        with _open_folder(make=True) as folder:
            # Everybody takes them in one order: of several who want the same, one gets them all.
            for uuid in sorted(set(uuids)):
                files[uuid] = _locked(folder, uuid)
        yield GpuLocks(files, who)
    finally:
        for file in files.values():
            with contextlib.suppress(OSError):
                os.ftruncate(file, 0)
            os.close(file)


def holder_of(uuid: str) -> LockHolder | None:
    """The dsrun that holds a GPU, if one does. Changes nothing; what can't be looked at is held by nobody."""
    try:
        with _open_folder(make=False) as folder:
            file = os.open(_path(uuid).name, SAFELY | os.O_RDONLY, dir_fd=folder)
    except (OSError, DsrunError):
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(file)
    except OSError:
        return None
    finally:
        os.close(file)
    return None


def _path(uuid: str) -> Path:
    return FOLDER / f"{uuid}.lock"


@contextlib.contextmanager
def _open_folder(*, make: bool) -> Iterator[int]:
    """The folder's descriptor. Whoever made it, it has to be open to everybody. make: create it if need be."""
    try:
        if make:
            with _no_umask(), contextlib.suppress(FileExistsError):
                FOLDER.mkdir(EVERYBODY)
        folder = os.open(FOLDER, SAFELY | os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise _in_the_way(FOLDER, "a link or a file") from error
        raise DsrunError(f"GPUs can't be locked there: {error.strerror}", where=str(FOLDER)) from error
    try:
        found = os.fstat(folder)
        if stat.S_IMODE(found.st_mode) != EVERYBODY:
            what = f"a folder of {_name(found.st_uid)}'s own ({stat.filemode(found.st_mode)})"
            raise _in_the_way(FOLDER, what)
        yield folder
    finally:
        os.close(folder)


def _locked(folder: int, uuid: str) -> int:
    """The descriptor of a GPU's file, locked."""
    while True:
        file = _open_file(folder, uuid)
        try:
            _lock(file, uuid)
            with contextlib.suppress(FileNotFoundError):
                there = os.stat(_path(uuid).name, dir_fd=folder, follow_symlinks=False)
                if os.path.samestat(there, os.fstat(file)):
                    return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # it was removed meanwhile: others would lock a new one


def _open_file(folder: int, uuid: str) -> int:
    """A GPU's file; it is made where it is not there.

    Never O_CREAT for one that is there: Linux refuses that for other users' files in such a folder, even for those that
    everybody may write (fs.protected_regular, Documentation/admin-guide/sysctl/fs.rst).
    """
    flags = SAFELY | os.O_RDWR
    name = _path(uuid).name
    while True:
        try:
            file = os.open(name, flags, dir_fd=folder)
            break
        except FileNotFoundError:
            with _no_umask(), contextlib.suppress(FileExistsError):
                os.close(os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder))
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise _in_the_way(_path(uuid), "no plain file") from error
            raise DsrunError(f"can't be locked: {error.strerror}", where=str(_path(uuid))) from error
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(file)
        raise _in_the_way(_path(uuid), "no plain file" if found.st_nlink <= 1 else "a file with other names")
    return file


def _lock(file: int, uuid: str) -> None:
    for _ in range(TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(PAUSE_S)
        else:
            return
    raise BusyError("another dsrun was faster", [f"GPU {uuid} is in use: {_read(file)}"])


def _read(file: int) -> LockHolder:
    """The note in a locked file. Anybody may have written it, and it may be half written."""
    try:
        found = json.loads(os.pread(file, MOST_BYTES, 0))
        pid = int(found["pid"])
        user, run_dir, since = (printable(str(found[name]), MOST) for name in ("user", "run_dir", "since"))
    except (OSError, ValueError, KeyError, TypeError):
        return LockHolder()
    return LockHolder(user, pid, run_dir, since)


@contextlib.contextmanager
def _no_umask() -> Iterator[None]:
    """So that what is made for everybody is everybody's from the first moment."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _in_the_way(path: Path, what: str) -> DsrunError:
    return DsrunError(
        f"is {what}; dsrun keeps its locks of GPUs there, for all users, and follows nothing else",
        where=str(path),
        hint=f"Remove it; dsrun makes it again: rm -r {path}",
    )
