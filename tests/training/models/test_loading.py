"""Loading into ranks: the same numbers under every ZeRO stage, the same bytes back, and no weights but the model's."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("deepspeed")

from chatglm_checkpoint import (
    CONFIG,
    HEAD_DIM,
    IDS,
    loaded,
    plain_angle,
    random_weights,
    reference_logits,
    write_checkpoint,
)
from safetensors.torch import load_file, save_file

from dsrun.cluster.ports import free_port
from dsrun.errors import DsrunError
from dsrun.job.job import DataSpec, FsdpSpec, HostDevices, Job, ModelSpec, Prepared, TrainingSpec
from dsrun.jobs.assembly.finetune.data import dataset_folder
from dsrun.models import model_files, resolve
from dsrun.models.transformers_code import CAPPED
from dsrun.training.data.batches import BatchPlan, Examples, training_batch
from dsrun.training.engines.deepspeed import DeepSpeed
from dsrun.training.loss import target_loss
from dsrun.training.models import load as loading
from dsrun.training.models.chatglm import prepare_folder
from dsrun.training.models.export import export
from dsrun.training.models.tokenizer import load_tokenizer
from dsrun.training.models.weights import Reader, Skeleton, listed, open_shard, weight_files


def a_job(spec: ModelSpec, model_dir: Path, stage: int, precision: str = "fp32", ranks: int = 2) -> Job:
    return Job(
        run_dir=str(model_dir.parent),
        model=spec,
        data=DataSpec(
            train_file="none",
            eval_file=None,
            prompt_column="prompt",
            response_column="response",
            max_source_length=8,
            max_target_length=8,
        ),
        training=TrainingSpec(
            lr=1e-4,
            lr_schedule="linear",
            warmup_steps=0,
            epochs=1.0,
            max_steps=None,
            seed=1,
            eval_steps=None,
            save_steps=100,
            keep_checkpoints=1,
            generate_rows=0,
            score_before=False,
            activation_checkpointing="none",
        ),
        preset="test",
        precision=precision,
        accelerator="cpu",
        hosts=(HostDevices("localhost", tuple(range(ranks))),),
        ds_config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "train_batch_size": ranks,
            "fp16": {"enabled": precision == "fp16"},
            "bf16": {"enabled": precision == "bf16"},
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        },
        prepared=Prepared(str(model_dir), "none", None),
        dsrun_version="0",
    )


def chatglm_job(folder: Path, target: Path, stage: int, precision: str = "fp32", ranks: int = 2) -> Job:
    spec, _ = resolve.resolve(str(folder), None)
    target.mkdir()
    prepare_folder(spec, target)
    return a_job(spec, target, stage, precision, ranks)


RANK = """
import gc, json, sys
from pathlib import Path
import torch
from dsrun.job.job import Job
from dsrun.training.models.chatglm import write_original
from dsrun.training.engines import backend_of, deepspeed
from dsrun.training.models.export import shards
from dsrun.training.models.load import load_model

ids = json.loads(sys.argv[1])
deepspeed.connect()
for path in map(Path, sys.argv[2:]):
    job = Job.read(path)
    out = path.parent
    model, keep_alive = load_model(job)
    rope = {name: str(buffer.dtype) for name, buffer in model.named_buffers()}
    held = sum(getattr(p, "ds_tensor", p).numel() for p in model.parameters())
    engine = backend_of(job).initialize(job, model)
    engine.eval()
    with torch.no_grad():
        logits = engine(input_ids=torch.tensor([ids])).logits[0].float()
    weights = engine.full_weights([name for names in shards(engine.module) for name in names])
    if torch.distributed.get_rank() == 0:
        torch.save(logits, out / "logits.pt")
        if job.model.source == "chatglm":
            (out / "back").mkdir()
            write_original(weights, engine.module.config, Path(job.model.location), out / "back")
        else:
            torch.save({name: tensor.clone() for name, tensor in weights.items()}, out / "weights.pt")
        (out / "found.json").write_text(json.dumps({"rope": rope, "held": held}))
    torch.distributed.barrier()
    del model, keep_alive, engine, weights
    gc.collect()
