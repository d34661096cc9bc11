"""Evaluation: the loss on held-out rows, and answers to held-out prompts with their scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dsrun.jobs.job import Job
from dsrun.training.batches import Rows, filled, in_turn, prompt_batch, shares, training_batch
from dsrun.training.metrics import score

PREDICTIONS = "generated_predictions.jsonl"
GENERATION_BATCH_FACTOR = 4
"""Prompts answered at once, in micro batches: without gradients there is room."""


def target_loss(model: Any, batch: dict[str, torch.Tensor], target_tokens: int) -> torch.Tensor:
    """Cross-entropy of the next token, summed over the batch's targets and divided by `target_tokens`.

    transformers' own loss function does it, in float32 (a kernel that replaces it is used too).
    """
    return model(**batch, num_items_in_batch=target_tokens, use_cache=False).loss


@torch.no_grad()
def evaluation_loss(engine: Any, job: Job, rows: Rows, pad_id: int) -> float:
    """Mean cross-entropy over every target token of the rows (nats per token), on all ranks together.

    A batch holds as many rows as take the room of a training step's largest micro batch. Sorted by length they need
    hardly any padding, so that packing would save nothing here.
    """
    order = sorted(range(len(rows)), key=rows.length)
    batches = filled(rows, order, job.micro_batch * rows.length(order[-1]))
    total = torch.zeros(2, dtype=torch.float64)
    engine.eval()
    for chosen in in_turn(batches, job.world_size)[dist.get_rank()]:
        counted = chosen or order[:1]  # a rank without rows takes part, and counts nothing
        batch = training_batch(rows, counted, pad_id)
        loss = target_loss(engine, {k: v.to(engine.device) for k, v in batch.items()}, 1)
        if chosen:
            total += torch.tensor([float(loss), sum(map(rows.target_tokens, chosen))], dtype=torch.float64)
    engine.train()
    summed = total.to(engine.device)
    dist.all_reduce(summed)
    return float(summed[0] / summed[1])


@torch.no_grad()
def generate(engine: Any, job: Job, rows: Rows, tokenizer: Any, end_ids: list[int]) -> list[dict[str, str]]:
    """Greedy answers to the first generate_rows prompts: {"prompt", "labels", "predict"} in order, on rank 0.

    Other ranks get an empty list. Every rank answers its share.
    """
    count = min(job.training.generate_rows, len(rows))
    order = sorted(range(count), key=lambda row: int(rows.prompt_tokens[row]))
    engine.eval()
    answers: list[tuple[int, str]] = []
    recompute = job.training.gradient_checkpointing
    if recompute:  # it rules out the cache of keys and values
        engine.module.gradient_checkpointing_disable()
    for chosen in shares(order, job.world_size, job.micro_batch * GENERATION_BATCH_FACTOR)[dist.get_rank()]:
        prompts = [rows.prompt_ids(row) for row in chosen or order[:1]]
        batch = {k: v.to(engine.device) for k, v in prompt_batch(prompts, tokenizer.pad_token_id).items()}
        output = engine.module.generate(
            **batch,
            max_new_tokens=job.data.max_target_length,
            do_sample=False,
            use_cache=True,
            eos_token_id=end_ids,
            pad_token_id=tokenizer.pad_token_id,
            synced_gpus=job.zero_stage == 3,
        )
        texts = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        answers += zip(chosen, texts, strict=False)
    if recompute:
        engine.module.gradient_checkpointing_enable({"use_reentrant": job.zero_stage == 3})
    engine.train()
    gathered: list[Any] | None = [None] * job.world_size if dist.get_rank() == 0 else None
    dist.gather_object(answers, gathered)
    if gathered is None:
        return []
    found = dict(pair for share in gathered for pair in share)
    return [
        {
            "prompt": rows.text(row, "prompt"),
            "labels": rows.text(row, "response").strip(),
            "predict": found[row].strip(),
        }
        for row in range(count)
    ]


def write_and_score(answers: list[dict[str, str]], path: Path) -> dict[str, float]:
    """Write the answers as JSON lines, and return their mean scores."""
    lines = [json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers]
    path.write_text("".join(lines), encoding="utf-8")
    return score([answer["predict"] for answer in answers], [answer["labels"] for answer in answers])
