"""Rows of data files, in every format, good and bad."""

from __future__ import annotations

import gzip
import importlib
import json

import pytest

from dsrun.data import rows
from dsrun.data.conversations import TEXT, Columns, TextDocument
from dsrun.data.data_file import check_data_file
from dsrun.data.rows import CHECKED_ROWS, FORMATS, BadRowError, read_rows, texts_of
from dsrun.errors import DsrunError

COLUMNS = Columns("content", "summary")
TABLES = [ending for ending in FORMATS if ending != ".txt"]
"""The kinds of files that have columns."""
ROWS = [
    {"content": "类型#裙*颜色#红色", "summary": "一条红色的裙子。"},
    {"content": 'a "quoted", text', "summary": "two\nlines 🙂"},
    {"content": "  spaces  ", "summary": "\ttab"},
]


def write(folder, kind: str, rows=ROWS):
    path = folder / f"the lab's 数据{kind}"
    if kind == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    elif kind == ".json":
        path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    elif kind == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        import csv

        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS[:2], delimiter="\t" if kind == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


def texts(path):
    return [row for _, row in read_rows(path)]


def the_problem(path, columns=COLUMNS):
    (problem,) = check_data_file(path, columns)
    assert problem.where.startswith(str(path))
    return problem


@pytest.mark.parametrize("kind", TABLES)
def test_every_format_gives_the_same_rows(tmp_path, kind):
    path = write(tmp_path, kind)
    assert texts(path) == ROWS
    assert check_data_file(path, COLUMNS) == []


@pytest.mark.parametrize("kind", TABLES)
def test_the_ending_may_be_in_capitals(tmp_path, kind):
    path = write(tmp_path, kind)
    assert texts(path.rename(path.with_suffix(kind.upper()))) == ROWS


@pytest.mark.parametrize("kind", [kind for kind in TABLES if kind != ".parquet"])
def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path, kind):
    path = write(tmp_path, kind)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert texts(path) == ROWS


@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".tsv"])
def test_windows_line_ends(tmp_path, kind):
    rows = [{"content": "a", "summary": "b"}, {"content": "c", "summary": "d"}]
    path = write(tmp_path, kind, rows)
    path.write_bytes(path.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))
    assert texts(path) == rows


def test_jsonl_counts_lines_and_json_counts_rows(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"a": 1}\n\n  \n{"a": 2}', encoding="utf-8")
    assert list(read_rows(path)) == [(2, {"a": 1}), (5, {"a": 2})]
    path = tmp_path / "a.json"
    path.write_text('[\n\n{"a": 1},\n{"a": 2}]', encoding="utf-8")
    assert list(read_rows(path)) == [(1, {"a": 1}), (2, {"a": 2})]


def test_json_with_its_rows_under_a_key(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"version": "1", "data": [{"a": 1}]}', encoding="utf-8")
    assert texts(path) == [{"a": 1}]


def test_a_bad_row_comes_in_its_place(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": \n[1]\n{"a": 2}\n', encoding="utf-8")
    rows = dict(read_rows(path))
    assert (rows[1], rows[4]) == ({"a": 1}, {"a": 2})
    assert isinstance(rows[2], BadRowError)
    assert "JSON" in str(rows[2])
    assert isinstance(rows[3], BadRowError)
    assert "list" in str(rows[3])
    path = tmp_path / "a.json"
    path.write_text('[{"a": 1}, 3, {"a": 2}]', encoding="utf-8")
    assert [isinstance(row, BadRowError) for row in texts(path)] == [False, True, False]
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,2\n1,2,3\n4,5\n", encoding="utf-8")
    assert [isinstance(row, BadRowError) for row in texts(path)] == [False, True, False]


def test_deep_nesting_is_a_bad_row_and_no_crash(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("[" * 100_000 + '\n{"a": 1}\n', encoding="utf-8")
    bad, good = texts(path)
    assert isinstance(bad, BadRowError)
    assert good == {"a": 1}


def test_a_long_cell_of_a_csv_file_is_read(tmp_path):
    row = {"content": "长" * 200_000, "summary": "短"}
    assert texts(write(tmp_path, ".csv", [row])) == [row]


def test_a_row_with_half_a_character_has_no_texts(tmp_path):
    # JSON can spell one half of a surrogate pair; no tokenizer takes it, and no UTF-8 file holds it.
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "\\ud83d", "summary": "b"}\n{"content": "\\ud83d\\ude42", "summary": "b"}\n')
    broken, whole = texts(path)
    assert texts_of(whole, COLUMNS[:2]) == ("🙂", "b")
    assert isinstance(broken, BadRowError) or texts_of(broken, COLUMNS[:2]) is None


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"content": "a", "summary": "b"}, ("a", "b")),
        ({"content": 1, "summary": 0}, ("1", "0")),
        ({"content": " a ", "summary": "b\n"}, (" a ", "b\n")),
        ({"content": "a", "summary": ""}, None),
        ({"content": " \n\t", "summary": "b"}, None),
        ({"content": None, "summary": "b"}, None),
        ({"content": "a"}, None),
        (BadRowError("x"), None),
    ],
)
def test_texts_of_a_row(row, expected):
    assert texts_of(row, COLUMNS[:2]) == expected


