"""Time that a short command takes: dsrun's help, presets and plans beside the help of deepspeed and accelerate.

    python bench/cli.py [--rounds 11] [--output docs/reference/bench-cli.md]

Every round runs every command once, so that a busy minute hits all of them; what is reported is the median
over the rounds, and the median of the rounds' own ratios. Then come inputs that are wrong: dsrun must say no
without importing torch. The commands are the console scripts beside this Python where they are installed,
`python -m` otherwise.
"""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
MODULES = {
    "dsrun": "dsrun",
    "deepspeed": "deepspeed.launcher.runner",
    "accelerate": "accelerate.commands.accelerate_cli",
}
OURS = (
    "dsrun --help",
    "dsrun preset zero2-offload --gpus 2",
    "dsrun plan llama-2-7b --gpu v100-32g --gpus 2",
)
THEIRS = ("deepspeed --help", "accelerate estimate-memory --help")
WRONG = (
    ("unknown preset", "dsrun preset zero2-ofload"),
    ("unknown model", "dsrun finetune llama-tinny"),
    ("missing train file", "dsrun finetune llama-tiny --train-file rows.json"),
    ("missing column", "dsrun finetune llama-tiny --train-file rows.jsonl --prompt-column question"),
)
WANTED_RATIO, WANTED_S, WRONG_LIMIT_S = 10.0, 0.15, 0.5


@dataclass
class Timing:
    """One command's rounds. wall: seconds from start to end; cpu: processor seconds, user and system."""

    argv: list[str]
    code: int = 0
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    said: str = ""

    def run(self, folder: Path, environ: dict[str, str]) -> None:
        """Run it once; the exit code must be the expected one. What it says on stderr is kept."""
        with (folder / "stderr").open("w+") as errors:
            began = time.perf_counter()
            process = subprocess.Popen(
                self.argv,
                cwd=folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
            _, status, usage = os.wait4(process.pid, 0)
            self.wall.append(time.perf_counter() - began)
            self.cpu.append(usage.ru_utime + usage.ru_stime)
            process.returncode = os.waitstatus_to_exitcode(status)
            errors.seek(0)
            self.said = errors.read()
        if process.returncode != self.code:
            print(self.said, file=sys.stderr)
            raise SystemExit(f"{' '.join(self.argv)} ended with {process.returncode} instead of {self.code}")

    @property
    def median(self) -> float:
        """Seconds of wall clock."""
        return statistics.median(self.wall)

    def cells(self) -> str:
        """Median and fastest wall clock, median processor time, for a table's row."""
        return f"{self.median:.3f} | {min(self.wall):.3f} | {statistics.median(self.cpu):.3f}"


def argv_of(text: str) -> list[str]:
    """A command as it is started here: its console script where there is one."""
    name, *words = text.split()
    script = Path(sys.executable).parent / name
    return [str(script), *words] if script.exists() else [sys.executable, "-m", MODULES[name], *words]


def measure(timings: dict[str, Timing], rounds: int, folder: Path) -> None:
    """Run all in turn, `rounds` times, after one round that fills the file cache and is not counted."""
    environ = {**os.environ, "DS_ACCELERATOR": "cpu"}
    if importlib.util.find_spec("dsrun") is None:
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CHECKOUT), environ.get("PYTHONPATH")]))
    for done in range(rounds + 1):
        for timing in timings.values():
            timing.run(folder, environ)
        if done == 0:
            for timing in timings.values():
                timing.wall.clear()
                timing.cpu.clear()
        print(f"round {done} of {rounds}", file=sys.stderr)


def ratios(timings: dict[str, Timing]) -> dict[tuple[str, str], float]:
    """Times that each foreign command takes longer: the median of the rounds' ratios."""
    return {
        (theirs, ours): statistics.median(
            slow / fast for slow, fast in zip(timings[theirs].wall, timings[ours].wall, strict=True)
        )
        for theirs in THEIRS
        for ours in OURS
    }


def report(timings: dict[str, Timing], found: dict[tuple[str, str], float], rounds: int) -> str:
    """The page for docs/reference."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("deepspeed", "accelerate", "torch"))
    started = "`python -m dsrun`" if argv_of("dsrun")[1:] else "the console script `dsrun`"
    load = os.getloadavg()[0]
    lines = [
        "# Short commands, timed",
        "",
        f"Made by `python bench/cli.py` on {date.today()}: {versions}, Python {platform.python_version()}, "
        f"{os.cpu_count()} CPU cores (load {load:.1f}), dsrun started as {started}.",
        "",
        f"{rounds} rounds, each running every command once; seconds. A busy machine stretches wall clock: the fastest "
        "round and the processor time show what the command itself takes. `dsrun validate` has "
        "[a page of its own](bench-validate.md).",
        "",
        "| command | median | fastest | processor time |",
        "| --- | --- | --- | --- |",
        *(f"| `{text}` | {timings[text].cells()} |" for text in (*OURS, *THEIRS)),
        "",
        "How many times longer (median over the rounds of the two commands' ratio in the round):",
        "",
        "| | " + " | ".join(f"`{ours}`" for ours in OURS) + " |",
        "| --- |" + " --- |" * len(OURS),
        *(
            f"| `{theirs}` | " + " | ".join(f"{found[theirs, ours]:.0f}x" for ours in OURS) + " |"
            for theirs in THEIRS
        ),
        "",
        f"Wanted: {WANTED_RATIO:.0f}x or more; the smallest is {min(found.values()):.0f}x. The goal for dsrun's is "
        f"{WANTED_S} s: "
        + ", ".join(
            f"`{text}` {'meets' if timings[text].median <= WANTED_S else 'misses'} it" for text in OURS
        )
        + ".",
        "",
        "## Input that is wrong",
        "",
        f"Each is answered with exit code 1 and what to do next; the limit is {WRONG_LIMIT_S} s.",
        "",
        "| what | median | fastest | processor time | the answer |",
        "| --- | --- | --- | --- | --- |",
    ]
    for what, text in WRONG:
        said = " ".join(timings[text].said.split()).replace("|", "\\|")
        lines.append(f"| {what}: `{text}` | {timings[text].cells()} | {said} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Time everything, write the page, and fail if a wish isn't met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    compileall.compile_dir(CHECKOUT / "dsrun", quiet=2)  # as pip leaves an installed package
    timings = {text: Timing(argv_of(text)) for text in (*OURS, *THEIRS)}
    wrong = {text: Timing(argv_of(text), code=1) for _, text in WRONG}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        row = json.dumps({"content": "a", "summary": "b"})
        (folder / "rows.jsonl").write_text(f"{row}\n" * 1000, encoding="utf-8")
        measure(timings | wrong, arguments.rounds, folder)
        for timing in wrong.values():
            timing.said = timing.said.replace(f"{folder}/", "")
    found = ratios(timings)
    text = report(timings | wrong, found, arguments.rounds)
    print(text)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text, encoding="utf-8")
    slow = [command for command, timing in wrong.items() if timing.median > WRONG_LIMIT_S]
    if slow or min(found.values()) < WANTED_RATIO:
        raise SystemExit(f"too slow: {', '.join(slow) or f'less than {WANTED_RATIO:.0f}x'}")


if __name__ == "__main__":
    main()
