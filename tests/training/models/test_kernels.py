"""A loss that is computed with the output layer is the loss; everything else stays as it was."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from needed import needs, since

torch = pytest.importorskip("torch")
needs("transformers")

sys.path.append(str(Path(__file__).resolve().parents[1] / "data"))
from test_packing import KINDS, SIZE, model_of, rows_of_many_lengths, step_of
from transformers import AutoConfig, AutoModelForCausalLM, utils

from dsrun.cluster.ports import free_port
from dsrun.errors import DsrunError
from dsrun.models.liger import GATED, LAYERS, LOSS
from dsrun.models.transformers_code import CAPPED
from dsrun.options.table import ParallelismOptions
from dsrun.training.data.batches import BatchPlan, training_batch
from dsrun.training.data.packing import Packing, probe
from dsrun.training.loss import target_loss
from dsrun.training.models import kernels
from dsrun.training.models.kernels import attention_of, chunk_budget, fuse_layers, fuse_loss, liger

# In the place of liger-kernel's function: its arguments, its chunks of tokens, gradients made in forward.
STAND_IN = """
import torch

class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, target, bias, ignore_index, accum_dtype):
        total = torch.zeros((), dtype=torch.float32)
        to_hidden = torch.zeros_like(hidden)
        to_weight = torch.zeros_like(weight, dtype=accum_dtype)
        for first in range(0, len(hidden), 7):
            some, wanted = hidden[first : first + 7], target[first : first + 7]
            logits = (some @ weight.t()).float()
            counted = (wanted != ignore_index)[:, None]
            chances = logits.softmax(-1)
            safe = wanted.clamp_min(0)[:, None]
            total -= (logits.log_softmax(-1).gather(1, safe) * counted).sum()
            minus = torch.full_like(safe, -1, dtype=chances.dtype)
            gradient = (chances.scatter_add(1, safe, minus) * counted).to(some.dtype)
            to_hidden[first : first + 7] = gradient @ weight
            to_weight += gradient.t() @ some
        ctx.save_for_backward(to_hidden, to_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx, gradient):
        to_hidden, to_weight = ctx.saved_tensors
        return gradient * to_hidden, gradient * to_weight, None, None, None, None

def liger_fused_linear_cross_entropy(
    input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
    reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None,
):
    assert input.dim() == 2 and target.dim() == 1 and len(input) == len(target)
    assert reduction == "sum" and bias is None and weight.numel() > 0
    return _Fused.apply(input, weight, target, bias, ignore_index, accum_dtype)
