"""The next step's batches are made while a step runs."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")

from dsrun.training.data.ahead import made_ahead, pinned

CPU = torch.device("cpu")


def test_every_step_comes_once_and_in_turn():
    assert list(made_ahead(lambda step: step * 10, range(3, 7), CPU)) == [30, 40, 50, 60]
    assert list(made_ahead(str, range(5, 5), CPU)) == []


def test_a_step_is_made_while_another_is_worked_on_and_no_more_than_one():
    begun, made = [threading.Event() for _ in range(4)], []

    def make(step: int) -> int:
        begun[step].set()
        made.append(threading.current_thread())
        return step

    steps = made_ahead(make, range(4), CPU)
    assert next(steps) == 0
    assert begun[1].wait(60), "before it is asked for"
    assert not begun[2].wait(0.05)
    assert list(steps) == [1, 2, 3]
    assert threading.current_thread() not in made


def test_what_fails_is_raised_as_it_is_when_its_step_comes():
    def make(step: int) -> int:
        if step == 2:
            raise OSError("the file is gone")
        return step

    steps = made_ahead(make, range(4), CPU)
    assert [next(steps), next(steps)] == [0, 1]
    with pytest.raises(OSError, match="the file is gone"):
        next(steps)


def test_it_ends_early():
    before = threading.active_count()
    steps = made_ahead(lambda step: step, range(100), CPU)
    next(steps)
    steps.close()
    assert threading.active_count() == before


def test_only_a_gpus_batches_are_pinned(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: ("pinned", self))
    batch = {"input_ids": torch.ones(2), "max_length_q": 7}
    assert pinned(batch, CPU) is batch
    pinned_batch = pinned(batch, torch.device("cuda", 1))
    assert pinned_batch["input_ids"][0] == "pinned"
    assert pinned_batch["max_length_q"] == 7
