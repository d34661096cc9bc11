"""What the rules of the batch say, to the word, and where they begin and end."""

import pytest

from dsrun.config.rules import batch
from dsrun.config.rules.frame import Context, example

TOTAL, MICRO, STEPS = batch.TOTAL, batch.MICRO, batch.ACCUMULATION


def hits(rule, given):
    return list(rule.findings(Context(*example(given))))


def triad(total, micro=None, steps=None, **more):
    sizes = {TOTAL: total, MICRO: micro, STEPS: steps}
    given = {"_bare": True, **{key: value for key, value in sizes.items() if value is not None}, **more}
    return [(hit.path, hit.message, hit.suggestion) for hit in hits(batch.batch_triad, given)]


@pytest.mark.parametrize(
    ("sizes", "message", "suggestion"),
    [
        ((3,), "3 is no multiple of 4 ranks", "The nearest that works: 4."),
        ((1,), "1 is no multiple of 4 ranks", "The nearest that works: 4."),
        ((6,), "6 is no multiple of 4 ranks", "The nearest that work: 4 and 8."),
        (
            (10, 1),
            "10 doesn't agree with train_micro_batch_size_per_gpu 1 x 4 ranks = 4",
            "The nearest that work: 8 and 12.",
        ),
        (
            (12, None, 2),
            "12 doesn't agree with gradient_accumulation_steps 2 x 4 ranks = 8",
            "The nearest that work: 8 and 16.",
        ),
        (
            (64, 4, 1),
            "64 doesn't agree with train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 1 x 4 ranks = 16",
            "Set train_batch_size to 16, or gradient_accumulation_steps to 4.",
        ),
        (
            (40, 4, 1),
            "40 doesn't agree with train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 1 x 4 ranks = 16",
            "Set train_batch_size to 16, or the nearest to 40: "
            "32 (gradient_accumulation_steps 2) or 48 (gradient_accumulation_steps 3).",
        ),
        (
            (8, 4, 1),
            "8 doesn't agree with train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 1 x 4 ranks = 16",
            "Set train_batch_size to 16, or the nearest to 8: 16 (gradient_accumulation_steps 1).",
        ),
    ],
)
def test_triad(sizes, message, suggestion):
    assert triad(*sizes) == [(TOTAL, message, suggestion)]


@pytest.mark.parametrize(
    "sizes", [(4,), (8, 1), (8, 2), (8, 2, 1), (16, 2, 2), (8, None, 2), (8, "auto", 1), (-3,), (0,)]
)
def test_triad_that_agrees_or_is_anothers_matter(sizes):
    assert triad(*sizes) == []
    assert triad(6, 0) == triad(6, -1) == triad(6, 1.5) == triad(6, 2, "3") == []


@pytest.mark.parametrize(("total", "found"), [(2, 0), (3, 1), (6, 0)])
def test_sequence_groups_divide_the_ranks(total, found):
    assert len(triad(total, sequence_parallel_size=2)) == found
    assert triad(total, sequence_parallel_size=3) == [], "another rule's, and no whole number of ranks"


def test_ranks_of_no_known_number_are_not_judged():
    assert triad(3, _world_size=None) == []


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({}, 1),
        ({"sequence_parallel_size": 4}, 4),
        ({"sequence_parallel_size": 2}, 2),
        ({"sequence_parallel_size": 0}, 1),
        ({"sequence_parallel_size": True}, 1),
        ({"sequence_parallel_size": "2"}, 1),
        ({"tensor_parallel": {"autotp_size": 2}}, 1),
    ],
)
def test_model_parallel_size(config, size):
    assert batch.model_parallel_size(config) == size


def test_no_batch_size():
    (raw,) = hits(batch.no_batch_size, {"_bare": True})
    assert (raw.path, raw.message, raw.fix) == (MICRO, "there is no batch size", None)
    assert raw.suggestion == f"Set {MICRO}, say to 4, or {TOTAL}."
    (hf,) = hits(batch.no_batch_size, {"_bare": True, "_for": "hf", STEPS: "auto"})
    assert (hf.path, hf.message) == (MICRO, "there is no batch size")
    assert hf.suggestion == f'Set {TOTAL} and {MICRO} to "auto".'
    assert hf.fix.edits == (("add", TOTAL, "auto"), ("add", MICRO, "auto"))
    assert hf.fix.safe


@pytest.mark.parametrize(
    ("size", "world", "said"),
    [
        (3, 4, [("groups of 3 don't divide 4 GPUs", "Sizes that do: 1, 2, 4.")]),
        (4, 6, [("groups of 4 don't divide 6 GPUs", "Sizes that do: 1, 2, 3, 6.")]),
        (2, 1, [("groups of 2 don't divide 1 GPUs", "Sizes that do: 1.")]),
        (2, 4, []),
        (1, 3, []),
        (0, 3, []),
        (3, None, []),
    ],
)
def test_tensor_groups(size, world, said):
    found = hits(batch.tensor_groups, {"_world_size": world, "tensor_parallel": {"autotp_size": size}})
    assert [(hit.message, hit.suggestion) for hit in found] == said
    assert all(hit.path == "tensor_parallel.autotp_size" for hit in found)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (
            (10, 4),
            "10 is no multiple of train_micro_batch_size_per_gpu 4: no number of GPUs makes them agree"
            " | The nearest that work: 8 and 12.",
        ),
        (
            (3, None, 4),
            "3 is no multiple of gradient_accumulation_steps 4: no number of GPUs makes them agree"
            " | The nearest that works: 4.",
        ),
        (
            (12, 4, 2),
            "12 is no multiple of train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 2 = 8: "
            "no number of GPUs makes them agree | The nearest that work: 8 and 16.",
        ),
        ((12, 4), None),
        ((12, 0), None),
        ((-1, 2), None),
        ((12, "auto"), None),
        (("auto", 4), None),
    ],
)
def test_total_for_no_number_of_gpus(sizes, said):
    sizes = dict(zip((TOTAL, MICRO, STEPS), sizes, strict=False))
    given = {"_bare": True, "_world_size": None, **{k: v for k, v in sizes.items() if v is not None}}
    found = hits(batch.total_for_no_number_of_gpus, given)
    assert [f"{hit.message} | {hit.suggestion}" for hit in found] == ([said] if said else [])
    assert all(hit.path == TOTAL for hit in found)
    assert hits(batch.total_for_no_number_of_gpus, {**given, "_world_size": 4}) == []


