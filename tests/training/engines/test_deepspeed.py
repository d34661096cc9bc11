"""What is done around DeepSpeed's calls, on plain tensors: the whole of it trains in tests/test_end_to_end.py."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("deepspeed")

from dsrun.options.table import ParallelismOptions
from dsrun.training.engines.deepspeed import DeepSpeed, _import_muon_uncompiled, _without_hooks

RANKS, ACCUM, SCALE = 2, 3, 2.0**10


class Stage0:
    """DeepSpeedEngine's backward and step at stage 0 in fp16, on one of several ranks that hold the same."""

    module = torch.nn.Module()
    device = train = eval = step = None

    def __init__(self, *, scales_itself: bool = False) -> None:
        self.optimizer = SimpleNamespace(loss_scale=SCALE)
        self.scales_itself = scales_itself

    def backward(self, loss: torch.Tensor) -> None:
        (loss / ACCUM * (SCALE if self.scales_itself else 1.0)).backward()


def gradient(precision: str, stage: int, **kind) -> float:
    """Of a weight after one micro-step of loss 3 * weight, before the step divides by ranks or scale."""
    job = SimpleNamespace(
        precision=precision,
        zero_stage=stage,
        dp_size=RANKS,
        parallel=ParallelismOptions(),
        world_size=RANKS,
        grad_accum=ACCUM,
    )
    weight = torch.ones((), requires_grad=True)
    DeepSpeed(Stage0(**kind), job).backward(3 * weight)
    return float(weight.grad)


def test_the_average_over_ranks_and_micro_steps_is_undone():
    assert gradient("fp32", 0) == gradient("bf16", 2) == 3 * RANKS


@pytest.mark.parametrize("itself", [True, False])
def test_stage_0_in_fp16_is_scaled_once(itself):
    """The step divides by the loss scale, whether backward has multiplied by it or not."""
    assert gradient("fp16", 0, scales_itself=itself) == 3 * RANKS * SCALE


def test_other_stages_scale_by_themselves():
    assert gradient("fp16", 2, scales_itself=True) == 3 * RANKS * SCALE


def test_only_the_engines_hooks_are_taken_off_and_put_back_in_their_order():
    layer, called = torch.nn.Linear(2, 2), []

    def note(name):
        return lambda *_: called.append(name)

    first = layer.register_forward_pre_hook(note("engine first"))
    layer.register_forward_pre_hook(note("another's"))
    offload = SimpleNamespace(
        fwd_pre_hook=first,
        forward_hooks=[layer.register_forward_pre_hook(note("engine")), layer.register_forward_hook(note("after"))],
        backward_hooks=[layer.register_forward_hook(note("after, too"))],
    )  # fmt: skip
    every = ["engine first", "another's", "engine", "after", "after, too"]
    for wanted in (["another's"], every):
        called.clear()
        if wanted is every:
            layer(torch.ones(2))
        else:
            with _without_hooks(offload):
                layer(torch.ones(2))
        assert called == wanted
    with pytest.raises(RuntimeError), _without_hooks(offload):
        raise RuntimeError
    called.clear()
    layer(torch.ones(2))
    assert called == every


def test_no_compiler_is_imported_for_a_muon_that_does_not_step(monkeypatch):
    from deepspeed.runtime import compiler

    before = compiler.compile
    for name in [name for name in sys.modules if name.startswith("deepspeed.runtime.zero.muon")]:
        monkeypatch.delitem(sys.modules, name)
    _import_muon_uncompiled()
    muon = importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    assert not hasattr(muon.muon_update, "_torchdynamo_orig_callable")
    assert compiler.compile is before
