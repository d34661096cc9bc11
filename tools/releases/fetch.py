"""Releases, fetched as pip finds and fetches them, and their Python kept in a cache; nothing of them is run.

`pip download` of a source package runs its setup.py to learn its dependencies, so pip's own finder and session are
asked instead: the index, the mirrors, certificates and credentials are those of pip's configuration. An archive is
deleted once it has been read. The cache is one SQLite file a package, in which a text that many releases share stands
once; it lies outside the repository, in ~/.cache/dsrun-releases or $DSRUN_RELEASES.
"""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from dsrun.errors import DsrunError
from tools.releases.packages import Package

TABLES = """
create table if not exists texts (hash text primary key, packed blob);
create table if not exists releases (release text primary key, archive text, sha256 text, metadata text);
create table if not exists names (hash text primary key, reader text, packed blob);
create table if not exists files (release text, path text, hash text, primary key (release, path));
"""
CHUNK = 1 << 20


@dataclass(frozen=True)
class Archive:
    """A file of one release on the index."""

    release: str
    name: str
    url: str
    sha256: str


@dataclass(frozen=True)
class Source:
    """What a release was read from."""

    release: str
    archive: str
    sha256: str
    metadata: str
    """Its METADATA or PKG-INFO."""


def cache_folder() -> Path:
    return Path(os.environ.get("DSRUN_RELEASES") or Path.home() / ".cache" / "dsrun-releases")


class Cache:
    """The Python of the releases of one package."""

    def __init__(self, package: Package, folder: Path | None = None) -> None:
        folder = folder or cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        self.package = package
        self.data = sqlite3.connect(folder / f"{package.name}.sqlite", timeout=60, isolation_level=None)
        self.data.execute("pragma journal_mode = wal")  # one may read while another writes
        self.data.executescript(TABLES)

    def sources(self) -> list[Source]:
        """What was read of each release, oldest first."""
        rows = self.data.execute("select release, archive, sha256, metadata from releases").fetchall()
        return sorted((Source(*row) for row in rows), key=lambda source: Version(source.release))

    def files(self, release: str) -> dict[str, str]:
        """Path -> hash of its text."""
        rows = self.data.execute("select path, hash from files where release = ? order by path", (release,))
        return {path: digest for path, digest in rows.fetchall() if self.package.reads(path)}

    def text(self, digest: str) -> str:
        (packed,) = self.data.execute("select packed from texts where hash = ?", (digest,)).fetchone()
        return zlib.decompress(packed).decode("utf-8", "replace")

    def add(self, archive: Archive, path: Path) -> None:
        """Read an archive, all of it or nothing."""
        metadata = ""
        with self.data:
            self.data.execute("begin")
            for name, content in members(path):
                if re.search(r"\.dist-info/METADATA$|^[^/]+/PKG-INFO$", name):
                    metadata = content.decode("utf-8", "replace")
                elif kept := self._kept(name, path.suffix == ".whl"):
                    digest = hashlib.sha256(content).hexdigest()
                    text = (digest, zlib.compress(content))
                    self.data.execute("insert or ignore into texts values (?, ?)", text)
                    file = (archive.release, kept, digest)
                    self.data.execute("insert or replace into files values (?, ?, ?)", file)
            row = (archive.release, archive.name, archive.sha256, metadata)
            self.data.execute("insert or replace into releases values (?, ?, ?, ?)", row)

    def _kept(self, name: str, wheel: bool) -> str:
        """Where a file of an archive lies when installed; empty if it is left out."""
        inner = name if wheel else re.sub(r"^[^/]+/(?:src/|py_src/|bindings/python/py_src/)?", "", name)
        for folder, installed in self.package.folders.items():
            if inner.startswith(f"{folder}/") and inner.endswith((".py", ".pyi")):
                path = installed + inner[len(folder) :]
                return path if self.package.reads(path) else ""
        return ""


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    """The Python files and the metadata of a wheel or source package."""
    wanted = re.compile(r"\.pyi?$|/METADATA$|/PKG-INFO$")
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            for info in wheel.infolist():
                if wanted.search(info.filename):
                    yield info.filename, wheel.read(info)
        return
    with tarfile.open(path) as opened:
        for member in opened:
            file = opened.extractfile(member) if member.isreg() and wanted.search(member.name) else None
            if file:
                yield member.name, file.read()


