"""A byte-level tokenizer as newer models have it, made by hand: letters, line breaks that join, and added tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def byte_tokenizer(
    template: str, special: Sequence[str], plain: Sequence[str] = (), *, bos: str | None = None
) -> Any:
    """special: tokens that are special, the first one being the end of a text; plain: added ones that are not."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    line_break = "Ċ"
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary[line_break * 2] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(line_break, line_break)]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=special[0], pad_token=special[0], bos_token=bos,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    made.chat_template = template
    return made
