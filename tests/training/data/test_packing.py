"""Rows in one line don't see one another, and what they contribute is what they contribute alone."""

from __future__ import annotations

import random

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("transformers")

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from running import examples
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from dsrun.training.data.batches import IGNORED, BatchPlan, packed_batch, training_batch
from dsrun.training.data.packing import Packing, borders, probe
from dsrun.training.loss import target_loss
from dsrun.training.models.kernels import attention_for

SIZE = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "vocab_size": 97, "max_position_embeddings": 256, "eos_token_id": 2,
    "pad_token_id": 0, "bos_token_id": 1, "initializer_range": 0.2,
}  # fmt: skip
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
KINDS = {
    "llama": {},
    "glm": {"attention_bias": True, "rope_parameters": HALF},
    "qwen2": {},
    "mistral": {"sliding_window": 8},
}  # fmt: skip


class Drawn:
    """Rows of (prompt, response) lengths with random ids, as the prepared ones are."""

    def __init__(self, lengths: list[tuple[int, int]], seed: int = 3) -> None:
        draw = random.Random(seed)
        self.prompts = [prompt for prompt, _ in lengths]
        self.rows = [[draw.randrange(3, 97) for _ in range(sum(pair))] for pair in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def length(self, row: int) -> int:
        return len(self.rows[row])

    def target_tokens(self, row: int) -> int:
        return self.length(row) - self.prompts[row]

    def ids(self, row: int) -> list[int]:
        return self.rows[row]

    def labels(self, row: int) -> list[int]:
        return [IGNORED] * self.prompts[row] + self.rows[row][self.prompts[row] :]


def model_of(kind: str, attention: str = "sdpa"):
    torch.manual_seed(5)
    config = AutoConfig.for_model(kind, **SIZE, **KINDS[kind])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()


def rows_of_many_lengths() -> Drawn:
    draw = random.Random(11)
    return Drawn([(draw.randint(1, 12), draw.randint(1, 25)) for _ in range(24)])


def laid(packing: Packing, lengths: list[int], room: int, targets: int = 0) -> list[list[int]]:
    """The sequences of one micro batch. targets: of each example."""
    return packing.deal(lengths, [targets] * len(lengths), ranks=1, rounds=1, room=room)[0]


def step_of(model, plan: BatchPlan, packing: Packing | None, step: int = 0) -> tuple[float, dict]:
    """The loss of an optimizer step over all its ranks, and its gradients."""
    model.zero_grad()
    total = 0.0
    for rank in range(plan.dp_size):
        part = plan.step(step, rank)
        for lines in part.micro_batches:
            if packing is None:
                batch = training_batch(plan.examples, [row for line in lines for row in line], 0)
            else:
                batch = packed_batch(plan.examples, lines, 0, packing)
            loss = target_loss(model, batch, part.target_tokens)
            loss.backward()
            total += float(loss.detach())
    return total, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


# A step's loss and gradient


@pytest.mark.parametrize(
    ("kind", "selects"),
    [
        *[(kind, False) for kind in KINDS],
        *[pytest.param(kind, True, marks=[] if kind == "llama" else pytest.mark.full) for kind in KINDS],
    ],
)
def test_a_packed_step_is_the_unpacked_one(kind, selects):
    rows, model = rows_of_many_lengths(), model_of(kind)
    packing = Packing(10_000, selects=selects)  # so that attention counts for little, and lines are long
    loss, gradients = step_of(model, BatchPlan(rows, 1, 2, 3, 2), None)
    plan = BatchPlan(rows, 1, 2, 3, 2, packing)
    batches = [batch for rank in range(2) for batch in plan.step(0, rank).micro_batches]
    assert any(len(line) > 1 for batch in batches for line in batch)
    packed_loss, packed_gradients = step_of(model, plan, packing)
    assert packed_loss == pytest.approx(loss, abs=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(packed_gradients[name], gradient, atol=1e-5, rtol=1e-4)


@settings(max_examples=examples(15), deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=9),
    hidden=st.sampled_from([1, 50, 10_000]),
    data=st.data(),
)
def test_any_lines_of_any_rows_lose_what_they_lose_alone(lengths, hidden, data):
    rows, model = Drawn(lengths), any_model()
    packing = Packing(hidden, selects=data.draw(st.booleans()))
    numbers = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=7))
    lines = laid(packing, [rows.length(row) for row in numbers], 10_000)
    batch = packed_batch(rows, [[numbers[place] for place in line] for line in lines], 0, packing)
    with torch.no_grad():
        packed = float(target_loss(model, batch, 1))
        alone = sum(float(target_loss(model, training_batch(rows, [row], 0), 1)) for row in numbers)
    assert packed == pytest.approx(alone, rel=1e-5, abs=1e-5)


