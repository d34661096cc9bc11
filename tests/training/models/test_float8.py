"""Linear layers in fp8, emulated on a CPU: which are taken, what they compute, and that weights stay what they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("torchao", "transformers")

from dsrun.errors import TrainingError
from dsrun.options.table import FP8_WAYS, NO_FP8
from dsrun.training.models import float8
from dsrun.training.models.adapters import linear_layers

WAYS = [way for way in FP8_WAYS if way != NO_FP8]
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip


def a_model(kind="llama", **more):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **more})
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def a_job(way="rowwise", accelerator="cpu"):
    return SimpleNamespace(training=SimpleNamespace(fp8=way), accelerator=accelerator)


def losses(model, steps=6):
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    # 39 tokens: no multiple of 16.
    ids = torch.randint(0, 64, (3, 13), generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_near_bf16s(way):
    plain, model = losses(a_model()), a_model()
    note = float8.take_float8(model, a_job(way))
    assert "14 linear layers" in note and "emulated" in note
    rounded = losses(model)
    assert rounded != plain, "something is rounded"
    assert rounded == pytest.approx(plain, abs=5e-2)
    assert rounded[-1] < rounded[0]


@pytest.mark.parametrize("way", WAYS)
def test_evaluation_computes_as_the_exported_model(way):
    plain, model = a_model(), a_model()
    float8.take_float8(model, a_job(way))
    ids = torch.arange(20)[None]
    assert not torch.equal(model(ids).logits, plain(ids).logits)
    assert torch.equal(model.eval()(ids).logits, plain.eval()(ids).logits)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(type(weight) is torch.nn.Parameter for weight in model.parameters())
    assert all(weight.equal(plain.state_dict()[name]) for name, weight in model.state_dict().items())


def test_head_routers_and_odd_sizes_are_left():
    mixture = a_model("mixtral", num_local_experts=16, num_experts_per_tok=2)
    float8.take_float8(mixture, a_job())
    taken = {name.rpartition(".")[2] for name, module in mixture.named_modules() if float8.is_float8(module)}
    assert taken == {"q_proj", "k_proj", "v_proj", "o_proj"}
    odd = a_model(intermediate_size=90)
    assert "6 have odd sizes" in float8.take_float8(odd, a_job())
    assert not any(float8.is_float8(layer.mlp.up_proj) for layer in odd.model.layers)
    assert not float8.is_float8(odd.lm_head)


def test_a_model_without_a_layer_that_can():
    with pytest.raises(TrainingError, match="multiples of 16"):
        float8.take_float8(a_model(hidden_size=40, intermediate_size=24, num_attention_heads=2), a_job())


def test_a_device_that_cant_says_so(monkeypatch):
    """Without emulation, with a torch that refuses as one without the kernel does."""

    def refuse(*_, **__):
        raise RuntimeError("Rowwise scaling is not supported on your device\nmore")

    monkeypatch.setattr("torchao.float8.float8_ops.addmm_float8_unwrapped", refuse)
    model = a_model()
    with pytest.raises(
        TrainingError, match="can't be computed on cpu: Rowwise scaling is not supported"
    ) as caught:
        float8.take_float8(model, a_job(accelerator="cuda"))
    assert "--fp8 rowwise" in str(caught.value)
    assert not any(map(float8.is_float8, linear_layers(model)))


@pytest.mark.parametrize("way", WAYS)
def test_the_units_get_sizes_that_they_take(way, monkeypatch):
    """All three products of each layer, whatever the number of tokens: rows of the second are a multiple of 16."""
    shapes = []

    def multiply(a, a_scale, b, b_scale, output_dtype, **_):
        shapes.append((tuple(a.shape), tuple(b.shape)))
        return (a.float() / a_scale @ (b.float() / b_scale)).to(output_dtype)

    def scaled(a, a_scale, b, b_scale, output_dtype, output_scale=None, bias=None, use_fast_accum=False):
        return multiply(a, a_scale, b, b_scale, output_dtype)

    monkeypatch.setattr("torchao.float8.float8_ops.addmm_float8_unwrapped", scaled)
    model = a_model()
    float8.take_float8(model, a_job(way, accelerator="cuda"))
    shapes.clear()
    assert losses(model, 2) == pytest.approx(losses(a_model(), 2), abs=5e-2)
    assert len(shapes) == 2 * 3 * 14
    assert not {size % 16 for (_, inner), (rows, columns) in shapes for size in (inner, rows, columns)} - {0}


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_compiled_layers_are_whole_graphs_with_the_same_losses(way):
    from torch._dynamo.utils import counters

    from dsrun.training.models.compiled import compile_layers

    found = []
    for compiles in (False, True):
        model = a_model()
        float8.take_float8(model, a_job(way))
        if compiles:
            compile_layers(model, backend="aot_eager")
        found.append(losses(model, 3))
    assert found[0] == found[1]
    assert counters["stats"]["unique_graphs"] and not counters["graph_break"]