@pytest.mark.parametrize("kind", ["", ".pdf", ".jsonl.bak", ".xlsx"])
def test_an_unknown_kind_of_file_names_the_known_ones(tmp_path, kind):
    path = tmp_path / f"data{kind}"
    path.write_text("x")
    problem = the_problem(path)
    assert all(known in problem.hint for known in FORMATS)


def test_a_missing_file_offers_the_nearest(tmp_path):
    path = write(tmp_path, ".jsonl").rename(tmp_path / "train.jsonl")
    problem = the_problem(tmp_path / "trian.jsonl")
    assert "no such file" in problem.what
    assert str(path) in problem.hint


def test_files_joined_by_a_comma_are_several(tmp_path):
    path = write(tmp_path, ".jsonl")
    assert "--train-file" in the_problem(path.with_name(f"{path.name},b.jsonl")).hint


def test_a_missing_folder_is_said(tmp_path):
    assert str(tmp_path / "none") in the_problem(tmp_path / "none" / "train.jsonl").hint


def test_a_folder_is_no_data_file(tmp_path):
    (tmp_path / "train.jsonl").mkdir()
    assert "folder" in the_problem(tmp_path / "train.jsonl").what


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b""),
        ("a.jsonl", b"\n\n  \n"),
        ("a.json", b"[]"),
        ("a.csv", b""),
        ("a.csv", b"content,summary\n"),
        ("a.tsv", b"content\tsummary\n"),
    ],
)
def test_an_empty_file(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    problem = the_problem(tmp_path / name)
    assert "no rows" in problem.what
    assert problem.hint


def test_an_empty_parquet_file(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"content": pa.array([], pa.string()), "summary": pa.array([], pa.string())}), path
    )
    assert "no rows" in the_problem(path).what


@pytest.mark.parametrize("kind", TABLES)
def test_missing_columns_are_named_with_those_there_are(tmp_path, kind):
    path = write(tmp_path, kind)
    problems = check_data_file(path, Columns("question", "answer"))
    assert [problem.where for problem in problems] == [str(path)] * 2
    options = ("--prompt-column", "--response-column")
    for problem, column, option in zip(problems, ("question", "answer"), options, strict=True):
        assert column in problem.what
        assert all(there in problem.what for there in COLUMNS[:2])
        assert option in problem.hint


def test_rows_that_are_all_empty(tmp_path):
    path = write(tmp_path, ".jsonl", [{"content": "a", "summary": " "}, {"content": "", "summary": "b"}])
    assert "empty" in the_problem(path).what


