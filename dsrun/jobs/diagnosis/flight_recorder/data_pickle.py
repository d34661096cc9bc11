"""Pickles that hold data and nothing else, read without unpickling: whatever names code is refused.

Dumps of torch's flight recorder are such (torch/csrc/distributed/c10d/FlightRecorderDetail.hpp writes them with torch's
own pickler, protocol 2), and its memory snapshots (torch/cuda/memory.py, `_dump_snapshot`, with Python's): dicts,
lists, tuples, texts, numbers, true, false and none. The few operations that such data need are done here, one after the
other, and no other. What is held at once is counted: a short file may ask for any number of values.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Protocol

from dsrun.errors import DsrunError

MOST_BYTES = 64 << 20
"""Largest dump that is read: one of 2000 collectives has about 5 MB."""
MOST_HELD = 60_000_000
"""Values that are held at once: 8 bytes for each place of a value, and more for each container."""
CONTAINER = 10
"""What an empty container takes, in places of values."""
CHECK_EVERY = 4096
"""Operations between two looks at what is held."""


class Bytes(Protocol):
    """bytes, or a file in memory (mmap)."""

    def __len__(self) -> int: ...
    def __getitem__(self, place: Any, /) -> Any: ...
    def find(self, sub: bytes, start: int = ..., end: int = ..., /) -> int: ...


def read(
    data: Bytes, most_bytes: int = MOST_BYTES, passes: Callable[[dict[Any, Any]], int | None] | None = None
) -> Any:
    """The data of a pickle. Raises DsrunError for one that is cut off, or holds anything else than data.

    passes: asked of each dict before it goes into a list. A number leaves it out: as many values as it has taken out
    of the dict, and of what is in it. None keeps it.
    """
    if len(data) > most_bytes:
        raise DsrunError(f"has {len(data) >> 20} MiB; up to {most_bytes >> 20} are read")
    machine = _Machine(data, passes)
    try:
        while not machine.run(CHECK_EVERY):
            if machine.held > MOST_HELD:
                raise DsrunError("holds more values than are read")
        return machine.stack[-1]
    except (ValueError, IndexError, KeyError, TypeError, struct.error, UnicodeDecodeError) as error:
        raise DsrunError(f"is cut off or damaged ({error})") from error


class _Machine:
    """The stack and the memo of a pickle that is being read."""

    def __init__(self, data: Bytes, passes: Callable[[dict[Any, Any]], int | None] | None) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.marks: list[int] = []
        """Places on the stack where containers' items begin."""
        self._data, self._at, self._passes = data, 0, passes
        self._gathered = 0

    @property
    def held(self) -> int:
        """Places of values that are in use."""
        return self._gathered + len(self.stack) + len(self.marks) + 4 * len(self.memo)

    def run(self, operations: int) -> bool:
        """Do some operations; whether the last one was the end."""
        data, at, stack, memo = self._data, self._at, self.stack, self.memo
        for _ in range(operations):
            code = data[at]
            at += 1
            # A snapshot is mostly places in the memo and small numbers: they come first.
            if code == 0x68:  # BINGET
                stack.append(memo[data[at]])
                at += 1
            elif code == 0x6A:  # LONG_BINGET
                stack.append(memo[int.from_bytes(self._take(at, 4), "little")])
                at += 4
            elif code == 0x4B:  # BININT1
                stack.append(data[at])
                at += 1
            elif code == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif code == 0x28:  # MARK
                self.marks.append(len(stack))
            elif code in NUMBERS:
                format_, size = NUMBERS[code]
                stack.append(struct.unpack(format_, self._take(at, size))[0])
                at += size
            elif code in LENGTHS:
                size = int.from_bytes(self._take(at, LENGTHS[code]), "little")
                at += LENGTHS[code]
                part = self._take(at, size)
                at += size
                stack.append(_long(part) if code in LONGS else str(part, "utf-8", "surrogatepass"))
            elif code in CONSTANTS:
                stack.append(CONSTANTS[code])
            elif code in EMPTY:
                stack.append(EMPTY[code]())
                self._gathered += CONTAINER
            elif code in PUTS:
                memo[int.from_bytes(self._take(at, PUTS[code]), "little")] = stack[-1]
                at += PUTS[code]
            elif code in SKIPPED:
                at += SKIPPED[code]
            elif code in LINES:
                end = data.find(b"\n", at)
                if end < 0:
                    raise ValueError("a line without an end")
                self._line(code, data[at:end])
                at = end + 1
            elif code == 0x2E:  # STOP
                return True
            else:
                self._gather(code, at - 1)
        self._at = at
        return False

    def _take(self, at: int, size: int) -> bytes:
        part: bytes = self._data[at : at + size]
        if len(part) != size:
            raise ValueError("the file ends within a value")
        return part

    def _line(self, code: int, line: bytes) -> None:
        """An operation of protocol 0, whose argument is a line."""
        text = str(line, "raw-unicode-escape")
        if code == 0x56:  # UNICODE
            self.stack.append(text)
        elif code == 0x46:  # FLOAT
            self.stack.append(float(text))
        elif code == 0x70:  # PUT
            self.memo[int(text)] = self.stack[-1]
        elif code == 0x67:  # GET
            self.stack.append(self.memo[int(text)])
        elif text in ("00", "01") and code == 0x49:  # INT, which has the two constants, too
            self.stack.append(text == "01")
        else:
            self.stack.append(int(text.removesuffix("L")))

    def _gather(self, code: int, at: int) -> None:
        """Put values from the stack into a container. Raises DsrunError for an operation that data don't need."""
        stack = self.stack
        if code in TUPLES:
            size = TUPLES[code]
            first = self.marks.pop() if size is None else len(stack) - size
            if first < 0:
                raise IndexError("too few values for a tuple")
            items = stack[first:]
            del stack[first:]
            stack.append(tuple(items))
            self._gathered += len(items) + CONTAINER
        elif code in APPENDS:
            items = self._marked() if code == 0x65 else [stack.pop()]
            if self._passes:
                items = [item for item in items if not self._is_left_out(item)]
            _into(stack[-1], list).extend(items)
            self._gathered += len(items)
        elif code in SETS:
            items = self._marked() if code == 0x75 else [stack.pop(-2), stack.pop()]
            _into(stack[-1], dict).update(zip(items[::2], items[1::2], strict=True))
            self._gathered += len(items)
        elif code in (0x6C, 0x64):  # LIST, DICT of protocol 0
            items = self._marked()
            stack.append(items if code == 0x6C else dict(zip(items[::2], items[1::2], strict=True)))
            self._gathered += len(items) + CONTAINER
        else:
            raise DsrunError(
                f"is no dump of data: {_named(code)} at byte {at} would run code, and is not read"
            )

    def _is_left_out(self, item: Any) -> bool:
        freed = self._passes(item) if self._passes and type(item) is dict else None
        if freed is not None:
            self._gathered -= freed
        return freed is not None

    def _marked(self) -> list[Any]:
        """Take the values above the last mark from the stack."""
        since = self.marks.pop()
        items = self.stack[since:]
        del self.stack[since:]
        return items


