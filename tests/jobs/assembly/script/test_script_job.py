"""A user's script: how its source takes a config, what is planned, and how its ranks' output is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from asking import script_request

from dsrun.cluster.devices import Machine
from dsrun.errors import DsrunError
from dsrun.job import run_folder
from dsrun.job.job import ScriptJob
from dsrun.job.job import read as read_job
from dsrun.jobs.assembly.script import plan
from dsrun.jobs.assembly.script import source as script_source
from dsrun.jobs.assembly.script.repeat import repeated
from dsrun.jobs.launchers.common import environment
from dsrun.jobs.runs import past_runs, run_summaries
from dsrun.jobs.supervision.display.script_view import ScriptView

RAW = """
import argparse, deepspeed
parser = argparse.ArgumentParser()
parser.add_argument("--epochs")
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
deepspeed.initialize(args=args, model=None)
"""
TRAINER = """
import sys
from transformers import HfArgumentParser, Seq2SeqTrainingArguments, Trainer
from arguments import ModelArguments
parser = HfArgumentParser((ModelArguments, Seq2SeqTrainingArguments))
if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
    parser.parse_json_file(sys.argv[1])
parser.parse_args_into_dataclasses()
"""
OWN_CONFIG = RAW.replace("model=None", "model=None, config={'train_batch_size': 8}")
DOTLIST = """
import sys
from omegaconf import OmegaConf
from transformers import HfArgumentParser, TrainingArguments
CLASSES = [TrainingArguments]
def read():
    if sys.argv[1].endswith(".yaml"):
        return OmegaConf.from_cli(sys.argv[2:])
HfArgumentParser(CLASSES)
"""
OPTION = """
import argparse, deepspeed
parser = argparse.ArgumentParser()
parser.add_argument("-c", "--ds-config", type=str)
args = parser.parse_args()
deepspeed.initialize(model=None, config=args.ds_config)
"""
SWITCHED = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed", action="store_true")
parser.add_argument("--deepspeed_config", type=str)
"""
FILES = ("--deepspeed",)

# source, who reads the config, the ways it is taken
SOURCES = {
    "add_config_arguments": (RAW, "deepspeed", (("--deepspeed", "--deepspeed_config"),)),
    "imported": (
        RAW.replace("deepspeed.add_config", "add_config"), "deepspeed", (("--deepspeed", "--deepspeed_config"),),
    ),
    "HfArgumentParser": (TRAINER, "hf", (FILES,)),
    "a list of classes": (DOTLIST, "hf", (FILES,)),
    "a subclass": (
        "from transformers import HfArgumentParser, TrainingArguments\nclass Mine(TrainingArguments): pass\n"
        "HfArgumentParser([Mine])", "hf", (FILES,),
    ),
    "one class": (
        "import transformers\ntransformers.HfArgumentParser(transformers.TrainingArguments)", "hf", (FILES,),
    ),
    "trl": ("from trl import TrlParser, SFTConfig\nTrlParser((SFTConfig,))", "hf", (FILES,)),
    "HfArgumentParser of others": (
        "from transformers import HfArgumentParser\nfrom mine import A\nHfArgumentParser((A,))", None, (),
    ),
    "TrainingArguments in the code": (
        "from transformers import TrainingArguments, Trainer\nTrainer(args=TrainingArguments('out'))", "hf", (),
    ),
    "TrainingArguments from an option": (
        "import argparse\nfrom transformers import TrainingArguments\np = argparse.ArgumentParser()\n"
        "p.add_argument('--deepspeed')\na = p.parse_args()\nTrainingArguments('out', deepspeed=a.deepspeed)",
        "hf", (FILES,),
    ),
    "an option": (OPTION, "deepspeed", (("--ds-config",),)),
    "click": (
        "import click\n@click.option('--ds-config-path')\ndef main(): pass", "deepspeed", (("--ds-config-path",),),
    ),
    "a switch and an option": (SWITCHED, "deepspeed", (("--deepspeed", "--deepspeed_config"),)),
    "a switch alone": (SWITCHED.replace('"--deepspeed_config", type=str', '"--x"'), None, ()),
    "its own config": (OWN_CONFIG, "deepspeed", (("--deepspeed", "--deepspeed_config"),)),
    "nothing": ("print('hello')", None, ()),
    "two": (
        "p.add_argument('--ds_config')\np.add_argument('--deepspeed-config')", "deepspeed",
        (("--ds_config",), ("--deepspeed-config",)),
    ),
}  # fmt: skip


