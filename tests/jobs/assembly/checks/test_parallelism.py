"""What is refused, and that each refusal names something that isn't."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest

from dsrun.jobs.assembly.checks.parallelism import (
    EXPERT_NETWORKS,
    PIPELINED,
    ParallelSetup,
    idle,
    network_fields,
    notes,
    refusals,
    window_of,
    with_section,
)
from dsrun.models.tensor_parallel import NETWORKS
from dsrun.options.commands import FinetuneOptions
from dsrun.options.derived import by_pipeline
from dsrun.options.layers import Resolved
from dsrun.options.table import ParallelismOptions


def setup_of(tp: int = 2, devices: tuple[int, ...] = (4,), sp: int = 1, **more) -> ParallelSetup:
    parallel = ParallelismOptions(tp=tp, sp=sp)
    return ParallelSetup(parallel=parallel, devices=devices, **{"heads": 8, "kv_heads": 4, **more})


def shared(sp: int = 2, **more) -> ParallelSetup:
    return setup_of(1, sp=sp, **more)


@pytest.mark.parametrize("more", [{}, {"stage": 0}, {"stage": 3}, {"method": "lora"}, {"optimizer": "sgd"}])
@pytest.mark.parametrize("network", NETWORKS)
def test_what_was_compared_is_not_refused(network, more):
    assert refusals(setup_of(network=network, **more)) == []
    assert refusals(shared(network=network, **more)) == []


@pytest.mark.parametrize(
    ("setup", "said"),
    [
        (setup_of(devices=(3,)), "3 ranks"),
        (setup_of(devices=(1,)), "Leave it out"),
        (setup_of(4, devices=(2, 2)), "two hosts"),
        (setup_of(4, devices=(6, 2)), "two hosts"),
        (setup_of(network="mixtral"), "zero3"),
        (setup_of(4, heads=3, kv_heads=3), "nearest that fits: --tp 2"),
        (setup_of(4, heads=8, kv_heads=2, method="lora"), "nearest that fits: --tp 2"),
        (setup_of(method="qlora"), "--method lora"),
        (setup_of(method="ptuning"), "--method lora"),
        (setup_of(optimizer="muon"), "adamw"),
        (setup_of(optimizer="adamw-8bit"), "adamw"),
        (setup_of(stage=3, offload=True), "zero3"),
        (setup_of(stage=3, second_copy=True), "--preset zero3"),
        (setup_of(stage=3, quantized=True), "zero_quantized_weights"),
        (shared(stage=3, quantized=True), "zero_quantized_weights"),
        (setup_of(2, sp=2), "nearest that can be: --tp 2, 2 times"),
        (setup_of(fsdp=True), "zero3"),
        (shared(fsdp=True), "zero3"),
        (shared(devices=(3,)), "3 ranks"),
        (shared(4, devices=(2, 2)), "two hosts"),
        (shared(network="mixtral"), "llama"),
        (shared(3, devices=(3,)), "--sp 2 on 2 devices"),
        (shared(attention="sdpa"), "varlen"),
        (shared(attention="flash"), "varlen"),
        (shared(packing=False), "--no-packing"),
        (shared(official=True), "--official"),
        (shared(loss="micro-batch-mean"), "token-mean"),
        (shared(method="ptuning"), "--method lora"),
        (shared(method="qlora"), "--method lora"),
        (shared(stage=3, offload=True), "zero3"),
    ],
)
def test_one_message_says_what_would_do(setup, said):
    (problem,) = refusals(setup)
    assert problem.where in (f"--tp {setup.parallel.tp}", f"--sp {setup.parallel.sp}", "--tp 2 --sp 2")
    assert said in str(problem)


@pytest.mark.parametrize("kind", ["tp", "sp", "pp"])
def test_the_size_that_is_named_is_not_refused(kind):
    """On the ranks that are there, or on as many as are named."""
    named = 0
    for size, devices, heads, kv_heads, method in itertools.product(
        range(2, 9), ((1,), (3,), (6,), (8,), (2, 2), (4, 6)), (3, 8), (1, 2, 3), ("full", "lora")
    ):
        more = {"stage": 1, "packing": False, "attention": "sdpa"} if kind == "pp" else {"method": method}
        setup = ParallelSetup(
            parallel=ParallelismOptions(**{kind: size}),
            devices=devices,
            heads=heads,
            kv_heads=kv_heads,
            layers=4,
            **more,
        )
        problems = refusals(setup)
        assert len(problems) <= 1
        for found in (
            re.search(rf"--{kind} (\d+)(?: on (\d+) devices)?", problem.hint) for problem in problems
        ):
            if found:
                near = ParallelismOptions(**{kind: int(found[1])})
                there = (int(found[2]),) if found[2] else devices
                assert refusals(dataclasses.replace(setup, parallel=near, devices=there)) == []
                named += 1
    assert named > 50


@pytest.mark.parametrize(("heads", "kv_heads", "sp"), [(8, 4, 4), (8, 2, 4), (8, 2, 8), (6, 6, 3)])
def test_heads_of_keys_and_values_may_be_repeated(heads, kv_heads, sp):
    assert refusals(shared(sp, devices=(sp,), heads=heads, kv_heads=kv_heads)) == []


def test_ranks_without_attention_are_worth_a_word():
    assert notes(setup_of(4, kv_heads=2))
    assert not notes(setup_of(4, kv_heads=4))


@pytest.mark.parametrize("network", NETWORKS)
def test_the_config_names_each_layer_once(network):
    config = with_section({}, network, ParallelismOptions(tp=2), freezes=False)
    patterns = [
        pattern
        for spec in config["tensor_parallel"]["partition_config"]["layer_specs"]
        for pattern in spec["patterns"]
    ]
    for layer in NETWORKS[network].layers:
        for end in ("", ".base_layer"):
            name = f"model.layers.0.block.{layer}{end}.weight"
            assert sum(bool(re.match(pattern, name)) for pattern in patterns) == 1, name
        lora = [f"model.layers.0.block.{layer}.lora_{side}.default.weight" for side in "AB"]
        assert sum(bool(re.match(pattern, name)) for pattern in patterns for name in lora) == 1, lora
    assert not any(re.match(pattern, "lm_head.weight") for pattern in patterns)
    assert with_section({}, network, ParallelismOptions(), freezes=False) == {}


def test_gradients_of_norms_are_summed_where_there_are_some():
    """torch takes no hook on a weight that isn't trained."""
    trained, frozen = (
        with_section({}, "qwen3", ParallelismOptions(tp=2), freezes=freezes)["tensor_parallel"]
        for freezes in (False, True)
    )
    (norms,) = [one for one in trained["partition_config"]["layer_specs"] if one.get("grad_allreduce")]
    assert re.match(norms["patterns"][0], "model.layers.0.self_attn.q_norm.weight")
    assert not any(one.get("grad_allreduce") for one in frozen["partition_config"]["layer_specs"])


