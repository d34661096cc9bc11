"""Script that dsrun is measured against in peers.py and gpu/speed.py: transformers' Trainer, started by `deepspeed`.

The shortest script that trains the same rows: read, tokenise, train. Nothing is kept between runs. Rank 0
writes the time at which each optimizer step ended to --mark, and what the steps took to --report.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Mark(TrainerCallback):
    """Writes when each optimizer step ended, in seconds since the epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_step_end(self, _: TrainingArguments, state: TrainerState, __: TrainerControl, **___: Any) -> None:
        """Called by the Trainer after each optimizer step."""
        if state.is_world_process_zero:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{time.time()}\n")


class Count:
    """Tokens that are no padding, of the batches that the model is called with."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.tokens: torch.Tensor | None = None
        model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, _: torch.nn.Module, __: Any, named: dict[str, Any]) -> None:
        if "attention_mask" in named:
            seen = named["attention_mask"].sum()
            self.tokens = seen if self.tokens is None else self.tokens + seen


class Steps(TrainerCallback):
    """Takes the time from the end of step `warm` to the end of the last one, and the tokens between them."""

    def __init__(self, path: Path, warm: int, count: Count) -> None:
        self.path, self.warm, self.count = path, warm, count
        self.began = (0.0, 0)

    def on_step_end(self, _: TrainingArguments, state: TrainerState, __: TrainerControl, **___: Any) -> None:
        """Called by the Trainer after each optimizer step."""
        if state.global_step not in (self.warm, state.max_steps):
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = (time.perf_counter(), int(self.count.tokens))
        if state.global_step == self.warm:
            self.began = now
            return
        # Below: largest memory of the ranks, sum of their tokens.
        most = torch.tensor(memory(), dtype=torch.float64)
        tokens = torch.tensor([now[1] - self.began[1]], dtype=torch.float64)
        if torch.cuda.is_available():
            most, tokens = most.cuda(), tokens.cuda()
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
        torch.distributed.all_reduce(tokens)
        if state.is_world_process_zero:
            found = {
                "tokens": int(tokens), "seconds": now[0] - self.began[0], "steps": state.global_step - self.warm,
                "allocated_bytes": int(most[0]), "reserved_bytes": int(most[1]),
            }  # fmt: skip
            self.path.write_text(json.dumps(found) + "\n", encoding="utf-8")


def memory() -> tuple[int, int]:
    """The most that was allocated and reserved on this rank's GPU; without one, its resident memory, twice."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    most = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return most, most


def read_rows(path: Path, tokenizer: Any, source: int, target: int) -> list[dict[str, list[int]]]:
    """Rows as input_ids and labels; the prompt is not trained on."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    prompts = tokenizer(
        [f"[INST] {row['content']} [/INST]" for row in rows], truncation=True, max_length=source
    )
    responses = tokenizer(
        [row["summary"] for row in rows], add_special_tokens=False, truncation=True, max_length=target - 1
    )
    return [
        {
            "input_ids": prompt + response + [tokenizer.eos_token_id],
            "labels": [-100] * len(prompt) + response + [tokenizer.eos_token_id],
        }
        for prompt, response in zip(prompts["input_ids"], responses["input_ids"], strict=True)
    ]


def collate(rows: list[dict[str, list[int]]], pad_id: int) -> dict[str, torch.Tensor]:
    """Rows padded on the right to the longest."""

    def padded(key: str, value: int) -> torch.Tensor:
        return pad_sequence([torch.tensor(row[key]) for row in rows], batch_first=True, padding_value=value)

    ids = padded("input_ids", pad_id)
    mask = pad_sequence(
        [torch.ones(len(row["input_ids"]), dtype=torch.long) for row in rows], batch_first=True
    )
    return {"input_ids": ids, "attention_mask": mask, "labels": padded("labels", -100)}


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--train-file", type=Path, required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("--mark", type=Path)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--warm", type=int, default=2, help="steps that --report leaves out")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--max-source-length", type=int, required=True)
    parser.add_argument("--max-target-length", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--local_rank", type=int)
    given = parser.parse_args()
    arguments = TrainingArguments(
        output_dir=given.output_dir,
        deepspeed=given.config,
        per_device_train_batch_size=given.micro_batch,
        max_steps=given.max_steps,
        learning_rate=given.lr,
        bf16=given.precision == "bf16",
        fp16=given.precision == "fp16",
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=False,
        logging_steps=1,
        **({"gradient_checkpointing": True} if given.gradient_checkpointing else {}),
        save_strategy="no",
        report_to="none",
        seed=42,
    )
    # Meets the other ranks: under ZeRO-3 the model is divided while it is loaded, among as many as there are by then.
    deepspeed.init_distributed()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=DTYPES[given.precision])
    callbacks: list[TrainerCallback] = [Mark(given.mark)] if given.mark else []
    if given.report:
        callbacks.append(Steps(given.report, given.warm, Count(model)))
    rows = read_rows(given.train_file, tokenizer, given.max_source_length, given.max_target_length)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        data_collator=lambda chosen: collate(chosen, tokenizer.pad_token_id),
        callbacks=callbacks,
    )
    trainer.train()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # without it the process now and then aborts as it ends


if __name__ == "__main__":
    main()
