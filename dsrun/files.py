"""Reading files with errors that name them, and writing files so that nobody ever sees half of one."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO

from dsrun.errors import DsrunError, Problem, UnfitFileError, collected, raise_all

FULL = (errno.ENOSPC, errno.EDQUOT)
SHORT = 500
"""Characters of a field that is written on a full disk, at most."""
BLOCK_BYTES = 4096
"""Bytes that any file with content already has on the disk."""

MOST_BYTES = 64 << 20
"""Largest file, in bytes, that is read as a whole from a folder that others may write into."""
WEIGHT_FILE_BYTES = 5 * 10**9
"""Size of an exported model's files, at most: the Hub's limit is ten times as much."""


@contextlib.contextmanager
def explained(what: str, where: object = None, hint: str = "") -> Iterator[None]:
    """Turn an OSError into a DsrunError. what: "can't be read"; where: else the file that the OSError names."""
    try:
        yield
    except OSError as error:
        where = str(where or error.filename or "")
        raise DsrunError(f"{what}: {error.strerror or error}", where=where, hint=hint) from error


def why_not_writable(folder: Path) -> str:
    """The reason that nothing can be made in an existing folder; empty if something can."""
    if not folder.is_dir():
        return f"{folder} is not a folder"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} is not writable"


def user_name(uid: int) -> str:
    """A user's name, or "user 1234" where the number has none."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def why_not_readable(path: Path) -> str:
    """The file or folder that keeps this process out, and its owner; empty where none does, or nothing is there."""
    whole = path.absolute()
    for part in (
        *reversed(whole.parents),
        whole,
    ):  # from the root, so that the outermost closed folder is named
        wanted = os.X_OK if part != whole else os.R_OK | os.X_OK * os.path.isdir(part)  # noqa: PTH112 - never raises
        if os.path.lexists(part) and not os.access(part, wanted, effective_ids=True):
            status = part.stat(follow_symlinks=False)
            return (
                f"Permission denied: {part} is {user_name(status.st_uid)}'s ({stat.filemode(status.st_mode)})"
            )
    return ""


def is_full(error: object) -> bool:
    """Whether the system said that a disk has no room, or none for this user."""
    return getattr(error, "errno", None) in FULL


def write_over(path: Path, text: str) -> None:
    """Put a text of less than a block into the room that a file already has: a full disk has none for a new one."""
    with path.open("r+b") as file:
        file.write(text.encode("utf-8", "replace")[:BLOCK_BYTES])
        file.truncate()


def open_inside(folder: Path, name: str, *, most: int = MOST_BYTES) -> BinaryIO:
    """Open a file to be read in a folder that others may write into: no pipe or device, no link out of the folder.

    most: the largest size in bytes. Raises OSError as opening does, and UnfitFileError.
    """
    path = folder / name
    parts = Path(name).parts
    linked = any(folder.joinpath(*parts[: count + 1]).is_symlink() for count in range(len(parts)))
    if linked and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise UnfitFileError("is a link out of its folder, and is not followed", where=str(path))
    # Checked twice: before it is opened, as to open a device may do something, and as it was opened, as somebody may
    # have put something else in its place meanwhile.
    _check_plain(path.stat(), path, most)
    # A pipe that takes its place meanwhile would wait for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | (0 if linked else os.O_NOFOLLOW)
    file = os.fdopen(os.open(path, flags), "rb")
    try:
        _check_plain(os.fstat(file.fileno()), path, most)
    except BaseException:
        file.close()
        raise
    return file


