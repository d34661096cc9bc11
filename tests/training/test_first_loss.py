"""Whether the first loss after a resume fits."""

from __future__ import annotations

import math

import pytest

from dsrun.training.first_loss import loss_before

FALLING = [7.66, 7.5, 7.41, 7.2, 7.11, 6.9, 6.85, 6.7, 6.66, 6.5, 6.44, 6.417]


def lines(losses, first: int = 1) -> list[dict]:
    return [{"step": step, "loss": loss} for step, loss in enumerate(losses, first)]


@pytest.mark.parametrize(
    ("loss", "far"), [(6.039, False), (6.6, False), (6.83, False), (6.9, True), (7.625, True)]
)
def test_far_from_the_last_one(loss, far):
    known = loss_before([*lines(FALLING), {"step": 12, "eval_loss": 99.0}], 12)
    note = known.surprise(13, loss)
    assert bool(note) == far
    if far:
        assert f"{loss:.4g} in step 13" in note and "that of step 12 was 6.417" in note
        assert "--checkpoint N" in note


@pytest.mark.parametrize(
    ("loss", "far"), [(6.039, False), (6.1, False), (6.4, True), (7.625, True), (5.7, True)]
)
def test_a_step_that_was_taken_before(loss, far):
    known = loss_before(lines([*FALLING, 6.039, 5.9]), 12)
    note = known.surprise(13, loss)
    assert bool(note) == far
    assert not far or "it was 6.039" in note


def test_too_little_is_known():
    assert loss_before([], 12) is None
    assert loss_before(lines(FALLING[:5]), 5) is None
    assert loss_before(lines(FALLING), 40) is None
    assert loss_before([{"step": step, "loss": None} for step in range(1, 13)], 12) is None


def test_a_loss_that_is_no_number_is_said_elsewhere():
    assert loss_before(lines(FALLING), 12).surprise(13, math.nan) == ""


def test_only_the_last_steps_count():
    """How a loss falls at first says nothing of later ones."""
    curve = [9.0, 5.0, 8.0, *[2 + 0.01 * (step % 2) for step in range(60)]]
    assert loss_before(lines(curve), len(curve)).surprise(64, 2.1)
