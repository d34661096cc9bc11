"""`dsrun submit`, with an sbatch that keeps what it gets and answers as it is told."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from datetime import datetime
from pathlib import Path

import jsonschema
import pytest
import yaml

from dsrun import catalog
from dsrun.cli import cli
from dsrun.jobs.runs import rank_logs

FAKE = """#!{python}
import json, os, sys
folder = os.path.dirname(os.path.abspath(__file__))
text = open(sys.argv[-1], encoding="utf-8").read()
with open(os.path.join(folder, "got.json"), "w") as file:
    json.dump(dict(argv=sys.argv[1:], cwd=os.getcwd(), text=text, token=os.environ.get("HF_TOKEN")), file)
with open(os.path.join(folder, "answer.json")) as file:
    answer = json.load(file)
sys.stdout.write(answer["out"])
sys.stderr.write(answer["err"])
sys.exit(answer["code"])
"""
FINETUNE = ("finetune", "llama-tiny", "--preset", "zero2")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a hostile name to work in, outside of Slurm."""
    for name in (
        "DSRUN_CLUSTER",
        "DSRUN_REQUEUE",
        *(name for name in os.environ if name.startswith("SLURM_")),
    ):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "a lab's 50% 实验室"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def sbatch(place, tmp_path, monkeypatch):
    """`sbatch(out, err, code)` decides what sbatch answers; `sbatch.got()` is what it got."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "sbatch"
    program.write_text(FAKE.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def answers(out="1234\n", err="", code=0):
        (folder / "answer.json").write_text(json.dumps({"out": out, "err": err, "code": code}))

    answers()
    answers.got = lambda: json.loads((folder / "got.json").read_text())
    answers.called = (folder / "got.json").exists
    return answers


def last_line(text):
    """The command at the end of a script, without the shell's own words."""
    words = shlex.split(text.splitlines()[-1])
    assert words[0] == "exec"
    return words[1:]


def test_a_job_that_waits_in_the_queue_is_a_run(dsrun, place, sbatch):
    """Before it begins the folder has only the script: it is listed as submitted, its log once there is one."""
    run = place / "runs" / "mine"
    sent = dsrun("submit", "--gpus-per-node", 4, "--output-dir", run, "--", *FINETUNE)
    assert sent.code == 0, sent.err
    assert "mine  submitted" in dsrun("runs").out
    for command in ("show", "logs", "stop", "resume"):
        said = dsrun(command, "mine")
        assert (said.code, said.out) == (1, "")
        assert "sent to Slurm" in said.err and "squeue" in said.err
    log = run / "logs" / "slurm-1234.out"
    log.write_text("dsrun: a slip\n")
    assert str(log) in dsrun("show", "mine").err
    waited: list[float] = []

    def begin(seconds):
        waited.append(seconds)
        (run / "job.json").write_text("{}")

    said: list[str] = []
    rank_logs.await_job(run, said.append, sleep=begin)
    assert len(waited) == 1 and str(log) in said[0]


def test_a_slip_behind_the_command_leads_to_its_own_help(dsrun, place, sbatch):
    said = dsrun("submit", "--gpus-per-node", 4, "--", "finetune", "llama-tiny", "--nonsense")
    assert said.code == 2
    assert re.search(r"Usage: dsrun finetune \[OPTIONS\](.|\n)*dsrun finetune (-h|--help)", said.err)