def test_a_file_without_one_good_row(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("nonsense\nmore\n")
    problem = the_problem(path)
    assert "JSON" in problem.what


def test_some_bad_rows_are_no_reason_to_refuse(tmp_path):
    path = write(tmp_path, ".jsonl")
    path.write_text("nonsense\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    assert check_data_file(path, COLUMNS) == []


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv"])
def test_another_encoding_is_named_with_the_way_out(tmp_path, kind):
    path = write(tmp_path, kind, [{"content": "中文" * 9, "summary": "衣服" * 9}])
    path.write_bytes(path.read_text(encoding="utf-8").encode("gb18030"))
    problem = the_problem(path)
    assert "UTF-8" in problem.what
    assert "iconv" in problem.hint


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        (
            "a.jsonl",
            '[\n{"content": "a", "summary": "b"},\n{"content": "c", "summary": "d"}\n]',
            "ending .json",
        ),
        ("a.jsonl", '{\n "content": "a",\n "summary": "b"\n}\n', "on one line"),
        ("a.jsonl", "{'content': 'a', 'summary': 'b'}\n", "json.dumps"),
        ("a.json", '[[{"content": "a"}], [{"content": "b"}]]', "one list"),
        ("a.json", '{"train": [1], "test": [2]}', "file of its own"),
        ("a.csv", "content,summary\na,b,c\n", "quotation marks"),
        ("a.csv", "content;summary\na;b\n", "semicolons"),
        ("a.jsonl", '{"Content": "a", "summary": "b"}\n', "--prompt-column Content"),
    ],
)
def test_a_known_slip_is_answered_with_what_to_do(tmp_path, name, text, word):
    path = tmp_path / name
    path.write_text(text)
    assert word in check_data_file(path, COLUMNS)[0].hint


