"""The options that say which rows are trained on, from the command line to the job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from asking import finetune_request

from dsrun.cli.finetune import command
from dsrun.data.conversations import Columns
from dsrun.data.data_file import check_data_file, unusable
from dsrun.data.rows import about_how_many, format_of
from dsrun.data.sequence_lengths import measure
from dsrun.errors import DsrunError
from dsrun.job.job import DataSpec
from dsrun.jobs.assembly.finetune import plan

COLUMNS = Columns("content", "summary")
ROWS = {
    "prompt-response": {"content": "q", "summary": "a"},
    "alpaca": {"instruction": "i", "input": "x", "output": "o"},
    "sharegpt": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "messages": {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    "text": {"text": "a book"},
}


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    """An empty folder to stand in, a cache of its own, and a CUDA that has a compiler."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "work"


def write(name: str, *rows) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    Path(name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Path(name)


def given(*words: str) -> dict:
    """What the command line makes of its options."""
    params = command.make_context("finetune", ["llama-tiny", *words]).params
    return {name: value for name, value in params.items() if value not in (None, False, ())}


def planned(machine, *words: str):
    options = {name: value for name, value in given(*words).items() if name != "words"}
    return plan(finetune_request(**options), machine, {})


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet", ".csv"])
def test_the_format_is_found_by_the_columns(machine, kind, ending):
    path = Path(f"the lab's 数据{ending}")
    row = ROWS[kind]
    if ending == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist([row]), path)
    elif ending == ".csv":
        import csv

        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(row)
            writer.writerow(
                [value if isinstance(value, str) else json.dumps(value) for value in row.values()]
            )
    else:
        path.write_text(json.dumps([row] if ending == ".json" else row), encoding="utf-8")
    assert format_of(path, COLUMNS) == kind
    assert check_data_file(path, COLUMNS) == []
    assert unusable(path, COLUMNS) == []
    found = planned(machine, "--train-file", str(path))
    assert found.job.data.data_format == kind
    said = [note for note in found.notes if f"read as {kind}" in note]
    assert len(said) == (kind != "prompt-response")


