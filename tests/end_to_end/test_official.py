"""--official: ChatGLM2's own recipe, beside a plain loop that was written from its description.

The loop knows nothing of dsrun but the order of the rows and the weights to begin with.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("transformers", "sentencepiece")

from running import lines_of

from dsrun.data.conversations import Conversation, Turn
from dsrun.job.job import DataSpec
from dsrun.jobs.assembly.finetune.data import dataset_folder
from dsrun.training.data.prompts import Limits, encoder_for
from dsrun.training.data.reference_recipe import (
    ReferenceEncoder,
    reference_batch,
    rounds,
    row_length,
)
from dsrun.training.loss import reference_loss
from dsrun.training.models.tiny import _texts
from dsrun.training.models.tokenizer import fast_tokenizer, train_sentencepiece

SEED, STEPS = 9, 10
SOURCE, TARGET = 40, 24
FRAMES = {"chatglm2-tiny": "[Round 1]\n\n问：{}\n\n答：", "llama-tiny": "[INST] {} [/INST]"}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    path = tmp_path_factory.mktemp("pieces") / "tokenizer.model"
    train_sentencepiece(_texts(dataset_folder("advertise")), 2000, 3, path)
    return {style: fast_tokenizer(path, style) for style in ("chatglm2", "llama")}


@pytest.fixture(scope="module")
def encoder(tokenizers):
    return ReferenceEncoder(encoder_for(tokenizers["chatglm2"], "chatglm2"))


# Encoding


def parts(encoder, *turns: tuple[str, str], source: int = 999, target: int = 999):
    """The last turn's sequence, as the ids of its prompt, those of its answer, and what was cut."""
    talk = Conversation(tuple(Turn(*turn) for turn in turns))
    (found,) = encoder.encode_conversations([talk], Limits(source, target), train_on_prompt=False)
    ids, prompt = found[-1].ids, found[-1].prompt_tokens
    return ids[:prompt], ids[prompt:], (found[-1].shortened, found[-1].cut)


