"""The schemas of the older DeepSpeeds: against themselves, each other, and the releases they were read from."""

from __future__ import annotations

import hashlib
import json

import pytest
from jsonschema import Draft202012Validator

from dsrun.config.schemas import schema
from tools.schemas import generate
from tools.schemas.generate import nodes

VERSIONS = [f"0.{number}" for number in range(9, 20)]
OLDER = VERSIONS[:-1]
SCHEMAS = {schema.name_of(version): schema.load(version).root for version in schema.versions()}
DIGESTS = {
    "0.9": "82a578e7024256dc",
    "0.10": "39c8ed4f93dc85e8",
    "0.11": "886c6c038dd9798b",
    "0.12": "20a79d9779130d67",
    "0.13": "162318a8582b90de",
    "0.14": "341dcacc4ae21254",
    "0.15": "4545fb26c4004033",
    "0.16": "f5c39450347aa0ef",
    "0.17": "2e1b09048a4a8452",
    "0.18": "30ddb86c2706f4a6",
    "0.19": "86262aafc60c5237",
}
"""Start of the SHA-256 of each version's schema, keys sorted. Only a version that is generated again gets a new one."""

KEYS = {name: dict(nodes(schema)) for name, schema in SCHEMAS.items()}


def since(path):
    """The first version that has a key."""
    return next(name for name in VERSIONS if path in KEYS[name])


def until(path):
    """The last version that has a key."""
    return next(name for name in reversed(VERSIONS) if path in KEYS[name])


def defaults(path):
    """Version -> default, where it differs from the version before."""
    known = {}
    for name in VERSIONS:
        if path in KEYS[name]:
            value = KEYS[name][path].get("default")
            if not known or [*known.values()][-1] != value:
                known[name] = value
    return known


# Each schema by itself


def test_there_is_one_for_every_minor_version():
    assert [*SCHEMAS] == VERSIONS


