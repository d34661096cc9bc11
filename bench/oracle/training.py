"""Training with a config: deepspeed.initialize and two optimizer steps of a small model on the CPU.

Every config gets a process of its own, forked from one that has imported DeepSpeed, with a limit on its time and
memory. Nothing is compiled there: an operator that isn't built yet counts as `unable`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.cluster import extensions
from oracle import reading
from oracle.draw import Case, Config
from oracle.reading import Outcome

TRAINED, FAILED, NOT_FINITE, SLOW, UNABLE = "trained", "failed", "not finite", "slow", "unable"
STEPS, MOST_MICRO_STEPS, MOST_ROWS, WIDTH = 2, 24, 64, 32
PORT = 29710
"""The first of the ports that name the buffers in /dev/shm; nothing listens there."""
MEMORY_BYTES = 8 * 2**30
HERE = (
    "MemoryError",
    "ModuleNotFoundError",
    "NotBuiltError",
    "failed to build/load",
    "fp16 is not supported on your device",
    "can't allocate memory",
    "Cannot allocate memory",
)
"""What an exception of this machine, not of the config, says."""
OPERATORS = {
    "pin_memory": "PinMemoryBuilder",
    "cpu_adagrad": "CPUAdagradBuilder",
    "cpu_lion": "CPULionBuilder",
    **extensions.BUILDERS,
}


class NotBuiltError(Exception):
    """A config that needs an operator which isn't compiled."""


@dataclass
class Job:
    """A running child. pipe: where it says how it went."""

    index: int
    pid: int
    pipe: int
    folder: Path
    port: int
    ends: float


def prepare(cache: Path, *, build: Sequence[str] = ()) -> None:
    """Import DeepSpeed for the CPU and load the operators that are built, and `build` even if they have to be."""
    directory = extensions.folder(os.environ, cache)
    os.environ |= {extensions.VARIABLE: str(directory), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    os.environ |= {
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "LOCAL_SIZE": "1",
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
    }
    import torch

    torch.set_num_threads(1)
    with silenced(os.devnull):
        reading.load()
        importlib.import_module(
            "deepspeed.runtime.zero.muon.muon_optimizer"
        )  # most of what an engine imports
        from deepspeed import ops
        from deepspeed.accelerator import get_accelerator
        from deepspeed.ops.op_builder.builder import OpBuilder

        ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as in the ranks of a fine-tune
        for name, builder in OPERATORS.items():
            if name in build or not extensions.missing([name], directory):
                get_accelerator().create_op_builder(builder).load(verbose=False)
    OpBuilder.jit_load = not_built


def not_built(builder: Any, *_: Any, **__: Any) -> None:
    """In place of OpBuilder.jit_load."""
    raise NotBuiltError(f"{builder.name} isn't compiled")


@contextlib.contextmanager
def silenced(path: str | Path) -> Iterator[None]:
    """Standard output and error, of libraries in C too, into a file."""
    saved = os.dup(1), os.dup(2)
    with Path(path).open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        for number, old in enumerate(saved, 1):
            os.dup2(old, number)
            os.close(old)


def train_all(cases: Sequence[Case], *, jobs: int = 1, limit_s: float = 60) -> Iterator[tuple[int, Outcome]]:
    """(index, outcome) of each case as it ends. `prepare` comes first."""
    waiting = list(enumerate(cases))
    running: list[Job] = []
    with tempfile.TemporaryDirectory(prefix="dsrun-agreement-") as name:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    index, case = waiting.pop(0)
                    port = min(set(range(PORT, PORT + jobs)) - {job.port for job in running})
                    running.append(start(index, case, Path(name) / str(index), port, limit_s))
                for job in ended(running):
                    running.remove(job)
                    yield job.index, finish(job)
        finally:
            for job in running:
                finish(job)


def ended(running: list[Job]) -> list[Job]:
    """Wait until a job has said how it went, or is out of time."""
    wait_s = max(0.0, min(job.ends for job in running) - time.monotonic())
    ready, _, _ = select.select([job.pipe for job in running], [], [], wait_s)
    return [job for job in running if job.pipe in ready or time.monotonic() >= job.ends]


def train(case: Case, *, limit_s: float = 60) -> Outcome:
    """Train one case."""
    return next(train_all([case], limit_s=limit_s))[1]


def start(index: int, case: Case, folder: Path, port: int, limit_s: float) -> Job:
    """Fork a child that trains."""
    (folder / "nvme").mkdir(parents=True)
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        try:
            signal.alarm(int(limit_s) + 10)  # for the case that nobody is left to end it
            child(case, folder, port, writer)
        finally:
            os._exit(1)
    os.close(writer)
    return Job(index, pid, reader, folder, port, time.monotonic() + limit_s)


def finish(job: Job) -> Outcome:
    """A child's outcome, once it has said it, died or run out of time; what it left behind is removed."""
    late = not select.select([job.pipe], [], [], 0)[0]
    said = b"" if late else os.read(job.pipe, 65536)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(job.pid, 0)[1])
    os.close(job.pipe)
    last = (
        (job.folder / "log").read_text(errors="replace")[-200:].strip()
        if (job.folder / "log").exists()
        else ""
    )
    remove_shared_memory(job.port)
    shutil.rmtree(job.folder, ignore_errors=True)
    if late:
        return Outcome(SLOW, "not done when its time was up")
    if not said:
        return Outcome(FAILED, f"the process died with {status}: {' '.join(last.split())}")
    return Outcome(**json.loads(said))


