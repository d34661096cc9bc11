"""--method and what goes with it, from the command line to the job: defaults, adapters, refusals, memory and disk."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from asking import finetune_request

from dsrun.cli.finetune import command
from dsrun.cli.parsing.options import given
from dsrun.cluster.devices import Gpu, Machine
from dsrun.errors import DsrunError
from dsrun.job.job import Job, ModelSpec
from dsrun.jobs.assembly import finetune
from dsrun.jobs.assembly.checks import disk_check
from dsrun.jobs.assembly.resume import resumed
from dsrun.models import peft_methods
from dsrun.models.adapters import read_adapter
from dsrun.options.commands import FinetuneOptions
from dsrun.options.table import PeftOptions

GIB = 2**30
CPU = Machine("cpu", (), 8, "no GPU", 64 * GIB)
CHATGLM2 = {
    "model_type": "glm", "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 28,
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 65024,
    "attention_bias": True, "tie_word_embeddings": False, "dtype": "float16",
}  # fmt: skip


def cards(free, count=1):
    gpus = tuple(Gpu(i, "NVIDIA A100", f"GPU-{i}", 80 * GIB, (8, 0), int(free * GIB)) for i in range(count))
    return Machine("cuda", gpus, 32, f"{count} x NVIDIA A100", 500 * GIB)


@pytest.fixture(autouse=True)
def _own_places(own_places, monkeypatch):
    """And bitsandbytes is there."""
    installed(monkeypatch, "bitsandbytes", "peft")


def installed(monkeypatch, *names, without=()):
    """As if these packages were there, and those not."""
    real = importlib.util.find_spec

    def find(name, *args):
        if name in without:
            return None
        return object() if name in names else real(name, *args)

    monkeypatch.setattr(peft_methods.importlib.util, "find_spec", find)


@pytest.fixture
def plan(tmp_path):
    """`plan(machine, *words)`: what finetune would start; nothing is downloaded."""
    path = tmp_path / "the lab's 数据.jsonl"
    path.write_text('{"content": "类型#裙", "summary": "一条裙子。"}\n' * 9, encoding="utf-8")

    def make(machine, *words, model="llama-tiny"):
        words = ["--train-file", str(path), *map(str, words)]
        params = command.make_context("finetune", [model, *words]).params
        request = finetune.FinetuneRequest(model, given(FinetuneOptions, params))
        return finetune.plan(request, machine, {}, download=False)

    return make


def said(plan, *args, **more):
    with pytest.raises(DsrunError) as caught:
        plan(*args, **more)
    return " | ".join(f"{problem} {problem.hint}" for problem in caught.value.problems)


def lora_folder(folder: Path, **fields) -> Path:
    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA", "r": 4, "lora_alpha": 32, "lora_dropout": 0.05, "bias": "none", "use_dora": False,
        "target_modules": ["v_proj", "q_proj"], "base_model_name_or_path": "/models/base",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def prefix_folder(folder: Path, **fields) -> Path:
    folder.mkdir(parents=True)
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    if fields:
        (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        ((), 2e-3), (("--method", "lora"), 2e-4), (("--method", "ptuning"), 2e-2),
        (("--method", "lora", "--lr", "3e-4"), 3e-4),
    ],
)  # fmt: skip
def test_each_method_has_its_learning_rate(plan, words, rate):
    """Before the model file's own, which is a full fine-tune's."""
    assert plan(CPU, *words, model="chatglm2-tiny").job.training.lr == rate


def test_the_official_recipe_with_p_tuning(plan):
    job = plan(CPU, "--official", "--method", "ptuning", "--gpus", "1").job
    assert (job.micro_batch, job.grad_accum, job.training.max_steps, job.training.lr) == (1, 16, 3000, 2e-2)
    assert job.peft.pre_seq_len == 128 and job.peft.prefix_dropout == 0.1
    assert (job.data.max_source_length, job.data.max_target_length) == (64, 128)
    assert job.ds_config["gradient_clipping"] == 1


def test_what_was_asked_for_is_in_the_job(plan):
    words = (
        "--method",
        "lora",
        "--lora-rank",
        5,
        "--lora-alpha",
        7,
        "--lora-dropout",
        0.2,
        "--lora-target",
        "q_proj",
    )
    job = plan(CPU, *words).job
    assert job.peft == PeftOptions(
        method="lora", lora_rank=5, lora_alpha=7.0, lora_dropout=0.2, lora_target="q_proj"
    )
    assert job.peft.freezes
    assert Job.from_json(job.to_json(), "job.json") == job


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--lora-rank", 4), "--lora-rank"),
        (("--method", "ptuning", "--lora-alpha", 4), "--lora-alpha"),
        (("--method", "lora", "--pre-seq-len", 4), "--method ptuning"),
        (("--export-format", "adapter"), "full fine-tune makes none"),
        (("--method", "ptuning", "--attention", "eager"), "needs sdpa"),
        (("--method", "lora", "--adapter", "nowhere"), "no such folder or file"),
    ],
)
def test_what_does_not_go_together_is_said(plan, words, says):
    assert says in said(plan, CPU, *words)


@pytest.mark.parametrize("model", ["llama-tiny", "chatglm2-tiny"])
def test_layers_that_the_model_does_not_have_are_named_before_it_starts(plan, model):
    text = said(plan, CPU, "--method", "lora", "--lora-target", "q_proj,query_key_value", model=model)
    assert "no query_key_value" in text and "o_proj" in text
    assert plan(CPU, "--method", "lora", "--lora-target", "q_proj, lm_head", model=model).job.peft.lora_target


@pytest.mark.parametrize("model_type", peft_methods.LINEAR)
def test_linear_layers_are_transformers_own(model_type):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    fields = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "vocab_size": 16,
    }
    config = transformers.AutoConfig.for_model(
        model_type, intermediate_size=8, num_hidden_layers=1, pad_token_id=0, **fields
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    linear = {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert linear == set(peft_methods.LINEAR[model_type])


def test_a_prefix_is_not_merged(plan):
    assert "layout" in said(plan, CPU, "--method", "ptuning", "--export-format", "chatglm")


def test_without_peft_there_is_no_lora(plan, monkeypatch):
    installed(monkeypatch, without=("peft",))
    assert "needs peft" in said(plan, CPU, "--method", "lora")
    assert plan(CPU, "--method", "ptuning").job.peft.method == "ptuning", "it needs none"


# QLoRA


def test_four_bits_need_a_gpu(plan):
    assert "needs a CUDA GPU" in said(plan, CPU, "--method", "qlora")


def test_four_bits_need_bitsandbytes(plan, monkeypatch):
    installed(monkeypatch, "peft", without=("bitsandbytes",))
    text = said(plan, cards(79), "--method", "qlora")
    assert "pip install" in text
    assert "bitsandbytes" in text


def test_four_bits_are_not_cut_apart(plan):
    text = said(plan, cards(79, 2), "--method", "qlora", "--preset", "zero3")
    assert "ZeRO-3" in text and "scales" in text
    assert plan(cards(79), "--method", "qlora", "--preset", "zero2").job.peft.method == "qlora"


# Adapters to go on with


def test_a_lora_is_gone_on_with_as_it_is(plan, tmp_path):
    folder = lora_folder(tmp_path / "a lora")
    job = plan(CPU, "--adapter", folder).job
    assert job.peft == PeftOptions(
        method="lora",
        lora_rank=4,
        lora_alpha=32.0,
        lora_dropout=0.05,
        lora_target="q_proj,v_proj",
        adapter=str(folder),
    )
    assert job.training.lr == 2e-4
    assert plan(CPU, "--adapter", folder, "--lora-dropout", 0.3).job.peft.lora_dropout == 0.3
    assert plan(cards(79), "--adapter", folder, "--method", "qlora").job.peft.method == "qlora"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--lora-rank", 8), "was made with 4"),
        (("--lora-target", "all"), "was made with q_proj,v_proj"),
        (("--method", "ptuning"), "is LoRA"),
        (("--method", "full"), "full"),
    ],
)
def test_a_lora_can_not_become_another(plan, tmp_path, words, says):
    assert says in said(plan, CPU, "--adapter", lora_folder(tmp_path / "a"), *words)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"use_rslora": True}, "use_rslora"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"peft_type": "PREFIX_TUNING"}, "computes something else"),
        ({"r": None}, "lacks r"),
        ({"target_modules": None}, "lacks r"),
    ],
)
def test_what_is_more_than_plain_lora_is_refused(tmp_path, fields, says):
    with pytest.raises(DsrunError, match=says):
        read_adapter(lora_folder(tmp_path / "a", **fields))


def test_a_p_tuning_checkpoint_is_gone_on_with(plan, tmp_path):
    folder = prefix_folder(tmp_path / "checkpoint-3000", model_type="chatglm", pre_seq_len=64)
    job = plan(CPU, "--adapter", folder).job
    assert (job.peft.method, job.peft.pre_seq_len, job.peft.adapter) == ("ptuning", 64, str(folder))
    assert "made with 64" in said(plan, CPU, "--adapter", folder, "--pre-seq-len", 128)
    bare = plan(CPU, "--adapter", folder / "pytorch_model.bin").job.peft
    text = said(plan, CPU, "--adapter", folder / "pytorch_model.bin", "--pre-seq-len", 64)
    assert "--pre-seq-len" in text
    assert (bare.method, bare.adapter) == ("ptuning", str(folder / "pytorch_model.bin"))


def test_what_is_no_adapter_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("")
    for path, says in (
        ("empty", "holds no adapter"),
        ("notes.txt", "is not an adapter"),
        ("gone", "no such"),
    ):
        with pytest.raises(DsrunError, match=says) as caught:
            read_adapter(tmp_path / path)
        assert caught.value.problems[0].where == str(tmp_path / path)
    lora = lora_folder(tmp_path / "lora")
    (lora / "adapter_model.safetensors").unlink()
    with pytest.raises(DsrunError, match="holds no weights"):
        read_adapter(lora)
    (lora / "adapter_config.json").write_text("[1]")
    with pytest.raises(DsrunError, match="config"):
        read_adapter(lora)


# Memory and disk


def test_a_7b_fits_with_lora_where_it_does_not_in_full(plan):
    words = (
        "--preset",
        "zero2",
        "--gpus",
        "1",
        "--micro-batch",
        "1",
        "--activation-checkpointing",
        "full",
        "--precision",
        "bf16",
    )
    text = said(plan, cards(23), *words, model="llama-2-7b")
    assert "out of memory" in text
    job = plan(cards(23), *words, "--method", "lora", model="llama-2-7b").job
    full = plan(cards(500), *words, model="llama-2-7b").job
    assert job.prediction["gpu_held_bytes"] < full.prediction["gpu_held_bytes"] / 6
    small = plan(cards(9), *words, "--method", "qlora", model="llama-2-7b").job
    assert small.prediction["gpu_held_bytes"] < job.prediction["gpu_held_bytes"] / 2
    prefix = plan(cards(23), *words, "--method", "ptuning", model="llama-2-7b").job
    assert prefix.prediction["gpu_held_bytes"] < full.prediction["gpu_held_bytes"] / 6


def test_auto_counts_the_method(plan):
    words = ("--preset", "auto", "--gpus", "1", "--activation-checkpointing", "full", "--precision", "bf16")
    full = plan(cards(23), *words, model="llama-2-7b").job
    assert "offload" in full.preset
    assert "offload" not in plan(cards(23), *words, "--method", "lora", model="llama-2-7b").job.preset
    quantised = plan(cards(10), *words, "--method", "qlora", model="llama-2-7b").job
    assert quantised.zero_stage < 3


@pytest.fixture
def chatglm(make_job, tmp_path):
    job = make_job(tmp_path / "run")
    return replace(job, model=ModelSpec("chatglm2-6b", "chatglm", "/x", "chatglm2", CHATGLM2), precision="bf16",
                   ds_config={**job.ds_config, "bf16": {"enabled": True}})  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "stage", "weights"),
    [
        # 28 layers x rank x (rows + columns) of q, k, v, o, gate_up (one matrix) and down
        (PeftOptions(method="lora", lora_rank=8), 2, 8 * 28 * (8192 + 2 * 4352 + 8192 + 31488 + 17792)),
        (PeftOptions(method="lora", lora_rank=8), 3, 8 * 28 * (8192 + 2 * 4352 + 8192 + 31488 + 17792)),
        (PeftOptions(method="ptuning", pre_seq_len=128), 2, 128 * 14_336),
    ],
)
def test_a_checkpoint_holds_what_is_trained(chatglm, spec, stage, weights):
    zero = {**chatglm.ds_config["zero_optimization"], "stage": stage}
    job = replace(chatglm, peft=spec, ds_config={**chatglm.ds_config, "zero_optimization": zero})
    need = disk_check.need_of(job, disk_check.setup_of(job))
    assert need.checkpoint_bytes == (12 if stage == 3 else 14) * weights
    whole = 0 if spec.method == "ptuning" else 2 * 6_243_584_000
    assert need.model_bytes == pytest.approx(whole + 2 * weights, rel=1e-3)
    alone = replace(job, training=replace(job.training, export_format="adapter"))
    assert disk_check.need_of(alone, disk_check.setup_of(alone)).model_bytes == 2 * weights


def test_a_run_keeps_its_method(plan, tmp_path):
    job = plan(CPU, "--method", "lora").job
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "job.json").write_text(replace(job, run_dir=str(run_dir)).to_json())
    (run_dir / "run.json").write_text('{"state": "failed"}')

    def again(**given):
        return resumed(finetune_request(output_dir=run_dir, **given), CPU, {}).job

    assert again(method="lora").peft == job.peft
    for changed in ({"method": "full"}, {"lora_rank": 16}):
        with pytest.raises(DsrunError, match="was started with"):
            again(**changed)
    assert asdict(job.peft)["method"] == "lora"
