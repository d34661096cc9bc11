"""What a release's checkout needs before it is built: the tag's version, and the repository's own address.

    python tools/release.py v0.1.0 https://github.com/OWNER/NAME

Refuses a tag that says another version than the package. Writes project_urls into setup.cfg: where the project lives is
known only where it is released from.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "Source": "", "Documentation": "/blob/HEAD/docs/README.md", "Changelog": "/blob/HEAD/CHANGELOG.md",
    "Issues": "/issues",
}  # fmt: skip
ADDRESS = re.compile(r"https://[\w.-]+/[\w.-]+/[\w.-]+")


def check_tag(tag: str, root: Path = ROOT) -> None:
    """Exit where the tag is not the package's version with a v before it, or the changelog has no section for it."""
    match = re.search(r'__version__ = "([^"]+)"', (root / "dsrun/__init__.py").read_text(encoding="utf-8"))
    version = match[1] if match else None
    if tag != f"v{version}":
        raise SystemExit(f"the tag is {tag}, and dsrun/__init__.py says {version}")
    if f"\n## [{version}]" not in (root / "CHANGELOG.md").read_text(encoding="utf-8"):
        raise SystemExit(f"CHANGELOG.md has no section [{version}]: what is unreleased gets its name first")


def with_urls(setup: str, address: str) -> str:
    """setup.cfg with the project's pages. Exits where the address is none of a repository."""
    if not ADDRESS.fullmatch(address):
        raise SystemExit(f"{address} is no https address of a repository")
    lines = "\n".join(f"    {name} = {address}{path}" for name, path in PAGES.items())
    return setup.replace("\n[options]\n", f"\nproject_urls =\n{lines}\n\n[options]\n", 1)


def main() -> None:
    """Check the tag and write the addresses."""
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    check_tag(sys.argv[1])
    path = ROOT / "setup.cfg"
    path.write_text(with_urls(path.read_text(encoding="utf-8"), sys.argv[2]), encoding="utf-8")


if __name__ == "__main__":
    main()
