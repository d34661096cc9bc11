from __future__ import annotations

import pytest

from dsrun.config.presets.build import Options, build_config
from dsrun.config.presets.overrides import parse
from dsrun.errors import DsrunError

ZERO = "zero_optimization"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (f"{ZERO}.reduce_bucket_size=2e8", 200_000_000),
        (f"{ZERO}.reduce_bucket_size = 200000000", 200_000_000),
        (f"$.{ZERO}.stage=3.0", 3),
        ("fp16.loss_scale=128", 128),
        ("fp16.loss_scale=0.5", 0.5),
        ("optimizer.params.lr=1e-5", 1e-5),
        ("optimizer.params.betas=[0.9, 0.95]", [0.9, 0.95]),
        ("optimizer.type=Lion", "Lion"),
        ('optimizer.type="Lion"', "Lion"),
        ("optimizer.params.anything=true", True),
        ("optimizer.params.anything=some text", "some text"),
        ("wall_clock_breakdown=true", True),
        ("steps_per_print=null", None),
        ("tensorboard.job_name=5", "5"),
        ("tensorboard.job_name=a=b c", "a=b c"),
        ("tensorboard.output_path=/日志/it's", "/日志/it's"),
        (f'{ZERO}.offload_param={{"device": "cpu"}}', {"device": "cpu"}),
        (f"{ZERO}.offload_param=null", None),
        (f'{ZERO}.leaf_module.names=["a"]', ["a"]),
    ],
)
def test_good(text, value):
    (parsed,) = parse([text], "deepspeed").values()
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stage=2", "It belongs at zero_optimization.stage"),
        ("fp16.stage=2", "It belongs at zero_optimization.stage"),
        (f"{ZERO}.loss_scale=0", "It belongs at fp16.loss_scale"),
        (f"{ZERO}.reduce_bucket=1", f"Did you mean {ZERO}.reduce_bucket_size?"),
        ("zero_optimisation.stage=1", "zero_optimization"),
        ("gradient_clipping.x=1", "unknown key"),
        ("amp.enabled=true", "was removed from DeepSpeed"),
        ("optimizer.params.max_grad_norm=1", "gradient_clipping"),
        (f"{ZERO}.stage=4", "one of 0, 1, 2, 3"),
        (f"{ZERO}.stage=two", "one of 0, 1, 2, 3"),
        (f"{ZERO}.stage=2.5", "one of 0, 1, 2, 3"),
        (f"{ZERO}.reduce_bucket_size=many", "a whole number"),
        (f"{ZERO}.reduce_bucket_size=0.5", "a whole number"),
        (f"{ZERO}.reduce_bucket_size=0x10", "a whole number"),
        (f"{ZERO}.overlap_comm=True", "In small letters: true"),
        (f"{ZERO}.overlap_comm=1", "true or false"),
        (f"{ZERO}.overlap_comm=", "true or false"),
        (f"{ZERO}.offload_optimizer.device=disk", "one of none, cpu, nvme"),
        (f"{ZERO}.reduce_bucket_size=0", "more than 0"),
        ("optimizer.params.betas=[0.9]", "a list of 2"),
        ("optimizer.params.lr=NaN", "JSON has no such number"),
        ("optimizer.params.lr=1e999", "JSON has no such number"),
        ("optimizer.params.x=[Infinity]", "JSON has no such number"),
        ("optimizer.params.lr=auto", "--for hf"),
        ("gradient_clipping", "is not KEY=VALUE"),
        ("=1", "is not KEY=VALUE"),
        ("a..b=1", "is not KEY=VALUE"),
        ("__class__.__init__=1", "unknown key"),
        (f"{ZERO}.stage={'[' * 50000}", "one of 0, 1, 2, 3"),
    ],
)
def test_bad(text, message):
    with pytest.raises(DsrunError) as caught:
        parse([text], "deepspeed")
    assert message in str(caught.value)
    assert "--set" in str(caught.value)


def test_auto_for_hf():
    assert parse(["optimizer.params.lr=auto"], "hf") == {"optimizer.params.lr": "auto"}
    with pytest.raises(DsrunError, match="HF Trainer doesn't fill it in here"):
        parse(["fp16.loss_scale=auto"], "hf")


def test_all_bad_ones_come_together():
    with pytest.raises(DsrunError) as caught:
        parse(["stage=1", "fp16.enabled=true", "nonsense"], "deepspeed")
    assert len(caught.value.problems) == 2


def test_an_alias_becomes_its_name():
    assert parse([f"{ZERO}.prefetch_bucket_size=1e6"], "deepspeed") == {
        f"{ZERO}.stage3_prefetch_bucket_size": 1_000_000
    }


def test_what_is_set_holds_and_the_triad_follows():
    built = build_config(
        "zero2", Options(gpus=2, overrides=("train_micro_batch_size_per_gpu=8", "bf16.enabled=true"))
    )
    assert built.ds_config["train_batch_size"] == 16
    assert built.origins["train_micro_batch_size_per_gpu"] == built.origins["bf16.enabled"] == "--set"
    assert "fp16" not in built.ds_config


def test_a_section_set_by_hand_still_gets_its_folder():
    text = f'{ZERO}.offload_optimizer={{"device": "nvme"}}'
    built = build_config("zero3", Options(overrides=(text,), nvme_path="/n"))
    assert built.ds_config[ZERO]["offload_optimizer"] == {"device": "nvme", "nvme_path": "/n"}
    assert built.origins[f"{ZERO}.offload_optimizer.device"] == "--set"
    assert built.origins[f"{ZERO}.offload_optimizer.nvme_path"] == "--nvme-path"


def test_a_fault_inside_a_section_has_its_own_path():
    with pytest.raises(DsrunError) as caught:
        build_config("zero3", Options(overrides=(f'{ZERO}.offload_param={{"devise": "cpu"}}',)))
    assert f"--set: $.{ZERO}.offload_param.devise" in str(caught.value)
    assert "offload_param.device?" in str(caught.value)


def test_order_counts():
    texts = (f"{ZERO}.stage=1", f'{ZERO}={{"stage": 2}}', f"{ZERO}.overlap_comm=false")
    assert build_config("zero3", Options(overrides=texts)).ds_config[ZERO] == {
        "stage": 2,
        "overlap_comm": False,
    }


def test_options_without_effect_are_reported():
    built = build_config(
        "zero2", Options(nvme_path="/n", micro_batch=2, overrides=("train_micro_batch_size_per_gpu=3",))
    )
    assert sorted(finding.message.split()[0] for finding in built.findings) == [
        "--micro-batch",
        "--nvme-path",
    ]
