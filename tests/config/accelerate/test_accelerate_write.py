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


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    folder = tmp_path / "a user's 工作"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def written(dsrun, here):
    """`written(preset, *options)`: the YAML's path, and the ds_config beside it."""

    def write(preset, *options):
        said = dsrun("preset", preset, "--for", "accelerate", "-o", "acc.yaml", *options)
        assert said.code == 0, said.err
        return here / "acc.yaml", json.loads((here / "acc.deepspeed.json").read_text())

    return write


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(name, marks=() if name in PRESETS else pytest.mark.full)
        for name in catalog.files("presets")
        if name != "zero3-nvme"
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
    said = dsrun("preset", "zero2", "--for", "accelerate", "-o", "acc.yaml")
    assert said.code == 1
    assert "acc.deepspeed.json" in said.err
    assert [path.name for path in here.iterdir()] == ["acc.deepspeed.json"]
    assert (here / "acc.deepspeed.json").read_text() == "mine"


@pytest.mark.parametrize("words", [(), ("-o", "-"), ("-o", "acc.json")])
def test_two_files_need_a_yamls_name(dsrun, here, words):
    said = dsrun("preset", "zero2", "--for", "accelerate", *words)
    assert (said.code, said.out, [*here.iterdir()]) == (2, "", [])