def test_a_compressed_file_that_isnt_called_so(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(gzip.compress(b'{"content": "a", "summary": "b"}\n'))
    hint = the_problem(path).hint
    assert hint.startswith("It is compressed (.gz)") and "rows.jsonl.gz" in hint and "iconv" not in hint


def test_utf16_is_no_chinese_encoding(tmp_path):
    path = tmp_path / "from excel.csv"
    path.write_text("content,summary\na,b\n", encoding="utf-16")
    hint = the_problem(path).hint
    assert "iconv -f UTF-16" in hint and f"'{path}'" in hint


def test_json_that_is_jsonl_says_so(tmp_path):
    path = write(tmp_path, ".jsonl").rename(tmp_path / "a.json")
    assert ".jsonl" in the_problem(path).hint


@pytest.mark.parametrize("content", ["3", '"x"', '{"a": [1], "b": [2]}', "null"])
def test_json_without_a_list_of_rows(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_text(content)
    assert "list" in the_problem(path).what


def test_what_only_says_that_it_is_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1, or not")
    assert "Parquet" in the_problem(path).what
    path.write_bytes(b"")
    assert the_problem(path).what


def test_a_file_that_vanishes_raises(tmp_path):
    with pytest.raises(DsrunError, match=r"can't be read.*"):
        list(read_rows(tmp_path / "a.jsonl"))


def test_only_the_first_rows_are_looked_at(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "a", "summary": "b"}\n' * CHECKED_ROWS + "nonsense\n" * 50)
    assert check_data_file(path, COLUMNS) == []


@pytest.mark.parametrize("ends", ["\n", ""])
def test_a_plain_text_is_one_document_in_pieces(tmp_path, monkeypatch, ends):
    monkeypatch.setattr(rows, "PIECE_CHARACTERS", 20)
    whole = "".join(f"第 {number} 行 of the book\n" for number in range(9)) + "the end" + ends
    path = tmp_path / "a book.TXT"
    path.write_text("\ufeff" + whole, encoding="utf-8")
    pieces = [row for _, row in read_rows(path)]
    assert "".join(piece.text for piece in pieces) == whole
    assert all(piece.text.endswith("\n") for piece in pieces[:-1])
    assert [piece.begins for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(pieces) > 3
    assert check_data_file(path, COLUMNS) == []


def test_a_line_without_end_is_divided_too(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "PIECE_CHARACTERS", 20)
    path = tmp_path / "a.txt"
    path.write_text("x" * 99)
    assert [len(row.text) for _, row in read_rows(path)] == [40, 40, 19]


def test_a_plain_text_without_a_word(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(" \n\n")
    assert "no rows" in the_problem(path).what


def test_a_plain_text_is_no_table(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a text")
    (problem,) = check_data_file(path, COLUMNS, "alpaca")
    assert "plain text" in problem.what and "alpaca" in problem.what
    assert check_data_file(path, COLUMNS, TEXT) == []
    assert texts(path) == [TextDocument("a text")]


def test_a_single_column_may_be_the_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "a text"}\n')
    assert all("--text-column body" in problem.hint for problem in check_data_file(path, COLUMNS))
    assert check_data_file(path, COLUMNS._replace(text="body")) == []


@pytest.mark.parametrize("packed", rows.PACKED)
@pytest.mark.parametrize("kind", [ending for ending in TABLES if ending != ".parquet"])
def test_compressed_files_are_read_as_what_is_in_them(tmp_path, kind, packed):
    import hashlib

    plain = write(tmp_path, kind)
    path = plain.with_name(plain.name + packed)
    path.write_bytes(importlib.import_module(rows.PACKED[packed]).compress(plain.read_bytes()))
    digest = hashlib.sha256()
    assert list(read_rows(path, digest)) == list(read_rows(plain))
    assert digest.hexdigest() == hashlib.sha256(path.read_bytes()).hexdigest()
    assert rows.about_how_many(path) == rows.about_how_many(plain)
    assert check_data_file(path, COLUMNS) == []
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DsrunError, match="can't be read"):
        list(read_rows(path))
    path.write_bytes(b"no such thing")
    with pytest.raises(DsrunError, match="can't be read"):
        list(read_rows(path))


def test_what_is_compressed_otherwise_is_refused(tmp_path):
    for name in ("a.gz", "a.parquet.gz", "a.jsonl.zip"):
        with pytest.raises(DsrunError, match="unknown kind"):
            rows.kind_of(tmp_path / name)


@pytest.mark.parametrize(
    ("row", "command"),
    [
        ({"translation": {"en": "a", "de": "b"}}, ".translation"),
        ({"dialogue": [{"role": "user", "content": "a"}]}, "{messages: .dialogue}"),
        ({"id": "7", "body": {"messages": []}}, ".body"),
        ({"a b": {"en": "a"}, "url": "x"}, '.["a b"]'),
        ([{"role": "user", "content": "a"}], "{messages: .}"),
        ({"question": "q", "answers": {"text": ["a"], "start": [1]}}, ".answers = .answers.text[0]"),
        ({"prompt": "q", "completion": "a", "label": False}, "select(.label)"),
    ],
)
@pytest.mark.parametrize("kind", [".jsonl", ".json"])
def test_texts_that_lie_deeper_have_a_command_that_takes_them_out(tmp_path, row, command, kind):
    if kind == ".json" and isinstance(row, list):
        pytest.skip("a list of lists is another fault")
    path = write(tmp_path, kind, [row, row])
    question, answer = ("prompt", "completion") if "prompt" in row else ("question", "answers")
    columns = Columns(question, answer) if question in row else COLUMNS
    (problem,) = check_data_file(path, columns)
    rows_of = ".[] | " if kind == ".json" else ""
    assert f"jq -c '{rows_of}{command}'" in problem.hint or f"jq -c {rows_of}{command} " in problem.hint


def test_a_list_that_is_no_conversation_is_said_to_be_one(tmp_path):
    path = write(tmp_path, ".jsonl", [{"title": "t", "paragraphs": [{"context": "c", "qas": []}]}])
    (problem,) = check_data_file(path, COLUMNS)
    assert "objects with context, qas" in problem.hint


def test_the_text_that_a_question_is_about_is_read(tmp_path):
    from dsrun.data.conversations import PROMPT_RESPONSE, content_of, unread_columns

    row = {"context": "the sky is blue", "question": "colour?", "answer": "blue"}
    columns = Columns("question", "answer")
    (turn,) = content_of(row, PROMPT_RESPONSE, columns).turns
    assert (turn.question, turn.extra, turn.answer) == ("colour?", "the sky is blue", "blue")
    assert unread_columns(list(row), PROMPT_RESPONSE, columns) == []
    (turn,) = content_of(row, PROMPT_RESPONSE, columns._replace(blanks=True)).turns
    assert turn.extra == ""
    (turn,) = content_of({**row, "context": {"other": []}}, PROMPT_RESPONSE, columns).turns
    assert turn.extra == ""
    (turn,) = content_of(row, PROMPT_RESPONSE, Columns("context", "answer")).turns
    assert (turn.question, turn.extra) == ("the sky is blue", "")
