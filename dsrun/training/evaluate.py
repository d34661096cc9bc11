"""Evaluation: the loss on held-out examples, and answers to held-out prompts with their scores."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dsrun.data.thoughts import begun, marks_in, visible
from dsrun.files import json_text
from dsrun.job.job import Job
from dsrun.options.table import ANSWERED_AT_ONCE
from dsrun.training.data.batches import (
    Examples,
    filled,
    in_turn,
    on,
    prompt_batch,
    sequence_share,
    shares,
    training_batch,
)
from dsrun.training.data.packing import borders, keeps_states, takes_borders
from dsrun.training.engines.sequence_parallel import undivided
from dsrun.training.loss import target_loss
from dsrun.training.metrics import score
from dsrun.training.models.load import keep_activations, recompute
from dsrun.training.models.tiling import undivided_mlps
from dsrun.training.ranks.barrier import barrier

PREDICTIONS = "generated_predictions.jsonl"
PROMPT_END = 16
"""Tokens at a prompt's end among which a mark that begins a thought is looked for."""
CACHE_BYTES = 64 << 20
"""More prompts than ANSWERED_AT_ONCE says are answered at once, as long as their keys and values take no more than
this: a step of a small model costs little more for many prompts than for one."""


@torch.no_grad()
def evaluation_loss(engine: Any, job: Job, examples: Examples, pad_id: int) -> float:
    """Mean cross-entropy over every target token of the examples (nats per token), on all ranks together.

    A batch is at most as large as a training step's largest micro batch. Sorted by length the examples need hardly any
    padding: packing would save nothing here.
    """
    order = sorted(range(len(examples)), key=examples.length)
    batches = filled(examples, order, job.micro_batch * examples.length(order[-1]))
    total = torch.zeros(2, dtype=torch.float64)
    # Layers with a state take borders with certain kernels only, and one example needs none.
    unmasked, sp = takes_borders(engine.module) and not keeps_states(engine.module), job.parallel.sp
    index = dist.get_rank() % sp
    engine.eval()
    with engine.whole() as whole:
        for chosen in in_turn(batches, job.dp_size)[job.dp_index(dist.get_rank())]:
            if whole and not chosen:
                continue
            # Where weights stay partitioned, a rank without examples takes part in the forward, and counts nothing.
            forwarded = chosen or order[:1]
            batch: dict[str, Any]
            if sp > 1:
                batch = sequence_share(examples, forwarded, pad_id, ranks=sp, index=index, selects=False)
            else:
                batch = training_batch(examples, forwarded, pad_id)
            if sp == 1 and unmasked and len(forwarded) == 1:
                batch |= borders([examples.length(forwarded[0])], "cpu", unmasked=True)
            loss = target_loss(engine, on(engine.device, batch), 1)
            if chosen:  # sequence-parallel neighbours share a sequence, whose targets count once
                targets = 0 if index else sum(map(examples.target_tokens, chosen))
                total += torch.tensor([float(loss), targets], dtype=torch.float64)
    engine.train()
    summed = total.to(engine.device)
    dist.all_reduce(summed)
    return float(summed[0] / summed[1])


def perplexity(loss: float) -> float | None:
    """exp of a mean loss in nats per token; None where that is too large for a float."""
    return math.exp(loss) if loss < math.log(sys.float_info.max) else None


@torch.no_grad()
def generate(
    engine: Any, job: Job, examples: Examples, tokenizer: Any, end_ids: list[int]
) -> list[dict[str, str]]:
    """Greedy answers to the first generate_rows prompts, as `predictions` has them; an empty list but on rank 0.

    Every data-parallel rank answers its share: batches of prompts of about the same length (int64, [prompts, longest],
    padded on the left). Where weights stay partitioned it takes as many steps as every other rank.
    """
    prompts = examples.with_question[: job.training.generate_rows]
    order = sorted(prompts, key=lambda example: int(examples.prompt_tokens[example]))
    engine.eval()
    if job.training.recomputed:
        keep_activations(engine.module)
    with engine.whole() as whole, undivided(job), undivided_mlps(engine.module):
        answers = _answers(engine, job, examples, order, tokenizer=tokenizer, end_ids=end_ids, alone=whole)
    if job.training.recomputed:
        recompute(engine.module, job)
    engine.train()
    barrier()
    gathered: list[Any] | None = [None] * job.world_size if dist.get_rank() == 0 else None
    dist.gather_object(answers, gathered)
    if gathered is None:
        return []
    return predictions(examples, dict(pair for share in gathered for pair in share), tokenizer)


