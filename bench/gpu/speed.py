"""Part 2: how fast are the kernels, and how much of the card does a model of Llama-3-8B's widths get?

    python bench/gpu/speed.py [--output FOLDER] [--budget 520] [--keep FOLDER] [--only NAME ...] [--tiny]

What is worth most comes first; a second call with --only goes on where the first ran out of time.

- The product of two large matrices: the rate that everything else is a share of.
- Attention forward and backward over a packed sequence, with Llama-8B's heads: torch's SDPA, causal and under a mask of
  the examples' borders, its varlen kernel, flex_attention (compiled).
- A step of Adam on a billion weights: DeepSpeed's FusedAdam, torch's fused and foreach ones.
- Llama-3-8B with 8 of its 32 layers and its whole vocabulary, random weights, ZeRO-2 in bf16: 2.8e9 weights, 58.8 GiB
  by `dsrun plan` for rows of 4k, so that a card of 80 GB holds what the whole model's 140 GiB would need two of. Packed
  sequences of 4k and 8k tokens and of many short examples, with and without liger's kernels, --compile and expandable
  segments; beside transformers' Trainer with the same folder, rows, optimizer (torch's fused AdamW) and config
  (peer_trainer.py). LLaMA-Factory stays out: it wants transformers 5.6 at most, and bench/peers.py has it.
- LoRA on the whole of Llama-3-8B (23 GiB by the plan).

No run writes its model (--export-format none).

--keep names a folder for the random models: a call that finds them there doesn't draw them again (a minute, 22 GB).

MFU is what the model's own arithmetic takes over what the card does in the same time by its data sheet (dense, 16
bits). For a token that is

    6 N + 6 L W S      N: weights that are multiplied with (all but the input embedding, which is looked up),
                       L: layers, W: heads x head size, S: tokens of an example on average

after PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B: 6 N + 12 L H Q T), with half of its second term because
attention is causal. What checkpointing computes again doesn't count.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    CHECKOUT,
    KERNEL_S,
    Case,
    Child,
    Clock,
    arguments,
    begin,
    carry_out,
    dsrun,
    ended,
    has,
    planned,
    wanted,
)

sys.path.insert(0, str(CHECKOUT / "bench"))
from peers import ROWS, free_port, remove_shared_memory

from dsrun.models import model_files
from dsrun.planner import gpus as kinds

WARM, STEPS, TINY_STEPS = 2, 10, 4
"""Steps of a run; the first WARM of them are left out of the times."""
TRIES = 5
MATRIX = {"cuda": 8192, "cpu": 256}
"""Rows of the matrices whose product is timed."""
LENGTHS = {"cuda": (2048, 4096, 8192), "cpu": (64,)}
"""Tokens of a packed sequence, of EXAMPLES."""
EXAMPLES, HEADS, KV_HEADS, HEAD = 8, 32, 8, 128
STEPPED = {"cuda": 10**9, "cpu": 10**5}
"""Weights that Adam steps."""
KERNELS = ("sdpa-causal", "sdpa-mask", "varlen", "flex")
ADAMS = ("deepspeed-fused", "torch-fused", "torch-foreach")
FUSED = ("--set", "optimizer.params.torch_adam=true", "--set", "optimizer.params.fused=true")
"""Both sides' AdamW: one kernel, and nothing to compile."""
FP8 = ("--compile", "--fp8")
LONG, SHORT = (4096, 8192), 512
"""Tokens of an example."""


@dataclass(frozen=True)
class Model:
    """A network on disk. weights: all of them; multiplied: without the input embedding; width: heads x head size."""

    name: str
    folder: Path
    weights: int
    multiplied: int
    layers: int
    width: int

    def flops(self, row_tokens: float, *, frozen: bool = False) -> float:
        """Floating-point operations of a trained token, in examples of so many (see above). frozen: the weights have no
        gradients of their own, so that backward has one product with each and not two."""
        return (4 if frozen else 6) * self.multiplied + 6 * self.layers * self.width * row_tokens


