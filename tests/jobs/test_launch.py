"""What is started: explicit commands, and a command.sh that says the same to a shell."""

from __future__ import annotations

import json
import shlex
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dsrun.errors import DsrunError
from dsrun.jobs import layout, run, run_folder
from dsrun.jobs.job import HostDevices, Job
from dsrun.jobs.launchers import local

BASH = shutil.which("bash") or "/bin/bash"
HOSTILE = [
    "plain",
    "with spaces",
    "it's",
    'double "quotes"',
    "中文 路径",
    "$HOME `id` $(id)",
    "a;b&c|d>e",
    "back\\slash",
    "-leading dash",
    "#comment",
    "star * and ?",
    "new\nline",
]


@pytest.fixture(params=HOSTILE, ids=lambda name: name.split()[0])
def hostile(request, tmp_path) -> Path:
    return tmp_path / request.param


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


@pytest.fixture
def script(hostile, make_job, machine):
    """A run folder with a hostile name, as it is before the run: (job, launch, the text of command.sh)."""
    model = replace(make_job().model, name=hostile.name)
    job = make_job(hostile, model=model)
    environ = {"DSRUN_CACHE": str(hostile), "TORCH_EXTENSIONS_DIR": str(hostile / "扩展")}
    launch = run.launch_of(job, environ)
    with run_folder.held(hostile):
        run.write_folder(job, launch, machine, environ)
    return job, launch, (hostile / run_folder.COMMAND).read_text(encoding="utf-8")


def test_the_command_is_explicit(make_job, tmp_path):
    job = make_job(hosts=(HostDevices("localhost", (1, 3)),))
    argv = local.command(job, tmp_path, 23456, ["--resume"])
    assert argv[:3] == [sys.executable, "-m", "deepspeed.launcher.runner"]
    assert option(argv, "--hostfile") == str(tmp_path / "hostfile")
    assert option(argv, "--include") == "localhost:1,3"
    assert option(argv, "--master_port") == "23456"
    assert option(argv, "--master_addr") == "127.0.0.1"
    assert option(argv, "--job") == str(tmp_path / "job.json")
    assert argv[-1] == "--resume"
    assert not {"--num_gpus", "--num_nodes"} & set(argv)


@pytest.mark.parametrize("devices", [(0,), (0, 1), (2, 3), (7,)])
def test_every_device_is_a_slot_of_the_hostfile(make_job, devices):
    job = make_job(hosts=(HostDevices("localhost", devices),))
    host, slots = local.hostfile(job).split()
    assert host == "localhost"
    assert int(slots.removeprefix("slots=")) > max(devices)


def test_deepspeed_reads_them_so(make_job, tmp_path):
    pytest.importorskip("deepspeed")
    code = (
        "import sys; from deepspeed.launcher import runner\n"
        "pool = runner.fetch_hostfile(sys.argv[1])\n"
        "print(dict(runner.parse_inclusion_exclusion(pool, sys.argv[2], '')))"
    )
    job = make_job(hosts=(HostDevices("localhost", (1, 3)),))
    (tmp_path / "hostfile").write_text(local.hostfile(job))
    argv = local.command(job, tmp_path, 23456, [])
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "hostfile"), option(argv, "--include")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "{'localhost': [1, 3]}"


def test_two_launches_take_two_ports(make_job):
    ports = {option(run.launch_of(make_job(), {}).train, "--master_port") for _ in range(5)}
    assert len(ports) > 1


def test_a_resumed_launch_says_so_and_names_no_checkpoint_that_may_be_gone(make_job):
    assert run.launch_of(make_job(), {}, resume=True).train[-1] == "--resume"
    assert "--resume" not in run.launch_of(make_job(), {}).train


