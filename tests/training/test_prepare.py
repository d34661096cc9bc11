"""Data files as tokenised rows: what is in them, the report, and that nothing of it depends on how many did it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from needed import needs

needs("torch", "transformers")

from plain_tokenizer import plain_tokenizer

from dsrun.data import inputs
from dsrun.data.cache import prepared_paths
from dsrun.data.rows import read_rows
from dsrun.errors import DsrunError
from dsrun.job.export_request import ExportRequest
from dsrun.job.job import DataSpec, HostDevices, Job, ModelSpec, TrainingSpec
from dsrun.options.table import PeftOptions
from dsrun.training import export_process, worker
from dsrun.training import prepare as prepare_module
from dsrun.training.data import tokenizing
from dsrun.training.data.batches import IGNORED, Examples
from dsrun.training.data.prompts import encoder_for
from dsrun.training.data.tokenizing import DataFile, describe, lines, marked, tokenise
from dsrun.training.prepare import prepare
from dsrun.training.reports.report import Report


@pytest.fixture(scope="module")
def tokenizer():
    return plain_tokenizer()


@pytest.fixture
def make(tmp_path, tokenizer):
    """`make(rows or several of them, format, **fields of DataSpec)`: the report and the rows."""

    def made(*contents, name="chatglm3", weights=(), processes=1, say=None, **fields):
        files = []
        for number, rows in enumerate(contents):
            path = tmp_path / f"rows {number} 数据.jsonl"
            texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
            path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
            files.append(DataFile(path, weights[number] if weights else 1.0))
        data = DataSpec(**{
                "train_file": str(files[0].path), "eval_file": None, "prompt_column": "content",
                "response_column": "summary", "max_source_length": 99, "max_target_length": 99, **fields,
            })  # fmt: skip
        target = tmp_path / f"out {processes}.arrow"
        encoder = encoder_for(tokenizer, name)
        return tokenise(files, data, encoder, target, processes=processes, say=say), Examples(target)

    return made


def pair(number: int) -> dict:
    return {"content": f"question {number}", "summary": f"answer {number}"}


def talk(number: int, rounds: int = 2) -> dict:
    turns = []
    for place in range(rounds):
        turns += [{"from": "human", "value": f"q{place} of {number}"}, {"from": "gpt", "value": f"a{place}"}]
    return {"conversations": turns}


def trained(tokenizer, rows, row) -> list[str]:
    return [tokenizer.decode(rows.ids(row)[start:end]) for start, end in rows.spans(row)]


def test_several_files_of_several_formats(make, tokenizer):
    alpaca = [{"instruction": "Add.", "input": "1 + 1", "output": "2"}]
    report, rows = make([pair(0), pair(1)], alpaca, [talk(7)])
    assert [entry["format"] for entry in report["files"]] == ["prompt-response", "alpaca", "sharegpt"]
    assert [entry["rows"] for entry in report["files"]] == [2, 1, 1]
    assert len(rows) == report["rows"] == report["rows_per_epoch"] == 4
    assert trained(tokenizer, rows, 0) == [" \n answer 0</s>"]
    assert trained(tokenizer, rows, 3) == [" \n a0<|user|>", " \n a1</s>"]
    assert rows.text(2, "prompt") == "Add.\n1 + 1"
    assert rows.text(3, "response") == "a1"
    assert tokenizer.decode(rows.prompt_ids(3)).endswith("q1 of 7<|assistant|>")


def test_labels_are_the_ids_of_what_is_trained_on(make):
    report, rows = make([pair(0), talk(1), talk(2, rounds=3)], data_format="auto")
    assert report["rows"] == 1, "the first rows' columns decide for the file"
    report, rows = make([talk(1), talk(2, rounds=3)], [pair(0)])
    for row in range(len(rows)):
        ids, labels = list(rows.ids(row)), list(rows.labels(row))
        inside = {place for start, end in rows.spans(row) for place in range(start, end)}
        assert labels == [token if place in inside else IGNORED for place, token in enumerate(ids)]
        assert rows.target_tokens(row) == len(inside)
        assert rows.length(row) == len(ids)
    assert report["target_tokens"] == sum(rows.target_tokens(row) for row in range(len(rows)))
    assert report["tokens"] == sum(rows.length(row) for row in range(len(rows)))


def test_prompts_can_be_trained_on(make):
    report, rows = make([pair(0), pair(1)], train_on_prompt=True)
    assert list(rows.labels(1)) == [IGNORED, *rows.ids(1)[1:]]
    assert report["target_tokens"] == report["tokens"] - 2
    whole = list(rows.ids(1))
    assert rows.prompt_ids(1) == whole[: int(rows.prompt_tokens[1])] != whole


@pytest.mark.parametrize("weights", [(2.0, 0.5), (1.0, 3.0), (0.25, 1.5), (1.0, 0.1)])
def test_weights_say_how_often_rows_come(make, weights):
    report, rows = make([pair(n) for n in range(10)], [pair(n) for n in range(100, 130)], weights=weights)
    names = [rows.text(row, "prompt") for row in range(len(rows))]
    first, second = (Counter(name for name in names if (len(name) > 10) == late) for late in (False, True))
    assert sum(first.values()) == int(10 * weights[0])
    assert sum(second.values()) == int(30 * weights[1])
    for rows_of_file, weight in ((first, weights[0]), (second, weights[1])):
        assert set(rows_of_file.values()) <= {int(weight), int(weight) + (weight % 1 > 0)} | {1}
    assert report["rows"] == 40
    assert report["rows_per_epoch"] == len(rows)
    for row, name in enumerate(names):
        assert list(rows.ids(row)[-3:-1]) == list(rows.ids(names.index(name))[-3:-1])


def test_half_of_a_file_is_taken_evenly(make):
    _, rows = make([pair(n) for n in range(10)], weights=(0.5,))
    assert [rows.text(row, "prompt") for row in range(len(rows))] == [
        f"question {n}" for n in (1, 3, 5, 7, 9)
    ]


@pytest.mark.parametrize("name", ["chatglm2", "chatglm3", "llama-2"])
def test_several_processes_give_the_same(make, tmp_path, monkeypatch, name):
    monkeypatch.setattr(tokenizing, "CHUNK_ROWS", 7)
    contents = [[*map(pair, range(20)), "nonsense", *map(pair, range(20, 60))], [*map(talk, range(30))]]
    one, _ = make(*contents, name=name)
    three, rows = make(*contents, name=name, processes=3)
    for report in (one, three):
        del report["seconds"], report["bad_rows_file"]
    assert one == three
    assert (tmp_path / "out 1.arrow").read_bytes() == (tmp_path / "out 3.arrow").read_bytes()
    assert len(rows) == 60 + 30 * (2 if name == "chatglm2" else 1)


def test_bad_rows_are_counted_and_listed(make, tmp_path):
    bad = [
        "{",
        "[1]",
        {"content": "a"},
        {"content": "q", "summary": "a", "history": 3},
        '{"content": "\\ud800"}',
    ]
    report, rows = make([pair(0), *bad, pair(1)])
    assert len(rows) == report["rows"] == 2
    assert (report["bad"], report["empty"]) == (4, 1)
    assert sum(report["dropped"].values()) == 5
    assert [entry["row"] for entry in report["bad_rows"]] == [2, 3, 4, 5, 6]
    listed = [
        json.loads(line) for line in Path(report["bad_rows_file"]).read_text(encoding="utf-8").splitlines()
    ]
    assert listed == report["bad_rows"]
    assert all(entry["file"].endswith("rows 0 数据.jsonl") for entry in listed)
    (line,) = [line for line in lines(report) if "left out" in line]
    assert line.startswith("5 rows left out")
    assert report["bad_rows_file"] in line
    assert json.loads((tmp_path / "out 1.arrow.json").read_text(encoding="utf-8")) == report


def test_strict_data_stops_and_leaves_nothing(make, tmp_path):
    with pytest.raises(DsrunError) as caught:
        make([pair(0), "{", {"content": "a"}], strict_data=True)
    first, second = caught.value.problems
    assert first.where.endswith("数据.jsonl:2")
    assert second.where.endswith("数据.jsonl:3")
    assert "--strict-data" in second.hint
    assert [path.name for path in tmp_path.iterdir()] == ["rows 0 数据.jsonl"]
    assert len(make([pair(0), pair(1)], strict_data=True)[1]) == 2


def test_no_row_at_all(make, tmp_path):
    with pytest.raises(DsrunError, match="no row"):
        make([{"content": "a"}, "{"])
    assert [path.name for path in tmp_path.iterdir()] == ["rows 0 数据.jsonl"]


def test_a_process_that_dies_is_an_error_of_the_users_machine(make, monkeypatch, tmp_path):
    import os

    monkeypatch.setattr(tokenizing, "encode_chunk", lambda *_: os._exit(9))
    with pytest.raises(DsrunError, match="ended from outside"):
        make([pair(0)], processes=2)
    assert [path.name for path in tmp_path.iterdir()] == ["rows 0 数据.jsonl"]


def test_the_report_measures_lengths_and_what_was_cut(make):
    long = {"content": "word " * 60, "summary": "answer " * 60}
    report, rows = make([*map(pair, range(98)), long, long], [talk(0, rounds=20)])
    lengths = sorted(rows.length(row) for row in range(len(rows)))
    assert report["longest"] == lengths[-1] <= 198
    assert report["percentiles"] == {str(share): lengths[share] for share in (50, 90, 95, 99)}
    assert (report["prompts_shortened"], report["responses_cut"], report["conversations_shortened"]) == (
        2,
        2,
        1,
    )
    assert report["turns_dropped"] > 5
    assert report["truncated"] == pytest.approx(3 / 101)
    text = describe(report)
    assert "101 rows of 2 files (prompt-response, sharegpt)" in text
    assert "3.0% truncated: 2 prompts shortened, " in text


def test_three_samples_show_the_mask(make, tokenizer):
    report, rows = make([*map(pair, range(9))], [talk(3)])
    assert [sample["row"] for sample in report["samples"]] == [0, 5, 9]
    for sample in report["samples"]:
        assert sample["ids"] == list(rows.ids(sample["row"]))
        labels = [IGNORED if token is None else token for token in sample["labels"]]
        assert labels == list(rows.labels(sample["row"]))
        assert "".join(part["text"] for part in sample["parts"] if part["trained"]) == "".join(
            trained(tokenizer, rows, sample["row"])
        )
    assert lines(report)[-1] == (r"row 1: [gMASK]<sop><|user|> \n question 0<|assistant|>⟦ \n answer 0</s>⟧")
    assert marked(report["samples"][2]).count("⟦") == 2


def test_progress_is_said(make, monkeypatch):
    monkeypatch.setattr(tokenizing, "CHUNK_ROWS", 10)
    monkeypatch.setattr(tokenizing, "PROGRESS_S", 0)
    notes: list[str] = []
    make([*map(pair, range(40))], say=notes.append)
    assert [line.split(",")[0] for line in notes] == [
        f"tokenised {n} rows ({n / 40:.0%})" for n in (10, 20, 30, 40)
    ]


def test_one_file_by_its_path(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(pair(0)) + "\n")
    data = DataSpec(
        train_file=str(path),
        eval_file=None,
        prompt_column="content",
        response_column="summary",
        max_source_length=64,
        max_target_length=64,
    )
    report = tokenise(path, data, encoder_for(tokenizer, "plain"), tmp_path / "a.arrow")
    assert (report["rows"], report["file"]) == (1, str(path))


# The tokenizer of an original ChatGLM checkpoint, compared with its own on the user's rows


@pytest.fixture
def job(tmp_path, piece_model, fast, monkeypatch):
    """`job(*rows)`: of such a checkpoint, whose tokenizer is made; and its folder."""
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "cache"))

    def made(*rows):
        for name in ("original", "glm", "run"):
            (tmp_path / name).mkdir()
        (tmp_path / "original" / "tokenizer.model").write_bytes(piece_model.read_bytes())
        fast("chatglm2").save_pretrained(tmp_path / "glm")
        for name in ("train.jsonl", "dev.jsonl"):
            (tmp_path / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        spec = ModelSpec("x", "chatglm", str(tmp_path / "original"), "chatglm2", {}, {"style": "chatglm2"})
        data = DataSpec(
            train_file=str(tmp_path / "train.jsonl"),
            eval_file=str(tmp_path / "dev.jsonl"),
            prompt_column="content",
            response_column="summary",
            max_source_length=64,
            max_target_length=64,
            allow_bad_rows=True,
        )
        paths = replace(prepared_paths(spec, data), model_dir=str(tmp_path / "glm"))
        training = TrainingSpec(
            lr=1e-4,
            lr_schedule="linear",
            warmup_steps=0,
            epochs=1.0,
            max_steps=None,
            seed=1,
            eval_steps=None,
            save_steps=100,
            keep_checkpoints=1,
            generate_rows=0,
            score_before=False,
            activation_checkpointing="none",
        )
        return Job(
            run_dir=str(tmp_path / "run"), hosts=(HostDevices("localhost", (0, 1)),), model=spec, data=data,
            training=training, preset="zero2", precision="fp32", accelerator="cpu", ds_config={}, prepared=paths,
            dsrun_version="0",
        )  # fmt: skip

    return made


def test_the_tokenizer_is_compared_on_the_rows(job, tmp_path):
    notes: list[str] = []
    rows = [{"content": "类型#裙", "summary": "这件 裙子"}, {"content": "\ud800", "summary": "half"}, pair(1)]
    made = job(*rows)
    prepare(made, notes.append)
    (line,) = [line for line in notes if "tokenizer.model" in line]
    assert line.endswith("ids: 10 texts compared"), "of both files, without the half"
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"data.json"}
    notes.clear()
    prepare(made, notes.append)
    assert notes == [], "rows that are in the cache were compared"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/nowhere/x"),
        RuntimeError('IoError(Os { code: 28, message: "No space left on device" })'),
    ],
)
def test_a_full_disk_of_the_cache_is_said_with_which_it_is(job, tmp_path, monkeypatch, capsys, error):
    made = job(pair(0))
    (tmp_path / "run" / "job.json").write_text(made.to_json(), encoding="utf-8")

    def fails(*_):
        raise error

    monkeypatch.setattr(prepare_module, "prepare", fails)
    monkeypatch.setattr("sys.argv", ["prepare", str(tmp_path / "run" / "job.json")])
    assert prepare_module.main() == 1
    printed = capsys.readouterr()
    (problem,) = json.loads(printed.out)["problems"]
    assert "the cache's disk is full: No space left on device" in problem["what"]
    rows = Path(made.prepared.train_rows)
    assert problem["where"] == "/" or Path(problem["where"]) in rows.parents, (
        "the nearest folder that is there"
    )
    assert "DSRUN_CACHE" in problem["hint"]
    assert "Traceback" in printed.err, "which goes into prepare.log"


def test_another_error_is_raised_as_it_is(job, tmp_path, monkeypatch):
    made = job(pair(0))
    (tmp_path / "run" / "job.json").write_text(made.to_json(), encoding="utf-8")
    monkeypatch.setattr(prepare_module, "prepare", lambda *_: 1 / 0)
    monkeypatch.setattr("sys.argv", ["prepare", str(tmp_path / "run" / "job.json")])
    with pytest.raises(ZeroDivisionError):
        prepare_module.main()


def test_a_tokenizer_that_gives_other_ids_is_refused(job, tmp_path):
    made = job(pair(0), {"content": "plain", "summary": "an UPPER word"})
    path = tmp_path / "glm" / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["normalizer"]["normalizers"].insert(0, {"type": "Lowercase"})
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(DsrunError, match=r"ids differ from its model's for the text '.*U.*'") as caught:
        prepare(made, lambda _: None)
    assert caught.value.problems[0].where == str(tmp_path / "original" / "tokenizer.model")
    assert not list(tmp_path.rglob("*.arrow")), "nothing is tokenised with it"


# What is read is what the job was planned with


def in_cache(job) -> list[str]:
    folder = Path(job.prepared.train_rows).parent
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_rows_get_no_other_contents_name(job, tmp_path):
    made, path = job(pair(0), pair(1)), tmp_path / "train.jsonl"
    content = path.read_bytes()
    path.write_bytes(content + content)
    with pytest.raises(DsrunError) as caught:
        prepare(made, lambda _: None)
    (problem,) = caught.value.problems
    assert problem.where == str(path)
    assert f"{2 * len(content):,} bytes, {len(content):,} when the run was planned" in problem.what
    assert "Put it back" in problem.hint and "dsrun finetune" in problem.hint
    assert in_cache(made) == []
    path.write_bytes(content)
    prepare(made, lambda _: None)
    assert len(Examples(Path(made.prepared.train_rows))) == 2


def test_what_was_really_read_is_compared(job, tmp_path, monkeypatch):
    """Nobody's second look: the bytes that became rows, be they there for a moment only."""
    made, path = job(pair(0), pair(1)), tmp_path / "train.jsonl"
    before, stat = path.read_bytes(), path.stat()
    other = before.replace(b"question 0", b"question 7")
    real = tokenizing._chunks

    def meanwhile(*arguments):
        path.write_bytes(other)
        yield from real(*arguments)
        path.write_bytes(before)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    monkeypatch.setattr(tokenizing, "_chunks", meanwhile)
    with pytest.raises(DsrunError, match=r"is not the data .* as before, other ones: SHA-256"):
        prepare(made, lambda _: None)
    assert in_cache(made) == []