class Index:
    """The package index as pip is configured to see it."""

    def __init__(self, session: Any, finder: Any) -> None:
        self.session, self.finder = session, finder

    def archives(self, package: Package) -> list[Archive]:
        """The file that is to be read of each release, oldest first."""
        releases: dict[Version, list[Archive]] = {}
        for link in self._links(package.name):
            release = version_of(link.filename)
            if release and release >= Version(package.first) and not release.is_prerelease:
                digest = link.hash if link.hash_name == "sha256" else ""
                releases.setdefault(release, []).append(
                    Archive(str(release), link.filename, link.url_without_fragment, digest)
                )
        if not package.every_release:
            last = {(release.major, release.minor): release for release in sorted(releases)}
            releases = {release: releases[release] for release in last.values()}
        chosen = (preferred(package, releases[release]) for release in sorted(releases))
        return [archive for archive in chosen if archive]

    def _links(self, name: str) -> Iterator[Any]:
        from pip._internal.index.collector import parse_links

        collector = self.finder._link_collector
        sources = collector.collect_sources(name, candidates_from_page=lambda _page: [])
        for source in (*sources.find_links, *sources.index_urls):
            link = source.link if source else None
            if link and not link.url.startswith("file:") and (page := collector.fetch_response(link)):
                yield from parse_links(page)

    def members(self, archive: Archive, paths: Collection[str]) -> dict[str, str]:
        """Some files of a wheel, by ranges of its bytes: kilobytes of a wheel of megabytes."""
        from pip._internal.network.lazy_wheel import LazyZipOverHTTP

        with LazyZipOverHTTP(archive.url, self.session) as opened, zipfile.ZipFile(opened) as wheel:
            there = set(wheel.namelist())
            return {path: wheel.read(path).decode("utf-8", "replace") for path in paths if path in there}

    def fetch(self, archive: Archive, folder: Path) -> Path:
        """The archive as a file of the folder. Raises DsrunError where its hash isn't the index's."""
        path, digest = folder / archive.name, hashlib.sha256()
        answer = self.session.get(archive.url, headers={"Accept-Encoding": "identity"}, stream=True)
        answer.raise_for_status()
        with path.open("wb") as file:
            for chunk in answer.iter_content(CHUNK):
                digest.update(chunk)
                file.write(chunk)
        if digest.hexdigest() != archive.sha256:
            raise DsrunError(f"{archive.name} arrived damaged: its SHA-256 is not the index's")
        return path


@contextmanager
def index() -> Iterator[Index]:
    """pip's index, with one session for all that is fetched."""
    from pip._internal.commands import create_command
    from pip._internal.utils.temp_dir import global_tempdir_manager

    command: Any = create_command("download")
    options, _ = command.parse_args(["nothing", "--no-deps"])
    with command.main_context(), global_tempdir_manager():
        session = command.get_default_session(options)
        yield Index(session, command._build_package_finder(options, session))


def version_of(name: str) -> Version | None:
    """The release of an archive, by its name."""
    try:
        return parse_wheel_filename(name)[1] if name.endswith(".whl") else parse_sdist_filename(name)[1]
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None


def preferred(package: Package, archives: list[Archive]) -> Archive | None:
    """The file of a release that is read; None where it has none that can be."""
    for pattern in package.files:
        fitting = [archive for archive in archives if re.search(pattern, archive.name)]
        if fitting:
            return min(fitting, key=lambda archive: archive.name)
    return None


def update(
    package: Package,
    folder: Path | None = None,
    only: Collection[str] = (),
    say: Callable[[str], object] = print,
) -> list[str]:
    """Fetch the releases that the cache lacks; only: of these, patches included that are else left out. Returns
    those that were fetched."""
    cache = Cache(package, folder)
    known = {source.release for source in cache.sources()}
    if only and set(only) <= known:
        return []
    new = []
    with index() as opened:
        for archive in opened.archives(replace(package, every_release=True) if only else package):
            if archive.release in known or (only and archive.release not in only):
                continue
            with tempfile.TemporaryDirectory() as scratch:
                path = opened.fetch(archive, Path(scratch))
                say(f"{archive.name}: {path.stat().st_size / 1e6:.1f} MB")
                cache.add(archive, path)
            new.append(archive.release)
    return new


def newest(package: Package) -> str:
    """The newest release that the index has a file of."""
    with index() as opened:
        return opened.archives(package)[-1].release
