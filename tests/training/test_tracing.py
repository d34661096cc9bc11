"""The trace of a step: what it sees of real models, and that a few layers stand for all."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsrun.planner import lora
from dsrun.planner.gpu_memory import gpu_memory
from dsrun.planner.setup import Setup
from dsrun.planner.shape import from_config
from dsrun.planner.trace.recording import Recording, UnrollError
from dsrun.planner.trace.replay import replay
from dsrun.planner.trace.request import TracedModel, request_of
from dsrun.planner.trace.schedule import actions
from dsrun.training.tracing import process
from dsrun.training.tracing.recorder import Recorder
from dsrun.training.tracing.reduction import chosen_layers

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 5,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096,
}  # fmt: skip
GEMMA3 = {
    **LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 12, "head_dim": 64, "sliding_window": 256,
    "sliding_window_pattern": 6,
}  # fmt: skip
QWEN3_MOE = {
    **LLAMA, "model_type": "qwen3_moe", "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}  # fmt: skip
GRANITE = {
    **LLAMA, "model_type": "granitemoehybrid", "num_hidden_layers": 10, "num_local_experts": 0,
    "num_experts_per_tok": 0, "shared_intermediate_size": 1376,
    "mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 32,
    "layer_types": ["mamba"] * 4 + ["attention"] + ["mamba"] * 4 + ["attention"],
}  # fmt: skip
IMAGES = {
    "model_type": "gemma3", "text_config": GEMMA3, "mm_tokens_per_image": 4,
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 7,
    },
}  # fmt: skip
"""A text part with a tower that reads images."""
LORA = {"rank": 8, "target": "all", "dropout": 0.0}


def setup_of(config: dict[str, Any], **fields: Any) -> Setup:
    """A setup of one GPU in 16 bits, 4 x 1,024 tokens."""
    shape = from_config(config, "config.json")
    method = {"method": "lora", "adapters": lora.lora_weights(shape, 8)} if fields.pop("lora", False) else {}
    base = Setup(shape=shape, engine="torch", precision="pure", micro_batch=4, seq_len=1024, fused_adam=False)
    return base.changed(**{**method, **fields})


def request(config: dict[str, Any], *, reduce: bool = True, **fields: Any) -> dict[str, Any]:
    """A request of a Llama's setup for any config, as it arrives in the process."""
    made = request_of(setup_of(LLAMA, **fields), config, LORA)
    return json.loads(json.dumps({**made, "reduce": reduce}))


def unrolled(made: dict[str, Any]) -> tuple[Recording, list[Any]]:
    recording = Recording.of(process.record(made), made["points"])
    return recording, recording.unrolled()


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"checkpointing": 1},
    "every second layer": {"checkpointing": 2},
    "re-entrant": {"checkpointing": 1, "reentrant": True},
    "lora": {"lora": True, "fp32_adapters": True},
    "autocast": {"precision": "amp"},
    "eager": {"flash": False},
}


OFTEN = ("plain", "recomputed")
"""Ways that are compared in every lane."""


@pytest.mark.parametrize(
    "way", [way if way in OFTEN else pytest.param(way, marks=pytest.mark.full) for way in WAYS]
)
def test_a_few_layers_stand_for_all(way):
    """The same events as those of a trace of every layer, and the same sizes."""
    few, events = unrolled(request(LLAMA, **WAYS[way]))
    whole, all_events = unrolled(request(LLAMA, reduce=False, **WAYS[way]))
    assert len(few.chosen) < len(whole.chosen)
    assert alike(few, events) == alike(whole, all_events)


@pytest.mark.parametrize(
    "config",
    [GEMMA3, pytest.param(QWEN3_MOE, marks=pytest.mark.full), pytest.param(GRANITE, marks=pytest.mark.full)],
    ids=lambda config: config["model_type"],
)
def test_one_layer_of_each_kind_is_traced(config):
    few, events = unrolled(request(config, checkpointing=1))
    whole, all_events = unrolled(request(config, reduce=False, checkpointing=1))
    assert len(few.chosen) < len(whole.chosen)
    assert alike(few, events) == alike(whole, all_events)