CONSTANTS = {0x4E: None, 0x88: True, 0x89: False}
EMPTY: dict[int, type] = {0x7D: dict, 0x5D: list, 0x29: tuple}
TUPLES = {0x85: 1, 0x86: 2, 0x87: 3, 0x74: None}
"""Operations that make a tuple, with its length; None: up to the last mark."""
APPENDS, SETS = (0x61, 0x65), (0x73, 0x75)
"""APPEND and APPENDS, SETITEM and SETITEMS."""
NUMBERS = {0x4A: ("<i", 4), 0x4D: ("<H", 2), 0x47: (">d", 8)}
"""BININT, BININT2, BINFLOAT: format and size."""
LONGS = (0x8A, 0x8B)
LENGTHS = {0x8A: 1, 0x8B: 4, 0x8C: 1, 0x58: 4, 0x8D: 8}
"""LONG1, LONG4, SHORT_BINUNICODE, BINUNICODE, BINUNICODE8: bytes of the length before the value."""
PUTS = {0x71: 1, 0x72: 4}
"""BINPUT, LONG_BINPUT: bytes of the place."""
SKIPPED = {0x80: 1, 0x95: 8}
"""PROTO and FRAME, with their argument's bytes."""
LINES = (0x49, 0x4C, 0x46, 0x56, 0x70, 0x67)
"""INT, LONG, FLOAT, UNICODE, PUT, GET."""


def _named(code: int) -> str:
    """Python's name of an operation."""
    import pickletools

    return next((one.name for one in pickletools.opcodes if ord(one.code) == code), f"operation {code}")


def _long(part: bytes) -> int:
    return int.from_bytes(part, "little", signed=True)


def _into(container: Any, kind: type) -> Any:
    if type(container) is not kind:
        raise TypeError(f"{type(container).__name__} in place of {kind.__name__}")
    return container
