"""Which rank trains on which rows at which step."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections import Counter

import pytest
from needed import needs

needs("torch")

import pyarrow as pa
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from running import examples

from dsrun import catalog
from dsrun.training.data import packing
from dsrun.training.data.balance import shard
from dsrun.training.data.batches import (
    IGNORED,
    BatchPlan,
    Examples,
    filled,
    in_turn,
    packed_batch,
    prompt_batch,
    sequence_share,
    shares,
    training_batch,
)
from dsrun.training.data.packing import Packing

SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())), ("prompt_tokens", pa.int32()),
        ("prompt", pa.string()), ("response", pa.string()),
    ]
)  # fmt: skip


def write_rows(path, lengths: list[tuple[int, int]], chunk: int = 4096) -> Examples:
    """Rows of so many (prompt, response) tokens; row 7's first token is 7000."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        for start in range(0, len(lengths), chunk):
            part = lengths[start : start + chunk]
            ids = [
                [(start + place) * 1000 + token for token in range(prompt + response)]
                for place, (prompt, response) in enumerate(part)
            ]
            names = [f"第{start + place}行" for place in range(len(part))]
            columns = [ids, [prompt for prompt, _ in part], names, names]
            writer.write_batch(pa.record_batch(columns, schema=SCHEMA))
    return Examples(path)


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory):
    return tmp_path_factory.mktemp("rows") / "a user's 行.arrow"


LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=40)
PLANS = {
    "lengths": LENGTHS,
    "seed": st.integers(0, 2**32),
    "world_size": st.integers(1, 4),
    "micro_batch": st.integers(1, 4),
    "grad_accum": st.integers(1, 3),
}
MASKED, VARLEN = Packing(32), Packing(32, varlen=True)
WAYS = st.sampled_from([{}, {"packing": MASKED}, {"packing": VARLEN}, {"in_order": True}])


def chosen(plan: BatchPlan, step: int) -> list[int]:
    """The rows of a step, over all ranks and micro-steps."""
    return [
        row
        for rank in range(plan.dp_size)
        for micro_batch in plan.step(step, rank).micro_batches
        for row in rows_of(micro_batch)
    ]


