"""`dsrun chat`: what it starts, and what it answers before it does. The talk itself: tests/test_chat_for_real.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from asking import finetune_request
from running import HEAVY

from dsrun import catalog
from dsrun.cluster.devices import Gpu, Machine
from dsrun.cluster.gpu_use import GpuProcess, GpuUse, LockHolder
from dsrun.errors import DsrunError
from dsrun.job import inference_request, run_folder
from dsrun.job.inference_request import CHATGLM2, Decoding
from dsrun.jobs.assembly import inference
from dsrun.jobs.assembly.finetune import plan
from dsrun.jobs.supervision import run
from dsrun.jobs.supervision.commands import commands_of
from dsrun.options.commands import ChatOptions

ROOT = catalog.PACKAGE.parent
PAPER = Machine("cpu", (), 4, "a machine of paper")
GIB = 2**30
BUSY = GpuUse((GpuProcess(7, 20 * GIB, "alice", "python"),), 20 * GIB)
HELD = GpuUse((), 0, LockHolder("bob", 9, "/runs/x", "2026-11-21 09:30"))


@pytest.fixture
def work(tmp_path, monkeypatch):
    """The folder that commands run in; its name is a hostile one."""
    folder = tmp_path / "a user's 工作"
    folder.mkdir()
    (folder / "dev.jsonl").write_text(
        '{"content": "类型#裙", "summary": "一条裙子。"}\n' * 9, encoding="utf-8"
    )
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return folder


@pytest.fixture
def make_model():
    """`make_model(folder)`: what a model's folder looks like from outside."""

    def make(folder, model_type="llama", **fields):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"model_type": model_type, **fields}))
        for name in ("model.safetensors", "tokenizer.json"):
            (folder / name).touch()
        return folder

    return make


@pytest.fixture
def make_run(work, make_model):
    """`make_run(name, state, model=True, **options)`: a run's folder in runs/."""

    def make(name="mine", state="finished", *, model=True, **given):
        path = work / "runs" / name
        data = {"train_file": work / "dev.jsonl", "eval_file": work / "dev.jsonl"}
        request = finetune_request(**{"output_dir": path, "gpus": 2, **data, **given})
        job = plan(request, PAPER, os.environ).job
        with run_folder.held(path):
            run.write_folder(job, commands_of(job, os.environ), PAPER, os.environ)
            run_folder.write_state(path, state)
        if model:
            make_model(path / "model")
        return path

    return make


@pytest.fixture
def chat(dsrun, monkeypatch):
    """`chat(*args)`: what was said, and the request and device that it would have started."""
    became: list[tuple] = []

    def exec_chat(request, device):
        became.append((request, device))
        sys.exit(0)

    monkeypatch.setattr(inference, "exec_chat", exec_chat)

    def ask(*args):
        became.clear()
        said = dsrun("chat", *args)
        return said, *(became[0] if became else (None, None))

    return ask


# Who is asked


def test_a_run_by_name_and_by_folder(chat, make_run):
    path = make_run()
    for name in ("mine", "runs/mine", path):
        said, talk, where = chat(name)
        assert (said.code, said.out) == (0, ""), said.err
        assert talk.model.folder == str(path / "model")
        assert talk.model.prompt_format == "llama-2", "as it was trained"
        assert (talk.prompt, talk.system, talk.max_new_tokens) == (None, None, 512)
        assert (
            (where.accelerator, where.precision)
            == ("cpu", "fp32")
            == (talk.model.accelerator, talk.model.precision)
        )


def test_a_models_folder(chat, make_model, work):
    folder = make_model(work / "some model")
    said, talk, _ = chat(folder, "--prompt-format", "llama-2")
    assert said.code == 0
    assert (talk.model.folder, talk.model.prompt_format) == (str(folder), "llama-2")
    assert chat("some model")[1].model.prompt_format == "auto"


@pytest.mark.parametrize(
    ("state", "what", "hint"),
    [
        ("failed", "has no model (failed)", "dsrun resume"),
        ("finished", "has no model (finished)", "dsrun rerun"),
        ("running", "has no model (interrupted)", "dsrun resume"),
    ],
)
def test_a_run_without_a_model_says_what_to_do(chat, make_run, state, what, hint):
    path = make_run(state=state, model=False)
    said, talk, _ = chat("mine")
    assert (said.code, said.out, talk) == (1, "", None)
    assert f"{path}: {what}" in said.err
    assert hint in said.err


def test_a_run_that_still_trains(chat, make_run):
    path = make_run(state="running", model=False)
    with run_folder.held(path):
        said, _, _ = chat("mine")
    assert "has no model (running)" in said.err
    assert "dsrun logs -f" in said.err


def test_a_checkpoint_is_named(chat, make_run):
    path = make_run(state="failed", model=False)
    (path / "checkpoints" / "step-4").mkdir(parents=True)
    (path / "checkpoints" / "step-4" / "complete").write_text("{}")
    said, _, _ = chat("mine")
    assert "Its newest checkpoint is step-4. Continue it" in said.err


