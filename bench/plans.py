"""Time that plans take: 100,000 in one process, and `dsrun plan` from the shell beside DeepSpeed's and accelerate's.

    python bench/plans.py [--plans 100000] [--rounds 7] [--write]

In one process: judge() over every shipped model x GPU x length x micro batch x checkpointing x preset, with as many
lengths as the number asks for. A plan is not a cheap one: what a GPU and a node hold, the seconds of a step, disks and
the verdict. From the shell: every round runs every command once, so that a busy minute hits all of them; what is
reported is the fastest, the median, and the median of the rounds' own ratios. DeepSpeed's estimator of ZeRO-2 answers
with three sums; of accelerate it is the help only, as its estimate wants the hub.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))
if TYPE_CHECKING:
    from dsrun.planner.plan import MemoryBudget
    from dsrun.planner.setup import Setup
RESULTS = CHECKOUT / "bench" / "results"
GPUS_A_NODE, HOST_GIB, NVME_TB = 8, 512, 4
MICRO_BATCHES = (1, 2, 4, 8)
STEP = 64
"""Tokens: the lengths are its multiples."""
LIMIT_S = 60.0
OURS = "dsrun plan chatglm2-6b --gpu v100-32g --gpus 2"
DEEPSPEED = (
    "from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as needs; "
    "print(needs(6243584000, num_gpus_per_node=2, cpu_offload=True))"
)
THEIRS = {
    "DeepSpeed's estimate_zero2_model_states_mem_needs": [sys.executable, "-c", DEEPSPEED],
    "accelerate estimate-memory --help": [
        sys.executable, "-m", "accelerate.commands.accelerate_cli", "estimate-memory", "--help",
    ],
}  # fmt: skip


@dataclass
class Timing:
    """One command's rounds. wall: seconds from start to end; cpu: processor seconds, user and system."""

    argv: list[str]
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def run(self, folder: Path, environ: dict[str, str]) -> None:
        """Run it once; it must end with 0."""
        with (folder / "said").open("w+") as said:
            began = time.perf_counter()
            process = subprocess.Popen(
                self.argv, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )
            _, status, usage = os.wait4(process.pid, 0)
            self.wall.append(time.perf_counter() - began)
            self.cpu.append(usage.ru_utime + usage.ru_stime)
            process.returncode = os.waitstatus_to_exitcode(status)
            said.seek(0)
            text = said.read()
        if process.returncode != 0:
            print(text, file=sys.stderr)
            raise SystemExit(f"{' '.join(self.argv)} ended with {process.returncode}")


@dataclass(frozen=True)
class Sweep:
    """Cost of judging many plans. verdicts: verdict -> plans."""

    plans: int
    seconds: float
    models: int
    gpus: int
    presets: int
    lengths: int
    verdicts: dict[str, int]

    @property
    def a_second(self) -> float:
        return self.plans / self.seconds


def jobs(wanted: int) -> tuple[list[tuple[str, Setup, MemoryBudget]], dict[str, int]]:
    """At least that many set-ups with their presets and rooms, and how many there are of each kind."""
    from dsrun import catalog
    from dsrun.jobs.assembly.planning import setups
    from dsrun.models import model_files
    from dsrun.options.commands import PlanOptions
    from dsrun.planner import gpus
    from dsrun.planner.gpu_memory import GIB
    from dsrun.planner.plan import MemoryBudget
    from dsrun.planner.shape import from_config
    from dsrun.planner.speed import Hardware

    shapes = []
    for name in model_files.names():
        found = model_files.load_model_file(name)
        shapes.append(from_config(found.architecture, str(found.path), found.parameters))
    rooms = []
    for name in catalog.files("presets/gpus"):
        gpu = gpus.load(name)
        rooms.append(
            MemoryBudget(
                GPUS_A_NODE,
                1,
                gpu.memory_gib * GIB,
                Hardware.from_gpu(gpu, GPUS_A_NODE),
                host_bytes=HOST_GIB * GIB,
                nvme_bytes=NVME_TB * 1e12,
            )
        )
    options = PlanOptions(seq_len=STEP, micro_batch=1, grad_accum=1)
    names = setups.all_presets()
    bases = [(setups.base_setup(shape, room, options, "fp16"), room) for shape in shapes for room in rooms]
    # The largest weight sizes NVMe's buffers, so that a preset's fields are the model's own.
    divided = [setups.preset_fields(names, rooms[0], base)[0] for base, _ in bases[:: len(rooms)]]
    one_length = len(bases) * len(names) * len(MICRO_BATCHES) * 2
    lengths = -(-wanted // one_length)
    made = [
        (preset, replace(base, **fields, seq_len=STEP * length, micro_batch=rows, checkpointing=again), room)
        for length, rows, again in itertools.product(range(1, lengths + 1), MICRO_BATCHES, (0, 1))
        for number, (base, room) in enumerate(bases)
        for preset, fields in divided[number // len(rooms)].items()
    ]
    kinds = {"models": len(shapes), "gpus": len(rooms), "presets": len(names), "lengths": lengths}
    return made[:wanted], kinds


def sweep(wanted: int) -> Sweep:
    """Judge so many, all different, and count the verdicts. Only the judging is timed."""
    from dsrun.planner.plan import judge

    made, kinds = jobs(wanted)
    began = time.perf_counter()
    verdicts = Counter(judge(preset, setup, room).verdict for preset, setup, room in made)
    seconds = time.perf_counter() - began
    return Sweep(len(made), seconds, **kinds, verdicts=dict(verdicts))


def argv_of(text: str) -> list[str]:
    """dsrun's command as it is started here: its console script where there is one."""
    name, *words = text.split()
    script = Path(sys.executable).parent / name
    return [str(script), *words] if script.exists() else [sys.executable, "-m", name, *words]


def commands() -> Iterator[tuple[str, Timing]]:
    """Name -> what is run, ours first."""
    yield OURS, Timing(argv_of(OURS))
    for name, argv in THEIRS.items():
        yield name, Timing(argv)


def from_the_shell(rounds: int) -> dict[str, Timing]:
    """Run all in turn, `rounds` times, after one round that fills the file cache and is not counted."""
    environ = {**os.environ, "DS_ACCELERATOR": "cpu"}
    if importlib.util.find_spec("dsrun") is None or not argv_of("dsrun")[0].endswith("dsrun"):
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CHECKOUT), environ.get("PYTHONPATH")]))
    timings = dict(commands())
    with tempfile.TemporaryDirectory() as name:
        for done in range(rounds + 1):
            for timing in timings.values():
                timing.run(Path(name), environ)
            if done == 0:
                for timing in timings.values():
                    timing.wall.clear()
                    timing.cpu.clear()
            print(f"round {done} of {rounds}", file=sys.stderr)
    return timings


def ratio(theirs: Timing, ours: Timing) -> float:
    """Times that a foreign command takes longer: the median of the rounds' ratios."""
    return statistics.median(slow / fast for slow, fast in zip(theirs.wall, ours.wall, strict=True))


def report(done: Sweep, timings: dict[str, Timing]) -> str:
    """Text that is printed."""
    ours = timings[OURS]
    lines = [
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores (load {os.getloadavg()[0]:.1f}), "
        f"Python {platform.python_version()}",
        f"{done.plans} plans ({done.models} models x {done.gpus} GPUs x {done.presets} presets x {done.lengths} "
        f"lengths x {len(MICRO_BATCHES)} micro batches x 2): {done.seconds:.2f} s, {done.a_second:.0f} a second",
        "  " + ", ".join(f"{name} {count}" for name, count in sorted(done.verdicts.items())),
        "",
        f"{'fastest':>9}{'median':>9}{'cpu':>9}{'ratio':>8}",
    ]
    lines += [
        f"{min(timing.wall):8.3f}s{statistics.median(timing.wall):8.3f}s{statistics.median(timing.cpu):8.3f}s"
        f"{ratio(timing, ours):7.1f}x  {name}"
        for name, timing in timings.items()
    ]
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """Package -> its version, of those that are installed."""
    found = {"python": platform.python_version()}
    for name in ("deepspeed", "accelerate", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def record(done: Sweep, timings: dict[str, Timing]) -> dict[str, object]:
    """Data that are written."""
    return {
        "date": str(date.today()),
        "versions": versions(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "sweep": {**asdict(done), "plans_a_second": done.a_second},
        "shell": {
            name: {
                "wall": timing.wall,
                "cpu": timing.cpu,
                "fastest": min(timing.wall),
                "median": statistics.median(timing.wall),
                "times_ours": ratio(timing, timings[OURS]),
            }
            for name, timing in timings.items()
        },
    }


def main() -> None:
    """Time everything, write what is asked for, and fail if the sweep takes too long."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="write bench/results/plans-DATE.json")
    given = parser.parse_args()
    done = sweep(given.plans)
    timings = from_the_shell(given.rounds)
    print(report(done, timings))
    if given.write:
        RESULTS.mkdir(parents=True, exist_ok=True)
        path = RESULTS / f"plans-{date.today()}.json"
        path.write_text(json.dumps(record(done, timings), indent=1) + "\n", encoding="utf-8")
    if done.seconds > LIMIT_S * done.plans / 100_000:
        raise SystemExit(f"too slow: 100,000 plans in more than {LIMIT_S:.0f} s")


if __name__ == "__main__":
    main()
