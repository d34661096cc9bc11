"""Time that `dsrun validate` takes, beside DeepSpeed's own reading of the same file, and what hostile files cost.

    python bench/validate.py --output docs/reference/bench-validate.md --results bench/results/validate.json

In one process: judging a file, against DeepSpeedConfig(file). From the shell: `python -m dsrun validate FILE`,
against a Python that imports DeepSpeedConfig and reads the file. Every round runs all of them once, so that a
busy minute hits all; what is reported is the fastest round and the median of the rounds' own ratios. Then 500
files in one command, beside check-jsonschema with the same schema where that is installed (`pip install
check-jsonschema`), and hostile files, each in a process of its own: exit code, processor
time and memory. --fuzz 10000 runs that many random texts too (tests/config/test_hostile.py).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from io import StringIO
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
EXAMPLES = CHECKOUT / "tests" / "examples" / "valid"
MIXED = sorted(EXAMPLES.parent.glob("*/*.json"))
"""Right and wrong ones, of which the many files are copies."""
FILES = ("stage-2-cpu-offload", "stage-3-nvme", "minimal")
MANY = 500
ONE_S, MANY_S, HOSTILE_S, HOSTILE_MB = 0.2, 1.13, 2.0, 500
"""Limits: wall clock of one file; processor time of many, and of a hostile one."""
OURS, THEIRS = f"dsrun validate, a folder of {MANY}", f"check-jsonschema, {MANY} files"
READING = (
    "import sys; from deepspeed.runtime.config import DeepSpeedConfig; DeepSpeedConfig(sys.argv[1])",
    "import sys; from deepspeed.runtime.config import DeepSpeedConfig",
)
COMPILED = str(Path(tempfile.gettempdir()) / "dsrun-bench-compiled")
# Starts a command and tells what it took; small itself, as a child's memory begins with its parent's.
LAUNCH = (
    "import os, subprocess, sys, time; began = time.perf_counter(); "
    "process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, "
    "stderr=subprocess.DEVNULL); _, status, usage = os.wait4(process.pid, 0); "
    "print(os.waitstatus_to_exitcode(status), time.perf_counter() - began, usage.ru_utime + usage.ru_stime, "
    "usage.ru_maxrss // 1024)"
)


@dataclass
class Timing:
    """The rounds of one thing: seconds of wall clock, and of processor time where it is a process."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    memory_mb: int = 0
    code: int = 0

    def command(self, argv: Iterable[str], folder: Path) -> None:
        """Run a command once."""
        environ = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(CHECKOUT)}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)  # As where it is installed: the first round compiles.
        environ["PYTHONPYCACHEPREFIX"] = COMPILED
        launch = [sys.executable, "-I", "-S", "-c", LAUNCH, *argv]
        said = subprocess.run(
            launch, cwd=folder, env=environ, capture_output=True, text=True, check=True
        ).stdout
        code, wall, cpu, memory = said.split()
        self.code = int(code)
        self.wall.append(float(wall))
        self.cpu.append(float(cpu))
        self.memory_mb = max(self.memory_mb, int(memory))

    def call(self, function: Callable[[], object], times: int) -> None:
        """Call a function a few times; what counts is one call."""
        began = time.perf_counter()
        for _ in range(times):
            function()
        self.wall.append((time.perf_counter() - began) / times)


def newest_schema() -> dict[str, object]:
    """The schema that dsrun judges by."""
    from dsrun.config.schemas import schema

    return schema.load().root


def ratio(slow: Timing, fast: Timing) -> float:
    """Times that one takes longer: the median over the rounds."""
    return statistics.median(one / other for one, other in zip(slow.wall, fast.wall, strict=True))


def in_process(rounds: int) -> dict[str, tuple[Timing, Timing]]:
    """file -> (dsrun, DeepSpeed), both imported and warm."""
    from deepspeed.runtime.config import DeepSpeedConfig

    from dsrun.config.rules import Setting
    from dsrun.config.validation.validate import validate

    found = {name: (Timing(), Timing()) for name in FILES}
    for _ in range(rounds + 1):
        for name, (ours, theirs) in found.items():
            path = EXAMPLES / f"{name}.json"
            data = path.read_bytes()
            ours.call(lambda data=data, name=name: validate(data, name, Setting()), 50)
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                theirs.call(lambda path=path: DeepSpeedConfig(str(path)), 50)
    for timing in (timing for pair in found.values() for timing in pair):
        del timing.wall[0]  # which fills caches
    return found


