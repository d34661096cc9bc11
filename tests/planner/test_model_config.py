"""A model's config, however odd: a shape, or sentences that say what is wrong with it; never an internal error."""

from __future__ import annotations

import json
import math
import random

import pytest
from test_shape import BASE, CHATGLM2

from dsrun.errors import DsrunError
from dsrun.planner.families import FAMILIES, Family
from dsrun.planner.model_config import MOST, ModelConfig, UnknownShapeError
from dsrun.planner.plan import MemoryBudget, judge
from dsrun.planner.setup import Setup
from dsrun.planner.shape import EXPERTS, Shape, from_config
from dsrun.planner.speed import Hardware

ODD = [None, -1, 0, 1, 2.5, 1e30, 10**40, math.nan, math.inf, "64", True, [], {"a": 1}, 10**9]
A100 = Hardware(matrix_tflops=312, fp32_tflops=19.5, memory_gb_s=2039, link_gb_s=300)
SWITCHES = [key for family in FAMILIES.values() for key in (
    family.qkv_bias, family.out_bias, family.mlp_bias, family.qk_norm_key, *(family.dropout or ())[:1], *family.only,
) if isinstance(key, str) and key]  # fmt: skip


def base(family: str) -> dict[str, object]:
    return {"model_type": family, **BASE.get(family, CHATGLM2)}


def keys_of(family: str) -> list[str]:
    """Everything that is read of a family's config."""
    known = FAMILIES[family]
    sizes = {key for size in Family.SIZES for key in known.names(size)}
    mixture = known.experts
    mixed = {*mixture.count, mixture.width, mixture.shared, mixture.dense} if mixture else set()
    own = {
        "tie_word_embeddings",
        "multi_query",
        "is_encoder_decoder",
        "vision_config",
        "word_embed_proj_dim",
        *SWITCHES,
    }
    return sorted({*base(family), *sizes, *mixed, *EXPERTS, *own} - {""})


def described(values) -> Shape | None:
    """The shape, or None where it is refused in sentences; every other exception goes through."""
    try:
        shape = from_config(values, "x")
    except DsrunError as error:
        assert error.problems
        assert all(
            problem.what and "\n" not in problem.what and len(problem.what) < 600
            for problem in error.problems
        )
        return None
    numbers = [
        value
        for value in vars(shape).values()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    ]
    assert all(type(number) is int and 0 <= number <= MOST for number in numbers)
    assert min(shape.layers, shape.hidden, shape.intermediate, shape.heads, shape.kv_heads, shape.vocab) >= 1
    assert 0 < shape.active <= shape.parameters <= MOST
    return shape


def planned(shape: Shape) -> None:
    room = MemoryBudget(gpus=2, nodes=1, gpu_bytes=80e9, hardware=A100, host_bytes=500e9)
    for stage in (0, 3):
        assert judge("x", Setup(shape, gpus=2, stage=stage), room).preset == "x"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_with_every_odd_value(family):
    for key in keys_of(family):
        for value in ODD:
            shape = described({**base(family), key: value})
            if shape is not None:
                planned(shape)
        without = {name: old for name, old in base(family).items() if name != key}
        described(without)


@pytest.mark.parametrize("family", FAMILIES)
def test_many_odd_values_at_once(family):
    draw = random.Random(family)  # the same in every run
    keys, taken = keys_of(family), 0
    for _ in range(500):
        changes = {
            draw.choice(keys): draw.choice([*ODD, draw.randint(-3, 300)]) for _ in range(draw.randint(1, 4))
        }
        shape = described({**base(family), **changes})
        taken += shape is not None
    assert taken  # some of them are networks


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("mixtral", "num_experts_per_tok", None), ("mixtral", "num_local_experts", "8"),
        ("qwen2_moe", "shared_expert_intermediate_size", [1]), ("deepseek_v3", "kv_lora_rank", "x"),
        ("deepseek_v3", "qk_nope_head_dim", []), ("deepseek_v2", "first_k_dense_replace", math.inf),
        ("glm4_moe", "moe_intermediate_size", {}),
    ],
)  # fmt: skip
def test_sizes_of_experts_and_latents_are_reported_by_name(family, key, value):
    with pytest.raises(DsrunError) as error:
        from_config({**base(family), key: value}, "x")
    assert key in str(error.value)


def test_more_experts_are_chosen_than_there_are():
    with pytest.raises(DsrunError, match="num_experts_per_tok is 9"):
        from_config({**base("mixtral"), "num_experts_per_tok": 9}, "x")


def test_what_is_missing_is_another_matter_than_what_is_wrong():
    llama = base("llama")
    for values in (
        {**llama, "vocab_size": None},
        {**llama, "model_type": "mamba"},
        {**llama, "num_experts": 4},
    ):
        with pytest.raises(UnknownShapeError):
            from_config(values, "x")
    for values in ({**llama, "vocab_size": "x"}, {**llama, "model_type": "mamba", "hidden_size": -1}):
        with pytest.raises(DsrunError) as error:
            from_config(values, "x")
        assert not isinstance(error.value, UnknownShapeError)


def test_readers_of_switches_and_shares():
    reader = ModelConfig({"a": None, "b": 1, "c": "no", "d": 0.5, "e": 7, "f": math.nan}, "x")
    assert (
        reader.switch("a", default=True),
        reader.switch("b", default=False),
        reader.switch("z", default=True),
    ) == (False, True, True)
    assert (reader.share("d", 0.1), reader.share("a", 0.1), reader.share("z", 0.1)) == (0.5, 0.0, 0.1)
    assert not reader.wrong
    assert [reader.switch("c", default=True), reader.share("e", 0.1), reader.share("f", 0.1)] == [
        True,
        0.1,
        0.1,
    ]
    assert [problem.what for problem in reader.wrong] == ["c is 'no'", "e is 7", "f is nan"]


@pytest.mark.parametrize("command", ["plan", "finetune"])
@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", 1e30), ("hidden_size", -1), ("vocab_size", "x"), ("num_hidden_layers", 10**15)],
)
def test_plan_and_finetune_refuse_the_same_config(dsrun, tmp_path, monkeypatch, command, key, value):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**base("llama"), key: value}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "a.jsonl").write_text('{"content": "a", "summary": "b"}\n' * 4)
    more = ("--train-file", "a.jsonl", "--gpus", 1, "--dry-run") if command == "finetune" else ("--gpus", 2)
    said = dsrun(command, folder, *more)
    assert said.code == 1, said
    assert key in said.err or "weights" in said.err, said.err