def test_in_order_micro_batches_are_the_same_on_any_ranks(rows_file):
    rows = write_rows(rows_file, [(1 + row % 5, 1 + row % 7) for row in range(30)])
    plans = [BatchPlan(rows, 3, ranks, 2, 4 // ranks, in_order=True) for ranks in (1, 2, 4)]

    def micro_batches(plan, step):
        return sorted(one for rank in range(plan.dp_size) for one in plan.step(step, rank).micro_batches)

    for step in range(5):
        first, *others = (micro_batches(plan, step) for plan in plans)
        assert len(first) == 4
        assert others == [first, first]


def rows_of(micro_batch: list[list[int]]) -> list[int]:
    return [row for line in micro_batch for row in line]


@settings(max_examples=examples(80), deadline=None)
@given(**PLANS, steps=st.integers(1, 12), way=WAYS)
def test_every_row_once_in_every_epoch(
    rows_file, lengths, seed, world_size, micro_batch, grad_accum, steps, way
):
    plan = BatchPlan(write_rows(rows_file, lengths), seed, world_size, micro_batch, grad_accum, **way)
    counts = Counter(row for step in range(steps) for row in chosen(plan, step))
    whole = steps * plan.step_examples // len(lengths)
    assert set(counts) <= set(range(len(lengths)))
    assert all(counts[row] in {whole, whole + 1} for row in range(len(lengths)))
    assert counts.total() == steps * plan.step_examples


@settings(max_examples=examples(80), deadline=None)
@given(**PLANS, step=st.integers(0, 50), way=WAYS)
def test_every_step_is_full_and_its_counts_are_true(
    rows_file, lengths, seed, world_size, micro_batch, grad_accum, step, way
):
    rows = write_rows(rows_file, lengths)
    plan = BatchPlan(rows, seed, world_size, micro_batch, grad_accum, **way)
    parts = [plan.step(step, rank) for rank in range(world_size)]
    assert all(len(part.micro_batches) == grad_accum for part in parts)
    assert all(rows_of(batch) for part in parts for batch in part.micro_batches), "ZeRO-3: all take part"
    if "packing" not in way:
        assert all(len(line) == 1 for part in parts for batch in part.micro_batches for line in batch)
    dealt = [row for part in parts for batch in part.micro_batches for row in rows_of(batch)]
    assert sorted(dealt) == sorted(chosen(BatchPlan(rows, seed, world_size, micro_batch, grad_accum), step))
    for part in parts:  # every rank divides by the same numbers
        assert part.target_tokens == sum(lengths[row][1] for row in dealt)
        assert part.tokens == sum(sum(lengths[row]) for row in dealt)


@settings(max_examples=examples(60), deadline=None)
@given(**PLANS)
def test_ranks_share_no_row_within_an_epoch(rows_file, lengths, seed, world_size, micro_batch, grad_accum):
    plan = BatchPlan(write_rows(rows_file, lengths), seed, world_size, micro_batch, grad_accum)
    assume(plan.step_examples <= len(lengths))
    for step in range(len(lengths) // plan.step_examples):
        dealt = chosen(plan, step)
        assert len(set(dealt)) == len(dealt)


@settings(max_examples=examples(60), deadline=None)
@given(**PLANS, step=st.integers(0, 50), way=WAYS)
def test_a_resumed_run_sees_the_rows_of_an_undisturbed_one(
    rows_file, lengths, seed, world_size, micro_batch, grad_accum, step, way
):
    rows = write_rows(rows_file, lengths)
    settings_of_the_run = (seed, world_size, micro_batch, grad_accum)
    undisturbed = BatchPlan(rows, *settings_of_the_run, **way)
    for earlier in range(step):
        undisturbed.step(earlier, 0)
    resumed = BatchPlan(Examples(rows_file), *settings_of_the_run, **way)
    for rank in range(world_size):
        assert resumed.step(step, rank) == undisturbed.step(step, rank)


def test_the_order_is_the_same_in_every_process(rows_file):
    rows = write_rows(rows_file, [(1, 2)] * 50)
    code = (
        "import sys; from pathlib import Path; from dsrun.training.data.batches import BatchPlan, Examples\n"
        "plan = BatchPlan(Examples(Path(sys.argv[1])), 42, 2, 2, 2)\n"
        "print([plan.step(step, rank).micro_batches for step in range(9) for rank in range(2)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(rows_file)], capture_output=True, text=True, check=True,
        cwd=catalog.PACKAGE.parent,
    )  # fmt: skip
    plan = BatchPlan(rows, 42, 2, 2, 2)
    assert done.stdout.strip() == str(
        [plan.step(step, rank).micro_batches for step in range(9) for rank in range(2)]
    )


def test_seeds_and_epochs_have_orders_of_their_own(rows_file):
    rows = write_rows(rows_file, [(1, 1)] * 64)
    orders = {
        tuple(chosen(BatchPlan(rows, seed, 1, 1, 1), epoch * 64 + place)[0] for place in range(64))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 4


def test_without_packing_all_ranks_pad_to_about_as_many_tokens(rows_file):
    lengths = [(1, length) for length in range(1, 65)]
    random.Random(3).shuffle(lengths)
    rows = write_rows(rows_file, lengths)
    plan = BatchPlan(rows, 0, 2, 4, 1)
    for step in range(8):
        batches = [list(map(rows.length, rows_of(plan.step(step, rank).micro_batches[0]))) for rank in (0, 1)]
        assert min(batches[0]) >= max(batches[1]), "neighbours by length share a micro batch"
        equal_numbers = sorted(batches[0] + batches[1], reverse=True)[0] * 4
        assert max(len(batch) * max(batch) for batch in batches) <= equal_numbers
    assert any(
        len(plan.step(step, 0).micro_batches[0]) < len(plan.step(step, 1).micro_batches[0])
        for step in range(8)
    )


@settings(max_examples=examples(80), deadline=None)
@given(**PLANS, step=st.integers(0, 50), packing=st.sampled_from([MASKED, Packing(4096), VARLEN]))
def test_a_packed_micro_batch_holds_no_more_than_a_padded_one_could(
    rows_file, lengths, seed, world_size, micro_batch, grad_accum, step, packing
):
    rows = write_rows(rows_file, lengths)
    plan = BatchPlan(rows, seed, world_size, micro_batch, grad_accum, packing)
    batches = [batch for rank in range(world_size) for batch in plan.step(step, rank).micro_batches]
    longest = max(rows.length(row) for batch in batches for row in rows_of(batch))
    for batch in batches:
        assert len(batch) * max(sum(map(rows.length, line)) for line in batch) <= micro_batch * longest
    if packing is VARLEN:
        assert all(len(batch) == 1 for batch in batches), "its kernel takes one sequence"
        loads = [sum(map(rows.length, rows_of(batch))) for batch in batches]
        assert max(loads) - min(loads) <= longest


def test_a_mask_never_grows_too_large(rows_file, monkeypatch):
    lengths = [(1, 1 + 7 * number % 64) for number in range(64)]
    plan = BatchPlan(rows := write_rows(rows_file, lengths), 0, 2, 8, 1, Packing(4096))
    for side, packs in ((160, True), (16, False)):
        monkeypatch.setattr(packing, "MASK_ELEMENTS", side * side)
        for step, rank in itertools.product(range(4), range(2)):
            (batch,) = plan.step(step, rank).micro_batches
            width = max(sum(map(rows.length, line)) for line in batch)
            assert any(len(line) > 1 for line in batch) == packs
            assert not packs or len(batch) * width * width <= side * side


def test_rows_in_order_are_dealt_in_turn(rows_file):
    plan = BatchPlan(
        write_rows(rows_file, [(1, 1 + number % 9) for number in range(40)]), 5, 2, 3, 2, in_order=True
    )
    order = list(range(40))
    random.Random("5:0").shuffle(order)
    first = [[rows_of(b) for b in plan.step(0, rank).micro_batches] for rank in range(2)]
    assert first == [[order[0:3], order[6:9]], [order[3:6], order[9:12]]]


@pytest.mark.parametrize(
    ("rows", "step_rows", "epochs", "expected"),
    [
        (100, 10, 1.0, 10), (100, 10, 3.0, 30), (101, 10, 1.0, 11), (100, 8, 1.5, 19), (5, 8, 1.0, 1),
        (100, 10, 0.01, 1), (100, 10, 1.1, 11), (1000, 10, 0.3, 30), (10, 1, 0.7, 7),
    ],
)  # fmt: skip
def test_steps_of_so_many_epochs(rows_file, rows, step_rows, epochs, expected):
    plan = BatchPlan(write_rows(rows_file, [(1, 1)] * rows), 0, step_rows, 1, 1)
    assert plan.total_steps(epochs, None) == expected
    assert plan.total_steps(None, 7) == 7


@settings(max_examples=examples(100), deadline=None)
@given(
    count=st.integers(0, 60), world_size=st.integers(1, 5), batch=st.integers(1, 9), seed=st.integers(0, 9)
)
def test_evaluation_rows_are_shared_out_whole(count, world_size, batch, seed):
    rows = random.Random(seed).sample(range(1000), count)
    dealt = shares(rows, world_size, batch)
    assert len(dealt) == world_size
    assert len({len(share) for share in dealt}) == 1, "ZeRO-3: every rank takes part in every round"
    assert Counter(row for share in dealt for part in share for row in part) == Counter(rows)
    assert all(len(part) <= batch for share in dealt for part in share)


@settings(max_examples=examples(60), deadline=None)
@given(lengths=LENGTHS, micro_batch=st.integers(1, 6), world_size=st.integers(1, 4))
def test_evaluation_batches_are_filled(rows_file, lengths, micro_batch, world_size):
    rows = write_rows(rows_file, lengths)
    order = sorted(range(len(rows)), key=rows.length)
    room = micro_batch * rows.length(order[-1])
    batches = filled(rows, order, room)
    assert [row for batch in batches for row in batch] == order
    assert all(len(batch) * rows.length(batch[-1]) <= room for batch in batches)
    for batch, following in itertools.pairwise(batches):
        assert (len(batch) + 1) * rows.length(following[0]) > room, "one more would have fitted"
    dealt = in_turn(batches, world_size)
    assert len({len(share) for share in dealt}) == 1
    assert sorted(row for share in dealt for batch in share for row in batch) == sorted(order)


# Rows of a file


def test_rows_of_a_file(rows_file):
    lengths = [(2, 3), (1, 1), (4, 2)]
    rows = write_rows(rows_file, lengths)
    assert len(rows) == 3
    assert [rows.length(row) for row in range(3)] == [5, 2, 6]
    assert [rows.target_tokens(row) for row in range(3)] == [3, 1, 2]
    assert rows.ids(1).tolist() == [1000, 1001]
    assert rows.prompt_ids(2) == [2000, 2001, 2002, 2003]
    assert (rows.text(0, "prompt"), rows.text(2, "response")) == ("第0行", "第2行")


def test_rows_of_a_file_in_many_batches(rows_file):
    lengths = [(1 + number % 3, 1 + number % 5) for number in range(50)]
    whole = write_rows(rows_file, lengths)
    ids = [whole.ids(row).tolist() for row in range(50)]
    parts = write_rows(rows_file, lengths, chunk=7)
    assert [parts.ids(row).tolist() for row in range(50)] == ids
    assert [parts.text(row, "prompt") for row in range(50)] == [f"第{row}行" for row in range(50)]


# Padding


def test_a_training_batch(rows_file):
    rows = write_rows(rows_file, [(2, 1), (1, 3), (1, 1)])
    batch = training_batch(rows, [2, 1], pad_id=99)
    assert batch["input_ids"].tolist() == [[2000, 2001, 99, 99], [1000, 1001, 1002, 1003]]
    assert batch["labels"].tolist() == [
        [IGNORED, 2001, IGNORED, IGNORED],
        [IGNORED, 1001, 1002, 1003],
    ]
    assert IGNORED == -100


def test_a_token_that_is_also_the_padding_is_trained_on(rows_file):
    rows = write_rows(rows_file, [(1, 2), (2, 3)])
    batch = training_batch(rows, [0, 1], pad_id=1)  # 1 is a token of row 0's response
    assert batch["labels"].tolist()[0] == [IGNORED, 1, 2, IGNORED, IGNORED]


@settings(max_examples=examples(40), deadline=None)
@given(lengths=LENGTHS, data=st.data())
def test_padding_is_never_trained_on(rows_file, lengths, data):
    rows = write_rows(rows_file, lengths)
    some = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=6))
    batch = training_batch(rows, some, pad_id=0)
    assert batch["input_ids"].shape == batch["labels"].shape == (len(some), max(map(rows.length, some)))
    counted = (batch["labels"] != IGNORED).sum(dim=1).tolist()
    assert counted == [rows.target_tokens(row) for row in some]
    trained = batch["labels"] != IGNORED
    assert (batch["labels"][trained] == batch["input_ids"][trained]).all()


def test_a_packed_batch(rows_file):
    rows = write_rows(rows_file, [(2, 1), (1, 3), (1, 1)])
    batch = packed_batch(rows, [[1], [0, 2]], 99, MASKED)
    assert batch["input_ids"].tolist() == [
        [1000, 1001, 1002, 1003, 99],
        [0, 1, 2, 2000, 2001],
    ]
    assert batch["labels"].tolist() == [
        [IGNORED, 1001, 1002, 1003, IGNORED],
        [IGNORED, IGNORED, 2, IGNORED, 2001],
    ]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0], [0, 1, 2, 0, 1]]
    assert "attention_mask" not in batch, "beside one, transformers does not look at the positions"


