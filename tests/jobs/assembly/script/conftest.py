"""What tests of script jobs share: both files here plan in a user's folder."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    """An empty working directory and a cache of the test's own."""
    folder = tmp_path / "a user's 工作"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "cache"))
    return folder
