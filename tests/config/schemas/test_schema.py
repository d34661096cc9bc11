"""The schema of the DeepSpeed configuration file, against itself, DeepSpeed and HF Trainer."""

from __future__ import annotations

import copy
import json
import typing
from types import SimpleNamespace

import pytest
from jsonschema import Draft202012Validator
from needed import since

from dsrun.config.schemas import schema
from tools.schemas import generate
from tools.schemas.generate import nodes
from tools.schemas.signatures import load

SCHEMA = schema.load().root
OVERLAY = json.loads(generate.OVERLAY.read_text(encoding="utf-8"))
NODES = dict(nodes(SCHEMA))
CHECKER = Draft202012Validator(SCHEMA)

BATCH = {"train_micro_batch_size_per_gpu": 1}


def complaints(config):
    return [f"{error.json_path}: {error.message}" for error in CHECKER.iter_errors(config)]


def accepts(node, value):
    return Draft202012Validator(node).is_valid(value)


def at(path, value):
    """A configuration that holds only `value` at the dotted path."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


# The schema by itself


def test_it_holds_everything_in_place():
    def keywords(node):
        if isinstance(node, dict):
            for keyword, value in node.items():
                yield keyword
                yield from keywords(value)

    words = set(keywords(SCHEMA))
    assert not words & {"$ref", "$defs", "allOf", "oneOf", "if"}
    assert not words & generate.INSTRUCTIONS - set(SCHEMA["properties"]["autotuning"]["properties"])
    assert len(NODES) > 400


def test_every_key_is_described_in_one_line():
    descriptions = {path: node.get("description", "") for path, node in NODES.items()}
    assert [path for path, text in descriptions.items() if not text.endswith(".") or "\n" in text] == []


def test_only_the_params_are_open():
    open_ones = {
        path
        for path, node in NODES.items()
        if "properties" in node and node["additionalProperties"] is not False
    }
    assert open_ones == {"optimizer.params", "scheduler.params"}
    assert SCHEMA["additionalProperties"] is False


def test_auto_is_allowed_only_where_marked():
    def is_free_text(node):
        return "string" in node.get("type", ()) and "enum" not in node

    for path, node in NODES.items():
        if node.get("x-auto"):
            assert node["anyOf"][0] == {"const": "auto"}, path
            assert is_free_text(node["anyOf"][1]) or not accepts(node["anyOf"][1], "auto"), path
            assert "description" in node, path
            assert accepts(node, "auto"), path
        elif accepts(node, "auto") and not is_free_text(node):
            assert node.get("default") == "auto", f"{path}: no word of DeepSpeed's own"


def test_second_names_lead_to_their_first():
    seconds = {path: node["x-alias-of"] for path, node in NODES.items() if "x-alias-of" in node}
    assert seconds["zero_optimization.prefetch_bucket_size"] == "stage3_prefetch_bucket_size"
    assert seconds["bfloat16"] == "bf16"
    for path, first in seconds.items():
        section = path.rpartition(".")[0]
        assert "x-alias-of" not in NODES[f"{section}.{first}" if section else first]
    assert not any("x-auto" in NODES[path] for path in seconds)


def test_removed_keys_are_named_but_not_known():
    assert set(SCHEMA["x-removed"]) >= {"elasticity", "amp", "zero_optimization.mics_shard_size"}
    assert not set(SCHEMA["x-removed"]) & set(NODES)
    assert all(text.endswith(".") and "\n" not in text for text in SCHEMA["x-removed"].values())


# Against the installed DeepSpeed


@pytest.mark.parametrize(
    ("key", "target"),
    [
        ("preset_model", "deepspeed.module_inject.auto_ep_presets.registry:PRESET_MODELS"),
        ("expert_activation", "deepspeed.moe.ep_experts:EXPERT_ACTIVATIONS"),
    ],
)
def test_choices_that_only_the_running_code_knows(deepspeed, key, target):
    assert NODES[f"expert_parallel.{key}"]["enum"] == [*load(target), None]


def models_in(annotation):
    """The pydantic models inside a type."""
    if hasattr(annotation, "model_fields"):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from models_in(argument)


def pydantic_keys(model, path):
    """(path, model, allowed names) of a model and of all below it, each under every one of its names."""
    names = set()
    for name, info in model.model_fields.items():
        own = {name, info.alias or name}
        names |= own
        for inner in models_in(info.annotation):
            for other in own:
                yield from pydantic_keys(inner, f"{path}.{other}")
    yield path, model, names


def parsed(config):
    from deepspeed.runtime.config import DeepSpeedConfig

    return DeepSpeedConfig(copy.deepcopy(config))


def test_it_has_exactly_the_fields_of_the_pydantic_models(deepspeed):
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    seen = set()
    for path, entry in nodes(OVERLAY):
        if "model" in entry:
            for section, model, names in pydantic_keys(load(entry["model"]), path):
                assert set(NODES[section]["properties"]) == names, section
                seen.add(model)

    def used(value):
        if isinstance(value, DeepSpeedConfigModel):
            yield type(value)
        for inner in vars(value).values() if hasattr(value, "__dict__") else ():
            yield from used(inner)

    zero = {"stage": 2, "offload_param": {}, "offload_optimizer": {}, "zenflow": {}}
    full = parsed({**BATCH, "weight_quantization": {}, "comms_logger": {}, "zero_optimization": zero})
    # The monitors' common model has their sections as fields and no section of its own.
    assert {model.__name__ for model in set(used(full)) - seen} == {"DeepSpeedMonitorConfig"}


def defaults(properties):
    """The configuration that gives every key its default: no old or second names, no params."""
    config = {}
    for name, node in properties.items():
        if node.get("deprecated") or "x-alias-of" in node or name in ("optimizer", "scheduler"):
            continue
        if "default" in node:
            config[name] = node["default"]
        elif "properties" in node and (inner := defaults(node["properties"])):
            config[name] = inner
    return config


def as_data(value):
    """What a parsed configuration holds, for comparing two of them."""
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return {name: as_data(inner) for name, inner in vars(value).items() if name != "_param_dict"}
    return value


def test_writing_down_every_default_changes_nothing(deepspeed):
    explicit = {**defaults(SCHEMA["properties"]), **BATCH}
    assert complaints(explicit) == []
    assert len(explicit) > 40
    # Kept as they were written, and read alike.
    del explicit["datastates_ckpt"], explicit["pipeline"]["use_reentrant"]
    # Blocks that are off when they are absent, whatever stands in them.
    for absent in ("comms_logger", "weight_quantization"):
        assert parsed({absent: explicit.pop(absent), **BATCH})
    assert as_data(parsed(explicit)) == as_data(parsed(BATCH))


def test_old_and_second_names_still_work(deepspeed):
    for path, node in NODES.items():
        section, _, name = path.rpartition(".")
        if section == "zero_optimization" and ("x-alias-of" in node or node.get("deprecated")):
            assert parsed({**BATCH, section: {name: node["default"]}}), path


def test_pydantic_blocks_are_closed_in_deepspeed_too(deepspeed):
    for path, entry in nodes(OVERLAY):
        if "model" in entry:
            with pytest.raises(ValueError, match="Extra inputs are not permitted"):
                parsed({**BATCH, **at(path, {"no_such_key": 1})})


def test_removed_keys_are_refused(deepspeed):
    from deepspeed.runtime.config import DeepSpeedConfigError

    assert set(SCHEMA["x-refused"]) < set(SCHEMA["x-removed"])
    for path in SCHEMA["x-refused"]:
        with pytest.raises(DeepSpeedConfigError):
            parsed({**BATCH, **at(path, None)})


# Against the installed transformers


@since(
    transformers="5.18"
)  # before, a warm-up of 0 steps is filled in, which DeepSpeed refuses (versions' table)
def test_hf_trainer_fills_in_exactly_the_marked_keys(tmp_path):
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    def all_auto(properties):
        return {
            name: all_auto(node["properties"]) if "properties" in node else "auto"
            for name, node in properties.items()
        }

    def still_auto(config, path=""):
        for name, value in config.items():
            here = f"{path}.{name}" if path else name
            if isinstance(value, dict):
                yield from still_auto(value, here)
            elif value == "auto":
                yield here

    config = all_auto(SCHEMA["properties"])
    everything = set(still_auto(config))
    config["zero_optimization"]["stage"] = 3  # "auto" sizes are worked out for stage 3 only
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    filled = HfTrainerDeepSpeedConfig(config)
    filled.trainer_config_process(arguments)
    filled.trainer_config_finalize(arguments, SimpleNamespace(config=SimpleNamespace(hidden_size=32)), 100)

    left = set(still_auto(filled.config)) | {"zero_optimization.stage"}
    assert everything - left == {path for path, node in NODES.items() if node.get("x-auto") is True}
    # What it fills in has the type that the schema asks for.
    for path in everything - left:
        value = filled.config
        for name in path.split("."):
            value = value[name]
        assert accepts(NODES[path]["anyOf"][1], value), f"{path}: {value!r}"


# Small configurations

GOOD = {
    "nothing": {},
    "an editor's key and a comment": {"$schema": "./deepspeed-0.19.schema.json", "_note": {"by": ["hand"]}},
    "HF Trainer's usual": {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
            },
        },
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
        },
    },
    "sizes in powers of ten": {"zero_optimization": {"reduce_bucket_size": 5e8, "sub_group_size": 1e9}},
    "a second name": {"zero_optimization": {"stage": 3, "max_live_parameters": 10}},
    "the old form of ZeRO": {"zero_optimization": True, "allgather_size": 1000},
    "null where it means something": {
        "train_batch_size": None,
        "steps_per_print": None,
        "aio": None,
        "zero_optimization": {"overlap_comm": None, "offload_param": None},
    },
    "a torch optimizer with arguments of its own": {
        "optimizer": {"type": "Adadelta", "params": {"lr": 1, "rho": 0.9}}
    },
    "letter case": {"communication_data_type": "BF16", "checkpoint": {"tag_validation": "Ignore"}},
    "DeepSpeed's own auto": {
        "data_types": {"keep_in_fp32_modules": "auto"},
        "zero_optimization": {"zenflow": {"select_strategy": "auto", "update_interval": "auto"}},
        "expert_parallel": {"top_k": "auto"},
    },
    "leaf modules as one name": {"zero_optimization": {"leaf_module": {"classes": "MixtralSparseMoeBlock"}}},
    "a tensor-parallel plan": {
        "tensor_parallel": {
            "autotp_size": 2,
            "partition_config": {
                "layer_specs": [
                    {"patterns": [".*o_proj.weight$"], "partition_type": "row"},
                    {"patterns": [".*qkv.weight$"], "shape": [[64, 16, 16], -1], "partition_dim": 0},
                ]
            },
        }
    },
    "a curriculum": {
        "data_efficiency": {
            "enabled": True,
            "data_sampling": {
                "curriculum_learning": {
                    "enabled": True,
                    "curriculum_metrics": {
                        "seqlen": {
                            "min_difficulty": 8,
                            "max_difficulty": 1024,
                            "schedule_type": "fixed_root",
                            "schedule_config": {
                                "total_curriculum_step": 100,
                                "difficulty_step": 8,
                                "root_degree": 2,
                            },
                        }
                    },
                }
            },
        }
    },
}

BAD = {
    "a typo at the top": ({"gradient_clip": 1.0}, "$"),
    "a removed block": ({"elasticity": {"enabled": False}}, "$"),
    "a typo in ZeRO": ({"zero_optimization": {"offload_optimzer": {}}}, "$.zero_optimization"),
    "a typo in a block that DeepSpeed doesn't check": ({"aio": {"blocksize": 1}}, "$.aio"),
    "a typo in a rule of a plan": (
        {"tensor_parallel": {"partition_config": {"layer_specs": [{"pattern": "x"}]}}},
        "$.tensor_parallel.partition_config.layer_specs[0]",
    ),
    "a stage in quotes": ({"zero_optimization": {"stage": "3"}}, "$.zero_optimization.stage"),
    "a stage that doesn't exist": ({"zero_optimization": {"stage": 4}}, "$.zero_optimization.stage"),
    "auto under a second name": (
        {"zero_optimization": {"prefetch_bucket_size": "auto"}},
        "$.zero_optimization.prefetch_bucket_size",
    ),
    "a truth in quotes": ({"prescale_gradients": "false"}, "$.prescale_gradients"),
    "a number for a truth": ({"fp16": {"enabled": 1}}, "$.fp16.enabled"),
    "a fraction of a step": ({"gradient_accumulation_steps": 2.5}, "$.gradient_accumulation_steps"),
    "no samples": ({"train_batch_size": 0}, "$.train_batch_size"),
    "a negative learning rate": (
        {"optimizer": {"type": "Adam", "params": {"lr": -1}}},
        "$.optimizer.params.lr",
    ),
    "a learning rate in quotes": (
        {"optimizer": {"type": "Adam", "params": {"lr": "1e-4"}}},
        "$.optimizer.params.lr",
    ),
    "an optimizer by name": ({"optimizer": {"name": "Adam"}}, "$.optimizer"),
    "a block as a truth": ({"fp16": True}, "$.fp16"),
    "an unknown device": (
        {"zero_optimization": {"offload_param": {"device": "CPU"}}},
        "$.zero_optimization.offload_param.device",
    ),
    "more than all": (
        {"zero_optimization": {"offload_optimizer": {"ratio": 1.5}}},
        "$.zero_optimization.offload_optimizer.ratio",
    ),
    "a print at every zeroth step": ({"steps_per_print": 0}, "$.steps_per_print"),
    "a precision that doesn't exist": ({"communication_data_type": "auto"}, "$.communication_data_type"),
    "what only Python can say": ({"tensor_parallel": {"dtype": "bf16"}}, "$.tensor_parallel.dtype"),
}


@pytest.mark.parametrize("name", GOOD)
def test_good(name):
    assert complaints(GOOD[name]) == []


@pytest.mark.parametrize("name", BAD)
def test_bad(name):
    config, place = BAD[name]
    texts = complaints(config)
    assert texts
    assert {text.partition(": ")[0] for text in texts} == {place}
