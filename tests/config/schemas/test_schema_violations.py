"""The checks against the schema."""

from __future__ import annotations

import copy

import pytest
from jsonschema import Draft202012Validator
from running import examples

from dsrun.config import tree
from dsrun.config.presets.build import Options, build_config
from dsrun.config.presets.json_text import render_json
from dsrun.config.schemas import schema
from dsrun.config.schemas import violations as schema_violations

hypothesis = pytest.importorskip("hypothesis")
given, strategies = hypothesis.given, hypothesis.strategies

SCHEMA = schema.load()
VALIDATOR = Draft202012Validator(SCHEMA.root)
CONFIG = build_config("zero3-offload", Options(gpus=2)).ds_config
PATHS = SCHEMA.paths
VALUES = strategies.recursive(
    strategies.none()
    | strategies.booleans()
    | strategies.integers(-2, 2**40)
    | strategies.floats(allow_nan=False)
    | strategies.sampled_from(["auto", "cpu", "nvme", "", "x", "fp16", "0"]),
    lambda inner: (
        strategies.lists(inner, max_size=3)
        | strategies.dictionaries(
            strategies.sampled_from(["enabled", "stage", "device", "type", "_x", "y"]), inner, max_size=3
        )
    ),
    max_leaves=4,
)


@pytest.mark.parametrize(
    ("node", "value", "right"),
    [
        ({"type": "integer"}, 1.0, True),
        ({"type": "integer"}, 1.5, False),
        ({"type": "integer"}, 10**400, True),
        ({"type": ["integer", "number"]}, True, False),
        ({"enum": [1, None]}, True, False),
        ({"const": True}, 1, False),
        ({"type": "number"}, float("nan"), True),
        ({"type": "number", "minimum": 0}, float("nan"), False),
        ({"type": "number", "exclusiveMaximum": 0}, float("nan"), False),
        ({"anyOf": [{"const": "auto"}, {"type": "number", "maximum": 1}]}, float("nan"), False),
        ({"type": "number", "minimum": 0}, float("inf"), True),
        ({"minimum": 0}, "a text", True),
    ],
)
def test_numbers_that_validators_differ_on(node, value, right):
    assert schema_violations.fits(node, value) == right


def test_a_long_list_of_wrong_items_is_not_judged_to_its_end(monkeypatch):
    config = {**CONFIG, "zero_optimization": {"leaf_module": {"classes": [1] * 40_000}}}
    validator = schema_violations._validator(schema.load())
    assert len(list(validator.iter_errors(config))) < 2 * schema_violations.MOST
    assert schema_violations.check(schema.load(), config, "deepspeed")


@hypothesis.settings(max_examples=examples(200), deadline=None)
@given(path=strategies.sampled_from(PATHS), value=VALUES, target=strategies.sampled_from(["hf", "deepspeed"]))
def test_checks_and_rules_never_break(path, value, target):
    """Whatever stands at a key, there are findings or none, and no exception."""
    from dsrun.config.rules import Setting, run

    config = copy.deepcopy(CONFIG)
    tree.put(config, path, value)
    findings = run(config, Setting(target=target, world_size=2))
    if not VALIDATOR.is_valid(config):
        assert findings


@pytest.mark.parametrize(
    ("config", "target", "kind", "path"),
    [
        ({"zero_optimization": {"stag": 1}}, "deepspeed", "unknown", "zero_optimization.stag"),
        ({"zero_optimization": {"stage": "3"}}, "deepspeed", "converted", "zero_optimization.stage"),
        ({"zero_optimization": {"stage": "x"}}, "deepspeed", "value", "zero_optimization.stage"),
        (
            {"zero_optimization": {"mics_shard_size": 2}},
            "deepspeed",
            "removed",
            "zero_optimization.mics_shard_size",
        ),
        ({"nebula": None}, "deepspeed", "removed", "nebula"),
        ({"bf16": {"enabled": "auto"}}, "deepspeed", "auto", "bf16.enabled"),
        ({"fp16": {"loss_scale": "auto"}}, "hf", "auto", "fp16.loss_scale"),
        ({"tensorboard": {"job_name": "auto"}}, "hf", "auto", "tensorboard.job_name"),
        ({"bf16": {}, "bfloat16": {}}, "deepspeed", "alias", "bfloat16"),
        ({"optimizer": {"params": {}}}, "deepspeed", "value", "optimizer"),
    ],
)
def test_each_kind(config, target, kind, path):
    assert [
        (violation.kind, violation.path) for violation in schema_violations.check(SCHEMA, config, target)
    ] == [(kind, path)]


def test_comments_and_good_autos_pass():
    config = {
        "_why": "auto",
        "_x": {"any": 1},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2},
    }
    assert not schema_violations.check(SCHEMA, config, "hf")
    assert not schema_violations.check(SCHEMA, {"tensorboard": {"job_name": "auto"}}, "deepspeed")


def test_text_is_stable():
    config = build_config("zero3-nvme", Options(gpus=2, nvme_path="/n")).ds_config
    text = render_json(config)

    def turned(value):
        if isinstance(value, dict):
            return {key: turned(value[key]) for key in reversed(value)}
        return value

    assert render_json(turned(config)) == text
    assert text.endswith("}\n")
    assert '"lr": 0.0001' in text
    assert '"sub_group_size": 100000000,' in text
    assert '"betas": [0.9, 0.999]' in text
    assert text.splitlines()[1] == '  "train_batch_size": 8,'
