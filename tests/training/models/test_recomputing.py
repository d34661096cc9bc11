"""Activation checkpointing: which layers are computed again, and that no gradient changes."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from dsrun.options.table import ComputeOptions
from dsrun.training.models.load import keep_activations, recompute

LAYERS, TOKENS = 4, 12


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=2,
        pad_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def gradients(model):
    """Every weight's, how often each layer went forward, and the bytes that were kept for backward."""
    calls, kept = [0] * LAYERS, 0
    own = {weight.data_ptr() for weight in model.parameters()}

    def count(number):
        def hook(*_):
            calls[number] += 1

        return hook

    def keep(tensor):
        nonlocal kept
        kept += 0 if tensor.data_ptr() in own else tensor.nbytes
        return tensor

    hooks = [layer.self_attn.register_forward_hook(count(n)) for n, layer in enumerate(model.model.layers)]
    rows = torch.arange(2 * TOKENS).remainder(37).reshape(2, TOKENS)
    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    for hook in hooks:
        hook.remove()
    return [weight.grad.clone() for weight in model.parameters()], calls, kept


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("way", "every", "again"),
    [("full", 2, [2, 2, 2, 2]), ("selective", 2, [2, 1, 2, 1]), ("selective", 3, [2, 1, 1, 2])],
)
def test_gradients_stay_and_the_right_layers_go_forward_twice(model, stage, way, every, again):
    plain, once, whole = gradients(model)
    assert once == [1] * LAYERS
    job = SimpleNamespace(
        zero_stage=stage,
        training=ComputeOptions(activation_checkpointing=way, recompute_every=every),
    )
    recompute(model, job)
    model.enable_input_require_grads()
    recomputed, calls, kept = gradients(model)
    keep_activations(model)
    model.disable_input_require_grads()
    assert calls == again
    assert kept < whole
    for one, other in zip(plain, recomputed, strict=True):
        assert torch.equal(one, other)
    assert gradients(model)[1] == [1] * LAYERS


def test_offloaded_inputs_pass_through_host_memory(model, monkeypatch):
    """Here without pinning, for which there has to be a GPU."""
    whole = torch.autograd.graph.save_on_cpu
    packed = []

    def unpinned(pin_memory):
        assert pin_memory
        packed.append(1)
        return whole(pin_memory=False)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", unpinned)
    plain = gradients(model)[0]
    training = ComputeOptions(activation_checkpointing="offload")
    recompute(model, SimpleNamespace(zero_stage=2, training=training))
    offloaded, calls, _ = gradients(model)
    keep_activations(model)
    assert (len(packed), calls) == (LAYERS, [2] * LAYERS)
    assert all(torch.equal(one, other) for one, other in zip(plain, offloaded, strict=True))