def test_a_prompt_is_one_text_after_the_two_marks(encoder, tokenizers):
    tokenizer = tokenizers["chatglm2"]
    marks = tokenizer.convert_tokens_to_ids(["[gMASK]", "<sop>"])
    text = "[Round 1]\n\n问：类型#裙\n\n答："
    ids, _, cut = parts(encoder, ("类型#裙", "a"), source=64)
    assert ids == [*marks, *tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert cut == (False, False)


def test_what_was_said_before_is_in_the_same_text(encoder, tokenizers):
    assert rounds("三", [("一", "甲"), ("二", "乙")]) == (
        "[Round 1]\n\n问：一\n\n答：甲\n\n[Round 2]\n\n问：二\n\n答：乙\n\n[Round 3]\n\n问：三\n\n答："
    )
    ids, _, _ = parts(encoder, ("一", "甲"), ("二", "乙"))
    text = "[Round 1]\n\n问：一\n\n答：甲\n\n[Round 2]\n\n问：二\n\n答："
    assert ids == tokenizers["chatglm2"](text)["input_ids"]


def test_a_long_prompt_loses_its_end_and_keeps_the_marks(encoder):
    prompt = "颜色#白色*" * 30
    (whole, _, _), (ids, _, cut) = parts(encoder, (prompt, "a")), parts(encoder, (prompt, "a"), source=20)
    assert (ids, cut) == (whole[:20], (True, False))
    assert encoder.tokenizer.decode(ids[:2]) == "[gMASK]<sop>"


def test_the_end_mark_has_a_place_beyond_the_limit(encoder):
    _, ids, cut = parts(encoder, ("q", "这件上衣采用纯棉面料" * 9), target=12)
    assert (len(ids), ids[-1], cut) == (13, 2, (False, True))
    _, ids, cut = parts(encoder, ("q", "短"), target=12)
    assert (ids[-1], cut) == (2, (False, False))


def test_text_that_looks_like_a_mark_stays_text(encoder, tokenizers):
    ids, answer, _ = parts(encoder, ("[gMASK]", "[gMASK]"))
    mark = tokenizers["chatglm2"].convert_tokens_to_ids("[gMASK]")
    assert (ids.count(mark), answer.count(mark)) == (1, 0)


def test_other_formats_keep_their_frame(tokenizers):
    encoder = ReferenceEncoder(encoder_for(tokenizers["llama"], "llama-2"))
    ids, _, _ = parts(encoder, ("hi", "a"))
    assert ids == tokenizers["llama"]("[INST] hi [/INST]")["input_ids"]


# Batches and the loss


class Prepared:
    """Rows as they come from the cache."""

    def __init__(self, *pairs: tuple[list[int], list[int]]) -> None:
        self.pairs = pairs

    def length(self, row: int) -> int:
        return len(self.ids(row))

    def ids(self, row: int) -> list[int]:
        return [*self.pairs[row][0], *self.pairs[row][1]]

    def labels(self, row: int) -> list[int]:
        return [-100] * len(self.pairs[row][0]) + self.pairs[row][1]


DATA = DataSpec(
    train_file="train.jsonl",
    eval_file=None,
    prompt_column="content",
    response_column="summary",
    max_source_length=4,
    max_target_length=3,
)


def test_every_row_is_padded_to_both_limits_and_one(tokenizers):
    rows = Prepared(([7, 8], [9, 0, 2]), ([5], [6, 2]))
    batch = reference_batch(rows, [0, 1], tokenizers["chatglm2"], DATA)
    assert row_length(DATA) == 8
    assert batch["input_ids"].tolist() == [[7, 8, 9, 0, 2, 0, 0, 0], [5, 6, 2, 0, 0, 0, 0, 0]]
    ignored = -100  # and so is the padding's token inside an answer
    assert batch["labels"].tolist() == [
        [ignored, ignored, 9, ignored, 2, *[ignored] * 3],
        [ignored, 6, 2, *[ignored] * 5],
    ]


def test_an_end_mark_that_is_the_padding_is_still_learnt():
    class Tokenizer:
        pad_token_id = eos_token_id = 2

    batch = reference_batch(Prepared(([7], [9, 2])), [0], Tokenizer(), DATA)
    assert batch["labels"].tolist()[0][:4] == [-100, 9, 2, -100]


def test_the_loss_is_the_mean_of_this_micro_batch():
    class Model:
        def __call__(self, **told):
            assert "num_items_in_batch" not in told
            assert told["use_cache"] is False
            return type("Output", (), {"loss": torch.tensor(3.0)})

    assert float(reference_loss(Model(), {"input_ids": None, "labels": None}, 4)) == 0.75


# Options


def planned(dsrun, *args: str) -> dict:
    said = dsrun("finetune", "chatglm2-tiny", *args, "--dry-run", "--json")
    assert said.code == 0, said.err
    return json.loads(said.out)["job"]


def test_the_recipe_says_what_nobody_else_says(dsrun):
    job = planned(dsrun, "--official")
    assert (job["training"]["lr"], job["training"]["max_steps"], job["training"]["epochs"]) == (
        1e-4,
        5000,
        None,
    )
    assert (job["data"]["max_source_length"], job["data"]["max_target_length"]) == (64, 64)
    assert (job["data"]["official"], job["training"]["packing"]) == (True, False)
    assert job["ds_config"]["gradient_clipping"] == 0
    assert job["ds_config"]["optimizer"]["params"]["weight_decay"] == 0


def test_what_the_recipe_leaves_open_is_the_users(dsrun):
    job = planned(dsrun, "--official", "--lr", "3e-4", "--epochs", "2", "--micro-batch", "2")
    training = job["training"]
    assert (training["lr"], training["max_steps"], training["epochs"]) == (3e-4, None, 2.0)
    assert job["ds_config"]["train_micro_batch_size_per_gpu"] == 2


def test_rows_are_packed_unless_somebody_says_otherwise(dsrun):
    assert planned(dsrun)["training"]["packing"] is True
    assert planned(dsrun, "--no-packing")["training"]["packing"] is False


@pytest.mark.parametrize(
    "options",
    [["--packing"], ["--grad-clip", "1"], ["--grad-clip", "0", "--method", "ptuning"]],
    ids=["packing", "clipping", "none with P-Tuning"],
)
def test_what_makes_the_recipe_is_not_contradicted(dsrun, options):
    said = dsrun("finetune", "chatglm2-tiny", "--official", *options, "--dry-run")
    assert said.code == 1
    assert options[0] in said.err


def test_the_scripts_own_clipping_may_be_given(dsrun):
    job = planned(dsrun, "--official", "--method", "ptuning", "--grad-clip", "1")
    assert job["ds_config"]["gradient_clipping"] == 1


# For real


class Recipe(NamedTuple):
    """Settings that one of the two scripts trains with, or leaves to its user."""

    options: tuple[str, ...]
    """Options that tell dsrun so, or leave it to --official."""
    lr: float
    ranks: int = 1
    micro_batch: int = 1
    grad_accum: int = 1
    source: int = 64
    target: int = 128
    clip: float = 0.0


FULL = Recipe(
    (
        "--gpus", "2", "--micro-batch", "3", "--lr", "3e-3",
        "--max-source-length", str(SOURCE), "--max-target-length", str(TARGET),
    ),
    lr=3e-3, ranks=2, micro_batch=3, source=SOURCE, target=TARGET,
)  # fmt: skip
P_TUNING = Recipe(("--method", "ptuning", "--gpus", "1"), lr=2e-2, grad_accum=16, clip=1.0)


@pytest.fixture(scope="session")
def finetune(environ, tmp_path_factory):
    """`finetune(model, *args)`: a run on CPU ranks; its folder."""
    pytest.importorskip("deepspeed")
    place = tmp_path_factory.mktemp("official")

    def run(model: str, *args: str) -> Path:
        folder = place / f"run {len(list(place.iterdir()))}"
        command = [
            sys.executable, "-m", "dsrun", "finetune", model, "--official", "--precision", "fp32",
            "--max-steps", str(STEPS), "--seed", str(SEED), "--generate-rows", "0", "--output-dir", str(folder), *args,
        ]  # fmt: skip
        done = subprocess.run(command, env=environ, cwd=place, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        return folder

    return run


def data_of(folder: Path) -> Path:
    """Rows of the shipped data, some prompts longer than the limit."""
    lines = (dataset_folder("advertise") / "train.jsonl").read_text(encoding="utf-8").splitlines()[:40]
    rows = [json.loads(line) for line in lines]
    for row in rows[::5]:
        row["content"] = "*".join([row["content"]] * 4)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def read_rows(model: str, tokenizer: Any, data: Path, recipe: Recipe) -> list[tuple[list[int], list[int]]]:
    """The scripts' own preparation: each row's ids and labels, all of one length."""
    width = recipe.source + recipe.target + 1
    encoded = []
    for line in data.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        a_ids = tokenizer(FRAMES[model].format(row["content"]))["input_ids"][: recipe.source]
        b_ids = tokenizer(row["summary"], add_special_tokens=False)["input_ids"][: recipe.target]
        ids = [*a_ids, *b_ids, 2]
        labels = [-100] * len(a_ids) + [*b_ids, 2]
        padding = width - len(ids)
        labels = [-100 if label == 0 else label for label in labels]
        encoded.append((ids + [0] * padding, labels + [-100] * padding))
    return encoded


def reference(
    model: str, folder: str, data: Path, recipe: Recipe, prefix: Any = None
) -> tuple[list[float], list[float], list[float]]:
    """The recipe's losses and gradient norms of the first steps, in one process, and what averaging over all tokens
    would say instead. prefix: ChatGLM2's embedding of P-Tuning, which alone is trained then."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    trained = list(network.parameters())
    if prefix is not None:
        network.requires_grad_(False)
        trained = [prefix.requires_grad_()]
    optimizer = torch.optim.AdamW(trained, lr=recipe.lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    encoded = read_rows(model, tokenizer, data, recipe)
    micro_batches = recipe.ranks * recipe.grad_accum
    wanted = STEPS * micro_batches * recipe.micro_batch
    order = [row for epoch in range(1 + wanted // len(encoded)) for row in shuffled(len(encoded), epoch)]
    losses, norms, over_all = [], [], []
    for step in range(STEPS):
        loss, sums, counts = 0.0, 0.0, 0
        for _ in range(micro_batches):
            batch, order = order[: recipe.micro_batch], order[recipe.micro_batch :]
            ids, labels = (torch.tensor([encoded[row][part] for row in batch]) for part in (0, 1))
            each = torch.nn.functional.cross_entropy(
                logits_of(network, ids, prefix)[:, :-1].float().flatten(0, 1),
                labels[:, 1:].flatten(),
                reduction="none",
            )
            targets = int((labels[:, 1:] != -100).sum())
            share = each.sum() / targets / micro_batches
            share.backward()
            loss += float(share.detach())
            sums, counts = sums + float(each.detach().sum()), counts + targets
        losses.append(loss)
        over_all.append(sums / counts)
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, recipe.clip or float("inf"))))
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * (1 - step / STEPS)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, over_all


def logits_of(network: Any, ids: Any, prefix: Any) -> Any:
    """Logits with ChatGLM2's prefix as keys and values of past tokens; the text's positions begin at 0 all the same."""
    from transformers import DynamicCache

    if prefix is None:
        return network(ids, attention_mask=torch.ones_like(ids)).logits
    config = network.config
    rows, heads, size = len(ids), config.num_key_value_heads, config.head_dim
    past = prefix.view(-1, 2 * config.num_hidden_layers, heads, size).permute(1, 2, 0, 3)
    cache = DynamicCache(config=config)
    for layer, (keys, values) in enumerate(past.unflatten(0, (-1, 2))):
        cache.update(*(one.expand(rows, -1, -1, -1) for one in (keys, values)), layer)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    seen = torch.ones(rows, prefix.shape[0] + ids.shape[1], dtype=torch.long)
    return network(ids, attention_mask=seen, position_ids=positions, past_key_values=cache).logits


def shuffled(rows: int, epoch: int) -> list[int]:
    order = list(range(rows))
    random.Random(f"{SEED}:{epoch}").shuffle(order)
    return order


def recipes_losses(run: Path, model: str, data: Path, recipe: Recipe, prefix: Any = None) -> None:
    """Compare a run with the recipe's loop."""
    job = json.loads((run / "job.json").read_text(encoding="utf-8"))
    assert job["ds_config"]["gradient_clipping"] == recipe.clip
    assert job["training"]["activation_checkpointing"] == "full"
    steps = [line for line in lines_of(run / "metrics.jsonl") if "loss" in line]
    losses, norms, over_all = reference(model, job["prepared"]["model_dir"], data, recipe, prefix)
    assert [line["loss"] for line in steps] == pytest.approx(losses, abs=1e-5)
    assert [line["grad_norm"] for line in steps] == pytest.approx(norms, rel=1e-4)
    assert max(abs(a - b) for a, b in zip(losses, over_all, strict=True)) > 1e-3, (
        "another mean would not be seen"
    )
    assert max(norms) > 1, "clipping would not be seen"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "preset"),
    [("chatglm2-tiny", "zero2"), pytest.param("llama-tiny", "zero3", marks=pytest.mark.full)],
)
def test_the_losses_are_those_of_the_recipe(finetune, tmp_path, model, preset):
    data = data_of(tmp_path)
    run = finetune(model, "--preset", preset, "--train-file", str(data), *FULL.options)
    recipes_losses(run, model, data, FULL)


