"""Tokenizers: exact fast ones from SentencePiece models and lists of ranks, and the small ones that ship as recipes."""

from __future__ import annotations

import ast
import base64
import heapq
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError
from dsrun.files import read_json_object
from dsrun.models import chatglm

SPACE = "▁"  # SentencePiece writes a space so
SPECIALS = {**chatglm.SPECIALS, "llama": ()}
"""A style -> the tokens that come after the vocabulary."""
GLM4_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern by which GLM-4 cuts a text before it merges bytes (its tokenization_chatglm.py)."""
RANK_PREFIX, RANK_END = ("[gMASK]", "<sop>"), "<|endoftext|>"
"""The tokens before a text of GLM-4, and the one that ends it."""
AGAIN = "Download it again."
SAMPLE_TEXTS = 2000
SAMPLE_LETTERS = 4000


def train_sentencepiece(
    texts: Iterable[str],
    vocab_size: int,
    max_piece_length: int,
    model_file: Path,
    *,
    dummy_prefix: bool = True,
) -> None:
    """Train a SentencePiece BPE model with ChatGLM2's and Llama's options, and write it.

    Identity normalisation, a dummy space in front, runs of spaces kept, byte fallback, single digits; ids:
    unk 0, <s> 1, </s> 2, then the 256 bytes. Deterministic: one thread. max_piece_length (characters): on little
    text a piece would otherwise grow into a whole phrase, too rare to learn. dummy_prefix: CodeGeeX2's has none.
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
        add_dummy_prefix=dummy_prefix,
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

    model_file: a SentencePiece BPE model. style: chatglm2, chatglm3 or llama; chatglm2 and chatglm3 begin a text
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
    unknown = pieces.id_to_piece(pieces.unk_id())
    merges = _merges(pieces, vocabulary)
    bpe = BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    # Whether the model puts a space before a text is tried.
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
    kinds = (pieces.is_unknown, pieces.is_control, pieces.is_unused, pieces.is_byte)
    normal = {piece for piece, index in vocabulary.items() if not any(is_kind(index) for is_kind in kinds)}
    scored = [
        (-pieces.get_score(vocabulary[piece]), (piece[:cut], piece[cut:]))
        for piece in vocabulary
        if piece in normal
        for cut in range(1, len(piece))
        if piece[:cut] in normal and piece[cut:] in normal
    ]
    return [pair for _, pair in sorted(scored, key=lambda entry: entry[0])]


