"""Time that the board takes to answer, with many long runs: its table, a run's page, runs over each other.

    python bench/board.py [--runs 500] [--steps 100000] [--rounds 11] [--output docs/reference/bench-board.md]

Makes one run of so many steps, and the others as copies of it whose long file is a link to the same data. Asks the
application in this process, without a browser: what is measured is reading and writing the page. One of the runs goes
on, so that no round finds everything as it was.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from starlette.applications import Starlette
from starlette.testclient import TestClient

from dsrun.job import run_folder
from dsrun.job.job import FORMAT, DataSpec, HostDevices, Job, ModelSpec, Prepared, TrainingSpec
from dsrun.reports.board.app import make_app
from dsrun.reports.board.known_runs import FRESH_S, UNREAD, KnownRuns, key_of
from dsrun.reports.board.serve import SWITCH_S
from dsrun.training.reports.report import Report

TOKEN = "bench"
READING = "the table, while runs are still being read"
MAKING = "the table, while a run's page is being made"
PAGES, PAUSE_S = 5, 0.1
"""Number of runs' pages that are made while the table is asked for, and seconds between two questions."""


def make_runs(home: Path, count: int, steps: int) -> None:
    """Make a number of runs in a folder."""
    first = home / "run-0000"
    job = Job(
        run_dir=str(first), model=ModelSpec("llama-2-7b", "folder", "/models/llama-2-7b", "llama-2"),
        data=DataSpec(train_file="/data/train.jsonl", eval_file=None),
        training=TrainingSpec(), preset="zero2", precision="bf16", accelerator="cuda",
        hosts=(HostDevices("localhost", tuple(range(8))),),
        ds_config={
            "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8, "zero_optimization": {"stage": 2},
        },
        prepared=Prepared("/cache/model", "/cache/rows", None), dsrun_version="0", format=FORMAT,
        prediction={"device": "a100-80g", "gpu_allocated_bytes": 6e10, "host_bytes": 1e11},
    )  # fmt: skip
    with run_folder.held(first):
        (first / "job.json").write_text(job.to_json())
        report = Report(first, 0)
        report.event("plan", total_steps=steps, start_step=0, train_rows=9, eval_rows=9, step_rows=8)
        fields = {
            "lr": 1e-4,
            "grad_norm": 1.25,
            "tokens": 8192,
            "seconds": 0.75,
            "skipped": 0,
            "loss_scale": None,
        }
        with (first / "metrics.jsonl").open("w") as file:
            for step in range(1, steps + 1):
                line = {"time": 1.7e9 + step, "step": step, "loss": 2 + 8 / step + step % 7 / 50, **fields}
                file.write(json.dumps({**line, "memory_bytes": 5 * 10**10}) + "\n")
        for step in range(0, steps, max(1, steps // 100)):
            report.event("eval", step=step, loss=2.5)
        run_folder.write_state(first, "finished")
    for number in range(1, count):
        path = home / f"run-{number:04}"
        shutil.copytree(first, path, ignore=shutil.ignore_patterns("metrics.jsonl", ".lock"))
        os.link(first / "metrics.jsonl", path / "metrics.jsonl")
        (path / ".lock").touch()


def seconds_of(
    rounds: int, ask: Callable[[], object], before: Callable[[], object]
) -> list[tuple[float, float]]:
    """Seconds of each round, without the preparation: by the clock, and of the processor."""
    found = []
    for _ in range(rounds):
        before()
        began = time.perf_counter(), time.process_time()
        ask()
        found.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    return found


def main() -> None:
    """Measure, and print or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "runs"
        make_runs(home, options.runs, options.steps)
        rows = measure(home, options.rounds)
    lines = [
        "# How fast the board answers",
        "",
        f"Made by `python bench/board.py --runs {options.runs} --steps {options.steps}` on {date.today()}: "
        f"{options.runs} runs of {options.steps:,} steps each, on {os.cpu_count()} cores ({platform.machine()}), "
        f"Python {platform.python_version()}. Seconds: the median of {options.rounds} rounds, the slowest, and those "
        "of the processor in the median, which don't count what else the machine was doing (its load at the end: "
        f"{os.getloadavg()[0]:.0f}). While runs are read and pages are made the table is asked for again and again "
        f"({len(rows[READING])} and {len(rows[MAKING])} times). A file is written between two rounds, so "
        "that none finds all as it was.",
        "",
        "| asked for | median | slowest | of the processor |",
        "| --- | --- | --- | --- |",
        *(table_row(name, found) for name, found in rows.items()),
        "",
    ]
    text = "\n".join(lines)
    print(text)
    if options.output:
        options.output.write_text(text, encoding="utf-8")


def table_row(name: str, found: list[tuple[float, float]]) -> str:
    """A line of the table."""
    clock, processor = ([one[place] for one in found] for place in (0, 1))
    return (
        f"| {name} | {statistics.median(clock):.3f} | {max(clock):.3f} | {statistics.median(processor):.3f} |"
    )


def measure(home: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Request -> seconds of each round."""
    sys.setswitchinterval(SWITCH_S)
    runs = KnownRuns(home)
    apps: list[Starlette] = []
    start = seconds_of(1, lambda: apps.append(make_app(runs, TOKEN)), lambda: None)
    with TestClient(apps[0], base_url="http://127.0.0.1") as client:
        client.get(f"/?token={TOKEN}", follow_redirects=False)  # the cookie alone
        return {"(starting)": start, **answers(home, runs, client, rounds)}


def answers(
    home: Path, runs: KnownRuns, client: TestClient, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Requests of a browser, in their order."""
    events = home / "run-0001" / "events.jsonl"

    def changed() -> None:
        time.sleep(FRESH_S)  # a look holds as long
        with events.open("a") as file:
            file.write('{"time": 1.0, "event": "note", "text": "x"}\n')

    def get(address: str) -> Callable[[], object]:
        return lambda: client.get(address).raise_for_status()

    def filling() -> dict[str, list[tuple[float, float]]]:
        """Asked on and on from the first answer until every run was read."""
        began, found = (time.perf_counter(), time.process_time()), []
        while not found or any(line.state == UNREAD for line in runs.lines()):
            found += seconds_of(1, get("/"), lambda: None)
        whole = time.perf_counter() - began[0], time.process_time() - began[1]
        return {
            READING: found,
            "until every run was read": [whole],
        }

    def meanwhile() -> list[tuple[float, float]]:
        """Asked on and on while somebody else looks at a run for the first time, which takes a while."""
        found = []
        making = threading.Thread(target=get(f"/run/{key_of(next(others))}"))
        making.start()
        while making.is_alive():
            found += seconds_of(1, get("/"), lambda: time.sleep(PAUSE_S))
        return found

    others = (f"run-{number:04}" for number in range(3, 500))
    page, other = key_of("run-0001"), key_of("run-0002")
    compare = f"/compare?run={page}&run={other}"
    return {
        "the table, for the first time": seconds_of(1, get("/"), lambda: None),
        **filling(),
        "the table, as a page": seconds_of(rounds, get("/"), changed),
        "the table, as an open page asks for it": seconds_of(rounds, get("/?part=1"), changed),
        MAKING: [one for _ in range(PAGES) for one in meanwhile()],
        "a run's page, for the first time": seconds_of(1, get(f"/run/{page}"), changed),
        "a run's page, after it has changed": seconds_of(3, get(f"/run/{page}"), changed),
        "a run's page, unchanged": seconds_of(3, get(f"/run/{other}"), get(f"/run/{other}")),
        "two runs over each other": seconds_of(3, get(compare), changed),
        "two runs over each other, by tokens": seconds_of(3, get(f"{compare}&by=tokens"), changed),
    }


if __name__ == "__main__":
    main()
