"""Nothing is lost: the files at a run's end, a model from every checkpoint, exports that meet a full disk."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from needed import needs

needs("deepspeed", "transformers")

from running import Done, finish, lines_of, own_disk_at, words_of
from safetensors.torch import load_file, save_file

from dsrun.job.job import Job
from dsrun.job.layout import whole_checkpoints

pytestmark = pytest.mark.slow

AT_EXPORT = Path(__file__).resolve().parents[1] / "at_export"
STEPS = 20
"""The fewest with a checkpoint of the last one."""
LEFT_BYTES = 200_000
"""Room for states and lines, and not for a model."""


@pytest.fixture(scope="module")
def run(environ, tmp_path_factory) -> Callable[..., Done]:
    """`run(*words, at_export=...)`: a dsrun to its end; its run's folder is the last word but its options."""
    import subprocess
    import sys

    cwd = tmp_path_factory.mktemp("cwd")

    def carried_out(run_dir: Path, *words: object, at_export: str = "", **more: str) -> Done:
        paths = f"{AT_EXPORT}{os.pathsep}{environ['PYTHONPATH']}" if at_export else environ["PYTHONPATH"]
        process = subprocess.Popen(
            [sys.executable, "-m", "dsrun", *map(str, words)], cwd=cwd, text=True, stdin=subprocess.DEVNULL,
            env={**environ, **more, "PYTHONPATH": paths, "AT_EXPORT": at_export},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        return finish(process, run_dir, 900)

    return carried_out


def names(run_dir: Path) -> list[str]:
    return [path.name for path in whole_checkpoints(run_dir)]


def weights_of(folder: Path) -> dict:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def same_weights(one: Path, other: Path) -> bool:
    first, second = weights_of(one), weights_of(other)
    return (
        bool(first)
        and first.keys() == second.keys()
        and all(first[name].equal(second[name]) for name in first)
    )


# What the end of a run leaves


@pytest.fixture(scope="module")
def kept(run, data, tmp_path_factory) -> Done:
    """A run whose checkpoints stay, with three evaluations on the way."""
    run_dir = tmp_path_factory.mktemp("keeping") / "a run"
    options = ("--max-steps", STEPS, "--save-steps", 12, "--eval-steps", 6, "--keep-best", "--json")
    done = run(run_dir, *words_of("llama-tiny", run_dir), *data, *options, "--timeout", 9)
    assert done.code == 0, done.err
    return done


def test_the_last_step_has_a_checkpoint(kept):
    assert names(kept.run_dir) == ["step-12", "step-20"]
    events = [event["event"] for event in lines_of(kept.run_dir / "events.jsonl")]
    last = len(events) - 1 - events[::-1].index("checkpoint")
    assert last < events.index("model")


def test_the_best_is_kept(kept):
    evals = {
        line["step"]: line["eval_loss"] for line in kept.metrics if line.get("eval_loss") and line["step"]
    }
    result = json.loads(kept.out)
    best = min(evals, key=evals.get)
    assert result["best"] == {"step": best, "loss": evals[best], "model": str(kept.run_dir / "best")}
    assert same_weights(kept.run_dir / "best", kept.run_dir / "model") == (best == STEPS)
    assert json.loads((kept.run_dir / "best/config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]


def test_a_model_from_each_checkpoint(kept, run, tmp_path):
    for step, as_the_end in ((20, True), (12, False)):
        folder = tmp_path / f"at {step}"
        done = run(kept.run_dir, "export", kept.run_dir, "--checkpoint", step, "-o", folder)
        assert done.code == 0, done.err
        assert same_weights(folder, kept.run_dir / "model") is as_the_end
        assert weights_of(folder).keys() == weights_of(kept.run_dir / "model").keys()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "at 20" / name).read_text() == (kept.run_dir / "model" / name).read_text()


def test_no_json_holds_nan(kept):
    def refuse(word: str) -> None:
        raise AssertionError(word)

    files = [
        *kept.run_dir.glob("*.json*"),
        *kept.run_dir.glob("state/*.json"),
        *kept.run_dir.glob("*/step-*/complete"),
    ]
    assert len(files) > 6
    for path in files:
        for text in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
            json.loads(text, parse_constant=refuse)


@pytest.mark.full
@pytest.mark.parametrize(
    ("preset", "more"),
    [
        ("zero3", ("--method", "lora")),
        ("ddp", ()),
        ("ddp", ("--precision", "bf16")),
        ("zero1", ("--precision", "bf16")),
        ("zero2-offload", ()),
        ("zero3", ("--precision", "bf16")),
        ("zero3-offload", ()),
        ("zero2", ("--method", "lora")),
        ("zero1", ("--method", "ptuning", "--pre-seq-len", 8)),
    ],
)
def test_every_division_and_method(preset, more, run, data, tmp_path):
    run_dir = tmp_path / "run"
    options = ("--preset", preset, *more, "--max-steps", STEPS, "--save-steps", 12)
    done = run(run_dir, *words_of("llama-tiny", run_dir), *data, *options)
    assert done.code == 0, done.err
    written = run_dir / ("adapter" if "ptuning" in more else "model")
    done = run(run_dir, "export", run_dir, "-o", tmp_path / "again")
    assert done.code == 0, done.err
    if "ptuning" in more:
        assert (written / "pytorch_model.bin").read_bytes() == (
            tmp_path / "again/pytorch_model.bin"
        ).read_bytes()
    else:
        assert same_weights(written, tmp_path / "again")


# Weights that are no numbers


def test_a_weight_that_is_nan(reference, run, data, tmp_path):
    own = Path(Job.read(reference.run_dir / "job.json").prepared.model_dir)
    folder = tmp_path / "damaged"
    shutil.copytree(own, folder)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "down_proj" in name)
    weights[name].view(-1)[7] = math.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    run_dir = tmp_path / "run"
    done = run(run_dir, *words_of(str(folder), run_dir), *data, "--gpus", 1)
    assert (done.code, done.state) == (1, "failed"), done.err
    assert name in done.err and str(folder / "model.safetensors") in done.err
    assert "Traceback" not in done.err
    assert not done.metrics
    assert name in json.loads(done.read("run.json"))["why"]


# A disk that fills while the model is written


@pytest.fixture(scope="module")
def disk(tmp_path_factory) -> Iterator[Path]:
    with own_disk_at(tmp_path_factory.mktemp("disk"), 1 << 30) as folder:
        yield folder or pytest.skip("a disk can't be made here: only root may mount one")


@pytest.fixture(scope="module")
def no_room(disk, run, data) -> tuple[Done, Path]:
    """Folder of a run that had no room for its model, and a copy of it."""
    run_dir, ballast = disk / "run", disk / "ballast"
    options = ("--gpus", 1, "--max-steps", STEPS, "--save-steps", 1000)
    fill = f"fill {ballast} {LEFT_BYTES}"
    done = run(run_dir, *words_of("llama-tiny", run_dir), *data, *options, at_export=fill)
    ballast.unlink()
    shutil.copytree(run_dir, disk / "copy")
    return done, disk / "copy"


def test_no_room_for_the_model(no_room):
    done, copy = no_room
    assert done.code == 1
    assert "the disk is full" in done.err or "the disk was full" in done.err
    assert f"dsrun export {done.run_dir}" in done.err
    assert json.loads((copy / "run.json").read_text())["state"] == "failed"
    assert names(copy) == [f"step-{STEPS}"]
    assert not list(copy.glob("*model*"))


def test_it_is_written_once_there_is_room(no_room, run):
    done, copy = no_room
    text = (copy / "job.json").read_text().replace(str(done.run_dir), str(copy))
    (copy / "job.json").write_text(text)
    exported = run(done.run_dir, "export", done.run_dir)
    assert exported.code == 0, exported.err
    resumed = run(copy, "resume", copy)
    assert (resumed.code, resumed.state) == (0, "finished"), resumed.err
    assert same_weights(done.run_dir / "model", copy / "model")
    assert not (copy / "checkpoints").exists(), "it stood until the model was written"
    assert names(done.run_dir) == [f"step-{STEPS}"]


# A slow one


@pytest.mark.full
def test_an_export_that_takes_longer_than_the_ranks_wait(run, data, tmp_path):
    run_dir = tmp_path / "slow"
    words = (*words_of("llama-tiny", run_dir), *data)
    done = run(run_dir, *words, at_export="sleep 90", DEEPSPEED_TIMEOUT="1")
    assert (done.code, done.state) == (0, "finished"), done.err
    times = {event["event"]: event["time"] for event in lines_of(run_dir / "events.jsonl")}
    assert times["model"] - done.metrics[-1]["time"] > 90