def any_model(found: list = []):  # noqa: B006  (made once)
    if not found:
        found.append(model_of("glm"))
    return found[0]


# Cross-talk


@pytest.mark.parametrize("kind", KINDS)
def test_another_row_changes_nothing(kind):
    """One row's tokens are replaced; its neighbours' logits don't move, those of the row itself do."""
    rows, model = Drawn([(3, 4), (2, 6), (5, 5), (1, 3)]), model_of(kind)
    lines, starts = [[0, 1, 2], [3]], [0, 7, 15, 20]
    batch = packed_batch(rows, lines, 0, Packing(48))
    with torch.no_grad():
        before = model(**batch, use_cache=False).logits
        batch["input_ids"][0, starts[1] : starts[2]] = 96 - batch["input_ids"][0, starts[1] : starts[2]]
        after = model(**batch, use_cache=False).logits
    assert torch.equal(before[0, : starts[1]], after[0, : starts[1]])
    assert torch.equal(before[0, starts[2] : starts[3]], after[0, starts[2] : starts[3]])
    assert torch.equal(before[1], after[1])
    assert not torch.allclose(before[0, starts[1] : starts[2]], after[0, starts[1] : starts[2]], atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_probe_finds_that_rows_are_apart(kind, dtype):
    model = model_of(kind).to(dtype)
    model.train()
    assert probe(model) == (True, True)
    assert model.training


class Deaf(torch.nn.Module):
    """A model that hears only a part of what it is told."""

    def __init__(self, inner, *names: str, **more) -> None:
        super().__init__()
        self.inner, self.config, self.device = inner, inner.config, torch.device("cpu")
        self.names, self.more = names, more

    def forward(self, **options):
        return self.inner(**{name: options[name] for name in options if name in self.names}, **self.more)


class Strict(torch.nn.Module):
    """A model that knows nothing of logits_to_keep, or of positions."""

    def __init__(self, inner, refused: set[str]) -> None:
        super().__init__()
        self.inner, self.config, self.device, self.refused = inner, inner.config, torch.device("cpu"), refused

    def forward(self, **options):
        for name in sorted(self.refused & set(options)):
            raise TypeError(f"forward() got an unexpected keyword argument '{name}'")
        return self.inner(**options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_probe_finds_cross_talk(kind, dtype):
    inner = model_of(kind).to(dtype)
    names = ("input_ids", "position_ids", "logits_to_keep", "use_cache")
    assert probe(Deaf(inner, *names)) == (True, True)
    assert not probe(Deaf(inner, "input_ids", "logits_to_keep"))[0], "positions that go unheard"
    mask = torch.ones(1, 16, dtype=torch.long)  # beside a mask, transformers looks at no position
    assert not probe(Deaf(inner, *names, attention_mask=mask))[0]


def test_a_state_is_never_packed():
    """What Mamba carries on from example to example may be too little for the probe to see in 16 bits."""
    inner = model_of("llama")
    inner._is_stateful = True
    assert probe(inner) == (False, False)


def test_the_probe_finds_what_a_model_takes():
    inner = model_of("llama")
    assert probe(Strict(inner, {"logits_to_keep"})) == (True, False)
    assert probe(Strict(inner, {"position_ids"})) == (False, False)
    assert probe(Deaf(inner, "input_ids", "position_ids", "use_cache")) == (True, False)


# The kernel for rows of unequal length


def test_what_the_kernel_is_told_is_enough_to_keep_rows_apart():
    """Attention that is told by cu_seq_lens alone, in place of flash-attn, which needs a GPU."""

    def attention(module, query, key, value, attention_mask, scaling, cu_seq_lens_q, max_length_q, **_):
        assert attention_mask is None
        ends = cu_seq_lens_q.tolist()
        assert max_length_q == max(b - a for a, b in itertools.pairwise(ends))
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], is_causal=True, scale=scaling
            )
            for a, b in itertools.pairwise(ends)
        ]
        return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None

    AttentionInterface.register("told_by_lengths", attention)
    rows = rows_of_many_lengths()
    loss, gradients = step_of(model_of("glm"), BatchPlan(rows, 1, 2, 3, 2), None)
    packing = Packing(48, varlen=True, selects=True)
    plan = BatchPlan(rows, 1, 2, 3, 2, packing)
    assert all(len(batch) == 1 for batch in plan.step(0, 0).micro_batches), "one line"
    packed_loss, packed_gradients = step_of(model_of("glm", "told_by_lengths"), plan, packing)
    assert packed_loss == pytest.approx(loss, abs=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(packed_gradients[name], gradient, atol=1e-5, rtol=1e-4)


# Where rows lie


@settings(max_examples=examples(200), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=20), hidden=st.sampled_from([16, 200, 4096])
)
def test_lines_hold_every_row_in_the_room_there_is(lengths, hidden):
    for room in {sum(lengths), len(lengths) * max(lengths)}:
        lines = laid(Packing(hidden), lengths, room)
        assert sorted(place for line in lines for place in line) == list(range(len(lengths)))
        assert len(lines) * max(sum(lengths[place] for place in line) for line in lines) <= room