torch.distributed.destroy_process_group()
"""


def run_ranks(jobs: list[Job], environ: dict[str, str], ids: list[int]) -> None:
    """Two real ranks load one job's model after the other, and write what they compute for one sequence."""
    paths = [Path(job.run_dir) / "job.json" for job in jobs]
    for job, path in zip(jobs, paths, strict=True):
        path.write_text(job.to_json())
    env = {
        **environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2",
        "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, json.dumps(ids), *map(str, paths)],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=paths[0].parent,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=600)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)[-6000:]


def same_bytes(original: Path, back: Path) -> bool:
    for path in weight_files(original):
        was, now = open_shard(path), open_shard(back / path.name)
        if list(was) != list(now) or any(
            tensor.dtype != now[name].dtype
            or not torch.equal(tensor.view(torch.uint8), now[name].view(torch.uint8))
            for name, tensor in was.items()
        ):
            return False
    return True


def base_scaled(position, pair):
    return position * 40000 ** (-2 * pair / (HEAD_DIM / 2))


@dataclasses.dataclass(frozen=True)
class Case:
    """A checkpoint, and how it is loaded."""

    stage: int
    kind: str
    precision: str = "fp32"
    stretched: bool = False
    full: bool = False

    @property
    def name(self) -> str:
        return f"zero{self.stage}-{self.kind}-{self.precision}" + "-rope" * self.stretched


CASES = [
    Case(0, "bin", full=True),
    Case(2, "bin"),
    Case(2, "safetensors", "bf16", full=True),
    Case(3, "bin", full=True),
    Case(3, "safetensors", stretched=True),
    Case(3, "bin", "bf16"),
]
LLAMAS = (3,)
MORE_LLAMAS = (2,)
LOGS = ("events.jsonl", "metrics.jsonl")


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory, environ):
    """The folder in which two ranks have loaded every case."""
    full = request.config.getoption("--full")
    root = tmp_path_factory.mktemp("ranks")
    jobs = []
    for case in [case for case in CASES if full or not case.full]:
        weights = random_weights()
        fields = {"rope_ratio": 4, "_name_or_path": "THUDM/chatglm3-6b-32k"} if case.stretched else {}
        if case.precision == "bf16":
            weights = {name: tensor.bfloat16() for name, tensor in weights.items()}
            fields["torch_dtype"] = "bfloat16"
        folder = write_checkpoint(root / case.name / "a user's 模型", weights, case.kind, **fields)
        jobs.append(chatglm_job(folder, root / case.name / "glm", case.stage, case.precision))
    for stage in (*LLAMAS, *(MORE_LLAMAS if full else ())):
        (root / f"llama{stage}").mkdir()
        folder, _ = llama(root / f"llama{stage}", tie_word_embeddings=True)
        jobs.append(a_job(resolve.resolve(str(folder), None)[0], folder, stage))
    run_ranks(sorted(jobs, key=lambda job: job.zero_stage), environ, IDS)
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[pytest.mark.full] * case.full) for case in CASES]
)
def test_two_ranks_compute_what_the_formulas_say(case, ranks):
    folder = ranks / case.name
    logits = torch.load(folder / "logits.pt", weights_only=True)
    weights = random_weights()
    angle = base_scaled if case.stretched else plain_angle
    if case.precision == "fp32":
        assert torch.allclose(logits, reference_logits(weights, IDS, angle), atol=1e-5, rtol=0)
    else:
        weights = {name: tensor.bfloat16().float() for name, tensor in weights.items()}
        wanted = reference_logits(weights, IDS, angle)
        assert (logits - wanted).abs().max() < 0.05 * wanted.abs().max()
    assert same_bytes(folder / "a user's 模型", folder / "back")
    result = json.loads((folder / "found.json").read_text())
    assert set(result["rope"].values()) == {"torch.float32"}
    whole = sum(tensor.numel() for name, tensor in weights.items() if "inv_freq" not in name)
    assert result["held"] == (whole if case.stage < 3 else pytest.approx(whole / 2, rel=0.01))


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage", [*LLAMAS, *(pytest.param(stage, marks=pytest.mark.full) for stage in MORE_LLAMAS)]
)
def test_a_llama_with_tied_weights(stage, ranks):
    from transformers import AutoModelForCausalLM

    own = AutoModelForCausalLM.from_pretrained(ranks / f"llama{stage}" / "llama")
    with torch.no_grad():
        wanted = own.eval()(torch.tensor([IDS])).logits[0]
    logits = torch.load(ranks / f"llama{stage}" / "logits.pt", weights_only=True)
    assert torch.allclose(logits, wanted, atol=1e-5, rtol=0)
    stored = torch.load(ranks / f"llama{stage}" / "weights.pt", weights_only=True)
    own_weights = dict(own.named_parameters())
    assert stored.keys() == own_weights.keys(), "what is tied is there once"
    assert all(torch.equal(stored[name], tensor) for name, tensor in own_weights.items())


