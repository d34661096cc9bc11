"""Memory that a rank takes while the model is loaded: dsrun beside transformers' own loading.

    python bench/loading.py [--output bench/results/loading-DATE.json]  (and .md beside it)

A checkpoint of about 300 million fp16 weights in ChatGLM2's original format (random, its real vocabulary) is loaded
by two CPU ranks, each time in new processes: ZeRO-2 and ZeRO-3, safetensors and .bin, in the checkpoint's type and in
bf16.
The other side loads the same weights from a folder in transformers' own format with from_pretrained under the same
config, which is what a Trainer script does.

"base" is a rank's resident memory with the libraries loaded; "peak" the kernel's high-water mark of resident memory
while loading, mapped pages of files included; "own" what the rank keeps of the model: all of it under ZeRO-2, half
under ZeRO-3. Wanted of rank 1: peak at most 1.15 times base + own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
WANTED = 1.15
MIB = 1 << 20
LAYERS, HIDDEN, HEADS, GROUPS, HEAD_DIM, FFN, VOCAB = 13, 1024, 16, 2, 64, 3424, 65024
CONFIG = {
    "model_type": "chatglm", "num_layers": LAYERS, "hidden_size": HIDDEN, "ffn_hidden_size": FFN,
    "num_attention_heads": HEADS, "multi_query_attention": True, "multi_query_group_num": GROUPS,
    "kv_channels": HEAD_DIM, "padded_vocab_size": VOCAB, "seq_length": 32768, "layernorm_epsilon": 1e-5,
    "add_qkv_bias": True, "add_bias_linear": False, "rmsnorm": True, "post_layer_norm": True,
    "original_rope": True, "torch_dtype": "float16", "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def write_original(folder: Path, kind: str) -> int:
    """The checkpoint in two shards, without a tokenizer; returns its weights' count."""
    import torch
    from safetensors.torch import save_file

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, dtype=torch.float16) * 0.02

    rows = (HEADS + 2 * GROUPS) * HEAD_DIM
    weights = {"transformer.embedding.word_embeddings.weight": draw(VOCAB, HIDDEN)}
    for number in range(LAYERS):
        layer = f"transformer.encoder.layers.{number}."
        weights |= {
            f"{layer}input_layernorm.weight": draw(HIDDEN),
            f"{layer}post_attention_layernorm.weight": draw(HIDDEN),
            f"{layer}self_attention.query_key_value.weight": draw(rows, HIDDEN),
            f"{layer}self_attention.query_key_value.bias": draw(rows),
            f"{layer}self_attention.dense.weight": draw(HIDDEN, HEADS * HEAD_DIM),
            f"{layer}mlp.dense_h_to_4h.weight": draw(2 * FFN, HIDDEN),
            f"{layer}mlp.dense_4h_to_h.weight": draw(HIDDEN, FFN),
        }
    weights |= {
        "transformer.encoder.final_layernorm.weight": draw(HIDDEN),
        "transformer.output_layer.weight": draw(VOCAB, HIDDEN),
        "transformer.rotary_pos_emb.inv_freq": draw(HEAD_DIM // 4),
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    names = list(weights)
    half = len(names) // 2
    weight_map = {}
    for number, part in enumerate((names[:half], names[half:]), 1):
        shard = {name: weights[name] for name in part}
        file = (
            f"model-{number:05}-of-00002.safetensors"
            if kind == "safetensors"
            else f"pytorch_model-{number:05}-of-00002.bin"
        )
        save_file(shard, folder / file, {"format": "pt"}) if kind == "safetensors" else torch.save(
            shard, folder / file
        )
        weight_map |= dict.fromkeys(part, file)
    index = "model.safetensors.index.json" if kind == "safetensors" else "pytorch_model.bin.index.json"
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(tensor.numel() for name, tensor in weights.items() if not name.endswith("inv_freq"))


def write_native(original: Path, prepared: Path, folder: Path) -> None:
    """Write the same weights as a folder in transformers' own format, and the config alone in another folder."""
    import torch
    from transformers import AutoConfig

    from dsrun.models.chatglm import glm_fields
    from dsrun.training.models.chatglm import glm_weights
    from dsrun.training.models.weights import Skeleton

    config = AutoConfig.for_model(**glm_fields(CONFIG, original))
    config.architectures, config.dtype = ["GlmForCausalLM"], torch.float16
    config.save_pretrained(prepared)
    skeleton = Skeleton(config, torch.float16)
    skeleton.fill(glm_weights(original, config), torch.device("cpu"))
    skeleton.model.save_pretrained(folder)


def job_for(side: str, folder: Path, prepared: Path, stage: int, precision: str) -> Any:
    """A job that says no more than how the model is loaded."""
    from dsrun import __version__
    from dsrun.job.job import DataSpec, HostDevices, Job, ModelSpec, Prepared, TrainingSpec
    from dsrun.models.chatglm import glm_fields

    ours = side == "dsrun"
    fields = glm_fields(CONFIG, folder) if ours else {}
    ds_config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "train_batch_size": 2,
        "zero_optimization": {"stage": stage}, "fp16": {"enabled": precision == "fp16"},
        "bf16": {"enabled": precision == "bf16"},
    }  # fmt: skip
    training = TrainingSpec(
        lr=1e-4, lr_schedule="linear", warmup_steps=0, epochs=1.0, max_steps=None, seed=1, eval_steps=None,
        save_steps=1, keep_checkpoints=1, generate_rows=0, score_before=False, activation_checkpointing="none",
    )  # fmt: skip
    return Job(
        run_dir=str(folder.parent),
        model=ModelSpec("bench", "chatglm" if ours else "folder", str(folder), "auto", fields),
        data=DataSpec(
            train_file="none",
            eval_file=None,
            prompt_column="prompt",
            response_column="response",
            max_source_length=8,
            max_target_length=8,
        ),
        training=training,
        preset="bench",
        precision=precision,
        accelerator="cpu",
        hosts=(HostDevices("localhost", (0, 1)),),
        ds_config=ds_config,
        prepared=Prepared(str(prepared if ours else folder), "none", None),
        dsrun_version=__version__,
    )


def rank(side: str, job_file: Path) -> None:
    """One rank's part: load, and print what it took."""
    import deepspeed
    import torch
    from transformers import AutoModelForCausalLM, GlmForCausalLM  # noqa: F401  (part of the base)
    from transformers.integrations import HfDeepSpeedConfig

    from dsrun.job.job import Job
    from dsrun.training.models.load import DTYPES, load_model
    from dsrun.training.reports.report import host_bytes

    torch.set_num_threads(1)
    job = Job.read(job_file)
    deepspeed.init_distributed()
    torch.distributed.all_reduce(torch.ones(1 << 20))  # the group's own buffers are no part of loading
    torch.distributed.barrier()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
    base, began = host_bytes()[0], time.perf_counter()
    if side == "dsrun":
        model, keep_alive = load_model(job)
    else:
        keep_alive = HfDeepSpeedConfig(job.ds_config) if job.zero_stage == 3 else None
        dtype = getattr(torch, DTYPES[job.precision])
        model = AutoModelForCausalLM.from_pretrained(
            job.model.location, dtype=dtype, attn_implementation="sdpa"
        )
    seconds = time.perf_counter() - began
    after, peak = host_bytes()
    own = sum(getattr(p, "ds_tensor", p).nbytes for p in model.parameters())
    found = {"base": base, "peak": peak, "after": after, "own": own, "seconds": round(seconds, 2)}
    torch.distributed.barrier()
    print("FOUND " + json.dumps(found), flush=True)
    del keep_alive
    torch.distributed.destroy_process_group()


def measure(side: str, job: Any, folder: Path) -> list[dict[str, float]]:
    """Two ranks in new processes; what each found."""
    path = folder / "job.json"
    path.write_text(job.to_json())
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    env = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(CHECKOUT),
        "DSRUN_CACHE": str(folder / "cache"),
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", side, str(path)],
            env={**env, "RANK": str(number), "LOCAL_RANK": str(number)}, cwd=folder, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=600) for process in started]
    found = []
    for process, (out, err) in zip(started, said, strict=True):
        lines = [line for line in out.splitlines() if line.startswith("FOUND ")]
        if process.returncode or not lines:
            raise SystemExit(out[-2000:] + err[-6000:])
        found.append(json.loads(lines[-1].removeprefix("FOUND ")))
    return found


