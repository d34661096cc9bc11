"""Tokens per second of `dsrun finetune` on this machine's GPUs, the share of their matrix rate that is, and the memory.

    python bench/throughput_gpu.py --output FOLDER [--budget 480] [--models llama-1b] [--gpus 2] [--steps 12]
    python bench/throughput_gpu.py --output FOLDER --tiny

Networks with random weights train on the shipped rows, each with the presets that the planner says fit, and beside
every run a plain one: transformers' Trainer (peer_trainer.py) with the same model folder, rows, batch and config.
Tokens are those of the rows, without padding; the first steps, which warm up, are left out. Memory is the largest of
the ranks' peaks (torch.cuda.max_memory_allocated and max_memory_reserved). No case is started that would not end within
--budget seconds. --tiny does the same on CPUs, with networks in miniature: it shows that the bench works, and no speed.

MFU is what the model's own arithmetic takes, over what the cards do in the same time. The latter is measured: products
of two large square matrices in the precision that is trained in. The former is, for a token,

    6 N + 6 L W S      N: weights that are multiplied with (all but the input embedding, which is looked up),
                       L: layers, W: heads x head size, S: tokens of a row on average

after PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B: 6 N + 12 L H Q T), with half of its second term because
attention is causal. What checkpointing computes again doesn't count.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from peers import ROWS, free_port, remove_shared_memory
from planner_gpu import GIB, machine, took, versions

from dsrun.cluster.devices import Machine, detect
from dsrun.errors import DsrunError
from dsrun.jobs.build import finetune
from dsrun.jobs.build.finetune import FinetuneRequest
from dsrun.models import model_files
from dsrun.options.commands import FinetuneOptions
from dsrun.options.table import Resolved

PRESETS = ("zero2", "zero3")
OFFLOAD = ("zero2-offload", "zero3-offload")
"""Taken where none of PRESETS fits: the step then waits for the CPU."""
MICRO_BATCHES = (64, 32, 16, 8, 4, 2, 1)
LENGTH = 128
"""Tokens of a prompt, and of a response, at most."""
WARM = 2
MATRIX = {"cuda": 8192, "cpu": 1024}
"""Rows of the matrices whose product is timed."""
START_S, SECONDS_A_BILLION = 45.0, 12.0
"""What a run takes to start and to end, by guess, until a like one was seen."""
LLAMA_1B = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
"""TinyLlama's shape: 1.1e9 weights."""
MODELS = ("llama-1b", "llama-7b", "chatglm2-6b")
TINY = ("llama-tiny", "chatglm2-tiny")
FILES = {"llama-7b": "llama-2-7b"}


@dataclass(frozen=True)
class Model:
    """A network on disk. weights: all of them; multiplied: without the input embedding; width: heads x head size."""

    name: str
    folder: Path
    weights: int
    multiplied: int
    layers: int
    width: int

    def flops(self, row_tokens: float) -> float:
        """Floating-point operations of a trained token, in rows of so many (see above)."""
        return 6 * self.multiplied + 6 * self.layers * self.width * row_tokens


@dataclass(frozen=True)
class Case:
    """One set-up that both sides run."""

    model: Model
    preset: str
    precision: str
    gpus: int
    micro_batch: int
    checkpointing: bool
    optimizer: str = "adamw"

    @property
    def name(self) -> str:
        """For folders."""
        return f"{self.model.name}-{self.preset}-{self.optimizer}"

    def given(self, steps: int) -> dict[str, Any]:
        """finetune's options by name."""
        return {
            "preset": self.preset, "precision": self.precision, "gpus": self.gpus, "max_steps": steps,
            "micro_batch": self.micro_batch,
            "activation_checkpointing": "full" if self.checkpointing else "none", "optimizer": self.optimizer,
            "train_file": (str(ROWS),), "generate_rows": 0, "score_before": False, "warmup_steps": 0,
            "save_steps": 10**6, "max_source_length": LENGTH, "max_target_length": LENGTH,
            "allow_truncation": True, "grad_accum": 1, "lr_schedule": "linear",
        }  # fmt: skip

    def words(self, steps: int) -> list[str]:
        """The same on the command line, without "dsrun"."""
        words = ["finetune", str(self.model.folder)]
        for name, value in self.given(steps).items():
            option = name.replace("_", "-")
            value = value[0] if isinstance(value, tuple) else value  # noqa: PLW2901
            if isinstance(value, bool):
                words.append(f"--{option}" if value else f"--no-{option}")
            else:
                words += [f"--{option}", str(value)]
        return words


