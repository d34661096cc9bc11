"""Common parts of the bench for one GPU: cases, the time that is left, and results written at once."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
RESULTS = CHECKOUT / "bench/results/gpu"
"""Lines of JSON, a case each, in a file for each part and day."""
GIB = 2**30
BUDGET_S = 520.0
"""Seconds of a part: under nine minutes."""
RUN_S, KERNEL_S = 20.0, 5.0
"""Seconds that a case is expected to take: a short run of dsrun's, a kernel in the process of all kernels."""
OUT_OF_TIME, OUT_OF_MEMORY, NO_TIME = "out of time", "out of memory", "no time left"


def has(module: str) -> bool:
    """Whether a module is installed."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent isn't there
        return False


class Clock:
    """The budget: what is left, and whether it is enough for what the next case is expected to take."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds."""
        return self._until - time.monotonic()

    def has_room(self, expected: float) -> bool:
        """Whether a case that is expected to take so many seconds is likely to end in time."""
        return expected < self.left


@dataclass(frozen=True)
class Case:
    """Something to run. run: with a folder of its own and the seconds that are left; returns what it found, with
    `failed`: a word, empty where it didn't."""

    name: str
    run: Callable[[Path, float], dict[str, Any]]
    cuda: bool = False
    """Nothing of it can be tried on a CPU."""
    expected: float = RUN_S
    """Seconds, on a GPU. One slow case says nothing of the next: a compiled run takes five times a plain one."""
    lacks: str = ""
    """What has to be installed for it and isn't."""


@dataclass
class Results:
    """A file that gets a line for each case as soon as there is one."""

    part: str
    folder: Path
    where: str
    tiny: bool
    lines: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, found: Mapping[str, Any]) -> None:
        """A case's result; seen by who looks, though the machine should go away the next moment."""
        day = str(date.today())
        line = {"part": self.part, "case": name, "day": day, "where": self.where, "tiny": self.tiny, **found}
        self.lines.append(line)
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{self.part}-{day}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(json.dumps({name: found})[:400], flush=True)


def carry_out(cases: Iterable[Case], results: Results, clock: Clock, folder: Path) -> None:
    """Each case that there is time for, in a folder of its own. One that fails is a result, too."""
    for number, case in enumerate(cases):
        if results.tiny and case.cuda:
            results.add(case.name, {"failed": "", "skipped": "for GPUs alone"})
            continue
        if case.lacks:
            results.add(case.name, {"failed": "", "skipped": f"{case.lacks} is not installed"})
            continue
        if not clock.has_room(case.expected):
            results.add(case.name, {"failed": "", "skipped": NO_TIME})
            continue
        place, began = folder / f"case-{number}", time.monotonic()
        place.mkdir()
        try:
            found = case.run(place, clock.left)
        except Exception as error:  # the next case may work
            found = {"failed": f"{type(error).__name__}: {error}"}
        shutil.rmtree(place, ignore_errors=True)
        seconds = time.monotonic() - began
        results.add(case.name, {"failed": "", **found, "wall_seconds": round(seconds, 1)})


