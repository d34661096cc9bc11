"""Steps by a budget of tokens on two ranks, of several numbers of micro-steps, beside plain torch in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("deepspeed")

from token_steps import CLIP, LR, ROOM, SEED, STEPS, TOKENS, examples, model

from dsrun.cluster.ports import free_port
from dsrun.training.data.token_budget import TokenPlan

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone")]
PRESETS = ("zero2",)
MORE = ("ddp", "zero1", "zero3", "fsdp", "fsdp-whole")


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> list[float]:
    """Each example by itself, the sum over a step divided by its target tokens."""
    made = model()
    rows = examples(tmp_path_factory.mktemp("alone"))
    plan = TokenPlan(rows, SEED, 1, tokens=TOKENS, room=ROOM, packing=None)
    optimizer = torch.optim.AdamW(made.parameters(), lr=LR, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        part = plan.step(step, 0)
        total = 0.0
        for micro_batch in part.micro_batches:
            for (example,) in micro_batch:
                ids, labels = (torch.tensor(one).long() for one in (rows.ids(example), rows.labels(example)))
                logits = made(ids[None]).logits[0]
                loss = torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum")
                (loss / part.target_tokens).backward()
                total += loss.item() / part.target_tokens
        torch.nn.utils.clip_grad_norm_(made.parameters(), CLIP)
        optimizer.step()
        losses.append(total)
    return losses


@pytest.fixture(scope="module")
def results(request, environ, tmp_path_factory):
    """What two ranks came to under each preset, one after the other."""
    presets = [*PRESETS, *(MORE if request.config.getoption("--full") else ())]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port()),
        str(Path(__file__).with_name("token_steps.py")), str(tmp_path_factory.mktemp("ranks")), *presets,
    ]  # fmt: skip
    env = {**environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, text=True, capture_output=True, env=env, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"preset"')]
    return {line["preset"]: line for line in lines}


@pytest.mark.parametrize("preset", [*PRESETS, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)])
def test_the_losses_are_plain_torchs(results, reference, preset):
    assert len(set(results[preset]["counts"])) > 1, "steps of several numbers of micro-steps"
    assert results[preset]["idle"], "a rank without work"
    assert results[preset]["losses"] == pytest.approx(reference, abs=1e-5)
