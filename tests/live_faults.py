"""Faults in live jobs of two ranks, under each launcher; a table of what dsrun says of them.

    python tests/live_faults.py [--fault NAME ...] [--launcher NAME ...] [--write]

Each job really runs and really fails: by `dsrun launch`, by torchrun and by deepspeed. Of the first dsrun's own words
and exit code count, of the others what `dsrun diagnose` reads in the log. --write writes docs/reference/live-faults.md.
Exits with 1 where a cause, a rank, a stack or a code is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "live-faults.md"
COMMAND = "python tests/live_faults.py --write"
UNTOLD = (
    "DeepSpeed's launcher looks at its ranks once a second, and tells the code of whichever it sees first. Where",
    "that is rank 0, which only lost its peer, the log holds no trace of rank 1's exit or signal, and dsrun names no",
    "cause (bold). That rank 1 was first shows by its silence, where the other rank wrote that its peer was gone.",
)
LIMIT_S = 300
WAIT_S, SHORT_WAIT_S = 120, 6
"""The limit of a collective in these scripts; in that of a rank which hangs."""
SCRIPT = """
import datetime, os, signal, sys, time

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds={wait_s}))
rank = dist.get_rank()
weights = torch.ones(8)


def stuck():
    while True:
        time.sleep(0.1)


def step(number):
    if number == 2 and rank == {rank}:
        fail()
    total = weights * number
    dist.all_reduce(total)


def fail():
{body}


for number in range(5):
    step(number)
    print(f"step {{number}}", flush=True)
"""


@dataclass(frozen=True)
class LiveFault:
    """A fault of one rank (or of all), and what has to be said of it."""

    name: str
    body: str
    """The function that the rank calls, without its indentation."""
    causes: tuple[str, ...]
    """Classes of failures that are right."""
    code: int
    """The exit code that `dsrun launch` has to end with: docs/howto/when-it-fails.md."""
    rank: int = 1
    everywhere: bool = False
    """Whether the fault is of no rank alone, so that none is the first."""
    hangs: bool = False
    code_alone: int = 0
    """The exit code that is all a log can hold of it; 0 where there are words, too."""

    def script(self) -> str:
        """The script's text."""
        lines = "\n".join(f"    {line}" for line in self.body.splitlines())
        return SCRIPT.format(wait_s=SHORT_WAIT_S if self.hangs else WAIT_S, rank=self.rank, body=lines)


FAULTS = (
    LiveFault("exception", 'raise ValueError("no column \'text\' in train.jsonl")', ("data", "script_error"), 1),
    LiveFault("exit", "import atexit\natexit.register(time.sleep, 5)\nsys.exit(3)", ("exited",), 3, code_alone=3),
    LiveFault("killed", "os.kill(os.getpid(), signal.SIGKILL)", ("killed", "host_oom"), 137, code_alone=-9),
    LiveFault("segfault", "import ctypes\nctypes.string_at(0)", ("segfault",), 139, code_alone=-11),
    LiveFault("hang", "stuck()", ("collective_timeout",), 1, hangs=True),
    LiveFault("shapes", "dist.all_reduce(torch.ones(800))", ("ranks_disagree",), 134, everywhere=True),
    LiveFault(
        "nan",
        "torch.autograd.set_detect_anomaly(True)\n"
        "value = torch.zeros(1, requires_grad=True)\n"
        "(torch.sqrt(value) * 0).sum().backward()",
        ("nan",), 1,
    ),
    LiveFault(
        "full-disk", 'with open("/dev/full", "wb", buffering=0) as file:\n    torch.save(weights, file)',
        ("disk_full",), 1,
    ),
    LiveFault("import", "import flash_attn_that_is_not_there", ("import",), 1),
)  # fmt: skip


@dataclass
class Outcome:
    """What came of a fault under a launcher."""

    fault: LiveFault
    launcher: str
    code: int
    diagnosis: dict[str, Any]
    text: str

    @property
    def cause_is_right(self) -> bool:
        """Whether the class that is named is right."""
        return self.diagnosis.get("cause") in self.fault.causes

    @property
    def is_in_log(self) -> bool:
        """Whether the log holds the fault at all: DeepSpeed's launcher tells one rank's code."""
        code = self.fault.code_alone
        return self.launcher != "deepspeed" or not code or f"return code = {code}" in self.text

    @property
    def rank_is_right(self) -> bool:
        """Whether the first rank is named rightly, or said to be open."""
        rank = self.diagnosis.get("rank")
        return rank is None or (rank == self.fault.rank and not self.fault.everywhere)

    @property
    def rank_is_named(self) -> bool:
        """Whether a rank is named."""
        return self.diagnosis.get("rank") is not None

    @property
    def code_is_right(self) -> bool:
        """Whether `dsrun launch` ended as documented; other launchers have codes of their own."""
        return self.launcher != "dsrun launch" or self.code == self.fault.code

    @property
    def stack_is_there(self) -> bool:
        """Whether a hang is shown by the stack of the rank that hangs, where dsrun watches it."""
        return not self.fault.hangs or self.launcher != "dsrun launch" or "in stuck" in self.text

    @property
    def problems(self) -> list[str]:
        """What is not as it should be."""
        checks = {
            f"cause {self.diagnosis.get('cause')}": self.cause_is_right,
            f"rank {self.diagnosis.get('rank')}": self.rank_is_right,
            f"exit code {self.code}": self.code_is_right,
            "no stack of the rank that hangs": self.stack_is_there,
        }
        return [words for words, right in checks.items() if not right]


