"""Since when, until when, what instead: of a package of three made releases."""

from __future__ import annotations

import dataclasses

import pytest
from made_releases import NEW, OLD, made

from dsrun.releases import lookup, packed
from tools.releases import names, top_names
from tools.releases.packages import PACKAGES


@pytest.fixture(scope="module")
def peft(tmp_path_factory):
    return made(tmp_path_factory.mktemp("releases"))


@pytest.fixture(autouse=True)
def only(peft, monkeypatch):
    """These are all the data there are."""
    monkeypatch.setattr(packed, "packages", lambda: ["peft"])
    monkeypatch.setattr(packed, "package", lambda _name: peft)


def spans(path: str, parameter: str = "") -> list[tuple[str, str]]:
    return lookup.look_up(path, parameter).runs()


ALWAYS = [("0.1.0", "0.10.0")]
OLDEST, MIDDLE = [("0.1.0", "0.1.0")], [("0.2.0", "0.2.0")]
SINCE_NEW, UNTIL_NEW = [("0.2.0", "0.10.0")], [("0.1.0", "0.2.0")]


@pytest.mark.parametrize(
    ("path", "had"),
    [
        ("peft", ALWAYS),
        ("peft.utils", ALWAYS),
        ("peft.helpers", SINCE_NEW),
        ("peft.LoraConfig", ALWAYS),
        ("peft.Layer", []),  # __all__ leaves it out
        ("peft.tuners.Layer", ALWAYS),
        ("peft.tuners.lora.LoraLayer", ALWAYS),
        ("peft.gone_soon", OLDEST),
        ("peft.utils.gone_soon", OLDEST),
        ("peft.utils.conditional", OLDEST),
        ("peft.utils._hidden", UNTIL_NEW),
        ("peft.utils.OnlyForTypes", []),
        ("peft.utils.torch", OLDEST),
        ("peft.base.Sdpa2Attention", OLDEST),
        ("peft.tuners.lora.Trainer", ALWAYS),
        ("peft.nothing", []),
        ("peft.nothing.at.all", []),
    ],
)
def test_names(path, had):
    assert spans(path) == had


@pytest.mark.parametrize(
    ("path", "had"),
    [
        ("peft.LoraConfig.r", ALWAYS),
        ("peft.LoraConfig.peft_type", ALWAYS),  # its base's
        ("peft.LoraConfig.revision", SINCE_NEW),
        ("peft.LoraConfig.save", ALWAYS),
        ("peft.tuners.Layer.merged", ALWAYS),  # set on self, in a branch
        ("peft.tuners.Layer.out", ALWAYS),
        ("peft.tuners.Layer.inner", []),  # of another object
        ("peft.tuners.Layer.active", ALWAYS),
        ("peft.tuners.Layer.scale", ALWAYS),
        ("peft.tuners.Layer.x", []),
    ],
)
def test_members(path, had):
    assert spans(path) == had


@pytest.mark.parametrize(
    ("path", "parameter", "had"),
    [
        ("peft.prepare", "model", ALWAYS),
        ("peft.prepare", "use_reentrant", UNTIL_NEW),  # once by its signature, once by a decorator
        ("peft.prepare", "reentrant", SINCE_NEW),
        ("peft.LoraConfig", "r", ALWAYS),
        ("peft.LoraConfig", "revision", SINCE_NEW),
        ("peft.tuners.Layer", "in_features", ALWAYS),
        ("peft.tuners.Layer", "lora_only", ALWAYS),
        ("peft.tuners.Layer", "self", []),
        ("peft.tuners.Layer", "anything", []),
        ("peft.tuners.Layer.forward", "past_key_value", UNTIL_NEW),
        ("peft.tuners.Layer.forward", "past_key_values", [("0.10.0", "0.10.0")]),
        ("peft.tuners.Layer.count", "a", ALWAYS),
        ("peft.LoraConfig.save", "selected", SINCE_NEW),
    ],
)
def test_parameters(path, parameter, had):
    assert spans(path, parameter) == had


