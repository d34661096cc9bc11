"""What tests of accelerate's files share."""

from __future__ import annotations

import pytest


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory, with a name as users have them."""
    folder = tmp_path / "a user's 工作"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder
