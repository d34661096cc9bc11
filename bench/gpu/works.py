"""Part 1: does everything run on this GPU, with the losses of a CPU?

    python bench/gpu/works.py [--output FOLDER] [--budget 520] [--keep FOLDER] [--only NAME ...] [--tiny]

llama-tiny takes a few steps on the CPU in fp32, and then on the GPU: under every preset, killed and resumed, exported
and read back, in fp16; then with each attention, without what is on by default, with what is off, without nvcc. A line
for each case: the largest difference of a step's loss from the CPU's, and how large it may be (fp32 1e-4, else 1e-2).
DeepSpeed's operators are compiled once, for all cases; --keep names a folder in which the next call finds them.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from common import RUN_S, Case, Clock, arguments, begin, carry_out, dsrun, ended, has, planned, wanted

from dsrun.job.layout import whole_checkpoints
from dsrun.planner import gpus as kinds

MODEL = "llama-tiny"
STEPS, TINY_STEPS = 12, 3
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}
FP8_TOLERANCE = 5e-2
PRESETS = ("ddp", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload", "fsdp")
ATTENTION = ("sdpa", "varlen", "eager", "flash")
WAYS = {
    "zero3-no-liger": ("--preset", "zero3", "--no-liger"),
    "zero3-no-packing": ("--preset", "zero3", "--no-packing"),
    "zero3-recomputed": ("--preset", "zero3", "--activation-checkpointing", "full"),
    "zero2-offloaded-activations": ("--preset", "zero2", "--activation-checkpointing", "offload"),
    "zero2-compile": ("--preset", "zero2", "--compile"),
    "fsdp-compile": ("--preset", "fsdp", "--compile"),
    "zero2-async-save": ("--preset", "zero2", "--async-save"),
    "fsdp-async-save": ("--preset", "fsdp", "--async-save"),
    "fsdp-fp8-rowwise": ("--preset", "fsdp", "--fp8", "rowwise"),
    "fsdp-fp8-tensorwise": ("--preset", "fsdp", "--fp8", "tensorwise"),
    "zero2-fused-torch-adam": (
        "--preset", "zero2", "--set", "optimizer.params.torch_adam=true", "--set", "optimizer.params.fused=true",
    ),
}  # fmt: skip
"""Other ways to compute the same numbers."""
BY_TOKENS = ("--preset", "zero2", "--tokens-per-batch", "4000")
"""Cases whose steps hold other examples: that they train is all that is asked."""
GPUS_ALONE = (
    "attention-flash",
    "zero2-offloaded-activations",
    "fused-adam",
    "zero2-no-nvcc",
    "fp16",
    "zero3-no-liger",
)
"""Cases that say nothing on a CPU."""
TRUSTED = ("zero2", "zero3", "fsdp")
"""Presets that are killed and resumed, and whose export is read: one of each way to keep weights."""
FLASH_MODULES = ("flash_attn", "flash_attn_interface", "flash_attn.cute")
COMPILE_S, COMPILED_RUN_S = 90.0, 60.0
COMPILES = {"fused-adam": "FusedAdamBuilder", "cpu-adam": "CPUAdamBuilder"}
BUILD = (
    "import sys; from deepspeed.accelerator import get_accelerator as a; "
    "a().create_op_builder(sys.argv[1]).load(verbose=True)"
)


@dataclass(frozen=True)
class Bench:
    """Settings of all cases. reference: the CPU's losses, by step; environ: what every run on the GPU gets;
    card: dsrun's name of it, None where it has none."""

    steps: int
    reference: Mapping[int, float]
    environ: Mapping[str, str] = field(default_factory=dict)
    card: str | None = None

    def words(self, precision: str, *more: str) -> list[str]:
        """The command of a case."""
        return [
            "finetune", MODEL, "--gpus", "1", "--max-steps", str(self.steps), "--seed", "1", "--precision", precision,
            "--eval-steps", "1000", "--generate-rows", "0", "--no-score-before", "--save-steps", "2", *more,
        ]  # fmt: skip

    def compared(
        self,
        precision: str,
        found: Mapping[str, Any],
        *,
        same_steps: bool = True,
        tolerance: float | None = None,
    ) -> dict[str, Any]:
        """A run beside the reference. same_steps: they hold the same examples; else its losses are finite. tolerance:
        the precision's unless it is given."""
        allowed = tolerance or TOLERANCE[precision]
        if found["failed"]:
            return {"failed": found["failed"]}
        losses = {line["step"]: line["loss"] for line in found["metrics"] if "loss" in line}
        if not same_steps:
            trained = len(losses) == self.steps and all(map(math.isfinite, losses.values()))
            return {"failed": "" if trained else "it doesn't train", "losses": losses}
        if losses.keys() != self.reference.keys():
            return {"failed": f"steps {sorted(losses)} and not {sorted(self.reference)}"}
        apart = max(abs(losses[step] - self.reference[step]) for step in losses)
        failed = "" if apart <= allowed else "other losses"
        return {
            "failed": failed,
            "difference": apart,
            "tolerance": allowed,
            "notes": found["notes"][:6],
        }

    def case(
        self,
        name: str,
        *more: str,
        precision: str,
        environ: Mapping[str, str] | None = None,
        same_steps: bool = True,
        lacks: str = "",
    ) -> Case:
        """A run that is compared."""

        def run(folder: Path, seconds: float) -> dict[str, Any]:
            found = dsrun(self.words(precision, *more), folder, seconds, {**self.environ, **(environ or {})})
            rounded = FP8_TOLERANCE if "--fp8" in more else None
            compared = self.compared(precision, found, same_steps=same_steps, tolerance=rounded)
            if name not in PRESETS:
                return compared
            words = [MODEL, "--preset", name, "--precision", precision, "--gpus", "1"]
            figures = {key: found[key] for key in ("gpu_allocated_bytes", "step_seconds")}
            plan = planned(words, self.card, folder, seconds)
            return {"model": MODEL, "preset": name, "set_up": name, **compared, **figures, **plan}

        expected = COMPILED_RUN_S if "--compile" in more else RUN_S
        return Case(name, run, cuda=name in GPUS_ALONE, expected=expected, lacks=lacks)