def test_rows_of_one_length_need_no_mask():
    assert all(len(line) == 1 for line in laid(Packing(4096), [100] * 8, 800))


def test_short_rows_lie_beside_a_long_one():
    lines = laid(Packing(4096), [400, 60, 50, 90, 70, 80], 2400)
    assert sorted(map(len, lines)) in ([1, 5], [6])


def test_what_a_long_line_costs_in_attention_is_weighed():
    lengths = [1000, 900] * 4
    assert len(laid(Packing(64), lengths, 8000)) > len(laid(Packing(100_000), [*lengths, 20], 9000))


def test_one_line_is_worth_more_where_its_prompts_need_no_logits():
    lengths = [100, 90, 95, 105]
    assert len(laid(Packing(400), lengths, 420, targets=30)) > 1
    assert len(laid(Packing(400, head=0.5), lengths, 420, targets=30)) > 1
    assert len(laid(Packing(400, head=0.5, selects=True), lengths, 420, targets=30)) == 1


def test_the_positions_of_each_row_begin_anew():
    arguments = borders([3, 1, 2], "cpu", unmasked=True)
    assert arguments["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1]]
    assert arguments["cu_seq_lens_q"].tolist() == [0, 3, 4, 6]
    assert arguments["cu_seq_lens_q"].dtype == torch.int32


@pytest.mark.parametrize(
    ("kind", "precision", "installed", "capability", "expected"),
    [
        ("llama", "bf16", True, (9, 0), "flash_attention_2"), ("glm", "fp16", True, (8, 0), "flash_attention_2"),
        ("llama", "fp32", True, (9, 0), "sdpa"), ("llama", "bf16", False, (9, 0), "sdpa"),
        ("llama", "fp16", True, (7, 5), "sdpa"), ("xglm", "bf16", True, (9, 0), "eager"),
    ],
)  # fmt: skip
def test_flash_attn_is_taken_where_it_works(
    tmp_path, monkeypatch, kind, precision, installed, capability, expected
):
    from transformers import utils

    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    monkeypatch.setattr(utils, "is_flash_attn_2_available", lambda: installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert attention_for(str(tmp_path), precision) == expected