def test_one_row_a_line_is_merely_padded(rows_file):
    rows = write_rows(rows_file, [(2, 1), (1, 3)])
    assert set(packed_batch(rows, [[0], [1]], 99, MASKED)) == {"input_ids", "labels"}


def test_a_line_for_the_kernel_of_unequal_lengths(rows_file):
    rows = write_rows(rows_file, [(2, 1), (1, 3)])
    batch = packed_batch(rows, [[1, 0]], 99, VARLEN)
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 4, 7]
    assert (batch["max_length_q"], batch["max_length_k"]) == (4, 4)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2]]


def test_only_what_comes_before_a_target_needs_logits(rows_file):
    rows = write_rows(rows_file, [(3, 1), (1, 2)])
    batch = packed_batch(rows, [[0, 1]], 99, Packing(32, selects=True))
    assert batch["logits_to_keep"].tolist() == [2, 4, 5]
    assert batch["labels"].tolist() == batch["shift_labels"].tolist() == [[3, 1001, 1002]]
    batch = packed_batch(rows, [[0], [1]], 99, Packing(32, selects=True))
    assert batch["logits_to_keep"].tolist() == [0, 1, 2]
    assert batch["labels"].tolist() == [[IGNORED, IGNORED, 3], [1001, 1002, IGNORED]]


