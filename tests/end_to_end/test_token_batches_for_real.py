"""Steps by a budget of tokens in a run that is killed: resumed, it takes the steps that it would have taken."""

from __future__ import annotations

import os
import signal

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

from running import finish, held_at, let_go, same, starts_of

pytestmark = [pytest.mark.slow, pytest.mark.full]
STEPS, SAVE_STEPS, KILLED_AT = 9, 3, 5
WORDS = (
    "--gpus", "2", "--precision", "fp32", "--tokens-per-batch", "400", "--generate-rows", "0", "--no-score-before",
    "--max-source-length", "40", "--max-target-length", "16", "--allow-truncation", "--warmup-steps", "0",
    "--eval-steps", "1000", "--max-steps", str(STEPS), "--save-steps", str(SAVE_STEPS), "--keep", "9",
)  # fmt: skip


def words(preset, run_dir, data):
    return ("finetune", "llama-tiny", "--output-dir", run_dir, "--preset", preset, *WORDS, *data)


@pytest.fixture(scope="module", params=["zero2", "fsdp"])
def runs(request, tmp_path_factory, dsrun_here, data):
    """A run that nothing happens to; and one of which a rank gets kill -9, resumed."""
    place = tmp_path_factory.mktemp("tokens")
    whole = finish(dsrun_here(*words(request.param, place / "whole", data)), place / "whole")
    assert whole.code == 0, whole.err
    process = dsrun_here(*words(request.param, place / "killed", data))
    ranks = held_at(process, place / "killed", KILLED_AT)
    os.kill(ranks[1], signal.SIGKILL)
    let_go(ranks)
    assert finish(process, place / "killed").code != 0
    again = finish(dsrun_here("resume", place / "killed"), place / "killed")
    assert again.code == 0, again.err
    return whole, again


def test_the_steps_are_those_of_an_undisturbed_run(runs):
    whole, again = runs
    assert starts_of(again.run_dir) == [0, SAVE_STEPS]
    same(again.losses, whole.losses, 0.0)
    tokens = [[line["tokens"] for line in run.metrics if "loss" in line] for run in runs]
    assert tokens[0] == tokens[1] and len(set(tokens[0])) > 1, "no step is like the other"
    assert all(count <= 400 for count in tokens[0])
