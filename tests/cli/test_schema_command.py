from __future__ import annotations

import json

import jsonschema
import pytest

from dsrun.config.schemas import schema


def test_it_is_a_schema(dsrun):
    found = json.loads(dsrun("schema").out)
    jsonschema.Draft202012Validator.check_schema(found)
    validator = jsonschema.Draft202012Validator(found)
    assert validator.is_valid({"train_batch_size": 8, "zero_optimization": {"stage": 2}})
    assert not validator.is_valid({"train_batch_size": "many"})


@pytest.mark.parametrize("version", schema.versions(), ids=lambda version: ".".join(map(str, version)))
def test_every_version(dsrun, version):
    said = dsrun("schema", "--deepspeed-version", ".".join(map(str, version)))
    assert (said.code, said.err) == (0, "")
    assert json.loads(said.out) == schema.load(version).root


def test_into_a_file(dsrun, tmp_path):
    path = tmp_path / "组" / "schema.json"
    assert dsrun("schema", "-o", path).code == 1
    path.parent.mkdir()
    said = dsrun("schema", "-o", path)
    assert (said.code, said.out) == (0, "")
    assert json.loads(path.read_text(encoding="utf-8")) == schema.load().root
    said = dsrun("schema", "-o", path, "--deepspeed-version", "0.14")
    assert said.code == 1
    assert "--force" in said.err
    assert dsrun("schema", "-o", path, "--deepspeed-version", "0.14", "--force").code == 0
    assert json.loads(path.read_text(encoding="utf-8")) == schema.load((0, 14)).root


def test_an_unknown_version(dsrun):
    said = dsrun("schema", "--deepspeed-version", "0.1")
    assert (said.code, said.out) == (1, "")
    assert "0.9 to 0.19" in said.err


def test_stdout(dsrun):
    for name in ("-", "/dev/stdout"):
        said = dsrun("schema", "-o", name)
        assert json.loads(said.out) == schema.load().root


def test_nothing_heavy_is_imported(imported):
    assert not imported("schema") & {"torch", "deepspeed", "jsonschema", "yaml", "jinja2", "rich"}