def test_the_script_is_valid_shell(script, hostile):
    done = subprocess.run(
        [BASH, "-n", str(hostile / run_folder.COMMAND)], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert stat.S_IMODE((hostile / run_folder.COMMAND).stat().st_mode) & 0o111


def test_the_script_round_trips(script):
    _, launch, text = script
    words = shlex.split(text, comments=True)
    exports = [f"{name}={value}" for name, value in launch.env.items()]
    wanted = [word for export in exports for word in ("export", export)]
    assert words == ["set", "-e", *wanted, *launch.prepare, "exec", *launch.train]


def test_a_shell_runs_just_that(script, hostile, tmp_path):
    """A real bash, with a program in Python's place that writes down its arguments and the environment."""
    _, launch, text = script
    spy = tmp_path / "spy"
    spy.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "print(json.dumps({'argv': sys.argv[1:], 'env': dict(os.environ)}))\n"
    )
    spy.chmod(0o755)
    text = text.replace(shlex.quote(sys.executable), shlex.quote(str(spy)))
    (tmp_path / "spied.sh").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [BASH, str(tmp_path / "spied.sh")],
        check=False,
        capture_output=True,
        text=True,
        env={"PATH": "/none"},
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    prepare, train = map(json.loads, done.stdout.splitlines())
    assert (prepare["argv"], train["argv"]) == (launch.prepare[1:], launch.train[1:])
    for name, value in launch.env.items():
        assert train["env"][name] == value


def test_a_failed_preparation_ends_the_script(script, tmp_path):
    _, _, text = script
    text = text.replace(shlex.quote(sys.executable), "false")
    (tmp_path / "spied.sh").write_text(text, encoding="utf-8")
    assert (
        subprocess.run([BASH, str(tmp_path / "spied.sh")], check=False, capture_output=True).returncode == 1
    )


def test_the_folder_holds_the_job(script, hostile):
    job, _, _ = script
    assert Job.read(hostile / run_folder.JOB) == job
    assert json.loads((hostile / run_folder.CONFIG).read_text()) == job.ds_config
    environment = json.loads((hostile / run_folder.ENVIRONMENT).read_text(encoding="utf-8"))
    assert environment["packages"]["torch"]
    assert environment["packages"]["deepspeed"]
    assert environment["accelerator"] == "cpu"
    assert environment["variables"]["TORCH_EXTENSIONS_DIR"] == str(hostile / "扩展")
    assert {"python", "host", "platform", "gpus", "git"} <= set(environment)


def test_no_secrets_in_the_environment(make_job, machine, tmp_path):
    job = make_job(tmp_path / "run")
    secrets = {"HF_TOKEN": "hf_s3cr3t", "WANDB_API_KEY": "s3cr3t", "AWS_SECRET_ACCESS_KEY": "s3cr3t"}
    with run_folder.held(tmp_path / "run"):
        run.write_folder(job, run.launch_of(job, secrets), machine, secrets)
    for path in (tmp_path / "run").iterdir():
        assert path.is_dir() or "s3cr3t" not in path.read_text(encoding="utf-8"), path


def test_the_git_state_is_that_of_the_users_checkout(tmp_path, machine, monkeypatch):
    from dsrun.jobs import environment

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment.describe(machine, {})["git"] is None
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q", "-b", "main"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / "train.py").touch()
    state = environment.describe(machine, {})["git"]
    assert (len(state["commit"]), state["branch"], state["changed"]) == (40, "main", ["?? train.py"])


# The result, read back from the folder


def test_a_result_from_its_folder(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "eval_loss": 7.5}\n{"step": 1, "loss": 7.0, "skipped": 1}\n'
        '{"step": 2, "loss": 6.0, "skipped": 1}\n{"step": 2, "eval_loss": 6.5}\n'
    )
    (tmp_path / "events.jsonl").write_text(
        '{"event": "model", "path": "/runs/a/model"}\n'
        '{"event": "scores", "when": "after", "scores": {"rouge-l": 30.0}, "example_prompt": "问"}\n'
    )
    result = run.result_of(tmp_path)
    wanted = {
        "run_dir": str(tmp_path), "model": "/runs/a/model", "steps": 2, "loss": 6.0,
        "eval_loss": {"first": 7.5, "last": 6.5}, "scores": {"after": {"rouge-l": 30.0}}, "skipped_steps": 1,
    }  # fmt: skip
    assert {key: result[key] for key in wanted} == wanted


def test_a_folder_without_a_result_says_so(tmp_path):
    with pytest.raises(DsrunError) as caught:
        run.result_of(tmp_path)
    assert caught.value.problems, "an error without a word"


def test_the_newest_whole_checkpoint(tmp_path):
    assert layout.whole_checkpoints(tmp_path) == []
    for step in (2, 10, 9):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step-{step}" / "complete").touch()
    (tmp_path / "checkpoints" / "step-11").mkdir()  # half written
    assert layout.whole_checkpoints(tmp_path)[-1] == tmp_path / "checkpoints" / "step-10"
