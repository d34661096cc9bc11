"""LoRA and P-Tuning through the launcher, for real: two ranks, ZeRO-2 and ZeRO-3, resumed, exported.

The legs of a journey: each takes the run of another one up at one of its checkpoints.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytest.importorskip("peft")

sys.path.insert(0, str(Path(__file__).parent / "training"))

from running import lines_of, same
from test_chatglm import random_weights, write_checkpoint
from test_resume_elsewhere import cut_off

from dsrun.jobs import space
from dsrun.jobs.finetune import dataset_folder
from dsrun.jobs.job import Job
from dsrun.training import adapters
from dsrun.training.batches import Plan, Rows
from dsrun.training.loop import learning_rate
from dsrun.training.weights import open_shard

pytestmark = pytest.mark.slow

STEPS = 6
COMMON = (
    "--micro-batch", "4", "--generate-rows", "0", "--no-score-before", "--max-source-length", "40", "--precision",
    "fp32", "--max-target-length", "16", "--eval-steps", "1000", "--save-steps", "2", "--keep", "9", "--max-steps",
    str(STEPS), "--gpus", "2",
)  # fmt: skip
LORA = ("--method", "lora", "--lora-rank", "4", "--lr", "5e-3")
STARTS = {
    "lora": ("llama-tiny", (*LORA, "--preset", "zero2")),
    "prefix": (
        "CHATGLM",
        ("--method", "ptuning", "--pre-seq-len", "6", "--prefix-dropout", "0", "--preset", "zero3"),
    ),
}
LEGS = {
    # Name: whose run, from which step, with what
    "lora, zero2 -> zero3": ("lora", 2, ("--preset", "zero3")),
    "prefix, again": ("prefix", 4, ()),
}
IDS = [[5, 7, 31, 31, 2, 99, 64, 3, 11, 17]]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def original(place) -> Path:
    """A checkpoint in ChatGLM2's own format."""
    return write_checkpoint(place / "chatglm", random_weights(), "safetensors", torch_dtype="float32")


@pytest.fixture(scope="module")
def run(place, environ, original):
    """`run(name)`: the folder of a finished run, of STARTS or LEGS; each is done once."""
    data = []
    for option, name, count in (("--train-file", "train.jsonl", 64), ("--eval-file", "dev.jsonl", 8)):
        rows = (dataset_folder("advertise") / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (place / name).write_text("".join(rows[:count]), encoding="utf-8")
        data += [option, str(place / name)]
    done: dict[str, Path] = {}

    def made(name: str) -> Path:
        if name in done:
            return done[name]
        run_dir = place / f"run {len(done)} {name[:4]}"
        if name in STARTS:
            model, args = STARTS[name]
            args = (*COMMON, *data, *args)
        else:
            source, step, more = LEGS[name]
            before = made(source)
            model, args = STARTS[name.partition(",")[0]][0], (*more, "--resume")
            if not (before / "model").exists():
                (before / "model").mkdir()
            cut_off(before, step, run_dir)
        target = str(original) if model == "CHATGLM" else model
        command = [sys.executable, "-m", "dsrun", "finetune", target, "--output-dir", str(run_dir), *args]
        process = subprocess.run(
            command, env=environ, cwd=place, text=True, capture_output=True, timeout=300, check=False
        )
        assert process.returncode == 0, process.stderr
        done[name] = run_dir
        return run_dir

    return made


def losses(run_dir: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines_of(run_dir / "metrics.jsonl") if "loss" in line}


def plain_losses(job: Job, model: torch.nn.Module, trained: list[torch.nn.Parameter]) -> dict[int, float]:
    """The run in one process, with torch alone: row by row, every row a sequence of its own."""
    rows = Rows(Path(job.prepared.train_rows))
    plan = Plan(rows, job.training.seed, job.world_size, job.micro_batch, job.grad_accum)
    wanted = job.ds_config["optimizer"]["params"]
    optimizer = torch.optim.AdamW(
        trained, lr=1.0, betas=tuple(wanted.get("betas", (0.9, 0.999))), eps=wanted.get("eps", 1e-8),
        weight_decay=wanted.get("weight_decay", 0.0),
    )  # fmt: skip
    found = {}
    for step in range(STEPS):
        chosen = [
            row
            for rank in range(job.world_size)
            for lines in plan.step(step, rank).micro_batches
            for line in lines
            for row in line
        ]
        total, targets = 0.0, sum(map(rows.target_tokens, chosen))
        optimizer.zero_grad()
        for row in chosen:
            logits = model(torch.tensor([rows.ids(row)])).logits[0]
            labels = torch.tensor(rows.labels(row))
            loss = torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum") / targets
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, job.ds_config["gradient_clipping"])
        optimizer.param_groups[0]["lr"] = learning_rate(job, step, STEPS)
        optimizer.step()
        found[step + 1] = total
    return found


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor(IDS)).logits


