"""What `-o run.toml` writes is read back to the same job, for every option of a fine-tune."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from dsrun.options.commands import FinetuneOptions
from dsrun.options.declare import entries

TABLE = {
    name: entry for name, entry in entries(FinetuneOptions).items() if not entry.option.command_line_only
}
FRAME = "{{ tone }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
NORTH = 'launcher = "ssh"\nhosts = "localhost:2"\n'
LITTLE = '{"content": "a", "summary": "b"}\n' * 8
GIVEN = {
    "preset": "zero3", "layout": "as said", "tp": 1, "sp": 1, "pp": 1, "train_file": ["one.jsonl:2"],
    "eval_file": "e.jsonl",
    "val_size": 0.25, "max_samples": 5, "prompt_column": "content", "response_column": "summary",
    "history_column": "h", "text_column": "t", "data_format": "prompt-response", "max_length": 90,
    "max_source_length": 40, "max_target_length": 30, "add_special_tokens": ["<a>,<b>"], "thinking": "auto",
    "micro_batch": 2, "grad_accum": 3, "global_batch": 12, "tokens_per_batch": 4096, "muon_lr": 0.01,
    "optimizer": "sgd", "method": "lora", "devices": "0,1", "gpus": 2, "master_port": 29512, "env": ["A=1"],
    "loss": "token-mean", "attention": "sdpa", "recompute_every": 3, "keep_checkpoints": 3, "metrics": "text",
    "overrides": ["zero_optimization.reduce_bucket_size=1000000"], "lora_target": "q_proj", "log": ["tensorboard"],
    "export_format": "transformers", "lr_schedule": "linear", "activation_checkpointing": "selective",
    "chat_template": "frame.jinja", "template_arg": ["tone=brief"], "nvme_path": "nvme", "hostfile": "hosts",
    "hosts": "localhost", "nodes": 1, "include": "localhost:0,1", "exclude": "localhost:0", "launcher": "ssh",
    "master_addr": "127.0.0.1", "ep": 2, "cluster": "north", "adapter": None, "model_path": None,
    "log_project": "p",
}  # fmt: skip
"""Values, where the kind of the option doesn't give one; None: it needs what isn't here."""
BESIDE = {
    "max_target_length": {"max_source_length": 30}, "muon_lr": {"optimizer": "muon"}, "momentum": {"optimizer": "sgd"},
    "lora_rank": {"method": "lora"}, "lora_alpha": {"method": "lora"}, "lora_dropout": {"method": "lora"},
    "lora_target": {"method": "lora"}, "pre_seq_len": {"method": "ptuning"}, "prefix_dropout": {"method": "ptuning"},
    "recompute_every": {"activation_checkpointing": "selective"}, "log_project": {"log": ["tensorboard"]},
    "eval_steps": {"eval_file": "e.jsonl"}, "generate_rows": {"eval_file": "e.jsonl"},
    "metrics": {"eval_file": "e.jsonl"},
    "score_before": {"eval_file": "e.jsonl"}, "compute_metrics": {"eval_file": "e.jsonl"},
    "keep_best": {"eval_file": "e.jsonl"}, "prompt_column": {"response_column": "summary"},
    "response_column": {"prompt_column": "content"}, "template_arg": {"chat_template": "frame.jinja"},
    "nvme_path": {"preset": "zero3-nvme"}, "hostfile": {"global_batch": 6},
    "include": {"hostfile": "hosts"}, "exclude": {"hostfile": "hosts"},
    "launcher": {"hosts": "localhost"}, "ep": {"preset": "zero1", "train_file": ["one.jsonl"]},
    "fp8": {"preset": "fsdp"}, "text_column": {"data_format": "prompt-response"},
}  # fmt: skip
"""Options that another one needs."""
NAMES_DEVICES = {"devices", "hostfile", "hosts", "include", "exclude", "launcher", "cluster"}
"""Options beside which a number of GPUs is one too many."""
NO_VALUE = {name for name, value in GIVEN.items() if value is None}
NOT_PART = {"run_dir", "prediction", "origins"}
"""Fields of a job that tell of the moment, or of where a value came from."""


def value_of(entry):
    if entry.name in GIVEN:
        return GIVEN[entry.name]
    if entry.kind is bool:
        return not entry.default
    low = entry.option.at_least if entry.option.at_least is not None else 1
    if entry.choices:
        return [choice for choice in entry.choices if choice != entry.default][-1]
    return {int: int(low) + 1, float: 0.25, str: "x"}.get(entry.kind, "a/b")


def words_of(values):
    for name, value in values.items():
        entry = TABLE[name]
        for item in value if isinstance(value, list) else [value]:
            yield entry.spelled(item)
            if entry.kind is not bool:
                yield str(item)


def test_every_option_has_a_value():
    assert set(GIVEN) <= set(TABLE)
    assert {"adapter", "model_path"} == NO_VALUE  # of other networks, whose files are made by training


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[] if place % 2 == 0 or name in ("generate_rows", "val_size") else pytest.mark.full
        )
        for place, name in enumerate(TABLE)
        if name not in NO_VALUE
    ],
)
@pytest.mark.parametrize("model", ["chatglm2-tiny"])
def test_a_written_file_gives_the_same_job(dsrun, capsys, tmp_path, monkeypatch, model, name):
    """chatglm2-tiny's file has values of its own, and its data set has held-out rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "nvme").mkdir()
    texts = {"hosts": "localhost slots=3\n", "frame.jinja": FRAME, "launch/clusters/north.toml": NORTH}
    for file, text in {"one.jsonl": LITTLE, "e.jsonl": LITTLE, **texts}.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text, encoding="utf-8")
    monkeypatch.setenv("DSRUN_PATH", str(tmp_path))
    values = {**BESIDE.get(name, {}), name: value_of(TABLE[name])}
    if name == "ep":
        monkeypatch.syspath_prepend(Path(__file__).parents[1] / "training")
        model = tmp_path / "mixtral"
        importlib.import_module("tiny_checkpoints").write_checkpoint(model, "mixtral")
        capsys.readouterr()  # what writing it has printed
    if name in ("generate_rows",):
        values[name] = 0
    gpus = () if NAMES_DEVICES & values.keys() else ("--gpus", 2)
    command = ("finetune", model, *gpus, *words_of(values), "--dry-run", "--json")
    written = dsrun(*command, "-o", "run.toml")
    if written.code:  # the option and the model, or this machine, contradict each other
        assert not (tmp_path / "run.toml").exists()
        pytest.skip(f"{name}: {written.err.strip().splitlines()[-1]}")
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    again = dsrun("finetune", "../run.toml", "--dry-run", "--json")
    assert again.code == 0, again.err
    jobs = [json.loads(text)["job"] for text in (written.out, again.out)]
    assert (
        len(
            {
                json.dumps({key: job[key] for key in job if key not in NOT_PART}, sort_keys=True)
                for job in jobs
            }
        )
        == 1
    )
