"""The stored signatures of optimizers' and schedulers' classes are current."""

from __future__ import annotations

import pytest
from needed import since

from dsrun.config.rules.optimizer import signatures
from tools.schemas import signatures as made_by


def test_the_data_are_current(capsys):
    """optimizers.json is what tools/schemas/signatures.py makes, with the versions that it was made from."""
    pytest.importorskip("deepspeed")
    pytest.importorskip("torch")
    if made_by.made_from() != signatures.data()["made_from"]:
        pytest.skip("made from other versions")
    assert made_by.main(["--check"]) == 0, capsys.readouterr().out


@since(deepspeed="0.19.8")
def test_stale_data_are_found(tmp_path, monkeypatch, capsys):
    pytest.importorskip("deepspeed")
    stale = tmp_path / "optimizers.json"
    stale.write_text("{}", encoding="utf-8")
    monkeypatch.setattr(made_by, "FILE", stale)
    assert made_by.main(["--check"]) == 1
    assert made_by.main([]) == 0
    assert made_by.main(["--check"]) == 0
    assert "-{}" in capsys.readouterr().out
