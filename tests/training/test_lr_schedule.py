"""The learning rate of each step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dsrun.training.loop import learning_rate, warmup_steps


def job(**fields):
    given = {"lr": 1.0, "lr_schedule": "cosine", "warmup_steps": None, "warmup_ratio": None, **fields}
    return SimpleNamespace(training=SimpleNamespace(**given))


@pytest.mark.parametrize(
    ("given", "total", "expected"),
    [
        ({"warmup_ratio": 0.03}, 100, 3),
        ({"warmup_ratio": 0.03}, 101, 4),
        ({"warmup_ratio": 0.0}, 100, 0),
        ({"warmup_steps": 20}, 100, 20),
        ({"warmup_steps": 0}, 100, 0),
    ],
)
def test_how_long_the_warm_up_is(given, total, expected):
    assert warmup_steps(job(**given).training, total) == expected


def test_a_warm_up_and_a_cosine():
    rates = [learning_rate(job(warmup_ratio=0.1), step, 20) for step in range(20)]
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert rates[11] == pytest.approx(0.5)
    assert sorted(rates[2:], reverse=True) == rates[2:]
    assert 0 < rates[-1] < 0.01


def test_the_configs_scheduler_decides():
    assert learning_rate(job(lr_schedule="config"), 3, 20) is None
