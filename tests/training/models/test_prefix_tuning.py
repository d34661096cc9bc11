"""P-Tuning v2: the network with a prefix computes what the formulas say, and checkpoints go in and out unchanged."""

import json
import math

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("transformers")

from chatglm_checkpoint import (
    CONFIG,
    FFN,
    GROUPS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    IDS,
    LAYERS,
    loaded,
    random_weights,
    write_checkpoint,
)

from dsrun.errors import DsrunError
from dsrun.options.table import PeftOptions
from dsrun.training.data.packing import probe
from dsrun.training.models import prefix_tuning
from dsrun.training.models.adapters import put_on
from dsrun.training.models.load import load_answering

POSITIONS = 5
WIDTH = GROUPS * HEAD_DIM


def random_prefix(*, projected=False):
    """A P-Tuning checkpoint's tensors under their official names."""
    generator = torch.Generator().manual_seed(11)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    whole = 2 * LAYERS * WIDTH
    prefix = {"embedding.weight": draw(POSITIONS, whole)}
    if projected:
        prefix |= {"trans.0.weight": draw(HIDDEN, whole) / 12, "trans.0.bias": draw(HIDDEN)}
        prefix |= {"trans.2.weight": draw(whole, HIDDEN) / 8, "trans.2.bias": draw(whole)}
    return {f"transformer.prefix_encoder.{name}": tensor for name, tensor in prefix.items()}


