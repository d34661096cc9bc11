"""How the file of schemas is made from DeepSpeed's code, and that it is current."""

from __future__ import annotations

import copy
import json
import os
import tarfile
from pathlib import Path

import pytest

from dsrun.config import tree
from dsrun.config.schemas import schema
from dsrun.errors import DsrunError
from tools.schemas import generate
from tools.schemas.source import ReleaseSource, TypedClass

OVERLAY = json.loads(generate.OVERLAY.read_text(encoding="utf-8"))


def test_the_file_is_current(deepspeed, capsys):
    assert generate.main(["--check"]) == 0, capsys.readouterr().out
    assert capsys.readouterr().out == ""


def test_check_shows_what_is_out_of_date(deepspeed, capsys, monkeypatch, tmp_path):
    stale = tmp_path / generate.SCHEMAS.name
    text = generate.SCHEMAS.read_text(encoding="utf-8")
    current = '"default": {"until 0.19.2": 0, "since 0.19.3": 1}'
    assert text.count(current) == 1
    wrong = current.replace('"since 0.19.3": 1}', '"since 0.19.3 until 0.19.7": 1, "since 0.19.8": 5}')
    stale.write_text(text.replace(current, wrong), encoding="utf-8")
    monkeypatch.setattr(generate, "SCHEMAS", stale)
    assert generate.main(["--check"]) == 1
    changed = [line for line in capsys.readouterr().out.splitlines() if 'until 0.19.2": 0, ' in line]
    assert [(line[0], line[-2]) for line in changed] == [("-", "5"), ("+", "1")]
    assert generate.main([]) == 0
    assert stale.read_text(encoding="utf-8") == text


def refused(overlay):
    """Places where the generation stops."""
    with pytest.raises(DsrunError) as caught:
        generate.schemas([ReleaseSource.installed()], overlay)
    return {problem.where for problem in caught.value.problems}


def test_a_key_that_the_overlay_lacks_stops_the_generation(deepspeed):
    overlay = copy.deepcopy(OVERLAY)
    del overlay["properties"]["aio"]["properties"]["queue_depth"]
    del overlay["properties"]["zero_optimization"]["properties"]["stage"]
    del overlay["properties"]["fp16"]["properties"]["hysteresis"]["description"]
    del overlay["removed"]["nebula"]
    keys = ("aio.queue_depth", "zero_optimization.stage", "fp16.hysteresis", "nebula")
    assert refused(overlay) == {f"{deepspeed.__version__}: {key}" for key in keys}


def test_a_key_that_no_version_reads_stops_the_generation(deepspeed):
    overlay = copy.deepcopy(OVERLAY)
    overlay["properties"]["bf16"]["properties"]["loss_scale"] = {"type": "number", "description": "None."}
    assert refused(overlay) == {"bf16.loss_scale"}


def test_a_key_that_is_gone_without_advice_stops_the_generation(deepspeed):
    overlay = copy.deepcopy(OVERLAY)
    del overlay["removed"]["aio.thread_count"]
    gone = [schema.name_of(release) for release in schema.releases() if release >= (0, 16, 4)]
    assert refused(overlay) == {f"{release}: aio.thread_count" for release in gone}


# All versions in one


def test_variants_of_an_entry():
    entries = {
        (0, 9): {"a": 1, "gone": {"x": True}},
        (0, 10): {"a": 1, "b": [1]},
        (0, 11): {"new": None, "a": 1.0, "b": [1, 2]},
    }
    merged = generate.merged(entries)
    assert merged == {
        "new": {"since 0.11": None},
        "a": {"until 0.10": 1, "since 0.11": 1.0},
        "gone": {"until 0.9": {"x": True}},
        "b": {"since 0.10 until 0.10": [1], "since 0.11": [1, 2]},
    }
    for version, entry in entries.items():
        assert json.dumps(schema.as_of(merged, version)) == json.dumps(entry)
    assert schema.as_of(merged["new"], (0, 9)) is tree.MISSING


def test_the_file_is_the_schemas_merged():
    named = {"$id": "", "title": "", "x-deepspeed-version": ""}
    made = {release: {**schema.load(release).root, **named} for release in schema.releases()}
    found = {**json.loads(generate.SCHEMAS.read_text(encoding="utf-8")), **named}
    assert found.pop(schema.RELEASES) == [schema.name_of(release) for release in made]
    assert generate.text_of(generate.merged(made)) == generate.text_of(found)


