"""Trainings of LLaMA-Factory and TRL beside the same ones through `dsrun import`: the losses, and what explains them.

    python bench/imported_pairs.py --llama-factory VENV --example qwen3_full_sft.yaml --trl VENV [--output PAGE]

VENV: an environment with the trainer (pip install llamafactory==0.9.5, which wants an older transformers; an empty
module torchaudio.py is enough for it. pip install trl peft). --example: LLaMA-Factory's own YAML, from a clone of its
repository; TRL's own command stands in its script's docstring. Nothing of them is checked in. What a CPU can't do or
what would need the network is changed, and listed: model, data, bf16, the DeepSpeed config.

The model is a tiny random Qwen3 with a ChatML template. All rows are in every step, so that their order means nothing.
A plain loop of torch repeats each training on the tokens that the trainer made: where it has the trainer's losses and
dsrun's on dsrun's tokens, the tokens are all that differs. The exit status is 1 where it hasn't.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "bench")]

ROWS, STEPS, LR, SEED = 8, 10, "1.0e-3", 0
ROUNDING = 1e-4
TOKENS = "tokens.json"
OF_LLAMA_FACTORY = """
import json, sys, yaml
from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args
from llamafactory.model import load_tokenizer
model, data, training, *_ = get_train_args(yaml.safe_load(open(sys.argv[1])))
tokens = load_tokenizer(model)
template = get_template_and_fix_tokenizer(tokens["tokenizer"], data)
rows = get_dataset(template, model, data, training, stage="sft", **tokens)["train_dataset"]
json.dump([{"ids": row["input_ids"], "labels": row["labels"]} for row in rows], open(sys.argv[2], "w"))
"""
OF_TRL = """
import json, sys
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
trainer = SFTTrainer(
    AutoModelForCausalLM.from_pretrained("model"),
    SFTConfig(output_dir="none", use_cpu=True, bf16=False, report_to="none"),
    train_dataset=load_dataset(sys.argv[1])["train"], processing_class=AutoTokenizer.from_pretrained("model"),
)
batch = [(row, trainer.data_collator([row])) for row in trainer.train_dataset]
rows = [{"ids": made["input_ids"][0].tolist(), "labels": made["labels"][0].tolist()} for _, made in batch]
json.dump(rows, open(sys.argv[2], "w"))
"""


@dataclass
class Trained:
    """A training by one of the two."""

    losses: list[float]
    rates: list[float]
    """Learning rates of the steps."""
    rows: list[dict[str, list[int]]]
    """Ids and labels of each row."""


@dataclass
class Pair:
    """The same training by both, and what a plain loop makes of each one's tokens."""

    title: str
    changed: str
    theirs: Trained
    ours: Trained
    plain_theirs: list[float]
    plain_ours: list[float]
    differs: str


def make_inputs(folder: Path) -> None:
    """The model, its tokenizer and the rows: of alpaca's form, and as messages."""
    import torch
    from chat_text import CHATML, FAMILIES, tokenizer_of
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = tokenizer_of(FAMILIES["Qwen3"], CHATML)
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    pairs = [
        (f"Say {count} things.", " ".join(f"w{n}" for n in range(count))) for count in range(2, ROWS + 2)
    ]
    alpaca = [{"instruction": question, "input": "", "output": answer} for question, answer in pairs]
    (folder / "rows.json").write_text(json.dumps(alpaca), encoding="utf-8")
    (folder / "dataset_info.json").write_text(
        json.dumps({"mine": {"file_name": "rows.json"}}), encoding="utf-8"
    )
    (folder / "data").mkdir()
    lines = (
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in pairs
    )
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "data" / "train.jsonl").write_text(text, encoding="utf-8")


def ran(argv: list[str], folder: Path, **environ: str) -> str:
    """The output of a command. Ends this program where the command fails."""
    env = {
        **os.environ, "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu", "DSRUN_CACHE": str(folder / "cache"), **environ,
    }  # fmt: skip
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"{shlex.join(argv)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}"
        )
    return done.stdout


def of_trainer(state: Path, tokens: Path) -> Trained:
    """A training of the HF Trainer's, by its log."""
    log = [line for line in json.loads(state.read_text(encoding="utf-8"))["log_history"] if "loss" in line]
    rows = json.loads(tokens.read_text(encoding="utf-8"))
    return Trained([line["loss"] for line in log], [line["learning_rate"] for line in log], rows)


