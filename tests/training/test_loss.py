"""The losses that --loss names: their parts add up to the mean that they promise; the trainer asks by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dsrun.errors import DsrunError
from dsrun.options.commands import FinetuneOptions
from dsrun.options.declare import entries
from dsrun.training import loss
from dsrun.training.engines import MicroSteps
from dsrun.training.loss import LOSSES, StepTotals

BATCHES = ([1.0, 3.0], [5.0, 5.0, 5.0, 8.0])
"""The cross-entropy of each target token, by micro batch."""
TOTALS = StepTotals(target_tokens=6, micro_batches=2)


def model(losses, num_items_in_batch=None, use_cache=False):
    """As transformers' models: the sum over num_items_in_batch, or the mean over this batch."""
    return SimpleNamespace(loss=losses.sum() / (num_items_in_batch or losses.numel()))


@pytest.mark.parametrize(("name", "mean"), [("token-mean", 27 / 6), ("micro-batch-mean", (2 + 23 / 4) / 2)])
def test_the_parts_of_a_step_add_up(name, mean):
    parts = [LOSSES[name](model, {"losses": torch.tensor(batch)}, TOTALS) for batch in BATCHES]
    assert float(sum(parts)) == pytest.approx(mean)


class Mixture:
    """As transformers' mixtures of experts: each forward adds its routers' loss, weighted, to its own."""

    config = SimpleNamespace(output_router_logits=True, router_aux_loss_coef=0.5)
    config.get_text_config = lambda: Mixture.config

    def __call__(self, losses, **more):
        aux = losses[0]
        return SimpleNamespace(loss=model(losses, **more).loss + 0.5 * aux, aux_loss=aux)


@pytest.mark.parametrize(("name", "mean"), [("token-mean", 27 / 6), ("micro-batch-mean", (2 + 23 / 4) / 2)])
def test_the_routers_losses_are_averaged_over_micro_batches(name, mean):
    parts = [LOSSES[name](Mixture(), {"losses": torch.tensor(batch)}, TOTALS) for batch in BATCHES]
    assert float(sum(parts)) == pytest.approx(mean + 0.5 * (1 + 5) / 2)


def test_an_evaluation_counts_tokens_alone():
    entropy = sum(loss.target_loss(Mixture(), {"losses": torch.tensor(batch)}, 6) for batch in BATCHES)
    assert float(entropy) == pytest.approx(27 / 6)


def test_a_routers_loss_without_a_weight_is_refused():
    config = SimpleNamespace(output_router_logits=True)
    config.get_text_config = lambda: config
    with pytest.raises(DsrunError, match="weight"):
        loss.routers_weight(config)
    config.output_router_logits = False
    assert loss.routers_weight(config) == 0


def test_every_loss_is_a_choice():
    assert entries(FinetuneOptions)["loss"].choices == tuple(LOSSES)
    assert FinetuneOptions().loss in LOSSES


class Engine(MicroSteps):
    """One that only notes what it is asked for."""

    device = torch.device("cpu")

    def __init__(self):
        self.done = []

    def backward(self, share):
        self.done.append(float(share))

    def step(self):
        self.done.append("step")


def test_an_engine_takes_its_micro_batches_one_after_the_other():
    """An entry in LOSSES is all that a new loss takes."""
    engine, totals = Engine(), StepTotals(8, 6)

    def new(model, batch, step):
        assert model is engine
        return batch["losses"].sum() * step.micro_batches / step.target_tokens

    batches = [{"losses": torch.ones(4)}, {"losses": torch.ones(2)}]
    assert float(engine.take_step(batches, totals, new)) == 3 + 1.5
    assert engine.done == [3, "step", 1.5, "step"]
