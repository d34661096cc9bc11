"""What of a job is secret: hidden in every file that others can read, and whole for whoever runs it."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from dsrun.errors import DsrunError
from dsrun.host.hiding import HIDDEN
from dsrun.job import job as jobs
from dsrun.job import rank_state, run_folder
from dsrun.job.job import HostDevices, ScriptJob
from dsrun.job.layout import JOB, SECRETS
from dsrun.jobs.runs import past_runs
from dsrun.jobs.supervision.commands import command_text, commands_of
from dsrun.jobs.supervision.display.script_view import ScriptView

PASSWORD, KEY = "hunter3x", "sk-proj-aB3dE6gH9jK2mN5pQ8rS"
ARGS = ("--api-key", KEY, f"--password={PASSWORD}", "--url", f"https://u:{PASSWORD}@host", "--lr", "0.1")


@pytest.fixture
def job(tmp_path) -> ScriptJob:
    run_dir = tmp_path / "a run's 目录"
    run_dir.mkdir()
    return ScriptJob(
        run_dir=str(run_dir), hosts=(HostDevices("localhost", (0,)),), script="s.py", args=ARGS, cwd=str(tmp_path),
        accelerator="cpu", dsrun_version="0", plain=True,
        env={"MY_PASSWORD": PASSWORD, "PLACE": "here", "DB": f"postgresql://me:{PASSWORD}@h/db"},
        ds_config={"comet": {"api_key": PASSWORD}, "train_batch_size": 2},
    )  # fmt: skip


def test_job_json_holds_none_and_whoever_runs_it_has_them(job):
    job.write()
    run_dir = Path(job.run_dir)
    text = (run_dir / JOB).read_text(encoding="utf-8")
    assert PASSWORD not in text and KEY not in text and text.count(HIDDEN) == 6
    assert "--lr" in text and "here" in text
    assert stat.S_IMODE((run_dir / SECRETS).stat().st_mode) == 0o600
    assert jobs.read(run_dir / JOB) == job
    shown = jobs.read_shown(run_dir / JOB)
    assert isinstance(shown, ScriptJob)
    assert shown.args == (
        "--api-key",
        HIDDEN,
        f"--password={HIDDEN}",
        "--url",
        f"https://u:{HIDDEN}@host",
        "--lr",
        "0.1",
    )


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_job_json_has_the_permissions_of_the_umask(job, mask):
    before = os.umask(mask)
    try:
        job.write()
    finally:
        os.umask(before)
    assert stat.S_IMODE((Path(job.run_dir) / JOB).stat().st_mode) == 0o666 & ~mask
    assert stat.S_IMODE((Path(job.run_dir) / SECRETS).stat().st_mode) == 0o600


def test_a_file_that_others_could_read_is_closed(job):
    path = Path(job.run_dir) / SECRETS
    path.write_text("[]")
    path.chmod(0o666)
    job.write()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_job_without_secrets_has_no_such_file(job):
    job.write()
    plain = replace(job, args=("--lr", "0.1"), env={}, ds_config=None)
    plain.write()
    assert not (Path(job.run_dir) / SECRETS).exists()
    assert "secrets" not in json.loads((Path(job.run_dir) / JOB).read_text(encoding="utf-8"))
    assert jobs.read(Path(job.run_dir) / JOB) == plain


def closed(path: Path) -> None:
    """As it is for a colleague: root, who runs tests in containers, may read everything."""
    path.unlink()
    path.symlink_to("/proc/1/mem/nothing")


@pytest.mark.parametrize(
    "damage", [Path.unlink, closed, lambda path: path.write_text("[["), lambda path: path.write_text("[]")]
)
def test_a_colleague_is_told_which_values_are_lacking(job, damage):
    job.write()
    damage(Path(job.run_dir) / SECRETS)
    run = past_runs.read(Path(job.run_dir))
    assert run.script and run.script.args[0] == "--api-key"
    with pytest.raises(
        DsrunError, match=r"--api-key, --password, --url.*env\.MY_PASSWORD, env\.DB.*are lacking"
    ) as error:
        run.with_secrets()
    assert "Who started the run can go on with it" in str(error.value)
    assert PASSWORD not in str(error.value)


def test_a_run_read_for_its_owner_is_whole(job):
    job.write()
    assert past_runs.read(Path(job.run_dir)).with_secrets().any_job == job


@pytest.mark.parametrize("place", [["args", 99], ["nothing"], ["args", "x"], [], ["run_dir"], 7, None])
def test_places_that_are_not_there_are_said(job, place):
    job.write()
    run_dir = Path(job.run_dir)
    raw = json.loads((run_dir / JOB).read_text(encoding="utf-8"))
    (run_dir / JOB).write_text(json.dumps({**raw, "secrets": [place]}))
    (run_dir / SECRETS).write_text(json.dumps([[place, "x"]]))
    with pytest.raises(DsrunError):
        jobs.read(run_dir / JOB)


def test_command_sh_holds_none(job):
    text = command_text(job, commands_of(job, {}))
    assert "PLACE=" in text and PASSWORD not in text and "MY_PASSWORD" not in text


TEXT = f"WANDB_API_KEY={PASSWORD}, https://u:{PASSWORD}@host\npassword: '{PASSWORD}'"


def test_the_states_of_run_and_rank_hold_none(job):
    run_dir = Path(job.run_dir)
    run_folder.write_state(
        run_dir, "failed", why=TEXT, problems=[TEXT], diagnosis={"trace": {"lines": [TEXT]}}
    )
    assert PASSWORD not in (run_dir / "run.json").read_text()
    assert run_folder.record_of(run_dir)["problems"][0].startswith(
        "WANDB_API_KEY=(hidden), https://u:(hidden)@host"
    )
    state = rank_state.RankState(run_dir, 0)
    state.end("failed", error=TEXT, traceback=TEXT)
    assert PASSWORD not in (run_dir / "state/rank-0.json").read_text()


def test_the_terminal_shows_none(job, capsys):
    from dsrun.cli.jobs.running import say

    log = Path(job.run_dir) / run_folder.rank_log(0)
    log.parent.mkdir()
    log.touch()
    lines: list[str] = []
    with ScriptView(Path(job.run_dir), 1, lines.append):
        log.write_text(TEXT + "\n")
    say(TEXT)
    assert len(lines) == 2
    assert PASSWORD not in "".join([*lines, *capsys.readouterr()])
