"""Folders of several users: who may not read a run is told so, and files get what the umask leaves."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from dsrun import cli
from dsrun.errors import DsrunError
from dsrun.files import make_readable, why_not_readable, write_atomic
from dsrun.job import run_folder
from dsrun.jobs.runs import past_runs, rank_logs, run_summaries
from dsrun.reports import report  # noqa: F401  (imported while it may be read)

NOBODY = 65534


@pytest.fixture
def shared():
    """A folder that everybody may look into; pytest's own are closed."""
    folder = Path(tempfile.mkdtemp(prefix="dsrun-shared-"))
    folder.chmod(0o755)
    yield folder
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    shutil.rmtree(folder)


@contextmanager
def somebody_else():
    """Root reads everything: it becomes nobody. Any other user is kept out of its own closed folders, too."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.fixture(params=["folder", "job.json", "above"])
def closed(shared, request):
    """A run that one may not read: its folder is closed, its job.json alone, or a folder above."""
    run = shared / "lab" / "run 一"
    run.mkdir(parents=True)
    (run / "logs").mkdir()
    (run / "logs" / "rank-0.log").write_text("ValueError: x\n")
    (run / run_folder.JOB).write_text("{}")
    for folder in (run, run.parent):
        folder.chmod(0o755)  # whatever the umask says
    {"folder": run, "job.json": run / run_folder.JOB, "above": run.parent}[request.param].chmod(0)
    return run


def test_a_run_that_one_may_not_read_is_not_called_missing(closed):
    with somebody_else():
        with pytest.raises(DsrunError, match=r"Permission denied: .* is .*'s \([d-]---------\)"):
            past_runs.read(past_runs.named(str(closed)))
        summary = run_summaries.summary(closed, "run")
        assert summary.state == "no access" and "Permission denied" in summary.problem
        (problem,) = run_folder.check_unfinished(closed)
        assert "Permission denied" in problem.what


@pytest.mark.parametrize("command", ["show", "logs", "stop", "report", "rerun", "diagnose", "runs"])
def test_every_command_says_so(shared, closed, command, monkeypatch):
    shared.chmod(0o777)  # a page that is written would be another one than was asked for
    monkeypatch.chdir(shared)
    CliRunner().invoke(cli.cli, [command, "nowhere"])  # imports come first: nobody may not read root's Python
    with somebody_else():
        done = CliRunner().invoke(cli.cli, [command, str(closed)], catch_exceptions=True)
        text = f"{done.output} {done.exception}"
    assert "Permission denied" in text, text
    assert "holds no" not in text and "broken" not in text
    assert [path.name for path in shared.iterdir()] == ["lab"]


def test_a_closed_folder_is_no_place_for_a_run(shared):
    (shared / "run").mkdir()
    (shared / "run").chmod(0)
    with somebody_else():
        (problem,) = run_folder.check_new(shared / "run")
    assert "Permission denied" in problem.what


def test_a_log_that_one_may_not_read(shared):
    log = shared / "rank-0.log"
    log.write_text("x\n")
    log.chmod(0)
    with somebody_else(), pytest.raises(DsrunError, match=r"Permission denied: .*rank-0.log is"):
        rank_logs._check_readable(log)


def test_what_is_readable_or_not_there(shared):
    (shared / "file").touch()
    assert why_not_readable(shared) == why_not_readable(shared / "file") == ""
    assert why_not_readable(shared / "no" / "such") == ""


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o775), (0o022, 0o755), (0o077, 0o700)])
def test_a_program_obeys_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_atomic(tmp_path / "command.sh", "#!/bin/sh\n", executable=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "command.sh").stat().st_mode) == mode


def test_the_groups_bit_of_a_shared_folder_stays(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    folder.chmod(0o2700)
    before = os.umask(0o002)
    try:
        make_readable(folder)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o2775