def llama(tmp_path: Path, **fields):
    """A small Llama's folder, and its logits for IDS as transformers computes them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1280, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, **fields,
    )  # fmt: skip
    torch.manual_seed(4)
    model = LlamaForCausalLM(config)
    folder = tmp_path / "llama"
    model.save_pretrained(folder, max_shard_size="60KB")
    (folder / "tokenizer.json").touch()
    with torch.no_grad():
        return folder, model.eval()(torch.tensor([IDS])).logits[0]


@pytest.fixture
def no_other_way(monkeypatch):
    """Fails where transformers' own loading is used."""

    def refuse(*_):
        raise AssertionError("loaded by transformers")

    monkeypatch.setattr(loading, "_by_transformers", refuse)


def load_here(folder: Path, precision: str = "fp32"):
    spec, _ = resolve.resolve(str(folder), None)
    return loading.load_model(a_job(spec, folder, 0, precision, ranks=1))[0]


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_of_transformers_own(tied, tmp_path, no_other_way):
    folder, wanted = llama(tmp_path, tie_word_embeddings=tied)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    model = load_here(folder)
    with torch.no_grad():
        assert torch.equal(model(torch.tensor([IDS])).logits[0], wanted)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert model.generation_config.eos_token_id == [2, 7]
    assert model.training and not model.config.use_cache


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral", "glm"])
def test_the_other_families(kind, tied, tmp_path, no_other_way):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind, vocab_size=1280, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(4)
    own = AutoModelForCausalLM.from_config(config).eval()
    own.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").touch()
    with torch.no_grad():
        computed = load_here(tmp_path / "model").eval()(torch.tensor([IDS])).logits
        assert torch.equal(computed, own(torch.tensor([IDS])).logits)


GATED = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 1280, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
NETWORKS = {
    "gemma2": {}, "gemma3_text": {}, "phi3": {}, "glm4": {}, "olmo2": {}, "smollm3": {}, "cohere": {}, "granite": {},
    "gpt_oss": {"num_local_experts": 4, **EXPERTS}, "mixtral": {"num_local_experts": 4, **EXPERTS},
    "qwen3_moe": {"num_experts": 4, **EXPERTS}, "bloom": {"n_layer": 2, "n_head": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4}, "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "mamba": {"state_size": 4},
}  # fmt: skip
"""model_type -> what a small one has besides GATED. Some have torch's attention, some not, some none at all."""


@pytest.mark.parametrize(("kind", "fields"), NETWORKS.items(), ids=NETWORKS)
def test_any_causal_model_of_transformers(kind, fields, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    # transformers itself, before 5.23, takes SDPA for a type in CAPPED, too.
    attention = {"attn_implementation": "eager"} if kind in CAPPED else {}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **GATED, **fields), **attention
    ).eval()
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    with torch.no_grad():
        wanted = model(torch.tensor([IDS])).logits
        loaded = load_here(tmp_path).eval()
        computed = loaded(torch.tensor([IDS])).logits
    assert loaded.config._attn_implementation == model.config._attn_implementation
    assert torch.allclose(computed, wanted, atol=1e-5, rtol=0)