@pytest.fixture
def planned(work, machine):
    """`planned(text, *args, preset=..., **fields)`: the plan of a script with this text."""

    def make(text: str, *args: str, force: bool = False, on: Machine = machine, **given):
        (work / "train.py").write_text(text, encoding="utf-8")
        asked = {"gpus": 2, "output_dir": Path("run"), "force": force, **given}
        return plan(script_request("train.py", args, **asked), on, os.environ)

    return make


def refused(planned, *words, **given) -> str:
    with pytest.raises(DsrunError) as error:
        planned(*words, **given)
    return str(error.value)


@pytest.mark.parametrize("name", SOURCES)
def test_sources(work, name):
    text, reader, ways = SOURCES[name]
    (work / "train.py").write_text(text, encoding="utf-8")
    found = script_source.of_script(work / "train.py")
    assert (found.reader, found.ways) == (reader, ways)


def test_of_pythons_own_library_one_file_is_read(monkeypatch):
    import json.tool

    read = []
    parsed = script_source.parsed
    monkeypatch.setattr(script_source, "parsed", lambda path: read.append(path) or parsed(path))
    path, root = script_source.module_file("json.tool", [str(Path(json.tool.__file__).parents[1])])
    found = script_source.of_module(path, root)
    assert read == [path]
    assert not found.wants_deepspeed and "argparse" in found.imports


def test_the_parser_is_found_among_the_modules_beside_it(work):
    lab = work / "lab" / "args"
    lab.mkdir(parents=True)
    (work / "train.py").write_text("def main():\n    from lab.run import go\n    go()\n")
    (work / "lab" / "run.py").write_text("import deepspeed\nfrom .args import parse\n")
    (lab / "__init__.py").write_text("from .parser import parse\nfrom . import parser, broken\n")
    (lab / "broken.py").write_text("not python")
    (lab / "parser.py").write_text(TRAINER + "import lab.run\n")
    found = script_source.of_script(work / "train.py")
    assert (found.reader, found.ways, found.argv_file) == ("hf", (FILES,), True)
    path, root = script_source.module_file("lab.args.parser", [str(work)])
    assert (path, root) == (lab / "parser.py", work)
    assert script_source.of_module(path, root).ways == (FILES,)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere", "no module"),
        ("train.py", "leave out -m"),
        ("json.nothing", "can be run"),
        ("os.path", "no package"),
    ],
)
def test_modules_that_are_not_there(work, machine, name, words):
    (work / "train.py").write_text("")
    with pytest.raises(DsrunError, match=words):
        plan(script_request(name, module=True, gpus=1), machine, os.environ)


def test_a_plain_script(planned, work):
    job = planned("print(1)", "--x", "a b").job
    assert job == ScriptJob(
        run_dir=str(work / "run"), script="train.py", args=("--x", "a b"), cwd=str(work), accelerator="cpu",
        hosts=job.hosts, dsrun_version=job.dsrun_version, local_rank=False, plain=True,
    )  # fmt: skip
    assert job.world_size == 2
    assert planned("print(1)", output_dir=None).job.run_dir.startswith(str(work / "runs" / "train-2"))


def test_preset_for_deepspeed(planned, work):
    found = planned(RAW, "--epochs", "1", preset="zero2", micro_batch=3)
    file = str(work / "run" / "deepspeed.json")
    assert found.job.args == ("--epochs", "1", "--deepspeed", "--deepspeed_config", file)
    assert found.job.ds_config["train_batch_size"] == 6
    assert not any(value == "auto" for value in found.job.ds_config.values())
    assert any("micro batch 3" in note for note in found.notes)
    assert planned(RAW, "--deepspeed", "--", "x", preset="zero2").job.args == (
        "--deepspeed", "--deepspeed_config", file, "--", "x",
    )  # fmt: skip


def test_preset_for_the_trainer(planned, work):
    found = planned(TRAINER, "--output_dir", "out", preset="zero3")
    assert found.job.args == ("--output_dir", "out", "--deepspeed", str(work / "run" / "deepspeed.json"))
    assert found.job.ds_config["train_batch_size"] == "auto"
    text = refused(planned, TRAINER, "--per_device_train_batch_size", "2", preset="zero3", micro_batch=4)
    assert "per_device_train_batch_size" in text
    assert planned(TRAINER, "--per_device_train_batch_size=4", preset="zero3", micro_batch=4).job.ds_config


