"""`dsrun convert`: one form of a config from another, there and back, judged by accelerate's own classes."""

from __future__ import annotations

import json

import pytest
import yaml
from accelerating import deepspeed_of, variables_of
from needed import since

ZERO_3 = {
    "distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "num_processes": 8, "num_machines": 2,
    "deepspeed_config": {"zero_stage": 3, "offload_param_device": "cpu", "offload_optimizer_device": "cpu",
                         "gradient_accumulation_steps": 4, "zero3_save_16bit_model": True},
}  # fmt: skip
FSDP_1 = {
    "distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 4,
    "fsdp_config": {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_version": 1,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_use_orig_params": True, "fsdp_offload_params": True,
    },
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def converted(dsrun, here):
    """`converted(content, *words)`: what became of a YAML (a mapping) or of a file, and what was said."""

    def make(content, *words):
        name = content
        if not isinstance(content, str):
            name = "given.yaml"
            (here / name).write_text(yaml.safe_dump(content))
        result = dsrun("convert", name, *words)
        assert result.code == 0, result.err
        return result

    return make


def test_the_config_is_the_one_that_accelerate_builds(converted, here):
    config = json.loads(converted(ZERO_3).out)
    theirs = deepspeed_of(variables_of(here / "given.yaml"))
    theirs.pop("steps_per_print")
    for section in theirs["zero_optimization"].values():
        if isinstance(section, dict):
            assert section.pop("nvme_path") is None
    for section in config["zero_optimization"].values():
        if isinstance(section, dict):
            section.pop("nvme_path", None)
    assert {**config, "gradient_clipping": "auto"} == {**theirs, "gradient_clipping": "auto"}


def test_there_and_back(converted, here):
    """A YAML with its own settings, its config in a file, the YAML that names it: accelerate reads both alike."""
    converted(ZERO_3, "-o", "ds.json")
    converted("ds.json", "--gpus", 4, "--nodes", 2, "-o", "named.yaml")
    first, second = (deepspeed_of(variables_of(here / name)) for name in ("given.yaml", "named.yaml"))
    assert second["zero_optimization"]["stage"] == 3
    assert {key: first[key] for key in ("bf16", "fp16", "gradient_accumulation_steps")} == {
        key: second[key] for key in ("bf16", "fp16", "gradient_accumulation_steps")
    }
    assert second["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert json.loads(converted("named.yaml").out) == json.loads((here / "ds.json").read_text())


@since(accelerate="1.14")  # before, it leaves settings of version 1 in
def test_fsdp_1_becomes_what_accelerate_makes_of_it(converted):
    to_fsdp2 = pytest.importorskip("accelerate.commands.to_fsdp2")
    result = converted(FSDP_1, "--to", "fsdp")
    theirs = to_fsdp2.convert_config_to_fsdp2(json.loads(json.dumps(FSDP_1)))
    assert yaml.safe_load(result.out)["fsdp_config"] == theirs["fsdp_config"]
    assert "fsdp_backward_prefetch" in result.err


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_as_fsdp_and_back(converted, here, stage):
    settings = {**ZERO_3["deepspeed_config"], "zero_stage": stage}
    result = converted({**ZERO_3, "deepspeed_config": settings}, "--to", "fsdp", "-o", "fsdp.yaml")
    assert "gradient_accumulation_steps" in result.err, "the script's own, and told so"
    config = variables_of(here / "fsdp.yaml")
    assert config["FSDP_RESHARD_AFTER_FORWARD"] == str(stage == 3).lower()
    assert (config["FSDP_OFFLOAD_PARAMS"], config["ACCELERATE_MIXED_PRECISION"]) == ("true", "bf16")
    back = json.loads(converted("fsdp.yaml").out)
    assert back["zero_optimization"]["stage"] == stage
    assert back["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert back["bf16"]["enabled"]


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        (ZERO_3, ("--to", "accelerate"), "already"),
        ({**ZERO_3, "deepspeed_config": {"zero_stage": 1}}, ("--to", "fsdp"), "stage 2 or 3"),
        (
            {**ZERO_3, "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "cpu"}}, ("--to", "fsdp"),
            "both",
        ),
        ({**ZERO_3, "deepspeed_config": {"zero_stage": 3, "offload_param_device": "nvme"}}, ("--to", "fsdp"), "NVMe"),
        ({**ZERO_3, "deepspeed_config": {"deepspeed_config_file": "no.json"}}, (), "no.json"),
        ({**ZERO_3, "distributed_type": "MULTI_GPU"}, (), "MULTI_GPU"),
        ({**FSDP_1, "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}, (), "HYBRID_SHARD"),
        ({**FSDP_1, "fsdp_config": {"fsdp_version": 2}}, ("--to", "fsdp"), "already"),
    ],
)  # fmt: skip
def test_what_has_no_word_on_the_other_side(dsrun, here, content, words, message):
    (here / "given.yaml").write_text(yaml.safe_dump(content))
    result = dsrun("convert", "given.yaml", *words)
    assert (result.code, result.out) == (1, "")
    assert message in result.err


def test_nothing_is_overwritten(dsrun, here):
    (here / "given.yaml").write_text(yaml.safe_dump(ZERO_3))
    (here / "ds.json").write_text("mine")
    assert dsrun("convert", "given.yaml", "-o", "ds.json").code == 1
    assert (here / "ds.json").read_text() == "mine"
    assert dsrun("convert", "given.yaml", "-o", "ds.json", "--force").code == 0


def test_a_file_and_settings_beside_it_are_no_config(dsrun, here):
    (here / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    given = {"distributed_type": "DEEPSPEED", "mixed_precision": "fp16"}
    section = {"deepspeed_config_file": "ds.json", "zero_stage": 3}
    (here / "given.yaml").write_text(yaml.safe_dump({**given, "deepspeed_config": section}))
    result = dsrun("convert", "given.yaml")
    assert (result.code, result.out) == (1, "")
    assert "deepspeed_config.zero_stage and mixed_precision" in result.err