def test_a_file_that_grows_while_it_is_read(make, tmp_path, monkeypatch):
    real = tokenizing._chunks

    def growing(*arguments):
        yield from real(*arguments)
        with (tmp_path / "rows 0 数据.jsonl").open("a") as file:
            file.write(json.dumps(pair(9)) + "\n")

    monkeypatch.setattr(tokenizing, "_chunks", growing)
    with pytest.raises(DsrunError, match="was changed while it was read"):
        make([pair(0), pair(1)])
    assert [path.name for path in tmp_path.iterdir()] == ["rows 0 数据.jsonl"]


def test_another_host_has_another_file(job, tmp_path, monkeypatch):
    """The refusal names both hosts; a copy with another time is the same file."""
    made, path = job(pair(0), pair(1)), tmp_path / "train.jsonl"
    content = path.read_bytes()
    planned_on = made.prepared.inputs.host
    monkeypatch.setattr("socket.gethostname", lambda: "node2")
    path.write_bytes(content.replace(b"question 0", b"question 7"))
    with pytest.raises(DsrunError) as caught:
        prepare(made, lambda _: None)
    (problem,) = caught.value.problems
    assert " on node2" in problem.what and f" on {planned_on}, where the run was planned" in problem.what
    assert f"copy {planned_on}'s to node2. If they share the folder it was changed since" in problem.hint
    assert in_cache(made) == []
    path.write_bytes(content)
    prepare(made, lambda _: None)


