"""bench/throughput_gpu.py as far as it goes without training: what it would run, what it counts, and its table."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
from running import write_tokenizer

from dsrun.cluster.devices import Gpu, Machine

BENCH = Path(__file__).resolve().parents[2] / "bench"
GIB = 2**30


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(BENCH))
    try:
        yield importlib.import_module("throughput_gpu")
    finally:
        sys.path.remove(str(BENCH))


@pytest.fixture(autouse=True)
def _own_places(tmp_path, monkeypatch):
    from dsrun.jobs.build import finetune

    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(finetune, "check_operators", lambda *_: None)


def cards(count: int, total: int) -> Machine:
    gpus = tuple(
        Gpu(i, "NVIDIA A100-SXM4-80GB", f"GPU-{i}", total * GIB, (8, 0), total * GIB) for i in range(count)
    )
    return Machine("cuda", gpus, 32, "GPUs", 1000 * GIB)


@pytest.fixture
def seven(bench, tmp_path):
    """Llama-2-7B, with files of no bytes."""
    from dsrun.models.model_files import load_model_file

    folder = tmp_path / "llama-7b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(load_model_file("llama-2-7b").architecture))
    write_tokenizer(folder)
    (folder / "model.safetensors").touch()
    return bench.Model("llama-7b", folder, 6_738_415_616, 6_607_343_616, 32, 4096)


def presets_of(bench, model, machine) -> list[tuple[str, int, bool]]:
    bounds = bench.Bounds(machine, len(machine.gpus), 12, 64)
    return [(case.preset, case.micro_batch, case.checkpointing) for case in bench.cases(model, bounds)]


def test_presets_that_fit_are_run_with_the_largest_batch_that_does(bench, seven):
    roomy, alone = (presets_of(bench, seven, cards(count, 141)) for count in (8, 1))
    assert [preset for preset, *_ in roomy] == ["zero2", "zero3"]
    assert roomy[0][1] == 64
    assert not roomy[0][2]
    assert alone[0][0] == "zero2"
    assert alone[0][1] < 64 or alone[0][2]


def test_where_none_fits_the_optimizer_is_offloaded(bench, seven, capsys):
    assert [preset for preset, *_ in presets_of(bench, seven, cards(1, 40))] == ["zero2-offload"]
    assert "llama-7b with zero2 is left out: " in capsys.readouterr().err


def test_the_command_is_one_that_dsrun_takes(bench, seven):
    from dsrun.cli.finetune import command as finetune

    case = bench.Case(seven, "zero2", "bf16", 1, 8, checkpointing=True)
    words = case.words(12)
    parsed = finetune.make_context("finetune", words[1:]).params
    given = case.given(12)
    assert {name: parsed[name] for name in given} == given
    assert parsed["words"] == (str(seven.folder),)


def test_a_tokens_arithmetic(bench, seven):
    """6 N, and of attention what a causal row takes: 4 L W operations forward for each pair, half of the pairs."""
    row = 100
    pairs = row * row / 2
    assert seven.flops(row) == pytest.approx(6 * seven.multiplied + 3 * 4 * 32 * 4096 * pairs / row)


def test_a_budget_that_is_spent_starts_nothing(bench):
    clock = bench.Clock(100)
    assert clock.expects(7 * 10**9) > 100 > clock.expects(10**9)
    clock.seen.append((10**9, 30.0))
    assert clock.expects(10**9) == 30
    assert clock.expects(2 * 10**9) == 30 + bench.SECONDS_A_BILLION
    assert 99 < clock.left <= 100


def test_the_table(bench, seven):
    case = bench.Case(seven, "zero2", "bf16", 2, 8, checkpointing=False)
    found = {
        "side": "dsrun", "failed": "", "tokens": 16_000, "seconds": 2.0, "steps": 10,
        "allocated_bytes": 3 * GIB, "reserved_bytes": 4 * GIB,
    }  # fmt: skip
    row = bench.judged(case, found, 400e12)
    assert row["row_tokens"] == 100
    assert row["mfu"] == pytest.approx(8_000 * seven.flops(100) / 800e12)
    lost = bench.judged(case, {"side": "Trainer", "failed": "out of memory"}, 400e12)
    first, second = bench.table([row, lost]).splitlines()[2:]
    assert first == "| llama-7b | zero2 | adamw | 8 | no | dsrun | 8,000 | 39.7 % | 3.00 | 4.00 |"
    assert second == "| llama-7b | zero2 | adamw | 8 | no | Trainer | out of memory |  |  |  |"


def test_a_command_that_hangs_is_ended_with_all_it_started(bench, tmp_path, capsys):
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    failed, _ = bench.ended([sys.executable, "-c", child], {}, tmp_path, 1.0)
    assert failed == "out of time"
    failed, _ = bench.ended(
        [sys.executable, "-c", "raise SystemExit('CUDA out of memory')"], {}, tmp_path, 60.0
    )
    assert failed == "out of memory"
    assert bench.ended([sys.executable, "-c", "print(5)"], {}, tmp_path, 60.0) == ("", "5\n")


def test_files_hold_every_weight_once(bench):
    from types import SimpleNamespace

    sizes = {f"w{number}": SimpleNamespace(numel=lambda: 600_000) for number in range(5)}
    files = list(bench.shards(sizes, "cpu"))
    assert [name for file in files for name in file] == list(sizes)
    assert max(map(len, files)) == 1
