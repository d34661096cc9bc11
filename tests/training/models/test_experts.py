"""The routers' loss of mixtures of experts beside transformers' own, which leaves out what an attention mask does."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("transformers", "deepspeed")

from dsrun.options.table import ParallelismOptions
from dsrun.training.data.packing import Packing
from dsrun.training.loop import Trainer
from dsrun.training.models.experts import REAL_TOKENS, leave_out_padding

PAD, LENGTHS = 0, [9, 4, 6]
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "num_experts_per_tok": 2, "output_router_logits": True,
    "router_aux_loss_coef": 0.5, "attn_implementation": "sdpa",
}  # fmt: skip
KINDS = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}


class Rows:
    """Examples as they come from the cache."""

    def __init__(self, lengths) -> None:
        generator = torch.Generator().manual_seed(2)
        self.rows = [torch.randint(1, 64, (length,), generator=generator).tolist() for length in lengths]

    def length(self, row):
        return len(self.rows[row])

    def ids(self, row):
        return self.rows[row]

    labels = ids


def model(kind, **more):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | KINDS[kind] | more))
    for name, weight in made.named_parameters():
        if name.endswith("gate.weight"):
            torch.nn.init.normal_(weight, std=0.5)
    return made.train()


def batch_of(made, sequences, *, packed):
    """What the loop gives a model."""
    trainer = Trainer.__new__(Trainer)
    trainer.job = SimpleNamespace(data=SimpleNamespace(official=False), parallel=ParallelismOptions())
    trainer.tokenizer = SimpleNamespace(pad_token_id=PAD)
    trainer.packing = Packing(32) if packed else None
    trainer.train_examples, trainer.masks_padding = Rows(LENGTHS), leave_out_padding(made)
    return trainer._batch(sequences)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_left_out_as_under_transformers_own_mask(kind):
    made = model(kind)
    batch = batch_of(made, [[0], [1], [2]], packed=False)
    found = made(**batch)
    found.loss.backward()
    gradients = {name: weight.grad for name, weight in made.named_parameters()}
    theirs = model(kind)
    mask = torch.tensor([[1] * length + [0] * (max(LENGTHS) - length) for length in LENGTHS])
    wanted = theirs(input_ids=batch["input_ids"], labels=batch["labels"], attention_mask=mask)
    wanted.loss.backward()
    assert float(found.aux_loss.detach()) == pytest.approx(float(wanted.aux_loss.detach()), abs=1e-6)
    assert float(found.loss.detach()) == pytest.approx(float(wanted.loss.detach()), abs=1e-6)
    for name, weight in theirs.named_parameters():
        torch.testing.assert_close(gradients[name], weight.grad, atol=1e-6, rtol=1e-5)
    without = float(model(kind)(input_ids=batch["input_ids"], labels=batch["labels"]).aux_loss.detach())
    assert abs(float(wanted.aux_loss.detach()) - without) > 1e-3, "padding would not be seen"


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_packed_sequences_is_left_out(kind):
    """Beside positions that start over transformers takes no mask; its function is asked with the scores."""
    made = model(kind)
    batch = batch_of(made, [[0, 1], [2]], packed=True)
    real = batch[REAL_TOKENS]
    assert real.sum(1).tolist() == [13, 6] and "attention_mask" not in batch
    found = made(**batch)
    theirs = importlib.import_module(type(made).__module__).load_balancing_loss_func
    assert torch.isclose(found.aux_loss, theirs(found.router_logits, 4, 2, real), atol=1e-6)
    assert (found.aux_loss - theirs(found.router_logits, 4, 2)).abs() > 1e-3, "padding would not be seen"


def test_a_model_without_a_routers_loss_stays_as_it_is():
    made = model("mixtral", output_router_logits=False)
    assert REAL_TOKENS not in batch_of(made, [[0], [1]], packed=False)
    assert "forward" not in vars(made)