def _answers(
    engine: Any,
    job: Job,
    examples: Examples,
    order: Sequence[int],
    *,
    tokenizer: Any,
    end_ids: list[int],
    alone: bool,
) -> list[tuple[int, str]]:
    """This rank's answers, by their examples. order: all examples, the shortest prompt first. alone: whether a rank
    needs no other one for a forward."""
    answers: list[tuple[int, str]] = []
    positions = getattr(engine.module.config.get_text_config(), "max_position_embeddings", None)
    longest = int(examples.prompt_tokens[order[-1]]) + job.data.max_target_length
    size = max(job.micro_batch * ANSWERED_AT_ONCE, CACHE_BYTES // (longest * cache_bytes(engine.module)))
    ranks = (
        job.world_size // job.parallel.tp
    )  # tensor-parallel neighbours answer together, all others by themselves
    size = min(size, math.ceil(len(order) / ranks))  # no rank is to have all prompts while others have none
    for chosen in shares(order, ranks, size)[dist.get_rank() // job.parallel.tp]:
        if alone and not chosen:
            continue
        prompts = [examples.prompt_ids(example) for example in chosen or order[:1]]
        batch = on(engine.device, prompt_batch(prompts, tokenizer.pad_token_id))
        most = job.data.answer_tokens(list(map(len, prompts)), positions)
        output = engine.module.generate(
            **batch, max_new_tokens=most, do_sample=False, use_cache=True,
            eos_token_id=end_ids, pad_token_id=tokenizer.pad_token_id, synced_gpus=not alone,
        )  # fmt: skip
        texts = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        answers += zip(chosen, texts, strict=False)
    return answers


def cache_bytes(model: Any) -> int:
    """Bytes of a token's keys and values in every layer, in the model's own type.

    Where the config has no heads, the most that it can be: keys and values as wide as the hidden states.
    """
    config = model.config.get_text_config()
    width = config.hidden_size
    if heads := getattr(config, "num_attention_heads", None):
        head_width = getattr(config, "head_dim", None) or width // heads
        width = (getattr(config, "num_key_value_heads", None) or heads) * head_width
    return int(2 * config.num_hidden_layers * width * model.dtype.itemsize)


def predictions(examples: Examples, answers: Mapping[int, str], tokenizer: Any) -> list[dict[str, str]]:
    """The answers as a fine-tune writes them, in the examples' order: {"prompt", "labels", "predict"}.

    Where the prompt begins a thought, the answer gets the mark that begins it, too: a thought without an end is then
    seen to be no answer. answers: by their examples' numbers.
    """
    marks = marks_in(tokenizer.chat_template)
    ends = {example: tokenizer.decode(examples.prompt_ids(example)[-PROMPT_END:]) for example in answers}
    return [
        {
            "prompt": examples.text(example, "prompt"),
            "labels": examples.text(example, "response").strip(),
            "predict": begun(ends[example], answers[example], marks).strip(),
        }
        for example in sorted(answers)
    ]


def write_and_score(
    answers: list[dict[str, str]], path: Path, kind: str, chat_template: str | Mapping[str, str] | None
) -> dict[str, float]:
    """Write the answers as JSON lines; returns the scores of what stands after their thoughts.

    kind: as dsrun.training.metrics.kind_of gives it. chat_template: the tokenizer's, which has the marks of thoughts.
    """
    lines = [json_text(answer) + "\n" for answer in answers]
    path.write_text("".join(lines), encoding="utf-8")
    marks = marks_in(chat_template)
    predicted, expected = ([visible(each[key], marks) for each in answers] for key in ("predict", "labels"))
    return score(predicted, expected, kind)
