"""What of FSDP's engine needs no other ranks: sums, and how a model is divided over eight that don't exist."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from needed import needs, since

needs("torch", "transformers", "peft")

RANKS, LAYERS = 8, 3


@pytest.fixture
def ranks():
    """The first of eight ranks; the collectives of torch's fake backend leave a rank's own numbers where they are."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def small_model(*, tied: bool = False):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
    }
    config = AutoConfig.for_model("llama", vocab_size=64, **sizes, tie_word_embeddings=tied, use_cache=False)
    return AutoModelForCausalLM.from_config(config).train()


def divided(model):
    """The model over eight ranks, and what of it stays gathered until backward."""
    from dsrun.job.job import FsdpSpec
    from dsrun.training.engines import fsdp

    spec = FsdpSpec(micro_batch=1, grad_accum=1, grad_clip=0, shard_ranks=RANKS)
    job = SimpleNamespace(precision="fp32", accelerator="cpu", preset="fsdp", fsdp=spec, world_size=RANKS)
    return fsdp._shard(model, job, fsdp._mesh(job, "cpu"))


def groups(model):
    """The modules with a group of weights of their own, by name; a group is gathered and reduced together."""
    from torch.distributed.fsdp import FSDPModule

    names = {module: name for name, module in model.named_modules()}
    return {
        names[module]: [names[part.module] for group in module._get_fsdp_state()._fsdp_param_groups
                        for part in (one._module_info for one in group.fsdp_params)]
        for module in model.modules() if isinstance(module, FSDPModule)
    }  # fmt: skip


def prefetched(model, direction: str):
    """What each module has gathered before it computes, by name."""
    from torch.distributed.fsdp import FSDPModule

    names = {
        module._get_fsdp_state(): name
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule)
    }
    lists = {name: getattr(state, f"_states_to_{direction}_prefetch") for state, name in names.items()}
    return {name: [names[state] for state in states] for name, states in lists.items() if states}


EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
CHAIN = [EMBEDDING, *(f"model.layers.{number}" for number in range(LAYERS)), HEAD]


def test_embedding_and_output_layer_are_sharded_apart_from_the_model(ranks):
    model = small_model()
    kept = divided(model)
    of_groups = groups(model)
    assert set(of_groups) == {"", *CHAIN}
    assert of_groups[""] == ["model.norm"]
    assert kept == [model.lm_head]


def test_each_part_gathers_the_next_before_it_computes(ranks):
    model = small_model()
    divided(model)
    assert prefetched(model, "forward") == {name: [behind] for name, behind in pairwise(CHAIN)}
    assert prefetched(model, "backward") == {name: [before] for before, name in pairwise(CHAIN)}


def test_a_tied_embedding_stays_with_the_model(ranks):
    """It is needed from the first layer to the last."""
    model = small_model(tied=True)
    assert divided(model) == []
    assert set(groups(model)) == {"", *CHAIN[1:-1]}
    assert prefetched(model, "forward") == {name: [behind] for name, behind in pairwise(CHAIN[1:-1])}


def test_an_adapter_on_the_ends_is_in_their_groups(ranks):
    """Its small matrices are used inside the wrapper's forward, so nothing else gathers them."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(small_model(), LoraConfig(target_modules=["embed_tokens", "lm_head", "q_proj"]))
    divided(model)
    of_groups = groups(model)
    ends = [name for name in of_groups if name.endswith((EMBEDDING, HEAD))]
    assert len(ends) == 2
    assert all(any("lora" in part for part in of_groups[name]) for name in ends)


@since(torch="2.7")
def test_kept_parts_are_again_after_answers(ranks):
    """`whole` gathers all parts; afterwards each is resharded after its forward, or not, as it was before."""
    import torch

    from dsrun.training.engines import fsdp

    def resharded(model):
        return [
            group.post_forward_mesh_info is not None
            for part in fsdp._parts(model) for group in part._get_fsdp_state()._fsdp_param_groups
        ]  # fmt: skip

    model = small_model()
    kept = divided(model)
    model(input_ids=torch.zeros(1, 2, dtype=torch.long))
    before = resharded(model)
    assert before.count(False) == 2  # the model and its output layer
    engine = fsdp.Fsdp.__new__(fsdp.Fsdp)
    engine.module, engine.device, engine._kept = model, torch.device("cpu"), [model, *kept]
    engine._job = SimpleNamespace(precision="fp32")
    with engine.whole() as whole:
        assert whole
        assert not any(resharded(model))
    assert resharded(model) == before


def test_the_norm_of_large_gradients_is_right():
    """In fp32 it would be 2e-3 off."""
    import torch

    from dsrun.training.engines.fsdp import whole_norm

    gradients = [torch.full((1 << 22,), 0.1), torch.full((2, 3), 2.0)]
    wanted = (sum(float(one.double().square().sum()) for one in gradients)) ** 0.5
    norm = whole_norm(gradients)
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(wanted, rel=1e-6)
