"""--compile: each layer's forward by torch.compile, with the same losses, names and numbers of graphs.

torch._dynamo traces the layers as it always does; what it makes of the graphs is the machine's (tests/end_to_end).
"""

from itertools import accumulate

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from types import SimpleNamespace

from dsrun.errors import TrainingError
from dsrun.training.models import varlen
from dsrun.training.models.compiled import Compilation, compile_layers
from dsrun.training.models.load import recompute

pytestmark = pytest.mark.slow

STEPS = 4


def a_model(attention: str = "sdpa", way: int = 0):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        pad_token_id=0, use_cache=False, attn_implementation=attention,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config).train()
    if way:
        training = SimpleNamespace(recomputed=way, offloads_activations=False)
        recompute(made, SimpleNamespace(training=training, zero_stage=2))
        made.enable_input_require_grads()
    return made


def packed(step: int) -> dict:
    """One row of two or three examples, longer at every step, with their borders."""
    length = 9 + 5 * step
    lengths = (length // 3, length - length // 3) if step % 2 else (3, 4, length - 7)
    positions = torch.cat([torch.arange(one) for one in lengths])[None]
    ids = (positions * 7 + step) % 37 + 1
    borders = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    told = {
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": max(lengths),
        "max_length_k": length,
    }
    return {"input_ids": ids, "labels": ids, "position_ids": positions, **told, "example_lengths": lengths}


def losses(model) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for step in range(STEPS):
        loss = model(**packed(step), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.fixture
def dynamo():
    """A process that has compiled nothing."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo
    torch._dynamo.reset()


@pytest.fixture
def own_attention():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    varlen.register()
    yield varlen.ATTENTION
    ALL_ATTENTION_FUNCTIONS.pop(varlen.ATTENTION, None)
    varlen.register()


@pytest.mark.parametrize("way", [0, 2], ids=["whole", "every second layer again"])
def test_lengths_vary_and_one_graph_does_for_all_layers(dynamo, way):
    wanted = losses(a_model(way=way))
    model = a_model(way=way)
    names = list(model.state_dict())
    compile_layers(model, backend="eager")
    assert losses(model) == pytest.approx(wanted, abs=1e-4)
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert list(Compilation().notes()) == ["torch.compile: 1 graphs, whole layers"]
    assert list(model.state_dict()) == names


def test_attention_with_borders_is_left_out_and_told(dynamo, own_attention):
    wanted = losses(a_model(own_attention))
    model = a_model(own_attention)
    compile_layers(model, backend="eager")
    assert losses(model) == pytest.approx(wanted, abs=1e-4)
    graphs = dynamo.utils.counters["stats"]["unique_graphs"]
    (told,) = Compilation().notes()
    assert "torch.compiler.disable" in told
    losses(model)
    assert dynamo.utils.counters["stats"]["unique_graphs"] == graphs, "other lengths are no other graphs"


def test_evaluation_is_computed_as_without(dynamo):
    model = a_model()
    compile_layers(model, backend="eager")
    model.eval()
    with torch.no_grad():
        model(**packed(1))
    with pytest.raises(TrainingError, match="no layer"):
        list(Compilation().notes())


def test_a_limit_that_is_reached_is_told(dynamo):
    compilation = Compilation()
    model = a_model()
    compile_layers(model, backend="eager")
    with dynamo.config.patch(recompile_limit=1):
        model(**packed(0), use_cache=False)
        assert len(list(compilation.notes())) == 1
        two = {name: torch.cat([packed(1)[name]] * 2) for name in ("input_ids", "labels")}
        model(**two, use_cache=False)
        told = list(compilation.notes())
    assert any("limit" in text for text in told)


def test_a_model_without_layers_is_refused():
    with pytest.raises(TrainingError, match="its modules are layers"):
        compile_layers(SimpleNamespace(_no_split_modules=None, modules=list))
