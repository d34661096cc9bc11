"""Measurements that decide a default: read from their files, written by the bench, and nothing where there are none."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from dsrun import catalog
from dsrun.errors import DsrunError
from dsrun.jobs.assembly.checks import compiling
from dsrun.options.commands import FinetuneOptions
from dsrun.options.layers import NOTHING, Resolved
from dsrun.planner.analysis import measured

BENCH = Path(__file__).resolve().parents[2] / "bench/gpu"
H100 = "NVIDIA H100 80GB HBM3"
WRITTEN = """
seconds_without = 1.0
seconds_with = {compiled}
start_seconds = 60
day = "2026-11-24"
with_what = "llama-3-8b; torch 2.11.0"
"""


@pytest.fixture
def page(monkeypatch):
    for folder in (BENCH.parent, BENCH):
        monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("page")
    for name in ("page", "common"):
        sys.modules.pop(name, None)


@pytest.fixture
def put(lab, monkeypatch, tmp_path):
    """`put(engine, seconds)`: a lab's measurement of an H100; there are tools to compile with."""
    monkeypatch.setattr(compiling, "_tools", lambda *_: iter(()))
    (lab / "presets" / "measured").mkdir(parents=True, exist_ok=True)

    def write(engine: str, compiled: float = 0.8, text: str = WRITTEN) -> Path:
        path = lab / "presets" / "measured" / f"compile-h100-80g-{engine}.toml"
        path.write_text(text.format(compiled=compiled))
        return path

    return write


def default(names=(H100,), *, fsdp=True, config=None, **given):
    options = Resolved.by_user(FinetuneOptions, given).options
    return compiling.measured_default(
        options, gpu_names=set(names), fsdp=fsdp, ds_config=config or {}, environ={}
    )


def zero(stage, **more):
    return {"zero_optimization": {"stage": stage, **more}}


def test_no_measurement_no_default():
    assert default() == NOTHING
    assert not list(catalog.files(measured.KIND)) or (catalog.shipped_root() / measured.KIND).is_dir()


def test_a_measurement_decides_for_its_gpu_and_engine(put):
    put("fsdp")
    layer = default()
    assert layer.values == {"compile": True}
    for words in ("80%", "h100-80g", "2026-11-24", "torch 2.11.0", "60 s", "--no-compile"):
        assert words in layer.note
    assert default(fsdp=False, config=zero(2)) == NOTHING
    assert default(["NVIDIA A100-SXM4-80GB"]) == NOTHING
    assert default([H100, "NVIDIA A100-SXM4-80GB"]) == NOTHING
    assert default(["a card of paper"]) == NOTHING


def test_deepspeed_below_stage_3(put):
    put("zero")
    assert default() == NOTHING
    assert all(default(fsdp=False, config=zero(stage)).values for stage in (0, 1, 2))
    assert default(fsdp=False, config=zero(3)) == NOTHING
    assert default(fsdp=False, config=zero(2, offload_optimizer={"device": "cpu"})) == NOTHING


@pytest.mark.parametrize("compiled", [0.96, 1.0, 1.3])
def test_a_tie_or_a_loss_is_no_default(put, compiled):
    put("fsdp", compiled)
    assert default() == NOTHING


@pytest.mark.parametrize(("steps", "taken"), [(299, False), (301, True)])
def test_a_short_run_doesnt_get_its_start_back(put, steps, taken):
    put("fsdp")
    assert bool(default(max_steps=steps, epochs=None).values) is taken


@pytest.mark.parametrize("given", [{"method": "ptuning"}, {"tile_tokens": 512}, {"tp": 2}])
def test_where_layers_cant_be_compiled_nothing_is_said(put, given):
    put("fsdp")
    assert default(**given) == NOTHING


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seconds_without = 1", "seconds_with is missing"),
        (WRITTEN.replace("{compiled}", "0"), "seconds_with is 0"),
        (WRITTEN.replace("{compiled}", "0.5") + "speed = 3\n", "speed is not a key"),
        (WRITTEN.replace("{compiled}", '"fast"'), "seconds_with is 'fast'"),
    ],
)
def test_a_file_with_faults_names_them_all(put, text, words):
    path = put("fsdp", text=text.replace("{", "{{").replace("}", "}}"))
    with pytest.raises(DsrunError) as caught:
        measured.compiled("h100-80g", "fsdp")
    assert words in str(caught.value) and str(path) in str(caught.value)


# Written by the bench


def result(case, seconds, first, where=f"{H100}, 81559 MiB, 570; torch 2.11.0", **more):
    return {
        "part": "speed", "case": case, "where": where, "day": "2026-11-24", "tiny": False, "failed": "",
        "model": "llama-3-8b-8-layers", "preset": "fsdp", "step_seconds": seconds, "first_step_seconds": first, **more,
    }  # fmt: skip


def test_the_bench_writes_what_the_chooser_reads(page, put, lab):
    lines = [result("8b-widths-4k-fsdp", 1.0, 2.0), result("8b-widths-4k-fsdp-compile", 0.8, 92.0)]
    page.write_only(lab / "presets" / "measured", page.measured_files(lines))
    found = measured.compiled("h100-80g", "fsdp")
    assert (found.seconds_without, found.seconds_with, found.start_seconds) == (1.0, 0.8, 90.0)
    assert found.with_what == "llama-3-8b-8-layers; torch 2.11.0"
    assert default().values == {"compile": True}
    page.write_only(lab / "presets" / "measured", {})
    assert default() == NOTHING


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [result("8b-widths-4k-fsdp", 1.0, 2.0)],
        [
            result("8b-widths-4k-fsdp", 1.0, 2.0),
            result("8b-widths-4k-fsdp-compile", 0.8, 9.0, failed="out of time"),
        ],
        [result("8b-widths-4k-fsdp", 1.0, 2.0), result("8b-widths-4k-fsdp-compile", 0.8, 9.0, tiny=True)],
        [
            result("8b-widths-4k-fsdp", 1.0, 2.0),
            result("8b-widths-4k-fsdp-compile", 0.8, 9.0, where="NVIDIA A40, 1; x"),
        ],
        [
            result(case, 1.0, 2.0, where="a card of paper; x")
            for case in ("8b-widths-4k", "8b-widths-4k-compile")
        ],
    ],
)
def test_no_half_of_a_measurement_is_written(page, lines):
    """Both runs, on one card of a known kind, and on a GPU."""
    assert page.measured_files(lines) == {}


def test_what_ships_is_what_was_measured(page):
    shipped = catalog.shipped_root() / measured.KIND
    files = {path.name: path.read_text() for path in shipped.glob("*.toml")} if shipped.is_dir() else {}
    assert files == page.measured_files(importlib.import_module("common").stored())
    assert set(page.COMPILED) == set(measured.ENGINES)