def row(name: dict[str, Any], ranks: list[dict[str, float]]) -> dict[str, Any]:
    """Measurements in MiB, and rank 1's peak as a multiple of its base and own share."""
    first, second = ranks
    return {
        **name,
        **{
            f"rank{number}_{key}_mib": round(found[key] / MIB)
            for number, found in enumerate(ranks)
            for key in ("base", "own", "peak", "after")
        },
        "seconds": max(first["seconds"], second["seconds"]),
        "rank0_ratio": round(first["peak"] / (first["base"] + first["own"]), 3),
        "rank1_ratio": round(second["peak"] / (second["base"] + second["own"]), 3),
    }


HEAD = """\
# Memory while a model is loaded

`bench/loading.py`, {day}: {millions:.0f} million random fp16 weights in ChatGLM2's original format, loaded by two
ranks on a CPU (torch {torch}, transformers {transformers}, deepspeed {deepspeed}; the machine's load average was
{load:.1f} at most). MiB of resident memory, mapped pages of files included. *transformers* loads the same weights from
a folder in its own format with `from_pretrained`. dsrun's rank 1 takes at most {worst:.2f} times what it had before and
what it keeps of the model (wanted: {wanted}).

"""


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| loaded by | ZeRO | files | type | base | own | rank 0 peak | rank 1 peak | rank 1 ratio | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['side']} | {r['stage']} | {r['files']} | {r['type']} | {r['rank1_base_mib']} | {r['rank1_own_mib']} "
        f"| {r['rank0_peak_mib']} | {r['rank1_peak_mib']} | {r['rank1_ratio']:.2f} | {r['seconds']} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> int:
    """Measure everything; 1 where rank 1 takes more than is wanted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=CHECKOUT / f"bench/results/loading-{date.today()}.json"
    )
    parser.add_argument("--no-peer", action="store_true", help="dsrun's own side only")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank(arguments.rank[0], Path(arguments.rank[1]))
        return 0
    rows, load = [], [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="dsrun-loading-") as name:
        root = Path(name)
        count = 0
        for kind in ("safetensors", "bin"):
            count = write_original(root / kind, kind)
        write_native(root / "safetensors", root / "prepared", root / "native")
        sides = [("dsrun", "safetensors"), ("dsrun", "bin")]
        sides += [] if arguments.no_peer else [("transformers", "native")]
        for side, files in sides:
            for stage in (2, 3):
                for precision in ("fp16", "bf16"):
                    job = job_for(side, root / files, root / "prepared", stage, precision)
                    what = {
                        "side": side, "stage": stage, "files": "bin" if files == "bin" else "safetensors",
                        "type": "same" if precision == "fp16" else "other",
                    }  # fmt: skip
                    rows.append(row(what, measure(side, job, root)))
                    load.append(os.getloadavg()[0])
                    print(json.dumps(rows[-1]), file=sys.stderr)
    worst = max(r["rank1_ratio"] for r in rows if r["side"] == "dsrun")
    result = {
        "date": str(date.today()), "parameters": count, "wanted_rank1_ratio": WANTED, "worst_rank1_ratio": worst,
        "python": platform.python_version(), "load_average": load,
        "versions": {name: version(name) for name in ("torch", "transformers", "deepspeed")}, "rows": rows,
    }  # fmt: skip
    arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    text = HEAD.format(
        day=date.today(),
        millions=count / 1e6,
        load=max(load),
        worst=worst,
        wanted=WANTED,
        **result["versions"],
    )
    text += table(rows) + "\n"
    arguments.output.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    return 0 if worst <= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
