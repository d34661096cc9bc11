"""SequenceLengths of a file's rows against what the tokenizers themselves count."""

from __future__ import annotations

import json
import statistics
import sys

import pytest

from dsrun.data import sequence_lengths
from dsrun.data.sequence_lengths import SPECIALS, ExampleLength, example_lengths, fitting, measure
from dsrun.errors import DsrunError
from dsrun.job.job import DataSpec

WORDS = ["裙子", "上衣", "a", "dress", "of", "silk", "颜色", "白色", "long"]
ROWS = [
    {
        "content": " ".join(WORDS[: number % 9 + 1]),
        "summary": "，".join(WORDS[number % 7 :] * (1 + number % 3)),
    }
    for number in range(61)
]


@pytest.fixture
def fast(tmp_path):
    """A folder with a tokenizer.json, and the tokenizer. It adds a begin mark of its own where it may."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>"])
    made.train_from_iterator([row["content"] for row in ROWS], trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    folder = tmp_path / "a model's 文件夹"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder, made


@pytest.fixture
def pieces(tmp_path):
    """A folder with a tokenizer.model, and SentencePiece's processor of it."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path / "pieces"
    folder.mkdir()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([row["content"] for row in ROWS]), model_prefix=str(folder / "tokenizer"),
        vocab_size=60, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return folder, sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def file_of(tmp_path, rows) -> str:
    path = tmp_path / "rows 数据.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def spec(train_file, source=10_000, target=10_000) -> DataSpec:
    return DataSpec(
        train_file=train_file,
        eval_file=None,
        prompt_column="content",
        response_column="summary",
        max_source_length=source,
        max_target_length=target,
    )


def test_tokenizer_json(fast, tmp_path):
    folder, made = fast
    lengths = measure(spec(file_of(tmp_path, ROWS)), folder)
    check(lengths, lambda text: len(made.encode(text, add_special_tokens=False).ids))


def test_tokenizer_model(pieces, tmp_path):
    folder, processor = pieces
    lengths = measure(spec(file_of(tmp_path, ROWS)), folder)
    check(lengths, lambda text: len(processor.encode(text)))


def check(lengths, count):
    whole = sorted(count(row["content"]) + SPECIALS + count(row["summary"]) + 1 for row in ROWS)
    assert lengths.rows == len(ROWS)
    assert lengths.mean == pytest.approx(statistics.mean(whole))
    assert (lengths.median, lengths.p95, lengths.longest) == (statistics.median(whole), whole[57], whole[-1])
    assert lengths.cut == 0
    assert len(set(whole)) > 10


def test_the_fast_tokenizer_is_taken_where_there_are_both(fast, pieces, tmp_path):
    folder, made = fast
    (folder / "tokenizer.model").write_bytes((pieces[0] / "tokenizer.model").read_bytes())
    check(
        measure(spec(file_of(tmp_path, ROWS)), folder),
        lambda text: len(made.encode(text, add_special_tokens=False).ids),
    )


def test_long_rows_are_cut_as_training_cuts_them(fast, tmp_path):
    folder, made = fast
    data = file_of(tmp_path, [{"content": "a", "summary": "a"}, {"content": "a " * 50, "summary": "a"}])
    one = len(made.encode("a", add_special_tokens=False).ids)
    lengths = measure(spec(data, source=20, target=9), folder)
    assert (lengths.rows, lengths.longest, lengths.cut) == (2, 20 + one + 1, 0.5)
    assert lengths.median == lengths.longest


def test_a_row_of_just_that_length_is_not_cut(fast, tmp_path):
    folder, made = fast
    data = file_of(tmp_path, [{"content": "dress", "summary": "silk"}])
    prompt, response = (len(made.encode(text, add_special_tokens=False).ids) for text in ("dress", "silk"))
    assert measure(spec(data, source=prompt + SPECIALS, target=response + 1), folder).cut == 0
    assert measure(spec(data, source=prompt + SPECIALS, target=response), folder).cut == 1


def test_a_row_whose_both_ends_are_cut_counts_once(fast, tmp_path):
    folder, _ = fast
    data = file_of(tmp_path, [{"content": "a " * 50, "summary": "a " * 50}])
    lengths = measure(spec(data, source=7, target=5), folder)
    assert (lengths.longest, lengths.cut) == (12, 1.0)


def test_rows_that_training_leaves_out(fast, tmp_path):
    bad = [
        "{", "[1]", {"content": "a"}, {"content": "", "summary": "a"}, {"content": "a", "summary": "  "},
        {"content": None, "summary": "a"}, '{"content": "\\ud800", "summary": "a"}',
    ]  # fmt: skip
    good = [{"content": "a", "summary": "a"}, {"content": 5, "summary": "a"}]
    folder, _ = fast
    assert measure(spec(file_of(tmp_path, [*bad, *good])), folder).rows == 2


def test_no_row_is_an_error(fast, tmp_path):
    with pytest.raises(DsrunError, match="content and summary") as caught:
        measure(spec(file_of(tmp_path, [{"content": "a"}])), fast[0])
    assert caught.value.problems[0].where.endswith("rows 数据.jsonl")


