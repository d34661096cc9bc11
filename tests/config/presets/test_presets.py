"""Every preset in every combination: built, fits the schema, and is what its name says."""

from __future__ import annotations

import copy
import itertools
import re
from types import SimpleNamespace

import pytest

from dsrun import catalog
from dsrun.config import tree
from dsrun.config.presets import preset
from dsrun.config.presets.build import Options, build_config
from dsrun.config.schemas import schema
from dsrun.config.schemas import violations as schema_violations
from dsrun.ds_config import rounding
from dsrun.errors import DsrunError

FSDP = [name for name in catalog.files("presets") if preset.load(name).fsdp]
PRESETS = [name for name in catalog.files("presets") if name not in FSDP]
"""Whatever ships for DeepSpeed: a new file is a test of everything here."""
STAGES = {
    "ddp": 0,
    "zero1": 1,
    "zero2": 2,
    "zero2-offload": 2,
    "zero3": 3,
    "zero3-offload": 3,
    "zero3-nvme": 3,
}
"""What these names promise."""
FP16 = {
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
AUTOS = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer.params.lr",
    "optimizer.params.betas",
    "optimizer.params.eps",
    "optimizer.params.weight_decay",
}
FP16_ALONE = ("zero3-zeropp",)
"""Presets that rules refuse in bf16 and fp32 (DS269)."""
EVERY = [
    (name, precision, target)
    for name, precision, target in itertools.product(
        PRESETS, (None, "fp16", "bf16", "fp32"), ("deepspeed", "hf")
    )
    if name not in FP16_ALONE or precision in (None, "fp16")
]


def build(name, **options):
    return build_config(name, Options(nvme_path="/nvme" if needs_disk(name) else None, **options))


def needs_disk(name):
    return "nvme_path" in preset.load(name).requires


@pytest.mark.parametrize("name", PRESETS)
def test_no_timer_waits_for_the_device(name):
    """DeepSpeed's would synchronise it twice a micro batch."""
    assert tree.get(build(name).ds_config, "timers.throughput.enabled") is False


def test_the_names_promise_stages():
    assert {name: build(name).ds_config["zero_optimization"]["stage"] for name in STAGES} == STAGES


@pytest.mark.parametrize(("name", "precision", "target"), EVERY)
def test_every_combination_builds(name, precision, target):
    built = build(name, gpus=2, nodes=3, precision=precision, target=target)
    config = built.ds_config
    # DeepSpeed's own loop trains fp16 at stage 0 without loss scaling, which is warned about.
    unscaled = config["zero_optimization"]["stage"] == 0 and config.get("fp16", {}).get("enabled") is True
    serious = [finding.rule for finding in built.findings if finding.severity != "note"]
    assert serious == (["DS306"] if unscaled else [])
    # A precision that is fixed for HF Trainer has to be among its arguments too.
    fixed = target == "hf" and precision in ("fp16", "bf16")
    rounded = len(rounding(config))  # by a CUDA kernel
    notes = [finding.rule for finding in built.findings if finding.severity == "note"]
    assert sorted(notes) == ["DS244"] * rounded + ["DS602"] * fixed
    assert not schema_violations.check(schema.load(), config, target)
    assert set(built.origins) == {path for path, _ in tree.leaves(config)}
    wanted = precision or ("fp16" if target == "deepspeed" else None)
    enabled = {key: config[key]["enabled"] for key in ("fp16", "bf16") if key in config}
    if wanted is None:
        assert enabled == {"fp16": "auto", "bf16": "auto"}
    elif wanted == "fp32":
        assert not any(enabled.values())
    else:
        assert enabled == {wanted: True}
    if enabled.get("fp16"):
        assert {key: value for key, value in config["fp16"].items() if key != "enabled"} == FP16


@pytest.mark.parametrize("name", FP16_ALONE)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_kernel_that_takes_all_bits_for_fp16(name, precision):
    with pytest.raises(DsrunError, match=f"reads {precision} gradients as if they were fp16"):
        build(name, gpus=2, nodes=2, precision=precision)


@pytest.mark.parametrize("name", PRESETS)
def test_numbers_for_deepspeed(name):
    config = build(name, gpus=2, nodes=3, micro_batch=5, grad_accum=7).ds_config
    assert config["train_batch_size"] == 2 * 3 * 5 * 7
    assert "auto" not in [value for _, value in tree.leaves(config)]
    for path, value in tree.leaves(config):
        if "integer" in schema.types(schema.load().node(path) or {}) and not isinstance(value, (bool, str)):
            assert type(value) is int, path


@pytest.mark.parametrize("name", PRESETS)
def test_autos_for_hf(name):
    config = build(name, gpus=2, target="hf").ds_config
    found = {path for path, value in tree.leaves(config) if value == "auto"}
    assert found >= AUTOS
    assert all(schema.load().is_auto(path) for path in found)


