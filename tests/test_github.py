"""What lies in the repository for the places where people work: an action, a hook, issue forms, images, a release."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dsrun.json_outputs import VERSIONS

ROOT = Path(__file__).resolve().parents[1]
GITHUB = ROOT / ".github"
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
NAMED = {
    "ds_config.json": True, "ds_config_zero3.json": True, "ds_z3_offload_config.json": True, "deepspeed.json": True,
    "deepspeed_zero2.json": True, "deepspeed_config.json": True, "ds_zero3.json": True, "tsconfig.json": False,
    "config.json": False, "deepspeed.schema.json": False, "ads_config.json": False, "ds_dataset.json": False,
    "deepspeech.json": False, "package.json": False, "DeepSpeedExamples.json": False,
}  # fmt: skip


def run_action(tmp_path: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """The action's step with some inputs, as GitHub hands them over."""
    dsrun = tmp_path / "dsrun"
    dsrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m dsrun "$@"\n', encoding="utf-8")
    dsrun.chmod(0o755)
    (step,) = [step for step in ACTION["runs"]["steps"] if "validate.sh" in step["run"]]
    values = {name: given.get("default", "") for name, given in ACTION["inputs"].items()} | inputs
    environ = {
        name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda match: values[match[1]], text)
        for name, text in step["env"].items()
    }
    return subprocess.run(
        ["bash", "-c", step["run"]],
        env={**os.environ, **environ, "GITHUB_ACTION_PATH": str(ROOT), "DSRUN": str(dsrun)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def configs(tmp_path):
    (tmp_path / "good one.json").write_text('{"train_micro_batch_size_per_gpu": 1}', encoding="utf-8")
    (tmp_path / "bad.json").write_text('{"train_batch_sise": 1}', encoding="utf-8")
    return tmp_path


def test_the_action_shows_findings_beside_their_lines(configs):
    done = run_action(configs, files="good one.json\nbad.json")
    assert done.returncode == 1, done.stderr
    assert "::error" in done.stdout and "file=bad.json" in done.stdout
    assert run_action(configs, files="good one.json").returncode == 0


def test_the_actions_inputs_are_words_and_never_shell(configs):
    done = run_action(
        configs, files="good one.json\n$(touch pwned); `touch pwned`", arguments="--level\nnote"
    )
    assert not (configs / "pwned").exists()
    assert done.returncode and "no such file" in (done.stdout + done.stderr).lower()


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"files": ""}, "files: name a config or a folder"),
        ({"files": "bad.json", "strict": "yes"}, "strict: true or false, not yes"),
        ({"files": "bad.json", "deepspeed-version": "0.1"}, "0.1"),
    ],
)
def test_the_action_refuses_what_it_does_not_know(configs, inputs, words):
    done = run_action(configs, **inputs)
    assert done.returncode and words in done.stderr + done.stdout


def test_every_input_of_the_action_reaches_the_step():
    (step,) = [step for step in ACTION["runs"]["steps"] if "validate.sh" in step["run"]]
    used = re.findall(r"inputs\.([\w-]+)", " ".join(step["env"].values()))
    script = (GITHUB / "validate.sh").read_text(encoding="utf-8")
    assert sorted(used) == sorted(ACTION["inputs"])
    assert all(f"${{{name}:-" in script for name in step["env"])
    assert "${{" not in step["run"], "an input in the script would be read as shell"


@pytest.mark.parametrize("name", NAMED)
def test_editors_take_configs_for_configs(name):
    """SchemaStore's patterns without a folder hold for a file's own name, and mind the case."""
    patterns = json.loads((GITHUB / "schemastore.json").read_text(encoding="utf-8"))["fileMatch"]
    assert any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) == NAMED[name]


@pytest.mark.parametrize("name", [name for name, wanted in NAMED.items() if wanted])
def test_the_hook_takes_what_editors_take(name):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert re.search(hook["files"], name) and not re.search(hook["exclude"], name)


@pytest.mark.parametrize(
    "path", sorted((GITHUB / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda path: path.name
)
def test_issue_forms_ask_for_what_machines_can_read(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form["name"] and form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    asked = re.findall(r"dsrun (\w+) --json", " ".join(field["attributes"]["label"] for field in fields))
    assert asked and set(asked) <= set(VERSIONS)


def test_images_copy_nothing_that_is_not_there():
    for path in (GITHUB / "docker").iterdir():
        text = path.read_text(encoding="utf-8")
        assert "USER user" in text, "nobody trains as root"
        assert all((ROOT / name).is_file() for name in re.findall(r"/src/(\S+\.txt)", text))
        assert path.name in text, "the comment's own command"


# A release


@pytest.fixture
def checkout(tmp_path):
    from tools import release

    (tmp_path / "dsrun").mkdir()
    (tmp_path / "dsrun/__init__.py").write_text('__version__ = "1.2.3"\n', encoding="utf-8")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [1.2.3] - 2026-12-01\n", encoding="utf-8")
    return release, tmp_path


def test_a_tag_says_the_packages_version(checkout):
    release, root = checkout
    release.check_tag("v1.2.3", root)
    for tag in ("1.2.3", "v1.2.4", "v1.2.3rc1"):
        with pytest.raises(SystemExit, match=r"says 1\.2\.3"):
            release.check_tag(tag, root)
    (root / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"no section \[1\.2\.3\]"):
        release.check_tag("v1.2.3", root)


def test_a_package_names_the_repository_that_it_is_released_from(checkout):
    import configparser

    release, _ = checkout
    setup = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    config = configparser.ConfigParser()
    config.read_string(release.with_urls(setup, "https://github.com/lab/dsrun"))
    urls = dict(line.split(" = ") for line in config["metadata"]["project_urls"].strip().splitlines())
    assert urls["Source"] == "https://github.com/lab/dsrun"
    assert urls["Changelog"].endswith("/CHANGELOG.md") and len(urls) == 4
    assert config["options"]["python_requires"] == ">=3.10"
    for address in ("http://github.com/lab/dsrun", "https://github.com/lab", "https://x/y/z\n[options]"):
        with pytest.raises(SystemExit, match="no https address"):
            release.with_urls(setup, address)


def test_what_is_supported_is_what_setup_cfg_allows():
    sys.path.insert(0, str(ROOT / "tests"))
    from lowest import bounds

    page = (ROOT / "docs/reference/stability.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\w+) \| ([\d.]+) \|", page, re.MULTILINE))
    assert len(rows) >= 6
    lowest = {name: version for name, (version, _) in bounds().items()} | {"Python": "3.10"}
    assert rows == {name: lowest[name] for name in rows}
