"""Other releases of DeepSpeed to ask: their Python from the cache of tools/releases, beside the installed torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tools.releases.fetch import Cache, update
from tools.releases.packages import PACKAGES

INSTALLED = """version = "{release}"
git_hash = git_branch = "unknown"
installed_ops = compatible_ops = {{}}
accelerator_name = "cpu"
torch_info = {{
    "version": "0.0", "cuda_version": "0.0", "nccl_version": "0.0", "hip_version": "0.0", "bf16_support": False
}}
"""
"""What setup.py writes. Nothing is compiled, so nothing is installed."""


def unpacked(release: str, folder: Path) -> Path:
    """The folder to import a release of DeepSpeed from; fetched where the cache lacks it."""
    place = folder / release
    mark = place / "deepspeed" / "git_version_info_installed.py"
    if not mark.is_file():
        package = PACKAGES["deepspeed"]
        update(package, only=(release,), say=lambda text: print(text, file=sys.stderr))
        cache = Cache(package)
        for path, digest in cache.files(release).items():
            file = place / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(cache.text(digest), encoding="utf-8")
        mark.write_text(INSTALLED.format(release=release), encoding="utf-8")
    return place


def environment(place: Path) -> dict[str, str]:
    """The environment of a process that imports this DeepSpeed."""
    paths = [str(place), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "DS_ACCELERATOR": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**os.environ, **own, "DSRUN_ORACLE_RELEASE": place.name}