def test_a_number_from_the_user_is_kept_for_hf():
    config = build("zero2", gpus=2, target="hf", micro_batch=8, grad_clip=0.5).ds_config
    assert config["train_micro_batch_size_per_gpu"] == 8
    assert config["gradient_clipping"] == 0.5
    assert config["train_batch_size"] == config["gradient_accumulation_steps"] == "auto"
    full = build("zero2", gpus=2, target="hf", micro_batch=8, grad_accum=3).ds_config
    assert full["train_batch_size"] == 48


def test_safe_defaults():
    for name in PRESETS:
        zero = build(name).ds_config["zero_optimization"]
        assert zero.get("overlap_comm") is {0: None, 1: False, 2: False, 3: True}[zero["stage"]]
        if zero["stage"] == 3:
            assert zero["stage3_gather_16bit_weights_on_model_save"] is True
    nvme = build("zero3-nvme", gpus=4).ds_config
    offload = nvme["zero_optimization"]["offload_optimizer"]
    assert offload["buffer_count"] >= (8 if offload["pipeline_read"] or offload["pipeline_write"] else 4)
    assert nvme["zero_optimization"]["offload_param"]["buffer_size"] == 135_000_000
    assert nvme["aio"]["block_size"] == 1048576


def test_a_known_model_sizes_the_nvme_buffers():
    options = Options(gpus=4, nvme_path="/n", largest_parameter=1001)
    offload = build_config("zero3-nvme", options).ds_config["zero_optimization"]["offload_param"]
    assert offload["buffer_size"] == 251


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_introduces_itself(name, dsrun, monkeypatch, tmp_path):
    """The header gives a command, and the command works."""
    monkeypatch.chdir(tmp_path)
    header = catalog.files("presets")[name].read_text(encoding="utf-8").split("\n\n")[0]
    found = re.search(rf"^#   dsrun (preset {name} .*)$", header, re.MULTILINE)
    assert found
    assert "Not " in header
    result = dsrun(*found[1].split())
    assert result.code == 0
    assert (tmp_path / "deepspeed.json").is_file()


def deepspeed_config(config, ranks):
    """What DeepSpeed's own parser makes of it, as if `ranks` ranks were running."""
    from deepspeed import comm as dist
    from deepspeed.runtime.config import DeepSpeedConfig

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_rank", lambda *_: 0)
        patch.setattr(dist, "get_world_size", lambda *_: ranks)
        return DeepSpeedConfig(copy.deepcopy(config))


@pytest.mark.parametrize(("name", "precision", "target"), EVERY)
def test_deepspeed_parses_it(name, precision, target):
    pytest.importorskip("deepspeed")
    config = build(name, gpus=2, nodes=2, precision=precision, target=target).ds_config
    if target == "hf":
        config = filled_in_by_hf(config, precision)
    parsed = deepspeed_config(config, ranks=4)
    assert (
        parsed.train_batch_size
        == 4 * parsed.train_micro_batch_size_per_gpu * parsed.gradient_accumulation_steps
    )
    assert int(parsed.zero_optimization_stage) == config["zero_optimization"]["stage"]
    wanted = precision or "fp16"
    assert parsed.float16_config.enabled is (wanted == "fp16")
    assert parsed.bfloat16_config.enabled is (wanted == "bf16")
    offload = parsed.zero_config.offload_optimizer
    assert (offload is not None) is ("offload_optimizer" in config["zero_optimization"])


def filled_in_by_hf(config, precision):
    """The config after HF Trainer's own code has filled in its "auto"s."""
    integration = pytest.importorskip("transformers.integrations.deepspeed")
    args = SimpleNamespace(
        world_size=4,
        n_gpu=1,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=5,
        max_grad_norm=0.7,
        learning_rate=1e-4,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-7,
        weight_decay=0.1,
        save_on_each_node=False,
        fp16=precision in (None, "fp16"),
        fp16_full_eval=False,
        bf16=precision == "bf16",
        bf16_full_eval=False,
        get_warmup_steps=lambda steps: 1,
    )
    hf = integration.HfTrainerDeepSpeedConfig(copy.deepcopy(config))
    hf.trainer_config_process(args)
    hf.trainer_config_finalize(args, SimpleNamespace(config=SimpleNamespace(hidden_size=64)), 10)
    assert "auto" not in [value for _, value in tree.leaves(hf.config)]
    assert hf.config["gradient_clipping"] == 0.7
    assert hf.config["optimizer"]["params"]["betas"] == [0.9, 0.95]
    return hf.config


def test_chains_are_short():
    """A preset says only what is its own: no value repeats the one it would get anyway."""
    for name in PRESETS:
        chain = preset.load(name).chain
        inherited = {}
        for file in chain[:-1]:
            inherited.update(tree.leaves(file.config))
        own = dict(tree.leaves(chain[-1].config))
        assert not {path for path, value in own.items() if path in inherited and inherited[path] == value}
