"""Tensor and sequence parallelism on two real ranks beside data parallelism; bench/parallelism.py has the grid."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from pathlib import Path

import pytest
from needed import needs

needs("torch", "deepspeed", "transformers")

BENCH = Path(__file__).resolve().parents[3] / "bench" / "parallelism.py"
STEPS = 3
HALF_WAY = ("--eval-steps", "2", "--keep-best", "--generate-rows", "2")
"""The model is written before the last step: what is gathered for it must leave the training as it was."""

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone")]


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_parallelism", BENCH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def cells_of(bench):
    return [
        bench.Cell("llama-tiny", "full", layout, preset)
        for layout, preset in (("dp2", "ddp"), ("sp2", "zero1"), ("tp2", "zero2"))
    ]


@pytest.fixture(scope="module")
def runs(bench, environ, tmp_path_factory):
    """Each cell's folder: the same ranks trained one after the other."""
    folder = tmp_path_factory.mktemp("layouts")
    cells = cells_of(bench)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        assert [bench.planned(cell, folder, STEPS, *HALF_WAY) for cell in cells] == ["", "", ""]
        bench.train(cells, 2, folder)
    return {cell.layout: folder / cell.name for cell in cells}


@pytest.mark.parametrize("layout", ["sp2", "tp2"])
def test_a_layout_trains_as_data_parallelism_does(bench, runs, layout):
    """Losses, norms of gradients, every exported weight and the answers."""
    comparison = bench.compared(runs[layout], runs["dp2"])
    assert comparison.losses < 1e-5
    assert comparison.weights < 1e-5
    assert comparison.answers


@pytest.mark.parametrize("layout", ["sp2", "tp2"])
def test_examples_are_shared_out_by_groups(runs, layout):
    """All ranks are one group, which trains on all examples of a step: four in a micro batch."""
    job = json.loads((runs[layout] / "job.json").read_text(encoding="utf-8"))
    assert job["parallel"][layout[:2]] == 2
    assert job["ds_config"]["train_micro_batch_size_per_gpu"] == 4
    assert "train_batch_size" not in job["ds_config"]


def test_what_is_written_in_the_middle_changes_nothing_after_it(bench, runs):
    """Under tensor parallelism each weight is put together for it: its losses after that are still the others'."""
    losses = {
        layout: [value for (_, name), value in bench.numbers(runs[layout]).items() if name == "loss"]
        for layout in runs
    }
    assert all((folder / "best").is_dir() for folder in runs.values())
    for here, there in itertools.combinations(losses.values(), 2):
        assert len(here) == STEPS
        assert here == pytest.approx(there, abs=1e-5)


# The whole table


GRID = ("tp2", "tp2 x dp2", "sp2", "sp2 x dp2", "pp2", "pp2 x dp2", "fsdp2", "hsdp 2 x 2", "hpz 2 x 2")
OF_LORA = ("tp2", "sp2")
GOOD = ("exact", "within", "refused: ")


@pytest.fixture(scope="module")
def folder(environ, tmp_path_factory):
    """Where the references of all layouts are trained, each once."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("DSRUN_PATH", "DS_ACCELERATOR", "OMP_NUM_THREADS", "PYTHONPATH"):  # which the bench sets
            patch.setenv(name, environ.get(name, ""))
        for name, value in environ.items():
            patch.setenv(name, value)
        yield tmp_path_factory.mktemp("grid")


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "method"),
    [
        *(pytest.param(layout, "full", id=layout) for layout in GRID),
        *(pytest.param(layout, "lora", id=f"{layout}, lora") for layout in OF_LORA),
    ],
)
def test_every_model_is_exact_or_refused(bench, folder, layout, method):
    """With SGD and, of all weights, with AdamW: 20 steps beside one process; or why it is refused."""
    kinds = ("sgd", "adamw") if method == "full" else ("sgd",)
    cells = [
        bench.Cell(model, method, layout, bench.OWN_PRESETS.get(layout, "zero1"), kind)
        for kind, model in itertools.product(kinds, bench.MODELS)
    ]
    outcomes = bench.measured(cells, folder)
    outcome_words = {cell.name: outcomes[cell].words(cell.kind) for cell in cells}
    assert {name: words for name, words in outcome_words.items() if not words.startswith(GOOD)} == {}
    refused = {cell.model for cell in cells if outcomes[cell].refused}
    assert refused == (set() if layout in bench.OWN_PRESETS else {"mixtral-tiny"})
