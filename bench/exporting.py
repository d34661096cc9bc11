"""Memory that rank 0 takes while the trained model is written: no more than two files' worth above what it held.

    python bench/exporting.py [--layers 24] [--only CASE ...] [--write]

A Llama of random fp32 weights (1.4 GB) takes a step on two CPU ranks, under ZeRO-2, ZeRO-3 and FSDP, whole and with
LoRA, and is then written in files of at most 100 MB (5 GB in a real export) as at the end of a fine-tune. Whole models
are gathered from the ranks; LoRA's are the folder's own weights with its products added.

"start" is what rank 0 holds before, "peak" the most that it holds meanwhile, of anonymous memory (RssAnon and RssShmem
in /proc/PID/status, looked at by another process every few milliseconds): pages of mapped files are the system's to
take back. "over" is the difference, "files" that in files' worth.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

from loading import CHECKOUT, job_for

OUTPUT = CHECKOUT / "bench/results/exporting.json"
MB = 10**6
FILE_BYTES, WANTED, LOOK_S = 100 * MB, 2.0, 0.002
LAYERS, HIDDEN, FFN, HEADS, VOCAB = 24, 1024, 2816, 16, 16000
CASES = ("zero3", "zero3-lora", "zero2", "zero2-lora", "fsdp", "fsdp-lora")


def write_model(folder: Path, layers: int) -> int:
    """The folder that is trained; returns its weights' bytes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=layers,
        num_attention_heads=HEADS, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size=FILE_BYTES)
    return sum(one.nbytes for one in model.parameters())


def a_job(case: str, folder: Path) -> Any:
    """A job of two ranks that says no more than how the model is trained and written."""
    from dsrun.job.job import FsdpSpec
    from dsrun.options.table import PeftOptions

    preset, _, method = case.partition("-")
    stage = int(preset[-1]) if preset.startswith("zero") else 0
    job = job_for("folder", folder, folder, stage, "fp32")
    adamw = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
    spec = FsdpSpec(micro_batch=1, grad_accum=1, grad_clip=1.0, shard_ranks=2) if preset == "fsdp" else None
    return dataclasses.replace(
        job, run_dir=str(folder.parent / case), ds_config={**job.ds_config, "optimizer": adamw}, fsdp=spec,
        peft=PeftOptions(method=method or "full", lora_dropout=0.0),
    )  # fmt: skip


def rank(case: str, folder: Path) -> None:
    """What one rank does; the first one prints what it took."""
    import torch
    import torch.distributed as dist

    from dsrun.training.engines import backend_of
    from dsrun.training.loss import StepTotals, token_mean
    from dsrun.training.models import export
    from dsrun.training.models.load import load_model

    export.SHARD_BYTES = FILE_BYTES
    job = a_job(case, folder)
    backend = backend_of(job)
    backend.connect()
    model, keep_alive = load_model(job)
    engine = backend.initialize(job, model)
    ids = torch.arange(3, 11)[None] + dist.get_rank()
    engine.take_step([{"input_ids": ids, "labels": ids}], StepTotals(14, 2), token_mean)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what a step has freed would hide what is taken
    dist.barrier()
    tokenizer = SimpleNamespace(pad_token_id=0, save_pretrained=lambda _: None)
    began = time.perf_counter()
    with watched() if dist.get_rank() == 0 else contextlib.nullcontext(lambda: {}) as held:
        folders, _ = export.export(engine, tokenizer, [2], job)
    seconds = time.perf_counter() - began
    del keep_alive
    if dist.get_rank() == 0:
        written = sum(path.stat().st_size for path in folders.glob("*.safetensors"))
        print("FOUND " + json.dumps({**held(), "written": written, "seconds": round(seconds, 1)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def watched() -> Iterator[Callable[[], dict[str, int]]]:
    """This process's anonymous memory: at the start and at most, in bytes. Another one looks, and waits for no lock."""
    argv = [sys.executable, __file__, "--watch", str(os.getpid())]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin and other.stdout
        found = {"start": int(other.stdout.readline())}
        yield lambda: found
        other.stdin.close()
        found["peak"] = int(other.stdout.readline())


def watch(pid: int) -> None:
    """Print what the process holds, and once stdin ends the most that it held."""
    ended = Event()
    Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    most = anonymous_bytes(pid)
    print(most, flush=True)
    while not ended.wait(LOOK_S):
        most = max(most, anonymous_bytes(pid))
    print(most, flush=True)


def anonymous_bytes(pid: int) -> int:
    """What a process holds that no file stands for."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def measure(case: str, folder: Path) -> dict[str, Any]:
    """Two ranks in new processes; what the first one found."""
    argv = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__,
        "--rank", case, str(folder),
    ]  # fmt: skip
    env = {
        **os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{CHECKOUT / 'bench'}",
    }  # fmt: skip
    done = subprocess.run(argv, env=env, text=True, capture_output=True, timeout=1800, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    if done.returncode or not lines:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-6000:])
    found = json.loads(lines[-1].removeprefix("FOUND "))
    over = found["peak"] - found["start"]
    return {"case": case, **found, "over": over, "files": round(over / FILE_BYTES, 2)}


def main() -> int:
    """Measure; 1 where rank 0 takes more than is wanted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--write", action="store_true", help=f"write {OUTPUT.relative_to(CHECKOUT)}")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--watch", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank(given.rank[0], Path(given.rank[1]))
        return 0
    if given.watch:
        watch(given.watch)
        return 0
    with tempfile.TemporaryDirectory(prefix="dsrun-exporting-") as name:
        size = write_model(Path(name) / "model", given.layers)
        rows = []
        for case in given.only:
            rows.append(measure(case, Path(name) / "model"))
            print(json.dumps(rows[-1]), flush=True)
            if given.write:
                result = {"date": str(date.today()), "weights": size, "file": FILE_BYTES, "rows": rows}
                OUTPUT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return int(any(row["files"] > WANTED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
