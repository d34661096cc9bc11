"""Helpers for tests of whole runs: looking at a run's folder and at its processes, and waiting."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import hypothesis
import psutil
import pytest

from dsrun import catalog
from dsrun.host.toolkit import libaio_header
from dsrun.job.layout import whole_checkpoints
from dsrun.jobs.assembly.finetune.data import dataset_folder

T = TypeVar("T")
HEAVY = {
    "torch", "deepspeed", "transformers", "accelerate", "datasets", "tokenizers", "numpy", "rich", "jinja2",
}  # fmt: skip
"""Modules that commands which only look at things never import."""
STEPS, SAVE_STEPS = 10, 2
"""Steps of the reference run and of runs compared with it; the learning rate depends on the number of steps."""
SHORT = (
    "--precision", "fp32", "--micro-batch", "4", "--grad-accum", "1", "--generate-rows", "0", "--no-score-before",
    "--max-source-length", "40", "--max-target-length", "16", "--allow-truncation", "--warmup-steps", "0",
)  # fmt: skip
COMMON = (*SHORT, "--eval-steps", "1000")
REFERENCE = (
    *COMMON, "--preset", "zero2", "--max-steps", str(STEPS), "--save-steps", str(SAVE_STEPS), "--keep", "9",
)  # fmt: skip
TOLERANCE = 1e-5
"""Largest distance between the fp32 losses of two runs on the same rows."""


def each(cases: Iterable[T], check: Callable[[T], None], name: Callable[[T], str] = str) -> None:
    """Check every case and fail with all that are wrong: for thousands of small ones, for which a test each is dear."""
    wrong, count = [], 0
    for count, case in enumerate(cases, 1):  # noqa: B007
        try:
            check(case)
        except Exception as error:
            wrong.append(f"{name(case)}: {type(error).__name__}: {error}")
    assert count, "there are no cases"
    if wrong:
        pytest.fail("\n\n".join([f"{len(wrong)} of {count} cases:", *wrong]), pytrace=False)


def examples(count: int) -> int:
    """Number of examples of a property test: all in the full lane, a share in the others (tests/conftest.py)."""
    return max(5, count * hypothesis.settings.default.max_examples // 100)


def words_of(model: str, run_dir: Path) -> list[str]:
    """The reference run's words, without its data. Options after them count more."""
    return ["finetune", model, "--output-dir", str(run_dir), "--gpus", "2", *REFERENCE]


def needs_fp16() -> None:
    """Skip a test that trains in fp16 where this processor can't; how losses are scaled is tested without it, too.

    DeepSpeed asks the same (accelerator/cpu_accelerator.py).
    """
    torch = pytest.importorskip("torch")
    if not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        pytest.skip("DeepSpeed has no fp16 on this processor (torch.ops.mkldnn._is_mkldnn_fp16_supported)")


def needs_libaio() -> None:
    """Skip a test of a job that offloads to NVMe where dsrun would refuse it: DeepSpeed couldn't compile async_io."""
    if not libaio_header(sys.prefix):
        pytest.skip("libaio's header is not installed here: no async_io")


def write_tokenizer(folder: Path) -> None:
    """A tokenizer.json that knows no word."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """The folder, made, and no other worker of these tests in the same block."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class Done:
    """A dsrun that has ended, and its run's folder."""

    code: int
    out: str
    err: str
    run_dir: Path

    @property
    def metrics(self) -> list[dict]:
        return lines_of(self.run_dir / "metrics.jsonl")

    @property
    def losses(self) -> dict[int, float]:
        steps = [line for line in self.metrics if "loss" in line]
        assert [line["step"] for line in steps] == list(range(1, len(steps) + 1)), "each step once, in order"
        return {line["step"]: line["loss"] for line in steps}

    @property
    def last_eval(self) -> float:
        return [line["eval_loss"] for line in self.metrics if "eval_loss" in line][-1]

    @property
    def state(self) -> str:
        return json.loads(self.read("run.json"))["state"]

    @property
    def own_traceback(self) -> bool:
        """Whether dsrun itself shows one; what it quotes from a rank's log is indented."""
        return re.search("^Traceback", self.err, re.MULTILINE) is not None

    def read(self, name: str) -> str:
        return (self.run_dir / name).read_text(encoding="utf-8")


def lines_of(path: Path) -> list[dict]:
    """Lines that a file holds so far; somebody may just be writing its last line."""
    text = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]


def little_data(folder: Path) -> tuple[str, ...]:
    """The options that name a little data, which is put into the folder. What is there is left: a job may read it."""
    options: list[str] = []
    for option, name, count in (("--train-file", "train.jsonl", 72), ("--eval-file", "dev.jsonl", 12)):
        lines = (dataset_folder("advertise") / name).read_text(encoding="utf-8").splitlines(keepends=True)
        if not (folder / name).exists():
            (folder / name).write_text("".join(lines[:count]), encoding="utf-8")
        options += [option, str(folder / name)]
    return tuple(options)


def finish(process: subprocess.Popen[str], run_dir: Path, timeout: float = 400) -> Done:
    out, err = process.communicate(timeout=timeout)
    return Done(process.returncode, out, err, run_dir)


def until(condition: Callable[[], T], what: str, timeout: float = 300, every: float = 0.01) -> T:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(every)
    raise AssertionError(f"{what}: not after {timeout} s")