def test_a_job_without_a_record_is_held_to_the_name(job, tmp_path):
    """As dsrun wrote it before it kept one."""
    made, path = job(pair(0), pair(1)), tmp_path / "train.jsonl"
    old = replace(made, prepared=replace(made.prepared, inputs=None))
    content = path.read_bytes()
    path.write_bytes(content + content)
    with pytest.raises(DsrunError, match=r"\(the training rows\) can't be made again: its data") as caught:
        prepare(old, lambda _: None)
    assert str(path) in caught.value.problems[0].where
    assert in_cache(made) == []
    path.write_bytes(content)
    prepare(old, lambda _: None)


def test_a_dsrun_that_prepares_otherwise_does_not_take_the_name(job, tmp_path, monkeypatch):
    made = job(pair(0), pair(1))
    monkeypatch.setattr("dsrun.data.cache.RECIPE", 0)
    with pytest.raises(DsrunError, match="may prepare in another way"):
        prepare(made, lambda _: None)
    assert in_cache(made) == []


def test_a_model_folder_is_made_of_the_files_that_it_is_named_after(job, tmp_path):
    """The tokenizer of a checkpoint in ChatGLM's format, changed after the run was planned."""
    made = job(pair(0))
    made = replace(made, prepared=prepared_paths(made.model, made.data))
    piece = tmp_path / "original" / "tokenizer.model"
    content = piece.read_bytes()
    piece.write_bytes(content[:-1] + b"x")
    for one in (made, replace(made, prepared=replace(made.prepared, inputs=None))):
        with pytest.raises(
            DsrunError, match=r"is not the tokenizer|\(the model folder\) can't be made again"
        ):
            prepare(one, lambda _: None)
        assert not Path(made.prepared.model_dir).exists()


