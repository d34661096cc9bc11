"""What the checker in the documentation asks of dsrun: with Python alone, no process, no thread, no device."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import dsrun as interface
from dsrun import browser
from dsrun.config.reading.scripts import suffix_of

ROOT = Path(__file__).resolve().parents[1]
CHECKER = ROOT / "docs" / "checker"
ALONE = """
import sys
from importlib.abc import MetaPathFinder

LACKING = {"_multiprocessing", "_posixshmem", "_uuid", "curses", "dbm", "grp", "pwd", "resource", "syslog"}
REFUSED = ("subprocess.Popen", "os.fork", "os.exec", "os.posix_spawn", "_thread.start_new_thread", "socket.__new__")

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in LACKING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def refused(event, _):
    if event in REFUSED:
        raise RuntimeError(f"{event} in a browser")

for name in LACKING & set(sys.modules):
    del sys.modules[name]
sys.meta_path.insert(0, Absent())
sys.addaudithook(refused)
from dsrun.browser import answer
for line in sys.stdin:
    print(answer(line))
"""
"""A program that answers as in a browser: modules that its Python lacks are absent, and no process, thread or
connection can be started."""
REQUESTS = {
    "choices": {"command": "choices"},
    "config": {"command": "validate", "text": '{"train_batch_sise": 8}', "gpu": "v100-32g", "world_size": 8},
    "YAML": {"command": "validate", "text": "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 4}\n"},
    "script": {"command": "validate", "text": "import deepspeed\nconfig = {'train_batch_size': 'x'}\n"},
    "plan": {"command": "plan", "model": "llama-7b", "gpu": "v100-32g", "gpus": 2},
    "layouts": {"command": "plan", "model": "llama-2-70b", "gpu": "a100-80g", "layouts": True, "seq_len": 2048},
    "inference": {"command": "plan", "model": "llama-3-8b", "gpu": "rtx-4090", "purpose": "inference"},
    "log": {"command": "diagnose", "texts": ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"]},
    "rule": {"command": "explain", "name": "ds221", "language": "zh_CN"},
    "library": {"command": "explain", "name": "transformers.TrainingArguments", "parameter": "evaluation_strategy"},
    "nothing": {"command": "explain", "name": "DS999"},
}  # fmt: skip


def pinned() -> set[str]:
    """The packages that the browser gets, and what the installed versions of these need."""
    text = (ROOT / "requirements" / "browser.txt").read_text(encoding="utf-8")
    names, waiting = set(), re.findall(r"^([\w.-]+)==", text, re.MULTILINE)
    while waiting:
        name = waiting.pop()
        try:
            needed = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # an installed jsonschema does without it
            continue
        if name not in names:
            names.add(name)
            waiting += [re.match(r"[\w.-]+", row)[0] for row in needed if "extra ==" not in row]
    return names


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages")
    for name in pinned():
        for file in metadata.files(name):
            top = (
                Path(file.locate()).parents[len(file.parts) - 2]
                if len(file.parts) > 1
                else Path(file.locate())
            )
            if ".." not in file.parts and not (folder / top.name).exists():
                (folder / top.name).symlink_to(top)
    lines = "".join(json.dumps(request) + "\n" for request in REQUESTS.values())
    done = subprocess.run(
        [sys.executable, "-S", "-c", ALONE], input=lines, capture_output=True, text=True, check=False, cwd=folder,
        env={"HOME": str(folder), "PYTHONPATH": f"{folder}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(zip(REQUESTS, map(json.loads, done.stdout.splitlines()), strict=True))


def test_everything_is_answered_without_what_a_browser_lacks(answers):
    assert [name for name, answer in answers.items() if "value" not in answer] == ["nothing"]
    assert answers["nothing"]["problems"] == [
        {"where": "", "what": "there is no rule DS999", "hint": "`dsrun explain` lists them."}
    ]
    assert answers["config"]["value"] == interface.validate(
        {"train_batch_sise": 8}, gpu="v100-32g", world_size=8, deepspeed_version=newest(answers)
    )
    assert {row["file"] for row in answers["YAML"]["value"]["findings"]} == {"config.yaml"}
    assert {row["line"] for row in answers["script"]["value"]["findings"]} == {2}
    assert any("transformers" in note and "formula" in note for note in answers["plan"]["value"]["notes"])
    assert answers["log"]["value"]["cause"] == "gpu_oom"
    assert re.search("[\u4e00-\u9fff]", answers["rule"]["value"]["lines"][0])


def newest(answers):
    """The release that the page offers first."""
    return answers["choices"]["value"]["versions"][0]


def test_the_fields_offer_what_can_be_asked(answers):
    offered = answers["choices"]["value"]
    plan = interface.plan(min(offered["models"]), gpu=min(offered["gpus"]), trace=False)
    assert plan["plans"]
    for version in offered["versions"]:
        assert "findings" in interface.validate({}, deepspeed_version=version)


def test_without_a_card_a_browser_is_told_to_name_one(monkeypatch):
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setattr(sys, "platform", "emscripten")
    (problem,) = json.loads(browser.answer('{"command": "plan", "model": "llama-7b"}'))["problems"]
    assert "--gpu" in problem["hint"]


@pytest.mark.parametrize(
    ("text", "suffix"),
    [
        ('{"a": 1}', ".json"), ("// a comment\n{}", ".json"), ("", ".json"), ("epoch 1 done", ".json"),
        ("a: 1\nb:\n  - 2\n", ".yaml"), ("---\n# c\ndeepspeed_config:\n  zero_stage: 3\n", ".yaml"),
        ("#!/bin/bash\nx: 1\n", ".sh"), ("#!/usr/bin/env python3\n", ".py"),
        ("set -e\ncat > ds.json <<EOF\n{}\nEOF\n", ".sh"), ("#SBATCH -N 2\nsrun python train.py\n", ".sh"),
        ("CUDA_VISIBLE_DEVICES=0 deepspeed train.py --x\n", ".sh"),
        ("config = {'a': 1}\n", ".py"), ("from x import y\ny(\n", ".py"),
    ],
)  # fmt: skip
def test_a_text_without_a_name_is_known_by_its_lines(text, suffix):
    assert suffix_of(text) == suffix


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("launch.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 7\n"),
        ("run.sh", '#!/bin/sh\ncat > ds.json <<E\n{"train_batch_size": 0}\nE\ndeepspeed x.py --deepspeed ds.json\n'),
        ("train.py", "config = {'train_batch_size': -1}\n"),
    ],
)  # fmt: skip
def test_a_text_is_judged_as_the_file_would_be(dsrun, tmp_path, monkeypatch, name, text):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text, encoding="utf-8")
    shown = json.loads(dsrun("validate", name, "--json").out)
    assert shown["findings"]
    assert interface.validate(text, name=name) == interface.validate(Path(name)) == shown
    unnamed = interface.validate(text)["findings"]
    assert [row["message"] for row in unnamed] == [row["message"] for row in shown["findings"]]


def test_a_text_that_is_no_config_is_refused_by_what_it_is():
    with pytest.raises(interface.DsrunError, match="mkdocs' site, and holds no DeepSpeed config"):
        interface.validate("site_name: x\nnav: []\n")


def test_explain_says_what_the_command_says(dsrun, monkeypatch):
    monkeypatch.setenv("LC_ALL", "C")
    for name in (
        "DS203",
        "$.zero_optimization.stage",
        "gpu-oom",
        "zero2-small-gradients",
        "signatures",
        "versions",
    ):
        value = interface.explain(name)
        assert value == json.loads(dsrun("explain", name, "--json").out)
        assert "\n".join(value["lines"]) + "\n" == dsrun("explain", name).out
    assert interface.explain()["kind"] == "rules"


def test_the_page_has_every_text_in_both_languages():
    texts = json.loads((CHECKER / "texts.json").read_text(encoding="utf-8"))
    script = (CHECKER / "checker.js").read_text(encoding="utf-8")
    form = (CHECKER / "checker.html").read_text(encoding="utf-8")
    assert texts["en"].keys() == texts["zh"].keys()
    used = set(re.findall(r"\btexts\.(\w+)", script)) | set(re.findall(r"\{(\w+)\}", form))
    assert used - {"language", "assets", "texts"} <= texts["en"].keys()


def test_a_site_without_the_checker_says_so(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    module = hooks.in_browser()
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    assert "isn't built into" in hooks.checker("en", "../checker") and "没有编入" in hooks.checker(
        "zh", "../checker"
    )
    (tmp_path / module.MANIFEST).write_text(json.dumps({"sources": "others"}), encoding="utf-8")
    assert "made of other sources" in hooks.checker("en", "../checker")
    (tmp_path / module.MANIFEST).write_text(
        json.dumps({"sources": module.sources_digest()}), encoding="utf-8"
    )
    built = hooks.checker("zh", "../../checker")
    assert 'src="../../checker/checker.js"' in built and "检查" in built and "{" + "config}" not in built