def cases(bench: Bench, *, tiny: bool) -> Iterator[Case]:
    """The most telling first."""
    half = "fp32" if tiny else "bf16"
    for name, builder in COMPILES.items():
        yield Case(f"compiles-{name}", compiling(builder, bench), cuda=True, expected=COMPILE_S)
    yield bench.case("zero2-fp32", "--preset", "zero2", precision="fp32")
    for preset in PRESETS:
        yield bench.case(preset, "--preset", preset, precision=half)
    for preset in TRUSTED:
        yield Case(f"killed-and-resumed-{preset}", partial(resumed, bench, half, preset), expected=2 * RUN_S)
        yield Case(f"export-loads-{preset}", partial(loaded, bench, half, preset), expected=1.5 * RUN_S)
    beside = partial(resumed, bench, half, "zero2", more=("--async-save",))
    yield Case("killed-and-resumed-async-save", beside, expected=2 * RUN_S)
    yield bench.case("fp16", "--preset", "zero2", precision="fp16")
    for name in ATTENTION:
        words = ("--preset", "zero2", "--attention", name)
        lacks = "flash-attn" if name == "flash" and not has_flash() else ""
        yield bench.case(f"attention-{name}", *words, precision=half, lacks=lacks)
    for name, words in WAYS.items():
        # fp8 stands beside bf16; --tiny trains in fp32, and the reference does.
        precision, lacks = (
            (half, "") if "--fp8" not in words else ("bf16", "" if has("torchao") else "torchao")
        )
        yield bench.case(name, *words, precision=precision, lacks=lacks)
    yield bench.case("tokens-per-batch", *BY_TOKENS, precision=half, same_steps=False)
    yield bench.case("zero2-no-nvcc", "--preset", "zero2", precision=half, environ=without("nvcc"))


def has_flash() -> bool:
    """Whether one of flash-attn's generations is installed."""

    return any(map(has, FLASH_MODULES))