"""
made: dict = {}
exec(STAND_IN, made)
KERNEL = made["liger_fused_linear_cross_entropy"]


def never(*_, **__):
    raise AssertionError("the fused kernel is used")


# The loss

DEFAULT = {("glm", 0), ("qwen2", 0), ("mistral", 0), ("llama", 0), ("llama", 1), ("llama", 2)}
"""Every kind of model, every kind of packing; the others wait for --full."""


@pytest.mark.parametrize(
    ("kind", "packing"),
    [
        pytest.param(
            kind, packing, marks=[] if (kind, index) in DEFAULT else pytest.mark.full, id=f"{kind}-{index}"
        )
        for kind in KINDS
        for index, packing in enumerate([None, Packing(10_000), Packing(10_000, selects=True)])
    ],
)
def test_a_fused_step_is_the_plain_one(kind, packing):
    rows, model = rows_of_many_lengths(), model_of(kind)
    plan = BatchPlan(rows, 1, 2, 3, 2, packing)
    loss, gradients = step_of(model, plan, packing)
    assert fuse_loss(model, KERNEL) == ""
    fused_loss, fused_gradients = step_of(model, plan, packing)
    assert fused_loss == pytest.approx(loss, abs=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(fused_gradients[name], gradient, atol=1e-5, rtol=1e-4)


def test_the_kernel_is_what_computes_it():
    rows, model = rows_of_many_lengths(), model_of("llama")
    fuse_loss(model, never)
    with pytest.raises(AssertionError, match="the fused kernel is used"):
        target_loss(model, training_batch(rows, [0], 0), 1)


@pytest.mark.parametrize("tokens", [1, 100, 500, 2048, 2500, 8192, 30000])
@pytest.mark.parametrize("shape", [(32000, 8192), (65024, 4096), (128256, 4096), (151936, 896)])
def test_chunks_of_about_2048_tokens(tokens, shape):
    """By the arithmetic of liger-kernel's fused_linear_cross_entropy_forward; its own chunks at one budget."""

    def chunks_of(budget):
        chunks = -(-shape[0] // (budget * shape[1]))
        size = -(-tokens // chunks)
        return min(1 << (size - 1).bit_length(), tokens)

    budget = chunk_budget(tokens, torch.empty(shape, device="meta"))
    assert min(tokens, 1024) <= chunks_of(budget)
    assert chunks_of(budget) <= 4096 or budget == 1
    assert chunks_of(budget) >= chunks_of(1)


def test_a_kernel_that_takes_a_budget_gets_one():
    rows, model, seen = rows_of_many_lengths(), model_of("llama"), []

    def kernel(hidden, weight, target, *, chunk_mem_const=1, **options):
        seen.append((chunk_mem_const, chunk_budget(len(hidden), weight)))
        return KERNEL(hidden, weight, target, **options)

    fuse_loss(model, kernel)
    target_loss(model, training_batch(rows, [0], 0), 1)
    assert len(seen) == 1
    assert len(set(seen[0])) == 1


def test_without_a_count_it_is_the_mean():
    """As ChatGLM2's own script and everybody else calls it."""
    rows, model = rows_of_many_lengths(), model_of("glm")
    batch = training_batch(rows, [0, 1], 0)
    plain = model(**batch).loss.item()
    fuse_loss(model, KERNEL)
    assert model(**batch).loss.item() == pytest.approx(plain, abs=1e-6)
    assert model(**batch).logits is None


def test_without_labels_nothing_changes():
    ids = torch.tensor([[5, 6, 7, 8]])
    model = model_of("llama")
    logits, answer = model(input_ids=ids).logits, model.generate(ids, max_new_tokens=5, do_sample=False)
    looked = probe(model)
    fuse_loss(model, never)
    assert torch.equal(model(input_ids=ids).logits, logits)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), answer)
    assert probe(model) == looked == (True, True)


def test_inside_an_adapter():
    """peft's wrapper calls the model that it wraps."""
    rows, inner = rows_of_many_lengths(), model_of("llama")
    assert fuse_loss(SimpleNamespace(get_base_model=lambda: inner), never) == ""
    with pytest.raises(AssertionError, match="the fused kernel is used"):
        target_loss(inner, training_batch(rows, [0], 0), 1)


def test_another_output_layer_is_left_alone():
    model = model_of("qwen2")
    was = model.forward
    model.lm_head = torch.nn.Sequential(model.lm_head)
    assert "not a plain one" in fuse_loss(model, never)
    assert model.forward == was


def test_a_rank_without_liger_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(DsrunError, match="--liger: liger-kernel can't be imported"):
        liger()


def test_ligers_own_function_is_taken(monkeypatch):
    inside = ModuleType("liger_kernel.transformers.functional")
    inside.liger_fused_linear_cross_entropy = never
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, inside.__name__, inside)
    assert liger() is never


def patching(seen: list, *switches: str):
    """A function as liger-kernel's: with a switch for each part."""

    def patch(**options):
        seen.append(options)

    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in (*switches, "model")]
    patch.__signature__ = inspect.Signature(parameters)
    return patch


LIGERS = ("rope", "rms_norm", "swiglu", "cross_entropy", "fused_linear_cross_entropy")


def test_ligers_layers_are_put_into_the_model_itself():
    model, seen = model_of("llama"), []
    wrapped = SimpleNamespace(get_base_model=lambda: model)
    done, why = fuse_layers(wrapped, {"llama": patching(seen, *LIGERS)})
    assert (done, why) == (("rope", "rms_norm", "swiglu"), "")
    assert seen == [{"model": model, **dict.fromkeys(LIGERS[:3], True), **dict.fromkeys(LIGERS[3:], False)}]


