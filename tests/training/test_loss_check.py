"""When a loss that is no number ends a run."""

from __future__ import annotations

from math import inf, nan
from types import SimpleNamespace

import pytest

from dsrun.errors import TrainingError
from dsrun.training.loss_check import FP16_STEPS, LossCheck


def check(precision: str, **fp16) -> LossCheck:
    training = SimpleNamespace(lr=0.5)
    return LossCheck(SimpleNamespace(precision=precision, training=training, ds_config={"fp16": fp16}))


def stopped_at(one: LossCheck, losses: list[float], scales: list[float | None]) -> int | None:
    """The step that is the last, None where all are taken."""
    for step, (loss, scale) in enumerate(zip(losses, scales, strict=True), 1):
        try:
            one.training(step, loss, scale)
        except TrainingError as error:
            assert str(error).startswith(f"step {step}: ") and str(error).count("\n") == 0
            return step
    return None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_the_first_one_is_the_last(precision, bad):
    assert stopped_at(check(precision), [2.0, 1e30, bad, 1.0], [None] * 4) == 3


def test_fp16_goes_on_over_single_ones():
    losses = [2.0, *[nan] * (FP16_STEPS - 1), 2.0, *[inf] * (FP16_STEPS - 1), 1.0]
    assert stopped_at(check("fp16"), losses, [2.0**16] * len(losses)) is None


def test_fp16_stops_when_they_persist():
    assert stopped_at(check("fp16"), [2.0, *[nan] * 9], [2.0**16] * 10) == 1 + FP16_STEPS


@pytest.mark.parametrize(("fp16", "lowest"), [({}, 1.0), ({"min_loss_scale": 64}, 64.0)])
def test_fp16_stops_at_the_lowest_scale(fp16, lowest):
    losses, scales = [2.0, 2.0, nan, nan], [lowest, lowest, 2 * lowest, lowest]
    assert stopped_at(check("fp16", **fp16), losses, scales) == 4


def test_a_gradient_overflow_alone_is_normal():
    scales = [2.0**power for power in range(9, -1, -1)]
    assert stopped_at(check("fp16"), [2.0] * 10, scales) is None


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_an_evaluation(precision):
    one = check(precision)
    one.evaluation(0, 3.0)
    with pytest.raises(TrainingError, match="step 4: the evaluation loss is nan"):
        one.evaluation(4, nan)


@pytest.mark.parametrize(("precision", "named"), [("fp16", "bf16"), ("bf16", "fp32"), ("fp32", "--lr")])
def test_what_to_try(precision, named):
    with pytest.raises(TrainingError) as caught:
        check(precision).training(1, nan, None)
    for word in (named, "0.5", "--warmup-steps", "data"):
        assert word in str(caught.value)