def compiling(builder: str, bench: Bench) -> Any:
    """Time that an operator of DeepSpeed's takes to be compiled and loaded. The runs after it find it compiled."""

    def run(folder: Path, seconds: float) -> dict[str, Any]:
        began = time.monotonic()
        environ = {**os.environ, **bench.environ}
        failed, _ = ended([sys.executable, "-c", BUILD, builder], environ, folder, seconds)
        return {"failed": failed, "seconds": time.monotonic() - began}

    return run


def without(program: str) -> dict[str, str]:
    """An environment that doesn't find a program."""
    folders = [one for one in os.environ["PATH"].split(os.pathsep) if not (Path(one) / program).exists()]
    return {"PATH": os.pathsep.join(folders), "CUDA_HOME": "/nowhere"}


def resumed(
    bench: Bench, precision: str, preset: str, folder: Path, seconds: float, *, more: Sequence[str] = ()
) -> dict[str, Any]:
    """Kill -9 of the rank once a checkpoint is there, and on from that."""
    run, until = folder / "run", time.monotonic() + seconds
    argv = [
        sys.executable,
        "-m",
        "dsrun",
        *bench.words(precision, "--preset", preset, *more),
        "--output-dir",
        str(run),
    ]
    with (folder / "first").open("w") as out:
        environ = {**os.environ, **bench.environ}
        process = subprocess.Popen(argv, stdout=out, stderr=out, env=environ, start_new_session=True)
        while process.poll() is None and not whole_checkpoints(run) and time.monotonic() < until:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    time.sleep(3)  # its agent sees that nobody is there any more
    again = [sys.executable, "-m", "dsrun", "resume", str(run)]
    failed, _ = ended(again, environ, folder, until - time.monotonic())
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines() if not failed else []
    found = {"failed": failed, "metrics": [json.loads(line) for line in lines], "notes": []}
    return {"model": MODEL, "preset": preset, "resumed": True, **bench.compared(precision, found)}


def loaded(bench: Bench, precision: str, preset: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Whether transformers alone reads what was exported, and computes finite numbers."""
    about = {"model": MODEL, "preset": preset, "exported": True}
    found = dsrun(bench.words(precision, "--preset", preset), folder, seconds, bench.environ)
    if found["failed"]:
        return {**about, "failed": found["failed"]}
    code = (
        "import sys, torch, transformers as t; m = t.AutoModelForCausalLM.from_pretrained(sys.argv[1]); "
        "assert m(torch.arange(3, 9)[None]).logits.isfinite().all()"
    )
    failed, _ = ended(
        [sys.executable, "-c", code, str(folder / "run/model")], dict(os.environ), folder, seconds
    )
    return {**about, "failed": failed}


def reference(steps: int, folder: Path, seconds: float) -> dict[int, float]:
    """The losses of a CPU in fp32, by step. Ends the bench where there are none."""
    folder.mkdir()
    words = Bench(steps, {}).words("fp32", "--preset", "zero2")
    found = dsrun(words, folder, seconds, {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""})
    shutil.rmtree(folder)
    if found["failed"]:
        raise SystemExit(f"no reference: {found['failed']}")
    return {line["step"]: line["loss"] for line in found["metrics"] if "loss" in line}


def main() -> None:
    """Run, and write each result as it comes."""
    given = arguments(__doc__)
    results, clock = begin("works", given), Clock(given.budget)
    steps = TINY_STEPS if given.tiny else STEPS
    with tempfile.TemporaryDirectory(prefix="dsrun-works-") as name:
        # One folder of compiled operators for all cases; the reference has dsrun's own, for a CPU.
        operators = (given.keep or Path(name)).resolve() / "operators"
        environ = {} if given.tiny else {"TORCH_EXTENSIONS_DIR": str(operators)}
        kind = None if given.tiny else kinds.recognise(results.where.split(",")[0])
        losses = reference(steps, Path(name) / "reference", clock.left)
        bench = Bench(steps, losses, environ, kind.name if kind else None)
        results.add("cpu-reference", {"failed": "", "losses": dict(bench.reference)})
        chosen = wanted(cases(bench, tiny=given.tiny), given.only)
        carry_out(chosen, results, clock, Path(name))


if __name__ == "__main__":
    main()