def test_a_job_is_sent(dsrun, place, sbatch, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    said = dsrun(
        "submit", "--nodes", 2, "--gpus-per-node", 4, "--time", "2:00:00", "--partition", "gpu",
        "--account", "abc@v100", "--qos", "q", "--job-name", "tiny", "--output-dir", "run", "--", *FINETUNE,
    )  # fmt: skip
    assert (said.code, said.err) == (0, "")
    run = place / "run"
    assert said.out == (
        "job         1234: 2 nodes, 4 GPUs each, at most 02:00:00\n"
        f"run folder  {run}  (submit.sbatch, logs/slurm-1234.out)\n"
        f"follow it   squeue -j 1234; dsrun logs {shlex.quote(str(run))} -f\n"
        "end it      scancel 1234\n"
    )
    got = sbatch.got()
    assert got["argv"] == ["--parsable", str(run / "submit.sbatch")]
    assert got["cwd"] == str(place)
    assert got["token"] == "hf_very_secret"
    assert "hf_very_secret" not in got["text"]
    assert (run / "submit.sbatch").read_text(encoding="utf-8") == got["text"]
    assert (run / "logs").is_dir(), "Slurm writes its log there and makes no folder"
    for line in (
        "nodes=2",
        "gres=gpu:4",
        "time=02:00:00",
        "partition=gpu",
        "account=abc@v100",
        "job-name=tiny",
    ):
        assert f"#SBATCH --{line}\n" in got["text"]
    assert f"\ncd -- {shlex.quote(str(place))} || exit 1\n" in got["text"]
    assert last_line(got["text"]) == [
        sys.executable, "-m", "dsrun", "finetune", "--output-dir", str(run), "--continue", "--gpus", "4", *FINETUNE[1:],
    ]  # fmt: skip


def test_the_words_are_a_command_that_dsrun_takes(dsrun, place, sbatch):
    assert dsrun("submit", "--gpus-per-node", 2, *FINETUNE, "--lr", "1e-3").code == 0
    words = last_line(sbatch.got()["text"])[3:]
    found = cli.get_command(None, "finetune").make_context("finetune", words[1:])
    assert found.params["lr"] == 1e-3
    assert found.params["gpus"] == 2
    assert found.params["words"] == ("llama-tiny",)


@pytest.mark.usefixtures("place")
def test_the_config_is_the_one_of_all_ranks(dsrun, sbatch):
    """16 examples a step are right for four ranks, and not for six."""
    rows = (*FINETUNE, "--set", "train_batch_size=16")
    said = dsrun("submit", "--nodes", 2, "--gpus-per-node", 3, *rows)
    assert (said.code, "--global-batch 18" in said.err) == (1, True)
    assert not sbatch.called()
    assert dsrun("submit", "--nodes", 2, "--gpus-per-node", 2, "--output-dir", "a", *rows).code == 0
    assert (
        dsrun("submit", "--nodes", 2, "--gpus-per-node", 4, *rows, "--gpus", 2, "--output-dir", "b").code == 0
    )
    named = ("--devices", "0,1", "--output-dir", "c")
    assert dsrun("submit", "--nodes", 2, "--gpus-per-node", 4, *rows, *named).code == 0


def test_as_json(dsrun, place, sbatch):
    said = dsrun("submit", "--gpus-per-node", 1, "--output-dir", "run", "--json", *FINETUNE)
    assert json.loads(said.out) == {
        "version": 1,
        "job_id": "1234",
        "run_dir": str(place / "run"),
        "script": str(place / "run" / "submit.sbatch"),
        "log": str(place / "run" / "logs" / "slurm-1234.out"),
        "nodes": 1,
        "gpus_per_node": 1,
        "time_limit_min": None,
    }


@pytest.mark.usefixtures("place")
def test_a_dry_run_leaves_nothing(dsrun, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    words = ("submit", "--gpus-per-node", 1, "--output-dir", "run", "--dry-run")
    said = dsrun(*words, *FINETUNE)
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("#!/bin/bash\n#SBATCH --job-name=run\n")
    shown = json.loads(dsrun(*words, "--json", *FINETUNE).out)
    assert shown["script"] == said.out
    assert shown["command"] == ["sbatch", "--parsable", str(Path("run").absolute() / "submit.sbatch")]
    assert sorted(tmp_path.rglob("*")) == before


def test_the_default_folder_and_name(dsrun, place, sbatch):
    assert dsrun("submit", "--gpus-per-node", 1, *FINETUNE).code == 0
    (run,) = (place / "runs").iterdir()
    assert run.name.startswith(f"llama-tiny-{datetime.now():%Y%m}")
    assert f"#SBATCH --job-name={run.name}\n" in sbatch.got()["text"]


@pytest.mark.parametrize("form", [["--output-dir", "run"], ["--output-dir=run"]])
def test_the_folder_may_be_named_behind_the_command(dsrun, place, sbatch, form):
    assert dsrun("submit", "--gpus-per-node", 1, *FINETUNE, *form).code == 0
    words = last_line(sbatch.got()["text"])
    assert words.count("--output-dir") == 1
    assert words[words.index("--output-dir") + 1] == str(place / "run")


@pytest.mark.usefixtures("sbatch")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["finetune", "llama-tiny", "--presett", "zero2"], "No such option"),
        (["finetune", "llama-tiny", "--max-steps", "0"], "--max-steps"),
        (["finetune"], "Missing argument 'MODEL'"),
        (["finetun", "llama-tiny"], "'finetun' can't be sent. Did you mean 'finetune'?"),
        (["plan", "llama-tiny"], "'plan' can't be sent. It sends finetune and launch."),
        ([*FINETUNE, "--dry-run"], "dsrun submit --dry-run finetune"),
        ([*FINETUNE, "--output-dir", "x"], "given twice"),
        ([*FINETUNE, "--gpus", "9"], "--gpus 9 is more than the 8"),
    ],
)
def test_a_mistake_is_reported_before_anything_is_sent(dsrun, place, words, message):
    said = dsrun("submit", "--gpus-per-node", 8, "--output-dir", "run", "--", *words)
    assert said.code == 2
    assert message in said.err
    assert not list(place.iterdir())


