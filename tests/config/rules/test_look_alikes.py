"""Files of other tools, and keys that only look like DeepSpeed's."""

from __future__ import annotations

import json

import pytest

from dsrun.config.rules import Setting, run
from dsrun.config.validation.validate import RuleSelection, apply_fixes, validate

FOREIGN = [
    {"compilerOptions": {"strict": True, "target": "es5"}, "include": ["src"], "exclude": ["dist"]},
    {"name": "x", "version": "1.0", "scripts": {"a": "b"}, "dependencies": {"q": "1"}, "files": ["a"]},
    {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "torch_dtype": "bfloat16", "vocab_size": 9},
    {"base_model_name_or_path": "x", "peft_type": "LORA", "r": 8, "lora_alpha": 16, "inference_mode": True},
    {"python.linting.enabled": True, "editor.tabSize": 4},
]


@pytest.mark.parametrize("config", FOREIGN, ids=lambda config: next(iter(config)))
def test_a_foreign_file_hears_one_thing_and_stays_as_it_is(config):
    assert [finding.rule for finding in run(config, Setting())] == ["DS016"]
    text = json.dumps(config).encode()
    result = validate(text, "x.json", Setting())
    fixed = apply_fixes(result, Setting(), RuleSelection(), unsafe=True)
    assert fixed.document.text.encode() == text


@pytest.mark.parametrize(
    "config",
    [
        {"zero_optimisation": {"stage": 2}},
        {"ds_config": {"bf16": {"enabled": True}}},
        {"zero_optimization.stage": 2},
        {"elasticity": {"enabled": False}},
        {"train_batchsize": 8, "hidden_size": 3},
    ],
    ids=lambda config: next(iter(config)),
)
def test_a_slip_is_no_foreign_file(config):
    rules = {finding.rule for finding in run(config, Setting())}
    assert "DS016" not in rules
    assert "DS102" in rules


def test_a_section_is_renamed_only_where_its_keys_fit():
    mine = {"train_batch_size": 1, "compiler": {"strict": True, "target": "es5"}}
    theirs = {"train_batch_size": 1, "compiler": {"deepcompile": True}}
    fixes = [
        [finding.fix for finding in run(config, Setting(world_size=1)) if finding.path == "compiler"]
        for config in (mine, theirs)
    ]
    assert fixes[0] == [None]
    assert fixes[1][0] is not None


def test_a_projects_own_section_is_a_warning():
    (finding,) = run({"train_batch_size": 1, "zqx": {"a": 1}}, Setting(world_size=1))
    assert (finding.rule, finding.severity) == ("DS001", "warning")


def test_unsafe_fixes_do_not_contradict_each_other():
    """What stage 3 was to read is taken out with offload_param; the stage that trains today stays."""
    config = {
        "train_batch_size": 1,
        "zero_optimization": {
            "stage": 1, "offload_param": {"device": "cpu"}, "stage3_max_live_parameters": 1, "sub_group_size": 5,
            "stage3_prefetch_bucket_size": 5,
        },
    }  # fmt: skip
    setting = Setting(world_size=1)
    result = validate(json.dumps(config).encode(), "x.json", setting)
    fixed = apply_fixes(result, setting, RuleSelection(), unsafe=True)
    assert fixed.document.value["zero_optimization"] == {"stage": 1}
