"""Mixtures of experts on two ranks under ZeRO, beside plain torch in one process."""

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

from mixtures import KINDS, LR, ROUTED, SIZES, STEPS, TOTAL, model, step_batches, target_tokens, with_lora

from dsrun.cluster.ports import free_port
from dsrun.planner.gpu_memory import gpu_memory
from dsrun.planner.setup import Setup
from dsrun.planner.shape import from_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone")]
CASES = ["mixtral:zero3:full", "mixtral:zero3:none", "qwen3_moe:zero2:none", "mixtral:zero2:lora"]
EXPERTS_DIVIDED = ["qwen2_moe:zero2:ep2+none", "deepseek_v3:zero3:ep2+none", "mixtral:zero2:ep2+full"]
"""Each rank has half of the experts; layers are computed again in backward, or aren't."""
CASES += EXPERTS_DIVIDED
MORE = sorted(
    {":".join(one) for one in itertools.product(KINDS, ("zero2", "zero3"), ("none", "full"))} - {*CASES}
)
MORE += [
    f"{kind}:{preset}:ep2+{way}"
    for kind in KINDS if kind != "glm4_moe" for preset in ("zero1", "zero2", "zero3") for way in ("none", "full")
]  # fmt: skip
MORE = [case for case in MORE if case not in CASES]


@functools.cache
def reference(kind, way):
    """Losses, weights, and in each step the largest share of a layer's tokens that one expert got."""
    made = with_lora(model(kind)) if way == "lora" else model(kind)
    trained = [weight for weight in made.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=LR, momentum=0.9)
    losses, shares, routed = [], [], []
    for step in range(STEPS):
        batches = step_batches(step)
        targets, loss, counts, routers = target_tokens(batches), 0.0, {}, 0.0
        for batch in batches:
            out = made(
                input_ids=batch["input_ids"], output_router_logits="output_router_logits" in KINDS[kind]
            )
            logits, labels = out.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
            loss = loss + torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / targets
            if "output_router_logits" in KINDS[kind]:
                routers = routers + ROUTED["router_aux_loss_coef"] * out.aux_loss / len(batches)
                for layer, scores in enumerate(out.router_logits):
                    chosen = torch.nn.functional.one_hot(scores.topk(2).indices, 4).sum((0, 1))
                    counts[layer] = counts.get(layer, 0) + chosen
        loss = loss + routers
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        routed.append(float(torch.as_tensor(routers).detach()))
        shares.append(max((float(2 * one.max() / one.sum()) for one in counts.values()), default=None))
    return losses, {name: one.detach().double() for name, one in made.state_dict().items()}, shares, routed


@pytest.fixture(scope="module")
def results(request, environ):
    """What two ranks came to in each case, one after the other."""
    cases = [*CASES, *(MORE if request.config.getoption("--full") else ())]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port()),
        str(Path(__file__).with_name("mixtures.py")), *cases,
    ]  # fmt: skip
    environ = {**environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, text=True, capture_output=True, check=False, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    return {line["case"]: line for line in lines}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in MORE)])
def test_two_ranks_train_a_mixture_as_plain_torch_does(results, case):
    """Losses with the routers' part, the weights of all experts, and what is said of the routers."""
    losses, weights, shares, routed = reference(*case.split(":")[::2])
    line = results[case]
    assert line["unseen"] == [], "another stage, or more ranks, would not be seen"
    assert line["losses"] == pytest.approx(losses, abs=1e-5)
    assert set(line["weights"]) == set(weights)
    for name, (total, norm) in line["weights"].items():
        assert norm == pytest.approx(float(weights[name].norm()), rel=1e-5, abs=1e-6), name
        assert total == pytest.approx(float(weights[name].sum()), rel=1e-4, abs=1e-4), name
    told = line["told"]
    if "output_router_logits" not in KINDS[case.partition(":")[0]]:  # it balances by a bias of its own
        assert all(set(one) == {"expert_share"} and 0.5 <= one["expert_share"] <= 1 for one in told)
    else:
        assert [one["expert_share"] for one in told] == pytest.approx(shares)
        assert [one["router_loss"] for one in told] == pytest.approx(routed, abs=1e-5)


@pytest.mark.parametrize("case", EXPERTS_DIVIDED)
def test_rows_go_to_the_ranks_of_their_experts_and_back(results, case):
    """Two all-to-alls of a layer in forward and two in backward, and where it is computed again two more."""
    kind, _, way = case.split(":")
    layers = SIZES["num_hidden_layers"] - KINDS[kind].get("first_k_dense_replace", 0)
    assert results[case]["sent"] == STEPS * TOTAL // 2 * layers * (6 if way.endswith("+full") else 4)


def test_stage_3_keeps_experts_until_backward(results):
    """What the planner says of them: all layers' where none is computed again, none else."""
    experts = 4 * SIZES["num_hidden_layers"] * 3 * SIZES["hidden_size"] * SIZES["intermediate_size"]
    shape = from_config({"model_type": "mixtral", **SIZES, **KINDS["mixtral"]}, "config.json")
    for way, checkpointing in (("none", 0), ("full", 1)):
        setup = Setup(shape, gpus=2, stage=3, precision="fp32", checkpointing=checkpointing)
        viewed = gpu_memory(setup).terms["viewed"]
        assert results[f"mixtral:zero3:{way}"]["kept"] == viewed == (0 if checkpointing else 4 * experts)
