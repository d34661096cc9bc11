"""What two configs really differ in."""

from __future__ import annotations

import pytest

from dsrun.config.compare import compare
from dsrun.config.rules import Setting

MICRO = {"train_micro_batch_size_per_gpu": 2}
OPTIMIZER = {"optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}


def paths(left, right, **setting):
    return [difference.path for difference in compare(left, right, Setting(**setting))]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({}, {"zero_optimization": {"stage": 0}}),
        ({}, {"_why": "a note", "zero_optimization": {"_why": "another"}}),
        ({}, {"//": "a note", "#": 1}),
        ({"zero_optimization": {"stage": 2.0}}, {"zero_optimization": {"stage": 2}}),
        ({"zero_optimization": {"stage": "2"}}, {"zero_optimization": {"stage": 2}}),
        (
            {"zero_optimization": {"reduce_bucket_size": 2e8}},
            {"zero_optimization": {"reduce_bucket_size": 200000000}},
        ),
        ({"zero_optimization": True}, {"zero_optimization": {"stage": 1}}),
        ({"zero_optimization": {"offload_param": {}}}, {"zero_optimization": {"offload_param": None}}),
        (
            {"zero_optimization": {"gather_16bit_weights_on_model_save": True}},
            {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}},
        ),
        ({"a": {"b": 1}}, {"a": {"b": 1.0}}),
        (MICRO, {**MICRO, "gradient_accumulation_steps": 1}),
    ],
)
def test_no_difference(left, right):
    assert compare(left, right, Setting()) == []
    assert compare(right, left, Setting()) == []


def test_a_difference():
    (difference,) = compare({"zero_optimization": {"stage": 3}}, {}, Setting())
    assert difference.as_dict() == {
        "path": "zero_optimization.stage",
        "before": 3,
        "after": 0,
        "given_before": True,
        "given_after": False,
        "known_before": True,
        "known_after": True,
        "does": difference.does,
    }
    assert difference.does


def test_in_the_order_of_the_configs():
    left = {"steps_per_print": 1, "zero_optimization": {"stage": 1}}
    right = {"wall_clock_breakdown": True, "zero_optimization": {"stage": 2}}
    assert paths(left, right) == ["steps_per_print", "zero_optimization.stage", "wall_clock_breakdown"]


def test_another_name_counts_as_given():
    left = {"zero_optimization": {"gather_16bit_weights_on_model_save": True}}
    (difference,) = compare(left, {}, Setting())
    assert difference.path == "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    assert (difference.given_before, difference.given_after) == (True, False)


def test_a_block_that_is_left_out_has_no_defaults():
    differences = compare(OPTIMIZER, {}, Setting())
    assert [row.path for row in differences] == ["optimizer.type", "optimizer.params.lr"]
    assert not any(row.known_after for row in differences)
    assert all(row.after is None for row in differences)


def test_unknown_keys_differ_too():
    (difference,) = compare({"a.b": {"c": [1]}}, {}, Setting())
    assert (difference.path, difference.before, difference.known_after, difference.does) == (
        "a.b.c",
        [1],
        False,
        "",
    )
    assert paths({"a": 1}, {"a": {"b": 1}}) == ["a", "a.b"]
    assert paths({"a": True}, {"a": 1}) == ["a"]


@pytest.mark.parametrize(
    ("left", "right", "world_size", "rows"),
    [
        (
            MICRO,
            {"train_batch_size": 16},
            None,
            {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps"},
        ),
        (MICRO, {"train_batch_size": 8}, 4, set()),
        (MICRO, {"train_batch_size": 16, "gradient_accumulation_steps": 2}, 4, {"train_batch_size"}),
        (MICRO, {"train_batch_size": 16, **MICRO}, 4, {"train_batch_size"}),
        (MICRO, {"train_micro_batch_size_per_gpu": "auto"}, 4, {"train_micro_batch_size_per_gpu"}),
        (MICRO, {"train_batch_size": 0}, 4, {"train_micro_batch_size_per_gpu"}),
    ],
)
def test_batch_sizes(left, right, world_size, rows):
    differences = {row.path: row for row in compare(left, right, Setting(world_size=world_size))}
    assert rows <= set(differences)
    assert bool(differences) == bool(rows)


@pytest.mark.parametrize(
    "config",
    [
        {"": 1, "\n": {"": []}},
        {"zero_optimization": [1]},
        {"zero_optimization": {"stage": {"a": 1}}},
        {"optimizer": "Adam"},
        {"train_batch_size": 10**400},
        {"train_batch_size": None, "tensor_parallel": {"autotp_size": 0}},
        {"train_batch_size": -1, "train_micro_batch_size_per_gpu": -1},
    ],
)
def test_odd_configs(config):
    assert compare(config, config, Setting(world_size=2)) == []
    compare(config, {}, Setting(world_size=2))
    compare({}, config, Setting(world_size=2))


def test_versions():
    """Defaults are those of the version."""
    assert paths({"zero_optimization": {"overlap_comm": None}}, {}, version=(0, 19)) == []
    assert paths({"zero_optimization": {"overlap_comm": None}}, {}, version=(0, 9)) in (
        [],
        ["zero_optimization.overlap_comm"],
    )
