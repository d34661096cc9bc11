"""LoRA and P-Tuning through the launcher, for real: two ranks, ZeRO-2 and ZeRO-3, resumed, exported.

The legs of a journey: each takes the run of another one up at one of its checkpoints.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("deepspeed", "peft")


from chatglm_checkpoint import random_weights, write_checkpoint
from running import COMMON, cut_off, finish, lines_of, same, starts_of

from dsrun.job.job import Job
from dsrun.jobs.assembly.checks import disk_check
from dsrun.training.data.batches import BatchPlan, Examples
from dsrun.training.learning_rate import learning_rate
from dsrun.training.models.load import load_answering
from dsrun.training.models.weights import open_shard

pytestmark = pytest.mark.slow

STEPS = 6
SHORT = ("--gpus", "2", *COMMON, "--save-steps", "2", "--keep", "9", "--max-steps", str(STEPS))
LR = 5e-3
LORA = ("--method", "lora", "--lora-rank", "4", "--lr", str(LR))
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
def run(place, dsrun_here, data, original):
    """`run(name)`: the folder of a finished run, of STARTS or LEGS; each is done once."""
    done: dict[str, Path] = {}

    def made(name: str) -> Path:
        if name in done:
            return done[name]
        if name not in STARTS:  # it is counted, too
            made(LEGS[name][0])
        run_dir = place / f"run {len(done)} {name[:4]}"
        if name in STARTS:
            model, args = STARTS[name]
            target = str(original) if model == "CHATGLM" else model
            words = ("finetune", target, "--output-dir", run_dir, *SHORT, *data, *args)
        else:
            source, step, more = LEGS[name]
            cut_off(made(source), step, run_dir)
            words = ("resume", run_dir, *more)
        ended = finish(dsrun_here(*words), run_dir)
        assert ended.code == 0, ended.err
        done[name] = run_dir
        return run_dir

    return made


def losses(run_dir: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines_of(run_dir / "metrics.jsonl") if "loss" in line}


def plain_losses(job: Job, model: torch.nn.Module, trained: list[torch.nn.Parameter]) -> dict[int, float]:
    """The run in one process, with torch alone: row by row, every row a sequence of its own."""
    rows = Examples(Path(job.prepared.train_rows))
    plan = BatchPlan(rows, job.training.seed, job.dp_size, job.micro_batch, job.grad_accum)
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
            logits = model(torch.tensor([rows.ids(row).tolist()])).logits[0]
            labels = torch.tensor(rows.labels(row).tolist())
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
    # Adam makes a part of a step of what rounding does to a gradient that is nearly zero.
    close = LR * STEPS / 30
    assert all(torch.allclose(stored[name], weight, atol=close) for name, weight in trained.items())


@pytest.mark.full
def test_a_prefix_trains_as_torch_does(run, original):
    from dsrun.training.models import prefix_tuning

    job = Job.read(run("prefix") / "job.json")
    model = load_answering(original, dtype=torch.float32)
    torch.manual_seed(job.training.seed)
    prefix_tuning.add(model, 6, 0.0)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    wanted = plain_losses(job, model.train(), weights)
    assert abs(wanted[1] - wanted[STEPS]) > 0.005
    same(wanted, losses(run("prefix")), 1e-5)
    answering = load_answering(run("prefix") / "adapter", dtype=torch.float32)
    assert torch.allclose(logits(answering), logits(model.eval()), atol=1e-4)
    stored = torch.load(run("prefix") / "adapter" / "pytorch_model.bin", weights_only=True)
    assert stored["transformer.prefix_encoder.embedding.weight"].shape == (6, 3 * 2 * 2 * 16)


@pytest.mark.full
@pytest.mark.parametrize("name", LEGS)
def test_losses_go_on(run, name):
    same(losses(run(name.partition(",")[0])), losses(run(name)))
    assert starts_of(run(name))[-1] == LEGS[name][1]


@pytest.mark.parametrize("name", ["lora", pytest.param("lora, zero2 -> zero3", marks=pytest.mark.full)])
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


@pytest.mark.parametrize(
    ("name", "step"),
    [("lora", 2), pytest.param("lora, zero2 -> zero3", 4, marks=pytest.mark.full), ("prefix", 2)],
)
def test_checkpoints_hold_what_is_trained(run, name, step):
    """And are as large as the disk was asked for."""
    job = Job.read(run(name) / "job.json")
    need = disk_check.need_of(job, disk_check.setup_of(job), STEPS)
    size = disk_check.size_of(run(name) / "checkpoints" / f"step-{step}")
    overhead = 200_000  # of names and places, which a tiny model has as many of as a large one
    assert need.checkpoint_bytes < size < 1.1 * need.checkpoint_bytes + overhead
