"""Where a value came from is a field, and no text that somebody may choose."""

from __future__ import annotations

import pytest

from dsrun.config.presets.preset_options import by_overrides
from dsrun.errors import DsrunError
from dsrun.models.peft_methods import by_adapter
from dsrun.options import run_file
from dsrun.options.commands import FinetuneOptions
from dsrun.options.layers import Origin, Resolved, Source

NAMES = ["the adapter.toml", "the adapter of mine/run.toml", "a --set", "run.toml"]


def from_file(name: str, **values: object) -> Resolved[FinetuneOptions]:
    return Resolved.built_in(FinetuneOptions).filled(Source.RUN_FILE, values, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_files_rank_is_not_dropped_for_the_files_name(name):
    with pytest.raises(DsrunError, match="has no effect with --method full"):
        by_adapter(from_file(name, lora_rank=4))
    assert by_adapter(from_file(name, lora_rank=4, method="lora")) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_run_files_values_are_written_again_whatever_its_name(name, tmp_path):
    text = run_file.text("m", list(from_file(name, lr=0.5).rows()), tmp_path)
    assert f"\nlr = 0.5  # run file: {name}" in text


def test_what_set_says_is_written_by_set_alone(tmp_path):
    resolved = Resolved.by_user(FinetuneOptions, {"overrides": ["optimizer.params.lr=0.5"]})
    resolved = resolved.with_layers(by_overrides(resolved, resolved.options.overrides))
    assert resolved.origins["lr"] == Origin(Source.COMMAND_LINE, "--set", through="overrides")
    assert "\n# lr = 0.5  # command line: --set" in run_file.text("m", list(resolved.rows()), tmp_path)