@pytest.mark.parametrize(
    ("path", "parameter", "instead", "because"),
    [
        ("peft.utils.gone_soon", "", "prepare", "its deprecation says so"),
        ("peft.gone_soon", "", "prepare", "its deprecation says so"),
        ("peft.LoraConfig", "fan_in", "", ""),
        ("peft.utils.moves_out", "", "peft.helpers.moves_out", "0.2.0 has it there"),
        ("peft.base.Sdpa2Attention", "", "", ""),
        ("peft.prepare", "use_reentrant", "reentrant", "its decorator says so"),
        (
            "peft.tuners.Layer.forward",
            "past_key_value",
            "past_key_values",
            "it has the same words, and came in 0.10.0",
        ),
        ("peft.utils.prepare", "", "", ""),
    ],
)
def test_what_took_its_place(path, parameter, instead, because):
    record = lookup.look_up(path, parameter)
    assert (record.instead, record.because) == (instead, because)


def test_the_ends(peft):
    record = lookup.look_up("peft.utils.gone_soon")
    assert (record.first, record.last, record.next, record.from_the_start) == (
        "0.1.0",
        "0.1.0",
        "0.2.0",
        True,
    )
    assert (record.is_in("0.1.0"), record.is_in("0.2.0"), record.is_in("0.3.0")) == (True, False, None)
    assert record.messages == ("`gone_soon` is deprecated. Use `prepare` in {} instead.",)
    record = lookup.look_up("peft.prepare", "use_reentrant")
    assert record.taken_by_decorator == 0b010
    assert lookup.look_up("peft.tuners.Layer", "anything").any_keyword
    assert not lookup.look_up("peft.prepare", "anything").any_keyword
    assert lookup.look_up("peft.prepar").near == ("prepare",)
    assert lookup.look_up("peft.LoraConfig").defined == "peft.tuners.lora.LoraConfig"
    assert peft.note == "every release from 0.1.0 to 0.10.0"


def test_who_imports_it(peft):
    (use,) = lookup.uses("transformers.Trainer")
    assert (use.package, use.first, use.last, use.until_now) == ("peft", "0.1.0", "0.10.0", True)
    assert lookup.uses("transformers.Nothing") == []
    line = peft.section("sources").splitlines()[1]
    assert line.split("\t")[:2] == ["0.2.0", "peft-0.2.0-py3-none-any.whl"]
    assert line.endswith("\ttorch>=1.13.0; transformers>=4.0,<5")


def test_no_data_of_a_package():
    with pytest.raises(LookupError):
        lookup.look_up("numpy.array")
    assert packed.package_of("zero_optimization.stage") is None


LAZY = {
    "peft/__init__.py": """
from typing import TYPE_CHECKING
from .utils import _LazyModule, not_an_attribute
_import_structure = {"utils": ["helper"], "models.auto": []}
_import_structure["models.auto"].append("Auto")
if TYPE_CHECKING:
    from .utils import only_for_types
else:
    import sys
    sys.modules[__name__] = _LazyModule(
        __name__, define_import_structure(Path(__file__).parent / "models"), _import_structure
    )
""",
    "peft/utils.py": "class _LazyModule: ...\ndef helper(): ...\nnot_an_attribute = only_for_types = 1\n",
    "peft/models/__init__.py": "",
    "peft/models/auto.py": "class Auto: ...\n",
    "peft/models/one.py": """
__all__ = ["One"]
class One: ...
@requires(backends=("torch",))
class Two: ...
class Three: ...
""",
    "peft/models/convert_one.py": "__all__ = ['Four']\nclass Four: ...\n",
}


def test_lazy_modules(tmp_path, monkeypatch):
    """Their names are those of their import structure, written out or collected from what files export."""
    package = made(tmp_path, {"0.2.0": LAZY})
    monkeypatch.setattr(packed, "package", lambda _name: package)
    module = package.module("peft")
    assert {entry.text for entry in module.of("")} == {"helper", "Auto", "One", "Two"}
    assert lookup.look_up("peft.One").defined == "peft.models.one.One"
    assert lookup.look_up("peft.Auto").defined == "peft.models.auto.Auto"


