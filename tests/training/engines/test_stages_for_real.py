"""Two pipeline stages, on two ranks and on four, beside plain torch in one process."""

from __future__ import annotations

import functools
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("deepspeed", "transformers")

from stages import CLIP, KINDS, LR, SAVED, STEPS, model, step_batches, target_tokens

from dsrun.cluster.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone")]
CASES = [(2, "llama:zero1:full:0"), (2, "glm:zero1:none:1")]
MORE = sorted(
    {
        *((2, ":".join((kind, "zero1", "selective", tied))) for kind, tied in itertools.product(KINDS, "01")),
        *((4, f"{kind}:zero1:full:{tied}") for kind, tied in itertools.product(KINDS, "01")),
    }
)


def loss_of(made, batches):
    total = 0.0
    for batch in batches:
        logits = made(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
        labels = batch["labels"][:, 1:].flatten()
        total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    return total / target_tokens(batches)


@functools.cache
def reference(kind, tied, shares):
    """Losses, norms and weights, and the evaluation loss after SAVED steps."""
    made = model(kind, tied=tied)
    optimizer = torch.optim.SGD(made.parameters(), lr=LR, momentum=0.9)
    losses, norms, evaluation = [], [], None
    for step in range(STEPS):
        if step == SAVED:
            with torch.no_grad():
                evaluation = float(loss_of(made, step_batches(99, shares)))
        loss = loss_of(made, step_batches(step, shares))
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(made.parameters(), CLIP)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: one.detach() for name, one in made.state_dict().items()}, evaluation


@pytest.fixture(scope="module")
def results(request, environ, tmp_path_factory):
    """What the ranks came to in each case; those of as many ranks in one start."""
    cases = [*CASES, *(MORE if request.config.getoption("--full") else ())]
    lines = {}
    for ranks in sorted({count for count, _ in cases}):
        folder = tmp_path_factory.mktemp(f"stages-{ranks}")
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port",
            str(free_port()), str(Path(__file__).with_name("stages.py")), str(folder),
            *(case for count, case in cases if count == ranks),
        ]  # fmt: skip
        environ = {**environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environ, text=True, capture_output=True, check=False, timeout=1500)
        assert done.returncode == 0, done.stderr[-3000:]
        records = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"'))
        lines |= {(ranks, line["case"]): line for line in records}
    return lines


@pytest.mark.parametrize(
    ("ranks", "case"), [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)]
)
def test_two_stages_train_as_plain_torch_does(results, ranks, case):
    """Losses and clipped gradients' norms, the evaluation loss, all weights by their names; and resumed, the same."""
    kind, _, _, tied = case.split(":")
    losses, norms, weights, evaluation = reference(kind, tied == "1", ranks // 2)
    line = results[ranks, case]
    assert line["losses"] == pytest.approx(losses, abs=1e-5)
    assert line["norms"] == pytest.approx(norms, rel=1e-4)
    assert max(norms) > CLIP
    assert line["evaluation"] == pytest.approx(evaluation, abs=1e-5)
    assert line["resumed"] == pytest.approx(losses[SAVED:], abs=1e-5)
    exported = torch.load(line["weights"], weights_only=True)
    of_another = {"lm_head.weight"} if tied == "1" else set()
    assert set(exported) == set(line["stored"]) == set(weights) - of_another
    for name, one in exported.items():
        assert torch.allclose(one, weights[name], atol=1e-5), name
    assert line["own"] < len(weights)
    assert line["non_finite"] is None


def test_each_rank_has_files_of_its_own(results):
    """Who wrote which: the first rank of a stage its layers, and each rank its part of the optimizer's states."""
    written = results[CASES[0]]["written_by"]
    layers = {name: rank for name, rank in written.items() if name.startswith("layer")}
    assert set(layers.values()) == {0, 1}
    for name, rank in layers.items():
        assert int(name[6:8]) in results[CASES[0]]["places"][rank], name
    states = {rank for name, rank in written.items() if "optim_states" in name}
    assert states == {0, 1}
