"""The packed data made of the cache: the same bytes each time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection
from pathlib import Path

from dsrun.errors import DsrunError
from dsrun.releases.packed import FOLDER, SUFFIX, PackageReleases
from tools.releases.config_facts import config_text
from tools.releases.fetch import Cache, Source, index
from tools.releases.history import history
from tools.releases.pack import packed, sources_text, uses_text, with_section
from tools.releases.packages import PACKAGES, Package
from tools.releases.settings import CLASSES, from_cache, settings_text


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
    elif package.name in CLASSES:
        sections["config"] = settings_text(package.name, made.sources, from_cache(cache))
    return packed(made, sections)


def with_settings(package: Package, shipped: bytes, say: Callable[[str], object] = print) -> bytes:
    """The file of a package with its settings read again, of the releases that it has: from their wheels alone."""
    releases = PackageReleases(place_of(package)).releases
    read: dict[str, dict[str, str]] = {}
    with index() as opened:
        for archive in opened.archives(package):
            if archive.release in releases:
                read[archive.release] = opened.members(archive, CLASSES[package.name])
                say(archive.name)
    if lacking := [release for release in releases if release not in read]:
        raise DsrunError(f"the index has no {package.name} {', '.join(lacking)} any more")
    sources = [Source(release, "", "", "") for release in releases]
    text = settings_text(package.name, sources, lambda release, path: read[release].get(path))
    return with_section(shipped, "config", text)


def place_of(package: Package) -> Path:
    """Where the data of a package ship."""
    return FOLDER / f"{package.name}{SUFFIX}"