def of_dsrun(folder: Path, source: str) -> Trained:
    """The same file through `dsrun import` and `dsrun finetune`."""
    from dsrun.job.job import Job
    from dsrun.training.data.batches import Examples

    dsrun = [sys.executable, "-m", "dsrun"]
    paths = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    ran([*dsrun, "import", source, "-o", "run.toml", "--force"], folder, PYTHONPATH=paths)
    run = folder / f"{source}-run"
    more = ["--gpus", "1", "--generate-rows", "0", "--output-dir", str(run)]
    ran([*dsrun, "finetune", "run.toml", *more], folder, PYTHONPATH=paths)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "loss" in line]
    examples = Examples(Path(Job.read(run / "job.json").prepared.train_rows))
    rows = []
    for place in range(len(examples)):
        ids, labels = examples.ids(place), examples.labels(place)
        rows.append({"ids": list(map(int, ids)), "labels": list(map(int, labels))})
    return Trained([line["loss"] for line in steps], [line["lr"] for line in steps], rows)


def plain(folder: Path, trained: Trained) -> list[float]:
    """The losses of a loop in torch on these tokens, at these learning rates: AdamW, the gradient clipped at 1."""
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0, weight_decay=0)
    losses = []
    for rate in trained.rates:
        optimizer.param_groups[0]["lr"] = rate
        targets = sum(label != -100 for row in trained.rows for label in row["labels"][1:])
        total = 0.0
        for row in trained.rows:
            logits = model(input_ids=torch.tensor([row["ids"]])).logits[0, :-1].float()
            labels = torch.tensor(row["labels"][1:])
            loss = (
                torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
                / targets
            )
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def difference(folder: Path, theirs: Trained, ours: Trained) -> str:
    """The texts that are trained on in the first row, by each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")

    def of(trained: Trained) -> str:
        row = min(trained.rows, key=lambda row: len(row["ids"]))
        ids = [label for label in row["labels"][1:] if label != -100]
        return f"`{json.dumps(tokenizer.decode(ids), ensure_ascii=False)}`"

    return f"of the shortest row dsrun trains on {of(ours)}, the other on {of(theirs)}"


def replaced(text: str, values: Mapping[str, str | None], line: str) -> str:
    """A text with other values of some arguments, of which None drops its line. line: a pattern of one, with {name}."""
    for name, value in values.items():
        pattern = re.compile(line.format(name=re.escape(name)), re.MULTILINE)
        if not pattern.search(text):
            raise SystemExit(f"the example has no {name} any more")
        text = pattern.sub("" if value is None else lambda match, new=value: match[1] + new, text)
    return text


def llama_factory(folder: Path, venv: Path, example: Path) -> Pair:
    """LLaMA-Factory's YAML by both."""
    changes: dict[str, str | None] = {
        "model_name_or_path": "model", "dataset": "mine\ndataset_dir: .", "deepspeed": None, "output_dir": "theirs",
        "logging_steps": "1", "gradient_accumulation_steps": str(ROWS), "learning_rate": LR,
        "num_train_epochs": f"1\nmax_steps: {STEPS}", "bf16": "false", "preprocessing_num_workers": None,
        "dataloader_num_workers": None,
    }  # fmt: skip
    text = replaced(example.read_text(encoding="utf-8"), changes, r"^({name}: *)[^\n]*")
    (folder / "sft.yaml").write_text(text, encoding="utf-8")
    ran([str(venv / "bin/llamafactory-cli"), "train", "sft.yaml"], folder)
    ran([str(venv / "bin/python"), "-c", OF_LLAMA_FACTORY, "sft.yaml", TOKENS], folder)
    name = f"LLaMA-Factory {installed(venv, 'llamafactory')}, {example.name}"
    return paired(
        folder, name, changes, of_trainer(folder / "theirs/trainer_state.json", folder / TOKENS), "sft.yaml"
    )


def trl(folder: Path, venv: Path) -> Pair:
    """The first command in the docstring of TRL's script, by both."""
    (script,) = venv.glob("lib/python3*/site-packages/trl/scripts/sft.py")
    command = script.read_text(encoding="utf-8").partition("```bash\n")[2].partition("```")[0]
    changes: dict[str, str | None] = {
        "--model_name_or_path": "model", "--dataset_name": "data", "--learning_rate": LR, "--packing": None,
        "--num_train_epochs": f"1 --max_steps {STEPS} --bf16 False --report_to none --logging_steps 1",
        "--gradient_accumulation_steps": str(ROWS // 2), "--eval_strategy": None, "--eval_steps": None,
        "--output_dir": "theirs", "--push_to_hub": None,
    }  # fmt: skip
    text = replaced(command, changes, r"( *{name}(?:  *| *(?=\\|$)))[^\\\n]*")
    text = re.sub(r"(\\\n\s*)+", "\\\n    ", text).rstrip("\\\n ") + "\n"
    (folder / "sft.sh").write_text(text, encoding="utf-8")
    words = shlex.split(text.replace("\\\n", " "))
    ran([str(venv / "bin/python"), str(script), *words[words.index("trl/scripts/sft.py") + 1 :]], folder)
    ran([str(venv / "bin/python"), "-c", OF_TRL, "data", TOKENS], folder)
    state = max((folder / "theirs").rglob("trainer_state.json"))
    name = f"TRL {installed(venv, 'trl')}, the command of trl/scripts/sft.py"
    return paired(folder, name, changes, of_trainer(state, folder / TOKENS), "sft.sh")


def paired(folder: Path, title: str, changes: Mapping[str, str | None], theirs: Trained, source: str) -> Pair:
    """The pair of a training that its own trainer has done, and of the file that it is in."""
    ours = of_dsrun(folder, source)
    changed = ", ".join(f"`{name.lstrip('-')}`" for name in changes)
    differs = difference(folder, theirs, ours)
    return Pair(title, changed, theirs, ours, plain(folder, theirs), plain(folder, ours), differs)


def installed(venv: Path, package: str) -> str:
    """The version of a package in an environment."""
    code = f"from importlib.metadata import version; print(version({package!r}), version('transformers'))"
    found, transformers = ran([str(venv / "bin/python"), "-c", code], Path.cwd()).split()
    return f"{found} with transformers {transformers}"


def apart(some: list[float], others: list[float]) -> float:
    """The largest difference between two runs of losses."""
    return max(abs(a - b) for a, b in zip(some, others, strict=True))


def section(pair: Pair) -> list[str]:
    """What the page says of a pair."""
    rows = zip(pair.theirs.losses, pair.plain_theirs, pair.ours.losses, pair.plain_ours, strict=True)
    rates = apart(pair.theirs.rates, pair.ours.rates)
    return [
        f"## {pair.title}", "", f"Changed for a CPU without a network, for both: {pair.changed}.", "",
        "| step | its own | plain loop on its tokens | dsrun's | plain loop on dsrun's tokens |",
        "| --- | --- | --- | --- | --- |",
        *(f"| {step} | " + " | ".join(f"{loss:.6f}" for loss in row) + " |" for step, row in enumerate(rows, 1)), "",
        f"Largest difference to the plain loop: {apart(pair.theirs.losses, pair.plain_theirs):.1e} its own, "
        f"{apart(pair.ours.losses, pair.plain_ours):.1e} dsrun's; between their learning rates: {rates:.1e}. What "
        f"differs is what is trained on: {pair.differs}.", "",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama-factory", type=Path, metavar="VENV")
    parser.add_argument("--example", type=Path, metavar="YAML")
    parser.add_argument("--trl", type=Path, metavar="VENV")
    parser.add_argument("--output", type=Path, metavar="PAGE")
    given = parser.parse_args()
    pairs = []
    for train, words in ((llama_factory, (given.llama_factory, given.example)), (trl, (given.trl,))):
        if all(words):
            with tempfile.TemporaryDirectory() as name:
                make_inputs(Path(name))
                pairs.append(train(Path(name), *(word.absolute() for word in words)))
    names = ("torch", "deepspeed", "transformers")
    lines = [
        "# Trainings that were imported, beside their own trainers", "",
        f"Made by `python bench/imported_pairs.py` on {date.today()}: "
        f"{', '.join(f'{name} {version(name)}' for name in names)} for dsrun.", "",
        f"Each file is trained by its own trainer and, through `dsrun import`, by `dsrun finetune`: {STEPS} steps on "
        f"the CPU in fp32, a tiny random Qwen3, {ROWS} rows, all of them in every step. The plain loop is torch's "
        "AdamW on the ids and labels that each of the two made.", "",
        *(line for pair in pairs for line in section(pair)),
    ]  # fmt: skip
    text = "\n".join(lines).rstrip() + "\n"
    if given.output:
        given.output.write_text(text, encoding="utf-8")
    else:
        print(text)
    sys.exit(
        any(
            max(apart(pair.theirs.losses, pair.plain_theirs), apart(pair.ours.losses, pair.plain_ours))
            > ROUNDING
            for pair in pairs
        )
    )


if __name__ == "__main__":
    main()
