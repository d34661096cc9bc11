"""ChatGLM2's own fine-tuning recipe (THUDM/ChatGLM2-6B, ptuning/main.py without --pre_seq_len), number for number.

Differences from dsrun's own way:

- a prompt is cut at its end, frame and all;
- every example is padded to the same length;
- each micro batch's loss is the mean over its own tokens, and the step's is the mean of those.

The order of the examples is dsrun's, not that of the Trainer's sampler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dsrun.data.conversations import BadRowError, Conversation
from dsrun.errors import DsrunError
from dsrun.job.job import DataSpec
from dsrun.training.data.batches import IGNORED, Examples
from dsrun.training.data.prompt_formats import Question
from dsrun.training.data.prompts import Encoded, Limits, PromptEncoder

FORMAT = "chatglm2"
"""The prompt format that the recipe writes itself."""


def rounds(query: str, history: Sequence[tuple[str, str]] = ()) -> str:
    """A question after earlier ones and their answers, in ChatGLM2's words."""
    exchanges = [*history, (query, "")]
    return "\n\n".join(
        f"[Round {number}]\n\n问：{question}\n\n答：{answer}"
        for number, (question, answer) in enumerate(exchanges, start=1)
    )


class ReferenceEncoder:
    """Encodes conversations as the recipe does, in place of the PromptEncoder that it is made from.

    Every answer is a sequence with all turns before it. A long prompt loses its end, and with it the mark that asks for
    the answer, as in the recipe. Formats other than ChatGLM2's keep their frame; the rest is the same.
    """

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder, self.tokenizer = encoder, encoder.tokenizer

    def encode_conversations(
        self, conversations: Sequence[Conversation], limits: Limits, *, train_on_prompt: bool
    ) -> list[list[Encoded] | BadRowError]:
        """See PromptEncoder. Raises DsrunError where prompts are to be trained on, too."""
        if train_on_prompt:
            hint = "Leave --train-on-prompt out."
            raise DsrunError("trains on responses only", where="--official", hint=hint)
        return [self._encode(conversation, limits) for conversation in conversations]

    def _encode(self, conversation: Conversation, limits: Limits) -> list[Encoded] | BadRowError:
        sequences = []
        for part in conversation.each_answer():
            *history, (question, answer) = [
                (Question(turn.question, extra=turn.extra).whole, turn.answer) for turn in part.turns
            ]
            if part.system or not part.is_plain or (history and self._encoder.name != FORMAT):
                return BadRowError(
                    "has what --official has no words for: a system text, tools, thoughts or earlier rounds"
                )
            if self._encoder.name == FORMAT:
                whole = self._ids(rounds(question, history), special=True)
            else:
                (whole,) = self._encoder.encode_questions([Question(question)])
            prompt, response = whole[: limits.source], self._ids(answer, special=False)
            ids = [*prompt, *response[: limits.target], self.tokenizer.eos_token_id]
            spans = ((max(1, len(prompt)), len(ids)),)
            shortened, cut = len(whole) > limits.source, len(response) > limits.target
            sequences.append(Encoded(ids, spans, len(prompt), question, answer, shortened, cut))
        return sequences

    def _ids(self, text: str, *, special: bool) -> list[int]:
        options = {"add_special_tokens": special, "split_special_tokens": True, "verbose": False}
        return list(self.tokenizer(text, **options)["input_ids"])


def row_length(data: DataSpec) -> int:
    """Tokens of every example with its padding: the end mark has a place of its own."""
    return data.max_source_length + data.max_target_length + 1


def reference_batch(
    examples: Examples, chosen: Sequence[int], tokenizer: Any, data: DataSpec
) -> dict[str, torch.Tensor]:
    """input_ids and labels (int64, [examples, row_length]), padded on the right.

    As in the recipe, a padding token inside an answer is not trained on (ignore_pad_token_for_loss). An end mark that
    is the padding token, too, is: in ChatGLM2 it never is one.
    """
    pad_id = tokenizer.pad_token_id
    input_ids = torch.full((len(chosen), row_length(data)), pad_id, dtype=torch.long)
    labels = torch.full_like(input_ids, IGNORED)
    for place, example in enumerate(chosen):
        length = examples.length(example)
        input_ids[place, :length] = torch.tensor(examples.ids(example))
        labels[place, :length] = torch.tensor(examples.labels(example))
    if pad_id != tokenizer.eos_token_id:
        labels[labels == pad_id] = IGNORED
    return {"input_ids": input_ids, "labels": labels}
