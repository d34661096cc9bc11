"""A plain loop of transformers' own classes, which training is compared with; and the comparison.

Of a checkpoint with more than text its text part is trained, of others all of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from text_parts import CHAOTIC, EPS, LORA, LR, SEED, STEPS, step_examples, targets

from dsrun.cluster.ports import free_port

FAMILIES = (
    "qwen3_5", "qwen3_5_moe", "gemma3", "gemma4", "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm46v",
    "glm4v_moe", "llava", "internvl", "llama4",
)  # fmt: skip
TEXT = ("model.language_model.", "language_model.", "model.text_model.", "lm_head.")
"""Beginnings of the names of a text part's weights in the families' own classes."""
ROUTERS = ("gate", "router")
"""Parts of the names of layers that choose experts."""
TAKEN = {"falcon_h1": "mamba.out_proj", "granitemoehybrid": "mamba.out_proj", "jamba": "mamba.dt_proj"}
"""Ends of the names of layers whose weight Mamba's kernels take without LoRA's part."""

FUSED = ("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4v_moe", "qwen3_next")
"""Networks in which PEFT takes the names of a shared expert's or dense layer's matrices for the experts'."""


def parts(model) -> tuple[str, ...]:
    """Beginnings of the names of the weights that are trained: of all in a model of text alone."""
    return TEXT if model.config.get_text_config() is not model.config else ("",)


def on_two_ranks(
    cases: list[str], folder: Path, environ: dict[str, str], timeout: float = 3000
) -> dict[str, dict]:
    """What two ranks came to in each case, one after the other; the folder has the checkpoints."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port()),
        str(Path(__file__).with_name("text_parts.py")), str(folder), *cases,
    ]  # fmt: skip
    path = f"{environ['PYTHONPATH']}:{Path(__file__).parents[1]}"
    environ = {**environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=environ, text=True, capture_output=True, check=False, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    return {line["case"]: line for line in lines}


def whole_model(folder: Path):
    """A checkpoint by the class that its config names, as transformers loads it, and the loading's own findings."""
    import transformers

    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    kind = getattr(transformers, name)
    model, info = kind.from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert not any(info[key] for key in ("missing_keys", "mismatched_keys", "unexpected_keys")), info
    return model


def logits_of(model, ids):
    """A model's logits of text alone.

    With transformers 5.24.0 Llama 4's whole class has none (its forward asks the text part's output for image_outputs),
    so that its text part is asked.
    """
    of_text = model.language_model if type(model).__name__ == "Llama4ForConditionalGeneration" else model
    return of_text(input_ids=ids).logits


def plain_loop(folder: Path, method: str):
    """The losses of a plain loop, example by example, and the model that it trained."""
    model = whole_model(folder).train()
    for name, weight in model.named_parameters():
        weight.requires_grad_(name.startswith(parts(model)))
    if method == "lora":
        with_lora(model)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    lr = CHAOTIC.get(folder.name, LR)
    optimizer, losses = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.999), eps=EPS, weight_decay=0.0), []
    for step in range(STEPS):
        examples, loss = step_examples(step), 0.0
        for example in examples:
            ids = torch.tensor([example])
            logits = logits_of(model, ids)[0, :-1]
            entropy = torch.nn.functional.cross_entropy(logits.float(), ids[0, 1:], reduction="sum")
            loss = loss + entropy / targets(examples)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.eval()


def with_lora(model) -> None:
    """LoRA by peft on every linear layer of the text part but the output's and routers."""
    from peft import LoraConfig, inject_adapter_in_model

    taken = TAKEN.get(model.config.model_type, "nothing")
    fused = ("gate_proj", "up_proj", "down_proj") if model.config.model_type in FUSED else ()
    layers = [
        name for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.startswith(parts(model)) and "lm_head" not in name
        and not {*name.split(".")} & {*ROUTERS} and not name.endswith((taken, *fused))
    ]  # fmt: skip
    assert layers
    torch.manual_seed(SEED)
    config = LoraConfig(
        r=LORA["lora_rank"], lora_alpha=int(LORA["lora_alpha"]), target_modules=layers, bias="none"
    )
    inject_adapter_in_model(config, model)


def check_whole(line: dict, folder: Path, trained: Any) -> Any:
    """Hold the whole export against the model that the plain loop trained: towers bit by bit, logits, files. Returns
    the logits."""
    written = whole_model(Path(line["folders"]["model"]))
    before = dict(whole_model(folder).named_parameters())
    text = parts(written)
    beside = {name: weight for name, weight in written.named_parameters() if not name.startswith(text)}
    assert beside or text == ("",), "a checkpoint without towers shows nothing"
    assert all(torch.equal(weight, before[name]) for name, weight in beside.items())
    ids = torch.tensor([step_examples(0)[0]])
    with torch.no_grad():
        wanted, logits = logits_of(trained, ids), logits_of(written.eval(), ids)
    assert torch.allclose(logits, wanted, atol=2e-4)
    assert not torch.allclose(logits, logits_of(whole_model(folder).eval(), ids), atol=2e-4)
    assert text == ("",) or (Path(line["folders"]["model"]) / "preprocessor_config.json").is_file()
    return logits