@pytest.mark.parametrize(
    ("total", "gpus", "more"),
    [
        (16, 2, {}),
        (8, 1, {}),
        (12, None, {}),
        (16, None, {"sequence_parallel_size": 1}),
        (16, None, {"_world_size": 2}),
        (0, None, {}),
        (16, None, {MICRO: 0}),
    ],
)
def test_number_of_gpus_it_is_made_for(total, gpus, more):
    found = hits(
        batch.number_of_gpus_it_is_made_for, {"_world_size": None, TOTAL: total, MICRO: 4, STEPS: 2, **more}
    )
    said = f"{total} = {MICRO} 4 x {STEPS} 2 x {gpus}: it starts on no other number of GPUs"
    assert [(hit.path, hit.message) for hit in found] == ([(TOTAL, said)] if gpus else [])
    assert all(hit.suggestion == f"Leave {TOTAL} out, and it follows the number of GPUs." for hit in found)


@pytest.mark.parametrize(
    ("size", "more", "message", "suggestion"),
    [
        (
            2,
            {},
            "2 makes no groups without data_parallel_size: the batch is counted for 2 ranks, and 4 train",
            "Add data_parallel_size: 2, or remove it.",
        ),
        (
            3,
            {},
            "3 makes no groups without data_parallel_size: the batch is counted for 1.33333 ranks, and 4 train",
            "Add data_parallel_size, or remove it.",
        ),
        (
            2,
            {"_world_size": None},
            "2 makes no groups without data_parallel_size",
            "Add data_parallel_size, or remove it.",
        ),
        (
            2,
            {"_for": "hf", "_world_size": None},
            "2 makes no groups without data_parallel_size",
            "Remove it; accelerate's ParallelismConfig(sp_size=2) is what splits sequences.",
        ),
    ],
)
def test_sequence_parallel_size_alone(size, more, message, suggestion):
    (hit,) = hits(batch.sequence_parallel_size_alone, {batch.SEQUENCE: size, **more})
    assert (hit.path, hit.message, hit.suggestion) == (batch.SEQUENCE, message, suggestion)
    assert hit.fix.edits == (("remove", batch.SEQUENCE, None),)
    assert not hit.fix.safe


@pytest.mark.parametrize(
    ("sequence", "data", "said"),
    [
        (
            2,
            1,
            "sequence_parallel_size 2 x data_parallel_size 1 = 2, and there are 4 GPUs | Set data_parallel_size to 2.",
        ),
        (
            3,
            2,
            "sequence_parallel_size 3 x data_parallel_size 2 = 6, and there are 4 GPUs | Their product has to be 4.",
        ),
        (2, 2, None),
        (4, 1, None),
        (0, 3, None),
        (3, 0, None),
    ],
)
def test_groups_that_are_not_all_gpus(sequence, data, said):
    found = hits(batch.groups_that_are_not_all_gpus, {batch.SEQUENCE: sequence, batch.DATA: data})
    assert [f"{hit.message} | {hit.suggestion}" for hit in found] == ([said] if said else [])
    assert all(hit.path == batch.DATA for hit in found)


def test_sequences_split_in_code_only():
    (hit,) = hits(batch.sequences_split_in_code_only, {batch.SEQUENCE: 2, batch.DATA: 2})
    assert (hit.path, hit.message) == (batch.SEQUENCE, "2 makes groups and splits no sequence by itself")
    assert hit.suggestion == (
        "Use DistributedAttention in the model, and give each GPU its part of the sequence; or remove both sizes."
    )
    assert hits(batch.sequences_split_in_code_only, {batch.SEQUENCE: 2}) == []


@pytest.mark.parametrize(
    ("total", "path", "seen"),
    [
        (8, TOTAL, "a step sees 4 samples, not 8"),
        (None, "tensor_parallel.autotp_size", "a step sees 1 of 2 samples it counts"),
    ],
)
def test_batch_counts_tensor_parallel_gpus(total, path, seen):
    given = {"tensor_parallel": {"autotp_size": 2}, **({TOTAL: total} if total else {})}
    (hit,) = hits(batch.batch_counts_tensor_parallel_gpus, given)
    text = f"DeepSpeed counts every GPU, and groups of 2 share their samples: {seen}"
    assert (hit.path, hit.message) == (path, text)
    assert hit.suggestion == "Take 2 times the batch or the accumulation you would use without."


def test_accelerate_accumulates_once_where_the_key_is_missing():
    zero = {"zero_optimization": {"stage": 1}}
    (message,) = [said[1] for said in triad(8, 1, _for="hf", **zero)]
    assert (
        message
        == "8 doesn't agree with train_micro_batch_size_per_gpu 1 x gradient_accumulation_steps 1 x 4 ranks = 4"
    )
    assert triad(8, 1, _for="lightning") == triad(8, 1) == []
