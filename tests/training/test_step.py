"""One optimizer step of the loop: how often the host waits for the device."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("deepspeed")

from torch.overrides import TorchFunctionMode

import dsrun
from dsrun.options.table import ParallelismOptions, PeftOptions
from dsrun.training import loop
from dsrun.training.data.batches import StepPlan
from dsrun.training.engines import MicroSteps
from dsrun.training.loop import MadeStep, Trainer
from dsrun.training.loss_check import LossCheck

pytestmark = pytest.mark.usefixtures("alone")
OURS = str(Path(dsrun.__file__).parent)
WAIT = {"item", "tolist", "cpu", "numpy", "nonzero", "__float__", "__int__", "__bool__", "__index__"}


class Waits(TorchFunctionMode):
    """Notes each time that dsrun's code reads a tensor's value, for which the host would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        caller = sys._getframe(1).f_code
        if name in WAIT and caller.co_filename.startswith(OURS):
            self.seen.append(f"{name} in {caller.co_name}")
        return function(*args, **(kwargs or {}))


class Engine(MicroSteps):
    """A weight, and the calls that the loop makes; it reads no value itself."""

    device = torch.device("cpu")

    def __init__(self, norm) -> None:
        self.weight = torch.ones((), requires_grad=True)
        self.norm = norm
        self.taken = itertools.count()

    def __call__(self, input_ids, labels, num_items_in_batch, use_cache):
        return SimpleNamespace(loss=self.weight * input_ids.sum() / num_items_in_batch)

    def backward(self, share) -> None:
        share.backward()

    def step(self) -> None:
        next(self.taken)

    set_learning_rate = staticmethod(lambda rate: None)
    learning_rate = staticmethod(lambda: 0.1)
    loss_scale = staticmethod(lambda: None)
    skipped_steps = staticmethod(lambda: 0)

    def gradient_norm(self):
        return self.norm


def taken(tmp_path, norm) -> tuple[list[str], dict]:
    """The waits of one step with three micro-steps, and its line."""
    lines: list[dict] = []
    job = SimpleNamespace(
        training=SimpleNamespace(
            lr=0.1, lr_schedule="constant", warmup_steps=0, seed=1, loss="token-mean", save_steps=9,
            tokens_per_batch=None,
        ),
        peft=PeftOptions(), parallel=ParallelismOptions(), world_size=1, dp_size=1, grad_accum=3, precision="fp32",
        ds_config={},
    )  # fmt: skip
    trainer = Trainer.__new__(Trainer)
    trainer.job, trainer.engine, trainer.rank, trainer.total_steps = job, Engine(norm), 0, 9
    trainer.report = SimpleNamespace(metrics=lambda **fields: lines.append(fields))
    trainer.experts = SimpleNamespace(taken=lambda: torch.zeros(0), metrics=lambda summed, micro_batches: {})
    trainer.requests, trainer.loss_check = loop.Requests(tmp_path), LossCheck(job)
    batch = {"input_ids": torch.full((2, 3), 2.0), "labels": torch.zeros(2, 3)}
    made = iter([MadeStep(StepPlan([], target_tokens=6, tokens=18), [batch] * 3)])
    with Waits() as waits:
        assert trainer._step(0, made) == loop.NOTHING
    return waits.seen, lines[0]


@pytest.mark.parametrize("norm", [torch.tensor(2.5), 2.5, None])
def test_the_host_waits_once(tmp_path, norm):
    seen, line = taken(tmp_path, norm)
    assert seen == ["tolist in _on_host"]
    assert line["loss"] == 6.0
    assert line["grad_norm"] == (None if norm is None else 2.5)


def test_a_norm_that_lies_elsewhere_is_read_by_itself(tmp_path):
    """As with offload; and it shows that a second wait would be seen."""

    class Elsewhere(torch.Tensor):
        device = torch.device("cuda", 0)

    seen, line = taken(tmp_path, torch.tensor(2.5).as_subclass(Elsewhere))
    assert len(seen) == 2, seen
    assert line["grad_norm"] == 2.5
