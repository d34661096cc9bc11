"""One lock for each GPU of this machine, so that two dsrun never train on the same one.

A lock is flock(2) on a file that is named after the GPU's UUID. The kernel gives it back when the process that holds it
ends, by whatever signal; no lock is ever left behind, and a file that lies there means nothing by itself. Python opens
descriptors so that child processes don't inherit them (PEP 446): ranks that outlive their dsrun do not keep the lock.

All users of the machine meet in FOLDER. It is in /tmp because that is the one place where everybody may write on every
distribution (/run/lock is root's on Red Hat's, and /dev/shm loses the files of a user who logs out: RemoveIPC in
logind.conf(5)). It is made as /tmp itself is: everybody writes, and nobody but the owner removes (mode 1777). The files
are 0666, since whoever comes first makes them for all. Where /tmp is private (a container, PrivateTmp), or was swept
while a run went on, the lock isn't seen; that the GPU is in use is seen all the same, by what NVML says.

So any user can be in the others' way: with a folder or a file that is theirs alone, or by locking a file and never
letting go. Who does so is named, by what the kernel says and not by a note that anybody can write; and VARIABLE names
another folder to meet in, which is the way past, as NVML still says what is in use. The notes hold no path: everybody
can read them. Whose run folder it is sees the holder's own user, among that process's open files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from dsrun.cluster.gpu_use import LONGEST_NAME, BusyError, LockHolder
from dsrun.errors import DsrunError
from dsrun.files import user_name
from dsrun.words import printable

VARIABLE = "DSRUN_GPU_LOCKS"
"""The variable that names another folder than FOLDER, for all who are to respect one another's GPUs."""
FOLDER = Path("/tmp/dsrun-gpus")  # noqa: S108  what is found there is checked before it is used
EVERYBODY = 0o1777
"""The folder's mode."""
SAFE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Follow no link, wait for no reader of a pipe, leave nothing to child processes."""
TRIES, PAUSE_S = 10, 0.02
"""Times that a lock is tried: whoever only looks whether a GPU is held locks its file for some microseconds, too."""
RUN_LOCK = ".lock"
"""The file that a dsrun holds open in its run folder (job/run_folder.py)."""
MOST_BYTES = 4096
"""Bytes of a note that are read: no dsrun's is as long."""


def this_process() -> LockHolder:
    """This process, as a holder."""
    return LockHolder(user_name(os.getuid()), os.getpid(), since=f"{datetime.now():%Y-%m-%d %H:%M}")


@contextlib.contextmanager
def locked(uuids: Iterable[str], who: LockHolder) -> Iterator[None]:
    """Hold GPUs, all or none, until the block ends or this process does.

    Raises BusyError with who has one of them, at once; DsrunError where the folder or a file in it can't be trusted.
    """
    files: dict[str, int] = {}
    try:
        with _open_folder(make=True) as folder:
            # Everybody takes them in one order: of several who want the same, the first gets them all, and none waits.
            for uuid in sorted(set(uuids)):
                files[uuid] = _locked(folder, uuid)
        note = {"user": who.user, "pid": who.pid, "since": who.since}
        text = json.dumps(note, ensure_ascii=False).encode("utf-8", errors="replace")
        for file in files.values():
            with contextlib.suppress(OSError):  # a full disk: the lock holds without its note
                os.ftruncate(file, 0)
                os.pwrite(file, text, 0)
        yield
    finally:
        for file in files.values():
            with contextlib.suppress(OSError):
                os.ftruncate(file, 0)
            os.close(file)


def holder_of(uuid: str) -> LockHolder | None:
    """The dsrun that holds a GPU, if one does; changes nothing. A GPU whose file can't be looked at counts as free."""
    try:
        with _open_folder(make=False) as folder:
            file = os.open(_path(uuid).name, SAFE_FLAGS | os.O_RDONLY, dir_fd=folder)
    except (OSError, DsrunError):
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(file)
    except OSError:
        return None
    finally:
        os.close(file)
    return None


def _folder() -> Path:
    return Path(os.environ.get(VARIABLE) or FOLDER).expanduser()


def _path(uuid: str) -> Path:
    return _folder() / f"{uuid}.lock"