def ended(argv: Sequence[str], environ: Mapping[str, str], folder: Path, seconds: float) -> tuple[str, str]:
    """Run a command; a word on how it failed (empty: it did not), and its stdout. What runs too long is ended."""
    with (folder / "stdout").open("w+") as out, (folder / "stderr").open("w+") as err:
        process = subprocess.Popen(
            argv, env=environ, cwd=folder, stdout=out, stderr=err, start_new_session=True
        )
        try:
            code = process.wait(max(1.0, seconds))
            failed = f"exit {code}" if code else ""
        except subprocess.TimeoutExpired:
            failed = OUT_OF_TIME
            _end(process)
        out.seek(0)
        err.seek(0)
        text, errors = out.read(), err.read()
    if failed:
        print(text[-2000:], errors[-4000:], file=sys.stderr)
        if OUT_OF_MEMORY in (text + errors).lower():
            failed = OUT_OF_MEMORY
    return failed, text


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(10)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def dsrun(
    words: Sequence[str], folder: Path, seconds: float, environ: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A fine-tune into folder/run; its lines of metrics, peaks and notes. failed: a word, empty where it ended well."""
    run = folder / "run"
    argv = [sys.executable, "-m", "dsrun", *words, "--output-dir", str(run), "--json"]
    failed, _ = ended(argv, {**os.environ, **(environ or {})}, folder, seconds)
    events = _lines(run / "events.jsonl")
    return {
        "failed": failed, "metrics": _lines(run / "metrics.jsonl"), **took(run),
        "notes": [line["text"] for line in events if line.get("event") == "note"],
    }  # fmt: skip


def _lines(path: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    )


def took(out: Path) -> dict[str, Any]:
    """Figures of a run's ranks: the largest of each, None where no rank had it."""
    peaks = [json.loads(path.read_text()).get("peaks", {}) for path in sorted(out.glob("state/rank-*.json"))]
    names = ("gpu_allocated_bytes", "gpu_reserved_bytes", "host_peak_bytes", "step_seconds")
    return {
        name: max((peak[name] for peak in peaks if peak.get(name) is not None), default=None)
        for name in names
    }


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, from a process of its own: this one must never hold a GPU that a job then finds in use."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


class Child:
    """A process that calls functions for this one, one after the other, so that torch is imported and CUDA started
    once. This process must never hold a GPU that a job then finds in use; the child gives it back in `end`."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's result. A child that died (out of host memory, an illegal access) is replaced by the next."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        try:
            return self._pool.submit(function, *arguments).result()
        except Exception:
            self.end()  # after an error CUDA's context may be lost, and its memory held
            raise

    def end(self) -> None:
        """Let the child go, with what it holds of the GPU."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def planned(words: Sequence[str], kind: str | None, folder: Path, seconds: float) -> dict[str, Any]:
    """What `dsrun plan` says of a set-up: bytes allocated and seconds a step. Empty where the card is no known kind."""
    if kind is None:
        return {}
    failed, text = ended(
        [sys.executable, "-m", "dsrun", "plan", *words, "--gpu", kind, "--json"], os.environ, folder, seconds
    )
    if failed:
        return {}
    (plan,) = json.loads(text)["plans"][:1]
    step = (plan.get("speed") or {}).get("seconds_per_step")
    return {"planned_allocated_bytes": plan["gpu"]["allocated_bytes"], "planned_step_seconds": step}


def machine() -> list[str]:
    """Name of every GPU in nvidia-smi, its memory and driver."""
    asked = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip().splitlines()


def versions() -> str:
    """Versions of the packages that decide the figures."""
    found = []
    for name in ("deepspeed", "torch", "transformers"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} missing")
    return ", ".join(found)


def stored(folder: Path = RESULTS) -> Iterator[dict[str, Any]]:
    """Every result that is kept, the oldest first."""
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: path.stem[-10:]):
        yield from _lines(path)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options of each part."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, help="seconds; no case is started that ends later"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        help="a folder for what is made once: random models; a later call finds them there",
    )
    parser.add_argument("--only", nargs="+", default=[], help="cases whose names begin so")
    parser.add_argument(
        "--tiny", action="store_true", help="on a CPU and in miniature: that the bench works, no speed"
    )
    return parser


def arguments(doc: str | None) -> argparse.Namespace:
    """The options that a part was given."""
    return parser(doc).parse_args()


def begin(part: str, given: argparse.Namespace) -> Results:
    """The results' file, with what it was measured on. Ends where there is no GPU and --tiny is not given."""
    if given.tiny:
        os.environ["DS_ACCELERATOR"] = "cpu"
        return Results(part, given.output, f"a CPU, in miniature; {versions()}", tiny=True)
    if shutil.which("nvidia-smi") is None or not (there := machine()):
        raise SystemExit("no GPU to measure on; --tiny shows on a CPU that the bench works")
    return Results(part, given.output, f"{there[0]}; {versions()}", tiny=False)


def wanted(cases: Iterable[Case], only: Sequence[str]) -> Iterator[Case]:
    """Cases whose names begin with one of `only`; all where nothing is named."""
    yield from (case for case in cases if not only or case.name.startswith(tuple(only)))
