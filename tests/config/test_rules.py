"""Each rule by its examples: tests/examples/valid/*.json, tests/examples/invalid/DS123-what-is-wrong.json.

An example is a deepspeed.json for 4 GPUs; "_target": "hf" makes it one for HF Trainer.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsrun.config.rules import SEVERITIES, Context, find_rules, run

EXAMPLES = Path(__file__).parents[1] / "examples"
VALID = sorted((EXAMPLES / "valid").glob("*.json"))
INVALID = sorted((EXAMPLES / "invalid").glob("*.json"))


def findings(path):
    config = json.loads(path.read_text(encoding="utf-8"))
    return run(config, target=config.get("_target", "deepspeed"), world_size=4)


def test_there_are_examples():
    assert len(VALID) >= 10
    assert len(INVALID) >= 30


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
def test_valid(path):
    assert findings(path) == []


@pytest.mark.parametrize("path", INVALID, ids=lambda path: path.stem)
def test_invalid(path):
    found = findings(path)
    assert {finding.rule for finding in found} == {path.stem.split("-")[0]}
    assert all(finding.path and finding.message and finding.suggestion for finding in found)


def test_every_rule_has_an_example():
    assert {path.stem.split("-")[0] for path in INVALID} == {rule.id for rule in find_rules()}


def test_every_rule_names_its_source():
    for rule in find_rules():
        assert rule.severity in SEVERITIES
        assert ".py" in rule.source or "issues" in rule.source, rule.id


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 1}, "8 and 12"),
        ({"train_batch_size": 3}, "The nearest that works: 4"),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1},
            "Set train_batch_size to 16, or gradient_accumulation_steps to 4.",
        ),
        (
            {"train_batch_size": 40, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1},
            "32 (gradient_accumulation_steps 2) or 48 (gradient_accumulation_steps 3)",
        ),
    ],
)
def test_legal_batch_sizes_are_offered(config, said):
    (finding,) = run(config, world_size=4)
    assert (finding.rule, said in finding.suggestion) == ("DS101", True)


def test_without_a_world_size_nothing_is_said_about_it():
    assert run({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}) == []


def test_model_parallel_gpus_share_a_batch():
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    assert run({**config, "tensor_parallel": {"autotp_size": 2}}, world_size=4) == []


def test_getters_leave_out_what_is_not_of_the_type():
    context = Context({"a": "auto", "b": True, "c": 2e8, "d": "x", "bfloat16": {"enabled": True}})
    assert context.text("a") is None
    assert context.number("b") is None
    assert context.integer("c") == 200_000_000
    assert context.section("d") == {}
    assert context.flag("bf16.enabled") is True
    assert Context({"zero_optimization": True}).stage == 1
