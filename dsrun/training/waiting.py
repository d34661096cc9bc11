"""The time that this rank waits in collectives, measured where every engine waits: torch's Work.wait.

On a CPU that call lasts until the exchange is done. On a GPU it only makes the stream wait, so that events before and
after it have the time; they are read once the step's numbers have been, for which the host waits in any case.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work


class WaitClock:
    """The seconds waited in a process's main thread since they were last taken. One in a process at a time."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._thread, self._inside = threading.get_ident(), False
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []
        self._wait = Work.wait

    def start(self) -> WaitClock:
        """Begin to measure."""
        wait, clock = self._wait, self

        def timed(work: Any, *args: Any, **kwargs: Any) -> Any:
            if clock._inside or threading.get_ident() != clock._thread:
                return wait(work, *args, **kwargs)
            clock._inside = True
            try:
                return clock._measured(wait, work, *args, **kwargs)
            finally:
                clock._inside = False

        Work.wait = timed
        return self

    def stop(self) -> None:
        """Measure no more."""
        Work.wait = self._wait

    def _measured(self, wait: Any, work: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._on_gpu:
            began = time.perf_counter()
            try:
                return wait(work, *args, **kwargs)
            finally:
                self._seconds += time.perf_counter() - began
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        answer = wait(work, *args, **kwargs)
        after.record()
        self._events.append((before, after))
        return answer

    def taken(self) -> float:
        """The seconds since the last call. On a GPU those of exchanges that are done; the others count next time."""
        done: list[tuple[Any, Any]] = []
        open_: list[tuple[Any, Any]] = []
        for pair in self._events:
            (done if pair[1].query() else open_).append(pair)
        self._events = open_
        seconds = self._seconds + sum(before.elapsed_time(after) / 1000 for before, after in done)
        self._seconds = 0.0
        return seconds
