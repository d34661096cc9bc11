"""A DeepSpeed config in the place of a preset, and the preset file that is made of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dsrun.catalog import read_toml
from dsrun.cli import preset as preset_command
from dsrun.config import tree
from dsrun.config.presets import from_config, preset
from dsrun.config.presets.build import Options, build_config
from dsrun.errors import DsrunError
from dsrun.options import run_file

TRAINERS = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": False,
        "reduce_bucket_size": "auto",
        "sub_group_size": 1e9,
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 10}},
    "wall_clock_breakdown": False,
}
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").rglob("*.json"))


@pytest.fixture
def ds(tmp_path):
    def write(config, name="它的 ds.json"):
        path = tmp_path / name
        path.write_text(json.dumps(config), encoding="utf-8")
        return path

    return write


def test_a_config_of_the_trainers_is_a_preset(ds):
    path = ds(TRAINERS)
    built = build_config(str(path), Options(gpus=2, micro_batch=3)).ds_config
    assert built["zero_optimization"] == {"stage": 3, "overlap_comm": False, "sub_group_size": 1e9}
    assert built["train_batch_size"] == 6
    assert built["optimizer"]["type"] == "AdamW"
    assert "auto" not in json.dumps(built)


def test_for_the_trainer_auto_stays(ds):
    built = build_config(str(ds(TRAINERS)), Options(target="hf")).ds_config
    assert built["zero_optimization"]["reduce_bucket_size"] == "auto"
    assert built["scheduler"] == TRAINERS["scheduler"]
    assert built["fp16"]["enabled"] == built["bf16"]["enabled"] == "auto"


def test_its_own_optimizer_gets_nothing_of_another(ds):
    own = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    built = build_config(
        str(ds({"optimizer": own, "zero_allow_untested_optimizer": True})), Options()
    ).ds_config
    assert built["optimizer"] == own


def test_the_preset_file_says_the_same(ds, tmp_path):
    path = ds(TRAINERS)
    made = tmp_path / "presets" / "mine.toml"
    made.parent.mkdir()
    done = CliRunner().invoke(preset_command.command, ["--from", str(path), "-o", str(made)])
    assert done.exit_code == 0, done.output
    assert read_toml(made) == from_config.read(path)
    for target in ("deepspeed", "hf"):
        options = Options(gpus=2, target=target)
        assert build_config(str(made), options).ds_config == build_config(str(path), options).ds_config


def test_every_example_survives_the_way_through_toml(tmp_path):
    assert len(EXAMPLES) > 5
    for path in EXAMPLES:
        made = tmp_path / f"{path.stem}.toml"
        made.write_text(from_config.text(path), encoding="utf-8")
        assert read_toml(made) == from_config.read(path), path


def test_nothing_but_null_and_auto_is_left_out(ds):
    config = {**TRAINERS, "flops_profiler": {"enabled": False}, "comms_logger": {}, "dump_state": None}
    made = from_config.read(ds(config))
    kept = {path for table in ("config", "hf") for path, _ in tree.leaves(made[table])}
    assert {path for path, value in tree.leaves(config) if value is not None} <= kept | {"comms_logger"}
    assert made["config"]["comms_logger"] == {}


def test_what_is_no_config_is_refused(ds, tmp_path):
    with pytest.raises(DsrunError):
        preset.load(str(ds([1, 2])))
    with pytest.raises(DsrunError, match="no such file"):
        preset.load(str(tmp_path / "gone.json"))
    with pytest.raises(DsrunError):
        build_config(str(ds({"compilerOptions": {"strict": True}})), Options())


def test_from_takes_no_other_options(ds):
    done = CliRunner().invoke(preset_command.command, ["zero2", "--from", str(ds(TRAINERS))])
    assert done.exit_code == 2
    assert "--from takes the config as it is" in done.output


def test_a_run_file_names_a_config_beside_it(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('model = "m"\npreset = "ds.json"\n', encoding="utf-8")
    assert run_file.read(file).values["preset"] == str(tmp_path / "ds.json")


def test_a_key_that_is_there_twice_is_refused(tmp_path):
    """DeepSpeed stops at one, and which of the values was meant nobody knows; twice the same is no question."""
    path = tmp_path / "ds.json"
    path.write_text(
        '{"zero_optimization": {"stage": 2},\n "zero_optimization": {"stage": 3}}', encoding="utf-8"
    )
    with pytest.raises(DsrunError, match="zero_optimization a second time") as error:
        from_config.read(path)
    assert error.value.problems[0].where.startswith(f"{path}:2")
    path.write_text('{"zero_optimization": {"stage": 2, "stage": 2}}', encoding="utf-8")
    assert from_config.read(path)["config"]["zero_optimization"] == {"stage": 2}
