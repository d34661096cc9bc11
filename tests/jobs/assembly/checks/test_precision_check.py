"""Precisions that devices don't train in are refused before the start, or said to be slow."""

from __future__ import annotations

import pytest

from dsrun import packages
from dsrun.cluster import cpu_types
from dsrun.cluster.devices import Gpu, Machine
from dsrun.jobs.assembly.checks import precision
from dsrun.jobs.assembly.checks.kernels import Devices, devices_of
from dsrun.options.commands import FinetuneOptions
from dsrun.options.layers import Resolved

GIB = 2**30


def cards(*capabilities) -> Machine:
    gpus = tuple(Gpu(i, f"Card {one}", f"GPU-{i}", 16 * GIB, one) for i, one in enumerate(capabilities))
    return Machine("cuda", gpus, 8, "cards of paper")


P100S, V100S, A100S = cards((6, 0), (6, 0)), cards((7, 0), (7, 0)), cards((8, 0), (8, 0))


@pytest.mark.parametrize(
    ("machine", "refused"),
    [(P100S, {"fp16"}), (V100S, set()), (A100S, set()), (cards((8, 0), (6, 1)), {"fp16"})],
)
def test_fp16_needs_7_0(machine, refused):
    assert {one for one in ("fp16", "bf16", "fp32") if precision.problems(one, machine)} == refused


def test_deepspeeds_own_way_round_it(monkeypatch):
    (problem,) = precision.problems("fp16", P100S)
    assert "DS_ALLOW_DEPRECATED_FP16=1" in problem.hint
    monkeypatch.setenv("DS_ALLOW_DEPRECATED_FP16", "1")
    assert not precision.problems("fp16", P100S)


@pytest.mark.parametrize(("there", "refused"), [(True, False), (False, True)])
def test_a_cpu_has_fp16_or_not(monkeypatch, there, refused):
    monkeypatch.setattr(cpu_types, "has_fp16", lambda: there)
    assert bool(precision.problems("fp16", Machine("cpu", (), 4, "no GPU"))) is refused


@pytest.mark.parametrize(
    ("machine", "own"), [(P100S, "fp32"), (V100S, "fp16"), (cards((8, 0), (7, 5)), "fp16")]
)
def test_bf16_that_is_emulated_is_said(machine, own):
    (note,) = precision.notes("bf16", machine)
    assert own in note


def test_bf16_where_it_is_at_home():
    assert not precision.notes("bf16", A100S)
    assert not precision.notes("bf16", Machine("cpu", (), 4, "no GPU"))
    assert not precision.notes("fp16", V100S)


# --fp8


def fp8(*, fsdp=True, installed="0.18.0", monkeypatch, **given) -> str:
    monkeypatch.setattr(packages, "installed_version", lambda name: installed)
    options = Resolved.by_user(FinetuneOptions, {"fp8": "rowwise", "precision": "bf16", **given}).options
    return "\n".join(map(str, precision.fp8_problems(options, fsdp=fsdp)))


def test_fp8_under_fsdp(monkeypatch):
    assert fp8(monkeypatch=monkeypatch) == ""
    assert fp8(monkeypatch=monkeypatch, compile=True) == ""
    assert fp8(monkeypatch=monkeypatch, fp8="none", fsdp=False, precision="fp16", installed=None) == ""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fsdp": False}, "--preset fsdp"),
        ({"precision": "fp32"}, "--precision bf16"),
        ({"precision": "fp16"}, "--precision bf16"),
        ({"method": "lora"}, "--method lora"),
        ({"tile_tokens": 4096}, "--tile-tokens"),
        ({"official": True}, "--official"),
        ({"installed": None}, "torchao is not installed"),
        ({"installed": "0.9.0"}, "torchao 0.9.0 is installed, and it takes 0.10"),
    ],
)
def test_where_fp8_cant_be(given, words, monkeypatch):
    text = fp8(monkeypatch=monkeypatch, **given)
    assert words in text and "--fp8 rowwise" in text and text.count("--fp8 rowwise") == 1


@pytest.mark.parametrize(
    ("capabilities", "refused"),
    [([(8, 9)], False), ([(9, 0)], False), ([(12, 0)], False), ([(8, 0)], True), ([(9, 0), (8, 6)], True)],
)
def test_fp8_needs_8_9(capabilities, refused):
    devices = devices_of(cards(*capabilities), range(len(capabilities)))
    problems = precision.fp8_device_problems("rowwise", devices)
    assert bool(problems) is refused
    assert not problems or "8.9" in problems[0].what
    assert precision.fp8_device_problems("none", devices) == []


def test_fp8_on_hosts_that_nobody_has_asked_and_on_cpus():
    """The ranks find out; CPUs emulate it."""
    assert precision.fp8_device_problems("rowwise", Devices("cuda", None)) == []
    assert precision.fp8_device_problems("rowwise", Devices("cpu", None)) == []
