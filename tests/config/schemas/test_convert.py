"""What pydantic makes of values of another type, beside pydantic itself where it is installed."""

from __future__ import annotations

import pytest

from dsrun.config import tree
from dsrun.config.schemas.convert import converted

VALUES = [
    *(
        "3",
        " 3 ",
        "-3",
        "+3",
        "3.0",
        "3.5",
        "0x1f",
        "1_000",
        "5e8",
        "5e-1",
        "1e400",
        "nan",
        "inf",
        "",
        " ",
        "three",
    ),
    *("true", "True", "TRUE", "yes", "Y", "on", "off", "no", "n", "t", "f", "0", "1", "2", "truee"),
    *(
        True,
        False,
        0,
        1,
        2,
        -1,
        0.0,
        1.0,
        2.0,
        2.5,
        1e300,
        10**400,
        None,
        [],
        [1],
        {},
        {"a": 1},
        "９",
        "²",
        "9" * 500,
    ),
]
TYPES = {"boolean": bool, "integer": int, "number": float}


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("name", TYPES)
def test_as_pydantic_has_it(name, value):
    """What it converts is converted alike; what is here left alone may still be converted there."""
    pydantic = pytest.importorskip("pydantic")
    result = converted(value, {"type": name})
    try:
        wanted = pydantic.TypeAdapter(TYPES[name]).validate_python(value)
    except (pydantic.ValidationError, OverflowError):
        wanted = tree.MISSING
    if result is not tree.MISSING:
        assert wanted is not tree.MISSING, "DeepSpeed refuses it"
        assert wanted == result


@pytest.mark.parametrize(
    ("value", "node", "wanted"),
    [
        ("3", {"type": "integer"}, 3),
        ("3.0", {"type": "integer"}, 3),
        ("2e8", {"type": "number"}, 2e8),
        ("yes", {"type": "boolean"}, True),
        (0, {"type": "boolean"}, False),
        (True, {"type": "integer"}, 1),
        ("true", {"type": ["boolean", "null"]}, True),
        ("5", {"anyOf": [{"const": "auto"}, {"type": "integer"}]}, 5),
        ("five", {"type": "integer"}, tree.MISSING),
        ("inf", {"type": "number"}, tree.MISSING),
        (2, {"type": "boolean"}, tree.MISSING),
        ([1], {"type": "integer"}, tree.MISSING),
        ("3", {"type": "string"}, tree.MISSING),
        ({}, {"type": "object"}, tree.MISSING),
    ],
)
def test_converted(value, node, wanted):
    assert converted(value, node) is wanted or converted(value, node) == wanted