def _check_plain(status: os.stat_result, path: Path, most: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UnfitFileError("is not a regular file", where=str(path))
    if status.st_size > most:
        raise UnfitFileError(f"has {status.st_size:,} bytes, and {most:,} are read at most", where=str(path))


def read_inside(folder: Path, name: str, *, most: int = MOST_BYTES) -> bytes:
    """The content of a file in such a folder. Raises as `open_inside`."""
    with open_inside(folder, name, most=most) as file:
        return file.read(most)


def read_text_inside(folder: Path, name: str) -> str:
    """The UTF-8 text of a file in such a folder. Raises DsrunError with the file where it can't be read."""
    path = folder / name
    with explained("can't be read", path):
        return decoded(read_inside(folder, name), path)


def decoded(content: bytes, path: Path) -> str:
    """The text of a file's bytes. Raises DsrunError with the file where they are not UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DsrunError(f"is not UTF-8 (byte {error.start})", where=str(path)) from error


def read_text(path: Path) -> str:
    """A UTF-8 text file's content. Raises DsrunError with the file where it can't be read."""
    with explained("can't be read", path):
        content = path.read_bytes()
    return decoded(content, path).replace("\r\n", "\n").replace("\r", "\n")  # as files opened as text have it


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises DsrunError with the file where it does not."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise DsrunError(f"is not JSON: {error}", where=str(path)) from error
    if not isinstance(value, dict):
        raise DsrunError(f"holds {type(value).__name__} instead of a JSON object", where=str(path))
    return value


def plain(value: Any) -> Any:
    """A value as JSON can hold it: NaN and infinity, which it has no words for, become null; paths become text."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def json_text(value: Any, *, indent: int | None = None) -> str:
    """A value as JSON that every reader takes, without a newline at its end: see `plain`."""
    return json.dumps(plain(value), ensure_ascii=False, indent=indent, allow_nan=False)


def write_atomic(
    path: Path | str, text: str, *, overwrite: bool = True, private: bool = False, executable: bool = False
) -> None:
    """Write `text` (UTF-8) to `path` in one step: readers see the old file or the whole new one.

    A new file gets the permissions of the umask, an existing one keeps its own; a link is written through. private:
    only its owner may read it, whatever was there before. executable: a new file may be run by those who may read it.
    Raises DsrunError if the file can't be written, if it exists and `overwrite` is false (even where it
    appears while writing), or if the name is that of something else than a file, such as /dev/stdout.
    """
    # The link's target is replaced: replacing `path` would leave a file where the link was. The temporary file lies
    # beside the target, as a rename is one step only within a file system.
    target = Path(os.path.realpath(path))
    mode = _mode(target, path)
    if mode is not None and not overwrite:
        raise _exists(path)
    temporary = target.with_name(f".{target.name[:200]}.{os.urandom(6).hex()}.tmp")
    try:
        most = 0o600 if private else 0o777 if executable else 0o666
        _write_new(temporary, text, 0o600 if private else mode, most)
        if not overwrite:
            # Takes the name only if it is free, even if somebody else takes it at this moment.
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        temporary.replace(target)
    except FileExistsError as error:
        raise _exists(path) from error
    except OSError as error:
        raise DsrunError(f"can't be written: {error.strerror}", where=str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_all(texts: Mapping[Path, str], *, overwrite: bool) -> None:
    """Write files that belong together, each as `write_atomic` does. Raises DsrunError before the first is written
    where any of them can't be, or stands there already."""
    problems: list[Problem] = []
    for path in texts:
        with collected(problems):
            if _mode(Path(os.path.realpath(path)), path) is not None and not overwrite:
                raise _exists(path)
    raise_all(problems)
    for path, text in texts.items():
        write_atomic(path, text, overwrite=overwrite)


def _mode(target: Path, shown: Path | str) -> int | None:
    """The permissions of an existing file, None where there is none yet."""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        if not target.parent.is_dir():
            raise DsrunError(
                f"no such folder: {target.parent}", where=str(shown), hint="Make it first."
            ) from None
        return None
    except OSError as error:
        raise DsrunError(f"can't be written: {error.strerror}", where=str(shown)) from error
    # /dev/stdout leads to the file behind a redirection, whose writer would lose it.
    stream = str(Path(shown).absolute()).startswith(("/dev/std", "/dev/fd/", "/proc/"))
    if stream or not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise DsrunError(f"is {kind}", where=str(shown), hint="Name a file.")
    return stat.S_IMODE(mode)


def _write_new(path: Path, text: str, mode: int | None, most: int) -> None:
    # Not mkstemp, whose files are 0600: os.open applies the umask, which can't be read without setting it.
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, most)
    with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
        if mode is not None:
            os.fchmod(file.fileno(), mode)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _exists(path: Path | str) -> DsrunError:
    return DsrunError("exists already and is left as it is", where=str(path), hint="--force replaces it.")


def make_readable(folder: Path) -> None:
    """Give a folder and its files the permissions that the umask leaves: libraries make temporary ones private.

    The set-group-ID bit of a folder in a shared one stays, which chmod(2) would take away.
    """
    mask = os.umask(0)
    os.umask(mask)
    folder.chmod(0o777 & ~mask | folder.stat().st_mode & stat.S_ISGID)
    for path in folder.iterdir():
        if path.is_file() and not path.is_symlink():
            path.chmod(0o666 & ~mask)