def test_training_leaves_the_files_alone(tmp_path, no_other_way):
    folder, _ = llama(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    model = load_here(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_another_type_is_cast(tmp_path, no_other_way):
    folder, _ = llama(tmp_path)
    model = load_here(folder, "bf16")
    own = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert all(torch.equal(tensor, own[name].bfloat16()) for name, tensor in model.state_dict().items())
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_old_tables_of_positions_are_left_out(tmp_path, no_other_way):
    folder, wanted = llama(tmp_path)
    path = sorted(folder.glob("*.safetensors"))[0]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({**load_file(path), name: torch.ones(4)}, path)
    index["weight_map"][name] = path.name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with torch.no_grad():
        assert torch.equal(load_here(folder)(torch.tensor([IDS])).logits[0], wanted)


def change(folder: Path, alter) -> None:
    """Write the weights anew, in one shard."""
    files = sorted(folder.glob("*.safetensors"))
    weights = {name: tensor for path in files for name, tensor in load_file(path).items()}
    for path in (*files, *folder.glob("*.index.json")):
        path.unlink()
    changed = {new: tensor for name, old in weights.items() for new, tensor in alter(name, old)}
    save_file(changed, folder / "model.safetensors", {"format": "pt"})


def test_a_missing_weight_of_a_folder_is_an_error(tmp_path):
    folder, _ = llama(tmp_path)
    change(folder, lambda name, tensor: [] if name == "model.norm.weight" else [(name, tensor)])
    with pytest.raises(DsrunError, match=r"model\.norm\.weight"):
        load_here(folder)


def test_a_weight_of_another_shape_is_an_error(tmp_path):
    folder, _ = llama(tmp_path)
    change(folder, lambda name, tensor: [(name, tensor[:-1].clone() if name == "lm_head.weight" else tensor)])
    with pytest.raises(DsrunError, match=r"lm_head\.weight has shape \[1279, 32\]"):
        load_here(folder)


def test_names_that_only_transformers_knows(tmp_path):
    """A checkpoint of the network without its head's prefix."""
    folder, wanted = llama(tmp_path, tie_word_embeddings=True)
    change(folder, lambda name, tensor: [(name.removeprefix("model."), tensor)])
    with torch.no_grad():
        assert torch.equal(load_here(folder)(torch.tensor([IDS])).logits[0], wanted)


@pytest.mark.parametrize("part", [1, 7, 1000, 1 << 20])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_reading_in_parts(part, kind, tmp_path):
    weights = {
        "a": torch.randn(37, 5),
        "b": torch.randn(3).bfloat16(),
        "c": torch.tensor(2.5),
        "d": torch.empty(0, 4),
    }
    path = tmp_path / ("model.safetensors" if kind == "safetensors" else "pytorch_model.bin")
    save_file(weights, path) if kind == "safetensors" else torch.save(weights, path)
    stored = listed(tmp_path)
    assert {name: (one.shape, one.dtype) for name, one in stored.items()} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()
    }
    reader = Reader(max(4, part))
    for name in ("c", "a", "d", "b", "a"):
        target = torch.empty(weights[name].shape, dtype=torch.float64)
        reader.copy(stored[name], target)
        assert torch.equal(target, weights[name].double())
    rows = stored["a"].part(4, 9).part(2, 3)
    target = torch.empty(rows.shape)
    reader.copy(rows, target)
    assert torch.equal(target, weights["a"][6:9].float())


def test_a_shard_takes_no_memory_but_a_part(tmp_path):
    """In a process of its own: what it held at most, beyond what it held before and what it keeps."""
    save_file({f"w{number}": torch.ones(4 << 20) for number in range(16)}, tmp_path / "model.safetensors")
    script = """
import sys, torch
from pathlib import Path
from dsrun.training.reports.report import host_bytes
from dsrun.training.models.weights import Reader, listed
torch.set_num_threads(1)
stored = listed(Path(sys.argv[1]))
target = torch.zeros(4 << 20, dtype=torch.bfloat16)
reader = Reader()
Path("/proc/self/clear_refs").write_text("5")
before = host_bytes()[0]
for one in stored.values():
    reader.copy(one, target)
print((host_bytes()[1] - before) >> 20)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 32 + 24, "of a shard of 256 MiB"


def test_a_skeleton_has_shapes_and_positions_only():
    from transformers import AutoConfig

    config = AutoConfig.for_model(**model_files.load_model_file("llama-3-8b").architecture)
    skeleton = Skeleton(config, torch.float16)
    assert sum(parameter.numel() for parameter in skeleton.model.parameters()) == 8_030_261_248
    held = sum(parameter.numel() for parameter in skeleton.model.parameters() if not parameter.is_meta)
    assert held < 1e6
    assert skeleton.model.model.rotary_emb.inv_freq[1] == pytest.approx(500000.0 ** (-2 / 128))


def held(model, job: Job) -> DeepSpeed:
    """The engine around a model that is trained no more."""
    return DeepSpeed(SimpleNamespace(module=model, device=None, train=None, eval=None, step=None), job)


@pytest.mark.parametrize(
    ("fields", "code", "outer"),
    [
        ({}, "", {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
        (
            {"rope_ratio": 4},
            "base = base * self.rope_ratio",
            {"rope_theta": 40000.0, "partial_rotary_factor": 0.5},
        ),
        (
            {"rope_ratio": 4},
            "x / self.rope_ratio",
            {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        ),
    ],
)
def test_an_exported_folder_loads_anywhere(fields, code, outer, tmp_path, alone):
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = write_checkpoint(tmp_path / "original", random_weights(), "bin", **fields)
    (folder / "modeling_chatglm.py").write_text(code)
    job = chatglm_job(folder, tmp_path / "glm", 0, ranks=1)
    model, _ = loading.load_model(job)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    job = dataclasses.replace(
        job, run_dir=str(run_dir), training=dataclasses.replace(job.training, export_format="chatglm")
    )
    export(held(model, job), load_tokenizer(Path(job.prepared.model_dir)), [2], job)
    assert same_bytes(folder, run_dir / "model-chatglm")
    written = json.loads((run_dir / "model" / "config.json").read_text())
    assert written["model_type"] == "glm" and written["use_cache"] is True
    assert {name: written[name] for name in outer} == outer
    assert AutoConfig.from_pretrained(run_dir / "model").rope_parameters == model.config.rope_parameters
    again = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    with torch.no_grad():
        wanted = model.eval()(torch.tensor([IDS])).logits
        assert torch.equal(again(torch.tensor([IDS])).logits, wanted)
    assert again.generation_config.eos_token_id == [2]
    assert sorted(path.name for path in run_dir.iterdir()) == ["model", "model-chatglm"]


@pytest.mark.parametrize("part", ["names", "rows"])
def test_a_part_of_a_model_is_no_export(part, tmp_path, alone, monkeypatch):
    folder, _ = llama(tmp_path)
    job = a_job(resolve.resolve(str(folder), None)[0], folder, 0, ranks=1)
    model, _ = loading.load_model(job)

    def save_a_part(folder, state_dict, max_shard_size):
        kept = list(state_dict)[1:] if part == "names" else list(state_dict)
        rows = {name: state_dict.pop(name)[: 1 if part == "rows" else None].clone() for name in kept}
        save_file(rows, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(model, "save_pretrained", save_a_part)
    tokenizer = SimpleNamespace(pad_token_id=0, save_pretrained=lambda folder: None)
    with pytest.raises(RuntimeError, match=r"not the whole model: \['model"):
        export(held(model, job), tokenizer, [2], job)
    assert not (tmp_path / "model").exists()


def exported_logits(folder: Path) -> torch.Tensor:
    """Logits of a folder in transformers' own format, as anybody computes them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0]


def plain_losses(model, job: Job, learning_rates: list[float]) -> list[float]:
    """The losses of a run's steps in one process: a row a line, no DeepSpeed."""
    told = job.ds_config["optimizer"]["params"]
    options = {"betas": told["betas"], "eps": told["eps"], "weight_decay": told["weight_decay"]}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    rows = Examples(Path(job.prepared.train_rows))
    plan = BatchPlan(rows, job.training.seed, job.dp_size, job.micro_batch, job.grad_accum)
    losses = []
    for step, rate in enumerate(learning_rates):
        optimizer.zero_grad()
        parts = [plan.step(step, rank) for rank in range(job.world_size)]
        total = 0.0
        for line in (line for part in parts for batch in part.micro_batches for line in batch):
            loss = target_loss(model, training_batch(rows, line, 0), parts[0].target_tokens)
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    return losses


@pytest.mark.slow
@pytest.mark.full
def test_from_an_original_folder_to_another(tmp_path, environ):
    """The whole command: two ranks, ZeRO-3, packed rows; both folders that it writes are the model that was trained."""
    weights = random_weights()
    folder = write_checkpoint(tmp_path / "a user's 模型", weights, "bin", "chatglm3", torch_dtype="float32")
    rows = dataset_folder("advertise") / "train.jsonl"
    command = [
        sys.executable, "-m", "dsrun", "finetune", str(folder), "--train-file", str(rows), "--gpus", "2",
        "--preset", "zero3", "--precision", "fp32", "--export-format", "chatglm", "--max-steps", "5", "--lr", "1e-3",
        "--micro-batch", "3", "--grad-accum", "2", "--grad-clip", "0", "--max-source-length", "48",
        "--max-target-length", "48", "--allow-truncation", "--generate-rows", "0",
        "--output-dir", str(tmp_path / "run"),
    ]  # fmt: skip
    done = subprocess.run(command, env=environ, cwd=tmp_path, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    job = Job.read(run / "job.json")
    assert job.model.prompt_format == "chatglm3"

    events, metrics = ([json.loads(line) for line in (run / name).read_text().splitlines()] for name in LOGS)
    assert [event["packed"] for event in events if event["event"] == "plan"] == [True]
    steps = [line for line in metrics if "loss" in line]
    wanted = plain_losses(loaded(folder, tmp_path / "glm"), job, [line["lr"] for line in steps])
    assert [line["loss"] for line in steps] == pytest.approx(wanted, abs=1e-5)
    assert wanted[-1] < wanted[0] - 0.1

    back = run / "model-chatglm"
    trained = {name: tensor for path in weight_files(back) for name, tensor in open_shard(path).items()}
    assert {path.name for path in back.iterdir()} == {path.name for path in folder.iterdir()}
    assert [name for name, tensor in weights.items() if torch.equal(trained[name], tensor)] == [
        "transformer.rotary_pos_emb.inv_freq"
    ]
    logits = reference_logits(trained, IDS, plain_angle)
    assert torch.allclose(exported_logits(run / "model"), logits, atol=1e-5, rtol=0)
    assert resolve.resolve(str(back), None)[0].prompt_format == "chatglm3"
    for rank in range(2):
        peaks = json.loads((run / f"state/rank-{rank}.json").read_text())["peaks"]
        assert peaks["host_baseline_bytes"] <= peaks["host_loading_peak_bytes"] <= peaks["host_peak_bytes"]


def test_a_job_file_keeps_what_loading_needs(tmp_path):
    folder = write_checkpoint(tmp_path / "original", random_weights(), "bin")
    job = chatglm_job(folder, tmp_path / "glm", 3)
    again = Job.from_json(job.to_json(), "here")
    assert dataclasses.asdict(again)["model"] == dataclasses.asdict(job)["model"]
    assert again.model.location == str(folder)
    assert again.model.architecture["num_key_value_heads"] == CONFIG["multi_query_group_num"]


def test_the_rows_of_all_ranks_are_the_whole(tmp_path, monkeypatch):
    """FSDP's ranks read some rows of each weight; ChatGLM's fused ones are rows of a tensor already."""
    from dsrun.training.engines import fsdp

    folder, ranks = write_checkpoint(tmp_path / "original", random_weights(), "bin"), 3
    job = chatglm_job(folder, tmp_path / "model", 0)
    whole = loading._read(job, torch.float32, torch.device("cpu")).state_dict()
    spec = FsdpSpec(micro_batch=1, grad_accum=1, grad_clip=0.0, shard_ranks=ranks)
    parts = []
    for rank in range(ranks):
        monkeypatch.setattr(fsdp.dist, "get_rank", lambda rank=rank: rank)
        mine = dataclasses.replace(job, ds_config={}, fsdp=spec)
        model = loading._read(mine, torch.float32, torch.device("cpu"), trains=True)
        parts.append({name: one.rows for name, one in model.named_parameters()})
        assert {name: one.shape for name, one in model.named_parameters()} == {
            name: whole[name].shape for name in parts[-1]
        }
    for name in parts[0]:
        assert torch.equal(torch.cat([one[name] for one in parts]), whole[name]), name
