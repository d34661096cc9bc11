"""A coordinator of a thousand hosts: seconds until a failure is named, its own load, touches of the run folder.

    python bench/coordinator.py [--hosts 1000] [--ranks 8] [--seconds 20] [--write]

The coordinator is the real one, over TCP on this machine. Hosts are stubs: another process holds all their connections,
answers as agents do, sends their heartbeats, and lets a rank of the host in the middle fail. Before that, the
coordinator is only watched. What a real agent touches while its ranks run is counted beside it (RankWatch, with
sleeping ranks). Wanted: named within 15 s, load under one core, one touch a second a host. --write: into
docs/reference/many-hosts.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dsrun.errors import JobFailedError  # noqa: E402
from dsrun.job.job import HostDevices, ScriptJob  # noqa: E402
from dsrun.job.layout import state_file  # noqa: E402
from dsrun.job.rank_state import RUNNING  # noqa: E402
from dsrun.job.run_folder import CONTROL  # noqa: E402
from dsrun.jobs.diagnosis.ends import HostEnd, RankEnd  # noqa: E402
from dsrun.jobs.supervision import protocol  # noqa: E402
from dsrun.jobs.supervision.coordinator import Coordinator  # noqa: E402
from dsrun.jobs.supervision.display.script_view import ScriptView  # noqa: E402
from dsrun.jobs.supervision.run_options import RunOptions  # noqa: E402
from dsrun.jobs.supervision.worker_group import RankWatch  # noqa: E402

CALLERS = 64
"""Hosts that call in at once."""
ERROR = "ValueError: a bad row"
PAGE = ROOT / "docs" / "reference" / "many-hosts.md"
WANTED_S, WANTED_LOAD, WANTED_TOUCHES = 15.0, 1.0, 1.0


# The hosts


def stub_hosts(run_dir: Path, hosts: int, ranks: int, fails_after_s: float) -> None:
    """All hosts of the job, in this process. Writes when the rank failed into a file beside the run folder."""
    until = time.monotonic() + 60
    while not (run_dir / CONTROL).exists() and time.monotonic() < until:
        time.sleep(0.05)
    setup = json.loads((run_dir / CONTROL).read_text())

    def called(number: int) -> protocol.Connection:
        connection = protocol.call(["127.0.0.1"], setup["port"], setup["token"])
        assert connection, f"host {number}: nobody answers"
        connection.send(number=number)
        connection.send(hello=number, host=f"n{number}", pid=1, addresses=["127.0.0.1"], port=1)
        return connection

    with ThreadPoolExecutor(CALLERS) as pool:
        connections = dict(enumerate(pool.map(called, range(hosts))))
    threading.Thread(target=_beat, args=(list(connections.values()),), daemon=True).start()
    started: float | None = None
    failing = hosts // 2
    while connections:
        for number, connection in list(connections.items()):
            for message in connection.receive():
                if "reach" in message:
                    connection.send(reached=message["reach"])
                elif "start" in message and started is None:
                    started = time.monotonic()
                elif "stop" in message or "bye" in message:
                    _end(connection, number, ranks)
                    del connections[number]
            if connection.closed:
                connections.pop(number, None)
        if started and failing in connections and time.monotonic() - started > fails_after_s:
            now = time.time()
            end = RankEnd(failing * ranks, now, ERROR, killed=False, pid=1)
            connections[failing].send(rank_end=end._asdict(), clock=now)
            beside(run_dir).write_text(str(now))
            fails_after_s = float("inf")
        time.sleep(0.05)


def beside(run_dir: Path) -> Path:
    return run_dir.with_name(f"{run_dir.name}-failed-at")


def _beat(connections: list[protocol.Connection]) -> None:
    while True:
        time.sleep(protocol.HEARTBEAT_S)
        for connection in connections:
            connection.heartbeat()


def _end(connection: protocol.Connection, number: int, ranks: int) -> None:
    statuses = {str(number * ranks + rank): RUNNING for rank in range(ranks)}
    connection.send(exit=HostEnd(number, None, statuses=statuses)._asdict())


# The coordinator


@contextmanager
def touches(folder: Path) -> Iterator[Counter[str]]:
    """Calls of this process to the file system for something below a folder, by the call."""
    counted: Counter[str] = Counter()
    calls = {name: getattr(os, name) for name in ("stat", "open", "scandir", "listdir", "replace", "unlink")}

    def counting(name: str, call: Any) -> Any:
        def counted_call(path: Any, *words: Any, **named: Any) -> Any:
            if isinstance(path, (str, Path)) and str(path).startswith(f"{folder}/"):
                counted[name] += 1
            return call(path, *words, **named)

        return counted_call

    for name, call in calls.items():
        setattr(os, name, counting(name, call))
    try:
        yield counted
    finally:
        for name, call in calls.items():
            setattr(os, name, call)


def measure(run_dir: Path, hosts: int, ranks: int, seconds: float) -> dict[str, float]:
    """One job with so many hosts, whose rank fails after `seconds`."""
    job = ScriptJob(
        run_dir=str(run_dir), script="train.py", args=(), cwd=str(run_dir), accelerator="cuda", dsrun_version="",
        hosts=tuple(HostDevices(f"n{number}", tuple(range(ranks))) for number in range(hosts)), launcher="manual",
    )  # fmt: skip
    (run_dir / "logs").mkdir(exist_ok=True)
    failed_at = beside(run_dir)
    words = [str(run_dir), "--stubs", "--hosts", str(hosts), "--ranks", str(ranks), "--seconds", str(seconds)]
    stubs = subprocess.Popen([sys.executable, __file__, *words])
    began = time.monotonic()
    marks: dict[str, tuple[float, float, int]] = {}
    view = ScriptView(run_dir, job.world_size, lambda _line: None)

    def watch() -> bool:
        told = view()
        if not failed_at.exists():
            marks["last"] = (time.monotonic(), time.process_time(), sum(touched.values()))
            marks.setdefault("up", marks["last"])
        return told

    try:
        with touches(run_dir) as touched:
            try:
                Coordinator(job, os.environ, RunOptions(check=False), watch, lambda _line: None).run()
            except JobFailedError as error:
                text, ended = str(error), time.time()
            else:
                raise SystemExit("the job did not fail")
    finally:
        stubs.wait(60)
    if f"rank {hosts // 2 * ranks}" not in text or ERROR not in text:
        raise SystemExit(f"the rank that failed is not named: {text}")
    (up, cpu_up, touched_up), (last, cpu_last, touched_last) = marks["up"], marks["last"]
    watched = last - up
    return {
        "hosts": hosts,
        "ranks": hosts * ranks,
        "seconds_to_meet": up - began,
        "seconds_to_name": ended - float(failed_at.read_text()),
        "load_while_watching": (cpu_last - cpu_up) / watched,
        "touches_a_second_a_host": (touched_last - touched_up) / watched / hosts,
    }


def agent_touches(run_dir: Path, ranks: int, seconds: float) -> float:
    """Touches of the run folder a second by the agent of a host whose ranks run."""
    with subprocess.Popen(["sleep", str(seconds + 60)]) as sleeping:
        for rank in range(ranks):
            path = run_dir / state_file(rank)
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({"rank": rank, "pid": sleeping.pid, "status": RUNNING}))
        watch = RankWatch(run_dir, range(ranks))
        for _ in range(3):  # what is new is read twice
            watch.look()
            time.sleep(1)
        began = time.monotonic()
        with touches(run_dir) as touched:
            while time.monotonic() - began < seconds:
                watch.look()
                time.sleep(0.25)  # host_agent.WATCH_S
        watch.close()
        sleeping.kill()
    return sum(touched.values()) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", nargs="?", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stubs", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--write", action="store_true", help="put the figures into the page")
    given = parser.parse_args()
    if given.stubs:
        stub_hosts(given.run_dir, given.hosts, given.ranks, given.seconds)
        return
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "run").mkdir()
        found = measure(Path(name) / "run", given.hosts, given.ranks, given.seconds)
    with tempfile.TemporaryDirectory() as name:
        found["agent_touches_a_second"] = agent_touches(Path(name), given.ranks, given.seconds)
    for key, value in found.items():
        print(f"{key:28} {value:.3g}")
    good = found["seconds_to_name"] <= WANTED_S and found["load_while_watching"] < WANTED_LOAD
    good &= found["touches_a_second_a_host"] + found["agent_touches_a_second"] <= WANTED_TOUCHES * 1.1
    if given.write:
        PAGE.write_text(page(found), encoding="utf-8")
    sys.exit(not good)


def page(found: dict[str, float]) -> str:
    """docs/reference/many-hosts.md."""
    rows = {
        "hosts and ranks": f"{found['hosts']:.0f} and {found['ranks']:.0f}",
        "until all have called in and know where to meet": f"{found['seconds_to_meet']:.1f} s",
        f"from a rank's end until it is named (wanted: {WANTED_S:g} s)": f"{found['seconds_to_name']:.1f} s",
        "load of the coordinator meanwhile (wanted: under one core)": f"{found['load_while_watching']:.2f} cores",
        "its touches of the run folder, a second and host": f"{found['touches_a_second_a_host']:.2f}",
        f"an agent's, a second (wanted with them: {WANTED_TOUCHES:g})": f"{found['agent_touches_a_second']:.2f}",
    }
    table = "".join(f"| {what} | {value} |\n" for what, value in rows.items())
    return f"""# A thousand hosts

Made by `python bench/coordinator.py --write` on {datetime.now(UTC):%Y-%m-%d}, on {os.cpu_count()} cores that the
stubs of all hosts share with it: the real coordinator, over TCP; hosts that only answer and send heartbeats; a rank of
the host in the middle fails.

| | |
| --- | --- |
{table}
Touches are counted once every rank has said its first state. Until then an agent looks at each quarter of a
second, up to four touches a second a host.
"""


if __name__ == "__main__":
    main()
