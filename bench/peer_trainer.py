"""What dsrun is measured against in first_step.py: transformers' Trainer, started by `deepspeed` itself.

The shortest script that trains the same rows: read, tokenise, train. Nothing is kept between runs. Rank 0
writes the time at which the first optimizer step ended to --mark.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

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


class Mark(TrainerCallback):
    """Writes when the first optimizer step ended, in seconds since the epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_step_end(self, _: TrainingArguments, state: TrainerState, __: TrainerControl, **___: Any) -> None:
        """Called by the Trainer after each optimizer step."""
        if state.global_step == 1 and state.is_world_process_zero:
            self.path.write_text(f"{time.time()}\n", encoding="utf-8")


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
    parser.add_argument("--mark", type=Path, required=True)
    parser.add_argument("--max-source-length", type=int, required=True)
    parser.add_argument("--max-target-length", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--local_rank", type=int)
    given = parser.parse_args()
    arguments = TrainingArguments(
        output_dir=given.output_dir,
        deepspeed=given.config,
        per_device_train_batch_size=given.micro_batch,
        max_steps=given.max_steps,
        learning_rate=given.lr,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=42,
    )
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    rows = read_rows(given.train_file, tokenizer, given.max_source_length, given.max_target_length)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        data_collator=lambda chosen: collate(chosen, tokenizer.pad_token_id),
        callbacks=[Mark(given.mark)],
    )
    trainer.train()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # without it the process now and then aborts as it ends


if __name__ == "__main__":
    main()
