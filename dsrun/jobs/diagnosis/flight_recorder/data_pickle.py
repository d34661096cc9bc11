"""Pickles that hold data and nothing else, read without unpickling: whatever names code is refused.

A dump of torch's flight recorder is one (torch/csrc/distributed/c10d/FlightRecorderDetail.hpp writes it with torch's
own pickler, protocol 2): dicts, lists, tuples, texts, numbers, true, false and none. `pickletools` takes the bytes
apart and runs nothing; the few operations that such data need are done here.
"""

from __future__ import annotations

import pickletools
from typing import Any

from dsrun.errors import DsrunError

MOST_BYTES = 64 << 20
"""Largest dump that is read: one of 2000 collectives has about 5 MB."""
VALUES = frozenset(
    {"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "BINFLOAT", "FLOAT", "BINUNICODE",
     "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"}
)  # fmt: skip
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read(data: bytes) -> Any:
    """The data of a pickle. Raises DsrunError for one that is cut off, or holds anything else than data."""
    if len(data) > MOST_BYTES:
        raise DsrunError(f"has {len(data) >> 20} MiB; up to {MOST_BYTES >> 20} are read")
    machine = _Machine()
    try:
        for operation, argument, at in pickletools.genops(data):
            if operation.name == "STOP":
                return machine.stack[-1]
            machine.do(operation.name, argument, at or 0)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DsrunError(f"is cut off or damaged ({error})") from error
    raise DsrunError("is cut off")


class _Machine:
    """The stack and the memo of a pickle that is being read."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.marks: list[int] = []
        """Places on the stack where containers' items begin."""

    def do(self, name: str, argument: Any, at: int) -> None:
        """One operation. Raises DsrunError for one that data don't need."""
        if name in VALUES:
            self.stack.append(argument)
        elif name in CONSTANTS:
            self.stack.append(CONSTANTS[name])
        elif name in EMPTY:
            self.stack.append(EMPTY[name]())
        elif name == "MARK":
            self.marks.append(len(self.stack))
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[argument] = self.stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            self.stack.append(self.memo[argument])
        elif name not in ("PROTO", "FRAME"):
            self._gather(name, argument, at)

    def _gather(self, name: str, argument: Any, at: int) -> None:
        """Put values from the stack into a container."""
        if name in TUPLES:
            items = self.stack[-TUPLES[name] :]
            del self.stack[-TUPLES[name] :]
            self.stack.append(tuple(items))
        elif name == "TUPLE":
            self.stack.append(tuple(self._marked()))
        elif name in ("APPEND", "APPENDS"):
            items = [self.stack.pop()] if name == "APPEND" else self._marked()
            _into(self.stack[-1], list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [self.stack.pop(-2), self.stack.pop()] if name == "SETITEM" else self._marked()
            _into(self.stack[-1], dict).update(zip(items[::2], items[1::2], strict=True))
        else:
            fault = f" ({str(argument)[:80]})" if argument is not None else ""
            raise DsrunError(
                f"is no dump of data: {name}{fault} at byte {at} would run code, and is not read"
            )

    def _marked(self) -> list[Any]:
        """Take the values above the last mark from the stack."""
        since = self.marks.pop()
        items = self.stack[since:]
        del self.stack[since:]
        return items


def _into(container: Any, kind: type) -> Any:
    if type(container) is not kind:
        raise TypeError(f"{type(container).__name__} in place of {kind.__name__}")
    return container
