"""Weights that ZeRO-3 divided, while held-out prompts are answered on two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from needed import needs
from running import words_of

needs("torch", "deepspeed")

from dsrun.cluster.ports import free_port

pytestmark = pytest.mark.slow
PROMPTS, LONGEST = 6, 16
METHODS = {
    "full": ("--preset", "zero3"),
    "lora": ("--preset", "zero3", "--method", "lora"),
    "ptuning": ("--preset", "zero3", "--method", "ptuning", "--pre-seq-len", "4"),
}
COMPILES = {"full, offloaded": ("--preset", "zero3-offload")}
every_method = pytest.mark.parametrize(
    "method", [*METHODS, *(pytest.param(method, marks=pytest.mark.full) for method in COMPILES)]
)


@pytest.fixture(scope="module")
def results(request, environ, data, tmp_path_factory):
    """What answering took, and gave, by the method that trains the model."""
    folder, jobs = tmp_path_factory.mktemp("answering"), []
    methods = METHODS | (COMPILES if request.config.getoption("--full") else {})
    for method, options in methods.items():
        words = [
            *words_of("chatglm2-tiny", folder / method), *data, *options, "--generate-rows", str(PROMPTS),
            "--set", "zero_optimization.stage3_param_persistence_threshold=0", "--dry-run", "--json",
        ]  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "dsrun", *words], env=environ, text=True, capture_output=True, check=True
        )
        path = folder / f"{method}.json"
        path.write_text(json.dumps(json.loads(done.stdout)["job"]), encoding="utf-8")
        jobs.append(str(path))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port()),
        str(Path(__file__).with_name("answering.py")), *jobs,
    ]  # fmt: skip
    env = {**environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=env, text=True, capture_output=True, check=False, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line)["found"] for line in done.stdout.splitlines() if line.startswith('{"found"')]
    return dict(zip(methods, lines, strict=True))


@every_method
def test_weights_are_gathered_once_and_not_for_each_token(results, method):
    each, once = (results[method][name]["gathered"] / results[method]["weights"] for name in ("each", "once"))
    assert 0.9 < once < 1.1
    assert each > LONGEST / 2


@every_method
def test_the_answers_are_the_same(results, method):
    each, once = (results[method][name]["answers"] for name in ("each", "once"))
    assert len(once) == PROMPTS
    assert once == each


@every_method
def test_weights_are_divided_again_and_as_they_were(results, method):
    assert results[method]["divided"] > 0
    assert results[method]["each"]["divided again"]
    assert results[method]["once"]["divided again"]


@pytest.mark.parametrize("method", METHODS)
def test_the_evaluation_loss_is_the_same(results, method):
    each, once = (results[method][name]["loss"] for name in ("each", "once"))
    assert once == pytest.approx(each, rel=1e-6)