def test_names_that_name_no_model(chat, make_run, work):
    make_run()
    (work / "empty").mkdir()
    (work / "adapter").mkdir()
    (work / "adapter" / "adapter_config.json").write_text("{}")
    (work / "x.gguf").touch()
    for name, what in (
        ("mnie", "Did you mean 'mine'?"),
        ("no/such", "no such run"),
        ("empty", "holds neither a run nor a model"),
        ("adapter", "is an adapter of kind None"),
        ("x.gguf", "GGUF"),
        ("dev.jsonl", "is a file"),
    ):
        said, talk, _ = chat(name)
        assert (said.code, said.out, talk) == (1, "", None)
        assert what in said.err, name
        assert "Traceback" not in said.err


ORIGINAL = {
    "num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 16, "num_attention_heads": 2, "multi_query_attention": True,
    "multi_query_group_num": 1, "kv_channels": 4, "padded_vocab_size": 300, "seq_length": 64, "layernorm_epsilon": 1e-5,
}  # fmt: skip


def test_chatglms_original_format_is_asked_in_its_own(chat, make_model, work):
    folder = make_model(work / "glm", "chatglm", **ORIGINAL)
    (folder / "tokenizer.model").write_bytes(b"\n\x0epieces")
    said, talk, _ = chat("glm")
    assert said.code == 0, said.err
    assert (talk.model.folder, talk.model.prompt_format) == (str(folder), "chatglm2")
    (folder / "tokenizer_config.json").write_text('["<|assistant|>"]')
    assert chat("glm")[1].model.prompt_format == "chatglm3"
    (folder / "tokenizer.model").unlink()
    assert f"{folder}: holds no tokenizer.model" in chat("glm")[0].err


