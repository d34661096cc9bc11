"""FSDP on two and four ranks beside plain torch in one process: models, optimizers, copies of a model, and the rest."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("transformers")

from shards import KINDS, SAVED, STEPS

from dsrun.cluster.ports import free_port
from dsrun.training.engines import fsdp

WAYS = (
    "llama:sgd:2:whole", "glm:sgd:2:offload", "llama:adamw:2:recompute", "glm:sgd:2:lora", "llama:sgd:2:bf16",
    "qwen3:adamw:2:lora:bf16", "llama:adamw:2:compile:recompute", "glm:sgd:2:compile",
)  # fmt: skip
CASES = {
    2: [*(f"{kind}:{optimizer}:2" for kind, optimizer in itertools.product(KINDS, ("sgd", "adamw"))), *WAYS],
    4: [
        *(f"{kind}:{optimizer}:2" for kind, optimizer in itertools.product(KINDS, ("sgd", "adamw"))),
        *(f"{kind}:sgd:4" for kind in KINDS), "llama:sgd:2:whole", "mixtral:adamw:4:offload",
    ],
}  # fmt: skip
"""Ranks -> kind of model, optimizer, ranks that share a copy, what else."""
grid = pytest.mark.parametrize(
    ("ranks", "case"),
    [
        pytest.param(ranks, case, marks=[pytest.mark.full, pytest.mark.slow], id=f"{ranks} ranks, {case}")
        for ranks, cases in CASES.items()
        for case in cases
    ],
)


@pytest.fixture(scope="module")
def outcome(environ):
    """What the ranks came to in each case, one after the other."""
    results = {}
    for ranks, cases in CASES.items():
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port",
            str(free_port()), str(Path(__file__).with_name("shards.py")), *cases,
        ]  # fmt: skip
        done = subprocess.run(command, env=environ, text=True, capture_output=True, timeout=3000, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
        results |= {(ranks, line["case"]): line for line in lines}
    return results


def tolerance(case: str) -> float:
    return 2e-2 if "bf16" in case else 1e-4 if "adamw" in case else 1e-5


@grid
def test_losses_and_weights_are_one_processs(outcome, ranks, case):
    line = outcome[ranks, case]
    assert len(line["losses"]) == STEPS
    assert line["losses"] == pytest.approx(line["wanted"], abs=tolerance(case))
    assert line["weights"] < tolerance(case)


@grid
def test_the_weights_are_divided(outcome, ranks, case):
    """A rank holds about its share of them, and while they are loaded next to nothing else."""
    line, shared = outcome[ranks, case], int(case.split(":")[2])
    assert line["dtensors"] and line["bytes_before"] < 1000
    assert line["own_share"] == pytest.approx(1 / shared, abs=0.03)


@grid
def test_a_checkpoint_goes_on_exactly(outcome, ranks, case):
    line = outcome[ranks, case]
    assert line["resumed_at"] == SAVED
    assert line["resumed"] == line["losses"][SAVED:]


@grid
def test_a_rank_answers_without_the_others(outcome, ranks, case):
    line = outcome[ranks, case]
    assert (line["alone"], line["non_finite"]) == (True, None)
    assert line["answer"] == pytest.approx(line["wanted_answer"], abs=100 * tolerance(case))


def test_a_model_that_is_not_divided_is_no_model_of_fsdps():
    """torch would train it all the same, whole on every rank."""
    with pytest.raises(RuntimeError, match="weight is not sharded over 2 ranks"):
        fsdp.check_engaged(torch.nn.Linear(4, 4), 2)
