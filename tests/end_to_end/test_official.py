"""--official: ChatGLM2's own recipe, beside a plain loop that was written from its description.

The loop knows nothing of dsrun but the order of the rows and the weights to begin with.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("transformers", "sentencepiece")

from running import lines_of

from dsrun.data.conversations import Conversation, Turn
from dsrun.jobs.build.finetune.data import dataset_folder
from dsrun.jobs.spec.job import DataSpec
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

STEPS, RANKS, MICRO_BATCH, LR, SEED = 8, 2, 3, 3e-3, 9
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


@pytest.mark.parametrize("option", [["--packing"], ["--grad-clip", "1"]])
def test_what_makes_the_recipe_is_not_contradicted(dsrun, option):
    said = dsrun("finetune", "chatglm2-tiny", "--official", *option, "--dry-run")
    assert said.code == 1
    assert option[0] in said.err


# For real


@pytest.fixture(scope="session")
def finetune(environ, tmp_path_factory):
    """`finetune(model, *args)`: a run on two CPU ranks; its folder."""
    pytest.importorskip("deepspeed")
    place = tmp_path_factory.mktemp("official")

    def run(model: str, *args: str) -> Path:
        folder = place / f"run {len(list(place.iterdir()))}"
        command = [
            sys.executable, "-m", "dsrun", "finetune", model, "--gpus", str(RANKS), "--precision", "fp32",
            "--max-source-length", str(SOURCE), "--max-target-length", str(TARGET), "--micro-batch", str(MICRO_BATCH),
            "--lr", str(LR), "--max-steps", str(STEPS), "--seed", str(SEED), "--generate-rows", "0",
            "--output-dir", str(folder), *args,
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


def reference(model: str, folder: str, data: Path) -> tuple[list[float], list[float]]:
    """The recipe's losses of the first steps, in one process, and what averaging over all tokens would say instead."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    optimizer = torch.optim.AdamW(network.parameters(), lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    width = SOURCE + TARGET + 1
    encoded = []
    for line in data.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        a_ids = tokenizer(FRAMES[model].format(row["content"]))["input_ids"][:SOURCE]
        b_ids = tokenizer(row["summary"], add_special_tokens=False)["input_ids"][:TARGET]
        ids = [*a_ids, *b_ids, 2]
        labels = [-100] * len(a_ids) + [*b_ids, 2]
        padding = width - len(ids)
        labels = [-100 if label == 0 else label for label in labels]
        encoded.append((ids + [0] * padding, labels + [-100] * padding))
    order = [row for epoch in range(2) for row in shuffled(len(encoded), epoch)]
    losses, over_all = [], []
    for step in range(STEPS):
        means, sums, counts = [], 0.0, 0
        for rank in range(RANKS):
            first = (step * RANKS + rank) * MICRO_BATCH
            rows = [encoded[row] for row in order[first : first + MICRO_BATCH]]
            ids, labels = (torch.tensor([row[part] for row in rows]) for part in (0, 1))
            logits = network(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, :-1].float()
            each = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="none"
            )
            targets = int((labels[:, 1:] != -100).sum())
            means.append(each.sum() / targets)
            sums, counts = sums + float(each.detach().sum()), counts + targets
        loss = torch.stack(means).mean()
        losses.append(float(loss.detach()))
        over_all.append(sums / counts)
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 - step / STEPS)
        optimizer.step()
        optimizer.zero_grad()
    return losses, over_all


def shuffled(rows: int, epoch: int) -> list[int]:
    order = list(range(rows))
    random.Random(f"{SEED}:{epoch}").shuffle(order)
    return order


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "preset"),
    [("chatglm2-tiny", "zero2"), pytest.param("llama-tiny", "zero3", marks=pytest.mark.full)],
)
def test_the_losses_are_those_of_the_recipe(finetune, tmp_path, model, preset):
    data = data_of(tmp_path)
    run = finetune(model, "--official", "--preset", preset, "--train-file", str(data))
    job = json.loads((run / "job.json").read_text(encoding="utf-8"))
    assert job["ds_config"]["gradient_clipping"] == 0
    assert job["training"]["activation_checkpointing"] == "full"
    steps = [line for line in lines_of(run / "metrics.jsonl") if "loss" in line]
    losses, over_all = reference(model, job["prepared"]["model_dir"], data)
    assert [line["loss"] for line in steps] == pytest.approx(losses, abs=1e-5)
    assert max(abs(a - b) for a, b in zip(losses, over_all, strict=True)) > 1e-3, (
        "another mean would not be seen"
    )
    assert max(line["grad_norm"] or 0 for line in steps) > 1, "clipping would not be seen"