def reference_logits(weights, prefix, ids):
    """ChatGLM2 with a prefix from the formulas, one sequence: the prefix's keys are not turned, positions are the
    text's, and every token sees the whole prefix."""
    table = prefix["transformer.prefix_encoder.embedding.weight"]
    if "transformer.prefix_encoder.trans.0.weight" in prefix:
        p = {name.rpartition("trans.")[2]: tensor for name, tensor in prefix.items()}
        table = torch.tanh(table @ p["0.weight"].T + p["0.bias"]) @ p["2.weight"].T + p["2.bias"]
    past = table.view(POSITIONS, 2 * LAYERS, GROUPS, HEAD_DIM)

    def norm(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + CONFIG["layernorm_epsilon"]) * weight

    def turned(x):
        out = x.clone()
        for place in range(len(ids)):
            for pair in range(HEAD_DIM // 4):
                angle = place * 10000 ** (-4 * pair / HEAD_DIM)
                a, b = x[place, :, 2 * pair], x[place, :, 2 * pair + 1]
                out[place, :, 2 * pair] = a * math.cos(angle) - b * math.sin(angle)
                out[place, :, 2 * pair + 1] = b * math.cos(angle) + a * math.sin(angle)
        return out

    h = weights["transformer.embedding.word_embeddings.weight"][torch.tensor(ids)]
    for number in range(LAYERS):
        layer = f"transformer.encoder.layers.{number}."
        w = {name.removeprefix(layer): tensor for name, tensor in weights.items() if name.startswith(layer)}
        mixed = norm(h, w["input_layernorm.weight"]) @ w["self_attention.query_key_value.weight"].T
        mixed = mixed + w["self_attention.query_key_value.bias"]
        q, k, v = mixed.split([HEADS * HEAD_DIM, WIDTH, WIDTH], dim=-1)
        q = turned(q.view(-1, HEADS, HEAD_DIM))
        k = torch.cat([past[:, 2 * number], turned(k.view(-1, GROUPS, HEAD_DIM))])
        v = torch.cat([past[:, 2 * number + 1], v.view(-1, GROUPS, HEAD_DIM)])
        outputs = []
        for place in range(len(ids)):
            seen = POSITIONS + place + 1
            for head in range(HEADS):
                group = head // (HEADS // GROUPS)
                scores = k[:seen, group] @ q[place, head] / math.sqrt(HEAD_DIM)
                outputs.append(scores.softmax(0) @ v[:seen, group])
        h = h + torch.stack(outputs).view(len(ids), -1) @ w["self_attention.dense.weight"].T
        gate, up = (norm(h, w["post_attention_layernorm.weight"]) @ w["mlp.dense_h_to_4h.weight"].T).split(
            FFN, -1
        )
        h = h + (gate * torch.sigmoid(gate) * up) @ w["mlp.dense_4h_to_h.weight"].T
    return (
        norm(h, weights["transformer.encoder.final_layernorm.weight"])
        @ weights["transformer.output_layer.weight"].T
    )


def logits(model, ids, **more):
    with torch.no_grad():
        return model(torch.tensor([ids]), **more).logits[0]


@pytest.fixture
def original(tmp_path):
    return write_checkpoint(tmp_path / "original", random_weights(), "safetensors")


@pytest.fixture
def model(original, tmp_path):
    """The network, with a prefix of its own that was drawn."""
    torch.manual_seed(1)
    glm = loaded(original, tmp_path / "glm")
    prefix_tuning.add(glm, POSITIONS, dropout=0.0)
    return glm.eval()


def checkpoint(folder, tensors, **config):
    folder.mkdir(exist_ok=True)
    torch.save(tensors, folder / "pytorch_model.bin")
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("projected", [False, True], ids=["table", "projection"])
def test_an_official_checkpoint_computes_what_the_formulas_say(original, tmp_path, projected):
    prefix = random_prefix(projected=projected)
    # What a newer script of theirs saves beside it, and an older one all of:
    there = checkpoint(tmp_path / "p", prefix | {"transformer.rotary_pos_emb.inv_freq": torch.zeros(4)})
    answering = load_answering(original, dtype=torch.float32, adapter=there)
    wanted = reference_logits(random_weights(), prefix, IDS)
    assert torch.allclose(logits(answering, IDS), wanted, atol=1e-5, rtol=0)
    without = load_answering(original, dtype=torch.float32)
    assert not torch.allclose(logits(without, IDS), wanted, atol=0.1)


@pytest.mark.parametrize("projected", [False, True], ids=["table", "projection"])
def test_training_goes_on_from_an_official_checkpoint(original, tmp_path, projected):
    """From the bare file, too, which alone knows its length."""
    prefix = random_prefix(projected=projected)
    folder = checkpoint(tmp_path / "p", prefix, pre_seq_len=POSITIONS)
    for spec in (
        PeftOptions(method="ptuning", adapter=str(folder), pre_seq_len=POSITIONS, prefix_dropout=0.0),
        PeftOptions(method="ptuning", adapter=str(folder / "pytorch_model.bin"), prefix_dropout=0.0),
    ):

        class Job:
            peft = spec

            class training:  # noqa: N801
                seed = 3

        if spec.pre_seq_len != POSITIONS:
            (folder / "config.json").unlink()
        answering = load_answering(original, dtype=torch.float32)
        put_on(answering, Job)
        wanted = reference_logits(random_weights(), prefix, IDS)
        assert torch.allclose(logits(answering.train(), IDS), wanted, atol=1e-5, rtol=0)
        trained = [weight.shape for weight in answering.parameters() if weight.requires_grad]
        assert trained == [(POSITIONS, 2 * WIDTH)] * LAYERS


def test_a_saved_prefix_is_the_same_when_it_is_read(model, original, tmp_path):
    own = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert len(own) == LAYERS
    folder = tmp_path / "out"
    folder.mkdir()
    assert prefix_tuning.write(own, folder) == POSITIONS
    (stored,) = torch.load(folder / "pytorch_model.bin", weights_only=True).items()
    assert stored[0] == "transformer.prefix_encoder.embedding.weight"
    assert stored[1].shape == (POSITIONS, LAYERS * 2 * WIDTH)
    again = load_answering(original, dtype=torch.float32, adapter=folder)
    assert torch.equal(logits(again, IDS), logits(model, IDS))
    assert torch.allclose(
        logits(model, IDS), reference_logits(random_weights(), dict([stored]), IDS), atol=1e-5, rtol=0
    )


def test_padding_and_the_cache_change_nothing(model):
    whole = logits(model, IDS)
    pads = 4
    mask = torch.tensor([[0] * pads + [1] * len(IDS)])
    places = torch.tensor([[0] * pads + list(range(len(IDS)))])
    padded = logits(model, [0] * pads + IDS, attention_mask=mask, position_ids=places)
    assert torch.allclose(padded[pads:], whole, atol=1e-5, rtol=0)
    made = model.generate(
        torch.tensor([IDS]),
        max_new_tokens=6,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        eos_token_id=None,
    )[0].tolist()
    step_by_step = list(IDS)
    for _ in range(6):
        step_by_step.append(int(logits(model, step_by_step)[-1].argmax()))
    assert made == step_by_step
    assert len(set(made[len(IDS) :])) > 1


def test_rows_in_one_line_see_the_prefix_and_not_each_other(model):
    assert probe(model) == (True, True)
    first, second = IDS[:4], IDS[4:]
    places = torch.tensor([[*range(len(first)), *range(len(second))]])
    packed = logits(model, first + second, position_ids=places, use_cache=False)
    assert torch.allclose(packed[: len(first)], logits(model, first), atol=1e-5, rtol=0)
    assert torch.allclose(packed[len(first) :], logits(model, second), atol=1e-5, rtol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_are_the_same_when_activations_are_computed_again(model, reentrant):
    def gradients():
        model.zero_grad()
        ids = torch.tensor([IDS])
        model(ids, labels=ids, use_cache=False).loss.backward()
        return {
            name: weight.grad.clone() for name, weight in model.named_parameters() if weight.requires_grad
        }

    model.train()
    plain = gradients()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    again = gradients()
    assert list(plain) == list(again) and len(plain) == LAYERS
    for name, gradient in plain.items():
        assert gradient.abs().max() > 1e-4
        assert torch.allclose(gradient, again[name], atol=1e-6), name


def test_only_the_prefix_is_trained_and_dropped(model):
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert trained == [f"model.layers.{number}.self_attn.prefix.weight" for number in range(LAYERS)]
    prefix = model.get_submodule("model.layers.0.self_attn.prefix")
    prefix.dropout = 0.5
    assert (prefix.eval()(2) != 0).all()
    dropped = prefix.train()(2)
    assert 0.3 < (dropped == 0).float().mean() < 0.7
    assert not torch.equal(dropped[:, 0], dropped[:, 1]), "each row for itself"


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"transformer.prefix_encoder.embedding.weight": torch.zeros(POSITIONS, 6)}, "shape"),
        ({"prompt_embeddings": torch.zeros(POSITIONS, 6)}, "no P-Tuning prefix"),
        (
            {
                "transformer.prefix_encoder.embedding.weight": torch.zeros(POSITIONS, 2 * LAYERS * WIDTH),
                "transformer.prefix_encoder.trans.0.weight": torch.zeros(4, 2 * LAYERS * WIDTH),
            },
            "lacks a part of its projection",
        ),
        (
            {
                "transformer.prefix_encoder.embedding.weight": torch.zeros(POSITIONS, 2 * LAYERS * WIDTH),
                "transformer.prefix_encoder.gate": torch.zeros(4),
            },
            "prefix_encoder.gate|gate",
        ),
    ],
)
def test_another_checkpoint_is_refused(original, tmp_path, tensors, says):
    with pytest.raises(DsrunError, match=says) as caught:
        load_answering(original, dtype=torch.float32, adapter=checkpoint(tmp_path / "p", tensors))
    assert "pytorch_model.bin" in str(caught.value.problems[0].where)


def test_a_network_without_such_attention_is_refused():
    from transformers import GPT2Config, GPT2LMHeadModel

    class Other(GPT2LMHeadModel):
        _supports_attention_backend = False

    small = Other(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16))
    with pytest.raises(DsrunError, match="Other has no attention") as caught:
        prefix_tuning.add(small, 3, 0.0)
    assert "lora" in caught.value.problems[0].hint
