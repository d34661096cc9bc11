"""The learning rate of each step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dsrun.training.learning_rate import learning_rate, warmup_note, warmup_steps


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


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize(
    "given", [{"warmup_ratio": 0.1}, {"warmup_steps": 1}, {"warmup_steps": 0}, {"warmup_steps": 20}]
)
def test_the_rates_are_those_of_transformers(schedule, given):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    planned = job(lr_schedule=schedule, **given)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    name = schedule if schedule != "constant" else "constant_with_warmup"
    theirs = transformers.get_scheduler(
        name, optimizer, num_warmup_steps=warmup_steps(planned.training, 20), num_training_steps=20
    )
    wanted = []
    for _ in range(20):
        wanted.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    assert [learning_rate(planned, step, 20) for step in range(20)] == pytest.approx(wanted)


def test_a_warm_up_and_a_cosine():
    rates = [learning_rate(job(warmup_ratio=0.1), step, 20) for step in range(20)]
    assert rates[:3] == pytest.approx([0, 1 / 2, 1])
    assert rates[11] == pytest.approx(0.5)
    assert sorted(rates[2:], reverse=True) == rates[2:]
    assert 0 < rates[-1] < 0.01


def test_a_run_that_ends_within_its_warm_up_is_said():
    note = warmup_note(job(warmup_steps=20).training, 5)
    assert "20 steps, and the run 5" in note and "0.2 " in note
    assert "never goes beyond 0 " in warmup_note(job(warmup_ratio=0.03).training, 1)
    assert not warmup_note(job(warmup_steps=4).training, 5)
    assert not warmup_note(job(warmup_steps=0).training, 1)
    assert not warmup_note(job(lr_schedule="config", warmup_steps=9).training, 5)


def test_the_configs_scheduler_decides():
    assert learning_rate(job(lr_schedule="config"), 3, 20) is None