def folder_tokenizer(folder: Path, style: str) -> Any:
    """The fast tokenizer of an original ChatGLM folder, from its tokenizer.model. style: a key of chatglm.SPECIALS."""
    if chatglm.KINDS[style] == chatglm.SENTENCEPIECE:
        return fast_tokenizer(folder / "tokenizer.model", style)
    ranks = read_ranks(folder / "tokenizer.model")
    return rank_tokenizer(ranks, pattern_of(folder), specials_of(folder, len(ranks)))


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model's or an adapter's folder, ChatGLM's own format included. It pads on the left; without a
    token for padding, with the end token."""
    from transformers import AutoTokenizer

    if (folder / "config.json").is_file() and is_original(folder):
        chatglm.check_tokenizer(folder)
        tokenizer = folder_tokenizer(folder, chatglm.prompt_format(folder, None))
    else:
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=False)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def is_original(folder: Path) -> bool:
    """Whether a model's folder is in ChatGLM's own format."""
    return read_json_object(folder / "config.json").get("model_type") == chatglm.MODEL_TYPE


def read_ranks(model_file: Path) -> dict[bytes, int]:
    """Tokens and their ranks, which are their ids: lines of base64 and a number.

    Raises DsrunError unless the ranks are 0, 1, 2, ... and every single byte has one.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(model_file.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            where = f"{model_file}:{number}"
            raise DsrunError("is no base64 token with its rank", where=where, hint=AGAIN) from error
    whole = sorted(ranks.values()) == list(range(len(ranks)))
    if not whole or any(bytes([byte]) not in ranks for byte in range(256)):
        what = "lacks ranks: they must be 0, 1, 2, ..., and every byte must have one"
        raise DsrunError(what, where=str(model_file), hint=AGAIN)
    return ranks


def pattern_of(folder: Path) -> str:
    """The pattern that cuts texts: the one in the folder's own code (read as text, never run), else GLM-4's."""
    code = folder / "tokenization_chatglm.py"
    text = code.read_text(encoding="utf-8", errors="replace") if code.is_file() else ""
    if pattern := re.search(r"""\bpat_str\s*=\s*(r?"(?:[^"\\\n]|\\.)*")""", text):
        return str(ast.literal_eval(pattern[1]))
    return GLM4_PATTERN


def specials_of(folder: Path, size: int) -> tuple[str, ...]:
    """The special tokens, from id `size` on: those in tokenizer_config.json, else GLM-4's.

    Raises DsrunError where their ids are not those after the vocabulary, or where a token that every text begins or
    ends with is not among them.
    """
    path = folder / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        added = {
            int(place): str(token["content"])
            for place, token in config.get("added_tokens_decoder", {}).items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DsrunError(f"is no tokenizer config: {error}", where=str(path), hint=AGAIN) from error
    if not added:
        return SPECIALS["glm-4"]
    if sorted(added) != list(range(size, size + len(added))):
        raise DsrunError(
            f"gives special tokens the ids {min(added)} to {max(added)}; they should start at {size}, after the ranks",
            where=str(path),
            hint="Are tokenizer.model and tokenizer_config.json from one repository?",
        )
    names = tuple(added[place] for place in sorted(added))
    if missing := [name for name in (*RANK_PREFIX, RANK_END) if name not in names]:
        hint = "Is it GLM-4's tokenizer_config.json?"
        raise DsrunError(f"has no special token {', '.join(missing)}", where=str(path), hint=hint)
    return names


def rank_tokenizer(ranks: Mapping[bytes, int], pattern: str, specials: Sequence[str]) -> Any:
    """A transformers tokenizer from ranks: of all neighbours that make a token together, those of the lowest rank join.

    A text begins with [gMASK] <sop>. Bytes stand in the vocabulary as letters, as byte-level tokenizers write them.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    written = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [
        (rank, cut, (written[token[:cut]], written[token[cut:]]))
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    tokenizer = Tokenizer(
        BPE(
            vocab={written[token]: rank for token, rank in ranks.items()},
            merges=[pair for _, _, pair in sorted(merges)],
            ignore_merges=True,  # a piece of text that is a token is taken whole, however it could be merged
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join([*RANK_PREFIX, "$A"]),
        pair=" ".join([*RANK_PREFIX, "$A", "$B:1", f"{RANK_END}:1"]),
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in [*RANK_PREFIX, RANK_END]],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=RANK_END,
        eos_token=RANK_END,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def rank_ids(text: str, ranks: Mapping[bytes, int], pattern: str) -> list[int]:
    """Ids of a text by the definition, which those of rank_tokenizer are compared with.

    As long as neighbours in a piece make a token together, those of the lowest rank join, the leftmost first.
    """
    import regex

    ids = []
    for part in regex.findall(pattern, text):
        piece = part.encode()
        ids += [ranks[piece]] if piece in ranks else [ranks[token] for token in _joined(piece, ranks)]
    return ids


def _joined(piece: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """The tokens that a piece's bytes join to.

    A heap holds the pairs that may join, the lowest rank first. A pair stays in it when one of the two has joined
    another token meanwhile, and is passed over then: taking it out would cost a search.
    """
    ends = list(
        range(1, len(piece) + 1)
    )  # where the token ends that begins at each place; -1: none begins there now
    begins = [-1, *range(len(piece))]  # where the token begins that ends at each place
    waiting: list[tuple[int, int, int]] = []

    def look(left: int) -> None:
        """Note the pair of the token at `left` and the one after it, if they make a token together."""
        if left >= 0 and ends[left] < len(piece):
            end = ends[ends[left]]
            if (rank := ranks.get(piece[left:end])) is not None:
                heapq.heappush(waiting, (rank, left, end))

    for place in range(len(piece)):
        look(place)
    while waiting:
        _, left, end = heapq.heappop(waiting)
        middle = ends[left]
        if middle < 0 or middle >= end or ends[middle] != end:  # one of the two has joined another since
            continue
        ends[left], ends[middle], begins[end] = end, -1, left
        look(left)
        look(begins[left])
    return [piece[place:end] for place, end in enumerate(ends) if end > 0]


def check_on_texts(tokenizer: Any, folder: Path, style: str, texts: Iterable[str]) -> int:
    """Compare the fast tokenizer's ids with those of the folder's tokenizer.model itself; returns the count of texts.

    Raises DsrunError with the first text whose ids differ: rather no training than training on other ids.
    """
    encode = _own_encoder(folder, style)
    count = 0
    for text in texts:
        count += 1
        if _fast_ids(tokenizer, text) != encode(text):
            raise DsrunError(
                f"the fast tokenizer's ids differ from its model's for the text {_shortest(tokenizer, encode, text)!r}",
                where=str(folder / "tokenizer.model"),
                hint="Take such rows out of the data, and report the text: training on other ids would harm the model.",
            )
    return count


def _own_encoder(folder: Path, style: str) -> Callable[[str], list[int]]:
    if chatglm.KINDS[style] == chatglm.RANKS:
        ranks, pattern = read_ranks(folder / "tokenizer.model"), pattern_of(folder)
        return lambda text: rank_ids(text, ranks, pattern)
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return lambda text: list(pieces.encode(text))


def _shortest(tokenizer: Any, encode: Callable[[str], list[int]], text: str) -> str:
    """A part of the text that still differs, halved as long as a half does."""
    while len(text) > 1:
        middle = len(text) // 2
        for half in (text[:middle], text[middle:]):
            if _fast_ids(tokenizer, half) != encode(half):
                text = half
                break
        else:
            break
    return text


def _fast_ids(tokenizer: Any, text: str) -> list[int]:
    encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
    return list(encoded["input_ids"])


def sample_of(rows: Iterable[object], count: int = SAMPLE_TEXTS) -> Iterable[str]:
    """Texts of rows, whatever their columns: those of the first rows, then of every second, fourth and so on."""
    step, taken = 1, 0
    for number, row in enumerate(rows):
        if number % step:
            continue
        for text in _texts(row):
            yield text[:SAMPLE_LETTERS]
            taken += 1
        if taken >= count:
            step, taken = step * 2, 0


def _texts(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)