class Clock:
    """The budget: what is left, and what a case of so many weights will take, from those that were seen."""

    def __init__(self, seconds: float) -> None:
        self.until = time.monotonic() + seconds
        self.seen: list[tuple[int, float]] = []

    @property
    def left(self) -> float:
        """Seconds."""
        return self.until - time.monotonic()

    def expects(self, weights: int) -> float:
        """Seconds of one side of a case: as the slowest of the like, grown with the weights that are moved."""
        if not self.seen:
            return START_S + SECONDS_A_BILLION * weights / 1e9
        return max(
            seconds + SECONDS_A_BILLION * max(0, weights - others) / 1e9 for others, seconds in self.seen
        )


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, from a process of its own: this one must never hold a GPU that a job then finds in use."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def matrix_rate(accelerator: str, precision: str) -> float:
    """Floating-point operations per second of a large product of matrices on one device, the best of several tries."""
    import torch

    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    size = MATRIX[accelerator]
    left, right = (torch.randn(size, size, device=accelerator, dtype=kind) for _ in range(2))
    wait = torch.cuda.synchronize if accelerator == "cuda" else lambda: None
    best = float("inf")
    for repeat in range(6):
        wait()
        began = time.perf_counter()
        for _ in range(10):
            left @ right
        wait()
        if repeat:  # the first one warms up
            best = min(best, (time.perf_counter() - began) / 10)
    return 2 * size**3 / best