@pytest.mark.parametrize("option", ["cluster", "hostfile", "hosts", "launcher", "nodes"])
def test_what_the_queue_decides_can_not_be_sent_along(dsrun, place, option):
    value = {"nodes": "2", "launcher": "ssh"}.get(option, "x")
    said = dsrun("submit", "--gpus-per-node", 8, "--", *FINETUNE, f"--{option}", value)
    assert said.code == 2
    assert f"--{option} can't be sent along" in said.err


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["finetune", "llama-tinny"], ["unknown model 'llama-tinny'"]),
        (["finetune", "llama-tiny", "--preset", "zerro2"], ["unknown preset 'zerro2'"]),
        (["finetune", "llama-tiny", "--train-file", "no.jsonl"], ["no.jsonl: no such file"]),
        (
            ["finetune", "llama-tiny", "--train-file", "no.jsonl", "--eval-file", "no.csv", "--set", "a.b=1"],
            ["no.jsonl: no such file", "no.csv: no such file", "--set"],
        ),
        (["finetune", "llama-tiny", "--preset", "zero3-nvme"], ["--nvme-path"]),
    ],
)
def test_a_jobs_problems_are_reported_together(dsrun, place, sbatch, words, messages):
    said = dsrun("submit", "--gpus-per-node", 8, "--", *words)
    assert said.code == 1
    for message in messages:
        assert message in said.err
    assert not sbatch.called()
    assert not list(place.iterdir())


def test_the_preset_that_fits_is_chosen_on_the_node(dsrun, place, sbatch):
    assert dsrun("submit", "--gpus-per-node", 8, "finetune", "llama-tiny", "--preset", "auto").code == 0


def test_the_count_of_gpus_may_come_from_the_command(dsrun, place, sbatch):
    said = dsrun("submit", *FINETUNE)
    assert said.code == 2
    assert "--gpus-per-node N" in said.err
    assert dsrun("submit", *FINETUNE, "--gpus", 2).code == 0
    text = sbatch.got()["text"]
    assert "#SBATCH --gres=gpu:2\n" in text
    assert last_line(text).count("--gpus") == 1


def test_devices_are_the_commands_own(dsrun, place, sbatch):
    assert dsrun("submit", "--gpus-per-node", 4, *FINETUNE, "--devices", "2,3").code == 0
    assert "--gpus" not in last_line(sbatch.got()["text"])


