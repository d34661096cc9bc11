"""How much of the host's memory is free, in a container, too."""

from __future__ import annotations

import pytest

psutil = pytest.importorskip("psutil")

from dsrun.training.engines.host_memory import available_bytes


def cgroup(folder, limit: str, used: str):
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    return folder


def test_a_container_has_what_it_may_take(tmp_path):
    assert available_bytes(cgroup(tmp_path, "5000000", "2000000")) == 3_000_000


def test_a_full_container_has_nothing(tmp_path):
    assert available_bytes(cgroup(tmp_path, "5000", "6000")) == 0


@pytest.mark.parametrize("limit", ["max", str(1 << 60)])
def test_elsewhere_it_is_what_the_machine_has(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 7 << 30}))
    assert available_bytes(cgroup(tmp_path, limit, "1")) == 7 << 30
    assert available_bytes(tmp_path / "no such folder") == 7 << 30
