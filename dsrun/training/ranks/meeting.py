"""The ranks' first exchange, with a short limit and words of its own.

torch waits ten minutes for a rank that doesn't come, or for a network over which nothing gets through, and then names a
store's key or a collective's number. Here the ranks:

1. count themselves in the process group's store, before there is a group: whoever doesn't come is named (`arrive`);
2. connect and add up one number, which takes seconds where anything works (`watched`): a thread gives up, as the one
   that computes may be inside of NCCL for good.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from dsrun.errors import TrainingError
from dsrun.job.job import Job, ranks_of
from dsrun.words import counted, listed

ARRIVE_S, EXCHANGE_S, WORD_S = 600.0, 120.0, 60.0
"""Seconds that a rank waits for the others to come, and for the first exchange once all are there, where --timeout says
nothing; and until the first rank says for whom it waits."""
LIMIT = "DEEPSPEED_TIMEOUT"
"""Where --timeout is given, its minutes, for both."""
LONGER = "--timeout MINUTES waits longer."
ARRIVED, CONNECTED = "dsrun/arrived", "dsrun/connected"
"""Keys of the store: how many ranks, and with a rank's number behind them whether it is one of these."""


class Meeting:
    """A rank among the others of its job, before they have exchanged anything.

    job: says on which host a rank is. note: tells the user something, where this is the first rank.
    """

    def __init__(self, job: Job, note: Callable[[str], None]) -> None:
        self._job, self._note = job, note
        self._rank, self._ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        minutes = os.environ.get(LIMIT)
        self._arrive_s, self._exchange_s = (float(minutes) * 60,) * 2 if minutes else (ARRIVE_S, EXCHANGE_S)
        self._store: dist.TCPStore | None = None

    def arrive(self) -> None:
        """Wait for the other ranks. Raises TrainingError where some don't come, with their hosts."""
        began, told = time.monotonic(), self._rank > 0
        store = self._store = self._reached()
        self._count(store, ARRIVED)
        while store.add(ARRIVED, 0) < self._ranks:
            waited = time.monotonic() - began
            late = waited > self._arrive_s
            # Asked for seldom: it takes a question for each rank.
            missing = self._missing(store, ARRIVED) if late or (waited > WORD_S and not told) else []
            if late and missing:
                what = f"{self._named(missing)} did not come within {_span(self._arrive_s)}"
                raise TrainingError(what, where=self._address, hint=f"{_look_at(missing)} {LONGER}")
            if missing:
                told = True
                self._note(f"still waiting for {self._named(missing)} to begin")
            time.sleep(min(1.0, 0.01 + waited / 10))

    @contextmanager
    def watched(self, give_up: Callable[[TrainingError], None]) -> Iterator[None]:
        """While it lasts a rank connects and makes the first exchange (`exchange`). give_up: ends the process, called
        by another thread after the limit."""
        done = threading.Event()

        def watch() -> None:
            if not done.wait(self._exchange_s):
                give_up(self._stuck())

        threading.Thread(target=watch, daemon=True, name="the first exchange").start()
        try:
            yield
        finally:
            done.set()

    def exchange(self, device: torch.device) -> None:
        """Add up one number over all ranks, which are connected. Raises RuntimeError where the sum is wrong."""
        if self._store is None:
            raise RuntimeError("the ranks have not met")
        self._count(self._store, CONNECTED)
        ones = torch.ones(1, device=device)
        dist.all_reduce(ones)
        if (total := ones.item()) != self._ranks:
            raise RuntimeError(f"the first all-reduce of {self._ranks} ones gave {total}")

    def _reached(self) -> dist.TCPStore:
        """The store that torch's process group will use: its server is shared within the first rank's process."""
        host, _, port = self._address.rpartition(":")
        try:
            return dist.TCPStore(
                host, int(port), self._ranks, is_master=self._rank == 0, multi_tenant=True, wait_for_workers=False,
                timeout=timedelta(seconds=self._arrive_s),
            )  # fmt: skip
        except dist.DistError as error:
            if self._rank == 0:  # its port is taken, say: torch's words are known
                raise
            what = f"{self._named([self._rank])} can't reach the first rank there: {error}"
            hint = (
                "Its name has to lead to the same machine on every host, and no firewall may stand between."
            )
            raise TrainingError(what, where=self._address, hint=hint) from error

    def _count(self, store: dist.Store, key: str) -> None:
        """Count this rank: by its number first, so that a rank in the sum is no missing one."""
        store.add(f"{key}/{self._rank}", 1)
        store.add(key, 1)

    def _missing(self, store: dist.Store, key: str) -> list[int]:
        """The ranks that are not counted. Adding nothing is how every torch asks a store without waiting."""
        return [rank for rank in range(self._ranks) if not store.add(f"{key}/{rank}", 0)]

    def _stuck(self) -> TrainingError:
        """The error of a first exchange that came to no end."""
        behind: list[int] = []
        try:
            if self._store is not None:
                behind = self._missing(self._store, CONNECTED)
        except dist.DistError as error:  # the first rank has given up already
            logging.getLogger(__name__).info("no rank can be asked any more: %s", error)
        so_far = f"; {self._named(behind)} could not connect" if 0 < len(behind) < self._ranks else ""
        what = f"all {self._ranks} ranks are there, but their first exchange did not end in {_span(self._exchange_s)}"
        return TrainingError(what + so_far, where=self._address, hint=f"{self._remedy()} {LONGER}")

    def _remedy(self) -> str:
        """What to look at where ranks are there and nothing gets through."""
        gpus, hosts = self._job.accelerator == "cuda", len(self._job.hosts) > 1
        parts = ["`dsrun doctor --smoke` tells which hosts or cards don't get through to each other."]
        if hosts:
            name = "NCCL_SOCKET_IFNAME" if gpus else "GLOO_SOCKET_IFNAME"
            parts.append(f"Between hosts: the wrong network interface ({name} names one), or a firewall.")
        if gpus:
            parts.append("Within a host: PCIe ACS or an IOMMU, if NCCL_P2P_DISABLE=1 helps.")
        return " ".join(parts)

    def _named(self, ranks: Sequence[int]) -> str:
        """Ranks in words, with their hosts where there are several."""
        hosts = self._job.hosts
        if len(hosts) == 1:
            return _few(ranks)
        on = {
            host.host: sorted(set(ranks) & set(ranks_of(hosts, number))) for number, host in enumerate(hosts)
        }
        return listed([f"{_few(these)} on {host}" for host, these in on.items() if these])


def _few(ranks: Sequence[int]) -> str:
    """Numbers of ranks, those that follow one another as one: "rank 3", "ranks 1, 4-7"."""
    runs = [
        [rank for _, rank in group]
        for _, group in itertools.groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])
    ]
    words = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(words)}"


def _span(seconds: float) -> str:
    return counted(round(seconds / 60), "minute") if seconds >= 60 else counted(round(seconds), "second")


def _look_at(ranks: Sequence[int]) -> str:
    log = f"`dsrun logs RUN --rank {ranks[0]}`"
    return f"See what holds it up ({log}): imports from a slow file system, a GPU that doesn't answer."