# Reading a release


def release(files):
    """A release with a few files."""
    return ReleaseSource("0.14.5", files)


def test_a_source_package(tmp_path):
    path = tmp_path / "deepspeed-0.14.5.tar.gz"
    file = tmp_path / "file.py"
    file.write_text("KEY = 1\n", encoding="utf-8")
    with tarfile.open(path, "w:gz") as opened:
        opened.add(file, "deepspeed-0.14.5/deepspeed/runtime/config.py")
        opened.add(file, "deepspeed-0.14.5/setup.py")
    source = ReleaseSource.packed(path)
    assert (source.release, source.version) == ("0.14.5", (0, 14, 5))
    assert source.files == {"runtime/config.py": "KEY = 1\n"}


def test_what_is_read_from_the_code():
    source = release(
        {
            "constants.py": "from .config import *\nKEY = 'size'\nif True:\n    SIZE = None\nelse:\n    SIZE = 5e8\n",
            "config.py": (
                "from .constants import *\n"
                "class Base(BaseModel):\n    class Config:\n        extra = 'forbid'\n"
                "class Device(str, Enum):\n    cpu = 'cpu'\n"
                "class Inner(Base):\n    plain = True\n"
                "class Outer(Base):\n"
                "    device: Device = Device.cpu\n"
                "    inner: Optional[Inner] = None\n"
                "    count: int = Field(pp_int(1e3), ge=1, alias='stage3_count')\n"
                "    old: bool = Field(False, json_schema_extra={'deprecated': True})\n"
                "    names: List[str] = Field(default_factory=lambda: list(NAMES))\n"
                "NAMES: List[str] = ['a']\n"
                "class Free(BaseModel):\n    anything: str = ''\n"
                "def read(block, other=KEY):\n"
                "    for name in ['one', 'two']:\n        block.get(name, {})\n"
                "    return [get_scalar_param(block, other, SIZE), 'four' in block.keys(), block['three']]\n"
            ),
        },
    )
    assert source.rejects_unknown(TypedClass("config.py", "Outer"))
    assert not source.rejects_unknown(TypedClass("config.py", "Free"))
    assert not source.has(TypedClass("config.py", "Missing"))
    fields = source.fields(TypedClass("config.py", "Outer"))
    assert fields["device"].keywords == {"type": "string", "enum": ["cpu"]}
    assert fields["device"].default == "cpu"
    assert fields["inner"].model == TypedClass("config.py", "Inner")
    assert fields["count"].keywords == {"type": "integer", "minimum": 1}
    assert (fields["count"].default, fields["count"].alias) == (1000, "stage3_count")
    assert fields["old"].keywords == {"type": "boolean", "deprecated": True}
    assert fields["names"].default == ["a"]
    assert source.fields(TypedClass("config.py", "Inner"))["plain"].keywords == {"type": "boolean"}
    reads = {(read.block, read.key): read.default for read in source.reads("config.py")}
    assert reads[("block", "size")] == 500000000
    assert {key for _, key in reads} == {"one", "two", "three", "four", "size"}


def test_a_new_key_of_an_older_release_stops_the_generation():
    source = release(
        {"runtime/config.py": "def get(param_dict):\n    return param_dict.get('brand_new', 1)\n"}
    )
    overlay = {"description": "", "properties": {}, "removed": {}}
    with pytest.raises(DsrunError, match=r"0\.14\.5: brand_new: missing in the overlay"):
        generate.Builder(source, overlay, schema.load().root).schema()


def test_a_missing_package_is_named(tmp_path, capsys):
    assert generate.main([str(tmp_path / "deepspeed-0.9.5.tar.gz"), "--check"]) == 1
    assert "deepspeed-0.9.5.tar.gz" in capsys.readouterr().err


def test_every_version_is_current(capsys):
    packages = sorted(Path(os.environ.get("DEEPSPEED_SOURCES", "none")).glob("deepspeed-*.tar.gz"))
    if not packages:
        pytest.skip("DEEPSPEED_SOURCES names no folder with source packages of DeepSpeed")
    assert generate.main([*map(str, packages), "--check"]) == 0, capsys.readouterr().out
