"""`dsrun validate` of what is no DeepSpeed config: said what it is, and its configs are judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dsrun.cli.validate import command
from dsrun.errors import DsrunError

BAD = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
"""DS221."""


@pytest.fixture
def validate(tmp_path, monkeypatch):
    """`validate(text, name, *options)`: the command's result on a file in a folder with a space in its name."""
    folder = tmp_path / "a b"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def run(text, name, *options):
        (folder / name).write_text(text, encoding="utf-8")
        return CliRunner().invoke(command, [name, *options])

    return run


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("model_name_or_path: m\nstage: sft\ntemplate: x\ncutoff_len: 9\n", "a.yaml", "LLaMA-Factory"),
        ("base_model: m\nsequence_len: 9\nadapter: lora\n", "a.yml", "axolotl"),
        ("apiVersion: v1\nkind: Pod\n", "pod.yaml", "Kubernetes"),
        ("site_name: x\n", "mkdocs.yml", "mkdocs"),
        ("hello: world\n", "h.yaml", "no file that dsrun knows, with the keys hello"),
        ('{"compilerOptions": {}}', "tsconfig.json", "tsconfig"),
        ('{"architectures": ["X"], "model_type": "llama", "hidden_size": 8}', "config.json", "a model's config.json"),
        ("echo hi\n", "a.sh", "starts no training"),
    ],
)  # fmt: skip
def test_what_is_no_config_is_not_clean(validate, text, name, says):
    done = validate(text, name)
    assert isinstance(done.exception, DsrunError), done.output
    assert done.exception.exit_code == 1
    assert says in str(done.exception)


def test_a_trainers_yaml_leads_to_the_config_that_it_names(validate, tmp_path):
    (tmp_path / "a b" / "ds.json").write_text(json.dumps(BAD), encoding="utf-8")
    done = validate("model_name_or_path: m\nstage: sft\ntemplate: x\ndeepspeed: ds.json\n", "sft.yaml")
    assert "DS221" in done.stdout
    assert "looks like a training of LLaMA-Factory's; checked: " in " ".join(done.stderr.split())


def test_a_named_config_that_is_gone_is_told(validate):
    done = validate("model_name_or_path: m\nstage: sft\ntemplate: x\ndeepspeed: gone.json\n", "sft.yaml")
    assert "names gone.json, which isn't here" in str(done.exception)


def test_a_config_in_a_heredoc_and_the_one_that_is_named(validate, tmp_path):
    (tmp_path / "a b" / "other.json").write_text(json.dumps(BAD), encoding="utf-8")
    script = f"cat <<EOF > 'ds.json'\n{json.dumps(BAD)}\nEOF\ndeepspeed t.py --deepspeed_config ds.json\n"
    done = validate(script, "a.sh", "--json")
    assert [Path(finding["file"]).name for finding in json.loads(done.stdout)["findings"]] == ["a.sh"]
    done = validate(script.replace("_config ds", "_config other"), "a.sh", "--json")
    assert len({finding["file"] for finding in json.loads(done.stdout)["findings"]}) == 2


def test_a_dict_in_python_is_read_without_running_it(validate):
    text = (
        "import os\nraise SystemExit\nCONFIG = {'train_batch_size': 8, 'fp16': {'enabled': True},\n"
        "  'zero_optimization': {'stage': 2, 'offload_param': {'device': 'cpu'}}}\nOTHER = {'a': {'b': 1}}\n"
    )
    done = validate(text, "train.py", "--select", "DS221")
    assert "train.py:4" in done.stdout


def test_fix_leaves_such_a_file_alone(validate, tmp_path):
    text = f"CONFIG = {BAD!r}\n"
    done = validate(text, "train.py", "--fix", "--unsafe-fixes")
    assert (tmp_path / "a b" / "train.py").read_text(encoding="utf-8") == text
    assert "DS221" in done.output


def test_accelerates_yaml_is_judged_as_ever(validate):
    done = validate(
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {zero_stage: 7}\n", "acc.yaml"
    )
    assert "$.deepspeed_config.zero_stage" in done.stdout


def test_the_less_severe_are_counted_as_they_are_shown(validate):
    text = "distributed_type: MULTI_GPU\nnum_processes: 2\nunknown_key: 1\n"
    counts = []
    for level in ("error", "note"):
        done = validate(text, "acc.yaml", "--level", level)
        counts.append(done.output)
    shown = counts[1].count("  DS")
    hidden = f"{shown - counts[0].count('  DS')} less severe"
    assert hidden in counts[0] or hidden.startswith("0")


def test_fp16_on_cpus_is_told(validate):
    done = validate('{"train_batch_size": 8, "fp16": {"enabled": true}}', "ds.json", "--gpu", "cpu")
    assert "DS329" in done.output
