"""The digest of a file that torch has just written, without reading its tensors again.

torch.save writes a zip archive, stored and not compressed, with the CRC-32 of each record as it lay in memory
(caffe2/serialize/inline_container.cc). Those of the large records are put together with that of what lies between them,
which is read: the result is the CRC-32 of the whole file, as anything that reads all of it would find. A file of FSDP's
(`.distcp`) is one such archive after the other.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch

from dsrun.job.checkpoints import BLOCK_BYTES, WrittenFile

POLYNOMIAL = 0xEDB88320
"""CRC-32's, its highest power in the lowest bit, as zlib has it."""
ONE = 1 << 31
LOCAL_HEADER_BYTES = 30


class _Record(NamedTuple):
    """A large record of an archive."""

    offset: int
    bytes: int
    crc32: int


def written(path: Path, rank: int) -> WrittenFile:
    """The file that this rank has just written. Raises OSError."""
    # Where a script has switched off torch's own digests, an archive holds none.
    if path.stat().st_size > BLOCK_BYTES and torch.serialization.get_crc32_options():
        with path.open("rb") as file:
            try:
                return _put_together(file, sorted(_large_records(file)), rank)
            except (BadZipFile, ValueError, NotImplementedError):
                pass  # it is no archive, or none of torch's: a swap file is bare numbers
    return WrittenFile.of(path, rank)


def _put_together(file: BinaryIO, records: list[_Record], rank: int) -> WrittenFile:
    """The digest of a file whose large records' are known."""
    digest = position = 0
    end = file.seek(0, io.SEEK_END)
    for record in [*records, _Record(end, 0, 0)]:
        if record.offset < position:
            raise ValueError("records overlap")
        digest = _read(file, position, record.offset, digest)
        digest = joined(digest, record.crc32, record.bytes)
        position = record.offset + record.bytes
    if position != end:
        raise ValueError("a record is longer than the file")
    return WrittenFile(end, f"{digest:08x}", rank)


def _read(file: BinaryIO, position: int, end: int, digest: int) -> int:
    """The digest goes on over a part of the file."""
    file.seek(position)
    while position < end:
        block = file.read(min(BLOCK_BYTES, end - position))
        if not block:
            raise ValueError("the file has become shorter")
        digest = zlib.crc32(block, digest)
        position += len(block)
    return digest


def _large_records(file: BinaryIO) -> Iterator[_Record]:
    """The records worth not reading, of all archives in the file: from the last one, as each one's list is at its end.

    Raises BadZipFile where anything else is there.
    """
    end = file.seek(0, io.SEEK_END)
    while end:
        start = end
        with ZipFile(_Beginning(file, end)) as archive:
            for record in archive.infolist():
                start = min(start, record.header_offset)
                if record.file_size < BLOCK_BYTES:
                    continue
                if record.compress_type != ZIP_STORED:
                    raise BadZipFile("compressed")
                file.seek(record.header_offset)
                header = file.read(LOCAL_HEADER_BYTES)
                names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
                offset = record.header_offset + LOCAL_HEADER_BYTES + names
                yield _Record(offset, record.file_size, record.CRC)
        if start == end:
            raise BadZipFile("an archive without a record")
        end = start


class _Beginning(io.RawIOBase):
    """A file up to a position, as if it ended there."""

    def __init__(self, file: BinaryIO, end: int) -> None:
        self._file, self._end, self._position = file, end, 0

    def readable(self) -> bool:
        """See RawIOBase."""
        return True

    def seekable(self) -> bool:
        """See RawIOBase."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See RawIOBase. Raises OSError before the beginning, as a file does."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._end}[whence]
        if base + offset < 0:
            raise OSError("before the file's beginning")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """See RawIOBase."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """See RawIOBase."""
        self._file.seek(self._position)
        content = self._file.read(max(0, min(len(buffer), self._end - self._position)))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


# Two digests become one, as zlib's crc32_combine does it: a digest is a polynomial over two elements, and bytes that
# follow multiply it by a power of x.


def joined(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two parts, of which each one's is known, and the second one's length."""
    return _times(_power(second_bytes), first) ^ second


@cache
def _power(count: int) -> int:
    """x to the 8 * count."""
    power, factor = ONE, ONE >> 8
    while count:
        if count & 1:
            power = _times(factor, power)
        factor = _times(factor, factor)
        count >>= 1
    return power


def _times(first: int, second: int) -> int:
    """Product of two polynomials, modulo CRC-32's."""
    product, bit = 0, ONE
    while bit:
        if first & bit:
            product ^= second
        second = (second >> 1) ^ (POLYNOMIAL if second & 1 else 0)
        bit >>= 1
    return product