@dataclass(frozen=True)
class Run:
    """A set-up of a model. length: of an example; more: words for finetune alone."""

    name: str
    length: int
    micro_batch: int
    more: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = ()
    preset: str = "zero2"
    gpus: int = 1
    lora: bool = False
    """On the whole model."""
    expected: float = 40.0
    """Seconds: imports 15, loading 15, ten steps 10."""

    def words(self, model: Model, rows: Path, precision: str, steps: int) -> list[str]:
        """The command, without "dsrun"."""
        half = self.length // 2
        return [
            "finetune", str(model.folder), "--preset", self.preset, "--precision", precision, "--gpus", str(self.gpus),
            "--train-file", str(rows), "--prompt-column", "content", "--response-column", "summary",
            "--max-source-length", str(half), "--max-target-length", str(half), "--allow-truncation",
            "--micro-batch", str(self.micro_batch), "--grad-accum", "1", "--max-steps", str(steps),
            "--generate-rows", "0", "--no-score-before", "--warmup-steps", "0", "--save-steps", "1000000",
            "--no-last-checkpoint", "--activation-checkpointing", "full", "--force",
            *(() if self.preset == "fsdp" else FUSED), *self.more,
            "--export-format", "none", *(("--method", "lora") if self.lora else ()),
        ]  # fmt: skip

    def plan_words(self, model: Model, precision: str) -> list[str]:
        """The same set-up, for `dsrun plan`."""
        half = str(self.length // 2)
        return [
            str(model.folder / "config.json"), "--preset", self.preset, "--precision", precision,
            "--gpus", str(self.gpus), "--max-source-length", half, "--max-target-length", half, "--micro-batch",
            str(self.micro_batch), "--grad-accum", "1", "--activation-checkpointing", "full", "--host-memory", "128GiB",
            *(("--method", "lora") if self.lora else ()), *(self.more if FP8[-1] in self.more else ()),
        ]  # fmt: skip


WIDTHS, WHOLE = "llama-3-8b-8-layers", "llama-3-8b"
"""Models: the widths of Llama-3-8B with LAYERS layers; all of it, for LoRA."""
LAYERS = 8
COMPILING_S = 120.0
RUNS = (
    Run("8b-widths-4k", LONG[0], 1),
    Run("8b-widths-8k", LONG[1], 1),
    Run("8b-lora-4k", LONG[0], 1, preset="ddp", lora=True, expected=70.0),
    Run("8b-widths-short-packed", SHORT, 16),
    Run("8b-widths-4k-no-liger", LONG[0], 1, ("--no-liger",)),
    Run("8b-widths-4k-compile", LONG[0], 1, ("--compile",), expected=COMPILING_S),
    Run("8b-widths-4k-fsdp", LONG[0], 1, preset="fsdp"),
    Run("8b-widths-4k-fsdp-compile", LONG[0], 1, ("--compile",), preset="fsdp", expected=COMPILING_S),
    Run("8b-widths-4k-fsdp-rowwise", LONG[0], 1, (*FP8, "rowwise"), preset="fsdp", expected=COMPILING_S),
    Run(
        "8b-widths-4k-fsdp-tensorwise", LONG[0], 1, (*FP8, "tensorwise"), preset="fsdp", expected=COMPILING_S
    ),
    Run("8b-widths-short-padded", SHORT, 16, ("--no-packing",)),
    Run(
        "8b-widths-4k-fixed-segments", LONG[0], 1, (), (("PYTORCH_ALLOC_CONF", "expandable_segments:False"),)
    ),
)
"""The most telling first."""
MOST_TELLING = 5
"""Runs that come before the kernels: 4k and 8k, each with the Trainer beside it, and LoRA."""
FIRST_COMPILED_S = 30.0
"""Seconds of a kernel that is compiled first."""
BESIDE_TRAINER = ("8b-widths-4k", "8b-widths-8k", "8b-widths-short-packed")


def best(function: Callable[[], Any], accelerator: str) -> float:
    """Seconds of the fastest of several calls, after one that warms up."""
    import torch

    wait = torch.cuda.synchronize if accelerator == "cuda" else lambda: None
    found = float("inf")
    for number in range(TRIES + 1):
        wait()
        began = time.perf_counter()
        function()
        wait()
        found = min(found, time.perf_counter() - began) if number else found
    return found


def matrix_rate(accelerator: str) -> dict[str, Any]:
    """Floating-point operations per second of a large product of matrices."""
    import torch

    kind, size = torch.bfloat16 if accelerator == "cuda" else torch.float32, MATRIX[accelerator]
    left, right = (torch.randn(size, size, device=accelerator, dtype=kind) for _ in range(2))
    return {"failed": "", "flops_per_second": 2 * size**3 / best(lambda: left @ right, accelerator)}


def attention(name: str, tokens: int, accelerator: str) -> dict[str, Any]:
    """Seconds of one kind of attention, forward and backward, over EXAMPLES in a sequence of so many tokens."""
    import torch

    kind = torch.bfloat16 if accelerator == "cuda" else torch.float32
    shapes = [(1, heads, tokens, HEAD) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    inputs = [torch.randn(shape, device=accelerator, dtype=kind, requires_grad=True) for shape in shapes]
    attend = KIND[name](tokens, accelerator)

    def once() -> None:
        attend(*inputs).sum().backward()

    seconds = best(once, accelerator)
    # Causal within each example: two products forward and five back of half the pairs.
    pairs = tokens * (tokens / EXAMPLES) / 2
    flops = 7 * 2 * HEADS * HEAD * pairs if name != "sdpa-causal" else 7 * 2 * HEADS * HEAD * tokens**2 / 2
    return {"failed": "", "seconds": seconds, "flops_per_second": flops / seconds}


def _sdpa(tokens: int, accelerator: str, *, masked: bool) -> Callable[..., Any]:
    import torch

    mask = None
    if masked:
        number = torch.arange(tokens, device=accelerator) // (tokens // EXAMPLES)
        mask = (number[:, None] == number[None]).tril()

    def attend(query: Any, key: Any, value: Any) -> Any:
        # transformers repeats keys and values under a mask (integrations/sdpa_attention.py).
        key, value = (one.repeat_interleave(HEADS // KV_HEADS, dim=1) for one in (key, value))
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None
        )

    return attend


def _varlen(tokens: int, accelerator: str) -> Callable[..., Any]:
    import torch

    from dsrun.training.models.varlen import attend

    lengths = (tokens // EXAMPLES,) * EXAMPLES
    borders = torch.arange(0, tokens + 1, tokens // EXAMPLES, dtype=torch.int32, device=accelerator)
    told = {"cu_seq_lens_q": borders, "max_length_q": lengths[0], "example_lengths": lengths}
    return lambda query, key, value: attend(torch.nn.Module(), query, key, value, None, **told)[0]


def _flex(tokens: int, accelerator: str) -> Callable[..., Any]:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    each = tokens // EXAMPLES

    def sees(_: Any, __: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (query // each == key // each)

    mask = create_block_mask(sees, None, None, tokens, tokens, device=accelerator)
    compiled = torch.compile(flex_attention) if accelerator == "cuda" else flex_attention
    return lambda query, key, value: compiled(query, key, value, block_mask=mask, enable_gqa=True)


KIND: dict[str, Callable[[int, str], Callable[..., Any]]] = {
    "sdpa-causal": partial(_sdpa, masked=False), "sdpa-mask": partial(_sdpa, masked=True), "varlen": _varlen,
    "flex": _flex,
}  # fmt: skip


def adam(name: str, accelerator: str) -> dict[str, Any]:
    """Seconds of a step on many fp32 weights, and the most that it allocates beside weights, gradients and states."""
    import torch

    count = STEPPED[accelerator] // 10
    weights = [torch.nn.Parameter(torch.zeros(count, device=accelerator)) for _ in range(10)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    if name == "deepspeed-fused":
        from deepspeed.ops.adam import FusedAdam

        optimizer = FusedAdam(weights, lr=1e-4)
    else:
        way = {"fused": True} if name == "torch-fused" else {"foreach": True}
        optimizer = torch.optim.AdamW(weights, lr=1e-4, **way)
    optimizer.step()
    beside = None
    if accelerator == "cuda":
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        beside = torch.cuda.max_memory_allocated() - held
    return {"failed": "", "seconds": best(optimizer.step, accelerator), "bytes_beside": beside}


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


def tokenizer_of(style: str, folder: Path) -> Path:
    """A folder with a tokenizer, trained on the shipped text as that of the models in miniature."""
    from dsrun.training.models.tiny import _texts
    from dsrun.training.models.tokenizer import fast_tokenizer, train_sentencepiece

    folder.mkdir()
    train_sentencepiece(_texts(ROWS.parent), 2000, 3, folder / "tokenizer.model")
    fast_tokenizer(folder / "tokenizer.model", style).save_pretrained(folder)
    return folder


def write_rows(path: Path, length: int) -> None:
    """Rows of at least so many tokens; finetune cuts them to length."""
    texts = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()[:400]]
    text = "".join(str(value) for row in texts for value in row.values())
    each = min(2 * length, len(text) // 2)
    rows = [{"content": text[at : at + each], "summary": text[at : at + each]} for at in range(0, 64 * 7, 7)]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


@dataclass(frozen=True)
class Bench:
    """Settings of the runs. models: for the full fine-tunes, and for LoRA, made when they are first asked for;
    peak: the card's dense 16-bit rate by its data sheet, and card: dsrun's name of it; None: not known."""

    models: Callable[[str], Model]
    precision: str
    steps: int
    peak: float | None
    card: str | None = None

    def judged(
        self, flops_per_token: float, tokens: int, seconds: float, found: dict[str, Any]
    ) -> dict[str, Any]:
        """A run's speed."""
        rate = tokens / seconds
        flops = rate * flops_per_token
        return {
            "failed": "", "tokens_per_second": rate, "flops_per_second": flops,
            "mfu": flops / self.peak if self.peak else None, **found,
        }  # fmt: skip

    def ours(self, run: Run, folder: Path, seconds: float) -> dict[str, Any]:
        """`dsrun finetune`."""
        rows = folder / "rows.jsonl"
        write_rows(rows, run.length)
        model = self.models(WHOLE if run.lora else WIDTHS)
        words = run.words(model, rows, self.precision, self.steps)
        found = dsrun(words, folder, seconds, dict(run.environ))
        if found["failed"]:
            return {"failed": found["failed"]}
        counted = [line for line in found["metrics"] if "tokens" in line][WARM:]
        tokens, took = (sum(line[name] for line in counted) for name in ("tokens", "seconds"))
        figures = {
            name: found[name] for name in ("gpu_allocated_bytes", "gpu_reserved_bytes", "step_seconds")
        }
        length = min(run.length, tokens / (len(counted) * run.micro_batch * run.gpus))
        about = {
            "model": model.name + "-lora" * run.lora,
            "preset": run.preset,
            "set_up": run.name,
            "gpus": run.gpus,
        }
        first = next((line["seconds"] for line in found["metrics"] if "tokens" in line), None)
        figures["first_step_seconds"] = first
        plan = planned(run.plan_words(model, self.precision), self.card, folder, seconds)
        flops = model.flops(length, frozen=run.lora)
        return self.judged(flops, tokens, took, {**about, **figures, **plan, "notes": found["notes"][:6]})

    def trainers(self, run: Run, folder: Path, seconds: float) -> dict[str, Any]:
        """transformers' Trainer on the same rows, under the config that dsrun's preset gives it."""
        rows, config, report = folder / "rows.jsonl", folder / "deepspeed.json", folder / "report.json"
        write_rows(rows, run.length)
        words = ["preset", "zero2", "--precision", self.precision, "--for", "hf"]
        words += ["--micro-batch", str(run.micro_batch), *FUSED]
        failed, text = ended([sys.executable, "-m", "dsrun", *words], dict(os.environ), folder, seconds)
        if failed:
            return {"failed": failed}
        config.write_text(text, encoding="utf-8")
        half = str(run.length // 2)
        model = self.models(WIDTHS)
        argv = [
            sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "1", "--master_port", str(free_port()),
            str(CHECKOUT / "bench/peer_trainer.py"), "--model", str(model.folder), "--train-file", str(rows),
            "--config", str(config), "--output-dir", str(folder / "peer"), "--report", str(report),
            "--warm", str(WARM), "--max-source-length", half, "--max-target-length", half,
            "--precision", self.precision, "--micro-batch", str(run.micro_batch), "--max-steps", str(self.steps),
            "--lr", "1e-4", "--gradient-checkpointing",
        ]  # fmt: skip
        failed, _ = ended(argv, dict(os.environ), folder, seconds)
        remove_shared_memory()
        if failed:
            return {"failed": failed}
        found = json.loads(report.read_text(encoding="utf-8"))
        length = min(run.length, found["tokens"] / (found["steps"] * run.micro_batch))
        memory = {f"gpu_{name}": found[name] for name in ("allocated_bytes", "reserved_bytes")}
        return self.judged(model.flops(length), found["tokens"], found["seconds"], memory)


def kernel_cases(accelerator: str, child: Child) -> Iterator[Case]:
    """Cases that need no model, all in one process."""

    def case(name: str, function: Callable[..., Any], *arguments: Any, cuda: bool = False) -> Case:
        return Case(
            name,
            lambda *_: child(function, *arguments, accelerator),
            cuda=cuda,
            expected=FIRST_COMPILED_S if cuda else KERNEL_S,
        )

    yield case("matrices", matrix_rate)
    for tokens in LENGTHS[accelerator]:
        for name in KERNELS:  # flex has no backward unless it is compiled
            yield case(f"attention-{name}-{tokens}", attention, name, tokens, cuda=name == "flex")
    for name in ADAMS:
        yield case(f"adam-{name}", adam, name, cuda=name == "deepspeed-fused")


def run_cases(bench: Bench, *, tiny: bool) -> Iterator[Case]:
    """Every set-up, and the Trainer beside some."""
    for run in RUNS:
        short = replace(run, length=64, more=tuple(word for word in run.more if word != "--no-liger"))
        taken = short if tiny else run
        rounded = FP8[-1] in run.more  # beside bf16, which --tiny doesn't train in
        lacks = "torchao" if rounded and not has("torchao") else ""
        ours = partial(bench.ours, taken)
        yield Case(run.name, ours, cuda=rounded, expected=run.expected, lacks=lacks)
        if run.name in BESIDE_TRAINER:
            yield Case(f"{run.name}-trainer", partial(bench.trainers, taken), expected=run.expected)


@dataclass
class Models:
    """Random models, each made when it is first asked for, or found where an earlier call kept it."""

    folder: Path
    child: Child
    tiny: bool

    def __call__(self, name: str) -> Model:
        """A model by its name."""
        place = self.folder / (f"tiny-{name}" if self.tiny else name)
        facts = place / "bench.json"  # written last: a folder without it is half a model
        if not facts.is_file():
            shutil.rmtree(place, ignore_errors=True)
            made = self._write(name, place)
            facts.write_text(json.dumps({**asdict(made), "folder": None}), encoding="utf-8")
        return Model(**{**json.loads(facts.read_text(encoding="utf-8")), "folder": place})

    def _write(self, name: str, place: Path) -> Model:
        fields = dict(model_files.load_model_file("llama-tiny" if self.tiny else WHOLE).architecture)
        if name == WIDTHS and not self.tiny:
            fields["num_hidden_layers"] = LAYERS
        tokenizer = self.folder / "tokenizer"
        if not (tokenizer / "tokenizer_config.json").is_file():
            shutil.rmtree(tokenizer, ignore_errors=True)
            self.child(tokenizer_of, "llama", tokenizer)
        made = self.child(write_model, name, fields, tokenizer, place, "cpu" if self.tiny else "cuda")
        self.child.end()  # it has drawn the weights on the GPU, which the run needs
        return made


def main() -> None:
    """Run, and write each result as it comes."""
    given = arguments(__doc__)
    results, clock = begin("speed", given), Clock(given.budget)
    accelerator = "cpu" if given.tiny else "cuda"
    kind = None if given.tiny else kinds.recognise(results.where.split(",")[0])
    child = Child()
    with tempfile.TemporaryDirectory(prefix="dsrun-speed-") as name:
        folder = Path(name)
        kept = given.keep or folder / "models"
        kept.mkdir(parents=True, exist_ok=True)
        bench = Bench(
            Models(kept.resolve(), child, given.tiny), "fp32" if given.tiny else "bf16",
            TINY_STEPS if given.tiny else STEPS, 1e12 * kind.matrix_tflops if kind else None,
            kind.name if kind else None,
        )  # fmt: skip
        (folder / "kernels").mkdir()
        (folder / "runs").mkdir()
        kernels = list(wanted(kernel_cases(accelerator, child), given.only))
        runs = list(wanted(run_cases(bench, tiny=given.tiny), given.only))
        # The product of matrices says whether the card does what its data sheet says; then the model, worth most.
        first = [case for case in kernels if case.name == "matrices"]
        carry_out(first, results, clock, folder / "kernels")
        child.end()
        carry_out(runs[:MOST_TELLING], results, clock, folder / "runs")
        carry_out([case for case in kernels if case not in first], results, clock, folder / "kernels")
        child.end()
        carry_out(runs[MOST_TELLING:], results, clock, folder / "runs")


if __name__ == "__main__":
    main()
