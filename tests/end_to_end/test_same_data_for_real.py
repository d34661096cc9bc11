"""A run whose data file was changed, and whose cache is gone: neither it nor a later one trains on other rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from needed import needs

needs("deepspeed", "transformers")

from asking import finetune_request
from running import SAVE_STEPS, STEPS, cut_off, finish, same

from dsrun.cluster.devices import detect
from dsrun.jobs.assembly import finetune
from dsrun.training.data.batches import Examples

pytestmark = pytest.mark.slow

ROWS = 72
"""Rows of the reference run's training file."""


@pytest.fixture
def died(reference, environ, data, tmp_path) -> Path:
    """The reference run as it lies there after its death near its end, with a data file and a cache of its own."""
    cut_off(reference.run_dir, STEPS - SAVE_STEPS, tmp_path / "run")
    shared = Path(data[1]).parent
    path = tmp_path / "run" / "job.json"
    text = path.read_text(encoding="utf-8").replace(environ["DSRUN_CACHE"], str(tmp_path / "cache"))
    path.write_text(text.replace(str(shared), str(tmp_path)), encoding="utf-8")
    for name in ("train.jsonl", "dev.jsonl"):
        (tmp_path / name).write_bytes((shared / name).read_bytes())
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "models").symlink_to(
        Path(environ["DSRUN_CACHE"]) / "models"
    )  # what takes long to make
    return tmp_path / "run"


def test_resumed_refused_restored_resumed_and_begun_anew(
    died, reference, environ, tmp_path, dsrun, dsrun_here, monkeypatch
):
    for name in ("DS_ACCELERATOR", "DSRUN_CACHE"):
        monkeypatch.setenv(name, environ[name])
    monkeypatch.setitem(environ, "DSRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "cache"))
    path, cache = tmp_path / "train.jsonl", tmp_path / "cache" / "rows"
    content = path.read_text(encoding="utf-8")
    path.write_text("".join(content.splitlines(keepends=True)[:40]), encoding="utf-8")

    said = dsrun("resume", died)
    assert said.code == 1
    assert f"{path}: is not the data that the run was planned with" in said.err.replace("\n", " ")
    assert not cache.exists()

    path.write_text(content, encoding="utf-8")
    done = finish(dsrun_here("resume", died), died)
    assert done.code == 0, done.err
    same(done.losses, reference.losses)

    job = json.loads(done.read("job.json"))
    options = {"train_file": path, "eval_file": tmp_path / "dev.jsonl", "output_dir": tmp_path / "another"}
    limits = {"max_source_length": 40, "max_target_length": 16, "gpus": 2, "allow_truncation": True}
    new = finetune.plan(finetune_request(**options, **limits), detect(environ), environ).job
    assert new.prepared.train_rows == job["prepared"]["train_rows"]
    assert len(Examples(Path(new.prepared.train_rows))) == ROWS
