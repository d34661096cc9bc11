"""What is refused, and that each refusal names something that isn't."""

from __future__ import annotations

import dataclasses
import re

import pytest

from dsrun.jobs.build.checks.parallelism import ParallelSetup, notes, refusals, with_section
from dsrun.models.tensor_parallel import NETWORKS
from dsrun.options.groups import ParallelismOptions


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
        (setup_of(4, heads=3, kv_heads=3), "nearest that fits: 3"),
        (setup_of(4, heads=8, kv_heads=2, method="lora"), "nearest that fits: 2"),
        (setup_of(method="qlora"), "--method lora"),
        (setup_of(method="ptuning"), "--method lora"),
        (setup_of(optimizer="muon"), "adamw"),
        (setup_of(optimizer="adamw-8bit"), "adamw"),
        (setup_of(stage=3, offload=True), "zero3"),
        (setup_of(2, sp=2), "one of the two"),
        (setup_of(fsdp=True), "zero3"),
        (shared(fsdp=True), "zero3"),
        (shared(devices=(3,)), "3 ranks"),
        (shared(4, devices=(2, 2)), "two hosts"),
        (shared(network="mixtral"), "llama"),
        (shared(3, devices=(3,)), "nearest that fits: 2"),
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


def test_the_size_that_is_named_is_not_refused():
    setup = setup_of(4, heads=8, kv_heads=2, method="lora")
    (problem,) = refusals(setup)
    near = int(re.search(r"\d+", problem.hint)[0])
    assert refusals(dataclasses.replace(setup, parallel=ParallelismOptions(tp=near))) == []


@pytest.mark.parametrize(("heads", "kv_heads", "sp"), [(8, 4, 4), (8, 2, 4), (8, 2, 8), (6, 6, 3)])
def test_heads_of_keys_and_values_may_be_repeated(heads, kv_heads, sp):
    assert refusals(shared(sp, devices=(sp,), heads=heads, kv_heads=kv_heads)) == []


def test_ranks_without_attention_are_worth_a_word():
    assert notes(setup_of(4, kv_heads=2))
    assert not notes(setup_of(4, kv_heads=4))


@pytest.mark.parametrize("network", NETWORKS)
def test_the_config_names_each_layer_once(network):
    config = with_section({}, network, ParallelismOptions(tp=2))
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
    assert with_section({}, network, ParallelismOptions()) == {}
