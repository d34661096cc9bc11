"""What is started: explicit commands, and a command.sh that says the same to a shell."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from dsrun.errors import DsrunError, JobFailedError
from dsrun.job import layout, run_folder
from dsrun.job.job import HostDevices, Job
from dsrun.job.processes import TerminalClosedError, TerminatedError
from dsrun.jobs.supervision import commands, run
from dsrun.jobs.supervision.commands import commands_of
from dsrun.jobs.supervision.display.progress import PlainView
from dsrun.jobs.supervision.run_options import RunOptions

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
    launch = commands_of(job, environ)
    with run_folder.held(hostile):
        run.write_folder(job, launch, machine, environ)
    return job, launch, (hostile / run_folder.COMMAND).read_text(encoding="utf-8")


HOSTS = (HostDevices("n1", (1, 3)), HostDevices("n2", (0,)))


def test_the_command_is_explicit(make_job, tmp_path):
    argv = commands.ranks_command(make_job(tmp_path, hosts=HOSTS), 1, ("10.0.0.1", 23456), resume=True)
    assert argv[:3] == [sys.executable, "-m", "deepspeed.launcher.launch"]
    assert option(argv, "--node_rank") == "1"
    assert option(argv, "--master_port") == "23456"
    assert option(argv, "--master_addr") == "10.0.0.1"
    assert "--no_local_rank" in argv
    assert argv[-4:] == ["--module", "dsrun.jobs.supervision.rank", str(tmp_path / "job.json"), "--resume"]


@pytest.mark.slow
def test_deepspeed_reads_them_so(make_job, tmp_path):
    pytest.importorskip("deepspeed")
    code = (
        "import base64, json, sys; from deepspeed.launcher import launch\n"
        "arguments = launch.parse_args()\n"
        "print([json.loads(base64.urlsafe_b64decode(arguments.world_info)), arguments.node_rank, arguments.module,"
        " arguments.training_script, arguments.training_script_args])"
    )
    hosts = (*HOSTS, HostDevices("本机", (7,)))
    argv = commands.ranks_command(make_job(tmp_path, hosts=hosts), 1, ("10.0.0.1", 23456), resume=True)
    done = subprocess.run([sys.executable, "-c", code, *argv[3:]], capture_output=True, text=True, check=True)
    wanted = [
        {"n1": [0, 1], "n2": [0], "本机": [0]}, 1, True, "dsrun.jobs.supervision.rank",
        [str(tmp_path / "job.json"), "--resume"],
    ]  # fmt: skip
    assert done.stdout.splitlines()[-1] == str(wanted)


def test_two_launches_take_two_ports(make_job):
    ports = {option(commands_of(make_job(), {}).train[0], "--master_port") for _ in range(5)}
    assert len(ports) > 1


def test_a_command_for_every_host_and_one_place_to_meet(make_job):
    train = commands_of(make_job(hosts=HOSTS), {}).train
    assert [option(argv, "--node_rank") for argv in train] == ["0", "1"]
    assert len({(option(argv, "--master_addr"), option(argv, "--master_port")) for argv in train}) == 1
    assert option(train[0], "--master_addr") == "n1"
    assert option(commands_of(make_job(), {}).train[0], "--master_addr") == "127.0.0.1"


def test_a_resumed_launch_says_so_and_names_no_checkpoint_that_may_be_gone(make_job):
    for hosts in (HOSTS, HOSTS[:1]):
        job = make_job(hosts=hosts)
        assert all(argv[-1] == "--resume" for argv in commands_of(job, {}, resume=True).train)
        assert not any("--resume" in argv for argv in commands_of(job, {}).train)


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
    assert words == ["set", "-e", *wanted, *launch.prepare, "exec", *launch.train[0]]


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
    assert (prepare["argv"], train["argv"]) == (launch.prepare[1:], launch.train[0][1:])
    for name, value in launch.env.items():
        assert train["env"][name] == value


def test_on_several_hosts_each_has_its_part(hostile, make_job, tmp_path):
    """command.sh NUMBER; without one, or with a wrong one, nothing is started."""
    job = make_job(hostile, hosts=HOSTS)
    launch = replace(commands_of(job, {}), prepare=[])
    spy = tmp_path / "spy"
    spy.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    spy.chmod(0o755)
    path = tmp_path / "spied.sh"
    text = commands.command_text(job, launch).replace(shlex.quote(sys.executable), shlex.quote(str(spy)))
    path.write_text(text, encoding="utf-8")

    def start(*words: str):
        return subprocess.run([BASH, str(path), *words], check=False, capture_output=True, text=True)

    for number, argv in enumerate(launch.train):
        assert json.loads(start(str(number)).stdout) == argv[1:]
    for words in ((), ("2",), ("x",)):
        done = start(*words)
        assert (done.returncode != 0, done.stdout) == (True, "")
        assert done.stderr


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
        run.write_folder(job, commands_of(job, secrets), machine, secrets)
    for path in (tmp_path / "run").iterdir():
        assert path.is_dir() or "s3cr3t" not in path.read_text(encoding="utf-8"), path


def test_the_git_state_is_that_of_the_users_checkout(tmp_path, machine, monkeypatch):
    from dsrun.jobs.launchers.common import environment

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
        (tmp_path / "checkpoints" / f"step-{step}" / "complete").write_text("{}")
    (tmp_path / "checkpoints" / "step-11").mkdir()  # half written
    assert layout.whole_checkpoints(tmp_path)[-1] == tmp_path / "checkpoints" / "step-10"


# Again, where it fails


@pytest.fixture
def run_ranks(stage, make_job):
    """`run_ranks(script, restarts)`: run a fine-tune with one rank to its end, as often as it may be started."""

    def start(script: str, restarts: int, view=None, **fields) -> int:
        stage.play(script)
        job = stage.put(make_job(stage.run_dir, ranks=1))
        options = RunOptions(env=stage.forwarded, max_restarts=restarts, check=False, **fields)
        view = view or nullcontext(lambda: False)
        return run.run_ranks(job, stage.environ, stage.said.append, view, options=options)

    return start


COUNTED = """
write("starts", argv=sys.argv[3:])
starts = len((run_dir / "starts").read_text().splitlines())
"""


def starts(stage) -> list[list[str]]:
    return [json.loads(line)["argv"] for line in (stage.run_dir / "starts").read_text().splitlines()]


def test_it_fails_once_and_is_started_again(run_ranks, stage):
    run_ranks(COUNTED + "fail('ValueError: x') if starts == 1 else state('finished')", 3)
    assert starts(stage) == [[], ["--resume"]]
    assert any("ValueError: x" in line and "1 of 3" in line for line in stage.said)
    state = json.loads((stage.run_dir / "run.json").read_text())
    assert (state["state"], state["restarts"]) == ("running", 1)


def test_without_a_wish_it_is_not(run_ranks, stage):
    with pytest.raises(JobFailedError):
        run_ranks(COUNTED + "fail('ValueError: x')", 0)
    assert starts(stage) == [[]]


def test_one_that_gets_nowhere_is_not_started_for_ever(run_ranks, stage):
    with pytest.raises(JobFailedError, match="ValueError: x"):
        run_ranks(COUNTED + "fail('ValueError: x')", 10)
    assert len(starts(stage)) == 2
    assert any("before anything new was done" in line for line in stage.said)


def test_one_that_gets_on_is_started_as_often_as_is_wished_for(run_ranks, stage):
    with pytest.raises(JobFailedError):
        run_ranks(COUNTED + "write('metrics.jsonl', step=starts); fail('ValueError: x')", 2)
    assert len(starts(stage)) == 3


PRINTS = (
    COUNTED
    + """
