"""ZeRO++'s rounded weights and gradients: refused where they do harm or no good, with a reason and a way out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsrun import packages
from dsrun.config import tree
from dsrun.config.presets.options import Options
from dsrun.config.presets.sources import draft
from dsrun.job.job import HostDevices
from dsrun.jobs.assembly.checks.communication import rounding_problems
from dsrun.jobs.assembly.planning import setups
from dsrun.options.table import ParallelismOptions
from dsrun.planner.shape import from_numbers

TWO = tuple(HostDevices(name, tuple(range(8))) for name in ("a", "b"))
LLAMA = from_numbers(8e9)


def problems(preset="zero3-qwz", hosts=TWO, precision="bf16", put=(), **more) -> str:
    config = draft(preset, Options(gpus=8, nodes=2, precision=precision, micro_batch=1, grad_accum=1))
    for path, value in put:
        tree.put(config, path, value)
    given = {"accelerator": "cuda", "shape": LLAMA, "parallel": ParallelismOptions(), **more}
    return "\n".join(map(str, rounding_problems(config, preset, hosts=hosts, precision=precision, **given)))


@pytest.mark.parametrize(
    ("preset", "precision"), [("zero3-qwz", "bf16"), ("zero3-qwz", "fp16"), ("zero3-zeropp", "fp16")]
)
def test_taken_between_hosts(preset, precision):
    assert problems(preset, precision=precision) == ""


@pytest.mark.parametrize("preset", ["zero3", "zero3-hpz", "zero2", "ddp"])
def test_nothing_is_said_of_presets_that_round_nothing(preset):
    assert problems(preset, hosts=TWO[:1], precision="fp32", accelerator="cpu") == ""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"accelerator": "cpu"}, "a CUDA kernel"),
        ({"hosts": TWO[:1]}, "there is one host"),
        ({"precision": "fp32"}, "trains in fp32"),
        ({"parallel": ParallelismOptions(tp=2)}, "--tp 2"),
        ({"parallel": ParallelismOptions(sp=4)}, "--sp 4"),
        ({"put": (("zero_optimization.offload_param", {"device": "cpu"}),)}, "offload"),
        ({"put": (("zero_optimization.offload_optimizer", {"device": "cpu"}),)}, "offload"),
    ],
)
def test_refused(given, words):
    text = problems(**given)
    assert words in text and "zero3-qwz: zero_quantized_weights" in text
    assert "--preset zero3" in text, "with a way out"


def test_one_host_where_the_user_says_so():
    assert problems(hosts=TWO[:1], overrides=("zero_optimization.zero_quantized_weights=true",)) == ""


@pytest.mark.parametrize(
    ("release", "refused"), [("0.19.5", True), ("0.18.9", True), ("0.19.6", False), (None, False)]
)
def test_a_deepspeed_that_reads_bf16_as_fp16(monkeypatch, release, refused):
    monkeypatch.setattr(packages, "installed_version", lambda name: release)
    assert ("takes bf16 weights for fp16" in problems()) is refused
    assert problems(precision="fp16") == ""


def test_gradients_want_hosts_of_one_size():
    """DeepSpeed makes their groups of the GPUs that each rank sees."""
    uneven = (TWO[0], HostDevices("b", tuple(range(4))))
    assert "as many GPUs on every host" in problems("zero3-zeropp", hosts=uneven, precision="fp16")
    assert "as many GPUs" not in problems(hosts=uneven)


@pytest.mark.parametrize(("ranks", "divides"), [(2, True), (16, True), (24, False), (6, False)])
def test_a_share_of_a_weight_that_the_quantiser_cant_take(ranks, divides):
    hosts = tuple(HostDevices(str(number), tuple(range(ranks // 2))) for number in range(2))
    text = problems(hosts=hosts)
    assert ("no multiple of 8" not in text) is divides
    assert problems(hosts=hosts, shape=None) == "", (
        "a network that the planner doesn't know is left to DeepSpeed"
    )


def test_small_weights_are_not_gathered():
    """DeepSpeed keeps those below a threshold whole on every rank."""
    small = replace(LLAMA, layers=1, hidden=12, intermediate=10, heads=2, kv_heads=2, head_dim=6, vocab=30)
    three = tuple(HostDevices(name, (0,)) for name in "abc")
    assert problems(hosts=three, shape=small) == ""


@pytest.mark.parametrize("nodes", [1, 2])
def test_nobody_gets_one_without_naming_it(nodes):
    """Neither a plan's table nor the planner's choice has them."""
    names = setups.all_presets(nodes)
    assert "zero3" in names and not {"zero3-qwz", "zero3-zeropp"} & set(names)