# Pipelines


def mixed(ep: int = 2, devices: tuple[int, ...] = (4,), **more) -> ParallelSetup:
    parallel = ParallelismOptions(ep=ep)
    return ParallelSetup(parallel=parallel, devices=devices, **{"network": "mixtral", "experts": 8, **more})


@pytest.mark.parametrize("network", EXPERT_NETWORKS)
@pytest.mark.parametrize(
    "more", [{}, {"stage": 1}, {"stage": 3}, {"optimizer": "sgd"}, {"precision": "bf16"}]
)
def test_experts_that_were_compared_are_not_refused(network, more):
    assert refusals(mixed(network=network, **more)) == []


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        (mixed(network="llama", experts=None), "llama has no experts to divide"),
        (mixed(network="glm4_moe"), "the experts of glm4_moe are not known to be divided rightly"),
        (mixed(3), "4 ranks can't make groups of 3; 8 experts are no equal shares for 3 ranks"),
        (mixed(8, (8,), experts=6), "6 experts are no equal shares for 8 ranks"),
        (mixed(stage=0), "without ZeRO"),
        (mixed(fsdp=True), "is DeepSpeed's, and the preset FSDP's"),
        (mixed(offload=True), "not tried together with offload"),
        (mixed(method="lora"), "not tried with --method lora"),
        (mixed(optimizer="muon"), "not tried with --optimizer muon"),
        (mixed(precision="fp16"), "not tried in fp16"),
        (mixed(compiled=True), "are not compiled"),
        (mixed(second_copy=True, stage=3), "second copy"),
        (mixed(network="qwen3_5_moe_text", router_loss=True), "a second time"),
    ],
)
def test_experts_that_were_not_compared_are_refused(setup, words):
    problems = refusals(setup)
    assert len(problems) == 1, problems
    assert words in problems[0].what
    assert problems[0].hint


def test_sizes_that_divide_the_experts_are_named():
    assert refusals(mixed(3))[0].hint == "Sizes that do: 2, 4."


def test_divided_experts_stand_in_the_config():
    config = with_section(
        {"zero_optimization": {"stage": 1}}, "mixtral", ParallelismOptions(ep=4), freezes=False
    )
    assert config["expert_parallel"] == {"enabled": True, "autoep_size": 4}