@contextlib.contextmanager
def _open_folder(*, make: bool) -> Iterator[int]:
    """The folder's descriptor; whoever made the folder, it has to be open to everybody. make: create it if need be."""
    path = _folder()
    try:
        if make:
            with _no_umask(), contextlib.suppress(FileExistsError):
                path.mkdir(EVERYBODY)
        folder = os.open(path, SAFE_FLAGS | os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise _in_the_way(path, "a link or a file") from error
        if error.errno == errno.EACCES and os.path.lexists(path):
            raise _in_the_way(path, _own_folder(path.lstat())) from error
        raise DsrunError(
            f"GPUs can't be locked there: {error.strerror}", where=str(path), hint=_ELSEWHERE
        ) from error
    try:
        status = os.fstat(folder)
        if stat.S_IMODE(status.st_mode) != EVERYBODY:
            raise _in_the_way(path, _own_folder(status))
        yield folder
    finally:
        os.close(folder)


def _own_folder(status: os.stat_result) -> str:
    return f"a folder of {user_name(status.st_uid)}'s own ({stat.filemode(status.st_mode)})"


def _locked(folder: int, uuid: str) -> int:
    """The descriptor of a GPU's file, locked."""
    while True:
        file = _open_file(folder, uuid)
        try:
            _lock(file, uuid)
            with contextlib.suppress(FileNotFoundError):
                # Somebody may have removed the file between its opening and its locking. Whoever comes next then makes
                # and locks a new one under the name, so that the lock on the old one would keep nobody out.
                there = os.stat(_path(uuid).name, dir_fd=folder, follow_symlinks=False)
                if os.path.samestat(there, os.fstat(file)):
                    return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _open_file(folder: int, uuid: str) -> int:
    """A GPU's file; it is made where it is not there.

    Never O_CREAT for one that is there: Linux refuses that for other users' files in such a folder, even for those that
    everybody may write (fs.protected_regular, Documentation/admin-guide/sysctl/fs.rst).
    """
    flags = SAFE_FLAGS | os.O_RDWR
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
            if error.errno == errno.EACCES:
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                kind = f"a file of {user_name(status.st_uid)}'s own ({stat.filemode(status.st_mode)})"
                raise _in_the_way(_path(uuid), kind) from error
            message = f"can't be locked: {error.strerror}"
            raise DsrunError(message, where=str(_path(uuid)), hint=_ELSEWHERE) from error
    status = os.fstat(file)
    # A hard link would have us write our note into a file of somebody's choosing.
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(file)
        raise _in_the_way(_path(uuid), "no plain file" if status.st_nlink <= 1 else "a file with other names")
    return file


def _lock(file: int, uuid: str) -> None:
    for _ in range(TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(PAUSE_S)
        except OSError as error:
            message = f"can't be locked: {error.strerror}"
            raise DsrunError(message, where=str(_path(uuid)), hint=_ELSEWHERE) from error
        else:
            return
    holder = _holder(file)
    line = f"GPU {uuid} is in use: {holder}"
    if holder.program == LockHolder.program:
        raise BusyError("another dsrun was faster", [line])
    hint = f"Ask {holder.user} to end process {holder.pid}. {_ELSEWHERE}"
    raise BusyError("is locked by something else than dsrun", [line], hint=hint)


def _holder(file: int) -> LockHolder:
    """The holder of a locked file, as the kernel names it; the note counts where it is the same process's."""
    note, pid = _read(file), _locker(os.fstat(file))
    if pid is None or pid == note.pid:
        return replace(note, run_dir=_run_folder(note.pid))
    try:
        owner = user_name(Path(f"/proc/{pid}").stat().st_uid)
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended, or other users' processes are shown to nobody (hidepid)
        return LockHolder(pid=pid)
    if b"dsrun" in words:
        return LockHolder(owner, pid, _run_folder(pid))
    program = Path(words.partition(b"\0")[0].decode("utf-8", "replace")).name or "process"
    return LockHolder(owner, pid, program=f"{printable(program, LONGEST_NAME)}, which is no dsrun")


def _locker(status: os.stat_result) -> int | None:
    """The process that has locked a file, by /proc/locks; None where it isn't seen, as in another container."""
    inode = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text(encoding="ascii", errors="replace").splitlines():
            words = line.split()  # "1: FLOCK  ADVISORY  WRITE 4711 08:01:1234 0 EOF"
            if words[1:2] == ["FLOCK"] and words[3:4] == ["WRITE"] and inode in words and int(words[4]) > 0:
                return int(words[4])
    return None


def _run_folder(pid: int) -> str:
    """The run folder that a process holds; empty where this user may not see its open files, or there is none yet."""
    with contextlib.suppress(OSError):
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = Path(handle.readlink())
                if target.name == RUN_LOCK:
                    return printable(str(target.parent), LONGEST_NAME)
    return ""


def _read(file: int) -> LockHolder:
    """The note in a locked file. Anybody may have written it, and it may be half written."""
    try:
        note = json.loads(os.pread(file, MOST_BYTES, 0))
        pid = int(note["pid"])
        user, since = (printable(str(note[name]), LONGEST_NAME) for name in ("user", "since"))
    except (OSError, ValueError, KeyError, TypeError):
        return LockHolder()
    return LockHolder(user, pid, since=since)


@contextlib.contextmanager
def _no_umask() -> Iterator[None]:
    """No umask inside the block, so that a file made for everybody is open to all from the first moment."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


_ELSEWHERE = f"Or meet in another folder, with all who are to respect your GPUs: {VARIABLE}=/path"


def _in_the_way(path: Path, what: str) -> DsrunError:
    owner = path.lstat().st_uid
    remove = f"Remove it; dsrun makes it again: rm -r {path}"
    if owner != os.geteuid() and os.geteuid() != 0:
        remove = f"{user_name(owner)} or root can remove it; dsrun makes it again."
    return DsrunError(
        f"is {what}; dsrun keeps its locks of GPUs there, for all users, and follows nothing else",
        where=str(path),
        hint=f"{remove}\n  {_ELSEWHERE}",
    )
