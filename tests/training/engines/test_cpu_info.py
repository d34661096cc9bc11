"""The processor is asked once, and the answer is the one that would have been given."""

import pytest

cpuinfo = pytest.importorskip("cpuinfo")

from dsrun.training.engines import cpu_info


@pytest.fixture
def asked(monkeypatch, tmp_path):
    calls = []

    def ask():
        calls.append(1)
        return {"flags": ["avx2"], "arch": "X86_64"}

    monkeypatch.setattr(cpuinfo, "get_cpu_info", ask)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return calls


def test_a_second_process_does_not_ask(asked, monkeypatch):
    plain = cpuinfo.get_cpu_info
    cpu_info.remember()
    first = cpuinfo.get_cpu_info()
    assert cpuinfo.get_cpu_info() == first == {"flags": ["avx2"], "arch": "X86_64"}
    monkeypatch.setattr(cpuinfo, "get_cpu_info", plain)  # as a process that starts anew
    cpu_info.remember()
    assert cpuinfo.get_cpu_info() == first
    assert len(asked) == 1


def test_a_broken_file_is_made_again(asked, tmp_path):
    cpu_info.remember()
    cpuinfo.get_cpu_info()
    (path,) = tmp_path.glob("cpu-*.json")
    path.write_text("{")
    cpuinfo.get_cpu_info.cache_clear()
    assert cpuinfo.get_cpu_info()["arch"] == "X86_64"
    assert path.read_text() != "{"


def test_nothing_is_changed_without_a_folder(asked, monkeypatch):
    plain = cpuinfo.get_cpu_info
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    cpu_info.remember()
    assert cpuinfo.get_cpu_info is plain
