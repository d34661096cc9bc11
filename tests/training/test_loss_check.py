"""When a loss that is no number ends a run."""

from __future__ import annotations

from math import inf, isfinite, nan
from types import SimpleNamespace

import pytest

from dsrun.errors import TrainingError
from dsrun.training.loss_check import PATIENCE, LossCheck


def check(precision: str, **fp16) -> LossCheck:
    training = SimpleNamespace(lr=0.5)
    return LossCheck(SimpleNamespace(precision=precision, training=training, ds_config={"fp16": fp16}))


def stopped_at(loss_check: LossCheck, losses: list[float], scales: list[float | None]) -> int | None:
    """The step that is the last, None where all are taken."""
    for step, (loss, scale) in enumerate(zip(losses, scales, strict=True), 1):
        try:
            loss_check.training(step, loss, scale)
        except TrainingError as error:
            since = next(number for number, loss in enumerate(losses[:step], 1) if not isfinite(loss))
            assert str(error).startswith(f"loss is not finite since step {since}\n")
            return step
    return None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_the_first_one_is_the_last(precision, bad):
    assert stopped_at(check(precision), [2.0, 1e30, bad, 1.0], [None] * 4) == 3


def test_fp16_goes_on_over_single_ones():
    losses = [2.0, *[nan] * (PATIENCE - 1), 2.0, *[inf] * (PATIENCE - 1), 1.0]
    assert stopped_at(check("fp16"), losses, [2.0**16] * len(losses)) is None


def test_fp16_stops_when_they_persist():
    assert stopped_at(check("fp16"), [2.0, *[nan] * 9], [2.0**16] * 10) == 1 + PATIENCE


@pytest.mark.parametrize(("fp16", "lowest"), [({}, 1.0), ({"min_loss_scale": 64}, 64.0)])
def test_fp16_stops_at_the_lowest_scale(fp16, lowest):
    losses, scales = [2.0, 2.0, nan, nan], [lowest, lowest, 2 * lowest, lowest]
    assert stopped_at(check("fp16", **fp16), losses, scales) == 4


def gradients(
    loss_check: LossCheck, norms: list[float | None], scales: list[float | None], skipped: list[int]
) -> tuple[int, str] | None:
    """The last step and what is said of it, where every loss is a number."""
    for step, (norm, scale, count) in enumerate(zip(norms, scales, skipped, strict=True), 1):
        try:
            loss_check.training(step, 2.0, scale, norm=norm, skipped=count)
        except TrainingError as error:
            return step, error.problems[0].what
    return None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("bad", [nan, inf, -1.0])
def test_a_gradient_that_was_stepped_with(precision, bad):
    end = gradients(check(precision), [3.0, None, bad, 1.0], [None] * 4, [0] * 4)
    assert end == (3, "gradient is not finite since step 3")


def test_steps_that_are_skipped_are_waited_for():
    """DeepSpeed leaves the weights as they were."""
    some = [1.0, *[inf] * (PATIENCE - 1), 1.0]
    assert gradients(check("bf16"), some, [None] * len(some), [0, 1, 2, 3, 4, 4]) is None
    end = gradients(check("bf16"), [1.0, *[inf] * 9], [None] * 10, list(range(10)))
    assert end == (1 + PATIENCE, "gradient is not finite since step 2")


def test_skipped_steps_of_an_earlier_part_of_the_run_do_not_count():
    loss_check = check("fp32")
    loss_check.training(31, 2.0, None, norm=1.0, skipped=7)
    assert not loss_check.troubled


def test_fp16_overflows_at_the_lowest_scale_for_a_few_steps():
    scales = [4.0, 2.0, *[1.0] * 9]
    end = gradients(check("fp16"), [inf] * 11, scales, list(range(1, 12)))
    assert end == (PATIENCE, "gradient is not finite since step 1")


def test_the_lowest_scale_is_given_up():
    loss_check = check("fp16")
    loss_check.training(3, nan, 2.0)
    assert loss_check.given_up(4).problems[0].what == "loss is not finite since step 3"


def test_no_time_for_a_checkpoint():
    loss_check = check("fp16")
    loss_check.training(1, 2.0, 8.0, norm=1.0)
    assert not loss_check.troubled
    loss_check.training(2, 2.0, 4.0, norm=inf, skipped=1)
    assert loss_check.troubled
    loss_check.training(3, 2.0, 4.0, norm=1.0, skipped=1)
    assert not loss_check.troubled


def test_a_gradient_overflow_alone_is_normal():
    scales = [2.0**power for power in range(9, -1, -1)]
    assert stopped_at(check("fp16"), [2.0] * 10, scales) is None


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_an_evaluation(precision):
    loss_check = check(precision)
    loss_check.evaluation(0, 3.0)
    with pytest.raises(TrainingError, match=r"loss is not finite since step 4\n.*evaluation"):
        loss_check.evaluation(4, nan)


@pytest.mark.parametrize(("precision", "named"), [("fp16", "bf16"), ("bf16", "fp32"), ("fp32", "--lr")])
def test_what_to_try(precision, named):
    with pytest.raises(TrainingError) as caught:
        check(precision).training(1, nan, None)
    for word in (named, "0.5", "--warmup-steps", "data"):
        assert word in str(caught.value)
