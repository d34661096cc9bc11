"""`dsrun finetune` and `dsrun models`: what is answered before anything is started."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from running import needs_libaio

from dsrun import catalog
from dsrun.config.presets.preset import load
from dsrun.job import run_folder
from dsrun.job.job import Job
from dsrun.models import model_files

ROOT = catalog.PACKAGE.parent
HEAVY = {"torch", "deepspeed", "transformers", "accelerate", "datasets", "tokenizers", "numpy"}
HOOK = """
import atexit, os, sys
sys.path.insert(0, os.environ.pop("TEST_ROOT"))
report = os.environ.pop("TEST_MODULES")
atexit.register(lambda: open(report, "w").write("\\n".join(sys.modules)))
import dsrun.cli
dsrun.cli.main(sys.argv[1:])
"""


@pytest.fixture
def work(tmp_path):
    """The folder that commands run in; its name is a hostile one."""
    folder = tmp_path / "a user's 工作"
    folder.mkdir()
    return folder


@pytest.fixture
def places(tmp_path, work):
    """The environment of a CPU machine with an empty cache and home."""
    for name in ("home", "cache", "tmp"):
        (tmp_path / name).mkdir()
    return {
        "HOME": str(tmp_path / "home"), "DSRUN_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "tmp"),
        "DS_ACCELERATOR": "cpu", "PATH": os.environ["PATH"],
    }  # fmt: skip


@pytest.fixture
def ask(dsrun, places, work, monkeypatch):
    """`ask(*args)`: dsrun in this process, on a CPU machine with an empty cache and home."""
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.chdir(work)

    def run(*args: object, **environ: str):
        for name, value in {**places, **environ}.items():
            monkeypatch.setenv(name, value)
        return dsrun(*args)

    return run


def alone(args, work, environ, root=ROOT) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """dsrun in a process of its own; also the modules that it imported."""
    report = work.parent / "modules"
    done = subprocess.run(
        [sys.executable, "-c", HOOK, *map(str, args)], check=False, capture_output=True, text=True, cwd=work,
        env={**environ, "TEST_ROOT": str(root), "TEST_MODULES": str(report)}, timeout=60,
    )  # fmt: skip
    return done, {name.partition(".")[0] for name in report.read_text().split()}


@pytest.mark.parametrize(
    ("code", "args"),
    [
        (1, ("finetune", "llama-tiny", "--train-file", "columns.jsonl", "--response-column", "answer")),
        (2, ("finetune", "llama-tiny", "--gpus", "0")),
        (0, ("finetune", "--help-all")),
        (0, ("finetune", "llama-tiny", "--dry-run", "--json")),
        (0, ("models",)),
    ],
    ids=["bad input", "wrong usage", "help", "dry run", "models"],
)
def test_nothing_heavy_is_imported(places, data, code, args):
    done, modules = alone(args, data, places)
    assert done.returncode == code, done.stderr
    assert not modules & HEAVY


@pytest.fixture
def data(work):
    """Files to train on, good and bad."""
    files = {
        "train.jsonl": '{"content": "类型#裙", "summary": "一条裙子。"}\n' * 9,
        "columns.jsonl": '{"question": "a", "answer": "b"}\n',
        "empty.jsonl": "",
        "nothing.jsonl": '{"content": "", "summary": ""}\n',
        "broken.json": '{"content": ',
        "data.xlsx": "x",
    }
    for name, text in files.items():
        (work / name).write_text(text, encoding="utf-8")
    (work / "busy").mkdir()
    (work / "busy" / "thesis.tex").touch()
    (work / "a folder").mkdir()
    return work


@pytest.fixture
def untouched(tmp_path, ask, data):
    """Afterwards nothing may have been made or changed."""

    def content():
        return sorted((str(path), path.stat().st_size) for path in tmp_path.rglob("*"))

    before = content()
    yield
    assert content() == before


BAD = {
    "unknown model": (("chatglm2-tinny",), ["'chatglm2-tinny'", "'chatglm2-tiny'", "dsrun models"]),
    "unknown preset": (("llama-tiny", "--preset", "zero2-ofload"), ["'zero2-ofload'", "'zero2-offload'"]),
    "missing file": (
        ("llama-tiny", "--train-file", "trian.jsonl"),
        ["trian.jsonl: no such file", "train.jsonl"],
    ),
    "missing evaluation file": (
        ("llama-tiny", "--train-file", "train.jsonl", "--eval-file", "dev.jsonl"),
        ["dev.jsonl: no such file"],
    ),
    "missing column": (
        ("llama-tiny", "--train-file", "columns.jsonl", "--response-column", "answer"),
        ["'content'", "question, answer", "--prompt-column"],
    ),
    "empty file": (("llama-tiny", "--train-file", "empty.jsonl"), ["empty.jsonl: holds no rows"]),
    "empty rows": (("llama-tiny", "--train-file", "nothing.jsonl"), ["nothing.jsonl", "empty"]),
    "not JSON": (("llama-tiny", "--train-file", "broken.json"), ["broken.json", "JSON"]),
    "another kind": (("llama-tiny", "--train-file", "data.xlsx"), ["'.xlsx'", ".jsonl"]),
    "a folder as data": (("llama-tiny", "--train-file", "a folder"), ["a folder"]),
    "output folder in use": (("llama-tiny", "--output-dir", "busy"), ["busy: is not empty", "--output-dir"]),
    "a file as output folder": (("llama-tiny", "--output-dir", "train.jsonl"), ["is not a folder"]),
    "too many ranks": (("llama-tiny", "--gpus", "9999"), ["--gpus 9999", "CPU core", "Use --gpus"]),
    "no such device": (("llama-tiny", "--devices", "0,9999"), ["--devices", "9999", "Choose from"]),
    "devices twice": (("llama-tiny", "--devices", "0", "--gpus", "1"), ["--devices 0 and --gpus 1"]),
    "NVMe without a path": (("llama-tiny", "--preset", "zero3-nvme"), ["zero3-nvme", "--nvme-path"]),
    "no data": (("llama-7b", "--force"), ["--train-file"]),
    "no such folder": (("./none", "--train-file", "train.jsonl"), ["none: no such folder"]),
    "a folder without a model": (("./a folder", "--train-file", "train.jsonl"), ["holds no config.json"]),
    "a bad config key": (("llama-tiny", "--set", "stage=1"), ["--set", "zero_optimization.stage"]),
    "resume of nothing": (("llama-tiny", "--resume", "--output-dir", "none"), ["no run to continue"]),
    "resume of no folder": (("llama-tiny", "--resume"), ["--output-dir"]),
    "a name too long for a file": (("llama-tiny", "--train-file", "x" * 300 + ".jsonl"), ["xxx"]),
}


def test_ranks_share_cores_where_that_is_forced(ask):
    cores = len(os.sched_getaffinity(0))
    answer = ask(
        "finetune",
        "llama-tiny",
        "--gpus",
        2 * cores,
        "--force",
        "--dry-run",
        "--json",
        "--global-batch",
        4 * cores,
    )
    assert answer.code == 0, answer.err
    assert len(json.loads(answer.out)["job"]["hosts"][0]["devices"]) == 2 * cores
    assert f"{2 * cores} CPU ranks share {cores} CPU core" in answer.err


@pytest.mark.parametrize(
    ("size", "says"),
    [(None, "this is plain ZeRO-3"), (2, "shared by all 2 ranks"), (4, "shared by all 2 ranks")],
)
def test_a_second_copy_that_saves_nothing_is_noted(ask, size, says):
    more = () if size is None else ("--set", f"zero_optimization.zero_hpz_partition_size={size}")
    answer = ask("finetune", "llama-tiny", "--gpus", "2", "--preset", "zero3-hpz", *more, "--dry-run")
    assert answer.code == 0, answer.err
    assert says in answer.err + answer.out
    assert "ZeRO-3" not in ask("finetune", "llama-tiny", "--gpus", "2", "--preset", "zero3", "--dry-run").err


NEEDS_NO_ADVICE = {
    "empty rows", "a file as output folder", "a folder as data", "another kind", "a name too long for a file",
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_message(ask, untouched, case):
    args, words = BAD[case]
    answer = ask("finetune", *args)
    assert (answer.code, answer.out) == (1, ""), answer.err
    assert all(word in answer.err for word in words), answer.err
    assert len(re.findall(r"^dsrun: ", answer.err, re.MULTILINE)) == 1, answer.err
    assert "Traceback" not in answer.err
    if case not in NEEDS_NO_ADVICE:
        assert re.search(r"\n  +\S", answer.err), f"what to do next stands indented below: {answer.err}"


def test_all_problems_are_reported_at_once(ask, untouched):
    answer = ask(
        "finetune", "lama-tiny", "--train-file", "trian.jsonl", "--gpus", 9999, "--preset", "zero3-nvme",
        "--output-dir", "busy",
    )  # fmt: skip
    assert (answer.code, answer.out) == (1, "")
    for words in ("lama-tiny", "trian.jsonl", "--gpus 9999", "--nvme-path", "busy"):
        assert words in answer.err
    assert answer.err.count("dsrun: ") == 5


@pytest.mark.parametrize(
    "args",
    [
        (), ("llama-tiny", "--gpus", "0"), ("llama-tiny", "--lr", "0"), ("llama-tiny", "--epochs", "-1"),
        ("llama-tiny", "--precision", "int8"), ("llama-tiny", "--epochs", "1", "--max-steps", "3"),
        ("llama-tiny", "--nonsense"), ("llama-tiny", "--save-steps", "0"), ("llama-tiny", "--seed", "x"),
    ],
)  # fmt: skip
def test_wrong_usage(ask, untouched, args):
    answer = ask("finetune", *args)
    assert (answer.code, answer.out) == (2, "")
    assert "Usage" in answer.err


@pytest.mark.parametrize("lr", ["nan", "inf"])
def test_a_learning_rate_that_is_no_number(ask, untouched, lr):
    answer = ask("finetune", "llama-tiny", "--lr", lr)
    assert answer.code in {1, 2}
    assert "--lr" in answer.err
    assert "bug in dsrun" not in answer.err


@pytest.mark.parametrize("epochs", ["nan", "inf"])
def test_epochs_that_are_no_number(ask, untouched, epochs):
    answer = ask("finetune", "llama-tiny", "--epochs", epochs, "--dry-run")
    assert answer.code in {1, 2}
    assert "--epochs" in answer.err


def test_help_names_every_option_of_the_field(ask, untouched):
    answer = ask("finetune", "--help-all")
    assert answer.code == 0
    for option in (
        "--preset", "--gpus", "--devices", "--hostfile", "--hosts", "--nodes", "--include", "--exclude", "--launcher",
        "--no-check", "--master-addr", "--master-port", "--env",
        "--train-file", "--eval-file", "--prompt-column", "--response-column",
        "--max-source-length", "--max-target-length", "--micro-batch", "--grad-accum", "--lr", "--epochs",
        "--max-steps", "--seed", "--save-steps", "--output-dir", "--model-path", "--resume", "--dry-run", "--json",
    ):  # fmt: skip
        assert option in answer.out


@pytest.mark.parametrize("setting", ["tensor_parallel.autotp_size=2", "sequence_parallel_size=2"])
def test_a_technique_that_the_loop_does_not_do_is_refused_before_the_rest_of_the_config(ask, setting):
    answer = ask("finetune", "llama-tiny", "--gpus", "2", "--dry-run", "--set", setting)
    assert answer.code == 1
    assert setting.split("=", maxsplit=1)[0] in answer.err
    assert "DS101" not in answer.err


# --dry-run


@pytest.fixture
def dry_run(ask, untouched):
    def run(*args: object, **environ: str) -> dict:
        answer = ask("finetune", *args, "--dry-run", "--json", **environ)
        assert answer.code == 0, answer.err
        return json.loads(answer.out)

    return run


def test_a_dry_run_is_complete_and_writes_nothing(dry_run, work):
    shown = dry_run(
        "llama-tiny", "--preset", "zero3", "--train-file", "train.jsonl", "--output-dir", "out put"
    )
    job = Job.from_json(json.dumps(shown["job"]), "stdout")
    assert job.run_dir == str(work / "out put")
    assert (job.preset, job.zero_stage, job.world_size) == ("zero3", 3, 2 if os.cpu_count() > 1 else 1)
    assert job.data.train_file == str(work / "train.jsonl")
    assert "auto" not in json.dumps(job.ds_config)
    assert shown["environment"]["DS_ACCELERATOR"] == "cpu"
    prepare, train = shown["commands"]
    assert str(work / "out put" / "job.json") in prepare
    assert "deepspeed.launcher.launch" in train
    assert int(train[train.index("--master_port") + 1]) > 1024


def test_a_dry_run_for_people_can_be_pasted_into_a_shell(ask, untouched, work):
    answer = ask("finetune", "llama-tiny", "--gpus", 1, "--dry-run", "--output-dir", "it's 输出")
    assert answer.code == 0
    config = answer.out[answer.out.index("# deepspeed.json\n") :].split("\n\n")[0].partition("\n")[2]
    assert json.loads(config)["zero_optimization"]["stage"] == 2
    assert "#   host       device  rank\n#   localhost       0     0\n" in answer.out
    lines = answer.out.splitlines()
    assert ["export", "DS_ACCELERATOR=cpu"] in [
        shlex.split(line) for line in lines if line.startswith("export ")
    ]
    prepare, train = map(shlex.split, lines[lines.index("# commands") + 1 :])
    assert str(work / "it's 输出" / "job.json") in prepare
    assert str(work / "it's 输出" / "job.json") in train


def test_a_dry_run_on_several_hosts(dry_run, ask):
    """The table of ranks, in the order in which they are named; nobody is asked."""
    given = (
        "--devices",
        "w2:1,0,w1:0",
        "--no-check",
        "--launcher",
        "openmpi",
        "--env",
        "A=b",
        "--master-port",
        2950,
        "--global-batch",
        9,
    )
    shown = dry_run("llama-tiny", *given)
    assert [list(row.values()) for row in shown["ranks"]] == [
        ["w2", "1", 0, 0],
        ["w2", "0", 1, 1],
        ["w1", "0", 2, 0],
    ]
    assert shown["job"]["launcher"] == "openmpi"
    assert (
        shown["job"]["ds_config"]["train_batch_size"]
        == 3 * shown["job"]["ds_config"]["train_micro_batch_size_per_gpu"]
    )
    assert len(shown["commands"]) == 3
    answer = ask("finetune", "llama-tiny", *given, "--dry-run")
    assert "#   host  device  rank\n#   w2         1     0\n" in answer.out
    assert "# on w1\n" in answer.out


def test_a_dry_run_from_a_hostfile(ask, dry_run, data):
    (data / "hostfile").write_text("# ours\nw1 slots=2\nw2 slots=2x\n", encoding="utf-8")
    answer = ask("finetune", "llama-tiny", "--hostfile", "hostfile", "--no-check", "--dry-run")
    assert (answer.code, "hostfile:3: " in answer.err) == (1, True)
    (data / "hostfile").write_text("w1 slots=2\nw2 slots=2\n", encoding="utf-8")
    named = dry_run("llama-tiny", "--hostfile", "hostfile", "--no-check", "-e", "w1:1", "--global-batch", 9)
    assert [row["host"] for row in named["ranks"]] == ["w1", "w2", "w2"]
    by_variable = dry_run("llama-tiny", "--no-check", "--nodes", 1, DSRUN_HOSTFILE=str(data / "hostfile"))
    assert [row["host"] for row in by_variable["ranks"]] == ["w1", "w1"]
    (data / "hostfile").unlink()


@pytest.mark.parametrize(("preset", "path"), catalog.files("presets").items())
def test_a_dry_run_of_every_preset(dry_run, ask, tmp_path, preset, path):
    if load(preset).rounds:  # between hosts with GPUs alone
        answer = ask("finetune", "llama-tiny", "--gpus", 1, "--preset", preset, "--dry-run")
        assert answer.code == 1 and "needs NVIDIA GPUs" in answer.err and "there is one host" in answer.err
        return
    nvme = ("--nvme-path", tmp_path) if "nvme" in path.read_text(encoding="utf-8") else ()
    if nvme:
        needs_libaio()
    shown = dry_run("llama-tiny", "--gpus", 1, "--preset", preset, *nvme)
    assert shown["job"]["preset"] == preset


def test_a_dry_run_of_a_model_downloads_nothing(dry_run):
    shown = dry_run("chatglm2-6b", "--train-file", "train.jsonl", "--gpus", 1)
    assert shown["job"]["model"]["source"] == "hub"
    assert shown["job"]["data"]["max_source_length"] == shown["job"]["data"]["max_target_length"] == 64
    assert shown["job"]["training"]["lr"] == 1e-4
    assert shown["job"]["ds_config"]["train_micro_batch_size_per_gpu"] == 4


def test_a_dry_run_of_a_resumed_run_names_its_checkpoint(ask, dry_run, data):
    """The very command that would start, checkpoint included."""
    shown = dry_run("llama-tiny", "--train-file", "train.jsonl", "--gpus", 1)
    run_dir = data / "died"
    checkpoint = run_dir / "checkpoints" / "step-5"
    try:
        checkpoint.mkdir(parents=True)
        (checkpoint / "complete").write_text("{}")
        (run_dir / "job.json").write_text(json.dumps({**shown["job"], "run_dir": str(run_dir)}))
        answer = ask("finetune", "llama-tiny", "--output-dir", "died", "--resume", "--dry-run", "--json")
        assert answer.code == 0, answer.err
        shown = json.loads(answer.out)
        assert shown["commands"][-1][-1] == "--resume"
        assert shown["resume_from"] == str(checkpoint)
        assert sorted(path.name for path in run_dir.iterdir()) == ["checkpoints", "job.json"]
    finally:
        import shutil

        shutil.rmtree(run_dir)


def test_warnings_are_no_part_of_the_result(ask, untouched):
    answer = ask(
        "finetune", "llama-tiny", "--dry-run", "--json", "--set", "zero_optimization.sub_group_size=1e8"
    )
    assert json.loads(answer.out)
    assert "sub_group_size" in answer.err


def test_a_folder_in_use_by_another_dsrun(ask, data):
    with run_folder.held(data / "running"):
        answer = ask("finetune", "llama-tiny", "--output-dir", "running")
    assert answer.code == 1
    assert "another dsrun" in answer.err


def test_a_fault_of_dsruns_own_keeps_its_traceback(places, tmp_path, data):
    done, _ = alone(("finetune", "llama-tiny"), data, places, broken(tmp_path))
    assert (done.returncode, done.stdout) == (3, "")
    assert "Traceback" not in done.stderr
    (path,) = (tmp_path / "tmp").glob("dsrun-traceback-*")
    assert str(path) in done.stderr
    assert "a fault on purpose" in path.read_text()


def broken(tmp_path) -> Path:
    """A copy of dsrun with a fault in it."""
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(catalog.PACKAGE, copy / "dsrun", ignore=shutil.ignore_patterns("__pycache__"))
    path = copy / "dsrun" / "cluster" / "devices.py"
    path.write_text(
        path.read_text(encoding="utf-8") + "\n\ndef detect(_):\n    1 / 0  # a fault on purpose\n"
    )
    return copy


def test_a_cache_that_can_not_be_written(ask, tmp_path):
    (tmp_path / "file").touch()
    said = ask("finetune", "llama-tiny", "--dry-run", DSRUN_CACHE=str(tmp_path / "file" / "cache"))
    assert said.code == 1
    assert "the cache can't be written" in said.err and "DSRUN_CACHE" in said.err


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_stdout_and_a_closed_one(work, unbuffered):
    """Both are the shell's doing (> file, >&-), and neither is a bug."""
    line = shlex.join([sys.executable, "-m", "dsrun", "preset"])
    for place, code in (("> /dev/full", 1), (">&-", 0)):
        words = ["sh", "-c", f"{line} {place}"]
        done = subprocess.run(
            words,
            cwd=work,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code
        assert "internal" not in done.stderr
        assert ("full" in done.stderr) == bool(code)


def test_a_folder_that_is_gone(ask, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    said = ask("finetune", "llama-tiny", "--dry-run")
    assert said.code == 1
    assert "cd ." in said.err and "internal" not in said.err


# dsrun models


def test_models(ask, untouched):
    answer = ask("models")
    assert (answer.code, answer.err) == (0, "")
    names = [line.split()[0] for line in answer.out.splitlines()]
    assert set(names) == set(model_files.names())
    assert re.search(r"^chatglm2-6b +6\.2B +\S", answer.out, re.MULTILINE)
    assert re.search(r"^llama-2-70b +69\.0B +\S", answer.out, re.MULTILINE)


def test_models_as_json(ask, untouched):
    rows = json.loads(ask("models", "--json").out)["models"]
    assert {row["name"] for row in rows} == set(model_files.names())
    by_name = {row["name"]: row for row in rows}
    assert by_name["chatglm2-6b"]["parameters"] == 6_243_584_000
    assert by_name["llama-tiny"]["repository"] is None
    mixture = by_name["qwen3-30b-a3b"]
    assert (mixture["experts"], mixture["experts_per_token"], mixture["kv_heads"]) == (128, 8, 4)
    assert by_name["qwen3-8b"]["experts"] is None
    assert all({"name", "parameters", "summary", "repository"} <= set(row) for row in rows)


def test_facts_of_one_model(ask, untouched):
    answer = ask("models", "llama-4-scout-17b-16e")
    assert (answer.code, answer.err) == (0, "")
    for fact in (
        r"parameters +108,641,793,536 \(108\.6B\)", "context +10,485,760 tokens", "experts +16 a block, 1 a token",
        "heads +40, 8 of keys and values", r"licence +\S", r"source +\S",
    ):  # fmt: skip
        assert re.search(f"^{fact}", answer.out, re.MULTILINE), fact
    (row,) = json.loads(ask("models", "llama-4-scout-17b-16e", "--json").out)["models"]
    assert (row["layers"], row["hidden_size"], row["prompt_format"]) == (48, 5120, "chat-template")


def test_facts_of_an_unknown_name(ask, untouched):
    answer = ask("models", "qwen3-8")
    assert (answer.code, answer.out) == (1, "")
    assert "qwen3-8b" in answer.err


@pytest.mark.parametrize("words", [("--checkpoint", "2"), ("--no-digests",)])
def test_only_a_run_that_goes_on_has_a_checkpoint(dsrun, words):
    said = dsrun("finetune", "llama-tiny", *words)
    assert (said.code, "are for a run that goes on: --resume" in said.err) == (2, True)
