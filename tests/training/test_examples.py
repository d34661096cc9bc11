"""What `--show-examples` prints, and what an exported template asks with."""

from __future__ import annotations

import json

import pytest
from needed import needs

needs("torch", "transformers")

from byte_tokenizer import byte_tokenizer

from dsrun.errors import DsrunError
from dsrun.job.job import DataSpec, HostDevices, Job, ModelSpec, Prepared, TrainingSpec
from dsrun.training.data.template_encoder import served_with
from dsrun.training.data.tokenizing import tokenise
from dsrun.training.examples import first_examples
from dsrun.training.prepare import encoder_of, tokenizer_of

TEMPLATE = (
    "{% for m in messages %}{{ '<im>' ~ m.role ~ ' ' ~ m.content ~ '</im>' }}{% endfor %}"
    "{% if add_generation_prompt %}<im>assistant {% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think></think>' }}{% endif %}{% endif %}"
)
THOUGHT = {"content": "q", "summary": "<think>why</think>a"}
PLAIN = {"content": "q", "summary": "<think></think>a"}


@pytest.fixture
def make(tmp_path):
    """`make(rows, **fields of ModelSpec)`: a job on them, with a folder that holds a tokenizer."""
    folder = tmp_path / "a model's 文件夹"
    tokenizer = byte_tokenizer(TEMPLATE, ("<end>", "<im>", "</im>"), ("<think>", "</think>"))
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")

    def made(rows, **fields) -> Job:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        data = DataSpec(
            train_file=str(path), eval_file=None, prompt_column="content", response_column="summary",
            max_source_length=99, max_target_length=99,
        )  # fmt: skip
        return Job(
            run_dir=str(tmp_path / "run"), model=ModelSpec("m", "folder", str(folder), "auto", **fields), data=data,
            training=TrainingSpec(), preset="zero1", precision="fp32", accelerator="cpu",
            hosts=(HostDevices("localhost", (0,)),), ds_config={},
            prepared=Prepared(str(folder), str(tmp_path / "rows.arrow"), None), dsrun_version="0",
        )  # fmt: skip

    return made


def test_the_first_examples_are_shown_from_their_ids(make):
    rows = [{"content": "", "summary": "a"}, THOUGHT, *[PLAIN] * 40]
    shown = first_examples(make(rows), 2)
    assert [(one["row"], one["parts"]) for one in shown["examples"]] == [
        (2, [part("<im>user q</im><im>assistant "), part("<think>why</think>a</im>", trained=True)]),
        (3, [part("<im>user q</im><im>assistant <think></think>"), part("a</im>", trained=True)]),
    ]
    assert shown["examples"][1]["trained_on"] == 2
    assert shown["left_out"] == [{"row": 1, "why": "'content' is empty"}]


def part(text: str, *, trained: bool = False) -> dict:
    return {"trained": trained, "text": text}


def test_a_file_without_examples_is_refused(make):
    with pytest.raises(DsrunError, match="'content' is missing"):
        first_examples(make([{"summary": "a"}]), 1)


@pytest.mark.parametrize(
    ("rows", "fields", "served"),
    [
        ([PLAIN], {}, {"enable_thinking": False}),
        ([THOUGHT], {}, {"enable_thinking": True}),
        ([THOUGHT, PLAIN], {}, {}),
        ([THOUGHT], {"thinking": "off"}, {"enable_thinking": False}),
        ([THOUGHT, PLAIN], {"template_args": {"enable_thinking": True}}, {"enable_thinking": True}),
    ],
)
def test_the_exported_template_asks_as_in_training(make, tmp_path, rows, fields, served):
    job = make(rows, **fields)
    tokenise(tmp_path / "rows.jsonl", job.data, encoder_of(job), tmp_path / "rows.arrow")
    tokenizer, _ = tokenizer_of(job)
    assert served_with(job, tokenizer) == served
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "q"}], tokenize=False, add_generation_prompt=True
    )
    closed = "<think></think>" if served.get("enable_thinking") is False else ""
    assert prompt == f"<im>user q</im><im>assistant {closed}"
    prompt_with_default = tokenizer.apply_chat_template(
        [{"role": "user", "content": "q"}], tokenize=False, add_generation_prompt=True, enable_thinking=True
    )
    assert prompt_with_default == "<im>user q</im><im>assistant "