@pytest.mark.slow
def test_with_p_tuning_they_are_those_of_the_other_script(finetune, tokenizers, tmp_path):
    """Losses from a prefix in the scripts' form; without its dropout, which no other program draws alike."""
    data = data_of(tmp_path)
    layers, groups, head_dim = 2, 2, 16
    folder = tmp_path / "louder"
    write_louder(folder, tokenizers["chatglm2"], layers, groups, head_dim)
    generator = torch.Generator().manual_seed(4)
    prefix = torch.randn(16, 2 * layers * groups * head_dim, generator=generator)
    started = tmp_path / "pytorch_model.bin"
    torch.save({"transformer.prefix_encoder.embedding.weight": prefix}, started)
    options = ("--model-path", str(folder), "--adapter", str(started), "--prefix-dropout", "0")
    run = finetune("chatglm2-tiny", *options, "--train-file", str(data), *P_TUNING.options)
    recipes_losses(run, "chatglm2-tiny", data, P_TUNING, prefix)


def write_louder(folder: Path, tokenizer: Any, layers: int, groups: int, head_dim: int) -> None:
    """ChatGLM2's network with random weights and such logits that a prefix has gradients to be clipped."""
    from transformers import GlmConfig, GlmForCausalLM

    config = GlmConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=groups, head_dim=head_dim, vocab_size=2048, max_position_embeddings=512,
        eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    network = GlmForCausalLM(config)
    network.lm_head.weight.data *= 60
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