def test_preset_by_hand(planned, work):
    file = str(work / "run" / "deepspeed.json")
    assert planned("print(1)", preset="zero1", config_option="--ds").job.args == ("--ds", file)
    assert planned("print(1)", preset="zero1", config_option="ds=").job.args == (f"ds={file}",)


REFUSED = {
    "none": ("print(1)", (), "--config-option NAME"),
    "several": (SOURCES["two"][0], (), "--ds_config FILE or --deepspeed-config FILE"),
    "its own": (OWN_CONFIG, (), "train.py:7"),
    "named already": (RAW, ("--deepspeed", "--deepspeed_config", "my.json"), "--deepspeed_config my.json"),
    "named with =": (TRAINER, ("--deepspeed=my.json",), "--deepspeed my.json"),
    "a file of arguments": (TRAINER, ("args.json",), "takes its arguments from args.json"),
    "named in the file": (DOTLIST, ("with.yaml",), "with.yaml: deepspeed z3.json"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_presets_that_can_not_be_handed_over(planned, work, name):
    text, args, words = REFUSED[name]
    (work / "with.yaml").write_text("deepspeed: z3.json\n")
    said = refused(planned, text, *args, preset="zero2")
    assert said.startswith("--preset: ")
    assert words in said


def test_a_file_of_arguments(planned, work):
    (work / "args.yaml").write_text("lr: 1\n")
    found = planned(DOTLIST, "args.yaml", preset="zero2")
    assert found.job.args == ("args.yaml", f"deepspeed={work / 'run' / 'deepspeed.json'}")
    assert not found.job.local_rank, "the script looks for the file in the first place"
    assert any("--local_rank" in note for note in found.notes)
    assert planned(DOTLIST, "args.yaml", local_rank=True).job.local_rank
    assert planned(DOTLIST, "--lr", "1", preset="zero2").job.local_rank


TRAINER_ALONE = """
import sys
from transformers import HfArgumentParser, TrainingArguments, Trainer
parser = HfArgumentParser(TrainingArguments)
if sys.argv[1].endswith(".yaml"):
    parser.parse_yaml_file(sys.argv[1])
parser.parse_args_into_dataclasses()
"""
NEEDS_NONE = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr')\n"


@pytest.mark.parametrize(
    ("text", "args", "given", "plain", "local_rank"),
    [
        (NEEDS_NONE, (), {}, True, False),
        (NEEDS_NONE + "parser.add_argument('--local_rank')", (), {}, True, True),
        (NEEDS_NONE, (), {"local_rank": True}, True, True),
        (NEEDS_NONE + "import deepspeed.comm", (), {}, False, True),
        (RAW, (), {}, False, True),
        (TRAINER, ("--use_cpu", "true"), {}, True, False),
        (TRAINER, (), {"preset": "zero2"}, False, True),
        ("import lab.args\n" + NEEDS_NONE, (), {}, True, False),
        (
            "from transformers import TrainingArguments\nTrainingArguments('o', deepspeed='x.json')",
            (),
            {},
            False,
            True,
        ),
    ],
)
def test_deepspeeds_launcher_is_for_those_who_want_it(planned, text, args, given, plain, local_rank):
    job = planned(text, *args, **given).job
    assert (job.plain, job.local_rank) == (plain, local_rank)
    variables = environment.of_ranks(job, {})
    assert ("DS_ACCELERATOR" in variables) == (not plain)


@pytest.mark.parametrize(
    ("text", "args", "given", "refusal"),
    [
        (TRAINER_ALONE, (), {}, True),
        (TRAINER_ALONE, ("--use_cpu", "true"), {}, False),
        (TRAINER_ALONE, ("--use_cpu", "false"), {}, True),
        (TRAINER_ALONE, (), {"gpus": 1}, False),
        (TRAINER_ALONE, (), {"env": ("ACCELERATE_USE_CPU=true",)}, False),
        (TRAINER_ALONE, ("args.yaml",), {}, False),
        (TRAINER_ALONE + "TrainingArguments('out', use_cpu=True)", (), {}, False),
        ("from transformers import TrainingArguments\nTrainingArguments('out')", (), {}, False),
    ],
)
def test_cpu_ranks_of_a_trainer_see_each_other(planned, work, text, args, given, refusal):
    """Where its arguments are not all on the command line nobody knows what they say."""
    (work / "args.yaml").write_text("use_cpu: true\n")
    if refusal:
        assert "--use_cpu true" in refused(planned, text, *args, **given)
    else:
        planned(text, *args, **given)


def test_another_python(planned, tmp_path):
    """Everything is asked of it: it has no torch, and this one's is no help."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    job = planned(NEEDS_NONE, python=python).job
    assert (job.python, job.plain) == (str(python), True)
    variables = environment.of_ranks(job, {"PATH": "/usr/bin"})
    assert variables["PATH"] == f"{python.parent}:/usr/bin"
    assert "TORCH_EXTENSIONS_DIR" not in variables
    text = refused(planned, NEEDS_NONE + "import torch, deepspeed", python=python)
    assert "lacks torch, deepspeed" in text
    assert f"{python} -m pip install torch deepspeed" in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no such file"),
        ("", "can't be run"),
        ("#!/bin/sh\necho hello", "no Python that answers"),
        ("#!/bin/sh\nexit 3", "no Python that answers"),
        (
            '#!/bin/sh\necho \'{"version": "3.6.9 (default)", "path": [], "prefix": "/"}\'',
            "3.8 is the oldest",
        ),
    ],
)
def test_pythons_that_are_none(planned, work, text, words):
    if text is not None:
        (work / "python").write_text(text)
        (work / "python").chmod(0o755 if text else 0o644)
    assert words in refused(planned, NEEDS_NONE, python=Path("python"))
    assert "is a folder" in refused(planned, NEEDS_NONE, python=work)


GOOD = '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}'
BAD = '{"train_micro_batch_size_per_gpu": 1,\n "zero_optimization": {"stage": 7}}'


@pytest.mark.parametrize(
    ("text", "args"),
    [
        (RAW, ("--deepspeed", "--deepspeed_config", "ds.json")),
        (RAW, ("--deepspeed_config=ds.json",)),
        (TRAINER, ("--deepspeed", "ds.json", "--per_device_train_batch_size", "1")),
        (OPTION, ("--ds-config", "ds.json")),
        ("print(1)", ("--deepspeed", "ds.json")),
        (DOTLIST, ("args.yaml", "deepspeed=ds.json")),
        (DOTLIST, ("args.yaml",)),
    ],
)
def test_the_scripts_own_config_is_validated(planned, work, text, args):
    (work / "args.yaml").write_text("deepspeed: ds.json\n")
    (work / "ds.json").write_text(GOOD)
    assert planned(text, *args).job.args == args
    (work / "ds.json").write_text(BAD)
    said = refused(planned, text, *args)
    assert "ds.json:2:" in said
    assert "stage" in said
    assert any("--force" in note for note in planned(text, *args, force=True).notes)
    (work / "ds.json").unlink()
    assert "no such file" in refused(planned, text, *args)


OF_THE_TRAINER = {
    "fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}, "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "args", "config"),
    [
        (
            RAW,
            ("--deepspeed", "--deepspeed_config", "ds.json"),
            {"fp16": {"enabled": True}, "train_batch_size": 2},
        ),
        (TRAINER, ("--deepspeed", "ds.json", "--fp16"), OF_THE_TRAINER),
    ],
    ids=["the config's", "the Trainer's"],
)
def test_fp16_in_the_scripts_own_config_is_refused_on_a_cpu_without(
    planned, work, monkeypatch, text, args, config
):
    on = Machine("cpu", (), 4, "no GPU")
    (work / "ds.json").write_text(json.dumps(config))
    monkeypatch.setattr("dsrun.cluster.cpu_types.has_fp16", lambda: False)
    said = refused(planned, text, *args, on=on)
    assert "fp16, which this CPU can't train in" in said and "ds.json" in said
    monkeypatch.setattr("dsrun.cluster.cpu_types.has_fp16", lambda: True)
    assert planned(text, *args, on=on).job.args == args
    (work / "ds.json").write_text(json.dumps({**config, "fp16": {"enabled": False}}))
    monkeypatch.setattr("dsrun.cluster.cpu_types.has_fp16", lambda: False)
    assert planned(text, *[word for word in args if word != "--fp16"], on=on).job


def test_a_config_by_hand_is_validated(planned, work):
    (work / "x").write_text(BAD)
    assert "x:2:" in refused(planned, "print(1)", "-c", "x", config_option="-c")
    assert planned("print(1)", "-c", "x").job.args == ("-c", "x")


def test_json_in_place_of_a_file(planned):
    assert "per_device_train_batch_size is 8" in refused(planned, TRAINER, "--deepspeed", GOOD)
    assert planned(TRAINER, "--deepspeed", GOOD, "--per-device-train-batch-size", "1").job
    assert "stage" in refused(planned, TRAINER, "--deepspeed", BAD)


def test_all_problems_at_once(planned, work):
    (work / "run").mkdir()
    (work / "run" / "job.json").write_text("{}")
    said = refused(planned, "print(1", "--deepspeed", "no.json", lr=1.0, gpus=9)
    for words in ("--lr: ", "train.py:1: is not Python", "no.json", "holds a run already", "--gpus 9"):
        assert words in said, said


@pytest.mark.parametrize(
    ("script", "words"), [("trian.py", "train.py"), ("lab", "is not a file"), ("json", "with -m")]
)
def test_scripts_that_are_none(work, machine, script, words):
    (work / "lab").mkdir()
    (work / "train.py").write_text("")
    with pytest.raises(DsrunError, match=words):
        plan(script_request(script, gpus=1), machine, os.environ)


def test_auto_needs_a_model(planned):
    assert "dsrun plan" in refused(planned, RAW, preset="auto")


def test_a_job_that_is_read_again(planned, work):
    job = planned(RAW, preset="zero2").job
    (work / "job.json").write_text(job.to_json(), encoding="utf-8")
    assert read_job(work / "job.json") == job


def test_repeated(planned, work, machine, dsrun):
    job = planned(RAW, "--epochs", "1", preset="zero2").job
    run_dir = work / "run"
    with run_folder.held(run_dir):
        (run_dir / "job.json").write_text(job.to_json(), encoding="utf-8")
        run_folder.write_state(run_dir, "failed")
    found = past_runs.read(run_dir)
    again = repeated(found, found.script, machine, os.environ, output_dir=work / "second").job
    file = str(work / "second" / "deepspeed.json")
    assert again == replace(job, run_dir=str(work / "second"), args=(*job.args[:-1], file))
    beside = repeated(found, found.script, machine, os.environ).job
    assert beside.run_dir.startswith(f"{run_dir}-2")
    with pytest.raises(DsrunError, match="dsrun rerun"):
        _ = found.job
    said = dsrun("rerun", run_dir, "--force")
    assert said.code == 2
    assert "--force is for a fine-tune" in said.err
    (work / "train.py").unlink()
    with pytest.raises(DsrunError, match="is gone"):
        repeated(found, found.script, machine, os.environ)


# What the ranks print


class Clock:
    """A view's run folder, whose time one sets."""

    def __init__(self, folder, monkeypatch, ranks: int) -> None:
        self.logs = folder / "logs"
        self.logs.mkdir()
        self.lines: list[str] = []
        self.now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        self.view = ScriptView(folder, ranks, self.lines.append)

    def say(self, rank: int, text: str) -> None:
        with (self.logs / f"rank-{rank}.log").open("a", encoding="utf-8") as log:
            log.write(text)

    def look(self, after_s: float = 0.2) -> tuple[bool, list[str]]:
        self.now += after_s
        self.lines.clear()
        return self.view(), [*self.lines]


@pytest.fixture
def clock(tmp_path, monkeypatch):
    return lambda ranks: Clock(tmp_path, monkeypatch, ranks)


def test_what_all_ranks_say_is_told_once(clock):
    seen = clock(2)
    assert seen.look() == (False, [])
    seen.say(0, "loading\nalone\n")
    assert seen.look() == (True, []), "the other rank may still say it"
    seen.say(1, "loading\n")
    assert seen.look() == (True, ["loading"])
    assert seen.look(1.5) == (False, ["[rank 0] alone"])
    seen.say(1, "")
    assert seen.look() == (False, [])


def test_one_rank_needs_no_name(clock):
    seen = clock(1)
    seen.say(0, "step 1\nste")
    assert seen.look() == (True, ["step 1"])
    with seen.view:
        pass
    assert seen.lines == ["step 1", "ste"], "at the end, half a line is one"


def test_signs_of_life(clock):
    seen = clock(1)
    seen.say(0, "")
    assert seen.look()[0], "the rank has begun"
    seen.say(0, " 10%|#   \r")
    assert seen.look() == (True, [])
    assert not seen.look()[0]


def test_summary_of_a_scripts_run(planned, work):
    run_dir = work / "run"
    job = planned(RAW, preset="zero2").job
    with run_folder.held(run_dir):
        (run_dir / "job.json").write_text(job.to_json(), encoding="utf-8")
        run_folder.write_state(run_dir, "finished", result={"restarts": 2})
    (one,) = run_summaries.summaries([run_dir])
    assert (one.state, one.model, one.preset, one.ranks) == ("finished", "train.py", "zero2", 2)
    assert (one.steps, one.total_steps, one.loss) == (None, None, None)
    assert past_runs.read(run_dir).restarts == 2
    assert json.loads((run_dir / "job.json").read_text())["kind"] == "script"


def test_what_an_earlier_start_has_said_is_not_told(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").write_text("old\n")
    lines: list[str] = []
    view = ScriptView(tmp_path, 1, lines.append)
    with (tmp_path / "logs" / "rank-0.log").open("a") as log:
        log.write("new\n")
    with view:
        pass
    assert lines == ["new"]


def test_started_once_more_in_its_folder(planned, work, machine):
    (work / "run").mkdir()
    job = planned("print(1)").job
    (work / "run" / "job.json").write_text(job.to_json(), encoding="utf-8")
    assert "holds a run already" in refused(planned, "print(1)")
    request = script_request(gpus=2, output_dir=Path("run"), again=True)
    assert plan(request, machine, os.environ).job == job


@pytest.mark.parametrize(
    "line",
    [
        'os.environ["CUDA_VISIBLE_DEVICES"] = "0"', 'os.putenv("CUDA_VISIBLE_DEVICES", "0")',
        'os.environ.update({"CUDA_VISIBLE_DEVICES": "0"})', 'os.environ.update(CUDA_VISIBLE_DEVICES="0")',
    ],
)  # fmt: skip
def test_a_script_that_chooses_its_devices_itself(tmp_path, line):
    path = tmp_path / "train.py"
    path.write_text(f"import os\n{line}\n")
    assert script_source.of_script(path).sets_devices == f"{path}:2"


def test_a_script_that_reads_its_devices(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        'import os\nprint(os.environ["CUDA_VISIBLE_DEVICES"])\nos.environ["X"] = "CUDA_VISIBLE_DEVICES"\n'
    )
    assert not script_source.of_script(path).sets_devices


# Names that the installed packages don't have


GONE = "import argparse\nimport transformers\nargparse.ArgumentParser()\n"


@pytest.fixture
def transformers_5(monkeypatch):
    from dsrun import packages

    monkeypatch.setattr(packages, "installed", lambda path=None: {"transformers": "5.23.0"})


def test_a_name_that_is_gone_refuses_the_job_before_its_start(planned, transformers_5):
    with pytest.raises(DsrunError) as caught:
        planned(f"{GONE}optimizer = transformers.AdamW\n")
    (problem,) = [problem for problem in caught.value.problems if problem.where == "train.py:4"]
    assert problem.what.startswith("transformers.AdamW is not in transformers 5.23.0")
    assert "torch.optim.AdamW" in problem.hint


def test_a_name_that_is_gone_is_a_note_where_it_may_never_be_reached(planned, transformers_5):
    notes = planned(f"{GONE}def later():\n    return transformers.AdamW\n").notes
    assert any(note.startswith("train.py:5: transformers.AdamW is not in") for note in notes)


def test_a_module_beside_the_script_is_read_too(planned, work, transformers_5):
    (work / "models.py").write_text("from transformers import TFAutoModel\n", encoding="utf-8")
    with pytest.raises(DsrunError, match=r"TFAutoModel is not in transformers 5\.23\.0"):
        planned(f"{GONE}import models\n")
    assert any("models.py:1" in note for note in planned(f"{GONE}import models\n", force=True).notes)
