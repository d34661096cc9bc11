"""The packed data made of the cache: the same bytes each time."""

from __future__ import annotations

import gc
from collections.abc import Collection
from pathlib import Path

from dsrun.releases.packed import FOLDER, SUFFIX
from tools.releases.config_facts import config_text
from tools.releases.fetch import Cache
from tools.releases.history import history
from tools.releases.pack import packed, sources_text, uses_text
from tools.releases.packages import PACKAGES, Package


def built(package: Package, folder: Path | None = None, only: Collection[str] = ()) -> bytes:
    """The file of a package, of the releases that the cache has; only: of these."""
    gc.disable()  # syntax trees are many objects without a circle
    try:
        cache = Cache(package, folder)
        others = frozenset(other.module for other in PACKAGES.values() if other != package)
        made = history(cache, others, only)
    finally:
        gc.enable()
    sections = {"sources": sources_text(made), "uses": uses_text(made.uses, made.every)}
    if package.name == "deepspeed":
        sections["config"] = config_text(cache, made.sources)
    return packed(made, sections)


def place_of(package: Package) -> Path:
    """Where the data of a package ship."""
    return FOLDER / f"{package.name}{SUFFIX}"
