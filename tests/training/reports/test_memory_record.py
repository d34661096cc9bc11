"""A record of a GPU's memory is something beside: whatever fails in it, training goes on, and errors stay theirs."""

import logging
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from dsrun.training.reports import memory_record


class Refuses:
    device = torch.device("cpu")

    def record(self):
        raise RuntimeError("not supported")

    def snapshot(self):
        raise RuntimeError("nor this")

    def free_and_total(self):
        return 0, 1


@pytest.fixture
def report(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_record, "allocator", Refuses)
    (tmp_path / "state").mkdir()
    return SimpleNamespace(run_dir=tmp_path, rank=0, doing="step 1")


def test_an_allocator_that_keeps_no_calls_ends_nothing(report, caplog):
    with caplog.at_level(logging.ERROR), memory_record.kept(report) as held:
        held.model = torch.nn.Linear(1, 1)
    assert "not supported" in caplog.text


def test_the_error_itself_comes_out(report, caplog):
    raised = pytest.raises(torch.OutOfMemoryError, match="too much")
    with caplog.at_level(logging.ERROR), raised, memory_record.kept(report):
        raise torch.OutOfMemoryError("too much")
    assert "can't be written down" in caplog.text