def test_another_activation_keeps_its_layer():
    """liger-kernel would compute SiLU without a word."""
    model, seen = model_of("llama"), []
    model.config.hidden_act = "gelu"
    assert fuse_layers(model, {"llama": patching(seen, *LIGERS)})[0] == ("rope", "rms_norm")
    assert seen[0]["swiglu"] is False


@pytest.mark.parametrize(
    ("functions", "says"), [({}, "none for llama"), ({"llama": ("rope",)}, "no rms_norm")]
)
def test_an_older_liger_is_said(functions, says):
    seen = []
    functions_of_kind = {kind: patching(seen, *switches) for kind, switches in functions.items()}
    done, why = fuse_layers(model_of("llama"), functions_of_kind)
    assert not done and not seen
    assert says in why


def test_a_type_that_liger_has_nothing_for_is_left_alone():
    assert fuse_layers(model_of("glm"), {}) == ((), "")


@since(transformers="5.5")  # Gemma 4
def test_its_tables_name_what_transformers_has():
    from transformers import CONFIG_MAPPING

    assert {*LAYERS, *LOSS} <= set(CONFIG_MAPPING)
    assert all(set(parts) <= {"rope", "rms_norm", *GATED} for parts in LAYERS.values())


def test_its_tables_are_ligers():
    patch = pytest.importorskip("liger_kernel.transformers.monkey_patch")
    for kind, parts in LAYERS.items():
        assert set(parts) <= set(inspect.signature(patch.MODEL_TYPE_TO_APPLY_LIGER_FN[kind]).parameters)


# Attention


@pytest.mark.parametrize(
    ("wanted", "there", "expected"),
    [
        ("auto", True, "flash_attention_2"), ("auto", False, "sdpa"), ("sdpa", True, "sdpa"),
        ("eager", True, "eager"), ("flash", True, "flash_attention_2"),
    ],
)  # fmt: skip
def test_attention(tmp_path, monkeypatch, wanted, there, expected):
    assert attention_of(job_with(wanted, tmp_path, monkeypatch, there=there)) == expected


def test_flash_that_the_ranks_cannot_have(tmp_path, monkeypatch):
    with pytest.raises(DsrunError, match="--attention flash"):
        attention_of(job_with("flash", tmp_path, monkeypatch, there=False))


@pytest.mark.parametrize("there", [True, False])
def test_auto_is_what_the_model_has(tmp_path, monkeypatch, there):
    assert attention_of(job_with("auto", tmp_path, monkeypatch, there=there, kind="bloom")) == "eager"


SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96,
    "head_dim": 8,
}  # fmt: skip


def test_older_gpus_get_a_key_for_each_query(tmp_path, monkeypatch):
    """torch's memory-efficient kernel refuses grouped heads; before Ampere the one that is left holds all scores."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    heads: list[tuple[int, int]] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def noted(query, key, value, **options):
        heads.append((query.shape[1], key.shape[1]))
        return real(query, key, value, **options)

    for capability, groups, kind in (((7, 0), 2, kernels.REPEATED), ((7, 0), 4, "sdpa"), ((8, 0), 2, "sdpa")):
        config = AutoConfig.for_model("llama", **SMALL, num_key_value_heads=groups)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert kernels.attention_without_packages(config) == kind
    config = AutoConfig.for_model("llama", **SMALL, num_key_value_heads=2)
    ids = torch.arange(3, 23)[None]
    padding = torch.ones_like(ids).index_fill(1, torch.tensor([0, 1]), 0)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    answers = []
    for attention in ("sdpa", kernels.REPEATED):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        heads.clear()
        alone = model(input_ids=ids).logits
        assert attention == "sdpa" or set(heads) == {(4, 4)}
        masked = model(input_ids=ids, attention_mask=padding).logits[:, 2:]
        written = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
        answers.append((alone, masked, written))
    for wanted, found in zip(*answers, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("kind", sorted(CAPPED))
def test_scores_are_capped(tmp_path, monkeypatch, kind):
    assert attention_of(job_with("auto", tmp_path, monkeypatch, there=False, kind=kind)) == "eager"


def job_with(attention: str, folder: Path, monkeypatch, *, there: bool, kind: str = "llama"):
    AutoConfig.for_model(kind).save_pretrained(folder)
    monkeypatch.setattr(utils, "is_flash_attn_2_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    return SimpleNamespace(
        training=SimpleNamespace(attention=attention), prepared=SimpleNamespace(model_dir=str(folder)),
        precision="bf16", parallel=ParallelismOptions(),
    )  # fmt: skip


# Both under DeepSpeed, which divides the weights and the optimizer's states

RANK = """
import json, sys
from types import SimpleNamespace
import deepspeed, torch
from transformers import AutoConfig, AutoModelForCausalLM
from dsrun.options.table import ParallelismOptions
from dsrun.training.loss import target_loss
from dsrun.training.models.kernels import fuse_loss
from dsrun.training.engines.deepspeed import connect
from dsrun.training.engines.optimizers import own_optimizer
import dsrun.training.engines.optimizers as optimizers

