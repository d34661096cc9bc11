"""Tests of the reader that follows a release's config by its syntax, on releases made here."""

from __future__ import annotations

import pytest

from dsrun.config.schemas import schema
from dsrun.config.schemas.violations import fits
from tools.schemas.interpret import BATCH, Reader, answers
from tools.schemas.source import ReleaseSource

HEAD = """
from deepspeed import comm as dist
from deepspeed.runtime.constants import *
from deepspeed.runtime.config_utils import get_scalar_param

def get_kind(param_dict, name=KIND):
    val = get_scalar_param(param_dict, name, None)
    val = val.lower() if val is not None else val
    if val is None:
        return None
    elif val == "fp32":
        return torch.float32
    raise ValueError(f"no {val}")

class DeepSpeedConfig(object):
    def __init__(self, config, mpu=None):
        self._param_dict = config
        try:
            self.rank = dist.get_rank()
            if "split" in config:
                self.world = dist.get_world_size() / config["split"]
            else:
                self.world = dist.get_world_size()
        except HANDLER:
            self.world = 1
        self.kept = config.get("kept", 3)
        self.kind = get_kind(config)
        self.unknown = torch.something(config.get("outside"))
        if self.unknown:
            raise ValueError("not to be told")
        section = config.get("section", {})
        if section.get("enabled", False):
            if "size" not in section:
                raise KeyError("size")
            assert section["size"] > 0
"""
UTILS = """
def get_scalar_param(param_dict, param_name, param_default_value):
    return param_dict.get(param_name, param_default_value)
"""


def release(handler: str = "Exception") -> ReleaseSource:
    return ReleaseSource(
        "0.50.0",
        {
            "runtime/config.py": HEAD.replace("HANDLER", handler),
            "runtime/constants.py": 'KIND = "kind"',
            "runtime/config_utils.py": UTILS,
            "comm/__init__.py": "",
        },
    )


@pytest.mark.parametrize(
    ("config", "taken"),
    [
        ({}, True),
        ({"kept": "anything"}, True),
        ({"kind": "FP32"}, True),
        ({"kind": "fp8"}, False),
        ({"kind": 3}, False),
        ({"outside": 1}, True),  # whatever torch makes of it, no exception is certain
        ({"section": {"enabled": True}}, False),
        ({"section": {"enabled": True, "size": 2}}, True),
        ({"section": {"enabled": True, "size": 0}}, False),
        ({"section": {"size": 0}}, True),
        ({"section": 3}, False),
    ],
)
def test_a_config_is_read_as_the_code_says(config, taken):
    assert Reader(release()).read(config) is taken


@pytest.mark.parametrize(
    ("handler", "value", "taken"),
    [
        ("Exception", "x", True),  # swallowed
        ("(RuntimeError, AttributeError)", "x", False),
        ("(RuntimeError, AttributeError)", 2, True),
        ("(RuntimeError, AttributeError)", 0, False),
        ("ArithmeticError", 0, True),
    ],
)
def test_what_a_handler_catches_is_taken(handler, value, taken):
    assert Reader(release(handler)).read({"split": value}) is taken


def test_an_endless_reading_is_not_told():
    source = ReleaseSource(
        "0.50.0",
        {"runtime/config.py": "class DeepSpeedConfig:\n def __init__(self, config):\n  while True:\n   pass"},
    )
    assert Reader(source).read({}) is None


def test_a_validator_that_looks_first_is_followed():
    text = """
from pydantic import field_validator
from deepspeed.runtime.config_utils import DeepSpeedConfigModel

class Part(DeepSpeedConfigModel):
    size: int = 3

    @field_validator("size", mode="before")
    @classmethod
    def no_flags(cls, v, info):
        if isinstance(v, bool):
            raise ValueError("no flag")
        return v

class DeepSpeedConfig:
    def __init__(self, config):
        self.part = Part(**config.get("part", {}))
"""
    reader = Reader(ReleaseSource("0.50.0", {"runtime/config.py": text}))
    assert reader.read({"part": {"size": True}}) is False
    assert reader.read({"part": {"size": 1}}) is True
    assert reader.sections["part"].node.name == "Part"
    assert reader.looked_at == {"size"}


def test_the_kinds_of_values_and_what_a_section_needs():
    nodes = {
        "kept": {"type": "integer"},
        "kind": {"type": "string"},
        "split": {"type": "integer"},
        "section": {
            "properties": {"enabled": {"type": "boolean"}, "size": {"type": "integer"}},
        },
    }
    found = answers(release("AttributeError"), nodes)
    assert found.refuses["kind"] == [
        kind for kind in schema.KINDS_OF_VALUES if kind != "null"
    ]  # each text that is tried is none of the names
    assert "kept" not in found.refuses
    assert found.refuses["split"] == [
        *("null", "false", "zero"),
        *("empty text", "whole number as text", "number as text", "auto", "text"),
        *("empty list", "list", "empty section", "section"),
    ]
    assert found.needs == {"section": ["size"]}


@pytest.mark.parametrize(("kind", "values"), schema.KINDS_OF_VALUES.items())
def test_every_value_that_is_tried_is_of_its_kind(kind, values):
    assert {schema.kind_of(value) for value in values} == {kind}


def test_the_overlay_calls_nothing_right_that_the_reader_refuses(deepspeed):
    """But for what needs another key beside it: one of the batch's, or a section that is switched on."""
    nodes = schema.load().nodes
    found = answers(ReleaseSource.installed(), nodes)
    assert len(found.refuses) > 20
    for path, kinds in found.refuses.items():
        values = [value for kind in kinds for value in schema.KINDS_OF_VALUES[kind] if value != schema.AUTO]
        wrong = [value for value in values if fits(nodes[path], value)]
        assert not wrong or path in BATCH or path.endswith(".enabled"), (path, wrong)
