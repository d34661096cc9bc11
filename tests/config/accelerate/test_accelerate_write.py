"""`dsrun preset NAME --for accelerate`: the YAML and its config, read by accelerate itself."""

from __future__ import annotations

import json

import pytest
from accelerating import arguments_of, deepspeed_of, variables_of

from dsrun import catalog
from dsrun.config.accelerate import findings as accelerate_yaml
from dsrun.config.rules import Setting
from dsrun.config.validation.sources import ConfigText
from dsrun.config.validation.validate import RuleSelection

PRESETS = ("ddp", "zero2", "zero3-offload")


pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def written(dsrun, here):
    """`written(preset, *options)`: the YAML's path, and the ds_config beside it."""

    def write(preset, *options):
        result = dsrun("preset", preset, "--for", "accelerate", "-o", "acc.yaml", *options)
        assert result.code == 0, result.err
        return here / "acc.yaml", json.loads((here / "acc.deepspeed.json").read_text())

    return write


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(name, marks=() if name in PRESETS else pytest.mark.full)
        for name in catalog.files("presets")
        if name != "zero3-nvme" and not name.startswith("fsdp")
    ],
)
def test_accelerate_builds_the_presets_config(written, preset):
    path, config = written(preset, "--gpus", "4", "--precision", "bf16")
    theirs = deepspeed_of(variables_of(path))
    theirs.pop("steps_per_print")
    assert {**theirs, "gradient_clipping": "auto"} == {**config, "fp16": {"enabled": False}} | {
        "gradient_clipping": "auto",
        "gradient_accumulation_steps": theirs["gradient_accumulation_steps"],
    }
    args = arguments_of(path)
    assert (args.num_processes, args.num_machines, args.use_deepspeed) == (4, 1, True)


def test_two_machines_start_with_torchruns_words(written):
    path, _ = written("zero3", "--gpus", "8", "--nodes", "2")
    variables_of(path)
    args = arguments_of(path)
    assert (args.num_processes, args.num_machines) == (16, 2)
    assert args.deepspeed_multinode_launcher == "standard"
    assert "--main_process_ip" in path.read_text()


@pytest.mark.parametrize("preset", PRESETS)
def test_no_rule_finds_anything(written, preset):
    path, _ = written(preset, "--gpus", "2")
    source = ConfigText("acc.yaml", path.read_bytes(), path)
    results = accelerate_yaml.validate(source, Setting(), RuleSelection(level="warning"))
    assert [located.finding for result in results for located in result.findings] == []


def test_an_optimizer_stays_where_it_is_asked_for(written):
    assert "optimizer" not in written("zero2")[1]
    assert "optimizer" in written("zero2", "--force", "--set", "optimizer.params.lr=1e-4")[1]


def test_nothing_is_overwritten(dsrun, here):
    (here / "acc.deepspeed.json").write_text("mine")
    result = dsrun("preset", "zero2", "--for", "accelerate", "-o", "acc.yaml")
    assert result.code == 1
    assert "acc.deepspeed.json" in result.err
    assert [path.name for path in here.iterdir()] == ["acc.deepspeed.json"]
    assert (here / "acc.deepspeed.json").read_text() == "mine"


@pytest.mark.parametrize("words", [(), ("-o", "-"), ("-o", "acc.json")])
def test_two_files_need_a_yamls_name(dsrun, here, words):
    result = dsrun("preset", "zero2", "--for", "accelerate", *words)
    assert (result.code, result.out, [*here.iterdir()]) == (2, "", [])


# ---------------------------------------------------------------- FSDP

HYBRID = {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "8"}


@pytest.mark.parametrize(
    ("preset", "version", "wanted"),
    [
        (
            "fsdp",
            "2",
            {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_OFFLOAD_PARAMS": "false"},
        ),
        ("fsdp", "1", {"FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "FULL_SHARD"}),
        ("fsdp-offload", "2", {"FSDP_OFFLOAD_PARAMS": "true"}),
        ("fsdp-hybrid", "2", HYBRID),
        ("fsdp-hybrid", "1", {"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}),
    ],
)
def test_accelerate_reads_an_fsdp_preset(dsrun, here, preset, version, wanted):
    words = (
        "--for",
        "accelerate",
        "--fsdp-version",
        version,
        "--gpus",
        "8",
        "--nodes",
        "2",
        "--precision",
        "bf16",
    )
    result = dsrun("preset", preset, *words, "-o", "acc.yaml")
    assert result.code == 0, result.err
    assert [path.name for path in here.iterdir()] == ["acc.yaml"]
    args = arguments_of(here / "acc.yaml")
    assert (args.use_fsdp, args.num_processes, args.num_machines, args.mixed_precision) == (
        True,
        16,
        2,
        "bf16",
    )
    values = variables_of(here / "acc.yaml")
    assert values.items() >= {**wanted, "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}.items()
    assert ("ACCELERATE_USE_PARALLELISM_CONFIG" in values) == (wanted is HYBRID)
    source = ConfigText("acc.yaml", (here / "acc.yaml").read_bytes(), here / "acc.yaml")
    (result,) = accelerate_yaml.validate(source, Setting(), RuleSelection(level="warning"))
    assert result.findings == ()


def test_the_trainer_reads_an_fsdp_preset(dsrun):
    transformers = pytest.importorskip("transformers")
    result = dsrun("preset", "fsdp-offload", "--for", "hf", "--gpus", "8")
    assert result.code == 0, result.err
    given = json.loads(result.out)
    assert given["fsdp_config"]["cpu_offload"]
    arguments = transformers.TrainingArguments("out", use_cpu=True, **given)
    plugin = arguments.fsdp_plugin_args
    assert (plugin["fsdp_version"], plugin["reshard_after_forward"], plugin["cpu_offload"]) == (2, True, True)
    # transformers before 5.10 doesn't hand it on, and accelerate takes this one for version 2.
    assert plugin.get("state_dict_type", "SHARDED_STATE_DICT") == "SHARDED_STATE_DICT"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("fsdp-hybrid", "--for", "hf", "--gpus", "8", "--nodes", "2"), 1, "--for accelerate"),
        (("fsdp", "--for", "accelerate", "--micro-batch", "2"), 2, "--micro-batch"),
        (("fsdp", "--for", "hf", "--fsdp-version", "1"), 2, "--fsdp-version"),
        (("zero2", "--fsdp-version", "1"), 2, "--fsdp-version"),
        (("fsdp", "--for", "accelerate", "--fsdp-version", "3"), 2, "--fsdp-version"),
        (("fsdp",), 1, "--for accelerate"),
    ],
)
def test_what_an_fsdp_preset_can_not_be(dsrun, words, code, message):
    result = dsrun("preset", *words)
    assert result.code == code
    assert message in result.err
    assert "Traceback" not in result.err
