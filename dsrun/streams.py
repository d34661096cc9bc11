"""Standard streams that may lose their reader: a terminal that is closed, a pipe that nobody reads, a full disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


class LastingStream:
    """A stream that is written to for as long as somebody reads it, and drops all text after that.

    lost: called once with the error, when it can't be written any longer.
    """

    def __init__(self, stream: Any, lost: Callable[[OSError], None]) -> None:
        self._stream, self._lost, self._gone = stream, lost, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or drop."""
        if not self._gone:
            self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush, or drop."""
        if not self._gone:
            self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            self._gone = True
            self._drop()
            self._lost(error)

    def _drop(self) -> None:
        """Let the stream lead nowhere: its buffer would be written at Python's end, and fail again."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


@contextmanager
def lasting_streams() -> Iterator[None]:
    """A context in which a job doesn't end when the reader of its stdout or stderr does."""
    before = sys.stdout, sys.stderr
    errors = LastingStream(sys.stderr, lambda _: None)  # there is nobody left to tell

    def lost(error: OSError) -> None:
        errors.write(f"stdout can't be written any longer ({error.strerror}); the job continues\n")

    sys.stdout, sys.stderr = LastingStream(sys.stdout, lost), errors
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