def printed(line):
    (run_dir / "logs").mkdir(exist_ok=True)
    with (run_dir / "logs" / "rank-0.log").open("a") as log:
        print(line, file=log)
    fail(line)
"""
)


def test_what_does_not_get_better_by_itself_is_not_started_again(run_ranks, stage):
    with pytest.raises(JobFailedError) as caught:
        run_ranks(PRINTS + "printed('OSError: [Errno 28] No space left on device')", 3)
    assert len(starts(stage)) == 1
    assert any("disk_full" in line and "not started again" in line for line in stage.said)
    assert "Cause: " in caught.value.problems[0].hint and "Next: " in caught.value.problems[0].hint
    assert (caught.value.diagnosis["cause"], caught.value.diagnosis["rank"]) == ("disk_full", 0)


def test_what_passes_is_waited_for_and_what_an_earlier_attempt_printed_does_not_count(
    run_ranks, stage, monkeypatch
):
    monkeypatch.setattr(run, "PAUSE_S", 0.1)
    first, second = (
        "'RuntimeError: code: -98, name: EADDRINUSE'",
        "'OSError: [Errno 28] No space left on device'",
    )
    with pytest.raises(JobFailedError) as caught:
        run_ranks(
            PRINTS + f"write('metrics.jsonl', step=starts); printed({first} if starts == 1 else {second})", 3
        )
    assert any("starting again in 0.1 s" in line for line in stage.said)
    assert len(starts(stage)) == 2
    assert caught.value.diagnosis["cause"] == "disk_full"


def test_one_that_was_asked_to_end_is_not_started_again(run_ranks, stage):
    strike = stage.when(stage.up(1), lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(TerminatedError):
        run_ranks(COUNTED + "answer()", 5, nullcontext(strike), save_on_stop=20 / 60)
    assert len(starts(stage)) == 1


@pytest.mark.parametrize(
    ("number", "error", "state"),
    [
        (signal.SIGHUP, TerminalClosedError, "stopped: the terminal was closed"),
        (signal.SIGTERM, TerminatedError, "interrupted"),
    ],
)
def test_the_folder_tells_of_a_signal_that_came_before_the_ranks(
    make_job, machine, tmp_path, number, error, state
):
    before = signal.getsignal(number)
    with pytest.raises(error), run.opened(make_job(tmp_path), machine, {}):
        os.kill(os.getpid(), number)
    assert run_folder.describe_state(tmp_path) == state
    assert signal.getsignal(number) is before


def test_what_can_not_be_started_is_not_tried_again(run_ranks, stage):
    import socket

    with socket.create_server(("", 0)) as taken, pytest.raises(DsrunError, match="--master-port"):
        run_ranks(COUNTED + "state('finished')", 5, master_port=taken.getsockname()[1])
    assert not (stage.run_dir / "starts").exists()
    assert sum("starting" in line for line in stage.said) == 1


# What is told while it runs


class Ears(PlainView):
    def __init__(self, run_dir) -> None:
        super().__init__(run_dir, print)
        self.events, self.lines = [], []

    def event(self, event) -> None:
        self.events.append(event)

    def metrics(self, line) -> None:
        self.lines.append(line)


def test_what_the_first_rank_writes_is_told(run_ranks, stage):
    (stage.run_dir / "events.jsonl").write_text('{"event": "phase", "text": "of the run before"}\n')
    (stage.run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    ears = Ears(stage.run_dir)
    script = (
        "write('events.jsonl', event='phase', text='训练')\n"
        "for step in range(2, 5): write('metrics.jsonl', step=step)\n"
        "state('finished')"
    )
    run_ranks(script, 0, ears)
    assert ears.events == [{"event": "phase", "text": "训练"}]
    assert [line["step"] for line in ears.lines] == [2, 3, 4]


def test_a_watcher_says_whether_anything_was_new(tmp_path):
    with Ears(tmp_path) as watch:
        assert not watch()
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
        assert watch()
        assert not watch()


@pytest.mark.parametrize(
    ("text", "mode"), [("lr = 1e-4\n", 0o644), ('overrides = ["wandb.api_key=geheim"]\n', 0o600)]
)
def test_a_run_file_with_a_secret_is_its_owners_alone(tmp_path, text, mode):
    before = os.umask(0o022)
    try:
        run.write_run_file(tmp_path, text)
    finally:
        os.umask(before)
    path = tmp_path / "run.toml"
    assert path.read_text(encoding="utf-8") == text
    assert stat.S_IMODE(path.stat().st_mode) == mode