def test_a_long_file_is_sampled_evenly(fast, tmp_path, monkeypatch):
    """Every step-th row from the first on, over the whole file, and no more than the limit."""
    monkeypatch.setattr(sequence_lengths, "MOST_ROWS", 20)
    rows = [{"content": "a", "summary": "a " * (60 if number % 4 == 0 else 1)} for number in range(61)]
    lengths = measure(spec(file_of(tmp_path, rows)), fast[0])
    assert lengths.rows == 16  # every fourth of 61
    assert lengths.mean == lengths.longest > 60


def test_many_rows_pass_in_several_parts(fast, tmp_path, monkeypatch):
    monkeypatch.setattr(sequence_lengths, "CHUNK", 7)
    folder, made = fast
    check(
        measure(spec(file_of(tmp_path, ROWS)), folder),
        lambda text: len(made.encode(text, add_special_tokens=False).ids),
    )


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(DsrunError, match=r"tokenizer\.json") as caught:
        measure(spec(file_of(tmp_path, ROWS)), tmp_path)
    assert "--seq-len" in caught.value.problems[0].hint


@pytest.mark.parametrize(
    ("name", "library"), [("tokenizer.json", "tokenizers"), ("tokenizer.model", "sentencepiece")]
)
def test_a_broken_tokenizer(tmp_path, name, library):
    pytest.importorskip(library)
    (tmp_path / name).write_text("not one", encoding="utf-8")
    with pytest.raises(DsrunError, match="can't be read") as caught:
        measure(spec(file_of(tmp_path, ROWS)), tmp_path)
    assert caught.value.problems[0].where == str(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "library"), [("tokenizer.json", "tokenizers"), ("tokenizer.model", "sentencepiece")]
)
def test_without_the_library(tmp_path, monkeypatch, name, library):
    (tmp_path / name).touch()
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(DsrunError, match=f"needs {library}") as caught:
        measure(spec(file_of(tmp_path, ROWS)), tmp_path)
    assert "pip install" in caught.value.problems[0].hint


# The limits that examples need


def test_limits_cover_99_percent_of_the_examples():
    usual = [ExampleLength(100, 30)] * 990
    assert fitting([*usual, *[ExampleLength(5000, 30)] * 4, *[ExampleLength(9, 700)] * 6], 4096) == (128, 704)
    rare = [*usual, *[ExampleLength(5000, 30)] * 4, *[ExampleLength(9, 700)] * 4]
    assert fitting(rare, 4096) == (128, 64)
    assert sum(one.cut(128, 64) for one in rare) == 8


@pytest.mark.parametrize(
    ("longest", "limits"),
    [
        (ExampleLength(900, 40), (448, 64)),
        (ExampleLength(40, 900), (64, 448)),
        (ExampleLength(900, 900), (256, 256)),
        (ExampleLength(40, 40), (64, 64)),
    ],
)
def test_limits_go_no_further_than_the_models_positions(longest, limits):
    assert fitting([longest], 512) == limits


def test_turns_share_both_limits():
    assert not ExampleLength(150, 10, turns=3).cut(100, 100)
    assert ExampleLength(150, 10).cut(100, 100)
    assert ExampleLength(195, 10, turns=3).cut(100, 100)


def test_what_a_chat_template_adds_is_counted(fast, tmp_path):
    folder, made = fast
    data = spec(file_of(tmp_path, [{"content": "a", "summary": "a"}]))
    (plain,) = example_lengths(data, folder)
    frame = "dress of silk " * 20
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": frame + "{{ messages[0].content }}{{ strftime_now('%d') }}"})
    )
    (framed,) = example_lengths(data, folder)
    count = len(made.encode(frame, add_special_tokens=False).ids)
    assert framed.prompt - plain.prompt >= count - 20
    assert framed.response == plain.response
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ raise_exception('no') }}"})
    )
    assert example_lengths(data, folder) == [plain]


def test_what_a_chat_template_writes_around_tools_is_counted(fast, tmp_path):
    folder, made = fast
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    tool = {"type": "function", "function": {"name": "a"}}
    words = "dress of silk " * 20
    template = f"{{% if tools %}}{words}{{{{ tools | tojson }}}}{{% endif %}}{{{{ messages[0].content }}}}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (without,) = example_lengths(spec(file_of(tmp_path, [{"messages": messages}])), folder)
    (with_tools,) = example_lengths(
        spec(file_of(tmp_path, [{"messages": messages, "tools": [tool]}])), folder
    )
    count = len(made.encode(words, add_special_tokens=False).ids)
    assert with_tools.prompt - without.prompt >= count


def test_of_many_examples_an_even_sample(fast, tmp_path, monkeypatch):
    folder, _ = fast
    monkeypatch.setattr(sequence_lengths, "MOST_ROWS", 20)
    lengths = example_lengths(spec(file_of(tmp_path, ROWS)), folder)
    assert 10 <= len(lengths) <= 21
    assert len(set(lengths)) > 5
