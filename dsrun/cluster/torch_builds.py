"""The builds of torch that run on a GPU and its driver: facts of PyTorch's releases and of CUDA's compatibility."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dsrun.versions import version

DRIVERS = {13: 580, 12: 525, 11: 450}
"""CUDA's major version -> the oldest driver (CUDA Compatibility, minor version compatibility, table 1)."""


class _TorchBuild(NamedTuple):
    """The wheels of one folder there, and what they run on. below: the first torch that has none there."""

    wheels: str
    oldest_driver: int
    least: tuple[int, int]
    most: tuple[int, int]
    below: str = ""


BUILDS = (
    _TorchBuild("cu130", 580, (7, 5), (99, 9)),
    _TorchBuild("cu128", 570, (10, 0), (12, 9)),
    _TorchBuild("cu126", 525, (5, 0), (9, 0), below="2.15"),
    _TorchBuild("cu118", 450, (5, 0), (9, 0), below="2.8"),
)
"""Newest first (pytorch/pytorch: RELEASE.md; issues 157517, 172352 and 190385). cu128 is named for what cu126 has no
code for alone."""


def left_out(capability: str | None, cuda: str, torch: str) -> bool:
    """Whether torch's builds for that CUDA lack code for a GPU of that compute capability ("7.0").

    CUDA 13 compiles for 7.5 and later; builds for CUDA 12.8 left out what is before 7.0 from their first, and 7.0
    from torch 2.11 on; those for 12.6 and before have nothing for 10.0 and later.
    """
    if not capability:
        return False
    have, made_for = version(capability), version(cuda)
    if made_for >= (13,) or (made_for >= (12, 8) and version(torch) >= (2, 11)):
        return have < (7, 5)
    if made_for >= (12, 8):
        return have < (7, 0)
    return have >= (10, 0)


def newest(driver: str | None, capabilities: Iterable[str | None]) -> str:
    """The command that installs the newest torch that this driver and all of these GPUs take; empty where none is
    known.

    driver: None where it isn't known, and is no reason against any.
    """
    versions = [version(capability) for capability in capabilities if capability]
    number = version(driver)[0] if driver and version(driver) else None
    for build in BUILDS:
        fits = all(build.least <= capability <= build.most for capability in versions)
        if fits and (number is None or number >= build.oldest_driver):
            torch = f"'torch<{build.below}'" if build.below else "torch"
            return f"pip install --force-reinstall {torch} --index-url https://download.pytorch.org/whl/{build.wheels}"
    return ""