def test_ranks_look_at_what_they_load(job, tmp_path, monkeypatch):
    """Before anything is loaded, and on each host: frozen weights are in no checkpoint, what was trained is."""
    made = job(pair(0))
    weights = tmp_path / "original" / "model.safetensors"
    weights.write_bytes(b"the weights")
    made = replace(
        made,
        prepared=replace(made.prepared, inputs=prepared_paths(made.model, made.data).inputs),
        peft=PeftOptions(method="lora"),
    )
    weights.write_bytes(b"others, then")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(DsrunError, match="is not the model's weights that the run was planned with"):
        worker.train(made, Report(tmp_path / "run", 0), resume=False)
    (tmp_path / "run" / "job.json").write_text(made.to_json(), encoding="utf-8")
    with pytest.raises(DsrunError, match="is not the model's weights that the run was planned with"):
        export_process.write(ExportRequest(made.run_dir, str(tmp_path / "step-2"), {}))
    whole = replace(made, peft=PeftOptions(method="full"))
    assert inputs.WEIGHTS not in inputs.kinds_read(whole, from_checkpoint=True)
    assert inputs.WEIGHTS in inputs.kinds_read(whole, from_checkpoint=False)
    weights.write_bytes(b"the weights")
    inputs.check(made, inputs.KINDS, trust_times=True)


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "rows.json", "rows.csv", "rows.tsv", "rows.txt", "rows.parquet"]
)
def test_the_digest_is_of_all_that_was_read(tmp_path, name):
    """In every format, with line ends and a mark of Windows' own."""
    path = tmp_path / name
    rows = [{"content": f"q {n} 问" * 99, "summary": "a"} for n in range(3000)]
    if name.endswith(".parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    elif name.endswith(".json"):
        path.write_text(json.dumps(rows), encoding="utf-8-sig")
    elif name.endswith(".jsonl"):
        path.write_text("\r\n".join(map(json.dumps, rows)), encoding="utf-8-sig", newline="")
    else:
        lines = ["content,summary", *(f"{row['content']},a" for row in rows)]
        path.write_text("\r\n".join(lines), encoding="utf-8-sig", newline="")
    digest = hashlib.sha256()
    rows_read = list(read_rows(path, digest))
    assert digest.hexdigest() == hashlib.sha256(path.read_bytes()).hexdigest()
    assert rows_read == list(read_rows(path))
    assert len(rows_read) == 3000 or (len(rows_read) > 1 and name.endswith(".txt"))


# The cache


def test_what_decides_the_rows_decides_their_name(tmp_path):
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        (tmp_path / name).write_text(f"{name}\n")
    (tmp_path / "same.jsonl").write_text("a.jsonl\n")
    model = ModelSpec("x", "folder", str(tmp_path), "plain")
    first, *more = (str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "c.jsonl"))

    def named(file=first, **fields):
        return prepared_paths(
            model,
            DataSpec(
                train_file=file,
                eval_file=None,
                prompt_column="content",
                response_column="summary",
                max_source_length=64,
                max_target_length=64,
                **fields,
            ),
        ).train_rows

    others = [
        {"more_files": more}, {"more_files": more[::-1]}, {"more_files": more, "weights": (1, 2, 1)},
        {"more_files": more, "weights": (1, 1, 2)}, {"history_column": "before"}, {"data_format": "alpaca"},
        {"train_on_prompt": True}, {"strict_data": True}, {"official": True},
    ]  # fmt: skip
    names = [named(), *(named(**fields) for fields in others)]
    assert len(set(names)) == len(names)
    assert named(str(tmp_path / "same.jsonl")) == named()


