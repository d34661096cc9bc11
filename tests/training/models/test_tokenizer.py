"""The fast tokenizer against SentencePiece itself."""

from __future__ import annotations

import base64
import itertools
import json
import random
import unicodedata

import pytest
from needed import needs

needs("transformers")

from transformers.convert_slow_tokenizer import bytes_to_unicode

from dsrun.errors import DsrunError
from dsrun.jobs.assembly.finetune.data import dataset_folder
from dsrun.training.models.tiny import _texts
from dsrun.training.models.tokenizer import (
    GLM4_PATTERN,
    check_on_texts,
    fast_tokenizer,
    folder_tokenizer,
    pattern_of,
    rank_ids,
    read_ranks,
    sample_of,
    specials_of,
    train_sentencepiece,
)

KINDS = {
    "chinese": [chr(code) for code in range(0x4E00, 0x9FA5, 7)],
    "of the corpus": list("类型裙颜色红版型宽松风格简约图案条纹衣样式外套，。#*这款采用设计"),
    "letters": list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    "digits and signs": list("0123456789.,:;!?()[]{}<>+-*/=_#@%&|\\'\"`~^$"),
    "spaces": [*"   ", "  ", "    ", " " * 9, "\t", "\n", "\r\n", "\n\n", "\u3000", "\u00a0"],
    "emoji": ["🙂", "👨‍👩‍👧", "🇨🇳", "❤️", "👍🏽", "🏳️‍🌈"],
    "accents": ["é", "e\u0301", "ñ", "ß", "Ω", "й", "ا", "한", "ก", "ﬁ", "①", "Ａ"],
    "odd": [
        "▁",
        "▁▁",
        "\u0000",
        "\u0007",
        "\u200b",
        "\ufeff",
        "\ue000",
        "\uf8ff",
        "\U000f0000",
        "𠮷",
        "\U0010fffd",
    ],
    # Not those that aren't assigned: libraries differ in which of them are letters by now.
    "any": [
        chr(code) for code in range(1, 0x110000, 97) if unicodedata.category(chr(code)) not in ("Cn", "Cs")
    ],
    "specials": ["<s>", "</s>", "<unk>", "[gMASK]", "<sop>", "sop", "<0x0A>", "<|user|>"],
}


def strings(count: int) -> list[str]:
    draw = random.Random(20)
    kinds = list(KINDS.values())
    texts = [
        "",
        " ",
        "  ",
        "\n",
        "▁",
        "a",
        " a",
        "a ",
        "你好",
        "[Round 1]\n\n问：你好\n\n答：",
        "x" * 500,
        "长" * 300,
    ]
    texts += [piece for kind in kinds for piece in kind]
    while len(texts) < count:
        some = draw.sample(kinds, draw.randint(1, 4))
        texts.append("".join(draw.choice(draw.choice(some)) for _ in range(draw.randint(1, 40))))
    return texts


STRINGS = strings(15500)


def test_there_are_enough_strings():
    assert len(STRINGS) >= 15000
    assert len(set(STRINGS)) > 14000


def encoded(tokenizer, texts):
    return tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]


@pytest.mark.parametrize("style", ["chatglm3", "llama"])
def test_ids_are_sentencepieces(fast, pieces, style):
    texts = STRINGS + _texts(dataset_folder("advertise"))
    wrong = [
        text
        for text, ids, wanted in zip(texts, encoded(fast(style), texts), pieces.encode(texts), strict=True)
        if ids != wanted
    ]
    assert wrong == []


def test_ids_are_sentencepieces_without_a_dummy_prefix(tmp_path):
    """CodeGeeX2's model puts no space before a text."""
    import sentencepiece

    path = tmp_path / "tokenizer.model"
    train_sentencepiece(_texts(dataset_folder("advertise")), 2000, 3, path, dummy_prefix=False)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert not pieces.encode("一件", out_type=str)[0].startswith("▁")
    tokenizer = fast_tokenizer(path, "chatglm2")
    wanted = pieces.encode(STRINGS)
    assert encoded(tokenizer, STRINGS) == wanted
    assert tokenizer.batch_decode(wanted) == pieces.decode(wanted)


def test_texts_are_sentencepieces(fast, pieces):
    tokenizer = fast("chatglm2")
    ids = pieces.encode(STRINGS)
    # SentencePiece shows bytes that are no character as U+FFFD, each on its own; whole texts hold none.
    assert tokenizer.batch_decode(ids) == pieces.decode(ids)


def test_decoding_gives_the_text_back(fast):
    tokenizer = fast("llama")
    texts = [text for text in STRINGS if "▁" not in text]
    assert tokenizer.batch_decode(encoded(tokenizer, texts)) == texts


@pytest.mark.parametrize(
    ("style", "prefix"),
    [("chatglm2", ["[gMASK]", "<sop>"]), ("chatglm3", ["[gMASK]", "<sop>"]), ("llama", ["<s>"])],
)
def test_what_stands_before_a_text(fast, pieces, style, prefix):
    tokenizer = fast(style)
    ids = tokenizer("你好")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids[: len(prefix)]) == prefix
    assert ids[len(prefix) :] == pieces.encode("你好")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "你好"