@pytest.mark.parametrize("name", VERSIONS)
def test_it_is_what_it_was(name):
    text = json.dumps(SCHEMAS[name], sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == DIGESTS[name]


@pytest.mark.parametrize("name", VERSIONS)
def test_it_is_a_valid_schema_of_its_version(name):
    of_version = SCHEMAS[name]
    Draft202012Validator.check_schema(of_version)
    assert of_version["$schema"] == Draft202012Validator.META_SCHEMA["$id"]
    assert of_version["$id"].endswith(f"/deepspeed-{name}.schema.json")
    assert of_version["x-deepspeed-version"].startswith(f"{name}.")
    assert of_version["title"] == f"DeepSpeed {name} configuration"


@pytest.mark.parametrize("name", VERSIONS)
def test_every_key_has_a_description_and_a_type(name):
    for path, node in KEYS[name].items():
        assert node["description"].endswith("."), path
        assert node.keys() & {"type", "const", "anyOf", "not"}, path
        assert not node.keys() & (generate.INSTRUCTIONS - {"model"}), path


@pytest.mark.parametrize("name", VERSIONS)
def test_every_default_is_allowed(name):
    for path, node in KEYS[name].items():
        if "default" in node:
            assert Draft202012Validator(node).is_valid(node["default"]), path


@pytest.mark.parametrize("name", VERSIONS)
def test_only_objects_are_checked(name):
    checked = {path: node for path, node in KEYS[name].items() if "x-checked" in node}
    assert "zero_optimization" in checked
    for path, node in checked.items():
        assert node["x-checked"] is True, path
        assert "object" in node["type"], path
        assert node["additionalProperties"] is False, path


@pytest.mark.parametrize("name", OLDER)
def test_second_names_and_autos_are_those_of_the_newest(name):
    for path, node in KEYS[name].items():
        newest = KEYS[VERSIONS[-1]].get(path, {})
        if newest:
            assert node.get("x-auto") == newest.get("x-auto"), path
            assert node.get("x-alias-of") == newest.get("x-alias-of"), path


# The lists that compare versions


@pytest.mark.parametrize("name", OLDER)
def test_added_later_names_keys_of_later_versions(name):
    added = SCHEMAS[name]["x-added-later"]
    assert added
    for path, release in added.items():
        assert path not in KEYS[name]
        assert path in dict(nodes(schema.load(schema.numbers(release)).root))
        assert schema.numbers(release) > schema.load(schema.numbers(name)).version


@pytest.mark.parametrize("name", OLDER)
def test_a_key_of_any_version_is_known_removed_or_added_later(name):
    named = {*SCHEMAS[name]["x-removed"], *SCHEMAS[name]["x-added-later"], *KEYS[name]}
    for version in VERSIONS:
        for path in KEYS[version]:
            parts = path.split(".")
            assert any(".".join(parts[: count + 1]) in named for count in range(len(parts))), path


@pytest.mark.parametrize("name", VERSIONS)
def test_removed_keys_are_gone_and_have_advice(name):
    for path, advice in SCHEMAS[name]["x-removed"].items():
        assert path not in KEYS[name]
        assert advice.endswith("."), path


# What the releases' sources say

SINCE = {
    "zero_optimization.zero_hpz_partition_size": "0.10",
    "zero_optimization.zero_quantized_weights": "0.10",
    "weight_quantization": "0.10",
    "seq_parallel_comm_data_type": "0.11",
    "zero_optimization.offload_optimizer.ratio": "0.12",
    "use_data_before_expert_parallelism": "0.12",
    "graph_harvesting": "0.12",
    "bf16.immediate_grad_update": "0.13",
    "comet": "0.14",
    "timers": "0.14",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": "0.14",
    "aio.use_gds": "0.15",
    "sequence_parallel_size": "0.15",
    "tensor_parallel": "0.16",
    "compile.deepcompile": "0.16",
    "aio.intra_op_parallelism": "0.16",
    "seq_parallel_communication_data_type": "0.16",
    "zero_optimization.zeropp_loco_param": "0.16",
    "zero_optimization.stage3_module_granularity_threshold": "0.16",
    "data_efficiency.data_sampling.dynamic_batching": "0.16",
    "torch_autocast": "0.17",
    "zero_optimization.zenflow": "0.17",
    "bf16.check_grad_overflow": "0.17",
    "checkpoint.writer": "0.17",
    "zero_optimization.offload_optimizer.super_offload": "0.18",
    "zero_optimization.leaf_module": "0.18",
    "bf16.bf16_optimizer_states": "0.18",
    "datastates_ckpt": "0.18",
    "expert_parallel": "0.19",
    "log_level": "0.19",
    "gradient_allreduce_op": "0.19",
}
UNTIL = {
    "compile.backend": "0.13",
    "aio.thread_count": "0.15",
    "seq_parallel_comm_data_type": "0.15",
    "elasticity.micro_batch_sizes": "0.18",
    "zero_optimization.mics_shard_size": "0.18",
    "zero_optimization.zeropp_loco_param": "0.18",
    "amp": "0.18",
    "nebula": "0.18",
    "compression_training": "0.18",
    "sparse_attention": "0.18",
    "sparse_gradients": "0.18",
    "graph_harvesting": "0.18",
    "curriculum_learning": "0.18",
    "progressive_layer_drop": "0.18",
    "eigenvalue": "0.18",
    "quantize_training": "0.18",
}
DEFAULTS = {
    "gradient_clipping": {"0.9": 0, "0.19": 1},
    "steps_per_print": {"0.9": 10, "0.15": None},
    "bf16.immediate_grad_update": {"0.13": False, "0.16": True, "0.17": False},
    "bf16.check_grad_overflow": {"0.17": False, "0.19": True},
    "zero_optimization.offload_optimizer.pin_memory": {"0.9": False, "0.19": True},
    "zero_optimization.offload_param.pin_memory": {"0.9": False, "0.19": True},
    "zero_optimization.overlap_comm": {"0.9": None},
    "zero_optimization.reduce_bucket_size": {"0.9": 500000000},
    "fp16.initial_scale_power": {"0.9": 16},
    "checkpoint.writer.io_buffer_size": {"0.17": 64 * 1024**2},
}
CHECKED_SINCE = {
    "zero_optimization": "0.9",
    "zero_optimization.offload_param": "0.9",
    "hybrid_engine": "0.9",
    "comms_logger": "0.9",
    "tensorboard": "0.9",
    "fp16": "0.17",
    "bf16": "0.17",
    "bfloat16": "0.17",
}


@pytest.mark.parametrize("path", SINCE)
def test_the_version_that_brought_a_key(path):
    assert since(path) == SINCE[path]


@pytest.mark.parametrize("path", UNTIL)
def test_the_last_version_with_a_key(path):
    assert until(path) == UNTIL[path]
    after = SCHEMAS[VERSIONS[VERSIONS.index(UNTIL[path]) + 1]]["x-removed"]
    assert any(path == key or path.startswith(f"{key}.") for key in after)


@pytest.mark.parametrize("path", DEFAULTS)
def test_changed_defaults(path):
    assert defaults(path) == DEFAULTS[path]


@pytest.mark.parametrize("path", CHECKED_SINCE)
def test_since_when_unknown_keys_are_rejected(path):
    assert next(name for name in VERSIONS if KEYS[name][path].get("x-checked")) == CHECKED_SINCE[path]


def test_the_block_of_torch_compile_went_and_another_came():
    assert [name for name in VERSIONS if "compile" in KEYS[name]] == ["0.13", "0.16", "0.17", "0.18", "0.19"]
    assert "compile" in SCHEMAS["0.14"]["x-removed"]
    assert SCHEMAS["0.14"]["x-added-later"]["compile"] == "0.16.6"


def test_optimizers_that_were_known():
    known = {name: set(KEYS[name]["optimizer.type"]["x-known-values"]) for name in VERSIONS}
    for gone in ("onebitadam", "onebitlamb", "zerooneadam"):
        assert [name for name in VERSIONS if gone in known[name]] == OLDER
    assert next(name for name in VERSIONS if "lion" in known[name]) == "0.11"
    assert next(name for name in VERSIONS if "muadam" in known[name]) == "0.10"
    assert next(name for name in VERSIONS if "muon" in known[name]) == "0.17"


def test_how_bfloat16_was_spelled_for_communication():
    spelled = {name: KEYS[name]["communication_data_type"]["enum"] for name in VERSIONS}
    assert [name for name in VERSIONS if "bfp16" in spelled[name]] == VERSIONS[:5]
    assert [name for name in VERSIONS if "bf16" in spelled[name]] == VERSIONS[5:]


@pytest.mark.parametrize("name", VERSIONS)
def test_small_configurations(name):
    def fits(config):
        return Draft202012Validator(SCHEMAS[name]).is_valid(config)

    batch = {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": 1.0}
    assert fits({**batch, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}})
    assert not fits({**batch, "zero_optimisation": {}})
    assert fits({"zero_optimization": {"reduce_bucket_size": 0}}) == (name != "0.19")
    elastic = {"elasticity": {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [2, 4]}}
    assert fits(elastic) == (name != "0.19")
    assert fits({"compression_training": {"layer_reduction": {"enabled": False}}}) == (name != "0.19")


def test_a_schema_is_read_once():
    """Reading one takes longer than judging a config by it."""
    assert schema.load() is schema.load(schema.newest())
    assert schema.load((0, 14)) is schema.load((0, 14))