def test_files_with_weights(machine, work):
    for name in ("a.jsonl", "b.jsonl", "c.jsonl:2"):
        write(name, ROWS["messages"])
    assert planned(machine, "--train-file", "a.jsonl:1").job.data.weights == ()
    words = [word for name in ("a.jsonl:0.5", "b.jsonl", "c.jsonl:2") for word in ("--train-file", name)]
    with pytest.raises(DsrunError, match="jsonl:2"):  # a file that is called so is the file
        planned(machine, *words)
    Path("c.jsonl:2").rename("c.jsonl")
    data = planned(machine, *words).job.data
    assert data.train_files == tuple(str(work / name) for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    assert data.weights == (0.5, 1.0, 2.0)


def test_a_weight_of_nothing_is_refused(machine):
    write("a.jsonl", ROWS["messages"])
    with pytest.raises(DsrunError, match="more than 0"):
        planned(machine, "--train-file", "a.jsonl:0")


def test_files_of_several_formats_keep_each_its_own(machine):
    write("a.jsonl", ROWS["alpaca"])
    write("b.jsonl", ROWS["messages"])
    found = planned(machine, "--train-file", "a.jsonl", "--train-file", "b.jsonl")
    assert found.job.data.data_format == "auto"
    assert sum("is read as" in note for note in found.notes) == 2


def test_a_format_by_hand(machine):
    write("a.jsonl", {**ROWS["alpaca"], **ROWS["messages"]})
    assert planned(machine, "--train-file", "a.jsonl").job.data.data_format == "messages"
    found = planned(machine, "--train-file", "a.jsonl", "--data-format", "alpaca")
    assert found.job.data.data_format == "alpaca"
    assert not any("is read as" in note for note in found.notes)
    with pytest.raises(DsrunError, match="no column 'conversations'") as caught:
        planned(machine, "--train-file", "a.jsonl", "--data-format", "sharegpt")
    assert "--data-format" in caught.value.problems[0].hint


def test_named_columns_are_meant(machine):
    write("a.jsonl", ROWS["messages"])
    with pytest.raises(DsrunError, match="no column 'question'"):
        planned(machine, "--train-file", "a.jsonl", "--prompt-column", "question")


def test_every_file_is_checked(machine):
    write("a.jsonl", ROWS["messages"])
    write("b.jsonl", {"x": 1})
    with pytest.raises(DsrunError) as caught:
        planned(machine, "--train-file", "a.jsonl", "--train-file", "b.jsonl", "--train-file", "none.jsonl")
    wheres = [Path(problem.where).name for problem in caught.value.problems]
    assert wheres == ["b.jsonl", "b.jsonl", "none.jsonl"]


def test_rows_that_no_format_can_read(machine):
    write("a.jsonl", {"messages": [{"role": "narrator", "content": "x"}]})
    with pytest.raises(DsrunError, match="as messages; the first has an unknown role: 'narrator'"):
        planned(machine, "--train-file", "a.jsonl")


def test_strict_data_is_looked_at_before_anything_starts(machine):
    write("a.jsonl", *[ROWS["messages"]] * 300, "{", ROWS["messages"], {"messages": []})
    assert planned(machine, "--train-file", "a.jsonl").job.data.strict_data is False
    with pytest.raises(DsrunError) as caught:
        planned(machine, "--train-file", "a.jsonl", "--strict-data")
    assert [problem.where.rpartition(":")[2] for problem in caught.value.problems] == ["301", "303"]
    write("a.jsonl", ROWS["messages"])
    assert planned(machine, "--train-file", "a.jsonl", "--strict-data").job.data.strict_data is True


def test_the_other_options_arrive(machine):
    write("a.jsonl", {"content": "q", "summary": "a", "before": [["x", "y"]]})
    data = planned(
        machine, "--train-file", "a.jsonl", "--history-column", "before", "--train-on-prompt"
    ).job.data
    assert (data.history_column, data.train_on_prompt, data.official) == ("before", True, False)


def test_training_on_prompts_is_not_of_the_official_recipe(machine):
    write("a.jsonl", ROWS["prompt-response"])
    request = finetune_request(train_file="a.jsonl", train_on_prompt=True, official=True)
    with pytest.raises(DsrunError, match="--official"):
        plan(request, machine, {})


def test_about_how_many_rows():
    assert about_how_many(write("a.jsonl", 1, 2, 3)) == 3
    assert about_how_many(write("a.csv", "head", "a", "b")) == 2
    assert about_how_many(write("a.json", "[]")) is None


def test_lengths_of_talks(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    turns = [{"from": role, "value": "one two three"} for role in ("human", "gpt") * 3]
    path = str(write("a.jsonl", {"conversations": turns}, {"conversations": turns[:2]}, "{"))
    found = measure(
        DataSpec(
            train_file=path,
            eval_file=None,
            prompt_column="content",
            response_column="summary",
            max_source_length=20,
            max_target_length=10,
        ),
        tmp_path,
    )
    assert (found.rows, found.longest, found.cut) == (2, 30, 0.5)
    found = measure(
        DataSpec(
            train_file=path,
            eval_file=None,
            prompt_column="content",
            response_column="summary",
            max_source_length=200,
            max_target_length=100,
        ),
        tmp_path,
    )
    assert (found.longest, found.median) == (3 * (3 + 4 + 3 + 1), 3 * (3 + 4 + 3 + 1))
    assert found.mean == (33 + 11) / 2


def test_the_column_of_plain_text(machine):
    write("a.jsonl", {"body": "a text", "content": "q", "summary": "a"})
    assert planned(machine, "--train-file", "a.jsonl").job.data.data_format == "prompt-response"
    data = planned(machine, "--train-file", "a.jsonl", "--text-column", "body").job.data
    assert (data.data_format, data.text_column) == ("text", "body")


def test_plain_text_beside_conversations(machine):
    Path("a.txt").write_text("a text\n")
    write("b.jsonl", {"q": "?", "a": "!"})
    files = (
        "--train-file",
        "a.txt",
        "--train-file",
        "b.jsonl",
        "--prompt-column",
        "q",
        "--response-column",
        "a",
    )
    with pytest.raises(DsrunError, match="is plain text") as caught:
        planned(machine, *files)
    assert "--text-column" in caught.value.problems[0].hint
    found = planned(machine, *files, "--text-column", "text")
    assert found.job.data.data_format == "auto"
    assert any("a.txt is read as text" in note for note in found.notes)


def test_plain_text_is_not_of_the_official_recipe(machine):
    Path("a.txt").write_text("a text\n")
    with pytest.raises(DsrunError, match="--official"):
        planned(machine, "--train-file", "a.txt", "--official")


def test_lengths_of_documents_are_those_of_their_windows(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    path = str(write("a.jsonl", {"text": "one two"}, {"text": "word " * 20}))
    data = DataSpec(train_file=path, eval_file=None, max_source_length=6, max_target_length=4)
    found = measure(
        data, tmp_path
    )  # 20 words and an end: 10 tokens, then 9 new ones and the one before, then 2 and it
    assert (found.rows, found.longest, found.cut) == (4, 10, 0)
    assert found.mean == (3 + 10 + 10 + 3) / 4


# Columns by their roles

PAIRS = [
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "answer"),
    ("query", "answer"),
    ("input", "output"),
    ("text", "label"),
]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_pairs_are_known_by_their_names(machine, pair):
    write("a.jsonl", {pair[0]: "q", pair[1]: "a", "id": 1})
    write("e.jsonl", {pair[0]: "q", pair[1]: "a"})
    found = planned(machine, "--train-file", "a.jsonl", "--eval-file", "e.jsonl")
    data = found.job.data
    assert (data.prompt_column, data.response_column, data.data_format) == (*pair, "prompt-response")
    (note,) = [note for note in found.notes if "prompts are column" in note]
    assert ("a classifier" in note) == (pair[1] == "label")
    assert "--prompt-column" in note


def test_instruction_and_response_are_dollys(machine):
    write("a.jsonl", {"instruction": "i", "context": "c", "response": "r", "category": "x"})
    assert planned(machine, "--train-file", "a.jsonl").job.data.data_format == "dolly"


def test_text_alone_and_text_that_is_named_stay_text(machine):
    write("a.jsonl", {"text": "a", "label": "b"})
    found = planned(machine, "--train-file", "a.jsonl", "--text-column", "text")
    assert found.job.data.data_format == "text"
    write("b.jsonl", {"text": "a", "meta": "b"})
    assert planned(machine, "--train-file", "b.jsonl").job.data.data_format == "text"


def test_messages_in_two_columns_are_one_conversation(machine):
    asked, answered = [{"role": "user", "content": "q"}], [{"role": "assistant", "content": "a"}]
    path = write("a.jsonl", {"prompt": asked, "completion": answered})
    planned(machine, "--train-file", "a.jsonl")
    assert unusable(path, Columns("prompt", "completion"), "prompt-response") == []
    bad = write("b.jsonl", {"prompt": {"a": 1}, "completion": "x"})
    (problem,) = unusable(bad, Columns("prompt", "completion"), "prompt-response")
    assert "something other than text" in problem.what


def test_preferences_are_refused_with_what_would_be_taken(machine):
    row = {"prompt": "q", "chosen": "a", "rejected": "b"}
    write("a.jsonl", row)
    with pytest.raises(DsrunError, match="not on preferences") as caught:
        planned(machine, "--train-file", "a.jsonl")
    assert "--response-column chosen" in caught.value.problems[0].hint
    planned(machine, "--train-file", "a.jsonl", "--prompt-column", "prompt", "--response-column", "chosen")


def test_files_under_different_names_are_refused(machine):
    write("a.jsonl", {"question": "q", "answer": "a"})
    write("b.jsonl", {"prompt": "q", "response": "a"})
    with pytest.raises(DsrunError, match="different names"):
        planned(machine, "--train-file", "a.jsonl", "--train-file", "b.jsonl")


def test_columns_that_nobody_knows_are_told_in_one_problem(machine):
    write("a.jsonl", {"promt": "q", "respnse": "a", "x": 1})
    with pytest.raises(DsrunError) as caught:
        planned(machine, "--train-file", "a.jsonl")
    (problem,) = caught.value.problems
    assert "--prompt-column promt --response-column respnse" in problem.hint


def test_many_bad_rows_stop_the_job(machine):
    rows = [row for _ in range(25) for row in (ROWS["prompt-response"], "{broken", "{broken", "[1]")]
    write("a.jsonl", *rows)
    with pytest.raises(DsrunError, match="75 of 100 rows can't be trained on") as caught:
        planned(machine, "--train-file", "a.jsonl")
    assert "--allow-bad-rows" in caught.value.problems[0].hint
    found = planned(machine, "--train-file", "a.jsonl", "--allow-bad-rows")
    assert any("75 of 100 rows" in note for note in found.notes)


def test_a_few_bad_rows_are_told(machine):
    write("a.jsonl", *[ROWS["prompt-response"]] * 39, "{broken")
    found = planned(machine, "--train-file", "a.jsonl")
    assert any("1 of 40 rows can't be trained on (1 is not JSON)" in note for note in found.notes)


def test_rows_are_held_out_and_cut_to_a_number(machine):
    write("a.jsonl", *[{"prompt": f"q{n}", "response": "a"} for n in range(50)])
    data = planned(machine, "--train-file", "a.jsonl", "--max-samples", "20", "--val-size", "0.25").job.data
    assert [about_how_many(Path(path)) for path in (data.train_file, data.eval_file)] == [15, 5]
    with pytest.raises(DsrunError, match="both say what is held out"):
        planned(machine, "--train-file", "a.jsonl", "--val-size", "0.1", "--eval-file", "a.jsonl")


def test_messages_name_the_files_that_the_user_knows(machine):
    """The rows that are left after --val-size and --max-samples lie in the cache, under names that nobody chose."""
    write("a.jsonl", *[{"text": f"q{n}", "label": "a"} for n in range(50)])
    notes = planned(machine, "--train-file", "a.jsonl", "--val-size", "0.2").notes
    assert any("/a.jsonl: a classifier" in note for note in notes)
    write("b.jsonl", *[ROWS["prompt-response"]] * 9, "{broken")
    with pytest.raises(DsrunError) as caught:
        planned(machine, "--train-file", "b.jsonl", "--val-size", "0.2", "--max-samples", "10")
    (problem,) = caught.value.problems
    assert (Path(problem.where).name, "1 of 10 rows" in problem.what) == ("b.jsonl", True)
    assert not [note for note in notes if "/datasets/" in note]


def test_a_held_out_file_that_is_trained_on_is_told(machine):
    write("a.jsonl", ROWS["prompt-response"])
    found = planned(machine, "--train-file", "a.jsonl", "--eval-file", "./a.jsonl")
    assert any("is trained on, too" in note for note in found.notes)


def test_one_limit_for_prompt_and_response(machine):
    write("a.jsonl", ROWS["prompt-response"])
    data = planned(machine, "--train-file", "a.jsonl", "--max-length", "101").job.data
    assert (data.max_length, data.max_source_length, data.max_target_length) == (101, 51, 50)
    with pytest.raises(DsrunError, match="limit the same tokens"):
        planned(machine, "--train-file", "a.jsonl", "--max-length", "9", "--max-target-length", "4")
