"""Training with tp, sp, pp and their groups with data parallelism, beside data parallelism alone; the tables of a page.

    python bench/parallelism.py [--models ...] [--layouts ...] [--presets ...] [--kinds ...] [--write]

--write puts what was measured into bench/results/parallelism.json, in the place of the same cells of an earlier time,
and makes the page from all of them. --page makes it from these alone.

Every cell is a fine-tune on real CPU ranks, as `dsrun finetune` plans it: the same examples; of the kind "sgd" in fp32
with SGD at a rate of 0.05 (a gradient twice too large shows after one step, and AdamW would hide it). Compared are the
losses of all steps, the evaluations' losses and gradients' norms, every exported weight, the logits of the exported
model as transformers loads it, and the answers; that ranks are in groups the ranks themselves assert
(dsrun/training/engines). Cells of one layout are trained one after the other by the same ranks. What is refused is
refused by the checks that finetune makes, in their words.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
PAGE = CHECKOUT / "docs/reference/parallelism.md"
RESULTS = CHECKOUT / "bench/results/parallelism.json"
NO_ANSWERS = ("--generate-rows", "0")
TILES = ("--tile-tokens", "8")
PRESETS = ("ddp", "zero1", "zero2", "zero3", "zero3-hpz", "fsdp", "fsdp-pairs")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "dp2": (2, ()), "tp2": (2, ("--tp", "2")), "tp2 x dp2": (4, ("--tp", "2")), "sp2": (2, ("--sp", "2")),
    "sp2 x dp2": (4, ("--sp", "2")), "pp2": (2, ("--pp", "2", *NO_ANSWERS)),
    "pp2 x dp2": (4, ("--pp", "2", *NO_ANSWERS)), "dp2, tiles": (2, TILES), "tp2, tiles": (2, ("--tp", "2", *TILES)),
    "sp2, tiles": (2, ("--sp", "2", *TILES)),
    "ep2": (2, ("--ep", "2")), "ep2 x dp2": (4, ("--ep", "2")), "ep4": (4, ("--ep", "4")),
    "one by one": (1, ("--micro-batch", "1")), "fsdp2": (2, ()), "fsdp4": (4, ()), "hsdp 2 x 2": (4, ()),
    "hpz 2 x 2": (4, ("--set", "zero_optimization.zero_hpz_partition_size=2")),
}  # fmt: skip
"""A column: the ranks, and what finetune is told beside the preset. Another kind of parallelism is a line here."""
OWN_PRESETS = {"fsdp2": "fsdp", "fsdp4": "fsdp", "hsdp 2 x 2": "fsdp-pairs", "hpz 2 x 2": "zero3-hpz"}
"""Columns of one preset alone: of what ships, or PAIRS."""
PAIRS = 'summary = "FSDP, each pair of ranks with a copy"\nextends = "fsdp"\n[fsdp]\nshard_over = 2\n'
REFERENCE = (1, "zero1")
"""Ranks and preset of what the others are compared with: all examples in one process, which knows its gradient's norm
(without ZeRO DeepSpeed doesn't)."""
UNDIVIDED = "ddp"
"""Compared with one process of this preset: without ZeRO DeepSpeed clips by a norm that is summed in fp32, 1e-5 off on
CPUs (runtime/utils.py, clip_grad_norm_)."""
METHODS = ("full", "lora")
HELD_OUT = 4
"""Examples whose logits are compared."""


@dataclass(frozen=True)
class Kind:
    """Subject of a table."""

    words: tuple[str, ...]
    """Options for finetune."""
    losses: float
    """Largest distance of losses from the reference's."""
    weights: float | None
    """The same for exported weights and logits; None: they are not compared."""
    title: str
    reference: str
    """The kind that it is compared with."""
    steps: int = 20
    double: bool = False
    """Whether ranks compute in fp64 what the job has in fp32."""


KINDS = {
    "sgd": Kind(("--optimizer", "sgd", "--precision", "fp32"), 1e-5, 1e-5, "SGD, fp32", "sgd"),
    "adamw": Kind(
        ("--optimizer", "adamw", "--precision", "fp32", "--lr", "1e-3"), 1e-4, None,
        "AdamW at a rate of 1e-3, fp32: losses within 1e-4", "adamw",
    ),
    "steep": Kind(
        ("--optimizer", "sgd", "--precision", "fp32", "--lr", "0.5"), 1e-4, None,
        "SGD at ten times the rate, fp32: losses within 1e-4", "steep",
    ),
    "fp64": Kind(
        ("--optimizer", "sgd", "--precision", "fp32", "--lr", "0.5"), 1e-12, None,
        "SGD at ten times the rate, all of it in fp64: losses within 1e-12", "fp64", double=True,
    ),
    "short": Kind(("--optimizer", "sgd", "--precision", "fp32"), 1e-5, 1e-5, "SGD, fp32, 5 steps", "short", 5),
    "bf16": Kind(
        ("--optimizer", "sgd", "--precision", "bf16"), 1e-2, None,
        "SGD, bf16, 5 steps, beside the reference in fp32: losses within 1e-2", "short", 5,
    ),
}  # fmt: skip
OWN = {
    "qwen3-tiny": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen2-tiny": {"model_type": "qwen2", "tie_word_embeddings": True},
    "mistral-tiny": {"model_type": "mistral", "tie_word_embeddings": False, "sliding_window": 16},
    "mistral-long-tiny": {"model_type": "mistral", "tie_word_embeddings": False, "sliding_window": 4096},
    "mixtral-tiny": {
        "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Models that don't ship: llama-tiny with another network."""
MODELS = ("llama-tiny", "chatglm2-tiny", "qwen3-tiny", "mixtral-tiny")
"""Unless others of OWN are named."""
SAME = (
    "--global-batch", "4", "--generate-rows", "4", "--no-score-before",
    "--max-source-length", "40", "--max-target-length", "16", "--allow-truncation", "--warmup-steps", "0",
    "--eval-steps", "1000", "--lr-schedule", "constant", "--seed", "1",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One fine-tune."""

    model: str
    method: str
    layout: str
    preset: str
    kind: str = "sgd"

    @property
    def name(self) -> str:
        """Name of its folder."""
        return "-".join((self.model, self.method, self.layout.replace(" ", ""), self.preset, self.kind))

    @property
    def reference(self) -> Cell:
        """Cell that it is compared with."""
        preset = UNDIVIDED if self.preset == UNDIVIDED else REFERENCE[1]
        return replace(self, layout="", preset=preset, kind=KINDS[self.kind].reference)


@dataclass(frozen=True)
class Outcome:
    """Outcome: how far it is from the reference, or why it wasn't started."""

    losses: float = 0.0
    weights: float = 0.0
    answers: bool = True
    refused: str = ""
    logits: float = 0.0
    """Distance of the exported model's logits, as a share of the largest."""
    norms: float = 0.0
    """Distance of gradients' norms, as a share of the largest."""

    def words(self, kind: str) -> str:
        """A cell's text."""
        if self.refused:
            return f"refused: {self.refused}"
        judged = KINDS[kind]
        exact, worst = self.losses < judged.losses, self.losses
        if judged.weights is not None:
            worst = max(self.losses, self.weights, self.logits, self.norms)
            exact = exact and max(self.weights, self.logits, self.norms) < judged.weights and self.answers
        good = "exact" if judged.weights is not None else "within"
        return f"{good if exact else '**differs**'} ({worst:.0e})"


def own_models(folder: Path) -> None:
    """The files of OWN, where DSRUN_PATH finds them."""
    text = (CHECKOUT / "presets/models/llama-tiny.toml").read_text(encoding="utf-8")
    models = folder / "presets/models"
    models.mkdir(parents=True, exist_ok=True)
    for name, fields in OWN.items():
        lines = []
        for line in text.splitlines():
            key = line.partition("=")[0].strip()
            lines.append(f"{key} = {json.dumps(fields[key])}" if key in fields else line)
        place = lines.index("[architecture]") + 1
        there = {line.partition("=")[0].strip() for line in lines}
        lines[place:place] = [
            f"{key} = {json.dumps(value)}" for key, value in fields.items() if key not in there
        ]
        (models / f"{name}.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "presets/fsdp-pairs.toml").write_text(PAIRS, encoding="utf-8")


def words_of(cell: Cell, folder: Path, steps: int | None) -> list[str]:
    """dsrun's words for a cell; without a layout it is a reference. steps: other than its kind's."""
    ranks, said = (REFERENCE[0], ()) if not cell.layout else LAYOUTS[cell.layout]
    rate = ["--lr", "0.05" if cell.method == "full" else "0.5"]
    return [
        "finetune", cell.model, "--method", cell.method, "--gpus", str(ranks), "--preset", cell.preset, *SAME, *said,
        *rate, *KINDS[cell.kind].words, "--max-steps", str(steps or KINDS[cell.kind].steps),
        "--output-dir", str(folder / cell.name),
        "--force",  # ranks may share cores: losses don't depend on it
    ]  # fmt: skip


def planned(cell: Cell, folder: Path, steps: int | None = None, *more: str) -> str:
    """Write the cell's job.json; returns why it is refused, empty where it isn't. A reference that lies there, trained
    with the same words, stays."""
    from dsrun.cli import main as dsrun

    run_dir, words = folder / cell.name, [*words_of(cell, folder, steps), *more]
    told = run_dir / "words.json"
    before = json.loads(told.read_text(encoding="utf-8")) if told.is_file() else None
    if not cell.layout and before == words and done(run_dir):
        return ""
    shutil.rmtree(run_dir, ignore_errors=True)
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), contextlib.suppress(SystemExit):
        dsrun([*words, "--dry-run", "--json"])
    if not out.getvalue():
        return err.getvalue().strip().splitlines()[0].removeprefix("dsrun: ")
    run_dir.mkdir()
    (run_dir / "job.json").write_text(json.dumps(json.loads(out.getvalue())["job"]), encoding="utf-8")
    told.write_text(json.dumps(words), encoding="utf-8")
    return ""


def done(run_dir: Path) -> bool:
    """Whether a run has come to its end."""
    from dsrun.job.layout import state_file
    from dsrun.job.rank_state import FINISHED

    path = run_dir / state_file(0)
    return path.is_file() and json.loads(path.read_text(encoding="utf-8"))["status"] == FINISHED


def train(cells: list[Cell], ranks: int, folder: Path) -> None:
    """Ranks train these one after the other; those in fp64 have a start of their own."""
    for double in (False, True):
        jobs = [str(folder / cell.name / "job.json") for cell in cells if KINDS[cell.kind].double is double]
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks),
            str(Path(__file__).with_name("parallelism_ranks.py")), *["--double"] * double, *jobs,
        ]  # fmt: skip
        done = jobs and subprocess.run(command, text=True, capture_output=True, check=False, cwd=folder)
        if done and done.returncode:
            raise SystemExit(f"{cells[0].layout or 'reference'}: {done.stderr[-4000:]}")


def numbers(run_dir: Path) -> dict[tuple[int, str], float | None]:
    """Losses, evaluations' losses and gradients' norms, by step; plain DDP does not know its norm."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {
        (line["step"], name): line[name]
        for line in lines
        for name in ("loss", "eval_loss", "grad_norm")
        if name in line
    }


def compared(run_dir: Path, reference: Path) -> Outcome:
    """One run beside the other."""
    from safetensors.torch import load_file

    ours, theirs = numbers(run_dir), numbers(reference)
    if ours.keys() != theirs.keys():
        raise SystemExit(f"{run_dir}: {sorted(ours.keys() ^ theirs.keys())[:5]}")
    apart = {
        key: abs(ours[key] - theirs[key])  # type: ignore[operator]
        for key in theirs if ours[key] is not None and theirs[key] is not None
    }  # fmt: skip
    losses = max(value for (_, name), value in apart.items() if name != "grad_norm")
    largest = max(
        (value for (_, name), value in theirs.items() if name == "grad_norm" and value), default=1.0
    )
    norms = max((value for (_, name), value in apart.items() if name == "grad_norm"), default=0.0) / largest
    weights = 0.0
    for path in sorted(reference.glob("*/*.safetensors")):
        here, there = load_file(run_dir / path.relative_to(reference)), load_file(path)
        if here.keys() != there.keys():
            raise SystemExit(f"{run_dir}: {sorted(here.keys() ^ there.keys())[:5]}")
        weights = max(weights, *(float((here[name] - there[name]).abs().max()) for name in there))
    written = [one / "generated_predictions.jsonl" for one in (run_dir, reference)]
    texts = [path.read_text(encoding="utf-8") for path in written if path.is_file()]
    own, other = logits_of(run_dir), logits_of(reference)
    logits = float((own - other).abs().max() / other.abs().max())
    return Outcome(losses, weights, len(set(texts)) == 1, logits=logits, norms=norms)


@functools.cache
def logits_of(run_dir: Path) -> Any:
    """Logits of the exported model, as transformers alone loads it, for a few held-out examples.

    Not for tokens without sense: where a model is near a tie between two of them, it makes 1e-4 of 1e-7.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from dsrun.job.job import Job
    from dsrun.training.data.batches import Examples

    examples = Examples(Path(str(Job.read(run_dir / "job.json").prepared.eval_rows)))
    model = AutoModelForCausalLM.from_pretrained(run_dir / "model", dtype=torch.float32).eval()
    held_out = [torch.tensor(examples.ids(number).astype(int))[None] for number in range(HELD_OUT)]
    with torch.no_grad():
        return torch.cat([model(input_ids=ids).logits.flatten() for ids in held_out])


def measured(
    cells: list[Cell], folder: Path, keep: Callable[[dict[Cell, Outcome]], None] = lambda _: None
) -> dict[Cell, Outcome]:
    """Every cell, with the references that they need. keep: is told what there is so far, layout by layout."""
    own_models(folder / "lab")
    os.environ |= {
        "DSRUN_PATH": str(folder / "lab"), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT)
    }  # fmt: skip
    sys.path.insert(0, str(CHECKOUT))
    found: dict[Cell, Outcome] = {}
    references = {cell.reference for cell in cells}
    for cell in [*references, *cells]:
        if why := planned(cell, folder):
            found[cell] = Outcome(refused=why)
    for layout in ["", *dict.fromkeys(cell.layout for cell in cells)]:
        own = [cell for cell in [*references, *cells] if cell.layout == layout and cell not in found]
        if wanted := [cell for cell in own if not done(folder / cell.name)]:
            train(wanted, LAYOUTS[layout][0] if layout else REFERENCE[0], folder)
        for cell in own if layout else ():
            found[cell] = compared(folder / cell.name, folder / cell.reference.name)
            print(cell.name, found[cell].words(cell.kind), asdict(found[cell]), flush=True)
        keep(found)
    return {cell: found[cell] for cell in cells}


def tables(found: dict[Cell, Outcome]) -> str:
    """Table of each kind, under its title."""
    kinds = [kind for kind in KINDS if any(cell.kind == kind for cell in found)]
    return "\n\n".join(f"## {KINDS[kind].title}\n\n{table(found, kind)}" for kind in kinds)


def table(every: dict[Cell, Outcome], kind: str) -> str:
    """A row for each model, method and preset, a column for each layout."""
    found = {cell: one for cell, one in every.items() if cell.kind == kind}
    layouts = [name for name in LAYOUTS if any(cell.layout == name for cell in found)]
    lines = [f"| model | preset | {' | '.join(layouts)} |", f"| --- | --- |{' --- |' * len(layouts)}"]
    rows = {(cell.model, cell.method, cell.preset) for cell in found}
    for model, method, preset in sorted(
        rows, key=lambda row: (METHODS.index(row[1]), [*MODELS, *OWN].index(row[0]), row[2])
    ):
        cells = [found.get(Cell(model, method, layout, preset, kind)) for layout in layouts]
        name = model if method == "full" else f"{model}, {method}"
        lines.append(f"| {name} | {preset} | {' | '.join(one.words(kind) if one else '' for one in cells)} |")
    return "\n".join(lines)


def stored() -> dict[Cell, Outcome]:
    """Earlier measurements."""
    lines = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else []
    names = Cell.__dataclass_fields__
    return {
        Cell(**{name: line[name] for name in names if name in line}): Outcome(
            **{name: value for name, value in line.items() if name not in names}
        )
        for line in lines
    }


def write(found: dict[Cell, Outcome]) -> None:
    """Store the measurements beside earlier ones, and write the page of all."""
    every = stored() | {cell: one for cell, one in found.items() if cell.layout}
    lines = [json.dumps(asdict(cell) | asdict(one), ensure_ascii=False) for cell, one in every.items()]
    RESULTS.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    PAGE.write_text(page(every), encoding="utf-8")


def page(found: dict[Cell, Outcome]) -> str:
    """The whole page."""
    tried = ", ".join(f"{name} {version(name)}" for name in ("deepspeed", "torch", "transformers", "peft"))
    before = sorted(
        {
            f"{cell.layout} ({cell.preset}{', LoRA' * (cell.method == 'lora')})"
            for cell, one in found.items()
            if not (one.refused or one.logits or KINDS[cell.kind].double)
        }
    )
    older = f"\nNorms and logits were not compared in cells of {', '.join(before)} yet.\n" if before else ""
    return f"""# Parallelism, measured

Made by `python bench/parallelism.py --write` on {date.today()}: {tried}.
How to use it: [parallelism](../howto/parallelism.md).

Each cell is a fine-tune on CPU ranks, {Kind.steps} steps beside one process with the same examples, four a step;
SGD's rate 0.05 (LoRA: 0.5). **exact**: losses of all steps and of evaluations within 1e-5 of it, norms of gradients,
too (of the largest one), exported weights within 1e-5, and so the logits of the exported model (of the largest one)
on held-out examples, as transformers loads it by itself; the same answers to prompts; in brackets the largest
difference. A run whose ranks are not in the groups that were asked for stops by itself. Nothing of this was measured
on GPUs.

- "tiles": the loss and the MLPs take 8 tokens at a time (`--tile-tokens 8`).
- Cells of ddp stand beside one process without ZeRO. There DeepSpeed sums a gradient's norm in fp32 and does not tell
  it: norms are compared in the other rows.
- Ranks add up in another order than one process. At ten times the rate that rounding grows from step to step, as it
  does where one process takes the examples one by one; in fp64 all of them are the same. mistral-tiny looks back 16
  tokens, examples have up to 56.
- qwen2-tiny's LoRA at zero1 is off in one step, the tenth, whose gradient is more than twice its neighbours': the norm
  is 2e-5 off there, 4e-6 at most in all others, and 6e-6 at zero3. One process that takes the examples one by one is
  3e-6 off.
{older}
{tables(found)}
"""


def main() -> None:
    """Measure, and write the page where that is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--presets", nargs="+", default=PRESETS)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--kinds", nargs="+", default=["sgd"], choices=list(KINDS))
    parser.add_argument("--page", action="store_true", help="measure nothing")
    parser.add_argument(
        "--folder", help="where the runs lie; references that lie there are not trained again"
    )
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(CHECKOUT)}")
    given = parser.parse_args()
    if given.page:
        PAGE.write_text(page(stored()), encoding="utf-8")
        return
    cells = [
        Cell(model, method, layout, preset, kind)
        for kind, method, model, preset, layout in itertools.product(
            given.kinds, given.methods, given.models, given.presets, given.layouts
        )
        # LoRA of each model at two stages: what divides weights otherwise.
        if method == "full" or preset in ("zero1", "zero3", *OWN_PRESETS.values())
        if preset == OWN_PRESETS.get(layout, preset) and (layout in OWN_PRESETS or preset not in OWN_PRESETS.values())
    ]  # fmt: skip
    with contextlib.nullcontext(given.folder) if given.folder else tempfile.TemporaryDirectory() as folder:
        found = measured(cells, Path(folder).resolve(), write if given.write else lambda _: None)
    print(tables(found))


if __name__ == "__main__":
    main()
