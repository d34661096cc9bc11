"""ChatGLM2's own fine-tuning recipe (THUDM/ChatGLM2-6B, ptuning/main.py without --pre_seq_len), number for number.

What differs from dsrun's own way: a prompt is cut at its end, frame and all; every row is padded to the same length;
each micro batch's loss is the mean over its own tokens, and the step's is the mean of those. The order of the rows is
dsrun's: that of the Trainer's sampler is not repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dsrun.jobs.job import DataSpec
from dsrun.training.batches import IGNORED, Rows

FORMAT = "chatglm2"
"""The prompt format that the recipe has words for."""
WHOLE = 1 << 30
"""Tokens that no prompt has."""


def rounds(query: str, history: Sequence[tuple[str, str]] = ()) -> str:
    """A question after earlier ones and their answers, as ChatGLM2 is asked."""
    asked = [*history, (query, "")]
    return "\n\n".join(
        f"[Round {number}]\n\n问：{question}\n\n答：{answer}"
        for number, (question, answer) in enumerate(asked, start=1)
    )


class OfficialEncoder:
    """Encodes rows as the recipe does, behind the names of the PromptEncoder that it is made from.

    Formats other than ChatGLM2's keep their frame; the rest is the same.
    """

    def __init__(self, encoder: Any) -> None:
        self._encoder = encoder
        self.tokenizer = encoder.tokenizer
        self.end_ids = [self.tokenizer.eos_token_id]

    def encode_prompts(self, prompts: Sequence[str], limit: int) -> tuple[list[list[int]], int]:
        """Ids of each prompt in its frame, and how many were cut to `limit` tokens: what is cut off is the end.

        A long prompt therefore loses the mark that asks for the answer, here as there.
        """
        if self._encoder.name == FORMAT:
            return self.encode_rounds([(prompt, ()) for prompt in prompts], limit)
        return _cut(self._encoder.encode_prompts(prompts, WHOLE)[0], limit)

    def encode_rounds(
        self, asked: Sequence[tuple[str, Sequence[tuple[str, str]]]], limit: int
    ) -> tuple[list[list[int]], int]:
        """The same of ChatGLM2's prompts with what was said before: (query, history) pairs."""
        return _cut(self._ids([rounds(query, history) for query, history in asked], special=True), limit)

    def encode_responses(self, responses: Sequence[str], limit: int) -> tuple[list[list[int]], int]:
        """Ids of each response, and how many were cut to `limit` tokens; the end mark is added to these."""
        rows, cut = _cut(self._ids(responses, special=False), limit)
        return [ids + self.end_ids for ids in rows], cut

    def _ids(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        if not texts:
            return []
        encoded = self.tokenizer(
            list(texts), add_special_tokens=special, split_special_tokens=True, verbose=False
        )
        return [list(ids) for ids in encoded["input_ids"]]


def _cut(rows: list[list[int]], limit: int) -> tuple[list[list[int]], int]:
    return [ids[:limit] for ids in rows], sum(len(ids) > limit for ids in rows)


def row_length(data: DataSpec) -> int:
    """Tokens of every row with its padding: the end mark has a place of its own."""
    return data.max_source_length + data.max_target_length + 1


def official_batch(
    rows: Rows, chosen: Sequence[int], tokenizer: Any, data: DataSpec
) -> dict[str, torch.Tensor]:
    """input_ids and labels (int64, [rows, row_length]), padded on the right.

    Where an answer holds the padding's token it is not trained on, as there (ignore_pad_token_for_loss); but for an
    end mark that is the padding, too, as it never is in ChatGLM2.
    """
    pad_id = tokenizer.pad_token_id
    input_ids = torch.full((len(chosen), row_length(data)), pad_id, dtype=torch.long)
    labels = torch.full_like(input_ids, IGNORED)
    for place, row in enumerate(chosen):
        length = rows.length(row)
        input_ids[place, :length] = torch.tensor(rows.ids(row), dtype=torch.long)
        labels[place, :length] = torch.tensor(rows.labels(row), dtype=torch.long)
    if pad_id != tokenizer.eos_token_id:
        labels[labels == pad_id] = IGNORED
    return {"input_ids": input_ids, "labels": labels}


def official_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy over the targets of this micro batch alone."""
    return model(**batch, use_cache=False).loss