def test_special_tokens_come_after_the_pieces(fast, pieces):
    vocabulary, size = fast("chatglm2").get_vocab(), pieces.get_piece_size()
    names = ["[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"]
    assert [vocabulary[name] for name in names] == list(range(size, size + 5))
    assert len(fast("llama")) == size


@pytest.mark.parametrize("style", ["chatglm2", "llama"])
def test_roles_of_special_tokens(fast, style):
    tokenizer = fast(style)
    assert (tokenizer.unk_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 0, 2)
    assert tokenizer.bos_token_id == (1 if style == "llama" else None)
    assert tokenizer.padding_side == "left"


@pytest.mark.parametrize("style", ["chatglm2", "chatglm3", "llama"])
def test_a_saved_tokenizer_is_the_same(fast, pieces, tmp_path, style):
    from transformers import AutoTokenizer

    tokenizer = fast(style)
    folder = tmp_path / "a user's 分词器"
    tokenizer.save_pretrained(folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    assert encoded(loaded, STRINGS[::4]) == pieces.encode(STRINGS[::4])
    assert loaded(STRINGS[:300])["input_ids"] == tokenizer(STRINGS[:300])["input_ids"]
    assert loaded.batch_decode(pieces.encode(STRINGS[:300])) == pieces.decode(pieces.encode(STRINGS[:300]))
    for name in ("unk_token_id", "pad_token_id", "eos_token_id", "bos_token_id", "padding_side"):
        assert getattr(loaded, name) == getattr(tokenizer, name)
    assert loaded.get_vocab() == tokenizer.get_vocab()


def test_another_models_pieces(tmp_path):
    """English, another size, longer pieces."""
    import sentencepiece

    sentence = (
        "the quick brown fox jumps over a lazy dog while seven wizards mix potions for the king's feast"
    )
    words, draw = sentence.split(), random.Random(1)
    texts = [" ".join(draw.choices(words, k=9)) for _ in range(500)]
    train_sentencepiece(texts, 420, 16, tmp_path / "tokenizer.model")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    tokenizer = fast_tokenizer(tmp_path / "tokenizer.model", "llama")
    assert encoded(tokenizer, texts + STRINGS) == pieces.encode(texts + STRINGS)


def test_training_is_repeatable(piece_model, tmp_path):
    train_sentencepiece(_texts(dataset_folder("advertise")), 2000, 3, tmp_path / "again.model")
    assert (tmp_path / "again.model").read_bytes() == piece_model.read_bytes()


def test_ids_of_control_and_bytes(pieces):
    assert [pieces.id_to_piece(index) for index in range(3)] == ["<unk>", "<s>", "</s>"]
    assert pieces.id_to_piece(3) == "<0x00>"
    assert pieces.id_to_piece(13) == "<0x0A>"
    assert all(len(pieces.id_to_piece(index)) <= 3 for index in range(259, pieces.get_piece_size()))


# GLM-4's: bytes that join by rank


@pytest.fixture(scope="module")
def rank_folder(tmp_path_factory):
    """A folder with a tokenizer.model of ranks, learnt from the shipped text and from English words."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GLM4_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=3000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*_texts(dataset_folder("advertise")), *STRINGS[::3]], trainer)
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    folder = tmp_path_factory.mktemp("ranks")
    lines = [
        base64.b64encode(bytes(letters[letter] for letter in token)).decode() + f" {rank}"
        for token, rank in sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    ]
    (folder / "tokenizer.model").write_text("\n".join(lines))
    return folder


def by_definition(text: str, ranks: dict[bytes, int]) -> list[int]:
    """Of all neighbours in a piece of text that are a token together, those of the lowest rank join, and again."""
    regex = pytest.importorskip("regex")
    ids = []
    for piece in regex.findall(GLM4_PATTERN, text):
        whole = piece.encode()
        parts = [whole] if whole in ranks else [whole[place : place + 1] for place in range(len(whole))]
        while True:
            joined = [ranks.get(left + right) for left, right in itertools.pairwise(parts)]
            known = [rank for rank in joined if rank is not None]
            if not known:
                break
            place = joined.index(min(known))
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def test_ids_are_those_of_the_ranks(rank_folder):
    texts = STRINGS + _texts(dataset_folder("advertise"))[:500]
    ranks = read_ranks(rank_folder / "tokenizer.model")
    assert len(ranks) == 3000
    encoded_texts = encoded(folder_tokenizer(rank_folder, "glm-4"), texts)
    pairs = list(zip(texts, encoded_texts, strict=True))
    assert [text for text, ids in pairs if ids != rank_ids(text, ranks, GLM4_PATTERN)] == []
    assert [text for text, ids in pairs[::4] if ids != by_definition(text, ranks)] == []


def test_tokens_join_as_the_definition_says_whatever_the_ranks():
    draw = random.Random(8)
    for _ in range(300):
        words = {"".join(draw.choices("abc", k=draw.randint(2, 5))).encode() for _ in range(12)}
        tokens = [bytes([byte]) for byte in range(256)] + draw.sample(sorted(words), len(words))
        ranks = {token: rank for rank, token in enumerate(tokens)}
        for _ in range(5):
            text = "".join(draw.choices("abc", k=draw.randint(1, 25)))
            assert rank_ids(text, ranks, GLM4_PATTERN) == by_definition(text, ranks)


def test_ids_are_tiktokens(rank_folder):
    tiktoken = pytest.importorskip("tiktoken")
    ranks = read_ranks(rank_folder / "tokenizer.model")
    own = tiktoken.Encoding("own", pat_str=GLM4_PATTERN, mergeable_ranks=ranks, special_tokens={})
    assert encoded(folder_tokenizer(rank_folder, "glm-4"), STRINGS) == own.encode_ordinary_batch(STRINGS)


def test_texts_come_back_from_ranks(rank_folder):
    tokenizer = folder_tokenizer(rank_folder, "glm-4")
    assert tokenizer.batch_decode(encoded(tokenizer, STRINGS)) == STRINGS


def test_what_stands_before_a_text_of_glm_4(rank_folder, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = folder_tokenizer(rank_folder, "glm-4")
    ids = tokenizer("你好")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids[:2]) == ["[gMASK]", "<sop>"]
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "[gMASK]", "<|user|>", "<|observation|>"]) == [
        3000, 3002, 3007, 3009
    ]  # fmt: skip
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token) == (
        "<|endoftext|>",
        "<|endoftext|>",
        None,
    )
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(STRINGS[:500])["input_ids"] == tokenizer(STRINGS[:500])["input_ids"]


def test_the_folder_says_pattern_and_special_tokens(rank_folder, tmp_path):
    code = 'import tiktoken\nclass T:\n    def __init__(self):\n        pat_str = "\\\\s+|\\\\S"\n'
    (tmp_path / "tokenization_chatglm.py").write_text(code)
    assert pattern_of(tmp_path) == r"\s+|\S"
    assert pattern_of(rank_folder) == GLM4_PATTERN
    names = ("<|endoftext|>", "[gMASK]", "<sop>", "<0>")
    added = {str(3000 + place): {"content": name} for place, name in enumerate(names)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    assert specials_of(tmp_path, 3000) == names
    with pytest.raises(DsrunError, match="3000 to 3003"):
        specials_of(tmp_path, 2999)
    added["3002"] = {"content": "sop"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(DsrunError, match="has no special token <sop>"):
        specials_of(tmp_path, 3000)


@pytest.mark.parametrize("text", ["IQ== x\n", "IQ==\n", "*** 0\n", "IQ== 0\n", "IQ== 1\nIg== 0\n", ""])
def test_a_damaged_list_of_ranks(text, tmp_path):
    (tmp_path / "tokenizer.model").write_text(text)
    with pytest.raises(DsrunError) as caught:
        read_ranks(tmp_path / "tokenizer.model")
    assert str(tmp_path / "tokenizer.model") in caught.value.problems[0].where


# The check at the start


def test_a_tokenizer_that_agrees(piece_model, fast, rank_folder):
    texts = STRINGS[:300]
    assert check_on_texts(fast("chatglm3"), piece_model.parent, "chatglm3", texts) == 300
    assert check_on_texts(folder_tokenizer(rank_folder, "glm-4"), rank_folder, "glm-4", texts) == 300


def test_a_tokenizer_that_differs_is_refused_with_the_text(piece_model, fast):
    tokenizer = fast("chatglm2")
    from tokenizers import normalizers

    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(DsrunError) as caught:
        check_on_texts(tokenizer, piece_model.parent, "chatglm2", ["一" * 100 + "\tA" + "二" * 100])
    (problem,) = caught.value.problems
    assert "'" in problem.what
    assert len(problem.what) < 200, "the text is shortened to what differs"
    assert problem.where == str(piece_model)


def test_a_tie_that_ranks_decide_by_place(tmp_path):
    """ab+a and a+ba are both aba: the left one joins. What can't be told to the fast tokenizer is caught."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"ab", b"ba", b"aba"]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (tmp_path / "tokenizer.model").write_text("\n".join(lines))
    tokenizer, ranks = folder_tokenizer(tmp_path, "glm-4"), read_ranks(tmp_path / "tokenizer.model")
    draw = random.Random(3)
    texts = ["".join(draw.choices("ab", k=draw.randint(1, 12))) for _ in range(500)]
    differ = [text for text in texts if encoded(tokenizer, [text])[0] != rank_ids(text, ranks, GLM4_PATTERN)]
    for text in differ:
        with pytest.raises(DsrunError):
            check_on_texts(tokenizer, tmp_path, "glm-4", [text])


def test_texts_of_rows_whatever_their_columns():
    rows = [
        {"content": "a", "summary": "b", "number": 3},
        {"history": [["c", "d"]], "messages": [{"role": "user", "content": "e"}]},
        ValueError("a bad row"),
    ]
    assert list(sample_of(rows)) == ["a", "b", "c", "d", "user", "e"]
    many = list(sample_of([{"x": str(number)} for number in range(100_000)], count=100))
    assert many[:100] == [str(number) for number in range(100)]
    assert 500 < len(many) < 1200
    assert int(many[-1]) > 50_000
