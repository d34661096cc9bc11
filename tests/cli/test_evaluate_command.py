"""`dsrun evaluate`: what it starts, what it says before it does, and how it shows what came of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from test_chat_command import PAPER, make_model, make_run, work  # noqa: F401  (fixtures)

from dsrun.errors import DsrunError, JobFailedError
from dsrun.job.inference_request import Decoding
from dsrun.jobs.assembly import inference
from dsrun.options.commands import EvaluateOptions
from dsrun.options.layers import Resolved
from dsrun.options.table import EvaluationOptions

SCORES = {"rouge-1": 12.345, "rouge-2": 1.0, "rouge-l": 10.0, "bleu-4": 3.21}
FOUND = {
    "rows": 9, "answered": 5, "target_tokens": 1234, "eval_loss": 4.5, "scores": SCORES, "predictions": "/x.jsonl",
    "seconds": 1.0,
}  # fmt: skip


@pytest.fixture
def evaluate(dsrun, monkeypatch):
    """`evaluate(*args)`: what was said, and the evaluation that would have been done."""
    done: list = []
    found = dict(FOUND)

    def run_evaluation(asked, where):
        done.append((asked, where))
        return found

    monkeypatch.setattr(inference, "run_evaluation", run_evaluation)

    def run(*args, **fields):
        done.clear()
        found.update({**FOUND, **fields})
        said = dsrun("evaluate", *args)
        return said, done[0][0] if done else None

    return run


def test_a_run_is_evaluated_on_its_own_rows(evaluate, make_run, work):  # noqa: F811
    path = make_run(max_source_length=40, max_target_length=16, micro_batch=3, grad_accum=1, generate_rows=7)
    said, asked = evaluate("mine")
    assert said.code == 0, said.err
    assert asked.data.eval_file == str(work / "dev.jsonl")
    assert (asked.data.max_source_length, asked.data.max_target_length) == (40, 16)
    assert (asked.micro_batch, asked.answers, asked.limit) == (3, 7, None), "as it evaluated itself"
    assert asked.output == str(path / "predictions-dev.jsonl")
    assert asked.decoding == Decoding(seed=42)


def test_a_pipeline_that_could_not_answer_is_answered_for(evaluate, make_run):  # noqa: F811
    make_run(pp=2)
    assert evaluate("mine")[1].answers == EvaluationOptions().generate_rows > 0


def test_other_rows_are_all_answered(evaluate, make_run, work):  # noqa: F811
    make_run(generate_rows=2)
    other = work / "other 数据.jsonl"
    other.write_text('{"q": "类型#裙", "a": "一条裙子。"}\n', encoding="utf-8")
    columns = ("--prompt-column", "q", "--response-column", "a", "--max-target-length", "5")
    said, asked = evaluate(
        "mine", "--eval-file", other.name, *columns, "--limit", "3", "--sample", "--seed", "8"
    )
    assert said.code == 0, said.err
    assert asked.data.eval_file == str(other)
    assert (asked.data.prompt_column, asked.data.response_column, asked.data.max_target_length) == (
        "q",
        "a",
        5,
    )
    assert (asked.answers, asked.limit) == (None, 3)
    assert asked.decoding == Decoding(0.95, 0.7, 50, seed=8)
    assert Path(asked.output).name == "predictions-other 数据-sampled-8.jsonl"
    assert evaluate("mine", "--generate-rows", "0")[1].answers == 0


TALK = '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n'


def test_rows_of_every_format(evaluate, make_run, make_model, work):  # noqa: F811
    for name, text in (("talks.jsonl", TALK), ("alpaca.jsonl", '{"instruction": "i", "output": "o"}\n')):
        (work / name).write_text(text)
    make_run(eval_file=work / "talks.jsonl", train_file=work / "talks.jsonl", strict_data=True)
    _, asked = evaluate("mine")
    assert (asked.data.data_format, asked.data.strict_data) == ("messages", False)
    said, asked = evaluate("mine", "--eval-file", "alpaca.jsonl")
    assert said.code == 0, said.err
    assert asked.data.data_format == "auto", "the run's is that of its own file"
    make_model(work / "model")
    _, asked = evaluate("model", "--eval-file", "talks.jsonl", "--history-column", "before")
    assert (asked.data.data_format, asked.data.history_column) == ("auto", "before")
    assert evaluate("model", "--eval-file", "talks.jsonl", "--data-format", "messages")[1]
    for words in (("--prompt-column", "q"), ("--data-format", "alpaca")):
        said, asked = evaluate("model", "--eval-file", "talks.jsonl", *words)
        assert (said.code, asked) == (1, None)
        assert "there are: messages" in said.err


def test_limits_of_a_folder_without_a_run(evaluate, make_model, work):  # noqa: F811
    """One for prompt and response, unless one of them has its own."""
    make_model(work / "model")
    (work / "talks.jsonl").write_text(TALK)
    data = evaluate("model", "--eval-file", "talks.jsonl")[1].data
    assert (data.max_length, data.max_source_length, data.max_target_length) == (1024, 512, 512)
    apart = evaluate("model", "--eval-file", "talks.jsonl", "--max-source-length", "9")[1].data
    assert (apart.max_length, apart.max_source_length) == (None, 9)


def test_other_rows_show_their_columns_by_their_names(evaluate, make_model, work):  # noqa: F811
    make_model(work / "model")
    (work / "other.jsonl").write_text('{"question": "q", "answer": "a"}\n', encoding="utf-8")
    said, asked = evaluate("model", "--eval-file", "other.jsonl")
    assert said.code == 0, said.err
    assert (asked.data.prompt_column, asked.data.response_column) == ("question", "answer")


def test_a_folders_answers_go_elsewhere(evaluate, make_model, work):  # noqa: F811
    make_model(work / "a model")
    said, asked = evaluate("a model", "--eval-file", "dev.jsonl")
    assert said.code == 0, said.err
    assert asked.output == str(work / "predictions-a model-dev.jsonl")
    assert (asked.data.prompt_column, asked.data.response_column) == ("content", "summary")
    assert evaluate("a model", "--eval-file", "dev.jsonl", "--output", "mine.jsonl")[1].output == str(
        work / "mine.jsonl"
    )


def test_nothing_is_overwritten(evaluate, make_run):  # noqa: F811
    path = make_run() / "predictions-dev.jsonl"
    path.write_text("precious")
    said, asked = evaluate("mine")
    assert (said.code, said.out, asked) == (1, "", None)
    assert f"{path}: exists already" in said.err
    assert "--force" in said.err
    assert evaluate("mine", "--force")[1].overwrite


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (("--eval-file", "dve.jsonl"), "/dev.jsonl?"),
        (("--prompt-column", "nope"), "no column 'nope'; there are: content, summary"),
        (("--output", "."), "is a folder"),
        (("--output", "no/such/file"), "there is no such folder"),
    ],
)
def test_a_problem_is_reported_before_anything_starts(evaluate, make_run, args, what):  # noqa: F811
    make_run()
    said, asked = evaluate("mine", *args)
    assert (said.code, said.out, asked) == (1, "", None)
    assert what in said.err


def test_all_problems_together(evaluate, make_run):  # noqa: F811
    make_run()
    said, _ = evaluate("mine", "--response-column", "nope", "--output", ".")
    assert "no column 'nope'" in said.err
    assert "is a folder" in said.err


def test_rows_that_nobody_named(evaluate, make_run, make_model, work):  # noqa: F811
    import json as text

    path = make_run()
    job = text.loads((path / "job.json").read_text(encoding="utf-8"))
    job["data"]["eval_file"] = None
    (path / "job.json").write_text(text.dumps(job), encoding="utf-8")
    make_model(work / "model")
    for name, what in (
        ("mine", "the run held no rows out"),
        ("model", "a folder says nothing of held-out rows"),
    ):
        said, _ = evaluate(name)
        assert said.code == 1
        assert what in said.err
        assert "--eval-file" in said.err


def test_the_table(evaluate, make_run):  # noqa: F811
    make_run()
    said, _ = evaluate("mine")
    for text in (
        "loss        4.5000 over 1,234 tokens (perplexity 90.02)",
        "5, greedy: /x.jsonl",
        "ROUGE-1",
        "12.35",
    ):
        assert text in said.out
    said, _ = evaluate("mine", scores=None, predictions=None, answered=0, eval_loss=1e9)
    assert "perplexity inf" in said.out
    assert "ROUGE" not in said.out


def test_json(evaluate, make_run):  # noqa: F811
    path = make_run()
    said, _ = evaluate("mine", "--json", "--sample")
    value = json.loads(said.out)
    assert {name: value[name] for name in FOUND} == FOUND
    assert value["model"] == str(path / "model")
    assert value["decoding"] == {"temperature": 0.95, "top_p": 0.7, "top_k": 50, "seed": 42}
    assert (value["device"], value["precision"]) == ("the CPU", "fp32")
    assert json.loads(evaluate("mine", "--json", eval_loss=float("nan"))[0].out)["eval_loss"] is None


# The process


@pytest.fixture
def play(make_run, monkeypatch):  # noqa: F811
    """`play(code)`: an evaluation whose process is this Python code."""
    found = inference.find(str(make_run()))
    where = inference.choose_device(PAPER, None, None, {})
    plain = Resolved.built_in(EvaluateOptions)
    asked = inference.evaluation(
        found, inference.model_of(found, where, EvaluateOptions()), Decoding(), plain, Path.cwd()
    )

    def run(code: str):
        monkeypatch.setattr(inference, "command", lambda _: [sys.executable, "-c", code])
        return inference.run_evaluation(asked, where)

    return run


def test_the_last_line_is_the_result(play):
    assert play("print('talk'); print('{\"rows\": 3}')") == {"rows": 3}


def test_its_problems_are_ours(play):
    with pytest.raises(DsrunError, match="it is blue") as caught:
        play('print(\'{"problems": [{"what": "it is blue", "where": "x", "hint": "y"}]}\'); exit(1)')
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("code", "exit_code", "what"),
    [
        ("exit(5)", 5, "what it said is above"),
        ("print('no result')", 1, "what it said is above"),
        ("import os; os.kill(os.getpid(), 9)", 137, "SIGKILL"),
    ],
)
def test_a_process_that_dies(play, code, exit_code, what):
    with pytest.raises(JobFailedError, match=what) as caught:
        play(code)
    assert caught.value.exit_code == exit_code