IN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def in_terminal(command: list[str], columns: int = 80, **given) -> tuple[subprocess.Popen, int]:
    """A command in a terminal of its own, and the terminal's other end: closing it closes the terminal."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, *command],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, **given,
    )  # fmt: skip
    os.close(theirs)
    return process, ours


def step_of(run_dir: Path) -> int:
    """The last step that was written."""
    lines = lines_of(run_dir / "metrics.jsonl")
    return max((line["step"] for line in lines if "loss" in line), default=0)


def reaches(process: subprocess.Popen[str], run_dir: Path, step: int) -> None:
    """Wait until the run has done that step in this process: the lines of an attempt before a resume don't count."""
    # The system counts a process's start in hundredths from its boot, which may lie a little beside the clock.
    since = psutil.Process(process.pid).create_time() - 1

    def there() -> bool:
        assert process.poll() is None, process.communicate()
        plans = plans_of(run_dir)
        # A resumed run drops its lines after the checkpoint before it writes its plan.
        return bool(plans) and plans[-1]["time"] >= since and step_of(run_dir) >= step

    until(there, f"step {step}")


@contextlib.contextmanager
def own_disk_at(folder: Path, size: int) -> Iterator[Path | None]:
    """A disk of its own, of so many bytes; None where only root may mount one."""
    argv = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(argv, check=False, capture_output=True).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextlib.contextmanager
def full_disk(disk: Path) -> Iterator[None]:
    """Fill the disk: nothing more goes onto it."""
    ballast = disk / "ballast"
    # Unbuffered: what a buffer still held would be written once more as the file is closed, which fails, too.
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    yield
    ballast.unlink()


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Every living process whose command line names something in the run folder, except dsrun itself."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        named = any(word.startswith(f"{run_dir}{os.sep}") for word in words)
        if named and process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
            found.append(process)
    return found


def ranks_of(run_dir: Path) -> dict[int, int]:
    """The process id of each rank."""
    states = [json.loads(path.read_text()) for path in (run_dir / "state").glob("rank-*.json")]
    return {state["rank"]: state["pid"] for state in states}


def held_at(process: subprocess.Popen[str], run_dir: Path, step: int) -> dict[int, int]:
    """The ranks' process ids once that step is done. Rank 1 is stopped, so that nothing goes on until `let_go`."""
    reaches(process, run_dir, step)
    ranks = ranks_of(run_dir)
    os.kill(ranks[1], signal.SIGSTOP)
    return ranks


def let_go(ranks: dict[int, int]) -> None:
    for pid in ranks.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def half_written(run_dir: Path, ranks: dict[int, int], step: int) -> Path | None:
    """A checkpoint, of that step or later, that the ranks were just writing; they are stopped then."""
    for path in (run_dir / "checkpoints").glob("step-*"):
        if not (path / "complete").exists() and int(path.name.removeprefix("step-")) >= step:
            for pid in ranks.values():
                os.kill(pid, signal.SIGSTOP)
            if not (path / "complete").exists():
                return path
            let_go(ranks)
    return None


def cut_off(source: Path, step: int, target: Path) -> None:
    """The run as it would lie there, had it died after a step's checkpoint."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("model"))
    (target / "run.json").write_text('{"state": "failed"}')
    for folder in whole_checkpoints(target):
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)


def plans_of(run_dir: Path) -> list[dict]:
    """The line that each attempt of a run wrote when it was about to train."""
    return [line for line in lines_of(run_dir / "events.jsonl") if line["event"] == "plan"]


def starts_of(run_dir: Path) -> list[int]:
    """The step at which each attempt of a run began."""
    return [line["start_step"] for line in plans_of(run_dir)]


def ports_of(run_dir: Path) -> set[str]:
    """Ports where the ranks met, in every attempt; DeepSpeed's launcher prints them."""
    return set(re.findall(r"--master_port=(\d+)", (run_dir / "logs" / "launcher.log").read_text("utf-8")))


def shared_memory_of(run_dir: Path) -> list[Path]:
    ports, found = ports_of(run_dir), Path("/dev/shm").glob("deepspeed_allreduce*")
    return [path for path in found if any(f"_{port}_" in path.name for port in ports)]


def check_nothing_is_left(run_dir: Path) -> None:
    until(lambda: not processes_of(run_dir), f"the processes {processes_of(run_dir)} are gone")
    assert not shared_memory_of(run_dir)


def same(one: dict[int, float], other: dict[int, float], tolerance: float = TOLERANCE) -> None:
    assert list(one) == list(other)
    for step, loss in one.items():
        assert loss == pytest.approx(other[step], abs=tolerance), f"step {step}"


def answer_alike(one: Path, other: Path) -> None:
    """Hold two runs' models together: each is whole, loads in plain transformers, and gives the other's logits."""
    import torch
    import transformers

    asked = torch.arange(3, 19)[None]
    logits = []
    for run_dir in (one, other):
        model = transformers.AutoModelForCausalLM.from_pretrained(run_dir / "model", dtype="auto")
        logits.append(model.eval()(asked).logits)
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=0)


def check_form(name: str, value: dict) -> None:
    """Hold what a command printed with --json against its schema, and no key besides."""
    import jsonschema

    from tools.json_schemas import schema_of

    judge = jsonschema.Draft202012Validator(schema_of(name, strict=True))
    wrong = [f"{error.json_path}: {error.message[:300]}" for error in judge.iter_errors(value)]
    assert not wrong, f"tools/json_forms.py says otherwise of {name}: {wrong}"


@contextlib.contextmanager
def waiting_processes() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`start(code, *arguments, says=line)`: a Python process that prints the line and then waits for its stdin.

    Whatever was started is ended, and its pipes are closed, at the end.
    """
    started: list[subprocess.Popen[str]] = []

    def start(
        code: str, *arguments: str, says: str, cwd: Path = catalog.PACKAGE.parent
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], cwd=cwd, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        assert process.stdout
        assert process.stdout.readline() == f"{says}\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe:
                pipe.close()