def test_a_job_file_brings_back_the_data(tmp_path):
    data = DataSpec(
        train_file="a",
        eval_file=None,
        prompt_column="p",
        response_column="r",
        max_source_length=1,
        max_target_length=2,
        more_files=("b",),
        weights=(1.0, 2.0),
    )
    fields = json.loads(json.dumps(data.__dict__))
    assert DataSpec(**fields) == data
    assert data.train_files == ("a", "b")


def test_plain_text_beside_questions(make):
    text = "the quick brown fox jumps over the lazy dog"
    report, rows = make([{"text": text}, {"text": ""}], [pair(0)], max_source_length=20, max_target_length=12)
    first, second = report["files"]
    assert (first["format"], second["format"]) == ("text", "prompt-response")
    assert first["left_out"] == report["empty"] == 1
    assert report["documents"] == 1 and report["windows"] == first["rows"] > 1
    assert report["truncated"] == 0
    assert report["trained_on"] == "responses and text"
    assert rows.with_question == [len(rows) - 1]
    assert [rows.target_tokens(row) for row in range(len(rows))][:-1] == [
        rows.length(row) - 1 for row in range(len(rows) - 1)
    ]
    assert any("windows" in line for line in lines(report))


def test_plain_text_without_a_word_says_so(make):
    with pytest.raises(DsrunError, match="no row has a text"):
        make([{"text": " "}], [{"text": "\n"}])