def _environ(folder: Path) -> dict[str, str]:
    """Of a job: two threads' worth of machine, no GPU, the tree that this file is in."""
    own = {
        "HOME": str(folder), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "LANG": "C.UTF-8",
    }  # fmt: skip
    return {**os.environ, **own}


def _run(command: Sequence[str], folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        command, check=False, cwd=folder, env=_environ(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=LIMIT_S, errors="replace",
    )  # fmt: skip
    return done.returncode, done.stdout


def _diagnosis(log: Path, folder: Path) -> dict[str, Any]:
    code, text = _run([sys.executable, "-m", "dsrun", "diagnose", "--json", str(log)], folder)
    if code not in (0, 3):
        raise RuntimeError(text)
    diagnosis: dict[str, Any] = json.loads(text)
    return diagnosis


def by_dsrun(fault: LiveFault, folder: Path) -> Outcome:
    """The fault under `dsrun launch`."""
    command = ["dsrun", "launch", "--gpus", "2", "--output-dir", "run", "train.py"]
    code, text = _run([sys.executable, "-m", *command], folder)
    return Outcome(fault, "dsrun launch", code, _diagnosis(folder / "run", folder), text)


def _by_other(name: str, command: Sequence[str], fault: LiveFault, folder: Path) -> Outcome:
    code, text = _run([sys.executable, *command, "train.py"], folder)
    log = folder / "train.log"
    log.write_text(text)
    return Outcome(fault, name, code, _diagnosis(log, folder), text)


def by_torchrun(fault: LiveFault, folder: Path) -> Outcome:
    """The fault under torchrun."""
    return _by_other(
        "torchrun",
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        fault,
        folder,
    )


def by_deepspeed(fault: LiveFault, folder: Path) -> Outcome:
    """The fault under `deepspeed`."""
    command = ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--no_local_rank"]
    return _by_other("deepspeed", command, fault, folder)


LAUNCHERS: dict[str, Callable[[LiveFault, Path], Outcome]] = {
    "dsrun launch": by_dsrun,
    "torchrun": by_torchrun,
    "deepspeed": by_deepspeed,
}


def outcome_of(fault: LiveFault, launcher: str, folder: Path) -> Outcome:
    """What comes of a fault under a launcher, in an empty folder."""
    (folder / "train.py").write_text(fault.script())
    return LAUNCHERS[launcher](fault, folder)


def page(outcomes: Sequence[Outcome]) -> str:
    """The page of docs/reference."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed"))
    right = {
        "the cause": sum(outcome.cause_is_right for outcome in outcomes),
        "the first rank, or that it is open": sum(outcome.rank_is_right for outcome in outcomes),
        "the exit code": sum(outcome.code_is_right for outcome in outcomes),
    }
    named = sum(outcome.rank_is_named for outcome in outcomes)
    lines = [
        "# Faults in live jobs",
        "",
        f"Made by `{COMMAND}` on {date.today().isoformat()}: {packages}, {os.cpu_count()} CPU cores.",
        "",
        "Each job of two ranks really ran and really failed in its third step: in rank 1, but for `shapes`, in which",
        "the ranks' collectives differ and neither is to blame. Under `dsrun launch` dsrun's own words and its exit",
        "code count, under the others what `dsrun diagnose` reads in the log.",
        "",
        "| fault | " + " | ".join(f"`{name}`" for name in LAUNCHERS) + " |",
        "| --- |" + " --- |" * len(LAUNCHERS),
    ]
    for fault in FAULTS:
        cells = []
        for outcome in (outcome for outcome in outcomes if outcome.fault is fault):
            rank = outcome.diagnosis.get("rank")
            code = f", exit code {outcome.code}" if outcome.launcher == "dsrun launch" else ""
            wrong = f" **{'; '.join(outcome.problems)}**" if outcome.problems else ""
            place = "open" if rank is None else f"rank {rank}"
            stack = ", its stack" if outcome.diagnosis.get("stack") else ""
            cells.append(f"{outcome.diagnosis.get('cause')}, {place}{stack}{code}{wrong}")
        lines.append(f"| {fault.name} | " + " | ".join(cells) + " |")
    counts = "; ".join(f"{name} {count}" for name, count in right.items())
    lines += ["", *UNTOLD]
    lines += ["", f"Of {len(outcomes)} right: {counts}. A rank is named in {named}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is asked for, and print or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--fault", nargs="+", choices=names, default=names)
    parser.add_argument("--launcher", nargs="+", choices=list(LAUNCHERS), default=list(LAUNCHERS))
    parser.add_argument("--keep", type=Path, help="a folder that keeps the logs")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args()
    outcomes = []
    for fault in FAULTS:
        for launcher in arguments.launcher if fault.name in arguments.fault else ():
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                if arguments.keep:
                    folder = arguments.keep / f"{fault.name}-{launcher.split()[0]}"
                    folder.mkdir(parents=True)
                outcome = outcome_of(fault, launcher, folder)
            outcomes.append(outcome)
            diagnosis = outcome.diagnosis
            words = (
                f"{diagnosis['cause']}, rank {diagnosis['rank']}: {'; '.join(outcome.problems) or 'right'}"
            )
            print(f"{fault.name:10} {launcher:13} code {outcome.code:4}  {words}", flush=True)
            if arguments.keep:
                (folder / "text").write_text(outcome.text)
                (folder / "diagnosis.json").write_text(json.dumps(diagnosis, indent=1))
    if arguments.write:
        if len(outcomes) < len(FAULTS) * len(LAUNCHERS):
            parser.error("--write needs every fault under every launcher")
        PAGE.write_text(page(outcomes), encoding="utf-8")
    sys.exit(any(outcome.problems for outcome in outcomes))


if __name__ == "__main__":
    main()
