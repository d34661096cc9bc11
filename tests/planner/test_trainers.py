"""Other trainers' defaults (presets/trainers), and what they make of a set-up's memory."""

from __future__ import annotations

import dataclasses

import pytest

from dsrun import catalog
from dsrun.errors import DsrunError
from dsrun.planner import shapes, trainers
from dsrun.planner.gpu_memory import gpu_memory
from dsrun.planner.lora import lora_weights
from dsrun.planner.setup import Setup

LLAMA = shapes.shape("llama-3-8b", None)[0]
MISTRAL = shapes.shape("mistral-7b", None)[0]
NAMES = sorted(catalog.files(trainers.KIND))
OTHERS = [name for name in NAMES if name != trainers.OWN]
SAID = {"loss", "padding", "checkpointing", "adam", "dropout"}
"""What each file has to say something of."""


def setup(shape=LLAMA, **changes):
    given = {"gpus": 8, "stage": 3, "seq_len": 4096, "micro_batch": 2, "checkpointing": 1}
    return Setup(shape, **{**given, **changes})


def lora(shape=LLAMA, **changes):
    return setup(shape, **{"method": "lora", "adapters": lora_weights(shape, 16), **changes})


def test_there_are_trainers():
    assert set(NAMES) >= {"dsrun", "hf", "trl", "llama-factory", "ms-swift", "axolotl", "torchtune"}


@pytest.mark.parametrize("name", OTHERS)
def test_every_trainer_says_what_it_does_and_where_that_stands(name):
    trainer = trainers.load(name)
    assert {one.name for one in trainer.assumptions} >= SAID
    assert all(one.source and one.says and one.fields for one in trainer.assumptions)
    changed = setup().changed(**trainer.fields(setup()))
    assert changed.variable_lengths and gpu_memory(changed).allocated > 0
    assert all(trainers.of_source(f"{repository}#1").name == name for repository in trainer.repositories)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('title = "x"', "release is missing"),
        ('title = "x"\nrelease = "1"\nflavour = 3', "flavour is not a key"),
        ('title = "x"\nrelease = "1"\n[loss]\nsays = "a"\nsource = "b"\nlogit_bytes = 3', "loss.logit_bytes"),
        ('title = "x"\nrelease = "1"\n[loss]\nsays = "a"\nlogits_bytes = 3', "loss.source"),
        ('title = "x"\nrelease = "1"\n[loss]\nsays = "a"\nsource = "b"\nonly = "dpo"', "loss.only"),
    ],
)
def test_a_file_with_a_fault_is_refused(tmp_path, monkeypatch, text, said):
    folder = tmp_path / trainers.KIND
    folder.mkdir(parents=True)
    (folder / "faulty.toml").write_text(text, encoding="utf-8")
    monkeypatch.setenv("DSRUN_PATH", str(tmp_path))
    trainers.load.cache_clear()
    with pytest.raises(DsrunError, match=said.replace(".", "[.]")):
        trainers.load("faulty")


def test_what_the_user_said_stays():
    trainer = trainers.load("hf")
    given = trainers.fields_of(["activation_checkpointing", "packing"])
    assert "checkpointing" not in trainer.fields(setup(), given=given)
    assert "variable_lengths" not in trainer.fields(setup(), given=given)
    assert trainer.fields(setup())["checkpointing"] == 0


def test_only_what_changes_a_figure_is_said():
    trainer = trainers.load("hf")
    found = trainers.differences(setup(fused_loss=True), trainer, setup(fused_loss=True))
    assert found[0].assumption.name == "checkpointing" and found[0].more_bytes > 0
    named = {one.assumption.name for one in found}
    assert "loss" in named and not named & {"casts", "dropout", "adam"}


def test_adam_under_fsdp_as_it_was_measured():
    """10 bytes a weight over the ranks in pure bf16, 20 in mixed precision: weights, gradients, states, temporary."""
    for precision, each in (("pure", 10), ("amp", 20)):
        asked = setup(engine="fsdp", stage=0, precision=precision, fused_adam=False)
        states = gpu_memory(asked).peaks["step"]
        assert states == pytest.approx(each * LLAMA.parameters / 8, rel=1e-6)
        fused = gpu_memory(asked.changed(fused_adam=True)).peaks["step"]
        assert states - fused == pytest.approx((2 if precision == "pure" else 4) * LLAMA.parameters / 8)


def test_kbit_casts():
    """Embedding and output weights twice as wide, the residual stream too, and a 16-bit copy of the output weights."""
    plain = lora(engine="torch", stage=0, gpus=1, precision="pure", quantized="nf4")
    cast = plain.changed(kbit_casts=True)
    assert cast.base_bytes - plain.base_bytes == 2 * LLAMA.ends
    assert cast.block_inputs == 2 * plain.block_inputs
    more = gpu_memory(cast).peaks["turn"] - gpu_memory(plain).peaks["turn"]
    assert more == pytest.approx(2 * LLAMA.ends + plain.block_inputs + 2 * LLAMA.embedding)


def test_sharded_4_bit_weights_are_gathered_as_they_are():
    for engine, stage in (("deepspeed", 3), ("fsdp", 0)):
        plain = lora(engine=engine, stage=stage)
        quantized = plain.changed(method="qlora", quantized="nf4")
        terms, packed = gpu_memory(plain).terms, gpu_memory(quantized).terms
        assert packed["weights"] < 0.4 * terms["weights"]
        assert packed["gathered"] <= terms["gathered"]
    assert (
        gpu_memory(lora(stage=3, method="qlora", quantized="nf4")).terms["gathered"]
        < 0.7 * (gpu_memory(lora(stage=3)).terms["gathered"])
    )


def test_a_loss_in_pieces_of_its_own():
    """It holds a piece's logits, and leaves the MLP whole."""
    whole = setup(micro_batch=4)
    pieces = whole.changed(loss_tokens=256)
    terms, small = gpu_memory(whole).terms, gpu_memory(pieces).terms
    assert small["logits"] < 0.3 * terms["logits"]
    assert small["layer"] == terms["layer"]


def test_every_field_of_a_file_is_a_setups():
    fields = {field.name for field in dataclasses.fields(Setup)}
    for name in NAMES:
        for assumption in trainers.load(name).assumptions:
            assert set(assumption.fields) <= fields
