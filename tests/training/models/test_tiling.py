"""Loss and MLPs in tiles: the same numbers, and what is held for backward is one tile's."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

sys.path.append(str(Path(__file__).resolve().parents[1] / "data"))
from test_packing import model_of, rows_of_many_lengths, step_of

from dsrun.errors import TrainingError
from dsrun.options.table import ComputeOptions, ParallelismOptions
from dsrun.training.data.batches import BatchPlan, training_batch
from dsrun.training.data.packing import Packing
from dsrun.training.loss import target_loss
from dsrun.training.models.load import recompute
from dsrun.training.models.tiling import dense_mlps, take_tiles, tiled_cross_entropy, undivided_mlps

TILE, LONGEST = 7, 60


def a_job(tile=TILE, **compute):
    return SimpleNamespace(
        training=ComputeOptions(tile_tokens=tile, liger=False, **compute), micro_batch=1, zero_stage=2,
        data=SimpleNamespace(max_source_length=LONGEST, max_target_length=0, official=False),
        parallel=ParallelismOptions(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "packing"),
    [
        ("llama", Packing(10_000)),
        pytest.param("glm", None, marks=pytest.mark.full),
        pytest.param("qwen2", Packing(10_000, selects=True), marks=pytest.mark.full),
        pytest.param("llama", None, marks=pytest.mark.full),
    ],
)
def test_a_step_in_tiles_is_the_whole_one(kind, packing):
    rows, model = rows_of_many_lengths(), model_of(kind)
    plan = BatchPlan(rows, 1, 2, 3, 2, packing)
    loss, gradients = step_of(model, plan, packing)
    note = take_tiles(model, a_job())
    assert f"tiles of {TILE} tokens" in note
    assert f"{model.config.num_hidden_layers} MLPs in {-(-LONGEST // TILE)} tiles" in note
    tiled_loss, tiled_gradients = step_of(model, plan, packing)
    assert tiled_loss == pytest.approx(loss, abs=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(tiled_gradients[name], gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.full), 3])
def test_beside_recomputing(stage):
    """Re-entrant as under ZeRO-3, and as below it."""
    rows, model = rows_of_many_lengths(), model_of("llama")
    plan = BatchPlan(rows, 1, 2, 3, 2, Packing(10_000))
    loss, gradients = step_of(model, plan, Packing(10_000))
    job = a_job(activation_checkpointing="full")
    job.zero_stage = stage
    recompute(model, job)
    model.enable_input_require_grads()
    take_tiles(model.train(), job)
    tiled_loss, tiled_gradients = step_of(model, plan, Packing(10_000))
    assert tiled_loss == pytest.approx(loss, abs=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(tiled_gradients[name], gradient, atol=1e-5, rtol=1e-4)


def kept_for_backward(model, batch):
    """Elements, the weights aside, that one forward keeps."""
    own, kept = {weight.data_ptr() for weight in model.parameters()}, []

    def keep(tensor):
        if tensor.data_ptr() not in own:
            kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        target_loss(model, batch, 1)
    return kept


def test_backward_keeps_neither_logits_nor_the_inside_of_mlps():
    rows, model = rows_of_many_lengths(), model_of("llama")
    batch, config = training_batch(rows, [0, 1, 2], 0), model.config
    tokens = batch["input_ids"].numel()
    whole = kept_for_backward(model, batch)
    assert tokens * config.vocab_size in whole and tokens * config.intermediate_size in whole
    take_tiles(model, a_job())
    tiled = kept_for_backward(model, batch)
    assert tokens * config.vocab_size not in tiled and tokens * config.intermediate_size not in tiled
    assert sum(tiled) < 0.7 * sum(whole)


def test_every_rank_takes_as_many_tiles_as_the_job_says(monkeypatch):
    """However few tokens a micro batch has: under ZeRO-3 a tile is a gather, in which all ranks meet."""
    rows, model = rows_of_many_lengths(), model_of("llama")
    calls = []
    dense_mlps(model)[0].gate_proj.register_forward_hook(lambda _, given, __: calls.append(given[0].shape[1]))
    take_tiles(model, a_job())
    for example in (0, 1):
        calls.clear()
        batch = training_batch(rows, [example], 0)
        with torch.no_grad():
            target_loss(model, batch, 1)
        assert len(calls) == -(-LONGEST // TILE)
        assert sum(calls) == batch["input_ids"].numel()
    with torch.no_grad(), undivided_mlps(model):
        calls.clear()
        model.generate(batch["input_ids"][:, :4], max_new_tokens=3, do_sample=False)
    assert calls == [4, 1, 1]


def test_answers_are_the_same():
    ids = torch.tensor([[5, 6, 7, 8]])
    model = model_of("glm")
    logits = model(input_ids=ids).logits
    take_tiles(model, a_job())
    torch.testing.assert_close(model(input_ids=ids).logits, logits)


def test_inside_an_adapter():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        model_of("llama"), peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    )
    batch = training_batch(rows_of_many_lengths(), [0, 1, 2], 0)

    def gradients():
        model.zero_grad()
        loss = target_loss(model, batch, 1)
        loss.backward()
        return loss.item(), {n: w.grad.clone() for n, w in model.named_parameters() if w.grad is not None}

    loss, wanted = gradients()
    take_tiles(model, a_job())
    tiled_gradients, tiled = gradients()
    assert tiled_gradients == pytest.approx(loss, rel=1e-6)
    assert tiled.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(tiled[name], gradient, atol=1e-4, rtol=1e-4)


def test_in_16_bits_a_weights_gradient_is_rounded_once():
    torch.manual_seed(0)
    hidden, weight = torch.randn(400, 16).bfloat16(), torch.randn(12, 16).bfloat16()
    targets = torch.randint(0, 12, (400,))

    def of(tile):
        own = weight.clone().requires_grad_()
        loss = tiled_cross_entropy(hidden, own, targets, tile=tile, bias=None, ignore_index=-100)
        (loss / 400).backward()
        return own.grad

    exact = weight.double().requires_grad_()
    torch.nn.functional.cross_entropy(hidden.double() @ exact.t(), targets).backward()
    many, one = ((of(tile).double() - exact.grad).abs().max() for tile in (2, 400))
    assert many <= 2 * one


def test_another_model_stops_before_it_trains():
    model = model_of("qwen2")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(TrainingError, match="--tile-tokens"):
        take_tiles(model, a_job())