def test_files_with_names_only(tmp_path, monkeypatch):
    """The same names at the left margin as by syntax, and nothing is said of what is in them."""
    package = dataclasses.replace(PACKAGES["peft"], names_only=r"peft/models/(?!__init__)", name="peft")
    monkeypatch.setitem(PACKAGES, "peft", package)
    whole, short = (read(LAZY["peft/models/one.py"]) for read in (names.read, top_names.read_top))
    assert (short.names.keys(), short.exported, short.required) == (
        whole.names.keys(),
        whole.exported,
        whole.required,
    )
    made_of = made(tmp_path, {"0.2.0": LAZY})
    monkeypatch.setattr(packed, "package", lambda _name: made_of)
    assert {entry.text for entry in made_of.module("peft").of("")} == {"helper", "Auto", "One", "Two"}
    assert lookup.look_up("peft.One").releases
    assert lookup.look_up("peft.One.forward").unread
    assert not lookup.look_up("peft.utils._LazyModule.forward").unread


TOP = """
from .other import (
    One as First,
    Two,
)
from ..a.b import c
from torch import nn
import os
LIMIT: int = 3
try:
    inner = 1
except ImportError:
    pass
class Three(nn.Module):
    def method(self): ...
@decorated
async def four(a, b=1): ...
__all__ = ["Three"]
__all__ += ["four"]  # and more
"""


def test_names_at_the_left_margin():
    found = top_names.read_top(TOP)
    assert {name: (one[0].kind, one[0].target) for name, one in found.names.items()} == {
        "First": ("=", ".other.One"),
        "Two": ("=", ".other.Two"),
        "c": ("=", "..a.b.c"),
        "LIMIT": ("v", ""),
        "Three": ("c", ""),
        "four": ("f", ""),
    }
    assert found.exported == ["Three", "four"]


def test_stub_files(tmp_path, monkeypatch):
    """They add what is compiled; what they import is for themselves."""
    files = {
        "peft/__init__.py": "from .compiled import Model\n",
        "peft/compiled/__init__.py": "Model = _compiled.Model\n",
        "peft/compiled/__init__.pyi": "from ..other import Helper\nVERSION: str\n"
        "class Model:\n    def run(self, batch): ...\n",
    }
    package = made(tmp_path, {"0.2.0": files})
    monkeypatch.setattr(packed, "package", lambda _name: package)
    assert lookup.look_up("peft.Model.run", "batch").releases
    assert lookup.look_up("peft.compiled.VERSION").releases
    assert not lookup.look_up("peft.compiled.Helper").releases


def test_the_same_bytes_in_any_order(tmp_path):
    """Whatever was fetched first, and whatever the cache holds besides."""
    first, second = tmp_path / "one", tmp_path / "two"
    for folder in (first, second):
        folder.mkdir()
    turned = dict(reversed({"0.2.0": NEW, "0.3.0": OLD}.items()))
    assert (
        made(first, {"0.2.0": NEW, "0.3.0": OLD}).path.read_bytes() == made(second, turned).path.read_bytes()
    )


def test_only_last_patches():
    """Patches that the cache has for a difference do not come into the data."""
    package = dataclasses.replace(PACKAGES["peft"], first="0.2.0", every_release=False)
    assert package.chosen(["0.1.9", "0.2.0", "0.2.10", "0.2.9", "0.3.0.post1", "0.3.0"]) == {
        "0.2.10",
        "0.3.0.post1",
    }
    assert PACKAGES["peft"].chosen(["0.0.9", "0.1.0", "0.2.1"]) == {"0.1.0", "0.2.1"}


@pytest.mark.parametrize("releases", [0b1, 0b111, 0b101, 0b011, 0b110, 0b010, 0b1011, 0])
def test_spans(releases):
    every = 0b1111 if releases > 0b111 else 0b111
    assert packed.bits(packed.span(releases, every), every) == releases if releases else True
    assert packed.span(0b1011, 0b1111) == "0-1,3-"
    assert packed.span(0b0110, 0b1111) == "1-2"