size, folder = json.loads(sys.argv[1]), sys.argv[2]
optimizers.grouped.__defaults__ = (20_000,)  # several groups
adam = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
connect()
rank = torch.distributed.get_rank()

def engine_of(stage, own):
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **size), dtype=torch.float32)
    config = {
        "train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    if own:
        assert fuse_loss(model) == ""
        config["zero_allow_untested_optimizer"] = True
    else:
        config["optimizer"] = {"type": "AdamW", "params": {**adam, "torch_adam": True}}
    job = SimpleNamespace(
        training=SimpleNamespace(optimizer="adamw-8bit" if own else "adamw", optimizer_params=adam),
        zero_stage=stage, world_size=2, dp_size=2, parallel=ParallelismOptions(),
    )
    weights = list(model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=weights, optimizer=own_optimizer(job, weights), config=config
    )
    return engine

def losses(engine, steps):
    found = []
    for step in steps:
        for group in engine.optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        draw = torch.Generator().manual_seed(10 * step + rank)
        ids = torch.randint(3, 97, (2, 9 + rank), generator=draw)
        labels = ids.clone()
        labels[:, :3] = -100
        loss = target_loss(engine, {"input_ids": ids, "labels": labels}, 26)
        engine.backward(loss * 2)
        engine.step()
        part = loss.detach().clone()
        torch.distributed.all_reduce(part)
        found.append(float(part))
    return found

found = {}
for stage in (2, 3):
    found[f"{stage} plain"] = losses(engine_of(stage, False), range(5))
    engine = engine_of(stage, True)
    first = losses(engine, range(3))
    engine.save_checkpoint(folder, tag=f"stage-{stage}")
    found[f"{stage} own"] = first + losses(engine, range(3, 5))
    again = engine_of(stage, True)
    losses(again, range(1))
    again.load_checkpoint(folder, tag=f"stage-{stage}")
    found[f"{stage} again"] = first + losses(again, range(3, 5))
if rank == 0:
    with open(f"{folder}/found.json", "w") as file:
        json.dump(found, file)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_divided_over_ranks_both_train_as_deepspeeds_own(tmp_path, environ):
    """Two ranks, ZeRO-2 and 3: the fused loss finds the layer's weight, and the optimizer that is handed over steps,
    is saved and goes on."""
    pytest.importorskip("deepspeed")

    files = {
        "liger_kernel/transformers/functional.py": STAND_IN,
        "bitsandbytes/optim.py": "from torch.optim import AdamW\n\n\nclass AdamW8bit(AdamW):\n    pass\n",
    }
    for name, text in files.items():
        path = tmp_path / "fakes" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    for folder in ("liger_kernel", "liger_kernel/transformers", "bitsandbytes"):
        (tmp_path / "fakes" / folder / "__init__.py").touch()
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    env = {
        **environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": f"{tmp_path / 'fakes'}:{environ['PYTHONPATH']}",
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, str(script), json.dumps(SIZE), str(tmp_path)],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=600)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)[-6000:]
    measured = json.loads((tmp_path / "found.json").read_text())
    plain = measured["2 plain"]
    assert plain[4] < plain[0]
    for name, losses in measured.items():
        assert losses == pytest.approx(plain, abs=1e-5), name
