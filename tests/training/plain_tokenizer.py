"""A tokenizer made by hand, whose ids no version of a library changes: "▁", letters and bytes."""

from __future__ import annotations

from typing import Any

SPECIALS = (
    "<unk>", "<s>", "</s>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>",
)  # fmt: skip
LETTERS = "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789[]<>/#:|_,.!?"


def plain_tokenizer(
    merges: list[tuple[str, str]] | None = None, ids: dict[str, int] | None = None, *, prefix: bool = True
) -> Any:
    """merges: pairs that join, in this order; ids: of tokens that have others than their place here.

    prefix: whether every text gets a "▁" in front, as SentencePiece's models have it.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    names = [*SPECIALS[:3], *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS]
    names += [left + right for left, right in merges or []]
    names += [*(ids or {})]
    names += [letter for pair in merges or [] for part in pair for letter in part]
    vocabulary: dict[str, int] = {}
    free = iter(number for number in range(100_000) if number not in (ids or {}).values())
    for name in [*names, *SPECIALS]:
        if name not in vocabulary:
            vocabulary[name] = (ids or {}).get(name) or next(free)
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges or [], unk_token="<unk>", byte_fallback=True))
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<unk>", eos_token="</s>", bos_token="<s>",
        padding_side="left", clean_up_tokenization_spaces=False,
    )  # fmt: skip