def alike(recording: Recording, events: list[Any]) -> list[tuple[Any, ...]]:
    """The events by their sizes. 16-bit copies that autocast keeps go in no order: those that follow are sorted."""
    sizes = recording.sizes_at(4, 1024)
    found: list[tuple[Any, ...]] = []
    run: list[tuple[Any, ...]] = []
    for event in events:
        if event.kind == "free":
            run.append(("free", sizes[event.source]))
            continue
        found += [*sorted(run), (event.kind, event.segment, sizes[event.source] if event.source >= 0 else 0)]
        run = []
    return [*found, *sorted(run)]


def test_towers_are_frozen_and_have_no_layers_of_the_text():
    answer = process._answer({"describe": IMAGES})["described"]
    recording, _ = unrolled(request(IMAGES, checkpointing=1))
    frozen = sum(weight.elements for weight in recording.weights if not weight.trained)
    assert (answer["layers"], len(recording.kinds)) == (12, 12)
    assert answer["frozen"] == frozen > 0
    assert sum(weight.elements for weight in recording.weights) == answer["parameters"]


def test_layers_are_chosen_by_their_neighbours():
    assert chosen_layers([0] * 32) == [29, 30, 31]
    assert [[0, 1, 1, 1][number > 0] for number in chosen_layers([0, 1, 1, 1, 1, 1])] == [0, 1, 1, 1]
    alternating = chosen_layers([0, 1] * 16)
    assert len(alternating) == 4
    assert chosen_layers([5]) == [0]
    assert chosen_layers([0, 1, 2]) == [0, 1, 2]


def test_other_micro_batches_follow_from_two():
    """A line through 2 and 3 rows, beside a trace of that micro batch."""
    made = request(LLAMA, checkpointing=1)
    recording, _ = unrolled(made)
    other, _ = unrolled({**made, "points": [[5, 1024]]})
    assert recording.sizes_at(5, 1024) == other.sizes_at(5, 1024)
    assert request(LLAMA, micro_batch=1)["points"] == [[1, 1024]], "one row is recorded for itself"


@pytest.mark.parametrize("rows", [1, pytest.param(4, marks=pytest.mark.full)])
def test_other_lengths_follow_from_those_recorded(rows):
    made = request(LLAMA, flash=False, variable_lengths=True, micro_batch=rows)
    recording, _ = unrolled(made)
    assert (rows, 640) not in recording.points
    other, _ = unrolled({**made, "points": [[rows, 640]]})
    for said, true in zip(recording.sizes_at(rows, 640), other.sizes_at(rows, 640), strict=True):
        assert said == pytest.approx(true, rel=1e-3, abs=4096)
    with pytest.raises(ValueError, match="not recorded"):
        unrolled(request(LLAMA))[0].sizes_at(2, 100)


