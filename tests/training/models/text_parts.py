"""One of two ranks: tiny checkpoints are loaded, trained for some steps and written; the first rank prints what came of
each.

A case is FAMILY:PRESET:METHOD, and the folder in the first argument has the checkpoint FAMILY. The method ep is full
with the experts divided over both ranks.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

RANKS, EXAMPLES, STEPS, LR, SEED = 2, 4, 10, 1e-3, 3
EPS = 1e-6
"""AdamW's: with 1e-8 a gradient that is nothing but rounding would step as far as any other."""
CHAOTIC = {"gemma4": 1e-4, "lfm2": 1e-4}
"""Learning rates of families at whose tiny size the rounding of one step grows a hundredfold in the next ones."""
LORA = {"lora_rank": 2, "lora_alpha": 8.0}
LENGTHS = ((5, 9, 12, 7), (11, 6, 4, 13))
"""Tokens of a step's examples, in turn. The first half is rank 0's."""


def step_examples(step: int) -> list[list[int]]:
    """A step's examples, of both ranks."""
    generator = torch.Generator().manual_seed(step)
    lengths = LENGTHS[step % len(LENGTHS)]
    return [torch.randint(3, 250, (length,), generator=generator).tolist() for length in lengths]


def targets(examples: list[list[int]]) -> int:
    return sum(len(example) - 1 for example in examples)


def batch_of(examples: list[list[int]], packing: object) -> dict:
    """One packed sequence, or padded ones."""
    from dsrun.training.data.batches import IGNORED
    from dsrun.training.data.packing import borders

    if packing:
        ids = torch.tensor([[token for example in examples for token in example]])
        labels = [[IGNORED, *example[1:]] for example in examples]
        where = borders([len(example) for example in examples], "cpu", unmasked=packing.varlen)
        return {
            "input_ids": ids,
            "labels": torch.tensor([[label for row in labels for label in row]]),
            **where,
        }
    width = max(map(len, examples))
    ids = [[*example, *[0] * (width - len(example))] for example in examples]
    labels = [[*example, *[IGNORED] * (width - len(example))] for example in examples]
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}


def job_of(case: str, folder: Path):
    from dsrun.config.presets.build import Options, build_config
    from dsrun.job.job import DataSpec, HostDevices, Job, ModelSpec, Prepared, TrainingSpec
    from dsrun.jobs.assembly.checks.parallelism import with_section
    from dsrun.options.table import ParallelismOptions, PeftOptions

    family, preset, method = case.split(":")
    overrides = ["optimizer.params.torch_adam=true", f"optimizer.params.eps={EPS}"]
    if preset == "zero3":
        overrides.append("zero_optimization.stage3_param_persistence_threshold=0")
    lr = CHAOTIC.get(family, LR)
    options = Options(
        gpus=RANKS, precision="fp32", micro_batch=2, lr=lr, grad_clip=0.0, overrides=tuple(overrides)
    )
    source = str(folder / family)
    parallel = ParallelismOptions(ep=RANKS if method == "ep" else 1)
    ds_config = with_section(
        build_config(preset, options).ds_config, family, parallel, freezes=method == "lora"
    )
    return Job(
        run_dir=str(folder / case.replace(":", "-")),
        model=ModelSpec(family, "folder", source, "chat-template"),
        data=DataSpec(train_file="none", eval_file=None),
        training=TrainingSpec(
            lr=lr, seed=SEED, max_steps=STEPS, epochs=None, activation_checkpointing="none",
            export_format="text" if method == "full" and (folder / family / "preprocessor_config.json").is_file()
            else "transformers",
        ),
        preset=preset, precision="fp32", accelerator="cpu", hosts=(HostDevices("localhost", (0, 1)),),
        ds_config=ds_config, parallel=parallel, prepared=Prepared(source, "none", None), dsrun_version="0",
        peft=PeftOptions(method=method, **LORA) if method == "lora" else PeftOptions(),
    )  # fmt: skip


def train(case: str, folder: Path) -> None:
    from dsrun.job.export_request import export_folders
    from dsrun.models import multimodal
    from dsrun.models.resolve import architecture
    from dsrun.training.data.packing import packing_for
    from dsrun.training.engines import backend_of
    from dsrun.training.loss import StepTotals, token_mean
    from dsrun.training.models.export import write_from
    from dsrun.training.models.load import load_model, towers_note
    from dsrun.training.models.tokenizer import load_tokenizer

    job = job_of(case, folder)
    model, keep_alive = load_model(job)
    note = towers_note(job, model)
    engine = backend_of(job).initialize(job, model)
    packing = packing_for(engine)
    engine.train()
    losses = []
    for step in range(STEPS):
        examples = step_examples(step)
        own = examples[2 * dist.get_rank() :][:2]
        engine.set_learning_rate(job.training.lr)
        loss = token_mean(engine, batch_of(own, packing), StepTotals(targets(examples), RANKS))
        engine.backward(loss)
        engine.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses.append(float(whole))
    folders = export_folders(job, Path(job.run_dir))
    if multimodal.no_text_model(architecture(job.model)):
        folders.pop("model-text", None)
    write_from(engine, load_tokenizer(Path(job.prepared.model_dir)), [2], job, folders)
    if dist.get_rank() == 0:
        result = {
            "case": case,
            "losses": losses,
            "packs": packing is not None,
            "note": note,
            "kind": type(model).__name__,
        }
        print(
            json.dumps({**result, "folders": {kind: str(path) for kind, path in folders.items()}}), flush=True
        )
    del keep_alive


if __name__ == "__main__":
    from dsrun.training.engines.deepspeed import connect

    connect()
    for one in sys.argv[2:]:
        try:
            train(one, Path(sys.argv[1]))
        except Exception as error:  # on both ranks, or the other one waits for the limit
            traceback.print_exc()
            if dist.get_rank() == 0:
                print(json.dumps({"case": one, "error": f"{type(error).__name__}: {error}"}), flush=True)
    dist.destroy_process_group()