def write_model(name: str, fields: dict[str, Any], tokenizer: Path, folder: Path, accelerator: str) -> Model:
    """A Hugging Face folder with random weights, drawn on the device: minutes faster than on the host."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {key: value for key, value in fields.items() if key != "seed"}
    rope = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}
    if "partial_rotary_factor" in fields:
        rope["partial_rotary_factor"] = fields.pop("partial_rotary_factor")
    kind = torch.bfloat16 if accelerator == "cuda" else torch.float32
    config = AutoConfig.for_model(**fields, rope_parameters=rope, dtype=kind)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=kind)
    torch.manual_seed(1)
    folder.mkdir(parents=True)
    places: dict[str, str] = {}
    sizes = {key: weight.shape for key, weight in model.named_parameters()}
    for number, shard in enumerate(shards(sizes, accelerator)):
        drawn = {}
        for key in shard:
            if key.endswith("norm.weight"):
                drawn[key] = torch.ones(sizes[key], dtype=kind)
            elif key.endswith("bias"):
                drawn[key] = torch.zeros(sizes[key], dtype=kind)
            else:
                drawn[key] = torch.empty(sizes[key], dtype=kind, device=accelerator).normal_(0, 0.02).cpu()
        file = f"model-{number:05}.safetensors"
        save_file(drawn, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    for path in tokenizer.iterdir():
        if "token" in path.name or path.name == "chat_template.jinja":
            shutil.copy(path, folder / path.name)
    weights = sum(size.numel() for size in sizes.values())
    embedding = model.get_input_embeddings().weight.numel()
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    return Model(name, folder, weights, weights - embedding, config.num_hidden_layers, width)


def shards(sizes: dict[str, Any], accelerator: str) -> Iterator[list[str]]:
    """Names of weights, file by file; of about 2e9 elements each."""
    most = 2 * 10**9 if accelerator == "cuda" else 10**6
    some: list[str] = []
    held = 0
    for key, size in sizes.items():
        if some and held + size.numel() > most:
            yield some
            some, held = [], 0
        some.append(key)
        held += size.numel()
    yield some


@dataclass(frozen=True)
class Bounds:
    """What every case keeps to. largest: micro batch."""

    here: Machine
    gpus: int
    steps: int
    largest: int

    @property
    def precision(self) -> str:
        """What is trained in: what finetune takes there."""
        return self.here.default_precision

    def refusal(self, case: Case) -> str:
        """Why finetune would not start a case; empty where it would."""
        given = {**case.given(self.steps), "liger": False}
        try:
            request = FinetuneRequest(str(case.model.folder), Resolved.by_user(FinetuneOptions, given))
            finetune.plan(request, self.here, os.environ, download=False)
        except DsrunError as error:
            return "; ".join(str(problem) for problem in error.problems)
        return ""


def cases(model: Model, bounds: Bounds) -> Iterator[Case]:
    """A case for each preset that fits, with the largest micro batch that does; the planner says which.

    It is asked about a run without the fused loss, as the Trainer's is. Where no preset of PRESETS fits, OFFLOAD's are.
    """
    found = [case for preset in PRESETS if (case := fitting(model, preset, bounds))]
    for preset in () if found else OFFLOAD:
        if case := fitting(model, preset, bounds):
            found = [case]
            break
    yield from found
    if bounds.here.accelerator == "cuda" and found:
        eight = replace(found[0], optimizer="adamw-8bit")
        if not bounds.refusal(eight):
            yield eight


def fitting(model: Model, preset: str, bounds: Bounds) -> Case | None:
    """The case with that preset that fits: recomputing only where nothing fits without. None where nothing does."""
    why = ""
    for checkpointing in (False, True):
        for rows in (count for count in MICRO_BATCHES if count <= bounds.largest):
            case = Case(model, preset, bounds.precision, bounds.gpus, rows, checkpointing)
            why = bounds.refusal(case)
            if not why:
                return case
    print(f"{model.name} with {preset} is left out: {why}", file=sys.stderr)
    return None


def ended(argv: list[str], environ: dict[str, str], folder: Path, seconds: float) -> tuple[str, str]:
    """Run a command; a word on how it failed (empty: it did not), and its stdout. What runs too long is ended."""
    with (folder / "stdout").open("w+") as out, (folder / "stderr").open("w+") as err:
        process = subprocess.Popen(
            argv, env=environ, cwd=folder, stdout=out, stderr=err, start_new_session=True
        )
        try:
            code = process.wait(max(1.0, seconds))
            failed = f"exit {code}" if code else ""
        except subprocess.TimeoutExpired:
            failed = "out of time"
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, number)
                    process.wait(10)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    continue
        out.seek(0)
        err.seek(0)
        text, errors = out.read(), err.read()
    if failed:
        print(text[-3000:], errors[-6000:], file=sys.stderr)
        if "out of memory" in (text + errors).lower():
            failed = "out of memory"
    return failed, text


def ours(case: Case, steps: int, folder: Path, environ: dict[str, str], seconds: float) -> dict[str, Any]:
    """What `dsrun finetune` took."""
    out = folder / case.name
    argv = [sys.executable, "-m", "dsrun", *case.words(steps), "--output-dir", str(out), "--json"]
    failed, _ = ended(argv, environ, folder, seconds)
    found: dict[str, Any] = {"side": "dsrun", "failed": failed}
    if failed:
        return found
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    counted = [line for line in lines if "tokens" in line][WARM:]
    peaks = took(out)
    shutil.rmtree(out)
    allocated, reserved = (
        peaks[name] or peaks["host_peak_bytes"] for name in ("gpu_allocated_bytes", "gpu_reserved_bytes")
    )
    return found | {
        "tokens": sum(line["tokens"] for line in counted), "seconds": sum(line["seconds"] for line in counted),
        "steps": len(counted), "allocated_bytes": allocated, "reserved_bytes": reserved,
    }  # fmt: skip


def theirs(case: Case, steps: int, folder: Path, environ: dict[str, str], seconds: float) -> dict[str, Any]:
    """What the Trainer took, in the environment that dsrun's ranks have."""
    dsrun = [sys.executable, "-m", "dsrun"]
    failed, text = ended([*dsrun, *case.words(steps), "--dry-run", "--json"], environ, folder, seconds)
    if failed:
        return {"side": "Trainer", "failed": failed}
    planned = json.loads(text)
    config = folder / "deepspeed.json"
    words = ["preset", case.preset, "--gpus", str(case.gpus), "--precision", case.precision, "--for", "hf"]
    words += ["--micro-batch", str(case.micro_batch)]
    if planned["job"]["ds_config"].get("optimizer", {}).get("params", {}).get("torch_adam"):
        words += ["--set", "optimizer.params.torch_adam=true"]
    failed, text = ended([*dsrun, *words], environ, folder, seconds)
    config.write_text(text, encoding="utf-8")
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    argv = [
        str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", str(case.gpus),
        "--master_port", str(free_port()), str(Path(__file__).with_name("peer_trainer.py")),
        "--model", str(case.model.folder), "--train-file", str(ROWS), "--config", str(config),
        "--output-dir", str(folder / "peer"), "--report", str(report), "--warm", str(WARM),
        "--max-source-length", str(LENGTH), "--max-target-length", str(LENGTH), "--precision", case.precision,
        "--micro-batch", str(case.micro_batch), "--max-steps", str(steps), "--lr", "1e-4",
        *(["--gradient-checkpointing"] if case.checkpointing else []),
    ]  # fmt: skip
    added = {name: value for name, value in planned["environment"].items() if name != "PYTHONPATH"}
    failed, _ = ended(argv, {**environ, **added}, folder, seconds) if not failed else (failed, "")
    remove_shared_memory()
    found = {"side": "Trainer", "failed": failed}
    return found if failed else found | json.loads(report.read_text(encoding="utf-8"))


