"""Tokenizers: an exact fast one from a SentencePiece BPE model, and the small ones that ship as recipes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

SPACE = "▁"  # SentencePiece writes a space so
CHATGLM2_SPECIALS = ("[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>")
"""The tokens that ChatGLM2 puts after its pieces, by position. The last two are called sop and eop there; with
angle brackets they can't be mistaken for the letters inside a word such as "philosophy"."""
SPECIALS = {
    "chatglm2": CHATGLM2_SPECIALS,
    "chatglm3": (*CHATGLM2_SPECIALS, "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "llama": (),
}


def train_sentencepiece(
    texts: Iterable[str], vocab_size: int, max_piece_length: int, model_file: Path
) -> None:
    """Train a SentencePiece BPE model with ChatGLM2's and Llama's options, and write it.

    Identity normalisation, a dummy space in front, runs of spaces kept, byte fallback, single digits; ids:
    unk 0, <s> 1, </s> 2, then the 256 bytes. Deterministic: one thread. max_piece_length (characters): on little
    text a piece would otherwise grow into a whole phrase, too rare to learn.
    """
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        max_sentencepiece_length=max_piece_length,
        byte_fallback=True,
        character_coverage=0.9999,
        normalization_rule_name="identity",
        add_dummy_prefix=True,
        remove_extra_whitespaces=False,
        split_digits=True,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    model_file.write_bytes(model.getvalue())


def fast_tokenizer(model_file: Path, style: str) -> Any:
    """A transformers tokenizer whose ids equal SentencePiece's own on every string.

    model_file: a SentencePiece BPE model. style: a key of SPECIALS; chatglm2 and chatglm3 begin a text
    with [gMASK] sop, llama with <s>; padding is <unk>.

    The merges are every split of a piece into two pieces, in the order of the merged pieces' scores: that is the
    order in which SentencePiece's BPE joins. There is no pre-tokenizer: merges may cross spaces, as they do there.
    """
    import sentencepiece
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    size = pieces.get_piece_size()
    vocabulary = {pieces.id_to_piece(index): index for index in range(size)}
    tokenizer = Tokenizer(
        BPE(
            vocab=vocabulary,
            merges=_merges(pieces, vocabulary),
            unk_token=pieces.id_to_piece(pieces.unk_id()),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    dummy_prefix = pieces.encode("a", out_type=str)[0].startswith(SPACE)
    steps: list[Any] = [normalizers.Prepend(SPACE)] if dummy_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    names = [AddedToken(name, special=True, normalized=False) for name in SPECIALS[style]]
    tokenizer.add_special_tokens(names)
    prefix = ["[gMASK]", "<sop>"] if names else ["<s>"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join([*prefix, "$A"]),
        pair=" ".join([*prefix, "$A", "$B:1", "</s>:1"]),
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in [*prefix, "</s>"]],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",  # noqa: S106  (a token of text)
        pad_token="<unk>",  # noqa: S106
        eos_token="</s>",  # noqa: S106
        bos_token="<s>" if style == "llama" else None,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def _merges(pieces: Any, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Every split of a normal piece into two normal pieces, best score first (ties: order of the vocabulary)."""
    normal = {
        piece
        for piece, index in vocabulary.items()
        if not (
            pieces.is_unknown(index)
            or pieces.is_control(index)
            or pieces.is_unused(index)
            or pieces.is_byte(index)
        )
    }
    scored = [
        (-pieces.get_score(vocabulary[piece]), (piece[:cut], piece[cut:]))
        for piece in vocabulary
        if piece in normal
        for cut in range(1, len(piece))
        if piece[:cut] in normal and piece[cut:] in normal
    ]
    return [pair for _, pair in sorted(scored, key=lambda entry: entry[0])]
