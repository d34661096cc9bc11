"""The barrier without a time limit: two real ranks, whose process group gives up long before the slow one is there."""

from __future__ import annotations

import subprocess
import sys

import pytest
from needed import needs

needs("torch", "deepspeed")

from dsrun.cluster.ports import free_port

pytestmark = pytest.mark.slow

START = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import deepspeed
from dsrun.training.ranks import barrier as waiting
from dsrun.training.engines.deepspeed import _own_checkpoint_engine, connect

rank, folder, seconds = int(os.environ["RANK"]), sys.argv[1], 2
connect()

def slow():
    "From here on rank 0 takes longer than the process group waits."
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))
    if rank == 0:
        time.sleep(3 * seconds)
"""
PLAIN = "slow(); dist.barrier()"
WAITING = "slow(); waiting.barrier(); waiting.barrier()"
SAVING = """
model = torch.nn.Linear(4, 4)
engine, *_ = deepspeed.initialize(model=model, config={
    "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
})
write = engine.checkpoint_engine.save
def save(state_dict, path):
    if path.endswith("mp_rank_00_model_states.pt"):
        time.sleep(3 * seconds)
    write(state_dict, path)
engine.checkpoint_engine.save = save
if "plain" not in sys.argv:
    _own_checkpoint_engine(engine)
dist.barrier()
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))
engine.save_checkpoint(folder, tag="step-1")
"""
EXPORTING = """
from pathlib import Path
from types import SimpleNamespace
from transformers import LlamaConfig, LlamaForCausalLM
from dsrun.options.table import PeftOptions
from dsrun.training.models import export
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2))
state = model.state_dict()
engine = SimpleNamespace(
    module=model, outline=model, full_weights=lambda names: {name: state[name] for name in names} if rank == 0 else {})
text_alone = SimpleNamespace(source="chatglm")
job = SimpleNamespace(
    run_dir=folder, peft=PeftOptions(), training=SimpleNamespace(export_format="transformers"), model=text_alone
)
tokenizer = SimpleNamespace(pad_token_id=0, save_pretrained=lambda folder: None)
write = export._write_model
def slowly(*args):
    time.sleep(3 * seconds)
    write(*args)
export._write_model = slowly
dist.barrier()
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))
export.export(engine, tokenizer, [2], job)
assert Path(folder, "model", "config.json").is_file()
"""


def ranks(environ, folder, code: str, *words: str) -> list[tuple[int, str]]:
    """Each rank's exit code and what it said."""
    port = str(free_port())
    started = [
        subprocess.Popen(
            [sys.executable, "-c", START + code, folder, *words], text=True,
            env={
                **environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(rank),
                "LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            },
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    output = [process.communicate(timeout=600)[1] for process in started]
    return [(process.returncode, text) for process, text in zip(started, output, strict=True)]


@pytest.mark.full
def test_a_plain_barrier_gives_up(environ, tmp_path):
    _, (code, output) = ranks(environ, tmp_path, PLAIN)
    assert code and "timed out" in output.lower(), output


@pytest.mark.full
def test_this_one_waits(environ, tmp_path):
    for code, output in ranks(environ, tmp_path, WAITING):
        assert code == 0, output


def test_an_export_that_rank_0_writes_for_long(environ, tmp_path):
    for code, output in ranks(environ, tmp_path, EXPORTING):
        assert code == 0, output


@pytest.mark.full
@pytest.mark.parametrize("plain", [True, False])
def test_a_checkpoint_whose_weights_rank_0_writes_for_long(environ, tmp_path, plain):
    _, (code, output) = ranks(environ, tmp_path, SAVING, *["plain"] * plain)
    assert ("timed out" in output.lower()) is plain, output
    assert bool(code) is plain, output