def test_a_clusters_file(dsrun, place, sbatch, monkeypatch):
    (place / "our.toml").write_text(
        'partition = "a"\ngpus_per_node = 4\ngres = ""\ntime_limit_min = 90\nsetup = ["source /opt/it\'s"]\n'
        '[environment]\nNCCL_DEBUG = "WARN"\nOUR_SCRATCH = "/s"\n'
    )
    monkeypatch.setenv("DSRUN_CLUSTER", "./our.toml")
    assert dsrun("submit", "--output-dir", "one", *FINETUNE).code == 0
    text = sbatch.got()["text"]
    assert "#SBATCH --partition=a\n" in text
    assert "#SBATCH --time=01:30:00\n" in text
    assert "--gres" not in text
    assert "\nsource /opt/it's\n" in text
    assert "\nexport NCCL_DEBUG=WARN\nexport OUR_SCRATCH=/s\n" in text
    assert last_line(text)[7:11] == ["--gpus", "4", "--env", "OUR_SCRATCH"]
    said = dsrun("submit", "--partition", "b", "--time", "10", "--output-dir", "two", *FINETUNE)
    assert said.code == 0
    assert "#SBATCH --partition=b\n" in sbatch.got()["text"]
    assert "at most 00:10:00" in said.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cluster", "zzz"], "unknown cluster 'zzz'"),
        (["--cluster", "example-ssh"], "there is no queue to send to"),
        (["--partition", "a b"], "--partition: can't be 'a b'"),
        (["--account", "x\n#SBATCH --uid=0"], "--account: can't be"),
        (["--job-name", "a b"], "--job-name: can't be 'a b'"),
        (["--time", "2h"], "--time: can't be '2h'"),
        (["--output-dir", "a\\b"], "Slurm can't write its log here"),
    ],
)
def test_what_the_queue_can_not_take(dsrun, place, sbatch, options, message):
    said = dsrun("submit", "--gpus-per-node", 1, *options, *FINETUNE)
    assert said.code == 1
    assert message in said.err
    assert not sbatch.called()


@pytest.mark.usefixtures("place")
def test_secrets_stay_out_of_the_script(dsrun, sbatch):
    said = dsrun("submit", "--gpus-per-node", 1, *FINETUNE, "--env", "HF_TOKEN=hf_x")
    assert said.code == 1
    assert "the value of HF_TOKEN would stand in the script" in said.err
    assert "hf_x" not in said.err
    assert not sbatch.called()


WITH_SECRETS = [
    (("--api-key", "sk-proj-aB3dE6gH9jK2mN5pQ8rS"), "--api-key"),
    (("--password=hunter3x",), "--password"),
    (("--url", "https://u:hunter3x@host"), "--url"),
    (("ghp_aB3dE6gH9jK2mN5pQ8rS1tU4vW7xY0zA",), "(hidden)"),
    (("trainer.token=aB3dE6gH9jK2mN5p",), "trainer.token"),
]


@pytest.mark.parametrize(("words", "option"), WITH_SECRETS)
def test_secret_arguments_stay_out_of_the_script(dsrun, place, sbatch, words, option):
    (place / "s.py").write_text("")
    said = dsrun("submit", "--gpus-per-node", 1, "launch", "s.py", *words)
    assert (said.code, said.out) == (1, "")
    assert f"dsrun: {option}: what looks like a secret would stand in the script" in said.err
    assert "sbatch takes the environment along" in said.err
    assert not any(secret in said.err for secret in ("hunter3x", "aB3dE6gH9jK2"))
    assert not sbatch.called()


@pytest.mark.usefixtures("sbatch")
def test_ordinary_arguments_stand_in_the_script(dsrun, place):
    (place / "s.py").write_text("")
    words = (
        "--sort-key",
        "loss",
        "--key",
        "name",
        "--max_tokens",
        2048,
        "--pad_token=<pad>",
        "--token-file",
        "/a/b",
    )
    said = dsrun("submit", "--gpus-per-node", 1, "--dry-run", "launch", "s.py", *words)
    assert (said.code, "--sort-key loss --key name --max_tokens 2048" in said.out) == (0, True)


@pytest.mark.usefixtures("place")
def test_a_password_in_a_url_of_env_stays_out_of_the_script(dsrun, sbatch):
    said = dsrun("submit", "--gpus-per-node", 1, *FINETUNE, "--env", "HF_ENDPOINT=https://u:hunter3x@h")
    assert (said.code, "hunter3x" in said.err) == (1, False)
    assert "the value of HF_ENDPOINT would stand in the script" in said.err
    assert not sbatch.called()


def test_a_refusal_is_passed_on_and_leaves_nothing(dsrun, place, sbatch):
    error = "sbatch: error: invalid partition specified: gpuu\nsbatch: error: Batch job submission failed: Invalid\n"
    sbatch(out="", err=error, code=1)
    words = ("submit", "--gpus-per-node", 1, "--output-dir", "a/b/run", *FINETUNE)
    said = dsrun(*words)
    assert said.code == 1
    assert (
        "dsrun: sbatch: invalid partition specified: gpuu; Batch job submission failed: Invalid\n" in said.err
    )
    assert not list(place.iterdir())
    sbatch()
    assert dsrun(*words).code == 0


