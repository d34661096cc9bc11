"""What each release of the libraries changed, as data: `python -m tools.releases COMMAND`.

    python -m tools.releases fetch [PACKAGE...]     fetch the releases that the cache lacks, through pip
    python -m tools.releases write [PACKAGE...]     make dsrun/releases/*.history from the cache; --check compares
    python -m tools.releases settings [PACKAGE...]  read the settings again, from a few files of each wheel
    python -m tools.releases diff PACKAGE A B       what changed from release A to B, and what of dsrun it touches
    python -m tools.releases news FOLDER            for each package with a newer release than the data have: a report

Nothing that is fetched is run. The cache lies in ~/.cache/dsrun-releases, or in $DSRUN_RELEASES.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dsrun.errors import DsrunError
from dsrun.releases.packed import SUFFIX, PackageReleases
from tools.releases.build import built, place_of, with_settings
from tools.releases.fetch import newest, update
from tools.releases.packages import PACKAGES, Package
from tools.releases.report import report
from tools.releases.settings import CLASSES


def chosen(names: Sequence[str]) -> list[Package]:
    """The packages of these names; all where none is given."""
    if unknown := [name for name in names if name not in PACKAGES]:
        raise DsrunError(
            f"no data are made of {', '.join(unknown)}", hint=f"There are {', '.join(PACKAGES)}."
        )
    return [PACKAGES[name] for name in names] or list(PACKAGES.values())


def write(names: Sequence[str], *, check: bool) -> int:
    """Make the data; with check, only say which differ from what ships. The exit status."""
    differing = 0
    for package in chosen(names):
        made, place = built(package), place_of(package)
        same = place.is_file() and place.read_bytes() == made
        differing += not same
        print(f"{package.name}: {len(made):,} bytes{'' if same else ', changed'}")
        if not check:
            place.write_bytes(made)
    return int(check and differing > 0)


def settings(names: Sequence[str]) -> None:
    """Read the settings of packages again, beside the names that ship."""
    if unknown := [name for name in names if name not in CLASSES]:
        raise DsrunError(
            f"there are no settings of {', '.join(unknown)}", hint=f"There are of {', '.join(CLASSES)}."
        )
    for package in chosen(names or [*CLASSES]):
        place = place_of(package)
        place.write_bytes(with_settings(package, place.read_bytes()))


def between(package: Package, before: str, after: str) -> PackageReleases:
    """The data with both releases: those that ship, or made of these two alone."""
    if place_of(package).is_file():
        shipped = PackageReleases(place_of(package))
        if {before, after} <= {*shipped.releases}:
            return shipped
    update(package, only=(before, after), say=lambda text: print(text, file=sys.stderr))
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, f"{package.name}{SUFFIX}")
        path.write_bytes(built(package, only=(before, after)))
        made = PackageReleases(path, whole=True)
    if lacking := {before, after} - {*made.releases}:
        raise DsrunError(f"there is no {package.name} {', '.join(sorted(lacking))} that can be read")
    return made


def news(folder: Path) -> list[Path]:
    """Write a report for each package of which the index has a newer release than the data."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for package in PACKAGES.values():
        last, now = PackageReleases(place_of(package)).releases[-1], newest(package)
        if now != last:
            path = folder / f"{package.name}-{now}.md"
            path.write_text(report(between(package, last, now), last, now), encoding="utf-8")
            written.append(path)
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.releases",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("fetch", "write", "settings"):
        command = commands.add_parser(name)
        command.add_argument("packages", nargs="*", metavar="PACKAGE")
        if name == "write":
            command.add_argument(
                "--check", action="store_true", help="write nothing; exit 1 if it isn't current"
            )
    command = commands.add_parser("diff")
    for name in ("package", "before", "after"):
        command.add_argument(name)
    commands.add_parser("news").add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    try:
        if given.command == "fetch":
            for package in chosen(given.packages):
                print(f"{package.name}: {len(update(package))} new")
        elif given.command == "write":
            return write(given.packages, check=given.check)
        elif given.command == "settings":
            settings(given.packages)
        elif given.command == "diff":
            (package,) = chosen([given.package])
            sys.stdout.write(report(between(package, given.before, given.after), given.before, given.after))
        else:
            print("\n".join(str(path) for path in news(given.folder)))
    except DsrunError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
