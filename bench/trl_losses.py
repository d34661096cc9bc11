"""The losses of `dsrun finetune` beside those of TRL's SFTTrainer with assistant_only_loss, and what explains them.

    python bench/trl_losses.py [--packages DIR] [--output docs/reference/chat-text.md]

--packages: a folder with trl and what it needs, which is looked into after everything that is installed (pip install
--no-deps --target DIR trl dill multiprocess xxhash). For each family a tiny random model is trained for 10 steps three
times, with the same rows in the same order, in fp32, by one process on the CPU: by dsrun, by TRL as it is, and by TRL
with dsrun's tokens. The last has to have dsrun's losses; then what TRL's text has otherwise is all that differs.

--output: the page in which the section is put in the place of the old one. The exit status is 1 where the losses with
the same tokens differ by more than rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "bench")]

from chat_text import FAMILIES, TITLE, template_of, tokenizer_of, trl_folder  # noqa: E402

CHOSEN = ("Qwen3", "R1-Distill-Qwen", "GLM-4.5", "Gemma-3")
ROWS, BATCH, STEPS, LR, SEED = 16, 4, 10, 1e-3, 42
ROUNDING = 1e-5
WORDS = ("red", "green", "blue", "seven", "stone", "river", "cloud", "bread", "light", "paper")


def rows_of(family: str) -> list[dict[str, Any]]:
    """Rows of one turn, with thoughts where the family has some: of earlier ones TRL trains what the model drops."""
    draw = random.Random(family)

    def text(most: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(2, most)))

    thinks = bool(FAMILIES[family].thoughts)
    return [
        {
            "messages": [
                {"role": "user", "content": text(8)},
                {"role": "assistant", "content": f"<think>\n{text(6)}\n</think>\n\n" * thinks + text(6)},
            ]
        }
        for _ in range(ROWS)
    ]


def order() -> list[int]:
    """The rows of all steps, as dsrun draws them: each epoch in an order of its own."""
    chosen: list[int] = []
    for epoch in range(-(-STEPS * BATCH // ROWS)):
        rows = list(range(ROWS))
        random.Random(f"{SEED}:{epoch}").shuffle(rows)
        chosen += rows
    return chosen[: STEPS * BATCH]


def make_model(folder: Path, family: str, template: str | None) -> None:
    """A tiny random model with the family's tokens and template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tokenizer_of(FAMILIES[family], template)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def dsrun_losses(folder: Path, rows: Path) -> list[float]:
    """The losses of a fine-tune with one rank on the CPU."""
    run = folder / "run"
    environ = {
        **os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "DSRUN_CACHE": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")])),
    }  # fmt: skip
    argv = [
        sys.executable, "-m", "dsrun", "finetune", str(folder / "model"), "--gpus", "1", "--train-file", str(rows),
        "--precision", "fp32", "--preset", "zero1", "--micro-batch", str(BATCH), "--grad-accum", "1", "--no-packing",
        "--lr", str(LR), "--lr-schedule", "constant", "--warmup-steps", "0", "--max-steps", str(STEPS), "--seed",
        str(SEED), "--max-source-length", "256", "--max-target-length", "256", "--generate-rows", "0",
        "--no-score-before", "--grad-clip", "1", "--optimizer", "adamw", "--output-dir", str(run),
    ]  # fmt: skip
    done = subprocess.run(argv, env=environ, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"dsrun ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def dsrun_tokens(family: str, template: str | None, rows: list[dict[str, Any]]) -> list[dict[str, list[int]]]:
    """The rows as dsrun's ids and labels."""
    from dsrun.data.conversations import FORMATS, Columns
    from dsrun.training.data.prompts import Limits, encoder_for

    encoder = encoder_for(tokenizer_of(FAMILIES[family], template), "chat-template")
    read = [FORMATS["messages"].read(row, Columns("prompt", "response")) for row in rows]
    found = []
    for made in encoder.encode_conversations(read, Limits(256, 256)):
        if not isinstance(made, list) or len(made) != 1:
            raise SystemExit(f"{family}: a row became {made!r}")
        labels = [-100] * len(made[0].ids)
        for start, stop in made[0].spans:
            labels[start:stop] = made[0].ids[start:stop]
        found.append({"input_ids": made[0].ids, "labels": labels})
    return found


def trl_side(given: argparse.Namespace) -> None:
    """In a process of its own: train with TRL on rows, or on ids and labels, and write losses and tokens."""
    if given.packages:
        sys.path.append(str(given.packages))
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    class InOrder(SFTTrainer):
        """Takes rows as they come: they are in dsrun's order already."""

        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(dataset if dataset is not None else self.train_dataset)

    rows = json.loads(given.side.read_text(encoding="utf-8"))
    folder = given.side.parent
    trainer = InOrder(
        AutoModelForCausalLM.from_pretrained(folder / "model", dtype="float32"),
        SFTConfig(
            output_dir=str(folder / "trl"), per_device_train_batch_size=BATCH, max_steps=STEPS, learning_rate=LR,
            lr_scheduler_type="constant", warmup_steps=0, logging_steps=1, save_strategy="no", report_to="none",
            assistant_only_loss="labels" not in rows[0], use_cpu=True, bf16=False, seed=SEED, weight_decay=0.0,
            max_length=None, packing=False, gradient_checkpointing=False, max_grad_norm=1.0,
            dataset_kwargs={"skip_prepare_dataset": True} if "labels" in rows[0] else None,
        ),
        train_dataset=Dataset.from_list([rows[place] for place in order()]),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )  # fmt: skip
    trainer.train()
    kept = [{key: list(row[key]) for key in row if key != "messages"} for row in trainer.train_dataset]
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    given.side.with_suffix(".losses").write_text(
        json.dumps({"losses": losses, "rows": kept}), encoding="utf-8"
    )


def trl_losses(folder: Path, rows: list[dict[str, Any]], packages: Path | None) -> dict[str, Any]:
    """Losses that `trl_side` writes."""
    file = folder / "side.json"
    file.write_text(json.dumps(rows), encoding="utf-8")
    argv = [
        sys.executable,
        __file__,
        "--side",
        str(file),
        *(["--packages", str(packages)] if packages else []),
    ]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"TRL ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return dict(json.loads(file.with_suffix(".losses").read_text(encoding="utf-8")))


def difference(tokenizer: Any, ours: dict[str, list[int]], theirs: dict[str, list[int]]) -> str:
    """Differences of TRL in a row, in words."""
    masks = theirs.get("assistant_masks") or [int(label != -100) for label in theirs["labels"]]
    ids = theirs["input_ids"]
    mine = [label != -100 for label in ours["labels"]]
    trained = [token for token, on in zip(ids, masks, strict=True) if on]
    wanted = [token for token, on in zip(ours["input_ids"], mine, strict=True) if on]

    def shown(tokens: list[int]) -> str:
        return f"`{json.dumps(tokenizer.decode(tokens), ensure_ascii=False)}`"

    if ids[: len(ours["input_ids"])] == ours["input_ids"] and trained == wanted:
        rest = ids[len(ours["input_ids"]) :]
        return "none" if not rest else f"none that is trained on; TRL's row goes on with {shown(rest)}"
    return f"trained on by dsrun: {shown(wanted)}; by TRL: {shown(trained)}"


def measured(family: str, given: argparse.Namespace) -> tuple[str, str, float]:
    """A family's line, what differs in its first row, and by how much the losses with the same tokens differ."""
    trl = given.trl or (given.packages / "trl/chat_templates" if given.packages else trl_folder())
    template, _ = template_of(family, FAMILIES[family], trl, None)
    rows = rows_of(family)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", family, template)
        file = folder / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        ours = dsrun_losses(folder, file)
        tokens = dsrun_tokens(family, template, rows)
        as_it_is = trl_losses(folder, rows, given.packages)
        same = trl_losses(folder, tokens, given.packages)
    apart = [max(abs(a - b) for a, b in zip(ours, side["losses"], strict=True)) for side in (as_it_is, same)]
    tokenizer = tokenizer_of(FAMILIES[family], template)
    first = order().index(0)
    what = difference(tokenizer, tokens[0], as_it_is["rows"][first])
    line = (
        f"| {family} | {ours[0]:.6f} | {as_it_is['losses'][0]:.6f} | {ours[-1]:.6f} | {as_it_is['losses'][-1]:.6f} | "
        f"{apart[0]:.1e} | {apart[1]:.1e} |"
    )
    return line, f"- {family}: {what}.", apart[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packages", type=Path, metavar="DIR")
    parser.add_argument("--trl", type=Path, metavar="DIR", help="TRL's folder of templates")
    parser.add_argument("--family", action="append", choices=CHOSEN)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        trl_side(given)
        return
    found = [measured(family, given) for family in given.family or CHOSEN]
    if given.packages:
        sys.path.append(str(given.packages))
    names = ("trl", "transformers", "torch", "deepspeed")
    section = "\n".join(
        [
            TITLE,
            "",
            f"Made by `python bench/trl_losses.py` on {date.today()}: "
            f"{', '.join(f'{name} {version(name)}' for name in names)}.",
            "",
            f"{STEPS} steps of {BATCH} of {ROWS} rows of one turn (with thoughts, but for Gemma), AdamW at {LR}, fp32, "
            "one process on the CPU, a random model of two layers: `dsrun finetune`, and TRL's SFTTrainer with "
            "`assistant_only_loss`, which puts a training template of its own in the place of the model's. The last "
            "column is TRL's trainer with dsrun's tokens and labels: what is left is rounding.",
            "",
            "| | dsrun's first loss | TRL's | dsrun's last | TRL's | largest difference | with the same tokens |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *(line for line, _, _ in found),
            "",
            "What is trained on otherwise, by the first row:",
            "",
            *(what for _, what, _ in found),
            "",
        ]
    )
    if given.output:
        page = given.output.read_text(encoding="utf-8").partition(TITLE)[0].rstrip()
        given.output.write_text(f"{page}\n\n{section}", encoding="utf-8")
    else:
        print(section)
    sys.exit(any(apart > ROUNDING for _, _, apart in found))


if __name__ == "__main__":
    main()
