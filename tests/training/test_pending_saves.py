"""Checkpoints that are written beside the training: none is lost, whatever happens to the one under way."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("deepspeed")

from test_checkpoints import a_job, trainer, whole

from dsrun.errors import DsrunError, TrainingError
from dsrun.training import checkpoint, loop
from dsrun.training.engines.checkpoints.host_copies import CapturedFiles, host_copy
from dsrun.training.loss_check import LossCheck

pytestmark = pytest.mark.usefixtures("alone")
FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")


class Captures:
    """An engine with one tensor. gate: its files are written once that is set. fails: called before the second."""

    def __init__(self, fails=lambda path: None) -> None:
        self.weight, self.gate, self.fails = torch.zeros(4), threading.Event(), fails

    def capture(self, folder: Path, step: int) -> CapturedFiles:
        def save(value, path: str) -> None:
            assert self.gate.wait(60)
            if path.endswith(FILES[1]):
                self.fails(path)
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            torch.save(value, path)

        files = CapturedFiles(save)
        for name in FILES:
            files.take({"weight": self.weight, "step": step}, str(folder / name))
        return files


def begun(job, step: int, engine: Captures | None = None, *, open_: bool = True) -> checkpoint.PendingSave:
    engine = engine or Captures()
    pending = checkpoint.PendingSave(engine, job, step)
    if open_:
        engine.gate.set()
    return pending


def fails(number: int):
    def what(path: str) -> None:
        raise OSError(number, os.strerror(number), path)

    return what


def test_it_counts_once_it_is_finished_and_holds_what_was_there_at_its_step(tmp_path):
    job, engine = a_job(tmp_path, keep=1), Captures()
    begun(job, 2).finish()
    pending = begun(job, 4, engine, open_=False)
    engine.weight += 1
    assert not pending.written()
    assert whole(tmp_path) == ["step-2"]
    engine.gate.set()
    pending._thread.join()
    assert pending.written()
    assert whole(tmp_path) == ["step-2"], "files alone are no checkpoint"
    pending.finish()
    assert whole(tmp_path) == ["step-4"]
    assert torch.load(pending.folder / FILES[0])["weight"].sum() == 0
    assert checkpoint.choose(job, print) == pending.folder


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_meanwhile(tmp_path, number):
    job = a_job(tmp_path, keep=1)
    begun(job, 2).finish()
    pending = begun(job, 4, Captures(fails(number)))
    pending._thread.join()
    with pytest.raises(DsrunError, match="the disk is full"):
        pending.written()
    with pytest.raises(DsrunError, match="the disk is full") as caught:
        pending.finish()
    assert caught.value.problems[0].where == str(pending.folder)
    assert whole(tmp_path) == ["step-2"]
    assert not list(pending.folder.iterdir()), "the room is given back"
    begun(job, 6).finish()
    assert [path.name for path in pending.folder.parent.iterdir()] == ["step-6"], "what was cut short is gone"


def test_an_error_that_is_no_disks_is_told_as_it_is(tmp_path):
    def what(path: str) -> None:
        raise ValueError("torch can't pickle this")

    pending = begun(a_job(tmp_path), 2, Captures(what))
    with pytest.raises(ValueError, match="can't pickle"):
        pending.finish()
    assert whole(tmp_path) == []


def test_what_is_under_way_when_the_run_ends_is_not_gone_on_from(tmp_path):
    job, engine, notes = a_job(tmp_path), Captures(), []
    begun(job, 2).finish()
    pending = begun(job, 4, engine, open_=False)
    assert checkpoint.choose(job, notes.append).name == "step-2"
    engine.gate.set()
    pending._thread.join()
    assert checkpoint.choose(job, notes.append).name == "step-2"
    assert len(notes) == 1 and "step-4 is incomplete" in notes[0]


# In the loop


def beside(tmp_path, monkeypatch, wishes=None):
    """A trainer of 6 steps, a checkpoint each second."""
    made, did = trainer(tmp_path, wishes or {}, monkeypatch)
    made.job.training.async_save, made.eval_steps = True, 99

    def begin(engine, job, step):
        did.append(("begun", step))
        return SimpleNamespace(step=step, folder=tmp_path, finish=lambda: did.append(("finished", step)))

    monkeypatch.setattr(checkpoint, "PendingSave", begin)
    return made, did


def test_the_next_one_waits_for_the_one_before(tmp_path, monkeypatch):
    made, did = beside(tmp_path, monkeypatch)
    made._train(0)
    made._settle()
    assert did == [
        ("begun", 2), ("finished", 2), ("checkpoint", 2, None), ("begun", 4), ("finished", 4), ("checkpoint", 4, None),
    ]  # fmt: skip


def test_it_is_marked_after_the_step_in_which_all_ranks_have_written(tmp_path, monkeypatch):
    made, did = beside(tmp_path, monkeypatch)

    def step(number: int, _) -> int:
        did.append(number + 1)
        made.all_written = number + 1 == 3
        return loop.NOTHING

    made._step = step
    made._train(0)
    assert did[:6] == [1, 2, ("begun", 2), 3, ("finished", 2), ("checkpoint", 2, None)]


def test_it_is_not_marked_while_the_loss_is_no_number(tmp_path, monkeypatch):
    """Its weights may be what made it so; and an older one would go."""
    made, did = beside(tmp_path, monkeypatch)

    def step(number: int, _) -> int:
        made.loss_check.troubled, made.all_written = number + 1 > 2, True
        if number + 1 == 5:
            raise TrainingError("not finite since step 3")
        return loop.NOTHING

    made._step, made.loss_check = step, SimpleNamespace(troubled=False, since=3, weight=LossCheck.weight)
    with pytest.raises(TrainingError):
        made._train(0)
    assert did == [("begun", 2)]


def test_whoever_asks_for_one_gets_a_whole_one(tmp_path, monkeypatch):
    made, did = beside(tmp_path, monkeypatch, {3: loop.STOP})
    assert made._train(0) == 3
    assert did == [("begun", 2), ("finished", 2), ("checkpoint", 2, None), "done", ("checkpoint", 3, True)]


# Copies


def test_a_copy_is_what_torch_saves(tmp_path):
    """Shared storages, views, attributes, parameters, objects: the same bytes, and nobody else's memory."""
    base = torch.arange(12.0)
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.ds_note = {"of": base[:2]}
    value = {
        "view": base[2:8].view(2, 3), "whole": base, "turned": base.view(3, 4).t(), "parameter": parameter,
        "list": [torch.ones(2, dtype=torch.bfloat16), (base[3], "text")], "none": None, "scale": Scale(base),
    }  # fmt: skip
    value["again"] = value["list"]
    copied = host_copy(value)
    names = [tmp_path / name / "file.pt" for name in ("saved", "copied")]
    for path, content in zip(names, (value, copied), strict=True):
        path.parent.mkdir()
        torch.save(content, path)
    assert names[0].read_bytes() == names[1].read_bytes()
    base.zero_()
    parameter.data.zero_()
    value["scale"].scale = 0
    assert copied["whole"].sum() == 66 and copied["view"].sum() == 27 and copied["parameter"].sum() == 3
    assert copied["scale"].scale == 9 and copied["parameter"].ds_note["of"].sum() == 1
    assert copied["view"].untyped_storage().data_ptr() == copied["whole"].untyped_storage().data_ptr()
    assert copied["again"] is copied["list"]


class Scale:
    def __init__(self, tensor) -> None:
        self.scale, self.tensor = 9, tensor