@pytest.fixture
def make_adapter(make_model, work):
    """`make_adapter(folder)`: LoRA's, beside the model in the folder "base"."""

    def make(folder, base="base"):
        if not (work / base).exists():
            make_model(work / base)
        folder.mkdir(parents=True)
        config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
        path = str(work / base)
        (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": path}))
        (folder / "adapter_model.safetensors").touch()
        return folder

    return make


def test_an_adapter_is_asked_with_its_model(chat, make_adapter, work):
    folder = make_adapter(work / "lora")
    _, talk, _ = chat("lora")
    assert (talk.model.folder, talk.model.adapter) == (str(work / "base"), str(folder)), "it has no tokenizer"
    (folder / "tokenizer.json").touch()
    _, talk, _ = chat("lora")
    assert (talk.model.folder, talk.model.adapter) == (str(folder), None)
    _, talk, _ = chat("base", "--adapter", "lora")
    assert (talk.model.folder, talk.model.adapter) == (str(work / "base"), str(folder))
    said, talk, _ = chat("lora", "--adapter", "lora")
    assert (said.code, talk) == (1, None)
    assert "--adapter: is for a model's folder" in said.err
    assert "no such folder or file" in chat("base", "--adapter", "nope")[0].err
    (work / "base" / "model.safetensors").unlink()
    assert f"{work}/base: holds no weights" in chat("lora")[0].err
    (work / "base" / "config.json").unlink()
    said, talk, _ = chat("lora")
    assert f"the model that it was trained on is not in {work}/base" in said.err
    assert "--adapter" in said.err


def test_a_run_that_wrote_an_adapter_alone(chat, make_run, make_adapter):
    path = make_run(model=False)
    assert "Its folder model/ is gone" in chat("mine")[0].err
    (make_adapter(path / "adapter") / "tokenizer.json").touch()
    _, talk, _ = chat("mine")
    assert (talk.model.folder, talk.model.prompt_format) == (str(path / "adapter"), "llama-2")


def test_a_models_folder_that_is_not_whole(chat, make_run, work):
    (make_run() / "model" / "model.safetensors").unlink()
    assert "holds no weights" in chat("mine")[0].err


def test_nothing_heavy_is_imported(imported, make_run):
    for args in (("chat", "--help"), ("evaluate", "--help")):
        assert not imported(*args) & HEAVY
    make_run()
    # Up to the moment when it becomes the process that talks.
    code = (
        "import os, sys, dsrun.cli\n"
        "os.execve = lambda *_: (print(*sys.modules), os._exit(0))\n"
        "sys.stdout.reconfigure(line_buffering=True)\n"
        "dsrun.cli.main(['chat', 'mine'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "dsrun.jobs.assembly.inference" in done.stdout
    assert not {name.partition(".")[0] for name in done.stdout.split()} & HEAVY


# How it answers


@pytest.mark.parametrize(
    ("args", "decoding"),
    [
        ((), Decoding()),
        (("--temperature", "0"), Decoding()),
        (("--sample",), CHATGLM2),
        (("--sample", "--top-p", "0.5"), Decoding(0.95, 0.5, 50)),
        (("--temperature", "0.3"), Decoding(0.3, 1.0)),
        (("--top-p", "0.8"), Decoding(1.0, 0.8)),
    ],
)
def test_how_tokens_are_chosen(chat, make_run, args, decoding):
    make_run()
    _, talk, _ = chat("mine", "--seed", "5", *args)
    assert talk.decoding == Decoding(decoding.temperature, decoding.top_p, decoding.top_k, seed=5)


def test_a_drawn_seed_is_printed(chat, make_run):
    make_run()
    said, talk, _ = chat("mine", "--sample")
    assert f"seed {talk.decoding.seed}" in said.err
    assert "seed" not in chat("mine", "--sample", "--seed", "3")[0].err
    assert "seed" not in chat("mine")[0].err, "nothing is drawn"


@pytest.mark.parametrize(
    "args",
    [
        ("--sample", "--temperature", "0"),
        ("--top-p", "0.5", "--temperature", "0"),
        ("--temperature", "nan"),
        ("--temperature", "inf"),
        ("--top-p", "0"),
        ("--top-p", "1.1"),
        ("--max-new-tokens", "0"),
    ],
)
def test_what_can_not_be_meant(chat, make_run, args):
    make_run()
    said, talk, _ = chat("mine", *args)
    assert (said.code, talk) == (2, None)


def test_what_is_started(make_run):
    found = inference.find(str(make_run()))
    where = inference.choose_device(PAPER, None, None, {"A": "b"})
    talk = inference_request.ChatRequest(
        inference.model_of(found, where, ChatOptions()), Decoding(), 9, prompt="-x 'y'\n红"
    )
    command = inference.command(talk)
    assert command[:3] == [sys.executable, "-m", "dsrun.training.inference.chat_process"]
    assert inference_request.chat_request(command[3]) == talk
    assert where.env["HF_HUB_OFFLINE"] == "1"


# Where


def gpus(*uses, capability=(9, 0), **fields):
    return Machine(
        "cuda",
        tuple(
            Gpu(n, "H200", f"GPU-{n}", 140 * GIB, capability, use=use, **fields) for n, use in enumerate(uses)
        ),
        8,
        "paper",
    )


FREE = GpuUse((), 0)


@pytest.mark.parametrize(
    ("uses", "device", "environ", "chosen"),
    [
        ((FREE, FREE), None, {}, "0"),
        ((BUSY, FREE), None, {}, "1"),
        ((HELD, BUSY), None, {}, "1"),
        ((BUSY, FREE), 0, {}, "0"),
        ((FREE, FREE, FREE), None, {"CUDA_VISIBLE_DEVICES": "2,1"}, "2"),
        ((FREE, FREE, BUSY), None, {"CUDA_VISIBLE_DEVICES": "2,1"}, "1"),
    ],
)
def test_a_free_gpu_first(uses, device, environ, chosen):
    where = inference.choose_device(gpus(*uses), device, None, environ)
    assert where.env["CUDA_VISIBLE_DEVICES"] == chosen
    assert where.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert (where.accelerator, where.precision, where.device) == ("cuda", "bf16", f"GPU {chosen} (H200)")
    assert ("alice" in where.note) == (uses[int(chosen)] is BUSY)


@pytest.mark.parametrize(
    ("uses", "device", "environ", "what"),
    [
        ((HELD, HELD), None, {}, "bob's dsrun"),
        ((HELD, FREE), 0, {}, "--device 0: held by another dsrun"),
        ((FREE,), 3, {}, "--device 3: no device 3"),
        ((FREE, FREE), 0, {"CUDA_VISIBLE_DEVICES": "1"}, "CUDA_VISIBLE_DEVICES=1 hides it"),
        ((FREE,), None, {"CUDA_VISIBLE_DEVICES": ""}, "leaves no device"),
    ],
)
def test_gpus_that_are_not_to_be_had(uses, device, environ, what):
    with pytest.raises(DsrunError) as caught:
        inference.choose_device(gpus(*uses), device, None, environ)
    assert what in str(caught.value)


def test_precision_is_what_the_device_does_best():
    assert inference.choose_device(gpus(FREE, capability=(7, 0)), None, None, {}).precision == "fp16"
    assert inference.choose_device(gpus(FREE, capability=(7, 0)), None, "fp32", {}).precision == "fp32"


def test_a_cpu_machine(chat, make_run):
    make_run()
    where = inference.choose_device(PAPER, None, None, {"CUDA_VISIBLE_DEVICES": "3"})
    assert where.env["CUDA_VISIBLE_DEVICES"] == "", "torch must not find what dsrun does not use"
    said, talk, _ = chat("mine", "--device", "0")
    assert (said.code, talk) == (1, None)
    assert "--device 0: there is no GPU to use (DS_ACCELERATOR=cpu)" in said.err
