"""The fast tokenizer against SentencePiece itself."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("transformers")

from dsrun.jobs.finetune import dataset_folder
from dsrun.training.tiny import _texts
from dsrun.training.tokenizer import train_sentencepiece

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
    "specials": ["<s>", "</s>", "<unk>", "[gMASK]", "<sop>", "sop", "<0x0A>", "<|user|>"],
}


def strings(count: int) -> list[str]:
    draw = random.Random(20)
    kinds = list(KINDS.values())
    found = [
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
    found += [piece for kind in kinds for piece in kind]
    while len(found) < count:
        some = draw.sample(kinds, draw.randint(1, 4))
        found.append("".join(draw.choice(draw.choice(some)) for _ in range(draw.randint(1, 40))))
    return found


STRINGS = strings(8000)


def test_there_are_enough_strings():
    assert len(STRINGS) >= 2000
    assert len(set(STRINGS)) > 7000


def encoded(tokenizer, texts):
    return tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]


@pytest.mark.parametrize("style", ["chatglm2", "chatglm3", "llama"])
def test_ids_are_sentencepieces(fast, pieces, style):
    texts = STRINGS + _texts(dataset_folder("advertise"))
    wrong = [
        text
        for text, ids, wanted in zip(texts, encoded(fast(style), texts), pieces.encode(texts), strict=True)
        if ids != wanted
    ]
    assert wrong == []


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
    assert encoded(loaded, STRINGS) == pieces.encode(STRINGS)
    assert loaded(STRINGS[:300])["input_ids"] == tokenizer(STRINGS[:300])["input_ids"]
    assert loaded.batch_decode(pieces.encode(STRINGS[:300])) == pieces.decode(pieces.encode(STRINGS[:300]))
    for name in ("unk_token_id", "pad_token_id", "eos_token_id", "bos_token_id", "padding_side"):
        assert getattr(loaded, name) == getattr(tokenizer, name)
    assert loaded.get_vocab() == tokenizer.get_vocab()


def test_another_models_pieces(tmp_path):
    """English, another size, longer pieces."""
    import sentencepiece

    from dsrun.training.tokenizer import fast_tokenizer

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