def judged(case: Case, found: dict[str, Any], rate: float) -> dict[str, Any]:
    """A run's figures with its speed. rate: one device's, in floating-point operations per second."""
    row = {
        "model": case.model.name, "weights": case.model.weights, "preset": case.preset, "optimizer": case.optimizer,
        "precision": case.precision, "gpus": case.gpus, "micro_batch": case.micro_batch,
        "checkpointing": case.checkpointing, **found,
    }  # fmt: skip
    if found["failed"]:
        return row
    speed = found["tokens"] / found["seconds"]
    row_tokens = found["tokens"] / (found["steps"] * case.micro_batch * case.gpus)
    mfu = speed * case.model.flops(row_tokens) / (rate * case.gpus)
    return row | {"tokens_per_second": speed, "row_tokens": row_tokens, "mfu": mfu}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| model | preset | optimizer | micro batch | recomputes | | tokens/s | MFU | allocated GiB | reserved GiB |",
        "| --- | --- | --- | ---: | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        cells = [
            row["model"], row["preset"], row["optimizer"], str(row["micro_batch"]),
            "yes" if row["checkpointing"] else "no", row["side"],
        ]  # fmt: skip
        if row["failed"]:
            cells += [row["failed"], "", "", ""]
        else:
            cells += [f"{row['tokens_per_second']:,.0f}", f"{100 * row['mfu']:.1f} %"]
            cells += [f"{row[name] / GIB:.2f}" for name in ("allocated_bytes", "reserved_bytes")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page(rows: list[dict[str, Any]], heads: list[str]) -> str:
    """The page for bench/results."""
    return "\n".join(["# Training throughput", "", *heads, "", table(rows), ""])


def run(arguments: argparse.Namespace, folder: Path) -> None:
    """Everything, and both files after every run: a bench that is interrupted keeps what it has."""
    clock = Clock(arguments.budget)
    environ = dict(os.environ)
    if arguments.tiny:
        environ["DS_ACCELERATOR"] = os.environ["DS_ACCELERATOR"] = "cpu"
    here = detect(os.environ)
    if here.accelerator == "cpu" and not arguments.tiny:
        raise SystemExit(f"no GPU to measure on ({here.reason}); --tiny shows on a CPU that the bench works")
    gpus = arguments.gpus or (2 if arguments.tiny else len(here.indices))
    bounds = Bounds(here, gpus, arguments.steps, arguments.largest_batch)
    precision = bounds.precision
    rate = apart(matrix_rate, here.accelerator, precision)
    where = f"{gpus} CPU ranks on {here.cpu_cores} cores" if arguments.tiny else f"{gpus} x {machine()[0]}"
    on, size = "one GPU" if here.accelerator == "cuda" else "all cores", MATRIX[here.accelerator]
    heads = [
        f"{date.today()}: {where}; {versions()}.",
        f"The product of two matrices of {size} x {size} in {precision} on {on}: {rate / 1e12:.3g} TFLOP/s. Rows of "
        f"the shipped data, at most {2 * LENGTH} tokens; {arguments.steps} steps, the first {WARM} left out.",
    ]
    print("\n".join(heads), flush=True)
    rank_rate = rate / gpus if here.accelerator == "cpu" else rate  # CPU ranks share the cores
    tokenizers = {style: apart(tokenizer_of, style, folder / style) for style in ("llama", "chatglm2")}
    made: list[list[Case]] = []
    for name in arguments.models or (TINY if arguments.tiny else MODELS):
        fields = (
            LLAMA_1B
            if name == "llama-1b"
            else model_files.load_model_file(FILES.get(name, name)).architecture
        )
        style = "chatglm2" if fields["model_type"] == "glm" else "llama"
        if clock.left < START_S:
            print(f"{name}: no time left ({clock.left:.0f} s)", file=sys.stderr)
            break
        model = apart(write_model, name, fields, tokenizers[style], folder / name, here.accelerator)
        made.append(list(cases(model, bounds)))
    rows: list[dict[str, Any]] = []
    # Every model's first case before any second one: where time is short, that is what is left out.
    for case in sorted(
        itertools.chain(*made), key=lambda case: next(of for of in made if case in of).index(case)
    ):
        # The 8-bit optimizer stands beside the Trainer's run with AdamW.
        for side in (ours, theirs) if case.optimizer == "adamw" else (ours,):
            if clock.expects(case.model.weights) > clock.left:
                print(f"{case.name}, {side.__name__}: no time left ({clock.left:.0f} s)", file=sys.stderr)
                continue
            began = time.monotonic()
            found = side(case, arguments.steps, folder, environ, clock.left)
            clock.seen.append((case.model.weights, time.monotonic() - began))
            rows.append(judged(case, found, rank_rate) | {"wall_seconds": time.monotonic() - began})
            print(table(rows[-1:]).splitlines()[-1], flush=True)
            write(arguments.output, rows, heads, rate)
    if not any(not row["failed"] for row in rows):
        raise SystemExit("no run came to its end; see above")


def tokenizer_of(style: str, folder: Path) -> Path:
    """A folder with a tokenizer, trained on the shipped text as that of the models in miniature."""
    from dsrun.training.models.tiny import _texts
    from dsrun.training.models.tokenizer import fast_tokenizer, train_sentencepiece

    folder.mkdir()
    train_sentencepiece(_texts(ROWS.parent), 2000, 3, folder / "tokenizer.model")
    fast_tokenizer(folder / "tokenizer.model", style).save_pretrained(folder)
    return folder


def write(output: Path, rows: list[dict[str, Any]], heads: list[str], rate: float) -> None:
    """throughput-gpu-DATE.md and .json."""
    day = date.today()
    output.mkdir(parents=True, exist_ok=True)
    (output / f"throughput-gpu-{day}.md").write_text(page(rows, heads), encoding="utf-8")
    kept = {"day": str(day), "where": heads[0], "matrix_flops_per_second": rate, "runs": rows}
    (output / f"throughput-gpu-{day}.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Parse, and run in a folder that is gone afterwards."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=480.0, help="seconds")
    parser.add_argument("--models", nargs="+", choices=[*MODELS, *TINY])
    parser.add_argument("--gpus", type=int, help="all there are otherwise")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--largest-batch", type=int, default=MICRO_BATCHES[0], choices=MICRO_BATCHES)
    parser.add_argument("--tiny", action="store_true", help="on CPUs, with networks in miniature")
    arguments = parser.parse_args()
    if arguments.steps <= WARM:
        parser.error(f"--steps: more than {WARM}, which are left out")
    with tempfile.TemporaryDirectory(prefix="dsrun-throughput-") as name:
        run(arguments, Path(name))


if __name__ == "__main__":
    main()
