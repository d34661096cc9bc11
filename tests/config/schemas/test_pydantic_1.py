"""Values of a wrong type as pydantic 1 converts them, compared with its own code, which pydantic 2 brings along."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest

from dsrun.config import tree
from dsrun.config.rules import Setting, run
from dsrun.config.rules.frame import REFUSED
from dsrun.config.schemas import schema
from dsrun.config.schemas.convert import converted_by_1
from dsrun.config.schemas.violations import fits

pydantic = pytest.importorskip("pydantic.v1")

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 7, -1, 1.0, 1.5, -0.5, 1e30, 2**70),
    *("", "1", " 3 ", "2.0", "1e-3", "5e8", "true", "OFF", "x", "1_000", [], [1], {}, {"a": 1}),
)


class Stage(int, Enum):
    none = 0
    one = 1


NODES: dict[str, tuple[Any, dict[str, Any]]] = {
    "boolean": (bool, {"type": "boolean"}),
    "integer": (int, {"type": "integer"}),
    "number": (float, {"type": "number"}),
    "string": (str, {"type": "string"}),
    "object": (dict, {"type": "object"}),
    "stage": (Stage, {"type": "integer", "enum": [0, 1]}),
}


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize("name", NODES)
def test_a_value_becomes_what_pydantic_1_makes_of_it(name, value):
    kind, node = NODES[name]
    model = pydantic.create_model("Model", key=(kind, ...))
    try:
        wanted = model(key=value).key
    except pydantic.ValidationError:
        wanted = tree.MISSING
    right = fits(node, value)
    made = value if right else converted_by_1(value, node)
    if wanted is tree.MISSING:
        assert made is tree.MISSING
    else:
        assert made == wanted


@pytest.mark.parametrize(
    ("section", "key", "value", "before", "since"),
    [
        ("zero_optimization", "sub_group_size", 1.5, True, False),
        ("zero_optimization", "sub_group_size", "2.0", False, True),
        ("zero_optimization", "stage", "1", False, True),
        ("tensorboard", "job_name", 7, True, False),
        ("zero_optimization", "offload_param", [], True, False),
    ],
)
def test_a_release_is_judged_as_its_pydantic_does(section, key, value, before, since):
    config = {"train_batch_size": 4, section: {key: value}}
    for release, taken in (((0, 14, 5), before), ((0, 15, 0), since)):
        findings = run(config, Setting(version=release, world_size=1, device="cpu"))
        assert (not any(finding.effect == REFUSED for finding in findings)) is taken, schema.name_of(release)