def remove_shared_memory(port: int) -> None:
    """DeepSpeed's CPU collectives leave 69 MB a rank in /dev/shm."""
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{port}_*"):
        path.unlink(missing_ok=True)


def child(case: Case, folder: Path, port: int, writer: int) -> None:
    """The forked process: train and say how it went; it ends without any clean-up."""
    os.setpgid(0, 0)
    os.chdir(folder)
    os.environ["MASTER_PORT"] = str(port)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with silenced(folder / "log"):
        try:
            outcome = trained(housed(case.config, folder), port)
        except BaseException as error:
            outcome = reading.raised(FAILED, error)
            if any(word in outcome.said for word in HERE):
                outcome = Outcome(UNABLE, outcome.said, outcome.where)
    os.write(writer, json.dumps(vars(outcome)).encode())


def housed(config: Config, folder: Path) -> Config:
    """The config with its NVMe paths in a folder of this run."""
    changed = json.loads(json.dumps(config))
    zero = changed.get("zero_optimization")
    for key in ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param"):
        section = zero.get(key) if isinstance(zero, dict) else None
        if isinstance(section, dict) and isinstance(section.get("nvme_path"), str) and section["nvme_path"]:
            section["nvme_path"] = str(folder / "nvme")
    return changed


def trained(config: Config, port: int) -> Outcome:
    """deepspeed.initialize and the steps; raises what DeepSpeed raises."""
    import deepspeed
    import torch

    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)]
    model = torch.nn.Sequential(*layers)
    engine = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        optimizer=None if "optimizer" in config else own_optimizer(config, model),
        config=config,
        distributed_port=port,
    )[0]
    loss = steps(engine)
    if engine.global_steps < 1:
        return Outcome(TRAINED, f"no optimizer step in {MOST_MICRO_STEPS} micro batches")
    finite = torch.isfinite(torch.tensor(loss)).item()
    return Outcome(TRAINED if finite else NOT_FINITE, f"loss {loss}")


def own_optimizer(config: Config, model: Any) -> Any:
    """The optimizer of a training script whose config has none."""
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    zero = config.get("zero_optimization")
    offload = zero.get("offload_optimizer") if isinstance(zero, dict) else None
    away = isinstance(offload, dict) and offload.get("device") in ("cpu", "nvme")
    return (DeepSpeedCPUAdam if away else torch.optim.AdamW)(model.parameters(), lr=1e-3)


def steps(engine: Any) -> float:
    """Micro batches until there were enough optimizer steps; the last loss."""
    import torch

    rows = min(int(engine.train_micro_batch_size_per_gpu()), MOST_ROWS)
    value = 0.0
    for _ in range(MOST_MICRO_STEPS):
        dtype = next(engine.module.parameters()).dtype
        loss = engine(torch.randn(rows, WIDTH, dtype=dtype)).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        value = float(loss)
        if engine.global_steps >= STEPS:
            break
    return value
