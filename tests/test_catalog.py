from __future__ import annotations

import pytest

from dsrun import catalog
from dsrun.errors import DsrunError


def test_the_shipped_folders_are_found():
    for kind in ("presets", "templates", "launch"):
        assert (catalog.shipped_root() / kind).is_dir()


def test_the_nearest_folder_wins(lab):
    (lab / "presets" / "zero2.toml").write_text('summary = "ours"')
    assert catalog.files("presets")["zero2"] == lab / "presets" / "zero2.toml"
    assert (
        catalog.find("presets", "zero1", "preset", "dsrun preset").parent
        == catalog.shipped_root() / "presets"
    )


def test_earlier_entries_of_the_path_are_nearer(lab, tmp_path, monkeypatch):
    other = tmp_path / "other"
    (other / "presets").mkdir(parents=True)
    for folder in (lab, other):
        (folder / "presets" / "same.toml").write_text('summary = "x"')
    monkeypatch.setenv("DSRUN_PATH", f"{other}::{lab}")
    assert catalog.files("presets")["same"].is_relative_to(other)


def test_a_missing_folder_on_the_path_is_named(monkeypatch):
    monkeypatch.setenv("DSRUN_PATH", "/no/such/folder")
    with pytest.raises(DsrunError, match="DSRUN_PATH: no such folder: /no/such/folder"):
        catalog.roots()


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("zero2_offload", "zero2-offload"),
        ("Zero3", "zero3"),
        ("zero2-ofload", "zero2-offload"),
        ("xyz", None),
    ],
)
def test_closest(name, match):
    assert catalog.closest(name, ["zero2", "zero2-offload", "zero3"]) == match


def test_toml_faults_name_file_and_line(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("a = 1\nb = \n")
    with pytest.raises(DsrunError, match=r"bad\.toml: is not valid TOML: .*line 2"):
        catalog.read_toml(path)
    path.write_bytes(b"a = '\xff'")
    with pytest.raises(DsrunError, match="not UTF-8"):
        catalog.read_toml(path)
    with pytest.raises(DsrunError, match="No such file"):
        catalog.read_toml(tmp_path / "none.toml")