@pytest.mark.parametrize("way", ["recomputed", "lora", pytest.param("plain", marks=pytest.mark.full)])
def test_trace_and_formula_agree(way):
    config = {**LLAMA, "hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 64000}
    setup = setup_of(config, seq_len=2048, **WAYS[way])
    made = json.loads(json.dumps(request_of(setup, config, LORA)))
    model = TracedModel.of(made, {"recording": process.record(made)})
    model.check(setup)
    traced = replay(actions(setup, model.recording, model.events)).allocated
    assert traced == pytest.approx(gpu_memory(setup).allocated, rel=0.02)


def test_frozen_4_bit_matrices_keep_no_input():
    made = request(LLAMA, lora=True)
    frozen = {**made, "method": "qlora", "fp32_adapters": False}
    kept = [live_at_turn(*unrolled(one)) for one in (frozen, {**frozen, "method": "lora"})]
    assert kept[0] == kept[1]
    weights = process.record(frozen)["weights"]
    quantized = [weight for weight in weights if weight[4]]
    assert len(quantized) == 7 * LLAMA["num_hidden_layers"], "every matrix but embedding and output"
    assert not any(trained for _, _, trained, _, is_quantized in weights if is_quantized)


def live_at_turn(recording: Recording, events: list[Any]) -> int:
    """Bytes that forward leaves for backward."""
    sizes, live = recording.sizes_at(4, 1024), 0
    for event in events:
        if event.segment.kind == "turn":
            break
        live += {"allocate": 1, "free": -1}.get(event.kind, 0) * sizes[event.source]
    return live


def test_the_recorder_sees_what_lives_and_when_it_goes():
    fake = FakeTensorMode()
    with fake:
        weight = torch.empty(256, 256, requires_grad=True)
        recorder = Recorder([weight])
        with recorder:
            first = torch.ones(100, 256)
            second = first @ weight
            view = second.t()
            del first, second
            third = view.exp()
            del view
            third.sum().backward()
        recorder.close()
        weight.grad = None
    sizes = recorder.sizes
    assert sizes[:3] == [100 * 256 * 4] * 3
    assert recorder.events[:3] == [0, 1, 2], "the product is kept by its view, its input for backward"
    gone = {~event for event in recorder.events if event < 0}
    assert {0, 1} <= gone
    (gradient,) = [number for number, size in enumerate(sizes) if size == 256 * 256 * 4]
    assert gradient not in gone, "it outlives the step"


def test_dropout_costs_what_it_costs_on_a_gpu():
    """A mask of one byte an element, and no scores with flash attention."""
    gpt2 = {
        "model_type": "gpt2", "n_embd": 512, "n_layer": 4, "n_head": 8, "n_positions": 1024, "vocab_size": 4096,
    }  # fmt: skip
    without = {**gpt2, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    with_masks, plain = (live_at_turn(*unrolled(request(config))) for config in (gpt2, without))
    masks = (2 * 4 + 1) * 4 * 1024 * 512  # two in each layer, and the embedding's
    assert with_masks - plain == pytest.approx(masks, rel=0.01)


def test_the_process_answers_in_json_whatever_happens(monkeypatch, capsys):
    requests = [request(LLAMA), request({"model_type": "no-such-network"}), {"config": {}}]
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(requests)))
    process.main()
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [list(answer) for answer in answers] == [["recording"], ["error"], ["error"]]
    assert "no-such-network" in answers[1]["error"]


def test_layers_that_do_not_repeat_are_refused():
    made = request(LLAMA)
    value = process.record(made)
    with pytest.raises(UnrollError, match="mark"):
        Recording.of({**value, "marks": []}, made["points"]).unrolled()
    kinds = [*value["kinds"], 7]
    with pytest.raises(UnrollError, match="neighbours"):
        Recording.of({**value, "kinds": kinds}, made["points"]).unrolled()
    last = max(place for place, event in enumerate(value["events"]) if event < 0)
    middle = next(place for place, event in enumerate(value["events"]) if event < 0 and place > last // 2)
    events = [*value["events"]]
    events[middle] = events[middle - 1] if events[middle - 1] < 0 else events[middle + 1]
    with pytest.raises(UnrollError):
        Recording.of({**value, "events": events}, made["points"]).unrolled()


def test_stage_3_keeps_a_mixtures_experts_gathered():
    """Trace and formula agree where the experts of all layers are a third of a step's memory."""
    config = {**QWEN3_MOE, "num_hidden_layers": 6, "num_experts": 64, "moe_intermediate_size": 512}
    setup = setup_of(
        config, engine="deepspeed", stage=3, gpus=16, precision="bf16", micro_batch=1, seq_len=256,
        max_reuse=10_000_000, reduce_bucket=10_000_000, sub_group=10_000_000,
    )  # fmt: skip
    made = json.loads(json.dumps(request_of(setup, config, None)))
    recording, events = unrolled(made)
    traced = replay(list(actions(setup, recording, events))).peaks
    formula = gpu_memory(setup)
    assert formula.terms["viewed"] > formula.allocated / 3
    assert traced["turn"] == pytest.approx(formula.peaks["turn"], rel=0.1)