def from_the_shell(rounds: int, folder: Path) -> dict[str, Timing]:
    """The whole commands."""
    (configs := folder / "configs").mkdir()
    for index in range(MANY):
        (configs / f"ds_config_{index}.json").write_bytes(MIXED[index % len(MIXED)].read_bytes())
    many = [f"configs/{path.name}" for path in sorted(configs.iterdir())]
    one, schema = "one.json", "schema.json"
    (folder / one).write_bytes((EXAMPLES / f"{FILES[0]}.json").read_bytes())
    (folder / schema).write_text(json.dumps(newest_schema()), encoding="utf-8")
    dsrun = [sys.executable, "-m", "dsrun", "validate"]
    commands = {
        "dsrun validate FILE": [*dsrun, one],
        "DeepSpeedConfig(FILE)": [sys.executable, "-c", READING[0], one],
        "import of DeepSpeedConfig": [sys.executable, "-c", READING[1]],
        f"dsrun validate, {MANY} files": [*dsrun, *many],
        OURS: [*dsrun, "configs"],
        "dsrun validate --fix, nothing to fix": [*dsrun, "--fix", one],
    }
    if peer := shutil.which("check-jsonschema", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"):
        commands[THEIRS] = [peer, "--schemafile", schema, *many]
    found = {name: Timing() for name in commands}
    for done in range(rounds + 1):
        for name, argv in commands.items():
            found[name].command(argv, folder)
        if done == 0:
            for timing in found.values():
                timing.wall.clear()
                timing.cpu.clear()
    return found


def hostile_files() -> dict[str, bytes]:
    """Hostile files."""
    keys = {f"key_{index}": index for index in range(49_000)}
    start = {"train_micro_batch_size_per_gpu": 1}

    def dumped(**given: object) -> bytes:
        return json.dumps({**start, **given}).encode()

    return {
        "100,000 levels of lists": b"[" * 100_000,
        "100,000 levels of sections": b'{"a": ' * 100_000 + b"1" + b"}" * 100_000,
        "50 MB": b'{"a": "' + b"x" * 50_000_000 + b'"}',
        "a key of 4 MB": dumped(**{"x" * 4_000_000: 1}),
        "a key of 4 MB in zero_optimization": dumped(zero_optimization={"stage" * 800_000: 1}),
        "a value of 4 MB": dumped(zero_optimization={"stage": "9" * 4_000_000}),
        "a million comments": b"//x\n" * 1_000_000 + b"{}",
        "700,000 escapes in a key": b'{"' + b"\\ud800" * 690_000 + b'": 1}',
        "4 million line ends": b"\n" * 4_000_000 + b'{"a": 1}',
        "49,000 unknown keys": dumped(**keys),
        "49,000 unknown keys in zero_optimization": dumped(zero_optimization=keys),
        "49,000 unknown parameters of the optimizer": dumped(optimizer={"type": "Adam", "params": keys}),
        '49,000 times "auto"': dumped(**dict.fromkeys(keys, "auto")),
        "60,000 keys": dumped(**{f"key_{index}": index for index in range(60_000)}),
        "49,000 times the same key": b"{" + b", ".join([b'"a": 1'] * 49_000) + b"}",
        "24,000 times zero_optimization": b"{"
        + b", ".join([b'"zero_optimization": {"stage": 3}'] * 24_000)
        + b"}",
        "49,000 ignored rules": dumped(_dsrun_ignore=list(keys)),
        "NaN and Infinity": b'{"train_batch_size": NaN, "gradient_clipping": Infinity}',
        "integers of 400 and 5,000 digits": b'{"train_batch_size": '
        + b"9" * 400
        + b', "b": '
        + b"9" * 5000
        + b"}",
        "UTF-16": '{"train_batch_size": 1}'.encode("utf-16"),
        "nothing": b"",
    }


def hostile(folder: Path) -> dict[str, Timing]:
    """Judge each file, and show its fixes; the worse of the two."""
    found = {}
    for name, data in hostile_files().items():
        (folder / "x.json").write_bytes(data)
        found[name] = _worst(folder, "x.json")
    os.mkfifo(folder / "pipe")
    for name in ("/dev/zero", "/dev/urandom", "pipe"):
        found[f"`{name}`" if name[0] == "/" else "a pipe that nobody writes to"] = _worst(folder, name)
    return found


def _worst(folder: Path, name: str) -> Timing:
    timing = Timing()
    for options in ([], ["--diff", "--unsafe-fixes", "--for", "hf"], ["--format", "sarif"]):
        timing.command([sys.executable, "-m", "dsrun", "validate", *options, name], folder)
        if timing.code not in (0, 1):
            raise SystemExit(f"{name} {options}: exit code {timing.code}")
    return timing


def fuzz(count: int) -> str:
    """Random texts, as the test has them."""
    test = CHECKOUT / "tests" / "config" / "test_hostile.py"
    command = [sys.executable, "-m", "pytest", "-q", "-k", "random", str(test)]
    environ = {**os.environ, "DSRUN_FUZZ": str(count)}
    began = time.perf_counter()
    done = subprocess.run(command, cwd=CHECKOUT, env=environ, check=False, stdout=sys.stderr)
    if done.returncode:
        raise SystemExit("random texts: see above")
    return f"{count:,} random and mutated texts: no fault in {time.perf_counter() - began:.0f} s."


def beside(shell: dict[str, Timing]) -> str:
    """Many files, with every rule, beside the schema alone; both are the least processor time of a round."""
    if THEIRS not in shell:
        return ""
    times = min(shell[OURS].cpu) / min(shell[THEIRS].cpu)
    return (
        f"A folder of {MANY} files takes {times:.1f} times the processor time of check-jsonschema "
        f"{version('check-jsonschema')}, which judges keys and types by the same schema."
    )


def page(
    inside: dict[str, tuple[Timing, Timing]],
    shell: dict[str, Timing],
    bad: dict[str, Timing],
    said: str,
    rounds: int,
) -> str:
    """The page for docs/reference."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("deepspeed", "torch"))
    one, theirs = shell["dsrun validate FILE"], shell["DeepSpeedConfig(FILE)"]
    lines = [
        "# dsrun validate, timed",
        "",
        f"Made by `python bench/validate.py` on {date.today()}: {versions}, Python {platform.python_version()}, "
        f"{platform.machine()}, {os.cpu_count()} CPU cores (load {os.getloadavg()[0]:.1f}).",
        "",
        f"{rounds} rounds, each running everything once. A busy machine stretches wall clock: the fastest round and "
        "the processor time show what a command itself takes.",
        "",
        "## From the shell",
        "",
        "| command | fastest, s | median, s | processor time, s | memory, MB |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {name} | {min(timing.wall):.3f} | {statistics.median(timing.wall):.3f} | {min(timing.cpu):.3f} "
            f"| {timing.memory_mb} |"
            for name, timing in shell.items()
        ),
        "",
        f"Reading the file with DeepSpeed takes {ratio(theirs, one):.0f} times as long (median of the rounds' ratios), "
        f"nearly all of it the import. Wanted: one file in {ONE_S} s, {MANY} in {MANY_S} s of processor time. "
        f"{beside(shell)}".rstrip(),
        "",
        "## In one process, with everything imported",
        "",
        "| file | dsrun judges it, ms | DeepSpeedConfig reads it, ms | dsrun / DeepSpeed |",
        "| --- | --- | --- | --- |",
        *(
            f"| {name} | {min(ours.wall) * 1000:.2f} | {min(other.wall) * 1000:.2f} | {ratio(ours, other):.1f} |"
            for name, (ours, other) in inside.items()
        ),
        "",
        "## Hostile files",
        "",
        f"The worst of three commands (as it is; `--diff --unsafe-fixes --for hf`; `--format sarif`). Each ends with "
        f"exit code 0 or 1. The limits are {HOSTILE_S:.0f} s and {HOSTILE_MB} MB. {said}".rstrip(),
        "",
        "| file | longest, s | processor time, s | memory, MB |",
        "| --- | --- | --- | --- |",
        *(
            f"| {name} | {max(timing.wall):.2f} | {max(timing.cpu):.2f} | {timing.memory_mb} |"
            for name, timing in bad.items()
        ),
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Time everything, write the page, and fail if a limit isn't kept."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--fuzz", type=int, default=0, metavar="COUNT")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cpu"
    sys.path.insert(0, str(CHECKOUT))
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as other:
        shell = from_the_shell(arguments.rounds, Path(name))
        bad = hostile(Path(other))
    inside = in_process(arguments.rounds)
    said = fuzz(arguments.fuzz) if arguments.fuzz else ""
    text = page(inside, shell, bad, said, arguments.rounds)
    print(text)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    if arguments.results:
        numbers = {
            "date": str(date.today()),
            "shell": {name: vars(timing) for name, timing in shell.items()},
            "in_process": {name: [ours.wall, theirs.wall] for name, (ours, theirs) in inside.items()},
            "hostile": {name: vars(timing) for name, timing in bad.items()},
        }
        arguments.results.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    slow = [
        name for name, timing in bad.items() if max(timing.cpu) > HOSTILE_S or timing.memory_mb > HOSTILE_MB
    ]
    slow += [
        name
        for name, took, limit in (
            ("dsrun validate FILE", shell["dsrun validate FILE"].wall, ONE_S),
            (OURS, shell[OURS].cpu, MANY_S),
        )
        if min(took) > limit
    ]
    if slow:
        raise SystemExit(f"too slow or too large: {', '.join(slow)}")


if __name__ == "__main__":
    main()