def test_a_folder_of_somebodys_stays(dsrun, place, sbatch):
    (place / "a").mkdir()
    sbatch(out="", err="no", code=1)
    assert dsrun("submit", "--gpus-per-node", 1, "--output-dir", "a/run", *FINETUNE).code == 1
    assert [path.name for path in place.rglob("*")] == ["a"]


def test_no_sbatch(dsrun, place, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    said = dsrun("submit", "--gpus-per-node", 1, *FINETUNE)
    assert said.code == 1
    assert said.err.startswith("dsrun: there is no sbatch on PATH\n")
    assert not list(place.iterdir())


@pytest.mark.parametrize(("out", "job"), [("77;big\n", "77"), ("Welcome!\n77\n", "77")])
def test_forms_of_the_answer(dsrun, place, sbatch, out, job):
    sbatch(out=out, err="sbatch: your account is nearly empty\n")
    said = dsrun("submit", "--gpus-per-node", 1, *FINETUNE)
    assert said.code == 0
    assert said.out.startswith(f"job         {job}:")
    assert said.err == "note: sbatch: your account is nearly empty\n"


def test_an_answer_without_a_job(dsrun, place, sbatch):
    sbatch(out="Submitted\n")
    said = dsrun("submit", "--gpus-per-node", 1, *FINETUNE)
    assert said.code == 1
    assert "which is no job's id" in said.err


def test_a_folder_takes_one_job(dsrun, place, sbatch):
    words = ("submit", "--gpus-per-node", 1, "--output-dir", "run", *FINETUNE)
    assert dsrun(*words).code == 0
    said = dsrun(*words)
    assert said.code == 1
    assert "a job was sent from here already" in said.err
    (place / "run" / "job.json").write_text("{}")
    said = dsrun(*words)
    assert (said.code, "holds a run already" in said.err) == (1, True)


def test_a_run_is_continued(dsrun, place, sbatch):
    words = ("submit", "--gpus-per-node", 1, "--output-dir", "run", *FINETUNE, "--resume")
    said = dsrun(*words)
    assert (said.code, "holds no run to continue" in said.err) == (1, True)
    run = place / "run"
    run.mkdir()
    (run / "job.json").write_text("{}")
    (run / "submit.sbatch").write_text("the first one")
    sbatch(out="", err="no", code=1)
    assert dsrun(*words).code == 1
    assert sorted(path.name for path in run.iterdir()) == ["job.json", "submit.sbatch"]
    assert (run / "submit.sbatch").read_text() == "the first one"
    sbatch()
    assert dsrun(*words).code == 0
    text = sbatch.got()["text"]
    assert last_line(text)[-1] == "--resume"
    assert "--continue" not in text
    (run / "run.json").write_text('{"state": "finished"}')
    said = dsrun(*words)
    assert (said.code, "is finished" in said.err) == (1, True)


def test_a_run_may_be_continued_by_hand(dsrun, place, sbatch):
    words = ("submit", "--gpus-per-node", 1, "--output-dir", "run", *FINETUNE, "--continue")
    assert dsrun(*words).code == 0
    assert last_line(sbatch.got()["text"]).count("--continue") == 1
    (place / "run" / "job.json").write_text("{}")
    assert dsrun(*words).code == 0
    (place / "run" / "run.json").write_text('{"state": "finished"}')
    said = dsrun(*words)
    assert (said.code, "is finished" in said.err) == (1, True)


def test_resume_needs_a_folder(dsrun, place, sbatch):
    said = dsrun("submit", "--gpus-per-node", 1, *FINETUNE, "--resume")
    assert (said.code, "--output-dir RUN" in said.err) == (2, True)


def test_a_script_is_sent(dsrun, place, sbatch):
    (place / "train.py").write_text("")
    said = dsrun(
        "submit", "--gpus-per-node", 2, "launch", "train.py", "--output-dir", "out", "--hostfile", "x"
    )
    assert said.code == 0, said.err
    words = last_line(sbatch.got()["text"])[3:]
    assert words[:2] == ["launch", "--output-dir"]
    assert words[-5:] == ["train.py", "--output-dir", "out", "--hostfile", "x"], "the script's own options"


# Kubernetes

PODS = """
launcher = "kubernetes"
gpus_per_node = 4
time_limit_min = 60
interface = "eth0"
[kubernetes]
image = "lab/dsrun:1"
claim = "runs"
mount_path = MOUNT
secret = "tokens"
secret_variables = ["HF_TOKEN"]
python = "/opt/python"
[environment]
OUR_SCRATCH = "/s$HOME"
"""


@pytest.fixture
def pods(place):
    """A cluster whose volume this machine sees, too, below the folder with the hostile name."""
    mount = place / "mount"
    mount.mkdir()
    text = PODS.replace("MOUNT", json.dumps(str(mount), ensure_ascii=False))
    (place / "k8s.toml").write_text(text, encoding="utf-8")
    return mount


def kubernetes(dsrun, *words):
    return dsrun("submit", "--cluster", "./k8s.toml", *words)


def test_pods_get_a_manifest(dsrun, pods, monkeypatch):
    """Nothing is sent; the text fits the schema, and the command in it is one that dsrun takes."""
    (pods / "x").mkdir()
    monkeypatch.chdir(pods / "x")
    (pods / "x" / "train.py").write_text("")
    said = dsrun(
        "submit", "--cluster", "../../k8s.toml", "--nodes", 3, "--output-dir", "Run 1", "--time", "10",
        "launch", "train.py", "--output-dir", "$HOME",
    )  # fmt: skip
    assert (said.code, said.err) == (0, "send it: kubectl apply -f -\n")
    made = yaml.safe_load(said.out)
    schema = catalog.shipped_root() / "launch/schemas/pytorchjob.v1.schema.json"
    jsonschema.Draft202012Validator(json.loads(schema.read_text(encoding="utf-8"))).validate(made)
    assert made["metadata"]["name"] == "run-1"
    assert made["spec"]["runPolicy"]["activeDeadlineSeconds"] == 600
    replicas = made["spec"]["pytorchReplicaSpecs"]
    assert {role: replica["replicas"] for role, replica in replicas.items()} == {"Master": 1, "Worker": 2}
    (container,) = replicas["Worker"]["template"]["spec"]["containers"]
    assert container["workingDir"] == str(pods / "x")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert env == {
        "OUR_SCRATCH": "/s$$HOME", "NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0", "HF_TOKEN": None,
    }  # fmt: skip
    assert container["command"] == [
        "/opt/python", "-m", "dsrun", "launch", "--output-dir", str(pods / "x" / "Run 1"), "--launcher", "kubernetes",
        "--continue", "train.py", "--output-dir", "$$HOME",
    ]  # fmt: skip
    found = cli.get_command(None, "launch").make_context("launch", container["command"][4:])
    assert (found.params["launcher"], found.params["go_on"]) == ("kubernetes", True)


def test_a_manifest_goes_into_a_file(dsrun, pods, place):
    words = ("--output", "it's.yaml", *FINETUNE)
    said = kubernetes(dsrun, "--dry-run", *words)
    assert said.code == 0
    assert said.out.startswith("apiVersion: kubeflow.org/v1\n")
    assert not (place / "it's.yaml").exists()
    said = kubernetes(dsrun, "--json", *words)
    assert (said.code, said.err) == (0, "send it: kubectl apply -f 'it'\"'\"'s.yaml'\n")
    told = json.loads(said.out)
    assert told["manifest"] == yaml.safe_load((place / "it's.yaml").read_text(encoding="utf-8"))
    assert Path(told["run_dir"]).parent == pods / "runs"
    said = kubernetes(dsrun, *words)
    assert (said.code, "it's.yaml" in said.err) == (1, True)


def test_paths_that_pods_do_not_see_are_reported_together(dsrun, pods, place):
    (place / "lora.toml").write_text("")
    said = kubernetes(
        dsrun, "--output-dir", pods / ".." / "run", "finetune", "./model", "--train-file", "a.jsonl",
        "--eval-file", pods / "b.jsonl", "--preset", "./lora.toml", "--env", "WANDB_API_KEY=secret1",
        "--env", "HF_TOKEN", "--env", "OUR_SCRATCH", "--env", "NOWHERE",
    )  # fmt: skip
    assert said.code == 1
    told = [line for line in said.err.splitlines() if line.startswith("dsrun:")]
    for line, words in zip(
        told,
        (
            "--output-dir",
            "--train-file",
            "MODEL",
            "--preset",
            "the value of WANDB_API_KEY",
            "NOWHERE is not set",
        ),
        strict=True,
    ):
        assert words in line
    assert "secret1" not in said.err
    said = kubernetes(dsrun, "launch", "train.py")
    assert (said.code, "SCRIPT: 'train.py' is not on the pods' volume" in said.err) == (1, True)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(("words", "option"), WITH_SECRETS)
def test_secret_arguments_stay_out_of_the_manifest(dsrun, pods, words, option):
    said = kubernetes(dsrun, "launch", pods / "s.py", *words)
    assert (said.code, said.out) == (1, "")
    assert f"dsrun: {option}: what looks like a secret would stand in the manifest" in said.err
    assert "secret_variables" in said.err
    assert not any(secret in said.err for secret in ("hunter3x", "aB3dE6gH9jK2"))


def test_what_lies_on_the_volume_is_looked_at_where_it_is_seen(dsrun, pods):
    words = (*FINETUNE, "--train-file", pods / "no.jsonl")
    said = kubernetes(dsrun, "--output-dir", pods / "run", *words)
    assert (said.code, "no.jsonl: no such file" in said.err) == (1, True)
    (pods / "run").mkdir()
    (pods / "run" / "job.json").write_text("{}")
    said = kubernetes(dsrun, "--output-dir", pods / "run", *FINETUNE)
    assert (said.code, "holds a run already" in said.err) == (1, True)
    assert kubernetes(dsrun, "--output-dir", pods / "run", *FINETUNE, "--continue").code == 0
    (pods / "run" / "job.json").unlink()
    (pods / "run").rmdir()
    pods.rmdir()
    said = kubernetes(dsrun, *words)
    assert said.code == 0
    assert said.err.startswith(f"note: {pods} is not on this machine")
    said = kubernetes(dsrun, *words, "--lr", "1", "--set", "a.b=1")
    assert (said.code, "--set" in said.err) == (1, True)
    assert (
        kubernetes(
            dsrun, "finetune", "llama-2-7b", "--model-path", pods / "llama", "--train-file", pods / "x"
        ).code
        == 0
    )


@pytest.mark.usefixtures("pods")
@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--qos", "q"], 2, "--qos: k8s is a cluster of Kubernetes, and that is Slurm's"),
        (["--job-name", "A b"], 1, "--job-name: 'A b'"),
        (["--gpus-per-node", 8, "--nodes", 2, "--time", "2h"], 1, "--time: can't be '2h'"),
    ],
)
def test_what_kubernetes_can_not_take(dsrun, options, code, message):
    said = kubernetes(dsrun, *options, *FINETUNE)
    assert said.code == code
    assert message in said.err