def test_lora_trains_as_peft_and_torch_do(run):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    job = Job.read(run("lora") / "job.json")
    base = AutoModelForCausalLM.from_pretrained(job.prepared.model_dir)
    config = json.loads((run("lora") / "adapter" / "adapter_config.json").read_text())
    torch.manual_seed(job.training.seed)
    kinds = config["target_modules"]
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=16, target_modules=kinds, task_type="CAUSAL_LM"))
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    wanted = plain_losses(job, model.train(), weights)
    assert wanted[1] - wanted[STEPS] > 0.05, "it learns"
    same(wanted, losses(run("lora")), 1e-5)
    stored = open_shard(run("lora") / "adapter" / "adapter_model.safetensors")
    trained = {n.replace(".default", ""): w for n, w in model.named_parameters() if w.requires_grad}
    assert stored.keys() == trained.keys()
    assert all(torch.allclose(stored[name], weight, atol=2e-5) for name, weight in trained.items())


def test_a_prefix_trains_as_torch_does(run, original):
    from dsrun.training import ptuning

    job = Job.read(run("prefix") / "job.json")
    model = adapters.load_answering(original, dtype=torch.float32)
    torch.manual_seed(job.training.seed)
    ptuning.add(model, 6, 0.0)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    wanted = plain_losses(job, model.train(), weights)
    assert abs(wanted[1] - wanted[STEPS]) > 0.01
    same(wanted, losses(run("prefix")), 1e-5)
    answering = adapters.load_answering(run("prefix") / "adapter", dtype=torch.float32)
    assert torch.allclose(logits(answering), logits(model.eval()), atol=1e-4)
    stored = torch.load(run("prefix") / "adapter" / "pytorch_model.bin", weights_only=True)
    assert stored["transformer.prefix_encoder.embedding.weight"].shape == (6, 3 * 2 * 2 * 16)


@pytest.mark.parametrize("name", LEGS)
def test_losses_go_on(run, name):
    start = name.partition(",")[0]
    same(losses(run(start)), losses(run(name)), 1e-5)
    starts = [line["start_step"] for line in lines_of(run(name) / "events.jsonl") if line["event"] == "plan"]
    assert starts[-1] == LEGS[name][1]


@pytest.mark.parametrize("name", ["lora", "lora, zero2 -> zero3"])
def test_the_merged_model_is_base_and_adapter(run, name):
    from transformers import AutoModelForCausalLM

    run_dir = run(name)
    merged = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    apart = AutoModelForCausalLM.from_pretrained(run_dir / "adapter")
    assert torch.allclose(logits(merged), logits(apart), atol=1e-5, rtol=0)
    before = AutoModelForCausalLM.from_pretrained(Job.read(run_dir / "job.json").prepared.model_dir)
    assert not torch.allclose(logits(merged), logits(before), atol=1e-3)
    changed = {
        key.split(".")[-2]
        for key, weight in before.state_dict().items()
        if not torch.equal(weight, merged.state_dict()[key])
    }
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(("name", "step"), [("lora", 2), ("lora, zero2 -> zero3", 4), ("prefix", 2)])
def test_checkpoints_hold_what_is_trained(run, name, step):
    """And are as large as the disk was asked for."""
    job = Job.read(run(name) / "job.json")
    need = space.need_of(job, space.setup_of(job), STEPS)
    size = space.size_of(run(name) / "checkpoints" / f"step-{step}")
    overhead = 200_000  # of names and places, which a tiny model has as many of as a large one
    assert need.checkpoint_bytes < size < 1.1 * need.checkpoint_bytes + overhead