def test_experts_are_counted_in_the_text_part():
    text = {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 64,
        "num_experts": 16,
        "output_router_logits": True,
    }
    fields = network_fields({"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {}})
    assert (fields["experts"], fields["router_loss"]) == (16, True)


def staged(pp: int = 2, devices: tuple[int, ...] = (4,), **more) -> ParallelSetup:
    return ParallelSetup(
        parallel=ParallelismOptions(pp=pp),
        devices=devices,
        **{"stage": 1, "layers": 4, "packing": False, "attention": "sdpa", **more},
    )


@pytest.mark.parametrize(
    "setup",
    [
        *(staged(network=network) for network in PIPELINED), staged(4), staged(2, (1, 1)), staged(4, (2, 2)),
        staged(precision="bf16"), staged(optimizer="sgd"), staged(window=64, length=64), staged(network=None),
    ],
)  # fmt: skip
def test_stages_that_were_compared_are_not_refused(setup):
    assert refusals(setup) == []


@pytest.mark.parametrize(
    ("setup", "said"),
    [
        (staged(devices=(3,)), "3 ranks"),
        (staged(5, (5,)), "--pp 4 on 4 devices"),
        (staged(network="mixtral"), "zero3"),
        (staged(window=64, length=65), "64 tokens"),
        (staged(stage=3), "zero1"),
        (staged(stage=2), "zero1"),
        (staged(stage=0), "zero1"),
        (staged(offload=True), "zero1"),
        (staged(offload=True, stage=3), "zero1"),
        (staged(fsdp=True, stage=0), "zero1"),
        (staged(tiles=True), "--tile-tokens 0"),
        (staged(method="lora"), "--method full"),
        (staged(optimizer="muon"), "adamw"),
        (staged(precision="fp16"), "bf16"),
        (staged(packing=True), "--packing"),
        (staged(attention="eager"), "--attention sdpa"),
        (staged(fused_loss=True), "--liger"),
        (staged(loss="micro-batch-mean"), "token-mean"),
        (staged(by_tokens=True), "--global-batch"),
        (staged(answers=True), "dsrun evaluate"),
    ],
)
def test_what_does_not_go_with_stages_is_refused_with_what_does(setup, said):
    (problem,) = refusals(setup)
    assert f"--pp {setup.parallel.pp}" in problem.where
    assert said in str(problem)


@pytest.mark.parametrize(
    ("sizes", "near"),
    [
        ({"tp": 2, "pp": 2}, {"tp": 2}),
        ({"sp": 2, "pp": 2}, {"pp": 2}),
        ({"tp": 2, "sp": 2, "pp": 2}, {"tp": 2}),
    ],
)
def test_two_kinds_together_are_refused_in_one_message_with_the_nearest(sizes, near):
    """Which isn't refused: packing gave way to stages, and sequences are divided packed alone."""
    both = dataclasses.replace(staged(devices=(8,)), parallel=ParallelismOptions(**sizes))
    (problem,) = refusals(both)
    assert problem.where == both.parallel.words
    alone = ParallelismOptions(**near)
    assert f"{alone.words}, 4 times" in problem.hint
    assert refusals(dataclasses.replace(both, parallel=alone)) == []


@pytest.mark.parametrize(
    ("architecture", "window"),
    [
        ({"model_type": "llama"}, None), ({"model_type": "mistral"}, 4096),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral", "sliding_window": 128}, 128),
        ({"model_type": "qwen2", "sliding_window": 128}, None),
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True}, 128),
    ],
)  # fmt: skip
def test_what_attention_sees(architecture, window):
    assert window_of(architecture) == window


@pytest.mark.parametrize("architecture", [{"model_type": kind} for kind in PIPELINED])
def test_it_is_the_window_of_transformers_own_config(architecture):
    transformers = pytest.importorskip("transformers")
    own = transformers.AutoConfig.for_model(**architecture)
    assert window_of(architecture) == getattr(own, "sliding_window", None)


def test_few_micro_batches_are_worth_a_word():
    """(p-1)/(m+p-1)."""
    assert "50%" in idle(2, 1)[0]
    assert idle(2, 4) == idle(1, 1) == []


def test_defaults_give_way_to_stages_and_what_was_asked_for_does_not():
    asked = Resolved.by_user(FinetuneOptions, {"pp": 2})
    layer = by_pipeline(asked)
    options = asked.with_layers(layer).options
    assert (options.preset, options.packing, options.generate_rows, options.liger) == (
        "zero1",
        False,
        0,
        False,
    )
    assert "zero1" in layer.note
    asked = Resolved.by_user(FinetuneOptions, {"pp": 2, "preset": "zero3", "packing": True})
    layer = by_pipeline(asked)
    options = asked.with_layers(layer).options
    assert (options.preset, options.packing) == ("zero3", True)
    assert "zero1" not in layer.note
    assert by_pipeline(Resolved.by_user(FinetuneOptions, {})).note == ""