def test_a_row_that_is_trained_on_whole_is_not_foretold_by_the_row_before_it(rows_file, monkeypatch):
    rows = write_rows(rows_file, [(1, 2), (1, 1)])
    monkeypatch.setattr(Examples, "labels", Examples.ids)
    batch = packed_batch(rows, [[0, 1]], 99, MASKED)
    assert batch["labels"].tolist() == [[IGNORED, 1, 2, IGNORED, 1001]]


def test_prompts_are_padded_on_the_left():
    batch = prompt_batch([[5, 6], [7, 8, 9, 10], [11]], pad_id=0)
    assert batch["input_ids"].tolist() == [[0, 0, 5, 6], [7, 8, 9, 10], [0, 0, 0, 11]]
    assert batch["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]]


@settings(max_examples=examples(40), deadline=None)
@given(lengths=LENGTHS, ranks=st.integers(1, 5), selects=st.booleans())
def test_a_sequence_is_shared_out_whole(rows_file, lengths, ranks, selects):
    rows = write_rows(rows_file, lengths)
    chosen = range(len(lengths))
    whole = packed_batch(rows, [chosen], 0, Packing(16, varlen=True))
    parts = [
        sequence_share(rows, chosen, 0, ranks=ranks, index=index, selects=False) for index in range(ranks)
    ]
    width = whole["input_ids"].shape[1]
    assert len({part["input_ids"].shape for part in parts}) == 1, "ranks exchange as much as one another"

    def together(name):
        return torch.cat([part[name] for part in parts], dim=1)

    for name in ("input_ids", "position_ids"):
        assert together(name)[:, :width].equal(whole[name])
    following = torch.nn.functional.pad(whole["labels"], (0, 1), value=IGNORED)[:, 1:]
    assert together("labels")[:, :width].equal(following)
    assert (together("labels")[:, width:] == IGNORED).all()
    lengths_told = {part["example_lengths"] for part in parts}
    assert len(lengths_told) == 1, "attention sees the whole sequence on each"
    (told,) = lengths_told
    assert sum(told) == ranks * parts[0]["input_ids"].shape[1]
    assert told[: len(lengths)] == whole["example_lengths"]
    if selects:
        kept = [
            sequence_share(rows, chosen, 0, ranks=ranks, index=index, selects=True) for index in range(ranks)
        ]
        targets = [one["labels"][one["labels"] != IGNORED] for one in kept]
        assert torch.cat(targets).equal(following[following != IGNORED])


def test_examples_that_are_long_beside_the_width_are_one_sequence(rows_file):
    """There by what attention costs, more tokens come together than a micro batch of the longest has."""
    packing = Packing(1, varlen=True)
    lengths = [468, 667, 438, 461]
    by_cost = shard(list(map(packing.weight, lengths)), 1, 2)
    assert any(sum(lengths[place] for place in some) > 2 * 667 for some in by_cost)
    plan = BatchPlan(write_rows(rows_file, [(1, length - 1) for length in lengths]), 1, 1, 2, 2, packing)
    batches = plan.step(0, 0).micro_batches
    assert all(len(sequences) == 1 for sequences in batches)
    assert all(sum(lengths[row] for row in sequences[0]) <= 2 * 667 for sequences in batches)
    assert sorted(row for sequences in batches for row in sequences[0]) == [0, 1, 2, 3]