@pytest.mark.usefixtures("place")
def test_only_a_manifest_has_a_file(dsrun):
    said = dsrun("submit", "--gpus-per-node", 1, "--output", "x.yaml", *FINETUNE)
    assert (said.code, "--output is for a manifest" in said.err) == (2, True)


def test_what_kubernetes_refuses_is_reported_with_the_clusters_file(dsrun, pods, place):
    path = place / "k8s.toml"
    path.write_text(
        path.read_text(encoding="utf-8").replace("lab/dsrun:1", "a b").replace('"runs"', '"R"'),
        encoding="utf-8",
    )
    said = kubernetes(dsrun, *FINETUNE)
    assert said.code == 1
    assert "k8s.toml: kubernetes.image: " in said.err
    assert "k8s.toml: kubernetes.claim: " in said.err


def test_help_imports_nothing_heavy(imported):
    assert not imported("submit", "--help") & {"torch", "transformers", "deepspeed", "jinja2", "rich"}


def test_pods_name_no_checkpoint(dsrun, pods):
    """Each start of a pod would go back to it."""
    (pods / "run").mkdir()
    said = kubernetes(dsrun, *FINETUNE, "--output-dir", pods / "run", "--resume", "--checkpoint", 2)
    assert (said.code, "would go back there each time" in said.err) == (2, True), said.err
