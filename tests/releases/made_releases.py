"""A package of three releases, as archives, for the tests of the reader and of what writes its data."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from dsrun.releases.packed import PackageReleases
from tools.releases.build import built
from tools.releases.fetch import Archive, Cache
from tools.releases.packages import PACKAGES, Package

DEADLY = "raise SystemExit('it was run')\n"
OLD = {
    "peft/__init__.py": "from .tuners import *\nfrom .utils import prepare, gone_soon\nfrom . import _private\n",
    "peft/_private.py": "",
    "peft/tuners/__init__.py": "from .lora import LoraConfig, LoraLayer as Layer\n__all__ = ['LoraConfig']\n",
    "peft/tuners/lora.py": """
from dataclasses import dataclass, field
from transformers import Trainer, TrainingArguments
from ..base import Base
@dataclass
class LoraConfig(Base):
    r: int = 8
    fan_in: bool = field(default=False, metadata={"help": "Deprecated. Use `fan_in_fan_out` instead."})
class LoraLayer:
    scale = 1.0
    def __init__(self, in_features, *args, lora_only=None, **kwargs):
        self.in_features, (self.out, _) = in_features, args
        if args:
            self.deep.inner = 1
            self.merged = False
    def forward(self, x, past_key_value=None): ...
    @property
    def active(self): ...
    @staticmethod
    def count(a, b): ...
""",
    "peft/base.py": DEADLY
    + """
class Base:
    peft_type: str = None
    def save(self, folder): ...
class Sdpa2Attention: ...
""",
    "peft/utils.py": """
import warnings
def prepare(model, use_reentrant=True): ...
def gone_soon(model):
    warnings.warn("`gone_soon` is deprecated. " f"Use `prepare` in {model} instead.")
if True:
    def conditional(a): ...
else:
    conditional = None
def _hidden(): ...
try:
    import torch
except ImportError:
    torch = None
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from .base import Base as OnlyForTypes
def moves_out(a): ...
""",
    "tests/test_it.py": "class NotOfThePackage: ...",
}
NEW = {
    **OLD,
    "peft/__init__.py": "from .tuners import *\nfrom .utils import prepare\n",
    "peft/base.py": """
class Base:
    peft_type: str = None
    revision: str = None
    def save(self, folder, selected=None): ...
class Attention2: ...
""",
    "peft/utils.py": """
from .helpers import deprecate_kwarg
@deprecate_kwarg("use_reentrant", new_name="reentrant", version="9")
def prepare(model, reentrant=True): ...
def _hidden(): ...
""",
    "peft/helpers.py": "def moves_out(a): ...\ndef deprecate_kwarg(*a, **k): ...\n",
}
NEWEST = {
    **NEW,
    "peft/utils.py": "def prepare(model, reentrant=True): ...\n",
    "peft/tuners/lora.py": OLD["peft/tuners/lora.py"].replace(
        ", past_key_value=None", ", past_key_values=None"
    ),
}
RELEASES = {"0.1.0": OLD, "0.2.0": NEW, "0.10.0": NEWEST}


def wheel(path: Path, files: Mapping[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as opened:
        for name, text in files.items():
            opened.writestr(zipfile.ZipInfo(name), text)
        opened.writestr(zipfile.ZipInfo("peft-0.1.dist-info/METADATA"), METADATA)
    return path


def sdist(path: Path, files: Mapping[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as opened:
        for name, text in {**files, "PKG-INFO": METADATA, "setup.py": DEADLY}.items():
            inside = name if name in ("PKG-INFO", "setup.py") or name.startswith("tests/") else f"src/{name}"
            info = tarfile.TarInfo(f"peft-0.1/{inside}")
            info.size = len(text.encode())
            opened.addfile(info, io.BytesIO(text.encode()))
    return path


METADATA = """Name: peft
Requires-Dist: torch (>=1.13.0)
Requires-Dist: transformers>=4.0,<5
Requires-Dist: numpy
Requires-Dist: deepspeed>=0.9; extra == "all"

text
"""


def cached(folder: Path, releases: Mapping[str, Mapping[str, str]] = RELEASES) -> Package:
    """A cache in the folder with these as peft's releases: the first as a source package, the others as wheels."""
    package = PACKAGES["peft"]
    cache = Cache(package, folder)
    for release, files in releases.items():
        first = release == "0.1.0"
        name = f"peft-{release}.tar.gz" if first else f"peft-{release}-py3-none-any.whl"
        path = (sdist if first else wheel)(folder / name, files)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        cache.add(Archive(release, name, "", digest), path)
    return package


def made(folder: Path, releases: Mapping[str, Mapping[str, str]] = RELEASES) -> PackageReleases:
    """The packed data of these releases."""
    package = cached(folder, releases)
    path = folder / "peft.history"
    path.write_bytes(built(package, folder))
    return PackageReleases(path)
