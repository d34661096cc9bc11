"""Options of evaluations, where nothing would come of them: refused before the start, and otherwise in the job."""

from __future__ import annotations

import pytest
from asking import finetune_request

from dsrun.cluster.devices import Machine
from dsrun.errors import DsrunError
from dsrun.jobs.assembly.finetune import plan
from dsrun.options.commands import FinetuneOptions
from dsrun.options.declare import flag_of

CPU = Machine("cpu", (), 8, "no GPU", 64 << 30)
PAIR, TEXT = '{"content": "a", "summary": "b"}\n', '{"text": "Plain text, without a prompt."}\n'
OF_EXAMPLES = {"keep_best": True, "eval_steps": 5}
OF_ANSWERS = {"score_before": True, "compute_metrics": True}


@pytest.fixture
def files(tmp_path, own_places):
    """Pairs and plain text, as options."""
    for name, line in (("pairs", PAIR), ("text", TEXT)):
        (tmp_path / f"{name}.jsonl").write_text(line * 9, encoding="utf-8")
    return {
        name: {"train_file": tmp_path / f"{name}.jsonl", "eval_file": tmp_path / f"{name}.jsonl"}
        for name in ("pairs", "text")
    }


def planned(**given):
    return plan(finetune_request(gpus=2, **given), CPU, {}).job


def refused(**given):
    with pytest.raises(DsrunError) as caught:
        planned(**given)
    return caught.value.problems


@pytest.mark.parametrize(("name", "value"), [*OF_EXAMPLES.items(), *OF_ANSWERS.items(), ("generate_rows", 3)])
def test_without_held_out_examples(files, name, value):
    (problem,) = refused(train_file=files["pairs"]["train_file"], **{name: value})
    assert problem.where == flag_of(FinetuneOptions, name)
    assert "--eval-file" in problem.hint
    assert getattr(planned(**files["pairs"], **{name: value}).training, name) == value


@pytest.mark.parametrize("name", OF_ANSWERS)
def test_without_answers(files, name):
    (problem,) = refused(**files["pairs"], **{name: True, "generate_rows": 0})
    assert problem.where == flag_of(FinetuneOptions, name)
    assert "--generate-rows" in problem.what
    assert planned(**files["pairs"], generate_rows=0).training.generate_rows == 0


@pytest.mark.parametrize("name", OF_ANSWERS)
def test_a_pipeline_does_not_answer(files, name):
    (problem,) = refused(**files["pairs"], pp=2, **{name: True})
    assert "--pp 2" in problem.what
    assert "dsrun evaluate" in problem.hint


def test_plain_text_has_no_prompts(files):
    given = {"generate_rows": 3, **OF_ANSWERS}
    problems = refused(**files["text"], **given)
    assert {problem.where for problem in problems} == {flag_of(FinetuneOptions, name) for name in given}
    assert planned(**files["text"], **OF_EXAMPLES).training.keep_best


def test_a_project_of_no_tracker(files):
    (problem,) = refused(**files["pairs"], log_project="lab")
    assert problem.where == "--log-project"
