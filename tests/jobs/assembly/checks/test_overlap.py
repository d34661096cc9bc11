"""overlap_comm at ZeRO-1 and 2: on where the installed DeepSpeed does it right, off everywhere else."""

from __future__ import annotations

import pytest

from dsrun import packages
from dsrun.config.presets.options import Options
from dsrun.config.presets.sources import draft
from dsrun.jobs.assembly.checks.communication import OVERLAP, why_overlap


@pytest.fixture
def why(monkeypatch, tmp_path):
    def asked(preset="zero2", version="0.19.8", accelerator="cuda", ranks=2, overrides=()):
        monkeypatch.setattr(packages, "installed_version", lambda name: version)
        config = draft(preset, Options(gpus=ranks, overrides=overrides))
        return why_overlap(config, preset, accelerator, ranks, overrides)

    return asked


@pytest.mark.parametrize("given", [{}, {"preset": "zero1"}, {"version": "0.20.0"}])
def test_on_with_the_version_that_does_it_right(why, given):
    assert "deepspeed" in why(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"version": "0.19.7"}, {"version": None}, {"accelerator": "cpu"}, {"ranks": 1}, {"preset": "ddp"},
        {"preset": "zero3"}, {"preset": "zero2-offload"}, {"overrides": ("zero_optimization.overlap_comm=false",)},
        {"overrides": (OVERLAP,)},
    ],
)  # fmt: skip
def test_else_it_stays(why, given):
    assert why(**given) == ""


def test_a_labs_own_preset_is_left_alone(why, monkeypatch, tmp_path):
    own = tmp_path / "ours.toml"
    own.write_text('summary = "ours"\nextends = "zero2"\n[config]\n', encoding="utf-8")
    assert why(preset=str(own)) == ""
