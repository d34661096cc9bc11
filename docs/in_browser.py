"""Make what the checker in the documentation runs on: Python for browsers, a few packages, and dsrun's wheel.

    python docs/in_browser.py          into build/checker, from where `mkdocs build` takes it into the site

Needs npm, and pip with a network. Versions and hashes stand here and in requirements/browser.txt; nothing is fetched
by the reader's browser but from the site itself. Without build/checker, or where it was made of other sources, the
site is built all the same, and its page says that the checker isn't in it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "checker"
REQUIREMENTS = ROOT / "requirements" / "browser.txt"
PYODIDE = "314.0.7"
INTEGRITY = "sha512-0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
PYTHON = "3.14"
"""The Python that this Pyodide is."""
PARTS = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
"""Files of Pyodide that a worker loads."""
OF_THE_WHEEL = (
    "dsrun",
    "presets",
    "templates",
    "launch",
    "setup.cfg",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
COMPILED = (".so", ".pyd")
MANIFEST = "manifest.json"


def sources_digest() -> str:
    """A digest of what the checker is made of: dsrun's wheel, the versions of what is beside it, this script."""
    digest = hashlib.sha256()
    for name in (*OF_THE_WHEEL, "requirements/browser.txt", "docs/in_browser.py"):
        path = ROOT / name
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def why_not() -> str:
    """The reason that the site gets no checker; empty where build/checker is one of these sources."""
    try:
        manifest = json.loads((FOLDER / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "there is no build/checker: run python docs/in_browser.py first"
    if manifest["sources"] != sources_digest():
        return "build/checker was made of other sources: run python docs/in_browser.py again"
    return ""


def make() -> None:
    """Fetch, build and put everything into build/checker. Exits with the program's words where one fails."""
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        made = work / "checker"
        made.mkdir()
        put_pyodide(work, made)
        archives = [*packages(work, made), own_wheel(work, made)]
        manifest = {"pyodide": PYODIDE, "archives": archives, "sources": sources_digest()}
        (made / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.parent.mkdir(exist_ok=True)
        shutil.copytree(made, FOLDER)
    size = sum(file.stat().st_size for file in FOLDER.iterdir())
    sys.stdout.write(f"{FOLDER.relative_to(ROOT)}: {len(archives)} packages, {size / 2**20:.1f} MiB\n")


def put_pyodide(work: Path, made: Path) -> None:
    """Pyodide's own files, from its npm package."""
    run("npm", "pack", "--silent", f"pyodide@{PYODIDE}", "--pack-destination", str(work))
    archive = work / f"pyodide-{PYODIDE}.tgz"
    found = "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if found != INTEGRITY:
        raise SystemExit(f"{archive.name}: its digest is {found}, and {INTEGRITY} was expected")
    with tarfile.open(archive) as tar:
        for name in PARTS:
            member = tar.extractfile(f"package/{name}")
            if member is None:
                raise SystemExit(f"{archive.name} has no {name}")
            (made / name).write_bytes(member.read())


def packages(work: Path, made: Path) -> list[str]:
    """The pinned packages without their compiled parts, which are for another machine; returns their files' names."""
    platforms = ("--platform", "manylinux2014_x86_64", "--platform", "manylinux_2_28_x86_64")
    wheels = work / "wheels"
    run(
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", *platforms,
        "--python-version", PYTHON, "--require-hashes", "--requirement", str(REQUIREMENTS), "--dest", str(wheels),
    )  # fmt: skip
    for wheel in sorted(wheels.iterdir()):
        with (
            zipfile.ZipFile(wheel) as old,
            zipfile.ZipFile(made / wheel.name, "w", zipfile.ZIP_DEFLATED) as new,
        ):
            for name in old.namelist():
                if not name.endswith(COMPILED):
                    new.writestr(old.getinfo(name), old.read(name), zipfile.ZIP_DEFLATED)
    return [wheel.name for wheel in sorted(wheels.iterdir())]


def own_wheel(work: Path, made: Path) -> str:
    """dsrun's wheel, from a copy, so that nothing of an earlier build gets into it; returns its file's name."""
    copy = work / "dsrun"
    copy.mkdir()
    for name in OF_THE_WHEEL:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(work / "own"),
        str(copy),
    )
    (wheel,) = (work / "own").glob("dsrun-*.whl")
    shutil.copy(wheel, made)
    return wheel.name


def run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise SystemExit(f"{command[0]} is not installed") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{' '.join(command[:4])} ... ended with {error.returncode}") from None


if __name__ == "__main__":
    make()
