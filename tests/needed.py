"""Which tests a machine can run, said without importing what they use."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from dsrun import packages
from dsrun.versions import meets


def needs(*packages: str) -> None:
    """Skip the whole file unless these are installed.

    pytest.importorskip would import them: every worker reads every file, and DeepSpeed, peft and what they import take
    seconds in each.
    """
    for name in packages:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)


def since(**lowest: str) -> pytest.MarkDecorator:
    """Skip a test that compares dsrun with a package as it is since a version: since(accelerate="1.15").

    dsrun works with older ones (the lane `--versions lowest`), which have other names, defaults or classes.
    """
    have = {name: packages.installed_version(name) for name in lowest}
    old = [
        f"{name} {have[name]}"
        for name, low in lowest.items()
        if have[name] and not meets(have[name], f">={low}")
    ]
    wanted = ", ".join(f"{name} {low}" for name, low in lowest.items())
    return pytest.mark.skipif(
        bool(old), reason=f"compares with {wanted} and newer, installed is {', '.join(old)}"
    )
