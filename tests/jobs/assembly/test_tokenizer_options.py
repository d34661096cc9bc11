"""--chat-template and --add-special-tokens: what of them reaches the job, and what is refused before the start."""

from __future__ import annotations

import json

import pytest
from asking import finetune_request

from dsrun.errors import DsrunError
from dsrun.job.job import Job
from dsrun.jobs.assembly.finetune import plan

TEMPLATE = "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}"


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "work" / "rows.jsonl").write_text(json.dumps({"content": "q", "summary": "a"}) + "\n")
    return tmp_path / "work"


def planned(machine, **options) -> Job:
    asked = finetune_request(model="llama-tiny", train_file=("rows.jsonl",), **options)
    return plan(asked, machine, {}).job


def refused(machine, **options) -> str:
    with pytest.raises(DsrunError) as error:
        planned(machine, **options)
    assert all(problem.hint for problem in error.value.problems)
    return str(error.value)


def test_the_job_holds_the_template_and_not_its_file(machine, work):
    (work / "模板.jinja").write_text(TEMPLATE, encoding="utf-8")
    job = planned(machine, chat_template="模板.jinja")
    (work / "模板.jinja").unlink()
    again = Job.from_json(job.to_json(), "job.json")
    assert again == job
    assert (again.model.chat_template, again.model.prompt_format) == (TEMPLATE, "chat-template")


def test_tokens_come_from_lists_and_files(machine, work):
    (work / "more.txt").write_text("<c>\n\n <d> \n", encoding="utf-8")
    job = planned(machine, add_special_tokens=("<a>, <b>", "more.txt"))
    assert job.model.special_tokens == ("<a>", "<b>", "<c>", "<d>")
    assert Job.from_json(job.to_json(), "job.json") == job


def test_another_vocabulary_is_another_prepared_model(machine, work):
    (work / "t.jinja").write_text(TEMPLATE, encoding="utf-8")
    asked = [
        {},
        {"add_special_tokens": ("<a>",)},
        {"add_special_tokens": ("<a>,<b>",)},
        {"chat_template": "t.jinja"},
    ]
    found = [planned(machine, **options).prepared for options in asked]
    assert len({one.train_rows for one in found}) == len(asked)
    assert len({one.model_dir for one in found}) == len(asked) - 1, (
        "a template alone needs no model of its own"
    )


@pytest.mark.parametrize(
    ("tokens", "says"),
    [(("<a>,",), "''"), (("<a>,<b>", "<a>"), "2 times"), (("x" * 200,), "can't be"), (("no.txt",), "no.txt")],
)
def test_what_is_no_token_is_refused(machine, tokens, says):
    with pytest.raises(DsrunError, match=says):
        planned(machine, add_special_tokens=tokens)


def test_methods_that_leave_the_embeddings_alone_get_no_tokens(machine):
    assert "--method lora" in refused(machine, method="lora", add_special_tokens=("<a>",))


def test_the_reference_recipe_keeps_its_prompts(machine, work):
    (work / "t.jinja").write_text(TEMPLATE, encoding="utf-8")
    assert "--official" in refused(machine, official=True, chat_template="t.jinja")


def test_a_bad_template_is_named_before_the_start(machine, work):
    (work / "t.jinja").write_text("{% for %}", encoding="utf-8")
    assert "t.jinja:1" in refused(machine, chat_template="t.jinja")
    assert list(work.glob("runs")) == []
